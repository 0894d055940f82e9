"""Damaged or foreign files of a run directory: a tool succeeds or prints one line, and writes nothing else.

`python -m pytest tests/report/test_odd_files.py` tries a sample; with SHARDRUN_FULL=1 some thousand more.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from fsdp.checkpoint import __main__ as checkpoints
from fsdp.checkpoint.crc import crc32
from fsdp.predict.__main__ import main as predict
from fsdp.report.__main__ import main as report
from tests.report.test_watch_section import watched
from tests.support.runs import run as train

ODD = (
    b"NaN", b"-Infinity", b"1e999", b"1" + b"0" * 400, b"9" * 5000, b"5e-324", b"-1", b"1e308", b"0.5",
    b"true", b"null", b'""', b'"x"', b'"\\ud800"', b'"\\u0000"', b"[]", b"[[1]]", b"{}", b'{"a": 1}',
    b"[" * 100_000,
    b"\0", b"\xff\xfe", b"\n", b",",
)  # fmt: skip
"""What a value becomes."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run of six steps, and in RUN/watch all that the watch can leave."""
    folder = tmp_path_factory.mktemp("real") / "run"
    flags = (
        "--model.name mlp --model.args.hidden 8 --data.name digits --train.steps 6 --checkpoint.every_steps 3"
    )
    train(1, folder, flags, "--profile.memory true --profile.steps 3:4")
    return watched(folder)


def read_by_the_report(run: Path) -> list[Path]:
    """Relative paths of all files that it opens."""
    some = [
        *run.glob("*.jsonl"),
        *run.glob("watch/**/*"),
        *run.glob("profile/*_memory.json"),
        *run.glob("full_model/*"),
    ]
    some += [run / "config.toml", *run.glob("checkpoints/*/manifest.json")]
    return sorted(file.relative_to(run) for file in some if file.is_file())


# ---------------------------------------------------------------- damage


def values(data: bytes) -> list[tuple[int, int]]:
    """Where numbers, strings and empty lists stand, in JSON and TOML alike."""
    return [found.span() for found in re.finditer(rb'-?\d[\d.e+-]*|"[^"\n]*"|\[\]|true|false|null', data)]


def another_value(data: bytes, chance: random.Random) -> bytes:
    spans = values(data)
    if not spans:
        return chance.choice(ODD)
    first, last = chance.choice(spans)
    return data[:first] + chance.choice(ODD) + data[last:]


def flipped(data: bytes, chance: random.Random) -> bytes:
    some = bytearray(data)
    for _ in range(chance.choice((1, 3, 30))):
        if some:
            some[chance.randrange(len(some))] = chance.randrange(256)
    return bytes(some)


def cut(data: bytes, chance: random.Random) -> bytes:
    """As a full disk or a kill leaves it: torn, or with what was never written in its midst."""
    at, more = chance.randrange(len(data) + 1), chance.randrange(len(data) + 1)
    return chance.choice(
        (data[:at], data[at:], data[:at] + bytes(300) + data[at:], data[:at] + data[more:], b"")
    )


def lines_mixed(data: bytes, chance: random.Random) -> bytes:
    lines = data.splitlines(keepends=True)
    chance.shuffle(lines)
    return b"".join(lines + chance.choices(lines or [b"{}\n"], k=3) + [chance.choice(ODD) + b"\n"])


def resealed(data: bytes, chance: random.Random) -> bytes:
    """A manifest with another value and the checksum that fits it: by somebody who knows the format."""
    head, _, rest = data.partition(b"\n")
    text = another_value(rest[:-2], chance)
    return b'{"crc32": %10d, "manifest":\n%s}\n' % (crc32(text), text) if head.startswith(b"{") else data


DAMAGE: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    another_value,
    another_value,
    flipped,
    cut,
    lines_mixed,
    resealed,
)


def damage(run: Path, chance: random.Random, outside: Path) -> str:
    """Several files of a run directory made odd; says how."""
    said = []
    for name in chance.sample(read_by_the_report(run), k=chance.choice((1, 2, 6))):
        file = run / name
        kind = chance.randrange(24)
        how = chance.choice(DAMAGE)
        if kind == 0:
            file.unlink()
            chance.choice((file.mkdir, lambda file=file: os.mkfifo(file), lambda: None))()
        elif kind == 1:
            file.unlink()
            file.symlink_to(chance.choice((outside, file, run / "none", "/dev/zero", "/")))
        else:
            file.write_bytes(how(file.read_bytes(), chance))
        said.append(f"{name}: {('removed', 'a link')[kind] if kind < 2 else how.__name__}")
    if not chance.randrange(6):
        (run / "report.html").unlink(missing_ok=True)
        (run / "report.html").symlink_to(outside)
    return ", ".join(said)


