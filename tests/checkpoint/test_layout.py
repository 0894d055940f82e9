"""The layout of a save and its `.metadata`: each byte written once, even loads; read by torch and by us."""

from __future__ import annotations

import math
import pickle
from collections import Counter, deque
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from fsdp.checkpoint import layout, layout_file, metadata, torch_file, write_plan
from fsdp.checkpoint.file_names import LAYOUT, METADATA
from fsdp.checkpoint.layout import Layout, WholeTensor
from fsdp.checkpoint.metadata_pickle import metadata_pickle
from fsdp.checkpoint.snapshot import KeyPath, Piece, Snapshot
from fsdp.checkpoint.stored_parts import PartsOfLayout, PartsOfMetadata
from fsdp.checkpoint.write_plan import WritePlan
from fsdp.dist.collectives import ObjectGroup
from fsdp.dist.env import DistEnv
from tests.support.world import run_world

Box = tuple[tuple[int, ...], tuple[int, ...]]


def tensor(key: str, *size: int, dtype: torch.dtype = torch.float32, buffer: bool = False) -> WholeTensor:
    return WholeTensor(((key, tuple(key.split("."))),), size, dtype, buffer)


def rows(size: Sequence[int], nth: int, parts: int, dim: int = 0) -> Box | None:
    """torch's chunks: all but the last full ones have as many rows; the last may have none."""
    each = -(-size[dim] // parts)
    first, last = min(nth * each, size[dim]), min((nth + 1) * each, size[dim])
    offsets, sizes = [0] * len(size), list(size)
    offsets[dim], sizes[dim] = first, last - first
    return (tuple(offsets), tuple(sizes)) if last > first else None


TENSORS = (
    *(tensor(f"model.{nth}.w", 10, 6) for nth in range(5)),
    *(tensor(f"model.{nth}.b", 7) for nth in range(5)),
    tensor("model.big", 900, 1024),
    tensor("model.wide", 4, 3, 8, dtype=torch.bfloat16),
    tensor("model.statistics", 12, buffer=True),
    WholeTensor(
        (("model.tied", ("model", "tied")), ("model.head", ("model", "head"))), (9, 2), torch.float32
    ),
    *(tensor(f"optim.{nth}.step") for nth in range(9)),
)


def fsdp(rank: int, ranks: int, size: tuple[int, ...]) -> Box | None:
    return rows(size, rank, ranks) if size else ((), ())


def hsdp(rank: int, ranks: int, size: tuple[int, ...]) -> Box | None:
    return fsdp(rank % (ranks // 2), ranks // 2, size)


def ddp(rank: int, ranks: int, size: tuple[int, ...]) -> Box | None:
    return (0,) * len(size), size


def by_columns(rank: int, ranks: int, size: tuple[int, ...]) -> Box | None:
    return rows(size, rank, ranks, dim=len(size) - 1) if size else ((), ())


def mixed(rank: int, ranks: int, size: tuple[int, ...]) -> Box | None:
    """Replicas that hold different numbers of boxes."""
    return ddp(rank, ranks, size) if size == (7,) or rank >= ranks - 2 else fsdp(rank, ranks - 2, size)


SPREADS = (fsdp, hsdp, ddp, by_columns)


def made(spread: Callable[..., Box | None], ranks: int) -> Layout:
    told = [
        {
            nth: box
            for nth, one in enumerate(TENSORS)
            if (box := spread(rank, ranks, () if not one.size else one.size)) is not None
        }
        for rank in range(ranks)
    ]
    return layout.make_layout(TENSORS, [layout.pack_boxes(TENSORS, boxes) for boxes in told])


@pytest.mark.parametrize("ranks", [1, 2, 4, 6])
@pytest.mark.parametrize("spread", SPREADS)
def test_each_element_is_written_once(spread: Callable[..., Box | None], ranks: int) -> None:
    if spread is hsdp and ranks % 2:
        pytest.skip("two replicas")
    found = made(spread, ranks)
    for nth, one in enumerate(TENSORS):
        times, writers = np.zeros(one.size), found.writers(nth)
        assert (np.diff(writers.ranks) > 0).all()
        for offsets, sizes in zip(writers.offsets.tolist(), writers.sizes.tolist(), strict=True):
            times[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))] += 1
        assert (times == 1).all(), one


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_replicas_write_equal_amounts(ranks: int) -> None:
    found = made(ddp, ranks)
    load: Counter[int] = Counter()
    for nth in range(len(TENSORS)):
        writers = found.writers(nth)
        for rank, length in zip(writers.ranks.tolist(), found.lengths(nth, writers).tolist(), strict=True):
            load[rank] += length
    assert max(load.values()) - min(load.values()) < 2 * torch_file.item_length(1024 * 900)
    assert len(found.writers(10).ranks) == ranks, "a large tensor is shared by rows"
    assert found.writers(12).ranks.tolist() == [0], "rank 0's statistics"


def test_small_tensors_go_to_the_replica_with_the_least_to_write() -> None:
    """40 of equal size on 4 replicas, and a larger one, which counts as four of them."""
    tensors = [tensor("large", 40, 50), *(tensor(f"small.{nth}", 10, 50) for nth in range(40))]
    boxes = {nth: ((0, 0), one.size) for nth, one in enumerate(tensors)}
    found = layout.make_layout(tensors, [layout.pack_boxes(tensors, boxes)] * 4)
    writer = [int(found.writers(nth).ranks[0]) for nth in range(len(tensors))]
    times = Counter(writer[1:])
    assert sorted(times.values()) == [8, 10, 11, 11]
    assert times[writer[0]] == 8, "of the small ones it writes fewer"


@pytest.mark.parametrize("spread", SPREADS)
def test_a_rank_finds_its_own_parts(spread: Callable[..., Box | None]) -> None:
    found = made(spread, 4)
    parts = {(rank, *part) for rank in range(4) for part in found.parts_of(rank)}
    assert parts == {
        (rank, nth, first, last)
        for nth in range(len(TENSORS))
        for writers in [found.writers(nth)]
        for rank, first, last in zip(
            writers.ranks.tolist(), writers.first.tolist(), writers.last.tolist(), strict=True
        )
    }


def test_tensors_of_one_shape_share_a_division_unless_a_rank_holds_them_differently() -> None:
    told = [{nth: ((0,) * len(one.size), one.size) for nth, one in enumerate(TENSORS)} for _ in range(2)]
    told[1][3] = ((0, 0), (10, 6))
    rows_of = [layout.pack_boxes(TENSORS, boxes) for boxes in told]
    assert len(layout.make_layout(TENSORS, rows_of).divisions) == 7
    del told[1][3]
    rows_of = [layout.pack_boxes(TENSORS, boxes) for boxes in told]
    found = layout.make_layout(TENSORS, rows_of)
    assert len(found.divisions) == 8
    assert found.writers(3).ranks.tolist() == [0]


@pytest.mark.parametrize("spread", SPREADS)
def test_metadata_is_read_by_torch_and_by_our_own_reader(spread: Callable[..., Box | None]) -> None:
    found = made(spread, 4)
    values: list[tuple[str, KeyPath, bytes]] = [("train.step", ("train", "step"), b"12345")]
    data = bytes(metadata_pickle(found, values))
    theirs, ours = pickle.loads(data), metadata.read(data)
    assert isinstance(theirs, Metadata)
    assert theirs.state_dict_metadata == ours.state_dict_metadata
    assert theirs.storage_data == ours.storage_data
    assert theirs.planner_data == ours.planner_data
    assert list(theirs.state_dict_metadata) == [key for one in TENSORS for key, _ in one.keys] + [
        "train.step"
    ]
    ends: Counter[str] = Counter()
    for nth, one in enumerate(TENSORS):
        writers = found.writers(nth)
        for rank, offsets, sizes in zip(
            writers.ranks.tolist(), writers.offsets.tolist(), writers.sizes.tolist(), strict=True
        ):
            length = torch_file.item_length(math.prod(sizes) * one.dtype.itemsize)
            file = f"__{rank}_0.distcp"
            for key, _ in one.keys:
                place = theirs.storage_data[MetadataIndex(key, offsets)]
                assert (place.relative_path, place.offset, place.length) == (file, ends[file], length)
                entry = theirs.state_dict_metadata[key]
                assert isinstance(entry, TensorStorageMetadata)
                assert entry.properties.dtype == one.dtype
                assert [list(chunk.offsets) for chunk in entry.chunks] == writers.offsets.tolist()
                assert [list(chunk.sizes) for chunk in entry.chunks] == writers.sizes.tolist()
            ends[file] = torch_file.aligned(ends[file] + length)
    assert theirs.storage_data[MetadataIndex("train.step")].offset == ends["__0_0.distcp"]


def test_large_offsets_and_many_dimensions_are_written() -> None:
    tensors = (tensor("big", 3 * 2**31, 2, dtype=torch.float64), tensor("conv", 4, 3, 2, 2, 2))
    told = [{nth: rows(one.size, rank, 2) for nth, one in enumerate(tensors)} for rank in range(2)]
    packed = [layout.pack_boxes(tensors, boxes) for boxes in told]  # type: ignore[arg-type]
    read = metadata.read(bytes(metadata_pickle(layout.make_layout(tensors, packed), [])))
    big, conv = read.state_dict_metadata["big"], read.state_dict_metadata["conv"]
    assert isinstance(big, TensorStorageMetadata)
    assert isinstance(conv, TensorStorageMetadata)
    assert tuple(big.chunks[1].offsets) == (3 * 2**30, 0)
    assert tuple(conv.chunks[1].offsets) == (2, 0, 0, 0, 0)
    assert read.storage_data[MetadataIndex("conv", (0, 0, 0, 0, 0))].offset > 2**35


def value(name: str, data: bytes) -> tuple[str, KeyPath, bytes]:
    return (f"train.{name}", ("train", name), data)


def test_metadata_is_packed_once_while_lengths_stay_the_same() -> None:
    agreed = WritePlan("", [], TENSORS, made(fsdp, 2))
    first = write_plan.contents_files(agreed, [value("step", b"12345678")])
    assert write_plan.contents_files(agreed, [value("step", b"87654321")]) is first


def test_offsets_follow_values_that_grow_disappear_or_appear() -> None:
    agreed = WritePlan("", [], TENSORS, made(fsdp, 2))
    first = write_plan.contents_files(agreed, [value("step", b"1"), value("gone", b"22")])
    then = write_plan.contents_files(agreed, [value("step", b"4444"), value("new", b"7777777")])
    before, read = (metadata.read(bytes(files[METADATA])) for files in (first, then))
    kept = [key for key, entry in read.state_dict_metadata.items() if isinstance(entry, BytesStorageMetadata)]
    assert kept == ["train.step", "train.new"]
    old, new = before.storage_data[MetadataIndex("train.step")], read.storage_data[MetadataIndex("train.new")]
    assert (new.offset, new.length) == (old.offset + 4, 7)
    assert layout_file.decode(bytes(then[LAYOUT]))[1].storage_data[MetadataIndex("train.new")] == new


Spread = Callable[..., Box | None]


@pytest.mark.parametrize("spread", SPREADS)
def test_the_layout_file_has_the_places_that_metadata_has(spread: Spread) -> None:
    found = made(spread, 4)
    values = [value("step", b"12345"), value("lr", b"123")]
    stored = metadata.read(bytes(metadata_pickle(found, values)))
    layout_read, about = layout_file.decode(layout_file.encode(found, values))
    ours, theirs = PartsOfLayout(layout_read), PartsOfMetadata(stored)
    assert list(about.state_dict_metadata) == list(stored.state_dict_metadata)
    for key, entry in stored.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            assert about.storage_data[MetadataIndex(key)] == stored.storage_data[MetadataIndex(key)]
            continue
        again = about.state_dict_metadata[key]
        assert isinstance(again, TensorStorageMetadata)
        assert (again.size, again.properties.dtype) == (entry.size, entry.properties.dtype)
    tensors = [key for one in TENSORS for key, _ in one.keys]
    # in any order, and boxes within a part, over several, and of no element
    for key in (*tensors, *tensors[::-1], *tensors[::3]):
        size = tuple(stored.state_dict_metadata[key].size)  # type: ignore[union-attr]
        whole = ((0,) * len(size), size)
        middle = tuple(n // 3 for n in size), tuple(n - n // 3 for n in size)
        for box in (whole, middle, (whole[0], (0, *size[1:])) if size else whole):
            assert list(ours.overlapping(key, *box)) == list(theirs.overlapping(key, *box))
    groups = [{parts.memory(key) for key in ("model.tied", "model.head")} for parts in (ours, theirs)]
    assert [len(one) for one in groups] == [1, 1]


@pytest.mark.parametrize("state", [np.float64(2), deque([1])], ids=["of numpy", "an object"])
def test_a_state_that_no_resume_reads_is_not_saved(state: object) -> None:
    """Each save was sealed, and each start ended with `cannot be read`."""

    def packed(value: object) -> list[tuple[str, KeyPath, bytes]]:
        path = ("optim", "state", "w", "d")
        return write_plan.pack_values(Snapshot([], {"optim.state.w.d": (path, value)}))

    for plain in (2.0, None, [torch.ones(2), 3], {"a": 1}):
        assert len(packed(plain)) == 1
    with pytest.raises(TypeError, match=r"optim\.state\.w\.d is a \w+, which no resume reads"):
        packed(state)


def test_digests_are_sums_of_the_ranks_shares_under_every_key() -> None:
    plan = WritePlan("", [], TENSORS)
    shares = [{"model.0.w": 2**64 - 1, "model.tied": 5}, {"model.0.w": 3}]
    found = write_plan.sum_digests(plan, [write_plan.pack_shares(plan, one) for one in shares])
    two, five = f"{2:016x}", f"{5:016x}"
    assert found == {"model.0.w": (60, two), "model.tied": (18, five), "model.head": (18, five)}


def plans(env: DistEnv) -> tuple[bool, list[str], list[list[int]]]:
    """Whether a plan is kept, the tensors of one after rank 1 alone has a further one, each plan's parts."""

    def snapshot(*keys: str) -> Snapshot:
        pieces = [Piece(key, ("model", key), (2, 3), (env.rank, 0), torch.zeros(1, 3)) for key in keys]
        return Snapshot(pieces, {})

    group = ObjectGroup()
    first = write_plan.make_plan(snapshot("a"), None, group)
    kept = write_plan.make_plan(snapshot("a"), first, group)
    more = write_plan.make_plan(snapshot(*("a", "b")[: env.rank + 1]), kept, group)
    tensors = [one.keys[0][0] for one in more.tensors]
    return kept is first, tensors, [[part.index for part in plan.mine] for plan in (first, more)]


def test_a_plan_is_kept_until_any_rank_has_another_tensor() -> None:
    """Optimizer states of experts that only one rank's samples have reached."""
    assert run_world(2, plans) == [(True, ["a", "b"], [[0], [0]]), (True, ["a", "b"], [[0], [0, 1]])]
