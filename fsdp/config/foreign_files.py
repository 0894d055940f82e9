"""Reads the configuration of another trainer, and lists each entry with its counterpart here.

Accelerate's YAML, DeepSpeed's JSON, torchtitan's TOML, and any flat YAML or JSON, such as transformers'
TrainingArguments. Not here: the rows (aliases.md), writing a recipe (migrate.py).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp.base.commands import quoted
from fsdp.base.errors import ConfigError
from fsdp.base.text import columns, printable, printable_line
from fsdp.config.aliases import VALUE, Alias, alias_of
from fsdp.config.fields import FIELDS
from fsdp.config.limits import OddFile, parse_toml, read_limited

FOREIGN_SUFFIXES = (".yaml", ".yml", ".json")
TORCHTITAN = {
    "job", "profiling", "metrics", "optimizer", "lr_scheduler", "training", "parallelism", "compile",
    "activation_checkpoint", "validation", "quantize", "float8", "fault_tolerance", "experimental",
}  # fmt: skip
"""Sections of torchtitan's files that are not sections here."""
_OFF = ("false", "no", "none", "disabled")
_OWN_ENTRIES = "a file with the settings of one trainer alone, in YAML, JSON or TOML"
_UNKNOWN = "no counterpart is known"
MOST_VALUES, MOST_CHARACTERS = 100_000, 16 << 20
"""Of a file, with each alias of YAML in full and each entry under its whole name."""


@dataclass(frozen=True)
class ForeignEntry:
    """One entry of the file, and `here`: our flags, or why there are none.

    Where several entries set one field, that of the highest `weight` counts: 2 for one that turns something
    off, 1 for a typed value, 0 for flags without it.
    """

    name: str
    value: Any
    here: str
    weight: int = 1

    @property
    def text(self) -> str:
        return as_text(self.value)


@dataclass(frozen=True)
class ForeignFile:
    path: Path
    trainer: str
    entries: tuple[ForeignEntry, ...]

    def listing(self) -> str:
        """One line an entry, whatever characters the file holds."""
        rows = [
            (printable_line(f"{entry.name} {entry.text}")[:60], printable_line(entry.here))
            for entry in self.entries
        ]
        return "\n".join(f"  {line}" for line in columns(rows))


def read_foreign(path: Path) -> ForeignFile:
    """Raises ConfigError if the file cannot be read."""
    try:
        tree = _parse(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}).", "the path of the file") from None
    except OddFile as error:
        raise ConfigError(f"{path} cannot be used: {error}.", _OWN_ENTRIES) from None
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{path} holds no names with values.", "a configuration in YAML, JSON or TOML")
    return foreign_file(path, tree)


def foreign_file(path: Path, tree: Mapping[str, Any]) -> ForeignFile:
    trainer = _trainer_of(path, tree)
    titan = trainer == "torchtitan"
    return ForeignFile(path, trainer, tuple(_entry(name, value, titan) for name, value in _leaves(tree)))


def is_torchtitan(tree: Mapping[str, Any]) -> bool:
    return any(isinstance(tree.get(section), Mapping) for section in TORCHTITAN)


class ForeignConfigError(ConfigError):
    """The error of `--config FILE`: each entry of the file with its counterpart, in a line of its own."""

    def printed(self, text: str) -> str:
        return printable(text)


def refuse(file: ForeignFile) -> ConfigError:
    return ForeignConfigError(
        f"--config {printable_line(file.path)} is a file of {file.trainer}, not a recipe. Its entries are "
        f"here:\n{file.listing()}\n",
        f"python -m fsdp.config migrate {quoted(file.path)}",
    )


