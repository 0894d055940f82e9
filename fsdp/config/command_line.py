"""The argument parser of every tool: `python -m fsdp.plan`, `python -m launch.local` and the others.

    parser = CommandParser("fsdp.report", __doc__)
    parser.add_argument("--out", type=Path, metavar="FILE", help="…")
    options = parser.parse(argv)                         every flag is the tool's own
    options, flags = parser.parse_with_run_flags(argv)   the other flags are train.py's, for config.load

    @prints_errors("fsdp.report")
    def main(argv: Sequence[str]) -> int: …

--help prints the tool's docstring and its flags. A wrong flag raises ConfigError: one line with a HINT, exit
code 2. And the configuration's fields as text:

    --help             the common fields of every section, one line each, on two screens
    --help SECTION     the same for one section
    --help-all         every field, with its detail, type, default and unit
    --help-all SECTION

Not here: the texts, which are the docstrings of the fields, and which fields are common (sections.py); the
flags of a run (read.py).
"""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
import itertools
import math
import sys
import textwrap
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NoReturn, TypeVar

from fsdp.base.errors import ConfigError, ShardrunError
from fsdp.base.text import as_typed, lost_output, nearest, prepare_streams, print_answer, print_line
from fsdp.config import sections
from fsdp.config.sections import FIELDS, Config, FieldSpec

RUN_FLAGS = "Flags of train.py are accepted too: --help-all lists them."


Words = TypeVar("Words", bound=Sequence[str])


def prints_errors(module: str) -> Callable[[Callable[[Words], int]], Callable[[Words], int]]:
    """Decorator of a tool's main: prints an error in one line and returns its exit code.

    A full stdout is one of them; a reader that has ended (`| head`) ends the tool without a word.
    """

    def decorate(main: Callable[[Words], int]) -> Callable[[Words], int]:
        @functools.wraps(main)
        def run(argv: Words) -> int:
            try:
                code = main(argv)
                sys.stdout.flush()
            except ShardrunError as error:
                print_line(f"{module}: {error}")
                return error.exit_code
            except OSError as error:
                return lost_output(error, module)
            return code

        return run

    return decorate


