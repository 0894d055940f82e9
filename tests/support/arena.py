"""Three processes that take the lock of one run directory, all in the namespaces of this program.

    python -m tests.support.arena UID STALE_S      in the run directory; prints two results as JSON

The first takes the lock. The second tries while the first lives, the third after the first was killed. Both
run as user UID.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from fsdp.base.errors import ShardrunError
from fsdp.rundir.lock import Folder
from tests.support.locks import acquire

FORK = multiprocessing.get_context("fork")
HERE = Path()
"""Reached through the working directory: another user may not pass the folders above it."""
LONG_S = 60.0


def hold(told: Connection) -> None:
    acquire(HERE, "torchrun")
    told.send("held")
    told.recv()


def want(told: Connection, user: int, stale_s: float) -> None:
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    try:
        held = acquire(HERE, "srun", stale_s=stale_s)
        told.send(held.took_over)
        held.release()
    except ShardrunError as error:
        told.send(f"refused: {error}")


def main() -> None:
    user, stale_s = int(sys.argv[1]), float(sys.argv[2])
    Folder.beat_s = 0.05
    HERE.chmod(0o777)
    ours, theirs = multiprocessing.Pipe()
    holder = FORK.Process(target=hold, args=(theirs,))
    holder.start()
    assert ours.recv() == "held"
    came = [asked(user, LONG_S)]
    holder.kill()
    holder.join()
    came.append(asked(user, stale_s))
    print(json.dumps(came))


def asked(user: int, stale_s: float) -> str:
    ours, theirs = multiprocessing.Pipe()
    other = FORK.Process(target=want, args=(theirs, user, stale_s))
    other.start()
    found = str(ours.recv())
    other.join()
    return found


if __name__ == "__main__":
    main()
