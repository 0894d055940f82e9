"""User-defined data: --data.name package.module:factory.

The factory takes --data.args as keyword arguments (and seq_len, dir, if it has such parameters) and returns

    a torch map-style Dataset         or
    a pair (train, heldout) of them   or
    a stream, which has no length (stream.py), alone or as train     or
    a DataSet of fsdp.data, used as it is

Items are (inputs, targets), or dicts with "inputs" (or "input_ids") and the other arguments of the model's
forward. They are read by --data.workers threads concurrently. A Dataset's attribute `classes` holds the class
names. With an attribute `collate` it builds the batches: collate(items) returns such a pair or dict, with a
row for each item (docs/data.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, default_collate

from fsdp.base.errors import ConfigError, OneRankError, one_line
from fsdp.config import Args
from fsdp.data.stream import StreamItems, StreamSamples, is_stream
from fsdp.data.types import DataInfo, DataSet, Samples, Where, first_sample
from fsdp.models.factory import blame, load_attribute, parameters_of


def build(name: str, where: Where, args: Args) -> DataSet:
    factory = load_attribute(name, "--data.name")
    arguments = _arguments(name, factory, where, args)

    def make() -> Any:
        try:
            return factory(**arguments)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"--data.name {name} failed: {blame(error)}.", "the error is on that line of the factory"
            ) from error

    return as_dataset(name, make)


def _arguments(name: str, factory: Callable[..., Any], where: Where, args: Args) -> dict[str, Any]:
    takes = parameters_of(factory)
    if takes is None:
        return dict(args)
    takes.check(args, "--data.args", name)
    arguments = dict(args)
    if "seq_len" in takes.named:
        arguments.setdefault("seq_len", where.seq_len)
    if where.dir and not takes.accepts("dir"):
        raise ConfigError(f"--data.dir {where.dir}: {name} has no parameter dir.", "leave it out")
    if where.dir:
        arguments.setdefault("dir", where.dir)
    if missing := takes.missing(arguments):
        flag = "--data.dir FOLDER" if missing[0] == "dir" else f"--data.args.{missing[0]} VALUE"
        raise ConfigError(f"{name} needs {', '.join(missing)}.", flag)
    return arguments


def as_dataset(name: str, make: Callable[[], Any]) -> DataSet:
    made = make()
    if isinstance(made, DataSet):
        return made
    pair = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    streams = is_stream(pair[0])
    for part in pair[streams : 2 if pair[1] is not None else 1]:
        _check_map_style(name, part)
    heldout = ItemSamples(pair[1]) if pair[1] is not None else None
    if not streams:
        train = ItemSamples(pair[0])
        return DataSet(train=train, heldout=heldout, info=_info(name, train, pair[0]))

    def again() -> Any:
        stream = make()
        return stream[0] if isinstance(stream, tuple) else stream

    items = StreamItems(name, pair[0], again)
    samples: Any = StreamSamples(items, ItemSamples(items).batch)
    # `train` has no length, which only code that has seen that there is no stream reads
    return DataSet(train=samples, heldout=heldout, info=_info(name, samples, pair[0]), stream=items)


def _check_map_style(name: str, part: Any) -> None:
    by_index = (
        hasattr(part, "__len__") and hasattr(part, "__getitem__") and not isinstance(part, (Mapping, tuple))
    )
    if not by_index or not len(part):
        raise ConfigError(
            f"--data.name {name} returned a {type(part).__name__}, not a Dataset with items by index.",
            "return a Dataset with __len__ and __getitem__, the pair (train, heldout), or a stream",
        )


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
            return _widened(_as_dict(self._collate(items), "collate's batch"))
        rows = [_as_dict(item) for item in items]
        try:
            collated: Mapping[str, Tensor] = default_collate(rows)
        except (RuntimeError, KeyError) as error:
            raise OneRankError(
                f"samples {indices.tolist()}: those of one batch must have one shape: {one_line(error)}.",
                "give your Dataset a method collate(items) that pads them to one length: docs/data.md",
            ) from None
        return _widened(collated)


def _widened(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Targets and labels of whole numbers as int64, which cross entropy reads; arrays often have less."""
    narrow = (torch.uint8, torch.int8, torch.int16, torch.int32, *_UNSIGNED)
    long = [name for name in ("targets", "labels") if getattr(batch.get(name), "dtype", None) in narrow]
    return {name: value.long() if name in long else value for name, value in batch.items()}


def _as_dict(item: Any, name: str = "an item") -> dict[str, Any]:
    if isinstance(item, (tuple, list)) and len(item) == 2:
        return {"inputs": _value(item[0]), "targets": _value(item[1])}
    if isinstance(item, Mapping) and ("inputs" in item or "input_ids" in item):
        first = "inputs" if "inputs" in item else "input_ids"
        return {"inputs": _value(item[first])} | {k: _value(v) for k, v in item.items() if k != first}
    keys = f" with {', '.join(map(str, item))}" if isinstance(item, Mapping) else ""
    kind = f"{type(item).__name__}{keys}"
    raise TypeError(f"{name} is a {kind}, neither (inputs, targets) nor a dict with inputs")


def _value(value: Any) -> Any:
    """Converts arrays, lists, which default_collate would transpose, floats, which it would make doubles, and
    unsigned numbers of 16 bits and more, for which torch has few operations.
    """
    if isinstance(value, float):
        return torch.tensor(float(value))  # also of numpy's class
    if isinstance(value, (list, tuple, np.ndarray)):
        value = torch.as_tensor(value)
    return value.long() if isinstance(value, Tensor) and value.dtype in _UNSIGNED else value


_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)


def _info(name: str, samples: Samples, items: Any) -> DataInfo:
    """Derives the description of all samples from one."""
    first = first_sample(f"--data.name {name}", samples, "items are (inputs, targets), or dicts with inputs")
    if bad := [key for key, value in first.items() if not (isinstance(value, Tensor) and value.dim())]:
        raise ConfigError(
            f"--data.name {name}: {bad[0]} of a batch is not a tensor with a row for each item.",
            f"leave {bad[0]} out, or give numbers, arrays or tensors",
        )
    names = attribute_of(items, "classes")
    if isinstance(names, str) or not (names is None or isinstance(names, Iterable)):
        raise ConfigError(f"--data.name {name}: classes is {names!r}.", """classes = ["cat", "dog"]""")
    inputs, classes = first["inputs"], tuple(map(str, names or ()))
    facts: dict[str, Any] = {"num_classes": len(classes)} if classes else {}
    kind: Literal["images", "text", "other"] = "other"
    if inputs.dim() == 4 and inputs.is_floating_point() and inputs.shape[2] == inputs.shape[3]:
        kind, facts = "images", facts | {"channels": inputs.shape[1], "image_size": inputs.shape[2]}
    elif inputs.dim() == 2 and not inputs.is_floating_point():
        # One class per text is classification, not language modelling.
        kind = "other" if first.get("targets", inputs).dim() == 1 else "text"
        facts = facts | {"seq_len": inputs.shape[1]}
    tokens = inputs.shape[1] if kind == "text" else 0
    return DataInfo(kind=kind, facts=facts, class_names=classes, tokens_per_sample=tokens, default_epochs=1)
