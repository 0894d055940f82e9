"""The mutation command: what it changes, and that it tells a test that notices from one that does not."""

from __future__ import annotations

import ast

import pytest

from tests.mutate.__main__ import _tests_of, main
from tests.mutate.known import KNOWN
from tests.mutate.operators import mutations
from tests.mutate.trial import ROOT

SOURCE = '''
def keep(store, count: int, ready: bool = True) -> int:
    """Text stays."""
    log.info("a message stays %d", 3)
    if (count) <= 2 and ready:
        store.sync()
        store.size = count + 1
    raise ValueError(f"{count - 1} stays")
'''


def test_each_kind_of_change_is_found_and_is_valid_python() -> None:
    found = mutations("a.py", SOURCE)
    changes = {(one.kind, one.before, one.after) for one in found}
    assert changes == {
        ("condition negated", "(count) <= 2 and ready", "(not ((count) <= 2 and ready))"),
        ("comparison", "<=", "<"),
        ("and, or", "and", "or"),
        ("constant", "2", "3"),
        ("constant", "1", "2"),
        ("call removed", "store.sync()", "pass"),
        ("assignment removed", "store.size = count + 1", "pass"),
        ("arithmetic", "+", "-"),
    }
    for one in found:
        ast.parse(one.apply(SOURCE))


@pytest.mark.long
@pytest.mark.parametrize("room", ["checkpoint", "launch"])
def test_every_mutation_of_the_product_is_valid_python(room: str) -> None:
    place = ROOT / "fsdp" / room if room != "launch" else ROOT / room
    for path in sorted(place.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for one in mutations(path.name, text):
            ast.parse(one.apply(text))


def test_the_known_mutations_fit_the_sources() -> None:
    for one in KNOWN:
        mutation = one.mutation(ROOT)
        ast.parse(mutation.apply((ROOT / mutation.file).read_text(encoding="utf-8")))
        assert all((ROOT / test).exists() for test in one.tests), one.name


@pytest.mark.long
def test_a_test_that_notices_kills_and_another_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--known", "--only", "good steps are kept"]
    assert main(options) == 0
    assert "1 killed, 0 survived" in capsys.readouterr().out
    assert main([*options, "--tests", "tests/rundir/test_line_files.py"]) == 1
    assert "SURVIVED fsdp/optim/loss_scale.py" in capsys.readouterr().out


def test_a_wrong_place_is_one_line() -> None:
    with pytest.raises(SystemExit, match=r"fsdp/chekpoint has no Python file\. HINT: --room checkpoint"):
        main(["--room", "chekpoint"])


def test_the_parts_of_a_sample_are_the_sample(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--room", "rundir", "--file", "launch/policy.py", "--sample", "9", "--seed", "1", "--list"]

    def listed(*more: str) -> list[str]:
        main([*options, *more])
        return capsys.readouterr().out.splitlines()[1:]

    whole = listed()
    assert sum(line.startswith("launch/policy.py") for line in whole) == 4
    assert [line for nth in (1, 2, 3) for line in listed("--part", f"{nth}/3")] == whole


def test_a_files_own_test_comes_first() -> None:
    tests = _tests_of("fsdp/rundir/tail.py")
    assert tests[0] == "tests/rundir/test_tail.py"
    assert "tests/rundir/test_lock.py" in tests
