"""List, verify, prune or export a run's checkpoints, without starting ranks:

    python -m fsdp.checkpoint RUN                      list: step, age, size, mesh, state
    python -m fsdp.checkpoint RUN verify               read every byte of every checkpoint
    python -m fsdp.checkpoint RUN prune --keep-last 2  delete older ones; refused while a job writes there
    python -m fsdp.checkpoint RUN export --format both --out FOLDER

RUN is a run directory or a place of checkpoints, a folder or s3://bucket/prefix; `verify RUN` works like
`RUN verify`. --step N selects one checkpoint. Exit codes: 0; 1 if a checkpoint is not whole or cannot be
read; 2 for a wrong command; 4 if there is no checkpoint, one cannot be deleted, or another job writes there.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fsdp import config
from fsdp.base.errors import CheckpointError, ConfigError, RefusedError, without_hint
from fsdp.base.object_client import is_url
from fsdp.base.streams import print_line
from fsdp.base.text import byte_size, nearest, seconds
from fsdp.checkpoint import file_names, inspect, load, retention
from fsdp.checkpoint.adapter_weights import PEFT, Base
from fsdp.checkpoint.discovery import READ_AT_ONCE, broken_folders, set_aside, why_not_whole
from fsdp.checkpoint.export import export, of_averages
from fsdp.checkpoint.inspect import CheckpointListing
from fsdp.checkpoint.load import CheckpointSource
from fsdp.checkpoint.manifest import Broken
from fsdp.checkpoint.open_store import lock_place, open_store
from fsdp.checkpoint.store import Store
from fsdp.config import CheckpointSection
from fsdp.config.command_line import CommandParser, number, one_of, prints_errors, whole_number
from fsdp.config.sections import expanded
from fsdp.models.hf import resolve_folder
from fsdp.models.hub import PREFIX
from fsdp.models.registry import SourceFolder
from fsdp.run.frozen_base import base_of
from fsdp.run.job import prepare
from fsdp.run.weights import saved_as
from fsdp.rundir.atomic_write import FULL
from fsdp.rundir.lock import Folder, Locks, hold

COMMANDS = ("list", "verify", "prune", "export")
OF_ONE_COMMAND = {
    "quick": "list", "keep_last": "prune", "keep_every_steps": "prune", "format": "export",
    "dtype": "export", "shard_gib": "export", "out": "export", "ema": "export",
}  # fmt: skip
"""Options that the other commands would ignore."""


@prints_errors("fsdp.checkpoint")
def main(argv: Sequence[str]) -> int:
    try:
        options = _parse(argv)
        command = {"list": _list, "verify": _verify, "prune": _prune, "export": _export}[options.command]
        with _folder_of(options.run) as options.folder:
            options.section = _section(options)
            return command(open_store(_place(options)), options)
    except OSError as error:
        print_line(f"fsdp.checkpoint: {error}")
        return CheckpointError.exit_code
    except Broken as broken:
        print_line(f"fsdp.checkpoint: {broken.detail}. HINT: python -m fsdp.checkpoint {options.run} verify")
        return CheckpointError.exit_code


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser("fsdp.checkpoint", __doc__)
    parser.add_argument("words", nargs="+", metavar="RUN [list|verify|prune|export]")
    parser.add_argument("--step", type=whole_number(), help="only the checkpoint of this step")
    parser.add_argument("--quick", action="store_true", help="list: compare sizes only")
    parser.add_argument(
        "--keep-last",
        type=whole_number(),
        help="prune: number of newest checkpoints to keep; default: the run's config.toml",
    )
    parser.add_argument(
        "--keep-every-steps", type=whole_number(), help="prune: also keep the checkpoints of every n-th step"
    )
    parser.add_argument(
        "--format",
        type=one_of("torch", "safetensors", "both", "hf"),
        help="export: torch, safetensors, both, or hf for from_pretrained; default: the run's config.toml",
    )
    parser.add_argument(
        "--dtype",
        type=one_of("auto", "fp64", "fp32", "bf16", "fp16"),
        help="export: dtype of the tensors; default: the run's config.toml",
    )
    parser.add_argument(
        "--shard-gib", type=number(0), help="export: maximum size of a safetensors file, in GiB"
    )
    parser.add_argument("--out", help="export: folder to write to; default: RUN/full_model")
    parser.add_argument(
        "--ema",
        action="store_true",
        help="export: the moving average of the weights; default folder: RUN/full_model_ema",
    )
    parser.add_argument(
        "--trust-code",
        action="append",
        default=[],
        metavar="NAME",
        help=f"export of adapters: {config.TRUST_HELP}",
    )
    options = parser.parse(argv)
    commands = [word for word in options.words if word in COMMANDS]
    runs = [word for word in options.words if word not in COMMANDS]
    if len(runs) != 1 or len(commands) > 1:
        meant = {word: nearest(word, COMMANDS, "{}", "") for word in runs[:2]}
        commands += filter(None, meant.values())
        run = next((word for word in runs if not meant.get(word)), "RUN")
        raise ConfigError(
            f"{' '.join(options.words)}: expected one RUN and at most one command.",
            f"python -m fsdp.checkpoint {run} {(commands or ['list'])[0]}",
        )
    options.run, options.command = runs[0].rstrip("/"), (commands or ["list"])[0]
    for name, command in OF_ONE_COMMAND.items():
        if command != options.command and getattr(options, name) != parser.get_default(name):
            flag = name.replace("_", "-")
            hint = f"leave it out, or python -m fsdp.checkpoint {options.run} {command}"
            raise ConfigError(f"--{flag} has no effect on {options.command}.", hint)
    return options


@contextmanager
def _folder_of(run: str) -> Iterator[Path]:
    """The folder of RUN; for a URL a temporary one, with the records of the run that saved there."""
    if not is_url(run):
        yield Path(run)
        return
    with tempfile.TemporaryDirectory(prefix="shardrun-run-") as folder:
        open_store(run).fetch_records(Path(folder))
        yield Path(folder)


def _section(options: argparse.Namespace) -> CheckpointSection:
    """The run's own [checkpoint] section, overridden by this command's flags."""
    file = options.folder / "config.toml"
    section = CheckpointSection()
    if file.is_file():
        fields = {name: config.FIELDS[name] for name in config.FIELDS if name.startswith("checkpoint.")}
        read = {name: value for name, value in config.read_recipe(str(file)).items() if name in fields}
        values = {
            name.removeprefix("checkpoint."): config.parse_value(fields[name], value)
            for name, value in read.items()
        }
        section = CheckpointSection(**values)
    given = {
        "keep_last": options.keep_last, "keep_every_steps": options.keep_every_steps,
        "export_format": options.format,
        "export_dtype": options.dtype,
    }  # fmt: skip
    return dataclasses.replace(section, **{name: value for name, value in given.items() if value is not None})


def _place(options: argparse.Namespace) -> str:
    """The place of RUN's checkpoints: from its config, its subfolder `checkpoints`, or RUN itself."""
    run: str = options.run
    if is_url(run):
        return run
    if options.section.dir:
        return config.check_store(Path(run), options.section.dir)
    if Path(run, "checkpoints").is_dir():
        return str(Path(run, "checkpoints"))
    if not Path(run).is_dir():
        raise CheckpointError(
            f"{run} {'is not a folder' if Path(run).exists() else 'does not exist'}.",
            f"ls {shlex.quote(str(Path(run).parent))}, and give the --run.dir of a run",
        )
    return run


