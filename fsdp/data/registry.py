"""Builds the DataSet of --data.name, by a built-in or user-defined function of --data.args.

A name that is a path selects the built-in reader for its files: tokens, documents, text or folder; hf:NAME
and s3://… are documents. A data set's module is imported only when it is selected. Not here: any data.
"""

from __future__ import annotations

import dataclasses
import difflib
import errno
import importlib
import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdp.base.errors import ConfigError
from fsdp.config import DataSection
from fsdp.config.values import exists, with_home
from fsdp.data.arguments import Where, check_args, source_section
from fsdp.data.types import DataSet
from fsdp.tokenize.file_names import broken_link, shell_word, shown, unreadable
from fsdp.tokenize.hub_dataset import PREFIX, SAVED
from fsdp.tokenize.locate import is_remote
from fsdp.tokenize.shards import MANIFEST
from fsdp.tokenize.sources import ROWS, SETTINGS, ends_with, is_pattern, matching, plain_folder

BUILT_INS = ("digits", "fashion_mnist", "text", "tokens", "documents", "folder", "synthetic")
LOOKED_AT = 1000  # files of a folder, to tell images, rows and text apart
ABOUT = ("README", "LICENSE")
"""How the names of files about a folder begin, which are none of its data."""


def build_dataset(section: DataSection, model_facts: Mapping[str, Any] | None = None) -> DataSet:
    """Depends on the section and the files only: each rank calls it and gets the same."""
    if section.sources:
        mixed: DataSet = importlib.import_module("fsdp.data.mixture").build(
            section, lambda one: build_dataset(_with_tokenizer(one, section.tokenizer), model_facts)
        )
        return mixed
    section = _at_home(section)
    name, where = _selected(section, model_facts or {})
    if ":" not in name and name not in BUILT_INS:
        raise _unknown(name)
    if section.tokenizer and name != "documents":
        raise ConfigError(
            f"--data.tokenizer {section.tokenizer} has no effect on --data.name {section.name}.",
            "leave it out; --data.name documents --data.dir PATH reads files with it",
        )
    if ":" in name:
        return importlib.import_module("fsdp.data.custom").build(name, where, section.args)
    build = importlib.import_module(f"fsdp.data.{name}").build
    args = check_args(build, section.args, f"--data.name {section.name}")
    try:
        dataset: DataSet = build(where, **args)
    except OSError as error:
        raise unreadable(error, where.dir or name) from None
    return dataset


def _at_home(section: DataSection) -> DataSection:
    """With ~ replaced, which a shell does not do in a recipe or after --data.name=."""
    return dataclasses.replace(section, name=with_home(section.name), dir=with_home(section.dir))


def _with_tokenizer(source: DataSection, shared: str) -> DataSection:
    """The source with the tokenizer of [data], if it has none of its own and its data set takes one."""
    if source.tokenizer or not shared:
        return source
    given = dataclasses.replace(source, tokenizer=shared)
    return given if _selected(_at_home(given), {})[0] == "documents" else source


def takes_tokenizer(section: DataSection) -> bool:
    """Whether it reads rows or .txt files that are not tokenized yet; of a mixture, whether each does."""
    if section.sources:
        return all(
            not one.tokenizer and takes_tokenizer(source_section(section, one)) for one in section.sources
        )
    section = _at_home(section)
    if exists(Path(section.dir or section.name) / MANIFEST):
        return False
    name, where = _selected(section, {})
    path = name != section.name
    return name == "documents" or (path and name == "text" and where.dir.endswith(".txt"))


def _selected(section: DataSection, model_facts: Mapping[str, Any]) -> tuple[str, Where]:
    """The data set of --data.name, which may be a path, and its arguments."""
    name, where = section.name, _where(section, model_facts)
    try:
        if is_remote(name) or (name and name not in BUILT_INS and (Path(name).exists() or matching(name))):
            return _at_path(section, where)
    except OSError as error:
        raise unreadable(error, name) from None
    return name, where


def _where(section: DataSection, model_facts: Mapping[str, Any]) -> Where:
    return Where(
        section.dir,
        section.seq_len,
        dict(model_facts),
        skip_unreadable=section.skip_unreadable,
        tokenizer=section.tokenizer,
    )


