"""Parses one value: from a flag's text or a recipe's value to its field, or a ConfigError.

Contains the types, the ranges, and the syntax of structured strings (`2:8`, `step`). Not here: where values
come from (reading.py), fields that conflict (checks.py).
"""

from __future__ import annotations

import math
import os
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from fsdp.base.errors import ConfigError
from fsdp.base.text import nearest, parse_count
from fsdp.config.aliases import sharding
from fsdp.config.fields import FieldSpec
from fsdp.config.limits import parse_toml
from fsdp.config.sources import parse_sources


def parse_value(spec: FieldSpec, value: Any) -> Any:
    """Converts a string from a flag, or a TOML value, to the field's type, and checks its range."""
    choices = typing.get_args(spec.type) if typing.get_origin(spec.type) is Literal else ()
    names = choices or spec.meta["names"]
    if names:
        text = str(value).lower() if isinstance(value, bool) else str(value)
        if text not in names and (choices or ":" not in text):
            more = "" if choices else " or package.module:function"
            raise ConfigError(
                f"--{spec.name} {value} is not one of {', '.join(names)}{more}.",
                _choice_hint(spec, text, names),
            )
        return text
    if spec.is_tables:
        return parse_sources(value)
    if spec.type is bool:
        return _parse_bool(spec, value)
    if spec.type is str:
        return _without_nul(spec, str(value).lower() if isinstance(value, bool) else str(value))
    return _in_range(spec, _parse_number(spec, value))


def _choice_hint(spec: FieldSpec, text: str, choices: Sequence[str]) -> str:
    if spec.name == "mesh.strategy" and (known := sharding(text)) is not None:
        return known
    word = text.lower().removeprefix("torch.")
    word = DTYPES.get(word, word)
    if spec.name == "precision.frozen" and word in QUANTIZED:
        return "--precision.frozen bf16 --lora.rank 8"
    if word in FLOAT8 and "bf16" in choices:
        return f"--{spec.name} bf16 --speed.float8 tensorwise"
    return f"--{spec.name} {nearest(word, choices, '{}', str(spec.default))}"


DTYPES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}
"""torch's names of the dtypes that flags name."""
QUANTIZED = ("nf4", "fp4", "int4", "int8", "4bit", "8bit")
FLOAT8 = ("fp8", "float8", "float8_e4m3fn")


_TRUE, _FALSE = {"true", "1", "yes", "on"}, {"false", "0", "no", "off"}


def _parse_bool(spec: FieldSpec, value: Any) -> bool:
    text = str(value).lower()
    if text not in _TRUE | _FALSE:
        raise ConfigError(
            f"--{spec.name} {value} is not true or false.", f"--{spec.name} {str(spec.default).lower()}"
        )
    return text in _TRUE


def _parse_number(spec: FieldSpec, value: Any) -> float | int:
    kind = "a whole number" if spec.type is int else "a number"
    try:
        if isinstance(value, bool):
            raise ValueError
        if spec.type is int and str(value).lstrip("+-").replace("_", "").isdigit():
            return int(value)  # not by way of a float, which is exact up to 2⁵³
        number = float(value)
        if spec.type is float:
            return number
        exact = int(number)  # "1e6" is a whole number too; 2.5 is not
        if exact != number:
            raise ValueError
        return exact
    except (ValueError, OverflowError, TypeError):
        raise ConfigError(f"--{spec.name} {value} is not {kind}.", f"--{spec.name} {spec.default}") from None


def _without_nul(spec: FieldSpec, text: str) -> str:
    """A recipe may hold it; no path and no environment variable can."""
    if "\0" in text:
        raise ConfigError(f"--{spec.name} {text!r} holds a zero byte.", f"--{spec.name} {spec.default!r}")
    return text


LONGEST = 2**63 - 1
"""Of the whole numbers that tensors and arrays count with."""


def _in_range(spec: FieldSpec, number: float | int) -> float | int:
    low, high, above, below = (spec.meta[name] for name in ("low", "high", "above", "below"))
    if spec.type is int and high is None and number > LONGEST:
        high = LONGEST
    wrong = (
        (isinstance(number, float) and not math.isfinite(number))
        or (low is not None and number < low)
        or (high is not None and number > high)
        or (above is not None and number <= above)
        or (below is not None and number >= below)
    )
    if wrong:
        bounds = [f"at least {low}"] * (low is not None) + [f"above {above}"] * (above is not None)
        bounds += [f"at most {high}"] * (high is not None) + [f"below {below}"] * (below is not None)
        wanted = " and ".join(bounds) or "a number"
        raise ConfigError(
            f"--{spec.name} {number} is out of range: {wanted}.", f"--{spec.name} {spec.default}"
        )
    return number


def parse_named(spec: FieldSpec, name: str, value: Any) -> Any:
    """Parses the value of `--model.args.NAME`, or of `--ray.env.NAME`, which stays text."""
    if not spec.is_texts:
        return parse_free_value(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (str, int, float)):
        return str(value)
    raise ConfigError(f"--{spec.name}.{name} {value} is not text.", f"--{spec.name} {name}=VALUE")


def parse_free_value(text: Any) -> Any:
    """Parses the value of `--model.args.NAME`, which has no declared type: a TOML literal, else a string."""
    if not isinstance(text, str):
        return text
    try:
        return parse_toml(f"v = {text}")["v"]
    except (ValueError, RecursionError):  # no TOML, an integer of too many digits, lists too deep
        return {"True": True, "False": False}.get(text, text)


def reshard_policy(text: str) -> bool | int | Literal["step"]:
    """Parses --mesh.reshard_after_forward: a bool, a number of ranks, or "step"."""
    if text in ("true", "false"):
        return text == "true"
    if text == "step":
        return "step"
    if ranks := parse_count(text):
        return ranks
    raise ConfigError(
        f"--mesh.reshard_after_forward {text} is not true, false, step or a number of ranks.",
        "--mesh.reshard_after_forward true",
    )


def worker_range(text: str) -> tuple[int, int]:
    """Parses --ray.num_workers: `4` is (4, 4), `2:8` is (2, 8)."""
    if (span := _span(text)) is None:
        raise ConfigError(
            f"--ray.num_workers {text} is not a number of workers or a range.", "--ray.num_workers 2 or 2:8"
        )
    return span


def profile_steps(text: str) -> tuple[int, int]:
    """Parses --profile.steps: `3:5` is (3, 5), `4` is (4, 4)."""
    if (span := _span(text)) is None:
        raise ConfigError(f"--profile.steps {text} is not first:last, counted from 1.", "--profile.steps 3:5")
    return span


def _span(text: str) -> tuple[int, int] | None:
    """`2:8` or `4`, from 1; None for anything else."""
    first, colon, last = text.partition(":")
    low, high = parse_count(first), parse_count(last if colon else first)
    return (low, high) if low and high and low <= high else None


def exists(path: str | Path) -> bool:
    """Path.exists raises for a name that is too long and for a folder that may not be searched."""
    try:
        return Path(path).exists()
    except OSError:
        return False


def expanded(path: str) -> Path:
    return Path(with_home(path))


def with_home(path: str) -> str:
    """The path with ~ replaced; as it is for a ~NAME of nobody, where Path.expanduser raises."""
    return os.path.expanduser(path)  # noqa: PTH111
