"""The configuration: one frozen dataclass tree with every setting of a run.

    sections        the tree: every field with its default, help, unit and range
    fields          the fields as data, `section.field` → type, default, help
    help            --help and --help-all
    sources         [[data.sources]], the tables of a mixture
    values          parses one value and checks its type and range
    limits          reads files within limits of size and depth, as they may be a stranger's
    reading         loads a recipe (TOML), applies flags `--section.field VALUE`, runs the checks
    aliases         names of other trainers → flags here
    checks          fields that conflict
    checks_memory   fields that save memory or time, and conflict
    trust           reads a run directory's config.toml, and limits the code that it may name
    writing         writes a recipe, and hashes the fields that define what is trained
    command_line    the argument parser of the tools

Not here: what a field does, and checks that need the number of ranks (fsdp/dist/mesh.py). Imports no torch.
"""

from fsdp.config.checks import check
from fsdp.config.fields import FIELDS, FieldSpec, flatten
from fsdp.config.help import all_fields, common_fields, help_asked
from fsdp.config.reading import accepts, load, pair_flags, read_recipe, replace
from fsdp.config.sections import (
    LAUNCHERS_OWN,
    Args,
    CheckpointSection,
    CommSection,
    Config,
    DataSection,
    LoraSection,
    MemorySection,
    MeshSection,
    MixedSource,
    ModelSection,
    OptimSection,
    PlanSection,
    PrecisionSection,
    ProfileSection,
    RaySection,
    RunSection,
    SpeedSection,
    StopSection,
    TrainSection,
    WatchSection,
)
from fsdp.config.sources import as_tables, check_labels
from fsdp.config.trust import TRUST_HELP, CodeRefused, check_store, load_run_config
from fsdp.config.values import parse_free_value, parse_value, profile_steps, reshard_policy, worker_range
from fsdp.config.writing import changed_flags, config_hash, run_toml, shown_value, to_toml

__all__ = [
    "FIELDS", "LAUNCHERS_OWN", "TRUST_HELP", "Args", "CheckpointSection", "CodeRefused", "CommSection",
    "Config", "DataSection", "FieldSpec", "LoraSection", "MemorySection", "MeshSection", "MixedSource",
    "ModelSection",
    "OptimSection", "PlanSection", "PrecisionSection", "ProfileSection", "RaySection", "RunSection",
    "SpeedSection", "StopSection", "TrainSection", "WatchSection", "accepts", "all_fields", "as_tables",
    "changed_flags", "check", "check_labels", "check_store",
    "common_fields", "config_hash", "flatten", "help_asked", "load", "load_run_config", "pair_flags",
    "parse_free_value", "parse_value", "profile_steps", "read_recipe", "replace", "reshard_policy",
    "run_toml", "shown_value", "to_toml", "worker_range",
]  # fmt: skip
