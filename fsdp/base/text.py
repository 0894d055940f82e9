"""Texts for messages, logs and terminals: counts, lists, units, commands as a person types them. And stdout
and stderr, which print any text: a lost one is no traceback.

Control characters are escaped. Messages name the commands of a clone, `python train.py` and
`python -m fsdp.plan`; `as_typed` replaces them where `shardrun` started the run: it sets SHARDRUN_INSTALLED
for itself and its children. Also checks of values of files that may come from anywhere.
"""

from __future__ import annotations

import difflib
import errno
import io
import logging
import os
import re
import shlex
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

_CONTROLS = [*range(0x20), *range(0x7F, 0xA0), 0x61C, 0x200E, 0x200F]
_CONTROLS += [*range(0x2028, 0x202F), *range(0x2066, 0x206A)]
_SURROGATES = range(0xD800, 0xE000)
"""Of names that are no UTF-8; a stream decides by itself what it writes for them."""
_ESCAPES = {code: repr(chr(code))[1:-1] for code in [*_CONTROLS, *_SURROGATES]}
_IN_LINES = {code: _ESCAPES[code] for code in _CONTROLS if chr(code) not in "\t\n"}


def printable(text: str) -> str:
    """The text with escapes for what a terminal obeys: control characters and those that reorder a line.

    Names and values of a run directory, a store or a foreign file are in messages, and a terminal's escape
    sequences in them could rewrite the screen, its title or its clipboard. Line breaks and tabs stay.
    """
    return text.translate(_IN_LINES)


def printable_line(text: object) -> str:
    """As `printable`, with line breaks and tabs escaped too: a name cannot add a line of its own."""
    return str(text).translate(_ESCAPES)


def counted(count: int, noun: str) -> str:
    """`1 rank`, `3 ranks`."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def listed(items: Sequence[object], most: int = 8) -> str:
    """`a, b and 3 more`."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(map(str, items[:most])) + more


def parse_count(text: str) -> int | None:
    """Of `12` or `1_000`; None for anything else, such as `²`, which str.isdigit takes."""
    return int(text) if re.fullmatch(r"[0-9]+(_[0-9]+)*", text) and len(text) < 20 else None


def named_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 1, 2, 5`."""
    return f"rank{'s' * (len(ranks) > 1)} {listed(ranks)}"


def nearest(word: str, known: Iterable[str], form: str, otherwise: str, *, cutoff: float = 0.6) -> str:
    """`form` with the most similar of `known` words for its {}, or `otherwise`: for hints."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return form.replace("{}", found[0]) if found else otherwise


def markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """A table of Markdown, whose heads are the names of the first row."""
    import html  # a thousand names of entities

    lines = [[*rows[0]], ["---"] * len(rows[0]), *([*row.values()] for row in rows)]
    cells = ([html.escape(cell).replace("|", "\\|").replace("\n", "<br>") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def covering(names: Collection[str], every: Iterable[str]) -> str:
    """Patterns of these names for a flag, `vision.*` for all below the outermost module of which `every` name
    is among them.
    """
    known, patterns = [f"{name}." for name in every], list[str]()
    for name in names:
        parts = name.split(".")
        modules = ("".join(f"{part}." for part in parts[:depth]) for depth in range(1, len(parts) + 1))
        outer = next(m for m in modules if all(k[:-1] in names for k in known if k.startswith(m)))
        patterns.append(name if outer == f"{name}." else f"{outer}*")
    return ",".join(dict.fromkeys(patterns))


def columns(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """A line for each row, its cells aligned to the left, in the columns `right` to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


BELOW_1000 = 999.5
"""From here on three digits are rounded to 1e+03."""


def seconds(value: float) -> str:
    """Three digits, in the unit that fits; `?` for NaN."""
    if value != value:
        return "?"
    if value < 0.9995:
        return f"{value * 1e3:.3g} ms"
    if value < 120:
        return f"{value:.3g} s"
    minutes, hours = value / 60, value / 3600
    if minutes < 120:
        return f"{minutes:.0f} min"
    return f"{hours:.1f} h" if hours < 48 else f"{hours / 24:.1f} days"


def byte_size(count: float) -> str:
    """Three significant digits, binary units."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < BELOW_1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} GiB" if abs(count) < BELOW_1000 else f"{count / 1024:.3g} TiB"


INSTALLED = "SHARDRUN_INSTALLED"
_TOOL = re.compile(r"python -m (?:fsdp|launch)\.(\w+)")
_UNDER_A_LAUNCHER = re.compile(r"((?:torchrun|srun)\b[^`]*? )(?:python )?train\.py")


