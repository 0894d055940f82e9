"""What is compared, the ranks that train each mesh by fsdp.run.loop.train, and the size of a difference.

Gradients, changes and parameters are compared over the whole model: ‖run - plain‖ / ‖plain‖. In float64 a
small part that is wrong is still larger than rounding. torch is imported within functions: a wrong flag is
reported before torch is loaded. Not here: the plain loop (reference.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp import config as configuration
from fsdp.base.errors import ConfigError, TrainingError
from fsdp.config import Config, OptimSection
from fsdp.rundir.paths import write_atomically

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fsdp.dist.env import DistEnv
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


class Comparison(StrEnum):
    """A training of both sides. The first two are SGD's, which shows a wrong factor that Adam cancels."""

    GRADIENT = "gradients"
    SGD = "sgd"
    CONFIGURED = "configured"

    def overrides(self) -> dict[str, Any]:
        """SGD has momentum: without optimizer states --memory.nvme optimizer has nothing to move."""
        if self is Comparison.CONFIGURED:
            return {}
        # Settings of one optimizer are refused beside another.
        sgd = OptimSection(name="sgd", momentum=0.5, schedule="constant", warmup_steps=0)
        section = {f"optim.{name}": value for name, value in dataclasses.asdict(sgd).items()}
        lr, clip, steps = (FAR, 0.0, 1) if self is Comparison.GRADIENT else (0.01 / CLIP, CLIP, 3)
        return section | {"optim.lr": lr, "train.clip_grad_norm": clip, "train.steps": steps}


@dataclass(frozen=True)
class Row:
    """One mesh."""

    strategy: str
    replicate: int
    shard: int
    reshard: str
    micro_batches: int

    @property
    def name(self) -> str:
        return f"{self.strategy}-{self.replicate}-{self.shard}-{self.reshard}-{self.micro_batches}"


