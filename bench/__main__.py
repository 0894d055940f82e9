"""make bench: the short form of each bench, one table after another.

python -m bench [--short]        bench.NAME alone takes the full form: python -m bench.save --help
"""

from __future__ import annotations

import subprocess
import sys
import time

SHORT = {
    "train": ["--short"],
    "start": ["--short"],
    "restart": ["--short"],
    "goodput": ["--short"],
    "scale": ["--short"],
    "start_memory": [],
    "save": ["--short"],
    "ray_tutorial": ["--short"],
}


def main(argv: list[str]) -> int:
    if argv not in ([], ["--short"]):
        print(__doc__, file=sys.stderr)
        return 2
    failed = []
    for name, flags in SHORT.items():
        print(f"\n== python -m bench.{name} {' '.join(flags)}", flush=True)
        began = time.monotonic()
        code = subprocess.run([sys.executable, "-m", f"bench.{name}", *flags], check=False).returncode
        print(f"== {name}: exit {code}, {time.monotonic() - began:.0f} s", flush=True)
        failed += [name] if code else []
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
