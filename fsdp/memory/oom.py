"""Out of memory, in words: which rank, what held how much, what a step needs, which flag frees how much.

    RUN/oom-rank3.txt, and the text on stderr

It costs nothing until an error reaches it. Then it measures memory by kind (account.py), frees the failed
step's tensors, and asks oom_advice.py what to change. A process that the kernel's OOM killer ends writes
nothing: the watch names it (fsdp/watch).
"""

from __future__ import annotations

import errno
import re
import resource
import socket
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from fsdp.base.errors import Scope, ShardrunError
from fsdp.base.proc import memory_bytes, memory_group
from fsdp.base.text import byte_size, print_line
from fsdp.config import Config, accepts
from fsdp.distributed.env import DistEnv
from fsdp.memory.account import OomContext, OomFacts, by_size, tally

if TYPE_CHECKING:
    pass

MESSAGES = ("can't allocate memory", "not enough memory", "std::bad_alloc", "out of memory")
"""Parts of torch's error messages on the CPU, and where the class torch.OutOfMemoryError is lost."""


class OutOfMemory(ShardrunError):
    """Memory ran out on one rank; the page has the details."""

    exit_code, verdict = 6, "memory"
    scope: Scope = "rank"


@dataclass
class OutOfMemoryHandler:
    """Context manager of a run: an out-of-memory error becomes a page and OutOfMemory; other errors pass."""

    config: Config
    env: DistEnv
    run_dir: Path
    context: OomContext | None = None
    beyond: int = field(default=0, init=False)
    """Bytes of the process before the first step that belong to no tensor."""

    def set_context(self, context: OomContext) -> None:
        """Call it once the model is materialized and before the first step."""
        self.context = context
        resting = sum(tally(context.sharded.root, None, "cpu").values())
        self.beyond = max(0, memory_bytes().get("RssAnon", 0) - resting)

    def __enter__(self) -> OutOfMemoryHandler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if error is not None and is_out_of_memory(error):
            raise self.explain(error) from error

    def explain(self, error: BaseException) -> OutOfMemory:
        """Writes and prints the page; the error returned has its summary in one line."""
        from fsdp.memory.oom_advice import activation_estimates, advise, comes_first, footprint_of, page_text

        facts = measure(error, self.env, self.context, self.beyond)
        free_frames(error)
        advice, notes = None, ["It failed before the model was built."]
        if (context := self.context) is not None:
            config, device = self.config, self.env.device
            activations, notes = activation_estimates(config, context, device, facts.kinds["activations"])
            now, special = footprint_of(config, context, device), comes_first(config, context, facts)
            advice = advise(now, activations, facts, partial(accepts, config), special)
        page = page_text(facts, advice, notes)
        print_line(page)
        path = self.run_dir / f"oom-rank{self.env.rank}.txt"
        hint = f"details in {path}"
        try:
            path.write_text(page, encoding="utf-8")
        except OSError as failed:
            hint = f"details above; {self.run_dir} cannot be written ({failed.strerror})"
        if advice is not None and advice.first is not None:
            hint = f"{advice.first.flags} frees {byte_size(advice.first.bytes)}; {hint}"
        held = f"it held {by_size(facts.kinds)} and requested {byte_size(facts.requested)} more"
        return OutOfMemory(f"{facts.title}: {held}.", hint)


# ---------------------------------------------------------------- the error and what is measured


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error or one of its causes is an out-of-memory error."""
    for cause in _chain(error):
        if isinstance(cause, ShardrunError):
            return False
        if isinstance(cause, (torch.OutOfMemoryError, MemoryError)):
            return True
        if isinstance(cause, RuntimeError) and any(message in str(cause) for message in MESSAGES):
            return True
        if getattr(cause, "errno", None) == errno.ENOMEM:
            return True
    return False


def free_frames(error: BaseException) -> None:
    """Clears the frames of an error's tracebacks: they hold the step's tensors, and the page needs memory."""
    for cause in _chain(error):
        traceback.clear_frames(cause.__traceback__)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def requested_bytes(message: str) -> int:
    """Bytes of the failed allocation, from torch's message; 0 if it does not name them."""
    match = re.search(r"tried to allocate ([\d.]+) ?(bytes|KiB|MiB|GiB|TiB)", message, re.IGNORECASE)
    units = ("bytes", "kib", "mib", "gib", "tib")
    return round(float(match[1]) * 1024 ** units.index(match[2].lower())) if match else 0


def measure(error: BaseException, env: DistEnv, context: OomContext | None, beyond: int) -> OomFacts:
    """Call it while the failed step's tensors still exist."""
    device = env.device
    kinds = tally(context.sharded.root, context.optimizer, device.type) if context is not None else {}
    around = [(f"limit: {name}", byte_size(limit)) for name, limit in limits().items()]
    if device.type == "cuda":
        held = torch.cuda.memory_allocated(device)
        free, total = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - held
        around.append(("reserved by the allocator, unused", byte_size(unused)))
        around.append(("free on the device", f"{byte_size(free)} of {byte_size(total)}"))
    else:
        process = memory_bytes()
        held = max(0, process.get("RssAnon", 0) - beyond)
        around += [(f"process {name}", byte_size(process.get(name, 0))) for name in ("RssAnon", "VmSize")]
    if context is not None:
        kinds["activations"] = max(0, held - sum(kinds.values()))
    phases = context.phases if context is not None else None
    phase, step = (phases.name, phases.step) if phases else ("start", 0)
    message = " ".join(str(error).split()) or type(error).__name__
    rank = f"rank {env.rank} of {env.world_size} ({socket.gethostname()}, {device})"
    return OomFacts(
        title=f"{rank} ran out of memory in {phase}" + (f" of step {step}" if step else ""),
        error=message[:400],
        device=device.type,
        phase=phase,
        kinds=kinds,
        held=held,
        requested=requested_bytes(message),
        around=around,
    )


def limits() -> dict[str, int]:
    """Memory limits of this process in bytes, by the name under which they are set."""
    group, soft = memory_group().limit(), resource.getrlimit(resource.RLIMIT_AS)[0]
    bounds = {"the cgroup": group, "ulimit -v": None if soft == resource.RLIM_INFINITY else soft}
    return {name: limit for name, limit in bounds.items() if limit is not None}
