"""Builds the DataSet of --data.name: a built-in, a path, or code of the user (custom.py).

A name that is a path selects the built-in reader for its files: tokens, documents, text or folder; hf:NAME
and s3://… are documents. A data set's module is imported only when it is selected. Not here: any data.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import itertools
import logging
import os
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fsdp.base.errors import ConfigError
from fsdp.base.text import nearest, quoted
from fsdp.config import Args, DataSection, ModelSection
from fsdp.config.fields import expanded, with_home
from fsdp.data.types import DataSet, Where, source_section
from fsdp.models.factory import PREFIX, find_folder, unknown_argument

log = logging.getLogger(__name__)
BUILT_INS = {
    "digits": "images:digits",
    "fashion_mnist": "images:fashion_mnist",
    "text": "text:build",
    "tokens": "tokens:build",
    "documents": "documents:build",
    "folder": "images:folder",
    "synthetic": "synthetic:build",
}
"""Name → module of fsdp.data, and its function (where, *, …) -> DataSet, whose keywords are --data.args."""
LOOKED_AT = 1000
"""Files below a folder, to tell images, rows and text apart."""


def build_dataset(section: DataSection, model_facts: Mapping[str, Any] | None = None) -> DataSet:
    """Depends on the section and the files only: each rank calls it and gets the same."""
    if section.sources:
        mixed: DataSet = importlib.import_module("fsdp.data.mixture").build(
            section, lambda source: build_dataset(_with_tokenizer(source, section.tokenizer), model_facts)
        )
        return mixed
    if not section.name:
        raise ConfigError(
            "--data.name is not given: only --model.name vit and mlp train without it, on digits.",
            "--data.name text for a language model, digits for images; your own data: docs/data.md",
        )
    section = _at_home(section)
    try:
        name, where = _selected(section, model_facts or {})
        if section.tokenizer and name in BUILT_INS and name != "documents":
            raise ConfigError(
                f"--data.tokenizer {section.tokenizer} has no effect on --data.name {section.name}.",
                "leave it out; --data.name documents --data.dir PATH reads files with it",
            )
        if name in BUILT_INS:
            module, _, function = BUILT_INS[name].partition(":")
            build = getattr(importlib.import_module(f"fsdp.data.{module}"), function)
            built: DataSet = build(where, **check_args(build, section.args, f"--data.name {section.name}"))
            return built
    except OSError as error:
        raise ConfigError(
            f"{error.filename or section.name} cannot be read ({error.strerror or error}).",
            f"ls -ld {quoted(error.filename or section.dir or section.name)}",
        ) from None
    if ":" in name:
        return importlib.import_module("fsdp.data.custom").build(name, where, section.args)
    raise ConfigError(
        f"--data.name {name} is not {', '.join(BUILT_INS)}, a file or folder here, hf:NAME, "
        "s3://… or package.module:factory.",
        f"ls {quoted(Path(name).parent)}"
        if os.sep in name or Path(name).suffix
        else f"--data.name {nearest(name, list(BUILT_INS), '{}', 'package.module:factory')}",
    )


def _at_home(section: DataSection) -> DataSection:
    """With ~ replaced, which a shell does not do in a recipe or after --data.name=."""
    return dataclasses.replace(section, name=with_home(section.name), dir=with_home(section.dir))


# ---------------------------------------------------------------- a path as the name


def _selected(section: DataSection, model_facts: Mapping[str, Any]) -> tuple[str, Where]:
    """The data set of --data.name, which may be a path, and its arguments."""
    name = section.name
    where = Where(section.dir, section.seq_len, dict(model_facts), tokenizer=section.tokenizer)
    if not name or name in BUILT_INS:
        return name, where
    from fsdp.tokenize.rows import is_remote, matching

    if is_remote(name):
        reader = "documents"
    elif Path(name).exists() or matching(name):
        reader = _reader_of(Path(name), bool(section.tokenizer))
    else:
        return name, where
    if section.dir:
        raise ConfigError(
            f"--data.name {name} is a path, and --data.dir {section.dir} is another.",
            "leave one of them out, or --data.name text, tokens, documents or folder beside --data.dir",
        )
    return reader, dataclasses.replace(where, dir=name, flag="--data.name")


def _reader_of(path: Path, with_tokenizer: bool) -> str:
    """By the names of the files alone: those in a folder, and where it has none the first ones below it."""
    from fsdp.data.images import SUFFIXES
    from fsdp.tokenize.rows import ABOUT, MANIFEST, ROWS, SETTINGS, ends_with

    if not path.exists() or (path / MANIFEST).is_file():
        return "documents"
    here, folders = [path.name], list[str]()
    if path.is_dir():
        visible = sorted(entry.name for entry in path.iterdir() if not entry.name.startswith("."))
        folders = [name for name in visible if (path / name).is_dir()]
        here = [name for name in visible if name not in folders]
    walk = (names for folder in folders for _, _, names in os.walk(path / folder))
    below = list(itertools.islice(itertools.chain.from_iterable(walk), LOOKED_AT))
    if any(ends_with(name, (".bin", ".npy")) for name in here):
        return "tokens"
    pictures = [name for name in below or here if ends_with(name, SUFFIXES)]
    are_pictures = path.is_dir() and 2 * len(pictures) > len(below or here)
    data = [name for name in here or below if name not in SETTINGS and not name.upper().startswith(ABOUT)]
    rows = [name for name in data if ends_with(name, ROWS)]
    marks = [name for name in data if name.startswith(("_", ".")) and name not in rows]  # Spark's _SUCCESS
    about_pictures = are_pictures and len(rows) < len(folders)
    if with_tokenizer or (2 * len(rows) > len(data) - len(marks) and not about_pictures):
        return "documents"
    return "folder" if are_pictures else "text"


# ---------------------------------------------------------------- --data.args


def check_args(function: Callable[..., Any], args: Args, owner: str) -> dict[str, Any]:
    """Checks --data.args against the keyword-only parameters of a function and their types."""
    hints = typing.get_type_hints(function)
    parameters = inspect.signature(function).parameters
    known = {name: p.default for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
    checked = {}
    for name, value in args.items():
        if name not in known:
            raise unknown_argument(name, list(known), "--data.args", owner)
        kinds = typing.get_args(hints[name]) if isinstance(hints[name], types.UnionType) else (hints[name],)
        fitting = [kind for kind in kinds if _is(value, kind)]
        if not fitting:
            words = " or ".join(map(str, typing.get_args(hints[name]))) or hints[name].__name__
            default = known[name] if known[name] not in ("", None) else words
            raise ConfigError(f"--data.args.{name} {value} is not {words}.", f"--data.args.{name} {default}")
        checked[name] = float(value) if fitting[0] is float else value
    return checked


def _is(value: Any, kind: Any) -> bool:
    if typing.get_origin(kind) is typing.Literal:
        return value in typing.get_args(kind)
    number = isinstance(value, int) and kind is float
    return (isinstance(value, kind) or number) and isinstance(value, bool) == (kind is bool)


# ---------------------------------------------------------------- the tokenizer of the model's folder


def _with_tokenizer(source: DataSection, shared: str) -> DataSection:
    """The source with the tokenizer of [data], if it has none of its own and its data set takes one."""
    if source.tokenizer or not shared:
        return source
    tokenized = dataclasses.replace(source, tokenizer=shared)
    return tokenized if _selected(_at_home(tokenized), {})[0] == "documents" else source


def takes_tokenizer(section: DataSection) -> bool:
    """Whether it reads rows or .txt files that are not tokenized yet; of a mixture, whether each does."""
    from fsdp.tokenize.rows import MANIFEST

    sources = [source_section(section, source) for source in section.sources]
    if sources:
        return all(not source.tokenizer and takes_tokenizer(source) for source in sources)
    section = _at_home(section)
    if (Path(section.dir or section.name) / MANIFEST).is_file():
        return False
    name, where = _selected(section, {})
    return name == "documents" or (name == "text" != section.name and where.dir.endswith(".txt"))


def with_model_tokenizer(data: DataSection, model: ModelSection) -> DataSection:
    """The section with the tokenizer of the model's folder, where the data take one and none is given."""
    named = model.name if model.name.startswith(PREFIX) else model.weights
    if data.tokenizer or not (named.startswith(PREFIX) or (expanded(named) / "config.json").is_file()):
        return data
    try:
        folder = find_folder(named)
    except ConfigError:  # named when the model is resolved
        return data
    if not takes_tokenizer(data):
        return data
    if not any((folder / file).is_file() for file in ("tokenizer_config.json", "tokenizer.json")):
        log.warning(
            "documents: %s has no tokenizer, so a token is a byte of UTF-8. HINT: --data.tokenizer DIR",
            folder,
        )
        return data
    log.info("documents: the tokenizer of --data.tokenizer %s, the model's", named.removeprefix(PREFIX))
    return dataclasses.replace(data, tokenizer=named.removeprefix(PREFIX))
