"""--speed.float8: emulated, its rounding is small; weights are gathered in a byte; impossible flags are
refused.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fsdp import config as configuration
from fsdp.base.errors import ConfigError
from fsdp.config import SpeedSection
from fsdp.dist.env import DistEnv
from fsdp.parallel import float8
from fsdp.parallel.float8 import check_float8, check_float8_tokens
from fsdp.run.job import prepare
from fsdp.run.loop import train
from tests.support import comm_hooks
from tests.support.plain_loop import relative_difference
from tests.support.runs import flags, run
from tests.support.world import run_world

WIDE = "--model.name tests.support.user_code:Wide --precision.param bf16 --train.steps 6"
EMULATED = "--speed.float8_emulate true --speed.float8"
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


with_torchao = pytest.mark.needs("torchao")


def largest_gather(env: DistEnv, words: list[str]) -> int:
    comm_hooks.SEEN.clear()
    train(configuration.load(words), env)
    return max(size for what, size, _ in comm_hooks.SEEN if what == "all_gather")


@with_torchao
@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_it_trains_nearly_as_bf16_does_and_not_quite(recipe: str, tmp_path: Path) -> None:
    bf16 = run(2, tmp_path / "bf16", WIDE)
    found = run(2, tmp_path / recipe, WIDE, EMULATED, recipe)
    assert 1e-6 < relative_difference(found.parameters, bf16.parameters) < 5e-2
    losses = [[r["loss"] for r in one.records if "loss" in r] for one in (bf16, found)]
    assert losses[0] != losses[1]
    assert all(abs(a - b) < 0.05 for a, b in zip(*losses, strict=True))


@with_torchao
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_holds_each_layers_own_weights(ranks: int, tmp_path: Path) -> None:
    """Weights that are gathered in float8 are wrapped, and a wrapper has no address: layers were taken for
    one tied weight.
    """
    words = f"{WIDE} --optim.lr 1e-12 --optim.weight_decay 0"
    plain, found = (
        run(ranks, tmp_path / name, words, more)
        for name, more in (("a", ""), ("b", f"{EMULATED} tensorwise"))
    )
    assert all(
        torch.allclose(found.parameters[name], value, atol=1e-6) for name, value in plain.parameters.items()
    )


@with_torchao
@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", ["--mesh.strategy ddp", "--mesh.strategy hsdp --mesh.replicate 2 --mesh.shard 1"]
)
def test_replicas_train_in_it_too(mesh: str, tmp_path: Path) -> None:
    bf16, found = (
        run(2, tmp_path / name, WIDE, mesh, more)
        for name, more in (("a", ""), ("b", f"{EMULATED} tensorwise"))
    )
    assert 1e-6 < relative_difference(found.parameters, bf16.parameters) < 5e-2


@with_torchao
@pytest.mark.slow
def test_tensorwise_gathers_weights_in_a_byte_an_element(tmp_path: Path) -> None:
    own = f"{WIDE} --comm.all_gather tests.support.comm_hooks:gather --train.steps 1"
    [bf16, _] = run_world(2, largest_gather, ["--run.dir", str(tmp_path / "a"), *flags(own)])
    [tensorwise, _] = run_world(
        2, largest_gather, ["--run.dir", str(tmp_path / "b"), *flags(own, EMULATED, "tensorwise")]
    )
    [rowwise, _] = run_world(
        2, largest_gather, ["--run.dir", str(tmp_path / "c"), *flags(own, EMULATED, "rowwise")]
    )
    assert rowwise == bf16
    assert tensorwise < 0.6 * bf16


@with_torchao
@pytest.mark.slow
@pytest.mark.long
def test_a_checkpoint_is_plain_and_resumes(tmp_path: Path) -> None:
    whole = run(2, tmp_path / "whole", WIDE, f"{EMULATED} tensorwise").parameters
    half = ["--run.dir", str(tmp_path / "half"), *flags(WIDE, f"{EMULATED} tensorwise --train.stop_after 3")]
    run_world(2, _train, half)
    resumed = run(2, tmp_path / "half", WIDE, f"{EMULATED} tensorwise").parameters
    assert {type(value) for value in resumed.values()} == {torch.Tensor}
    assert relative_difference(resumed, whole) < 1e-6


def _train(env: DistEnv, words: list[str]) -> None:
    train(configuration.load(words), env)


def test_micro_batches_have_multiples_of_16_tokens() -> None:
    check_float8_tokens(SpeedSection(float8="rowwise"), 3, 1024)
    check_float8_tokens(SpeedSection(float8="rowwise"), 3, 0)  # images
    check_float8_tokens(SpeedSection(float8="rowwise", float8_emulate=True), 2, 1023)
    with pytest.raises(ConfigError, match=r"is 2,046\. HINT: --data.seq_len 1024, or"):
        check_float8_tokens(SpeedSection(float8="rowwise"), 2, 1023)


@pytest.mark.parametrize(
    ("recipe", "device", "capability", "said"),
    [
        ("tensorwise", CPU, None, "needs a GPU that multiplies in float8, and this is cpu"),
        ("tensorwise", CUDA, (8, 0), "needs compute capability 8.9, and A100 has 8.0"),
        ("rowwise", CUDA, (8, 9), "needs compute capability 9.0, and A100 has 8.9"),
        ("rowwise", CUDA, (9, 0), ""),
    ],
)
def test_unsupported_hardware_is_refused(
    recipe: str,
    device: torch.device,
    capability: tuple[int, int] | None,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A100")
    monkeypatch.setattr(float8.importlib.util, "find_spec", lambda _: True)
    section = SpeedSection(float8=recipe)  # type: ignore[arg-type]
    if not said:
        check_float8(section, device)
        return
    with pytest.raises(ConfigError) as caught:
        check_float8(section, device)
    assert said in str(caught.value)
    assert "HINT: --speed.float8 off" in str(caught.value)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(
        ConfigError, match=r"needs torchao, which is not installed. HINT: pip install torchao"
    ):
        check_float8(SpeedSection(float8="tensorwise", float8_emulate=True), CPU)


def test_a_model_without_such_sizes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"no nn.Linear within the model's blocks has sizes that are multiples of 16"
    ):
        float8.apply_float8([], SpeedSection(float8="rowwise", float8_emulate=True), sharded=True)


@pytest.mark.parametrize(
    "more",
    ["--lora.rank 2", "--memory.cpu_offload true", "--precision.master fp64", "--precision.param fp16"],
)
def test_incompatible_flags_are_refused_by_name(more: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configuration.load(["--speed.float8", "tensorwise", *more.split()])
    assert f"--speed.float8 tensorwise and {more} do not go together" in str(caught.value)


def test_emulation_alone_logs_nothing() -> None:
    with pytest.raises(ConfigError, match=r"--speed.float8_emulate true has no effect alone"):
        configuration.load(["--speed.float8_emulate", "true"])


@dataclass(frozen=True)
class Recipe:
    """Stands in for torchao's Float8LinearConfig."""

    name: str = ""
    emulate: bool = False
    enable_fsdp_float8_all_gather: bool = False
    pad_inner_dim: bool = False

    @classmethod
    def from_recipe_name(cls, name: str) -> Recipe:
        return cls(name)


