"""The report of a rank that is out of memory: what held it, and which flag frees how much.

It measures memory by kind (account.py), frees the failed step's tensors, estimates on fake tensors what a
step needs (oom_estimate.py), computes what each flag frees (oom_advice.py), and writes the page
(oom_text.py). Imported only once memory has run out (oom.py).
"""

from __future__ import annotations

import dataclasses
import re
import resource
import socket
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fsdp.base.cgroup import memory_group
from fsdp.base.errors import ConfigError, one_line
from fsdp.base.streams import print_line
from fsdp.base.units import byte_size
from fsdp.config import Config, accepts, reshard_policy
from fsdp.dist.env import DistEnv, expandable_segments
from fsdp.memory import oom_text
from fsdp.memory.account import by_size, device_bytes, process_bytes, tally
from fsdp.memory.oom_advice import Advice, Footprint, Suggestion, advise
from fsdp.memory.oom_error import OomContext, OutOfMemory
from fsdp.memory.oom_estimate import activation_bytes
from fsdp.memory.resting import resting_bytes
from fsdp.models.chunked_loss import output_layer
from fsdp.models.units import blocks_of, find_units
from fsdp.parallel.activations import apply_activation_checkpointing

KEPT = 0.25
"""A larger share of memory cached by an allocator is reported first."""


@dataclass(frozen=True)
class OomReport:
    config: Config
    env: DistEnv
    run_dir: Path
    context: OomContext | None
    beyond: int
    """Bytes of the process before the first step that belong to no tensor."""

    def write(self, error: BaseException) -> OutOfMemory:
        """Writes and prints the page; the error returned has its summary in one line."""
        facts = self._measure(error)
        free_frames(error)
        advice, note = (
            self._advice(facts)
            if self.context is not None
            else (None, "It failed before the model was built.")
        )
        details = self._write(facts, advice, note)
        first = advice.first if advice is not None else None
        hint = f"{first.flags} frees {byte_size(first.bytes)}; {details}" if first else details
        return OutOfMemory(
            f"{facts.where()}: it held {by_size(facts.kinds)} "
            f"and requested {byte_size(facts.requested)} more.",
            hint,
        )

    def _write(self, facts: oom_text.OomFacts, advice: Advice | None, note: str) -> str:
        """Returns where the details are: on stderr alone if the run directory cannot be written."""
        text = oom_text.text(facts, advice, note)
        print_line(text)
        path = self.run_dir / f"oom-rank{self.env.rank}.txt"
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            return f"details above; {self.run_dir} cannot be written ({error.strerror})"
        return f"details in {path}"

    def _measure(self, error: BaseException) -> oom_text.OomFacts:
        """Call it while the failed step's tensors still exist."""
        context, device = self.context, self.env.device
        kinds = tally(context.root, context.optimizer, device.type) if context is not None else {}
        process, allocator = process_bytes(), device_bytes(device)
        held = allocator["allocated"] if allocator else max(0, process.get("rss_anon", 0) - self.beyond)
        if context is not None:
            kinds["activations"] = max(0, held - sum(kinds.values()))
        phases = context.phases if context is not None else None
        message = " ".join(str(error).split()) or type(error).__name__
        return oom_text.OomFacts(
            rank=self.env.rank,
            ranks=self.env.world_size,
            host=socket.gethostname(),
            device=str(device),
            phase=phases.name if phases else "start",
            step=phases.step if phases else 0,
            error=message[:400],
            kinds=kinds,
            held=held,
            requested=requested_bytes(message),
            process=process,
            allocator=allocator,
            limits=limits(),
        )

    def _advice(self, facts: oom_text.OomFacts) -> tuple[Advice | None, str]:
        assert self.context is not None
        footprint = footprint_of(self.config, self.context, self.env.device)
        activations = ActivationEstimates(
            self.context, self.config, self.env.device, footprint, facts.kinds["activations"]
        )
        advice = advise(
            footprint,
            activations,
            facts.held,
            facts.requested,
            self.env.device.type,
            partial(accepts, self.config),
        )
        special = comes_first(self.config, self.context, facts, sum(advice.needs.values()))
        if special is not None:
            advice.others, advice.first = [one for one in (advice.first, *advice.others) if one], special
        return advice, activations.note


