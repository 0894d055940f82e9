"""Translate the configuration of another trainer: Accelerate, DeepSpeed, torchtitan, transformers.

    python -m fsdp.config migrate FILE                 write FILE's recipe beside it, as NAME.recipe.toml
    python -m fsdp.config migrate FILE --out RECIPE    the same under a name of yours
    python -m fsdp.config table                        print the settings that are known, and their flags

FILE is YAML, JSON or TOML. An entry without a counterpart becomes a comment with the reason.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from fsdp.base.commands import quoted
from fsdp.base.errors import ConfigError
from fsdp.base.streams import print_line
from fsdp.base.text import printable_line
from fsdp.config.aliases import PAGE
from fsdp.config.command_line import CommandParser, prints_errors
from fsdp.config.fields import FIELDS
from fsdp.config.foreign_files import read_foreign
from fsdp.config.migrate import recipe_text

ACTIONS = ("migrate", "table")


@prints_errors("fsdp.config")
def main(argv: Sequence[str]) -> int:
    parser = CommandParser("fsdp.config", __doc__)
    parser.add_argument("action", metavar="ACTION", help="migrate or table")
    parser.add_argument("file", metavar="FILE", nargs="?", help="the configuration of another trainer")
    parser.add_argument("--out", type=Path, metavar="RECIPE", help="where to write the recipe")
    options = parser.parse(argv)
    if options.action not in ACTIONS:
        raise ConfigError(
            f"{options.action} is not one of {', '.join(ACTIONS)}.", "python -m fsdp.config --help"
        )
    is_table = options.action == "table"
    answer = PAGE.read_text(encoding="utf-8").rstrip() if is_table else migrate(options.file, options.out)
    print_line(answer, sys.stdout)
    return 0


def migrate(file: str | None, out: Path | None) -> str:
    """Writes the recipe; returns what to do with it."""
    if file is None:
        raise ConfigError("migrate: FILE is missing.", "python -m fsdp.config migrate FILE")
    source = Path(file)
    found = read_foreign(source)
    if found.entries and all(
        entry.name in FIELDS or entry.name.rpartition(".")[0] in FIELDS for entry in found.entries
    ):
        raise ConfigError(
            f"{file} is a recipe of train.py already.",
            f"python train.py --config {quoted(file)} --dry-run",
        )
    target = out or source.with_name(f"{source.stem}.recipe.toml")
    if target.exists():
        raise ConfigError(
            f"{target} exists.",
            f"python -m fsdp.config migrate {quoted(file)} --out another.toml",
        )
    try:
        target.write_text(recipe_text(found, target), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{target} cannot be written ({error.strerror}).", "--out RECIPE") from None
    start = f"python train.py --config {quoted(target)} --dry-run"
    return f"{found.listing()}\nwritten: {printable_line(target)}; {start}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
