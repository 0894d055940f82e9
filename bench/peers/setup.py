"""An environment for each peer: its own pinned packages first, then those of this interpreter (the same
torch).

    python -m bench.peers.setup [NAME …]        into .cache/peers/NAME; a second call reuses them

A peer that cannot be installed or run is listed with the reason, here and under every table. A bench sets its
peers up within a time limit; one that failed is not retried until this command is run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / ".cache" / "peers"
PTH = "after_its_own.pth"
BOUND_S = 90.0
"""What a bench waits for all of its peers together; pip by hand takes as long as it needs."""


@dataclass(frozen=True)
class Peer:
    """Packages to install, code that tests the installation, and a reason if it cannot run."""

    packages: tuple[str, ...]
    proof: str
    why_not: str = ""
    """Why it is only listed."""
    environment: tuple[tuple[str, str], ...] = ()


PEERS = {
    "accelerate": Peer(("accelerate==1.15.0",), "import accelerate"),
    "lightning": Peer(("lightning==2.6.6",), "import bench.peers.fabric"),
    "deepspeed": Peer(
        ("deepspeed==0.19.8",), "import deepspeed",
        environment=(("DS_ACCELERATOR", "cpu"), ("DS_IGNORE_CUDA_DETECTION", "1"))
    ),
    "torchtitan": Peer(
        ("torchtitan==0.3.0",), "import torchtitan",
        why_not="it trains on CUDA devices only: the one attention that it has, FlexAttention, "
        "has no backward on a CPU",
    ),
}  # fmt: skip


def python_of(name: str) -> Path:
    return HOME / name / "bin" / "python"


def environment_of(name: str) -> dict[str, str]:
    return dict(PEERS[name].environment) if name in PEERS else {}


def missing(name: str) -> str:
    """Why this peer cannot run here; empty if it can."""
    peer, home = PEERS[name], HOME / name
    if peer.why_not:
        return peer.why_not
    by_hand = f"python -m bench.peers.setup {name}"
    if not _of_this_interpreter(home):
        return f"not installed here: {by_hand}"
    reason = home / "REASON"
    return f"{reason.read_text().strip()} (again: {by_hand})" if reason.exists() else ""


def _of_this_interpreter(home: Path) -> bool:
    """Whether it was set up beside the torch of this interpreter."""
    tried = (home / "READY").exists() or (home / "REASON").exists()
    return tried and (home / "BESIDE").exists() and (home / "BESIDE").read_text() == _beside()


def _beside() -> str:
    """The packages of this interpreter, searched after the peer's own."""
    return sysconfig.get_path("purelib") + "\n"


def set_up_all(names: Iterable[str], bound_s: float = BOUND_S) -> None:
    """Sets up those that were not tried yet, one after another, within the limit."""
    deadline = time.monotonic() + bound_s
    for name in names:
        if not PEERS[name].why_not and not _of_this_interpreter(HOME / name):
            set_up(name, max(1.0, deadline - time.monotonic()))


def set_up(name: str, bound_s: float | None = None) -> str:
    """Installs and tests one peer; returns the reason of a failure."""
    peer, home = PEERS[name], HOME / name
    if peer.why_not or ((home / "READY").exists() and _of_this_interpreter(home)):
        return peer.why_not
    shutil.rmtree(home, ignore_errors=True)
    try:
        why = _install(name, peer, None if bound_s is None else time.monotonic() + bound_s)
    except subprocess.TimeoutExpired:
        why = f"not installed within {bound_s:.0f} s"
    home.mkdir(parents=True, exist_ok=True)
    (home / "BESIDE").write_text(_beside())
    (home / ("REASON" if why else "READY")).write_text(why + "\n")
    return missing(name)


def _install(name: str, peer: Peer, deadline: float | None) -> str:
    """Environment, packages, import; returns the error. Past the deadline: subprocess.TimeoutExpired."""
    environment, python = (
        {**os.environ, **environment_of(name), "PYTHONPATH": str(ROOT)},
        str(python_of(name)),
    )
    steps = (
        [sys.executable, "-m", "venv", str(HOME / name)],
        [
            python,
            "-c",
            f"import sysconfig as s, pathlib as p; p.Path(s.get_path('purelib'), "
            f"{PTH!r}).write_text({_beside()!r})",
        ],
        [
            python,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--retries",
            "1",
            "--timeout",  # without a network a name may be waited for
            "8",
            *peer.packages,
        ],
    )
    proof = [python, "-c", f"{peer.proof}; import torch; print(torch.__version__)"]
    failed = ""
    for words in (*steps, proof):
        left = None if deadline is None else max(0.1, deadline - time.monotonic())
        done = subprocess.run(words, env=environment, capture_output=True, text=True, cwd=ROOT, timeout=left)
        if done.returncode:
            last = (done.stderr.strip() or "no word").splitlines()[-1]
            failed = failed or f"{' '.join(words[1:4])} …: {last[:300]}"
            if "pip" not in words:
                return failed
    return ""  # without a network pip fails, and the package may be this interpreter's own


def main(names: list[str]) -> int:
    if unknown := [name for name in names if name not in PEERS]:
        print(
            f"unknown peer {unknown[0]!r}. HINT: python -m bench.peers.setup {' '.join(PEERS)}",
            file=sys.stderr,
        )
        return 2
    for name in names or PEERS:
        why = set_up(name)
        print(
            f"{name:<12} {' '.join(PEERS[name].packages):<24} {why or 'ready in ' + str(HOME / name)}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
