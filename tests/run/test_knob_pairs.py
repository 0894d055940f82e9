"""Knobs compose: each pair of them, against one process that trains plainly; or refused by name.

A pair trains a few steps on two ranks, on four where a knob needs them. In float64 the worst
parameter may be apart by rounding alone; where a knob rounds by itself, losses and parameters stay near. What
cannot go together stands in REFUSED, and the refusal must name both.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fsdp import config as configuration
from fsdp.base.errors import ConfigError
from fsdp.distributed.env import DistEnv
from fsdp.run.loop import train
from tests.support import needs
from tests.support.marks import quick_are, sample_are
from tests.support.plain_loop import Trained, relative_difference, train_plainly, worst_parameter
from tests.support.runs import Finished, finished
from tests.support.world import run_world

STEPS = 4
SHARES = 12
"""Every second knob's first share of twelve stands for all pairs; the others are in the full form, as .ci/run
has it.
"""
BASE = (
    f"--train.steps {STEPS} --train.global_batch 8 --optim.lr 1e-2 --optim.warmup_steps 0 "
    "--checkpoint.every_steps 1000 --watch.enabled false --data.args.count 48 "
    "--data.name tests.support.user_code:vectors --model.name tests.support.user_code:Sixteens"
)
EXACT, ROUNDED, FLOAT8 = 1e-10, 2e-2, 8e-2
FP64 = "--precision.master fp64"


@dataclass(frozen=True)
class Knob:
    flags: str
    ranks: int = 2
    computes: str = "fp64"
    """The plain loop's dtype of computation; anything but fp64 rounds."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(word for word in self.flags.split() if word.startswith("--"))


KNOBS = {
    "recompute": Knob("--memory.activation_checkpointing full"),
    "recompute every second": Knob(
        "--memory.activation_checkpointing full --memory.activation_checkpointing_every 2"
    ),
    "recompute ops": Knob("--memory.activation_checkpointing ops"),
    "activations to the host": Knob("--memory.activation_offload true"),
    "zero-2": Knob("--mesh.reshard_after_forward false"),
    "gathered once a step": Knob("--mesh.reshard_after_forward step"),
    "reshard to 2": Knob("--mesh.reshard_after_forward 2", ranks=4),
    "hsdp": Knob("--mesh.strategy hsdp --mesh.replicate 2 --mesh.shard 2", ranks=4),
    "ddp": Knob("--mesh.strategy ddp"),
    "scattered each time": Knob("--mesh.accumulate shard"),
    "micro-batches": Knob("--train.micro_batch 1"),
    "prefetch": Knob("--speed.prefetch_forward 2 --speed.prefetch_backward 2"),
    "cpu offload": Knob("--memory.cpu_offload true"),
    "states on the host": Knob("--memory.optimizer_offload true"),
    "states in files": Knob("--memory.nvme optimizer --memory.nvme_dir DISK"),
    "all in files": Knob("--memory.nvme all --memory.nvme_dir DISK"),
    "states in bf16": Knob("--optim.state bf16", computes="fp32"),
    "states in 8 bits": Knob("--optim.state 8bit", computes="fp32"),
    "bf16": Knob("--precision.param bf16", computes="bf16"),
    "fp16": Knob("--precision.param fp16 --precision.loss_scale 256", computes="fp16"),
    "float8": Knob("--speed.float8 tensorwise --speed.float8_emulate true", computes="bf16"),
    "frozen": Knob("--model.frozen stem.*,blocks.1.*"),
    "adapters": Knob("--lora.rank 4 --lora.targets up,down"),
    "own gather": Knob("--comm.all_gather tests.support.comm_hooks:gather"),
    "root only": Knob("--mesh.wrap root"),
    "muon": Knob("--optim.name muon"),
    "moving average": Knob("--optim.ema 0.5"),
    "loss in chunks": Knob("--memory.loss_chunk 3"),
    "frozen in bf16": Knob(
        "--precision.frozen bf16 --lora.rank 4 --lora.targets up,down", computes="fp32"
    ),
}  # fmt: skip

