"""--data.skip_unreadable: what stands in for a sample that cannot be read, the bound, and any number of
ranks.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from fsdp.base.errors import OneRankError
from fsdp.config import DataSection
from fsdp.data import build_dataset
from fsdp.data.custom import ItemSamples
from fsdp.data.mixture import MixedSamples
from fsdp.data.types import DataInfo, DataSet, MixedRows
from fsdp.data.unreadable_samples import maybe_skipping
from tests.data.own import BROKEN, Files, Mended
from tests.support.runs import Finished, failures, run

BROKEN_DATA = "--data.name tests.data.own:broken --train.steps 6 --precision.master fp64"


def skipping(tmp_path: Path, allowed: int, broken: tuple[int, ...] = BROKEN) -> DataSet:
    data = DataSet(
        train=ItemSamples(Files(broken)), heldout=ItemSamples(Files(broken)), info=DataInfo(kind="other")
    )
    return maybe_skipping(data, allowed, tmp_path, rank=0)


def recorded(run_dir: Path) -> set[int]:
    lines = [line for path in (run_dir / "unreadable").iterdir() for line in path.read_text().splitlines()]
    return {json.loads(line)["index"] for line in lines}


def losses(of: Finished) -> list[float]:
    return [record["loss"] for record in of.records if "loss" in record]


def test_the_next_readable_sample_stands_in_around_the_end(tmp_path: Path) -> None:
    samples, mended = skipping(tmp_path, 4).train, ItemSamples(Mended(()))
    for indices in (np.array([17, 3, 5]), np.arange(50), np.array([18]), np.array([49, 49, 0])):
        assert torch.equal(samples.batch(indices)["inputs"], mended.batch(indices)["inputs"])
    assert recorded(tmp_path) == set(BROKEN)
    lines = (tmp_path / "unreadable" / "rank-00000.jsonl").read_text().splitlines()
    assert len(lines) == len(BROKEN), "a sample is a line, however often it is asked for"
    assert json.loads(lines[0])["why"].endswith(".png is truncated")


def test_in_a_mixture_a_sample_of_the_same_source_stands_in(tmp_path: Path) -> None:
    """The next source's first sample did, and its loss was counted as that of the source it replaced."""
    parts = {"one": ItemSamples(Files((49,))), "two": ItemSamples(Files((48, 49)))}
    data = DataSet(
        train=MixedSamples(parts),
        heldout=None,
        info=DataInfo(kind="other"),
        sources=MixedRows(("one", "two"), np.array([50, 100]), np.array([0, 0])),
    )
    samples, files = maybe_skipping(data, 4, tmp_path, rank=0).train, ItemSamples(Files(()))
    for index, stands_in in ((49, 0), (98, 0), (99, 0), (97, 47)):
        found = samples.batch(np.array([index]))["inputs"]
        assert torch.equal(found, files.batch(np.array([stands_in]))["inputs"]), index


def test_beyond_the_bound_it_stops_and_the_hint_names_the_record(tmp_path: Path) -> None:
    samples = skipping(tmp_path, 3).train
    with pytest.raises(
        OneRankError,
        match=r"^sample 49 cannot be read: OSError: 49.png is truncated: 4 by now, --data.skip_unreadable "
        r"3 allowed. "
        r"HINT: --data.skip_unreadable 8, or repair what .*unreadable lists and remove that folder$",
    ):
        samples.batch(np.arange(50))
    skipping(tmp_path, 8).train.batch(np.arange(50))


def test_the_bound_counts_held_out_samples_and_what_other_ranks_and_starts_met(tmp_path: Path) -> None:
    one = skipping(tmp_path, 4)
    one.train.batch(np.arange(10))
    assert one.heldout is not None
    one.heldout.batch(np.arange(10))
    other = maybe_skipping(one, 4, tmp_path, rank=1)
    assert other is not one
    skipping(tmp_path, 4).train.batch(np.arange(20))
    with pytest.raises(OneRankError, match=r"sample 49 cannot be read: .* 5 by now"):
        skipping(tmp_path, 4).train.batch(np.array([49]))


def test_a_batch_that_fails_with_readable_samples_still_stops(tmp_path: Path) -> None:
    class Odd(ItemSamples):
        def batch(self, indices: np.ndarray) -> dict[str, torch.Tensor]:
            if len(indices) > 1:
                raise RuntimeError("only one at a time")
            return super().batch(indices)

    data = DataSet(train=Odd(Files(())), heldout=None, info=DataInfo(kind="other"))
    with pytest.raises(RuntimeError, match="only one at a time"):
        maybe_skipping(data, 4, tmp_path, 0).train.batch(np.arange(4))
    assert not (tmp_path / "unreadable").exists()


def test_where_all_are_unreadable_it_ends(tmp_path: Path) -> None:
    with pytest.raises(OneRankError, match="none of 50 samples can be read"):
        skipping(tmp_path, 100, tuple(range(50))).train.batch(np.array([7]))


def test_without_the_flag_the_data_are_as_they_are(tmp_path: Path) -> None:
    data = DataSet(train=ItemSamples(Files(BROKEN)), heldout=None, info=DataInfo(kind="other"))
    assert maybe_skipping(data, 0, tmp_path, 0) is data


def test_the_first_sample_need_not_be_readable() -> None:
    section = DataSection(name="tests.data.own:broken", args={"first": 0}, skip_unreadable=1)
    assert build_dataset(section).info.kind == "other"


def test_a_run_stops_at_the_first_as_it_did(tmp_path: Path) -> None:
    (said,) = failures(1, tmp_path, BROKEN_DATA)
    assert said is not None
    assert "cannot be read: OSError: " in said


@pytest.mark.slow
def test_any_number_of_ranks_and_a_resumed_run_train_on_the_same_samples(tmp_path: Path) -> None:
    """Beside a run on the samples that should stand in; each epoch has 50 samples, in batches of 12."""
    mended = run(2, tmp_path / "mended", BROKEN_DATA.replace("broken", "mended"))
    skips = f"{BROKEN_DATA} --data.skip_unreadable 4"
    straight = run(2, tmp_path / "two", skips)
    assert losses(straight) == losses(mended)
    three = run(3, tmp_path / "three", skips)
    assert losses(three) == pytest.approx(losses(mended), rel=1e-12)
    assert failures(2, tmp_path / "resumed", skips, "--train.stop_after 2") == [None, None]
    resumed = run(2, tmp_path / "resumed", skips)
    assert losses(resumed) == losses(mended)
    assert {frozenset(recorded(one.run)) for one in (straight, three, resumed)} == {frozenset(BROKEN)}
