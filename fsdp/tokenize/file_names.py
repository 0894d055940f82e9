"""Names of files in messages: one line, and a word that a shell reads back."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from fsdp.base.errors import ConfigError


def shown(name: Path | str) -> str:
    """The name with line breaks and other control characters escaped."""
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in str(name))


def shell_word(name: Path | str) -> str:
    text = str(name)
    if text.isprintable():
        return shlex.quote(text)
    return f"$'{''.join(map(_escaped, text))}'"


def _escaped(sign: str) -> str:
    if sign.isprintable() and sign not in "\\'":
        return sign
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(sign))


def unreadable(error: OSError, name: Path | str) -> ConfigError:
    """For a file or folder that cannot be opened or listed; `name` if the error names none."""
    path = error.filename or name
    return ConfigError(f"{shown(path)} cannot be read ({error.strerror}).", f"ls -ld {shell_word(path)}")


def broken_link(path: Path) -> ConfigError:
    return ConfigError(
        f"{shown(path)} is a link to {shown(path.readlink())}, which does not exist.",
        f"rm {shell_word(path)}, or bring the file back",
    )
