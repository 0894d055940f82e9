"""What Ray is told before it is imported, so that it says and does no more than a run needs."""

from __future__ import annotations

import logging
import os

QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # the new way, chosen, so that Ray does not warn of the old
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # ranks write to files of their own: launch/ray_output.py
    "RAY_TRAIN_ENABLE_WORKER_STRUCTURED_LOGGING": "0",  # which would say each report there
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # relative paths in flags mean what they mean where they were typed
    # how soon a dead worker is seen; one report is taken at each look
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.25",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "20",
    "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "1",
}
"""Where the person has not said otherwise."""


def quiet() -> None:
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)


def hush() -> None:
    for name in ("ray", "ray.train"):
        logging.getLogger(name).setLevel(logging.ERROR)
