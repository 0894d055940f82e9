"""Each command that README, CONTRIBUTING and docs/ print is run here as typed, or is listed with the reason.

RUN and LONG (the full form) run in a copy of the repository, with this Python behind `python` and `torchrun`.
RUN, A and B are run directories, NOT_RUN names why a command is left out. What is left out still has its
modules, recipes and flags checked.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from fsdp import config as configuration
from tests.docs.conftest import typed
from tests.docs.pages import JOB_SCRIPT, ROOT, all_commands

RUN = {
    "python train.py --help": 0,
    "python train.py --data.name text --help": 0,
    "python train.py --batch_size 32": 2,
    "python -m fsdp.predict RUN": 0,
}
"""Exit code by command, in this order."""

FIRST = "torchrun --nproc_per_node=2 train.py --config recipes/text.toml --run.dir runs/first"
"""Makes runs/first, with which another command goes on."""

LONG = {
    "python -m fsdp.checkpoint RUN verify": 0,
    "python -m fsdp.report RUN": 0,
    "python -m fsdp.checkpoint RUN": 0,
    "python -m fsdp.report A B --out both.html": 0,
    "python -m fsdp.checkpoint RUN export --format both --out FOLDER": 0,
    "python -m fsdp.checkpoint RUN prune --keep-last 2": 0,
    "python train.py --config recipes/text.toml --dry-run": 0,
    FIRST: 0,
    "torchrun --nproc_per_node=4 train.py --config runs/first/config.toml --run.dir runs/first "
    "--train.steps 400": 0,
    "torchrun --nproc_per_node=2 train.py --config recipes/text.toml --data.name notes/": 0,
    "torchrun --nproc_per_node=2 train.py --data.name mine:build --data.args.folder corpus": 0,
    "torchrun --nproc_per_node=2 train.py --data.name stories.jsonl --data.args.rows packed "
    "--model.name transformer": 0,
    "torchrun --nproc_per_node=2 train.py --model.name mine:build --data.name text": 0,
    "torchrun --nproc_per_node=2 train.py --profile.memory true --profile.steps 3:5 --train.steps 8": 0,
    "torchrun --nproc_per_node=4 train.py --config RUN/config.toml --run.dir RUN": 0,
    "torchrun --nproc_per_node=2 train.py --config RUN/config.toml --checkpoint.resume RUN "
    "--run.dir runs/evaluated --train.evaluate_only true": 0,
    **{
        f"torchrun --nproc_per_node=2 train.py --config recipes/text.toml --train.steps 4{more}": 0
        for more in (
            "", " --mesh.reshard_after_forward false", " --mesh.strategy ddp", " --precision.param bf16",
            " --memory.activation_checkpointing full", " --mesh.wrap every:2",
            " --mesh.unsharded '*norm.weight'",
        )
    },
    "torchrun --nproc_per_node=2 train.py --train.epochs 1 --train.eval_every_epochs 0.5 "
    "--checkpoint.every_epochs 1": 0,
    "python -m launch.local --ranks 2 --config recipes/text.toml": 0,
    "python -m fsdp.plan --config recipes/text.toml --plan.gpu h100": 0,
    "python -m fsdp.doctor --ranks 2": 0,
    "python -m fsdp.doctor": 0,
    "python -m fsdp.parity --model.name mine:build --data.name text": 0,
    "python -m bench.claims vit_parameters": 0,
    "python -m compileall -q fsdp launch": 0,
    "python -m torch.distributed.checkpoint.format_utils dcp_to_torch RUN/checkpoints/step-00000003 "
    "full.pt": 0,
    "TORCH_DISTRIBUTED_DEBUG=DETAIL torchrun --nproc_per_node=2 train.py --config recipes/text.toml "
    "--train.steps 4": 0,
}  # fmt: skip

NOT_RUN = {
    r"torchrun --nproc_per_node=2 train\.py --config recipes/text\.toml$": "with --run.dir runs/first, above",
    r"torchrun --nproc_per_node=2 train\.py --config recipes/mixture": "tests/run/test_mixture_runs.py",
    r"python -m fsdp\.parity --(optim\.name muon|parity\.ranks 2 --p.*)$": "minutes; tests/parity",
    r"(torchrun --nproc_per_node=2|python) train\.py$": "the default job: .ci/run runs it by make train",
    r"torchrun --nproc_per_node=2 train\.py .*mine:(rows|lines)": "tests/walks/test_researcher.py",
    r"torchrun --nnodes=2": "needs two nodes: tests/slurm submits one torchrun a node",
    r"make ": "sets up an environment; .ci/run runs make train, test, lint and test-full in a fresh clone",
    r"pytest ": "tests",
    r"(LAUNCHER=\w+ )?sbatch ": "needs Slurm: tests/slurm submits these scripts to a real one",
    r"python -m launch\.submit": "needs Slurm: tests/slurm/test_submit.py",
    r"python -m launch\.ray_predict RUN": "starts a Ray: tests/ray/test_predict.py",
    r"python train\.py --backend ray": "starts or joins a Ray: tests/ray",
    r"torchrun .*--model\.name hf:FOLDER": "needs a folder of transformers: tests/run/test_pretrained.py",
    r"torchrun --nproc_per_node=2 -m fsdp\.predict RUN --(prompt|samples)": "tests/predict/test_sharded.py",
    r"torchrun .*--checkpoint\.dir s3://": "needs a server: tests/checkpoint/test_s3.py",
    r"python -m fsdp\.checkpoint s3://": "needs a server: tests/checkpoint/test_store_alone.py",
    r"python -m fsdp\.predict RUN.* --prompt": "needs its tokenizer: tests/walks/test_answers.py",
    r"python -m fsdp\.doctor --nccl-log FILE": "tests/doctor/test_transport.py",
    r"(torchrun --nproc_per_node=2|python) examples/": "tests/launch/test_library.py",
    r"torchrun --nproc_per_node=2 -m shardrun train": "needs pip install .: tests/launch/test_installed.py",
    r"(torchrun|python) .*--train\.stop_after": "with Slurm and Ray between them: tests/slurm/test_chain.py",
    r"torchrun train\.py$": "names the program",
    r"torchrun --max-restarts=N$": "names a flag of torchrun",
    r"torchrun --nproc_per_node=8 ": "eight ranks, for a machine with eight GPUs",
    r"python -m fsdp\.(report|predict|checkpoint) runs/first": "as with RUN, above; --prompt: tests/predict",
    r"python -m launch\.local --ranks 8$": "eight ranks, for a machine with eight GPUs",
    r"python -m bench\.claims ": "tests/memory/test_claims.py runs each claim",
    r"python -m bench\.": "minutes to an hour; tests/bench runs the short parts",
    r"torchrun --nproc_per_node=2 train.py --data.name chats": "needs a tokenizer: tests/tokenize",
    r"torchrun --nproc_per_node=2 train.py --data.name pictures": "needs pictures: tests/data/test_folder.py",
    r".*(recipes/(sft|lora)\.toml|runs/chat)": "tests/walks/test_finetuner.py runs the page as typed",
    r"python -m fsdp\.tokenize": "needs a tokenizer and a corpus: tests/tokenize/test_shards.py runs it",
    r"python -m fsdp\.plan --model\.name ": "tests/plan/test_command.py runs it as typed",
    r"python -m fsdp\.plan --config recipes/(llama|experts)": "tests/plan/test_recipes.py plans every recipe",
    r"python -m fsdp\.checkpoint RUN export --ema": "needs a run with --optim.ema: tests/optim/test_ema.py",
    r"python -m fsdp\.report RUN --trust-code": "names a person's package; tests/security/test_named_code.py",
    r"python -m fsdp\.(plan|parity|predict|report)$": "names the tool; other commands run it",
    r"python -m torch\.cuda\._memory_viz trace_plot": "needs a snapshot that a GPU wrote",
    r"python -m tests\.golden": "minutes; tests/golden/test_golden.py runs its parts",
}


def listed_for(command: str) -> list[str]:
    patterns = [pattern for pattern in NOT_RUN if re.match(pattern, command)]
    typed_here = command in RUN or command in LONG
    # tests/docs/test_tutorials.py runs the others of that page
    return [command] if typed_here or all_commands()[command].stem == "tutorials" else patterns


def test_every_printed_command_is_run_or_listed() -> None:
    assert [command for command in all_commands() if not listed_for(command)] == []


def test_every_listed_command_is_printed() -> None:
    printed = all_commands()
    assert [command for command in (*RUN, *LONG) if command not in printed] == []
    assert [pattern for pattern in NOT_RUN if not any(re.match(pattern, one) for one in printed)] == []


@pytest.mark.parametrize("command", [one for one in all_commands() if one not in RUN])
def test_modules_recipes_and_flags_of_a_command_exist(command: str) -> None:
    words = shlex.split(command.replace("…", ""))
    for recipe in [word for word in words if word.startswith("recipes/")]:
        assert (ROOT / recipe).is_file()
    if "-m" in words[:-1]:
        assert importlib.util.find_spec(words[words.index("-m") + 1]) is not None
    script = re.compile(rf".*(train\.py|\.({JOB_SCRIPT}))|--")
    scripts = [at for at, word in enumerate(words) if script.fullmatch(word)]
    first = scripts[-1] + 1 if scripts else len(words)
    own = [word for word in words[first:] if word not in ("--dry-run", "--preflight", "--help")]
    if own and not own[0].startswith("-") and words[0] == "sbatch":
        own = own[1:]  # a strategy or a recipe in front: tests/slurm/test_scripts.py
    of_a_run = own[:1] == ["--config"] and own[1].startswith(("RUN/", "runs/", "s3://"))
    if own and "--batch_size" not in own and not of_a_run:
        configuration.load([word.replace("{task}", "1") for word in own])


# ---------------------------------------------------------------- as typed


@pytest.mark.slow
@pytest.mark.parametrize("command", RUN)
def test_as_typed(command: str, place: Path, run: Path) -> None:
    done = typed(command, place)
    assert done.returncode == RUN[command], done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("command", LONG, ids=str)
def test_as_typed_and_long(command: str, place: Path, run: Path) -> None:
    if "runs/first/" in command and not (place / "runs/first").exists():
        typed(FIRST, place)  # its own test is in another part of the full form
    done = typed(command, place)
    assert done.returncode == LONG[command], done.stdout + done.stderr
