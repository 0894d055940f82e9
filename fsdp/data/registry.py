"""Builds the DataSet of --data.name: a built-in, a path, or code of the user, package.module:factory.

A name that is a path selects the built-in reader for its files: tokens, documents, text or folder; hf:NAME
is documents. A data set's module is imported only when it is selected. A factory takes --data.args as keyword
arguments (and seq_len, dir, if it has such parameters) and returns

    a torch map-style Dataset         or
    a pair (train, heldout) of them   or
    a stream, which has no length (stream.py), alone or as train     or
    a DataSet of fsdp.data, used as it is

Items are (inputs, targets), ((first, second), targets), or dicts of the arguments of the model's forward,
which `matched` compares with its parameters. They are read by --data.workers threads concurrently. A
Dataset's attribute `classes` holds the class names. With an attribute `collate` it builds the batches:
collate(items) returns such a pair or dict, with a row for each item (docs/data.md). Not here: any data.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import itertools
import logging
import os
import typing
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, default_collate

from fsdp.base.errors import ConfigError, OneRankError, one_line
from fsdp.base.object_client import is_url
from fsdp.base.text import listed, nearest, quoted
from fsdp.config import Args, DataSection, ModelSection
from fsdp.config.sections import expanded, with_home
from fsdp.data.types import (
    ITEMS_HINT,
    UNSIGNED,
    DataInfo,
    DataSet,
    Samples,
    Where,
    first_sample,
    source_section,
    widened,
)
from fsdp.models.registry import (
    PREFIX,
    blame,
    load_attribute,
    parameters_of,
    unknown_argument,
)

log = logging.getLogger(__name__)
BUILT_INS = {
    "digits": "images:digits",
    "fashion_mnist": "images:fashion_mnist",
    "text": "tokens:text",
    "tokens": "tokens:build",
    "documents": "documents:build",
    "folder": "images:folder",
    "synthetic": "images:synthetic",
}
"""Name → module of fsdp.data, and its function (where, *, …) -> DataSet, whose keywords are --data.args."""
LOOKED_AT = 1000
"""Files below a folder, to tell images, rows and text apart."""


def build_dataset(
    section: DataSection, model_facts: Mapping[str, Any] | None = None, *, evaluated: bool = False
) -> DataSet:
    """Depends on the section and the files only: each rank calls it and gets the same. `evaluated`: where
    --data.validation names files, no others are read.
    """
    if section.sources:
        mixed: DataSet = _mixture().build(
            section, lambda source: build_dataset(_with_tokenizer(source, section.tokenizer), model_facts)
        )
        return mixed
    if not section.name:
        raise ConfigError(
            "--data.name is not given: only --model.name vit and mlp train without it, on digits.",
            "--data.name text for a language model, digits for images; your own data: docs/data.md",
        )
    try:
        name, where = selected(section, model_facts)
        if section.tokenizer and name in BUILT_INS and name != "documents":
            raise ConfigError(
                f"--data.tokenizer {section.tokenizer} has no effect on --data.name {section.name}.",
                "leave it out; --data.name documents --data.dir PATH reads files with it",
            )
        if name in BUILT_INS:
            build = built_in(name)
            args = check_args(build, section.args, f"--data.name {section.name}")
            if section.validation:
                validated: DataSet = _mixture().validated(section, partial(build, **args), where, evaluated)
                return validated
            built: DataSet = build(where, **args)
            return built
    except OSError as error:
        raise ConfigError(
            f"{error.filename or section.name} cannot be read ({error.strerror or error}).",
            f"ls -ld {quoted(error.filename or section.dir or section.name)}",
        ) from None
    if ":" in name:
        made = _of_factory(name, where, section.args)
        return _mixture().with_share(section, made) if section.validation else made
    is_path = os.sep in name or Path(name).suffix
    hint = f"--data.name {nearest(name, list(BUILT_INS), '{}', 'package.module:factory')}"
    raise ConfigError(
        f"--data.name {name} is not {', '.join(BUILT_INS)}, a file or folder here, hf:NAME "
        "or package.module:factory.",
        f"ls {quoted(Path(name).parent)}" if is_path else hint,
    )


def _mixture() -> Any:
    return importlib.import_module("fsdp.data.mixture")


def built_in(name: str) -> Callable[..., Any]:
    module, _, function = BUILT_INS[name].partition(":")
    return getattr(importlib.import_module(f"fsdp.data.{module}"), function)  # type: ignore[no-any-return]


# ---------------------------------------------------------------- a path as the name


def selected(section: DataSection, model_facts: Mapping[str, Any] | None = None) -> tuple[str, Where]:
    """The data set of --data.name, which may be a path, and its arguments."""
    # A shell replaces ~ neither in a recipe nor after --data.name=.
    name, folder = with_home(section.name), with_home(section.dir)
    where = Where(folder, section.seq_len, dict(model_facts or {}), tokenizer=section.tokenizer)
    if not name or name in BUILT_INS:
        return name, where
    from fsdp.tokenize.rows import matching

    if is_url(name):
        copy = "aws s3 cp --recursive s3://bucket/prefix FOLDER, and --data.name FOLDER"
        raise ConfigError("--data.name is a URL, and data are read from a disk.", copy)
    if name.startswith(PREFIX):
        reader = "documents"
    elif Path(name).exists() or matching(name):
        reader = _reader_of(Path(name), bool(section.tokenizer))
    else:
        return name, where
    if folder:
        raise ConfigError(
            f"--data.name {name} is a path, and --data.dir {folder} is another.",
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
        visible = sorted(entry.name for entry in path.iterdir() if not entry.name.startswith((".", "_")))
        folders = [name for name in visible if (path / name).is_dir()]
        here = [name for name in visible if name not in folders]
    walk = (names for folder in folders for _, _, names in os.walk(path / folder))
    below = list(itertools.islice(itertools.chain.from_iterable(walk), LOOKED_AT))

    def count(names: list[str], suffixes: tuple[str, ...]) -> int:
        return sum(ends_with(name, suffixes) for name in names)

    if count(here, (".bin", ".npy")):
        return "tokens"
    files = here + below
    are_pictures = path.is_dir() and 2 * count(files, SUFFIXES) > len(files)
    data = [name for name in here or below if name not in SETTINGS and not name.upper().startswith(ABOUT)]
    rows = count(data, ROWS)
    if with_tokenizer or (2 * rows > len(data) and not (are_pictures and rows < len(folders))):
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
        kind = list if known[name] is None else type(known[name])
        words = typing.get_args(hints[name]) if kind is str else ()
        number = kind is float and isinstance(value, int)
        fits = value in words if words else isinstance(value, kind) or number
        if not fits or isinstance(value, bool):
            reason = f"--data.args.{name} {value} is not {' or '.join(words) or kind.__name__}."
            default = "LIST" if known[name] is None else quoted(known[name])
            raise ConfigError(reason, f"--data.args.{name} {default}")
        checked[name] = float(value) if kind is float else value
    return checked


# ---------------------------------------------------------------- the tokenizer of the model's folder


def _with_tokenizer(source: DataSection, shared: str) -> DataSection:
    """The source with the tokenizer of [data], if it has none of its own and its data set takes one."""
    tokenized = dataclasses.replace(source, tokenizer=source.tokenizer or shared)
    return tokenized if shared and selected(tokenized)[0] == "documents" else source


def takes_tokenizer(section: DataSection) -> bool:
    """Whether it reads rows or .txt files that are not tokenized yet; of a mixture, whether each does."""
    from fsdp.tokenize.rows import MANIFEST

    if section.sources:
        sources = [source_section(section, source) for source in section.sources]
        return all(not source.tokenizer and takes_tokenizer(source) for source in sources)
    name, where = selected(section)
    if name == "documents":
        return not (Path(where.dir) / MANIFEST).is_file()
    return name == "text" != section.name and where.dir.endswith(".txt")


def with_model_tokenizer(data: DataSection, model: ModelSection) -> DataSection:
    """The section with the tokenizer of the model's folder, where the data take one and none is given."""
    named = model.name if model.name.startswith(PREFIX) else model.weights
    if data.tokenizer or not (named.startswith(PREFIX) or (expanded(named) / "config.json").is_file()):
        return data
    from fsdp.models.hf import find_folder

    try:
        folder = find_folder(named)
    except ConfigError:  # named when the model is resolved
        return data
    if not takes_tokenizer(data):
        return data
    if not (folder / "tokenizer_config.json").is_file():
        hint = "HINT: --data.tokenizer DIR"
        log.warning("documents: %s has no tokenizer, so a token is a byte of UTF-8. %s", folder, hint)
        return data
    log.info("documents: the tokenizer of --data.tokenizer %s, the model's", named.removeprefix(PREFIX))
    return dataclasses.replace(data, tokenizer=named.removeprefix(PREFIX))


