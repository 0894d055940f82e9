"""The contenders by name, each with its module and environment. shardrun's are fsdp.run.loop.train."""

from __future__ import annotations

import ast
import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.peers import setup


@dataclass(frozen=True)
class Entry:
    label: str
    module: str = ""
    """module:class; empty is ours."""
    peer: str = ""
    """Its environment in bench/peers/setup.py; empty is the interpreter's own."""
    flags: tuple[str, ...] = ()
    """Ours alone: what is added to the flags of the work."""
    shards: bool = True
    one_rank: bool = False
    """It runs at one rank alone."""
    bound: float = 0.0
    """Most by which its first losses differ from the others'; 0 is what the work allows."""

    @property
    def python(self) -> Path:
        return setup.python_of(self.peer) if self.peer else Path(sys.executable)

    @property
    def missing(self) -> str:
        return setup.missing(self.peer) if self.peer else ""

    def load(self) -> Any:
        module, _, name = self.module.partition(":")
        return getattr(importlib.import_module(module), name)


ROSTER = {
    "bare": Entry("bare fully_shard loop", "bench.peers.bare:Bare"),
    "ours": Entry("shardrun"),
    "bare-loss": Entry("bare loop with a compiled loss", "bench.peers.bare:BareLoss"),
    "whole": Entry("whole compile without FSDP", "bench.peers.whole:Whole", one_rank=True),
    "ours-fp8": Entry("shardrun in fp8", flags=("--speed.float8", "tensorwise"), one_rank=True, bound=8e-2),
    "expert": Entry("bare loop with an expert's idioms", "bench.peers.expert:Expert"),
    "tutorial": Entry("PyTorch's FSDP2 tutorial", "bench.peers.tutorial:Tutorial"),
    "accelerate": Entry("Accelerate, FSDP2", "bench.peers.hf_accelerate:Accelerate", "accelerate"),
    "fabric": Entry("Lightning Fabric, ModelParallel", "bench.peers.fabric:Fabric", "lightning"),
    "ddp": Entry("DDP", "bench.peers.ddp:Ddp", shards=False),
    "ours-ddp": Entry("shardrun --mesh.strategy ddp", flags=("--mesh.strategy", "ddp"), shards=False),
}
"""FSDP2's frameworks, then those that keep a whole copy on each rank and are held against their like."""


def ready(names: list[str]) -> list[str]:
    """Those of `names` that can run here."""
    return [name for name in names if not ROSTER[name].missing]


def absent(names: list[str]) -> list[str]:
    """A line with the reason for each that cannot run."""
    return [
        f"{ROSTER[name].label}: not run, {ROSTER[name].missing}" for name in names if ROSTER[name].missing
    ]


def settings(names: list[str]) -> list[str]:
    """The settings of each, for the note under a table. Read from the source: peers' packages are not
    importable here.
    """
    said = []
    for name in names:
        entry = ROSTER[name]
        if entry.missing:
            continue
        source = (
            Path(setup.ROOT, *entry.module.partition(":")[0].split(".")).with_suffix(".py")
            if entry.module
            else None
        )
        if source is None:
            said.append(f"{entry.label}: defaults" + (f", {' '.join(entry.flags)}" if entry.flags else ""))
        else:
            packages = f" ({' '.join(setup.PEERS[entry.peer].packages)})" if entry.peer else ""
            said.append(f"{entry.label}{packages}: {_settings_in(source)}")
    return said


def _settings_in(source: Path) -> str:
    """The text of the class's `settings = …`; of an f-string the template."""
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "settings":
            return ast.unparse(node.value).lstrip("f").strip("'\"")
    raise AssertionError(f"{source} states no settings")
