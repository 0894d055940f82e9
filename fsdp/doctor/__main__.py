"""Checks whether these nodes can train together, and names those to exclude.

    torchrun --nproc_per_node=4 -m fsdp.doctor          or under srun; alone it starts a rank a GPU, or two
    sbatch slurm/fsdp.sbatch --preflight                in place of a job, on the job's nodes

It prints a table, its findings with a HINT each and a verdict, and writes DIR/doctor: doctor.txt,
doctor.json, and exclude, for sbatch's --exclude. Exit code 0 if all nodes are fit, 3 if one is not, 2 for a
wrong flag.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from fsdp.base.errors import ConfigError, LaunchError
from fsdp.config.command_line import CommandParser, number, prints_errors, whole_number

ENDED = LaunchError.exit_code
LEAST_S, MOST_S = 5.0, 86400.0
"""Bounds of --limit-s: the stages take the first."""
COME_UP_S = 60.0
"""What the ranks that it starts itself have for their imports, before their own bound begins to run, and for
their end.
"""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser("fsdp.doctor", __doc__)
    parser.add_argument(
        "--dir", type=Path, default=Path("runs"), help="folder of the checkpoints to come (default: runs)"
    )
    parser.add_argument(
        "--limit-s",
        type=number(LEAST_S, MOST_S),
        default=120.0,
        help="seconds after which it ends, done or not (default: 120)",
    )
    parser.add_argument(
        "--ranks",
        type=whole_number(),
        default=0,
        help="in a single process: ranks to start (default: 0, a rank per GPU, or two)",
    )
    parser.add_argument(
        "--nccl-log",
        type=Path,
        action="append",
        metavar="FILE",
        help="read NCCL's transport from a log of NCCL_DEBUG=INFO, and check nothing else; may be repeated",
    )
    # the file in which a rank leaves its exit code for the process that started it
    parser.add_argument("--verdict-to", type=Path, help=argparse.SUPPRESS)
    return parser.parse(argv)


@prints_errors("fsdp.doctor")
def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    if options.nccl_log:
        from fsdp.dist.nccl_log import NOTHING
        from fsdp.doctor import measure

        seen = measure.transport_of(options.nccl_log, 0, ())
        if seen["summary"] == NOTHING:
            raise ConfigError(
                f"{', '.join(map(str, options.nccl_log))} has no line of NCCL.",
                "start the run with NCCL_DEBUG=INFO, and give the file of its output",
            )
        print(measure.transport_text(seen))
        return 0
    from fsdp.dist.env import from_environment

    env = from_environment()
    if env.launcher == "a single process" and options.ranks != 1:
        return _start_ranks(options, env.device.type == "cuda")
    from fsdp.doctor.rank import as_rank

    return as_rank(options.dir.absolute(), options.limit_s, options.verdict_to)


def _start_ranks(options: argparse.Namespace, on_cuda: bool) -> int:
    """Start ranks on this node alone. They exit with 0: torchrun would report any other code as a crash.

    The verdict comes in a file.
    """
    import torch

    ranks = options.ranks or (torch.cuda.device_count() if on_cuda else 2)
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        verdict = Path(folder, "code")
        flags = ["--dir", str(options.dir), "--limit-s", str(options.limit_s), "--verdict-to", str(verdict)]
        starter = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
            "-m",
        ]
        environ = {"OMP_NUM_THREADS": "1", **os.environ}
        command = [*starter, "fsdp.doctor", *flags]
        with subprocess.Popen(command, env=environ) as process:
            try:
                ended = process.wait(options.limit_s + COME_UP_S)
            except subprocess.TimeoutExpired:
                process.terminate()  # torchrun then ends its ranks, after half a minute by SIGKILL
                process.wait()
                raise LaunchError(
                    f"{ranks} ranks have not ended {COME_UP_S:.0f} s after --limit-s {options.limit_s:g}.",
                    "a higher --limit-s, or fewer --ranks",
                ) from None
        return int(verdict.read_text()) if verdict.exists() else ended or ENDED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
