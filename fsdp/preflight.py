"""What every start looks at before it trains: do the ranks run the same programs, and do their nodes see one run directory.

A few milliseconds and one exchange, always. What takes seconds (devices, links, rates of storage) is fsdp/doctor's, which
begins with these facts too.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import platform
import secrets
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from fsdp import agree
from fsdp.env import DistEnv
from fsdp.errors import LaunchError

log = logging.getLogger(__name__)

PACKAGES = ("numpy", "triton", "torchvision", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
MUST_BE_EQUAL = ("torch", "cuda", "nccl")
SAME_FILE_S = 5.0
"""How long a shared folder may take to show another node's file: NFS keeps what it knows of a folder for some seconds."""


@dataclass(frozen=True)
class Facts:
    """What one rank runs on. Everything here is a word or a number, so that it can be sent and compared."""

    rank: int
    node: int
    host: str
    python: str
    torch: str
    cuda: str
    nccl: str
    driver: str
    device: str
    packages: Mapping[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def facts_of(env: DistEnv) -> Facts:
    on_cuda = env.device.type == "cuda"
    return Facts(
        rank=env.rank,
        node=env.node_rank,
        host=socket.gethostname(),
        python=platform.python_version(),
        torch=str(torch.__version__),
        cuda=str(torch.version.cuda or ""),
        nccl=".".join(map(str, torch.cuda.nccl.version())) if on_cuda else "",
        driver=_driver(),
        device=torch.cuda.get_device_name(env.device) if on_cuda else "cpu",
        packages=_packages(),
    )


def _driver() -> str:
    """The kernel module's own word: no program is started for it."""
    try:
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0].split("  ")[1].strip()
    except (OSError, IndexError):
        return ""


def _packages() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


# ---------------------------------------------------------------- comparing


@dataclass(frozen=True)
class Difference:
    """One thing that is not equal: what most have, and who has another."""

    what: str
    usual: str
    others: Mapping[int, str]
    """Rank → what it has instead."""
    fatal: bool

    def say(self, everyone: Sequence[Facts]) -> str:
        hosts = {facts.rank: facts.host for facts in everyone}
        shown = [f"rank {rank} on {hosts[rank]} has {value or 'none'}" for rank, value in list(self.others.items())[:4]]
        more = f", and {len(self.others) - 4} more" if len(self.others) > 4 else ""
        return f"{self.what} is {self.usual or 'none'} on most ranks, but {', '.join(shown)}{more}"


def differences(everyone: Sequence[Facts]) -> list[Difference]:
    """The most common value of each fact counts as the right one; among equals rank 0's."""
    names = [*MUST_BE_EQUAL, "python", "driver", "device"]
    found = [_difference(name, {f.rank: str(getattr(f, name)) for f in everyone}) for name in names]
    for package in PACKAGES:
        found.append(_difference(package, {f.rank: f.packages.get(package, "") for f in everyone}))
    return [one for one in found if one is not None]


def _difference(what: str, values: Mapping[int, str]) -> Difference | None:
    usual = Counter(values.values()).most_common(1)[0][0]  # among equals the first, which is rank 0's
    others = {rank: value for rank, value in values.items() if value != usual}
    return Difference(what, usual, others, what in MUST_BE_EQUAL) if others else None


# ---------------------------------------------------------------- at each start


def check(env: DistEnv, run: Path) -> None:
    """LaunchError on every rank alike where ranks cannot work together; what is only odd is said."""
    if env.world_size == 1:
        return
    token = agree.on_main(env.rank, lambda: _lay(run)) if env.num_nodes > 1 else ""
    seen = not token or env.local_rank != 0 or _sees(run / token)
    told: list[tuple[Facts, bool]] = agree.everyones((facts_of(env), seen))
    if token and env.is_main:
        (run / token).unlink(missing_ok=True)
    everyone = [facts for facts, _ in told]
    found = differences(everyone)
    for one in found:
        if one.fatal:
            raise LaunchError(
                f"{one.say(everyone)}.", "one environment that all nodes see: VENV in slurm/cluster.env, or a container"
            )
        if env.is_main:
            log.warning("%s", one.say(everyone))
    blind = sorted({facts.host for facts, sees in told if not sees})
    if blind and env.is_main:
        # Only checkpoints need the folder on every node; where they lie elsewhere this is no error.
        log.warning("%s does not see rank 0's run directory %s: is it on shared storage?", ", ".join(blind), run)


def _lay(run: Path) -> str:
    name = f".seen-by-all-{secrets.token_hex(4)}"
    (run / name).write_text(socket.gethostname())
    return name


def _sees(file: Path, patience_s: float = SAME_FILE_S) -> bool:
    deadline = time.monotonic() + patience_s
    while not file.exists():
        if time.monotonic() > deadline:
            return False
        os.listdir(file.parent) if file.parent.is_dir() else None  # noqa: PTH208  asks the server anew where exists() does not
        time.sleep(0.05)
    return True
