"""The run directory: its name and the paths of its files.

    config.toml     the newest resolved configuration; places of checkpoints are absolute
    metrics.jsonl   one record per step and per evaluation
    saves.jsonl     one record per sealed checkpoint
    history.jsonl   one record per start, end and crash
    STOPPED         the reason of a stop on request, if the last start ended so
    DONE            written when the last step is reached
    FAILED          the last start's error, for its launcher
    checkpoints/ full_model/ tensorboard/ logs/

Rank 0 alone writes here, except checkpoints. Not here: the lock (lock.py), the records of starts and ends
(history.py).
"""

from __future__ import annotations

import datetime
import errno
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp.base.errors import CheckpointError, ConfigError, error_number
from fsdp.base.object_client import is_url

if TYPE_CHECKING:
    from fsdp.config import Config

RAY_COPY = "working_dir_files"
"""Of `ray job submit --working-dir`: SESSION/runtime_resources/working_dir_files/_ray_pkg_…"""
PROBE_BYTES = 4096
"""Written and synced before a start: an empty file can be made on a disk that has no block left."""


class _Below:
    """A path in the run directory."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, run: RunDir, owner: type[RunDir]) -> Path:
        return run.path / self.name


@dataclass(frozen=True)
class RunDir:
    """The paths in a run directory."""

    path: Path

    config = _Below("config.toml")
    metrics = _Below("metrics.jsonl")
    history = _Below("history.jsonl")
    saves = _Below("saves.jsonl")
    stopped = _Below("STOPPED")
    done = _Below("DONE")
    failed = _Below("FAILED")
    full_model = _Below("full_model")
    full_model_ema = _Below("full_model_ema")


def choose(config: Config) -> RunDir:
    """The folder --run.dir, or a new one under runs/. Creates nothing."""
    path = Path(config.run.dir or f"runs/{_new_name(config)}").absolute()
    if RAY_COPY in path.parts:
        raise ConfigError(
            f"--run.dir {path} lies in Ray's copy of the working directory, which Ray deletes.",
            f"--run.dir $HOME/runs/{path.name}, or another folder that all nodes share",
        )
    return RunDir(path)


def _new_name(config: Config) -> str:
    """Time, model and data set; a random suffix distinguishes two runs started in one second."""
    data = "-".join(source.label for source in config.data.sources) or config.data.name
    label = f"{config.model.name}-{Path(data).name[:40]}".translate(str.maketrans(":./", "---")).strip("-")
    return f"{datetime.datetime.now():%Y%m%d-%H%M%S}-{label}-{os.urandom(2).hex()}"


def open_run(place: str) -> RunDir:
    """The run directory that a command names; ConfigError for a URL. Creates nothing."""
    if is_url(place):
        copy = f"aws s3 cp --recursive --exclude 'step-*' {shlex.quote(place)} runs/copy"
        reason = f"{place} is in an object store, and a run directory is a folder."
        raise ConfigError(reason, f"{copy} copies the run's records there")
    return RunDir(Path(place).absolute())


def create(path: Path) -> RunDir:
    """Create the folders on rank 0, or raise an error that names the place that cannot be written."""
    with writing(path):
        for folder in (path, path / "logs", path / "tensorboard"):
            folder.mkdir(parents=True, exist_ok=True)
        # os.urandom, not secrets: that imports OpenSSL, 4 MiB in the monitor process of each node
        probe = path / f".writable-{os.urandom(4).hex()}"
        write_atomically(probe, " " * PROBE_BYTES)
        probe.unlink(missing_ok=True)
    return RunDir(path)


def write_config(run: RunDir, config: Config) -> list[str]:
    """Writes config.toml, and returns what has changed since the last start as `field: old → new`. Places of
    checkpoints become absolute: a start or a tool in another working directory finds this run's.
    """
    # here: the monitor process of each node imports this file and needs no configuration
    from fsdp import config as configuration

    places = config.checkpoint
    places = replace(places, dir=_absolute(places.dir), local_dir=_absolute(places.local_dir))
    config, changed, old = replace(config, checkpoint=places), list[str](), dict[str, Any]()
    try:
        old = configuration.read_recipe(str(run.config)) if run.config.is_file() else {}
    except ConfigError as error:  # used for the comparison alone: the start continues
        reason = str(error).partition(" HINT:")[0]
        changed.append(f"config.toml of the last start cannot be compared: {reason}")
    for name, value in configuration.flatten(config).items() if old else ():
        if name == "run.dir" or name.partition(".")[0] in configuration.LAUNCHERS_OWN:
            continue
        if isinstance(value, tuple):
            value = configuration.as_tables(value)
        # a field that an earlier version did not have has its default
        default = [] if isinstance(value, list) else {} if isinstance(value, Mapping) else value
        if (before := old.get(name, default)) != value:
            changed.append(f"{name}: {before} → {value}")
    write_atomically(run.config, configuration.run_toml(config))
    return changed


def _absolute(place: str) -> str:
    return str(Path(place).absolute()) if place and not is_url(place) else place


# ---------------------------------------------------------------- files written whole or not at all

FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an OSError into a one-line error that names the file. For the files that a start needs."""
    try:
        yield
    except OSError as error:
        reason = f"{path} cannot be written ({error.strerror})."
        shown = next(
            str(folder)
            for folder in (error.filename or path, *path.absolute().parents)
            if os.path.lexists(folder)
        )
        advice = storage_advice(error.errno or 0, shown)
        if error.errno in FULL:
            hint = f"{advice}, then start the same command"
            raise CheckpointError(reason, hint, error_number=error.errno) from None
        raise ConfigError(reason, f"{advice}; --run.dir runs/NAME is another place") from None


@contextmanager
def storing(place: str, flag: str = "--checkpoint.dir") -> Iterator[None]:
    """Turns an OSError into a CheckpointError that names the store of checkpoints."""
    try:
        yield
    except OSError as error:
        reason, hint = f"{place} cannot be written: {error}.", f"{flag} FOLDER that is writable"
        raise CheckpointError(reason, hint, error_number=error_number(error)) from None


def storage_advice(number: int, place: str) -> str:
    """The command that shows the cause of a write's `errno` in a folder or under a URL."""
    folder = shlex.quote(place)
    if is_url(place):
        return f"python -m fsdp.checkpoint {folder} shows whether it answers"
    if number in FULL:
        return f"df -h {folder} and df -i {folder} show what is full: free some"
    if number in (errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.EEXIST):
        return f"ls -ld {folder} shows who may write there"
    return f"findmnt -T {folder} and df -h {folder} show the storage"


def write_atomically(path: Path, text: str) -> None:
    """Replace the file. A reader sees the old file or the new one, whole, even after a power failure."""
    replace_with(path, [text.encode()])


def replace_with(path: Path, pieces: Iterable[bytes]) -> None:
    """Replace the file by these bytes, synced before the rename: a file of NULs could otherwise remain."""
    aside = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    try:
        with aside.open("wb") as file:
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())
        aside.rename(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
