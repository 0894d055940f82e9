"""What a person can get wrong: one line that names field and value, a HINT that works as typed, exit code 2,
said once.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fsdp.base.errors import ConfigError
from fsdp.config import load
from fsdp.run.job import prepare

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")

FLAGS = {
    "--train.stepz 3": "did you mean --train.steps?",
    "--nothing.like.it 3": "python train.py --help-all lists them",
    "ddp": "HINT: --mesh.strategy ddp",
    "--precision.param torch.bfloat16": "HINT: --precision.param bf16",
    "--qlora true": "no counterpart: frozen weights in half the bytes ",
    "--optim.lr": "--optim.lr has no value. HINT: --optim.lr 0.0005",
    "--train.steps 2.5": "--train.steps 2.5 is not a whole number. HINT: --train.steps 0",
    "--optim.beta1 1": "is out of range: at least 0 and below 1. HINT: --optim.beta1 0.9",
    "--watch.deterministic maybe": "is not true or false",
    "--mesh.strategy fdsp": "HINT: --mesh.strategy fsdp",
    "--model.args 3": "has no name. HINT: --model.args.NAME 3",
    "--mesh.reshard_after_forward 0": "is not auto, true, false, step or a number of ranks",
    "--mesh.wrap klass:Block": "is not auto, every:N, class:NAME, size:PARAMETERS or root",
    "--ray.num_workers 4:2": "is not a number of workers or a range",
    "--run.dir s3://bucket/mine": "is not a folder, and run directories are",
    "--config nowhere.toml": "cannot be read (No such file or directory). HINT: ls recipes/",
    "--model.weights nowhere.pt": "does not exist. HINT: a .pt or .safetensors file, or a folder",
    "--checkpoint.resume nowhere": "does not exist",
    "--run.numa node": "is no flag any more. HINT: torchrun --numa-binding=node",
}
"""A part of the message; the hint is typed where it is a flag."""
CONTRADICTIONS = {
    "--train.steps 5 --train.epochs 2": "--train.steps 5 and --train.epochs 2 do not go together",
    "--train.micro_batch 128": "HINT: --train.micro_batch 64",
    "--train.steps 40 --optim.warmup_steps 50": "the warm-up is longer",
    "--data.workers 0 --data.prefetch 4": "HINT: --data.workers 1",
    "--optim.name muon --optim.momentum 0.8": "HINT: --optim.name sgd",
    "--optim.name sgd --optim.weight_decay 5e-4": "the first has no effect",
    "--optim.decay_share 0.5": "HINT: --optim.schedule wsd",
    "--lora.targets q": "no adapter reads the second",
    "--mesh.strategy fsdp --mesh.replicate 2": "fsdp has no replicas",
    "--mesh.strategy ddp --mesh.reshard_after_forward 2": "it applies to shards",
    "--mesh.strategy ddp --precision.reduce bf16": "reduces gradients in the master dtype",
    "--precision.param fp64": "HINT: --precision.master fp64",
    "--checkpoint.keep_best 2": "needs evaluations during the run",
    "--watch.hang_s -0.5": "is neither -1, 0 nor a time",
    "--memory.nvme all": "HINT: --memory.nvme_dir /tmp/nvme",
    "--memory.loss_chunk 8 --train.loss a:b": "--memory.loss_chunk 8 and --train.loss a:b do not go together",
    "--speed.float8 tensorwise --lora.rank 2": "and --lora.rank 2 do not go together",
    "--backend ray --mesh.replicate 2 --mesh.shard 4": "8 ranks, but --ray.num_workers is 2",
}


OF_THE_JOB = {
    "--model.name vitt --data.name digits": "HINT: --model.name vit",
    "--model.name tests.support.user_code:Unevn --data.name digits": "importing it failed",
    "--model.preset smal": "is not one of vit's: small, wide, b16. HINT: --model.preset small",
    "--model.args.widht 3": "is not an argument of --model.name vit. HINT: --model.args.width",
    "--model.args.heads 3": "is not a multiple of --model.args.heads 3. HINT: --model.args.heads 2",
    "--data.name digit": "HINT: --data.name digits",
    "--model.name transformer": "--data.name is not given",
    "--model.name transformer --data.name digits": "reads tokens, but the data holds images",
    "--mesh.shard 3": "replicate 1 × shard 3 = 3 ranks, but 4 were started. HINT: --mesh.replicate 0",
    "--mesh.reshard_after_forward 3": "does not divide shard 4. HINT: --mesh.reshard_after_forward 2",
}


def look_at(words: list[str], ranks: int) -> None:
    config = load(words)
    if ranks:
        prepare(config, world_size=ranks, num_nodes=1, device=CPU)


def refusal(words: str, ranks: int = 0) -> str:
    with pytest.raises(ConfigError) as caught:
        look_at(shlex.split(words), ranks)
    text = str(caught.value)
    assert "\n" not in text
    assert " HINT: " in text
    assert caught.value.exit_code == 2
    return text


def hinted(text: str) -> list[str]:
    """The hint's flags, where it is one to be typed."""
    hint = text.partition("HINT: ")[2].split(", or ")[0].removeprefix("did you mean ").rstrip("?")
    words = shlex.split(hint)
    return (
        words if len(words) == 2 and words[0].startswith("--") and words[1] not in ("VALUE", "NAME") else []
    )


