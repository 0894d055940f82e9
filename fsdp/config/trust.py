"""Reads a run directory's config.toml as untrusted data: code that it names needs the user's permission.

Used by the tools that read RUN (report, predict, checkpoint). `model.name` and `data.name` may name code, as
package.module:factory; such a name is accepted only if the command line contains it too, in --trust-code or
in a flag of its field. Code that only training runs (hooks, schedules) is dropped: the default replaces it. A
recipe given with --config is trusted. Not here: the import itself (fsdp/models/registry.py).
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from fsdp.base.errors import ConfigError
from fsdp.base.object_client import OBJECT_STORES
from fsdp.config.read import load, pair_flags, read_recipe
from fsdp.config.sections import Config, exists, expanded, flatten

TRAINING_CODE = (
    "comm.all_reduce_hook",
    "comm.all_gather",
    "comm.reduce_scatter",
    "optim.schedule",
    "optim.name",
    "train.loss",
    "run.sinks",
)
"""Fields that may name code which only training runs."""
STORES = ("file", "local", *OBJECT_STORES)
_CODE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", re.ASCII)
TRUST_HELP = "PACKAGE.MODULE:NAME that RUN/config.toml names and that may be imported; may be repeated"


class CodeRefused(ConfigError):
    """A run directory names code that the command line does not name."""


def load_run_config(
    run: Path, *, flags: Sequence[str] = (), trusted: Collection[str] = (), forgotten: tuple[str, ...] = ()
) -> Config:
    """Loads RUN/config.toml with `flags` over it, without the fields whose names begin with `forgotten`.

    Raises CodeRefused if it names code that is neither in `trusted` nor a value in `flags`.
    """
    # A model that a run directory names is not downloaded. huggingface_hub reads this when it is imported.
    os.environ["HF_HUB_OFFLINE"] = "1"
    given = dict(pair_flags(flags))
    values = _not_downloaded(read_recipe(str(run / "config.toml")))
    values = {name: value for name, value in values.items() if not name.startswith(forgotten)}
    values = _without_training_code(values)
    config = load([], values | given)
    check_code(run, config, {*trusted, *given.values()})
    return config


def _without_training_code(values: dict[str, Any]) -> dict[str, Any]:
    """Drops fields that name code for training, and all of [optim] but the average: a run may keep its best
    checkpoints by it. Nothing that reads a run needs the others, and an earlier commit may have accepted
    values that are refused today.
    """
    code = {name for name in TRAINING_CODE if ":" in str(values.get(name, ""))}
    code |= {name for name in values if name.startswith("optim.") and name != "optim.ema"}
    return {name: value for name, value in values.items() if name not in code}


def _not_downloaded(values: dict[str, Any], prefix: str = "data.") -> dict[str, Any]:
    """Drops the mirror, another folder to hold out, and a folder without the files: FashionMNIST is
    downloaded if it is missing, and neither the address nor the target may come from a run directory.
    """
    tables = values.get("data.sources")
    if isinstance(tables, list):
        tables = [_not_downloaded(table, "") if isinstance(table, dict) else table for table in tables]
        values = values | {"data.sources": tables}
    if values.get(f"{prefix}name") != "fashion_mnist":
        return values
    args, folder = values.get(f"{prefix}args"), expanded(str(values.get(f"{prefix}dir", "")))
    args = {name: value for name, value in args.items() if name != "mirror"} if isinstance(args, dict) else {}
    values = {name: value for name, value in values.items() if name != f"{prefix}validation"}
    return (
        values | {f"{prefix}args": args} | ({} if exists(folder / "FashionMNIST") else {f"{prefix}dir": ""})
    )


def check_store(run: Path, place: str) -> str:
    """Returns the store that RUN/config.toml names if its protocol is allowed: others of fsspec's run code
    from files, or log in at any host.
    """
    scheme, colon, _ = place.partition("://")
    if colon and (scheme not in STORES or "::" in place):
        raise ConfigError(
            f"{run}/config.toml names the store {place!a}: "
            f"a run directory may only name {', '.join(STORES)}.",
            "python -m fsdp.checkpoint URL, with the URL of that store",
        )
    return place


def named_code(config: Config) -> list[str]:
    """Each `package.module:name` of a configuration, for training too."""
    values = flatten(config)
    texts = [config.model.name, *config.data.names, *(str(values[name]) for name in TRAINING_CODE)]
    words = [word.strip() for text in texts for word in text.split(",")]
    return [word for word in words if _CODE.fullmatch(word) and not word.startswith("hf:")]


def check_code(run: Path, config: Config, trusted: Collection[str]) -> None:
    """Raises ConfigError if model.name or data.name is code outside `trusted`, or is trusted code in the run
    directory.
    """
    named = {"model.name": config.model.name, "data.name": config.data.name}
    named |= {f"data.sources.{source.label}": source.name for source in config.data.sources}
    # Row files in a store are data, which fsdp/tokenize/rows.py reads.
    stores = tuple(f"{scheme}://" for scheme in STORES)
    named = {field: name for field, name in named.items() if not name.startswith(stores)}
    # hf:FOLDER names data: a configuration and weights, or rows, read without code of the folder.
    named = {field: name for field, name in named.items() if ":" in name and not name.startswith("hf:")}
    refused = {field: name for field, name in named.items() if name not in trusted}
    if refused:
        shown = ", ".join(
            f"--{f} {name if _CODE.fullmatch(name) else ascii(name)}" for f, name in refused.items()
        )
        raise CodeRefused(
            f"{run}/config.toml names code, {shown}: code that a run directory names is not imported.",
            _hint(list(refused.values())),
        )
    for field, name in named.items():
        if (place := next(_within(run, name.partition(":")[0]), None)) is not None:
            raise ConfigError(
                f"--{field} {name}: its module is {place}, in the run directory.",
                "start in a folder of your own that holds the module",
            )


def _hint(names: Collection[str]) -> str:
    """Repeats only names that have the form of code: the line may be pasted into a shell."""
    if not all(_CODE.fullmatch(name) for name in names):
        return "the name is not package.module:factory: look into the file before you use it"
    allowed = " ".join(f"--trust-code {name}" for name in dict.fromkeys(names))
    return f"add {allowed} to load it from the working directory or an installed package"


def _within(run: Path, module: str) -> Iterator[Path]:
    """Yields the places in the run directory where Python would find the module. Imports nothing."""
    root = run.resolve()
    if Path.cwd().is_relative_to(root):
        yield Path.cwd()
    try:
        spec = importlib.util.find_spec(module.partition(".")[0])
    except (ImportError, ValueError):  # no place of its own; the import reports the error
        return
    places = [spec.origin, *(spec.submodule_search_locations or ())] if spec is not None else []
    yield from (Path(place) for place in places if place and Path(place).resolve().is_relative_to(root))
