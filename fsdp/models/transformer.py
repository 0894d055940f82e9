"""A decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU, embeddings tied or not.

It runs alone on one device. Rotary tables are non-persistent buffers: `init_buffers` computes them, and they
are in no checkpoint. Half-split rotation and the order of the projections are those of Hugging Face's Llama,
in whose format `--checkpoint.export_format hf` writes it. Not here: the loss; reading such a folder, which
`--model.name hf:FOLDER` does.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fsdp.base.torch_private import ConvertedModule, module_hooks
from fsdp.models.attention import Rows
from fsdp.models.init import Constant, Init, Normal, draw_parameters
from fsdp.models.registry import BuiltIn, check_multiple
from fsdp.models.units import LARGE_LAYER


@dataclass(frozen=True, kw_only=True)
class TransformerSizes:
    """kv_heads 0 is heads; ffn 0 is ⅔ of 4·width, rounded up to a multiple of 64; head_dim 0 is width over
    heads.
    """

    head_dim: int = 0
    rope_theta: float = 10_000.0
    vocab_size: int = 256
    width: int = 128
    layers: int = 2
    heads: int = 4
    kv_heads: int = 0
    ffn: int = 0
    max_seq_len: int = 1024
    tied: bool = False
    dropout: float = 0.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        if not self.head_dim:
            check_multiple(self, "width", "heads")
        object.__setattr__(self, "head_dim", self.head_dim or self.width // self.heads)
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "ffn", self.ffn or 64 * math.ceil(self.width * 8 / 3 / 64))
        check_multiple(self, "heads", "kv_heads")


# ---------------------------------------------------------------- modules


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


def joins(x: Tensor, *layers: nn.Linear) -> bool:
    """Whether the layers' products of x are one. It reads x once, and its backward writes x's gradient once;
    joining the weights for it costs less if x has twice as many tokens as they have rows. A layer that is
    wrapped, hooked or frozen keeps its own product, and so does each where no gradient is asked for: there is
    nothing to join in backward, and torch 2.11 cannot compile the function.
    """
    if not x.is_cuda or not torch.is_grad_enabled() or torch.is_autocast_enabled("cuda"):
        return False
    rows = sum(layer.out_features for layer in layers)
    return x.numel() >= 2 * rows * x.shape[-1] and all(
        type(layer) is nn.Linear and layer.weight.requires_grad and not module_hooks(layer)
        for layer in layers
    )


class JoinedProducts(torch.autograd.Function):
    """x times each weight, in backward by one product for x and one for the weights, in forward by one for
    all but the last `apart`: a part that is kept for backward keeps all that was made with it.

    Backward joins the weights in another order than forward: of two equal joins the compiler would make one
    and keep it between them.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, apart: int, *weights: Tensor) -> Any:  # type: ignore[override]
        ctx.save_for_backward(x, *weights)
        joined = weights[: len(weights) - apart]
        parts = F.linear(x, torch.cat(joined)).split([len(weight) for weight in joined], -1)
        return *parts, *(F.linear(x, weight) for weight in weights[len(joined) :])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # type: ignore[override]
        x, *weights = ctx.saved_tensors
        weights.reverse()
        joined = torch.cat(gradients[::-1], -1)
        of_weights = (joined.flatten(0, -2).t() @ x.flatten(0, -2)).split([len(w) for w in weights])
        return joined @ torch.cat(weights), None, *of_weights[::-1]


def products(x: Tensor, *layers: nn.Linear, apart: int = 0) -> tuple[Tensor, ...]:
    if joins(x, *layers):
        return JoinedProducts.apply(x, apart, *(layer.weight for layer in layers))
    return tuple(layer(x) for layer in layers)


