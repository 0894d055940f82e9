"""A decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU, embeddings tied or not.

It runs alone on one device. Positions are plain, or scaled for longer sequences as linear, llama3 or yarn, by
the formulas of the publications in float64. Rotary tables are non-persistent buffers: `init_buffers` computes
them, and they are in no checkpoint. Half-split rotation and the order of the projections are those of Hugging
Face's Llama. Not here: the loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp.base.errors import ConfigError
from fsdp.base.torch_private.core import ConvertedModule
from fsdp.models.factory import BuiltIn, Fact, check_multiple, check_ranges, size
from fsdp.models.init import Constant, Init, Normal, fill_from_global
from fsdp.models.packed import Documents, documents_of
from fsdp.models.units import LARGE_LAYER

SCALINGS = ("linear", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True)
class TransformerSizes:
    """kv_heads 0 is heads; ffn 0 is ⅔ of 4·width, rounded up to a multiple of 64; head_dim 0 is width over
    heads.
    """

    head_dim: int = size(0, low=0)
    rope_theta: float = size(10_000.0)
    rope_scaling: str = ""
    rope_factor: float = size(1.0)
    rope_original_len: int = size(0, low=0)
    """Longest sequence before scaling."""
    rope_low_freq: float = size(1.0, low=0)
    rope_high_freq: float = size(4.0, low=0)
    rope_beta_fast: float = size(32.0)
    rope_beta_slow: float = size(1.0, low=0)
    rope_attention: float = size(0.0, low=0)
    """yarn's factor of cosines and sines; 0: from rope_factor."""
    vocab_size: int = size(256)
    width: int = size(128)
    layers: int = size(2)
    heads: int = size(4)
    kv_heads: int = size(0, low=0)
    ffn: int = size(0, low=0)
    max_seq_len: int = size(1024)
    tied: bool = False
    dropout: float = size(0.0, low=0, below=1)
    norm_eps: float = size(1e-5, low=0)
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    ffn_bias: bool = False

    def __post_init__(self) -> None:
        check_ranges(self)
        _check_scaling(self.rope_scaling, self.rope_original_len)
        if not self.head_dim:
            check_multiple(self, "width", "heads")
        object.__setattr__(self, "head_dim", self.head_dim or self.width // self.heads)
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "ffn", self.ffn or 64 * math.ceil(self.width * 8 / 3 / 64))
        check_multiple(self, "heads", "kv_heads")
        if self.head_dim % 2:
            by_width = self.head_dim == self.width // self.heads
            raise ConfigError(
                f"heads of --model.args.head_dim {self.head_dim}, by default width {self.width} over heads "
                f"{self.heads}, are odd: rotary positions turn pairs.",
                f"--model.args.width {self.width + self.heads}"
                if by_width
                else f"--model.args.head_dim {self.head_dim + 1}",
            )


# ---------------------------------------------------------------- rotary positions


def _check_scaling(scaling: str, original_len: int) -> None:
    if scaling not in ("", *SCALINGS):
        raise ConfigError(
            f"--model.args.rope_scaling {scaling} is not one of {', '.join(SCALINGS)}.",
            "--model.args.rope_scaling llama3",
        )
    if scaling in ("llama3", "yarn") and not original_len:
        raise ConfigError(
            f"--model.args.rope_scaling {scaling} needs the sequence length before scaling.",
            "--model.args.rope_original_len 8192",
        )


def frequencies(sizes: TransformerSizes) -> tuple[Tensor, float]:
    """The angle a position for each pair of a head, and the factor of cosines and sines."""
    half = sizes.head_dim // 2
    plain = sizes.rope_theta ** -(torch.arange(half, dtype=torch.float64, device="cpu") / half)
    if sizes.rope_scaling == "linear":
        return plain / sizes.rope_factor, 1.0
    if sizes.rope_scaling == "llama3":
        return _llama3(plain, sizes), 1.0
    if sizes.rope_scaling == "yarn":
        return _yarn(plain, sizes), sizes.rope_attention or _yarn_attention(sizes.rope_factor)
    return plain, 1.0


def _yarn_attention(factor: float) -> float:
    return 0.1 * math.log(factor) + 1 if factor > 1 else 1.0


def _llama3(plain: Tensor, sizes: TransformerSizes) -> Tensor:
    """Pairs that turn often in the original length stay, those that turn rarely are slowed by the factor."""
    turns = sizes.rope_original_len * plain / (2 * math.pi)
    kept = (turns - sizes.rope_low_freq) / (sizes.rope_high_freq - sizes.rope_low_freq)
    return _mixed(plain, sizes.rope_factor, kept.clamp(0, 1))


