"""Parameters after 20 steps on every mesh, compared with a plain loop in one process, independent of fsdp/.

float64 shows a wrong reduction that rounding would hide; lower precisions have their own bounds.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from tests.support.marks import quick_are
from tests.support.plain_loop import Trained, relative_difference, train_plainly, worst_parameter
from tests.support.runs import run, settings

BOUNDS = {"fp64": 1e-10, "fp32": 1e-4, "bf16": 2e-2, "fp16": 2e-2}
PRECISION = {
    "fp64": "--precision.master fp64",
    "fp32": "--precision.param fp32",
    "bf16": "--precision.param bf16",
    "fp16": "--precision.param fp16 --precision.loss_scale 256",
}
HSDP = "--mesh.strategy hsdp --mesh.replicate 2 --mesh.shard 2"
DDP = "--mesh.strategy ddp"
WORDS = "--data.name tests.support.user_code:sentences"
TRANSFORMER = (
    f"{WORDS} --model.name transformer --model.args.vocab_size 31 --model.args.width 24 --model.args.heads 2 "
    "--model.args.layers 2 --model.args.ffn 22 --model.args.max_seq_len 9"
)
OWN = "--model.name tests.support.user_code:"

MESHES = {
    "one process": (1, ""),
    "fsdp of 2": (2, ""),
    "fsdp of 3": (3, ""),
    "fsdp of 4": (4, ""),
    "hsdp 2×2": (4, HSDP),
    "ddp of 2": (2, DDP),
    "ddp of 3": (3, DDP),
}

CASES = {
    "zero-2": (2, "--mesh.reshard_after_forward false"),
    "gathered once a step": (2, "--mesh.reshard_after_forward step --train.micro_batch 2"),
    "reshard to 2 of 4": (4, "--mesh.reshard_after_forward 2"),
    "reduced each time": (2, "--train.micro_batch 2 --mesh.accumulate every"),
    "hsdp, scattered each time": (4, f"{HSDP} --train.micro_batch 1 --mesh.accumulate shard"),
    "ddp, 3 micro-batches": (2, f"{DDP} --train.micro_batch 2"),
    "a batch that ranks do not divide": (4, "--train.global_batch 11"),
    "units in a list": (3, f"{OWN}Grouped"),
    "offloaded": (2, "--memory.cpu_offload true"),
    "sent and not drawn": (2, f"{TRANSFORMER} --model.init broadcast"),
    "recomputed but for products": (2, "--memory.activation_checkpointing ops"),
    "tied, hsdp": (4, f"{TRANSFORMER} --model.args.tied true {HSDP} --train.micro_batch 1"),
    "tied by hand, a block used twice": (2, f"{WORDS} {OWN}TiedWords"),
    "masked tokens, micro-batches": (3, f"{TRANSFORMER} --train.micro_batch 1"),
    "frozen, hsdp": (4, f"{OWN}Frozen {HSDP}"),
    "scalars, hsdp": (4, f"{OWN}Scalar {HSDP} --train.micro_batch 1 --mesh.accumulate every"),
    "smaller than the mesh, hsdp": (4, f"{OWN}Tiny {HSDP}"),
    "own loss": (3, f"{OWN}OwnLoss --train.global_batch 11 --train.micro_batch 2"),
}  # fmt: skip


def _is_tested(mesh: str, dtype: str) -> bool:
    """In lower precisions fewer meshes are enough."""
    return dtype in ("fp64", "fp32") or mesh in ("fsdp of 2", "hsdp 2×2", "ddp of 2")


ON_MESHES = [(mesh, dtype) for dtype in BOUNDS for mesh in MESHES if _is_tested(mesh, dtype)]
QUICK_MESHES = [("hsdp 2×2", "fp32"), ("fsdp of 2", "bf16")]
QUICK = ("gathered once a step", "ddp, 3 micro-batches")
SAMPLE_MESHES = [("fsdp of 3", "fp64"), ("ddp of 2", "fp16")]
SAMPLE = ("tied, hsdp", "own loss", "smaller than the mesh, hsdp")
"""One case per kind of fault, with those of the quick part. The others are in the full form."""


@functools.cache
def reference(words: str, dtype: str) -> Trained:
    return train_plainly(settings(words), dtype=dtype)


def _training_flags(words: str) -> str:
    """The flags that the plain loop reads: others must not change a result."""
    kept = ("model.name", "model.args", "data.name", "train.global_batch", "train.clip_grad_norm", "optim.")
    pairs = words.split()
    return " ".join(
        f"{name} {value}"
        for name, value in zip(pairs[::2], pairs[1::2], strict=True)
        if name[2:].startswith(kept)
    )


def check(ranks: int, words: str, dtype: str, folder: Path) -> None:
    plain = reference(_training_flags(words), dtype)
    finished = run(ranks, folder, words, PRECISION[dtype])
    steps = [record for record in finished.records if "loss" in record]
    assert [record["step"] for record in steps] == list(range(1, 21))
    assert relative_difference(finished.parameters, plain.parameters) <= BOUNDS[dtype]
    if dtype == "fp64":
        assert worst_parameter(finished.parameters, plain.parameters) <= BOUNDS[dtype]
    assert [record["loss"] for record in steps] == pytest.approx(plain.losses, rel=BOUNDS[dtype])
    assert [record["grad_norm"] for record in steps] == pytest.approx(plain.norms, rel=3 * BOUNDS[dtype])


@pytest.mark.parametrize("case", quick_are(QUICK, CASES, SAMPLE))
def test_float64(case: str, tmp_path: Path) -> None:
    check(*CASES[case], "fp64", tmp_path)


@pytest.mark.parametrize(("mesh", "dtype"), quick_are(QUICK_MESHES, ON_MESHES, SAMPLE_MESHES))
def test_each_precision_on_each_mesh(mesh: str, dtype: str, tmp_path: Path) -> None:
    check(*MESHES[mesh], dtype, tmp_path)