def test_rows_that_are_no_multiple_of_16_are_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of images, and of an expert's tokens: nothing counts them at the start."""
    monkeypatch.setitem(sys.modules, "torchao", ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.float8", SimpleNamespace(Float8LinearConfig=Recipe))
    kinds: list[Any] = ["tensorwise", "rowwise"]
    found = [float8._recipe(SpeedSection(float8=kind), True) for kind in kinds]
    assert found == [Recipe("tensorwise", False, True, True), Recipe("rowwise", False, False, True)]


@with_torchao
@pytest.mark.parametrize("kind", ["tensorwise", "rowwise"])
def test_padding_changes_no_product(kind: Any) -> None:
    """In torchao, whose CPU products take any size: those of 17 rows padded to 32 are those without."""
    found = []
    for pads in (True, False):
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(16, 32))
        convert = importlib.import_module("torchao.float8").convert_to_float8_training
        recipe = float8._recipe(SpeedSection(float8=kind, float8_emulate=not pads), False)
        convert(block, config=replace(recipe, pad_inner_dim=pads))
        block(torch.randn(17, 16)).square().sum().backward()
        found.append({name: p.grad for name, p in block.named_parameters() if p.grad is not None})
    assert relative_difference(*found) < 1e-2


def test_a_run_counts_the_tokens_of_its_micro_batches() -> None:
    words = (
        "--data.name synthetic --data.args.kind tokens --data.seq_len 33 --model.name transformer "
        "--train.global_batch 3 --train.steps 1 --speed.float8 rowwise"
    )
    with pytest.raises(ConfigError, match=r"multiple of 16 tokens, .* is 99\. HINT: --data\.seq_len 48"):
        prepare(configuration.load(words.split()), world_size=1, num_nodes=1, device=None)
