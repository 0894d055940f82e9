"""Weights in files, mapped: one state dict; a folder of transformers, of which each rank reads its rows; the
frozen weights under adapters, which a checkpoint of adapters identifies by a digest.

Names, fusing and splitting follow fsdp/models/hf_weights.py. Not here: which rows a rank keeps
(fsdp/shard/materialize.py), or how such files are written (export.py).
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp.base.devices import same_values, widest_floating
from fsdp.base.errors import CheckpointError, ConfigError, first_line
from fsdp.base.proc import TABLE, regular_text
from fsdp.base.text import listed, quoted
from fsdp.base.torch_private import EXTRA_STATE
from fsdp.checkpoint.manifest import Manifest
from fsdp.config import LoraSection
from fsdp.models.units import clean_name, first_names

if TYPE_CHECKING:
    from fsdp.models.hf import PretrainedFolder
    from fsdp.models.hf_weights import Conversion, NamePlan

log = logging.getLogger(__name__)

TORCH_FILE = "full-model.pt"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
FLAG = "--model.weights"


# ---------------------------------------------------------------- one state dict


def open_full_state(path: str | Path) -> dict[str, Tensor]:
    """A whole model's state dict: safetensors with or without an index, or a file of torch.save. Of a folder
    the newest format: the others may be of an earlier step.
    """
    location = Path(path)
    folders = (location, location / "full_model") if location.is_dir() else ()
    newest = next(filter(None, map(newest_export, folders)), None)
    if folders and newest is None:
        raise ConfigError(
            f"{FLAG} {path} holds no {TORCH_FILE}, {INDEX_FILE} or {SINGLE_FILE}.",
            f"--checkpoint.resume {path} if it is a checkpoint, or export one: "
            "python -m fsdp.checkpoint RUN export",
        )
    return {clean_name(name, ddp=True): tensor for name, tensor in open_files(newest or location).items()}


def newest_export(folder: Path, names: Sequence[str] = (INDEX_FILE, TORCH_FILE, SINGLE_FILE)) -> Path | None:
    """The file with which a reader of the folder's newest export begins."""
    files = [file for name in names if (file := folder / name).is_file()]
    return max(files, key=lambda file: file.stat().st_mtime_ns, default=None)


def open_files(file: Path, flag: str = FLAG) -> dict[str, Tensor]:
    """The tensors of a file, or of those that an index names."""
    files = files_of_index(file, flag) if file.name == INDEX_FILE else [file]
    return {name: tensor for part in files for name, tensor in open_file(part, flag).items()}


def files_of_index(index: Path, flag: str = FLAG) -> list[Path]:
    """The safetensors files that an index names, all in its folder. `flag` begins the message of an error."""
    try:
        names = sorted({str(name) for name in json.loads(regular_text(index, TABLE))["weight_map"].values()})
        if outside := [name for name in names if Path(name).name != name]:
            raise ValueError(f"it points outside its folder, to {outside[0]}")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        reason = f"{flag} {index} is no index of safetensors files ({type(error).__name__}: {error})."
        raise ConfigError(reason, "give a whole export") from None
    return [index.with_name(name) for name in names]


def open_file(file: Path, flag: str = FLAG) -> dict[str, Tensor]:
    """The tensors of a file by name, mapped: their data is read when it is used."""
    try:
        if file.exists() and not file.is_file():
            raise OSError("it is not a regular file")
        if file.suffix == ".safetensors":
            from safetensors import safe_open

            opened = safe_open(file, framework="pt")
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        for key in ("state_dict", "model"):
            state = state[key] if isinstance(state.get(key), Mapping) else state
        # what a module's get_extra_state returns is not kept
        tensors = {name: value for name, value in state.items() if name.rpartition(".")[2] != EXTRA_STATE}
        for name, value in tensors.items():
            if not isinstance(value, Tensor) or isinstance(value, DTensor):
                raise TypeError(f"{name} is a {type(value).__name__}, and no full tensor")
    except Exception as error:  # those of torch.load and safetensors have no common class
        raise ConfigError(
            f"{flag} {file} cannot be read: {type(error).__name__}: {first_line(error)}.",
            "give a whole .safetensors file, or torch.save(model.state_dict(), FILE), sharded tensors as "
            "tensor.full_tensor()",
        ) from None
    return tensors


# ---------------------------------------------------------------- a folder of transformers


