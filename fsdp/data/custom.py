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

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, default_collate

from fsdp.base.errors import ConfigError, OneRankError
from fsdp.config import Args
from fsdp.data.arguments import Where
from fsdp.data.stream import StreamItems, StreamSamples, is_stream
from fsdp.data.types import DataInfo, DataSet, Samples, first_sample
from fsdp.models.factory import blame, load_attribute, parameters_of


def build(name: str, where: Where, args: Args) -> DataSet:
    factory = load_attribute(name, "--data.name")
    given = _arguments(name, factory, where, args)

    def make() -> Any:
        try:
            return factory(**given)
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
    if where.dir and not takes.accepts("dir"):
        raise ConfigError(
            f"--data.dir {where.dir} has no effect on {name}: it has no parameter dir.",
            "leave it out, or give it a parameter dir",
        )
    given = dict(args)
    if "seq_len" in takes.named:
        given.setdefault("seq_len", where.seq_len)
    if where.dir:
        given.setdefault("dir", where.dir)
    if missing := takes.missing(given):
        flag = "--data.dir FOLDER" if missing[0] == "dir" else f"--data.args.{missing[0]} VALUE"
        raise ConfigError(f"{name} needs {', '.join(missing)}.", flag)
    return given


def as_dataset(name: str, make: Callable[[], Any]) -> DataSet:
    made = make()
    if isinstance(made, DataSet):
        return made
    pair = made if isinstance(made, tuple) else (made, None)
    if len(pair) != 2:
        raise ConfigError(
            f"--data.name {name} returned a tuple of {len(pair)}.",
            "return a Dataset, or the pair (train, heldout)",
        )
    streams = is_stream(pair[0])
    for part in pair[streams : 2 if pair[1] is not None else 1]:
        _check_map_style(name, part)
    heldout = ItemSamples(pair[1]) if pair[1] is not None and len(pair[1]) else None
    if streams:
        return _stream(name, make, pair[0], heldout)
    train = ItemSamples(pair[0])
    return DataSet(train=train, heldout=heldout, info=_info(name, train, pair[0]))


def _stream(name: str, make: Callable[[], Any], made: Any, heldout: Samples | None) -> DataSet:
    def again() -> Any:
        one = make()
        return one[0] if isinstance(one, tuple) else one

    items = StreamItems(name, made, again)
    train = StreamSamples(items, ItemSamples(items).batch)
    info = _info(name, train, made)  # type: ignore[arg-type]
    # `train` has no length, which only code that has seen that there is no stream reads
    return DataSet(train=train, heldout=heldout, info=info, stream=items)  # type: ignore[arg-type]


def _check_map_style(name: str, part: Any) -> None:
    if isinstance(part, Mapping):
        holds = ", ".join(map(str, part))
        raise ConfigError(
            f"--data.name {name} returned a {type(part).__name__} with {holds}, not a Dataset.",
            """return one of them, or the pair (made["train"], made["test"])""",
        )
    if not hasattr(part, "__len__") or not hasattr(part, "__getitem__"):
        raise ConfigError(
            f"--data.name {name} returned a {type(part).__name__}, which has no length or no items by index.",
            "give it __len__ and __getitem__: the order of samples must be the same at any number of ranks",
        )
    if not len(part):
        raise ConfigError(
            f"--data.name {name} returned an empty {type(part).__name__}.",
            "check the data that the factory reads",
        )
    hook = attribute_of(part, "collate")
    if hook is not None and not callable(hook):
        raise ConfigError(
            f"--data.name {name}: collate is of type {type(hook).__name__}, which cannot be called.",
            "collate(items) returns a batch, or leave the attribute out",
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
        except (RuntimeError, KeyError):
            if (unlike := _unlike(rows, indices)) is None:
                raise
            raise OneRankError(
                f"{unlike}: samples of one batch must have one shape.",
                "give your Dataset a method collate(items) that pads them to one length: docs/data.md",
            ) from None
        return _widened(collated)


def _widened(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Targets and labels of whole numbers as int64, which cross entropy reads; arrays often have less."""
    return {
        name: value.long() if name in ("targets", "labels") and _is_narrow(value) else value
        for name, value in batch.items()
    }


def _is_narrow(value: Any) -> bool:
    whole = isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())
    return whole and value.dtype not in (torch.int64, torch.bool)


def _unlike(rows: Sequence[Mapping[str, Any]], indices: np.ndarray) -> str | None:
    """Describes two samples that differ in their keys or shapes; None if all are alike."""
    first = rows[0]
    for row, index in zip(rows, indices, strict=True):
        if row.keys() != first.keys():
            return f"sample {indices[0]} has {', '.join(first)} and sample {index} has {', '.join(row)}"
        for name, value in row.items():
            if (one := tuple(np.shape(first[name]))) != (other := tuple(np.shape(value))):
                return f"{name} of sample {indices[0]} is {list(one)} and of sample {index} {list(other)}"
    return None


def _as_dict(item: Any, what: str = "an item") -> dict[str, Any]:
    if isinstance(item, (tuple, list)) and len(item) == 2:
        return {"inputs": _value(item[0]), "targets": _value(item[1])}
    if isinstance(item, Mapping) and ("inputs" in item or "input_ids" in item):
        first = "inputs" if "inputs" in item else "input_ids"
        return {"inputs": _value(item[first])} | {k: _value(v) for k, v in item.items() if k != first}
    shown = (
        f"a dict with {', '.join(map(str, item))}"
        if isinstance(item, Mapping)
        else f"a {type(item).__name__}"
    )
    raise TypeError(f"{what} is {shown}, neither (inputs, targets) nor a dict with inputs or input_ids")


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


def _classes(name: str, items: Any) -> tuple[str, ...]:
    found = attribute_of(items, "classes")
    if found is None:
        return ()
    if isinstance(found, str) or not isinstance(found, Iterable):
        raise ConfigError(
            f"--data.name {name}: classes is {found!r}, not the names of the classes.",
            """classes = ["cat", "dog"], or leave the attribute out""",
        )
    return tuple(map(str, found))


def _info(name: str, samples: Samples, items: Any) -> DataInfo:
    """Derives the description of all samples from one."""
    hint = "items are (inputs, targets), or dicts with inputs"
    first = first_sample(f"--data.name {name}", samples, hint)
    bad = [k for k, v in first.items() if not isinstance(v, Tensor)]
    if bad:
        raise ConfigError(
            f"--data.name {name}: {bad[0]} of an item is not a number, array or tensor.",
            f"leave {bad[0]} out",
        )
    inputs = first["inputs"]
    if flat := [name for name, value in first.items() if not value.dim()]:
        raise ConfigError(
            f"--data.name {name}: {flat[0]} of a batch is one number.", "a row for each item, from collate"
        )
    classes = _classes(name, items)
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