# ---------------------------------------------------------------- code of the user


def _of_factory(name: str, where: Where, args: Args) -> DataSet:
    factory = load_attribute(name, "--data.name")
    arguments, takes = dict(args), parameters_of(factory)
    if takes is not None:
        takes.check(args, "--data.args", name)
        if where.dir and not takes.accepts("dir"):
            raise ConfigError(f"--data.dir {where.dir}: {name} has no parameter dir.", "leave it out")
        arguments = {**({"seq_len": where.seq_len} if "seq_len" in takes.named else {}), **arguments}
        arguments = {**({"dir": where.dir} if where.dir else {}), **arguments}
        if missing := takes.missing(arguments):
            flag = "--data.dir FOLDER" if missing[0] == "dir" else f"--data.args.{missing[0]} VALUE"
            raise ConfigError(f"{name} needs {', '.join(missing)}.", flag)

    def make() -> Any:
        try:
            return factory(**arguments)
        except ConfigError:
            raise
        except Exception as error:
            hint = "the error is on that line of the factory"
            raise ConfigError(f"--data.name {name} failed: {blame(error)}.", hint) from error

    return as_dataset(name, make)


def as_dataset(name: str, make: Callable[[], Any]) -> DataSet:
    from fsdp.data.stream import StreamItems, StreamSamples, is_stream

    made = make()
    if isinstance(made, DataSet):
        return made
    pair: Any = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    streams = is_stream(pair[0])
    for part in pair[streams : 2 if pair[1] is not None else 1]:
        by_index = hasattr(part, "__len__") and hasattr(part, "__getitem__")
        if not by_index or isinstance(part, (Mapping, tuple)) or not len(part):
            problem = f"a {type(part).__name__}, not a Dataset with items by index"
            if by_index and not len(part):
                problem = f"an empty {type(part).__name__}"
            raise ConfigError(
                f"--data.name {name} returned {problem}.",
                "return a Dataset with __len__ and __getitem__, the pair (train, heldout), or a stream",
            )
    heldout = ItemSamples(pair[1]) if pair[1] is not None else None
    if not streams:
        train = ItemSamples(pair[0])
        return DataSet(train=train, heldout=heldout, info=_info(name, train, pair[0]))

    def again() -> Any:
        stream = make()
        return stream[0] if isinstance(stream, tuple) else stream

    items = StreamItems(name, pair[0], again)
    # `train` has no length, which only code that has seen that there is no stream reads
    samples: Any = StreamSamples(items, ItemSamples(items).batch)
    return DataSet(train=samples, heldout=heldout, info=_info(name, samples, pair[0]), stream=items)


