"""What some tests need beside requirements.txt. If it is absent they skip with the reason; if
SHARDRUN_CI_REQUIRE names it they fail instead, so that CI cannot pass by skipping.

    @pytest.mark.needs("transformers")       a package of .ci/requirements.txt, or a server named in ABSENT
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Callable
from typing import NoReturn

import pytest

from fsdp.base.proc import memory_group
from tests.checkpoint import s3_server
from tests.support import faulty_file


def _package(name: str) -> str:
    return (
        ""
        if importlib.util.find_spec(name)
        else f"{name} is not installed (pip install -r .ci/requirements.txt)"
    )


def _s3() -> str:
    return "" if s3_server.program() else s3_server.MISSING


def _cgroup() -> str:
    levels = memory_group().levels
    return (
        "" if levels and os.access(levels[-1], os.W_OK) else "no memory cgroup of one's own can be made here"
    )


def _charliecloud() -> str:
    if shutil.which("ch-run") is None:
        return "ch-run is not installed (apt-get install charliecloud)"
    made = subprocess.run(["unshare", "--user", "--mount", "true"], capture_output=True).returncode == 0
    return "" if made else "user namespaces cannot be made here"


ABSENT: dict[str, Callable[[], str]] = {
    "transformers": functools.partial(_package, "transformers"),
    "timm": functools.partial(_package, "timm"),
    "pyarrow": functools.partial(_package, "pyarrow"),
    "zstandard": functools.partial(_package, "zstandard"),
    "nbclient": functools.partial(_package, "nbclient"),
    "kubeflow_trainer_api": functools.partial(_package, "kubeflow_trainer_api"),
    "ipykernel": functools.partial(_package, "ipykernel"),
    "lm_eval": functools.partial(_package, "lm_eval"),
    "grpcio": functools.partial(_package, "grpc"),
    "mlflow": functools.partial(_package, "mlflow"),
    "datasets": functools.partial(_package, "datasets"),
    "peft": functools.partial(_package, "peft"),
    "torchao": functools.partial(_package, "torchao"),
    "bindfs": lambda: "" if shutil.which("bindfs") else "bindfs is not installed (apt-get install bindfs)",
    "browser": lambda: "" if shutil.which("chromium") else "no chromium (apt-get install chromium)",
    "cgroup": _cgroup,
    "charliecloud": _charliecloud,
    "fuse": faulty_file.missing,
    "s3": _s3,
}
"""By name: a function that returns why a thing is absent, or an empty string where it is there."""


def skip_or_fail(name: str, reason: str) -> NoReturn:
    """Skip the running test, or fail it if SHARDRUN_CI_REQUIRE names what it needs."""
    if name in os.environ.get("SHARDRUN_CI_REQUIRE", "").split(","):
        pytest.fail(f"SHARDRUN_CI_REQUIRE names {name}, but {reason}")
    pytest.skip(reason)


def check(name: str) -> None:
    if reason := ABSENT[name]():
        skip_or_fail(name, reason)
