"""stdout and stderr of a process: any text can be printed, both are open, and a lost one is no traceback."""

from __future__ import annotations

import errno
import io
import logging
import os
import sys
from typing import TextIO

from fsdp.base.text import printable


class PrintableFormatter(logging.Formatter):
    """Log records hold names of files that others wrote: control characters are escaped."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def prepare_streams() -> None:
    """Make stdout and stderr take any text, and the log of tools escape control characters.

    A stream of another encoding than UTF-8 (a locale of ISO-8859-1) escapes what it lacks, in place of an
    error at the end of a run. A closed one (`>&-`), for which Python has None, is redirected to /dev/null: on
    its own descriptor, or the next file that is opened would receive what C code prints.
    """
    if logging.lastResort is not None:  # the handler of tools, which set up no logging
        logging.lastResort.setFormatter(PrintableFormatter())
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr does by itself
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is not None:
            continue
        nowhere = os.open(os.devnull, os.O_WRONLY)
        if nowhere != number and not _is_open(number):  # with stdin closed it may be a lower one
            os.dup2(nowhere, number)
            os.close(nowhere)
            nowhere = number
        setattr(sys, name, os.fdopen(nowhere, "w"))


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


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
