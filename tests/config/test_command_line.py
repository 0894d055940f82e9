"""The parser of the tools: one-line errors with a hint, help from the docstring, flags of the run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from fsdp.base.errors import ConfigError
from fsdp.config import load
from fsdp.config.command_line import CommandParser, number, one_of, prints_errors, whole_number

ROOT = Path(__file__).parents[2]


def parser() -> CommandParser:
    made = CommandParser("tests.tool", "Do it:\n\n    python -m tests.tool RUN\n")
    made.add_argument("run", metavar="RUN", help="a run directory")
    made.add_argument("--out", type=Path, metavar="FILE", help="where to write")
    made.add_argument("--ranks", dest="ranks", type=whole_number(1), default=2, help="how many")
    made.add_argument("--share", type=number(0, 1), help="how much")
    made.add_argument("--format", type=one_of("torch", "both"), help="which format")
    made.add_argument("--quick", action="store_true", help="skip the rest")
    return made


def test_own_flags_and_positional_arguments_in_any_order() -> None:
    for words in ("RUN --out a --quick", "--out a RUN --quick", "--quick --out=a RUN"):
        options = parser().parse(words.split())
        assert (options.run, options.out, options.quick, options.ranks) == ("RUN", Path("a"), True, 2)


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        ("", "RUN is missing.", "python -m tests.tool --help"),
        ("RUN --outt a", "--outt is not a flag.", "did you mean --out?"),
        ("RUN --zzz", "--zzz is not a flag.", "python -m tests.tool --help"),
        ("RUN other", "other is not a flag.", "python -m tests.tool --help"),
        ("RUN --out", "--out has no value.", "python -m tests.tool --help"),
        ("RUN --ranks", "--ranks has no value.", "--ranks 2"),
        ("RUN --ranks 0", "--ranks 0 is not a whole number from 1.", "--ranks 2"),
        ("RUN --rank 2", "--rank is not a flag.", "did you mean --ranks?"),
        ("RUN --share nan", "--share nan is not a number from 0 to 1.", "python -m tests.tool --help"),
        ("RUN --format x", "--format x is not one of torch, both.", "python -m tests.tool --help"),
        ("RUN --quic", "--quic is not a flag.", "did you mean --quick?"),
    ],
)
def test_a_mistake_is_one_line_with_a_hint(words: str, message: str, hint: str) -> None:
    for parse in (parser().parse, lambda argv: parser().parse_with_run_flags(argv, sections=["data"])):
        with pytest.raises(ConfigError) as refused:
            parse(words.split())
        assert str(refused.value) == f"{message} HINT: {hint}"
        assert refused.value.exit_code == 2


def test_flags_of_the_run_are_handed_on_as_typed() -> None:
    words = "--train.steps 3 RUN --watch.deterministic --out a --config c.toml --optim.lr=1e-3 --batch_size 2"
    options, flags = parser().parse_with_run_flags(words.split())
    assert (options.run, options.out) == ("RUN", Path("a"))
    assert " ".join(flags) == (
        "--train.steps 3 --watch.deterministic --config c.toml --optim.lr=1e-3 --batch_size 2"
    )
    with pytest.raises(ConfigError, match=r"HINT: --train\.micro_batch 2, "):
        load(["--batch_size", "2"])


@prints_errors("tests.tool")
def much(argv: Sequence[str]) -> int:
    print("a line\n" * int(argv[0]))
    return 0


def ends_quietly(program: str, *words: str) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    start = partial(
        subprocess.run, [sys.executable, *words], cwd=ROOT, env=environ, stderr=subprocess.PIPE, text=True
    )
    reader, writer = os.pipe()
    os.close(reader)
    ended = start(stdout=writer)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (1, "")
    with Path("/dev/full").open("w") as full:
        done = start(stdout=full)
    assert done.returncode == 1
    assert done.stderr == f"{program}: its output cannot be written: No space left on device\n"


@pytest.mark.parametrize("lines", ["1", "100000"])  # less than a pipe holds, and more
def test_a_reader_that_has_ended_and_a_full_disk_are_no_traceback(lines: str) -> None:
    code = f"from {__name__} import much; raise SystemExit(much(['{lines}']))"
    ends_quietly("tests.tool", "-c", code)
