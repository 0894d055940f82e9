"""What a run says about itself: its derived facts at the start and in a dry run, a plan's figures beside its
own, and the closing lines with the commands that may follow.
"""

from __future__ import annotations

import importlib
import logging
import os
import shlex
import statistics
from collections.abc import Collection, Mapping

import torch
from torch import nn

from fsdp.base import proc
from fsdp.base.text import as_typed, byte_size, columns, from_here
from fsdp.base.torch_private import OPTIMIZER_IMPORT
from fsdp.config import Config, PlanSection
from fsdp.dist.collectives import cut_of
from fsdp.dist.env import DistEnv
from fsdp.memory.account import resting_bytes
from fsdp.models.units import find_units
from fsdp.optim.optimizer import is_custom
from fsdp.parallel.comm import whole_parameters
from fsdp.run.evaluate import Outcome
from fsdp.run.job import Job, prepare, trained_model

log = logging.getLogger(__name__)

WARM_UP = 2
"""First steps, in which kernels are compiled and memory is allocated; left out of a plan's comparison if
later ones ran."""


def describe(config: Config, job: Job, model: nn.Module) -> Mapping[str, str]:
    """The derived facts by name, as --dry-run and the last start-up line show them."""
    sizes, batch, dtypes = job.sizes, job.batch, job.dtypes
    padded = batch.micro_batch * batch.accumulation * sizes.ranks != batch.global_batch
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
    tokens = job.data.info.tokens_per_sample * job.batch.global_batch
    facts = {
        "mesh": f"{sizes.strategy}, replicate {sizes.replicate} × shard {sizes.shard} = {sizes.ranks} ranks",
        "model": f"{job.spec.name} {config.model.preset}".strip()
        + f", {total:,} parameters"
        + ("" if trained == total else f", {trained:,} trained"),
        "data": _data_name(job, config)
        + (f", {len(job.data.heldout):,} held out" if job.data.heldout is not None else ""),
        "global batch": f"{batch.global_batch} samples = micro-batch {batch.micro_batch} × "
        f"{batch.accumulation} × {sizes.ranks} ranks" + (", padded" if padded else ""),
        "steps": steps_line(job),
        "precision": f"{_name(dtypes.param)} on {_name(dtypes.master)}, reduced in {_name(dtypes.reduce)}"
        + ("" if dtypes.frozen is None else f", frozen in {_name(dtypes.frozen)}"),
        "bytes a rank": _bytes_a_rank(config, job, model),
        "units": units_line(model, config.mesh.wrap),
    }
    if chunk := config.memory.loss_chunk:
        from fsdp.models.chunked_loss import output_layer

        facts["loss"] = f"in chunks of {chunk:,} tokens, from the inputs of {output_layer(model)[0]}"
    if config.lora.rank:
        from fsdp.models.lora import adapted

        layers = sum(1 for _ in adapted(model))
        facts["adapters"] = f"rank {config.lora.rank} beside {layers} layers; checkpoints hold them alone"
    if tokens:
        facts["tokens a step"] = f"{tokens:,}"
    return facts


def steps_line(job: Job) -> str:
    if job.data.stream is not None:
        return f"{job.total_steps:,}"
    return f"{job.total_steps:,}, {job.cursor.steps_per_epoch:,} an epoch"


def _data_name(job: Job, config: Config) -> str:
    """The data set, or each source of a mixture with its share of the samples; and how many there are."""
    if job.data.stream is not None:
        return f"{config.data.name}, a stream of {len(job.data.stream.shards)} shards"
    samples = f", {len(job.data.train):,} samples"
    if job.data.sources is None:
        return config.data.name + samples
    from fsdp.data.mixture import MixCursor

    assert isinstance(job.cursor, MixCursor)
    segment = job.cursor.now
    shares = zip(segment.samples, segment.shares, strict=True)
    return " + ".join(f"{label} {share / sum(segment.shares):.1%}" for label, share in shares) + samples


def _units(model: nn.Module, wrap: str) -> list[tuple[str, list[nn.Parameter]]]:
    """Each communication unit as its modules' names and the parameters that it gathers; the root's own come
    last.
    """
    names = {module: name for name, module in model.named_modules()}
    taken: set[nn.Parameter] = set()
    found = []
    for unit in find_units(model, wrap):
        own = list(dict.fromkeys(p for module in unit for p in module.parameters() if p not in taken))
        taken.update(own)
        found.append((", ".join(names[module] for module in unit), own))
    return [*found, ("the root", [p for p in model.parameters() if p not in taken])]


def units_line(model: nn.Module, wrap: str) -> str:
    """The units in one line, or the reason why there are none."""
    *units, (_, rest) = _units(model, wrap)
    own = sum(p.numel() for p in rest)
    if units:
        sizes = [sum(p.numel() for p in parameters) for _, parameters in units]
        most = f"{min(sizes):,} to {max(sizes):,}" if min(sizes) < max(sizes) else f"{max(sizes):,}"
        return f"{len(units)} of {most} parameters, {own:,} in the root's"
    return (
        f"none: --mesh.wrap {wrap} finds no part of the model, and the root's group holds {own:,} parameters"
    )


