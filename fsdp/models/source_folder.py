"""What a folder of save_pretrained must give to be read by rows, and to be written again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fsdp.base.errors import ConfigError
from fsdp.models.hf_names import NamePlan, Shape

DTYPE_FIELDS = ("dtype", "torch_dtype")
"""The first one that is set counts, as in transformers."""


def named_dtype(file: Path, fields: Mapping[str, Any]) -> torch.dtype | None:
    """The dtype that a config.json names, as `bfloat16` or, as older exports do, `torch.bfloat16`."""
    field = next((name for name in DTYPE_FIELDS if fields.get(name) is not None), None)
    if field is None:
        return None
    found = getattr(torch, str(fields[field]).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ConfigError(
            f"{file} has {field} {fields[field]!a}, which is no floating-point dtype of torch.",
            f'"{field}": "bfloat16" in it, or the dtype of its weights',
        )
    return found


@dataclass(frozen=True)
class FolderHints:
    """The HINT of each error of a folder."""

    no_weights: str
    missing: str
    shape: str
    tied: str
    untied: str


class SourceFolder(Protocol):
    @property
    def flag(self) -> str:
        """The flag that names the folder, with its value."""
        ...

    @property
    def weights(self) -> str:
        """The value of --model.weights with which the weights are those of the folder."""
        ...

    @property
    def folder(self) -> Path | None:
        """None for a model that is written in transformers' format and started from none."""
        ...

    @property
    def class_name(self) -> str: ...

    @property
    def new_head(self) -> bool: ...

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype that config.json names."""
        ...

    @property
    def hints(self) -> FolderHints: ...

    def build(self) -> nn.Module: ...

    def plan_names(self, model: Any, files: Mapping[str, Shape]) -> NamePlan:
        """Where each tensor of a meta model is in the files."""
        ...

    def draw_missing(self, name: str, seed: int) -> Tensor:
        """A tensor of a new head."""
        ...

    def saved_pieces(self, model: Any) -> dict[str, dict[str, Tensor]]:
        """Model's name → the tensors that save_pretrained makes of it, as meta tensors by name."""
        ...

    def reverted(self, model: Any, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """One tensor of the model as save_pretrained names and splits it."""
        ...

    def saved_layer(self, name: str) -> str:
        """A module's name in the class that from_pretrained builds."""
        ...

    def config_json(self, dtype: torch.dtype) -> str: ...
