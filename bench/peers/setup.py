"""An environment for each peer: its own pinned packages first, then those of the interpreter that runs this (the same torch).

    python -m bench.peers.setup [NAME …]        into .cache/peers/NAME; a second call finds them there

What cannot be installed or cannot run on a machine is told with the reason, here and under every table.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / ".cache" / "peers"


@dataclass(frozen=True)
class Peer:
    """What pip installs, what proves that it is there, and why it may not run."""

    packages: tuple[str, ...]
    proof: str
    why_not: str = ""
    """Why it is only listed."""
    environment: tuple[tuple[str, str], ...] = ()


PEERS = {
    "accelerate": Peer(("accelerate==1.15.0",), "import accelerate"),
    "lightning": Peer(("lightning==2.6.6",), "import bench.peers.fabric"),
    "deepspeed": Peer(
        ("deepspeed==0.19.8",), "import deepspeed", environment=(("DS_ACCELERATOR", "cpu"), ("DS_IGNORE_CUDA_DETECTION", "1"))
    ),
    "torchtitan": Peer(
        ("torchtitan==0.3.0",), "import torchtitan",
        why_not="it trains on CUDA devices only: the one attention that it has, FlexAttention, has no backward on a CPU",
    ),
}  # fmt: skip


def python_of(name: str) -> Path:
    return HOME / name / "bin" / "python"


def environment_of(name: str) -> dict[str, str]:
    return dict(PEERS[name].environment) if name in PEERS else {}


def missing(name: str) -> str:
    """Why this peer cannot be run here; empty where it can."""
    peer = PEERS[name]
    if peer.why_not:
        return peer.why_not
    reason = HOME / name / "REASON"
    if reason.exists():
        return reason.read_text().strip()
    return "" if (HOME / name / "READY").exists() else f"not set up: python -m bench.peers.setup {name}"


def set_up(name: str) -> str:
    """Install and try one peer; why not, or nothing."""
    peer, home = PEERS[name], HOME / name
    if peer.why_not:
        return peer.why_not
    if not (home / "READY").exists():
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        own = Path(
            subprocess.check_output(
                [python_of(name), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
            ).strip()
        )
        (own / "after_its_own.pth").write_text(sysconfig.get_path("purelib") + "\n")
        why = _install(name, peer)
        (home / ("REASON" if why else "READY")).write_text(why + "\n")
        (home / ("READY" if why else "REASON")).unlink(missing_ok=True)
    return missing(name)


def _install(name: str, peer: Peer) -> str:
    environment = {**os.environ, **environment_of(name), "PYTHONPATH": str(ROOT)}
    pip = [str(python_of(name)), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *peer.packages]
    for words in (pip, [str(python_of(name)), "-c", f"{peer.proof}; import torch; print(torch.__version__)"]):
        done = subprocess.run(words, env=environment, capture_output=True, text=True, cwd=ROOT)
        if done.returncode:
            last = (done.stderr.strip() or "no word").splitlines()[-1]
            return f"{' '.join(words[1:4])} …: {last[:300]}"
    return ""


def main(names: list[str]) -> int:
    for name in names or PEERS:
        why = set_up(name)
        print(f"{name:<12} {' '.join(PEERS[name].packages):<24} {why or 'ready in ' + str(HOME / name)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
