"""The default job's data: real, whole, fixed, and drawn the same everywhere."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from fsdp.config import DataSection
from fsdp.data import DataSet, build_dataset


@pytest.fixture(scope="module")
def digits() -> DataSet:
    return build_dataset(DataSection(name="digits"))


def everything(digits: DataSet) -> tuple[np.ndarray, np.ndarray]:
    assert digits.heldout is not None
    parts = [part.batch(np.arange(len(part))) for part in (digits.train, digits.heldout)]
    inputs, targets = (torch.cat([part[name] for part in parts]).numpy() for name in ("inputs", "targets"))
    return inputs, targets


def test_all_1797_digits_are_there_and_a_tenth_is_held_out(digits: DataSet) -> None:
    assert digits.heldout is not None
    assert (len(digits.train), len(digits.heldout)) == (1618, 179)
    held = digits.heldout.batch(np.arange(179))["targets"]
    counts = torch.bincount(held, minlength=10)
    assert int(counts.min()) >= 17
    assert int(counts.max()) <= 18
    inputs, targets = everything(digits)
    assert np.bincount(targets).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert len(np.unique(inputs.reshape(len(inputs), -1), axis=0)) == len(inputs)


def test_the_same_bits_on_every_machine(digits: DataSet) -> None:
    inputs, targets = everything(digits)
    digest = hashlib.sha256(inputs.tobytes() + targets.tobytes()).hexdigest()
    assert digest == "d0aa582740c6813e2c05d08449e711f7652dbf48d0eb440972bef4ac58de9043"