def _unknown(name: str) -> ConfigError:
    if is_pattern(name):
        return ConfigError(f"--data.name {name} matches no file.", f"ls {plain_folder(name)}")
    if Path(name).is_symlink():
        raise broken_link(Path(name))
    near = difflib.get_close_matches(name, BUILT_INS, n=1, cutoff=0.5)
    there = f"ls {Path(name).parent}" if os.sep in name or Path(name).suffix else ""
    return ConfigError(
        f"--data.name {name} is not {', '.join(BUILT_INS)}, a file or folder here, hf:NAME, "
        "s3://… or package.module:factory.",
        there or f"--data.name {near[0] if near else 'package.module:factory for your own data'}",
    )


# ---------------------------------------------------------------- a file or a folder by its path


def _at_path(section: DataSection, where: Where) -> tuple[str, Where]:
    """Returns the built-in data set that reads the files at the path."""
    if section.dir:
        raise ConfigError(
            f"--data.name {section.name} is a path, and --data.dir {section.dir} is another.",
            "leave one of them out, or --data.name text, tokens, documents or folder beside --data.dir",
        )
    remote = is_remote(section.name)
    reader = "documents" if remote else _reader_of(Path(section.name), bool(section.tokenizer))
    return reader, dataclasses.replace(where, dir=section.name, flag="--data.name")


def _reader_of(path: Path, with_tokenizer: bool) -> str:
    if path.is_dir() and not os.access(path, os.R_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    if not path.exists() or (path / MANIFEST).is_file():
        return "documents"
    if not (path.is_file() or path.is_dir()):
        rows = f"rows{path.suffix or '.jsonl'}"
        raise ConfigError(
            f"--data.name {shown(path)} is neither a file nor a folder.",
            f"cat {shell_word(path)} > {rows} makes one of a pipe; --data.name {rows}",
        )
    names = [path.name] if path.is_file() else sorted(entry.name for entry in path.iterdir())
    if any(ends_with(name, (".bin", ".npy")) and not name.startswith(".") for name in names):
        return "tokens"
    firsts = names if path.is_file() else _first_names(path)
    holds_rows = _mostly_rows(firsts) and not _are_about_pictures(path, firsts)
    if not holds_rows and any((path / name).is_file() for name in SAVED):
        raise ConfigError(
            f"--data.name {shown(path)} is a folder of save_to_disk.",
            f"--data.name {PREFIX}{shell_word(path)}",
        )
    if with_tokenizer or holds_rows:
        return "documents"
    return "folder" if path.is_dir() and _mostly_pictures(path) else "text"


def _first_names(root: Path) -> list[str]:
    """The names of the files in a folder; where it has none, of the first files below it."""
    levels = ([name for name in names if not name.startswith(".")] for _, _, names in os.walk(root))
    here = next(levels, [])
    return here or list(itertools.islice(itertools.chain.from_iterable(levels), LOOKED_AT))


def _mostly_rows(names: list[str]) -> bool:
    data = [name for name in names if name not in SETTINGS and not name.upper().startswith(ABOUT)]
    marks = sum(name.startswith("_") and not ends_with(name, ROWS) for name in data)  # Spark's _SUCCESS
    return 2 * sum(ends_with(name, ROWS) for name in data) > len(data) - marks


def _are_about_pictures(root: Path, names: list[str]) -> bool:
    """Whether the rows, as labels.json, are fewer than the folders beside them, which hold pictures."""
    if not root.is_dir():
        return False
    with os.scandir(root) as entries:  # they know their kind: no request for each of 10,000 files
        folders = sum(entry.is_dir() and not entry.name.startswith(".") for entry in entries)
    return sum(ends_with(name, ROWS) for name in names) < folders and _mostly_pictures(root)


def _mostly_pictures(root: Path) -> bool:
    """Whether most of the first files in subfolders are images, or in the folder itself if it has none; one
    image among many texts does not count.
    """
    suffixes = importlib.import_module("fsdp.data.folder").SUFFIXES
    levels = os.walk(root)
    _, _, here = next(levels, ("", [], []))
    first = list(itertools.islice((name for _, _, names in levels for name in names), LOOKED_AT)) or here
    return 2 * sum(name.lower().endswith(suffixes) for name in first) > len(first)