def _yarn(plain: Tensor, sizes: TransformerSizes) -> Tensor:
    """As llama3, with a ramp over the index of the pair."""

    def pair_with(turns: float) -> float:
        ratio = sizes.rope_original_len / (2 * math.pi * turns)
        return sizes.head_dim * math.log(ratio) / (2 * math.log(sizes.rope_theta))

    first = max(math.floor(pair_with(sizes.rope_beta_fast)), 0)
    last = min(math.ceil(pair_with(sizes.rope_beta_slow)), sizes.head_dim - 1)
    ramp = (torch.arange(len(plain), dtype=torch.float64) - first) / (last - first or 1e-3)
    return _mixed(plain, sizes.rope_factor, 1 - ramp.clamp(0, 1))


def _mixed(plain: Tensor, factor: float, kept: Tensor) -> Tensor:
    return plain / factor * (1 - kept) + plain * kept


class Rotary:
    """The rotary tables of one forward. Not a tuple or dataclass: FSDP's mixed precision casts the tensors of
    those in a block's arguments, and in bf16 the slow pairs of neighbouring positions would be the same.
    """

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self.cos, self.sin = cos, sin

    def turn(self, x: Tensor) -> Tensor:
        """Rotates x[…, position, head_dim]; computes in float32, or in x's dtype if that is finer."""
        first, second = x.chunk(2, dim=-1)
        turned = (first * self.cos - second * self.sin, second * self.cos + first * self.sin)
        return torch.cat(turned, dim=-1).to(x.dtype)


# ---------------------------------------------------------------- modules


class Attention(nn.Module):
    def __init__(self, sizes: TransformerSizes) -> None:
        super().__init__()
        self.heads, self.kv_heads = sizes.heads, sizes.kv_heads
        q_width, kv_width = sizes.head_dim * sizes.heads, sizes.head_dim * sizes.kv_heads
        self.q = nn.Linear(sizes.width, q_width, bias=sizes.qkv_bias)
        self.k = nn.Linear(sizes.width, kv_width, bias=sizes.qkv_bias)
        self.v = nn.Linear(sizes.width, kv_width, bias=sizes.qkv_bias)
        self.o = nn.Linear(q_width, sizes.width, bias=sizes.out_bias)
        self.q_norm, self.k_norm = _head_norm(sizes), _head_norm(sizes)

    def forward(self, x: Tensor, rotary: Rotary, documents: Documents | None = None) -> Tensor:
        q = rotary.turn(self.q_norm(self._split(self.q(x), self.heads)))
        k = rotary.turn(self.k_norm(self._split(self.k(x), self.kv_heads)))
        v = self._split(self.v(x), self.kv_heads)
        if documents is not None:
            y = documents.attend(q, k, v)
        else:
            y = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads
            )
        return self.o(y.transpose(1, 2).flatten(2))

    @staticmethod
    def _split(x: Tensor, heads: int) -> Tensor:
        return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _head_norm(sizes: TransformerSizes) -> nn.Module:
    return nn.RMSNorm(sizes.head_dim, eps=sizes.norm_eps) if sizes.qk_norm else nn.Identity()


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, sizes: TransformerSizes) -> None:
        super().__init__()
        self.gate = nn.Linear(sizes.width, sizes.ffn, bias=sizes.ffn_bias)
        self.up = nn.Linear(sizes.width, sizes.ffn, bias=sizes.ffn_bias)
        self.down = nn.Linear(sizes.ffn, sizes.width, bias=sizes.ffn_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, sizes: TransformerSizes) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(sizes.width, eps=sizes.norm_eps)
        self.attention = Attention(sizes)
        self.ffn_norm = nn.RMSNorm(sizes.width, eps=sizes.norm_eps)
        self.ffn = FeedForward(sizes)
        self.dropout = nn.Dropout(sizes.dropout) if sizes.dropout else nn.Identity()

    def forward(self, x: Tensor, rotary: Rotary, documents: Documents | None = None) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), rotary, documents))
        return x + self.dropout(self.ffn(self.ffn_norm(x)))


