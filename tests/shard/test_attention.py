"""--speed.attention: the named kernel computes, in training and recomputation; no other takes its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp import config as configuration
from fsdp.config import SpeedSection
from fsdp.distributed.env import DistEnv
from fsdp.run.loop import train
from fsdp.shard import compute as attention
from fsdp.shard.checks import explained
from fsdp.shard.compute import attention_kernel
from tests.support.runs import flags
from tests.support.world import run_world

WORDS = (
    "--data.name tests.support.user_code:sentences --model.name transformer --model.args.vocab_size 31 "
    "--model.args.width 24 --model.args.heads 2 --model.args.max_seq_len 9 --train.steps 1"
)


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def attention_of_a_run(env: DistEnv, words: list[str]) -> bool:
    """Whether the run called a fused attention kernel."""
    with _Operators() as operators:
        train(configuration.load(words), env)
    return any(name.startswith("_scaled_dot_product_flash") for name in operators.seen)


@pytest.mark.parametrize(("kernel", "fused"), [("auto", True), ("flash", True), ("math", False)])
def test_the_named_kernel_computes(kernel: str, fused: bool, tmp_path: Path) -> None:
    words = flags(WORDS, f"--run.dir {tmp_path} --speed.attention {kernel}")
    assert run_world(1, attention_of_a_run, words) == [fused]


@pytest.mark.parametrize("name", ["fa3", "fa4"])
def test_a_package_of_flash_attention_takes_flashs_place_for_the_run(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(attention, "activate_flash_attention_impl", calls.append)
    monkeypatch.setattr(attention, "restore_flash_attention_impl", lambda: calls.append("restored"))
    query = torch.ones(1, 1, 4, 8)
    with attention_kernel(SpeedSection(attention=name)), _Operators() as operators:  # type: ignore[arg-type]
        F.scaled_dot_product_attention(query, query, query)
    assert any("flash" in one for one in operators.seen)
    assert calls == [name.upper(), "restored"]


def test_a_kernel_that_does_not_fit_ends_the_run_with_a_hint() -> None:
    query = torch.ones(1, 1, 4, 8)
    mask = torch.ones(4, 4, requires_grad=True)  # torch's flash kernel has no gradient for it
    with attention_kernel(SpeedSection(attention="flash")), pytest.raises(RuntimeError) as failed:
        F.scaled_dot_product_attention(query, query, query, attn_mask=mask)
    assert "HINT: --speed.attention auto" in str(explained(failed.value))
    other = RuntimeError("other")
    assert explained(other) is other