FILES = ("states in files", "all in files")
REFUSED = {
    *itertools.product(("recompute ops",), ("activations to the host",)),
    *itertools.product(
        ("recompute", "recompute every second", "recompute ops", "activations to the host"),
        ("root only",),
    ),
    *itertools.product(("zero-2", "gathered once a step", "reshard to 2"), ("ddp",)),
    *itertools.product(
        ("ddp",),
        ("scattered each time", "prefetch", "cpu offload", "all in files", "own gather"),
    ),
    *itertools.product(FILES, ("states in 8 bits",)),
    *itertools.product(("reshard to 2", "cpu offload", "all in files", "fp16"), ("float8",)),
    ("float8", "adapters"),
    ("float8", "root only"),
    ("frozen", "adapters"),
    *itertools.product((*FILES, "states in bf16", "states in 8 bits"), ("muon",)),
    *itertools.product(FILES, ("moving average",)),
    ("cpu offload", "states on the host"),
    *itertools.product(("states on the host",), (*FILES, "states in 8 bits", "muon", "moving average")),
    *itertools.product(("ddp", "all in files", "float8", "frozen"), ("frozen in bf16",)),
}
"""In the order of KNOBS."""

PAIRS = [
    pair
    for pair in itertools.combinations(KNOBS, 2)
    if not set(KNOBS[pair[0]].names) & set(KNOBS[pair[1]].names)
]  # one flag cannot be turned twice


def words_of(names: Iterable[str], disk: Path | str = "/tmp") -> list[str]:
    knobs = [KNOBS[name] for name in names]
    precision = [knob.computes for knob in knobs if knob.computes != "fp64"]
    more = "" if precision else FP64
    if "float8" in names and "bf16" not in names:
        more = "--precision.param bf16"
    return f"{BASE} {more} {' '.join(knob.flags for knob in knobs)}".replace("DISK", str(disk)).split()


def computes(names: Iterable[str]) -> str:
    """The coarsest of them."""
    found = {KNOBS[name].computes for name in names}
    return next((dtype for dtype in ("fp16", "bf16", "fp32") if dtype in found), "fp64")


def ranks_of(names: Iterable[str]) -> int:
    return max(KNOBS[name].ranks for name in names)


@functools.cache
def reference(flags: str, dtype: str) -> Trained:
    return train_plainly(configuration.load(f"{BASE} {flags}".split()), dtype=dtype, steps=STEPS)


def plainly(names: Sequence[str]) -> Trained:
    """With the knobs that the plain loop knows. It keeps frozen weights as they are."""
    parts = [KNOBS[name].flags for name in ("frozen", "adapters", "muon", "moving average") if name in names]
    parts += [KNOBS["adapters"].flags] if "frozen in bf16" in names else []
    return reference(" ".join(parts), computes(names))


def train_each(env: DistEnv, cases: list[list[str]]) -> None:
    for words in cases:
        train(configuration.load(words), env)


def check(several: Sequence[Sequence[str]], ranks: int, folder: Path) -> None:
    """All of them one after the other in one world."""
    if any("float8" in names for names in several):
        needs.check("torchao")  # a sample of triples has it or not
    places = [folder / f"{ranks}-{at}" for at in range(len(several))]
    run_world(
        ranks,
        train_each,
        [
            ["--run.dir", str(place), *words_of(names, folder / "disk")]
            for names, place in zip(several, places, strict=True)
        ],
        timeout_s=240,
    )
    wrong = {
        " + ".join(n): found
        for n, place in zip(several, places, strict=True)
        if (found := apart(n, finished(place)))
    }
    assert not wrong, wrong


def apart(names: Sequence[str], ours: Finished) -> str:
    """Empty where it trained as one process does."""
    plain = plainly(names)
    exact = computes(names) == "fp64"
    difference = worst_parameter if exact else relative_difference
    found = difference(ours.parameters, plain.parameters)
    if "moving average" in names:
        found = max(found, difference(averages(ours.run), plain.averages))
    losses = [record["loss"] for record in ours.records if "loss" in record]
    furthest = max(abs(a - b) / abs(b) for a, b in zip(losses, plain.losses, strict=True))
    bound = EXACT if exact else FLOAT8 if "float8" in names else ROUNDED
    return (
        ""
        if max(found, furthest) <= bound
        else f"parameters {found:.1e}, losses {furthest:.1e}, bound {bound:.0e}"
    )


