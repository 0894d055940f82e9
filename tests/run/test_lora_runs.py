"""Runs that train adapters: parity with one process at any mesh, checkpoints of adapters alone, merged
exports.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp.checkpoint import __main__ as checkpoints
from fsdp.checkpoint.pretrained import open_full_state
from fsdp.config import Config
from fsdp.data import Cursor, build_dataset
from fsdp.models import build_real, resolve
from fsdp.models.lora import apply_lora
from tests.support.adapters import draw_adapters, merge
from tests.support.marks import sample_are
from tests.support.plain_loop import relative_difference
from tests.support.runs import failures, run, settings

LORA = (
    "--lora.rank 3 --lora.alpha 6 --train.steps 6 --train.clip_grad_norm 0 "
    "--optim.name sgd --optim.momentum 0"
)
FP64 = "--precision.master fp64 --precision.param fp64"


def plain_model(config: Config, state: dict[str, Tensor] | None = None) -> nn.Module:
    model = build_real(resolve(config.model, build_dataset(config.data).info.facts), config.run.seed).double()
    if state is not None:
        model.load_state_dict(state)
    return model


def trained_alone(config: Config) -> dict[str, Tensor]:
    """The same training in one process: torch's SGD on the adapters, merged at the end."""
    model = plain_model(config)
    apply_lora(model, config.lora)
    draw_adapters(model, config.run.seed)
    data = build_dataset(config.data)
    cursor = Cursor(seed=config.run.seed, samples=len(data.train), global_batch=config.train.global_batch)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for step in range(config.train.steps):
        batch = data.train.batch(cursor.indices(step))
        loss = F.cross_entropy(model(batch["inputs"].double()), batch["targets"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    merge(model)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


CONSTANT = "--optim.lr 0.1 --optim.schedule constant --optim.warmup_steps 0"


MESHES = [
    (4, "--mesh.strategy hsdp --mesh.replicate 2 --mesh.shard 2"),
    (1, ""),
    (2, "--mesh.reshard_after_forward step --train.micro_batch 3"),
    (2, "--mesh.strategy ddp"),
    (2, "--memory.activation_checkpointing full --model.init broadcast"),
]


@pytest.mark.parametrize(("ranks", "more"), sample_are(MESHES[:1], MESHES))
def test_any_mesh_trains_the_adapters_that_one_process_does(ranks: int, more: str, tmp_path: Path) -> None:
    found = run(ranks, tmp_path, LORA, CONSTANT, FP64, more).parameters
    expected = trained_alone(settings(LORA, CONSTANT, FP64))
    moved = [
        n
        for n, value in plain_model(settings()).named_parameters()
        if not torch.equal(found[n], value.detach())
    ]
    assert moved == [f"blocks.{i}.{part}.weight" for i in range(3) for part in ("up", "down")]
    for name, value in expected.items():
        assert relative_difference({name: found[name]}, {name: value}) < 1e-10, name


def sizes_of(run_dir: Path) -> dict[str, int]:
    [manifest] = (run_dir / "checkpoints").glob("*/manifest.json")
    body = json.loads(manifest.read_text().partition("\n")[2][:-2])
    return {key: numel for key, (numel, _) in body["digests"].items()}


def test_checkpoints_hold_adapters_and_their_optimizer_alone(tmp_path: Path) -> None:
    run(2, tmp_path, "--lora.rank 2 --train.steps 2")
    keys = sizes_of(tmp_path)
    assert all(".lora_a" in key or ".lora_b" in key for key in keys), keys
    assert {key.split(".")[0] for key in keys} == {"model", "optim"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    run(2, folder, "--train.steps 2 --checkpoint.export_format both")
    return folder


@pytest.mark.long
@pytest.mark.slow
def test_base_weights_come_from_a_file_and_others_are_refused(base: Path, tmp_path: Path) -> None:
    words = f"--lora.rank 2 --train.steps 6 --model.weights {base}/full_model"
    assert failures(2, tmp_path, words, "--train.stop_after 3") == [None, None]
    for text in failures(2, tmp_path, "--lora.rank 2 --train.steps 6"):
        assert "holds adapters over --model.weights" in str(text)
        assert f"HINT: --model.weights {base}/full_model" in str(text)
    for text in failures(2, tmp_path, "--train.steps 6"):
        assert "holds adapters over" in str(text)
    assert failures(2, tmp_path, words) == [None, None]


def test_the_command_exports_as_the_run_and_refuses_a_changed_base(base: Path, tmp_path: Path) -> None:
    weights = tmp_path / "weights.pt"
    torch.save(torch.load(base / "full_model/full-model.pt", weights_only=True), weights)
    run_dir = tmp_path / "run"
    found = run(2, run_dir, f"--lora.rank 2 --train.steps 3 --model.weights {weights}").parameters
    out = tmp_path / "out"
    words = [str(run_dir), "export", "--out", str(out)]
    words += [
        "--trust-code",
        "tests.support.user_code:Uneven",
        "--trust-code",
        "tests.support.user_code:vectors",
    ]
    assert checkpoints.main([*words, "--format", "both"]) == 0
    again = open_full_state(out)
    assert set(again) == set(found)
    assert all(torch.equal(again[name], found[name]) for name in found)
    assert torch.equal(
        torch.load(out / "full-model.pt", weights_only=True)["head.weight"], found["head.weight"]
    )
    changed = torch.load(weights, weights_only=True)
    changed["head.bias"] += 1
    torch.save(changed, weights)
    assert checkpoints.main(words) == 4