def quoted(word: object) -> str:
    """A word of a shell's line; where characters do not print, as a line break, in bash's $'…'."""
    text = str(word)
    return shlex.quote(text) if text.isprintable() else f"$'{''.join(map(_escaped, text))}'"


def _escaped(sign: str) -> str:
    if sign.isprintable() and sign not in "\\'":
        return sign
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(sign))


def as_typed(text: str) -> str:
    """The text with each command of a clone as `shardrun NAME`, if that is installed."""
    if INSTALLED not in os.environ:
        return text
    text = _TOOL.sub(r"shardrun \1", text)
    text = _UNDER_A_LAUNCHER.sub(lambda found: _ranks(found[1]), text)
    return text.replace("python train.py", "shardrun train")


def from_here(text: str) -> str:
    """The commands of `as_typed` with the clone's place, if they are to be typed elsewhere."""
    clone = Path(__file__).parents[2]
    if INSTALLED in os.environ or not (clone / "train.py").is_file() or _is_here(clone):
        return text
    place, paths = shlex.quote(str(clone)), os.environ.get("PYTHONPATH", "")
    if str(clone) not in paths.split(os.pathsep):
        more = ":$PYTHONPATH" if paths else ""
        text = re.sub(r"(?<!\S)(?=python -m (fsdp|launch)\.)", lambda _: f"PYTHONPATH={place}{more} ", text)
    return re.sub(r"(?<= )(?=train\.py|slurm/\w+\.sbatch)", lambda _: f"{place}/", text)


def _is_here(clone: Path) -> bool:
    try:
        return Path.cwd() == clone
    except FileNotFoundError:  # it has been removed meanwhile
        return True


def _ranks(launcher: str) -> str:
    return f"{launcher}{'-m shardrun' if launcher.startswith('torchrun') else 'shardrun'} train"


def checked_count(value: Any) -> int:
    """A whole number from 0 that fits in 64 bits; no bool."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!a:.40} is not a whole number from 0")
    return value


def checked_text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"a {type(value).__name__} instead of a string")
    return value


# ---------------------------------------------------------------- stdout and stderr


class PrintableFormatter(logging.Formatter):
    """Log records hold names of files that others wrote: control characters are escaped."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def prepare_streams() -> None:
    """Make stdout and stderr take any text, and the log of tools escape control characters.

    A stream of another encoding than UTF-8 (a locale of ISO-8859-1) escapes what it lacks, in place of an
    error at the end of a run. A closed one (`>&-`), for which Python has None, is redirected to /dev/null.
    """
    if logging.lastResort is not None:  # the handler of tools, which set up no logging
        logging.lastResort.setFormatter(PrintableFormatter())
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr does by itself
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: PTH123, SIM115  for the life of the process


def print_line(text: str, stream: TextIO | None = None) -> None:
    """Print text of any origin, to stderr unless told: control characters are escaped (`printable`).

    It is one write, since the ranks of a node share their streams.
    Under PYTHONUNBUFFERED, `print` writes a text and the end of its line apart: two ranks that fail at once
    leave two texts on one line.
    """
    stream = sys.stderr if stream is None else stream
    stream.write(f"{printable(text)}\n")
    stream.flush()


def flush_output() -> None:
    """Flush stdout and stderr before the interpreter exits.

    The interpreter's own flush of a stream that cannot be written makes any exit code 120. Such a stream is
    redirected to /dev/null, as the documentation of Python's signal module does for SIGPIPE.
    """
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


def print_answer(text: str, program: str, end: str = "\n") -> int:
    """Print what a command was asked for, such as its help, and return the exit code."""
    try:
        print(printable(text), end=end, flush=True)
    except OSError as error:
        return lost_output(error, program)
    return 0


def lost_output(error: OSError, program: str) -> int:
    """The exit code after an error of stdout: a full disk is one line, and an ended reader (`| head`) none.

    Any other error is raised again.
    """
    if not is_of_output(error):
        raise error
    flush_output()
    if error.errno == errno.ENOSPC:
        print(f"{program}: its output cannot be written: {error.strerror}", file=sys.stderr)
    return 1


def is_of_output(error: OSError) -> bool:
    """Whether stdout's reader has ended (`| head`), or its disk is full: errors of files have their name.

    The stream itself cannot be asked: after the error it has dropped what was to be written.
    """
    return error.errno in (errno.EPIPE, errno.ENOSPC) and error.filename is None
