"""Items and outputs of one's own, as people write them, in float64 against a loop in one process: dicts with
the names of forward, two inputs in a pair, a dict of losses, and an IterableDataset.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from fsdp.base.errors import ConfigError
from fsdp.data import Cursor
from fsdp.models import build_real, resolve
from fsdp.parity.__main__ import main
from fsdp.predict.__main__ import main as predict
from fsdp.run.job import prepare
from tests.support.plain_loop import relative_difference
from tests.support.runs import failures, flags, run, settings

HERE, STEPS, BATCH, ROWS = __name__, 4, 7, 24
SGD = (
    f"--train.steps {STEPS} --train.global_batch {BATCH} --train.clip_grad_norm 0 --precision.master fp64 "
    "--optim.name sgd --optim.lr 0.05 --optim.momentum 0 --optim.schedule constant --optim.warmup_steps 0 "
)


class Two(nn.Module):
    """The cross entropy of its logits is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(8, 6), nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, image: Tensor, text: Tensor) -> Any:
        return self.head(torch.tanh(self.left(image)) + torch.tanh(self.right(text)))


class Losses(Two):
    def forward(self, image: Tensor, text: Tensor, label: Tensor) -> Any:  # type: ignore[override]
        apart = (self.left(image) - self.right(text)).square().mean()
        return {"match": apart, "classify": F.cross_entropy(super().forward(image, text), label)}


class Total(Losses):
    """One of its losses counts twice."""

    def forward(self, image: Tensor, text: Tensor, label: Tensor) -> Any:  # type: ignore[override]
        parts = super().forward(image, text, label)
        return {"loss": 2 * parts["match"] + parts["classify"], **parts}


class Shifty(Losses):
    calls = 0

    def forward(self, image: Tensor, text: Tensor, label: Tensor) -> Any:  # type: ignore[override]
        self.calls += 1
        found = super().forward(image, text, label)
        return found if self.calls < 3 else {"match": found["match"]}


class Vector(Losses):
    def forward(self, image: Tensor, text: Tensor, label: Tensor) -> Any:  # type: ignore[override]
        return {**super().forward(image, text, label), "size": self.left(image).square().mean(1)}


class Several(Losses):
    def forward(self, image: Tensor, text: Tensor, label: Tensor) -> Any:  # type: ignore[override]
        return tuple(super().forward(image, text, label).values())


class Apart(Losses):
    def forward(self, image: Tensor, text: Tensor, label: Tensor) -> Any:  # type: ignore[override]
        names = ("match", "classify", "third")[torch.distributed.get_rank() :]
        return {name: super(Losses, self).forward(image, text).mean() for name in names}


def row(index: int) -> tuple[Tensor, Tensor, int]:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(8, generator=generator), torch.randn(4, generator=generator), index % 3


