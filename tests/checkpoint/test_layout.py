"""`.metadata` of consecutive saves: packed once, and again when the length of a value changes."""

from __future__ import annotations

import pickle

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from fsdp.checkpoint import metadata, write_plan
from fsdp.checkpoint.snapshot import KeyPath
from fsdp.checkpoint.write_plan import PieceDescription, WritePlan


def layout() -> WritePlan:
    told = [
        [PieceDescription((("model.w", ("model", "w")),), (4, 2), (2 * rank, 0), (2, 2), torch.float32)]
        for rank in range(2)
    ]
    shares = write_plan.share_out(told)
    made, ends = write_plan.lay_out(told, shares)
    return WritePlan("", shares[0], made, ends)


def value(name: str, data: bytes) -> tuple[str, KeyPath, bytes]:
    return (f"train.{name}", ("train", name), data)


def test_metadata_is_packed_once_while_lengths_stay_the_same() -> None:
    agreed = layout()
    first = write_plan.metadata_bytes(agreed, [value("step", b"12345678")])
    assert write_plan.metadata_bytes(agreed, [value("step", b"87654321")]) is first
    assert agreed.metadata is None


def test_offsets_follow_values_that_grow_disappear_or_appear() -> None:
    agreed = layout()
    write_plan.metadata_bytes(agreed, [value("step", b"1"), value("gone", b"22")])
    read = metadata.read(
        write_plan.metadata_bytes(agreed, [value("step", b"4444"), value("new", b"7777777")])
    )
    fresh = layout()
    whole = metadata.read(
        write_plan.metadata_bytes(fresh, [value("step", b"4444"), value("new", b"7777777")])
    )
    assert pickle.dumps(read.storage_data) == pickle.dumps(whole.storage_data)
    assert read == whole
    kept = [key for key, entry in read.state_dict_metadata.items() if isinstance(entry, BytesStorageMetadata)]
    assert kept == ["train.step", "train.new"]
    new = read.storage_data[MetadataIndex("train.new")]
    assert (new.offset, new.length) == (fresh.ends[0] + 4, 7)
