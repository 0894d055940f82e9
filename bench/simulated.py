"""Rank 0's work for a checkpoint at thousands of ranks, without the ranks: the product's planning, metadata,
manifest and reading, on what each rank would have sent. Part of bench/scale.py.

    python -m bench.simulated 4096 [--preset 124m]
                                   one size, in its own process: the largest takes several gigabytes
"""

from __future__ import annotations

import argparse
import json
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from bench.peers.worker import memory_mib
from fsdp.base import garbage
from fsdp.checkpoint import file_names, load, manifest, write_plan
from fsdp.checkpoint.crc import crc32
from fsdp.checkpoint.layout import Layout, WholeTensor, make_layout, pack_boxes
from fsdp.checkpoint.local_store import LocalStore
from fsdp.checkpoint.manifest import Manifest
from fsdp.checkpoint.rank_file import Written
from fsdp.checkpoint.snapshot import Piece
from fsdp.checkpoint.tensor_keys import LoadTarget
from fsdp.checkpoint.write_plan import WritePlan
from fsdp.config import ModelSection
from fsdp.models.registry import resolve

T = TypeVar("T")


@dataclass
class Clock:
    """Processor seconds of each part."""

    took: dict[str, float] = field(default_factory=dict)

    def __call__(self, name: str, act: Callable[[], T]) -> T:
        began = time.process_time()
        result = act()
        self.took[name] = time.process_time() - began
        return result


def shapes_of(preset: str) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = resolve(ModelSection(name="transformer", preset=preset), {}).build()
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


Box = tuple[tuple[int, ...], tuple[int, ...]]


def tensors_of(shapes: dict[str, tuple[int, ...]]) -> list[WholeTensor]:
    """Parameters, both moments, and Adam's steps."""
    found = []
    for kind in ("model", "exp_avg", "exp_avg_sq", "step"):
        for name, shape in shapes.items():
            path = ("model", name) if kind == "model" else ("optim", "state", name, kind)
            size = () if kind == "step" else shape
            found.append(WholeTensor(((".".join(path), path),), size, torch.float32))
    return found