def _chosen(store: Store, options: argparse.Namespace) -> list[CheckpointListing]:
    listings = [found for found in inspect.scan(store) if options.step in (None, found.step)]
    shows_all = options.command in ("list", "verify") and options.step is None
    if not listings and not (shows_all and broken_folders(store)):
        what = "no checkpoint" if options.step is None else f"no checkpoint of step {options.step}"
        raise CheckpointError(f"{store.where} holds {what}.", _where_they_are(store, options))
    return listings


def _where_they_are(store: Store, options: argparse.Namespace) -> str:
    """A hint: the steps that are there, or the folder around one checkpoint."""
    if options.step is not None and inspect.scan(store):
        return f"python -m fsdp.checkpoint {options.run}"
    around, _, name = options.run.rpartition("/")
    if (one := file_names.parse(name)) is not None:
        return f"python -m fsdp.checkpoint {around or '.'} --step {one.step}"
    return "give the --run.dir of a run that has saved one"


def _list(store: Store, options: argparse.Namespace) -> int:
    listings = _chosen(store, options)
    whole = [found.manifest for found in listings if found.manifest is not None]
    total = sum(size for manifest in whole for size, _ in manifest.files.values())
    read = not options.quick and total <= READ_AT_ONCE
    return _table(store, listings, read)


def _verify(store: Store, options: argparse.Namespace) -> int:
    return _table(store, _chosen(store, options), read=True)


