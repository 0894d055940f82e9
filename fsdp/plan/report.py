"""The table, the best line to paste, the recipe, and the lines below them. Formats only: numbers come
from elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from fsdp import config as configuration
from fsdp.base.text import columns
from fsdp.config import Config
from fsdp.plan.estimate import SCRATCH_MARGIN, Plan, gib, not_modelled, uncounted_scratch
from fsdp.plan.model_shapes import subject_of
from fsdp.plan.rates import note_on_rates
from fsdp.run.job import model_of
from fsdp.run.summary import units_line
from fsdp.rundir.paths import write_atomically

_CHECKPOINTING = {"none": "none", "ops": "per operation", "full": "full"}


ROWS = 12
"""Of the table of plans."""


def table(plans: Sequence[Plan]) -> list[str]:
    if not plans:
        return []
    unit = "tok" if plans[0].tokens_per_sample else "sample"
    limit = gib(plans[0].rates.memory)
    head = ["mesh", "reshard", "checkpointing", "micro-batch", "peak GiB", f"fits {limit:.0f}", "step s"]
    head += [f"{unit}/s/GPU", "MFU", "bound by"]
    return [f"  {line}" for line in columns([head, *(_row(plan) for plan in plans[:ROWS])])]


def _row(plan: Plan) -> list[str]:
    memory, mesh = plan.config.memory, plan.config.mesh
    kind = _CHECKPOINTING[memory.activation_checkpointing]
    if memory.activation_checkpointing == "full" and memory.activation_checkpointing_every > 1:
        kind += f", each {memory.activation_checkpointing_every}."
    micro = f"{plan.micro_batch}" + (f" × {plan.accumulation}" if plan.accumulation > 1 else "")
    return [
        f"{plan.sizes.replicate}×{plan.sizes.shard}" + (" ddp" if plan.sizes.strategy == "ddp" else ""),
        "-" if plan.sizes.strategy == "ddp" else mesh.reshard_after_forward,
        kind + (", offload" if memory.cpu_offload else ""),
        micro,
        f"{gib(plan.needed):.1f}",
        "yes" if plan.fits else "no",
        f"{plan.step.seconds:.3f}",
        f"{plan.tokens_s:,.0f}",
        f"{plan.mfu:.1%}",
        plan.step.bound_by,
    ]


def flags_of(plan: Plan) -> str:
    """The flags of this plan, beside the user's own."""
    sizes, memory = plan.sizes, plan.config.memory
    words = [f"--mesh.strategy {sizes.strategy}", f"--mesh.replicate {sizes.replicate}"]
    if sizes.strategy != "ddp":
        words += [
            f"--mesh.shard {sizes.shard}",
            f"--mesh.reshard_after_forward {plan.config.mesh.reshard_after_forward}",
        ]
    words.append(f"--memory.activation_checkpointing {memory.activation_checkpointing}")
    words += ["--memory.cpu_offload true"] if memory.cpu_offload else []
    words.append(
        f"--train.global_batch {plan.config.train.global_batch} --train.micro_batch {plan.micro_batch}"
    )
    return " ".join(words)


def recipe(plan: Plan, config: Config) -> Config:
    """The user's configuration with the plan in it, and the prediction, for the run's end to compare."""
    sizes = plan.sizes
    changes: dict[str, object] = {
        "mesh__strategy": sizes.strategy, "mesh__replicate": sizes.replicate,
        "mesh__shard": 0 if sizes.strategy == "ddp" else sizes.shard,
        "mesh__reshard_after_forward": plan.config.mesh.reshard_after_forward,
        "memory__activation_checkpointing": plan.config.memory.activation_checkpointing,
        "memory__cpu_offload": plan.config.memory.cpu_offload,
        "train__global_batch": plan.config.train.global_batch,
        "train__micro_batch": plan.micro_batch, "plan__predicted_peak_gib": round(gib(_measurable(plan)), 6),
        "plan__predicted_step_s": round(plan.step.seconds, 6), "plan__write": "", "plan__gpus": sizes.ranks,
    }  # fmt: skip
    return configuration.replace(config, **changes)


def _measurable(plan: Plan) -> float:
    """The peak that the run itself will read: the allocator's peak of tensors on CUDA, the process's on
    CPU.
    """
    return plan.memory.peak if plan.rates.has_allocator else plan.needed


def write_recipe(plan: Plan, config: Config) -> None:
    write_atomically(Path(config.plan.write), configuration.to_toml(recipe(plan, config)))


# ---------------------------------------------------------------- what follows from the best


def details(plan: Plan, config: Config) -> list[str]:
    lines = [f"memory on rank 0, highest in {plan.memory.where}: " + ", ".join(_kinds(plan))]
    if plan.rates.has_allocator:
        lines.append(
            f"tensors {gib(plan.memory.peak):.2f} GiB, held by the allocator "
            f"{gib(plan.memory.reserved):.2f}, with driver and "
            f"NCCL {gib(plan.needed):.2f}; between steps {gib(plan.memory.resting):.2f}"
        )
    if plan.rates.has_allocator and (plan.memory.host or plan.staged):
        lines.append(
            f"on the host, a rank: {gib(plan.memory.host + plan.staged):.2f} GiB, {gib(plan.staged):.2f} "
            "of it a save's copy"
        )
    spec = subject_of(plan.config.model, plan.config.data).spec
    units = units_line(model_of(plan.config, spec), plan.config.mesh.wrap)
    lines.append(f"units: {units}; python train.py --dry-run lists each with its shards")
    lines += [_time(plan), *_links(plan), *_goal(plan, config)]
    return lines


def _kinds(plan: Plan) -> Iterator[str]:
    for name, size in sorted(plan.memory.kinds.items(), key=lambda item: -item[1]):
        if size >= 1e-3 * max(1.0, plan.memory.peak):
            yield f"{name.replace('_', ' ')} {gib(size):.2f}"


def _time(plan: Plan) -> str:
    parts = sorted(
        ((s, n) for n, s in plan.step.parts.items() if s >= 0.005 * plan.step.seconds and n != "host"),
        reverse=True,
    )
    return (
        f"step {plan.step.seconds:.3f} s: "
        + ", ".join(f"{name} {seconds:.3f}" for seconds, name in parts)
        + f"; communication not hidden {plan.step.exposed:.3f}"
    )


def _links(plan: Plan) -> list[str]:
    if plan.sizes.ranks == 1:
        return []
    return [
        f"a step and GPU sends {plan.step.within / 1e9:.2f} GB within its node, "
        f"{plan.step.between / 1e9:.2f} GB between nodes"
    ]


def _goal(plan: Plan, config: Config) -> list[str]:
    if not config.plan.tokens:
        return []
    hours = config.plan.tokens / (plan.samples_s * (plan.tokens_per_sample or 1)) / 3600
    unit = "tokens" if plan.tokens_per_sample else "samples"
    gpu_hours = hours * plan.sizes.ranks
    return [f"{config.plan.tokens:.3g} {unit}: {hours:,.1f} hours, {gpu_hours:,.0f} GPU-hours"]


def notes(config: Config) -> list[str]:
    subject = subject_of(config.model, config.data)
    found = [note for note in (subject.note, note_on_rates(config.plan.gpu)) if note]
    if scratch := uncounted_scratch(config, subject):
        found.append(
            f"{scratch}: what their kernels take beside tensors; the margin is {SCRATCH_MARGIN:.0%} "
            "unless --plan.margin is given"
        )
    return [*found, *not_modelled(config)]
