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
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp.base.errors import CheckpointError, ConfigError, ShardrunError, error_number
from fsdp.base.object_client import is_url

if TYPE_CHECKING:
    from fsdp.config import Config

RUNS = Path("runs")
RAY_COPY = "working_dir_files"
"""Of `ray job submit --working-dir`: SESSION/runtime_resources/working_dir_files/_ray_pkg_…"""
PROBE_BYTES = 4096
"""Written and synced before a start: an empty file can be made on a disk that has no block left."""


@dataclass(frozen=True)
class RunDir:
    """The paths in a run directory."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def history(self) -> Path:
        return self.path / "history.jsonl"

    @property
    def saves(self) -> Path:
        return self.path / "saves.jsonl"

    @property
    def stopped(self) -> Path:
        return self.path / "STOPPED"

    @property
    def done(self) -> Path:
        return self.path / "DONE"

    @property
    def failed(self) -> Path:
        return self.path / "FAILED"

    @property
    def full_model(self) -> Path:
        return self.path / "full_model"

    @property
    def full_model_ema(self) -> Path:
        return self.path / "full_model_ema"


def new_name(config: Config) -> str:
    """Time, model and data set; a random suffix distinguishes two runs started in one second."""
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    model = config.model.name.replace(":", "-").replace(".", "-").replace("/", "-").strip("-")
    data = "-".join(one.label for one in config.data.sources) or config.data.name
    data = Path(data.replace(":", "-")).name[:40]
    return f"{now}-{model}-{data}-{os.urandom(2).hex()}"


def choose(config: Config) -> RunDir:
    """The folder --run.dir, or a new one under runs/. Creates nothing."""
    path = Path(config.run.dir or RUNS / new_name(config)).absolute()
    if RAY_COPY in path.parts:
        raise ConfigError(
            f"--run.dir {path} lies in Ray's copy of the working directory, which Ray deletes.",
            f"--run.dir $HOME/runs/{path.name}, or another folder that all nodes share",
        )
    return RunDir(path)


def open_run(place: str) -> RunDir:
    """The run directory that a command names; ConfigError for a URL. Creates nothing."""
    if is_url(place):
        copied = f"aws s3 cp --recursive --exclude 'step-*' {shlex.quote(place)} runs/copy"
        raise ConfigError(
            f"{place} is in an object store, and a run directory is a folder.",
            f"{copied} copies a run's records there, and python -m fsdp.checkpoint "
            f"{shlex.quote(place)} export --out runs/copy/full_model its weights",
        )
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


def with_absolute_places(config: Config) -> Config:
    """A start or a tool in another working directory then finds this run's checkpoints, not another's."""
    places = config.checkpoint
    places = replace(places, dir=_absolute(places.dir), local_dir=_absolute(places.local_dir))
    return replace(config, checkpoint=places)


def _absolute(place: str) -> str:
    return str(Path(place).absolute()) if place and not is_url(place) else place


def _names(place: str, run: RunDir) -> bool:
    """Whether --run.dir of an earlier start, in a working directory of its own, can mean this folder."""
    if not place:
        return True
    with suppress(OSError):
        if Path(place).samefile(run.path):
            return True
    if Path(place).is_absolute():
        return False
    end = tuple(part for part in Path(place).parts if part != "..")
    return run.path.parts[len(run.path.parts) - len(end) :] == end


def write_config(run: RunDir, config: Config) -> list[str]:
    """Write config.toml, and return what has changed since the last start as `field: old → new`."""
    # here: the monitor process of each node imports this file and needs no configuration
    from fsdp import config as configuration

    changed: list[str] = []
    config = with_absolute_places(config)
    if run.config.is_file():
        try:
            old = configuration.read_recipe(str(run.config))
        except ConfigError as error:  # used for the comparison alone: the start continues
            why = str(error).partition(" HINT:")[0]
            changed.append(f"config.toml of the last start cannot be compared: {why}")
            old = {}
        for name, value in configuration.flatten(config).items():
            if name.partition(".")[0] in configuration.LAUNCHERS_OWN:
                continue
            if isinstance(value, tuple):
                value = configuration.as_tables(value)
            before = old.get(
                name, [] if isinstance(value, list) else {} if isinstance(value, Mapping) else value
            )
            if before != value and not (name == "run.dir" and _names(str(before), run)):
                changed.append(f"{name}: {before} → {value}")
    write_atomically(run.config, configuration.run_toml(config))
    return changed


# ---------------------------------------------------------------- files written whole or not at all

FULL = (errno.ENOSPC, errno.EDQUOT)
WRITES_ALONE = (*FULL, errno.EROFS, errno.EFBIG)
"""Errors that no read has."""
DENIED = (errno.EACCES, errno.EPERM)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError into a one-line error that names the file. For the files that a start needs."""
    try:
        yield
    except OSError as error:
        raise _unwritable(path, error) from None


