"""A crash simulator for folders of checkpoints, as ALICE and CrashMonkey are for file systems.

Recorder notes what the product asks of the file system below one folder: names made, renamed and deleted,
bytes written, fsyncs. `states` then gives what a power cut after each of these may leave. A file keeps the
bytes of its last fsync for certain; later ones may be there, in part, or not. A folder keeps the names of its
last fsync for certain; of the changes since then any may be there, whatever their order. Not here: what must
hold in each state.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

MOST_CHANGES = 8
"""Of more unsynced changes not all subsets are tried: none, all, each prefix, all but one, one alone."""


@dataclass(eq=False)
class Node:
    """A file or a folder, whatever names it has. `names` and `data` are what running programs see."""

    folder: bool
    names: dict[str, Node] = field(default_factory=dict)
    data: bytes = b""


@dataclass(frozen=True)
class Change:
    """One operation on a node; for a folder's names, the name that disappears and the one that appears."""

    kind: Literal["names", "data", "fsync"]
    node: Node
    path: str
    leaves: str = ""
    comes: str = ""
    what: Node | None = None
    data: bytes = b""


class Recorder:
    """A context manager that records the calls of os's functions below `root`; the calls take effect."""

    def __init__(self, root: Path, forgets: Callable[[Change], bool] = lambda change: False) -> None:
        """`forgets`: operations left out of the record, as if the product did not perform them."""
        self.root, self.top = str(root), Node(folder=True)
        self.changes: list[Change] = []
        self.notes: list[tuple[int, str]] = []
        """What the test has noted, with the number of operations before it."""
        self.times: list[int] = []
        """When each operation ended, on the clock that all recorders of this process share."""
        self._forgets, self._files = forgets, dict[int, tuple[Node, str]]()
        self._lock, self._real = threading.RLock(), dict[str, Callable[..., Any]]()

    def note(self, text: str) -> None:
        with self._lock:
            self.notes.append((len(self.changes), text))

    def __enter__(self) -> Recorder:
        noted: dict[str, Callable[..., None]] = {
            "open": self._on_open, "close": self._on_close, "write": self._on_write,
            "writev": self._on_writev, "fsync": self._on_fsync, "mkdir": self._on_mkdir,
            "rename": self._on_rename, "replace": self._on_rename,
            "unlink": self._on_unlink, "remove": self._on_unlink, "rmdir": self._on_unlink,
        }  # fmt: skip
        for name, then in noted.items():
            self._real[name] = getattr(os, name)
            setattr(os, name, self._noting(self._real[name], then))
        return self

    def __exit__(self, *_: object) -> None:
        for name, function in self._real.items():
            setattr(os, name, function)

    def _noting(self, real: Callable[..., Any], then: Callable[..., None]) -> Callable[..., Any]:
        def noted(*args: Any, dir_fd: int | None = None, **more: Any) -> Any:
            with self._lock:  # the order of the record is the order of the work
                named = {**more, **({} if dir_fd is None else {"dir_fd": dir_fd})}
                before = str(Path(f"/proc/self/fd/{dir_fd}").readlink()) if dir_fd is not None else ""
                result = real(*args, **named)
                then(
                    result,
                    *(str(Path(before, arg)) if before and isinstance(arg, str) else arg for arg in args),
                )
                return result

        return noted

    # ---- what each does to the nodes

    def _find(self, path: Any) -> tuple[Node, str] | None:
        """The folder of a path below the root, and its name there; None for other paths."""
        text = os.path.abspath(os.fspath(path))  # noqa: PTH100, resolve() would follow links
        if not text.startswith(self.root + "/"):
            return None
        *folders, name = text[len(self.root) + 1 :].split("/")
        node = self.top
        for folder in folders:
            if folder not in node.names:
                return None
            node = node.names[folder]
        return node, name

    def _add(self, change: Change) -> None:
        if change.kind == "names":
            change.node.names.pop(change.leaves, None)
            if change.what is not None:
                change.node.names[change.comes] = change.what
        if change.kind == "data":
            change.node.data = change.data
        if not self._forgets(change):
            self.changes.append(change)
            self.times.append(time.perf_counter_ns())

    def _come(self, path: Any, folder: bool) -> None:
        if (found := self._find(path)) is not None:
            self._add(Change("names", found[0], str(path), comes=found[1], what=Node(folder)))

    def _on_open(self, descriptor: int, path: Any, flags: int, *_: Any) -> None:
        if os.path.abspath(os.fspath(path)) == self.root:  # noqa: PTH100
            self._files[descriptor] = self.top, self.root
        if (found := self._find(path)) is None:
            return
        folder, name = found
        if name not in folder.names and flags & os.O_CREAT:
            self._come(path, folder=False)
        if name in folder.names:
            self._files[descriptor] = folder.names[name], str(path)
            if flags & os.O_TRUNC and folder.names[name].data:
                self._add(Change("data", folder.names[name], str(path)))

    def _on_close(self, _: None, descriptor: int) -> None:
        self._files.pop(descriptor, None)

    def _on_write(self, count: int, descriptor: int, data: Any) -> None:
        self._on_writev(count, descriptor, [data])

    def _on_writev(self, count: int, descriptor: int, buffers: Sequence[Any]) -> None:
        if descriptor in self._files:
            node, path = self._files[descriptor]
            whole = node.data + b"".join(bytes(one) for one in buffers)[:count]
            self._add(Change("data", node, path, data=whole))

    def _on_fsync(self, _: None, descriptor: int) -> None:
        if descriptor in self._files:
            self._add(Change("fsync", *self._files[descriptor]))

    def _on_rename(self, _: None, source: Any, target: Any) -> None:
        old, new = self._find(source), self._find(target)
        if old is None or new is None or old[1] not in old[0].names:
            return
        assert old[0] is new[0], "a rename between folders has no model here"
        self._add(
            Change("names", old[0], str(source), leaves=old[1], comes=new[1], what=old[0].names[old[1]])
        )

    def _on_mkdir(self, _: None, path: Any, *__: Any) -> None:
        self._come(path, folder=True)

    def _on_unlink(self, _: None, path: Any) -> None:
        found = self._find(path)
        if found is not None and found[1] in found[0].names:
            self._add(Change("names", found[0], str(path), leaves=found[1]))


