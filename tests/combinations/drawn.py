"""Draws a run's flags: one choice of each list, at random. Many draws are refused, as flags that do not go
together are.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

OWN = "tests.support.user_code"
RANKS = {
    1: ["--mesh.strategy fsdp"],
    2: [
        "--mesh.strategy fsdp",
        "--mesh.strategy ddp",
        "--mesh.strategy hsdp --mesh.replicate 2 --mesh.shard 1",
    ],
    3: [
        "--mesh.strategy fsdp",
        "--mesh.strategy ddp",
        "--mesh.strategy hsdp --mesh.replicate 3 --mesh.shard 1",
    ],
    4: ["--mesh.strategy ddp", "--mesh.strategy hsdp --mesh.replicate 2 --mesh.shard 2"],
}
VECTORS = [
    "--model.name mlp --data.name digits --model.args.hidden 96",
    "--model.name vit --data.name digits",
    f"--model.name {OWN}:Sixteens --data.name {OWN}:vectors_with_heldout",
    f"--model.name {OWN}:Scalar --data.name {OWN}:vectors_with_heldout",
]
TEXT = [
    "--data.sources {data}/mixture.toml --data.seq_len 48",
    "--data.name {data}/stories.jsonl --data.seq_len 48",
    "--data.name {data}/stories.jsonl --data.args.rows packed --data.seq_len 48",
    "--data.name synthetic --data.args.kind tokens --data.seq_len 16 --data.args.vocab_size 256",
]
OF_TEXT = [
    ["", "", "--model.args.dropout 0.1"],
    ["", "", "", "--train.z_loss 1e-4", "--memory.loss_chunk 32"],
    ["", "", "", "--lora.rank 2", "--lora.rank 4 --lora.dropout 0.1"],
]
ADAM_STATES = ["", "", "--optim.state bf16", "--optim.state 8bit"]
OF_ALL = [
    ["", "", "--optim.ema 0.9"],
    ["", "", "", "--precision.master bf16", "--precision.param bf16", "--precision.master fp64",
     "--precision.param fp16 --precision.loss_scale 1e9"],
    ["", "", "", "--memory.nvme all --memory.nvme_dir {run}/nvme", "--memory.activation_checkpointing full",
     "--memory.nvme optimizer --memory.nvme_dir {run}/nvme", "--memory.cpu_offload true"],
    ["", "", "--train.micro_batch 1", "--train.micro_batch 2",
     "--train.micro_batch 1 --mesh.accumulate shard", "--train.micro_batch 2 --mesh.accumulate every"],
    ["", "", "--data.workers 0", "--data.workers 3"],
    ["", "", "--mesh.wrap root", "--mesh.wrap every:2", "--mesh.unsharded *.norm.*",
     "--mesh.reshard_after_forward step", "--mesh.reshard_after_forward false"],
    ["", "", "--optim.schedule wsd --optim.warmup_steps 2", "--optim.schedule linear",
     "--optim.warmup_steps 3"],
    ["", "", "", "--train.eval_every_steps 3", "--train.nonfinite skip", "--train.clip_grad_norm 0",
     "--comm.divide_by 1"],
    ["", "", "--checkpoint.every_steps 2", "--checkpoint.every_steps 3 --checkpoint.local_dir {run}/local"],
    ["", "--run.seed 3"],
]  # fmt: skip
OPTIMIZERS = [
    "adamw", "adamw", "adamw", "adam --optim.weight_decay 0", "sgd --optim.weight_decay 0", "muon",
    "torch.optim:NAdam", "torch.optim:RMSprop", "torch.optim:Adagrad",
]  # fmt: skip


@dataclass(frozen=True)
class Drawn:
    ranks: int
    flags: str
    """{run} is the folder of one run, {data} that of the text."""
    stops: Sequence[int]

    def words(self, run: Path, data: Path) -> str:
        return self.flags.format(run=run, data=data)


def draw(seed: int, steps: int) -> Drawn:
    dice = random.Random(seed)
    ranks = dice.choice(list(RANKS))
    chosen = [dice.choice(RANKS[ranks])]
    if dice.random() < 0.5:
        chosen += ["--model.name transformer --model.args.width 32", dice.choice(TEXT)]
        chosen += [dice.choice(some) for some in OF_TEXT]
    else:
        chosen.append(dice.choice(VECTORS))
    optimizer = dice.choice(OPTIMIZERS)
    chosen.append(f"--optim.name {optimizer}")
    if optimizer.startswith("adam"):
        chosen.append(dice.choice(ADAM_STATES))
    chosen += [dice.choice(some) for some in OF_ALL]
    return Drawn(ranks, " ".join(filter(None, chosen)), sorted(dice.sample(range(1, steps), 3)))
