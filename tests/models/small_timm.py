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


def swin_v1() -> nn.Module:
    from timm.models.swin_transformer import SwinTransformer

    return SwinTransformer(
        img_size=PIXELS,
        patch_size=1,
        in_chans=1,
        num_classes=CLASSES,
        embed_dim=8,
        depths=(2, 2),
        num_heads=(2, 2),
        window_size=4,
        drop_path_rate=0.0,
    )


def cait() -> nn.Module:
    from timm.models.cait import Cait

    return Cait(
        img_size=PIXELS, patch_size=4, in_chans=1, num_classes=CLASSES, embed_dim=24, depth=2, num_heads=2
    )


def eva() -> nn.Module:
    from timm.models.eva import Eva

    return Eva(
        img_size=PIXELS, patch_size=4, in_chans=1, num_classes=CLASSES, embed_dim=24, depth=2, num_heads=2
    )


def pvt_v2() -> nn.Module:
    from timm.models.pvt_v2 import PyramidVisionTransformerV2

    return PyramidVisionTransformerV2(
        in_chans=1,
        num_classes=CLASSES,
        depths=(1, 1, 1, 1),
        embed_dims=(8, 8, 16, 16),
        num_heads=(1, 1, 2, 2),
        sr_ratios=(1, 1, 1, 1),
        mlp_ratios=(2, 2, 2, 2),
        drop_path_rate=0.0,
    )


MORE = ("swin_v1", "cait", "eva", "pvt_v2")
