"""Plans of `hf:` models beside real runs: peaks of models of transformers, with recomputation and adapters.

    python -m bench.plan_hf              5 models × none, full, ops, LoRA on two gloo ranks
    python -m bench.plan_hf llama t5     some of them; nothing is written

Each model is a folder with a config.json of save_pretrained's, of 7 to 25 million parameters. Predictions,
measurements and their precision are those of bench.plan. Results: bench/results/plan_hf.md.
"""

from __future__ import annotations

import platform
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from bench.plan import Row, table
from bench.plan_cases import Case
from bench.plan_real import Ranks

RESULTS = Path(__file__).parent / "results" / "plan_hf.md"
WORDS, LENGTH = 8192, 128
SIZES: dict[str, Any] = {
    "hidden_size": 384, "num_hidden_layers": 8, "num_attention_heads": 6, "intermediate_size": 1024,
}  # fmt: skip
NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {**SIZES, "vocab_size": WORDS, "num_key_value_heads": 2}),
    "gpt2": (
        "GPT2LMHeadModel",
        {"vocab_size": WORDS, "n_embd": 384, "n_layer": 8, "n_head": 6, "n_positions": LENGTH,
         "bos_token_id": 0, "eos_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
    "bert": ("BertForMaskedLM", {**SIZES, **NO_DROPOUT, "vocab_size": WORDS}),
    "t5": (
        "T5ForConditionalGeneration",
        {"vocab_size": WORDS, "d_model": 384, "d_kv": 64, "d_ff": 1024, "num_layers": 4, "num_heads": 6,
         "dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0},
    ),
    "vit": (
        "ViTForImageClassification",
        {**SIZES, **NO_DROPOUT, "image_size": 64, "patch_size": 8, "num_channels": 3, "num_labels": 10},
    ),
}  # fmt: skip
VARIANTS = {
    "none": (),
    "full": ("--memory.activation_checkpointing", "full"),
    "ops": ("--memory.activation_checkpointing", "ops"),
    "lora": ("--lora.rank", "8"),
}
CASES = [(name, how) for name in MODELS for how in VARIANTS]
COMMON = ("--train.global_batch", "8", "--train.micro_batch", "4")
IMAGES = ("--data.name", "synthetic", "--data.args.kind", "images", "--data.args.image_size", "64",
          "--data.args.channels", "3", "--data.args.num_classes", "10")  # fmt: skip


class Texts(Dataset[dict[str, Tensor]]):
    """Rows of equal length with labels, as a person's own Dataset gives them."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.full((LENGTH,), index)
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


def texts() -> Texts:
    return Texts()


def write_folder(name: str, folder: Path) -> None:
    """A config.json: the planner reads no weights, and the measured ranks draw theirs."""
    import transformers

    cls = getattr(transformers, MODELS[name][0])
    cls.config_class(**MODELS[name][1], architectures=[cls.__name__]).save_pretrained(folder)


def case_of(name: str, variant: str, folder: Path) -> Case:
    data = IMAGES if name == "vit" else ("--data.name", "bench.plan_hf:texts")
    return Case(2, ("--model.name", f"hf:{folder / name}", *data, *COMMON, *VARIANTS[variant]))


def run(names: Sequence[str], folder: Path) -> Iterator[Row]:
    with Ranks() as ranks:
        for name, variant in CASES:
            if name in names:
                write_folder(name, folder / name)
                case = case_of(name, variant, folder)
                named = Case(case.ranks, (name, variant))
                yield Row(named, ranks.predict(case), ranks.measure(case))


def main(names: Sequence[str]) -> int:
    if not set(names) <= set(MODELS):
        print(f"{__doc__}\nHINT: names among {', '.join(MODELS)}", file=sys.stderr)
        return 2
    title = f"# Plans of hf: models beside real runs ({platform.machine()}, torch {torch.__version__}, gloo)"
    command = "`python -m bench.plan_hf`: two ranks, fp32, AdamW, micro-batches of 4."
    with tempfile.TemporaryDirectory(prefix="plan-hf-") as folder:
        text = "\n".join([title, "", command, "", *table(list(run(names or list(MODELS), Path(folder))))])
    print(text)
    if not names:
        RESULTS.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
