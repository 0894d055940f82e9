"""What a run says about itself: its derived facts at the start and in a dry run, a plan's figures beside its
own, and the closing lines with the commands that may follow.
"""

from __future__ import annotations

import logging
import os
import shlex
import statistics
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from fsdp.base.text import as_typed, byte_size, columns, from_here
from fsdp.checkpoint.checkpointer import Restored
from fsdp.config import Config, PlanSection
from fsdp.config.sections import shown_value
from fsdp.distributed.env import DistEnv
from fsdp.distributed.mesh import MeshSizes, fewest_ranks
from fsdp.memory.account import resting_bytes
from fsdp.models.units import find_units
from fsdp.optim.optimizer import is_custom
from fsdp.run.build import RunParts
from fsdp.run.evaluate import Outcome
from fsdp.run.job import Job, prepare, trained_model
from fsdp.rundir.history import RunDir, last_step, read_records
from fsdp.shard.compute import whole_parameters

log = logging.getLogger(__name__)

WARM_UP = 2
"""First steps, in which kernels are compiled and memory is allocated; left out of a plan's comparison if
later ones ran."""


def describe(config: Config, job: Job, model: nn.Module) -> Mapping[str, str]:
    """The derived facts by name, as --dry-run and the last start-up line show them."""
    sizes, batch, dtypes, data = job.sizes, job.batch, job.dtypes, job.data
    reshard = job.sharding.resharding(model)
    padded = batch.micro_batch * batch.accumulation * sizes.data != batch.global_batch
    total = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    length = f"{len(data.train):,} samples" if data.stream is None else f"{len(data.stream.shards)} shards"
    computed, stored, reduced, frozen = (
        str(dtype).removeprefix("torch.")
        for dtype in (dtypes.param, dtypes.master, dtypes.reduce, dtypes.frozen)
    )
    facts = {
        "mesh": f"{sizes.strategy}, {sizes.equation}"
        + ("" if sizes.strategy == "ddp" else f", reshard_after_forward {shown_value(reshard)}"),
        "model": f"{job.spec.name} {config.model.preset}".strip()
        + f", {total:,} parameters, {trained:,} trained",
        "data": f"{' + '.join(config.data.names)}, {length}",
        "global batch": f"{batch.global_batch} samples = micro-batch {batch.micro_batch} × "
        f"{batch.accumulation} × {sizes.data} ranks" + (", padded" if padded else ""),
        "steps": steps_line(job),
        "precision": f"{computed} on {stored}, reduced in {reduced}"
        + ("" if dtypes.frozen is None else f", frozen in {frozen}"),
        "bytes a rank": f"{byte_size(_resting(config, job, model))} of parameters, gradients and optimizer"
        + (" (its states counted as Adam's)" if is_custom(config.optim) else ""),
        "units": units_line(model, config.mesh.wrap),
    }
    if tokens := data.info.tokens_per_sample * batch.global_batch:
        facts["tokens a step"] = f"{tokens:,}"
    return facts


def steps_line(job: Job) -> str:
    epoch = "" if job.data.stream is not None else f", {job.cursor.steps_per_epoch:,} an epoch"
    return f"{job.total_steps:,}{epoch}"


def units_line(model: nn.Module, wrap: str) -> str:
    """The communication units in one line, or the reason why there are none."""
    taken, sizes = set[nn.Parameter](), []
    for unit in find_units(model, wrap):
        parameters = {p for module in unit for p in module.parameters()} - taken
        taken |= parameters
        sizes.append(sum(p.numel() for p in parameters))
    root = sum(p.numel() for p in model.parameters() if p not in taken)
    if not sizes:
        return f"none: --mesh.wrap {wrap} finds no part of the model; {root:,} parameters in the root's"
    most = f"{min(sizes):,} to {max(sizes):,}" if min(sizes) < max(sizes) else f"{max(sizes):,}"
    return f"{len(sizes)} of {most} parameters, {root:,} in the root's"


def _resting(config: Config, job: Job, model: nn.Module) -> float:
    """Bytes of parameters, gradients and optimizer states on a rank. A plan adds what a step takes."""
    dtypes, whole = job.dtypes, {*whole_parameters(model, config.mesh.unsharded).values()}
    held, kept, divided = (
        resting_bytes(config.optim, model, dtypes.master, dtypes.frozen, only=only).total
        for only in (None, whole, divided_parameters(model, job.sizes))
    )
    return kept + (held - kept - divided * (1 - 1 / job.sizes.tensor)) / job.sizes.weight_shards


