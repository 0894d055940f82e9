"""What became of a worker group: the line that tells it, and what follows.

Ray restarts the group after any error, `--ray.max_failures` times. The Referee, who sits in Ray's controller,
asks launch/policy.py and ends the run where another start would only cost those tries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp.base.errors import LaunchError
from fsdp.rundir import history
from fsdp.rundir.paths import RunDir
from launch.ray_settings import quiet

quiet()

from ray.train import UserCallback  # noqa: E402  (after the words that Ray reads when it is imported)

from launch.policy import Act, Allocation, End, Kind, Past, decide  # noqa: E402


class RankFailed(Exception):
    """A rank's last words. All in args, so that it pickles whatever it was made from."""

    def __init__(
        self, rank: int, message: str, exit_code: int, kind: Kind, secondary: bool, trace: str
    ) -> None:
        super().__init__(rank, message, exit_code, kind, secondary, trace)
        self.rank, self.message, self.exit_code = rank, message, exit_code
        self.kind, self.secondary, self.trace = kind, secondary, trace
        """secondary: another rank tells the story."""

    def __str__(self) -> str:
        named = f"rank {self.rank}"
        return self.message if self.message.startswith(named) else f"{named}: {self.message}"


@dataclass(frozen=True)
class Story:
    message: str
    exit_code: int
    kind: Kind
    """DIED without a word of its own: killed, or with its node."""
    trace: str = ""


class GivenUp(Exception):
    """Raised in Ray's controller, where it ends the run. The story in args, so that it pickles."""


def tell(failures: Mapping[int, BaseException]) -> Story:
    """Of all ranks' failures the one that came first in meaning: an error of ours, then a death, then what
    followed from it.
    """
    words = [(rank, _unwrapped(error)) for rank, error in sorted(failures.items())]
    said = [word for _, word in words if isinstance(word, RankFailed)]
    first = next((word for word in said if not word.secondary), None)
    if first is not None:
        return Story(str(first), first.exit_code, first.kind, first.trace)
    dead = [rank for rank, word in words if not isinstance(word, RankFailed)]
    if dead:
        ranks = f"rank{'s' * (len(dead) > 1)} {', '.join(map(str, dead))}"
        return Story(f"{ranks} died ({_brief(dict(words)[dead[0]])})", LaunchError.exit_code, Kind.DIED)
    if said:
        return Story(str(said[0]), said[0].exit_code, said[0].kind, said[0].trace)
    return Story("the workers failed", LaunchError.exit_code, Kind.DIED)


def _unwrapped(error: BaseException) -> BaseException:
    return getattr(error, "_base_exc", error)


def _brief(error: BaseException) -> str:
    """Ray explains a death at length: the first line that is not a heading."""
    lines = [
        line.strip()
        for line in str(getattr(error, "health_check_failure", error)).splitlines()
        if line.strip()
    ]
    return lines[0][:160] if lines else type(error).__name__


def story_of(error: Any) -> Story:
    """What trainer.fit raised, as the driver tells it."""
    cause = getattr(error, "controller_failure", None)
    if isinstance(cause, GivenUp):
        return Story(*cause.args)
    if cause is not None:
        return Story(f"Ray could not go on: {_brief(cause)}", LaunchError.exit_code, Kind.ERROR)
    return tell(getattr(error, "worker_failures", {}))


class Referee(UserCallback):
    """Says once that a group failed and what follows."""

    def __init__(self, run: Path, logs: Path, max_failures: int) -> None:
        self._run, self._logs, self._max = RunDir(run), logs, max_failures
        self._crashes: list[End] = []
        self._starts = history.count_starts(self._run)

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        story = tell(worker_exceptions)
        before, self._starts = self._starts, history.count_starts(self._run)
        end = End(
            story.kind, history.last_step(self._run), self._starts == before, story.exit_code, story.message
        )
        # Ray itself counts max_failures
        decision = decide(end, Past(crashes=self._crashes), Allocation())
        if decision.act is Act.END:
            # what the policy has ended here is not started again by a job script around the driver
            kind = end.kind if end.kind is Kind.REFUSED else Kind.FINAL
            raise GivenUp(story.message, decision.code, kind, story.trace)
        self._crashes.append(end)
        failed = len(self._crashes)
        if self._max < 0 or failed <= self._max:
            self._say(
                f"{story.message}, {end.where}; the workers are started again ({failed} of {self._max})"
            )

    def _say(self, line: str) -> None:
        with (self._logs / "controller.err").open("a", encoding="utf-8") as file:
            file.write(line + "\n")
