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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdp import config
from fsdp.base.errors import CheckpointError, ConfigError
from fsdp.base.object_client import is_url
from fsdp.base.text import byte_size, print_line, seconds
from fsdp.checkpoint import inspect
from fsdp.checkpoint.export import PEFT, export, of_averages
from fsdp.checkpoint.inspect import CheckpointListing, set_aside, why_not_whole
from fsdp.checkpoint.manifest import Broken, Manifest
from fsdp.checkpoint.pretrained import Base
from fsdp.checkpoint.store import Store, lock_place, open_store
from fsdp.config import CheckpointSection, trust
from fsdp.config.command_line import CommandParser, one_of, prints_errors, whole_number
from fsdp.models.hf import SourceFolder, resolve_folder
from fsdp.models.registry import PREFIX
from fsdp.run.build import frozen_base
from fsdp.run.job import prepare
from fsdp.rundir.history import FULL, storage_advice
from fsdp.rundir.lock import Folder, hold
from fsdp.tokenize.conversations import template_text

COMMANDS: dict[str, dict[str, dict[str, Any]]] = {
    "list": {},
    "verify": {},
    "prune": {
        "--keep-last": {"help": "number of newest checkpoints to keep"},
        "--keep-every-steps": {"help": "also keep those of every n-th step"},
    },
    "export": {
        "--format": {"dest": "export_format", "help": "torch, safetensors, both or hf (for from_pretrained)"},
        "--dtype": {"dest": "export_dtype", "help": "dtype of the tensors: auto, fp64, fp32, bf16 or fp16"},
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
    with tempfile.TemporaryDirectory(prefix="shardrun-run-") as folder:
        options.folder = Path(options.run)
        if is_url(options.run):  # with the records of the run that saved there
            options.folder = Path(folder)
            open_store(options.run).fetch_records(options.folder)
        options.values, options.section = _section(options)
        store = open_store(_place(options))
        act = {"prune": _prune, "export": _export}.get(options.command, _list)
        try:
            return act(store, options)
        except Broken as broken:
            raise CheckpointError(f"{broken.detail}.", f"{options.again} verify") from None


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    if len(argv) > 1 and argv[0] in COMMANDS:
        raise ConfigError(f"RUN comes before {argv[0]}.", f"python -m fsdp.checkpoint {argv[1]} {argv[0]}")
    parser = CommandParser("fsdp.checkpoint", __doc__)
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("command", nargs="?", default="list", type=one_of(*COMMANDS))
    parser.add_argument("--step", type=whole_number(), help="only the checkpoint of this step")
    command = next((word for word in argv if word in COMMANDS), "list")
    for flag, how in COMMANDS[command].items():
        parser.add_argument(flag, **how)
    options = parser.parse(argv)
    options.again = f"python -m fsdp.checkpoint {options.run}"
    return options


def _section(options: argparse.Namespace) -> tuple[dict[str, Any], CheckpointSection]:
    """The run's configuration, empty without one, and its [checkpoint] with this command's flags over it."""
    file = options.folder / "config.toml"
    values = dict(config.read_recipe(str(file))) if file.is_file() else {}
    flags = {f"checkpoint.{name}": value for name, value in vars(options).items() if value is not None}
    names = [name for name in config.FIELDS if name.startswith("checkpoint.") and name in values | flags]
    parsed = {name: config.parse_value(config.FIELDS[name], (values | flags)[name]) for name in names}
    section = {name.removeprefix("checkpoint."): value for name, value in parsed.items()}
    return values, CheckpointSection(**section)


def _place(options: argparse.Namespace) -> str:
    """The place of RUN's checkpoints: from its config, its subfolder `checkpoints`, or RUN itself."""
    run: str = options.run
    if is_url(run):
        return run
    if options.section.dir:
        return trust.check_store(Path(run), options.section.dir)
    if not Path(run).is_dir():
        raise CheckpointError(f"{run} is no folder.", f"ls {shlex.quote(str(Path(run).parent))}")
    return f"{run}/checkpoints" if Path(run, "checkpoints").is_dir() else run


def _chosen(store: Store, options: argparse.Namespace) -> list[CheckpointListing]:
    listings = [listing for listing in inspect.scan(store) if options.step in (None, listing.step)]
    if not listings and (options.step is not None or not inspect.folders_of(store, "broken")):
        hint = "give the --run.dir of a run that has saved one"
        if options.step is not None:
            hint = f"{options.again} lists the steps"
        raise CheckpointError(f"{store.where} holds no such checkpoint.", hint)
    return listings


def _list(store: Store, options: argparse.Namespace) -> int:
    """Prints a line for each checkpoint, the newest first, then those set aside; returns the exit code."""
    reads, wrong = options.command == "verify", False
    listings = _chosen(store, options)
    width = max([12, *(len(_facts(listing.manifest)[2]) for listing in listings)])
    row = f"{{:>10}}  {{:>9}}  {{:>10}}  {{:<{width}}}  {{:>5}}  {{}}"
    print(row.format("step", "age", "size", "mesh", "ranks", "state"))
    for listing in listings:
        reason = why_not_whole(store, listing, reads)
        wrong |= reason is not None
        state = reason or ("verified" if reads else "sealed, sizes match; verify reads every byte")
        print_line(row.format(listing.step, *_facts(listing.manifest), state), sys.stdout)
    for folder, reason, restoring in set_aside(store):
        state = reason or (f"whole; {restoring} restores it" if restoring else "whole")
        print_line(f"{'set aside':>10}  {folder}: {state}", sys.stdout)
    return int(wrong)


def _facts(manifest: Manifest | None) -> tuple[str, str, str, str]:
    if manifest is None:
        return "", "", "", ""
    age = seconds(max(0.0, time.time() - manifest.created))
    return age, byte_size(manifest.bytes), manifest.mesh, str(manifest.ranks)


def _prune(store: Store, options: argparse.Namespace) -> int:
    is_store = is_url(options.run) or os.path.realpath(options.run) == os.path.realpath(store.where)
    # another run directory may share the store
    lock = hold(None if is_store else Folder(options.folder), lock_place(store), options.again)
    left: dict[int, str] = {}
    try:
        if options.step is not None:
            chosen = [listing.folder for listing in _chosen(store, options)]
            deleted = inspect.delete(store, chosen, "00000000", left)
        else:
            deleted = inspect.prune(store, options.section, "00000000", left=left)
    finally:
        lock.release()
    if deleted or not left:
        print_line("deleted " + ", ".join(deleted) if deleted else "nothing to delete", sys.stdout)
    for reason in left.values():
        hint = "renew the credentials" if is_url(store.where) else f"ls -la {shlex.quote(store.where)}"
        print_line(f"fsdp.checkpoint: {reason} (not deleted). HINT: {hint}, then prune again")
    return CheckpointError.exit_code if left else 0


def _export(store: Store, options: argparse.Namespace) -> int:
    listings, section = _chosen(store, options), options.section
    listing = next((listing for listing in listings if listing.manifest or listing.unread), None)
    if listing is None:
        raise CheckpointError(f"{store.where} holds no whole checkpoint.", f"{options.again} verify")
    if listing.unread is not None:  # an older one is not what was asked for
        raise listing.unread
    if is_url(options.run) and not options.out:
        raise ConfigError("an object store needs a local folder to export to.", "--out FOLDER")
    folder = Path(options.out or f"{options.run}/{'full_model_ema' if options.ema else 'full_model'}")
    if not options.out and (folder.is_symlink() or (folder / PEFT).is_symlink()):
        hint = f"--out {shlex.quote(os.path.realpath(folder))} to export there"
        raise ConfigError(f"{folder} is a link; the export does not follow links in a run directory.", hint)
    base, pretrained = _formats(options, listing)
    path = store.path(listing.folder)
    try:
        source = inspect.open_source(store, listing.folder, listing.manifest)
        averages = of_averages(source) if options.ema else source
        if averages is None:
            reason = f"{listing.folder} holds no moving average of the weights."
            raise ConfigError(reason, f"{options.again} export, without --ema")
        exported, dtype = section.export_format, section.export_dtype
        files = export(averages, folder, exported, base=base, pretrained=pretrained, dtype=dtype)
    except DAMAGED as error:
        number = getattr(error, "errno", None) or 0
        if number in FULL or str(getattr(error, "filename", "")).startswith(str(folder)):
            reason = f"{folder} cannot be written ({os.strerror(number)})."
            raise CheckpointError(reason, f"{storage_advice(number, str(folder))}; or --out FOLDER") from None
        failure = inspect.classify_failure(error, path)
        if isinstance(failure, CheckpointError):
            raise failure from error
        hint = f"{options.again} verify shows which are whole; --step N exports one"
        raise CheckpointError(f"{path} cannot be exported: {failure.detail}.", hint) from error
    for file in files:
        print(f"{file}  {byte_size(file.stat().st_size)}")
    for newer in listings[: listings.index(listing)]:
        reason = f"{store.path(newer.folder)} is not whole ({newer.detail}): step {listing.step} was exported"
        print_line(f"fsdp.checkpoint: {reason}. HINT: {options.again} lists all")
    return 0


def _formats(
    options: argparse.Namespace, listing: CheckpointListing
) -> tuple[Base | None, SourceFolder | None]:
    """From the run's own configuration: the frozen weights under adapters, and the format of transformers in
    which the run's model is exported, which a torch export does not need.
    """
    assert listing.manifest is not None
    saved, exported, values = listing.manifest.base, options.section.export_format, options.values
    if saved and not values:
        reason = f"{listing.folder} holds adapters over {saved['origin']}, and {options.run} no config.toml."
        raise ConfigError(reason, "give the run directory")
    pretrained: SourceFolder | None = None
    name = str(values.get("model.name", ""))
    if name.startswith(PREFIX) and exported != "torch":
        os.environ["HF_HUB_OFFLINE"] = "1"  # RUN names the model
        tables = values.get("data.sources") or [{"args": values.get("data.args", {})}]
        templates = [str(table.get("args", {}).get("chat_template", "")) for table in tables]
        pretrained = dataclasses.replace(
            resolve_folder(name, values.get("model.args", {}), {}),
            tokenizer=str(values.get("data.tokenizer", "")),
            chat_template=template_text(next(filter(None, templates), "")),
        )
    if not saved and (name != "transformer" or exported != "hf"):
        return None, pretrained
    run = trust.load_run_config(options.folder, trusted=options.trust_code, forgotten=("checkpoint.resume",))
    run = dataclasses.replace(run, checkpoint=options.section)
    job = prepare(run, world_size=1, num_nodes=1, device=None)
    if exported == "hf" and pretrained is None:
        pretrained = job.exported
    if not saved:
        return None, pretrained
    lora = dataclasses.replace(run.lora, rank=saved["rank"], alpha=saved["alpha"])
    return dataclasses.replace(frozen_base(run, job.spec, job.dtypes, saved["digest"]), lora=lora), pretrained


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
