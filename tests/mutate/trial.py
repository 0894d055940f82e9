"""One mutation in a copy of the sources, and the tests that must fail with it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutate.operators import Mutation

ROOT = Path(__file__).parents[2]
ALL_PASSED, SOME_FAILED, NONE_COLLECTED = 0, 1, 5


@dataclass(frozen=True)
class Trial:
    mutation: Mutation
    killed_by: str
    """The first failing test, "time" or "collection"; empty if the mutation survived."""
    seconds: float

    def __str__(self) -> str:
        end = f"killed by {self.killed_by}" if self.killed_by else "SURVIVED"
        return f"{self.seconds:6.1f} s  {end:60}  {self.mutation}"


class Copy:
    """The tracked and new files of the repository in a folder of their own, in which tests run."""

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="mutate-"))
        for name in sources("."):
            target = self.root / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)

    def __enter__(self) -> Copy:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.root)

    def try_out(self, mutation: Mutation, tests: Sequence[str], limit_s: float) -> Trial:
        path = self.root / mutation.file
        text = path.read_text(encoding="utf-8")
        path.write_text(mutation.apply(text), encoding="utf-8")
        try:
            began = time.monotonic()
            killed_by = self.first_failure(tests, limit_s)
            return Trial(mutation, killed_by, time.monotonic() - began)
        finally:
            path.write_text(text, encoding="utf-8")

    def first_failure(self, tests: Sequence[str], limit_s: float) -> str:
        """The first test that fails, in a session of its own that ends with all its processes."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header"]
        environ = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        output = self.root / ".output"
        with output.open("w+", encoding="utf-8") as file:
            run = subprocess.Popen(
                [*command, *tests],
                cwd=self.root,
                env=environ,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = run.wait(limit_s)
            except subprocess.TimeoutExpired:
                return "time"
            finally:
                end_session(run.pid)
                run.wait()
        return self._verdict(code, output.read_text(encoding="utf-8", errors="replace"))

    @staticmethod
    def _verdict(code: int, output: str) -> str:
        if code == ALL_PASSED:
            return ""
        if code == NONE_COLLECTED:
            raise SystemExit(f"no test was collected:\n{output[-2000:]}")
        for line in output.splitlines():
            if line.startswith(
                ("FAILED tests/", "ERROR tests/")
            ):  # a captured log has lines "ERROR    fsdp…"
                return line.split(" ")[1]
        return f"pytest's exit code {code}"


def end_session(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def sources(place: str) -> list[str]:
    """Files below `place` that git tracks or does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", place],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]
