"""Predict with a model sharded over Ray's workers, which one host need not hold:

    python -m launch.ray_predict RUN --ray.num_workers 4 --prompt "text"

The flags are those of `python -m fsdp.predict`, and train.py's --ray.*, which start a local Ray or join a
cluster. The answer is that of one process. Exit code 0, 2 for a wrong command, 3 if the workers fail.
"""

from __future__ import annotations

import secrets
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdp import config as configuration
from fsdp.base.errors import LaunchError
from fsdp.config import Config
from fsdp.config.command_line import prints_errors
from fsdp.rundir.paths import open_run


@prints_errors("launch.ray_predict")
def main(argv: Sequence[str]) -> int:
    words, flags = split(argv)
    if not words or words[0] in ("--help", "-h"):
        print((__doc__ or "").strip())
        return 0
    from launch.ray_check import check_installed
    from launch.ray_own import own_ray
    from launch.ray_settings import with_address

    check_installed()
    config = with_address(configuration.load(["--backend", "ray", *flags]))

    with own_ray(config.ray) as own:
        print(_answer(config, words, own), end="")
    return 0


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words of fsdp.predict, and the flags of --ray."""
    words, flags = list[str](), list[str]()
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--ray."):
            words.append(word)
            continue
        flags.append(word)
        if "=" not in word and rest:
            flags.append(rest.pop(0))
    return words, flags


def _answer(config: Config, words: Sequence[str], own: Any) -> str:
    from fsdp.predict.__main__ import parse
    from fsdp.predict.trained import read_config
    from launch import ray_cluster
    from launch.ray_resources import workers_for
    from launch.ray_trainer import workers_code

    options, flags = parse(words)  # a wrong word ends here, before workers start
    run = open_run(options.run).path
    trained = read_config(run, flags, options.trust_code)
    config = configuration.replace(
        trained, **{f"ray__{name}": value for name, value in vars(config.ray).items()}
    )
    logs = run / "logs" / f"ray-predict-{secrets.token_hex(4)}"
    try:
        with workers_code(config) as code, ray_cluster.connected(own, config.ray, code) as name:
            workers = workers_for(config.ray, config.run.device)
            print(f"{name}: {workers}", file=sys.stderr, flush=True)
            return _fit(workers, logs, words)
    finally:
        shutil.rmtree(logs, ignore_errors=True)


def _fit(workers: Any, logs: Path, words: Sequence[str]) -> str:
    import ray.train.torch

    from launch.ray_failure import failure_of_fit
    from launch.ray_predict_worker import predict
    from launch.ray_trainer import WorkersFailed

    api: Any = ray.train
    trainer = api.torch.TorchTrainer(
        predict,
        train_loop_config={"argv": list(words), "logs": str(logs), "folder": str(Path.cwd())},
        torch_config=api.torch.TorchConfig(backend=workers.backend),
        scaling_config=api.ScalingConfig(
            num_workers=workers.low,
            use_gpu=workers.gpus > 0,
            resources_per_worker=workers.resources,
        ),
        run_config=api.RunConfig(
            name="ray",
            storage_path=str(logs),
            worker_runtime_env={"env_vars": {"OMP_NUM_THREADS": workers.threads}},
        ),
    )
    try:
        answer = trainer.fit().return_value
    except api.TrainingFailedError as error:
        failure = failure_of_fit(error)
        raise WorkersFailed(failure.message, failure.exit_code, failure.kind) from None
    if not isinstance(answer, str):
        raise LaunchError("Ray ended the prediction without an answer of rank 0.", "ray logs cluster")
    return answer


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
