"""What is compared, the ranks that train each mesh by fsdp.run.loop.train, and the size of a difference.

A gradient's difference is relative to its norm, or to a thousandth of the model's norm if that is larger: the
bias of attention's keys has mathematically no gradient, only rounding. The difference of a trained parameter
is relative to its change in the same way. torch is imported within functions: a wrong flag is reported before
torch is loaded. Not here: the plain loop (reference.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp import config as configuration
from fsdp.base.errors import ConfigError, TrainingError
from fsdp.config import Config, OptimSection

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fsdp.dist.env import DistEnv
    from fsdp.parity.reference import TrainingRecord
    from fsdp.run.job import Job

BOUNDS = {"fp64": 1e-10, "fp32": 1e-4, "bf16": 2e-2, "fp16": 2e-2}
LOSS_SCALE = 256.0
"""For fp16: no gradient overflows. A run would skip such a step; the plain loop has no loss scale."""
FAR = 2.0**20
"""The learning rate of a step from which its gradient is computed; the initial parameter is then rounding."""
CLIP = 2.0**-10
"""A norm to which nearly any gradient is clipped."""
SMALL = 1e-3
"""Of the model's norm: the smallest scale of a parameter's difference."""
ROUNDING = 1e-5
"""Of a parameter's norm: a smaller change cannot be distinguished from rounding."""
ADAPTIVE = 1e4
"""Factor on the bound for Adam, which may divide by rounding alone (eps is 1e-8)."""
ROUNDED_INSIDE, ROUNDED_CONFIGURED = 1e-5, 1e-2
"""Bounds of a model that computes in float32 inside: of gradients and SGD, and of the run's own optimizer."""
NO_GRADIENT, ROUNDED_NO_GRADIENT = 1e-12, 1e-5
"""Of the model's gradient norm, and of one with float32 inside: less is rounding, which Adam amplifies."""
GROUP_TIMEOUT_S = 300.0
REASON = 900
"""Characters of a reason: what is written to a pipe at once, up to 4 KiB, no other rank interrupts."""

