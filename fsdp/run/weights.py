"""Initial weights by the flags: a state dict, a folder of transformers, or none.

Not here: how ranks read or receive them (fsdp/parallel/materialize.py).
"""

from __future__ import annotations

from fsdp.checkpoint.full_state import FullState, open_full_state
from fsdp.checkpoint.pretrained import PretrainedWeights
from fsdp.config import Config
from fsdp.models import ModelSpec

NONE = "none"
"""--model.weights none: random weights where --model.name has its own."""


def maybe_state(config: Config) -> FullState | None:
    """The state dict that --model.weights names."""
    return open_full_state(config.model.weights) if config.model.weights not in ("", NONE) else None


def reads_folder(config: Config, spec: ModelSpec) -> bool:
    """Whether the weights are those of the folder that --model.name names."""
    return spec.pretrained is not None and not config.model.weights


def open_folder(config: Config, spec: ModelSpec, *, quiet: bool = True) -> PretrainedWeights:
    assert spec.pretrained is not None
    return PretrainedWeights(spec.pretrained, config.run.seed, quiet)


def origin(config: Config, spec: ModelSpec) -> str:
    """The flag that identifies the weights."""
    if reads_folder(config, spec):
        return f"--model.name {spec.name}"
    weights = config.model.weights
    return f"--model.weights {weights}" if weights not in ("", NONE) else f"--run.seed {config.run.seed}"
