"""The planner's answer as text: the table, the lines below it, the best line to paste, and the recipe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fsdp import config as configuration
from fsdp.base.text import columns
from fsdp.config import Config
from fsdp.plan.estimate import Plan
from fsdp.plan.rates import GIB
from fsdp.plan.subject import subject_of
from fsdp.run.job import model_of
from fsdp.run.summary import units_line

ROWS = 12
"""Of the table of plans."""


def table(plans: Sequence[Plan]) -> list[str]:
    unit = "tok" if plans[0].tokens_per_sample else "sample"
    limit = plans[0].rates.memory / GIB
    head = ["mesh", "reshard", "checkpointing", "micro-batch", "peak GiB", f"fits {limit:.0f}", "step s"]
    head += [f"{unit}/s/GPU", "MFU", "bound by"]
    return [f"  {line}" for line in columns([head, *(_row(plan) for plan in plans[:ROWS])])]


def _row(plan: Plan) -> list[str]:
    memory, mesh = plan.config.memory, plan.config.mesh
    is_ddp, every = plan.sizes.strategy == "ddp", memory.activation_checkpointing_every
    kind = memory.activation_checkpointing.replace("ops", "per operation")
    kind += f", each {every}." if kind == "full" and every > 1 else ""
    return [
        f"{plan.sizes.replicate}×{plan.sizes.shard}" + (" ddp" if is_ddp else ""),
        "-" if is_ddp else mesh.reshard_after_forward,
        kind + (", offload" if memory.cpu_offload else ""),
        f"{plan.micro_batch}" + (f" × {plan.accumulation}" if plan.accumulation > 1 else ""),
        f"{plan.needed / GIB:.1f}",
        "yes" if plan.fits else "no",
        f"{plan.step.seconds:.3f}",
        f"{plan.tokens_s:,.0f}",
        f"{plan.mfu:.1%}",
        plan.step.bound_by,
    ]


def details(plan: Plan, config: Config) -> Iterator[str]:
    memory, step, on_device = plan.memory, plan.step, plan.rates.has_allocator
    kinds = sorted(memory.kinds.items(), key=lambda item: -item[1])
    shown = [f"{n.replace('_', ' ')} {size / GIB:.2f}" for n, size in kinds if size >= 1e-3 * memory.peak]
    yield f"memory on rank 0, highest in {memory.moment}: {', '.join(shown)}"
    if on_device:
        yield (
            f"tensors {memory.peak / GIB:.2f} GiB, held by the allocator {memory.reserved / GIB:.2f}, with "
            f"driver and NCCL {plan.needed / GIB:.2f}; between steps {memory.resting / GIB:.2f}"
        )
    if on_device and (memory.host or plan.staged):
        host = f"{(memory.host + plan.staged) / GIB:.2f} GiB, {plan.staged / GIB:.2f} of it a save's copy"
        yield f"on the host, a rank: {host}"
    spec = subject_of(plan.config.model, plan.config.data).spec
    units = units_line(model_of(plan.config, spec), plan.config.mesh.wrap)
    yield f"units: {units}; python train.py --dry-run lists each with its shards"
    parts = sorted(((seconds, name) for name, seconds in step.parts.items() if name != "host"), reverse=True)
    words = [f"{name} {seconds:.3f}" for seconds, name in parts if seconds >= 0.005 * step.seconds]
    yield f"step {step.seconds:.3f} s: {', '.join(words)}; communication not hidden {step.exposed:.3f}"
    if plan.sizes.ranks > 1:
        yield (
            f"a step and GPU sends {step.within / 1e9:.2f} GB within its node, {step.between / 1e9:.2f} GB "
            "between nodes"
        )
    if config.plan.tokens:
        unit = "tokens" if plan.tokens_per_sample else "samples"
        gpu_hours = config.plan.tokens / plan.tokens_s / 3600
        hours = f"{gpu_hours / plan.sizes.ranks:,.1f} hours, {gpu_hours:,.0f} GPU-hours"
        yield f"{config.plan.tokens:.3g} {unit}: {hours}"


def _chosen(plan: Plan) -> dict[str, object]:
    """The fields that a search sets."""
    mesh, memory, train = plan.config.mesh, plan.config.memory, plan.config.train
    is_ddp = plan.sizes.strategy == "ddp"
    return {
        "mesh.strategy": plan.sizes.strategy,
        "mesh.replicate": plan.sizes.replicate,
        "mesh.shard": 0 if is_ddp else plan.sizes.shard,
        "mesh.reshard_after_forward": mesh.reshard_after_forward,
        "memory.activation_checkpointing": memory.activation_checkpointing,
        "memory.cpu_offload": memory.cpu_offload,
        "train.global_batch": train.global_batch,
        "train.micro_batch": plan.micro_batch,
    }


def flags_of(plan: Plan) -> str:
    """The flags of this plan, beside the user's own."""
    chosen = _chosen(plan)
    return " ".join(f"--{name} {str(value).lower()}" for name, value in chosen.items())


def recipe(plan: Plan, config: Config) -> str:
    """The user's configuration with the plan in it, and the prediction, for the run's end to compare: the
    peak that the run itself will read, the allocator's of tensors on CUDA, the process's on CPU.
    """
    peak = plan.memory.peak if plan.rates.has_allocator else plan.needed
    predicted = {
        "plan.predicted_peak_gib": round(peak / GIB, 6),
        "plan.predicted_step_s": round(plan.step.seconds, 6),
        "plan.write": "",
        "plan.gpus": plan.sizes.ranks,
    }
    fields = {name.replace(".", "__"): value for name, value in (_chosen(plan) | predicted).items()}
    return configuration.to_toml(configuration.replace(config, **fields))