Log = Callable[[str], None]


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
        section = dataclasses.asdict(
            OptimSection(name="sgd", momentum=0.5, schedule="constant", warmup_steps=0)
        )
        sgd = {f"optim.{name}": value for name, value in section.items()}
        if self is Comparison.GRADIENT:
            return {**sgd, "optim.lr": FAR, "train.clip_grad_norm": 0.0, "train.steps": 1}
        return {**sgd, "optim.lr": 0.01 / CLIP, "train.clip_grad_norm": CLIP, "train.steps": 3}


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
    fsdp = [
        Row("fsdp", 1, ranks, reshard, micro) for reshard, micro in (("true", 1), ("false", 2), ("step", 2))
    ]
    ddp = [Row("ddp", ranks, 1, "true", micro) for micro in (1, 2) if ranks > 1]
    hsdp = [Row("hsdp", 2, ranks // 2, "true", micro) for micro in (1, 2) if ranks % 2 == 0]
    return fsdp + ddp + hsdp + [Row("fsdp", 1, ranks, "2", 1)] * (ranks % 2 == 0 and ranks > 2)


@dataclass(frozen=True)
class ParityOptions:
    """The run's flags, the number of ranks, the dtype and the number of steps."""

    words: list[str]
    ranks: int
    dtype: str
    steps: int

    def config(self, row: Row | None, folder: str, training: Comparison = Comparison.CONFIGURED) -> Config:
        """The run's own configuration for a mesh and a training; without a mesh that of the plain loop."""
        mesh: dict[str, Any] = {"mesh.strategy": "auto", "mesh.replicate": 0, "mesh.shard": 0}
        fixed: dict[str, Any] = {
            "backend": "torchrun", "run.dir": folder, "stop.deadline_s": 0.0,
            "train.steps": self.steps, "train.epochs": 0, "train.stop_after": 0,
            "train.eval_every_steps": 0, "train.eval_every_epochs": 0.0, "train.eval_samples": 1,
            "checkpoint.dir": "", "checkpoint.every_steps": 10**9, "checkpoint.every_minutes": 0.0,
            "checkpoint.every_epochs": 0.0, "checkpoint.resume": "auto", "checkpoint.keep_best": 0,
            "checkpoint.export": True, "checkpoint.export_format": "torch", "checkpoint.export_dtype": "auto",
            "run.matmul_precision": "highest",  # the plain loop's; TF32 is coarser than the bound of fp32
            "precision.loss_scale": LOSS_SCALE, "precision.reduce": "auto", "precision.param": self.dtype,
            "precision.master": "fp64" if self.dtype == "fp64" else "fp32",
            **({"precision.output": "auto"} if self.dtype == "fp64" else {}), **training.overrides(),
        }  # fmt: skip
        if row is not None:
            samples = -(-configuration.load(self.words, {**fixed, **mesh}).train.global_batch // self.ranks)
            mesh = {
                "mesh.strategy": row.strategy, "mesh.replicate": row.replicate, "mesh.shard": row.shard,
                "mesh.reshard_after_forward": row.reshard,
                "train.micro_batch": -(-samples // row.micro_batches),
            }  # fmt: skip
        return configuration.load(self.words, {**fixed, **mesh})


def compare(options: ParityOptions, log: Log) -> Iterator[tuple[Row, list[ParityDifference] | str]]:
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
    from torch.nn.modules.dropout import _DropoutNd

    from fsdp.models.checks import batch_norms
    from fsdp.run.job import meta_model

    model = meta_model(job.spec)
    for name, module in model.named_modules():
        if (isinstance(module, _DropoutNd) and module.p) or (
            isinstance(module, nn.MultiheadAttention) and module.dropout
        ):
            # A model of transformers has a field of its configuration for each of its dropouts.
            config: Any = getattr(job.spec.pretrained, "config", None)
            fields = config.to_dict() if hasattr(config, "to_dict") else {"dropout": 1.0}
            dropouts = [
                n for n, value in fields.items() if "drop" in n and isinstance(value, float) and value
            ]
            raise ConfigError(
                f"{name} drops values at random: runs cannot be compared.",
                " ".join(f"--model.args.{field} 0.0" for field in dropouts),
            )
    for name in batch_norms(model):
        raise ConfigError(
            f"{name} normalises over the rows that a rank has: runs cannot be compared.",
            "a model without BatchNorm",
        )


# ---------------------------------------------------------------- the ranks


def sharded_rows(
    options: ParityOptions, tried: list[Row], folder: str, on_cuda: bool
) -> Generator[tuple[Row, str]]:
    """Each mesh as soon as it has trained, with the reason if it is not possible. TrainingError if a rank
    fails. Ranks whose mesh is not possible wait for one another in its collectives: a new world trains the
    others.
    """
    context = multiprocessing.get_context("spawn")
    left = list(tried)
    while left:
        ours, theirs = context.Pipe(duplex=False)
        arguments = (options, list(left), folder, on_cuda, theirs)
        members = [
            context.Process(target=_rank, args=(rank, *arguments), daemon=True)
            for rank in range(options.ranks)
        ]
        for member in members:
            member.start()
        try:
            reason = ""
            while left and not reason:
                ready = wait([ours, *(member.sentinel for member in members)])
                if ours not in ready:  # `theirs` is open here: a pipe that is ready has a message
                    rank = next(rank for rank, member in enumerate(members) if member.sentinel in ready)
                    lines = Path(folder, f"rank-{rank}.log").read_text(errors="replace").split("\n")
                    last = next(
                        (line.strip(" .") for line in reversed(lines) if line.strip()), "its log is empty"
                    )
                    raise TrainingError(f"rank {rank} failed: {last}.")
                reason = ours.recv()
                yield left.pop(0), reason
        finally:
            for member in members:
                member.kill()
                member.join()


def _rank(
    rank: int, options: ParityOptions, tried: list[Row], folder: str, on_cuda: bool, pipe: Connection
) -> None:
    log = os.open(Path(folder, f"rank-{rank}.log"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    import torch
    import torch.distributed as dist

    from fsdp.dist.env import DistEnv, pick_device
    from fsdp.dist.process_group import process_group

    if not on_cuda:
        torch.set_num_threads(_threads(options))
    device = pick_device(rank, "cuda" if on_cuda else "cpu")
    env = DistEnv(
        rank=rank,
        world_size=options.ranks,
        local_rank=rank,
        local_world_size=options.ranks,
        node_rank=0,
        num_nodes=1,
        device=device,
        launcher="fsdp.parity",
    )
    meeting = dist.FileStore(str(Path(folder, f"store-{len(tried)}")), options.ranks)
    with process_group(env, GROUP_TIMEOUT_S, meeting):
        try:
            train_rows(env, options, tried, folder, lambda: pipe.send(""))
        except ConfigError as error:  # sent before the group is aborted, and other ranks fail for that
            pipe.send(str(error)[:REASON])
            raise


def train_rows(
    env: DistEnv, options: ParityOptions, tried: list[Row], folder: str, done: Callable[[], None]
) -> None:
    """One rank: fsdp.run.loop.train for each mesh and each kind of training."""
    import torch.distributed as dist

    from fsdp.run.loop import train

    for row in tried:
        for training in Comparison:
            run = Path(folder, row.name, training)
            train(options.config(row, str(run), training), env)
            shutil.rmtree(run / "checkpoints", ignore_errors=True)
        if env.is_main:
            done()
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
        text = f"{self.training}: {self.quantity} differs by {self.size:.1e}, bound {self.bound:.0e}"
        factor = f": it is {self.factor:.6g} times the plain loop's" if math.isfinite(self.factor) else ""
        return text + factor


class Judge:
    """The plain loop's trainings, and the precision of a comparison that follows from them."""

    def __init__(
        self, options: ParityOptions, jobs: Mapping[Row, Job], device: torch.device, log: Log
    ) -> None:
        from fsdp.parity.reference import PlainLoop

        first = next(iter(jobs))
        self._options, self._log = options, log
        self._plain = PlainLoop(options.config(None, ""), jobs[first], device)
        self._accumulation = {row: job.batch.accumulation for row, job in jobs.items()}
        self._trained: dict[tuple[Comparison, int], TrainingRecord] = {}
        gradients, rounds = self._train(Comparison.GRADIENT, first), self._plain.rounds
        sizes = {n: norm(gradients.start[n].double() - b.double()) for n, b in gradients.parameters.items()}
        least = (ROUNDED_NO_GRADIENT if rounds else NO_GRADIENT) * math.hypot(*sizes.values())
        flat = frozenset(name for name, size in sizes.items() if size and size <= least)
        self.measure = Measure(options.dtype, rounds, options.config(None, "").optim.name != "sgd", flat)
        self.notes = list(self.measure.notes())
        if self._plain.objective.is_own:
            self.notes.append(
                "the model's own loss is trained: the plain loop computes it for each rank's micro-batch, as "
                "the run does, and another number of ranks may train otherwise"
            )
        for note in self.notes:
            log(f"note: {note}")

    def differences(self, row: Row, folder: str) -> list[ParityDifference]:
        """The differences of all trainings of one mesh, whose runs are in `folder`."""
        differences = []
        for training in Comparison:
            plain = self._train(training, row)
            ours = _read(Path(folder, row.name, training), plain)
            differences += self.measure.differences(training, ours, plain)
        return differences

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


@dataclass(frozen=True)
class Measure:
    """Precision of a comparison: the dtype, rounding inside the model, parameters without a gradient."""

    dtype: str
    rounds: bool
    adaptive: bool
    flat: frozenset[str]

    @property
    def each(self) -> bool:
        """Whether each parameter is compared by itself; where values are rounded, the whole model is."""
        return self.dtype == "fp64" and not self.rounds

    def bound(self, training: Comparison) -> float:
        if self.dtype == "fp64" and self.rounds:
            return ROUNDED_CONFIGURED if training is Comparison.CONFIGURED else ROUNDED_INSIDE
        wide = self.each and self.adaptive and training is Comparison.CONFIGURED
        return (ADAPTIVE if wide else 1.0) * BOUNDS[self.dtype]

    def notes(self) -> Iterator[str]:
        if self.rounds:
            yield (
                "the model computes in float32 inside although the run computes in float64: the bound of the "
                f"whole model is {ROUNDED_INSIDE:.0e}, and {ROUNDED_CONFIGURED:.0e} in 'configured'"
            )
        if self.flat:
            more = f" and {len(self.flat) - 1} others" if len(self.flat) > 1 else ""
            yield (
                f"the gradient of {min(self.flat)}{more} is 0 except for rounding, which Adam amplifies: "
                "not compared in 'configured'"
            )

    def differences(
        self, training: Comparison, ours: TrainingRecord, plain: TrainingRecord
    ) -> list[ParityDifference]:
        """The largest difference of the losses, of the gradient norms, and of the gradients or parameters."""
        bound = self.bound(training)
        differences = []
        for name, a, b, limit in (
            ("loss", ours.losses, plain.losses, bound),
            ("gradient norm", ours.norms, plain.norms, 3 * bound),
        ):
            if len(a) != len(b):
                quantity = f"the number of steps ({len(a)}, plain loop {len(b)})"
                return [ParityDifference(training, quantity, math.inf, bound)]
            sizes = [_finite(abs(x - y) / max(abs(y), 1e-30)) for x, y in zip(a, b, strict=True)]
            step = max(range(len(sizes)), key=sizes.__getitem__)
            quantity, factor = f"the {name} of step {step + 1}", a[step] / (b[step] or math.nan)
            differences.append(ParityDifference(training, quantity, sizes[step], limit, factor))
        return [*differences, self._of_tensors(training, ours, plain, bound)]

    def _of_tensors(
        self, training: Comparison, ours: TrainingRecord, plain: TrainingRecord, bound: float
    ) -> ParityDifference:
        of_gradients = training is Comparison.GRADIENT
        rate = FAR if of_gradients else 1.0
        names = [n for n in plain.parameters if training is not Comparison.CONFIGURED or n not in self.flat]
        start = {n: plain.start[n].double() for n in names}
        a, b = ({n: (start[n] - side.parameters[n].double()) / rate for n in names} for side in (ours, plain))
        apart = {n: norm(a[n] - b[n]) for n in names}
        model = math.hypot(*(norm(b[n]) for n in names))
        quantity = "the gradient of" if of_gradients else "the parameter"
        if self.each:
            sizes = {
                n: _finite(apart[n] / max(norm(b[n]), SMALL * model, ROUNDING * norm(start[n]) / rate, 1e-60))
                for n in names
            }
            worst = max(names, key=sizes.__getitem__)
            factor = _factor(a, b, [worst])
            return ParityDifference(training, f"{quantity} {worst}", sizes[worst], bound, factor)
        if self.dtype != "fp64" and not of_gradients:
            # Relative to the parameters: in half precision a few steps' change has no significant digits.
            model = math.hypot(*(norm(plain.parameters[n]) for n in names))
        worst = max(names, key=lambda n: _finite(apart[n]))
        size = _finite(math.hypot(*apart.values()) / max(model, 1e-60))
        quantity = f"the model, {quantity} {worst} most,"
        return ParityDifference(training, quantity, size, bound, _factor(a, b, names))


def norm(tensor: Tensor) -> float:
    return float(tensor.double().norm())


def _finite(size: float) -> float:
    """NaN is larger than any number."""
    return size if math.isfinite(size) else math.inf


def _factor(ours: Mapping[str, Tensor], plain: Mapping[str, Tensor], names: list[str]) -> float:
    """ours / plain by least squares; NaN if ours is not a multiple of plain."""
    along = sum(float((ours[n] * plain[n]).sum()) for n in names)
    square = sum(float(plain[n].square().sum()) for n in names)
    factor = along / square if square else math.nan
    rest = sum(norm(ours[n] - factor * plain[n]) ** 2 for n in names)
    return factor if rest <= 1e-4 * square * max(1.0, factor**2) else math.nan
