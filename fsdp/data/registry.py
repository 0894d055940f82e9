"""Builds the DataSet of --data.name, by a built-in or user-defined function of --data.args.

A name that is a path selects the built-in reader for its files: tokens, documents, text or folder; hf:NAME
and s3://… are documents. A data set's module is imported only when it is selected. Not here: any data.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdp.base.errors import ConfigError
from fsdp.config import DataSection
from fsdp.config.sections import exists, with_home
from fsdp.data.arguments import Where, check_args, source_section
from fsdp.data.types import DataSet
from fsdp.tokenize.file_names import broken_link, unreadable
from fsdp.tokenize.source_names import MANIFEST, is_remote

BUILT_INS = ("digits", "fashion_mnist", "text", "tokens", "documents", "folder", "synthetic")


def build_dataset(section: DataSection, model_facts: Mapping[str, Any] | None = None) -> DataSet:
    """Depends on the section and the files only: each rank calls it and gets the same."""
    if section.sources:
        mixed: DataSet = importlib.import_module("fsdp.data.mixture").build(
            section, lambda one: build_dataset(_with_tokenizer(one, section.tokenizer), model_facts)
        )
        return mixed
    section = _at_home(section)
    if not section.name:
        raise ConfigError(
            "--data.name is not given: only --model.name vit and mlp train without it, on digits.",
            "--data.name text for a language model, digits for images; your own data: docs/data.md",
        )
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
    if not name or name in BUILT_INS:
        return name, where
    from fsdp.data.path_reader import is_path, reader_of

    try:
        if is_remote(name):
            return "documents", _at_path(section, where)
        if is_path(name):
            at_path = _at_path(section, where)
            return reader_of(Path(name), bool(section.tokenizer)), at_path
    except OSError as error:
        raise unreadable(error, name) from None
    return name, where


def _at_path(section: DataSection, where: Where) -> Where:
    if section.dir:
        raise ConfigError(
            f"--data.name {section.name} is a path, and --data.dir {section.dir} is another.",
            "leave one of them out, or --data.name text, tokens, documents or folder beside --data.dir",
        )
    return dataclasses.replace(where, dir=section.name, flag="--data.name")


def _where(section: DataSection, model_facts: Mapping[str, Any]) -> Where:
    return Where(
        section.dir,
        section.seq_len,
        dict(model_facts),
        tokenizer=section.tokenizer,
    )


def _unknown(name: str) -> ConfigError:
    from fsdp.tokenize.sources import is_pattern, plain_folder

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
