"""An out-of-memory error writes a page, and the first suggestion of the page helps."""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsdp import config as configuration
from fsdp.base.errors import OneRankError
from fsdp.config import Config, ModelSection
from fsdp.distributed.mesh import MeshSizes
from fsdp.memory.oom import OomFacts, OutOfMemory, OutOfMemoryHandler, is_out_of_memory, requested_bytes
from fsdp.memory.oom_advice import Advice, Footprint, advise, changes, comes_first, tensor_share
from fsdp.models import resolve
from tests.support.env import env_of

ROOT = Path(__file__).parents[2]
MIB = 2**20
HUNGRY = (
    "--model.name", "tests.memory.hungry:build",
    "--data.name", "tests.support.user_code:vectors", "--data.args.count", "2048",
    "--train.global_batch", "2048", "--train.steps", "2",
    "--checkpoint.every_steps", "0", "--checkpoint.export", "false",
)  # fmt: skip


def start(ranks: int, folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    )
    command = [sys.executable, *launcher, "train.py", "--run.dir", str(folder), *HUNGRY, *more]
    # Otherwise glibc caches freed memory, and the limit is reached by memory that no tensor holds.
    environ = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
    return subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300, check=False
    )


def first_suggestion(page: str) -> list[str]:
    lines = page.splitlines()
    return lines[lines.index("Change this first") + 1].split(" frees ")[0].split()


@pytest.mark.long
@pytest.mark.slow
def test_the_failed_rank_writes_its_page_and_its_first_suggestion_helps(tmp_path: Path) -> None:
    """Rank 1 of 2 has memory for half of the activations of twelve blocks. Recomputing costs least."""
    tight = ("--model.args.room", "350", "--model.args.rank", "1")
    failed = start(2, tmp_path / "failed", *tight)
    assert failed.returncode != 0
    page = (tmp_path / "failed" / "oom-rank1.txt").read_text()
    assert not (tmp_path / "failed" / "oom-rank0.txt").exists()
    assert page in failed.stderr
    assert re.match(r"rank 1 of 2 \(.*, cpu\) ran out of memory in (forward|backward) of step 1\.", page)
    assert "Some estimates on fake tensors failed" not in page
    assert re.search(r"activations and communication buffers +\d+(\.\d+)? MiB", page)
    assert re.search(
        r"train.py \(rank 1\): rank 1 of 2 .* ran out of memory in .* HINT: --memory.", failed.stderr
    )
    flags = first_suggestion(page)
    assert flags == ["--memory.activation_checkpointing", "ops"]
    passed = start(2, tmp_path / "passed", *tight, *flags)
    assert passed.returncode == 0, passed.stderr[-3000:]


