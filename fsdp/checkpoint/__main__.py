"""List, verify, prune or export a run's checkpoints, without starting ranks:

    python -m fsdp.checkpoint RUN                      list: step, age, size, mesh, state
    python -m fsdp.checkpoint RUN verify               read every byte of every checkpoint
    python -m fsdp.checkpoint RUN prune --keep-last 2  delete older ones; refused while a job writes there
    python -m fsdp.checkpoint RUN export --format both --out FOLDER

RUN is a run directory or a place of checkpoints, a folder or s3://bucket/prefix. --step N selects one
checkpoint. Exit codes: 0; 1 if a checkpoint is not whole or cannot be read; 2 for a wrong command; 4 if there
is no checkpoint, one cannot be deleted, or another job writes there.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fsdp import config
from fsdp.base.errors import CheckpointError, ConfigError
from fsdp.base.object_client import is_url
from fsdp.base.text import byte_size, print_line, seconds
from fsdp.checkpoint import inspect, retention
from fsdp.checkpoint.export import PEFT, export, of_averages
from fsdp.checkpoint.inspect import READ_AT_ONCE, CheckpointListing, set_aside, why_not_whole
from fsdp.checkpoint.manifest import Broken, Manifest, final_name, parse_name
from fsdp.checkpoint.pretrained import Base
from fsdp.checkpoint.store import Store, lock_place, open_store
from fsdp.config import CheckpointSection, trust
from fsdp.config.command_line import CommandParser, number, one_of, prints_errors, whole_number
from fsdp.models.hf import SourceFolder, resolve_folder
from fsdp.models.registry import PREFIX
from fsdp.run.job import prepare
from fsdp.run.weights import base_of, saved_as
from fsdp.rundir.lock import Folder, hold
from fsdp.rundir.paths import FULL

FORMATS = ("torch", "safetensors", "both", "hf")
DTYPES = ("auto", "fp64", "fp32", "bf16", "fp16")
COMMANDS: dict[str, dict[str, dict[str, Any]]] = {
    "list": {"--quick": {"action": "store_true", "help": "compare sizes only"}},
    "verify": {},
    "prune": {
        "--keep-last": {"type": whole_number(), "help": "number of newest checkpoints to keep"},
        "--keep-every-steps": {"type": whole_number(), "help": "also keep those of every n-th step"},
    },
    "export": {
        "--format": {"type": one_of(*FORMATS), "help": f"{', '.join(FORMATS)} (for from_pretrained)"},
        "--dtype": {"type": one_of(*DTYPES), "help": f"dtype of the tensors: {', '.join(DTYPES)}"},
        "--shard-gib": {"type": number(0), "help": "maximum size of a safetensors file, in GiB"},
        "--out": {"help": "folder to write to; default: RUN/full_model, or full_model_ema"},
        "--ema": {"action": "store_true", "help": "the moving average of the weights"},
        "--trust-code": {"action": "append", "default": [], "metavar": "NAME", "help": trust.TRUST_HELP},
    },
}
"""Each with its flags; the defaults are those of the run's config.toml."""
DAMAGED = (Broken, EOFError, LookupError, ValueError, TypeError, RuntimeError, OSError, MemoryError)
"""Files that do not fit together, or are larger than this machine's memory."""


@prints_errors("fsdp.checkpoint")
def main(argv: Sequence[str]) -> int:
    options = _parse(argv)
    run = f"python -m fsdp.checkpoint {options.run}"
    try:
        with _folder_of(options.run) as options.folder:
            options.section = _section(options)
            store = open_store(_place(options))
            if options.command == "prune":
                return _prune(store, options)
            return _export(store, options, run) if options.command == "export" else _list(store, options)
    except OSError as error:
        print_line(f"fsdp.checkpoint: {error}")
    except Broken as broken:
        print_line(f"fsdp.checkpoint: {broken.detail}. HINT: {run} verify")
    return CheckpointError.exit_code


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser("fsdp.checkpoint", __doc__)
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("command", nargs="?", default="list", type=one_of(*COMMANDS))
    parser.add_argument("--step", type=whole_number(), help="only the checkpoint of this step")
    actions = [
        (command, parser.add_argument(flag, **{**how, "help": f"{command}: {how['help']}"}))
        for command, flags in COMMANDS.items()
        for flag, how in flags.items()
    ]
    options = parser.parse(argv)
    options.run = options.run.rstrip("/")
    for command, action in actions:
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
    values = _recipe(options)
    stored = {
        name.removeprefix("checkpoint."): config.parse_value(field, values[name])
        for name, field in config.FIELDS.items()
        if name.startswith("checkpoint.") and name in values
    }
    flags = {
        "keep_last": options.keep_last,
        "keep_every_steps": options.keep_every_steps,
        "export_format": options.format,
        "export_dtype": options.dtype,
    }
    return CheckpointSection(**stored | {name: value for name, value in flags.items() if value is not None})


