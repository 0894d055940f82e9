"""--precision.frozen bf16: frozen weights in half the bytes, adapters and states in the master's dtype."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fsdp import config as configuration
from fsdp.base.errors import ConfigError
from fsdp.checkpoint import __main__ as checkpoints
from fsdp.dist.env import DistEnv
from fsdp.dist.mesh import MeshSizes
from fsdp.dist.shards import local_tensor
from fsdp.plan.step_trace import parameter_bytes
from fsdp.run.job import prepare, trained_model
from tests.support.runs import Finished, failures, flags, run
from tests.support.world import run_world

LORA = "--lora.rank 3 --train.steps 6"
FROZEN = "--precision.frozen bf16"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_losses_are_those_of_the_rounded_weights(ranks: int, tmp_path: Path) -> None:
    mesh = "--mesh.strategy hsdp --mesh.replicate 2 --mesh.shard 2" if ranks == 4 else ""
    mesh += " --precision.master fp64"
    plain = run(ranks, tmp_path / "plain", LORA, mesh)
    rounded = {name: value.bfloat16().double() for name, value in plain_start(tmp_path).items()}
    torch.save(rounded, tmp_path / "rounded.pt")
    start = f"--model.weights {tmp_path / 'rounded.pt'}"
    expected = run(ranks, tmp_path / "expected", LORA, mesh, start)
    found = run(ranks, tmp_path / "found", LORA, mesh, start, FROZEN)
    assert losses(found) == pytest.approx(losses(expected), abs=1e-12)
    for name, value in expected.parameters.items():
        assert torch.allclose(found.parameters[name], value, rtol=0, atol=1e-12), name
    assert losses(found) == pytest.approx(losses(plain), abs=0.02)
    assert losses(found) != pytest.approx(losses(plain), abs=1e-9)


def losses(finished: Finished) -> list[float]:
    return [record["loss"] for record in finished.records if "loss" in record]


def plain_start(folder: Path) -> dict[str, torch.Tensor]:
    """The initial weights of the seed, from a run that trains with a rate of nothing."""
    return run(1, folder / "start", "--train.steps 1 --optim.lr 1e-30 --optim.weight_decay 0").parameters


@pytest.mark.slow
def test_a_run_resumes_and_is_exported(tmp_path: Path) -> None:
    whole = run(2, tmp_path / "whole", LORA, FROZEN)
    run_world_ok = failures(2, tmp_path / "parts", LORA, FROZEN, "--train.stop_after 3")
    assert run_world_ok == [None, None]
    [said, _] = failures(2, tmp_path / "parts", LORA)
    assert said is not None
    assert "HINT: --precision.frozen bf16" in said
    found = run(2, tmp_path / "parts", LORA, FROZEN)
    assert all(torch.equal(found.parameters[n], value) for n, value in whole.parameters.items())
    out = tmp_path / "again"
    assert checkpoints.main([str(tmp_path / "parts"), "export", "--out", str(out), *trusted()]) == 0
    again = torch.load(out / "full-model.pt", weights_only=True)
    assert all(torch.equal(again[n], value) for n, value in whole.parameters.items())


def trusted() -> list[str]:
    return [
        "--trust-code", "tests.support.user_code:vectors", "--trust-code", "tests.support.user_code:Uneven",
    ]  # fmt: skip


def shard_bytes(env: DistEnv, words: list[str]) -> tuple[int, set[torch.dtype], set[torch.dtype]]:
    from fsdp.dist.mesh import build_mesh
    from fsdp.parallel.shard import shard_model

    config = configuration.load(words)
    job = prepare(config, world_size=env.world_size, num_nodes=1, device=env.device)
    sharded = shard_model(
        trained_model(config, job),
        config,
        sizes=MeshSizes("fsdp", 1, env.world_size),
        mesh=build_mesh(job.sizes, env.device, 60.0),
        device=env.device,
    )
    parameters = list(sharded.root.parameters())
    parts = [local_tensor(p) for p in parameters]
    return (
        sum(part.numel() * part.element_size() for part in parts),
        {p.dtype for p in parameters if p.requires_grad},
        {p.dtype for p in parameters if not p.requires_grad},
    )


@pytest.mark.slow
def test_its_bytes_are_those_of_the_plan() -> None:
    words = flags(LORA, FROZEN)
    ranks = run_world(2, shard_bytes, words)
    assert all(trained == {torch.float32} for _, trained, _ in ranks)
    assert all(frozen == {torch.bfloat16} for _, _, frozen in ranks)
    config = configuration.load(words)
    job = prepare(config, world_size=2, num_nodes=1, device=torch.device("cpu"))
    trained = sum(p.numel() for p in trained_model(config, job).parameters() if p.requires_grad)
    assert parameter_bytes(config) - 3 * 4 * trained == sum(size for size, _, _ in ranks)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "every parameter is trained. HINT: --lora.rank 8"),
        ("--lora.rank 2 --mesh.strategy ddp", "--precision.frozen bf16 do not go together"),
        (
            "--lora.rank 2 --memory.nvme all --memory.nvme_dir x",
            "--precision.frozen bf16 and --memory.nvme all",
        ),
    ],
)
def test_where_it_cannot_work_it_is_refused(words: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configuration.load([*FROZEN.split(), *words.split()])
    assert said in str(caught.value)
