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
from fsdp.base.text import byte_size, print_line, seconds
from fsdp.checkpoint import inspect, retention
from fsdp.checkpoint.adapter_weights import PEFT, Base
from fsdp.checkpoint.export import export, of_averages
from fsdp.checkpoint.inspect import READ_AT_ONCE, CheckpointListing, set_aside, why_not_whole
from fsdp.checkpoint.manifest import Broken, final_name, parse_name
from fsdp.checkpoint.store import Store, lock_place, open_store
from fsdp.config import CheckpointSection, trust
from fsdp.config.command_line import CommandParser, number, one_of, prints_errors, whole_number
from fsdp.config.fields import expanded
from fsdp.models.factory import PREFIX
from fsdp.models.hf import resolve_folder
from fsdp.models.registry import SourceFolder
from fsdp.run.job import Job, prepare
from fsdp.run.weights import base_of, saved_as
from fsdp.rundir.lock import Folder, Locks, hold
from fsdp.rundir.paths import FULL

COMMANDS = ("list", "verify", "prune", "export")
FORMATS = ("torch", "safetensors", "both", "hf")
DTYPES = ("auto", "fp64", "fp32", "bf16", "fp16")
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "--quick": ("list", {"action": "store_true", "help": "compare sizes only"}),
    "--keep-last": ("prune", {"type": whole_number(), "help": "number of newest checkpoints to keep"}),
    "--keep-every-steps": ("prune", {"type": whole_number(), "help": "also keep those of every n-th step"}),
    "--format": ("export", {"type": one_of(*FORMATS), "help": f"{', '.join(FORMATS)} (for from_pretrained)"}),
    "--dtype": ("export", {"type": one_of(*DTYPES), "help": f"dtype of the tensors: {', '.join(DTYPES)}"}),
    "--shard-gib": ("export", {"type": number(0), "help": "maximum size of a safetensors file, in GiB"}),
    "--out": ("export", {"help": "folder to write to; default: RUN/full_model, or full_model_ema"}),
    "--ema": ("export", {"action": "store_true", "help": "the moving average of the weights"}),
}
"""Each with its command; the defaults are those of the run's config.toml."""
DAMAGED = (Broken, EOFError, LookupError, ValueError, TypeError, RuntimeError, OSError, MemoryError)
"""Files that do not fit together, or are larger than this machine's memory."""


@prints_errors("fsdp.checkpoint")
def main(argv: Sequence[str]) -> int:
    try:
        options = _parse(argv)
        with _folder_of(options.run) as options.folder:
            options.section = _section(options)
            store = open_store(_place(options))
            if options.command == "prune":
                return _prune(store, options)
            return _export(store, options) if options.command == "export" else _list(store, options)
    except OSError as error:
        print_line(f"fsdp.checkpoint: {error}")
    except Broken as broken:
        print_line(f"fsdp.checkpoint: {broken.detail}. HINT: python -m fsdp.checkpoint {options.run} verify")
    return CheckpointError.exit_code


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser("fsdp.checkpoint", __doc__)
    parser.add_argument("words", nargs="+", metavar="RUN [list|verify|prune|export]")
    parser.add_argument("--step", type=whole_number(), help="only the checkpoint of this step")
    actions = {
        parser.add_argument(name, **{**how, "help": f"{command}: {how['help']}"}): command
        for name, (command, how) in OPTIONS.items()
    }
    parser.add_argument(
        "--trust-code", action="append", default=[], metavar="NAME", help=f"export: {trust.TRUST_HELP}"
    )
    options = parser.parse(argv)
    commands = [word for word in options.words if word in COMMANDS]
    runs = [word for word in options.words if word not in COMMANDS]
    if len(runs) != 1 or len(commands) > 1:
        words = " ".join(options.words)
        hint = "python -m fsdp.checkpoint RUN, or RUN with list, verify, prune or export"
        raise ConfigError(f"{words}: expected one RUN and at most one command.", hint)
    options.run, options.command = runs[0].rstrip("/"), (commands or ["list"])[0]
    for action, command in actions.items():
        if command != options.command and getattr(options, action.dest) != action.default:
            hint = f"leave it out, or python -m fsdp.checkpoint {options.run} {command}"
            raise ConfigError(f"{action.option_strings[0]} has no effect on {options.command}.", hint)
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
        values = {
            name.removeprefix("checkpoint."): config.parse_value(config.FIELDS[name], value)
            for name, value in config.read_recipe(str(file)).items()
            if name.startswith("checkpoint.") and name in config.FIELDS
        }
        section = CheckpointSection(**values)
    flags = {
        "keep_last": options.keep_last,
        "keep_every_steps": options.keep_every_steps,
        "export_format": options.format,
        "export_dtype": options.dtype,
    }
    return dataclasses.replace(section, **{name: value for name, value in flags.items() if value is not None})


