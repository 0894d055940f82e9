"""Small models of transformers for the axes, as --model.name takes them: sizes that four ranks divide, and
float64 where transformers computes in float32 (norms, routers), so that rounding hides no difference.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from tests.models.small_hf import Texts

WORDS = 32
SIZES: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 40, "use_cache": False,
}  # fmt: skip
MOE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
MORE: dict[str, dict[str, Any]] = {
    "Llama": {"tie_word_embeddings": True},
    "Qwen3": {},
    "Mistral": {"sliding_window": 4},
    "Gemma3": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {**MOE, "num_experts": 4},
    "DeepseekV3": {
        **MOE, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
        "num_key_value_heads": 4, "head_dim": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4, "v_head_dim": 8,
    },
}  # fmt: skip


_narrow = Tensor.float


def _kept_wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else _narrow(x)


class _Wide(ModuleType):
    """torch with a float32 that is float64."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def widened(kind: str) -> Any:
    """The class, which computes in float64 in this process until `narrowed`."""
    import transformers

    made = getattr(transformers, f"{kind}ForCausalLM")
    sys.modules[made.__module__].torch = _Wide("torch")  # type: ignore[attr-defined]
    Tensor.float = _kept_wide  # type: ignore[assignment,method-assign]
    return made


def narrowed() -> None:
    Tensor.float = _narrow  # type: ignore[method-assign]
    for module in [*sys.modules.values()]:
        if isinstance(vars(module).get("torch"), _Wide):
            module.torch = torch  # type: ignore[attr-defined]


def build(kind: str) -> nn.Module:
    import transformers

    made = widened(kind)
    name = "Gemma3TextConfig" if kind == "Gemma3" else f"{kind}Config"
    model: nn.Module = made(getattr(transformers, name)(**(SIZES | MORE[kind])))
    return model


class Rows(Texts):
    """Nine tokens a row, a length that no axis divides, without padding and so without a mask."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = self.tokens[index]
        return {"input_ids": tokens, "labels": torch.where(tokens % 7 == index % 7, -100, tokens)}


def rows(widens: str = "") -> Rows:
    """`widens`: a kind of model that the run reads from a folder."""
    if widens:
        widened(widens)
    return Rows(50, "causal")
