"""The configuration: one frozen dataclass tree with every setting of a run.

    sections        the tree: every field with its default, help, unit and range; the fields as data
    read            a recipe (TOML) and flags `--section.field VALUE`, parsed to their fields, and the checks
    checks          fields that conflict, as a table
    write           writes a recipe, hashes the fields that define what is trained; removed fields
    aliases         names of other trainers → flags here
    trust           reads a run directory's config.toml, and limits the code that it may name
    command_line    the argument parser of the tools, --help and --help-all

Not here: what a field does, and checks that need the number of ranks (fsdp/distributed/mesh.py). Imports no
torch.
"""

from fsdp.config.checks import check
from fsdp.config.read import (
    accepts,
    check_labels,
    load,
    pair_flags,
    parse_free_value,
    parse_value,
    read_recipe,
    replace,
)
from fsdp.config.sections import (
    FIELDS,
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
    SpeedSection,
    StopSection,
    TrainSection,
    WatchSection,
    exists,
    expanded,
    flatten,
    profile_steps,
    reshard_policy,
    shown_value,
    with_home,
    worker_range,
)
from fsdp.config.write import as_tables, changed_flags, config_hash, run_toml, to_toml
