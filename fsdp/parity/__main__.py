"""Check that sharded training of your model equals unsharded training. Starts its own ranks.

    python -m fsdp.parity
    python -m fsdp.parity --model.name my_models:build --data.name my_data:build --parity.ranks 4

It takes train.py's flags, and --parity.ranks N (2), --parity.dtype fp64|fp32|bf16|fp16 (fp64) and
--parity.steps N (20). Each mesh trains from the same initial weights on the same samples as a plain unsharded
loop in one process, which has a loss, clipping and optimizer of its own. For each mesh it compares

    gradients   loss, gradient norm and each parameter's gradient before any update, without clipping
    sgd         loss and gradient norm of three SGD steps with clipping, and each parameter after them
    configured  loss and gradient norm of N steps with the configured optimizer, and each parameter after them

and prints the largest relative difference of each in a table. In fp64 rounding cannot hide a wrong reduction.
A mesh that differs is followed by its largest differences, with both values. A mesh that the flags or the
model do not allow is "not possible", with the reason; of axes (context, tensor, expert) that is one line.
--mesh.context, --mesh.tensor or --mesh.expert N compares meshes of these sizes alone. Exit code 0 if every
possible mesh is within its bounds, 1 if not, 2 for a wrong flag or if no mesh is possible.
"""

# torch is imported within functions: a wrong flag is reported before torch is loaded.

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fsdp import config as configuration
from fsdp.base.errors import ConfigError, TrainingError
from fsdp.config import Config, OptimSection
from fsdp.config.command_line import RUN_FLAGS, CommandParser, one_of, prints_errors, whole_number
from fsdp.distributed.mesh import MeshSizes
from fsdp.rundir.history import write_atomically
from fsdp.watch.status_page import ProcessExit

if TYPE_CHECKING:
    import torch

    from fsdp.distributed.env import DistEnv
    from fsdp.parity.reference import TrainingRecord
    from fsdp.run.job import Job

