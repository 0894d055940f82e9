"""A training loop of one's own over a sharded module, with this package's checkpoints and watch:

    torchrun --nproc_per_node=2 examples/own_loop.py --run.dir runs/own --train.steps 60

The same command continues the run, on any number of ranks that divides the batch of 32: each has as many of
its rows, since gradients are averaged over the ranks. The flags are train.py's, of the sections that
shardrun.shard and shardrun.Training read (docs/library.md).
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # not needed after `pip install .`

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import shardrun

GLOBAL_BATCH = 32


def build() -> nn.Module:
    block = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)]
    return nn.Sequential(nn.Linear(16, 64), *block, nn.Linear(64, 4))


def batch(step: int, index: int, count: int) -> tuple[Tensor, Tensor]:
    """This rank's rows of the step's batch: a function of the step, so that a resumed run repeats none."""
    source = torch.Generator().manual_seed(step)
    rows = torch.randn(GLOBAL_BATCH, 16, generator=source)
    labels = rows[:, :4].argmax(1)
    return rows[index::count], labels[index::count]


def main() -> None:
    try:
        config = shardrun.load_config(sys.argv[1:])
    except shardrun.ShardrunError as error:
        sys.exit(f"own_loop.py: {error}")
    with shardrun.process(config) as env:
        if GLOBAL_BATCH % env.world_size:
            sys.exit(
                f"{GLOBAL_BATCH} rows do not divide among {env.world_size} ranks. HINT: --nproc_per_node=2"
            )
        model = shardrun.shard(build, config, env)
        optimizer = torch.optim.AdamW(model.root.parameters(), lr=3e-3)
        with shardrun.Training(config, env, model, optimizer) as training:
            data = training.data
            for step in training.steps(config.train.steps or 60):
                rows, labels = (part.to(env.device) for part in batch(step, data.index, data.count))
                with model.micro_batch(last=True):
                    loss = cross_entropy(model.called(rows), labels)
                    loss.backward()
                norm = training.update()
                training.record(loss=loss, grad_norm=norm)


if __name__ == "__main__":
    main()
