"""Names of files in messages, and errors about files that cannot be opened."""

from __future__ import annotations

from pathlib import Path

from fsdp.base.commands import quoted
from fsdp.base.errors import ConfigError


def shown(name: Path | str) -> str:
    """The name with line breaks and other control characters escaped."""
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in str(name))


def unreadable(error: OSError, name: Path | str) -> ConfigError:
    """For a file or folder that cannot be opened or listed; `name` if the error names none."""
    path = error.filename or name
    return ConfigError(f"{shown(path)} cannot be read ({error.strerror}).", f"ls -ld {quoted(path)}")


def broken_link(path: Path) -> ConfigError:
    return ConfigError(
        f"{shown(path)} is a link to {shown(path.readlink())}, which does not exist.",
        f"rm {quoted(path)}, or bring the file back",
    )