BOUNDS = {"fp64": 1e-10, "fp32": 1e-4, "bf16": 2e-2, "fp16": 2e-2}
FAR = 2.0**20
"""The learning rate of a step from which its gradient is computed; the initial parameter is then rounding."""
CLIP = 2.0**-10
"""A norm to which nearly any gradient is clipped."""
ADAPTIVE = 1e4
"""Factor on the bound for Adam, which may divide by rounding alone (eps is 1e-8)."""
ROUNDED_INSIDE, ROUNDED_CONFIGURED = 1e-5, 1e-2
"""Bounds of a model that computes in float32 inside: of gradients and SGD, and of the run's own optimizer."""
NO_GRADIENT, ROUNDED_NO_GRADIENT = 1e-12, 1e-5
"""Of the model's gradient norm, and of one with float32 inside: less is rounding, which Adam amplifies."""
GROUP_TIMEOUT_S = 300.0
AXES = ((2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (1, 2, 4), (4, 1, 1))
"""Sizes of context, tensor and expert."""


class Comparison(StrEnum):
    """A training of both sides. The first two are SGD's, which shows a wrong factor that Adam cancels."""

    GRADIENT = "gradients"
    SGD = "sgd"
    CONFIGURED = "configured"


@dataclass(frozen=True)
class Row:
    """One mesh."""

    sizes: MeshSizes
    reshard: str
    micro_batches: int

    @property
    def axes(self) -> set[str]:
        """Those beside replicate and shard."""
        return {axis for axis in ("context", "tensor", "expert") if getattr(self.sizes, axis) > 1}


def rows(ranks: int) -> list[Row]:
    """The meshes of data ranks alone, some with several micro-batches."""
    modes = (("true", 1), ("false", 2), ("step", 2), *([("2", 1)] if ranks % 2 == 0 and ranks > 2 else []))
    fsdp = [Row(MeshSizes("fsdp", 1, ranks), reshard, micro) for reshard, micro in modes]
    copies = [MeshSizes("ddp", ranks, 1)] if ranks > 1 else []
    copies += [MeshSizes("hsdp", 2, ranks // 2)] if ranks % 2 == 0 else []
    return fsdp + [Row(sizes, "true", micro) for sizes in copies for micro in (1, 2)]


def axis_rows(ranks: int, asked: tuple[int, ...] = (1, 1, 1)) -> list[Row]:
    """The meshes with context, tensor and expert ranks: of the sizes that are asked for, or those of AXES."""
    known = [(c, t, e) for c, t, e in AXES if ranks % (c * t) == ranks % e == 0]
    meshes = []
    for context, tensor, expert in [asked] if max(asked) > 1 else known:
        shard = max(1, ranks // (context * tensor))
        meshes.append(MeshSizes("fsdp", 1, shard, context, tensor, expert))
        if shard % 2 == 0 and ranks // 2 % expert == 0:
            meshes.append(MeshSizes("hsdp", 2, shard // 2, context, tensor, expert))
    return [Row(sizes, "true", micro) for sizes in meshes for micro in (1, 2)]


@dataclass(frozen=True)
class ParityOptions:
    """The run's flags, the number of ranks, the dtype and the number of steps."""

    words: list[str]
    ranks: int
    dtype: str
    steps: int

    @functools.cached_property
    def meshes(self) -> list[Row]:
        mesh = configuration.load(self.words).mesh
        asked = mesh.context, mesh.tensor, mesh.expert
        return ([] if max(asked) > 1 else rows(self.ranks)) + axis_rows(self.ranks, asked)

    @functools.cached_property
    def plain(self) -> Config:
        """The plain loop's configuration is the first mesh's."""
        return self.config(rows(self.ranks)[0])

    def config(self, row: Row, folder: str = "", training: Comparison = Comparison.CONFIGURED) -> Config:
        """The run's own configuration for a mesh and a training."""
        fixed: dict[str, Any] = {
            "backend": "torchrun", "run.dir": folder, "stop.deadline_s": 0.0,
            "train.steps": self.steps, "train.epochs": 0, "train.stop_after": 0,
            "train.eval_every_steps": 0, "train.eval_every_epochs": 0.0, "train.eval_samples": 1,
            "checkpoint.dir": "", "checkpoint.every_steps": 10**9, "checkpoint.every_minutes": 0.0,
            "checkpoint.every_epochs": 0.0, "checkpoint.resume": "auto", "checkpoint.keep_best": 0,
            "checkpoint.export": True, "checkpoint.export_format": "torch", "checkpoint.export_dtype": "auto",
            "run.matmul_precision": "highest",  # the plain loop's; TF32 is coarser than the bound of fp32
            # In fp16 no gradient overflows at this scale: the plain loop has none, and skips no step.
            "precision.loss_scale": 256.0, "precision.reduce": "auto", "precision.param": self.dtype,
            "precision.master": "fp64" if self.dtype == "fp64" else "fp32",
            **({"precision.output": "auto"} if self.dtype == "fp64" else {}),
            **{f"mesh.{name}": size for name, size in dataclasses.asdict(row.sizes).items()},
            "mesh.reshard_after_forward": row.reshard,
        }  # fmt: skip
        if training is not Comparison.CONFIGURED:
            # Settings of one optimizer are refused beside another. SGD has momentum: without states
            # --memory.nvme optimizer has nothing to move.
            sgd = dataclasses.asdict(
                OptimSection(name="sgd", momentum=0.5, schedule="constant", warmup_steps=0)
            )
            lr, clip, steps = (FAR, 0.0, 1) if training is Comparison.GRADIENT else (0.01 / CLIP, CLIP, 3)
            fixed |= {f"optim.{name}": value for name, value in sgd.items()} | {"optim.lr": lr}
            fixed |= {"train.clip_grad_norm": clip, "train.steps": steps}
        samples = -(-configuration.load(self.words, fixed).train.global_batch // row.sizes.data)
        fixed["train.micro_batch"] = -(-samples // row.micro_batches)
        return configuration.load(self.words, fixed)


@prints_errors("fsdp.parity")
def main(argv: Sequence[str]) -> int:
    parser = CommandParser("fsdp.parity", __doc__, epilog=RUN_FLAGS)
    for name, kind, default, text in (
        ("ranks", whole_number(1), 2, "ranks to compare with one process (default: 2)"),
        ("dtype", one_of(*BOUNDS), "fp64", "fp64, fp32, bf16 or fp16 (default: fp64)"),
        ("steps", whole_number(1), 20, "steps with the run's own optimizer (default: 20)"),
    ):
        parser.add_argument(f"--parity.{name}", dest=name, type=kind, default=default, help=text)
    options, flags = parser.parse_with_run_flags(argv)
    asked = ParityOptions(flags, options.ranks, options.dtype, options.steps)
    assert asked.plain  # a wrong flag is an error before torch is loaded
    return compare(asked, asked.meshes)


def compare(options: ParityOptions, meshes: Sequence[Row]) -> int:
    """Prints a line per mesh as soon as it is done, with its differences below; then the verdict."""
    import torch

    torch.set_num_threads(_threads(options))
    wanted, gpus = options.plain.run.device, torch.cuda.device_count()
    device = "cuda" if wanted == "cuda" or (wanted == "auto" and gpus >= options.ranks) else "cpu"
    job, judge, wrong, compared = job_of(options, torch.device(device)), None, 0, 0
    width = max([10, *(len(str(row.sizes)) for row in meshes)])
    impossible = list[set[str]]()
    print(f"{'mesh':<{width}} {'reshard':<8} {'micro-batches':<14} {'dtype':<6} ", end="")
    print(" ".join(f"{training:<10}" for training in Comparison), "verdict", flush=True)
    for row in meshes:
        if row.axes in impossible:
            continue
        reshard = "-" if row.sizes.strategy == "ddp" else row.reshard
        line = f"{row.sizes!s:<{width}} {reshard:<8} {row.micro_batches:<14} {options.dtype:<6}"
        with tempfile.TemporaryDirectory(prefix="parity-") as folder:
            if reason := start_ranks(options, row, folder, device):
                print(f"{line} not possible: {reason}", flush=True)
                impossible += [row.axes] if row.axes else []
                continue
            judge = judge or Judge(options, job, torch.device(device))
            differences = judge.differences(row, folder)
        sizes = [max(d.size for d in differences if d.training is training) for training in Comparison]
        apart = [d for d in differences if d.size > d.bound]
        sized = " ".join(f"{size:<10.1e}" for size in sizes)
        print(f"{line} {sized} {'DIFFERS' if apart else 'same'}", flush=True)
        for difference in apart:
            if difference.training is apart[0].training:  # later differences follow from the first
                print(f"  {difference}", flush=True)
        wrong, compared = wrong + bool(apart), compared + 1
    more = (
        f", {len(meshes) - compared} of {len(meshes)} meshes are not possible"
        if compared < len(meshes)
        else ""
    )
    verdict = f"parity holds: every {'possible ' if more else ''}mesh trains as one process does"
    if wrong:
        verdict = f"PARITY FAILS: {wrong} of {compared} meshes differ"
    elif not compared:
        verdict = "PARITY IS NOT KNOWN: no mesh was compared"
    print(f"{verdict}{more}, {options.steps} steps on {options.ranks} ranks in {options.dtype}")
    return 1 if wrong else 0 if compared else 2


def job_of(options: ParityOptions, device: torch.device) -> Job:
    """ConfigError for dropout and BatchNorm, whose results depend on how a batch is split."""
    from fsdp.models.units import batch_norms
    from fsdp.run.job import meta_model, prepare

    job = prepare(options.plain, world_size=options.ranks, num_nodes=1, device=device)
    model = meta_model(job.spec)
    for name, module in model.named_modules():
        rate = getattr(module, "p" if "Dropout" in type(module).__name__ else "dropout", 0.0)
        if isinstance(rate, float) and rate:
            # A model of transformers has a field of its configuration for each of its dropouts.
            config: Any = getattr(job.spec.pretrained, "config", None)
            fields = config.to_dict() if hasattr(config, "to_dict") else {"dropout": 1.0}
            rates = [n for n, value in fields.items() if "drop" in n and isinstance(value, float) and value]
            hint = " ".join(f"--model.args.{field} 0.0" for field in rates)
            raise ConfigError(f"{name} drops values at random: runs cannot be compared.", hint)
    for name in batch_norms(model):
        raise ConfigError(
            f"{name} normalises over the rows that a rank has: runs cannot be compared.",
            "a model whose norms are of a row, such as LayerNorm or GroupNorm",
        )
    return job


# ---------------------------------------------------------------- the ranks


def start_ranks(options: ParityOptions, row: Row, folder: str, device: str) -> str:
    """Trains one mesh in ranks of its own; the reason if it is not possible. TrainingError if a rank fails
    otherwise.
    """
    from torch import multiprocessing as mp

    if row.axes and (refused := refusal(options, row, device)):
        return refused
    mp.set_forkserver_preload(["fsdp.run.loop"])  # torch is imported once for all meshes
    arguments = options, row, folder, device
    try:
        mp.start_processes(_rank, arguments, options.ranks, daemon=True, start_method="forkserver")
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        reason = Path(folder, "reason.txt")
        if reason.exists():
            return reason.read_text()
        last = str(error).strip().splitlines()[-1]
        raise TrainingError(f"rank {error.error_index} failed: {last}.") from None
    return ""


def refusal(options: ParityOptions, row: Row, device: str) -> str:
    """Why the flags or the model do not allow a mesh, as far as it is known without ranks."""
    import torch

    from fsdp.run.job import prepare, trained_model

    try:
        config, here = options.config(row), torch.device(device)
        trained_model(config, prepare(config, world_size=options.ranks, num_nodes=1, device=here))
    except ConfigError as error:
        return str(error)
    return ""


def _rank(rank: int, options: ParityOptions, row: Row, folder: str, device: str) -> None:
    log = os.open(Path(folder, f"rank-{rank}.log"), os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    import torch
    import torch.distributed as dist

    from fsdp.distributed.env import DistEnv, pick_device
    from fsdp.distributed.process_group import process_group

    torch.set_num_threads(_threads(options))
    ranks, place = options.ranks, pick_device(rank, "cuda" if device == "cuda" else "cpu")
    env = DistEnv(rank, ranks, rank, ranks, 0, 1, place, "fsdp.parity")
    with process_group(env, GROUP_TIMEOUT_S, dist.FileStore(str(Path(folder, "store")), ranks)):
        train_row(env, options, row, folder)


def train_row(env: DistEnv, options: ParityOptions, row: Row, folder: str) -> None:
    """One rank: fsdp.run.loop.train for each kind of training."""
    from fsdp.run.loop import train

    try:
        for training in Comparison:
            train(options.config(row, str(Path(folder, training)), training), env)
    except ConfigError as error:  # written before the group is aborted, and other ranks fail for that
        write_atomically(Path(folder, "reason.txt"), str(error))
        raise


def _threads(options: ParityOptions) -> int:
    """More threads than free cores wait for one another in each matrix product: minutes, not seconds."""
    return max(1, (os.cpu_count() or 1) // (options.ranks + 1))


# ---------------------------------------------------------------- the size of a difference


class ParityDifference(NamedTuple):
    """The largest difference of one quantity of one training."""

    training: Comparison
    quantity: str
    size: float
    bound: float

    def __str__(self) -> str:
        return f"{self.training}: {self.quantity} differs by {self.size:.1e}, bound {self.bound:.0e}"


class Judge:
    """The plain loop's trainings, and the precision of a comparison that follows from them."""

    def __init__(self, options: ParityOptions, job: Job, device: torch.device) -> None:
        from fsdp.parity.reference import PlainLoop

        self._options, self._plain = options, PlainLoop(options.plain, job, device)
        self._trained = functools.cache(self._train)
        gradients, rounds = self._trained(Comparison.GRADIENT, 1, options.ranks), self._plain.rounds
        self.flat = without_gradient(gradients, ROUNDED_NO_GRADIENT if rounds else NO_GRADIENT)
        adapts = options.dtype == "fp64" and options.plain.optim.name != "sgd"
        bound = ROUNDED_INSIDE if rounds else BOUNDS[options.dtype]
        configured = ROUNDED_CONFIGURED if rounds else bound * (ADAPTIVE if adapts else 1)
        self._bounds = dict.fromkeys(Comparison, bound) | {Comparison.CONFIGURED: configured}
        flat = f"{', '.join(sorted(self.flat)[:3])} ({len(self.flat)} in all)"
        for note, applies in (
            (
                f"the model computes in float32 inside: the bounds are {bound}, configured {configured}",
                rounds,
            ),
            (f"the gradient of {flat} is rounding, which Adam amplifies: not in 'configured'", self.flat),
            ("the model's own loss is trained, of each rank's micro-batch", self._plain.objective.is_own),
        ):
            if applies:
                print(f"fsdp.parity: note: {note}", file=sys.stderr, flush=True)

    def differences(self, row: Row, folder: str) -> list[ParityDifference]:
        """The differences of all trainings of one mesh, whose runs are in `folder`."""
        return [d for training in Comparison for d in self._of(training, row, Path(folder, training))]

    def _of(self, training: Comparison, row: Row, run: Path) -> Iterator[ParityDifference]:
        import torch

        bound = self._bounds[training]
        plain = self._trained(training, row.micro_batches, row.sizes.data)
        parameters = torch.load(run / "full_model" / "full-model.pt", weights_only=True)
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for name, theirs, limit in (("loss", plain.losses, bound), ("grad_norm", plain.norms, 3 * bound)):
            ours = [record[name] for record in records if "grad_norm" in record]
            sizes = [_finite(abs(x - y) / max(abs(y), 1e-30)) for x, y in zip(ours, theirs, strict=True)]
            step = max(range(len(sizes)), key=sizes.__getitem__)
            values = f"{name} of step {step + 1}, {ours[step]:.6g} and in the plain loop {theirs[step]:.6g},"
            yield ParityDifference(training, values, sizes[step], limit)
        names = plain.parameters.keys() - (self.flat if training is Comparison.CONFIGURED else set())
        # In half precision a few steps' change has no significant digits: parameters are compared themselves.
        changes = training is Comparison.GRADIENT or self._options.dtype == "fp64"
        size, worst = difference_of(parameters, plain, names, changes=changes)
        quantity = "the gradient" if training is Comparison.GRADIENT else "the parameters"
        yield ParityDifference(training, f"{quantity}, {worst} most,", size, bound)

    def _train(self, training: Comparison, micro_batches: int, data_ranks: int) -> TrainingRecord:
        config = self._options.config(rows(self._options.ranks)[0], "", training)
        return self._plain.train(config, data_ranks, micro_batches)


def without_gradient(gradients: TrainingRecord, least: float) -> set[str]:
    """Trained parameters whose gradient is rounding, as that of the bias of attention's keys."""
    sizes = {n: float((gradients.start[n] - b).double().norm()) for n, b in gradients.parameters.items()}
    return {name for name, size in sizes.items() if 0 < size <= least * math.hypot(*sizes.values())}


def difference_of(
    parameters: dict[str, torch.Tensor], plain: TrainingRecord, names: Collection[str], *, changes: bool
) -> tuple[float, str]:
    """‖run - plain‖ / ‖plain‖ of these parameters or of their changes, and the parameter that differs most.
    Over the whole model: in float64 a small part that is wrong is still larger than rounding.
    """
    apart, sizes = {}, []
    for name in names:
        theirs = plain.parameters[name].double()
        apart[name] = _finite(float((parameters[name].double() - theirs).norm()))
        sizes.append(float((theirs - plain.start[name].double() if changes else theirs).norm()))
    return _finite(math.hypot(*apart.values()) / max(math.hypot(*sizes), 1e-60)), max(
        apart, key=apart.__getitem__
    )


def _finite(size: float) -> float:
    """NaN is larger than any number."""
    return size if math.isfinite(size) else math.inf


if __name__ == "__main__":
    from fsdp.parity import __main__ as command  # ranks find its functions by this name alone

    exiting = ProcessExit()
    sys.exit(exiting.leave(command.main(sys.argv[1:])))