def averages(run: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = torch.load(run / "full_model_ema" / "full-model.pt", weights_only=True)
    return found


EAGER = [name for name in KNOBS if name != "float8"]
ALONE = ("reshard to 2", "prefetch", "own gather")
"""What tests/golden has not, in the whole test command."""
TORCHAO = pytest.mark.needs("torchao")
LATER = (pytest.mark.slow, pytest.mark.long)


@pytest.mark.parametrize(
    "knob",
    [*quick_are(["recompute", "ddp", "fp16"], EAGER, ALONE), pytest.param("float8", marks=[TORCHAO, *LATER])],
)
def test_alone(knob: str, tmp_path: Path) -> None:
    check([(knob,)], ranks_of([knob]), tmp_path)


def shares() -> list[tuple[str, int]]:
    """Those in which there is a pair."""
    return [(first, share) for first in KNOBS for share in range(SHARES) if pairs_of(first, share)]


def pairs_of(first: str, share: int) -> list[tuple[str, str]]:
    """Without float8, whose pairs need torchao."""
    return [pair for pair in PAIRS if pair[0] == first and pair not in REFUSED and "float8" not in pair][
        share::SHARES
    ]


FLOAT8_PAIRS = [pair for pair in PAIRS if "float8" in pair and pair not in REFUSED]


@pytest.mark.parametrize(
    ("first", "share"), sample_are([one for one in shares() if one[1] == 0][::16], shares())
)
def test_with_each_knob_after_it(first: str, share: int, tmp_path: Path) -> None:
    for ranks in (2, 4):
        if some := [pair for pair in pairs_of(first, share) if ranks_of(pair) == ranks]:
            check(some, ranks, tmp_path)


def test_the_shares_are_all_the_pairs() -> None:
    shared = [pair for one in shares() for pair in pairs_of(*one)]
    assert sorted([*shared, *FLOAT8_PAIRS]) == sorted(set(PAIRS) - REFUSED)


@pytest.mark.parametrize("other", sample_are([], ["recompute", "activations to the host"]))
def test_compiled(other: str, tmp_path: Path) -> None:
    """Compiling takes seconds a run: two pairs stand for all."""
    words = [*words_of([other]), "--speed.compile", "true", "--run.dir", str(tmp_path / "run")]
    run_world(2, train_each, [words], timeout_s=240)
    found = finished(tmp_path / "run")
    assert worst_parameter(found.parameters, plainly([other]).parameters) <= EXACT


# ---------------------------------------------------------------- what cannot go together


def refusal(names: Sequence[str]) -> str:
    """The messages of a refusal before the start; empty without one."""
    try:
        configuration.load(words_of(names))
    except ConfigError as error:
        return str(error)
    return ""


def test_the_pairs_that_are_refused_are_these() -> None:
    started = {pair for pair in REFUSED if "root only" in pair}  # a model's units are known when it is built
    assert {pair for pair in PAIRS if refusal(pair)} == REFUSED - started


@pytest.mark.parametrize(
    "pair", [pytest.param(pair, marks=TORCHAO if "float8" in pair else ()) for pair in sorted(REFUSED)]
)
def test_a_refusal_names_both(pair: tuple[str, str], tmp_path: Path) -> None:
    said = refusal(pair)
    if "root only" in pair:
        said = str(
            run_world(1, refused_at_start, ["--run.dir", str(tmp_path / "run"), *words_of(pair, tmp_path)])[0]
        )
        assert "units" in said or "of the blocks" in said
        assert any(name in said for name in KNOBS[next(n for n in pair if n != "root only")].names), said
    else:
        for name in pair:
            assert any(flag in said for flag in KNOBS[name].names), said
    assert "HINT: " in said


def refused_at_start(env: DistEnv, words: list[str]) -> str:
    try:
        train(configuration.load(words), env)
    except ConfigError as error:
        return str(error)
    return ""
