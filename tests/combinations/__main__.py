"""Draw flags that no test names together, and check that a run which is stopped three times is the run that
nothing happens to, bit for bit:

    python -m tests.combinations --seconds 600            seeds from a random one on
    python -m tests.combinations --runs 1 --seed 120      that draw again

Compared are each step's loss, gradient norm and evaluation, the exported weights and their moving average.
What differs, or fails otherwise than by a refusal, is printed with its seed and its flags; the exit code is
then 1. It found that DDP on three ranks resumed with other last bits (docs/testing.md).
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdp.config.command_line import number, whole_number
from tests.combinations.drawn import Drawn, draw
from tests.support.runs import Finished, finished, on_a_rank
from tests.support.world import end_pool, run_world
from tests.torture.shapes import write_data

STEPS = 12
ALWAYS = (
    "--train.steps", str(STEPS), "--train.global_batch", "12", "--checkpoint.every_steps", "1000",
    "--watch.enabled", "false",
)  # fmt: skip
COMPARED = ("step", "loss", "grad_norm", "eval_loss", "eval_ema_loss")
SAME, REFUSED, BROKEN = "same", "refused", "broken"


def main(argv: Sequence[str]) -> int:
    options = _options(argv)
    os.environ["OMP_NUM_THREADS"] = "1"
    counts, began, seed = Counter[str](), time.monotonic(), options.seed
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="combinations-") as place:
        os.environ["XDG_CACHE_HOME"] = str(Path(place, "cache"))  # of the tokenized text
        write_data(Path(place, "data"))
        while _more(options, counts, time.monotonic() - began):
            found, said = check(draw(seed, STEPS), Path(place))
            counts[found] += 1
            if found == BROKEN:
                print(f"BROKEN, seed {seed}: {said}", flush=True)
            seed += 1
    print(f"{counts[SAME]} runs the same, {counts[REFUSED]} refused, {counts[BROKEN]} broken")
    return 1 if counts[BROKEN] else 0


def _more(options: argparse.Namespace, counts: Counter[str], seconds: float) -> bool:
    """`--runs` counts those that were not refused."""
    ran = counts[SAME] + counts[BROKEN]
    return ran < options.runs if options.runs else seconds < options.seconds


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.combinations",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seconds", type=number(0), default=60)
    parser.add_argument(
        "--runs", type=whole_number(), default=0, help="so many that are not refused; 0: --seconds"
    )
    parser.add_argument(
        "--seed", type=whole_number(), default=secrets.randbelow(1 << 30), help="of the first draw"
    )
    return parser.parse_args(argv)


def check(drawn: Drawn, place: Path) -> tuple[str, str]:
    """One of SAME, REFUSED and BROKEN, and what is to be said of it."""
    what = f"{drawn.ranks} ranks, stopped after {list(drawn.stops)}: {drawn.flags}\n  "
    folders = [place / "whole", place / "parts"]
    try:
        for folder in folders:
            folder.mkdir()
        errors = _train(drawn, folders[0], place / "data")
        if any(errors):
            refused = all(error and error.startswith("ConfigError") for error in errors)
            return (REFUSED if refused else BROKEN), f"{what}{errors}"
        for stop in (*drawn.stops, 0):
            errors = _train(drawn, folders[1], place / "data", f"--train.stop_after {stop}")
            if any(errors):
                return BROKEN, f"{what}resumed: {errors}"
        wrong = _difference(*(finished(folder / "run") for folder in folders))
        return (BROKEN, f"{what}{wrong}") if wrong else (SAME, "")
    except Exception:  # of any kind: that is what is searched
        end_pool()
        return BROKEN, f"{what}{traceback.format_exc()}"
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def _train(drawn: Drawn, folder: Path, data: Path, more: str = "") -> list[str | None]:
    words = f"{drawn.words(folder, data)} {more}".split()
    return run_world(drawn.ranks, on_a_rank, ["--run.dir", str(folder / "run"), *ALWAYS, *words])


def _difference(whole: Finished, parts: Finished) -> str:
    """What differs, in words; empty if nothing does."""
    there, here = (_numbers(one.records) for one in (whole, parts))
    if there != here:
        first = next((pair for pair in zip(there, here, strict=False) if pair[0] != pair[1]), None)
        return f"{len(there)} records and {len(here)}; the first that differ: {first}"
    for name, value in {**whole.parameters, **_average(whole)}.items():
        if not torch.equal(value, {**parts.parameters, **_average(parts)}[name]):
            return f"{name} differs at the end"
    return ""


def _numbers(records: Sequence[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [tuple(record.get(name) for name in COMPARED) for record in records]


def _average(run: Finished) -> dict[str, Tensor]:
    file = run.run / "full_model_ema" / "full-model.pt"
    found = torch.load(file, weights_only=True) if file.exists() else {}
    return {f"average of {name}": value for name, value in found.items()}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
