"""Start-up side by side: from the process's start to its first optimizer step, ours against a bare script.

The bare script imports the same torch and torchvision, builds the same vision transformer, shards it with fully_shard and
takes one step on random digits. Interleaved rounds; wall and processor seconds, medians, and the ratio.

    python -m bench.start [--rounds 5] [--ranks 2]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).with_name("results")

BARE = """
import os, time
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from fsdp.torchvision_import import import_torchvision
import_torchvision()
from torchvision.models.vision_transformer import VisionTransformer
dist.init_process_group("gloo")
torch.manual_seed(0)
model = VisionTransformer(image_size=28, patch_size=7, num_layers=10, num_heads=2, hidden_dim=128, mlp_dim=128, num_classes=10)
model.conv_proj = torch.nn.Conv2d(1, 128, 7, 7)
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
for block in model.encoder.layers:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
x, y = torch.randn(32, 1, 28, 28), torch.randint(10, (32,))
torch.nn.functional.cross_entropy(model(x), y).backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
print("FIRST", time.time(), flush=True)
dist.destroy_process_group()
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_once(command: list[str], ranks: int) -> tuple[float, float]:
    """Wall seconds from start to the first step, and processor seconds of all ranks to their end."""
    port, before = free_port(), resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.time()
    processes = []
    for rank in range(ranks):
        env = {
            **os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
        }  # fmt: skip
        processes.append(
            subprocess.Popen(command, env=env, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        )
    first = 0.0
    assert processes[0].stdout is not None
    for line in processes[0].stdout:
        if not first and line.startswith(("FIRST", "step 1/1")):
            first = time.time() - began
    codes = [process.wait() for process in processes]
    if any(codes) or not first:
        raise SystemExit(f"{command[:3]} ended with {codes}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return first, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bare = Path(folder, "bare.py")
        bare.write_text(BARE)
        ours = [
            sys.executable,
            "train.py",
            "--train.steps",
            "1",
            "--checkpoint.every_steps",
            "0",
            "--checkpoint.export",
            "false",
        ]
        contenders = {"bare fully_shard script": [sys.executable, str(bare)], "train.py": ours}
        seen: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
        for number in range(options.rounds + 1):
            for name, command in contenders.items():
                place = ["--run.dir", str(Path(folder, f"run{number}"))] if name == "train.py" else []
                took = run_once([*command, *place], options.ranks)
                if number:  # the first round warms the page cache
                    seen[name].append(took)
    print_table(seen, options.ranks)


def print_table(seen: dict[str, list[tuple[float, float]]], ranks: int) -> None:
    machine = f"{os.cpu_count()} cores, {platform.machine()}, {ranks} ranks, gloo"
    lines = [
        f"Start to first step, {machine}, {len(seen['train.py'])} rounds",
        "",
        "| | wall s, median | spread | processor s |",
        "|---|---|---|---|",
    ]
    medians = {}
    for name, rows in seen.items():
        walls = [wall for wall, _ in rows]
        medians[name] = statistics.median(walls)
        cpu = statistics.median(cpu for _, cpu in rows)
        lines.append(f"| {name} | {medians[name]:.2f} | {min(walls):.2f}–{max(walls):.2f} | {cpu:.2f} |")
    bare, ours = medians["bare fully_shard script"], medians["train.py"]
    lines.append(f"\ntrain.py is {ours - bare:+.2f} s, ratio {ours / bare:.2f}")
    text = "\n".join(lines)
    print(text)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "start.md").write_text(text + "\n")
    (RESULTS / "start.json").write_text(json.dumps({"machine": machine, "rounds": seen}, indent=1) + "\n")


if __name__ == "__main__":
    main()
