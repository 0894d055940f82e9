"""Built-in models of pictures: torchvision's VisionTransformer with its parameter names, its units and its
initial values as data, and two linear layers with a ReLU between.

torchvision is imported only when its model is built.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import relu

from fsdp.base.torch_private import import_torchvision
from fsdp.models.init import Constant, Init, Normal, Uniform
from fsdp.models.registry import BuiltIn, check_multiple


@dataclass(frozen=True, kw_only=True)
class VitSizes:
    image_size: int = 28
    channels: int = 1
    num_classes: int = 10
    patch_size: int = 7
    layers: int = 10
    heads: int = 2
    width: int = 128
    ffn: int = 128
    dropout: float = 0.0
    attention_dropout: float = 0.0

    def __post_init__(self) -> None:
        check_multiple(self, "image_size", "patch_size")
        check_multiple(self, "width", "heads")


def build(sizes: VitSizes) -> nn.Module:
    return _vit_class()(sizes)


@functools.cache
def _vit_class() -> Callable[[VitSizes], nn.Module]:
    """Creates the class on first use: its base class is torchvision's."""
    base: Any = import_torchvision().models.VisionTransformer

    class Vit(base):  # type: ignore[misc]
        """images [batch, channels, size, size] → logits [batch, num_classes]."""

        def __init__(self, sizes: VitSizes) -> None:
            super().__init__(
                image_size=sizes.image_size,
                patch_size=sizes.patch_size,
                num_layers=sizes.layers,
                num_heads=sizes.heads,
                hidden_dim=sizes.width,
                mlp_dim=sizes.ffn,
                dropout=sizes.dropout,
                attention_dropout=sizes.attention_dropout,
                num_classes=sizes.num_classes,
            )
            self.sizes = sizes
            if sizes.channels != 3:
                self.conv_proj = _stem(sizes)

        def units(self) -> list[nn.Module | list[nn.Module]]:
            """Stem, class token, positions and head are small: they stay in the root's group."""
            return list(self.encoder.layers)

        def param_inits(self) -> dict[str, Init]:
            return {name: _init_of(name, sizes=self.sizes) for name, _ in self.named_parameters()}

    return Vit


def _stem(sizes: VitSizes) -> nn.Conv2d:
    """Replaces torchvision's first layer for a number of channels other than three, drawn by its rule."""
    stem = nn.Conv2d(sizes.channels, sizes.width, kernel_size=sizes.patch_size, stride=sizes.patch_size)
    nn.init.trunc_normal_(stem.weight, std=_stem_std(sizes))
    assert stem.bias is not None
    nn.init.zeros_(stem.bias)
    return stem


def _stem_std(sizes: VitSizes) -> float:
    return math.sqrt(1 / (sizes.channels * sizes.patch_size**2))


def _init_of(name: str, *, sizes: VitSizes) -> Init:
    """torchvision 0.28's constructor as data, without its truncation at ±2, more than eight deviations."""
    width, ffn = sizes.width, sizes.ffn
    if name.endswith("in_proj_weight"):
        return Uniform(math.sqrt(6 / (width + 3 * width)))
    if name.endswith("out_proj.weight"):
        return Uniform(1 / math.sqrt(width))
    if ".mlp." in name:
        return Uniform(math.sqrt(6 / (width + ffn))) if name.endswith("weight") else Normal(1e-6)
    if name == "conv_proj.weight":
        return Normal(_stem_std(sizes))
    if name == "encoder.pos_embedding":
        return Normal(0.02)
    is_norm = ".ln" in name
    return Constant(1.0 if is_norm and name.endswith("weight") else 0.0)


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "small": {"patch_size": 7, "layers": 10, "heads": 2, "width": 128, "ffn": 128},
    "wide": {"patch_size": 7, "layers": 12, "heads": 8, "width": 3840, "ffn": 768},
    "b16": {
        **{"image_size": 224, "channels": 3, "num_classes": 1000},
        **{"patch_size": 16, "layers": 12, "heads": 12, "width": 768, "ffn": 3072},
    },
}


@dataclass(frozen=True, kw_only=True)
class MlpSizes:
    in_features: int = 1024
    hidden: int = 1024
    classes: int = 10


class Mlp(nn.Module):
    """inputs [batch, …] → logits [batch, classes]."""

    def __init__(self, sizes: MlpSizes) -> None:
        super().__init__()
        self.hidden = nn.Linear(sizes.in_features, sizes.hidden)
        self.output = nn.Linear(sizes.hidden, sizes.classes)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.output(relu(self.hidden(inputs.flatten(1))))

    def param_inits(self) -> dict[str, Init]:
        """As nn.Linear: weight and bias within ±1/√inputs."""
        layers = {"hidden": self.hidden, "output": self.output}
        return {
            f"{name}.{part}": Uniform(1 / math.sqrt(layer.in_features))
            for name, layer in layers.items()
            for part in ("weight", "bias")
        }


BUILT_IN = {
    "vit": BuiltIn(
        sizes=VitSizes,
        presets=PRESETS,
        reads="num_classes",
        facts={name: name for name in ("image_size", "channels", "num_classes")},
        exact=("image_size", "channels"),
        build=build,
    ),
    "mlp": BuiltIn(
        sizes=MlpSizes,
        presets={"base": {}},
        reads="num_classes",
        facts={"in_features": "pixels", "classes": "num_classes"},
        exact=("in_features",),
        build=Mlp,
    ),
}
