"""Is training your model sharded the same as training it plainly? Starts the ranks itself and prints a table
and a verdict.

    python -m fsdp.parity
    python -m fsdp.parity --model.name my_package.models:build --data.name my_package.data:build --parity.ranks 4

takes train.py's flags, and --parity.ranks N (2), --parity.dtype fp64|fp32|bf16|fp16 (fp64), --parity.steps N
(20). Each mesh trains from the same initial weights on the same samples as an unsharded loop in one process;
the two share no other code. Compared are, for each mesh,

    gradients   loss, gradient norm and each parameter's gradient before any update, without clipping
    clipped     the same after clipping
    sgd         loss and norm of three steps of SGD without clipping, and each parameter after them
    as asked    loss and norm of N steps with the run's own optimizer, and each parameter after them

The table shows the largest relative difference of each. In fp64 that is the worst parameter's, and rounding
cannot hide a wrong reduction. In a lower precision, and in a model that computes in float32 inside whatever
is asked, it is the whole model's. Under a mesh that differs stands what differs most, and by which factor.
Exit code 0 where every mesh is within its bounds, else 1; 2 for a wrong flag.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from fsdp.base.errors import ShardrunError
from fsdp.config.command_line import RUN_FLAGS, CommandParser, one_of, whole_number
from fsdp.parity.compare import compare
from fsdp.parity.measure import ParityDifference
from fsdp.parity.options import BOUNDS, Comparison, ParityOptions, Row


def main(argv: Sequence[str]) -> int:
    try:
        asked = _parse(argv)
        return _show(
            asked, compare(asked, lambda text: print(f"fsdp.parity: {text}", file=sys.stderr, flush=True))
        )
    except ShardrunError as error:
        print(f"fsdp.parity: {error}", file=sys.stderr)
        return error.exit_code


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


def _show(asked: ParityOptions, found: Iterator[tuple[Row, list[ParityDifference]]]) -> int:
    """A line a mesh as soon as it is done, under it what differs; then the verdict."""
    wrong = total = 0
    print(
        f"{'mesh':<10} {'reshard':<8} {'micro-batches':<14} {'dtype':<6} "
        + " ".join(f"{t:<10}" for t in Comparison)
        + " verdict"
    )
    for row, differences in found:
        mesh, reshard = (
            f"{row.strategy} {row.replicate}×{row.shard}",
            "-" if row.strategy == "ddp" else row.reshard,
        )
        sizes = [max(d.size for d in differences if d.training is training) for training in Comparison]
        apart = [d for d in differences if not d.same]
        print(
            f"{mesh:<10} {reshard:<8} {row.micro_batches:<14} {asked.dtype:<6} "
            + " ".join(f"{size:<10.1e}" for size in sizes)
            + f" {'DIFFERS' if apart else 'same'}",
            flush=True,
        )
        for difference in apart:
            if difference.training is apart[0].training:  # the others follow from it
                print(f"  {difference}", flush=True)
        wrong, total = wrong + bool(apart), total + 1
    said = "every mesh trains as one process does" if not wrong else f"{wrong} of {total} meshes differ"
    verdict = "PARITY FAILS" if wrong else "parity holds"
    print(f"{verdict}: {said}, {asked.steps} steps on {asked.ranks} ranks in {asked.dtype}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
