"""The files of a run directory in an object store: a folder on this machine, and its copy under the URL.

Every file of the folder is copied but checkpoints, links and names that begin with a dot, as an object of the
same name. Files that grow (`*.jsonl`, logs, TensorBoard's) are cut into parts of PART_BYTES: `metrics.jsonl`,
`metrics.jsonl.part-0001` and so on. A copy writes the parts that have changed, so it costs at most one part
and the new bytes for each file that has grown, whatever its size.

`mirror.json` in the store names the folder that wrote last. A start in that folder continues with its files,
which may be newer than the store's. In any other folder the store's files replace what an earlier start left.
Objects are data: a name that leads out of the folder is left out. Not here: when files are copied, and the
lock (run_mirror.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePosixPath
from zlib import crc32

from fsdp.checkpoint.full_state import INDEX_FILE
from fsdp.checkpoint.object_store import ObjectStore
from fsdp.rundir.atomic_write import write_atomically
from fsdp.rundir.lock import FILE as LOCK

INDEX, WRITER, STOP = ".mirror.json", "mirror.json", "STOP"
NOT_COPIED = ("checkpoints", "code", LOCK, STOP, WRITER)
"""Names in a run directory: of the store itself, of a submitted job, of requests."""
EXPORTS = ("full_model", "full_model_ema")
MARKERS = ("STOPPED", "DONE", "FAILED")
"""Copied last, and deleted in the store when they are removed here."""
PART_BYTES = 8 << 20
MOST_NAME_BYTES = 255
"""Of a file, on Linux's file systems."""
_IN_PARTS = re.compile(r"\w+/(model-.*\.safetensors|model\.safetensors\.index\.json)")
_WEIGHTS = re.compile(_IN_PARTS.pattern + r"|\w+/(model\.safetensors|full-model\.pt)")
_PART = re.compile(r"(.+)\.part-(\d{4,})", re.ASCII)


@dataclass(frozen=True)
class CopiedFile:
    """A file as it was copied last."""

    size: int
    mtime_ns: int
    inode: int
    parts: tuple[int, ...] = ()
    """The CRC-32 of each part of a file that grows."""

    @staticmethod
    def of(status: os.stat_result, parts: Sequence[int] = ()) -> CopiedFile:
        return CopiedFile(status.st_size, status.st_mtime_ns, status.st_ino, tuple(parts))


@dataclass
class Index:
    """What the store has of a folder, and the folder's own name there."""

    folder: str = ""
    copied: dict[str, CopiedFile] = field(default_factory=dict)

    @staticmethod
    def read(file: Path) -> Index:
        """Empty if there is none, or if it has another form."""
        try:
            found = json.loads(file.read_bytes())
            copied = {
                name: CopiedFile(**{**one, "parts": tuple(one["parts"])})
                for name, one in found["copied"].items()
            }
            return Index(str(found["folder"]), copied)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return Index()

    def write(self, file: Path) -> None:
        write_atomically(file, json.dumps(asdict(self)) + "\n")


