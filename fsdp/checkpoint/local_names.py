"""The name of a run's folders on the nodes' own disks, kept beside its checkpoints and deleted with them.

A new run in the place of a deleted one must not resume the local checkpoints of the old one, and neither must
a copy of its folder. The same run must find them, from whichever node its rank 0 starts and by whichever path
its folder is named.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import re
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

from fsdp.base.errors import CheckpointError, error_number
from fsdp.checkpoint.local_store import LocalStore
from fsdp.checkpoint.object_store import ObjectStore
from fsdp.checkpoint.store import Store
from fsdp.rundir.paths import write_atomically, writing

log = logging.getLogger(__name__)

TOKEN = ".local-checkpoints"
_NAME, _OLD_TOKEN = re.compile(r"shardrun-[0-9a-f]{16}"), re.compile(r"[0-9a-f]{16}\n?")


@dataclass(frozen=True)
class LocalName:
    """The name of a run's local folders, and the folder of checkpoints that it was given to."""

    name: str
    place: str
    inode: int


def local_folder_name(shared: Store, run_dir: Path) -> str:
    """The name of the local folders of the run with these checkpoints. Called under the store's lock."""
    if isinstance(shared, ObjectStore):
        return _digest(shared.where, _token(shared, run_dir / TOKEN))
    assert isinstance(shared, LocalStore)
    file = shared.root / TOKEN
    with writing(file):
        shared.root.mkdir(parents=True, exist_ok=True)
        known = _read(file, shared.where)
        place, inode = str(shared.root.resolve()), shared.root.stat().st_ino
        now = LocalName(_name_here(known, place, inode), place, inode)
        if now != known:
            write_atomically(file, json.dumps(asdict(now)) + "\n")
    return now.name


def _name_here(known: LocalName | None, place: str, inode: int) -> str:
    """The known name, unless the folder is a copy of the one that it was given to.

    A link or a rename leaves the inode, and a file system may number its inodes anew when it is mounted.
    """
    if known is not None and (known.inode == inode or known.place == place):
        return known.name
    if known is not None:
        log.info("%s is a copy of %s: it has local folders of its own", place, known.place)
    return f"shardrun-{secrets.token_hex(8)}"


def _read(file: Path, where: str) -> LocalName | None:
    """None if there is none, or if it has another form."""
    if not file.is_file():
        return None
    data = file.read_bytes()
    if (token := _old_token(data)) is not None:
        return LocalName(_digest(where, token), str(file.parent.resolve()), -1)
    return _parse(data)


def _parse(data: bytes) -> LocalName | None:
    """None for another form: it may be a stranger's, and the name becomes a folder's."""
    try:
        found = LocalName(**json.loads(data))
    except (ValueError, TypeError, RecursionError):
        return None
    whole = isinstance(found.name, str) and isinstance(found.place, str) and type(found.inode) is int
    return found if whole and _NAME.fullmatch(found.name) else None


def _old_token(data: bytes) -> str | None:
    """A file of an earlier version: the name is a digest of this token and the place."""
    text = data.decode(errors="replace")
    return text.strip() if _OLD_TOKEN.fullmatch(text) else None


def _token(shared: ObjectStore, old: Path) -> str:
    """The token in the store. `old` is where earlier versions kept it, on rank 0's node."""
    try:
        found = shared.get(TOKEN)
        if found is None:
            token = (_old_token(old.read_bytes()) if old.is_file() else None) or secrets.token_hex(8)
            if shared.swap(TOKEN, f"{token}\n".encode(), None) is not None:
                old.unlink(missing_ok=True)
                return token
            found = shared.get(TOKEN)  # its response was lost
        if found is None:
            raise OSError(errno.EIO, f"{TOKEN} was written and cannot be read")
    except OSError as error:
        hint = "--checkpoint.dir s3://bucket/prefix that can be written"
        what = f"{shared.where} cannot be written: {error}."
        raise CheckpointError(what, hint, error_number=error_number(error)) from None
    return found.data.decode(errors="replace").strip()


def _digest(where: str, token: str) -> str:
    return f"shardrun-{hashlib.sha256(f'{where} {token}'.encode()).hexdigest()[:16]}"
