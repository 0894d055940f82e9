"""A contender as a standalone script: torchvision's vision transformer, saved every few steps, resumed from
its newest save.

    torchrun --nproc_per_node 4 bench/peers/alone.py NAME --steps 20 [--every 5 --folder DIR]

Prints `step N/M` after each step, as train.py does. Imports only what NAME needs, because its start is timed.
bench/start.py and bench/restart.py interleave runs of several such scripts.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).parents[2])

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import fsdp  # noqa: E402, F401 - makes torchvision importable beside a CPU build of torch
from bench.peers.base import Given  # noqa: E402

CLASSES = {
    "bare": "bench.peers.bare:Bare",
    "tutorial": "bench.peers.tutorial:Tutorial",
    "accelerate": "bench.peers.hf_accelerate:Accelerate",
    "fabric": "bench.peers.fabric:Fabric",
    "ddp": "bench.peers.ddp:Ddp",
}
BATCH = 64


def model(channels: int = 1, width: int = 128) -> torch.nn.Module:
    from torchvision.models.vision_transformer import VisionTransformer

    torch.manual_seed(0)
    made = VisionTransformer(
        image_size=28,
        patch_size=7,
        num_layers=10,
        num_heads=2,
        hidden_dim=width,
        mlp_dim=width,
        num_classes=10,
    )
    made.conv_proj = torch.nn.Conv2d(channels, width, 7, 7)
    return made


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=list(CLASSES))
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--every", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    module, _, name = CLASSES[options.name].partition(":")
    kind = getattr(importlib.import_module(module), name)
    dist.init_process_group("gloo")
    made: Any = model()
    contender = kind(Given(made, list(made.encoder.layers), torch.device("cpu")))
    at = contender.load(options.folder) if options.folder else 0
    share = BATCH // dist.get_world_size()
    for step in range(at + 1, options.steps + 1):
        inputs, targets = torch.randn(share, 1, 28, 28), torch.randint(10, (share,))
        loss = contender.step(inputs, targets)
        if dist.get_rank() == 0:
            print(f"step {step}/{options.steps} loss {float(loss):.4f}", flush=True)
        if options.every and step % options.every == 0:
            contender.save(options.folder, step)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
