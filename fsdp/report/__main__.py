"""One HTML file that opens anywhere, offline:

    python -m fsdp.report RUN                 into RUN/report.html
    python -m fsdp.report A B --out both.html two runs over each other, and what differs

--out FILE puts it elsewhere; --no-samples leaves the trained model unasked.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from fsdp.errors import ConfigError, ShardrunError
from fsdp.report.page import page
from fsdp.report.read import read_run
from fsdp.report.samples import Samples, read_samples

USAGE = "python -m fsdp.report RUN [RUN] [--out FILE] [--no-samples]"


@dataclass(frozen=True)
class Asked:
    runs: list[Path]
    out: Path
    samples: bool


def main(argv: list[str]) -> int:
    if "--help" in argv or "-h" in argv:
        print(__doc__)
        return 0
    try:
        asked = _asked(argv)
        stories = [read_run(run) for run in asked.runs]
        samples = [read_samples(story.path) if asked.samples else Samples() for story in stories]
        asked.out.write_text(page(stories, samples), encoding="utf-8")
    except OSError as error:
        print(f"fsdp.report: {error.filename} cannot be written ({error.strerror}). HINT: --out FILE", file=sys.stderr)
        return 2
    except ShardrunError as error:
        print(f"fsdp.report: {error}", file=sys.stderr)
        return error.exit_code
    print(asked.out)
    return 0


def _asked(argv: list[str]) -> Asked:
    words, out = list(argv), ""
    if "--out" in words:
        at = words.index("--out")
        if at + 1 == len(words):
            raise ConfigError("--out has no value.", "--out report.html")
        out = words.pop(at + 1)
        words.pop(at)
    runs = [word for word in words if word != "--no-samples"]
    wrong = next((word for word in runs if word.startswith("--")), None)
    if wrong is not None:
        raise ConfigError(f"{wrong} is not a flag.", USAGE)
    if not 1 <= len(runs) <= 2:
        raise ConfigError(f"{len(runs)} runs were named, not one or two.", USAGE)
    return Asked([Path(run) for run in runs], Path(out) if out else Path(runs[0], "report.html"), "--no-samples" not in words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