def _table(store: Store, listings: Sequence[CheckpointListing], read: bool) -> int:
    """Prints a line for each checkpoint, the newest first, then those set aside; returns the exit code."""
    print(f"{'step':>10}  {'age':>9}  {'size':>10}  {'mesh':<12}  {'ranks':>5}  state")
    wrong = 0
    for found in listings:
        why = why_not_whole(store, found, read)
        wrong += why is not None
        state = why or ("verified" if read else "sealed, sizes match; verify reads every byte")
        about = found.manifest
        if about is None:
            print_line(f"{found.step:>10}  {'':>9}  {'':>10}  {'':<12}  {'':>5}  {state}", sys.stdout)
        else:
            age, size = seconds(max(0.0, time.time() - about.created)), byte_size(about.bytes)
            row = f"{found.step:>10}  {age:>9}  {size:>10}  {about.mesh:<12}  {about.ranks:>5}  {state}"
            print_line(row, sys.stdout)
    for folder, why, restoring in set_aside(store):
        state = why or (f"whole; {restoring} restores it" if restoring else "whole")
        print_line(f"{'set aside':>10}  {folder}: {state}", sys.stdout)
    return 1 if wrong else 0


def _prune(store: Store, options: argparse.Namespace) -> int:
    locks = _hold(store, options)
    left: dict[int, str] = {}
    try:
        if options.step is not None:
            chosen = [found.folder for found in _chosen(store, options)]
            deleted = retention.delete(store, chosen, "00000000", left)
        else:
            deleted = retention.prune(store, options.section, "00000000", left=left)
    finally:
        locks.release()
    if deleted or not left:
        print_line("deleted " + ", ".join(deleted) if deleted else "nothing to delete", sys.stdout)
    for step, why in left.items():
        hint = f"ls -la {shlex.quote(store.where)}/{file_names.final(step)}* shows who may delete it"
        hint = "renew the credentials" if is_url(store.where) else hint
        print_line(f"fsdp.checkpoint: {why} (not deleted). HINT: {hint}, then prune again")
    return CheckpointError.exit_code if left else 0


def _hold(store: Store, options: argparse.Namespace) -> Locks:
    """The locks of RUN and of its store, which another run directory may share."""
    is_store = is_url(options.run) or os.path.realpath(options.run) == os.path.realpath(store.where)
    run = None if is_store else Folder(options.folder)
    try:
        return hold(run, lock_place(store), "python -m fsdp.checkpoint prune")
    except RefusedError as error:
        hint = "prune when that job has ended, or start it with --checkpoint.keep_last N"
        raise RefusedError(without_hint(error), hint) from None


def _export(store: Store, options: argparse.Namespace) -> int:
    found, damaged = _to_export(store, options)
    assert found.manifest is not None
    if is_url(options.run) and not options.out:
        raise ConfigError("an object store needs a local folder to export to.", "--out FOLDER")
    name = "full_model_ema" if options.ema else "full_model"
    folder = Path(options.out) if options.out else _own_export(Path(options.run), name)
    section, base = options.section, _base(options, found)
    try:
        source = load.open_one(store, found.folder, found.manifest)
        if options.ema:
            source = _averages(source, options)
        _make(folder)
        files = export(
            source,
            folder,
            section.export_format,
            shard_gib=options.shard_gib,
            base=base,
            pretrained=_saved_as(options),
            dtype=section.export_dtype,
        )
    except (EOFError, LookupError, ValueError, TypeError, RuntimeError, MemoryError) as error:
        # files that do not fit together, or are larger than this machine's memory
        failure = inspect.classify_failure(error, store.path(found.folder))
        raise _not_exported(store, found, failure) from error
    except Broken as broken:
        raise _not_exported(store, found, broken) from None
    except OSError as error:
        if error.errno not in FULL and not str(error.filename or "").startswith(f"{folder}/"):
            failure = inspect.classify_failure(error, store.path(found.folder))
            raise _not_exported(store, found, failure) from None
        hint = f"ls -ld {folder} and df -h {folder} show why; --out FOLDER is another place"
        raise CheckpointError(f"{folder} cannot be written ({error.strerror}).", hint) from None
    for file in files:
        print(f"{file}  {byte_size(file.stat().st_size)}")
    for one in damaged:
        print_line(
            f"fsdp.checkpoint: {store.path(one.folder)} is not whole ({one.detail}): step {found.step} was "
            f"exported. HINT: python -m fsdp.checkpoint {options.run} lists all"
        )
    return 0


