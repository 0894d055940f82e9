"""Environment variables that Ray reads, its address, and its log levels."""

from __future__ import annotations

import logging
import os

from fsdp import config as configuration
from fsdp.base.errors import ConfigError
from fsdp.config import Config

QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # the new behaviour, so that Ray does not warn of the old one
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # each rank writes its own files: launch/ray_output.py
    "RAY_TRAIN_ENABLE_WORKER_STRUCTURED_LOGGING": "0",  # it would log each report
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # relative paths in flags stay relative to the driver's folder
    # the interval in which a dead worker is detected and one report is read
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.25",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "20",
    "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "1",
    "RAY_worker_niceness": "0",  # as torchrun's ranks; at Ray's 15 other work of the machine starves training
    # `ray job submit --working-dir` has a folder for the workers too: they get that of ray_code_upload.py
    "RAY_OVERRIDE_JOB_RUNTIME_ENV": "1",
}
"""Defaults; a variable that is set already is kept."""


def set_defaults() -> None:
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)


def with_address(config: Config) -> Config:
    """The address as ray.init finds it: --ray.address, else RAY_ADDRESS. Empty for a Ray of one's own."""
    if config.ray.address.startswith("http"):
        raise ConfigError(
            f"--ray.address {config.ray.address} is the address of Ray's dashboard, which starts jobs.",
            "--ray.address HEAD:6379, or ray job submit -- python train.py --backend ray",
        )
    given = config.ray.address or os.environ.get("RAY_ADDRESS", "")
    # http://… is the address of `ray job submit`
    own = given == "local" or given.startswith("http")
    return configuration.replace(config, ray__address="" if own else given)


def set_log_levels() -> None:
    for name in ("ray", "ray.train"):
        logging.getLogger(name).setLevel(logging.ERROR)


def threads_of(variable: str) -> int | None:
    """The number in OMP_NUM_THREADS: of a list for nested regions, such as 4,2, the first. None if none."""
    first = variable.partition(",")[0].strip()
    return (int(first) or None) if first.isdecimal() else None
