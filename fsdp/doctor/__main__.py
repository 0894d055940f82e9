"""Are these nodes fit to train together?

    torchrun --nproc_per_node=4 -m fsdp.doctor          or under srun; alone it starts a rank a GPU, or two
    sbatch slurm/fsdp.sbatch --preflight                in a job's place, on the job's nodes

It prints a table, a verdict and what to do, and writes DIR/doctor: doctor.html, doctor.json, and exclude, for sbatch's
--exclude. Exit code 0 where all is fit, 3 where a node falls out, 2 for a wrong flag.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

from fsdp.errors import ConfigError, LaunchError, ShardrunError

ENDED = 3


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
    parser.add_argument("--dir", type=Path, default=Path("runs"), help="where checkpoints will lie (default: runs)")
    parser.add_argument(
        "--limit-s", type=float, default=120.0, help="it ends after so many seconds, done or not (default: 120)"
    )
    parser.add_argument("--ranks", type=int, default=0, help="alone: how many to start (default: a rank a GPU, or two)")
    parser.add_argument("--verdict-to", type=Path, help=argparse.SUPPRESS)  # how ranks tell the process that started them
    options = parser.parse_args(argv)
    if options.limit_s < 5:
        parser.error(f"--limit-s {options.limit_s:g} is shorter than its shortest stage takes: at least 5")
    return options


def main(argv: Sequence[str]) -> int:
    try:
        options = parse(argv)
        from fsdp.env import from_environment

        env = from_environment()
        if env.launcher == "a single process" and options.ranks != 1:
            return _start_ranks(options, env.device.type == "cuda")
        code = as_rank(options)
    except ShardrunError as error:
        print(f"fsdp.doctor: {error}", file=sys.stderr)
        return error.exit_code
    return 0 if options.verdict_to else code


def _start_ranks(options: argparse.Namespace, on_cuda: bool) -> int:
    """On this node alone. The ranks end well in any case: the verdict comes as a file, or the starter would call it a crash."""
    import torch

    ranks = options.ranks or (torch.cuda.device_count() if on_cuda else 2)
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        told = Path(folder, "code")
        words = ["--dir", str(options.dir), "--limit-s", str(options.limit_s), "--verdict-to", str(told)]
        starter = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
        environ = {"OMP_NUM_THREADS": "1", **os.environ}
        ended = subprocess.run([*starter, "fsdp.doctor", *words], env=environ).returncode
        return int(told.read_text()) if told.exists() else ended or ENDED


def as_rank(options: argparse.Namespace) -> int:
    import torch.distributed as dist

    from fsdp.doctor import examine
    from fsdp.doctor.verdict import Scene
    from fsdp.env import from_environment, meeting_store

    env, began = from_environment(), time.monotonic()

    def tell(scene: Scene) -> int:
        return _tell(scene, options, time.monotonic() - began)

    store = dist.PrefixStore("doctor", meeting_store(env, options.limit_s))
    visit = examine.Visit(env, store, options.dir.absolute(), began + options.limit_s)
    with examine.bounded(visit, options.limit_s, tell):
        try:
            examine.examine(visit)
        except (RuntimeError, dist.DistError) as error:
            # A stage that failed for one fails for others too: what each saw is told, and rank 0 tells of all.
            visit.tell(failure=str(error).splitlines()[0][:200])
            if not env.is_main:
                return LaunchError.exit_code
        if env.is_main:
            code = tell(examine.scene_of(visit, store))
            store.set("verdict", str(code))
            store.wait([f"bye/{rank}" for rank in range(1, env.world_size)], timedelta(seconds=examine.LEAVE_S))
            return code
        code = int(store.get("verdict"))
        store.set(f"bye/{env.rank}", "")
        return code


def _tell(scene: object, options: argparse.Namespace, seconds: float) -> int:
    from fsdp.doctor import table
    from fsdp.doctor.verdict import Scene, judge

    assert isinstance(scene, Scene)
    verdict = judge(scene)
    print(table.text(scene, verdict, seconds), flush=True)
    code = 0 if verdict.fit else ENDED
    folder = options.dir.absolute() / "doctor"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "doctor.html").write_text(table.page(scene, verdict, seconds), encoding="utf-8")
        record = {"verdict": str(verdict), "fit": verdict.fit, "findings": [asdict(one) for one in verdict.findings]}
        (folder / "doctor.json").write_text(json.dumps(record | {"looks": scene.looks}, indent=1) + "\n", encoding="utf-8")
        (folder / "exclude").write_text(",".join(verdict.exclude) + "\n" if verdict.exclude else "", encoding="utf-8")
    except OSError as error:
        print(f"fsdp.doctor: {folder} cannot be written ({error.strerror}): the table above is all there is", file=sys.stderr)
    if options.verdict_to:
        options.verdict_to.write_text(str(code))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
