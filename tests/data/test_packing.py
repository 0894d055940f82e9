"""documents packed into rows: which tokens, targets and positions they hold, and how many rows there are."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsdp.data import DataSet, documents
from fsdp.data.documents import Pieces, best_fit, in_rows, pieces_of
from tests.data.test_documents import data
from tests.support.data_cache import own_cache as own_cache
from tests.tokenize.rows import write_lines

SEQ_LEN = 8


def packed(path: Path, **args: Any) -> DataSet:
    return data(path, seq_len=SEQ_LEN, rows="packed", **{"heldout": 0, **args})


def text_of(length: int, letter: str) -> dict[str, str]:
    """A document of `length` tokens: its end token is one of them."""
    return {"text": letter * (length - 1)}


def documents_in(made: DataSet) -> list[tuple[list[int], list[int]]]:
    """(inputs, targets) of each document of each row, cut where positions start again; padding left out."""
    batch = made.train.batch(np.arange(len(made.train)))
    found = []
    for inputs, targets, positions in zip(
        *(batch[name].tolist() for name in ("inputs", "targets", "position_ids")), strict=True
    ):
        begins = [n for n, position in enumerate(positions) if position == 0]
        for begin, end in itertools.pairwise([*begins, SEQ_LEN]):
            assert positions[begin:end] == list(range(end - begin))
            found.append((inputs[begin:end], targets[begin:end]))
    return [one for one in found if set(one[1]) != {-100}]


def test_rows_hold_each_token_once_as_a_target(tmp_path: Path) -> None:
    """Of exactly seq_len, of seq_len and its end token, two short ones, one of two pieces, an empty one."""
    lengths = {"a": SEQ_LEN, "b": SEQ_LEN + 1, "c": 2, "d": 3, "e": SEQ_LEN + 4}
    rows = [text_of(length, letter) for letter, length in lengths.items()]
    made = packed(write_lines(tmp_path / "a.jsonl", [*rows, {"text": ""}]))
    expected = []
    for letter, length in lengths.items():
        tokens = [*[ord(letter)] * (length - 1), 0]
        pieces = [(tokens[at : at + SEQ_LEN], tokens[at + 1 :][:SEQ_LEN]) for at in range(0, length, SEQ_LEN)]
        expected += [(inputs[: len(targets)], targets) for inputs, targets in pieces if targets]
    assert sorted(documents_in(made)) == sorted(expected)
    assert len(made.train) == 4  # 8 + 8 + 8 + (7 and 1) + (3 and 2) places
    assert made.info.masks_targets
    assert made.info.facts["packed"]


def test_pairs_are_cut_and_masked_as_in_a_row_a_document(tmp_path: Path) -> None:
    pairs = [{"prompt": "1+1=", "completion": "2"}, {"prompt": "é=", "completion": "e acute, cut off"}]
    pairs += [{"prompt": "x", "completion": "y"}] * 3
    path = write_lines(tmp_path / "a.jsonl", pairs)
    made = packed(path)
    alone = data(path, seq_len=SEQ_LEN, heldout=0, rows="document")
    batch = alone.train.batch(np.arange(len(alone.train)))
    expected = []
    for inputs, targets in zip(batch["inputs"].tolist(), batch["targets"].tolist(), strict=True):
        count = max(n + 1 for n, target in enumerate(targets) if target != -100)
        expected.append((inputs[:count], targets[:count]))
    assert sorted(documents_in(made)) == sorted(expected)
    assert (len(alone.train), len(made.train)) == (5, 3)


# ---------------------------------------------------------------- the plan


def plain_best_fit(widths: list[int], room: int) -> list[list[int]]:
    """One piece after another, the longest first, each into the fullest row that has room."""
    rows: list[list[int]] = []
    for width in sorted(widths, reverse=True):
        fitting = [row for row in rows if sum(row) + width <= room]
        if not fitting:
            rows.append([])
            fitting = rows[-1:]
        max(fitting, key=sum).append(width)
    return rows


def test_best_fit_is_that_of_a_plain_loop() -> None:
    generator = np.random.default_rng(0)
    for _ in range(300):
        room = int(generator.integers(1, 30))
        widths = generator.integers(1, room + 1, int(generator.integers(1, 60)))
        row_of = best_fit(widths, room)
        filled = np.bincount(row_of, weights=widths).astype(int).tolist()
        # Which of several equally full rows takes a piece is open.
        assert sorted(filled) == sorted(map(sum, plain_best_fit(widths.tolist(), room)))


def packed_rows(lengths: np.ndarray, part: int) -> tuple[Pieces, list[int]]:
    starts = np.cumsum(lengths) - lengths
    parts = [slice(first, first + part) for first in range(0, len(lengths), part)]
    pieces, ends = in_rows((pieces_of(starts[cut], lengths[cut], 16, True) for cut in parts), 16)
    return pieces, ends.tolist()


def test_groups_hold_every_piece_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "GROUP", 100)
    lengths = np.random.default_rng(3).integers(2, 40, 1000)
    pieces, ends = packed_rows(lengths, 100)
    widths = np.add.reduceat(pieces.width, [0, *ends[:-1]])
    assert widths.max() <= 16
    assert widths.sum() == (lengths - 1).sum()
    wanted = pieces_of(np.cumsum(lengths) - lengths, lengths, 16, True)
    assert sorted(zip(*map(list, pieces), strict=True)) == sorted(zip(*map(list, wanted), strict=True))
