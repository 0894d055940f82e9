"""Last words: whose failure they tell, of which kind, and what to do about it."""

from __future__ import annotations

import errno

import pytest
import torch

from fsdp.base.errors import (
    CheckpointError,
    ConfigError,
    Elsewhere,
    LaunchError,
    NotFiniteError,
    TrainingError,
)
from fsdp.dist.env import DistEnv
from fsdp.memory.oom import OutOfMemory
from fsdp.watch.failure_report import last_words

ENV = DistEnv(
    rank=2,
    world_size=4,
    local_rank=0,
    local_world_size=2,
    node_rank=1,
    num_nodes=2,
    device=torch.device("cpu"),
    launcher="tests",
)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ConfigError("--a 1"), "config"),
        (LaunchError("no"), "launcher"),
        (CheckpointError("rank 2: x.distcp: it cannot be read"), "checkpoint"),
        (CheckpointError("rank 2: x.distcp: ENOSPC"), "full disk"),
        (NotFiniteError("step 3: loss nan"), "nan"),
        (TrainingError("step 3: the words do not count: not finite"), "training"),
        (TrainingError("step 3: replicas differ"), "training"),
        (OutOfMemory("forward"), "memory"),
        (OSError(errno.ENOSPC, "No space left on device"), "full disk"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), "memory"),
        (ValueError("a sample"), "exception"),
    ],
)
def test_an_error_has_a_kind(error: Exception, kind: str) -> None:
    words = last_words(error, ENV)
    assert (words["kind"], words["secondary"]) == (kind, False)


@pytest.mark.parametrize(
    "error",
    [
        Elsewhere(0, "it broke", 4),
        RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:3"),
        RuntimeError(
            "[../gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800000ms for recv operation to complete"
        ),
        RuntimeError("NCCL error: remote process exited or there was a network error"),
    ],
)
def test_what_another_rank_has_done_is_an_echo(error: Exception) -> None:
    assert last_words(error, ENV)["secondary"]


def test_a_stranger_s_error_has_its_end_of_the_traceback_and_a_hint_where_the_cause_is_known() -> None:
    try:
        raise RuntimeError("Too many open files")
    except RuntimeError as error:
        words = last_words(error, ENV)
    assert "HINT: ulimit -n 65536" in words["print"]
    assert words["print"].startswith("[rank 2] failed on cpu:\nTraceback")


def test_whom_an_error_names_is_whom_it_is_about() -> None:
    assert last_words(CheckpointError("step 4 was not saved: rank 1: a: ENOSPC, rank 3: b: ENOSPC"), ENV)[
        "ranks"
    ] == [1, 3]
