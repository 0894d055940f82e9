"""The parts of a run for a training loop of one's own: sharding, materialization, checkpoints, the watch.

    with process(config) as env:                          the process group of this rank
        model = shard(build, config, env)                 sharded, with the weights of config.run.seed
        optimizer = torch.optim.AdamW(model.root.parameters())
        with Training(config, env, model, optimizer) as training:     locked, watched, restored
            for step in training.steps(100):
                with model.micro_batch(last=True):
                    loss = ...model.called(data)...
                    loss.backward()
                training.update()
                training.record(loss=loss)

Batches, loss and schedule are the caller's: each rank reads its own data, `training.data.index` of
`training.data.count`; gradients are averaged over ranks. Not here: the loop of train.py (loop.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from types import TracebackType

import torch
from torch import Tensor, nn

from fsdp.base.errors import CheckpointError, ConfigError, NotFiniteError
from fsdp.base.phases import Phases
from fsdp.config import Config
from fsdp.distributed.collectives import on_main, sum_over_ranks
from fsdp.distributed.env import DistEnv, from_environment
from fsdp.distributed.mesh import place_of, resolve
from fsdp.models import ModelSpec
from fsdp.optim.gradients import Verdicts
from fsdp.optim.optimizer import StateCheck, TrainState, check_step, update_of
from fsdp.record.recorder import Console, Reporter
from fsdp.run import build
from fsdp.run.job import model_of
from fsdp.run.step import StepParts, apply_update, gradients_of, reduced_norm
from fsdp.shard.compute import check_attention
from fsdp.shard.shard import Sharded, sharding_of
from fsdp.watch.rank import Watch

log = logging.getLogger(__name__)

CHECKED_EVERY = 100
"""Steps after which a device's verdicts on gradients are read where a loop records and saves nothing: reading
them makes the host wait for the device, and those not yet read take its memory.
"""


@contextmanager
def process(config: Config) -> Iterator[DistEnv]:
    """This process as a rank of torchrun or srun, or alone, with its process group and the settings of the
    process: of the allocator and of attention.
    """
    env = from_environment(device=config.run.device)
    build.set_up_process(config, env)
    check_attention(config.speed, env.device)
    with build.process(config, env):
        yield env


def shard(builder: Callable[[], nn.Module], config: Config, env: DistEnv) -> Sharded:
    """Builds the module on meta, shards it, and draws its weights from `config.run.seed`. Collective.

    The sections mesh, precision, memory, speed and comm apply, and of model `init`, `weights` and `frozen`.
    `root` of what it returns holds the parameters, `called` is the module to call.
    """
    for flag, value in (("lora.rank", config.lora.rank or "off"), ("memory.nvme", config.memory.nvme)):
        if value != "off":
            raise ConfigError(f"--{flag} {value} has no effect in a loop of your own.", f"leave --{flag} out")

    if config.mesh.expert > 1:
        fault = f"--mesh.expert {config.mesh.expert}: a loop of your own averages gradients over its ranks."
        raise ConfigError(f"{fault} Those of experts are sums over them.", "--mesh.expert 1")

    def built() -> nn.Module:
        model: object = builder()
        if isinstance(model, nn.Module):
            return model
        raise ConfigError(
            f"{name} returned a {type(model).__name__}, not an nn.Module.",
            "return one module; of several models, a module that has them as attributes: docs/library.md",
        )

    name = getattr(builder, "__name__", "model")
    spec = ModelSpec(name=name, build=built, sizes={}, knows_inits=False)
    sizes = resolve(config.mesh, env.world_size, env.num_nodes)
    for axis in ("context", "tensor", "expert"):
        if getattr(sizes, axis) > 1:
            fault = f"--mesh.{axis} {getattr(sizes, axis)}: a loop of one's own has data ranks alone."
            raise ConfigError(fault, f"--mesh.{axis} 1")
    sharding = replace(sharding_of(config, sizes, env.device), averages=True)
    dtypes = sharding.dtypes
    if sharding.sizes.strategy == "ddp":  # autocast leaves the operands of grouped products in the master's
        dtypes = replace(dtypes, param=dtypes.master)
    sharded = build.sharded(config, env, sharding, model_of(config, spec, dtypes))
    build.real_weights(config, env, sharded, spec, later_too=True)
    return sharded


class Training(build.RunParts):
    """The run directory's lock, the watch and the checkpoints around a loop. Every method is collective.

    Entering restores the newest checkpoint of `config.run.dir`; leaving saves the last step, unless an
    exception is raised. `config.checkpoint.every_steps` is the interval, `config.train.clip_grad_norm` clips.
    """

    def __init__(
        self,
        config: Config,
        env: DistEnv,
        model: Sharded,
        optimizer: torch.optim.Optimizer,
        reporter: Reporter | None = None,
    ) -> None:
        check_step("the optimizer", optimizer)
        own = set(model.root.parameters())
        for parameter in (member for group in optimizer.param_groups for member in group["params"]):
            if parameter not in own:
                raise ConfigError(
                    f"the optimizer holds a tensor of the shape {tuple(parameter.shape)} that is no "
                    "parameter of the model: its gradient would be one rank's, and no checkpoint would "
                    "hold it.",
                    "make it a part of the module that build returns: model.root.parameters() then has it",
                )
        self.config, self.env, self.sharded = config, env, model
        self.data = place_of(model.sizes, env.rank).data
        self.reporter, self.files, self.phases = reporter or Reporter(), None, Phases()
        self.state = TrainState(model=model.root, optimizer=optimizer)
        gradients, train = gradients_of(model), config.train
        self._verdicts = Verdicts(train, gradients, optimizer, model.root, scaler=None, whole_update=True)
        self._states = StateCheck(f"the optimizer {type(optimizer).__name__}", optimizer, model.root)
        self._parts = StepParts(
            sharded=model,
            gradients=gradients,
            optimizer=optimizer,
            update=update_of(optimizer, None),
            clip_norm=train.clip_grad_norm,
            verdicts=self._verdicts,
            enter=self.phases.enter,
            after_update=(self._states.after_update,),
        )
        self._metrics: dict[str, float] = {}

    @property
    def step(self) -> int:
        """Steps done."""
        return self.state.step

    def __enter__(self) -> Training:
        config, env = self.config, self.env
        with ExitStack() as stack:
            self.run, self.locks = stack.enter_context(build.locked_run(config, env))
            watch = stack.enter_context(Watch(config.watch, env, self.run.path))
            self.phases.listen(watch.phase)
            self.checkpointer = build.checkpointer(self)
            self._parts = replace(self._parts, saves=self.checkpointer)
            restored = self.checkpointer.restore(self.state)
            build.check_saves_are_there(self)
            on_main(env.rank, lambda: build.truncate(self.run, self.step))
            console = Console(total_steps=0, every=1, unit="sample")
            self.recorder = stack.enter_context(closing(build.recorder(self, console)))
            if env.is_main:
                resumed = f", resumes from step {restored.step}" if restored is not None else ""
                log.info("run %s%s", self.run.path, resumed)
            self._saved = self.checkpointer.resumed_step
            self._stack = stack.pop_all()
        return self

    def steps(self, last: int) -> Iterator[int]:
        """The numbers of the steps that are left, up to `last`."""
        while self.step < last:
            self.phases.enter("data", self.step + 1)  # listeners begin a step with it
            self.phases.enter("forward")
            yield self.step + 1

    def update(self) -> Tensor:
        """Clips the gradients, updates the parameters and clears the gradients; returns the norm.

        A norm that is not finite ends the run, or the update is skipped: `config.train.nonfinite`.
        """
        if not self.sharded.reduced:
            raise ConfigError(
                "update() without a micro_batch(last=True) before it: gradients are not averaged over the "
                "ranks.",
                "with model.micro_batch(last=True) around the last forward and backward of each update()",
            )
        self.sharded.reduced = False
        norm = reduced_norm(self._parts)
        apply_update(self._parts, self.step + 1, None, norm)
        self.state.step += 1
        if self.step % CHECKED_EVERY == 0:
            self._verdicts.settle()
        return norm

    def record(self, **metrics: Tensor | float) -> None:
        """Writes the means over ranks to RUN/metrics.jsonl and every tracker, prints them, and saves where a
        save is due.
        """
        self.phases.enter("record")
        self._verdicts.settle()
        values = [float(value.detach() if isinstance(value, Tensor) else value) for value in metrics.values()]
        means = [total / self.env.world_size for total in sum_over_ranks(*values)]
        self._metrics = dict(zip(metrics, means, strict=True))
        self.recorder.values("train", self.step, self._metrics)
        every = self.config.checkpoint.every_steps
        if every and self.step % every == 0:
            self.save(f"every {every} steps")
        self.record_sealed()

    def save(self, reason: str, *, wait: bool = False) -> None:
        """Starts a save of this step, written beside the next ones; with `wait`, written when it returns."""
        self.phases.enter("save")
        self._verdicts.settle()
        self._states.check()
        self.checkpointer.save(self.state, metrics=self._metrics, reason=reason, wait=wait)
        self._saved = self.step

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            with self._stack:
                if self._saved != self.step:
                    self.save("the end", wait=True)
                self.end_saves()
            return
        try:
            if isinstance(error, NotFiniteError):  # on every rank at the same step
                with suppress(CheckpointError):  # the log names it
                    self.end_saves()
        finally:
            self._stack.__exit__(kind, error, trace)
