"""One HTML file that opens anywhere, offline:

    python -m fsdp.report RUN                 into RUN/report.html
    python -m fsdp.report A B --out both.html two runs over each other, and what differs

--out FILE puts it elsewhere; --no-samples leaves the trained model unasked. A run directory is data: code
that its config.toml names is imported only where --trust-code NAME names it too, which may be repeated
(docs/security.md).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from fsdp.base.errors import ConfigError, ShardrunError
from fsdp.report.page import page
from fsdp.report.run_data import read_run
from fsdp.report.sample_section import SampleSection, read_samples
from fsdp.rundir.atomic_write import write_atomically

USAGE = "python -m fsdp.report RUN [RUN] [--out FILE] [--no-samples] [--trust-code NAME]"


@dataclass(frozen=True)
class ReportOptions:
    runs: list[Path]
    out: Path | None
    samples: bool
    trusted: tuple[str, ...]


def main(argv: list[str]) -> int:
    if "--help" in argv or "-h" in argv:
        print(__doc__)
        return 0
    try:
        asked = _asked(argv)
        stories = [read_run(run) for run in asked.runs]
        samples = [
            read_samples(story.path, asked.trusted) if asked.samples else SampleSection() for story in stories
        ]
        out = _write(asked, page(stories, samples))
    except ShardrunError as error:
        print(f"fsdp.report: {error}", file=sys.stderr)
        return error.exit_code
    for said in samples:
        if said.refused:
            print(f"fsdp.report: no samples: {said.refused}", file=sys.stderr)
    print(out)
    return 0


def _write(asked: ReportOptions, text: str) -> Path:
    """Into the file that the person named, or into RUN/report.html: if that is a link, the page replaces the
    link.
    """
    text = text.encode("utf-8", "replace").decode()  # a lone surrogate, which JSON can hold
    out = asked.out or asked.runs[0] / "report.html"
    try:
        if asked.out is None:
            write_atomically(out, text)
        else:
            out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{out} cannot be written ({error.strerror}).", "--out FILE") from None
    return out


def _asked(argv: list[str]) -> ReportOptions:
    words = list(argv)
    out = _values(words, "--out", "report.html")
    trusted = _values(words, "--trust-code", "my_module:build")
    runs = [word for word in words if word != "--no-samples"]
    wrong = next((word for word in runs if word.startswith("--")), None)
    if wrong is not None:
        raise ConfigError(f"{wrong} is not a flag.", USAGE)
    if not 1 <= len(runs) <= 2:
        raise ConfigError(f"{len(runs)} runs were named, not one or two.", USAGE)
    return ReportOptions(
        [Path(run) for run in runs],
        Path(out[-1]) if out else None,
        "--no-samples" not in words,
        tuple(trusted),
    )


def _values(words: list[str], flag: str, example: str) -> list[str]:
    """The values of a flag, in their order; it and they are taken out of the words."""
    found: list[str] = []
    while flag in words:
        at = words.index(flag)
        if at + 1 == len(words):
            raise ConfigError(f"{flag} has no value.", f"{flag} {example}")
        found.append(words.pop(at + 1))
        words.pop(at)
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
