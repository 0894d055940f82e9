"""Learning rates compared with ASHA, which ends the worse trials early: a reporter passes each step to Tune.

python examples/ray_asha.py --train.steps 20
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler

ROOT = str(Path(__file__).resolve().parents[1])


def trial(settings: dict[str, Any]) -> None:
    import shardrun

    class ToTune(shardrun.Reporter):
        def report(self, metrics: Mapping[str, float], checkpoint: str | None = None) -> None:
            if "loss" in metrics:  # evaluations and checkpoints are reported too
                tune.report(dict(metrics))

    name = tune.get_context().get_trial_id()
    flags = [*settings["flags"], "--optim.lr", str(settings["lr"]), "--run.dir", f"{settings['runs']}/{name}"]
    shardrun.train([*flags, "--run.log_every_steps", "1"], reporter=ToTune())


def main(argv: list[str]) -> None:
    ray.init(runtime_env={"env_vars": {"PYTHONPATH": ROOT}})  # not needed after `pip install .`
    space = {
        "lr": tune.grid_search([1e-3, 1e-6]),
        "flags": [*argv, "--checkpoint.export", "false"],
        "runs": str(Path("runs/asha").absolute()),
    }
    scheduler = ASHAScheduler(time_attr="step", max_t=1_000_000, grace_period=5, reduction_factor=2)
    tuner = tune.Tuner(
        trial,
        param_space=space,
        tune_config=tune.TuneConfig(metric="loss", mode="min", scheduler=scheduler, max_concurrent_trials=1),
        run_config=tune.RunConfig(storage_path=str(Path("runs/asha-results").absolute())),
    )
    results = tuner.fit()
    for _, row in results.get_dataframe().iterrows():
        print(f"lr {row['config/lr']:g}: loss {row['loss']:.3f}, ended at step {row['step']:.0f}")
    best = results.get_best_result().config
    assert best is not None
    print(f"best lr {best['lr']:g}")


if __name__ == "__main__":
    main(sys.argv[1:])