class Transformer(ConvertedModule):
    """tokens [batch, length] → logits [batch, length, vocab_size].

    With position_ids [batch, length] a row holds several documents: each begins where positions start again.
    """

    rotary_cos: Tensor
    rotary_sin: Tensor

    def __init__(self, sizes: TransformerSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embedding = nn.Embedding(sizes.vocab_size, sizes.width)
        self.dropout = nn.Dropout(sizes.dropout) if sizes.dropout else nn.Identity()
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width, eps=sizes.norm_eps)
        self.head = nn.Linear(sizes.width, sizes.vocab_size, bias=False)
        if sizes.tied:
            self.head.weight = self.embedding.weight
        for name in ("rotary_cos", "rotary_sin"):
            table = torch.empty(sizes.max_seq_len, sizes.head_dim // 2)
            self.register_buffer(name, table, persistent=False)
        if not self.embedding.weight.is_meta:
            self._start_alone()

    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        length = tokens.shape[1]
        if length > self.sizes.max_seq_len:
            raise ConfigError(
                f"a sequence of {length} tokens is longer than --model.args.max_seq_len "
                f"{self.sizes.max_seq_len}.",
                f"--model.args.max_seq_len {length}",
            )
        rotary = self._rotary(length, position_ids)
        x = self.dropout(self.embedding(tokens))
        head_dim = 2 * self.rotary_cos.shape[1]
        documents = None if position_ids is None else documents_of(position_ids, x, head_dim)
        for block in self.blocks:
            x = block(x, rotary, documents)
        return self.head(self.norm(x))

    def _rotary(self, length: int, position_ids: Tensor | None) -> Rotary:
        if position_ids is None:
            return Rotary(self.rotary_cos[:length], self.rotary_sin[:length])
        cos, sin = (table[position_ids].unsqueeze(1) for table in (self.rotary_cos, self.rotary_sin))
        return Rotary(cos, sin)

    def units(self) -> list[nn.Module | list[nn.Module]]:
        """A tied embedding and head are one parameter, in the root's group with the norm. So are small ones:
        a separate collective would cost more than their memory.
        """
        if self.sizes.tied or self.sizes.vocab_size * self.sizes.width < LARGE_LAYER:
            return [*self.blocks]
        return [self.embedding, *self.blocks, [self.norm, self.head]]

    def param_inits(self) -> dict[str, Init]:
        """0.02; projections into the residual stream divide it by the root of their number."""
        residual = Normal(0.02 / math.sqrt(2 * self.sizes.layers))
        inits: dict[str, Init] = {}
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                inits[name] = Constant(0.0 if name.endswith(".bias") else 1.0)
            else:
                inits[name] = (
                    residual if name.endswith(("attention.o.weight", "ffn.down.weight")) else Normal(0.02)
                )
        return inits

    def init_buffers(self, device: torch.device | str) -> None:
        """Computes angles in float64 on the host, tables in float32: the same bits on every device and in
        every precision.
        """
        turns, factor = frequencies(self.sizes)
        angles = torch.outer(torch.arange(self.sizes.max_seq_len, dtype=torch.float64, device="cpu"), turns)
        self.rotary_cos = (angles.cos() * factor).float().to(device)
        self.rotary_sin = (angles.sin() * factor).float().to(device)

    def _start_alone(self) -> None:
        inits = self.param_inits()
        for name, parameter in self.named_parameters():
            fill_from_global(parameter, inits[name])
        self.init_buffers(self.embedding.weight.device)

    def after_conversion(self) -> None:
        # model.to(torch.bfloat16) casts buffers too, and rounded tables are wrong.
        if self.rotary_cos.element_size() < 4:
            self.init_buffers(self.rotary_cos.device)


_LLAMA_8B = {
    "vocab_size": 128_256, "width": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "ffn": 14_336,
    "max_seq_len": 8192, "rope_theta": 500_000.0,
}  # fmt: skip
_LLAMA_70B = {**_LLAMA_8B, "width": 8192, "layers": 80, "heads": 64, "ffn": 28_672}

_LLAMA_2 = {"vocab_size": 32_000, "max_seq_len": 4096}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "toy": {"width": 128, "layers": 2, "heads": 4, "tied": True},
    "chapter": {"width": 512, "layers": 10, "heads": 8},
    # GPT-2 small's sizes; 50,257 tokens rounded up to a multiple of 128
    "124m": {
        **{"vocab_size": 50_304, "width": 768, "layers": 12, "heads": 12},
        **{"max_seq_len": 1024, "tied": True},
    },
    # Llama 3.2's 1B, without its scaled positions
    "1b": {**_LLAMA_8B, "width": 2048, "layers": 16, "ffn": 8192, "tied": True},
    # Llama 2's 7B and 13B: each head has keys and values of its own
    "7b": {**_LLAMA_2, "width": 4096, "layers": 32, "heads": 32, "ffn": 11_008},
    "13b": {**_LLAMA_2, "width": 5120, "layers": 40, "heads": 40, "ffn": 13_824},
    "8b": _LLAMA_8B,
    "llama-8b": _LLAMA_8B,
    "70b": _LLAMA_70B,
    "llama-70b": _LLAMA_70B,
}

BUILT_IN = BuiltIn(
    sizes=TransformerSizes,
    presets=PRESETS,
    reads="vocab_size",
    facts={
        "vocab_size": Fact("vocab_size", "{} different tokens"),
        "max_seq_len": Fact("seq_len", "{} tokens a sample"),
    },
    build=Transformer,
)
