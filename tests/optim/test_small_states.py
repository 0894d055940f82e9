"""--optim.state: moments in bf16 or 8 bits train nearly as fp32's do, resume to the bit, and know no number
of ranks.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp import config as configuration
from fsdp.base.errors import ConfigError
from fsdp.base.torch_private.core import like_shard
from fsdp.config import OptimSection
from fsdp.dist.env import DistEnv
from fsdp.memory.account import state_bytes
from fsdp.optim import small_states as adam
from fsdp.optim import small_states as bits
from fsdp.optim.optimizer import build_optimizer
from fsdp.optim.small_states import (
    SmallStateAdam,
    Table,
    decode,
    encode,
    noise_at,
    round_at_random,
)
from tests.support.marks import quick_are
from tests.support.plain_loop import relative_difference
from tests.support.runs import Finished, flags, on_a_rank, run
from tests.support.world import run_world

WIDE = "--model.args.width 80 --optim.warmup_steps 0"
BITS = "--optim.state 8bit"
HALF = "--optim.state bf16"


# ---------------------------------------------------------------- rounding and codes


def test_rounding_at_random_is_right_on_average() -> None:
    value = torch.full((1 << 16,), 1.0 + 1 / 1024)  # an eighth of the way from 1 to the next bf16
    rounded = round_at_random(value, noise_at(0, value, 7)).float()
    assert set(rounded.tolist()) == {1.0, 1.0 + 2**-7}
    assert float(rounded.mean()) == pytest.approx(1.0 + 1 / 1024, abs=1e-4)


def test_random_bits_follow_from_the_place_alone() -> None:
    whole = noise_at(0, torch.empty(100), 3)
    assert torch.equal(noise_at(40, torch.empty(30), 3), whole[40:70])
    assert not torch.equal(noise_at(0, torch.empty(100), 4), whole)
    assert len(set(noise_at(2**31 - 5, torch.empty(10), 3).tolist())) == 10


def test_bf16_values_stay_unchanged() -> None:
    value = torch.randn(1000).bfloat16()
    assert torch.equal(round_at_random(value.float(), noise_at(0, value, 1)), value)


@pytest.mark.needs("torchao")
def test_the_table_is_the_one_that_torchao_has() -> None:
    theirs: Any = importlib.import_module("torchao.optim.quant_utils")
    for signed in (True, False):
        table = Table.on(torch.device("cpu"), signed=signed)
        assert torch.equal(table.values, torch.tensor(theirs.create_dynamic_map(signed)))
        moment = torch.randn(3, 512) if signed else torch.rand(3, 512)
        scaled, scale = theirs.scale_tensor(moment, bits.BLOCK)
        found, ours = encode(moment, table)
        assert torch.equal(ours.flatten(), scale)
        # ties and last bits
        assert (found != theirs.quantize_8bit_with_qmap(scaled, table.values)).float().mean() < 0.01


@pytest.mark.parametrize("row", [80, 256, 300])
def test_a_code_is_the_nearest_value_of_its_block(row: int) -> None:
    table = Table.on(torch.device("cpu"), signed=True)
    moment = torch.randn(5, row) * torch.logspace(-6, 2, 5).unsqueeze(1)
    found, scale = encode(moment, table)
    assert scale.shape == (5, -(-row // 256))
    apart = (decode(found, scale, table) - moment).abs()
    largest_gap = float(table.values.diff().max())
    assert bool((apart <= largest_gap / 2 * 1.01 * moment.abs().amax(1, keepdim=True)).all())
    zeros = torch.zeros(2, row)
    assert torch.equal(decode(*encode(zeros, table), table), zeros)


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_those_of_a_search_in_the_table(signed: bool) -> None:
    table = Table.on(torch.device("cpu"), signed=signed)
    middles = table.middles[:-1]
    above, below = middles.nextafter(torch.tensor(2.0)), middles.nextafter(torch.tensor(-2.0))
    small = torch.logspace(0, -45, 100_000) * torch.rand(100_000)
    numbers = torch.cat([middles, above, below, small, -small if signed else small])
    rows = torch.ones(-(-len(numbers) // 255), bits.BLOCK)  # the 1 at each row's end makes its scale 1
    filled = nn.functional.pad(numbers, (0, 255 * len(rows) - len(numbers)))
    rows[:, :-1] = filled.view(-1, 255)
    found, _ = encode(rows, table)
    assert torch.equal(found.int(), torch.bucketize(rows, middles, out_int32=True))


# ---------------------------------------------------------------- the optimizer


def stepped(
    model: nn.Module, section: OptimSection, steps: int, *, compiled: bool = False
) -> torch.optim.Optimizer:
    optimizer = build_optimizer(section, model, compiled=compiled)
    for step in range(steps):
        for at, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(100 * step + at)
            whole = torch.randn(parameter.shape, generator=generator) / (at + 1)
            parameter.grad = whole if not isinstance(parameter, DTensor) else _sharded(whole, parameter)
        optimizer.step()
    return optimizer


def _sharded(whole: Tensor, parameter: DTensor) -> Tensor:
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, parameter.device_mesh, parameter.placements)


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(300, 7), nn.Tanh(), nn.Linear(7, 100, bias=False), nn.Linear(100, 101))


def sharded_update(env: DistEnv, state: Any, compiled: bool = False) -> list[Tensor]:
    model = layers()
    fully_shard(model, mesh=init_device_mesh("cpu", (env.world_size,), mesh_dim_names=("dp_shard",)))
    with mock.patch.object(adam, "SLICE", 500):  # several slices a shard
        stepped(model, OptimSection(state=state), 5, compiled=compiled)
    return [p.full_tensor().detach() for p in model.parameters() if isinstance(p, DTensor)]


@pytest.mark.parametrize("state", ["bf16", "8bit"])
def test_shards_are_updated_as_the_whole_is_to_the_bit(state: Any) -> None:
    model = layers()
    stepped(model, OptimSection(state=state), 5)
    for found in run_world(3, sharded_update, state):
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


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("state", ["bf16", "8bit"])
def test_a_compiled_update_is_compiled_in_the_first_steps_alone(state: Any) -> None:
    model = layers()
    optimizer = stepped(model, OptimSection(state=state), 2, compiled=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with torch.compiler.set_stance("fail_on_recompile"):
        for step in range(4):
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 / (step + 1)
            optimizer.step()


@pytest.mark.parametrize(("state", "bound"), [("bf16", 0.02), ("8bit", 0.1)])
def test_it_moves_nearly_as_torchs_does_and_not_quite(state: Any, bound: float) -> None:
    start = [p.detach().clone() for p in layers().parameters()]
    ours, theirs = layers(), layers()
    stepped(ours, OptimSection(state=state), 20)
    stepped(theirs, OptimSection(), 20)
    moved = [
        {str(at): p.detach() - b for at, (p, b) in enumerate(zip(m.parameters(), start, strict=True))}
        for m in (ours, theirs)
    ]
    assert 0 < relative_difference(*moved) < bound


def states_of_shards_elsewhere(env: DistEnv) -> list[tuple[str, tuple[int, ...]]]:
    """On meta beside a mesh of the CPU, as host memory lies beside one of GPUs with cpu_offload."""
    shard = distribute_tensor(torch.zeros(6, 300), init_device_mesh("cpu", (2,)), [Shard(0)])
    parameter = nn.Parameter(like_shard(shard, torch.empty(3, 300, device="meta")))
    states = [adam.new_state(parameter, kind) for kind in ("bf16", "8bit")]
    return [(one.device.type, tuple(one.shape)) for state in states for one in state.values() if one.dim()]


def test_states_lie_where_their_parameters_do() -> None:
    """Not where the mesh is: DTensor.from_local would move them there."""
    moments, scales = ("meta", (6, 300)), ("meta", (6, 2))
    assert run_world(2, states_of_shards_elsewhere) == [[moments] * 2 + [moments, scales] * 2] * 2


def converted_there_and_back(env: DistEnv) -> list[tuple[Tensor, Tensor]]:
    """Each moment of torch's AdamW, and after it was 8 bits."""
    model = layers()
    fully_shard(model, mesh=init_device_mesh("cpu", (env.world_size,), mesh_dim_names=("dp_shard",)))
    before, small, after = (
        build_optimizer(OptimSection(state=state), model) for state in ("master", "8bit", "master")
    )
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    before.step()
    with mock.patch.object(adam, "SLICE", 500):  # several slices a shard
        for source, target in ((before, small), (small, after)):
            target.state.update({p: dict(source.state[p]) for p in model.parameters()})
            adam.adapt_states(target)
    return [
        (before.state[p][name].full_tensor(), after.state[p][name].full_tensor())
        for p in model.parameters()
        for name in adam.MOMENTS
    ]


