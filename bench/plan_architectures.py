"""Twelve architectures for bench.plan_models, of 20 to 45 million parameters, and their data.

Plain modules and Datasets, as a person writes them; nothing here knows of shardrun.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

WORDS, LENGTH, IMAGE, SOUND = 8192, 64, 64, 512

# ---------------------------------------------------------------- data


class Made(Dataset[dict[str, Tensor]]):
    """64 equal samples."""

    def __init__(self, sample: dict[str, Tensor]) -> None:
        self.sample = sample

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.sample


def texts() -> Made:
    tokens = torch.zeros(LENGTH, dtype=torch.int64)
    return Made({"inputs": tokens, "targets": tokens})


def pairs() -> Made:
    """A source, the target before each position, and the target."""
    tokens = torch.zeros(LENGTH, dtype=torch.int64)
    return Made({"inputs": tokens, "before": tokens, "targets": tokens})


def pictures() -> Made:
    return Made({"inputs": torch.zeros(3, IMAGE, IMAGE), "targets": torch.tensor(0)})


def noisy() -> Made:
    """Noisy pictures, the step of the noise, and the noise."""
    picture = torch.zeros(3, IMAGE, IMAGE)
    return Made({"inputs": picture, "time": torch.tensor(0.5), "targets": picture})


def sounds() -> Made:
    tokens = torch.zeros(SOUND, dtype=torch.int64)
    return Made({"inputs": tokens, "targets": tokens})


# ---------------------------------------------------------------- texts


class Recurrent(nn.Module):
    """A language model of GRU or LSTM layers."""

    def __init__(self, kind: str, width: int = 1024, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.layers = {"gru": nn.GRU, "lstm": nn.LSTM}[kind](width, width, layers, batch_first=True)
        self.head = nn.Linear(width, WORDS, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.layers(self.embedding(inputs))[0]
        return self.head(found)


class Encoder(nn.Module):
    """A bidirectional encoder with a head for masked words."""

    def __init__(self, width: int = 512, layers: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.places = nn.Embedding(LENGTH, width)
        block = nn.TransformerEncoderLayer(width, 8, 4 * width, 0.0, F.gelu, batch_first=True)
        self.encoder = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, WORDS)

    def forward(self, inputs: Tensor) -> Tensor:
        places = torch.arange(inputs.shape[1], device=inputs.device)
        return self.head(self.encoder(self.embedding(inputs) + self.places(places)))


class Translator(nn.Module):
    """An encoder, and a decoder that reads it."""

    def __init__(self, width: int = 512, layers: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.core = nn.Transformer(width, 8, layers, layers, 4 * width, 0.0, batch_first=True)
        self.head = nn.Linear(width, WORDS, bias=False)

    def forward(self, inputs: Tensor, before: Tensor) -> Tensor:
        later = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=inputs.device).triu(1)
        source, target = self.embedding(inputs), self.embedding(before)
        return self.head(self.core(source, target, tgt_mask=later, tgt_is_causal=True))


class Experts(nn.Module):
    """Each expert takes the tokens that it scores highest (Zhou et al., "Expert Choice Routing", 2022)."""

    def __init__(self, width: int, experts: int = 8) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.empty(experts, width, 2 * width))
        self.down = nn.Parameter(torch.empty(experts, 2 * width, width))
        nn.init.normal_(self.up, std=0.02)
        nn.init.normal_(self.down, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        flat = self.norm(x).flatten(0, 1)
        scores = self.router(flat).softmax(-1)
        weights, chosen = scores.t().topk(2 * len(flat) // scores.shape[1])
        made = torch.bmm(F.gelu(torch.bmm(flat[chosen], self.up)), self.down) * weights[..., None]
        added = torch.zeros_like(flat).index_add(0, chosen.flatten(), made.flatten(0, 1))
        return x + added.view_as(x)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int = 8, *, causal: bool) -> None:
        super().__init__()
        self.norm, self.heads, self.causal = nn.LayerNorm(width), heads, causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return x + self.out(found.transpose(1, 2).flatten(2))


class Mixture(nn.Module):
    """A decoder with a mixture of experts in each block."""

    def __init__(self, width: int = 384, layers: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(Attention(width, causal=True), Experts(width)) for _ in range(layers)
        )
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.embedding(inputs)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


# ---------------------------------------------------------------- pictures and sounds


def resnet() -> nn.Module:
    from torchvision.models import resnet50

    made: nn.Module = resnet50(num_classes=10)
    return made


def convnext() -> nn.Module:
    from torchvision.models import convnext_tiny

    made: nn.Module = convnext_tiny(num_classes=10, stochastic_depth_prob=0.0)
    return made


class MixerBlock(nn.Module):
    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.across = nn.Sequential(
            nn.Linear(patches, 2 * patches), nn.GELU(), nn.Linear(2 * patches, patches)
        )
        self.within = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.across(self.first(x).transpose(1, 2)).transpose(1, 2)
        return x + self.within(self.second(x))


class Mixer(nn.Module):
    """Products across patches and within them, without attention (Tolstikhin et al., "MLP-Mixer", 2021)."""

    def __init__(self, width: int = 512, layers: int = 12, patch: int = 8) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.blocks = nn.ModuleList(MixerBlock((IMAGE // patch) ** 2, width) for _ in range(layers))
        self.head = nn.Linear(width, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.patches(inputs).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Residual(nn.Module):
    """Two convolutions, with the step of the noise between them."""

    def __init__(self, before: int, after: int, time: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(8, before), nn.SiLU(), nn.Conv2d(before, after, 3, padding=1))
        self.time = nn.Linear(time, after)
        self.second = nn.Sequential(nn.GroupNorm(8, after), nn.SiLU(), nn.Conv2d(after, after, 3, padding=1))
        self.skip = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        made = self.first(x) + self.time(time)[..., None, None]
        return self.skip(x) + self.second(made)


class Denoiser(nn.Module):
    """A diffusion model's U-Net: it predicts the noise, and returns the loss of that."""

    def __init__(self, width: int = 128, time: int = 256) -> None:
        super().__init__()
        sizes = [width, 2 * width, 3 * width, 4 * width]
        self.embed = nn.Sequential(nn.Linear(time, time), nn.SiLU(), nn.Linear(time, time))
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(Residual(a, b, time) for a, b in zip([width, *sizes], sizes, strict=False))
        self.middle, self.attention = Residual(sizes[-1], sizes[-1], time), Attention(sizes[-1], causal=False)
        self.up = nn.ModuleList(
            Residual(a + b, b, time) for a, b in zip([sizes[-1], *sizes[:0:-1]], sizes[::-1], strict=True)
        )
        self.leave = nn.Conv2d(width, 3, 3, padding=1)
        self.waves = time // 2

    def forward(self, inputs: Tensor, time: Tensor, targets: Tensor) -> Tensor:
        waves = torch.arange(self.waves, device=time.device, dtype=time.dtype) / self.waves
        angles = time[:, None] * torch.exp(-math.log(10_000) * waves)
        step = self.embed(torch.cat([angles.sin(), angles.cos()], -1))
        x, skips = self.enter(inputs), []
        for block in self.down:
            x = block(x, step)
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x, step)
        x = self.attention(x.flatten(2).transpose(1, 2)).transpose(1, 2).view_as(x)
        for block in self.up:
            x = F.interpolate(x, scale_factor=2.0)
            x = block(torch.cat([x, skips.pop()], 1), step)
        return F.mse_loss(self.leave(x).float(), targets.float())