Tree = dict[str, dict[str, bytes]]
"""Folder → file → bytes: what is found after a crash."""


def states(recorder: Recorder) -> Iterator[tuple[int, Tree]]:
    """The distinct states that a power cut may leave, after each number of operations."""
    seen: set[int] = set()
    for done in range(len(recorder.changes) + 1):
        changes = recorder.changes[:done]
        synced = {id(change.node): at for at, change in enumerate(changes) if change.kind == "fsync"}
        open_names = [
            at
            for at, change in enumerate(changes)
            if change.kind == "names" and synced.get(id(change.node), -1) < at
        ]
        for kept in _subsets(open_names):
            names = _names(changes, set(open_names) - set(kept))
            for data in _contents(changes, synced):
                tree = _tree(recorder.top, names, data)
                key = hash((done, tuple((f, n, d) for f, files in tree.items() for n, d in files.items())))
                if key not in seen:
                    seen.add(key)
                    yield done, tree


def _subsets(items: list[int]) -> Iterator[tuple[int, ...]]:
    if len(items) <= MOST_CHANGES:
        for size in range(len(items) + 1):
            yield from itertools.combinations(items, size)
        return
    yield from (tuple(items[:end]) for end in range(len(items) + 1))
    yield from ((one,) for one in items)
    yield from (tuple(other for other in items if other != one) for one in items)


def _names(changes: Sequence[Change], lost: set[int]) -> dict[int, dict[str, Node]]:
    """Each folder's names, without the changes that are lost."""
    names: dict[int, dict[str, Node]] = {}
    for at, change in enumerate(changes):
        if change.kind == "names" and at not in lost:
            own = names.setdefault(id(change.node), {})
            own.pop(change.leaves, None)
            if change.what is not None:
                own[change.comes] = change.what
    return names


def _contents(changes: Sequence[Change], synced: dict[int, int]) -> Iterator[dict[int, bytes]]:
    """Each file's bytes: of its last fsync; where there are later ones, also these and half of these."""
    certain: dict[int, bytes] = {}
    later: dict[int, bytes] = {}
    for at, change in enumerate(changes):
        if change.kind == "data":
            (certain if at < synced.get(id(change.node), -1) else later)[id(change.node)] = change.data
    yield certain
    for node, data in later.items():
        yield {**certain, node: data[: len(data) // 2]}
        yield {**certain, **later, node: bytes(len(data))}  # the size came to the disk, the blocks did not
    yield {**certain, **later}


def _tree(top: Node, names: dict[int, dict[str, Node]], data: dict[int, bytes]) -> Tree:
    return {
        folder: {name: data.get(id(file), b"") for name, file in sorted(names.get(id(node), {}).items())}
        for folder, node in sorted(names.get(id(top), {}).items())
        if node.folder
    }


class Left:
    """A store that holds a state after a crash in memory: thousands of them are cheap."""

    where = "what the crash left"

    def __init__(self, tree: Tree) -> None:
        self.tree = tree

    def folders(self) -> list[str]:
        return list(self.tree)

    def path(self, folder: str) -> str:
        return folder

    def sizes(self, folder: str) -> dict[str, int]:
        return {name: len(data) for name, data in self.tree[folder].items()}

    def size(self, folder: str, file: str) -> int | None:
        return self.sizes(folder).get(file)

    def read(self, folder: str, file: str) -> bytes:
        if file not in self.tree[folder]:
            raise FileNotFoundError(file)
        return self.tree[folder][file]

    def read_into(self, folder: str, file: str, offset: int, buffers: list[memoryview]) -> None:
        for view in buffers:
            view[:] = self.tree[folder][file][offset : offset + len(view)]
            offset += len(view)
