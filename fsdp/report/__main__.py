"""One HTML file that opens anywhere, offline:

    python -m fsdp.report RUN                 into RUN/report.html
    python -m fsdp.report A B --out both.html two runs side by side, and their differences
    python -m fsdp.report runs/sweep-* --out sweep.html  three runs and more as one table
    python -m fsdp.report RUN --serve         a page of a run in progress, on a free port of this machine
    python -m fsdp.report s3://bucket/runs/a  into a-report.html, in the working directory

--out FILE writes it elsewhere; --no-samples skips predictions of the trained model, which a table and a
served page do not have. A run directory is data: code that its config.toml names is imported only if
--trust-code NAME, which may be repeated, names it too
(docs/security.md).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from fsdp.base.errors import ConfigError, ShardrunError
from fsdp.base.streams import print_line
from fsdp.checkpoint.run_source import RunSource, opened, output_of
from fsdp.config import TRUST_HELP
from fsdp.config.command_line import CommandParser
from fsdp.record.console import print_last
from fsdp.report.page import MOST_SIDE_BY_SIDE, page
from fsdp.report.run_data import RunData, read_run
from fsdp.report.sample_section import LARGEST_EXPORT, SampleSection, read_samples
from fsdp.report.serve import REFRESH_S, serve
from fsdp.rundir.atomic_write import write_atomically

USAGE = "python -m fsdp.report runs/NAME"


@dataclass(frozen=True)
class ReportOptions:
    runs: list[str]
    out: Path | None
    samples: bool
    trusted: tuple[str, ...]
    serve: bool


def main(argv: list[str]) -> int:
    try:
        asked = _parse(argv)
        with ExitStack() as stack:
            exports = LARGEST_EXPORT if asked.samples and not asked.serve else 0
            sources = [stack.enter_context(opened(run, export_bytes=exports)) for run in asked.runs]
            if asked.serve:
                read_runs(sources)  # what is no run directory is an error now
                serve(lambda: live_page(sources))
                return 0
            out, samples = _write_page(asked, sources)
    except ShardrunError as error:
        print_line(f"fsdp.report: {error}")
        return error.exit_code
    for sample in samples:
        if sample.refused:
            print_line(f"fsdp.report: no samples: {sample.refused}")
    print_last(str(out))
    return 0


def _write_page(asked: ReportOptions, sources: Sequence[RunSource]) -> tuple[Path, list[SampleSection]]:
    stories = read_runs(sources)
    samples = [
        read_samples(story.path, asked.trusted) if asked.samples else SampleSection() for story in stories
    ]
    out = asked.out or output_of(asked.runs[0], "report.html")
    # the files of a URL are gone when the page is read: it has no links to them
    folder = None if any(source.url for source in sources) else out.parent
    _write(out, asked.out is not None, page(stories, samples, folder=folder))
    return out, samples


def read_runs(sources: Sequence[RunSource]) -> list[RunData]:
    """Runs of one name get their path or URL as name."""
    runs = [read_run(source.path, source.checkpoints) for source in sources]
    names = Counter(run.name for run in runs)
    return [
        replace(run, name=source.place) if names[run.name] > 1 else run
        for run, source in zip(runs, sources, strict=True)
    ]


def live_page(sources: Sequence[RunSource]) -> str:
    for source in sources:
        source.read(export_bytes=0)
    return page(read_runs(sources), refresh_s=REFRESH_S)


def _write(out: Path, named: bool, text: str) -> None:
    """To --out, or to RUN/report.html; if that is a link, the page replaces the link."""
    text = text.encode("utf-8", "replace").decode()  # a lone surrogate, which JSON can hold
    try:
        if named:
            out.write_text(text, encoding="utf-8")
        else:
            write_atomically(out, text)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written ({error.strerror}).", "--out report.html") from None


def _parse(argv: list[str]) -> ReportOptions:
    parser = CommandParser("fsdp.report", __doc__)
    parser.add_argument(
        "runs",
        nargs="*",
        metavar="RUN",
        help="run directories, folders or URLs: one, two to compare, or more for a table",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="the page (default: RUN/report.html; of a URL, NAME-report.html here)",
    )
    parser.add_argument("--no-samples", action="store_true", help="leave out the trained model's samples")
    parser.add_argument("--trust-code", action="append", default=[], metavar="NAME", help=TRUST_HELP)
    parser.add_argument(
        "--serve", action="store_true", help="serve the page to this machine while a run is in progress"
    )
    options = parser.parse(argv)
    if not options.runs:
        raise ConfigError("no run was named.", USAGE)
    if options.serve and options.out:
        raise ConfigError(
            f"--out {options.out} and --serve: a served page is not written.", "leave out --out"
        )
    few = len(options.runs) <= MOST_SIDE_BY_SIDE
    if not few and not options.out and not options.serve:
        raise ConfigError(f"{len(options.runs)} runs were named without --out.", "--out sweep.html")
    trusted = tuple(options.trust_code)
    return ReportOptions(options.runs, options.out, few and not options.no_samples, trusted, options.serve)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
