"""A TorchTrainer of one's own that reads Ray Data; placement, resources and runtime_env are Ray's arguments.

    python examples/ray_data.py --train.steps 40

Run again it continues from the newest checkpoint. Ray Data's position is not saved: each start reads from the
first row.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.train import RunConfig, ScalingConfig, get_dataset_shard
from ray.train.torch import TorchTrainer

ROOT = str(Path(__file__).resolve().parents[1])


def work(settings: dict[str, Any]) -> None:
    """One rank: its share of the rows; metrics and checkpoints go to ray.train.report."""
    import torch
    from torch import nn
    from torch.nn.functional import cross_entropy

    import shardrun

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))

    config, rows = shardrun.load_config(settings["flags"]), get_dataset_shard("train")
    with shardrun.process(config) as env:
        model = shardrun.shard(build, config, env)
        optimizer = torch.optim.AdamW(model.root.parameters(), lr=3e-3)

        def batches() -> Any:
            while True:
                yield from rows.iter_torch_batches(batch_size=16, drop_last=True, device=env.device)

        with shardrun.Training(config, env, model, optimizer) as training:
            for _, batch in zip(training.steps(config.train.steps or 40), batches(), strict=False):
                with model.micro_batch(last=True):
                    loss = cross_entropy(model.called(batch["x"]), batch["y"])
                    loss.backward()
                norm = training.update()
                training.record(loss=loss, grad_norm=norm)


def main(argv: list[str]) -> None:
    x = np.random.default_rng(0).standard_normal((512, 16), dtype=np.float32)
    rows = [{"x": row, "y": int(row[:4].argmax())} for row in x]
    ray.init(runtime_env={"env_vars": {"PYTHONPATH": ROOT}})  # not needed after `pip install .`
    result = TorchTrainer(
        work,
        train_loop_config={"flags": argv},
        scaling_config=ScalingConfig(
            num_workers=2, resources_per_worker={"CPU": 1}, placement_strategy="SPREAD"
        ),
        datasets={"train": ray.data.from_items(rows)},
        run_config=RunConfig(name="data", storage_path=str(Path("runs/ray").absolute())),
    ).fit()
    assert result.metrics is not None
    print(f"step {result.metrics['step']:.0f}: loss {result.metrics['loss']:.3f}, {result.checkpoint}")


if __name__ == "__main__":
    main(sys.argv[1:])