class Attention(nn.Module):
    def __init__(self, sizes: TransformerSizes) -> None:
        super().__init__()
        self.head_dim = sizes.head_dim
        q_width, kv_width = sizes.head_dim * sizes.heads, sizes.head_dim * sizes.kv_heads
        self.q = nn.Linear(sizes.width, q_width, bias=False)
        self.k = nn.Linear(sizes.width, kv_width, bias=False)
        self.v = nn.Linear(sizes.width, kv_width, bias=False)
        self.o = nn.Linear(q_width, sizes.width, bias=False)

    def forward(self, x: Tensor, rotary: Rotary, rows: Rows | None = None) -> Tensor:
        q, k, v = products(x, self.q, self.k, self.v, apart=1)  # v is kept, q and k are rotated first
        q, k, v = rotary.turn(self._split(q)), rotary.turn(self._split(k)), self._split(v)
        if rows is not None:
            y = rows.attend(q, k, v)
        else:
            grouped = q.shape[1] != k.shape[1]
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return self.o(y.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        """The heads that this rank has."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, sizes: TransformerSizes) -> None:
        super().__init__()
        self.gate = nn.Linear(sizes.width, sizes.ffn, bias=False)
        self.up = nn.Linear(sizes.width, sizes.ffn, bias=False)
        self.down = nn.Linear(sizes.ffn, sizes.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = products(x, self.gate, self.up)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, sizes: TransformerSizes) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(sizes.width, eps=sizes.norm_eps)
        self.attention = Attention(sizes)
        self.ffn_norm = nn.RMSNorm(sizes.width, eps=sizes.norm_eps)
        self.ffn = FeedForward(sizes)
        self.dropout = nn.Dropout(sizes.dropout) if sizes.dropout else nn.Identity()

    def forward(self, x: Tensor, rotary: Rotary, rows: Rows | None = None) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), rotary, rows))
        return x + self.dropout(self.ffn(self.ffn_norm(x)))


class TiedLookup(torch.autograd.Function):
    """An embedding whose weight is the head's too.

    Its gradient has a row for each token of a micro-batch, added to the head's gradient in place. Without it
    autograd fills a second gradient of the weight's size with zeros and adds the two into a third. The bits
    are the same: repetitions of a token are summed first, by torch's own kernel.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, weight: Tensor, tokens: Tensor, embedding: nn.Embedding
    ) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.weight = weight
        return embedding(tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        weight, tokens = ctx.weight, ctx.saved_tensors[0].reshape(-1)
        positions = torch.arange(len(tokens), device=tokens.device)
        # One of a token's positions for all of them. unique() would wait for the device.
        slots = tokens.new_empty(len(weight)).scatter_(0, tokens, positions)[tokens]
        by_token = gradient.reshape(len(tokens), -1).to(weight.dtype)
        rows = torch.ops.aten.embedding_dense_backward(by_token, slots, len(tokens), -1, False)

        def add(total: Tensor) -> None:
            hook.remove()
            total.index_add_(0, tokens, rows)  # a token's rows are zero, but that of its slot

        # Called when all gradients of the weight, the head's among them, are summed.
        hook = weight.register_hook(add)
        return None, None, None


SCATTERED = 4
"""Tokens of the vocabulary for each of a micro-batch from which TiedLookup moves fewer bytes."""


class Transformer(ConvertedModule):
    """tokens [batch, length] → logits [batch, length, vocab_size].

    With position_ids [batch, length] a row holds several documents: each begins where positions start again.
    `rows`, if given, is what knows them.
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
            draw_parameters(self, int(torch.randint(1 << 31, ())))
            self.init_buffers(self.embedding.weight.device)

    def forward(self, tokens: Tensor, position_ids: Tensor | None = None, rows: Rows | None = None) -> Tensor:
        cos, sin = self.rotary_cos, self.rotary_sin
        if position_ids is None:
            rotary = Rotary(cos[: tokens.shape[1]], sin[: tokens.shape[1]])
        else:
            rotary = Rotary(cos[position_ids].unsqueeze(1), sin[position_ids].unsqueeze(1))
        weight, embedding = self.head.weight, self.embedding
        tied = weight is embedding.weight and not hasattr(weight, "placements")  # not divided
        scattered = tied and len(weight) >= SCATTERED * tokens.numel()
        if scattered and not torch.compiler.is_compiling():
            x = self.dropout(TiedLookup.apply(weight, tokens, embedding))
        else:
            x = self.dropout(embedding(tokens))
        if rows is None and position_ids is not None:
            rows = Rows(x.dtype, (self.sizes.head_dim,)).read(position_ids)
        for block in self.blocks:
            x = block(x, rotary, rows)
        return self.head(self.norm(x))

    def units(self) -> list[nn.Module | list[nn.Module]]:
        """A tied embedding and head are one parameter, in the root's group with the norm. So are small ones:
        a separate collective would cost more than their memory.
        """
        if self.sizes.tied or self.sizes.vocab_size * self.sizes.width < LARGE_LAYER:
            return [*self.blocks]
        return [self.embedding, *self.blocks, [self.norm, self.head]]

    def tensor_plan(self) -> dict[str, str]:
        """How tensor ranks divide the layers, in the words of transformers' plans."""
        return TENSOR_PLAN

    def param_inits(self) -> dict[str, Init]:
        """0.02; projections into the residual stream divide it by the root of their number."""
        residual = Normal(0.02 / math.sqrt(2 * self.sizes.layers))

        def init_of(name: str, dims: int) -> Init:
            ends_residual = name.endswith(("attention.o.weight", "ffn.down.weight"))
            return Constant(1.0) if dims == 1 else residual if ends_residual else Normal(0.02)

        return {name: init_of(name, parameter.dim()) for name, parameter in self.named_parameters()}

    def init_buffers(self, device: torch.device | str) -> None:
        """Computes angles in float64 on the host, tables in float32: the same bits on every device and in
        every precision.
        """
        half = self.sizes.head_dim // 2
        turns = self.sizes.rope_theta ** -(torch.arange(half, dtype=torch.float64, device="cpu") / half)
        angles = torch.outer(torch.arange(self.sizes.max_seq_len, dtype=torch.float64, device="cpu"), turns)
        self.rotary_cos, self.rotary_sin = angles.cos().float().to(device), angles.sin().float().to(device)

    def after_conversion(self) -> None:
        # model.to(torch.bfloat16) casts buffers too, and rounded tables are wrong.
        if self.rotary_cos.element_size() < 4:
            self.init_buffers(self.rotary_cos.device)


TENSOR_PLAN = {
    "embedding": "embedding_rowwise",
    **{f"blocks.*.{layer}": "colwise" for layer in ("attention.q", "attention.k", "attention.v")},
    **{f"blocks.*.{layer}": "colwise" for layer in ("ffn.gate", "ffn.up")},
    **{f"blocks.*.{layer}": "rowwise" for layer in ("attention.o", "ffn.down")},
    "head": "colwise_gather_output",
}

_LLAMA_8B = {
    **{"vocab_size": 128_256, "width": 4096, "layers": 32, "heads": 32, "kv_heads": 8},
    **{"ffn": 14_336, "max_seq_len": 8192, "rope_theta": 500_000.0},
}
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
    **dict.fromkeys(("8b", "llama-8b"), _LLAMA_8B),
    **dict.fromkeys(("70b", "llama-70b"), _LLAMA_70B),
}

