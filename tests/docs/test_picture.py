"""docs/architecture.svg is what `make architecture` draws; docs/architecture.md lists every room."""

from __future__ import annotations

from tests import house_picture
from tests.docs.pages import ROOT, text_of
from tests.test_house import LEVEL


def test_the_picture_is_what_the_command_writes() -> None:
    assert house_picture.PICTURE.read_text(encoding="utf-8") == house_picture.draw(), "make architecture"


def test_every_room_has_a_box_and_every_arrow_goes_down() -> None:
    graph = house_picture.reduced(house_picture.room_imports())
    rows = house_picture.rows_of(graph)
    assert rows.keys() == LEVEL.keys()
    assert all(rows[name] > rows[target] for name, targets in graph.items() for target in targets)
    assert house_picture.draw().count('class="room"') == len(LEVEL)


def test_what_is_left_out_of_the_picture_is_implied_by_it() -> None:
    every = house_picture.room_imports()
    graph = house_picture.reduced(every)
    for name, targets in every.items():
        assert targets <= house_picture.reachable(graph, graph[name])


def test_the_page_lists_every_room() -> None:
    page = text_of(ROOT / "docs" / "architecture.md")
    forms = ("`{}`", "`{}/`", "`{}.py`")
    assert [name for name in LEVEL if not any(form.format(name) in page for form in forms)] == []
