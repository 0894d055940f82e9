"""The parts of the full form (`make test-full PART=2/4`)."""

from __future__ import annotations

from tests.conftest import in_part


def test_every_test_is_in_exactly_one_part() -> None:
    names = [f"tests/room/test_{n}.py::test_case[{n}]" for n in range(300)]
    parts = [{name for name in names if in_part(name, f"{number}/4")} for number in (1, 2, 3, 4)]
    assert set.union(*parts) == set(names)
    assert sum(map(len, parts)) == len(names)
    assert min(map(len, parts)) > 60
    assert all(in_part(name, "") for name in names)