def attribute_of(items: Any, name: str) -> Any:
    """The Dataset's attribute, for a torch Subset that of its Dataset; None without one."""
    while not hasattr(items, name) and isinstance(items, Subset):
        items = items.dataset
    return getattr(items, name, None)


class ItemSamples:
    """A map-style Dataset's items, collated by its own `collate`, else by torch's default_collate."""

    def __init__(self, items: Any) -> None:
        self.items = items
        self._collate: Callable[[list[Any]], Any] | None = attribute_of(items, "collate")

    def __len__(self) -> int:
        return len(self.items)

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        items = [self.items[int(index)] for index in indices]
        if self._collate is not None:
            return widened(_as_dict(self._collate(items), "collate's batch"))
        rows = [_as_dict(item) for item in items]
        try:
            collated: Mapping[str, Tensor] = default_collate(rows)
        except (RuntimeError, KeyError) as error:
            which = f"samples {listed(indices.tolist())}"
            raise OneRankError(
                f"{which}: those of one batch must have one shape: {one_line(error)}.",
                "give your Dataset a method collate(items) that pads them to one length: docs/data.md",
            ) from None
        return widened(collated)


def _as_dict(item: Any, name: str = "an item") -> dict[str, Any]:
    if isinstance(item, (tuple, list)) and len(item) == 2:
        inputs, targets = item
        several = isinstance(inputs, tuple) and any(isinstance(part, (Tensor, np.ndarray)) for part in inputs)
        parts = inputs if several else (inputs,)
        # forward's parameters name the second and the following: see `matched`
        places = ["inputs", *(f"inputs.{place}" for place in range(1, len(parts)))]
        named = inputs if isinstance(inputs, Mapping) else dict(zip(places, parts, strict=True))
        item = {**named, "targets": targets}
    if not isinstance(item, Mapping) or not item:
        raise TypeError(f"{name} is a {type(item).__name__}, neither (inputs, targets) nor a dict of fields")
    first = "inputs" if "inputs" in item else "input_ids"
    return {"inputs" if key == first else key: _value(value) for key, value in item.items()}