class Dicts(Dataset[Any]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        return dict(zip(("image", "text", "label"), row(index), strict=True))


class Pairs(Dicts):
    def __getitem__(self, index: int) -> Any:
        return row(index)[:2], row(index)[2]


class Mixed(Dicts):
    """A dict of the inputs, and a target of one byte."""

    def __getitem__(self, index: int) -> Any:
        image, text, label = row(index)
        return {"text": text, "image": image}, np.uint8(label)


class Flow(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return map(Pairs().__getitem__, range(ROWS))


class Random(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        while True:
            yield torch.rand(8), 1


class Wrong(Dicts):
    def __getitem__(self, index: int) -> Any:
        return {"picture": row(index)[0], "label": 0}


def held() -> Any:
    return Dicts(), Dicts()


def held_pairs() -> Any:
    return Pairs(), Pairs()


def words(model: str, data: str) -> str:
    return f"--model.name {HERE}:{model} --data.name {HERE}:{data} {SGD}"


def by_hand(model: str, data: str) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """The parameters, and the losses of each step."""
    config = settings(words(model, data))
    module = build_real(resolve(config.model, {}), config.run.seed).double()
    cursor = Cursor(seed=config.run.seed, samples=ROWS, global_batch=BATCH)
    steps = []
    for step in range(STEPS):
        numbers = [(step * BATCH + n) % ROWS for n in range(BATCH)]  # as they come
        rows = [row(int(n)) for n in (numbers if data == "Flow" else cursor.indices(step))]
        image, text = (torch.stack([each[part] for each in rows]).double() for part in (0, 1))  # type: ignore[misc]
        label = torch.tensor([each[2] for each in rows])
        output = module(image, text) if model == "Two" else module(image, text, label)
        losses = output if isinstance(output, dict) else {"loss": F.cross_entropy(output, label)}
        loss = losses["loss"] if "loss" in losses else losses["match"] + losses["classify"]
        module.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.sub_(0.05 * parameter.grad)  # type: ignore[operator]
        named = {f"loss/{name}": value.item() for name, value in losses.items() if name != "loss"}
        steps.append(named | {"loss": loss.item()})
    return {name: p.detach() for name, p in module.named_parameters()}, steps


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("model", "data"),
    [
        ("Two", "Dicts"), ("Two", "Pairs"), ("Two", "Mixed"), ("Two", "Flow"),
        ("Losses", "Dicts"), ("Losses", "Pairs"), ("Total", "Dicts"),
    ],
)  # fmt: skip
def test_what_people_write_is_trained_as_by_hand(model: str, data: str, ranks: int, tmp_path: Path) -> None:
    expected, steps = by_hand(model, data)
    assert failures(ranks, tmp_path, words(model, data), "--train.stop_after 2") == [None] * ranks
    finished = run(ranks, tmp_path, words(model, data))
    records = [record for record in finished.records if "grad_norm" in record]
    for record, losses in zip(records, steps, strict=True):
        assert {name: record.get(name) for name in losses} == pytest.approx(losses, rel=1e-12)
    assert relative_difference(finished.parameters, expected) <= 1e-12


def test_each_loss_is_evaluated_and_a_trap_is_named(tmp_path: Path) -> None:
    finished = run(2, tmp_path / "held", words("Losses", "held"))
    last = next(record for record in finished.records if "eval_loss" in record)
    assert last["eval_loss/match"] + last["eval_loss/classify"] == pytest.approx(last["eval_loss"])
    for model, message in (
        ("Shifty", "returned match as losses, and classify, match before. HINT: return the same"),
        ("Vector", "size, a loss of the model, is not one number. HINT: size.mean()"),
        ("Several", "the model returned several losses in a tuple. HINT: a dict of them"),
    ):
        assert message in str(failures(1, tmp_path / model, words(model, "Dicts"))[0])


def test_losses_that_differ_between_ranks_are_named_on_each(tmp_path: Path) -> None:
    for error in failures(2, tmp_path, words("Apart", "Dicts")):
        assert "classify, match, third on rank 0, and classify, third on rank 1. HINT: return" in str(error)


def test_predict_passes_two_inputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for data in ("held", "held_pairs"):
        finished = run(1, tmp_path / data, words("Two", data))
        last = next(record for record in finished.records if "eval_loss" in record)
        named = [word for name in ("Two", data) for word in ("--trust-code", f"{HERE}:{name}")]
        assert predict([str(finished.run), *named]) == 0
        assert f"accuracy  {last['eval_accuracy']:.2%} of the held-out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("model", "data", "message"),
    [
        (
            "Two",
            "Wrong",
            r"have picture, label, and the forward .* takes image, text\. HINT: .*: image, text",
        ),
        ("Losses", "Wrong", r"have picture, label, and the forward .* takes image, text, label\. HINT: "),
        ("Two", "Random", r"the state of Random, leads to another item .* HINT: .* random\.Random\(SEED\)"),
    ],
)
def test_what_does_not_fit_is_named(model: str, data: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare(settings(words(model, data)), world_size=1, num_nodes=1, device=None)


@pytest.mark.slow
@pytest.mark.long
def test_parity_reads_them_too(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--parity.ranks", "2", *flags(words("Losses", "Pairs"))[2:]]) == 0
    assert "holds" in "".join(capfd.readouterr())
