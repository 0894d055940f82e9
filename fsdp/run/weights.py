"""Initial weights by the flags: a state dict, a folder of transformers, or none.

Not here: how ranks read or receive them (fsdp/parallel/materialize.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fsdp.base.errors import ConfigError
from fsdp.config import Config
from fsdp.models import ModelSpec, build_real
from fsdp.models.units import names_in_state
from fsdp.parallel.checks import state_digest
from fsdp.parallel.materialize import build_on_host
from fsdp.parallel.shard import Dtypes

if TYPE_CHECKING:
    from fsdp.checkpoint.pretrained import Base, PretrainedWeights
    from fsdp.models.hf import SourceFolder

NONE = "none"
"""--model.weights none: random weights where --model.name has its own."""


def names_state(config: Config) -> bool:
    """Whether --model.weights names a state dict."""
    return config.model.weights not in ("", NONE)


def open_state(config: Config) -> dict[str, Tensor]:
    from fsdp.checkpoint.pretrained import open_full_state

    return open_full_state(config.model.weights)


def reads_folder(config: Config, spec: ModelSpec) -> bool:
    """Whether the weights are those of a folder of transformers."""
    return spec.pretrained is not None and config.model.weights == ""


def open_folder(config: Config, spec: ModelSpec, *, quiet: bool = True) -> PretrainedWeights:
    from fsdp.checkpoint.pretrained import PretrainedWeights

    assert spec.pretrained is not None
    return PretrainedWeights(spec.pretrained, config.run.seed, quiet)


def saved_as(config: Config, spec: ModelSpec) -> SourceFolder | None:
    """The format of transformers in which the run is exported; None for a state dict."""
    if spec.pretrained is not None:
        return spec.pretrained
    if config.checkpoint.export_format != "hf":
        return None
    if spec.name != "transformer":
        raise ConfigError(
            f"--checkpoint.export_format hf: {spec.name} is no model of transformers.",
            "--checkpoint.export_format safetensors",
        )
    from fsdp.models.transformer import from_sizes

    return from_sizes(spec.sizes, spec.build)


# ---------------------------------------------------------------- the frozen weights under adapters


class _Renamed(Mapping[str, Tensor]):
    """A state dict in which a tied weight may have any of its names."""

    def __init__(self, state: Mapping[str, Tensor], names: Mapping[str, list[str]]) -> None:
        self._state, self._names = state, names

    def __getitem__(self, name: str) -> Tensor:
        return self._state[next(known for known in self._names[name] if known in self._state)]

    def __iter__(self) -> Iterator[str]:
        return (name for name, known in self._names.items() if any(alias in self._state for alias in known))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def base_of(config: Config, spec: ModelSpec, dtypes: Dtypes, digest: str) -> Base:
    """The source of the weights by the flags, whatever their digest."""
    from fsdp.checkpoint.pretrained import Base

    seed, origin = config.run.seed, f"--run.seed {config.run.seed}"
    if spec.pretrained is not None and reads_folder(config, spec):
        origin = spec.pretrained.flag
    elif names_state(config):
        origin = f"--model.weights {config.model.weights}"

    def build() -> nn.Module:
        with torch.device("meta"):
            return spec.build()

    def read() -> Mapping[str, Tensor]:
        if reads_folder(config, spec):
            return open_folder(config, spec)
        if names_state(config):
            return _Renamed(open_state(config), names_in_state(build()))
        if spec.knows_inits:
            return build_real(spec, seed).state_dict()
        whole = partial(build_on_host, spec, seed)
        draws = spec.draws(seed, whole)
        return whole().state_dict() if draws is None else draws

    return Base(
        digest=digest,
        origin=origin,
        lora=config.lora,
        dtype=dtypes.master,
        stored=dtypes.frozen or dtypes.master,
        build=build,
        open=read,
    )


def maybe_base(config: Config, spec: ModelSpec, dtypes: Dtypes, root: nn.Module) -> Base | None:
    """The frozen weights of this run; None for a run without adapters. Collective."""
    if not config.lora.rank:
        return None
    from fsdp.checkpoint.pretrained import digest_of
    from fsdp.models.lora import base_names

    frozen = base_names(root)
    digests = {name: value for name, value in state_digest(root).items() if name in frozen}
    return base_of(config, spec, dtypes, digest_of(digests))
