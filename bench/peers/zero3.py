"""DeepSpeed ZeRO-3: its engine shards and clips; the optimizer is torch's AdamW, as in the others."""

from __future__ import annotations

from pathlib import Path

import deepspeed
import torch.distributed as dist
from torch import Tensor

from bench.peers.base import CLIP, Given, cross_entropy, make_optimizer, same_everywhere


class Zero3:
    settings = (
        "stage 3, overlap_comm on CUDA, contiguous_gradients, no offload, torch's AdamW; save_checkpoint"
    )

    def __init__(self, given: Given) -> None:
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": CLIP,
            "zero_optimization": {
                "stage": 3,
                "overlap_comm": given.device.type == "cuda",
                "contiguous_gradients": True,
            },
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": given.bf16},
            "zero_force_ds_cpu_optimizer": False,
        }
        for unit in given.units if given.compile else ():
            unit.compile()
        self.engine, *_ = deepspeed.initialize(
            model=given.model, optimizer=make_optimizer(given.model), config=config, dist_init_required=False
        )

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss = cross_entropy(self.engine(inputs), targets)
        self.engine.backward(loss)
        self.engine.step()
        return loss.detach()

    def save(self, folder: Path, step: int) -> None:
        self.engine.save_checkpoint(str(folder), tag=f"step-{step}")
        dist.barrier()

    def load(self, folder: Path) -> int:
        latest = folder / "latest"
        step = same_everywhere(int(latest.read_text().partition("-")[2]) if latest.exists() else 0)
        if step:
            self.engine.load_checkpoint(str(folder), tag=f"step-{step}")
        return step
