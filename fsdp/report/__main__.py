"""One HTML file that opens anywhere, offline:

    python -m fsdp.report RUN                 into RUN/report.html
    python -m fsdp.report A B --out both.html two runs side by side, and their differences

--out FILE writes it elsewhere; --no-samples skips predictions of the trained model. A run directory is data:
code that its config.toml names is imported only if --trust-code NAME, which may be repeated, names it too
(docs/security.md).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from fsdp.base.errors import ConfigError, ShardrunError
from fsdp.config import TRUST_HELP
from fsdp.config.command_line import CommandParser
from fsdp.report.page import page
from fsdp.report.run_data import read_run
from fsdp.report.sample_section import SampleSection, read_samples
from fsdp.rundir.atomic_write import write_atomically

USAGE = "python -m fsdp.report RUN, or RUN RUN"


@dataclass(frozen=True)
class ReportOptions:
    runs: list[Path]
    out: Path | None
    samples: bool
    trusted: tuple[str, ...]


def main(argv: list[str]) -> int:
    try:
        asked = _parse(argv)
        stories = [read_run(run) for run in asked.runs]
        samples = [
            read_samples(story.path, asked.trusted) if asked.samples else SampleSection() for story in stories
        ]
        out = _write(asked, page(stories, samples))
    except ShardrunError as error:
        print(f"fsdp.report: {error}", file=sys.stderr)
        return error.exit_code
    for sample in samples:
        if sample.refused:
            print(f"fsdp.report: no samples: {sample.refused}", file=sys.stderr)
    print(out)
    return 0


def _write(asked: ReportOptions, text: str) -> Path:
    """To --out, or to RUN/report.html; if that is a link, the page replaces the link."""
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


def _parse(argv: list[str]) -> ReportOptions:
    parser = CommandParser("fsdp.report", __doc__)
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="one or two run directories")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the page (default: RUN/report.html)")
    parser.add_argument("--no-samples", action="store_true", help="leave out the trained model's samples")
    parser.add_argument("--trust-code", action="append", default=[], metavar="NAME", help=TRUST_HELP)
    options = parser.parse(argv)
    if not 1 <= len(options.runs) <= 2:
        raise ConfigError(f"{len(options.runs)} runs were named, not one or two.", USAGE)
    return ReportOptions(options.runs, options.out, not options.no_samples, tuple(options.trust_code))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
