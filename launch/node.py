"""What slurm/node.sh starts on a node of a Slurm job:

    python -m launch.node ranks FLAGS OF TORCHRUN train.py FLAGS
    python -m launch.node check NODE RUN RANKS

`ranks` is torchrun with the exit code of the rank that failed first, which it names in one line: the rank has
printed its own error, and torchrun itself would print a traceback after it, on each node, and end with 1.
`check` prints one line about the node (devices, Python, torch), for `sbatch slurm/fsdp.sbatch --dry-run`.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from fsdp.base.errors import ShardrunError
from fsdp.dist import env


def ranks(argv: Sequence[str]) -> int:
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.disable(logging.ERROR)  # torchrun's own report of the same failure, in this process alone
    try:
        run.run(run.parse_args(list(argv)))
    except ChildFailedError as error:
        rank, first = error.get_first_failure()
        code = first.exitcode
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        print(f"torchrun: rank {rank} ended first on this node, with {how}", file=sys.stderr)
        return code if code >= 0 else 128 - code
    return 0


def check(node: str, run: Path, count: int) -> int:
    """Print what the node has, and its problems, for which the exit code is 1. RUN need not exist yet."""
    import torch

    folder = next(parent for parent in (run, *run.parents) if parent.is_dir())
    problems = [] if os.access(folder, os.W_OK) else [f"{folder} cannot be written"]
    devices = "no device for a rank"
    try:
        env.check_torch()
        env.check_gpus_are_seen()
        kinds = sorted({str(env.pick_device(rank)) for rank in range(count)})
        devices = f"{count} ranks on {', '.join(kinds)}"
    except ShardrunError as error:
        problems.append(str(error))
    python = f"Python {sys.version.split()[0]} at {sys.executable}"
    print(f"{node}: {devices}; {python}; torch {torch.__version__}; {folder} is here")
    for problem in problems:
        print(f"{node}: {problem}", file=sys.stderr)
    return 1 if problems else 0


def main(argv: Sequence[str]) -> int:
    if argv[0] == "ranks":
        return ranks(argv[1:])
    return check(argv[1], Path(argv[2]).absolute(), int(argv[3]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
