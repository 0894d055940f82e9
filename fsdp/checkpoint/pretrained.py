"""A folder of transformers' safetensors, read by rows: each rank reads the rows of its own shard.

Names, fusing and splitting follow fsdp/models/hf_weights.py. Not here: which rows a rank keeps
(fsdp/parallel/materialize.py), or how a folder is written (export.py).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fsdp.base.digest import same_values, widest_floating
from fsdp.base.errors import ConfigError
from fsdp.base.text import listed
from fsdp.checkpoint.full_state import INDEX_FILE, SINGLE_FILE, StoredTensor, files_of_index, open_safetensors
from fsdp.models.units import first_names

if TYPE_CHECKING:
    from fsdp.models.hf import PretrainedFolder
    from fsdp.models.hf_weights import Conversion, NamePlan

log = logging.getLogger(__name__)

PACKED = (".qweight", ".weight_packed")
"""The ends of names of packed weights in folders of GPTQ, AWQ and compressed-tensors."""
OUTPUT_LAYERS = ("lm_head.weight", "head.weight")
"""A folder whose model was tied lacks it."""


class PretrainedWeights(Mapping[str, Tensor]):
    """The tensors of a model's state dict by name, whole or by rows of dim 0; a tied one under any name."""

    def __init__(self, source: PretrainedFolder, seed: int, quiet: bool = False) -> None:
        """`seed` draws a new head (--model.args.head); `quiet` logs no line about names."""
        with torch.device("meta"):
            self._model: Any = source.build()
        self._source, self._seed = source, seed
        self._stored = open_stored(source)
        self._plan = source.plan_names(self._model, {name: one.size for name, one in self._stored.items()})
        self._first = first_names(self._model)
        self._drawn = frozenset(_check(source, self._model, self._plan))
        _check_dtypes(source, self._model, self._plan, self._stored)
        self._last: tuple[object, dict[str, Tensor]] = (None, {})
        self.nbytes = 0
        """Bytes read so far."""
        if not quiet:
            self._log()

    def _log(self) -> None:
        for what, names in (
            ("has tensors that the model does not use", self._plan.unexpected),
            ("lacks tensors of the new head, which are drawn from the seed", sorted(self._drawn)),
        ):
            if names:
                log.warning("%s %s: %s", self._source.folder, what, listed(names, 3))

    # ------------------------------------------------------------ reading

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Rows first … last - 1 of a tensor, in the dtype of the file; a scalar is one row."""
        name = self._first[name]
        if name in self._drawn:
            drawn = self._source.draw_missing(name, self._seed)
            return drawn[first:last] if drawn.dim() else drawn
        if name in self._plan.converted:
            return self._convert(name, first, last)
        keys = self._plan.plain[name]
        tensor = self._read(keys[0], first, last)
        for other in keys[1:]:
            if not same_values(tensor, self._read(other, first, last)):
                raise ConfigError(
                    f"{self._source.flag}: {keys[0]} and {other} differ, and config.json ties them.",
                    "--model.args.tie_word_embeddings false",
                )
        return tensor

    def _read(self, key: str, first: int, last: int) -> Tensor:
        tensor = self._stored[key].rows(first, last)
        self.nbytes += tensor.nbytes
        return tensor

    def _convert(self, name: str, first: int, last: int) -> Tensor:
        """The last conversion is kept: it may give several tensors of the model."""
        group = self._plan.converted[name]
        by_row = group.stacks_rows
        made = (group.target, first, last) if by_row else (group.target,)
        if self._last[0] != made:
            self._last = (None, {})  # freed before the next is read
            self._last = (made, self._converted(group, slice(first, last) if by_row else slice(None)))
        tensor = self._last[1][name]
        return tensor if by_row else tensor[first:last]

    def _converted(self, group: Conversion, chosen: slice) -> dict[str, Tensor]:
        tensors = {
            pattern: [self._read(key, 0, _rows(self._stored[key])) for key in keys[chosen]]
            for pattern, keys in group.sources.items()
        }
        if not all(tensors.values()):
            return {group.target: torch.empty((0, *self._shape(group.target)[1:]))}
        converted = group.convert(self._model, tensors)
        return {self._first.get(name, name): tensor for name, tensor in converted.items()}

    def _shape(self, name: str) -> torch.Size:
        return self._model.state_dict()[name].shape

    @property
    def dtype(self) -> torch.dtype:
        """The widest floating-point dtype of the files."""
        return widest_floating(one.dtype for one in self._stored.values())

    def __getitem__(self, name: str) -> Tensor:
        shape = self._shape(name)
        return self.rows(name, 0, shape[0] if shape else 1)

    def __iter__(self) -> Iterator[str]:
        return iter(self._model.state_dict())

    def __len__(self) -> int:
        return len(self._model.state_dict())


def open_stored(source: PretrainedFolder) -> dict[str, StoredTensor]:
    """The tensors of the folder's safetensors, in one file or in those of an index."""
    folder = source.folder
    single, index, flag = folder / SINGLE_FILE, folder / INDEX_FILE, f"{source.flag}:"
    if single.is_file():
        return open_safetensors(single, flag)
    if not index.is_file():
        raise _no_weights(source)
    stored: dict[str, StoredTensor] = {}
    for file in files_of_index(index, flag):
        stored |= open_safetensors(file, flag)
    return stored