BUILT_IN = {
    "transformer": BuiltIn(
        sizes=TransformerSizes,
        presets=PRESETS,
        reads="vocab_size",
        facts={"vocab_size": "vocab_size", "max_seq_len": "seq_len"},
        build=Transformer,
    )
}


# ---------------------------------------------------------------- in transformers' format

SIZES = {
    **{"vocab_size": "vocab_size", "width": "hidden_size", "layers": "num_hidden_layers"},
    **{"heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "ffn": "intermediate_size"},
    **{"head_dim": "head_dim", "norm_eps": "rms_norm_eps", "tied": "tie_word_embeddings"},
}
"""Size of the transformer → field of config.json."""
_BLOCK = {
    **{"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"},
    **{f"attention.{part}": f"self_attn.{part}_proj" for part in "qkvo"},
    **{f"ffn.{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}
_OUTSIDE = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}


@dataclass(frozen=True, kw_only=True)
class LlamaFormat:
    """A transformer of these sizes as a folder of save_pretrained."""

    fields: Mapping[str, Any]
    build: Callable[[], nn.Module]
    folder: None = None
    tokenizer: str = ""
    chat_template: str = ""
    dtype: torch.dtype | None = None
    class_name: str = "LlamaForCausalLM"

    def saved_pieces(self, model: Any) -> dict[str, dict[str, Tensor]]:
        return {name: self.reverted(model, name, tensor) for name, tensor in model.named_parameters()}

    def reverted(self, model: Any, name: str, tensor: Tensor) -> dict[str, Tensor]:
        layer, _, kind = name.rpartition(".")
        return {f"{self.saved_layer(layer)}.{kind}": tensor}

    def saved_layer(self, name: str) -> str:
        if name in _OUTSIDE:
            return _OUTSIDE[name]
        _, number, part = name.split(".", 2)
        return f"model.layers.{number}.{_BLOCK[part]}"

    def config_json(self, dtype: torch.dtype) -> str:
        named = {"architectures": [self.class_name], "dtype": str(dtype).removeprefix("torch.")}
        return json.dumps({**self.fields, **named}, indent=2, sort_keys=True) + "\n"


def from_sizes(sizes: Mapping[str, Any], build: Callable[[], nn.Module]) -> LlamaFormat:
    """The format of a transformer with these sizes."""
    rope = {"rope_type": "default", "rope_theta": sizes["rope_theta"]}
    fields = {
        "model_type": "llama", "hidden_act": "silu",
        **{field: sizes[name] for name, field in SIZES.items()},
        "max_position_embeddings": sizes["max_seq_len"], "rope_parameters": rope,
        # The older names of the same, which other programs read
        "rope_theta": rope["rope_theta"], "rope_scaling": None,
        "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    return LlamaFormat(fields=fields, build=build)