# ---------------------------------------------------------------- what must hold


def tree(folder: Path) -> dict[str, bytes | str]:
    """Everything below, links as where they lead."""
    found: dict[str, bytes | str] = {}
    for place, folders, files in os.walk(folder):
        for name in folders + files:
            path = Path(place, name)
            found[str(path)] = (
                str(path.readlink()) if path.is_symlink() else path.read_bytes() if path.is_file() else ""
            )
    return found


@dataclass(frozen=True)
class Tool:
    """A command that reads a run directory, and what it alone may write there."""

    main: Callable[[list[str]], int]
    words: tuple[str, ...] = ()
    writes: str = ""


TOOLS = {
    "report": Tool(report, ("--no-samples",), "report.html"),
    "report with samples": Tool(report, (), "report.html"),
    "predict": Tool(predict, (), "predictions.png"),
    "checkpoints list": Tool(checkpoints.main),
    "checkpoints export": Tool(checkpoints.main, ("export",), "full_model"),
}


OTHER_CLASSES = "other names or another order than those of the run"
"""A digest of which a bit is another is that of other classes."""
OLDER_EXPORTED = "was exported. HINT: "
"""Beside the export of an older checkpoint."""


def attempt(name: str, whole: Path, folder: Path, seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    """One damaged run: an answer or a line, and nothing changed but the tool's own file, in the folder or
    outside.
    """
    tool, run, outside = TOOLS[name], folder / "in" / "run", folder / "outside"
    shutil.copytree(whole, run)
    outside.write_text("somebody else's")
    what = f"seed {seed}: {damage(run, random.Random(seed), outside)}"
    before = tree(folder)
    try:
        code = tool.main([str(run), *tool.words])
    except BaseException as error:
        raise AssertionError(what) from error
    after, told = tree(folder), capsys.readouterr()
    own = run / tool.writes
    changed = {path for path in before | after if before.get(path) != after.get(path)}
    assert not [path for path in changed if not (tool.writes and Path(path).is_relative_to(own))], what
    assert code in (0, 1, 2, 4), what
    lines = [
        line for line in told.err.splitlines() if OTHER_CLASSES not in line and OLDER_EXPORTED not in line
    ]
    assert len(lines) == (1 if code > 1 else 0), what
    if tool.main is report and not code:
        assert not own.is_symlink(), what
        text = own.read_text(encoding="utf-8")
        assert text.endswith("</html>\n"), what
        assert 'points="nan' not in text, what
    shutil.rmtree(folder / "in")


@pytest.fixture(autouse=True)
def warnings_are_errors() -> Iterator[None]:
    """numpy warns where a number that is none reaches a chart."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


@pytest.mark.parametrize("tool", TOOLS)
def test_damaged_files_give_an_answer_or_a_line(
    tool: str, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in range(50):
        attempt(tool, whole, tmp_path, seed, capsys)


@pytest.mark.long
@pytest.mark.parametrize("tool", TOOLS)
def test_many_damaged_files_give_an_answer_or_a_line(
    tool: str, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in range(1000, 1500):
        attempt(tool, whole, tmp_path, seed, capsys)


# ---------------------------------------------------------------- notes on the page


@pytest.mark.parametrize(
    ("name", "odd", "says"),
    [
        ("metrics.jsonl", f'{{"step": NaN}}\n{{"step": 1e999}}\n{{"step": {10**400}}}\n',
         "left out: 3 lines of metrics.jsonl"),
        ("history.jsonl", '{"event": "start"', "left out: 1 line of history.jsonl"),
        ("saves.jsonl", '{"step": [1]}\n{"step": 1, "write_s": "x"}\n', "left out: 2 lines of saves.jsonl"),
        ("watch/timing.jsonl", '{"ranks": 3, "from_step": 0, "step": 1}\n',
         "left out: 1 line of watch/timing.jsonl"),
        ("watch/verdicts.jsonl", '{"kind": "hang", "time": 1e999}\n',
         "left out: 1 line of watch/verdicts.jsonl"),
        ("watch/late.jsonl", "[]\n", "left out: 1 line of watch/late.jsonl"),
        ("watch/spikes.jsonl", '{"step": 1e999, "grad_norm": 1}\n', "left out: 1 line of watch/spikes.jsonl"),
        ("profile/rank0_memory.json", "}", "left out: profile/rank0_memory.json, which could not be read"),
    ],
)  # fmt: skip
def test_lines_left_out_are_noted_once(whole: Path, tmp_path: Path, name: str, odd: str, says: str) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    with (run / name).open("a") as file:
        file.write(odd)
    assert report([str(run), "--no-samples"]) == 0
    text = (run / "report.html").read_text()
    assert text.count(says) == 1
    assert text.count('class="note"') == 1


def test_a_field_of_another_form_is_noted_and_left_out(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    (run / "config.toml").write_text(
        '[train]\nsteps = "many"\nglobal_batch = 8\n[model]\nargs = 3\n[new]\nthing = [1]\n'
    )
    assert report([str(run), "--no-samples"]) == 0
    text = (run / "report.html").read_text()
    assert "--train.steps many is not a whole number. It is left out." in text
    assert "--model.args 3 has no name. It is left out." in text
    assert "new.thing" in text


def test_a_value_too_large_for_a_chart_is_noted(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(
            '{"step": 7, "loss": 1e308}\n{"step": 8, "loss": -1e308}\n'
            + f'{{"step": 9, "loss": {10**400}}}\n'
        )
    assert report([str(run), "--no-samples"]) == 0
    assert "3 not finite</strong>, the first at step 7" in (run / "report.html").read_text()


EXTREMES = ("1e99", "1e-150", "Infinity", "-1e99", "NaN", "0")


def test_two_runs_are_compared_whatever_their_numbers_are(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of one that diverged, beside one that did not."""
    for name in ("a", "b"):
        shutil.copytree(whole, tmp_path / name)
    for one, other in itertools.permutations(EXTREMES, 2):
        for name, value in (("a", one), ("b", other)):
            of_step = f'"loss": {value}, "step_time_s": {value}, "per_s": {value}, "eval_loss": {value}'
            lines = "".join(f'{{"step": {step}, {of_step}}}\n' for step in range(1, 61))
            (tmp_path / name / "metrics.jsonl").write_text(lines)
        assert report([str(tmp_path / "a"), str(tmp_path / "b"), "--no-samples"]) == 0, (one, other)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("history.jsonl", '{"event": "end", "step": 6, "how": []}'),
        ("watch/verdicts.jsonl", '{"kind": "died", "ranks": [0], "folder": "%s"}' % ("x" * 300)),
    ],
    ids=["how it ended", "a folder"],
)
def test_a_value_of_a_form_that_python_refuses(whole: Path, tmp_path: Path, name: str, line: str) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    kept = [] if name == "history.jsonl" else (run / name).read_text().splitlines()
    start = '{"event": "start", "from_step": 0}'
    (run / name).write_text("\n".join([*kept, start, line]) + "\n")
    assert report([str(run), "--no-samples"]) == 0


@pytest.mark.parametrize("log", ["a FIFO", "a device"])
def test_a_log_that_is_no_file_is_not_read(whole: Path, tmp_path: Path, log: str) -> None:
    """Before, the first blocked the report for good; the second has a line without an end."""
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    (run / "logs").mkdir(exist_ok=True)
    file = run / "logs" / "nccl-0.log"
    if log == "a FIFO":
        os.mkfifo(file)
    else:
        file.symlink_to("/dev/zero")
    assert report([str(run), "--no-samples"]) == 0


def test_a_whole_run_has_no_notes(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    assert report([str(tmp_path / "run")]) == 0
    text = (tmp_path / "run" / "report.html").read_text()
    assert 'class="note"' not in text
    assert "could not be run" not in text


def test_both_runs_notes_are_shown(whole: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        shutil.copytree(whole, tmp_path / name)
    with (tmp_path / "b" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps([1]) + "\n")
    assert report([str(tmp_path / "a"), str(tmp_path / "b"), "--no-samples"]) == 0
    assert "left out: 1 line of metrics.jsonl" in (tmp_path / "a" / "report.html").read_text()
