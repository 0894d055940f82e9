"""torchrun as slurm/node.sh starts it: it ends with the exit code of the rank that failed first, and says so
in one line.

    python -m launch.agent FLAGS OF TORCHRUN train.py FLAGS

The rank itself has printed its error. torchrun would bury that under a traceback of its own for each node,
and end with 1.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Sequence

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def main(argv: Sequence[str]) -> int:
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
