"""One line about a node of a Slurm job, for `sbatch slurm/fsdp.sbatch --dry-run`: devices, Python, torch.

python -m launch.check_node --node n2 --run runs/NAME --ranks 8
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from fsdp.base.errors import ShardrunError
from fsdp.dist import env


def devices(ranks: int) -> str:
    """The devices of this node's ranks; raises if a rank would have none."""
    kinds = [env.pick_device(rank) for rank in range(ranks)]
    return f"{ranks} ranks on {', '.join(sorted({str(kind) for kind in kinds}))}"


def nearest(folder: Path) -> Path:
    """The folder, or its closest parent that exists."""
    return folder if folder.is_dir() or folder == folder.parent else nearest(folder.parent)


def report(node: str, run: Path, ranks: int) -> list[str]:
    """Print what the node has, and return its problems."""
    import torch

    place = nearest(run)
    problems = [] if os.access(place, os.W_OK) else [f"{place} cannot be written"]
    try:
        env.check_torch()
        env.check_gpus_are_seen()
        found = devices(ranks)
    except ShardrunError as error:
        found = "no device for a rank"
        problems.append(str(error))
    python = f"Python {sys.version.split()[0]} at {sys.executable}"
    print(f"{node}: {found}; {python}; torch {torch.__version__}; {place} is here")
    return problems


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m launch.check_node", description=__doc__.splitlines()[0])
    parser.add_argument("--node", required=True)
    parser.add_argument("--run", type=Path, required=True, help="the run directory, which need not exist yet")
    parser.add_argument("--ranks", type=int, required=True, help="number of ranks on this node")
    options = parser.parse_args(argv)
    problems = report(options.node, options.run.absolute(), options.ranks)
    for problem in problems:
        print(f"{options.node}: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
