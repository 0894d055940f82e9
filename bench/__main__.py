"""The short form of each bench, one table after another (`make bench`): nine minutes on two free cores.

python -m bench        python -m bench.NAME runs one in full: python -m bench.save --help
"""

from __future__ import annotations

import subprocess
import sys

SHORT = ("train", "start", "restart", "save")


def main(argv: list[str]) -> int:
    if argv not in ([], ["--short"]):
        print(__doc__, file=sys.stderr)
        return 2
    failed = []
    for name in SHORT:
        print(f"\n== python -m bench.{name} --short", flush=True)
        if subprocess.run([sys.executable, "-m", f"bench.{name}", "--short"], check=False).returncode:
            failed.append(name)
    print("\n== the tables again: bench/results/*-short.md; full forms: bench/results/*.md")
    if failed:
        print(f"== failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
