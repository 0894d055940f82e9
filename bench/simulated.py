"""Rank 0's work for a checkpoint at thousands of ranks, without the ranks: the product's planning, metadata,
manifest and reading, on what each rank would have sent. Part of bench/scale.py.

    python -m bench.simulated 4096 [--preset 124m]
                                   one size, in its own process: the largest takes several gigabytes
"""

from __future__ import annotations

import argparse
import json
import math
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from bench.peers.worker import memory_mib
from fsdp.base import garbage
from fsdp.checkpoint import file_names, manifest, metadata, saver, write_plan
from fsdp.checkpoint.load import CheckpointSource, _tasks
from fsdp.checkpoint.manifest import Manifest
from fsdp.checkpoint.rank_file import Written
from fsdp.checkpoint.snapshot import Piece
from fsdp.checkpoint.tensor_keys import LoadTarget
from fsdp.checkpoint.write_plan import Part, PieceDescription, WritePlan
from fsdp.config import ModelSection
from fsdp.models.registry import resolve

T = TypeVar("T")


@dataclass
class Clock:
    took: dict[str, float] = field(default_factory=dict)

    def __call__(self, name: str, act: Callable[[], T]) -> T:
        began = time.perf_counter()
        result = act()
        self.took[name] = time.perf_counter() - began
        return result


def shapes_of(preset: str) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = resolve(ModelSection(name="transformer", preset=preset), {}).build()
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def pieces_of(rank: int, ranks: int, shapes: dict[str, tuple[int, ...]]) -> Iterator[PieceDescription]:
    """The pieces of a rank of pure FSDP: rows of each parameter and of both moments, and Adam's steps, which
    every rank has.
    """
    for kind in ("model", "exp_avg", "exp_avg_sq", "step"):
        for name, shape in shapes.items():
            path = ("model", name) if kind == "model" else ("optim", "state", name, kind)
            keys = ((".".join(path), path),)
            if kind == "step":
                yield PieceDescription(keys, (), (), (), torch.float32)
                continue
            rows = -(-shape[0] // ranks)
            first, last = min(rank * rows, shape[0]), min((rank + 1) * rows, shape[0])
            if last > first:
                zeros = (0,) * (len(shape) - 1)
                yield PieceDescription(
                    keys, shape, (first, *zeros), (last - first, *shape[1:]), torch.float32
                )


def written(rank: int, pieces: list[PieceDescription], share: list[Part]) -> Written:
    keys = [(pieces[part.index].keys[0][0], math.prod(pieces[part.index].size)) for part in share]
    return Written(
        file_names.data_file(rank), 1 << 20, rank, {key: (numel, 12345 + rank) for key, numel in keys}
    )


def planned(
    ranks: int, shapes: dict[str, tuple[int, ...]], clock: Clock
) -> tuple[WritePlan, list[bytes], int]:
    """The plan as plan.agree makes it, what the ranks will tell of their files, and how many pieces there
    are.
    """
    with garbage.held():
        sent = [pickle.dumps(list(pieces_of(rank, ranks, shapes))) for rank in range(ranks)]
        clock("a rank describes its pieces", lambda: list(pieces_of(0, ranks, shapes)))
        told = clock("rank 0 hears all", lambda: [pickle.loads(one) for one in sent])
        shares = clock("who writes what", lambda: write_plan.share_out(told))
        made, ends = clock("where it lies", lambda: write_plan.lay_out(told, shares))
        reports = [pickle.dumps(written(rank, told[rank], shares[rank])) for rank in range(ranks)]
    return WritePlan("", shares[0], made, ends), reports, sum(map(len, told))


def simulate(ranks: int, preset: str) -> dict[str, Any]:
    shapes, clock = shapes_of(preset), Clock()
    agreed, reports, pieces = planned(ranks, shapes, clock)
    data = clock("first .metadata", lambda: write_plan.metadata_bytes(agreed, []))
    clock("next .metadata", lambda: write_plan.metadata_bytes(agreed, []))
    heard = clock("reports of a save", lambda: [pickle.loads(one) for one in reports])
    digests = clock("digests", lambda: saver._digests(heard))
    files = {one.file: (one.size, one.crc) for one in heard}
    about = Manifest(
        step=1,
        attempt="a",
        created=0.0,
        torch="",
        strategy="fsdp",
        replicate=1,
        shard=ranks,
        ranks=ranks,
        config="",
        reason="",
        counters={},
        metrics={},
        files=files,
        digests=digests,
    )
    sealed = clock("manifest written", lambda: manifest.encode(about))
    clock("manifest read", lambda: manifest.decode(sealed))
    read = clock(".metadata read", lambda: metadata.read(data))
    # The rows of one rank of a run at half the size: a resume on other hardware.
    wants = list(_wants(ranks // 2, shapes))
    nothing: Any = None
    source: Any = CheckpointSource(store=nothing, folder="", metadata=read, manifest=nothing)
    with garbage.held():  # as load does it
        clock("a rank finds its rows", lambda: [_tasks(source.metadata, want) for want in wants])
    once = ("rank 0 hears all", "who writes what", "where it lies", "first .metadata")
    each = ("next .metadata", "reports of a save", "digests", "manifest written")
    again = ("manifest read", ".metadata read", "a rank finds its rows")
    sums = {
        name: sum(clock.took[one] for one in parts)
        for name, parts in (("plan", once), ("seal", each), ("resume", again))
    }
    return {
        "ranks": ranks, "preset": preset, "pieces": pieces, "metadata_mib": len(data) / 2**20,
        "manifest_mib": len(sealed) / 2**20, "peak_mib": memory_mib("VmHWM"), "sums": sums,
        "took": clock.took,
    }  # fmt: skip


def _wants(ranks: int, shapes: dict[str, tuple[int, ...]]) -> Iterator[LoadTarget]:
    for one in pieces_of(0, ranks, shapes):
        key, path = one.keys[0]
        yield LoadTarget(key, Piece(key, path, one.size, one.offsets, torch.empty(one.sizes)))


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ranks", type=int)
    parser.add_argument("--preset", default="124m")
    options = parser.parse_args(argv)
    print(json.dumps(simulate(options.ranks, options.preset)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
