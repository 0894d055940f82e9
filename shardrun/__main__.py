"""One command for the run and its tools:

    shardrun train --config recipes/digits.toml           one process
    torchrun --nproc_per_node=2 -m shardrun train         a rank on each of two GPUs, or two CPU processes
    shardrun local --ranks 2                              the same without torchrun

    shardrun plan | doctor | submit                       before: does it fit, are nodes fit, Slurm's queue
    shardrun report | checkpoint | predict | parity       after: the run's page, its checkpoints, its model
    shardrun tokenize                                     a corpus as tokens

`shardrun NAME --help` describes each. In a clone the same are `python train.py`, `python -m launch.local` and
`python -m fsdp.NAME`.
"""

from __future__ import annotations

import difflib
import os
import runpy
import sys

import shardrun
from fsdp.base.text import INSTALLED, print_answer

MODULES = {
    "train": "train", "local": "launch.local", "submit": "launch.submit", "ray_predict": "launch.ray_predict",
    **{name: f"fsdp.{name}" for name in (
        "plan", "report", "doctor", "checkpoint", "predict", "parity", "tokenize",
    )},
}  # fmt: skip
"""What each command runs, as `python -m` would."""


def main() -> int:
    name, *rest = sys.argv[1:] or ["--help"]
    if name in ("--help", "-h"):
        return print_answer((__doc__ or "").strip(), "shardrun")
    if name not in MODULES:
        near = difflib.get_close_matches(name, MODULES, n=1)
        hint = f"shardrun {near[0]}" if near else "shardrun --help"
        print(f"shardrun: {name} is not one of {', '.join(MODULES)}. HINT: {hint}", file=sys.stderr)
        return 2
    if shardrun.IS_INSTALLED:  # hints name this command
        os.environ[INSTALLED] = "1"
        # for children that run `python -m fsdp.…`; this process has it on sys.path
        os.environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, (str(shardrun.CODE), os.environ.get("PYTHONPATH", "")))
        )
    sys.argv = [f"shardrun {name}", *rest]
    runpy.run_module(MODULES[name], run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
