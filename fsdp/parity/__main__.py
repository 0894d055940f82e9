"""Is training your model sharded the same as training it plainly? Starts the ranks itself and prints a table and a verdict.

    python -m fsdp.parity
    python -m fsdp.parity --model.name my_package.models:build --data.name my_package.data:build --parity.ranks 4

takes train.py's flags, and --parity.ranks N (2), --parity.dtype fp64|fp32|bf16|fp16 (fp64), --parity.steps N (20). Each mesh
trains from the same initial weights on the same samples as an unsharded loop in one process that is written out below; compared
are all parameters at the end. In fp64 the difference is the worst parameter's, ‖a - b‖ / ‖b‖, and rounding cannot hide a wrong
reduction; in a lower precision it is the whole model's. Exit code 0 where every mesh is within its bound, else 1; 2 for a flag.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from fsdp import config as configuration
from fsdp.errors import ConfigError, ShardrunError
from fsdp.parity.asked import BOUNDS, Asked, Row
from fsdp.parity.compare import compare

DEFAULTS = {"ranks": "2", "dtype": "fp64", "steps": "20"}


def main(argv: Sequence[str]) -> int:
    if "--help" in argv or "-h" in argv:
        print(__doc__)
        return 0
    try:
        asked = _ask(argv)
        differences = compare(asked)
    except ShardrunError as error:
        print(f"fsdp.parity: {error}", file=sys.stderr)
        return error.exit_code
    return _show(asked, differences)


def _ask(argv: Sequence[str]) -> Asked:
    own, words = dict(DEFAULTS), []
    for name, value in configuration.pair_flags(argv):
        section, _, key = name.partition(".")
        if section != "parity":
            words += [f"--{name}={value}"]
        elif key not in own:
            raise ConfigError(f"--{name} is not a flag.", "--parity.ranks, --parity.dtype or --parity.steps")
        else:
            own[key] = value
    for key in ("ranks", "steps"):
        if not own[key].isdigit() or int(own[key]) < 1:
            raise ConfigError(f"--parity.{key} {own[key]} is not a whole number from 1.", f"--parity.{key} {DEFAULTS[key]}")
    if own["dtype"] not in BOUNDS:
        raise ConfigError(f"--parity.dtype {own['dtype']} is not one of {', '.join(BOUNDS)}.", "--parity.dtype fp64")
    asked = Asked(words, int(own["ranks"]), own["dtype"], int(own["steps"]))
    asked.config(None, "")  # a wrong flag is said before torch is loaded
    return asked


def _show(asked: Asked, differences: Mapping[Row, float]) -> int:
    bound = BOUNDS[asked.dtype]
    print(
        f"{'mesh':<10} {'reshard':<8} {'micro-batches':<14} {'dtype':<6} {'max relative difference':<24} {'bound':<7} verdict"
    )
    for row, found in differences.items():
        mesh, verdict = f"{row.strategy} {row.replicate}×{row.shard}", "same" if found <= bound else "DIFFERS"
        reshard = "-" if row.strategy == "ddp" else row.reshard
        print(f"{mesh:<10} {reshard:<8} {row.micro_batches:<14} {asked.dtype:<6} {found:<24.3e} {bound:<7.0e} {verdict}")
    wrong = sum(not found <= bound for found in differences.values())
    said = "every mesh trains as one process does" if not wrong else f"{wrong} of {len(differences)} meshes differ"
    verdict = "PARITY FAILS" if wrong else "parity holds"
    print(f"{verdict}: {said}, {asked.steps} steps on {asked.ranks} ranks in {asked.dtype}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
