"""Initial weights by the flags: a state dict, a folder of transformers, or none.

Not here: how ranks read or receive them (fsdp/parallel/materialize.py).
"""

from __future__ import annotations

from fsdp.base.errors import ConfigError
from fsdp.checkpoint.full_state import FullState, open_full_state
from fsdp.checkpoint.pretrained import PretrainedWeights
from fsdp.config import Config
from fsdp.models import ModelSpec
from fsdp.models.registry import SourceFolder

NONE = "none"
"""--model.weights none: random weights where --model.name has its own."""


def maybe_state(config: Config) -> FullState | None:
    """The state dict that --model.weights names."""
    return open_full_state(config.model.weights) if config.model.weights not in ("", NONE) else None


def reads_folder(config: Config, spec: ModelSpec) -> bool:
    """Whether the weights are those of a folder of transformers."""
    return spec.pretrained is not None and config.model.weights == ""


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
    from fsdp.models.llama_folder import from_sizes

    return from_sizes(spec.sizes, spec.build)


def open_folder(config: Config, spec: ModelSpec, *, quiet: bool = True) -> PretrainedWeights:
    assert spec.pretrained is not None
    return PretrainedWeights(spec.pretrained, config.run.seed, quiet)


def origin(config: Config, spec: ModelSpec) -> str:
    """The flag that identifies the weights."""
    if reads_folder(config, spec):
        assert spec.pretrained is not None
        return spec.pretrained.flag
    weights = config.model.weights
    return f"--model.weights {weights}" if weights not in ("", NONE) else f"--run.seed {config.run.seed}"
