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
from typing import TYPE_CHECKING

from fsdp.base.errors import CheckpointError, ConfigError, error_number
from fsdp.base.object_client import is_url

if TYPE_CHECKING:
    from fsdp.config import Config

RUNS = Path("runs")
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
        copy = f"aws s3 cp --recursive --exclude 'step-*' {shlex.quote(place)} runs/copy"
        what = f"{place} is in an object store, and a run directory is a folder."
        export = f"python -m fsdp.checkpoint {shlex.quote(place)} export --out runs/copy/full_model"
        raise ConfigError(what, f"{copy} copies a run's records there, and {export} its weights")
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


def write_config(run: RunDir, config: Config) -> list[str]:
    """Writes config.toml, and returns what has changed since the last start as `field: old → new`."""
    # here: the monitor process of each node imports this file and needs no configuration
    from fsdp import config as configuration

    changed: list[str] = []
    config = with_absolute_places(config)
    try:
        old = configuration.read_recipe(str(run.config)) if run.config.is_file() else None
    except ConfigError as error:  # used for the comparison alone: the start continues
        old, why = {}, str(error).partition(" HINT:")[0]
        changed.append(f"config.toml of the last start cannot be compared: {why}")
    for name, value in configuration.flatten(config).items():
        if old is None or name == "run.dir" or name.partition(".")[0] in configuration.LAUNCHERS_OWN:
            continue
        if isinstance(value, tuple):
            value = configuration.as_tables(value)
        default = [] if isinstance(value, list) else {} if isinstance(value, Mapping) else value
        before = old.get(name, default)
        if before != value:
            changed.append(f"{name}: {before} → {value}")
    write_atomically(run.config, configuration.run_toml(config))
    return changed


# ---------------------------------------------------------------- files written whole or not at all

FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an OSError into a one-line error that names the file. For the files that a start needs."""
    try:
        yield
    except OSError as error:
        number, what = error.errno or 0, f"{path} cannot be written ({error.strerror})."
        file = error.filename if isinstance(error.filename, str | Path) else path
        shown = next(str(place) for place in (file, *path.absolute().parents) if os.path.lexists(place))
        advice = storage_advice(number, shown) or f"ls -ld {shlex.quote(shown)} shows who may write there"
        if number in FULL:
            hint = f"{advice}, then start the same command"
            raise CheckpointError(what, hint, error_number=number) from None
        if number == errno.EEXIST:  # of mkdir, which accepts a folder
            what, advice = (
                f"{file} is in the place of a folder.",
                f"mv {shlex.quote(str(file))} to another name",
            )
        raise ConfigError(what, f"{advice}; --run.dir runs/NAME is another place") from None


@contextmanager
def storing(place: str, flag: str = "--checkpoint.dir") -> Iterator[None]:
    """Turns an OSError into a CheckpointError that names the store of checkpoints."""
    try:
        yield
    except OSError as error:
        what, hint = f"{place} cannot be written: {error}.", f"{flag} FOLDER that is writable"
        raise CheckpointError(what, hint, error_number=error_number(error)) from None


def storage_advice(number: int, place: str) -> str:
    """What shows or removes the cause of a write's `errno` in a folder or under a URL; empty if unknown."""
    folder, remote = shlex.quote(place), "://" in place
    denied = "renew the credentials" if remote else f"ls -ld {folder} shows who may write there"
    if number in FULL and not remote:
        return f"df -h {folder} and df -i {folder} show what is full: free some"
    return {
        errno.EFBIG: "ulimit -f unlimited lifts the limit on a file's size",
        errno.EMFILE: "ulimit -n 65536 before the start",
        errno.EROFS: "" if remote else f"findmnt -T {folder} shows the mount: make it writable",
        errno.EACCES: denied,
        errno.EPERM: denied,
    }.get(number, "")


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
