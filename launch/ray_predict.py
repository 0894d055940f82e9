"""Predict with a model sharded over Ray's workers, which one host need not hold:

    python -m launch.ray_predict RUN --ray.num_workers 4 --prompt "text"

The flags are those of `python -m fsdp.predict`, and train.py's --ray.*, which start a local Ray or join a
cluster. The answer is that of one process. Exit code 0, 2 for a wrong command, 3 if the workers fail.
"""

from __future__ import annotations

import dataclasses
import secrets
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from fsdp import config as configuration
from fsdp.base.errors import LaunchError
from fsdp.config import Config
from fsdp.config.command_line import prints_errors
from launch.ray_cluster import OwnRay, connected, own_ray, with_address, workers_for


@prints_errors("launch.ray_predict")
def main(argv: Sequence[str]) -> int:
    words, flags = split(argv)
    if not words or words[0] in ("--help", "-h"):
        print((__doc__ or "").strip())
        return 0
    config = with_address(configuration.load(["--backend", "ray", *flags]))

    with own_ray(config.ray) as local:
        print(_answer(config, words, local), end="")
    return 0


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words of fsdp.predict, and the flags of --ray."""
    words, flags = list[str](), list[str]()
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        of_ray = word.startswith("--ray.")
        value = [rest.pop(0)] if of_ray and "=" not in word and rest else []
        (flags if of_ray else words).extend([word, *value])
    return words, flags


def _answer(config: Config, words: Sequence[str], local: OwnRay | None) -> str:
    from fsdp.predict.__main__ import parse
    from fsdp.predict.trained import read_config, run_of
    from launch.ray_trainer import fit
    from launch.ray_worker import predict

    options, flags = parse(words)  # a wrong word ends here, before workers start
    run, _ = run_of(options.run)
    ray = {f"ray__{name}": value for name, value in vars(config.ray).items()}
    config = configuration.replace(read_config(run, flags, options.trust_code), **ray)
    logs = run / "logs" / f"ray-predict-{secrets.token_hex(4)}"
    task = {"argv": list(words), "logs": logs, "folder": Path.cwd()}
    try:
        with connected(local, config) as name:
            workers = workers_for(config.ray, config.run.device)
            print(f"{name}: {workers}", file=sys.stderr, flush=True)
            workers = dataclasses.replace(workers, high=workers.low)
            answer = fit(predict, task, workers, logs / "ray", config.run.process_group_timeout_s, {})
    finally:
        shutil.rmtree(logs, ignore_errors=True)
    if not isinstance(answer, str):
        raise LaunchError("Ray ended the prediction without an answer of rank 0.", "ray logs cluster")
    return answer


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
