"""Checks whether these nodes can train together, and names those to exclude.

    torchrun --nproc_per_node=4 -m fsdp.doctor          or under srun; alone it starts a rank a GPU, or two
    sbatch slurm/fsdp.sbatch --preflight                in place of a job, on the job's nodes

It prints a table, its findings with a HINT each and a verdict, and writes DIR/doctor: doctor.html,
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
from typing import NoReturn

from fsdp.base.errors import ConfigError, LaunchError, ShardrunError

ENDED = LaunchError.exit_code
MOST_S = 86400.0
COME_UP_S = 60.0
"""What the ranks that it starts itself have for their imports, before their own bound begins to run, and for
their end.
"""


class _Parser(argparse.ArgumentParser):
    """One line and a HINT, as everywhere."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}.", "python -m fsdp.doctor --help")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(
        prog="python -m fsdp.doctor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--dir", type=Path, default=Path("runs"), help="where checkpoints will lie (default: runs)"
    )
    parser.add_argument(
        "--limit-s",
        type=float,
        default=120.0,
        help="it ends after so many seconds, done or not (default: 120)",
    )
    parser.add_argument(
        "--ranks", type=int, default=0, help="alone: how many to start (default: a rank a GPU, or two)"
    )
    # how ranks tell the process that started them
    parser.add_argument("--verdict-to", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if not 5 <= options.limit_s <= MOST_S:
        parser.error(
            f"--limit-s {options.limit_s:g}: at least 5, which its stages take, and at most {MOST_S:.0f}"
        )
    if options.ranks < 0:
        parser.error(f"--ranks {options.ranks}: 0 starts a rank a GPU, or two")
    return options


def main(argv: Sequence[str]) -> int:
    try:
        options = parse(argv)
        from fsdp.dist.env import from_environment

        env = from_environment()
        if env.launcher == "a single process" and options.ranks != 1:
            return _start_ranks(options, env.device.type == "cuda")
        from fsdp.doctor.rank import as_rank

        return as_rank(options.dir.absolute(), options.limit_s, options.verdict_to)
    except ShardrunError as error:
        print(f"fsdp.doctor: {error}", file=sys.stderr)
        return error.exit_code


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