def _recipe(options: argparse.Namespace) -> dict[str, Any]:
    """The run's configuration as written; empty without one."""
    file = options.folder / "config.toml"
    return dict(config.read_recipe(str(file))) if file.is_file() else {}


def _place(options: argparse.Namespace) -> str:
    """The place of RUN's checkpoints: from its config, its subfolder `checkpoints`, or RUN itself."""
    run: str = options.run
    if is_url(run):
        return run
    if options.section.dir:
        return trust.check_store(Path(run), options.section.dir)
    if not Path(run).is_dir():
        state = "is not a folder" if Path(run).exists() else "does not exist"
        hint = f"ls {shlex.quote(str(Path(run).parent))}, and give the --run.dir of a run"
        raise CheckpointError(f"{run} {state}.", hint)
    return f"{run}/checkpoints" if Path(run, "checkpoints").is_dir() else run


def _chosen(store: Store, options: argparse.Namespace) -> list[CheckpointListing]:
    listings = [listing for listing in inspect.scan(store) if options.step in (None, listing.step)]
    shows_all = options.command in ("list", "verify") and options.step is None
    if not listings and not (shows_all and inspect.folders_of(store, "broken")):
        parent, _, name = options.run.rpartition("/")
        step, hint = "", "give the --run.dir of a run that has saved one"
        if options.step is not None:
            step, hint = (
                f" of step {options.step}",
                f"python -m fsdp.checkpoint {options.run} lists the steps",
            )
        elif (folder := parse_name(name)) is not None:
            hint = f"python -m fsdp.checkpoint {parent or '.'} --step {folder.step}"
        raise CheckpointError(f"{store.where} holds no checkpoint{step}.", hint)
    return listings


def _list(store: Store, options: argparse.Namespace) -> int:
    """Prints a line for each checkpoint, the newest first, then those set aside; returns the exit code."""
    listings = _chosen(store, options)
    manifests = [listing.manifest for listing in listings if listing.manifest is not None]
    total = sum(size for manifest in manifests for size, _ in manifest.files.values())
    reads = options.command == "verify" or (not options.quick and total <= READ_AT_ONCE)
    print(_row("step", "age", "size", "mesh", "ranks", "state"))
    wrong = 0
    for listing in listings:
        why = why_not_whole(store, listing, reads)
        wrong += why is not None
        state = why or ("verified" if reads else "sealed, sizes match; verify reads every byte")
        print_line(_row(listing.step, *_facts(listing.manifest), state), sys.stdout)
    for folder, why, restoring in set_aside(store):
        state = why or (f"whole; {restoring} restores it" if restoring else "whole")
        print_line(f"{'set aside':>10}  {folder}: {state}", sys.stdout)
    return 1 if wrong else 0


def _row(step: object, age: str, size: str, mesh: str, ranks: object, state: str) -> str:
    return f"{step:>10}  {age:>9}  {size:>10}  {mesh:<12}  {ranks:>5}  {state}"


def _facts(manifest: Manifest | None) -> tuple[str, str, str, str]:
    if manifest is None:
        return "", "", "", ""
    age = seconds(max(0.0, time.time() - manifest.created))
    return age, byte_size(manifest.bytes), manifest.mesh, str(manifest.ranks)


