"""Builds the DataSet of --data.name, by a built-in or user-defined function of --data.args.

A name that is a path selects the built-in reader for its files: tokens, documents, text or folder; hf:NAME
and s3://… are documents. A data set's module is imported only when it is selected. Not here: any data.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdp.base.errors import ConfigError
from fsdp.config import DataSection
from fsdp.data.arguments import Where, check_args
from fsdp.data.types import DataSet
from fsdp.tokenize.locate import is_remote
from fsdp.tokenize.shards import MANIFEST
from fsdp.tokenize.sources import ROWS, is_pattern, matching, plain_folder

BUILT_INS = ("digits", "fashion_mnist", "text", "tokens", "documents", "folder", "synthetic")
LOOKED_AT = 1000  # files of a folder, to tell images from text


def build_dataset(section: DataSection, model_facts: Mapping[str, Any] | None = None) -> DataSet:
    """Depends on the section and the files only: each rank calls it and gets the same."""
    if section.sources:
        mixed: DataSet = importlib.import_module("fsdp.data.mixture").build(
            section, lambda one: build_dataset(_with_tokenizer(one, section.tokenizer), model_facts)
        )
        return mixed
    name, where = _selected(section, model_facts or {})
    if section.tokenizer and name != "documents":
        raise ConfigError(
            f"--data.tokenizer {section.tokenizer} has no effect on --data.name {section.name}.",
            "leave it out; --data.name documents --data.dir PATH reads files with it",
        )
    if ":" in name:
        return importlib.import_module("fsdp.data.custom").build(name, where, section.args)
    if name not in BUILT_INS:
        raise _unknown(name)
    build = importlib.import_module(f"fsdp.data.{name}").build
    dataset: DataSet = build(where, **check_args(build, section.args, f"--data.name {section.name}"))
    return dataset


def _with_tokenizer(source: DataSection, shared: str) -> DataSection:
    """The source with the tokenizer of [data], if it has none of its own and its data set takes one."""
    if source.tokenizer or not shared:
        return source
    given = dataclasses.replace(source, tokenizer=shared)
    return given if _selected(given, {})[0] == "documents" else source


def _selected(section: DataSection, model_facts: Mapping[str, Any]) -> tuple[str, Where]:
    """The data set of --data.name, which may be a path, and its arguments."""
    name, where = section.name, _where(section, model_facts)
    if is_remote(name) or (name and name not in BUILT_INS and (Path(name).exists() or matching(name))):
        return _at_path(section, where)
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
    if not path.exists() or (path / MANIFEST).is_file():
        return "documents"
    names = [path.name] if path.is_file() else sorted(entry.name for entry in path.iterdir())
    if any(name.endswith((".bin", ".npy")) for name in names):
        return "tokens"
    rows = sum(name.endswith(ROWS) for name in names)
    if with_tokenizer or 2 * rows > sum(not name.startswith(".") for name in names):
        return "documents"
    return "folder" if path.is_dir() and _mostly_pictures(path) else "text"


def _mostly_pictures(root: Path) -> bool:
    """Whether most of the first files in subfolders are images; one image among many texts does not count."""
    suffixes = importlib.import_module("fsdp.data.folder").SUFFIXES
    below = (name for folder, _, names in os.walk(root) if Path(folder) != root for name in names)
    first = list(itertools.islice(below, LOOKED_AT))
    return 2 * sum(name.lower().endswith(suffixes) for name in first) > len(first)
