"""torchrun for slurm/node.sh: its exit code is that of the rank that failed first, which it names in one
line.

    python -m launch.agent FLAGS OF TORCHRUN train.py FLAGS

The rank has printed its own error. torchrun itself would print a traceback of its own on each node after it,
and end with exit code 1.
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
