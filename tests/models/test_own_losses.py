"""What a model returns as its loss is what is trained: ten losses of one's own and three mixtures, in
float64, against a loop in one process that computes the loss of each rank's micro-batches.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp.data import Cursor, build_dataset
from fsdp.models import build_real, resolve
from fsdp.models.hf import remarks
from fsdp.parity.__main__ import main
from tests.models.own_losses import ALONE, LOSSES
from tests.support import needs
from tests.support.marks import quick_are
from tests.support.plain_loop import relative_difference
from tests.support.runs import Finished, failures, run, settings

STEPS, BATCH = 4, 7
FLAGS = (
    f"--train.steps {STEPS} --train.global_batch {BATCH} --train.clip_grad_norm 0 --precision.master fp64 "
    "--optim.name sgd --optim.lr 0.05 --optim.momentum 0 --optim.schedule constant --optim.warmup_steps 0"
)
Batch = Mapping[str, Tensor]
Part = Callable[[nn.Module, Batch, Batch], tuple[Tensor, float]]
"""A micro-batch's share of what is trained, and of the loss that is recorded."""
WAYS = ("targets", "labels")


def plain(words: str, part: Part, ranks: int, micro: int = 1) -> tuple[dict[str, Tensor], list[float]]:
    """Parameters and losses of a loop over the micro-batches of all ranks. The third step has two rows."""
    config = settings(words)
    data = build_dataset(config.data)
    model: Any = build_real(resolve(config.model, data.info.facts), config.run.seed).double()
    if "expert" in " ".join(name for name, _ in model.named_parameters()):
        model.set_experts_implementation("eager")  # torch's grouped products have no float64
    cursor = Cursor(seed=config.run.seed, samples=len(data.train), global_batch=BATCH)
    losses = []
    for step in range(STEPS):
        whole = data.train.batch(cursor.indices(step))
        shares = np.array_split(np.arange(len(whole["inputs"])), ranks)
        pieces = [rows for share in shares for rows in np.array_split(share, micro) if len(rows)]
        model.zero_grad()
        loss = 0.0
        for rows in pieces:
            trained, recorded = part(model, {name: value[rows] for name, value in whole.items()}, whole)
            trained.backward()
            loss += recorded
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(0.05 * parameter.grad)
        losses.append(loss)
    return {name: p.detach() for name, p in model.named_parameters()}, losses


def check(finished: Finished, expected: tuple[dict[str, Tensor], list[float]], bound: float) -> None:
    losses = [record["loss"] for record in finished.records if "grad_norm" in record]
    assert losses == pytest.approx(expected[1], rel=bound)
    assert relative_difference(finished.parameters, expected[0]) <= bound


def unbroken_and_resumed(ranks: int, folder: Path, words: str) -> list[Finished]:
    assert failures(ranks, folder / "resumed", words, "--train.stop_after 2") == [None] * ranks
    return [run(ranks, folder / name, words) for name in ("unbroken", "resumed")]


# ---------------------------------------------------------------- losses of one's own


def of_own(name: str, way: str) -> str:
    return (
        f"--model.name tests.models.own_losses:build --model.args.kind {name.replace(' ', '_')} "
        f"--data.name tests.models.own_losses:masked --data.args.name {way} {FLAGS}"
    )


def own_part(name: str, way: str) -> Part:
    def part(model: nn.Module, rows: Batch, whole: Batch) -> tuple[Tensor, float]:
        if name == "num_items_in_batch":
            items = (whole[way] != -100).sum()
            loss = model(rows["inputs"], **{way: rows[way]}, num_items_in_batch=items)["loss"]
            return loss, loss.item()
        found = model(rows["inputs"], **{way: rows[way]})
        if name in ALONE:
            return found * (share := len(rows[way]) / len(whole[way])), found.item() * share
        mine, every = ((one[way] != -100).sum().item() for one in (rows, whole))
        loss, share = found["loss"], mine / every
        return loss * share, loss.item() * share

    return part


CASES = [(name, way, ranks) for name in LOSSES for way in WAYS for ranks in (1, 2, 3)]
QUICK = [("class weights", "labels", 2), ("smoothing in training", "targets", 3)]
SAMPLE = [("a term in training", "labels", 3), ("zero ignored", "targets", 2), ("loss alone", "targets", 2)]


@pytest.mark.parametrize(("name", "way", "ranks"), quick_are(QUICK, CASES, SAMPLE))
def test_a_loss_of_one_s_own_is_trained_as_it_is(name: str, way: str, ranks: int, tmp_path: Path) -> None:
    expected = plain(of_own(name, way), own_part(name, way), ranks)
    for finished in unbroken_and_resumed(ranks, tmp_path, of_own(name, way)):
        check(finished, expected, 1e-10)


def test_micro_batches_have_their_own_loss_each(tmp_path: Path) -> None:
    words = of_own("a term in training", "targets")
    expected = plain(words, own_part("a term in training", "targets"), 2, 2)
    check(run(2, tmp_path, words, "--train.micro_batch 2"), expected, 1e-10)


