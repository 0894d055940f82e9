"""vit is torchvision's VisionTransformer, and mlp the tutorial's; both from data alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchvision.models import VisionTransformer

from fsdp.config import ModelSection
from fsdp.models import build_real, resolve

DIGITS = {"num_classes": 10, "image_size": 28, "channels": 1}
SHAPES = {"small": (10, 2, 128, 128), "wide": (12, 8, 3840, 768)}


def plain(preset: str) -> Any:
    layers, heads, width, ffn = SHAPES[preset]
    model: Any = VisionTransformer(
        image_size=28,
        patch_size=7,
        num_layers=layers,
        num_heads=heads,
        hidden_dim=width,
        mlp_dim=ffn,
        num_classes=10,
    )
    model.conv_proj = nn.Conv2d(1, width, kernel_size=7, stride=7)
    return model


def vit(preset: str = "", facts: dict[str, int] = DIGITS, **args: int | float) -> Any:
    return resolve(ModelSection(name="vit", preset=preset, args=args), facts).build()


def test_vit_computes_what_torchvisions_does() -> None:
    theirs = plain("small")
    ours: Any = build_real(resolve(ModelSection(name="vit"), DIGITS), seed=0)
    nn.init.normal_(ours.heads.head.weight)  # it starts at zero, and would hide everything
    theirs.load_state_dict(ours.state_dict())
    images = torch.randn(3, 1, 28, 28)
    assert torch.equal(ours(images), theirs(images))