class RunFiles:
    """The folder and the store of one run directory. Not safe to use from several threads."""

    def __init__(self, store: ObjectStore, folder: Path) -> None:
        self.store, self.folder = store, folder
        self._index = Index.read(folder / INDEX)
        self._markers_checked = False

    def take_over(self) -> bool:
        """Prepares the folder for a start that holds the lock; True if the store's files replaced it.

        Exports are not read: a start writes them anew.
        """
        writer = self.store.get(WRITER)
        foreign = writer is None or _writer(writer.data) != self._index.folder
        if foreign:
            self._clear()
            self._index = Index(secrets.token_hex(8))
            for name in fetch(self.store, self.folder, without=EXPORTS):
                self._index.copied[name] = _as_copied(self.folder / name, grows(name))
        else:
            # This start cuts records that it repeats, and they may grow beyond their size before a copy.
            copied = self._index.copied
            self._index.copied = {
                name: replace(one, inode=-1) if grows(name) else one for name, one in copied.items()
            }
        about = {"folder": self._index.folder, "host": socket.gethostname(), "time": time.time()}
        self.store.put(WRITER, [json.dumps(about).encode()])
        self.store.delete(STOP)  # a request that no start has seen
        self._index.write(self.folder / INDEX)
        return foreign

    def _clear(self) -> None:
        """Deletes all but the logs: torchrun has those of this start open."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for one in self.folder.iterdir():
            if one.is_dir() and not one.is_symlink():
                if one.name != "logs":
                    shutil.rmtree(one)
            else:
                one.unlink()

    def upload(self) -> None:
        """Copies what has changed. Raises OSError; what was copied before it stays known."""
        before = dict(self._index.copied)
        try:
            files = dict(_files(self.folder))
            for folder in EXPORTS:
                self._begin_export(folder, files)
            for name in sorted(files, key=lambda one: _order(one, files[one])):
                self._copy(name, files[name])
            for name in MARKERS:
                if name not in files and (name in self._index.copied or not self._markers_checked):
                    self.store.delete(name)
                    self._index.copied.pop(name, None)
            self._markers_checked = True
        finally:
            if self._index.copied != before:
                self._index.write(self.folder / INDEX)

    def _begin_export(self, folder: str, files: Mapping[str, Path]) -> None:
        """Before the files of a new export are copied: weights that the new one lacks are deleted, and an
        index whose parts change, without which a reader refuses them.
        """
        changed = {
            name
            for name, file in files.items()
            if name.startswith(f"{folder}/") and self._has_changed(name, file)
        }
        if not changed:
            return
        parts_change = any(_IN_PARTS.fullmatch(name) for name in changed)
        for name in (f"{folder}/{one}" for one in self.store.sizes(folder)):
            if _WEIGHTS.fullmatch(name) and (
                name not in files or (parts_change and name.endswith(f"/{INDEX_FILE}"))
            ):
                self.store.delete(name)
                self._index.copied.pop(name, None)

    def _has_changed(self, name: str, file: Path) -> bool:
        known = self._index.copied.get(name)
        with contextlib.suppress(FileNotFoundError):  # removed since it was listed
            return known is None or known != CopiedFile.of(file.stat(), known.parts)
        return False

    def has_stop_request(self) -> bool:
        """Whether a user has put an object STOP beside the files; deletes it."""
        if self.store.get(STOP) is None:
            return False
        self.store.delete(STOP)
        return True

    def _copy(self, name: str, file: Path) -> None:
        with contextlib.suppress(FileNotFoundError):  # removed since it was listed
            with file.open("rb") as opened:
                status = os.fstat(opened.fileno())
                known = self._index.copied.get(name)
                if known is not None and known == CopiedFile.of(status, known.parts):
                    return
                parts: Sequence[int] = ()
                if grows(name):
                    parts = self._put_parts(name, opened.fileno(), known, status)
                else:
                    self.store.put(name, _Pieces(opened.fileno(), status.st_size), status.st_size)
            self._index.copied[name] = CopiedFile.of(status, parts)

    def _put_parts(
        self, name: str, descriptor: int, known: CopiedFile | None, status: os.stat_result
    ) -> list[int]:
        """Writes the parts that differ from the known ones; returns the CRC-32 of each."""
        old = known.parts if known is not None else ()
        grown = known is not None and known.inode == status.st_ino and known.size <= status.st_size
        # of a file that has grown, the parts that were full are as they were
        parts = list(old[: known.size // PART_BYTES]) if grown and known is not None else []
        for nth in range(len(parts), max(1, -(-status.st_size // PART_BYTES))):
            end = min((nth + 1) * PART_BYTES, status.st_size)
            part = os.pread(descriptor, end - nth * PART_BYTES, nth * PART_BYTES)
            parts.append(crc32(part))
            if old[nth : nth + 1] != (parts[nth],):
                self.store.put(_part_name(name, nth), [part])
        for nth in range(len(parts), len(old)):
            self.store.delete(_part_name(name, nth))
        return parts


def _order(name: str, file: Path) -> tuple[bool, int, str]:
    """Markers last, and of exports the newest: an index after its parts, and readers take the newest."""
    written = 0
    if name.partition("/")[0] in EXPORTS:
        with contextlib.suppress(FileNotFoundError):
            written = file.stat().st_mtime_ns
    return name in MARKERS, written, name


def grows(name: str) -> bool:
    """Whether a file is appended to, so that its copy is cut into parts."""
    return name.endswith((".jsonl", ".log")) or name.startswith(("tensorboard/", "logs/"))


def fetch(store: ObjectStore, folder: Path, *, without: Collection[str] = ()) -> list[str]:
    """Writes the run's files into the folder, without these names at its top; returns their names."""
    names: dict[str, list[str]] = {}
    for name in sorted(store.objects()):
        part = _PART.fullmatch(name)
        base = part[1] if part is not None and grows(part[1]) else name
        top = base.partition("/")[0]
        if _is_inside(base) and top not in NOT_COPIED and top not in without:
            names.setdefault(base, []).append(name)
    for base, parts in names.items():
        _download(store, parts, folder / base)
        if base.partition("/")[0] in EXPORTS and (written := store.modified_at(base)) is not None:
            os.utime(folder / base, (written, written))  # of two formats readers take the newest
    return list(names)


