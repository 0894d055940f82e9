"""--optim.state: moments in bf16 or 8 bits train nearly as fp32's do, resume to the bit, and know no number
of ranks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdp.config import OptimSection, load
from fsdp.distributed.env import DistEnv
from fsdp.optim import small_states as adam
from fsdp.optim.optimizer import build_optimizer
from fsdp.run import build
from tests.support.marks import quick_are
from tests.support.plain_loop import relative_difference
from tests.support.runs import Finished, flags, on_a_rank, run
from tests.support.world import run_world

WIDE = "--model.args.width 80 --optim.warmup_steps 0"
BITS = "--optim.state 8bit"
HALF = "--optim.state bf16"


# ---------------------------------------------------------------- rounding and codes


# ---------------------------------------------------------------- the optimizer


def stepped(
    model: nn.Module, section: OptimSection, steps: int, *, compiled: bool = False
) -> torch.optim.Optimizer:
    optimizer = build_optimizer(section, model, compiled=compiled)
    for step in range(steps):
        for at, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(100 * step + at)
            whole = (torch.randn(parameter.shape, generator=generator) / (at + 1)).to(parameter.dtype)
            parameter.grad = whole if not isinstance(parameter, DTensor) else _sharded(whole, parameter)
        optimizer.step()
    return optimizer


def _sharded(whole: Tensor, parameter: DTensor) -> Tensor:

    return distribute_tensor(whole, parameter.device_mesh, parameter.placements)


def layers(master: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    parts = nn.Linear(300, 7), nn.Tanh(), nn.Linear(7, 100, bias=False), nn.Linear(100, 101)
    return nn.Sequential(*parts).to(master)


def sharded_update(
    env: DistEnv, state: Any, compiled: bool = False, master: torch.dtype = torch.float32
) -> list[Tensor]:
    model = layers(master)
    fully_shard(model, mesh=init_device_mesh("cpu", (env.world_size,), mesh_dim_names=("dp_shard",)))
    with mock.patch.object(adam, "SLICE", 500):  # several slices a shard
        stepped(model, OptimSection(state=state), 5, compiled=compiled)
    return [p.full_tensor().detach() for p in model.parameters() if isinstance(p, DTensor)]


@pytest.mark.parametrize(
    ("state", "master"),
    [("bf16", torch.float32), ("8bit", torch.float32), ("master", torch.bfloat16), ("8bit", torch.bfloat16)],
)
def test_shards_are_updated_as_the_whole_is_to_the_bit(state: Any, master: torch.dtype) -> None:
    model = layers(master)
    stepped(model, OptimSection(state=state), 5)
    for found in run_world(3, sharded_update, state, False, master):
        assert all(torch.equal(a, b) for a, b in zip(found, model.parameters(), strict=True))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("state", ["bf16", "8bit"])
def test_a_compiled_update_is_near_the_eager_one_and_knows_no_number_of_ranks(state: Any) -> None:
    eager, compiled = layers(), layers()
    stepped(eager, OptimSection(state=state), 5)
    stepped(compiled, OptimSection(state=state), 5, compiled=True)
    apart = relative_difference(
        *({str(at): p.detach() for at, p in enumerate(m.parameters())} for m in (compiled, eager))
    )
    assert apart < 1e-4
    for found in run_world(3, sharded_update, state, True):
        assert all(torch.equal(a, b) for a, b in zip(found, compiled.parameters(), strict=True))


# ---------------------------------------------------------------- runs


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_on_cuda_the_update_is_compiled_where_blocks_are_not(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernels lie where blocks' do: Triton's own place is the home."""
    placed = list[bool]()
    monkeypatch.setattr(build, "missing", lambda: "")
    monkeypatch.setattr(build, "set_kernel_folders", lambda: placed.append(True))
    parts = mock.Mock(config=load(["--optim.state", "bf16"]), sharded=mock.Mock(root=layers()))
    parts.job.sharding.compiled, parts.env.device = False, torch.device(device)
    with mock.patch.object(build, "build_optimizer") as built:
        build.optimizer(parts)
    assert built.call_args.kwargs == {"compiled": device == "cuda"}
    assert placed == [True] * (device == "cuda")


def digests(one: Path) -> dict[str, Any]:
    newest = max((one / "checkpoints").glob("step-*/manifest.json"))
    found: dict[str, Any] = json.loads(newest.read_text())["manifest"]["digests"]
    return found


def losses(one: Finished) -> list[float]:
    return [record["loss"] for record in one.records if "loss" in record]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "state", "mesh"),
    quick_are(
        [(2, BITS, "--mesh.strategy ddp")],
        [(2, BITS, ""), (3, HALF, ""), (2, BITS, "--mesh.strategy ddp")],
        [],
    ),
)
def test_a_resumed_run_equals_the_unbroken_run(ranks: int, state: str, mesh: str, tmp_path: Path) -> None:
    # Batches of one row a rank are left out: a CPU's product of one row is not the same to the bit in every
    # process.
    words = f"{WIDE} {state} {mesh} --data.args.count 48"
    straight = run(ranks, tmp_path / "straight", words)
    cut = ["--run.dir", str(tmp_path / "cut"), *flags(words, "--train.stop_after 9")]
    assert run_world(ranks, on_a_rank, cut) == [None] * ranks
    resumed = run(ranks, tmp_path / "cut", words)
    assert losses(resumed) == losses(straight)
    assert digests(tmp_path / "cut") == digests(tmp_path / "straight")


def test_a_checkpoint_with_other_moments_is_refused(tmp_path: Path) -> None:
    words = ["--run.dir", str(tmp_path / "run"), *flags(WIDE, "--train.stop_after 2")]
    assert run_world(1, on_a_rank, words) == [None]
    (said,) = run_world(1, on_a_rank, [*words[:2], *flags(WIDE, BITS)])
    assert "the checkpoint's moments are torch.float32, and --optim.state 8bit keeps" in str(said)
