"""The short form of each bench, one table after another (`make bench`). Planned for ten minutes on two free
cores.

    python -m bench [--short]        python -m bench.NAME runs one in full: python -m bench.save --help

After nine minutes no further bench starts; those left out are listed with their commands.
"""

from __future__ import annotations

import subprocess
import sys
import time

from bench.peers import setup
from bench.peers.roster import ROSTER
from bench.train import SHORT as WORKS

SHORT = ("train", "start", "restart", "save")
MINUTES, LAST_BEGIN = 10, 9


def tell_peers() -> None:
    for name in setup.PEERS:
        said = setup.missing(name) or f"ready in {setup.HOME / name}"
        print(f"{name:<12} {' '.join(setup.PEERS[name].packages):<20} {said}", flush=True)


def main(argv: list[str]) -> int:
    if argv not in ([], ["--short"]):
        print(__doc__, file=sys.stderr)
        return 2
    began, took = time.monotonic(), dict[str, tuple[int, float]]()
    # Those that the short forms run beside, within a bound; the full forms know more.
    wanted = [ROSTER[name].peer for names in WORKS.values() for name in names if ROSTER[name].peer]
    setup.set_up_all(wanted)
    tell_peers()
    for name in SHORT:
        if time.monotonic() - began > 60 * LAST_BEGIN:
            break
        print(f"\n== python -m bench.{name} --short", flush=True)
        start = time.monotonic()
        code = subprocess.run([sys.executable, "-m", f"bench.{name}", "--short"], check=False).returncode
        took[name] = (code, time.monotonic() - start)
    whole = time.monotonic() - began
    print("\n== which took: " + ", ".join(f"{name} {seconds:.0f} s" for name, (_, seconds) in took.items()))
    print(
        f"== {whole / 60:.1f} of {MINUTES} minutes; the tables again: bench/results/*-short.md; full "
        f"forms: bench/results/*.md"
    )
    for name in SHORT[len(took) :]:
        print(f"== left out, {LAST_BEGIN} minutes were over: python -m bench.{name} --short")
    failed = [f"{name} (exit {code})" for name, (code, _) in took.items() if code]
    if failed:
        print(f"== failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
