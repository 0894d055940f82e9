"""Small models of transformers, and texts with padding and masked labels, as --model.name and --data.name
take them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

WORDS = 31
SIZES: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 40,
}  # fmt: skip
NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LABELS: dict[str, Any] = {"num_labels": 5}
START: dict[str, Any] = {"decoder_start_token_id": 0}
HEADS: dict[str, Any] = {"head_dim": 12}
ROUTED: dict[str, Any] = {
    "num_key_value_heads": 1, "num_experts_per_tok": 2, "output_router_logits": True,
    "router_aux_loss_coef": 0.5, "use_cache": False,
}  # fmt: skip
MOE: dict[str, Any] = {**ROUTED, "num_experts": 3, "moe_intermediate_size": 20}


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=1, use_cache=False))


def gemma3() -> nn.Module:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    return Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, num_key_value_heads=1, head_dim=12, use_cache=False))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=WORDS,
            n_embd=24,
            n_layer=2,
            n_head=2,
            n_positions=16,
            use_cache=False,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**SIZES, **NO_DROPOUT))


def classifier() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig(**SIZES, **NO_DROPOUT, **LABELS))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=WORDS,
            d_model=24,
            d_kv=12,
            d_ff=40,
            num_layers=2,
            num_heads=2,
            dropout_rate=0.0,
            use_cache=False,
            pad_token_id=0,
            **START,
        )
    )


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**SIZES, **ROUTED, num_local_experts=3)
    return MixtralForCausalLM(config)


def qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**SIZES, num_key_value_heads=1, head_dim=12))


def qwen2_moe() -> nn.Module:
    """Every second layer is dense; a shared expert."""
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    config = Qwen2MoeConfig(**SIZES, **MOE, shared_expert_intermediate_size=20, decoder_sparse_step=2)
    return Qwen2MoeForCausalLM(config)


def qwen3_moe() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **MOE, **HEADS))


def odd_moe() -> nn.Module:
    """Five experts of a width that torch's grouped products support in no dtype."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    odd = {"num_experts": 5, "moe_intermediate_size": 19}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **(MOE | odd), **HEADS))


def gpt_oss() -> nn.Module:
    """Experts with biases, whose matrices are transposed and interleaved, of an odd width."""
    from transformers import GptOssConfig, GptOssForCausalLM

    odd = {"intermediate_size": 19, "num_local_experts": 5, "attn_implementation": "eager"}
    return GptOssForCausalLM(GptOssConfig(**(SIZES | HEADS | odd), **ROUTED, pad_token_id=0))


def mamba() -> nn.Module:
    from transformers import MambaConfig, MambaForCausalLM

    return MambaForCausalLM(MambaConfig(vocab_size=WORDS, hidden_size=24, num_hidden_layers=2, state_size=4))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=40,
            image_size=8,
            patch_size=4,
            num_channels=1,
            **NO_DROPOUT,
            **LABELS,
        )
    )


class Texts(Dataset[dict[str, Tensor]]):
    """Nine tokens a row, padded to the right; the longer of them are four times as long as the shorter."""

    def __init__(self, count: int, kind: str) -> None:
        self.kind = kind
        generator = torch.Generator().manual_seed(6)
        self.tokens = torch.randint(1, WORDS, (count, 9), generator=generator)
        self.others = torch.randint(1, WORDS, (count, 5), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Any]:
        length = 2 + (index * 3) % 8
        there = torch.arange(9) < length
        if self.kind == "speech":
            sounds = torch.randn(4, 12, generator=torch.Generator().manual_seed(index))
            return {"inputs": sounds, "labels": self.translation(index)}
        item: dict[str, Any] = {"input_ids": self.tokens[index] * there, "attention_mask": there.long()}
        if self.kind == "causal":
            return item | {"labels": torch.where(there, self.tokens[index], -100)}
        if self.kind == "masked":
            return item | {
                "labels": torch.where(there & (torch.arange(9) % 3 == index % 3), self.tokens[index], -100)
            }
        if self.kind == "seq2seq":
            return item | {"labels": self.translation(index)}
        return item | {"labels": index % 5}

    def translation(self, index: int) -> Tensor:
        return torch.where(torch.arange(5) < 1 + index % 5, self.others[index], -100)


def texts(kind: str, count: int = 50) -> Texts:
    return Texts(count, kind)


def texts_with_heldout(kind: str) -> tuple[Texts, Texts]:
    return Texts(50, kind), Texts(11, kind)


class Pictures(Dataset[tuple[Tensor, int]]):
    def __init__(self, count: int) -> None:
        self.inputs = torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(7))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.inputs[index], index % 5


def pictures(count: int = 50) -> Pictures:
    return Pictures(count)
