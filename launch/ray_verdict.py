"""What became of a worker group: the line that tells it, and whether another try can end differently.

Ray restarts the group after any error, `--ray.max_failures` times. A mistake in the configuration, numbers that are not finite,
and the same exception twice without a step between would only cost those tries: the Referee, who sits in Ray's controller, ends
the run at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp.errors import LaunchError
from fsdp.rundir import RunDir
from launch.ray_quiet import quiet

quiet()

from ray.train import UserCallback  # noqa: E402  (after the words that Ray reads when it is imported)

from launch.progress import last_step  # noqa: E402


class RankFailed(Exception):
    """A rank's last words. All in args, so that it pickles whatever it was made from."""

    def __init__(self, rank: int, message: str, exit_code: int, final: bool, secondary: bool, trace: str) -> None:
        super().__init__(rank, message, exit_code, final, secondary, trace)
        self.rank, self.message, self.exit_code = rank, message, exit_code
        self.final, self.secondary, self.trace = final, secondary, trace
        """final: another try would end the same way. secondary: another rank tells the story."""

    def __str__(self) -> str:
        named = f"rank {self.rank}"
        return self.message if self.message.startswith(named) else f"{named}: {self.message}"


@dataclass(frozen=True)
class Story:
    message: str
    exit_code: int
    final: bool
    trace: str = ""
    died: bool = False
    """Without a word of its own: killed, or with its node."""


class GivenUp(Exception):
    """Raised in Ray's controller, where it ends the run. The story in args, so that it pickles."""


def tell(failures: Mapping[int, BaseException]) -> Story:
    """Of all ranks' failures the one that came first in meaning: an error of ours, then a death, then what followed from it."""
    words = [(rank, _unwrapped(error)) for rank, error in sorted(failures.items())]
    said = [word for _, word in words if isinstance(word, RankFailed)]
    first = next((word for word in said if not word.secondary), None)
    if first is not None:
        return Story(str(first), first.exit_code, first.final, first.trace)
    dead = [rank for rank, word in words if not isinstance(word, RankFailed)]
    if dead:
        ranks = f"rank{'s' * (len(dead) > 1)} {', '.join(map(str, dead))}"
        return Story(f"{ranks} died ({_brief(dict(words)[dead[0]])})", LaunchError.exit_code, False, died=True)
    if said:
        return Story(
            str(said[0]), said[0].exit_code, said[0].final, said[0].trace, died=said[0].exit_code == LaunchError.exit_code
        )
    return Story("the workers failed", LaunchError.exit_code, False)


def _unwrapped(error: BaseException) -> BaseException:
    return getattr(error, "_base_exc", error)


def _brief(error: BaseException) -> str:
    """Ray explains a death at length: the first line that is not a heading."""
    lines = [line.strip() for line in str(getattr(error, "health_check_failure", error)).splitlines() if line.strip()]
    return lines[0][:160] if lines else type(error).__name__


def story_of(error: Any) -> Story:
    """What trainer.fit raised, as the driver tells it."""
    cause = getattr(error, "controller_failure", None)
    if isinstance(cause, GivenUp):
        return Story(*cause.args)
    if cause is not None:
        return Story(f"Ray could not go on: {_brief(cause)}", LaunchError.exit_code, True)
    return tell(getattr(error, "worker_failures", {}))


class Referee(UserCallback):
    """Says once that a group failed and what follows."""

    def __init__(self, run: Path, logs: Path, max_failures: int) -> None:
        self._run, self._logs, self._max = RunDir(run), logs, max_failures
        self._failed = 0
        self._last = (-1, 0)

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        story = tell(worker_exceptions)
        self._failed += 1
        step = last_step(self._run)
        # Of the exit code and not of the words, which name the rank that happened to speak first. No further than before: a
        # start goes back to its checkpoint, so what was read ahead may meet the same mistake some steps earlier.
        reached, code = self._last
        again = not story.died and code == story.exit_code and step <= reached
        self._last = (step, story.exit_code)
        if story.final or again:
            raise GivenUp(story.message, story.exit_code, True, story.trace)
        if self._max < 0 or self._failed <= self._max:
            self._say(f"{story.message}, after step {step}; the workers are started again ({self._failed} of {self._max})")

    def _say(self, line: str) -> None:
        with (self._logs / "controller.err").open("a", encoding="utf-8") as file:
            file.write(line + "\n")
