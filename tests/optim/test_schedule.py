"""Learning rates: the built-in schedules, a function of the user, a resumed run, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fsdp.base.errors import ConfigError
from fsdp.config import OptimSection
from fsdp.optim.optimizer import Schedule
from tests.support.runs import failures, run, settings

OWN = "tests.optim.test_schedule:"


def inverse(step: int, total_steps: int, settings: OptimSection) -> float:
    return min(step / max(1, settings.warmup_steps), (settings.warmup_steps / step) ** 0.5)


def nan_at_seven(step: int, total_steps: int, settings: OptimSection) -> float:
    return float("nan") if step == 7 else 1.0


def two_arguments(step: int, total_steps: int) -> float:
    return 1.0


def rates(section: OptimSection, steps: int) -> list[float]:
    schedule = Schedule(section, steps)
    return [schedule.lr(step) for step in range(1, steps + 1)]


def test_wsd_rises_stays_and_decays_over_its_share() -> None:
    found = rates(OptimSection(lr=1.0, schedule="wsd", warmup_steps=4, decay_share=0.3), 20)
    assert found[:4] == [0.25, 0.5, 0.75, 1.0]
    assert found[4:14] == [1.0] * 10
    assert found[14:] == pytest.approx([1 - 0.9 * part / 6 for part in range(1, 7)])


def test_a_function_s_factor_is_of_the_peak_rate_and_a_resumed_run_continues_it(tmp_path: Path) -> None:
    flags = f"--optim.schedule {OWN}inverse --optim.warmup_steps 3 --train.steps 6"
    whole = run(1, tmp_path / "whole", flags)
    assert failures(1, tmp_path / "parts", flags, "--train.stop_after 4") == [None]
    resumed = run(2, tmp_path / "parts", flags)
    expected = [1e-2 * inverse(step, 6, OptimSection(warmup_steps=3)) for step in range(1, 7)]
    assert [one["lr"] for one in whole.records if "lr" in one] == expected
    assert [one["lr"] for one in resumed.records if "lr" in one] == expected
    assert f'schedule = "{OWN}inverse"' in (tmp_path / "parts" / "config.toml").read_text()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            f"--optim.schedule {OWN}nan_at_seven",
            "failed at step 7: ValueError: it returned nan, which is not a finite number",
        ),
        (f"--optim.schedule {OWN}two_arguments", "failed at step 1: TypeError: two_arguments() takes 2"),
    ],
)
def test_a_wrong_function_is_one_line_before_any_process_group(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as refused:
        Schedule(settings(flags).optim, 20)
    assert refused.value.hint
    assert "\n" not in str(refused.value)
