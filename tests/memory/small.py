"""A sharded model with its optimizer and its files, and their resident bytes; runs that are killed."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp import config as configuration
from fsdp.config import Config, MemorySection, MeshSection, OptimSection
from fsdp.distributed.env import DistEnv
from fsdp.distributed.mesh import build_mesh, resolve
from fsdp.models import resolve as resolve_model
from fsdp.optim.optimizer import build_optimizer
from fsdp.shard import nvme, offload
from fsdp.shard.materialize import materialize
from fsdp.shard.nvme import NvmeFiles
from fsdp.shard.shard import Sharded, shard_model, sharding_of
from tests.support.runs import flags, on_a_rank
from tests.support.world import run_world


@dataclass
class Trained:
    sharded: Sharded
    optimizer: torch.optim.Optimizer
    nvme_files: NvmeFiles


class Wide(nn.Module):
    """Sixteen equal matrices, 64 MiB of parameters in all."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(1024, 1024, bias=False)) for _ in range(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def made(env: DistEnv, name: str, folder: Path, everything: bool) -> Trained:
    """Sharded and materialized, with files, as in fsdp/run/loop.py."""
    memory = MemorySection(nvme="all" if everything else "optimizer", nvme_dir=str(folder))
    sizes = resolve(MeshSection(), env.world_size)
    spec = resolve_model(configuration.load(["--model.name", name]).model, {})
    with torch.device("meta"):
        model = spec.build()
    sharded = shard_model(
        model, sharding_of(Config(memory=memory), sizes, env.device), build_mesh(sizes, env.device)
    )
    nvme_files = NvmeFiles(memory, OptimSection(), sharded.root, sharded.units, state_dtype=torch.float32)
    materialize(sharded, spec=spec, seed=0, init="shard", rank=env.rank, nvme_files=nvme_files)
    nvme_files.watch()
    return Trained(sharded, build_optimizer(OptimSection(), sharded.root), nvme_files)


def trained(env: DistEnv, folder: Path, everything: bool) -> Trained:
    """After two steps, with the gradients of the second."""
    one = made(env, "tests.support.user_code:Uneven", folder, everything)
    for _ in range(2):
        one.optimizer.zero_grad()
        one.sharded.root(torch.randn(3, 12)).square().sum().backward()
        one.nvme_files.step(one.optimizer)
    return one


def mapped() -> dict[str, int]:
    """Each unlinked file that this process maps → its resident bytes."""
    text = Path("/proc/self/smaps").read_text()
    blocks = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", text)
    found: dict[str, int] = {}
    for block in blocks:
        if name := re.search(r"/\.shardrun-\w+", block.partition("\n")[0]):
            kib = sum(int(size) for size in re.findall(r"\nRss:\s+(\d+) kB", block))
            found[name[0]] = found.get(name[0], 0) + (kib << 10)
    return found


def most_resident(env: DistEnv, folder: str) -> dict[str, int]:
    """While a second update is made, and after it."""
    others = mapped().keys()  # of runs before this one in the same process

    def resident() -> int:
        return sum(size for name, size in mapped().items() if name not in others)

    nvme.PART_BYTES = 8 << 20
    one = made(env, "tests.memory.small:Wide", Path(folder), everything=False)
    seen: list[int] = []
    one.optimizer.register_step_post_hook(lambda *_: seen.append(resident()))
    for _ in range(2):
        one.sharded.root(torch.randn(2, 1024)).square().mean().backward()
        one.nvme_files.step(one.optimizer)
    files = one.nvme_files._files["states"]
    return {"whole": files.size, "part": nvme.PART_BYTES, "update": max(seen), "rests": resident()}


def resident_with_all(env: DistEnv, folder: str) -> dict[str, int]:
    """With parameters and gradients in files: the most while units run, and what is left between them."""
    others = mapped().keys()

    def resident(*_: object) -> int:
        return sum(size for name, size in mapped().items() if name not in others)

    one = made(env, "tests.memory.small:Wide", Path(folder), everything=True)
    found = {"unit": 4 << 20, "start": resident()}
    inside: list[int] = []
    for block in one.sharded.root.get_submodule("blocks").children():
        block.register_forward_hook(lambda *_: inside.append(resident()))
        block.register_full_backward_pre_hook(lambda *_: inside.append(resident()))
    loss = one.sharded.root(torch.randn(2, 1024, requires_grad=True)).square().mean()
    found |= {"forward": max(inside), "after forward": resident()}
    inside.clear()
    loss.backward()
    found |= {"backward": max(inside), "after backward": resident()}
    one.nvme_files.step(one.optimizer)
    return found | {"after the update": resident()}


def order_of_update(env: DistEnv, folder: str) -> list[tuple[str, int]]:
    """In one update: which part is fetched and which is updated, by their order."""
    nvme.PART_BYTES = 8 << 20
    one = made(env, "tests.memory.small:Wide", Path(folder), everything=False)
    one.sharded.root(torch.randn(2, 1024)).square().mean().backward()
    places = {p: nth for nth, p in enumerate(one.sharded.root.parameters())}
    order: list[tuple[str, int]] = []
    fetch, step = NvmeFiles._fetch, offload.step_some

    def fetched(nvme_files: NvmeFiles, tensors: list[Any]) -> None:
        order.append(("fetched", places[tensors[0]]))
        fetch(nvme_files, tensors)

    def stepped(optimizer: Any, part: Any) -> None:
        order.extend(("updated", places[p]) for p in part)
        step(optimizer, part)

    NvmeFiles._fetch, offload.step_some = fetched, stepped  # type: ignore[method-assign, assignment]
    try:
        one.nvme_files.step(one.optimizer)
    finally:
        NvmeFiles._fetch, offload.step_some = fetch, step  # type: ignore[method-assign]
    return order


def begin(ranks: int, folder: Path, cut: str, what: str, disk: Path) -> None:
    """A start that leaves before its last step."""
    where = f"--memory.nvme {what}" + (f" --memory.nvme_dir {disk}" if what != "off" else "")
    said = run_world(ranks, on_a_rank, ["--run.dir", str(folder), *flags(cut, where)])
    assert said == [None] * ranks, said


def digests(run: Path) -> dict[str, Any]:
    """What the newest checkpoint says of every tensor, parameters and optimizer alike."""
    newest = max((run / "checkpoints").glob("step-*/manifest.json"))
    return json.loads(newest.read_text())["manifest"]["digests"]
