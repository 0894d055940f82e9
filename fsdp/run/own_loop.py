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

Batches, loss and schedule are the caller's: each rank reads its own data, `env.rank` of `env.world_size`;
gradients are averaged over ranks. Not here: the loop of train.py (loop.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from types import TracebackType

import torch
from torch import Tensor, nn

from fsdp.base.errors import CheckpointError, ConfigError, NotFiniteError
from fsdp.base.phases import Phases
from fsdp.config import Config
from fsdp.dist.collectives import on_main, sum_over_ranks
from fsdp.dist.env import DistEnv, from_environment
from fsdp.dist.mesh import build_mesh, resolve
from fsdp.models import ModelSpec
from fsdp.optim.gradients import Verdicts
from fsdp.optim.optimizer import StateCheck, check_step, update_of
from fsdp.optim.state import TrainState
from fsdp.parallel.compute import check_attention
from fsdp.parallel.shard import Sharded, shard_model, sharding_of
from fsdp.record.recorder import Reporter
from fsdp.run import build
from fsdp.run.job import trainable_model, warn_of_extra_states
from fsdp.run.step import StepParts, apply_update, gradients_of, reduced_norm
from fsdp.rundir import history
from fsdp.rundir.history import append_if_possible
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
    sizes = resolve(config.mesh, env.world_size, env.num_nodes)
    name = getattr(builder, "__name__", "model")

    def built() -> nn.Module:
        model: object = builder()
        if isinstance(model, nn.Module):
            return model
        raise ConfigError(
            f"{name} returned a {type(model).__name__}, not an nn.Module.",
            "return one module; of several models, a module that has them as attributes: docs/library.md",
        )

    spec = ModelSpec(name=name, build=built, sizes={}, knows_inits=False)
    sharding = sharding_of(config, sizes, env.device)
    dtypes = sharding.dtypes
    model = trainable_model(spec, config.run.seed, dtypes.master if sizes.strategy == "ddp" else dtypes.param)
    if config.model.frozen:
        from fsdp.models.lora import freeze

        freeze(model, config.model.frozen)
    warn_of_extra_states(model)
    sharded = shard_model(model, sharding, build_mesh(sizes, env.device, config.run.process_group_timeout_s))
    build.real_weights(config, sharded, spec, env.rank, later_too=True)
    return sharded


def _check_optimizer(model: Sharded, optimizer: torch.optim.Optimizer) -> None:
    check_step("the optimizer", optimizer)
    own = set(model.root.parameters())
    for parameter in (member for group in optimizer.param_groups for member in group["params"]):
        if parameter not in own:
            raise ConfigError(
                f"the optimizer holds a tensor of the shape {tuple(parameter.shape)} that is no parameter of "
                "the model: its gradient would be one rank's, and no checkpoint would hold it.",
                "make it a part of the module that build returns: model.root.parameters() then has it",
            )


class Training:
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
        _check_optimizer(model, optimizer)
        self._config, self._env, self._model = config, env, model
        self._reporter = reporter or Reporter()
        self._state = TrainState(model=model.root, optimizer=optimizer)
        gradients = gradients_of(model)
        self._verdicts = Verdicts(
            config.train, gradients, optimizer, model.root, scaler=None, whole_update=True
        )
        self._states = StateCheck(f"the optimizer {type(optimizer).__name__}", optimizer, model.root)
        self._phases, self._stack = Phases(), ExitStack()
        self._parts = StepParts(
            sharded=model,
            gradients=gradients,
            optimizer=optimizer,
            update=update_of(optimizer, None),
            clip_norm=config.train.clip_grad_norm,
            verdicts=self._verdicts,
            enter=self._phases.enter,
            after_update=(self._states.after_update,),
        )
        self._metrics: dict[str, float] = {}
        self._saved = -1

    @property
    def step(self) -> int:
        """Steps done."""
        return self._state.step

    def __enter__(self) -> Training:
        config, env = self._config, self._env
        with self._stack as stack:
            self._run, locks = stack.enter_context(build.locked_run(config, env))
            watch = stack.enter_context(Watch(config.watch, env, self._run.path))
            self._phases.listen(watch.phase)
            saves = build.checkpointer(config, env, self._run, self._model.sizes, locks)
            self._checkpointer, self._parts = saves, replace(self._parts, saves=saves)
            restored = saves.restore(self._state)
            build.check_saves_are_there(config, env, self._run, saves, self.step)
            on_main(env.rank, self._truncate_records)
            if env.is_main:
                resumed = f", resumes from step {restored.step}" if restored is not None else ""
                log.info("run %s%s", self._run.path, resumed)
            self._saved = saves.resumed_step
            self._stack = stack.pop_all()
        return self

    def steps(self, last: int) -> Iterator[int]:
        """The numbers of the steps that are left, up to `last`."""
        while self.step < last:
            self._phases.enter("data", self.step + 1)  # listeners begin a step with it
            self._phases.enter("forward")
            yield self.step + 1

    def update(self) -> Tensor:
        """Clips the gradients, updates the parameters and clears the gradients; returns the norm.

        A norm that is not finite ends the run, or the update is skipped: `config.train.nonfinite`.
        """
        if not self._model.reduced:
            raise ConfigError(
                "update() without a micro_batch(last=True) before it: gradients are not averaged over the "
                "ranks.",
                "with model.micro_batch(last=True) around the last forward and backward of each update()",
            )
        self._model.reduced = False
        norm = reduced_norm(self._parts)
        apply_update(self._parts, self.step + 1, None, norm)
        self._state.step += 1
        if self.step % CHECKED_EVERY == 0:
            self._verdicts.settle()
        return norm

    def record(self, **metrics: Tensor | float) -> None:
        """Writes the means over ranks to RUN/metrics.jsonl, logs them, and saves where a save is due."""
        self._phases.enter("record")
        self._verdicts.settle()
        values = [float(value.detach() if isinstance(value, Tensor) else value) for value in metrics.values()]
        means = [total / self._env.world_size for total in sum_over_ranks(*values)]
        self._metrics = dict(zip(metrics, means, strict=True))
        if self._env.is_main:
            shown = "  ".join(f"{name} {value:.4g}" for name, value in self._metrics.items())
            log.info("step %d  %s", self.step, shown)
            append_if_possible(self._run.metrics, {"step": self.step, **self._metrics})
        self._reporter.report({"step": self.step, **self._metrics})
        every = self._config.checkpoint.every_steps
        if every and self.step % every == 0:
            self.save(f"every {every} steps")
        self._record_sealed()

    def save(self, reason: str, *, wait: bool = False) -> None:
        """Starts a save of this step, written beside the next ones; with `wait`, written when it returns."""
        self._phases.enter("save")
        self._verdicts.settle()
        self._states.check()
        self._checkpointer.save(self._state, metrics=self._metrics, reason=reason, wait=wait)
        self._saved = self.step

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            try:
                if isinstance(error, NotFiniteError):  # on every rank at the same step
                    with suppress(CheckpointError):  # the log names it
                        self._end_saves()
            finally:
                self._stack.__exit__(kind, error, trace)
            return
        with self._stack:
            if self._saved != self.step:
                self.save("the end", wait=True)
            self._end_saves()

    def _end_saves(self) -> None:
        self._phases.enter("end")
        try:
            self._checkpointer.close()
        finally:
            self._record_sealed()

    def _truncate_records(self) -> None:
        history.truncate(self._run.metrics, self.step)
        history.truncate(self._run.saves, self.step)

    def _record_sealed(self) -> None:
        for sealed in self._checkpointer.sealed():
            self._reporter.report({}, checkpoint=sealed.path)
            if self._env.is_main:
                append_if_possible(
                    self._run.saves,
                    history.save_record(sealed.step, sealed.stall_s, sealed.write_s, sealed.bytes),
                )
