"""On a CUDA device, with `pytest -m cuda`: the short parts of the battery, and what no stand-in can show.

`python -m bench.gpu` runs all parts and writes their table.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bench import gpu
from fsdp.base.devices import digest_shard
from fsdp.config import OptimSection
from fsdp.models import init
from fsdp.models.chunked_loss import ChunkedHead
from fsdp.models.init import BLOCK, Normal, draw
from fsdp.models.loss import summed_entropy
from fsdp.optim.optimizer import build_optimizer
from tests.support.plain_loop import relative_difference

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="on a CUDA device: pytest -m cuda"),
]
SHORT = ("ranks", "forked", "attention", "syncs", "nonfinite", "devices", "saves", "oom", "float8")


@pytest.mark.parametrize("part", SHORT)
def test_a_short_part_of_the_battery(part: str, tmp_path: Path) -> None:
    result, about = gpu.inside(part, "cuda", tmp_path)
    if result == gpu.IMPOSSIBLE:
        pytest.skip(about)
    assert result == gpu.PASSED, about


def test_initial_values_are_the_hosts() -> None:
    device = torch.device("cuda", 0)
    assert init.draws_as_the_host(device)
    found = init.draw_into(torch.empty(3 * BLOCK, device=device), Normal(0.02), 1, "w", 5)
    assert torch.equal(found.cpu(), draw(Normal(0.02), 1, "w", 5, 3 * BLOCK))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_a_digest_is_the_hosts(dtype: torch.dtype) -> None:
    tensor = torch.randint(0, 200, (700_001,)).to(dtype)
    assert digest_shard(tensor.cuda()) == digest_shard(tensor)


@pytest.mark.parametrize("state", ["bf16", "8bit"])
def test_a_compiled_update_does_not_wait_and_is_near_the_hosts(state: Any) -> None:
    """The first steps compile."""
    torch.manual_seed(0)
    start = nn.Linear(512, 300)
    found = []
    for device in ("cpu", "cuda"):
        model = nn.Linear(512, 300).to(device)
        model.load_state_dict(start.state_dict())
        optimizer = build_optimizer(OptimSection(state=state), model, compiled=device == "cuda")
        for step in range(4):
            for at, parameter in enumerate(model.parameters()):
                drawn = torch.Generator().manual_seed(10 * step + at)
                parameter.grad = torch.randn(parameter.shape, generator=drawn).to(device)
            torch.cuda.set_sync_debug_mode("error" if device == "cuda" and step == 3 else "default")
            try:
                optimizer.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        found.append(
            {name: p.detach().cpu() - start.state_dict()[name] for name, p in model.named_parameters()}
        )
    assert relative_difference(*found) < 0.02


def test_losses_whole_compiled_and_in_chunks_are_equal() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(256, 64, device="cuda")
    model = nn.Sequential()
    model.head = nn.Linear(64, 1000, bias=False).cuda()
    targets = torch.randint(0, 1000, (256,), device="cuda")
    logits = model.head(hidden)
    whole, compiled = summed_entropy(logits, targets), torch.compile(summed_entropy)(logits, targets)
    chunked = ChunkedHead(model, 100)
    with chunked.summing(targets):
        in_chunks = chunked.take(model.head(hidden)).loss_sum
    assert torch.allclose(whole, compiled, rtol=1e-5)
    assert torch.allclose(whole, in_chunks, rtol=1e-3)  # TF32 may round other shapes otherwise
