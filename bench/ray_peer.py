"""Training as in Ray's FSDP2 tutorial, on this project's data and model: the contender of
tests/ray/test_tutorial.py.

    python -m bench.ray_peer FOLDER --steps 60 --every 20

Each worker builds the whole model and then shards it; Ray prepares a DataLoader; DCP writes into a temporary
folder that ray.train.report copies into the storage. Written from the API, without this project's training
code.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

GLOBAL_BATCH = 64


class AppState(Stateful):
    """Model and optimizer wrapped for DCP as in the tutorial."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optim = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optim}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
        )


def data_and_model() -> tuple[TensorDataset, nn.Module]:
    import numpy as np

    from fsdp.config import DataSection, ModelSection
    from fsdp.data import build_dataset
    from fsdp.models import resolve

    data = build_dataset(DataSection(name="digits"))
    batch = data.train.batch(np.arange(len(data.train)))
    return TensorDataset(batch["inputs"], batch["targets"]), resolve(ModelSection(), data.info.facts).build()


def shard(model: nn.Module) -> None:
    mesh = init_device_mesh(
        "cpu", (ray.train.get_context().get_world_size(),), mesh_dim_names=("data_parallel",)
    )
    for unit in model.units():  # type: ignore[operator]
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)


def save(model: nn.Module, optimizer: torch.optim.Optimizer, metrics: dict[str, float]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        dcp.save({"app": AppState(model, optimizer)}, checkpoint_id=folder)
        ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))


def train(given: dict[str, Any]) -> None:
    torch.manual_seed(0)
    context: Any = ray.train.get_context()
    dataset, model = data_and_model()
    model.to(ray.train.torch.get_device())
    shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    criterion = nn.CrossEntropyLoss()
    loader = ray.train.torch.prepare_data_loader(
        DataLoader(dataset, batch_size=GLOBAL_BATCH // context.get_world_size(), shuffle=True, drop_last=True)
    )
    step = 0
    with Path(given["folder"], f"rank-{context.get_world_rank()}.jsonl").open("w") as file:
        while step < given["steps"]:
            for images, targets in loader:
                step += 1
                loss = one_step(model, optimizer, criterion, images, targets)
                file.write(json.dumps({"step": step, "loss": loss}) + "\n")
                file.flush()
                if step % given["every"] == 0:
                    save(model, optimizer, {"loss": loss, "step": step})
                if step == given["steps"]:
                    break


def one_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, criterion: nn.Module, images: Tensor, targets: Tensor
) -> float:
    loss = criterion(model(images), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=20)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    folder = options.folder.absolute()
    api: Any = ray.train
    api.torch.TorchTrainer(
        train,
        train_loop_config={"folder": str(folder), "steps": options.steps, "every": options.every},
        scaling_config=api.ScalingConfig(num_workers=2),
        run_config=api.RunConfig(name="tutorial", storage_path=str(folder)),
    ).fit()


if __name__ == "__main__":
    main()
