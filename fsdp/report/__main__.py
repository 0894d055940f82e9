"""One HTML file that opens anywhere, offline:

    python -m fsdp.report RUN                 into RUN/report.html
    python -m fsdp.report A B --out both.html two runs over each other, and what differs

--out FILE puts it elsewhere; --no-samples leaves the trained model unasked.
"""

from __future__ import annotations

import sys
from pathlib import Path

from fsdp.errors import ConfigError, ShardrunError
from fsdp.report.page import page
from fsdp.report.read import read_run
from fsdp.report.samples import Samples, read_samples

USAGE = "python -m fsdp.report RUN [RUN] [--out FILE] [--no-samples]"


def main(argv: list[str]) -> int:
    if "--help" in argv or "-h" in argv:
        print(__doc__)
        return 0
    try:
        words = list(argv)
        out = ""
        if "--out" in words:
            at = words.index("--out")
            if at + 1 == len(words):
                raise ConfigError("--out has no value.", "--out report.html")
            out = words.pop(at + 1)
            words.pop(at)
        asks = "--no-samples" not in words
        words = [word for word in words if word != "--no-samples"]
        wrong = [word for word in words if word.startswith("--")]
        if wrong or not 1 <= len(words) <= 2:
            raise ConfigError(
                f"{wrong[0]} is not a flag." if wrong else f"{len(words)} runs were named, not one or two.", USAGE
            )
        stories = [read_run(Path(word)) for word in words]
        samples = [read_samples(story.path) if asks else Samples() for story in stories]
        place = Path(out) if out else Path(words[0], "report.html")
        place.write_text(page(stories, samples), encoding="utf-8")
    except OSError as error:
        print(f"fsdp.report: {error.filename} cannot be written ({error.strerror}). HINT: --out FILE", file=sys.stderr)
        return 2
    except ShardrunError as error:
        print(f"fsdp.report: {error}", file=sys.stderr)
        return error.exit_code
    print(place)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
