"""Writes the recipe of another trainer's configuration: what has a flag here, and the rest as comments.

An entry is applied only if the configuration with it passes the checks and what it names exists, so that
`train.py --config RECIPE --dry-run` accepts the recipe; otherwise it becomes a comment with the reason. The
file may be a stranger's, and the recipe is trusted: a comment is one line whatever the file holds, and a name
of code becomes a comment too.
Not here: reading the file (foreign_files.py), the rows (aliases.md).
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdp.base.commands import quoted
from fsdp.base.errors import ConfigError, without_hint
from fsdp.base.text import printable_line
from fsdp.config.aliases import is_flags
from fsdp.config.fields import FIELDS
from fsdp.config.foreign_files import ForeignFile
from fsdp.config.reading import load, pair_flags
from fsdp.config.trust import is_odd_store, may_name_code
from fsdp.config.values import exists, parse_value
from fsdp.config.writing import toml_value

_BUILT_IN = {
    "model.name": ("vit", "transformer", "mlp"),
    "data.name": ("digits", "fashion_mnist", "text", "synthetic"),
    "data.dir": (),
    "data.tokenizer": (),
}
"""Fields that name something of the user's, with the names that need nothing."""
_OF_THE_MODEL = ("mesh.wrap", "lora.targets")
_WHOLE = re.compile(r"[1-9][0-9]{0,17}")
_ACCUMULATION = ("gradient_accumulation_steps", "accumulate_grad_batches")


@dataclass
class _Recipe:
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    comments: list[str] = field(default_factory=list)


def recipe_text(file: ForeignFile, target: Path) -> str:
    """The recipe as TOML, with the origin of each value, for a file named `target`."""
    made = _Recipe()
    waiting = sorted((e for e in file.entries if is_flags(e.here)), key=lambda entry: entry.weight)
    while waiting:  # again, while one entry makes another valid
        refused = [entry for entry in waiting if _apply(made, entry.name, entry.here)]
        if len(refused) == len(waiting):
            break
        waiting = refused
    for entry in file.entries:
        why = _apply(made, entry.name, entry.here) if entry in waiting else ""
        if is_flags(entry.here) and not why and entry.name not in made.origins.values():
            why = f"{entry.here}, which another entry sets"
        if why or not is_flags(entry.here):
            made.comments.append(f"{entry.name} {entry.text}: {why or entry.here}")
    _set_global_batch(made, file)
    _set_data(made)
    start = f"torchrun --nproc_per_node={_ranks_per_node(file, made)} train.py --config {quoted(target)}"
    head = [_comment(f"From {file.path.name} ({file.trainer})."), _comment(start)]
    without = ["", "# Without a value here:", *(_comment(f"  {one}") for one in made.comments)]
    without = without if made.comments else []
    return "\n".join([*head, *_sections(made), *without]) + "\n"


def _comment(text: str) -> str:
    """A line break would end it, and the rest would be settings, which may name code."""
    return f"# {printable_line(text)}"


def _apply(made: _Recipe, name: str, flags: str) -> str:
    """Adds the fields of these flags, or returns why they cannot be added."""
    new: dict[str, Any] = {}
    try:
        for field_name, text in pair_flags(shlex.split(flags)):
            new[field_name] = parse_value(FIELDS[field_name], text)
            if why := _missing(field_name, text):
                return f"--{field_name} {text}, {why}"
        load([], made.values | new)
    except ConfigError as error:
        return without_hint(error)
    made.values |= new
    made.origins |= dict.fromkeys(new, name)
    return ""


def _missing(name: str, text: str) -> str:
    if may_name_code(name, text):
        return "once you know that code"
    if is_odd_store(text):
        return "once you know that address"
    if name in _BUILT_IN and text not in _BUILT_IN[name] and not exists(text.removeprefix("hf:")):
        return "once it is on this machine"
    if name in _OF_THE_MODEL and ":" in text + ":" * (name == "lora.targets"):
        return "once --model.name is the model with these layers"
    if name == "speed.float8" and text != "off":
        return "on GPUs that multiply in float8"
    if name == "run.device" and text == "cuda":
        return "which --run.device auto selects"
    if name == "mesh.reshard_after_forward" and text.isdigit():
        return "on a multiple of that many ranks"
    return ""


def _number(file: ForeignFile, *names: str) -> int:
    """The first of these entries that is a whole number from 1, or 1."""
    tails = {entry.name.rpartition(".")[2]: entry.text for entry in file.entries}
    texts = [tails.get(name, "") for name in names]
    return next((int(text) for text in texts if _WHOLE.fullmatch(text)), 1)


def _ranks(file: ForeignFile, made: _Recipe) -> int:
    """As the file says; two if it does not."""
    meshed = math.prod(max(1, made.values.get(f"mesh.{axis}", 1)) for axis in ("replicate", "shard"))
    named = max(_number(file, "num_processes"), _number(file, "devices") * _number(file, "num_nodes"), meshed)
    return named if named > 1 else 2


def _ranks_per_node(file: ForeignFile, made: _Recipe) -> int:
    return max(1, _ranks(file, made) // _number(file, "num_machines", "num_nodes"))


def _set_global_batch(made: _Recipe, file: ForeignFile) -> None:
    """Samples of a step, from those of a rank, for a file that does not contain them."""
    each = made.values.get("train.micro_batch")
    if not each or "train.global_batch" in made.values:
        return
    accumulation, ranks = _number(file, *_ACCUMULATION), _ranks(file, made)
    made.values["train.global_batch"] = each * accumulation * ranks
    made.origins["train.global_batch"] = f"{each} × {accumulation} accumulated × {ranks} ranks"


def _set_data(made: _Recipe) -> None:
    """A transformer reads tokens: Python's own sources stand in until the user's data is there."""
    if made.values.get("model.name") == "transformer" and "data.name" not in made.values:
        made.values["data.name"] = "text"
        made.origins["data.name"] = "a stand-in: python -m fsdp.tokenize prepares your own"


def _sections(made: _Recipe) -> Iterator[str]:
    grouped: dict[str, list[str]] = {}
    for name in FIELDS:
        if name in made.values:
            section, _, key = name.rpartition(".")
            line = f"{key} = {toml_value(made.values[name])}  {_comment(made.origins[name])}"
            grouped.setdefault(section, []).append(line)
    for section, lines in grouped.items():
        yield from ("", f"[{section}]", *lines)
