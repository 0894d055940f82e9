"""launch/policy.py: the table of docs/restarts.md, and the bounds."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp.distributed import stop
from launch import policy
from launch.guard import failure_of
from launch.policy import Act, Allocation, End, Kind, Past, decide, kind_of_stop

PAGE = Path(__file__).resolve().parents[2] / "docs" / "restarts.md"
LAUNCHERS = {
    "sbatch": Allocation(requeue=True),
    "launch.submit": Allocation(requeue=True, again=False),
    "launch.local": Allocation(tries_left=3),
    "Ray": Allocation(),
}
OWN_CODES = {Kind.FINAL: (2, 5), Kind.PROGRAM: (1,), Kind.ERROR: (1, 3, 4, 5, 6)}


def table() -> list[dict[str, str]]:
    """The first table of the page, a dictionary a row."""
    lines = [
        line.strip("| \n").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")
    ]
    head, rows = lines[0], [line for line in lines[1:] if len(line) == len(lines[0])]
    return [dict(zip(head, row, strict=True)) for row in rows]


def test_the_page_names_every_end() -> None:
    assert [row["how a start ended"] for row in table()] == [kind.value for kind in Kind]


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("row", table(), ids=lambda row: row["how a start ended"])
def test_the_page_says_what_follows_on_each_launcher(row: dict[str, str], launcher: str) -> None:
    kind = Kind(row["how a start ended"])
    if row[launcher] == "–":
        return  # cannot happen there
    for code in OWN_CODES.get(kind, (9,)):
        decision = decide(End(kind, step=10, code=code, why="SIGTERM"), Past(unmet=1), LAUNCHERS[launcher])
        assert decision.act.value == row[launcher]
        said = row["exit code at the end"]
        if decision.act is not Act.END:
            assert decision.code == 0
        else:
            assert str(code if kind in OWN_CODES else decision.code) in said
            assert kind not in OWN_CODES or decision.code == code


@pytest.mark.parametrize("reason", stop.REASONS)
def test_every_reason_to_stop_is_a_persons_or_the_schedulers(reason: str) -> None:
    persons = reason in ("SIGINT", "SIGHUP", "the stop file")
    assert kind_of_stop(reason) is (Kind.STOPPED if persons else Kind.PREEMPTED)
    assert kind_of_stop("--train.stop_after 10") is Kind.STOPPED


def crash(step: int, kind: Kind = Kind.ERROR, *, starting: bool = False, code: int = 1) -> End:
    return End(kind, step, starting, code)


DIED = Kind.DIED
AT_START = crash(0, DIED, starting=True)
AT_ONE_PLACE = {
    "the same error at the same step": ([crash(20)], crash(20), Act.END),
    "an error at a later step": ([crash(20)], crash(30), Act.AGAIN),
    "an error met sooner after a resume": ([crash(20)], crash(17), Act.END),
    "a death at the same step": ([crash(20, DIED)], crash(20, DIED), Act.AGAIN),
    "a third death at the same step": ([crash(20, DIED)] * 2, crash(20, DIED), Act.END),
    "deaths by chance, each sooner": ([crash(20, DIED), crash(19, DIED)], crash(18, DIED), Act.AGAIN),
    "a death, then an error at that step": ([crash(20, DIED)], crash(20), Act.END),
    "a crash while starting, after one at a step": ([crash(20)], crash(20, starting=True), Act.AGAIN),
    "an error while starting twice": ([crash(0, starting=True)], crash(0, starting=True), Act.END),
    "a death while starting twice": ([AT_START], AT_START, Act.AGAIN),
    "three deaths while starting": ([AT_START] * 2, AT_START, Act.END),
    "errors while starting, with a step between": (
        [crash(0, starting=True), crash(20)],
        crash(20, starting=True),
        Act.AGAIN,
    ),
}


@pytest.mark.parametrize("launcher", ["sbatch", "launch.local"])
@pytest.mark.parametrize(("earlier", "end", "act"), AT_ONE_PLACE.values(), ids=list(AT_ONE_PLACE))
def test_a_run_is_tried_again_while_it_gets_further(
    launcher: str, earlier: list[End], end: End, act: Act
) -> None:
    decision = decide(end, Past(crashes=earlier), LAUNCHERS[launcher])
    assert decision.act is act
    if act is Act.END:
        assert decision.code == (policy.EXIT_DIED if end.kind is DIED else end.code)
        assert decision.hint


def test_no_restart_left_ends_with_the_errors_own_code() -> None:
    decision = decide(crash(10, code=6), Past(), Allocation(tries_left=0))
    assert (decision.act, decision.code) == (Act.END, 6)


def test_a_rank_that_the_watch_ended_keeps_its_code() -> None:
    assert decide(crash(10, DIED, code=7), Past(), Allocation(tries_left=0)).code == 7
    assert decide(crash(10, DIED, code=-9), Past(), Allocation(tries_left=0)).code == 3


@pytest.mark.parametrize("kind", [Kind.PREEMPTED, Kind.NODES_LEAVE])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_stops_without_a_step_have_one_bound(kind: Kind, launcher: str) -> None:
    bound = policy.STOPS_WITHOUT_A_STEP
    codes = [
        decide(End(kind), Past(idle_stops=count), LAUNCHERS[launcher]).code for count in (bound - 1, bound)
    ]
    assert codes == [0, 1]


def test_the_bounds_are_those_of_the_page() -> None:
    page, again, fixed = PAGE.read_text(), Allocation(requeue=True), Allocation(requeue=False)
    assert "| 5 stops in a row before a step was done | end" in page
    assert "| 3 meetings missed in a row | end |" in page
    stops = [decide(End(Kind.PREEMPTED), Past(idle_stops=count), again).act for count in (4, 5)]
    unmet = [decide(End(Kind.UNMET), Past(unmet=count), again).act for count in (2, 3)]
    assert stops == unmet == [Act.REQUEUE, Act.END]
    ends = [End(Kind.PREEMPTED, why="SIGUSR1"), End(Kind.UNMET), crash(10)]
    assert [decide(end, Past(unmet=1), fixed).act for end in ends] == [Act.END, Act.END, Act.AGAIN]


@pytest.mark.parametrize(("step", "act"), [(0, Act.END), (3, Act.AGAIN)])
def test_an_error_of_the_program_is_not_tried_again_before_a_step(step: int, act: Act) -> None:
    failure = failure_of(TypeError("forward() takes 1 argument"))
    end = End(failure.kind, step, code=1, why=failure.message)
    assert decide(end, Past(), Allocation(requeue=True)).act is act
    assert decide(End(Kind.ERROR, step), Past(), Allocation(requeue=True)).act is Act.AGAIN
