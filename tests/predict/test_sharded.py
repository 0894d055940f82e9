"""Prediction with a model sharded over ranks: the text of one process, from an export or a checkpoint."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from fsdp.distributed.boxes import local_tensor
from fsdp.distributed.env import DistEnv
from fsdp.predict.__main__ import answer_as_rank, main, parse
from fsdp.predict.trained import open_run
from tests.support.runs import on_a_rank
from tests.support.world import run_world

FLAGS = (
    "--data.name text --data.seq_len 32 --data.args.max_mb 0.2 --model.name transformer "
    "--model.args.width 32 --model.args.heads 2 --model.args.layers 2 --train.steps 3 --train.global_batch 4 "
    "--watch.enabled false --checkpoint.every_steps 1000"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded") / "run"
    assert run_world(2, on_a_rank, ["--run.dir", str(folder), *FLAGS.split()]) == [None, None]
    return folder


def printed_on_a_rank(env: DistEnv, argv: list[str]) -> tuple[str, float]:
    """What the rank prints, and its part of the parameters."""
    options, flags = parse(argv)
    with redirect_stdout(io.StringIO()) as out:
        answer_as_rank(argv, env)
    with open_run(Path(options.run), env, flags) as trained:
        parameters = list(trained.model.parameters())
        part = sum(local_tensor(p).numel() for p in parameters) / sum(p.numel() for p in parameters)
    return out.getvalue(), part


def of_one_process(argv: list[str]) -> str:
    with redirect_stdout(io.StringIO()) as out:
        assert main(argv) == 0
    return out.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_the_text_is_that_of_one_process(run: Path, ranks: int, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    for words in ("--temperature 0", "--temperature 0.9 --top-k 20 --seed 5"):
        argv = [str(tmp_path / "run"), "--prompt", "def f", "--tokens", "12", *words.split()]
        expected = of_one_process([str(run), *argv[1:]])
        found = run_world(ranks, printed_on_a_rank, argv)
        assert [text for text, _ in found] == [expected, *[""] * (ranks - 1)]
        assert max(part for _, part in found) < 1 / ranks + 0.05
        if (tmp_path / "run" / "full_model").is_dir():  # next from the checkpoint
            shutil.rmtree(tmp_path / "run" / "full_model")


@pytest.mark.long
def test_the_command_runs_under_torchrun(run: Path) -> None:
    argv = [str(run), "--prompt", "def f", "--tokens", "5", "--temperature", "0"]
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    told = subprocess.run(
        [*command, "-m", "fsdp.predict", *argv],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert told.stdout == of_one_process(argv)
