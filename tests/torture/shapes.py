"""What is killed: the runs of a torture, as data, and the text that some of them train on."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

STEPS, OBJECT_STEPS, EVERY, KEEP = 150, 60, 5, 2
"""A save in an object store takes ten times as long."""
WIDE = ("--model.name", "mlp", "--data.name", "digits")
SMALL = (*WIDE, "--model.args.hidden", "96")
"""76,330 parameters, a checkpoint of 0.9 MiB; WIDE has ten times as many."""


@dataclass(frozen=True)
class Layout:
    """How a start divides the parameters among its ranks."""

    strategy: str
    ranks: int

    @property
    def flags(self) -> list[str]:
        replicate = ["--mesh.replicate", "2"] if self.strategy == "hsdp" else []
        return ["--mesh.strategy", self.strategy, *replicate]

    def __str__(self) -> str:
        return f"{self.strategy} on {self.ranks}"


@dataclass(frozen=True)
class Shape:
    """One kind of run."""

    strategy: str
    ranks: int
    steps: int = STEPS
    what: str = ""
    """What it has beside its layout, in words."""
    flags: tuple[str, ...] = WIDE
    """{run} is a folder of the run's own, {data} that of `write_data`."""
    objects: bool = False
    """Checkpoints in an object store, else in the run directory."""
    local: bool = False
    """Sealed in --checkpoint.local_dir first."""
    others: tuple[Layout, ...] = ()
    """Layouts of some of its starts. Sums are then rounded in another order, so it trains in fp64, and is
    compared within CLOSE instead of bit for bit.
    """

    @property
    def layout(self) -> Layout:
        return Layout(self.strategy, self.ranks)

    @property
    def layouts(self) -> list[Layout]:
        return [self.layout, *self.others]

    @property
    def store(self) -> str:
        if self.objects:
            return "S3 server"
        return "node's own disk, then a folder" if self.local else "folder"

    @property
    def name(self) -> str:
        return f"{self.layout}{self.what and f', {self.what}'}"


CLOSE = 1e-12
"""The largest difference of a loss or a parameter, as a part of itself or, below 1, of 1."""

EXACT = ("--precision.master", "fp64", "--optim.name", "sgd", "--optim.lr", "0.01")
TEXT = (
    "--model.name", "transformer", "--model.args.width", "32", "--model.args.dropout", "0.1",
    "--data.sources", "{data}/mixture.toml", "--data.seq_len", "48", "--data.workers", "3",
)  # fmt: skip

SHAPES = (
    Shape("fsdp", 2, what="wide"),
    Shape("ddp", 3, what="moving average", flags=(*SMALL, "--optim.ema", "0.9")),
    Shape("hsdp", 4, flags=SMALL),
    Shape("fsdp", 3, what="micro-batches", flags=(*SMALL, "--train.micro_batch", "2")),
    Shape("hsdp", 4, flags=SMALL, local=True),
    Shape("fsdp", 2, OBJECT_STEPS, flags=SMALL, objects=True),
    Shape("fsdp", 2, OBJECT_STEPS, flags=SMALL, objects=True, local=True),
    Shape("fsdp", 2, what="8-bit states", flags=(*SMALL, "--optim.state", "8bit")),
    Shape("fsdp", 2, what="bf16 states", flags=(*SMALL, "--optim.state", "bf16")),
    Shape("fsdp", 2, what="files", flags=(*SMALL, "--memory.nvme", "all", "--memory.nvme_dir", "{run}/nvme")),
    Shape("fsdp", 2, what="mixed text, packed", flags=TEXT),
    Shape("ddp", 2, what="mixed text, LoRA", flags=(*TEXT, "--lora.rank", "4", "--lora.dropout", "0.1")),
    Shape("hsdp", 4, what="mixed text, Muon", flags=(*TEXT, "--optim.name", "muon", "--optim.ema", "0.9")),
    Shape(
        "fsdp",
        2,
        what="then others",
        flags=(*SMALL, *EXACT),
        others=(Layout("fsdp", 3), Layout("ddp", 2), Layout("hsdp", 4), Layout("fsdp", 1)),
    ),
)


SOURCE = """
[[data.sources]]
name = "{folder}/{label}.jsonl"
label = "{label}"
weight = {weight}
args = {{rows = "packed", heldout = 0.05}}
"""


def write_data(folder: Path) -> None:
    """Text of two kinds, the same at every call, and the table that mixes it."""
    draw = random.Random(15)
    folder.mkdir(parents=True)
    tables = []
    for label, weight, longest in (("stories", 2, 40), ("notes", 1, 8)):
        texts = [_words(draw, draw.randrange(3, longest)) for _ in range(400)]
        lines = "".join(json.dumps({"text": one}) + "\n" for one in texts)
        (folder / f"{label}.jsonl").write_text(lines)
        tables.append(SOURCE.format(folder=folder, label=label, weight=weight))
    (folder / "mixture.toml").write_text("".join(tables))


def _words(draw: random.Random, count: int) -> str:
    return " ".join("".join(draw.choices("abcdefghij", k=draw.randrange(1, 9))) for _ in range(count))
