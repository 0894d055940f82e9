"""Environment variables that Ray reads when it is imported, and its log levels."""

from __future__ import annotations

import logging
import os

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
}
"""Defaults; a variable that is set already is kept."""


def set_defaults() -> None:
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)


def set_log_levels() -> None:
    for name in ("ray", "ray.train"):
        logging.getLogger(name).setLevel(logging.ERROR)