def _value(value: Any) -> Any:
    """Converts arrays, lists, which default_collate would transpose, floats, which it would make doubles, and
    unsigned numbers of 16 bits and more, for which torch has few operations.
    """
    if isinstance(value, float):
        return torch.tensor(float(value))  # also of numpy's class
    if isinstance(value, (list, tuple, np.ndarray)):
        value = torch.as_tensor(value)
    return value.long() if isinstance(value, Tensor) and value.dtype in UNSIGNED else value


def _info(name: str, samples: Samples, items: Any) -> DataInfo:
    """Derives the description of all samples from one."""
    first = first_sample(f"--data.name {name}", samples, ITEMS_HINT)
    if bad := [key for key, value in first.items() if not (isinstance(value, Tensor) and value.dim())]:
        raise ConfigError(
            f"--data.name {name}: {bad[0]} of a batch is not a tensor with a row for each item.",
            f"leave {bad[0]} out, or give numbers, arrays or tensors",
        )
    names = attribute_of(items, "classes")
    if isinstance(names, str) or not (names is None or isinstance(names, Iterable)):
        raise ConfigError(f"--data.name {name}: classes is {names!r}.", """classes = ["cat", "dog"]""")
    inputs, classes = first.get("inputs", next(iter(first.values()))), tuple(map(str, names or ()))
    facts: dict[str, Any] = {"num_classes": len(classes)} if classes else {}
    kind: Literal["images", "text", "other"] = "other"
    if inputs.dim() == 4 and inputs.is_floating_point() and inputs.shape[2] == inputs.shape[3]:
        kind, facts = "images", facts | {"channels": inputs.shape[1], "image_size": inputs.shape[2]}
    elif inputs.dim() == 2 and not inputs.is_floating_point():
        # One class per text is classification, not language modelling.
        kind = "other" if first.get("targets", inputs).dim() == 1 else "text"
        facts = facts | {"seq_len": inputs.shape[1]}
    tokens = inputs.shape[1] if kind == "text" else 0
    form: dict[str, Any] = {"tokens_per_sample": tokens, "default_epochs": 1, "fields": tuple(first)}
    return DataInfo(kind=kind, facts=facts, class_names=classes, **form)
