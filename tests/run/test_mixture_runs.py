"""[[data.sources]] on real ranks: kill and resume at 1, 3 and 2 ranks; changed weights; losses of sources."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.data_cache import own_cache as own_cache
from tests.support.data_ids import Numbered, Scores, killed_and_resumed, train_and_note

BASES = {"few": (11, 0), "many": (40, 100), "some": (23, 200)}


def recipe(folder: Path, **amounts: str) -> list[str]:
    """Sources of BASES with `weight = 2` or such."""
    tables = [
        f'[[data.sources]]\nname = "tests.support.data_ids:numbered"\nlabel = "{label}"\n'
        f"args = {{count = {BASES[label][0]}, base = {BASES[label][1]}, masked = {nth}}}\n{amount}\n"
        for nth, (label, amount) in enumerate(amounts.items())
    ]
    file = folder / f"mix-{'-'.join(amounts)}-{abs(hash(tuple(amounts.values()))):x}.toml"
    file.write_text("\n".join(tables))
    return ["--data.sources", str(file)]


def counted(steps: dict[int, list[int]]) -> Counter[int]:
    return Counter(n for ids in steps.values() for n in ids)


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.long
def test_killed_and_resumed_at_1_3_and_2_ranks_each_sample_comes_as_often_as_its_epochs_say(
    tmp_path: Path,
) -> None:
    words = [*recipe(tmp_path, few="epochs = 3", many="", some="epochs = 2"), "--train.global_batch", "7"]
    steps = killed_and_resumed(tmp_path, *words, crashes=(6, 12))
    expected = {
        base + n: times
        for label, times in (("few", 3), ("many", 1), ("some", 2))
        for base in (BASES[label][1],)
        for n in range(BASES[label][0])
    }
    assert counted(steps) == expected
    assert sorted(steps) == list(range(1, 18))  # 119 samples in batches of 7


def test_changed_weights_continue_each_source_where_it_stood(tmp_path: Path) -> None:
    batch = ["--train.global_batch", "8"]
    before = recipe(tmp_path, few="weight = 1", many="weight = 3")
    first, said = train_and_note(2, tmp_path, "a", *before, *batch, "--train.steps", "4")
    assert said == [None, None]
    after = recipe(tmp_path, few="weight = 1", many="weight = 1", some="weight = 2")
    batch = ["--train.global_batch", "12"]
    second, said = train_and_note(1, tmp_path, "b", *after, *batch, "--train.steps", "7")
    assert said == [None]
    assert min(second) == 5
    for ids in first.values():
        assert Counter(n // 100 for n in ids) == {0: 2, 1: 6}
    for ids in second.values():
        assert Counter(n // 100 for n in ids) == {0: 3, 1: 3, 2: 6}
    total = counted({**first, **second})
    many = [times for n, times in total.items() if n // 100 == 1]
    assert many == [1] * (4 * 6 + 3 * 3)  # 33 of 40, none twice
    few = [total[n] for n in range(11)]
    assert sorted(few) == [1] * 5 + [2] * 6  # 17 of 11: one whole epoch, and six more
    start = [json.loads(line) for line in (tmp_path / "run" / "history.jsonl").read_text().splitlines()]
    assert any("data.sources" in line for event in start for line in event.get("changed", []))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "more"), [(1, ""), (2, "--memory.loss_chunk 3"), pytest.param(3, "", marks=pytest.mark.long)]
)
def test_losses_of_sources_equal_an_independent_computation_in_float64(
    tmp_path: Path, ranks: int, more: str
) -> None:
    words = [*recipe(tmp_path, few="weight = 1", many="weight = 2"), "--train.global_batch", "7"]
    precision = ["--precision.master", "fp64", "--precision.param", "fp64", "--optim.lr", "1e-20"]
    micro = ["--train.micro_batch", "2", "--train.steps", "3", "--checkpoint.export", "true", *more.split()]
    steps, said = train_and_note(ranks, tmp_path, "a", *words, *precision, *micro)
    assert said == [None] * ranks
    model = Scores().double()
    model.load_state_dict(torch.load(tmp_path / "run" / "full_model" / "full-model.pt", weights_only=True))
    sources = {label: Numbered(*BASES[label], masked=nth) for nth, label in enumerate(("few", "many"))}
    for record in metrics(tmp_path)[:3]:
        total, weight = 0.0, 0
        for label, data in sources.items():
            loss, count = 0.0, 0
            for n in steps[record["step"]]:
                if n // 100 != data.base // 100:
                    continue
                sample = data[n - data.base]
                chances = model(sample["inputs"][None])[0].log_softmax(-1)
                for at, target in enumerate(sample["targets"].tolist()):
                    if target != -100:
                        loss, count = loss - float(chances[at, target]), count + 1
            assert record[f"tokens/{label}"] == count
            assert record[f"loss/{label}"] == pytest.approx(loss / count, rel=1e-12)
            total, weight = total + loss, weight + count
        assert record["loss"] == pytest.approx(total / weight, rel=1e-12)


def test_held_out_samples_of_each_source_are_evaluated_together_and_alone(tmp_path: Path) -> None:
    file = tmp_path / "mix.toml"
    file.write_text(
        "\n".join(
            f'[[data.sources]]\nname = "tests.support.data_ids:with_heldout"\nlabel = "{label}"\n'
            f"args = {{count = 9, base = {base}}}"
            for label, base in (("a", 0), ("b", 100))
        )
    )
    words = ["--data.sources", str(file), "--train.steps", "2", "--train.global_batch", "4"]
    _, said = train_and_note(2, tmp_path, "a", *words)
    assert said == [None, None]
    found = next(record for record in metrics(tmp_path) if "eval_loss" in record)
    held = {base: [Numbered(5, 1000 + base)[n]["targets"] for n in range(5)] for base in (0, 100)}
    counts = {base: sum(int((one != -100).sum()) for one in targets) for base, targets in held.items()}
    mean = (found["eval_loss/a"] * counts[0] + found["eval_loss/b"] * counts[100]) / sum(counts.values())
    assert found["eval_loss"] == pytest.approx(mean, rel=1e-6)
