"""--help and --help-all: the configuration's fields as text.

    --help             the common fields of every section, one line each, on two screens
    --help SECTION     the same for one section
    --help-all         every field, with its detail, type, default and unit
    --help-all SECTION

Not here: the texts, which are the docstrings of the fields, and which fields are common (sections.py).
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import textwrap
import typing
from collections.abc import Iterator, Sequence
from typing import Literal

from fsdp.base.errors import ConfigError
from fsdp.base.text import nearest
from fsdp.config import sections
from fsdp.config.fields import FIELDS, FieldSpec
from fsdp.config.sections import Config

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


def help_asked(argv: Sequence[str], doc: str) -> str | None:
    """The text for the first --help or --help-all in `argv`, under `doc`; None if there is none."""
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
    return text(section) if section else f"{doc.strip()}\n\n{text()}"


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
            lines += _wrap(field_docs()[spec.name][0], lead, " " * len(lead))
    more = f"--help-all {section}".strip()
    return "\n".join([*lines, "", f"Every flag{' of this section' * bool(section)}, in detail: {more}"])


def all_fields(section: str = "") -> str:
    """Every field, by section, with its type, help, detail, default and unit."""
    lines = [] if section else [*_GENERAL]
    for name, specs in _by_section(section):
        lines += ["", f"{name}: {section_doc(name)}"] if name else [""]
        for spec in specs:
            lines.append(f"  --{spec.name}{_argument(spec)}")
            lines += _wrap(_in_detail(spec), " " * 6, " " * 6)
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


def _wrap(text: str, first: str, then: str) -> Iterator[str]:
    yield from textwrap.wrap(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=then,
        break_on_hyphens=False,
        break_long_words=False,
    )


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