def as_text(value: Any) -> str:
    """A value as it is typed after a flag."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, list) and not any(isinstance(one, list | Mapping) for one in value):
        return ",".join(map(as_text, value)) if value else "[]"
    return str(value)


def _parse(path: Path) -> Any:
    text = read_limited(path).decode("utf-8-sig", errors="replace")
    try:
        tree = _tree(path, text)
        _check_text(tree)
        # lone surrogates, which JSON and YAML can escape, cannot be written to a recipe
        json.dumps(tree, ensure_ascii=False, default=str, skipkeys=True).encode()
        return tree
    except OddFile:
        raise
    except (ValueError, RecursionError) as error:
        first = str(error).partition("\n")[0]
        raise ConfigError(f"{path} cannot be parsed: {first}.", "a file in YAML, JSON or TOML") from None


def _tree(path: Path, text: str) -> Any:
    if path.suffix == ".toml":
        return parse_toml(text)
    return json.loads(text) if path.suffix == ".json" else _yaml(path, text)


def _yaml(path: Path, text: str) -> Any:
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise ConfigError(f"{path} is YAML, and PyYAML is not installed.", "pip install pyyaml") from None
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        _check_nodes(root)
        return loader.construct_document(root)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


def _check_nodes(root: Any) -> None:
    """Before YAML's aliases and merges are resolved: nine of nine aliases each may stand for gigabytes."""
    waiting, found = [root], 0
    while waiting:
        value, found = waiting.pop().value, found + 1
        if found > MOST_VALUES:
            raise OddFile(f"it holds more than {MOST_VALUES:,} values, with its aliases in full")
        if isinstance(value, list):
            waiting += [node for one in value for node in (one if isinstance(one, tuple) else (one,))]


def _check_text(tree: Any) -> None:
    """A long key with many entries, or a long text with many aliases, makes a recipe far above its file."""
    waiting, left = [(tree, 0)], MOST_CHARACTERS
    while waiting:
        value, before = waiting.pop()
        left -= 1 + before + (len(value) if isinstance(value, str) else 0)
        if left < 0:
            raise OddFile(f"its entries are more than {MOST_CHARACTERS:,} characters, each with its name")
        if isinstance(value, Mapping):
            waiting += [(one, before + len(str(key)) + 1) for key, one in value.items()]
        elif isinstance(value, (list, tuple, set)):
            waiting += [(one, 0) for one in value]


def _trainer_of(path: Path, tree: Mapping[str, Any]) -> str:
    if path.suffix == ".toml":
        return "torchtitan"
    if {"compute_environment", "distributed_type", "fsdp_config", "main_training_function"} & tree.keys():
        return "Accelerate"
    if {"zero_optimization", "train_micro_batch_size_per_gpu"} & tree.keys():
        return "DeepSpeed"
    if {"output_dir", "per_device_train_batch_size", "num_train_epochs"} & tree.keys():
        return "transformers"
    return "Lightning" if isinstance(tree.get("trainer"), Mapping) else "another trainer"


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _entry(name: str, value: Any, titan: bool) -> ForeignEntry:
    alias = (_of_torchtitan(name) if titan else None) or alias_of(name)
    if alias is not None:
        if value in ("", {}):
            return ForeignEntry(name, value, "leave it out: it is empty")
        typed = VALUE in alias.flags and not alias.is_exception(as_text(value))
        weight = 2 if as_text(value).lower() in _OFF else int(typed)
        return ForeignEntry(name, value, alias.hint(as_text(value)), weight)
    field = _field_of(name)
    return ForeignEntry(name, value, f"--{field} {shlex.quote(as_text(value))}" if field else _UNKNOWN)


def _of_torchtitan(name: str) -> Alias | None:
    """For its entries whose names are fields here too, with other values."""
    if name == "model.name":
        values = dict.fromkeys(("llama3", "llama2"), f"--{name} transformer")
        return Alias((name,), f"--{name} {VALUE}", values)
    if name == "checkpoint.export_dtype":
        reduced = alias_of("reduce_dtype")
        assert reduced is not None, "a row of aliases.md"
        values = {key: flags.replace("precision.reduce", name) for key, flags in reduced.values.items()}
        return Alias((name,), f"--{name} {VALUE}", values)
    return None


def _field_of(name: str) -> str:
    """The only field whose name ends like this one; empty if there is none or several."""
    tail = "." + name.rpartition(".")[2]
    found = [
        name
        for name, spec in FIELDS.items()
        if name.endswith(tail) and not name.startswith(("plan.", "ray.")) and not spec.is_tables
    ]
    return found[0] if len(found) == 1 else ""
