"""Messages between monitors, checked as they arrive: a peer's message is data.

A node reports its ranks (observations), step_s, steps, spent and asked. The head sends alive,
ask, keep (the folder of a verdict in RUN/watch), printed, done, and end with failed. A message of another
form is left out. Not here: sending and receiving (monitor_links.py).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from fsdp.base.phases import PHASES, Activity
from fsdp.watch.observation import Observation
from fsdp.watch.recorded_calls import GroupCalls
from fsdp.watch.stragglers import Work

KIND = re.compile(r"[a-z]+( [a-z]+)*")
FOLDER = re.compile(r"[a-z]+(-[a-z]+)*-\d{6,19}")
"""KIND-STEP, the folder of a verdict: a name that stays in RUN/watch."""
LARGEST = 1 << 63


def is_report(message: Any) -> bool:
    """Whether it is a node's report; `times_of` checks the values of steps and spent."""
    return (
        isinstance(message, dict)
        and type(message.get("asked")) is bool
        and _is_number(message.get("step_s"))
        and isinstance(message.get("steps"), dict)
        and isinstance(message.get("spent"), dict)
        and isinstance(message.get("ranks"), list)
        and all(map(_is_observation, message["ranks"]))
    )


def is_order(message: Any) -> bool:
    """Whether it is a message of the head."""
    if not isinstance(message, dict):
        return False
    keep = message.get("keep")
    flags = [value for name, value in message.items() if name != "keep"]
    return (
        all(type(value) is bool for value in flags)
        and ("keep" not in message or (type(keep) is str and FOLDER.fullmatch(keep) is not None))
        and ("failed" in message or not message.get("end"))
    )


def times_of(report: Mapping[str, Any], names: frozenset[str]) -> tuple[dict[int, Work], dict[int, Any]]:
    """Steps and spent by rank; JSON has no numbers as keys and no tuples. A rank of another form is left out.

    `names`: the times that every rank has.
    """
    steps, spent = dict[int, Work](), dict[int, Any]()
    for rank in report["steps"].keys() & report["spent"].keys():
        seconds = report["spent"][rank]
        if (
            not isinstance(seconds, dict)
            or seconds.keys() != names
            or not all(map(_is_number, seconds.values()))
        ):
            continue
        try:
            rows = {int(step): work for step, work in report["steps"][rank].items()}
            number = int(rank)
        except (ValueError, TypeError, AttributeError):
            continue
        if all(map(_is_number, rows.values())):
            steps[number], spent[number] = rows, seconds
    return steps, spent


# ---------------------------------------------------------------- the forms of values


def _is_observation(data: Any) -> bool:
    return (
        isinstance(data, dict)
        and data.keys() == _CHECKS.keys()
        and all(check(data[name]) for name, check in _CHECKS.items())
        and data["rank"] >= 0
        and data["phase"] in PHASES
    )


def _is_count(value: Any) -> bool:
    return type(value) is int and -LARGEST < value < LARGEST


def _is_number(value: Any) -> bool:
    return _is_count(value) or (type(value) is float and math.isfinite(value))


def _is_flag(value: Any) -> bool:
    return type(value) is bool


def _is_text(value: Any) -> bool:
    return type(value) is str


def _is_stack(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(frame, list)
        and len(frame) == 3
        and _is_text(frame[0])
        and _is_count(frame[1])
        and _is_text(frame[2])
        for frame in value
    )


def _are_calls(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(one, dict)
        and one.keys() == _CALL_CHECKS.keys()
        and all(check(one[name]) for name, check in _CALL_CHECKS.items())
        for one in value
    )


def _is_failure(value: Any) -> bool:
    """None, or the form of failure_report.py."""
    return value is None or (
        isinstance(value, dict)
        and _is_number(value.get("time"))
        and all(_is_text(value.get(name)) for name in ("kind", "message", "hint", "trace", "print"))
        and KIND.fullmatch(value["kind"]) is not None
        and all(_is_flag(value.get(name)) for name in ("secondary", "ours"))
        and isinstance(value.get("ranks"), list)
        and all(map(_is_count, value["ranks"]))
    )


_BY_TYPE: Mapping[str, Callable[[Any], bool]] = {
    "int": _is_count,
    "float": _is_number,
    "bool": _is_flag,
    "bool | None": lambda value: value is None or _is_flag(value),
    "str": _is_text,
    "Activity": lambda value: type(value) is int and 0 <= value <= max(Activity) * 2 - 1,
    "tuple[Frame, ...]": _is_stack,
    "dict[str, tuple[Frame, ...]]": lambda value: (
        isinstance(value, dict) and all(map(_is_stack, value.values()))
    ),
    "tuple[GroupCalls, ...]": _are_calls,
    "dict[str, Any] | None": _is_failure,
}
_CALL_CHECKS = {field.name: _BY_TYPE[str(field.type)] for field in dataclasses.fields(GroupCalls)}
_CHECKS = {field.name: _BY_TYPE[str(field.type)] for field in dataclasses.fields(Observation)}
