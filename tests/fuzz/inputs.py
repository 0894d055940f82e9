"""Generated inputs: JSON values, line files, flags, recipes, messages. hypothesis draws and shrinks them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from fsdp.config import FIELDS
from fsdp.config.write import toml_value
from launch.policy import Kind

ODD_TEXTS = (
    "", " ", "\0", "nan", "inf", "-1", "1e999", "9" * 5000, "true", "None", "\udcff", "a\nb", "../..", "é",
    "\x7f", "[" * 2000, "{}", "1:2", "step", "x:y", "0", "/dev/zero", "~", "$HOME", "%s", "--",
)  # fmt: skip


def json_values() -> SearchStrategy[Any]:
    """JSON values of every type, with numbers that no double or no step holds."""
    scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12)
    return st.recursive(
        scalars | st.just(10**400),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
        max_leaves=5,
    )


def encoded(values: SearchStrategy[Any]) -> SearchStrategy[bytes]:
    return values.map(lambda one: json.dumps(one).encode())


def line_files() -> SearchStrategy[bytes]:
    """history.jsonl and metrics.jsonl: whole lines, ones with a field of any value, any bytes."""
    step = st.integers(-1, 9) | json_values()
    event = {
        "event": st.sampled_from(["start", "end", "crash", "lost", "unmet"]) | json_values(),
        "step": step,
        "from_step": step,
        "job": st.just("7") | json_values(),
        "restart": st.integers(0, 2) | json_values(),
        "code": st.integers(0, 9) | json_values(),
        "kind": st.sampled_from(list(Kind.__members__)) | json_values(),
        "starting": json_values(),
        "data": json_values(),
    }
    line = encoded(st.fixed_dictionaries({}, optional=event))
    odd = st.binary(max_size=30) | st.sampled_from([b"[" * 20_000, bytes(99), b'{"step": 3, "lo'])
    return st.lists(line | line | odd, max_size=12).map(lambda lines: b"\n".join(lines))


def markers() -> SearchStrategy[bytes | None]:
    """FAILED: absent, of the start named t, with any values, any bytes."""
    failed = st.fixed_dictionaries(
        {"start": st.just("t") | json_values(), "code": st.integers(0, 9) | json_values()},
        optional={
            "kind": st.sampled_from(list(Kind.__members__)) | json_values(),
            "message": st.just("an error") | json_values(),
        },
    )
    return st.none() | st.binary(max_size=20) | encoded(failed) | encoded(json_values())


def locks() -> SearchStrategy[bytes]:
    names = ("token", "host", "place", "pid", "born", "launcher", "job", "since")
    whole = st.fixed_dictionaries({}, optional=dict.fromkeys(names, json_values()))
    return st.binary(max_size=40) | encoded(whole | json_values())


def another_part(whole: bytes) -> SearchStrategy[bytes]:
    """A file with a span of it replaced."""
    odd = [
        b"\0",
        b"1e999",
        b'"\\ud800"',
        b"[" * 3000,
        b"]",
        b"\xff",
        b"nan",
        b"{}",
        b"=",
        b"9" * 5000,
        b"\n[x]\n",
    ]
    at = st.integers(0, len(whole))
    between = st.sampled_from(odd) | st.binary(max_size=9)
    return st.tuples(at, at, between).map(lambda cut: whole[: cut[0]] + cut[2] + whole[cut[1] :])


# ---------------------------------------------------------------- flags and recipes


def texts() -> SearchStrategy[str]:
    numbers = (st.integers(-2, 40) | st.integers() | st.floats()).map(str)
    return st.sampled_from(ODD_TEXTS) | numbers | st.text(max_size=8)


def values_of(name: str) -> SearchStrategy[Any]:
    """Values of a field: its default, its names, numbers about it, and what does not fit."""
    spec = FIELDS[name]
    names = [
        str(one) for one in (spec.meta["names"] or getattr(spec.type, "__args__", ())) if isinstance(one, str)
    ]
    return st.one_of(
        st.just(str(spec.default)), *([st.sampled_from(names)] * 2 if names else []), texts(), st.just("true")
    )


def command_lines() -> SearchStrategy[list[str]]:
    """Flags with values, repeated, unknown, without a value, and words that are no flags."""
    known = st.sampled_from(sorted(FIELDS)).flatmap(
        lambda name: values_of(name).map(lambda value: [f"--{name}", value])
    )
    args = st.tuples(
        st.sampled_from(["--model.args.", "--data.args.", "--optim.args."]), st.text(max_size=5), texts()
    )
    more = args.map(lambda one: [f"{one[0]}{one[1]}={one[2]}"])
    odd = st.tuples(st.sampled_from(["--", "-", "--train.", ""]), texts()).map(lambda one: ["".join(one)])
    return st.lists(known | known | known | more | odd, max_size=6).map(
        lambda parts: [word for part in parts for word in part]
    )


def recipes() -> SearchStrategy[str]:
    """TOML: known and unknown sections and fields with values of any type, or any text."""
    by_section: dict[str, list[str]] = {}
    for name in FIELDS:
        section, _, field = name.rpartition(".")
        by_section.setdefault(section, []).append(field)
    value = texts() | st.booleans() | st.integers() | st.floats()
    tables = st.dictionaries(st.text(max_size=6), value, max_size=2)
    any_value = value | st.lists(value | tables, max_size=2) | tables

    def fields(section: str) -> SearchStrategy[tuple[str, Mapping[str, Any]]]:
        key = (
            st.sampled_from(by_section[section]) | st.sampled_from(by_section[section]) | st.text(max_size=6)
        )
        fitting = key.flatmap(
            lambda field: st.tuples(
                st.just(field),
                values_of(f"{section}.{field}") | any_value if f"{section}.{field}" in FIELDS else any_value,
            )
        )
        return st.tuples(st.just(section), st.lists(fitting, max_size=3).map(dict))

    known = st.sampled_from(sorted(section for section in by_section if section)).flatmap(fields)
    written = st.lists(known, max_size=4).map(
        lambda sections: "\n".join(map(_section, dict(sections).items()))
    )
    return written | written | st.text(max_size=40)


def _section(part: tuple[str, Mapping[str, Any]]) -> str:
    lines = [f"{json.dumps(key)} = {toml_value(value)}" for key, value in part[1].items()]
    return "\n".join([f"[{part[0]}]", *lines])
