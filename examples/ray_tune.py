"""Learning rates compared in one's own Ray Tune: each trial is a run of this package, in the trial's process.

    python examples/ray_tune.py --train.steps 20

A trial returns plain values: its results can be read where this package is not installed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from ray import tune

ROOT = str(Path(__file__).resolve().parents[1])


def trial(settings: dict[str, Any]) -> dict[str, Any]:
    """One run: its directory is named after the trial, which Tune's own folder would copy."""
    import shardrun

    name = tune.get_context().get_trial_id()
    flags = [*settings["flags"], "--optim.lr", str(settings["lr"]), "--run.dir", f"{settings['runs']}/{name}"]
    return shardrun.record_of(shardrun.train(flags))


def main(argv: list[str]) -> None:
    os.environ["PYTHONPATH"] = ROOT  # for the trials' processes; not needed after `pip install .`
    space = {
        "lr": tune.grid_search([3e-4, 3e-3]),
        "flags": [*argv, "--checkpoint.every_steps", "0", "--checkpoint.export", "false"],
        "runs": str(Path("runs/tune").absolute()),
    }
    tuner = tune.Tuner(
        trial,
        param_space=space,
        tune_config=tune.TuneConfig(metric="eval_loss", mode="min"),
        run_config=tune.RunConfig(storage_path=str(Path("runs/tune-results").absolute())),
    )
    best = tuner.fit().get_best_result()
    assert best.metrics is not None
    assert best.config is not None
    print(
        f"best lr {best.config['lr']:g}: accuracy {best.metrics['accuracy']:.2%}, {best.metrics['run_dir']}"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
