"""Check that sharded training of your model equals unsharded training. Starts its own ranks.

    python -m fsdp.parity
    python -m fsdp.parity --model.name my_models:build --data.name my_data:build --parity.ranks 4

It takes train.py's flags, and --parity.ranks N (2), --parity.dtype fp64|fp32|bf16|fp16 (fp64) and
--parity.steps N (20). Each mesh trains from the same initial weights on the same samples as a plain unsharded
loop in one process, which has a loss, clipping and optimizer of its own. For each mesh it compares

    gradients   loss, gradient norm and each parameter's gradient before any update, without clipping
    sgd         loss and gradient norm of three SGD steps with clipping, and each parameter after them
    configured  loss and gradient norm of N steps with the configured optimizer, and each parameter after them

and prints the largest relative difference of each in a table. In fp64 it is that of the worst parameter, and
rounding cannot hide a wrong reduction. In lower precisions, and in a model with float32 computations inside,
it is that of the whole model. A mesh that differs is followed by its largest difference and, if there is one,
the factor. A mesh that the flags or the model do not allow is "not possible", with the reason. Exit code 0 if
every possible mesh is within its bounds, 1 if not, 2 for a wrong flag or if no mesh is possible.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from fsdp.config.command_line import RUN_FLAGS, CommandParser, one_of, prints_errors, whole_number
from fsdp.parity.compare import BOUNDS, Comparison, ParityDifference, ParityOptions, Row, compare
from fsdp.watch.failure import ProcessExit


@prints_errors("fsdp.parity")
def main(argv: Sequence[str]) -> int:
    asked = _parse(argv)
    return _show(
        asked, compare(asked, lambda text: print(f"fsdp.parity: {text}", file=sys.stderr, flush=True))
    )


def _parse(argv: Sequence[str]) -> ParityOptions:
    parser = CommandParser("fsdp.parity", __doc__, epilog=RUN_FLAGS)
    for name, kind, default, text in (
        ("ranks", whole_number(1), 2, "ranks to compare with one process (default: 2)"),
        ("dtype", one_of(*BOUNDS), "fp64", "fp64, fp32, bf16 or fp16 (default: fp64)"),
        ("steps", whole_number(1), 20, "steps with the run's own optimizer (default: 20)"),
    ):
        parser.add_argument(f"--parity.{name}", dest=name, type=kind, default=default, help=text)
    options, flags = parser.parse_with_run_flags(argv)
    asked = ParityOptions(flags, options.ranks, options.dtype, options.steps)
    asked.config(None, "")  # a wrong flag is an error before torch is loaded
    return asked


def _show(asked: ParityOptions, judged: Iterator[tuple[Row, list[ParityDifference] | str]]) -> int:
    """Prints a line per mesh as soon as it is done, with its differences below; then the verdict."""
    wrong = compared = total = 0
    print(
        f"{'mesh':<10} {'reshard':<8} {'micro-batches':<14} {'dtype':<6} "
        + " ".join(f"{t:<10}" for t in Comparison)
        + " verdict"
    )
    for row, differences in judged:
        total += 1
        reshard = "-" if row.strategy == "ddp" else row.reshard
        mesh = f"{row.strategy} {row.replicate}×{row.shard}"
        line = f"{mesh:<10} {reshard:<8} {row.micro_batches:<14} {asked.dtype:<6}"
        if isinstance(differences, str):
            print(f"{line} not possible: {differences}", flush=True)
            continue
        sizes = [max(d.size for d in differences if d.training is training) for training in Comparison]
        apart = [d for d in differences if not d.same]
        sized = " ".join(f"{size:<10.1e}" for size in sizes)
        print(f"{line} {sized} {'DIFFERS' if apart else 'same'}", flush=True)
        for difference in apart:
            if difference.training is apart[0].training:  # later differences follow from the first
                print(f"  {difference}", flush=True)
        wrong, compared = wrong + bool(apart), compared + 1
    more = f", {total - compared} of {total} meshes are not possible" if compared < total else ""
    every = f"every {'possible ' if more else ''}mesh trains as one process does"
    verdict, code = f"parity holds: {every}", 0
    if wrong:
        verdict, code = f"PARITY FAILS: {wrong} of {compared} meshes differ", 1
    elif not compared:
        verdict, code = "PARITY IS NOT KNOWN: no mesh was compared", 2
    print(f"{verdict}{more}, {asked.steps} steps on {asked.ranks} ranks in {asked.dtype}")
    return code


if __name__ == "__main__":
    exiting = ProcessExit()
    sys.exit(exiting.leave(main(sys.argv[1:])))