def _unwritable(path: Path, error: OSError) -> ShardrunError:
    # Path.is_dir raises below a folder that may not be searched
    folder = next(one for one in (path, *path.absolute().parents) if os.path.isdir(one))  # noqa: PTH112
    what = f"{path} cannot be written ({error.strerror})."
    if error.errno in FULL:
        hint = f"{storage_advice(error.errno, str(folder))}, then start the same command"
        return CheckpointError(what, hint, error_number=error_number(error))
    if error.errno == errno.EEXIST and error.filename is not None:  # of mkdir, which accepts a folder
        hint = f"mv {shlex.quote(str(error.filename))} to another name; --run.dir runs/NAME is another place"
        return ConfigError(f"{error.filename} is in the place of a folder.", hint)
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return ConfigError(what, "ulimit -n 65536 before the start")
    if error.errno == errno.EFBIG:
        return ConfigError(what, f"{storage_advice(error.errno, str(folder))}, before the start")
    advice = storage_advice(error.errno or 0, str(folder)) if error.errno not in DENIED else ""
    advice = advice or f"ls -ld {_denied(folder, error)} shows who may write there"
    return ConfigError(what, f"{advice}; --run.dir runs/NAME is another place")


def _denied(folder: Path, error: OSError) -> str:
    """The folder, and a file in it that may not be opened, as words of a command."""
    file = error.filename
    shown = (folder, file) if isinstance(file, str | Path) and os.path.lexists(file) else (folder,)
    return " ".join(dict.fromkeys(shlex.quote(str(one)) for one in shown))


def storage_advice(number: int, place: str) -> str:
    """What shows or removes the cause of a write's `errno` in a folder or under a URL; empty if unknown."""
    if number == errno.EFBIG:
        return "ulimit -f unlimited lifts the limit on a file's size"
    if "://" in place:
        return "renew the credentials" if number in DENIED else ""
    folder = shlex.quote(place)
    if number in FULL:
        return f"df -h {folder} and df -i {folder} show what is full: free some"
    if number == errno.EROFS:
        return f"findmnt -T {folder} shows the mount: make it writable"
    return f"ls -ld {folder} shows who may write there" if number in DENIED else ""


def storage_shown(place: str) -> str:
    """What shows the storage of a folder or a URL that fails for another reason."""
    if "://" in place:
        return f"python -m fsdp.checkpoint {shlex.quote(place)} shows whether it answers"
    return f"findmnt -T {shlex.quote(place)} and df -h {shlex.quote(place)} show the storage"


def write_atomically(path: Path, text: str) -> None:
    """Replace the file. A reader sees the old file or the new one, whole, even after a power failure."""
    replace_with(path, [text.encode()])


def rename(source: Path, target: Path) -> None:
    """Rename, also where a file server repeats it because its reply was lost: the second finds no source."""
    before = source.lstat()
    try:
        source.rename(target)
    except FileNotFoundError:
        if not os.path.samestat(before, target.lstat()):
            raise


def replace_with(path: Path, pieces: Iterable[bytes]) -> None:
    """Replace the file by these bytes, synced before the rename: a file of NULs could otherwise remain."""
    aside = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    try:
        with aside.open("wb") as file:
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())
        rename(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
