"""Plans of twelve architectures beside real runs, measured from outside: the kernel's count of the process.

    python -m bench.plan_models                  each architecture on two gloo ranks, some in bf16 or DDP too
    python -m bench.plan_models GRU ResNet-50    some of them; the other rows stay

Each run has processes of its own. The process's peak is above its size before the model exists, without
pages of libraries that were first read meanwhile: all that tensors, operators, threads and Python allocate.
Results: bench/results/plan_models.md.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from bench.plan import Row
from bench.plan_architectures import DATA, MODELS
from bench.plan_cases import Case
from bench.plan_real import Ranks
from bench.plan_table import KeptTable

RESULTS = Path(__file__).parent / "results" / "plan_models.md"
TOKENS = ("--data.name", "synthetic", "--data.args.kind", "tokens", "--data.seq_len", "64",
          "--data.args.vocab_size", "8192")  # fmt: skip
BUILT_IN = {
    "decoder": ("--model.name", "transformer", *TOKENS, "--model.args.width", "512", "--model.args.layers",
                "8", "--model.args.heads", "8"),
    "ViT": ("--model.name", "vit", "--data.name", "bench.plan_architectures:pictures",
            "--model.args.image_size", "64", "--model.args.channels", "3", "--model.args.num_classes", "10",
            "--model.args.patch_size", "8", "--model.args.layers", "10", "--model.args.heads", "8",
            "--model.args.width", "512", "--model.args.ffn", "2048"),
}  # fmt: skip
ALL = [*BUILT_IN, *MODELS]
VARIANTS = {
    "fp32": ("--precision.param", "fp32"),
    "bf16": ("--precision.param", "bf16"),
    "DDP": ("--precision.param", "fp32", "--mesh.strategy", "ddp"),
}
MORE = {
    "bf16": ("decoder", "encoder-decoder", "experts", "GRU", "ConvNeXt", "diffusion U-Net"),
    "DDP": ("decoder", "GRU", "ResNet-50", "ConvNeXt"),
}
"""Beside fp32, which all have."""
COMMON = ("--train.global_batch", "8", "--train.micro_batch", "4")


def case_of(name: str, variant: str) -> Case:
    own = "bench.plan_architectures"
    data = ("--data.name", f"{own}:{DATA.get(name, 'texts')}")
    model = BUILT_IN.get(name) or ("--model.name", f"{own}:build", "--model.args.kind", name, *data)
    return Case(2, (*model, *COMMON, *VARIANTS[variant]))


def run(names: Sequence[str]) -> Iterator[tuple[str, str, Row]]:
    for name in names:
        for variant in VARIANTS:
            if variant != "fp32" and name not in MORE[variant]:
                continue
            case = case_of(name, variant)
            with Ranks() as ranks:  # what an earlier run has left would count as idle
                predicted, process = ranks.predict(case)
                yield name, variant, Row(case, predicted, process, ranks.measure(case).allocated, None)


def main(names: Sequence[str]) -> int:
    if unknown := [name for name in names if name not in ALL]:
        print(f"bench.plan_models: no {unknown[0]}. HINT: {', '.join(ALL)}", file=sys.stderr)
        return 2
    machine = f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}, gloo"
    title = f"# Plans of twelve architectures ({machine})"
    command = (
        "`python -m bench.plan_models`: two ranks, FSDP or DDP, AdamW, a micro-batch of 4 a rank; once each. "
        "Bytes are counted: load changes none."
    )
    return KeptTable(RESULTS, ALL, [title, "", command]).write(run(names or ALL))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