# ---------------------------------------------------------------- mixtures


MIXTURES = ("mixtral", "qwen3_moe", "qwen2_moe")


def of_mixture(name: str, way: str, *, exact: bool) -> str:
    return (
        f"--model.name tests.models.foreign:build --model.args.model {name} "
        + ("--model.args.exact true " if exact else "")
        + f"--data.name tests.models.own_losses:masked --data.args.name {way} {FLAGS}"
    )


def mixture_part(way: str) -> Part:
    """The cross entropy over all labels, and half of the router's loss by rows, which is recorded apart."""

    def part(model: nn.Module, rows: Batch, whole: Batch) -> tuple[Tensor, float]:
        output = model(rows["inputs"])
        logits, labels, every = output.logits, rows[way], whole[way]
        if way == "labels":
            logits, labels, every = logits[:, :-1], labels[:, 1:], every[:, 1:]
        entropy = (
            F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / (every != -100).sum()
        )
        return entropy + 0.5 * output.aux_loss * len(rows[way]) / len(whole[way]), entropy.item()

    return part


OF_MIXTURES = [(name, way, ranks) for name in MIXTURES for way in WAYS for ranks in (1, 2, 3)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way", "ranks"), quick_are([], OF_MIXTURES, [("qwen3_moe", "targets", 2)]))
def test_a_mixture_trains_its_router_s_loss_both_ways(
    name: str, way: str, ranks: int, tmp_path: Path
) -> None:
    needs.check("transformers")
    for exact, bound in ((True, 1e-10), (False, 1e-6)):
        words = of_mixture(name, way, exact=exact)
        expected = plain(words, mixture_part(way), ranks)
        folder = tmp_path / str(exact)
        for finished in unbroken_and_resumed(ranks, folder, words) if exact else [run(ranks, folder, words)]:
            check(finished, expected, bound)
            steps = [record for record in finished.records if "grad_norm" in record]
            assert all(record["aux_loss"] > 0.1 for record in steps)
    config = settings(words)
    data = build_dataset(config.data)
    model: Any = build_real(resolve(config.model, data.info.facts), config.run.seed).double()
    model.set_experts_implementation("eager")
    model.load_state_dict(finished.parameters, strict=False)
    assert data.heldout is not None
    heldout = data.heldout.batch(np.arange(9))
    with torch.no_grad():
        _, entropy = mixture_part(way)(model, heldout, heldout)
    assert finished.records[-1]["eval_loss"] == pytest.approx(entropy, rel=1e-6)


IN_PARITY = {name: of_own(name, "labels") for name in LOSSES} | {
    f"{name} by {way}": of_mixture(name, way, exact=True) for name in MIXTURES for way in WAYS
}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", quick_are([], IN_PARITY, ["class weights"]))
def test_parity_trains_it_too(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    if name not in LOSSES:
        needs.check("transformers")
    words = IN_PARITY[name].replace(f"--train.steps {STEPS}", "--train.steps 3")
    assert main(["--parity.ranks", "2", *words.split()]) == 0
    said = "".join(capfd.readouterr())
    assert "holds" in said
    assert ("the model's own loss is trained" in said) == (name in LOSSES)


# ---------------------------------------------------------------- what a line says


class TinyForCTC(nn.Linear):
    class config:
        ctc_loss_reduction = "sum"


class Routed(nn.Linear):
    class config:
        router_aux_loss_coef, output_router_logits = 0.01, False


def test_a_sum_and_a_router_that_is_not_trained_have_a_line() -> None:
    assert "ctc_loss_reduction mean" in next(remarks(TinyForCTC(2, 2)))
    assert "output_router_logits true" in next(remarks(Routed(2, 2)))
    assert not list(remarks(nn.Linear(2, 2)))


# ---------------------------------------------------------------- rows of all ranks


DOCUMENTED = Path(__file__).parents[2] / "docs" / "models.md"


def towers() -> nn.Module:
    """That of the page, with its two towers."""
    page = re.search(r"```python\n(import torch\n.*?)```", DOCUMENTED.read_text(encoding="utf-8"), re.DOTALL)
    assert page is not None
    names: dict[str, Any] = {}
    exec(page.group(1), names)
    model: nn.Module = names["Towers"]()
    model.pictures, model.texts = nn.Linear(12, 6), nn.Linear(5, 6)
    return model


class Pairs(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 28

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {"inputs": torch.randn(12, generator=generator), "texts": torch.randn(5, generator=generator)}


def pairs() -> Pairs:
    return Pairs()


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_page_s_gathered_rows_are_one_process_s(ranks: int, tmp_path: Path) -> None:
    """Seven rows: ranks have unequal numbers of them."""
    here = "tests.models.test_own_losses"
    words = f"--model.name {here}:towers --data.name {here}:pairs {FLAGS}"
    alone, together = (run(number, tmp_path / str(number), words) for number in (1, ranks))
    check(together, (alone.parameters, [r["loss"] for r in alone.records if "grad_norm" in r]), 1e-14)