def _prune(store: Store, options: argparse.Namespace) -> int:
    is_store = is_url(options.run) or os.path.realpath(options.run) == os.path.realpath(store.where)
    # another run directory may share the store
    run = None if is_store else Folder(options.folder)
    locks = hold(run, lock_place(store), "python -m fsdp.checkpoint prune")
    left: dict[int, str] = {}
    try:
        if options.step is not None:
            chosen = [listing.folder for listing in _chosen(store, options)]
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


def _export(store: Store, options: argparse.Namespace, run: str) -> int:
    damaged: list[CheckpointListing] = []
    for listing in _chosen(store, options):
        if listing.unread is not None:  # an older one is not what was asked for
            raise listing.unread
        if listing.manifest is not None:
            break
        damaged.append(listing)
    else:
        raise CheckpointError(f"{store.where} holds no whole checkpoint.", f"{run} verify")
    if is_url(options.run) and not options.out:
        raise ConfigError("an object store needs a local folder to export to.", "--out FOLDER")
    folder = Path(options.out or f"{options.run}/{'full_model_ema' if options.ema else 'full_model'}")
    if not options.out and (folder.is_symlink() or (folder / PEFT).is_symlink()):
        hint = f"--out {shlex.quote(os.path.realpath(folder))} to export there"
        raise ConfigError(f"{folder} is a link; the export does not follow links in a run directory.", hint)
    base, pretrained = _formats(options, listing)
    path, section = store.path(listing.folder), options.section
    try:
        source = inspect.open_source(store, listing.folder, listing.manifest)
        averages = of_averages(source) if options.ema else source
        if averages is None:
            reason = f"{listing.folder} holds no moving average of the weights."
            raise ConfigError(reason, f"{run} export, without --ema")
        more = (base, pretrained, section.export_dtype)
        files = export(averages, folder, section.export_format, options.shard_gib, *more)
    except DAMAGED as error:
        at_target = isinstance(error, OSError) and str(error.filename or "").startswith(str(folder))
        if isinstance(error, OSError) and (at_target or error.errno in FULL):
            hint = f"ls -ld {folder} and df -h {folder} show why; --out FOLDER is another place"
            raise CheckpointError(f"{folder} cannot be written ({error.strerror}).", hint) from None
        failure = inspect.classify_failure(error, path)
        if isinstance(failure, CheckpointError):
            raise failure from error
        hint = f"{run} verify shows which are whole; --step N exports one"
        raise CheckpointError(f"{path} cannot be exported: {failure.detail}.", hint) from error
    for file in files:
        print(f"{file}  {byte_size(file.stat().st_size)}")
    for newer in damaged:
        reason = f"{store.path(newer.folder)} is not whole ({newer.detail}): step {listing.step} was exported"
        print_line(f"fsdp.checkpoint: {reason}. HINT: {run} lists all")
    return 0


def _formats(
    options: argparse.Namespace, listing: CheckpointListing
) -> tuple[Base | None, SourceFolder | None]:
    """From the run's own configuration: the frozen weights under adapters, and the format of transformers in
    which the run's model is exported, which a torch export does not need.
    """
    assert listing.manifest is not None
    saved, exported = listing.manifest.base, options.section.export_format
    values = _recipe(options)
    if saved and not values:
        reason = (
            f"{listing.folder} holds adapters over {saved['origin']}, and {options.run} has no config.toml."
        )
        raise ConfigError(reason, "give the run directory")
    pretrained: SourceFolder | None = None
    name = str(values.get("model.name", ""))
    if name.startswith(PREFIX) and exported != "torch":
        pretrained = resolve_folder(name, values.get("model.args", {}), {})
    if not saved and (name != "transformer" or exported != "hf"):
        return None, pretrained
    run = trust.load_run_config(options.folder, trusted=options.trust_code, forgotten=("checkpoint.resume",))
    run = dataclasses.replace(run, checkpoint=options.section)
    job = prepare(run, world_size=1, num_nodes=1, device=None)
    if exported == "hf" and pretrained is None:
        pretrained = saved_as(run, job.spec)
    if not saved:
        return None, pretrained
    lora = dataclasses.replace(run.lora, rank=saved["rank"], alpha=saved["alpha"])
    return dataclasses.replace(base_of(run, job.spec, job.dtypes, saved["digest"]), lora=lora), pretrained


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
