"""Writes a Config as a recipe (TOML), and hashes the fields that define what is trained.

Not here: reading a recipe (read.py), --help (command_line.py).
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from fsdp.config.sections import FIELDS, LAUNCHERS_OWN, Config, MixedSource, flatten, shown_value


def to_toml(config: Config) -> str:
    """The resolved configuration as a recipe; --config loads the same Config from it."""
    return f"backend = {toml_value(config.backend)}\n{_sections(config, ())}"


def run_toml(config: Config) -> str:
    """The same for a run directory, without the launcher's settings: any launcher can resume the run."""
    return _sections(config, LAUNCHERS_OWN).lstrip()


def as_tables(sources: Sequence[MixedSource]) -> list[dict[str, Any]]:
    """The given fields of each source, as a recipe holds them."""
    names = [field.name for field in dataclasses.fields(MixedSource)]
    return [
        {name: value for name in names if (value := getattr(source, name)) not in ("", 0, {})}
        for source in sources
    ]


NOT_SHOWN = ("run.dir", "checkpoint.dir", "backend")
"""Where a run is and what started it: not settings that runs are told apart by."""


def changed_flags(fields: Mapping[str, Any]) -> list[str]:
    """`--section.field value` for each of these fields that differs from its default; of tables their
    name.
    """
    flags = []
    for name, value in fields.items():
        if name not in FIELDS or name in NOT_SHOWN or value == FIELDS[name].default:
            continue
        if FIELDS[name].is_tables:
            flags.append(f"[[{name}]]")
        elif isinstance(value, Mapping):
            flags += [f"--{name}.{key} {shown_value(one)}" for key, one in value.items()]
        else:
            flags.append(f"--{name} {shown_value(value)}")
    return flags


def _sections(config: Config, left_out: Sequence[str]) -> str:
    lines = []
    for section in dataclasses.fields(Config)[1:]:
        if section.name in left_out:
            continue
        lines.append(f"\n[{section.name}]")
        part = getattr(config, section.name)
        values = [(f.name, getattr(part, f.name)) for f in dataclasses.fields(part)]
        lines += [
            f"{key} = {toml_value(value)}" for key, value in values if not isinstance(value, (Mapping, tuple))
        ]
        for key, value in values:
            if isinstance(value, Mapping) and value:
                lines.append(f"\n[{section.name}.{key}]")
                lines += [f"{_toml_key(k)} = {toml_value(v)}" for k, v in value.items()]
            for table in as_tables(value) if isinstance(value, tuple) else ():
                lines.append(f"\n[[{section.name}.{key}]]")
                lines += [f"{_toml_key(k)} = {toml_value(v)}" for k, v in table.items()]
    return "\n".join(lines) + "\n"


def _toml_key(key: str) -> str:
    plain = key.replace("_", "").replace("-", "").isalnum() and key.isascii()
    return key if plain else toml_value(key)


def toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        # JSON's string escapes are valid in TOML, except DEL, which JSON does not escape.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml_key(k)} = {toml_value(v)}" for k, v in value.items()) + "}"
    return "[" + ", ".join(toml_value(v) for v in value) + "]"


NOT_TRAINED = {
    "backend", "mesh", "ray", "plan", "checkpoint", "stop", "memory", "speed", "profile",
    "run.dir", "run.log_every_steps", "run.full_records", "run.wandb", "run.mlflow", "run.sinks",
    "run.process_group_timeout_s", "run.numa", "run.allocator", "train.stop_after", "train.evaluate_only",
    "train.eval_answers",
    "data.workers", "data.prefetch", "data.to_device", "comm.divide_by", "comm.allocate_from_group",
    "watch",
}  # fmt: skip
"""Sections and fields that define where and how the run is executed, not what is trained."""

TRAINED = ("speed.float8", "watch.deterministic")
"""Fields of such sections that change what is trained."""


ADDED_LATER = (
    "optim.decay_share", "optim.ema", "train.loss", "data.tokenizer", "precision.frozen", "data.sources",
    "optim.muon_lr", "optim.muon_momentum", "optim.muon_steps", "optim.muon_adjust_lr",
    "optim.muon_parameters", "train.eval_every_epochs", "train.z_loss", "data.validation",
)  # fmt: skip
"""Fields whose default trains as before they existed: at it, hashes of older checkpoints stay equal."""


REMOVED: dict[str, tuple[Any, str]] = {
    "watch.unit_norms": (0, "leave it out: train/grad_norm is recorded at each step"),
    "watch.spike": (10.0, "leave it out: train/grad_norm is recorded at each step"),
    "run.full_records": (100_000, "leave it out: every step has a record"),
    "run.numa": ("auto", "torchrun --numa-binding=node --nproc_per_node=8 train.py"),
    "data.skip_unreadable": (0, "leave the sample out of the data: the error names it"),
    "data.to_device": (True, "leave it out: batches read ahead are copied to the device"),
    "comm.allocate_from_group": (
        False, "--comm.all_gather mine:Gather, whose allocate() makes buffers"
    ),
    "comm.divide_by": (0.0, "leave it out: gradients are summed"),
    "optim.muon_steps": (5, "leave it out: Muon iterates five times"),
    "optim.muon_adjust_lr": ("match_rms_adamw", "--optim.muon_lr, which is of AdamW's size"),
    "checkpoint.export_shard_gib": (5.0, "leave it out: a safetensors file has at most 5 GiB"),
    "stop.file": ("", "touch RUN/STOP"),
    "profile.shapes": (False, "--profile.trace true"),
    "profile.stacks": (False, "--profile.trace true"),
    "plan.calibrate": (False, "--plan.tflops N --plan.memory_gb_s N, as measured"),
    "plan.rank": (0, "leave it out: rank 0 is counted, which holds most"),
    "plan.rows": (12, "leave it out"),
    "plan.tokens": (0.0, "divide them by the plan's tok/s/GPU"),
    "plan.store_gb_s": (2.0, "leave it out: python -m bench.save measures a store"),
    "plan.failures_per_gpu_year": (0.19, "leave it out"),
    "speed.compile_cache": ("auto", "export TORCHINDUCTOR_CACHE_DIR=FOLDER, if /tmp is not the place"),
}  # fmt: skip
"""Fields that are no more: the default, as all runs train now, and the HINT. Typed, such a flag is an error;
in a recipe it is left out, with a warning if it differs from its default.
Defaults of fields that were hashed stay in the hash: checkpoints from before are of the same configuration.
A field of ADDED_LATER or NOT_TRAINED stays there.
"""


def config_hash(config: Config) -> str:
    """Hash of what is trained: equal for runs that differ only in where and how they are executed."""
    defaults = {name: spec.default for name, spec in FIELDS.items()}
    defaults |= {name: default for name, (default, _) in REMOVED.items()}
    trained = {
        name: value
        for name, value in (defaults | flatten(config)).items()
        if (name in TRAINED or not {name, name.partition(".")[0]} & NOT_TRAINED)
        and not (name in ADDED_LATER and value == defaults[name])
    }
    return hashlib.sha256(json.dumps(trained, sort_keys=True, default=str).encode()).hexdigest()[:16]