def _download(store: ObjectStore, parts: Sequence[str], target: Path) -> None:
    """One object, or the parts of a file that grows, under a name of its own until it is whole."""
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{secrets.token_hex(8)}")
    try:
        store.download(parts[0], aside)
        for part in parts[1:]:
            if (found := store.get(part)) is None:
                break  # cut off since it was listed
            with aside.open("ab") as file:
                file.write(found.data)
        aside.rename(target)
    finally:
        aside.unlink(missing_ok=True)


def _is_inside(name: str) -> bool:
    """Whether an object's name is one of a file in the folder. A bucket's keys may hold `..`, or a part of
    1024 bytes.
    """
    parts = name.split("/")
    hidden = any(part.startswith(".") or not part for part in parts)
    too_long = any(len(os.fsencode(part)) > MOST_NAME_BYTES for part in parts)
    return not hidden and not too_long and "\0" not in name and not PurePosixPath(name).is_absolute()


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Name → path of each regular file to copy."""
    for place, folders, names in os.walk(folder):
        here = Path(place)
        at_top = here == folder
        folders[:] = [
            one for one in folders if not one.startswith(".") and not (at_top and one in NOT_COPIED)
        ]
        for name in names:
            if name.startswith(".") or (at_top and name in NOT_COPIED):
                continue
            with contextlib.suppress(FileNotFoundError):
                if stat.S_ISREG((here / name).lstat().st_mode):
                    yield (here / name).relative_to(folder).as_posix(), here / name


@dataclass(frozen=True)
class _Pieces:
    """The first bytes of a file, which may change meanwhile; a request that is repeated reads them again."""

    descriptor: int
    size: int

    def __iter__(self) -> Iterator[bytes]:
        for at in range(0, self.size, PART_BYTES):
            yield os.pread(self.descriptor, min(PART_BYTES, self.size - at), at)


def _as_copied(file: Path, in_parts: bool) -> CopiedFile:
    """A file as the store has it."""
    with file.open("rb") as opened:
        status = os.fstat(opened.fileno())
        pieces = iter(lambda: opened.read(PART_BYTES), b"") if in_parts else iter(())
        return CopiedFile.of(status, [crc32(piece) for piece in pieces] or [0] * in_parts)


def _part_name(name: str, nth: int) -> str:
    return f"{name}.part-{nth:04d}" if nth else name


def _writer(data: bytes) -> str | None:
    """The folder that wrote last; None if the object has another form."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    name = found.get("folder") if isinstance(found, Mapping) else None
    return name if isinstance(name, str) and name else None
