"""The configuration: one frozen dataclass tree, the whole truth of a run.

    sections.py        the tree: every knob with its default, help, unit and range
    fields.py          the fields as data, `section.field` → type, default, help
    help.py            --help and --help-all
    values.py          one value from its text, within its type and range
    reading.py         a recipe (TOML) first, flags `--section.field value` over it, then the checks
    aliases.py         what people type who come from another trainer → our flags
    checks.py          what two knobs may not say together; checks_memory.py those that save memory or time
    trust.py           a run directory's own config.toml, and the code that it may name
    writing.py         back to a recipe, and the hash of what is trained

Not here: what a knob does, and what depends on the number of ranks (fsdp/dist/mesh.py). Nothing here knows
torch.
"""

from fsdp.config.checks import check
from fsdp.config.fields import FIELDS, FieldSpec, flatten
from fsdp.config.help import all_fields, common_fields, help_asked
from fsdp.config.reading import load, pair_flags, read_recipe, replace
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
from fsdp.config.trust import TRUST_HELP, CodeRefused, check_store, load_run_config
from fsdp.config.values import parse_free_value, parse_value, profile_steps, reshard_policy, worker_range
from fsdp.config.writing import config_hash, run_toml, to_toml

__all__ = [
    "FIELDS", "LAUNCHERS_OWN", "TRUST_HELP", "Args", "CheckpointSection", "CodeRefused", "CommSection", "Config",
    "DataSection", "FieldSpec", "LoraSection", "MemorySection", "MeshSection", "ModelSection", "OptimSection",
    "PlanSection", "PrecisionSection", "ProfileSection", "RaySection", "RunSection", "SpeedSection",
    "StopSection", "TrainSection", "WatchSection", "all_fields", "check", "check_store", "common_fields", "config_hash", "flatten",
    "help_asked", "load", "load_run_config", "pair_flags", "parse_free_value", "parse_value", "profile_steps",
    "read_recipe", "replace", "reshard_policy", "run_toml", "to_toml", "worker_range",
]  # fmt: skip