def mended(words: str, text: str) -> list[str]:
    """As a person would: the flag that the hint names gets the hint's value."""
    name, value = hinted(text)
    kept = shlex.split(words) if words.startswith("--") else []  # a value without its flag
    pairs = [(a, b) for a, b in zip(kept[::2], kept[1::2], strict=False) if a != name]
    return [word for pair in [*pairs, (name, value)] for word in pair]


@pytest.mark.parametrize("words", [*FLAGS, *CONTRADICTIONS])
def test_flags(words: str) -> None:
    text = refusal(words)
    assert {**FLAGS, **CONTRADICTIONS}[words] in text
    if hinted(text) and ".NAME" not in text:
        look_at(mended(words, text), 0)


@pytest.mark.parametrize("words", OF_THE_JOB)
def test_what_only_the_job_can_know(words: str) -> None:
    text = refusal(words, ranks=4)
    assert OF_THE_JOB[words] in text
    if hinted(text):
        look_at(mended(words, text), 4)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[train\nsteps = 3", " is not TOML: "),
        (b"[train]\nsteps = 'many'", "--train.steps many is not a whole number. HINT: "),
        (b"model = 3", "--model is not a flag. HINT: "),
        (b"[train]\nsteps = [1]", "--train.steps [1] is not a whole number. HINT: "),
        (b"[model]\nargs = 3", "--model.args 3 has no name. HINT: "),
    ],
)  # fmt: skip
def test_a_recipe(content: bytes, message: str, tmp_path: Path) -> None:
    recipe = tmp_path / "bad.toml"
    recipe.write_bytes(content)
    assert message in refusal(f"--config {recipe}")


def test_a_recipe_that_is_a_folder_or_not_readable(tmp_path: Path) -> None:
    assert f"--config {tmp_path} cannot be read (Is a directory). HINT: " in refusal(f"--config {tmp_path}")


# ---------------------------------------------------------------- the command as typed


def train_py(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "SLURM_PROCID")
    }
    return subprocess.run(
        [sys.executable, "train.py", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**environ, **variables},
    )


def test_it_is_said_in_one_line_by_rank_0_alone() -> None:
    """Before torch is loaded, and before anybody meets anybody: neither rank waits for the other."""
    said = [train_py("--train.stepz", "3", RANK=str(rank), WORLD_SIZE="2") for rank in range(2)]
    assert [process.returncode for process in said] == [2, 2]
    assert [process.stdout for process in said] == ["", ""]
    assert said[0].stderr == "train.py: --train.stepz is not a flag. HINT: did you mean --train.steps?\n"
    assert said[1].stderr == ""


def test_dry_run_prints_what_follows_and_makes_nothing(tmp_path: Path) -> None:
    words = [
        "--dry-run",
        "--mesh.replicate",
        "2",
        "--mesh.shard",
        "4",
        "--train.micro_batch",
        "3",
        "--data.name",
        "text",
    ]
    words += ["--model.name", "transformer", "--model.preset", "toy", "--train.steps", "7", "--run.dir"]
    done = train_py(*words, str(tmp_path / "r"))
    assert done.returncode == 0, done.stderr
    facts = {line[:15].strip(): line[15:].strip() for line in done.stdout.splitlines()}
    assert facts["mesh"] == "hsdp, replicate 2 × shard 4 = 8 ranks, reshard_after_forward true"
    assert facts["global batch"] == "64 samples = micro-batch 3 × 3 × 8 ranks, padded"
    assert facts["steps"].startswith("7, ")
    assert facts["tokens a step"] == "16,384"
    assert "parameters" in facts["model"]
    assert facts["bytes a rank"].endswith("iB of parameters, gradients and optimizer")
    assert not (tmp_path / "r").exists()
