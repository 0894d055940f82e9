"""Plans of `hf:` models beside real runs: peaks of models of transformers, with recomputation and adapters.

    python -m bench.plan_hf              5 models × none, full, ops, LoRA on two gloo ranks
    python -m bench.plan_hf llama t5     some of them; the other rows stay

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

from bench.plan import Row
from bench.plan_cases import Case
from bench.plan_real import Ranks
from fsdp.base.torchvision_import import prepare_torchvision
from fsdp.rundir.atomic_write import write_atomically

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
    prepare_torchvision()
    import transformers

    cls = getattr(transformers, MODELS[name][0])
    cls.config_class(**MODELS[name][1], architectures=[cls.__name__]).save_pretrained(folder)


def case_of(name: str, variant: str, folder: Path) -> Case:
    data = IMAGES if name == "vit" else ("--data.name", "bench.plan_hf:texts")
    return Case(2, ("--model.name", f"hf:{folder / name}", *data, *COMMON, *VARIANTS[variant]))


def run(names: Sequence[str], folder: Path) -> Iterator[tuple[str, str, Row]]:
    with Ranks() as ranks:
        for name, variant in CASES:
            if name in names:
                write_folder(name, folder / name)
                case = case_of(name, variant, folder)
                predicted, process = ranks.predict(case)
                yield name, variant, Row(case, predicted, process, ranks.measure(case), None)


HEADS = ("model", "variant", "tensor bytes, MiB", "planned", "error", "process, MiB", "planned", "error")


def line_of(name: str, variant: str, row: Row) -> str:
    real = row.measured
    tensors = f"{real.tensors / 2**20:.2f} | {row.predicted / 2**20:.2f} | {row.error:+.3%}"
    process = f"{real.process / 2**20:.0f} | {row.predicted_process / 2**20:.0f} | {row.process_error:+.1%}"
    return f"| {name} | {variant} | {tensors} | {process} |"


def table(lines: Sequence[str]) -> list[str]:
    errors = [[abs(float(cells[at].strip("%"))) for at in (5, 8)] for cells in map(_cells, lines)]
    worst = [max(one) for one in zip(*errors, strict=True)]
    heads = [f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|"]
    return [*heads, *lines, "", f"Worst: tensor bytes {worst[0]:.3f}%, process {worst[1]:.1f}%."]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")]


def _kept() -> list[str]:
    """Rows of an earlier call."""
    text = RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.exists() else []
    return [line for line in text if len(_cells(line)) > 2 and _cells(line)[1] in MODELS]


def main(names: Sequence[str]) -> int:
    found = []
    with tempfile.TemporaryDirectory(prefix="plan-hf-") as folder:
        for name, variant, row in run(names or list(MODELS), Path(folder)):
            found.append(line_of(name, variant, row))
            print(found[-1], file=sys.stderr, flush=True)
    lines = found + [line for line in _kept() if _cells(line)[1] not in (names or MODELS)]
    lines.sort(key=lambda line: list(MODELS).index(_cells(line)[1]))
    title = f"# Plans of hf: models beside real runs ({platform.machine()}, torch {torch.__version__}, gloo)"
    command = "`python -m bench.plan_hf`: two ranks, fp32, AdamW, micro-batches of 4."
    text = "\n".join([title, "", command, "", *table(lines)])
    print(text)
    write_atomically(RESULTS, text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