def boxes_of(rank: int, ranks: int, tensors: Sequence[WholeTensor]) -> dict[int, Box]:
    """A rank of pure FSDP has rows of each tensor; every rank has the scalars."""
    found: dict[int, Box] = {}
    for nth, tensor in enumerate(tensors):
        if not tensor.size:
            found[nth] = ((), ())
            continue
        rows = -(-tensor.size[0] // ranks)
        first, last = min(rank * rows, tensor.size[0]), min((rank + 1) * rows, tensor.size[0])
        if last > first:
            zeros = (0,) * (len(tensor.size) - 1)
            found[nth] = ((first, *zeros), (last - first, *tensor.size[1:]))
    return found


def written(rank: int, layout: Layout) -> Written:
    own = [nth for nth, _, _ in layout.parts_of(rank)]
    shares = np.array(own, np.int32), np.full(len(own), 12345 + rank, np.uint64)
    return Written(file_names.data_file(rank), 1 << 20, rank, shares=shares)


def planned(ranks: int, tensors: list[WholeTensor], clock: Clock) -> tuple[Layout, int]:
    """The layout as make_plan makes it, and how many pieces there are."""
    clock("a rank describes its pieces", lambda: pack_boxes(tensors, boxes_of(0, ranks, tensors)))
    rows, pieces = [], 0
    for rank in range(ranks):
        boxes = boxes_of(rank, ranks, tensors)
        pieces += len(boxes)
        rows.append(pack_boxes(tensors, boxes))
    layout = clock("who writes what", lambda: make_layout(tensors, rows))
    clock("a rank finds its parts", lambda: layout.parts_of(ranks // 2))
    return layout, pieces


def simulate(ranks: int, preset: str) -> dict[str, Any]:
    tensors, clock = tensors_of(shapes_of(preset)), Clock()
    layout, pieces = planned(ranks, tensors, clock)
    plan = WritePlan("", [], tensors, layout)
    contents = clock("first .metadata", lambda: write_plan.contents_files(plan, []))
    places = bytes(contents[file_names.LAYOUT])
    peaks = {"plan_peak_mib": memory_mib("VmHWM")}
    clock("next .metadata", lambda: sum(map(len, write_plan.contents_files(plan, [])[file_names.METADATA])))
    sealed = _sealed(ranks, plan, places, clock)
    peaks["seal_peak_mib"] = memory_mib("VmHWM")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, file_names.MANIFEST).write_bytes(sealed)
        Path(folder, file_names.LAYOUT).write_bytes(places)
        command = [sys.executable, "-m", "bench.simulated", str(ranks), "--preset", preset]
        found = json.loads(subprocess.check_output([*command, "--resume", folder], text=True))
    clock.took |= found.pop("took")
    peaks |= found
    once = ("who writes what", "a rank finds its parts", "first .metadata")
    each = ("next .metadata", "reports of a save", "digests", "manifest written")
    again = ("manifest read", "layout read", "a rank finds its rows")
    sums = {
        name: sum(clock.took[one] for one in parts)
        for name, parts in (("plan", once), ("seal", each), ("resume", again))
    }
    return {
        "ranks": ranks, "preset": preset, "pieces": pieces,
        "metadata_mib": contents[file_names.METADATA].size / 2**20,
        "layout_mib": len(places) / 2**20,
        "peak_mib": memory_mib("VmHWM"), **peaks, "sums": sums, "took": clock.took,
    }  # fmt: skip


def resumed(ranks: int, preset: str, folder: str) -> dict[str, Any]:
    """What one rank of a run at half the size does before it reads tensors: a resume on other hardware."""
    clock, store, before = Clock(), LocalStore(Path(folder).parent), memory_mib("VmHWM")
    wants = list(_wants(ranks // 2, tensors_of(shapes_of(preset))))
    name = Path(folder).name
    data = store.read(name, file_names.MANIFEST)
    about = clock("manifest read", lambda: manifest.decode(data))
    source = clock("layout read", lambda: load.open_one(store, name, about))
    with garbage.held():  # as load does it
        clock("a rank finds its rows", lambda: [load._tasks(source, want) for want in wants])
    return {"took": clock.took, "resume_base_mib": before, "resume_peak_mib": memory_mib("VmHWM")}


def _sealed(ranks: int, plan: WritePlan, places: bytes, clock: Clock) -> bytes:
    """The manifest, from what the ranks send of their files."""
    assert plan.layout is not None
    layout = plan.layout
    reports = [pickle.dumps(written(rank, layout)) for rank in range(ranks)]
    heard = clock("reports of a save", lambda: [pickle.loads(one) for one in reports])
    shares = [one.shares for one in heard]
    digests = clock("digests", lambda: write_plan.sum_digests(plan, shares))
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
        files={one.file: (one.size, one.crc) for one in heard}
        | {file_names.LAYOUT: (len(places), crc32(places))},
        digests=digests,
    )
    return clock("manifest written", lambda: manifest.encode(about))


def _wants(ranks: int, tensors: Sequence[WholeTensor]) -> Iterator[LoadTarget]:
    for nth, (offsets, sizes) in boxes_of(0, ranks, tensors).items():
        key, path = tensors[nth].keys[0]
        yield LoadTarget(key, Piece(key, path, tensors[nth].size, offsets, torch.empty(sizes, device="meta")))


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ranks", type=int)
    parser.add_argument("--preset", default="124m")
    parser.add_argument("--resume", metavar="FOLDER", help="the resume alone, of the files in this folder")
    options = parser.parse_args(argv)
    if options.resume:
        print(json.dumps(resumed(options.ranks, options.preset, options.resume)))
    else:
        print(json.dumps(simulate(options.ranks, options.preset)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
