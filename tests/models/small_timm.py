"""Small models of timm, as --model.name takes them; the pictures are those of small_hf.py."""

from __future__ import annotations

from torch import nn

CLASSES, PIXELS = 5, 8


def vision_transformer() -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(
        img_size=PIXELS, patch_size=4, in_chans=1, num_classes=CLASSES, embed_dim=24, depth=2, num_heads=2
    )


def convnext() -> nn.Module:
    from timm.models.convnext import ConvNeXt

    return ConvNeXt(in_chans=1, num_classes=CLASSES, depths=(1, 1, 2, 1), dims=(8, 8, 16, 16), patch_size=1)


def mixer() -> nn.Module:
    from timm.models.mlp_mixer import MlpMixer

    return MlpMixer(
        num_classes=CLASSES, img_size=PIXELS, in_chans=1, patch_size=4, num_blocks=2, embed_dim=24
    )