def unit_table(model: nn.Module, wrap: str, shards: int, whole: Collection[nn.Parameter] = ()) -> list[str]:
    """A line for each unit: its parameters, and how many of them rank 0 of a replica keeps, which has the
    longest shards.
    """
    rows = [("unit", "parameters", "rank 0's shard")]
    for name, parameters in _units(model, wrap):
        # FSDP shards no 0-dim parameter
        shard = sum(
            p.numel() if p in whole or not p.dim() else cut_of(p.shape, 0, shards).numel for p in parameters
        )
        rows.append((name, f"{sum(p.numel() for p in parameters):,}", f"{shard:,}"))
    return columns(rows, right=(1, 2))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _bytes_a_rank(config: Config, job: Job, model: nn.Module) -> str:
    """Parameters, gradients and optimizer states. A plan adds what a step takes."""
    dtypes, whole = job.dtypes, {*whole_parameters(model, config.mesh.unsharded).values()}
    held = resting_bytes(config.optim, model, dtypes.master, dtypes.frozen).total
    kept = resting_bytes(config.optim, model, dtypes.master, dtypes.frozen, only=whole).total
    resting = kept + (held - kept) / job.sizes.shard
    counted = " (its states counted as Adam's)" if is_custom(config.optim) else ""
    return f"{byte_size(resting)} of parameters, gradients and optimizer{counted}"


def dry_run(config: Config, env: DistEnv) -> str:
    """For the ranks that were started; for one process, for as many as the mesh flags name."""
    named = max(1, config.mesh.replicate) * max(1, config.mesh.shard)
    ranks = named if env.world_size == 1 else env.world_size
    job = prepare(config, world_size=ranks, num_nodes=env.num_nodes, device=env.device)
    model = trained_model(config, job)
    whole = {*whole_parameters(model, config.mesh.unsharded).values()}
    table = unit_table(model, config.mesh.wrap, job.sizes.shard, whole)
    return "\n".join([*columns(list(describe(config, job, model).items())), "", *table])


# ---------------------------------------------------------------- a plan's figures


class Planned:
    """A plan's figures, which it wrote into the run's recipe, beside the run's own: a sink of the recorder on
    rank 0. Created before the model, while the process is idle.
    """

    def __init__(self, plan: PlanSection, device: str) -> None:
        self._plan = plan
        if device == "cpu":
            importlib.import_module(OPTIMIZER_IMPORT)
        self._idle = proc.memory_bytes().get("VmRSS", 0) / 2**30 if device == "cpu" else 0.0
        self._times: list[float] = []
        self._peak = 0.0

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        if "train/step_time_s" in values:
            self._times.append(values["train/step_time_s"])
            self._peak = max(self._peak, values["train/max_mem_gib"])

    def close(self) -> None:
        return None

    def compared(self) -> dict[str, float]:
        """Logs and returns the figures; empty before any step. A peak on CPU is the process's above its size
        at the start, saves included.
        """
        if not self._times:
            return {}
        planned_gib, planned_s = self._plan.predicted_peak_gib, self._plan.predicted_step_s
        step_s, peak_gib = statistics.median(self._times[WARM_UP:] or self._times), self._peak - self._idle
        off, late = 100 * (peak_gib / planned_gib - 1), 100 * (step_s / planned_s - 1)
        line = "planned %.3f GiB and %.4g s a step; measured %.3f GiB (%+.1f%%) and %.4g s (%+.1f%%)"
        log.info(line, planned_gib, planned_s, peak_gib, off, step_s, late)
        return {
            "planned_peak_gib": planned_gib,
            "peak_gib": peak_gib,
            "planned_step_s": planned_s,
            "step_s": step_s,
        }


def maybe_planned(plan: PlanSection, device: str) -> Planned | None:
    """None for a run without a plan, or with a plan for another kind of device."""
    if not plan.predicted_step_s or not plan.predicted_peak_gib or (plan.gpu == "cpu") != (device == "cpu"):
        return None
    return Planned(plan, device)


# ---------------------------------------------------------------- closing lines


def summary(outcome: Outcome, config: Config, command: str) -> str:
    """`command` starts a run under the same launcher; its flags follow."""
    shown = _shown(outcome)
    if config.train.evaluate_only and not outcome.stopped:
        return _evaluated(outcome, config, shown)
    lines = []
    if outcome.evaluation is not None and outcome.evaluation.accuracy is not None:
        lines.append(
            f"held-out accuracy {outcome.evaluation.accuracy:.2%}  loss {outcome.evaluation.loss:.4f}"
        )
    how = f"stopped by {outcome.stopped}" if outcome.stopped else "finished"
    lines += [f"{how} at step {outcome.step}: {shown}", "next:"]
    run = shlex.quote(shown)
    names = (config.model.name, *config.data.names)
    named = [name for name in names if ":" in name and "://" not in name]
    target = " ".join([run, *(f"--trust-code {shlex.quote(name)}" for name in dict.fromkeys(named))])
    resume = f"{command} --config {shlex.quote(shown + '/config.toml')} --run.dir {run}"
    if outcome.stopped:
        lines.append(
            f"  {resume}{' --train.stop_after 0' if config.train.stop_after else ''}   # resumes here"
        )
    else:
        if config.checkpoint.export:
            lines.append(f"  python -m fsdp.predict {target}")
        lines.append(f"  {resume} --train.steps {outcome.step * 2} --train.epochs 0   # trains further")
    lines += [f"  python -m fsdp.report {target}", f"  python -m fsdp.checkpoint {run}"]
    return from_here(as_typed("\n".join(lines)))


def _shown(outcome: Outcome) -> str:
    """The run directory as a path that is short from here."""
    try:
        where = os.path.relpath(outcome.run_dir)
    except FileNotFoundError:  # the working directory has been removed meanwhile
        return str(outcome.run_dir)
    return str(outcome.run_dir) if where.startswith("..") else where


def _evaluated(outcome: Outcome, config: Config, shown: str) -> str:
    """The closing lines of an evaluation alone."""
    found = {} if outcome.evaluation is None else outcome.evaluation.values()
    numbers = "  ".join(f"{name} {value:.6g}" for name, value in found.items())
    source = config.checkpoint.resume if config.checkpoint.resume != "auto" else config.model.weights
    return f"evaluated step {outcome.step} of {source}: {numbers}\n{shown}/metrics.jsonl has every digit"
