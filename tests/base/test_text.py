"""Counts, lists, tables and errors as text."""

from __future__ import annotations

from fsdp.base.errors import ConfigError, first_line, message_line, without_hint
from fsdp.base.text import counted, listed, named_ranks


def test_counts_and_lists() -> None:
    assert [counted(n, "rank") for n in (0, 1, 2048)] == ["0 ranks", "1 rank", "2,048 ranks"]
    assert listed([3]) == "3"
    assert listed(range(10), 3) == "0, 1, 2 and 7 more"
    assert [named_ranks([4]), named_ranks([4, 6])] == ["rank 4", "ranks 4, 6"]


def test_an_error_without_a_message_has_its_class() -> None:
    assert [first_line(AssertionError()), message_line(AssertionError())] == ["AssertionError"] * 2


def test_the_message_of_an_error() -> None:
    error = ValueError("\nfirst line\n  second. ")
    found = [first_line(error), first_line(error, 5), message_line(error)]
    assert found == ["first line", "first", "first line second"]
    assert without_hint(ConfigError("wrong.", "--right")) == "wrong."