def rows(ranks: int) -> list[Row]:
    """The meshes of this many ranks, some with several micro-batches."""
    modes = (("true", 1), ("false", 2), ("step", 2), *([("2", 1)] if ranks % 2 == 0 and ranks > 2 else []))
    fsdp = [Row("fsdp", 1, ranks, reshard, micro) for reshard, micro in modes]
    ddp = [Row("ddp", ranks, 1, "true", micro) for micro in (1, 2) if ranks > 1]
    return fsdp + ddp + [Row("hsdp", 2, ranks // 2, "true", micro) for micro in (1, 2) if ranks % 2 == 0]


@dataclass(frozen=True)
class ParityOptions:
    """The run's flags, the number of ranks, the dtype and the number of steps."""

    words: list[str]
    ranks: int
    dtype: str
    steps: int

    def config(self, row: Row | None, folder: str, training: Comparison = Comparison.CONFIGURED) -> Config:
        """The run's own configuration for a mesh and a training; without a mesh that of the plain loop."""
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
            **({"precision.output": "auto"} if self.dtype == "fp64" else {}), **training.overrides(),
            "mesh.strategy": "auto", "mesh.replicate": 0, "mesh.shard": 0,
        }  # fmt: skip
        if row is not None:
            samples = -(-configuration.load(self.words, fixed).train.global_batch // self.ranks)
            fixed |= {
                "mesh.strategy": row.strategy,
                "mesh.replicate": row.replicate,
                "mesh.shard": row.shard,
                "mesh.reshard_after_forward": row.reshard,
                "train.micro_batch": -(-samples // row.micro_batches),
            }
        return configuration.load(self.words, fixed)


def compare(
    options: ParityOptions, log: Callable[[str], None]
) -> Iterator[tuple[Row, list[ParityDifference] | str]]:
    """Each mesh's differences from the plain loop, or why it is not possible. `log` receives progress."""
    import torch

    on_cuda = runs_on_cuda(options)
    device = torch.device("cuda", 0) if on_cuda else torch.device("cpu")
    torch.set_num_threads(_threads(options))
    jobs, refused = jobs_of(options, device)
    yield from refused.items()
    judge = None
    with (
        tempfile.TemporaryDirectory(prefix="parity-") as folder,
        contextlib.closing(sharded_rows(options, list(jobs), folder, on_cuda)) as trained,
    ):
        for row, reason in trained:
            if reason:
                yield row, reason
                continue
            judge = judge or Judge(options, jobs, device, log)  # beside the ranks' next mesh
            yield row, judge.differences(row, folder)
            shutil.rmtree(Path(folder, row.name))


def runs_on_cuda(options: ParityOptions) -> bool:
    """auto takes GPUs if there is one for each rank."""
    import torch

    asked = options.config(None, "").run.device
    gpus = torch.cuda.device_count() if asked != "cpu" and torch.cuda.is_available() else 0
    if asked == "cuda" and gpus < options.ranks:
        raise ConfigError(
            f"--run.device cuda: {gpus} GPUs are visible, and --parity.ranks {options.ranks} needs one each.",
            f"--parity.ranks {gpus}" if gpus else "--run.device cpu",
        )
    return gpus >= options.ranks


def jobs_of(options: ParityOptions, device: torch.device) -> tuple[dict[Row, Job], dict[Row, str]]:
    """The job of each mesh that the flags allow, and why the others are not possible; ConfigError if all are
    not, or if the model cannot be compared.
    """
    from fsdp.run.job import prepare

    jobs: dict[Row, Job] = {}
    refused: dict[Row, ConfigError] = {}
    for row in rows(options.ranks):
        try:
            jobs[row] = prepare(options.config(row, ""), world_size=options.ranks, num_nodes=1, device=device)
        except ConfigError as error:
            refused[row] = error
    if not jobs:
        raise next(iter(refused.values()))
    refuse_random(next(iter(jobs.values())))
    return jobs, {row: str(error) for row, error in refused.items()}


def refuse_random(job: Job) -> None:
    """ConfigError for dropout and BatchNorm: their results depend on how a batch is split."""
    from torch import nn

    from fsdp.models.units import batch_norms
    from fsdp.run.job import meta_model

    model = meta_model(job.spec)
    for name, module in model.named_modules():
        rate = getattr(module, "dropout" if isinstance(module, nn.MultiheadAttention) else "p", 0.0)
        if rate and ("Dropout" in type(module).__name__ or isinstance(module, nn.MultiheadAttention)):
            # A model of transformers has a field of its configuration for each of its dropouts.
            config: Any = getattr(job.spec.pretrained, "config", None)
            fields = config.to_dict() if hasattr(config, "to_dict") else {"dropout": 1.0}
            rates = [n for n, value in fields.items() if "drop" in n and isinstance(value, float) and value]
            hint = " ".join(f"--model.args.{field} 0.0" for field in rates)
            raise ConfigError(f"{name} drops values at random: runs cannot be compared.", hint)
    for name in batch_norms(model):
        raise ConfigError(
            f"{name} normalises over the rows that a rank has: its result depends on how a batch is split, "
            "so runs cannot be compared.",
            "a model whose norms are of a row, such as LayerNorm or GroupNorm",
        )


# ---------------------------------------------------------------- the ranks


def sharded_rows(
    options: ParityOptions, tried: list[Row], folder: str, on_cuda: bool
) -> Generator[tuple[Row, str]]:
    """Each mesh as soon as it has trained, with the reason if it is not possible: a new world trains the
    others then. TrainingError if a rank fails otherwise.
    """
    from torch import multiprocessing

    left = list(tried)
    while left:
        arguments = options, list(left), folder, on_cuda
        world = multiprocessing.start_processes(
            _rank, arguments, options.ranks, join=False, daemon=True, start_method="spawn"
        )
        reason = failure = ""
        try:
            while left and not reason:
                if failure:
                    raise TrainingError(f"{failure}.")
                try:
                    failure = "the ranks have ended" * world.join(timeout=0.1)
                except (
                    multiprocessing.ProcessRaisedException,
                    multiprocessing.ProcessExitedException,
                ) as error:
                    failure = f"rank {error.error_index} failed: {str(error).strip().splitlines()[-1]}"
                while left and not reason and (outcome := _outcome(folder, left[0])).exists():
                    reason = outcome.read_text()
                    yield left.pop(0), reason
        finally:
            for member in world.processes:
                member.kill()
                member.join()


def _outcome(folder: str, row: Row) -> Path:
    """Written when a mesh has trained, or is not possible: with the reason."""
    return Path(folder, f"{row.name}.txt")


def _rank(rank: int, options: ParityOptions, tried: list[Row], folder: str, on_cuda: bool) -> None:
    log = os.open(Path(folder, f"rank-{rank}.log"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    import torch
    import torch.distributed as dist

    from fsdp.dist.env import DistEnv, pick_device
    from fsdp.dist.process_group import process_group

    if not on_cuda:
        torch.set_num_threads(_threads(options))
    env = DistEnv(
        rank=rank,
        world_size=options.ranks,
        local_rank=rank,
        local_world_size=options.ranks,
        node_rank=0,
        num_nodes=1,
        device=pick_device(rank, "cuda" if on_cuda else "cpu"),
        launcher="fsdp.parity",
    )
    meeting = dist.FileStore(str(Path(folder, f"store-{len(tried)}")), options.ranks)
    with process_group(env, GROUP_TIMEOUT_S, meeting):
        train_rows(env, options, tried, folder)


def train_rows(env: DistEnv, options: ParityOptions, tried: list[Row], folder: str) -> None:
    """One rank: fsdp.run.loop.train for each mesh and each kind of training."""
    import torch.distributed as dist

    from fsdp.run.loop import train

    for row in tried:
        try:
            for training in Comparison:
                run = Path(folder, row.name, training)
                train(options.config(row, str(run), training), env)
                shutil.rmtree(run / "checkpoints", ignore_errors=True)
        except ConfigError as error:  # written before the group is aborted, and other ranks fail for that
            write_atomically(_outcome(folder, row), str(error))
            raise
        if env.is_main:
            write_atomically(_outcome(folder, row), "")
        dist.barrier()  # no rank reports the next mesh as not possible before rank 0 has reported this one


def _threads(options: ParityOptions) -> int:
    """More threads than free cores wait for one another in each matrix product: minutes, not seconds."""
    return max(1, (os.cpu_count() or 1) // (options.ranks + 1))


# ---------------------------------------------------------------- the size of a difference


@dataclass(frozen=True)
class ParityDifference:
    """The largest difference of one quantity of one training."""

    training: Comparison
    quantity: str
    size: float
    bound: float
    factor: float = math.nan
    """The run's value over the plain loop's, if one is a multiple of the other."""

    @property
    def same(self) -> bool:
        return self.size <= self.bound

    def __str__(self) -> str:
        factor = f": it is {self.factor:.6g} times the plain loop's" if math.isfinite(self.factor) else ""
        return f"{self.training}: {self.quantity} differs by {self.size:.1e}, bound {self.bound:.0e}{factor}"


class Judge:
    """The plain loop's trainings, and the precision of a comparison that follows from them."""

    def __init__(
        self,
        options: ParityOptions,
        jobs: Mapping[Row, Job],
        device: torch.device,
        log: Callable[[str], None],
    ) -> None:
        from fsdp.parity.reference import PlainLoop

        first = next(iter(jobs))
        config = options.config(None, "")
        self._options, self._log = options, log
        self._plain = PlainLoop(config, jobs[first], device)
        self._accumulation = {row: job.batch.accumulation for row, job in jobs.items()}
        self._trained: dict[tuple[Comparison, int], TrainingRecord] = {}
        gradients, rounds = self._train(Comparison.GRADIENT, first), self._plain.rounds
        self.flat = without_gradient(gradients, ROUNDED_NO_GRADIENT if rounds else NO_GRADIENT)
        bound = ROUNDED_INSIDE if rounds else BOUNDS[options.dtype]
        self.bounds = dict.fromkeys(Comparison, bound)
        if rounds:
            self.bounds[Comparison.CONFIGURED] = ROUNDED_CONFIGURED
        elif options.dtype == "fp64" and config.optim.name != "sgd":
            self.bounds[Comparison.CONFIGURED] *= ADAPTIVE
        self.notes = []
        if rounds:
            self.notes.append(
                "the model computes in float32 inside although the run computes in float64: the bounds are "
                f"{ROUNDED_INSIDE:.0e}, and {ROUNDED_CONFIGURED:.0e} in 'configured'"
            )
        if self.flat:
            self.notes.append(
                f"the gradient of {', '.join(sorted(self.flat)[:3])} ({len(self.flat)} in all) is 0 except "
                "for rounding, which Adam amplifies: not compared in 'configured'"
            )
        if self._plain.objective.is_own:
            self.notes.append(
                "the model's own loss is trained: the plain loop computes it for each rank's micro-batch, as "
                "the run does, and another number of ranks may train otherwise"
            )
        for note in self.notes:
            log(f"note: {note}")

    def differences(self, row: Row, folder: str) -> list[ParityDifference]:
        """The differences of all trainings of one mesh, whose runs are in `folder`."""
        return [
            difference
            for training in Comparison
            for plain in [self._train(training, row)]
            for ours in [_read(Path(folder, row.name, training), plain)]
            for difference in self._of(training, ours, plain)
        ]

    def _of(
        self, training: Comparison, ours: TrainingRecord, plain: TrainingRecord
    ) -> Iterator[ParityDifference]:
        bound = self.bounds[training]
        for name, a, b, limit in (
            ("loss", ours.losses, plain.losses, bound),
            ("gradient norm", ours.norms, plain.norms, 3 * bound),
        ):
            if len(a) != len(b):
                quantity = f"the number of steps ({len(a)}, plain loop {len(b)})"
                yield ParityDifference(training, quantity, math.inf, bound)
                return
            sizes = [_finite(abs(x - y) / max(abs(y), 1e-30)) for x, y in zip(a, b, strict=True)]
            step = max(range(len(sizes)), key=sizes.__getitem__)
            factor = a[step] / (b[step] or math.nan)
            yield ParityDifference(training, f"the {name} of step {step + 1}", sizes[step], limit, factor)
        names = plain.parameters.keys() - (self.flat if training is Comparison.CONFIGURED else set())
        # In half precision a few steps' change has no significant digits: parameters are compared themselves.
        changes = training is Comparison.GRADIENT or self._options.dtype == "fp64"
        size, worst, factor = difference_of(ours, plain, names, changes=changes)
        quantity = "the gradient" if training is Comparison.GRADIENT else "the parameters"
        yield ParityDifference(training, f"{quantity}, {worst} most,", size, bound, factor)

    def _train(self, training: Comparison, row: Row) -> TrainingRecord:
        key = training, self._accumulation[row]
        if key not in self._trained:
            self._log(f"plain loop: {training}")
            config = self._options.config(None, "", training)
            self._trained[key] = self._plain.train(config, self._options.ranks, key[1])
        return self._trained[key]


def _read(run: Path, plain: TrainingRecord) -> TrainingRecord:
    """A run's parameters, losses and gradient norms from its files."""
    import torch

    from fsdp.parity.reference import TrainingRecord

    parameters = torch.load(run / "full_model" / "full-model.pt", weights_only=True)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "grad_norm" in record]
    losses, norms = ([step[name] for step in steps] for name in ("loss", "grad_norm"))
    return TrainingRecord(plain.start, parameters, losses, norms)


def without_gradient(gradients: TrainingRecord, least: float) -> set[str]:
    """Trained parameters whose gradient is rounding, as that of the bias of attention's keys."""
    sizes = {n: _norm(gradients.start[n].double() - b.double()) for n, b in gradients.parameters.items()}
    return {name for name, size in sizes.items() if 0 < size <= least * math.hypot(*sizes.values())}


def difference_of(
    ours: TrainingRecord, plain: TrainingRecord, names: Collection[str], *, changes: bool
) -> tuple[float, str, float]:
    """‖ours - plain‖ / ‖plain‖ of these parameters or of their changes, the parameter that differs most, and
    the factor if ours is a multiple of plain, else NaN.
    """
    base = {n: plain.start[n].double() if changes else 0.0 for n in names}
    a, b = ({n: record.parameters[n].double() - base[n] for n in names} for record in (ours, plain))
    apart = {n: _norm(a[n] - b[n]) for n in names}
    square = sum(float(b[n].square().sum()) for n in names)
    size = _finite(math.hypot(*apart.values()) / max(math.sqrt(square), 1e-60))
    factor = sum(float((a[n] * b[n]).sum()) for n in names) / (square or math.nan)
    rest = sum(_norm(a[n] - factor * b[n]) ** 2 for n in names)
    is_multiple = rest <= 1e-4 * square * max(1.0, factor**2)
    return size, max(names, key=lambda n: _finite(apart[n])), factor if is_multiple else math.nan


def _norm(tensor: Tensor) -> float:
    return float(tensor.double().norm())


def _finite(size: float) -> float:
    """NaN is larger than any number."""
    return size if math.isfinite(size) else math.inf
