"""Checks before training: equal versions on all ranks, free devices, and one run directory.

They take a few milliseconds and one exchange of objects. Measurements that take seconds (devices, links,
storage) are in fsdp/doctor, which starts with these facts too.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import secrets
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fsdp.base.errors import LaunchError
from fsdp.base.text import listed
from fsdp.dist import collectives
from fsdp.dist.env import DistEnv

log = logging.getLogger(__name__)

MUST_BE_EQUAL = ("torch", "cuda", "nccl")
TAKEN = 0.1
"""The share of a device's memory that other processes may hold without a warning."""
SAME_FILE_S = 5.0
"""How long a shared folder may take to show another node's file: NFS caches a folder for some seconds."""


@dataclass(frozen=True)
class RankFacts:
    """What one rank runs on, in strings and numbers, which can be sent and compared."""

    rank: int
    node: int
    host: str
    python: str
    torch: str
    cuda: str
    nccl: str
    driver: str
    device: str
    taken: float = 0.0
    """The share of its device's memory that is not free before the run allocates any."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def facts_of(env: DistEnv) -> RankFacts:
    on_cuda = env.device.type == "cuda"
    return RankFacts(
        rank=env.rank,
        node=env.node_rank,
        host=socket.gethostname(),
        python=platform.python_version(),
        torch=str(torch.__version__),
        cuda=str(torch.version.cuda or ""),
        nccl=".".join(map(str, torch.cuda.nccl.version())) if on_cuda else "",
        driver=_driver(),
        device=torch.cuda.get_device_name(env.device) if on_cuda else "cpu",
        taken=_taken(env.device) if on_cuda else 0.0,
    )


def _taken(device: torch.device) -> float:
    free, total = torch.cuda.mem_get_info(device)
    return 1 - free / total


def _driver() -> str:
    """The driver's version as the kernel module gives it: no program is started."""
    try:
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0].split("  ")[1].strip()
    except (OSError, IndexError):
        return ""


# ---------------------------------------------------------------- comparing


@dataclass(frozen=True)
class NodeDifference:
    """One fact that differs: its most common value, and the ranks with another one."""

    what: str
    usual: str
    others: Mapping[int, str]
    """Rank → its value."""
    fatal: bool

    def describe(self, everyone: Sequence[RankFacts]) -> str:
        hosts = {facts.rank: facts.host for facts in everyone}
        odd = [f"rank {rank} on {hosts[rank]} has {value or 'none'}" for rank, value in self.others.items()]
        return f"{self.what} is {self.usual or 'none'} on most ranks, but {listed(odd, 4)}"


def differences(everyone: Sequence[RankFacts]) -> list[NodeDifference]:
    """The facts that differ. The most common value is the expected one; at a tie, rank 0's."""
    names = [*MUST_BE_EQUAL, "python", "driver", "device"]
    found = []
    for name in names:
        values = {f.rank: str(getattr(f, name)) for f in everyone}
        usual = Counter(values.values()).most_common(1)[0][0]  # at a tie the first, which is rank 0's
        others = {rank: value for rank, value in values.items() if value != usual}
        if others:
            found.append(NodeDifference(name, usual, others, name in MUST_BE_EQUAL))
    return found


# ---------------------------------------------------------------- at each start


def check(env: DistEnv, run: Path | None, patience_s: float = SAME_FILE_S) -> None:
    """LaunchError on every rank if the ranks cannot train together; rank 0 logs other differences. `run` is
    the folder that the nodes share, if they share one.
    """
    if env.world_size == 1:
        return
    token = ""
    if run is not None and env.num_nodes > 1:
        token = collectives.on_main(env.rank, lambda: _create_probe(run))
    seen = not token or env.local_rank != 0 or run is None or appears(run / token, patience_s)
    found: list[tuple[RankFacts, bool]] = collectives.all_gather_objects((facts_of(env), seen))
    if token and run is not None and env.is_main:
        (run / token).unlink(missing_ok=True)
    everyone = [facts for facts, _ in found]
    for difference in differences(everyone):
        if difference.fatal:
            hint = "one environment that all nodes see: VENV in slurm/cluster.env, or a container"
            raise LaunchError(f"{difference.describe(everyone)}.", hint)
        if env.is_main:
            log.warning("%s", difference.describe(everyone))
    for facts in everyone if env.is_main else ():
        if facts.taken > TAKEN:
            message = "rank %d on %s: other processes hold %.0f%% of the memory of its %s. "
            message += "HINT: nvidia-smi lists them"
            log.warning(message, facts.rank, facts.host, 100 * facts.taken, facts.device)
    if env.is_main and (blind := sorted({facts.host for facts, sees in found if not sees})):
        # Only checkpoints need the folder on every node, and --checkpoint.dir may be elsewhere: no error.
        message = "%s does not see rank 0's run directory %s: is it on shared storage?"
        log.warning(message, ", ".join(blind), run)


def _create_probe(run: Path) -> str:
    name = f".seen-by-all-{secrets.token_hex(4)}"
    (run / name).write_text(socket.gethostname())
    return name


def appears(file: Path, patience_s: float = SAME_FILE_S) -> bool:
    """Whether a shared folder shows a file, which another node may have written just now."""
    deadline = time.monotonic() + patience_s
    # of os: the methods of Path raise for a folder that this node may not search
    while not os.path.exists(file):  # noqa: PTH110
        if time.monotonic() > deadline:
            return False
        with contextlib.suppress(OSError):  # there is no such folder here, or it may not be read
            os.listdir(file.parent)  # noqa: PTH208  refreshes NFS's cache; exists() does not
        time.sleep(0.05)
    return True