def test_moments_of_a_checkpoint_are_converted_on_each_shard() -> None:
    for found in run_world(3, converted_there_and_back):
        for expected, moment in found:
            assert relative_difference({"moment": moment}, {"moment": expected}) < 0.02


def test_with_fp32_moments_it_is_torchs() -> None:
    """Vectors keep them under 8 bits: the arithmetic is the same."""
    ours, theirs = (nn.ParameterList([torch.linspace(-1, 1, 33)]) for _ in range(2))
    stepped(ours, OptimSection(state="8bit"), 10)
    stepped(theirs, OptimSection(fused="false"), 10)
    assert torch.allclose(ours[0], theirs[0], rtol=1e-6, atol=1e-7)


def test_a_second_moment_that_decays_slowly_does_not_stick() -> None:
    """With beta2 0.999 a step is a thousandth, a quarter of what bf16 shows: rounded to the nearest it would
    never move.
    """
    model = nn.Linear(64, 64, bias=False)
    optimizer = build_optimizer(OptimSection(state="bf16", beta2=0.999), model)
    model.weight.grad = torch.ones(64, 64)
    optimizer.step()
    before = float(optimizer.state[model.weight]["exp_avg_sq"].float().mean())
    model.weight.grad = torch.zeros(64, 64)
    for _ in range(300):
        optimizer.step()
    after = optimizer.state[model.weight]["exp_avg_sq"].float()
    assert float(after.mean()) == pytest.approx(before * 0.999**300, rel=0.02)
    nearest = torch.tensor(before).bfloat16()
    assert (nearest.float() * 0.999).bfloat16() == nearest