@dataclass
class ActivationEstimates:
    """Activation bytes by micro-batch, checkpointing and loss chunk, each estimated once. `held`: the failed
    step's.
    """

    context: OomContext
    config: Config
    device: torch.device
    now: Footprint
    held: int
    note: str = field(default="", init=False)
    _known: dict[tuple[int, str, int], int] = field(default_factory=dict, init=False)

    def __call__(self, micro: int, checkpointing: str, loss_chunk: int) -> int:
        asked = (micro, checkpointing, loss_chunk)
        if asked not in self._known:
            try:
                found = self._estimate(*asked)
            except Exception as error:
                # A user's model may do what fake tensors do not support: the page has a note, and the
                # estimate is scaled from what was held.
                self.note = f"Some estimates on fake tensors failed: {one_line(error)[:200]}"
                same = (micro, self.now.checkpointing, self.now.loss_chunk)
                found = self._known.get(same, self.held * micro // self.now.micro)
            self._known[asked] = found
        return self._known[asked]

    def _estimate(self, micro: int, checkpointing: str, loss_chunk: int) -> int:
        kind: Any = checkpointing
        memory = dataclasses.replace(self.config.memory, activation_checkpointing=kind)

        def prepare(model: nn.Module) -> None:
            apply_activation_checkpointing(find_units(model, self.config.mesh.wrap), memory)

        samples = self.context.samples
        count = len(samples) if hasattr(samples, "__len__") else micro  # a stream has no length
        batch = samples.batch(np.arange(micro, dtype=np.int64) % count)
        built, computed = self.context.build(), self.context.dtypes.param
        return activation_bytes(
            built,
            batch,
            self.device,
            computed,
            prepare,
            self.context.loss,
            loss_chunk,
            self.config.train.z_loss,
        )


def footprint_of(config: Config, context: OomContext, device: torch.device) -> Footprint:
    """The configuration in numbers. A parameter counts in one unit only; those in no unit are the root's."""
    seen: set[int] = set()

    def count(modules: Sequence[nn.Module]) -> int:
        fresh = {id(p): p.numel() for module in modules for p in module.parameters() if id(p) not in seen}
        seen.update(fresh)
        return sum(fresh.values())

    units = (*(count(unit) for unit in context.units), count([context.root]))
    dtypes = context.dtypes
    resting = resting_bytes(config.optim, context.root, dtypes.master, dtypes.frozen)
    trained = resting.gradients // dtypes.master.itemsize
    return Footprint(
        units=units,
        trained=trained,
        shard=context.sizes.shard,
        replicate=context.sizes.replicate,
        master=dtypes.master.itemsize,
        param=dtypes.param.itemsize,
        reduce=dtypes.reduce.itemsize,
        state=resting.optimizer / max(1, trained),
        reshard=reshard_policy(config.mesh.reshard_after_forward),
        accumulate=config.mesh.accumulate,
        accumulation=context.batch.accumulation,
        micro=context.batch.micro_batch,
        checkpointing=config.memory.activation_checkpointing,
        counted=dtypes.param.itemsize,
        loss_chunk=config.memory.loss_chunk,
        chunkable=_is_chunkable(context),
        offload=config.memory.cpu_offload and device.type == "cuda",
        nvme=config.memory.nvme != "off",
        ddp=context.sizes.strategy == "ddp",
        recomputes=bool(blocks_of([list(unit) for unit in context.units])),
    )


def _is_chunkable(context: OomContext) -> bool:
    """Whether --memory.loss_chunk applies: the data has a target for each token, and the output layer is
    linear.
    """
    if context.loss is not None or not hasattr(context.samples, "__len__"):
        return False
    sample = context.samples.batch(np.zeros(1, np.int64))
    targets = sample.get("targets", sample.get("labels"))
    try:
        return targets is not None and targets.dim() > 1 and bool(output_layer(context.root))
    except ConfigError:
        return False


def comes_first(
    config: Config, context: OomContext, facts: oom_text.OomFacts, needs: int
) -> Suggestion | None:
    """Suggestions for memory that no step holds: an evaluation's, a save's, the allocator's cache."""
    if facts.phase == "evaluate":
        rows = config.train.eval_batch or context.batch.micro_batch
        if rows > 1:
            return Suggestion(
                f"--train.eval_batch {-(-rows // 2)}",
                facts.kinds["activations"] // 2,
                "smaller evaluation batches",
            )
    if facts.phase == "save" and config.checkpoint.mode == "async":
        copied = facts.kinds["parameters"] + facts.kinds["optimizer"]
        return Suggestion("--checkpoint.mode blocking", copied, "training waits for each save")
    if facts.allocator and not expandable_segments():
        unused = facts.allocator["reserved"] - facts.allocator["allocated"]
        if unused > facts.requested and unused > KEPT * facts.held:
            return Suggestion(
                "PYTORCH_ALLOC_CONF=expandable_segments:True",
                unused,
                "in the environment: free blocks are merged",
            )
    elif not facts.allocator and facts.held - needs > KEPT * needs:
        return Suggestion(
            "MALLOC_MMAP_THRESHOLD_=131072 MALLOC_TRIM_THRESHOLD_=131072",
            facts.held - needs,
            "in the environment: freed blocks are returned to the system at once, at the cost of page faults",
        )
    return None


# ---------------------------------------------------------------- the error and the limits


def requested_bytes(message: str) -> int:
    """Bytes of the failed allocation, from torch's message; 0 if it does not name them."""
    found = re.search(r"tried to allocate ([\d.]+) ?(bytes|KiB|MiB|GiB|TiB)", message, re.IGNORECASE)
    if not found:
        return 0
    scale = {"bytes": 0, "kib": 1, "mib": 2, "gib": 3, "tib": 4}[found[2].lower()]
    return round(float(found[1]) * 1024**scale)


def free_frames(error: BaseException) -> None:
    """Clears the frames of an error's tracebacks: they hold the step's tensors, and the page needs memory."""
    chain: BaseException | None = error
    while chain is not None:
        if chain.__traceback__ is not None:
            traceback.clear_frames(chain.__traceback__)
        chain = chain.__cause__ or chain.__context__
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def limits() -> dict[str, int]:
    """Memory limits of this process in bytes, by the name under which they are set."""
    found = {}
    for name, which in (("ulimit -v", resource.RLIMIT_AS), ("ulimit -d", resource.RLIMIT_DATA)):
        soft, _ = resource.getrlimit(which)
        if soft != resource.RLIM_INFINITY:
            found[name] = soft
    if (limit := memory_group().limit()) is not None:
        found["the cgroup"] = limit
    return found