def _place(options: argparse.Namespace) -> str:
    """The place of RUN's checkpoints: from its config, its subfolder `checkpoints`, or RUN itself."""
    run: str = options.run
    if is_url(run):
        return run
    if options.section.dir:
        return trust.check_store(Path(run), options.section.dir)
    if Path(run, "checkpoints").is_dir():
        return str(Path(run, "checkpoints"))
    if not Path(run).is_dir():
        raise CheckpointError(
            f"{run} {'is not a folder' if Path(run).exists() else 'does not exist'}.",
            f"ls {shlex.quote(str(Path(run).parent))}, and give the --run.dir of a run",
        )
    return run


def _chosen(store: Store, options: argparse.Namespace) -> list[CheckpointListing]:
    listings = [listing for listing in inspect.scan(store) if options.step in (None, listing.step)]
    shows_all = options.command in ("list", "verify") and options.step is None
    if not listings and not (shows_all and inspect.folders_of(store, "broken")):
        around, _, name = options.run.rpartition("/")
        hint = "give the --run.dir of a run that has saved one"
        if options.step is not None:
            hint = f"python -m fsdp.checkpoint {options.run} lists the steps"
        elif (folder := parse_name(name)) is not None:
            hint = f"python -m fsdp.checkpoint {around or '.'} --step {folder.step}"
        step = "" if options.step is None else f" of step {options.step}"
        raise CheckpointError(f"{store.where} holds no checkpoint{step}.", hint)
    return listings


def _list(store: Store, options: argparse.Namespace) -> int:
    """Prints a line for each checkpoint, the newest first, then those set aside; returns the exit code."""
    listings = _chosen(store, options)
    manifests = [listing.manifest for listing in listings if listing.manifest is not None]
    total = sum(size for manifest in manifests for size, _ in manifest.files.values())
    reads = options.command == "verify" or (not options.quick and total <= READ_AT_ONCE)
    print(f"{'step':>10}  {'age':>9}  {'size':>10}  {'mesh':<12}  {'ranks':>5}  state")
    wrong = 0
    for listing in listings:
        why = why_not_whole(store, listing, reads)
        wrong += why is not None
        about, (age, size, mesh, ranks) = listing.manifest, [""] * 4
        if about is not None:
            age, size = seconds(max(0.0, time.time() - about.created)), byte_size(about.bytes)
            mesh, ranks = about.mesh, str(about.ranks)
        state = why or ("verified" if reads else "sealed, sizes match; verify reads every byte")
        print_line(f"{listing.step:>10}  {age:>9}  {size:>10}  {mesh:<12}  {ranks:>5}  {state}", sys.stdout)
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
        hint = f"ls -la {shlex.quote(store.where)}/{final_name(step)}* shows who may delete it"
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
    listing, damaged = _to_export(store, options)
    if is_url(options.run) and not options.out:
        raise ConfigError("an object store needs a local folder to export to.", "--out FOLDER")
    name = "full_model_ema" if options.ema else "full_model"
    folder, section = Path(options.out or f"{options.run}/{name}"), options.section
    for path in () if options.out else (folder, folder / PEFT):
        if path.is_symlink():
            hint = f"--out {shlex.quote(os.path.realpath(folder))} to export there"
            raise ConfigError(f"{path} is a link; the export does not follow links in a run directory.", hint)
    base, saved_as = _base(options, listing), _saved_as(options)
    try:
        source = inspect.open_source(store, listing.folder, listing.manifest)
        averages = of_averages(source) if options.ema else source
        if averages is None:
            reason = f"{listing.folder} holds no moving average of the weights."
            raise ConfigError(reason, f"python -m fsdp.checkpoint {options.run} export, without --ema")
        shard_gib, dtype = options.shard_gib, section.export_dtype
        files = export(averages, folder, section.export_format, shard_gib, base, saved_as, dtype)
    except DAMAGED as error:
        if isinstance(error, OSError) and (
            error.errno in FULL or str(error.filename or "").startswith(str(folder))
        ):
            hint = f"ls -ld {folder} and df -h {folder} show why; --out FOLDER is another place"
            raise CheckpointError(f"{folder} cannot be written ({error.strerror}).", hint) from None
        failure = inspect.classify_failure(error, store.path(listing.folder))
        if isinstance(failure, CheckpointError):
            raise failure from error
        hint = f"python -m fsdp.checkpoint {options.run} verify shows which are whole; --step N exports one"
        reason = f"{store.path(listing.folder)} cannot be exported: {failure.detail}."
        raise CheckpointError(reason, hint) from error
    for file in files:
        print(f"{file}  {byte_size(file.stat().st_size)}")
    for newer in damaged:
        print_line(
            f"fsdp.checkpoint: {store.path(newer.folder)} is not whole ({newer.detail}): step {listing.step} "
            f"was exported. HINT: python -m fsdp.checkpoint {options.run} lists all"
        )
    return 0


