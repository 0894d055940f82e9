"""The work that all contenders share: one shardrun configuration gives the model with its weights, and the
samples of each step.

Contenders receive batches made beforehand, so data costs them nothing; shardrun reads its own in the
background.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.peers import base
from fsdp import config as configuration
from fsdp.config import Config
from fsdp.data import Loader
from fsdp.distributed.mesh import DataRank
from fsdp.models import build_real
from fsdp.models.units import blocks_of, find_units
from fsdp.run.job import Job, prepare

COMMON = (
    "--train.steps", "1000000", "--optim.schedule", "constant", "--optim.warmup_steps", "0",
    "--optim.lr", str(base.LR),
    "--train.clip_grad_norm", str(base.CLIP), "--optim.beta1", str(base.BETAS[0]),
    "--optim.beta2", str(base.BETAS[1]),
    "--optim.weight_decay", str(base.DECAY), "--checkpoint.every_steps", "0", "--checkpoint.export", "false",
    "--precision.param", "fp32", "--speed.compile", "false", "--data.name", "synthetic",
    "--data.args.heldout", "0", "--watch.hang_s", "1800",
)  # fmt: skip
"""The watch waits: between its turns a contender stands still while the others compile."""


@dataclass(frozen=True)
class Work:
    """`flags` select the model, the data and the global batch, as in train.py."""

    name: str
    what: str
    flags: tuple[str, ...]
    unit: str
    cuda: bool = False
    """For one CUDA device, in bf16 and compiled; else for a CPU, in fp32."""

    @property
    def all_flags(self) -> list[str]:
        return [*COMMON, *self.flags]

    @property
    def config(self) -> Config:
        return configuration.load(self.all_flags)


def decoder(width: int, layers: int, vocab: int, tied: str = "false") -> tuple[str, ...]:
    sizes = {
        "width": width,
        "layers": layers,
        "heads": max(1, width // 64),
        "vocab_size": vocab,
        "tied": tied,
    }
    words = [word for name, value in sizes.items() for word in (f"--model.args.{name}", str(value))]
    return ("--model.name", "transformer", "--data.args.kind", "tokens", *words)


_ON_CUDA = (
    "--data.args.kind", "tokens", "--precision.param", "bf16", "--speed.compile", "true",
    "--run.log_every_steps", "10", "--model.name",
)  # fmt: skip
"""Ours looks at its numbers when it prints: a turn on a device is a multiple of ten steps."""

_LLAMA = (f"hf:{Path(__file__).with_name('llama-1.1b')}", "--model.weights", "none")
_SMALL = (
    "hidden_size 64 intermediate_size 176 num_hidden_layers 2 num_attention_heads 4 num_key_value_heads 2"
)

WORKS = {
    "tiny": Work(
        "tiny", "decoder, 0.2M parameters: nearly all of a step is the host's",
        (*decoder(64, 4, 256), "--data.seq_len", "8", "--train.global_batch", "8"), "tokens",
    ),
    "vit": Work(
        "vit", "vision transformer, 10 layers of 128, 1×28×28 images, global batch 64",
        ("--model.name", "vit", "--train.global_batch", "64"), "images",
    ),
    "decoder": Work(
        "decoder", "decoder, 6 layers of 384, 64 tokens × 16",
        (*decoder(384, 6, 1024), "--data.seq_len", "64", "--train.global_batch", "16"), "tokens",
    ),
    "100m": Work(
        "100m", "decoder, 100M parameters, 32 tokens × 4",
        (*decoder(768, 12, 19_968, "true"), "--data.seq_len", "32", "--train.global_batch", "4"), "tokens",
    ),
    "124m-cuda": Work(
        "124m-cuda", "decoder, preset 124m, 1024 tokens × 32, bf16, compiled",
        (*_ON_CUDA, "transformer", "--model.preset", "124m", "--data.seq_len", "1024",
         "--train.global_batch", "32"), "tokens", cuda=True,
    ),
    "1b-cuda": Work(
        "1b-cuda", "decoder, preset 1b, 2048 tokens × 4, bf16, compiled",
        (*_ON_CUDA, "transformer", "--model.preset", "1b", "--data.seq_len", "2048",
         "--train.global_batch", "4"), "tokens", cuda=True,
    ),
    "1b8-cuda": Work(
        "1b8-cuda", "decoder, preset 1b, 2048 tokens × 8, bf16, compiled",
        (*_ON_CUDA, "transformer", "--model.preset", "1b", "--data.seq_len", "2048",
         "--train.global_batch", "8"), "tokens", cuda=True,
    ),
    "hf-cuda": Work(
        "hf-cuda", "transformers' Llama, 1.1B parameters, 2048 tokens × 8, bf16, compiled",
        (*_ON_CUDA, *_LLAMA, "--data.args.vocab_size", "32000", "--data.seq_len", "2048",
         "--train.global_batch", "8"), "tokens", cuda=True,
    ),
    "hf-tiny": Work(
        "hf-tiny", "the same, 4.2M parameters",
        ("--model.name", *_LLAMA, *re.sub(r"([a-z]\w+)", r"--model.args.\1", _SMALL).split(),
         "--data.args.kind", "tokens", "--data.args.vocab_size", "32000", "--data.seq_len", "8",
         "--train.global_batch", "8"), "tokens",
    ),
}  # fmt: skip


class Place:
    """One rank's model, units and batches for a work."""

    def __init__(self, work: Work, rank: int, ranks: int, flags: tuple[str, ...] = ()) -> None:
        self.config = configuration.load([*work.all_flags, *flags])
        self.device = torch.device("cuda", 0) if work.cuda else torch.device("cpu")
        self.cuda = work.cuda
        self.job: Job = prepare(self.config, world_size=ranks, num_nodes=1, device=self.device)
        self.rank, self.ranks = rank, ranks

    def given(self) -> base.Given:
        model = build_real(self.job.spec, self.config.run.seed, self.device)
        return base.Given(model, units_of(model), self.device, bf16=self.cuda, compile=self.cuda)

    def batches(self, made: int = 32) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of steps 1, 2, …; after `made` of them they repeat."""
        loader = Loader(
            self.job.data.train,
            self.job.cursor,
            micro_batch=self.job.batch.micro_batch,
            accumulation=1,
            rank=DataRank(self.rank, self.ranks),
            workers=0,
            prefetch=1,
            pin=False,
        )
        ready: list[Any] = [loader.step(step).micro[0].data for step in range(made)]
        return itertools.cycle(
            [(one["inputs"].to(self.device), one["targets"].to(self.device)) for one in ready]
        )

    @property
    def samples_a_step(self) -> int:
        """Images, or tokens for language models, over all ranks."""
        return self.config.train.global_batch * max(1, self.job.data.info.tokens_per_sample)


def units_of(model: nn.Module) -> list[nn.Module]:
    """The blocks that shardrun shards by, so that all have the same units."""
    return blocks_of(find_units(model, "auto"))
