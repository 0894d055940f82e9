"""Stop and kill runs at one layout of 4 ranks, and resume them at another:

    python -m tests.golden.layouts                               all pairs of five layouts
    python -m tests.golden.layouts --launcher srun --part 3/25   one of them, as each CI run does

With dropout (of a mixture: noise of its router) the killed run and one of forked ranks that is stopped at the
same step have equal bits; at the same layout also with an uninterrupted run. Without it a run that goes to
the other layout and back equals the uninterrupted one at shard 4 within 1e-9 in fp64: losses, norms and
exported weights. The launcher starts what goes on at the other layout. Each step is there once. The pairs
with expert ranks train a Mixtral. A difference leaves its folder.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.golden.__main__ import _part
from tests.golden.chain import Chain, Violation
from tests.golden.configurations import FP64, HSDP, INPUTS, STORIES, Configuration, write_data
from tests.golden.starts import FORKED_RANKS, LAUNCHERS, Launchers, launchers
from tests.golden.values import difference, values_of
from tests.models.exact_hf import build

RANKS, STEPS = 4, 20
LAYOUTS = {
    "shard 4": "--mesh.shard 4",
    "tensor 2": "--mesh.shard 2 --mesh.tensor 2",
    "context 2": "--mesh.shard 2 --mesh.context 2",
    "expert 2": "--mesh.shard 4 --mesh.expert 2",
    "hsdp": HSDP,
}
PAIRS = [*itertools.product(LAYOUTS, LAYOUTS)]
TRANSFORMER = f"{STORIES} {FP64} --model.args.heads 4 --model.args.dropout"
MIXTRAL = (
    "--model.name hf:{data}/mixtral --data.name tests.models.exact_hf:rows --data.args.widens Mixtral"
    f" {FP64} --model.args.router_jitter_noise"
)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.golden.layouts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--launcher", choices=(FORKED_RANKS, *LAUNCHERS), default=FORKED_RANKS)
    parser.add_argument("--part", type=_part, default=(1, 1), metavar="K/N", help="each N-th from the K-th")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    options = parser.parse_args(argv)
    os.environ.update({"OMP_NUM_THREADS": "1", "PYTHONPATH": str(INPUTS)})
    failed, (nth, count) = 0, options.part
    print(f"seed {options.seed}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="layouts-")).resolve()
    with launchers([options.launcher]) as usable:
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        write_data(folder / "data")
        build("Mixtral").save_pretrained(folder / "data/mixtral")  # type: ignore[operator]
        runs = Runs(folder, usable, options.launcher)
        if reason := usable.left_out.get(options.launcher):
            raise SystemExit(f"{options.launcher}: {reason}")
        for number, (first, second) in [*enumerate(PAIRS)][nth - 1 :: count]:
            began, text = time.monotonic(), ""
            try:
                runs.check(first, second, random.Random(options.seed + number))
            except Violation as violation:
                text = f": {violation}"
            failed += bool(text)
            took = time.monotonic() - began
            print(f"{'DIFFERS' if text else 'same':8}{first} → {second}, {took:.0f} s{text}", flush=True)
    if failed:
        return 1
    shutil.rmtree(folder)
    return 0


class Runs:
    """Those of all pairs, and the uninterrupted ones that several are compared with."""

    def __init__(self, folder: Path, usable: Launchers, launcher: str) -> None:
        self._folder, self._usable, self._launcher = folder, usable, launcher
        self._whole: dict[tuple[str, str], Chain] = {}

    def check(self, first: str, second: str, dice: random.Random) -> None:
        """Violation, unless all is as it should be."""
        model, layouts = TRANSFORMER, LAYOUTS
        if "expert 2" in (first, second):  # without an axis of their own tensor ranks divide no experts
            model, layouts = MIXTRAL, LAYOUTS | {"tensor 2": f"{LAYOUTS['tensor 2']} --mesh.expert 2"}
        noisy, there, name = f"{model} 0.1", self._launcher, f"{first}-{second}"
        killed, stopped = self._chain(f"{name}-killed", noisy), self._chain(f"{name}-stopped", noisy)
        # the step of a second save, before which the first is sealed
        killed.die_at(dice.randrange(11, STEPS - 2), (RANKS, layouts[first]))
        step = killed.newest_sealed()
        killed.live(there, (RANKS, layouts[second]))
        stopped.live(other=(RANKS, f"{layouts[first]} --train.stop_after {step}"))
        stopped.live(other=(RANKS, layouts[second]))
        killed.check_end(stopped.read())
        if first == second:
            killed.check_end(self.whole(noisy, first).read())
            return
        exact = self._chain(f"{name}-exact", f"{model} 0.0")
        for stop, layout in ((7, first), (13, second), (0, first)):
            launcher = there if layout == second else FORKED_RANKS
            exact.live(launcher, (RANKS, f"{layouts[layout]} --train.stop_after {stop}"))
        whole = self.whole(f"{model} 0.0", "shard 4")
        if text := difference(values_of(exact.run_dir), values_of(whole.run_dir)):
            raise Violation(text)

    def whole(self, flags: str, layout: str) -> Chain:
        if (flags, layout) not in self._whole:
            chain = self._whole[flags, layout] = self._chain(f"whole-{len(self._whole)}", flags)
            chain.live(other=(RANKS, LAYOUTS[layout]))
        return self._whole[flags, layout]

    def _chain(self, name: str, flags: str) -> Chain:
        configuration = Configuration(name, RANKS, flags)
        data, folder = self._folder / "data", self._folder / name.replace(" ", "")
        return Chain(configuration, folder, STEPS, keep=0, data=data, launchers=self._usable)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