class Gated(nn.Module):
    """A dilated causal convolution with a gate."""

    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.gate = nn.Conv1d(width, 2 * width, 2, dilation=dilation)
        self.out, self.dilation = nn.Conv1d(width, width, 1), dilation

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.gate(F.pad(x, (self.dilation, 0))).chunk(2, 1)
        return x + self.out(value.tanh() * gate.sigmoid())


class Wave(nn.Module):
    """Convolutions over sound in 256 levels (van den Oord et al., "WaveNet", 2016)."""

    def __init__(self, width: int = 384, layers: int = 20) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.layers = nn.ModuleList(Gated(width, 2 ** (n % 8)) for n in range(layers))
        self.head = nn.Linear(width, 256)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.embedding(inputs).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.transpose(1, 2))


# ---------------------------------------------------------------- all

MODELS: dict[str, Callable[[], nn.Module]] = {
    "encoder": Encoder, "encoder-decoder": Translator, "experts": Mixture,
    "GRU": lambda: Recurrent("gru"), "LSTM": lambda: Recurrent("lstm"), "ResNet-50": resnet,
    "ConvNeXt": convnext, "MLP-Mixer": Mixer, "diffusion U-Net": Denoiser, "WaveNet": Wave,
}  # fmt: skip
"""Beside the decoder and the ViT of this project."""
DATA = {
    "encoder-decoder": "pairs", "ResNet-50": "pictures", "ConvNeXt": "pictures", "MLP-Mixer": "pictures",
    "diffusion U-Net": "noisy", "WaveNet": "sounds",
}  # fmt: skip
"""A function of this module; `texts` for the others."""


def build(kind: str) -> nn.Module:
    """--model.name bench.plan_architectures:build --model.args.kind NAME"""
    return MODELS[kind]()