class CommandParser(argparse.ArgumentParser):
    """argparse with one-line errors, flags in full, and the tool's docstring as help."""

    def __init__(self, module: str, doc: str | None, *, epilog: str = "") -> None:
        prepare_streams()
        self.flags: dict[str, argparse.Action] = {}
        self._module, self._section = module, module.rpartition(".")[2]
        super().__init__(
            prog=as_typed(f"python -m {module}"),
            usage=argparse.SUPPRESS,
            description=as_typed((doc or "").strip()),
            epilog=as_typed(epilog),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        action = super().add_argument(*names, **options)
        self.flags.update(dict.fromkeys(action.option_strings, action))
        return action

    def print_help(self, file: Any = None) -> None:
        """argparse ignores an output that cannot be written."""
        self.exit(print_answer(self.format_help(), self._module, end=""))

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """The tool's own flags and positional arguments. An unknown flag is an error."""
        options, unknown = self.parse_known_intermixed_args(list(argv))
        if unknown:
            self._refuse(unknown[0])
        return options

    def parse_with_run_flags(
        self, argv: Sequence[str], sections: Sequence[str] = ()
    ) -> tuple[argparse.Namespace, list[str]]:
        """The tool's own flags, and train.py's as typed: of `sections` only, if any are given."""
        if "--help-all" in argv and not sections:
            text = as_typed(help_asked(argv[argv.index("--help-all") :], self.format_help()) or "")
            self.exit(print_answer(text, self._module))
        own: list[str] = []
        flags: list[str] = []
        words = [word for word in argv if word != "--"]
        while words:
            word = words.pop(0)
            if not word.startswith("--") or not self._is_of_the_run(word, sections):
                own.append(word)
                continue
            flags.append(word)
            if "=" not in word and words and not words[0].startswith("--"):
                flags.append(words.pop(0))
        return self.parse(own), flags

    def _is_of_the_run(self, word: str, sections: Sequence[str]) -> bool:
        name, section = word.partition("=")[0], _section(word)
        if name in self.flags or (section and section in map(_section, self.flags)):
            return False
        if not section and f"{self._section}.{name[2:]}" in FIELDS:
            raise ConfigError(f"{name} is not a flag.", f"did you mean --{self._section}.{name[2:]}?")
        if not section and self._meant(name):
            return False
        return not sections or section in sections

    def error(self, message: str) -> NoReturn:
        """argparse reports `argument --out: expected one argument` and the like."""
        text, hint = message, f"{self.prog} --help"
        if message.startswith("argument "):
            flag, _, problem = message.removeprefix("argument ").partition(": ")
            text = f"{flag} has no value" if problem.startswith("expected ") else f"{flag} {problem}"
            default = getattr(self.flags.get(flag), "default", None)
            hint = f"{flag} {default}" if default not in (None, "", False, []) else hint
        elif message.startswith("the following arguments are required: "):
            text = f"{message.rpartition(': ')[2]} is missing"
        raise ConfigError(f"{text}.", hint)

    def _refuse(self, word: str) -> NoReturn:
        name = word.partition("=")[0]
        other = nearest(name, self.flags, "did you mean {}?", f"{self.prog} --help")
        meant = self._meant(name)
        hint = f"did you mean {meant}?" if meant else other
        raise ConfigError(f"{name} is not a flag.", hint)

    def _meant(self, name: str) -> str:
        """The tool's flag of which this is a misspelling, with or without its section; else empty."""
        names = {f"--{flag.removeprefix('--').rpartition('.')[2]}": flag for flag in self.flags}
        return names.get(nearest(name, names, "{}", "", cutoff=0.8), "")


def _section(flag: str) -> str:
    """`parity` of `--parity.ranks=2`; empty for a flag without a section."""
    section, dot, _ = flag.partition("=")[0].removeprefix("--").partition(".")
    return section if dot else ""


def whole_number(low: int = 0) -> Callable[[str], int]:
    """A type for add_argument: a whole number, `low` or more."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < low:
            raise argparse.ArgumentTypeError(f"{text} is not a whole number from {low}")
        return int(text)

    return parse


def number(low: float, high: float = math.inf) -> Callable[[str], float]:
    """A type for add_argument: a finite number, `low` or more and at most `high`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high or math.isinf(value):
            bounds = f"from {low:g}" + (f" to {high:g}" if high < math.inf else "")
            raise argparse.ArgumentTypeError(f"{text} is not a number {bounds}")
        return value

    return parse


def one_of(*names: str) -> Callable[[str], str]:
    """A type for add_argument: one of these words."""

    def parse(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text} is not one of {', '.join(names)}")
        return text

    return parse


# ---------------------------------------------------------------- --help and --help-all

WIDTH = 100
_FLAG_WIDTH, _DEFAULT_WIDTH = 36, 10
HELP_FLAGS = ("--help", "-h", "--help-all")
SECTIONS = tuple(dict.fromkeys(name.partition(".")[0] for name in FIELDS if "." in name))
_RARE = {*SECTIONS} - {name.partition(".")[0] for name, spec in FIELDS.items() if spec.meta["common"]}
"""Sections without a common field."""


@functools.cache
def field_docs() -> dict[str, tuple[str, str]]:
    """The docstring of every field: its first paragraph, and the rest."""
    names = {kind.__name__: f"{name}." for name, kind in typing.get_type_hints(Config).items()}
    docs = {}
    for owner in ast.parse(inspect.getsource(sections)).body:
        if not isinstance(owner, ast.ClassDef):
            continue
        prefix = names.get(owner.name, "")
        for field, text in itertools.pairwise(owner.body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                doc = " ".join(ast.literal_eval(text.value).replace("\n\n", "\0").split())
                summary, _, detail = doc.partition("\0")
                docs[f"{prefix}{ast.unparse(field.target)}"] = (summary.strip(), detail.strip())
    return docs


def help_asked(
    argv: Sequence[str], doc: str, data_args: Callable[[list[str]], str] = lambda flags: ""
) -> str | None:
    """The text for the first --help or --help-all in `argv`, under `doc`; None if there is none. What
    `data_args` gives for the other flags follows it.
    """
    at = next((index for index, word in enumerate(argv) if word in HELP_FLAGS), None)
    if at is None:
        return None
    section = argv[at + 1] if at + 1 < len(argv) and not argv[at + 1].startswith("-") else ""
    if section and section not in SECTIONS:
        raise ConfigError(
            f"{argv[at]} {section}: {section} is not one of {', '.join(SECTIONS)}.",
            nearest(section, SECTIONS, f"{argv[at]} {{}}", argv[at]),
        )
    text = all_fields if argv[at] == "--help-all" or section in _RARE else common_fields
    more = data_args([*argv[:at], *argv[at + 1 + bool(section) :]]) if section in ("", "data") else ""
    return (text(section) if section else f"{doc.strip()}\n\n{text()}") + more


def common_fields(section: str = "") -> str:
    """One line a common field: flag, default, help."""
    lines = [] if section else [*_GENERAL, ""]
    lines.append(f"{'flag':<{_FLAG_WIDTH}}{'default':<{_DEFAULT_WIDTH}}meaning")
    for name, specs in _by_section(section):
        common = [spec for spec in specs if spec.meta["common"]]
        lines += [f"{name}: {section_doc(name)}"] if name and common else []
        for spec in common:
            flag = f"  --{spec.name}{'.NAME' if spec.is_args else ''}"
            lead = f"{flag:<{_FLAG_WIDTH}}{_default(spec) or '-':<{_DEFAULT_WIDTH}}"
            summary, _ = field_docs()[spec.name]
            lines += _wrap(summary, initial_indent=lead, subsequent_indent=" " * len(lead))
    more = f"--help-all {section}".strip()
    return "\n".join([*lines, "", f"Every flag{' of this section' * bool(section)}, in detail: {more}"])


def all_fields(section: str = "") -> str:
    """Every field, by section, with its type, help, detail, default and unit."""
    lines = [] if section else [*_GENERAL]
    for name, specs in _by_section(section):
        lines += ["", f"{name}: {section_doc(name)}"] if name else [""]
        for spec in specs:
            lines.append(f"  --{spec.name}{_argument(spec)}")
            lines += _wrap(_in_detail(spec), initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines).strip("\n")


def _by_section(section: str) -> Iterator[tuple[str, list[FieldSpec]]]:
    """Sections with their fields, or the one that is named; first "" with the fields of no section."""
    for name, specs in itertools.groupby(FIELDS.values(), _section_of):
        if section in ("", name):
            yield name, list(specs)


_GENERAL = (
    "A flag is --section.field VALUE; in a recipe it is field = VALUE under [section].",
    "  --config FILE.toml    a recipe; flags override it",
    "  --dry-run             print what follows from the flags (mesh, batch, memory) and stop",
    "  --help SECTION        the same for one section: --help checkpoint",
    "  --help-all [SECTION]  every flag, in detail",
)


def section_doc(section: str) -> str:
    """What a section is about: the docstring of its class."""
    return inspect.getdoc(typing.get_type_hints(Config)[section]) or ""


def _section_of(spec: FieldSpec) -> str:
    return spec.name.partition(".")[0] if "." in spec.name else ""


def _in_detail(spec: FieldSpec) -> str:
    unit = f" {spec.meta['unit']}" if spec.meta["unit"] else ""
    default = _default(spec)
    shown = "" if spec.is_args else f" (default: {default}{unit})" if default else " (default: empty)"
    summary, detail = field_docs()[spec.name]
    return f"{summary}{shown}{f'. {detail}' if detail else ''}"


def _default(spec: FieldSpec) -> str:
    if spec.is_args or spec.is_tables:
        return ""
    return str(spec.default).lower() if isinstance(spec.default, bool) else str(spec.default)


_wrap = functools.partial(textwrap.wrap, width=WIDTH, break_on_hyphens=False, break_long_words=False)


def _argument(spec: FieldSpec) -> str:
    if spec.is_texts:
        return " NAME=VALUE"
    return ".NAME VALUE" if spec.is_args else f" {_type_name(spec)}"


def _type_name(spec: FieldSpec) -> str:
    if typing.get_origin(spec.type) is Literal:
        return "|".join(typing.get_args(spec.type))
    if spec.meta["names"]:
        return "|".join((*spec.meta["names"], "MODULE:NAME"))
    if spec.is_tables:
        return "FILE.toml"
    return {int: "INT", float: "FLOAT", bool: "true|false", str: "TEXT"}[spec.type]
