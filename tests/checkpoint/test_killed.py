"""Runs of train.py killed with SIGKILL and started again."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from tests.golden.chain import Chain, wide
from tests.golden.configurations import Configuration
from tests.support.marks import sample_are
from tests.support.processes import eventually
from tests.support.runs import on_a_rank
from tests.support.world import run_world

ROOT = Path(__file__).parents[2]
STEPS = 60
IN_SAVES = {"saving": 1, "sealing": 1, "pruning": 1}
CONFIGURATIONS = [wide("fsdp", 2), wide("hsdp", 4), wide("ddp", 2)]


@pytest.mark.long
@pytest.mark.parametrize(
    "configuration",
    sample_are(CONFIGURATIONS[:1], CONFIGURATIONS),
    ids=lambda configuration: configuration.name,
)
def test_a_killed_run_has_the_losses_of_an_uninterrupted_one_bit_for_bit(
    tmp_path: Path, configuration: Configuration
) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    whole, broken = (Chain(configuration, tmp_path / name, STEPS, keep=0) for name in ("whole", "broken"))
    whole.live()
    reference = whole.read()
    step = random.Random(seed).randrange(6, STEPS - 2)
    assert broken.die_at(step) >= step
    broken.live()
    assert broken.starts == 2
    broken.check_end(reference)
    assert len(list(broken.records("loss"))) == STEPS


@pytest.mark.long
def test_after_twenty_kills_in_saves_of_two_shards_by_two_tensor_ranks_no_state_is_lost_or_mixed(
    tmp_path: Path,
) -> None:
    """Every sealed checkpoint is that of the whole run at its step, bit for bit, and so is the end."""
    model = "--model.name transformer --data.name tests.support.user_code:sentences --model.args.width 64"
    sizes = "--model.args.heads 4 --model.args.vocab_size 32 --model.args.dropout 0.1"
    flags = f"{model} {sizes} --mesh.shard 2 --mesh.tensor 2"
    configuration, dice = Configuration("tensor", 4, flags), random.Random(seed := random.randrange(1 << 30))
    print(f"seed {seed}")
    whole = Chain(configuration, tmp_path / "whole", STEPS, keep=0)
    whole.live()
    reference, kills = whole.read(), Counter[str]()
    while kills.total() < 20:
        chain = Chain(configuration, tmp_path / f"after-{kills.total()}", STEPS)
        while kills.total() < 20 and (death := chain.die(dice, moments=IN_SAVES)):
            chain.check_death(death, reference)
            kills[death.moment] += 1
        if kills.total() == 20:
            chain.live()
        chain.check_end(reference)
    print(kills)


def losses(run_dir: Path) -> dict[int, float]:
    file = run_dir / "metrics.jsonl"
    records = (
        [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
        if file.exists()
        else []
    )
    return {record["step"]: record["loss"] for record in records if "loss" in record}


FLAGS = (
    "--model.name", "mlp", "--train.steps", str(STEPS), "--train.global_batch", "16",
    "--checkpoint.every_steps", "5",
)  # fmt: skip

DIGITS = ("--data.name", "digits")


def torchrun(run_dir: Path, gate: Path) -> subprocess.Popen[bytes]:
    return start_torchrun(
        run_dir, "--data.name=tests.support.gated:digits", "--data.args.last=40", f"--data.args.gate={gate}"
    )


def start_torchrun(run_dir: Path, *data: str) -> subprocess.Popen[bytes]:
    command = [
        str(Path(sys.executable).with_name("torchrun")), "--nproc_per_node=2",
        "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", "train.py", "--run.dir", str(run_dir),
        *FLAGS, *data,
    ]  # fmt: skip
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.DEVNULL)


def starts(run_dir: Path) -> list[dict[str, int]]:
    file = run_dir / "history.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [record for record in records if record["event"] == "start"]


@pytest.mark.slow
def test_of_a_killed_torchrun_the_ranks_save_and_the_same_command_continues(tmp_path: Path) -> None:
    """They trained on as orphans, and the command was refused until they had all steps."""
    assert run_world(2, on_a_rank, ["--run.dir", str(tmp_path / "whole"), *FLAGS, *DIGITS]) == [None] * 2
    gate, run = tmp_path / "gate", tmp_path / "run"
    with torchrun(run, gate) as first:
        eventually("steps", lambda: max(losses(run), default=0) >= 23, 100)
        first.kill()
        gate.touch()
        with torchrun(run, gate) as second:
            assert second.wait(100) == 0
    assert losses(run) == losses(tmp_path / "whole")
    assert 23 <= starts(run)[1]["from_step"] < STEPS


@pytest.mark.slow
@pytest.mark.long
def test_of_a_torchrun_killed_at_twenty_moments_of_training_each_start_continues(tmp_path: Path) -> None:
    """SIGKILL at torchrun alone, and the same command at once: its orphans still train or save."""
    whole, run, longer = tmp_path / "whole", tmp_path / "run", ("--train.steps", "160")
    assert run_world(2, on_a_rank, ["--run.dir", str(whole), *FLAGS, *DIGITS, *longer]) == [None] * 2
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    slowly = ("--data.name", "tests.slurm.slow:digits", "--data.args.seconds", "0.1")
    dice = random.Random(seed)
    reached, saved = [0], [0]
    for count in range(1, 21):
        step = max(reached[-1], saved[-1]) + dice.randrange(1, 6)
        with start_torchrun(run, *slowly, *longer) as agent:
            eventually(f"step {step} of start {count}", partial(is_at, run, count, step), 100)
            time.sleep(dice.uniform(0, 0.1))  # any moment within a step
            agent.kill()
        reached.append(max(losses(run)))
        saved.append(starts(run)[-1]["from_step"])
    with start_torchrun(run, *slowly, *longer) as last:
        assert last.wait(100) == 0
    saved = [start["from_step"] for start in starts(run)]
    print(f"killed at {reached[1:]}, continued at {saved[1:]}")
    assert losses(run) == losses(whole)
    assert all(step >= killed for step, killed in zip(saved[1:], reached[1:], strict=True))


def is_at(run_dir: Path, start: int, step: int) -> bool:
    return len(starts(run_dir)) == start and max(losses(run_dir), default=0) >= step