@pytest.mark.parametrize(("state", "share"), [("bf16", 0.5), ("8bit", 0.27)])
def test_memory_of_the_states(state: Any, share: float) -> None:
    model = nn.Linear(512, 512, bias=False)
    optimizer = stepped(model, OptimSection(state=state), 1)
    held = sum(v.nbytes for v in optimizer.state[model.weight].values() if v.dim())
    assert held == state_bytes(OptimSection(state=state), model.parameters(), 4)
    assert held <= share * state_bytes(OptimSection(), model.parameters(), 4)
    assert isinstance(optimizer, SmallStateAdam)


# ---------------------------------------------------------------- runs


def digests(one: Path) -> dict[str, Any]:
    newest = max((one / "checkpoints").glob("step-*/manifest.json"))
    found: dict[str, Any] = json.loads(newest.read_text())["manifest"]["digests"]
    return found


def losses(one: Finished) -> list[float]:
    return [record["loss"] for record in one.records if "loss" in record]


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


@pytest.mark.parametrize("state", quick_are([], [HALF, BITS], [HALF]))
def test_a_run_trains_nearly_as_with_fp32_moments(state: str, tmp_path: Path) -> None:
    full, small = run(2, tmp_path / "full", WIDE), run(2, tmp_path / "small", WIDE, state)
    assert 0 < relative_difference(small.parameters, full.parameters) < 0.02
    assert losses(small)[0] == losses(full)[0]
    assert losses(small)[-1] == pytest.approx(losses(full)[-1], rel=0.02)


@pytest.mark.slow
@pytest.mark.long
def test_a_checkpoint_resumes_with_other_moments_and_ranks(tmp_path: Path) -> None:
    """fp32, 8 bits, bf16, fp32: each start five steps, on two, three and one ranks."""
    for ranks, state, until in ((2, "", 5), (3, BITS, 10), (1, HALF, 15)):
        words = ["--run.dir", str(tmp_path / "run"), *flags(WIDE, state, f"--train.stop_after {until}")]
        assert run_world(ranks, on_a_rank, words) == [None] * ranks
    mixed, straight = run(2, tmp_path / "run", WIDE), run(2, tmp_path / "straight", WIDE)
    assert relative_difference(mixed.parameters, straight.parameters) < 0.02
    assert losses(mixed)[-1] == pytest.approx(losses(straight)[-1], rel=0.02)


@pytest.mark.slow
@pytest.mark.long
def test_bf16_moments_rest_in_files_too(tmp_path: Path) -> None:
    inside = run(2, tmp_path / "inside", HALF)
    outside = run(
        2, tmp_path / "outside", HALF, f"--memory.nvme optimizer --memory.nvme_dir {tmp_path / 'disk'}"
    )
    assert losses(inside) == losses(outside)
    assert all(torch.equal(outside.parameters[name], value) for name, value in inside.parameters.items())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            f"{HALF} --optim.name sgd",
            r"--optim.state bf16 and --optim.name sgd do not go together. HINT: --optim.state master",
        ),
        (f"{BITS} --optim.fused true", "--optim.state 8bit and --optim.fused true do not go together"),
        (
            f"{HALF} --precision.master fp64",
            "--optim.state bf16 and --precision.master fp64 do not go together",
        ),
        (
            f"{BITS} --memory.nvme optimizer --memory.nvme_dir /tmp",
            "8bit and --memory.nvme optimizer do not go together",
        ),
    ],
)
def test_impossible_flags_are_refused(words: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        configuration.load(words.split())


def test_a_fresh_state_is_the_code_of_zeros() -> None:
    parameter = nn.Parameter(torch.ones(3, 300))
    state = adam.new_state(parameter, "8bit")
    for name in adam.MOMENTS:
        found, scale = encode(
            torch.zeros(3, 300), adam.Table.on(torch.device("cpu"), signed=name == "exp_avg")
        )
        assert torch.equal(state[name], found)
        assert torch.equal(state[f"{name}_scale"], scale)


class _Waits(TorchDispatchMode):
    """Refuses operations for which a host waits for its device: reads, and copies of new numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.lift_fresh.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("state", "update"), [("bf16", "update_plain"), ("8bit", "update_coded")])
def test_where_it_is_compiled_each_matrix_is_one_call_and_later_steps_read_no_number(
    state: Any, update: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The functions that would be compiled run as they are. On CUDA a read, or a tensor made from a number of
    Python, is a wait; the slices of the other path are some fifty kernels each.
    """
    called: list[str] = []

    def as_it_is(function: Any) -> Any:
        called.append(function.__name__)
        return function

    monkeypatch.setattr(adam, "compiled", as_it_is)
    monkeypatch.setattr(adam.SmallStateAdam, "_update_eager", None)
    optimizer = stepped(nn.Linear(300, 7, bias=False), OptimSection(state=state), 1, compiled=True)
    assert called == [update]
    with _Waits():
        for step in range(2):
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 / (step + 1)
            optimizer.step()
    assert called == [update] * 3
