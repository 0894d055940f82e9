"""Checkpoints of adapters alone: the frozen weights under them, the check at a resume, the merged export.

Such a checkpoint holds adapters, optimizer and buffers; a digest that does not depend on the sharding
identifies the frozen weights. The adapters are in fsdp/models/lora.py.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from fsdp.base.digest import digest_shard
from fsdp.base.errors import CheckpointError
from fsdp.checkpoint import full_state, load
from fsdp.checkpoint.full_state import Entry
from fsdp.checkpoint.inspect import CheckpointSource
from fsdp.checkpoint.manifest import Manifest
from fsdp.config import LoraSection
from fsdp.models.lora import A, B, is_transposed, merged
from fsdp.models.registry import SourceFolder
from fsdp.models.units import names_in_state

PEFT = "adapter"
TASKS = {"ForCausalLM": "CAUSAL_LM", "LMHeadModel": "CAUSAL_LM", "ForConditionalGeneration": "SEQ_2_SEQ_LM"}
"""The end of a class's name in transformers, and peft's task, by which its Auto classes load the adapters."""


@dataclass(frozen=True)
class Base:
    """The frozen weights of a run with adapters. `build` makes the plain model on meta, `open` reads them."""

    digest: str
    origin: str
    lora: LoraSection
    dtype: torch.dtype
    """Of the merged model."""
    stored: torch.dtype
    """Of the frozen weights on the ranks."""
    build: Callable[[], nn.Module]
    open: Callable[[], Mapping[str, Tensor]]

    def as_stored(self, tensor: Tensor, entry: Entry) -> Tensor:
        """A weight of the source, rounded as the ranks round it."""
        return tensor.to(self.stored if entry.dtype.is_floating_point else entry.dtype)

    def for_manifest(self) -> dict[str, str | float]:
        """The form in which the manifest stores it."""
        return {
            "digest": self.digest,
            "origin": self.origin,
            "rank": self.lora.rank,
            "alpha": self.lora.alpha,
        }


def digest_of(tensors: Mapping[str, int]) -> str:
    """One digest for the digests of many tensors."""
    return hashlib.blake2b(json.dumps(sorted(tensors.items())).encode(), digest_size=8).hexdigest()


def check(manifest: Manifest, base: Base | None, where: str) -> None:
    """CheckpointError unless the checkpoint and the run have the same frozen weights under their adapters."""
    saved = manifest.base
    if not saved and base is None:
        return
    if not saved:
        raise CheckpointError(
            f"{where} holds a whole model, and this run trains adapters.",
            "--model.weights RUN/full_model to train adapters over it, or --lora.rank 0 to resume it",
        )
    origin = str(saved["origin"])
    if base is None:
        raise CheckpointError(
            f"{where} holds adapters alone, over {origin}.",
            f"--lora.rank {saved['rank']}, with the flags of that run",
        )
    if saved["digest"] != base.digest:
        raise CheckpointError(
            f"{where} holds adapters over {origin} ({saved['digest']}), and this run has other weights, "
            f"from {base.origin} ({base.digest}).",
            f"--precision.frozen {'auto' if base.stored == torch.bfloat16 else 'bf16'}, or the old files"
            if origin == base.origin
            else origin
            if origin.startswith("--")
            else "give the flags that the run had",
        )


# ---------------------------------------------------------------- export


def whole_model(source: CheckpointSource, base: Base) -> tuple[list[Entry], full_state.Fetch]:
    """The entries of the plain model, and a function that merges base and adapters for one of them."""
    stored = {key.removeprefix("model.") for key in source.tensors if key.startswith("model.")}
    model = base.build()
    entries = _entries(base, model)
    weights = base.open()
    _check_unchanged(base, weights, [entry for entry in entries if entry.name not in stored])

    def fetch(entry: Entry) -> Tensor:
        if entry.name in stored:
            return load.whole(source, f"model.{entry.name}")
        plain = base.as_stored(weights[entry.name], entry).to(entry.dtype)
        layer = entry.name.removesuffix(".weight")
        if f"{layer}.{A}" not in stored:
            return plain
        a, b = (load.whole(source, f"model.{layer}.{part}") for part in (A, B))
        return merged(plain, a, b, base.lora.scale, transposed=is_transposed(model.get_submodule(layer)))

    return entries, fetch


def _entries(base: Base, model: nn.Module) -> list[Entry]:
    state, found = model.state_dict(), []
    for name, (owner, *_) in names_in_state(model).items():
        tensor = state[name]
        dtype = base.dtype if tensor.is_floating_point() else tensor.dtype
        found.append(Entry(name, dtype, tuple(tensor.shape), owner if owner != name else ""))
    return found


def _check_unchanged(base: Base, weights: Mapping[str, Tensor], entries: list[Entry]) -> None:
    """CheckpointError if the weights have changed since the run read them."""
    digests = {
        e.name: digest_shard(base.as_stored(weights[e.name], e)).weighted for e in entries if not e.same_as
    }
    if digest_of(digests) != base.digest:
        raise CheckpointError(
            f"{base.origin} has changed: its weights have the digest {digest_of(digests)}, "
            f"those under the adapters had {base.digest}.",
            "restore the old weights, then python -m fsdp.checkpoint RUN export",
        )


def peft_files(
    source: CheckpointSource, folder: Path, base: Base, pretrained: SourceFolder | None = None
) -> dict[Path, Callable[..., object]]:
    """The adapters alone, in the names and layout of the peft library: file → the function that writes it.
    Layers have their names in the model of the `pretrained` folder.
    """
    saved_layer: Callable[[str], str] = str if pretrained is None else pretrained.saved_layer
    cls = "" if pretrained is None else pretrained.class_name
    task = (task for end, task in TASKS.items() if cls.endswith(end))
    place = folder / PEFT
    place.mkdir(parents=True, exist_ok=True)
    keys = {}
    for key, saved in source.tensors.items():
        layer, _, part = key.removeprefix("model.").rpartition(".")
        if key.startswith("model.") and part in (A, B):
            name = f"base_model.model.{saved_layer(layer)}.{'lora_A' if part == A else 'lora_B'}.weight"
            keys[name] = (key, Entry(name, saved.dtype, saved.size))
    own = {key.removeprefix("model.").rpartition(".")[0] for key, _ in keys.values()}
    model = base.build()
    origin = base.origin.removeprefix("--model.weights ")
    config = {
        "peft_type": "LORA",
        "task_type": next(task, None),
        "base_model_name_or_path": origin.removeprefix("--model.name ").removeprefix("hf:"),
        "r": base.lora.rank,
        "lora_alpha": base.lora.alpha,
        "lora_dropout": base.lora.dropout,
        "bias": "none",
        "target_modules": sorted(map(saved_layer, own)),
        "inference_mode": True,
        "fan_in_fan_out": any(is_transposed(model.get_submodule(layer)) for layer in own),
    }
    text = json.dumps(config, indent=1).encode()
    write = partial(
        full_state.write_safetensors,
        entries=[entry for _, entry in keys.values()],
        fetch=lambda entry: load.whole(source, keys[entry.name][0]),
    )
    return {
        place / "adapter_config.json": lambda stream: stream.write(text),
        place / "adapter_model.safetensors": write,
    }