def _to_export(
    store: Store, options: argparse.Namespace
) -> tuple[CheckpointListing, list[CheckpointListing]]:
    """The newest whole checkpoint, and the newer ones, which are not whole."""
    damaged: list[CheckpointListing] = []
    for listing in _chosen(store, options):
        if listing.unread is not None:  # an older one is not what was asked for
            raise listing.unread
        if listing.manifest is not None:
            return listing, damaged
        damaged.append(listing)
    hint = f"python -m fsdp.checkpoint {options.run} verify"
    raise CheckpointError(f"{store.where} holds no whole checkpoint.", hint)


def _saved_as(options: argparse.Namespace) -> SourceFolder | None:
    """The format of transformers in which the run's model is exported; a torch export needs none."""
    if not (options.folder / "config.toml").is_file() or options.section.export_format == "torch":
        return None
    values = _recipe(options, "or --format torch, a state dict alone")
    name = str(values.get("model.name", ""))
    if name.startswith(PREFIX):
        return resolve_folder(name, values.get("model.args", {}), {})
    if name != "transformer":
        return None
    run, job = _job(options)
    return saved_as(run, job.spec) if options.section.export_format == "hf" else None


def _recipe(options: argparse.Namespace, other: str) -> Mapping[str, Any]:
    """The run's configuration as written; ConfigError if the folder or file that it started from is gone."""
    values = config.read_recipe(str(options.folder / "config.toml"))
    for flag in ("model.name", "model.weights"):
        value = str(values.get(flag, ""))
        path = expanded(value.removeprefix(PREFIX))
        if value.startswith(PREFIX):
            missing = path.is_absolute() and not path.is_dir()  # a hub's name has a cache of its own
        else:
            missing = flag == "model.weights" and value not in ("", "none") and not path.exists()
        if missing:
            reason = f"{options.run} has --{flag} {value}, which no longer exists."
            raise ConfigError(reason, f"put it back, {other}")
    return values


def _job(options: argparse.Namespace) -> tuple[config.Config, Job]:
    run = trust.load_run_config(options.folder, trusted=options.trust_code, forgotten=("checkpoint.resume",))
    run = dataclasses.replace(run, checkpoint=options.section)
    return run, prepare(run, world_size=1, num_nodes=1, device=None)


def _base(options: argparse.Namespace, listing: CheckpointListing) -> Base | None:
    """The frozen weights under adapters, from the run's own configuration; None for a whole model."""
    assert listing.manifest is not None
    saved = listing.manifest.base
    if not saved:
        return None
    if not (options.folder / "config.toml").is_file():
        reason = (
            f"{listing.folder} holds adapters over {saved['origin']}, and {options.run} has no config.toml."
        )
        raise ConfigError(reason, "give the run directory")
    _recipe(options, "since checkpoints of adapters do not hold it")
    run, job = _job(options)
    lora = dataclasses.replace(run.lora, rank=saved["rank"], alpha=saved["alpha"])
    return dataclasses.replace(base_of(run, job.spec, job.dtypes, saved["digest"]), lora=lora)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
