"""Peak host memory of rank 0 while a 500M-parameter transformer is created on 4 ranks: weights drawn by
shardrun, sent by shardrun, and sent by torch's broadcast_from_rank0.

    python -m bench.start_memory            about a minute, 5 GB; writes bench/results/start_memory.*
    python -m bench.start_memory --short    125M parameters

Each way runs in processes of its own, with glibc set to return freed blocks (its cache would hide
everything). Idle is the memory before the model is built, the peak is VmHWM from there. Bound: the shard, one
block and 150 MB above idle.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from bench import processes, tables
from fsdp.base import proc

RANKS = 4
SIZES = {"vocab_size": 32_000, "width": 1280, "layers": 21, "heads": 10, "max_seq_len": 256, "tied": False}
SMALL = {**SIZES, "vocab_size": 16_000, "width": 768, "layers": 14, "heads": 6}
WAYS = ("ours, drawn", "ours, sent", "torch broadcast_from_rank0")


def status(name: str) -> float:
    """A line of /proc/self/status in MB."""
    return proc.memory_bytes()[name] / 2**20


def one_rank(rank: int, way: str, folder: str, model: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder, "store")), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=300))
    spec = transformer(model)
    if way.startswith("ours"):
        make = prepare_ours(rank, spec, "shard" if way == "ours, drawn" else "broadcast")
    else:
        make = prepare_torch(rank, spec)
    dist.barrier()
    idle = status("VmRSS")
    processes.reset_peak_memory()
    started = time.perf_counter()
    facts = make()
    seconds = time.perf_counter() - started
    result = {
        "idle_mb": idle,
        "peak_mb": status("VmHWM") - idle,
        "rest_mb": status("VmRSS") - idle,
        "seconds": seconds,
        **facts,
    }
    Path(folder, f"{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def transformer(model: dict[str, Any]) -> Any:
    from fsdp.config import ModelSection
    from fsdp.models import resolve

    return resolve(ModelSection(name="transformer", args=model), {"vocab_size": model["vocab_size"]})


def sizes_of(root: Any) -> dict[str, float]:
    """The shard, and one of the repeated blocks, in MB of fp32."""
    block = sum(p.numel() for p in root.blocks[0].parameters())
    total = sum(p.numel() for p in root.parameters())
    return {"parameters": total, "shard_mb": total * 4 / RANKS / 2**20, "block_mb": block * 4 / 2**20}


def prepare_ours(rank: int, spec: Any, init: str) -> Any:
    import torch

    from fsdp.config import Config
    from fsdp.dist.mesh import MeshSizes, build_mesh
    from fsdp.parallel.materialize import materialize
    from fsdp.parallel.shard import shard_model
    from fsdp.run.job import meta_model

    device, sizes = torch.device("cpu"), MeshSizes("fsdp", 1, RANKS)
    mesh = build_mesh(sizes, device)

    def make() -> dict[str, float]:
        sharded = shard_model(
            meta_model(spec),
            Config(),
            sizes=sizes,
            mesh=mesh,
            device=device,
        )
        materialize(sharded, spec=spec, seed=0, init=init, rank=rank)
        return sizes_of(sharded.root)

    return make


def prepare_torch(rank: int, spec: Any) -> Any:
    import torch
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp_shard",))

    def make() -> dict[str, float]:
        full = spec.build().state_dict() if rank == 0 else {}
        with torch.device("meta"):
            root = spec.build()
        for block in root.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(root, mesh=mesh)
        root.to_empty(device="cpu")
        set_model_state_dict(
            root, full, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        )
        return sizes_of(root)

    return make


def measure(way: str, model: dict[str, Any]) -> list[dict[str, float]]:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="start-memory-") as folder:
        ranks = [context.Process(target=one_rank, args=(rank, way, folder, model)) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        assert all(process.exitcode == 0 for process in ranks), f"{way}: a rank failed"
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(RANKS)]


def table(found: dict[str, list[dict[str, float]]]) -> str:
    first = next(iter(found.values()))[0]
    bound = first["shard_mb"] + first["block_mb"] + 150
    lines = [
        f"{first['parameters'] / 1e6:.0f}M parameters in fp32 on {RANKS} ranks, gloo, CPU. Bound for rank "
        f"0: shard "
        f"{first['shard_mb']:.0f} + block {first['block_mb']:.0f} + 150 = {bound:.0f} MB above idle.",
        "",
        "| way | rank 0 peak, MB above idle | others' peak | rank 0 afterwards | seconds | within the "
        "bound |",
        "|---|---|---|---|---|---|",
    ]
    for way, ranks in found.items():
        peak, others = ranks[0]["peak_mb"], max(rank["peak_mb"] for rank in ranks[1:])
        within = "yes" if peak <= bound else "no"
        lines.append(
            f"| {way} | {peak:.0f} | {others:.0f} | {ranks[0]['rest_mb']:.0f} | {ranks[0]['seconds']:.1f} "
            f"| {within} |"
        )
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--short", action="store_true", help="a model of a quarter of the size")
    options = parser.parse_args(argv)
    for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"):
        os.environ[name] = "131072"  # the processes started below read it as they start
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    about, model = tables.machine(), SMALL if options.short else SIZES
    found = {way: measure(way, model) for way in WAYS}
    text = table(found)
    print(
        tables.write(
            "start_memory",
            title="Memory at start",
            command="python -m bench.start_memory",
            about=about,
            text=text,
            numbers={"sizes": model, "ways": found},
            short=options.short,
        )
    )
    return 0 if all("| no |" not in line for line in text.splitlines() if line.startswith("| ours")) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