def test_the_error_is_raised_and_its_page_printed_where_the_run_directory_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A full disk, or one that is read-only: the exit code stays 6."""
    run = tmp_path / "a file"
    run.touch()
    handler = OutOfMemoryHandler(configuration.load([]), env_of(1, 2), run)
    with pytest.raises(OutOfMemory) as raised, handler:
        raise MemoryError("out of memory: tried to allocate 3 MiB")
    assert raised.value.exit_code == 6
    assert "rank 1 of 2" in str(raised.value)
    assert str(raised.value).endswith(f"HINT: details above; {run} cannot be written (Not a directory)")
    assert "torch's error: out of memory: tried to allocate 3 MiB" in capsys.readouterr().err


# ---------------------------------------------------------------- the estimate


NOW = Footprint(
    units=(100, 100, 50),
    trained=250,
    shard=2,
    replicate=1,
    master=4,
    param=4,
    reduce=4,
    state=8.0,
    reshard=True,
    accumulate="last",
    accumulation=1,
    micro=8,
    checkpointing="none",
    counted=4,
)


def anything(flags: str) -> bool:
    return True


def facts(**changed: Any) -> OomFacts:
    made = OomFacts(
        title="rank 3 of 8 (n1, cuda:3) ran out of memory in backward of step 12",
        error="CUDA out of memory <x>",
        device="cpu",
        phase="backward",
        kinds={},
        held=0,
        requested=10,
    )
    return dataclasses.replace(made, **changed)


def advised(now: Footprint, held: int, device: str = "cpu", accepts: Any = anything) -> Advice:
    return advise(now, activations, facts(held=held, device=device), accepts)


def activations(micro: int, checkpointing: str, loss_chunk: int) -> int:
    logits = 0 if loss_chunk else 150
    return ({"none": 850, "ops": 450, "full": 50}[checkpointing] + logits) * micro


def test_needs_are_sums() -> None:
    assert NOW.needs(activations) == {
        "parameters": 500, "gathered": 600, "gradients": 500 + 400, "optimizer": 1000, "activations": 8000,
        "communication": 800,
    }  # fmt: skip
    kept = dataclasses.replace(NOW, reshard=False, accumulation=4, param=2, reduce=4)
    assert kept.needs(activations)["gathered"] == 500
    assert kept.needs(activations)["gradients"] == 1000 + 200
    assert kept.needs(activations)["activations"] == 4000
    assert dataclasses.replace(NOW, ddp=True, shard=1).needs(activations)["communication"] == 0


@pytest.mark.parametrize(
    ("now", "held", "first"),
    [
        (NOW, 10_000, "--memory.activation_checkpointing ops"),
        (NOW, 7_000, "--memory.activation_checkpointing full"),
        (dataclasses.replace(NOW, chunkable=True), 10_800, "--memory.loss_chunk 1024"),
        (dataclasses.replace(NOW, chunkable=True, loss_chunk=512), 10_800,
         "--memory.activation_checkpointing ops"),
        (dataclasses.replace(NOW, reshard=False), 11_900, "--mesh.reshard_after_forward true"),
        (dataclasses.replace(NOW, checkpointing="full"), 5_150, "--train.micro_batch 4"),
        (dataclasses.replace(NOW, checkpointing="full"), 4_900, "--train.micro_batch 2"),
        (dataclasses.replace(NOW, replicate=4, checkpointing="full", micro=1), 2_700,
         "--mesh.strategy fsdp --mesh.replicate 1"),
    ],
)  # fmt: skip
def test_the_cheapest_flag_that_frees_enough_comes_first(now: Footprint, held: int, first: str) -> None:
    advice = advised(now, held)
    assert advice.enough
    assert advice.first is not None
    assert advice.first.flags == first
    assert advice.first.bytes >= advice.missing


def test_several_together_where_none_alone_is_enough() -> None:
    advice = advised(NOW, 3_500, "cuda")
    assert advice.enough
    assert advice.first is not None
    assert advice.first.flags.count("--") >= 2
    assert advice.first.flags.startswith("--memory.activation_checkpointing")
    hopeless = advised(NOW, 500)
    assert not hopeless.enough


def test_an_evaluation_and_a_save_have_their_own_first_suggestion() -> None:
    context: Any = SimpleNamespace(batch=SimpleNamespace(micro_batch=4))
    kinds = {"activations": 100, "parameters": 30, "optimizer": 60}
    for phase, flags, freed in (
        ("evaluate", "--train.eval_batch 2", 50),
        ("save", "--checkpoint.mode blocking", 90),
    ):
        first = comes_first(Config(), context, facts(phase=phase, kinds=kinds))
        assert first is not None
        assert (first.flags, first.bytes) == (flags, freed)
    assert comes_first(Config(), context, facts()) is None


@pytest.mark.parametrize(
    ("typed", "refused"),
    [
        ("--optim.ema 0.99", ["--memory.nvme optimizer --memory.nvme_dir DIR", "--precision.master bf16"]),
        ("--memory.activation_budget 0.5", ["--memory.activation_checkpointing ops"]),
        ("--optim.name muon", ["--memory.nvme optimizer --memory.nvme_dir DIR", "--optim.state bf16"]),
        ("--memory.optimizer_offload true", ["--memory.cpu_offload true"]),
    ],
)
def test_the_advice_has_no_flag_that_the_configuration_refuses(typed: str, refused: list[str]) -> None:
    config = configuration.load(typed.split())
    possible = [flags for flags, _, _ in changes(NOW, "cuda")]
    assert set(refused) <= set(possible)
    for held in (11_000, 500):  # one flag is enough; none is, not even all together
        advice = advised(NOW, held, "cuda", partial(configuration.accepts, config))
        assert advice.first is not None
        offered = [one.flags for one in (advice.first, *advice.others) if one.flags.startswith("--")]
        assert len(offered) > 3
        assert not [flags for flags in refused if any(flags in other for other in offered)]
        for flags in offered:
            configuration.load([*typed.split(), *flags.split()])


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate "
                      "memory: you tried to allocate 67108864 bytes. Error code 12"), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total"), True),
        (MemoryError(), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("Connection closed by peer"), False),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (OneRankError("rank 0, step 1: sample 3 cannot be read: MemoryError: ."), False),
    ],
)  # fmt: skip
def test_which_errors_are_out_of_memory_errors(error: BaseException, is_one: bool) -> None:
    assert is_out_of_memory(error) is is_one


def test_the_requested_bytes_are_read_from_the_error() -> None:
    assert requested_bytes("you tried to allocate 67108864 bytes. Error code 12") == 64 * MIB
    assert requested_bytes("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0") == 2.5 * 2**30
    assert requested_bytes("std::bad_alloc") == 0


def test_tensor_ranks_divide_most_activations() -> None:
    """As the planner traces the preset: 0.58 and 0.39 of a rank's alone."""
    with torch.device("meta"):
        model = resolve(ModelSection(name="transformer", preset="chapter"), {"vocab_size": 256}).build()
    shares = [tensor_share(model, MeshSizes("fsdp", 1, 1, 1, tensor)) for tensor in (1, 2, 4)]
    assert shares == pytest.approx([1, 0.58, 0.39], rel=0.15)