def _to_export(
    store: Store, options: argparse.Namespace
) -> tuple[CheckpointListing, list[CheckpointListing]]:
    """The newest whole checkpoint, and the newer ones, which are not whole."""
    damaged: list[CheckpointListing] = []
    for found in _chosen(store, options):
        if found.unread is not None:  # an older one is not what was asked for
            raise found.unread
        if found.manifest is not None:
            return found, damaged
        damaged.append(found)
    raise CheckpointError(
        f"{store.where} holds no whole checkpoint.", f"python -m fsdp.checkpoint {options.run} verify"
    )


def _not_exported(
    store: Store, found: CheckpointListing, failure: Broken | CheckpointError
) -> CheckpointError:
    """The error with the checkpoint's name, and an older one to export in its place."""
    if isinstance(failure, CheckpointError):
        return failure
    steps = [one.step for one in inspect.scan(store) if one.manifest is not None and one.step < found.step]
    hint = f"--step {steps[0]} exports the one before" if steps else "put back a copy: no older one is whole"
    return CheckpointError(f"{store.path(found.folder)} cannot be exported: {failure.detail}.", hint)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written ({error.strerror}).", "--out FOLDER") from None


def _averages(source: CheckpointSource, options: argparse.Namespace) -> CheckpointSource:
    found = of_averages(source)
    if found is None:
        raise ConfigError(
            f"{source.folder} holds no moving average of the weights.",
            f"python -m fsdp.checkpoint {options.run} export, without --ema",
        )
    return found


def _own_export(run: Path, name: str) -> Path:
    """The folder in the run directory; ConfigError where it is a link."""
    folder = run / name
    for one in (folder, folder / PEFT):
        if one.is_symlink():
            raise ConfigError(
                f"{one} is a link to {one.readlink()}; the export does not follow links in a run directory.",
                f"--out {shlex.quote(os.path.realpath(folder))} to export there",
            )
    return folder


def _saved_as(options: argparse.Namespace) -> SourceFolder | None:
    """The format of transformers in which the run's model is exported; a torch export needs none."""
    file = options.folder / "config.toml"
    if not file.is_file() or options.section.export_format == "torch":
        return None
    values = config.read_recipe(str(file))
    name, args = str(values.get("model.name", "")), values.get("model.args", {})
    _check_source(options, values, "or --format torch, a state dict alone")
    if name.startswith(PREFIX):
        return resolve_folder(name, args, {})
    if name != "transformer":
        return None
    run = config.load_run_config(options.folder, trusted=options.trust_code, forgotten=("checkpoint.resume",))
    run = dataclasses.replace(run, checkpoint=options.section)
    if options.section.export_format != "hf":
        return None
    return saved_as(run, prepare(run, world_size=1, num_nodes=1, device=None).spec)


def _check_source(options: argparse.Namespace, values: Mapping[str, Any], other: str) -> None:
    """The folder or file that the run started from exists."""
    name, weights = (str(values.get(field, "")) for field in ("model.name", "model.weights"))
    for flag, value in (("--model.name", name), ("--model.weights", weights)):
        place = expanded(value.removeprefix(PREFIX))
        if value.startswith(PREFIX):
            missing = place.is_absolute() and not place.is_dir()  # a hub's name has a cache of its own
        else:
            missing = flag == "--model.weights" and value not in ("", "none") and not place.exists()
        if missing:
            raise ConfigError(
                f"{options.run} has {flag} {value}, which no longer exists.", f"put it back, {other}"
            )


def _base(options: argparse.Namespace, found: CheckpointListing) -> Base | None:
    """The frozen weights under adapters, from the run's own configuration; None for a whole model."""
    assert found.manifest is not None
    saved = found.manifest.base
    if not saved:
        return None
    file = options.folder / "config.toml"
    if not file.is_file():
        raise ConfigError(
            f"{found.folder} holds adapters over {saved['origin']}, and {options.run} has no config.toml.",
            "give the run directory",
        )
    _check_source(options, config.read_recipe(str(file)), "since checkpoints of adapters do not hold it")
    run = config.load_run_config(options.folder, trusted=options.trust_code, forgotten=("checkpoint.resume",))
    job = prepare(run, world_size=1, num_nodes=1, device=None)
    return dataclasses.replace(
        base_of(run, job.spec, job.dtypes, saved["digest"]),
        lora=dataclasses.replace(run.lora, rank=saved["rank"], alpha=saved["alpha"]),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