class PretrainedWeights(Mapping[str, Tensor]):
    """The tensors of a model's state dict by name, whole or by rows of dim 0; a tied one under any name."""

    def __init__(self, source: PretrainedFolder, seed: int, quiet: bool = False) -> None:
        """`seed` draws a new head (--model.args.head); `quiet` logs no line about names."""
        with torch.device("meta"):
            self._model: Any = source.build()
        self._source, self._seed = source, seed
        self._stored = open_stored(source)
        shapes = {name: tuple(tensor.shape) for name, tensor in self._stored.items()}
        self._plan = source.plan_names(self._model, shapes)
        self._first = first_names(self._model)
        self._drawn = frozenset(_check(source, self._model, self._plan, self._stored))
        self._last: tuple[object, dict[str, Tensor]] = (None, {})
        self.dtype = widest_floating(tensor.dtype for tensor in self._stored.values())
        self.nbytes = 0
        """Bytes read so far."""
        for text, names in (
            ("has tensors that the model does not use", self._plan.unexpected),
            ("lacks tensors of the new head, which are drawn from the seed", sorted(self._drawn)),
        ):
            if names and not quiet:
                log.warning("%s %s: %s", source.folder, text, listed(names, 3))

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Rows first … last - 1 of a tensor, in the dtype of the file; a scalar is one row."""
        name = self._first[name]
        if name in self._drawn:
            drawn = self._source.draw_missing(name, self._seed)
            return drawn[first:last] if drawn.dim() else drawn
        if name in self._plan.converted:
            return self._convert(name, first, last)
        keys = self._plan.plain[name]
        tensor = self._read(keys[0], slice(first, last))
        for other in keys[1:]:
            if not same_values(tensor, self._read(other, slice(first, last))):
                raise ConfigError(
                    f"{self._source.flag}: {keys[0]} and {other} differ, and config.json ties them.",
                    "--model.args.tie_word_embeddings false",
                )
        return tensor

    def _read(self, key: str, rows: slice) -> Tensor:
        """In memory of its own: what is mapped may be dropped at any time."""
        stored = self._stored[key]
        tensor = (stored[rows] if stored.dim() else stored).clone()
        self.nbytes += tensor.nbytes
        return tensor

    def _convert(self, name: str, first: int, last: int) -> Tensor:
        """The last conversion is kept: it may give several tensors of the model."""
        group = self._plan.converted[name]
        by_row = group.stacks_rows
        key = (group.target, first, last) if by_row else (group.target,)
        if self._last[0] != key:
            self._last = (None, {})  # freed before the next is read
            self._last = (key, self._converted(group, slice(first, last) if by_row else slice(None)))
        tensor = self._last[1][name]
        return tensor if by_row else tensor[first:last]

    def _converted(self, group: Conversion, chosen: slice) -> dict[str, Tensor]:
        tensors = {
            pattern: [self._read(key, slice(None)) for key in keys[chosen]]
            for pattern, keys in group.sources.items()
        }
        if not all(tensors.values()):
            return {group.target: torch.empty((0, *self._shape(group.target)[1:]))}
        converted = group.convert(self._model, tensors)
        return {self._first.get(name, name): tensor for name, tensor in converted.items()}

    def _shape(self, name: str) -> torch.Size:
        return self._model.state_dict()[name].shape

    def __getitem__(self, name: str) -> Tensor:
        shape = self._shape(name)
        return self.rows(name, 0, shape[0] if shape else 1)

    def __iter__(self) -> Iterator[str]:
        return iter(self._model.state_dict())

    def __len__(self) -> int:
        return len(self._model.state_dict())


def open_stored(source: PretrainedFolder) -> dict[str, Tensor]:
    """The tensors of the folder's safetensors, in one file or in those of an index, downloaded first."""
    folder, flag, index = source.folder, f"{source.flag}:", source.folder / INDEX_FILE
    files = files_of_index(index, flag) if index.is_file() else [folder / SINGLE_FILE]
    if not (folder / SINGLE_FILE).exists() and (names := [file.name for file in files if not file.exists()]):
        from fsdp.models.hf import find_folder

        find_folder(source.name, names, folder.name)
    if (file := newest_export(folder, (SINGLE_FILE, INDEX_FILE))) is not None:
        return open_files(file, flag)
    raise ConfigError(
        f"{flag} {folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}.",
        f"in Python, {source.class_name}.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER); or "
        "--model.weights none, to train from random weights",
        scope="node",
    )