def divided_parameters(model: nn.Module, sizes: MeshSizes) -> set[nn.Parameter]:
    """Those of a plain model that each rank of a copy of the weights has another part of."""
    if sizes.tensor == 1:
        return set()
    from fsdp.shard.tensor import DIMS, plan_of

    plan = plan_of(model, sizes)
    if sizes.expert > 1:
        from fsdp.shard.expert import dispatch_of

        plan |= dict.fromkeys(dispatch_of(model, sizes), "colwise")
    return {p for name, p in model.named_parameters() if DIMS.get(plan.get(name, ""), p.dim()) < p.dim()}


def dry_run(config: Config, env: DistEnv) -> str:
    """For the ranks that were started; for one process, for as many as the mesh flags name."""
    ranks = fewest_ranks(config.mesh) if env.world_size == 1 else env.world_size
    job = prepare(config, world_size=ranks, num_nodes=env.num_nodes, device=env.device)
    return "\n".join(columns(list(describe(config, job, trained_model(config, job)).items())))


def compare_plan(plan: PlanSection, device: torch.device, run: RunDir) -> dict[str, float]:
    """Logs and returns the figures of the plan that wrote the run's recipe beside the run's own; empty
    without one, or with one for another kind of device. On a CPU the peak is the whole process's.
    """
    if not plan.predicted_step_s or (plan.gpu == "cpu") != (device.type == "cpu"):
        return {}
    steps = [record for record in read_records(run.metrics) if "step_time_s" in record]
    if not steps:
        return {}
    peak_gib = max(record["max_mem_gib"] for record in steps)
    step_s = statistics.median(record["step_time_s"] for record in steps[WARM_UP:] or steps)
    gib, seconds = plan.predicted_peak_gib, plan.predicted_step_s
    line = "planned %.3f GiB and %.4g s a step; measured %.3f GiB and %.4g s"
    log.info(line, gib, seconds, peak_gib, step_s)
    return {"planned_peak_gib": gib, "peak_gib": peak_gib, "planned_step_s": seconds, "step_s": step_s}


def log_start(parts: RunParts, facts: Mapping[str, str], restored: Restored | None) -> None:
    if parts.env.is_main:
        log.info("run %s", parts.run.path)
        notes = () if restored is None else (*restored.notes, f"resumes from step {restored.step}")
        for line in (*notes, parts.job.cursor.note() if notes else None):
            if line:
                log.info("%s", line)
        shown = {**facts, "steps": steps_line(parts.job)}
        log.info("%s", "; ".join(f"{name} {text}" for name, text in shown.items()))


# ---------------------------------------------------------------- closing lines


def shown_path(run: Path) -> str:
    """Relative, if it is below the working directory."""
    try:
        shown = os.path.relpath(run)
    except FileNotFoundError:  # the working directory has been removed meanwhile
        shown = ".."
    return str(run) if shown.startswith("..") else shown


def resuming(run: Path, command: str, config: Config) -> str:
    """The command that resumes the run."""
    shown, after = shown_path(run), " --train.stop_after 0" if config.train.stop_after else ""
    return f"{command} --config {shlex.quote(shown + '/config.toml')} --run.dir {shlex.quote(shown)}{after}"


def last_lines(run: Path, config: Config, command: str, above: str = "") -> str:
    """The end of a terminal after a failure: the step that is saved, and the command that resumes."""
    step = last_step(RunDir(run).saves)
    saved = f"step {step} is saved" if step else "no step is saved yet"
    then = "resumes here" if step else "starts again"
    lines = [f"{shown_path(run)}: {saved}.{above}", f"  {resuming(run, command, config)}   # {then}"]
    return from_here(as_typed("\n".join(lines)))


def summary(outcome: Outcome, config: Config, command: str) -> str:
    """`command` starts a run under the same launcher; its flags follow."""
    shown = shown_path(outcome.run_dir)
    numbers = {} if outcome.evaluation is None else outcome.evaluation.values()
    lines = ["  ".join(f"{name} {value:.6g}" for name, value in numbers.items() if "/" not in name)]
    how = f"stopped by {outcome.stopped}" if outcome.stopped else "finished"
    lines += [f"{how} at step {outcome.step}: {shown}", "next:"]
    run = shlex.quote(shown)
    names = (config.model.name, *config.data.names)  # hf:FOLDER and those of a store are no code
    named = [name for name in names if ":" in name and "://" not in name and not name.startswith("hf:")]
    target = " ".join([run, *(f"--trust-code {shlex.quote(name)}" for name in dict.fromkeys(named))])
    resume = resuming(outcome.run_dir, command, config)
    if outcome.stopped:
        lines.append(f"  {resume}   # resumes here")
    elif not config.train.evaluate_only:
        if config.checkpoint.export:
            lines.append(f"  python -m fsdp.predict {target}")
        lines.append(f"  {resume} --train.steps {outcome.step * 2} --train.epochs 0   # trains further")
    lines += [f"  python -m fsdp.report {target}", f"  python -m fsdp.checkpoint {run}"]
    return from_here(as_typed("\n".join(filter(None, lines))))
