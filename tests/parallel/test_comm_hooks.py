"""--comm.*: the user's own communication is called and trains the same, the divisor changes no result,
and the logged bytes are the bytes sent.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp import config as configuration
from fsdp.base.errors import ConfigError
from fsdp.config import CommSection
from fsdp.dist.env import DistEnv
from fsdp.parallel.comm_hooks import load_hooks
from fsdp.parallel.traffic import Traffic, traffic
from fsdp.run.job import prepare, trained_model
from fsdp.run.loop import train
from fsdp.run.training_loop import TrainingLoop
from tests.support import comm_hooks
from tests.support.marks import quick_are, sample_are
from tests.support.plain_loop import relative_difference
from tests.support.runs import failures, flags, run
from tests.support.world import run_world

HERE = "tests.support.comm_hooks"
HSDP = "--mesh.strategy hsdp --mesh.replicate 2 --mesh.shard 2"
FP64 = "--precision.master fp64 --precision.param fp64"


def called(env: DistEnv, words: list[str]) -> Counter[str]:
    comm_hooks.SEEN.clear()
    train(configuration.load(words), env)
    return Counter(what for what, _, _ in comm_hooks.SEEN)


OWN = (
    f"--comm.all_gather {HERE}:gather --comm.reduce_scatter {HERE}:Scatter --comm.all_reduce_hook {HERE}:hook"
)


@pytest.mark.parametrize(("ranks", "mesh"), quick_are([(4, HSDP)], [(2, ""), (4, HSDP)], []))
def test_a_users_function_is_called_and_trains_the_same(ranks: int, mesh: str, tmp_path: Path) -> None:
    words = flags(mesh, OWN, "--train.steps 3")
    for found in run_world(ranks, called, ["--run.dir", str(tmp_path / "own"), *words]):
        # four units: three blocks and the root; the last block and the root stay gathered between forward and
        # backward
        assert found["reduce_scatter"] == found["hook"] == 3 * 4
        assert found["all_gather"] == 3 * (4 + 2)
    own = torch.load(tmp_path / "own/full_model/full-model.pt", weights_only=True)
    usual = run(ranks, tmp_path / "usual", mesh, "--train.steps 3").parameters
    assert all(torch.equal(own[name], usual[name]) for name in usual)


def test_an_all_reduce_hook_changes_the_gradient(tmp_path: Path) -> None:
    """Half the gradient, twice the rate."""
    sgd = f"{FP64} --optim.name sgd --optim.momentum 0 --train.clip_grad_norm 0 --train.steps 4"
    half = run(2, tmp_path / "a", sgd, f"--comm.all_reduce_hook {HERE}:halves --optim.lr 0.02").parameters
    whole = run(2, tmp_path / "b", sgd, "--optim.lr 0.01").parameters
    assert relative_difference(half, whole) < 1e-12


@pytest.mark.parametrize(
    ("ranks", "mesh"),
    sample_are([(2, "")], [(2, ""), (4, HSDP), (2, "--train.micro_batch 2 --mesh.accumulate every")]),
)
@pytest.mark.parametrize("factor", quick_are([], ["1", "0.25", "64"], ["64"]))
def test_the_divisor_changes_no_result(ranks: int, mesh: str, factor: str, tmp_path: Path) -> None:
    divided = run(ranks, tmp_path / "a", FP64, mesh, f"--train.steps 4 --comm.divide_by {factor}").parameters
    usual = run(ranks, tmp_path / "b", FP64, mesh, "--train.steps 4").parameters
    assert relative_difference(divided, usual) < 1e-12


def test_the_divisor_divides_parameters_without_a_dimension_too(tmp_path: Path) -> None:
    """FSDP leaves them whole, and they are averaged apart."""
    scalars = (
        f"{FP64} --model.name tests.support.user_code:Scalar --data.name tests.support.user_code:vectors"
    )
    sgd = f"{scalars} --train.steps 4 --optim.name sgd --optim.momentum 0 --train.clip_grad_norm 0"
    divided = run(2, tmp_path / "a", sgd, "--comm.divide_by 64").parameters
    usual = run(2, tmp_path / "b", sgd).parameters
    assert relative_difference(divided, usual) < 1e-12


def largest_sent(env: DistEnv, words: list[str]) -> float:
    """The largest number that goes into a reduction."""
    found, reduce_scatter = [0.0], comm_hooks.Scatter.__call__

    def spy(self: Any, output: torch.Tensor, input: torch.Tensor, *args: Any, **more: Any) -> Any:
        found.append(float(input.abs().max()))
        return reduce_scatter(self, output, input, *args, **more)

    comm_hooks.Scatter.__call__ = spy  # type: ignore[method-assign]
    try:
        train(configuration.load(words), env)
    finally:
        comm_hooks.Scatter.__call__ = reduce_scatter  # type: ignore[method-assign]
    return max(found)


def test_the_divisor_scales_the_numbers_that_are_sent(tmp_path: Path) -> None:
    """--comm.divide_by 1 sends what is summed; the default sends as many times more as there are ranks."""
    words = flags(f"--train.steps 1 --comm.reduce_scatter {HERE}:Scatter")
    usual = max(run_world(2, largest_sent, ["--run.dir", str(tmp_path / "a"), *words]))
    summed = max(
        run_world(2, largest_sent, ["--run.dir", str(tmp_path / "b"), *words, "--comm.divide_by", "1"])
    )
    assert usual == pytest.approx(2 * summed, rel=1e-5)


@pytest.mark.parametrize(
    ("flag", "path", "said"),
    [
        ("all_gather", "nowhere:f", "there is no module nowhere"),
        ("all_gather", f"{HERE}:gater", f"HINT: --comm.all_gather {HERE}:gather"),
        ("all_reduce_hook", f"{HERE}:NOTHING", "cannot be called"),
        ("all_reduce_hook", f"{HERE}:too_few", "it is called with (gradient)"),
        ("reduce_scatter", f"{HERE}:hook", "it is called with (output, input, group, op, async_op=False)"),
    ],
)
def test_an_uncallable_object_is_refused_before_any_process_group(flag: str, path: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_hooks(replace(CommSection(), **{flag: path}))  # type: ignore[arg-type]
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--mesh.strategy ddp --comm.divide_by 2", "--comm.divide_by 2 applies to shards"),
        (
            f"--mesh.strategy ddp --comm.all_gather {HERE}:gather",
            "applies to shards",
        ),
        ("--mesh.strategy ddp --mesh.accumulate shard", "--mesh.accumulate shard applies to shards"),
    ],
)
def test_ddp_refuses_them(words: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configuration.load(words.split())
    assert said in str(caught.value)


def test_a_divisor_without_shards_is_refused(tmp_path: Path) -> None:
    for text in failures(
        2, tmp_path, "--mesh.strategy hsdp --mesh.replicate 2 --mesh.shard 1 --comm.divide_by 2"
    ):
        assert "divides where shards are reduced" in str(text)


# ---------------------------------------------------------------- bytes


def counted(env: DistEnv, words: list[str]) -> Traffic:
    """Bytes that the collectives of one step send on this rank, as a ring sends them."""
    sent: dict[str, float] = defaultdict(float)
    names = {
        "all_gather_into_tensor": "all_gather", "all_gather_single": "all_gather", "all_reduce": "all_reduce",
        "reduce_scatter_tensor": "reduce_scatter", "reduce_scatter_single": "reduce_scatter",
    }  # fmt: skip
    real = {name: getattr(dist, name) for name in names if hasattr(dist, name)}
    inside = [False]

    def counting(name: str, function: Any) -> Any:
        def call(*args: Any, **more: Any) -> Any:
            if inside[0]:
                group = more.get("group") or (args[2] if len(args) > 2 else None)
                ranks = dist.get_world_size(group)
                given = max(
                    (t for t in (*args, *more.values()) if isinstance(t, torch.Tensor)),
                    key=torch.Tensor.numel,
                )
                times = 2 if names[name] == "all_reduce" else 1
                # not the norm, nor the loss with the wish to stop
                if given.numel() > 1 and given.dtype != torch.float64:
                    sent[names[name]] += times * given.nbytes * (ranks - 1) / ranks
            was, inside[0] = inside[0], False  # one may be made of the other
            try:
                return function(*args, **more)
            finally:
                inside[0] = was

        return call

    step = TrainingLoop.train_step

    def once(self: TrainingLoop, *args: Any) -> Any:
        inside[0] = True
        try:
            return step(self, *args)
        finally:
            inside[0] = False

    TrainingLoop.train_step = once  # type: ignore[assignment, method-assign]
    for name, function in real.items():
        setattr(dist, name, counting(name, function))
    try:
        train(configuration.load(words), env)
    finally:
        TrainingLoop.train_step = step  # type: ignore[method-assign]
        for name, function in real.items():
            setattr(dist, name, function)
    return Traffic(sent["all_gather"], sent["reduce_scatter"], sent["all_reduce"])


CASES = [
    (2, "--mesh.reshard_after_forward true"),
    (2, "--mesh.reshard_after_forward false"),
    (2, "--train.micro_batch 2 --mesh.reshard_after_forward step"),
    (2, "--train.micro_batch 2 --mesh.accumulate last"),
    (2, "--train.micro_batch 2 --mesh.accumulate every"),
    (4, f"{HSDP} --train.micro_batch 1 --mesh.accumulate shard"),
    (4, f"{HSDP} --train.micro_batch 1 --mesh.accumulate every"),
    (4, f"{HSDP} --train.micro_batch 1 --mesh.accumulate last"),
    (4, "--mesh.reshard_after_forward 2"),
    (2, "--precision.param bf16"),
    (2, "--precision.param bf16 --precision.reduce bf16"),
    (2, "--lora.rank 2"),
    (2, "--mesh.wrap root --train.micro_batch 3"),
]


@pytest.mark.parametrize(("ranks", "words"), quick_are(CASES[::4], CASES, []))
def test_the_logged_bytes_are_the_bytes_sent(ranks: int, words: str, tmp_path: Path) -> None:
    given = [
        "--run.dir",
        str(tmp_path),
        *flags(words, "--train.steps 1 --checkpoint.every_steps 0 --checkpoint.export false"),
    ]
    config = configuration.load(given)
    job = prepare(config, world_size=ranks, num_nodes=1, device=torch.device("cpu"))
    told = traffic(
        trained_model(config, job),
        sizes=job.sizes,
        section=config.mesh,
        accumulation=job.batch.accumulation,
        gathered=job.dtypes.param,
        reduced=job.dtypes.reduce,
    )
    assert run_world(ranks, counted, given) == [told] * ranks