def _check(source: PretrainedFolder, model: Any, plan: NamePlan, stored: Mapping[str, Tensor]) -> list[str]:
    """Names to draw: those of a new head. ConfigError for others that are missing or have another shape, and
    for whole numbers or numbers of 8 bits.
    """
    tensors = model.state_dict()
    drawn = [
        name for name in [*plan.missing, *plan.misshapen] if source.new_head and _is_new(name, model, plan)
    ]
    missing = [name for name in plan.missing if name not in drawn]
    read = [key for name, keys in plan.plain.items() if tensors[name].is_floating_point() for key in keys]
    read += [key for group in plan.converted.values() for keys in group.sources.values() for key in keys]
    dtypes = {key: stored[key].dtype for key in read}
    if small := [key for key in read if not dtypes[key].is_floating_point or dtypes[key].itemsize == 1]:
        raise ConfigError(
            f"{source.flag}: its weights are quantized ({small[0]} is {dtypes[small[0]]}).",
            "name a folder with the weights before quantization: FSDP trains floating-point ones",
        )
    shapes = [(name, shape) for name, shape in plan.misshapen.items() if name not in drawn]
    misshapen = [f"{name} {shape} for {tuple(tensors[name].shape)}" for name, shape in shapes]
    if missing or misshapen:
        fault = f"lacks {listed(missing, 3)}" if missing else f"has other shapes: {listed(misshapen, 3)}"
        more = f" It has {listed(plan.unexpected, 3)}." if plan.unexpected else ""
        raise ConfigError(
            f"{source.flag}: {source.folder} does not fit {source.class_name}: it {fault}.{more}",
            "--model.args as the folder was saved (tie_word_embeddings true without an output layer); "
            "--model.args.head NAME draws a new head; --model.weights none trains from random weights",
        )
    return drawn


def _is_new(name: str, model: Any, plan: NamePlan) -> bool:
    """Whether a tensor belongs to a head: outside the base model, or in a part of it that the folder lacks
    entirely, as a pooler.
    """
    base = f"{model.base_model_prefix}."
    part = base + name.removeprefix(base).partition(".")[0] + "."
    return not name.startswith(base) or not any(
        key.startswith(part) for key in (*plan.plain, *plan.converted)
    )


# ---------------------------------------------------------------- the frozen weights under adapters


@dataclass(frozen=True)
class Base:
    """The frozen weights of a run with adapters. `build` makes the plain model on meta, `open` reads them."""

    digest: str
    """It does not depend on the sharding."""
    origin: str
    lora: LoraSection
    dtype: torch.dtype
    """Of the merged model."""
    stored: torch.dtype
    """Of the frozen weights on the ranks."""
    build: Callable[[], nn.Module]
    open: Callable[[], Mapping[str, Tensor]]

    def for_manifest(self) -> dict[str, str | float]:
        """The form in which the manifest stores it."""
        lora = self.lora
        return {"digest": self.digest, "origin": self.origin, "rank": lora.rank, "alpha": lora.alpha}


def digest_of(tensors: Mapping[str, int]) -> str:
    """One digest for the digests of many tensors."""
    return hashlib.blake2b(json.dumps(sorted(tensors.items())).encode(), digest_size=8).hexdigest()


def check_base(manifest: Manifest, base: Base | None, path: str) -> None:
    """CheckpointError unless the checkpoint and the run have the same frozen weights under their adapters."""
    saved, held, reason = manifest.base, "a whole model", ""
    if saved:
        held = f"adapters over {saved['origin']} ({saved['digest']})"
    if base is None and saved:
        reason, hint = "this run trains a whole model", f"--lora.rank {saved['rank']}, and that run's flags"
    elif base is not None and not saved:
        reason = "this run trains adapters"
        run = quoted(path.rpartition("/checkpoints/")[0] or "RUN")
        hint = f"--run.dir {run}-adapters --model.weights {run}/full_model to train adapters over it, or "
        hint += "--lora.rank 0 to resume it"
    elif base is not None and saved["digest"] != base.digest:
        reason = f"this run has other weights under its own, from {base.origin} ({base.digest})"
        hint = f"{saved['origin']} with unchanged files, and --precision.frozen as that run had it"
    if reason:
        raise CheckpointError(f"{path} holds {held}, and {reason}.", hint)
