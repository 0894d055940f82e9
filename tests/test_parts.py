"""The parts of the full form (`make test-full PART=2/3`)."""

from __future__ import annotations

from tests.conftest import in_part


def test_every_test_is_in_exactly_one_part() -> None:
    names = [f"tests/room/test_{n}.py::test_case[{n}]" for n in range(300)]
    parts = [{name for name in names if in_part(name, f"{number}/3")} for number in (1, 2, 3)]
    assert set.union(*parts) == set(names)
    assert sum(map(len, parts)) == len(names)
    assert min(map(len, parts)) > 80
    assert all(in_part(name, "") for name in names)
