"""--speed.float8: emulated, its rounding is small; weights are gathered in a byte; impossible flags are
refused.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fsdp import config as configuration
from fsdp.base.errors import ConfigError
from fsdp.config import SpeedSection
from fsdp.distributed.env import DistEnv
from fsdp.run.loop import train
from fsdp.shard import compute as float8
from fsdp.shard.compute import check_float8, check_float8_tokens
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


@pytest.mark.long
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


def test_micro_batches_have_multiples_of_16_tokens() -> None:
    check_float8_tokens(SpeedSection(float8="rowwise"), 3, 1024)
    check_float8_tokens(SpeedSection(float8="rowwise"), 3, 0)  # images
    check_float8_tokens(SpeedSection(float8="rowwise", float8_emulate=True), 2, 1023)
    with pytest.raises(ConfigError, match=r"is 2,046\. HINT: --data.seq_len 1024, or"):
        check_float8_tokens(SpeedSection(float8="rowwise"), 2, 1023)


@pytest.mark.parametrize(
    ("recipe", "device", "capability", "said"),
    [
        ("tensorwise", CPU, None, "needs a GPU of compute capability 8.9, and this cpu has 0.0"),
        ("tensorwise", CUDA, (8, 0), "needs a GPU of compute capability 8.9, and this cuda has 8.0"),
        ("rowwise", CUDA, (8, 9), "needs a GPU of compute capability 9.0, and this cuda has 8.9"),
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
    monkeypatch.setattr(float8.importlib.util, "find_spec", lambda _: True)
    section = SpeedSection(float8=recipe)  # type: ignore[arg-type]
    if not said:
        check_float8(section, device)
        return
    with pytest.raises(ConfigError) as caught:
        check_float8(section, device)
    assert said in str(caught.value)
    assert "HINT: --speed.float8 off" in str(caught.value)