def _no_weights(source: PretrainedFolder) -> ConfigError:
    pickled = next(source.folder.glob("pytorch_model*.bin"), None)
    what = f"; {pickled.name} is a pickle" if pickled else ""
    return ConfigError(
        f"{source.flag}: {source.folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}{what}.",
        f"in Python, {source.class_name}.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER); or "
        "--model.weights none, to train from random weights",
        scope="node",
    )


# ---------------------------------------------------------------- what does not fit


def _check(source: PretrainedFolder, model: Any, plan: NamePlan) -> list[str]:
    """Names to draw: those of a new head. ConfigError for others that are missing or have another shape."""
    drawn = [
        name for name in [*plan.missing, *plan.misshapen] if source.new_head and _is_new(name, model, plan)
    ]
    missing = [name for name in plan.missing if name not in drawn]
    if missing and (packed := next((name for name in plan.unexpected if name.endswith(PACKED)), None)):
        raise _quantized(source, packed)
    if missing:
        raise ConfigError(
            f"{source.flag}: {source.folder} lacks {listed(missing, 3)} of {source.class_name}"
            + (f"; it has {listed(plan.unexpected, 3)}." if plan.unexpected else "."),
            "--model.args.tie_word_embeddings true, if it was saved with tied embeddings"
            if missing[0] in OUTPUT_LAYERS and len(missing) == 1
            else "--model.args.head NAME draws a new head; --model.weights none trains from random weights",
        )
    tensors = model.state_dict()
    misshapen = [
        f"{name} {shape} for {tuple(tensors[name].shape)}"
        for name, shape in plan.misshapen.items()
        if name not in drawn
    ]
    if misshapen:
        raise ConfigError(
            f"{source.flag}: {source.folder} has other shapes than the model: {listed(misshapen, 3)}.",
            "leave out the --model.args that change them; --model.args.head NAME draws a new head",
        )
    return drawn


def _check_dtypes(
    source: PretrainedFolder, model: Any, plan: NamePlan, stored: Mapping[str, StoredTensor]
) -> None:
    """ConfigError for whole numbers, and for numbers of 8 bits beside their scales: without a
    quantization_config nothing says how they are multiplied.
    """
    tensors = model.state_dict()
    read = [key for name, keys in plan.plain.items() if tensors[name].is_floating_point() for key in keys]
    read += [key for one in plan.converted.values() for keys in one.sources.values() for key in keys]
    scaled = any("scale" in name.rpartition(".")[2] for name in plan.unexpected)
    for key in read:
        dtype = stored[key].dtype
        if not dtype.is_floating_point or (dtype.itemsize == 1 and scaled):
            raise _quantized(source, f"{key} is {str(dtype).removeprefix('torch.')}")


def _quantized(source: PretrainedFolder, what: str) -> ConfigError:
    return ConfigError(
        f"{source.flag}: its weights are quantized ({what}); FSDP trains floating-point ones.",
        "name a folder with the weights before quantization",
    )


def _is_new(name: str, model: Any, plan: NamePlan) -> bool:
    """Whether a tensor belongs to a head: outside the base model, or in a part of it that the folder lacks
    entirely, as a pooler.
    """
    base = f"{model.base_model_prefix}."
    part = base + name.removeprefix(base).partition(".")[0] + "."
    present = (*plan.plain, *plan.converted)
    return not name.startswith(base) or not any(one.startswith(part) for one in present)


def _rows(one: StoredTensor) -> int:
    return one.size[0] if one.size else 1
