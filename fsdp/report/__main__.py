"""One HTML file that opens anywhere, offline:

    python -m fsdp.report RUN                  into RUN/report.html
    python -m fsdp.report A B --out both.html  two runs side by side, and their differences

--out FILE writes it elsewhere. --no-samples leaves out text that the trained language model continues. A run
directory is data: code that its config.toml names is imported only if --trust-code NAME, which may be
repeated, names it too (docs/security.md).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from fsdp.base.errors import ConfigError, first_line
from fsdp.base.text import print_answer, print_line
from fsdp.config.command_line import CommandParser, prints_errors
from fsdp.config.trust import TRUST_HELP, CodeRefused
from fsdp.report.page import Sample, page
from fsdp.report.run_data import RunData, read_run
from fsdp.rundir import history
from fsdp.rundir.history import write_atomically

LARGEST_EXPORT = 2 << 30
"""A larger export is not loaded for a page."""
SAMPLE_TOKENS = 240


@prints_errors("fsdp.report")
def main(argv: Sequence[str]) -> int:
    parser = CommandParser("fsdp.report", __doc__)
    parser.add_argument("runs", nargs="*", metavar="RUN", help="one run directory, or two to compare")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the page (default: RUN/report.html)")
    parser.add_argument("--no-samples", action="store_true", help="leave out the language model's samples")
    parser.add_argument("--trust-code", action="append", default=[], metavar="NAME", help=TRUST_HELP)
    options = parser.parse(argv)
    if len(options.runs) != 1 and not (len(options.runs) == 2 and options.out):
        wanted = "one run, or two with --out both.html"
        raise ConfigError(f"{len(options.runs)} runs: a page shows {wanted}.", "python -m fsdp.report RUN")
    runs = [read_run(history.open_run(name).path) for name in options.runs]
    samples = [] if options.no_samples else [_sample(run, options.trust_code) for run in runs]
    file = options.out or runs[0].path / "report.html"
    text = page(runs, samples).encode("utf-8", "replace").decode()  # a lone surrogate, which JSON can hold
    try:
        write_atomically(file, text)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written ({error.strerror}).", "--out report.html") from None
    return print_answer(str(file), "fsdp.report")


def _sample(run: RunData, trusted: Sequence[str]) -> Sample:
    """Greedy and sampled text of a language model's export; the reason where there is none."""
    export = run.path / "full_model"
    if run.config.get("model.name") is None or not export.is_dir():
        return Sample()
    size = sum(file.stat().st_size for file in export.iterdir() if file.is_file())
    if size > LARGEST_EXPORT:
        return Sample(reason=f"the export has {size / 2**30:.1f} GiB: python -m fsdp.predict {run.path}")
    try:
        from fsdp.distributed.env import from_environment
        from fsdp.predict.trained import Text, answers, default_prompt, open_run

        with open_run(run.path, from_environment({}), (), trusted) as trained:
            if trained.data.info.kind != "text":
                return Sample()
            prompt = default_prompt(trained)
            texts = []
            for temperature, kind in ((0.0, "greedy"), (0.8, "sampled at temperature 0.8")):
                options = Text([prompt], raw=True, tokens=SAMPLE_TOKENS, temperature=temperature)
                texts.append((kind, answers(trained, options)))
            return Sample(prompt, texts)
    except CodeRefused as error:
        print_line(f"fsdp.report: no samples: {error}")
        return Sample(reason=str(error))
    except Exception as error:
        # A model, a data set or a damaged file can fail in any way; the rest of the page is still useful.
        cause = first_line(error).partition(" HINT: ")[0]
        return Sample(reason=f"the model could not be run ({type(error).__name__}: {cause})")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
