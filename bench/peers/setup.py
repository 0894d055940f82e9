"""An environment for each peer: its own pinned packages first, then those of this interpreter (the same
torch).

    python -m bench.peers.setup [NAME …]        into .cache/peers/NAME

A peer that is not installed or cannot run here is listed with the reason under every table.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / ".cache" / "peers"


@dataclass(frozen=True)
class Peer:
    """Packages to install, and code that tests the installation."""

    packages: tuple[str, ...]
    proof: str


PEERS = {
    "accelerate": Peer(("accelerate==1.15.0",), "import accelerate"),
    "lightning": Peer(("lightning==2.6.6",), "import bench.peers.fabric"),
}


def python_of(name: str) -> Path:
    return HOME / name / "bin" / "python"


def missing(name: str) -> str:
    """Why this peer cannot run here; empty if it can."""
    installed = (HOME / name / "READY").exists()
    return "" if installed else f"not installed: python -m bench.peers.setup {name}"


def set_up(name: str) -> None:
    """Installs and tests one peer. Without a network its package may be this interpreter's own."""
    home, python = HOME / name, str(python_of(name))
    shutil.rmtree(home, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    place = subprocess.check_output(
        [python, "-c", "import sysconfig as s; print(s.get_path('purelib'))"], text=True
    )
    Path(place.strip(), "after_its_own.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *PEERS[name].packages], check=False)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(
        [python, "-c", f"{PEERS[name].proof}; import torch"], env=environment, cwd=ROOT, check=True
    )
    (home / "READY").touch()


def main(names: list[str]) -> int:
    if unknown := [name for name in names if name not in PEERS]:
        hint = f"python -m bench.peers.setup {' '.join(PEERS)}"
        print(f"unknown peer {unknown[0]!r}. HINT: {hint}", file=sys.stderr)
        return 2
    for name in names or PEERS:
        set_up(name)
        print(f"{name:<12} {missing(name) or f'ready in {HOME / name}'}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
