"""When memory runs out on a rank: a page that says which rank, in which phase, what held how much, and what
to turn.

    RUN/oom-rank3.txt, RUN/oom-rank3.html, and the text on stderr

A Witness stands around the run and costs nothing until an error passes it. Then it looks at what stands
(account.py), lets go of what the failed step held, counts on fake tensors what a step needs
(oom_estimate.py), and reckons what each flag would give back (oom_advice.py). A process that the kernel's OOM
killer ends hears nothing and leaves no page: docs/oom.md.
"""

from __future__ import annotations

import dataclasses
import errno
import re
import resource
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from fsdp.base.errors import ShardrunError
from fsdp.base.phases import Phases
from fsdp.config import Config, reshard_policy
from fsdp.dist.env import DistEnv
from fsdp.dist.mesh import BatchPlan, MeshSizes
from fsdp.memory import oom_page
from fsdp.memory.account import by_size, device_bytes, human, process_bytes, tally
from fsdp.memory.oom_advice import Advice, Footprint, Suggestion, advise
from fsdp.memory.oom_estimate import activation_bytes
from fsdp.memory.resting import resting_bytes
from fsdp.models.blocks import blocks_of, find_units
from fsdp.parallel.activations import apply_activation_checkpointing

WORDS = (
    "can't allocate memory",
    "not enough memory",
    "std::bad_alloc",
    "CUDA out of memory",
    "out of memory",
)
"""How torch says it on the CPU and in the places where CUDA's own class is lost."""


KEPT = 0.25
"""A share that an allocator may well keep beside what tensors hold; more of it is worth a word."""


class OutOfMemory(ShardrunError):
    """One rank's; the page says the rest."""

    exit_code = 6
    scope: Literal["all", "node", "rank"] = "rank"


class SizedDataset(Protocol):
    """What the page asks of a data set."""

    def __len__(self) -> int: ...

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]: ...


@dataclass(kw_only=True)
class OomContext:
    """What the loop knows of the model and its step, told as it comes to be; None is what was not there yet."""

    sizes: MeshSizes
    batch: BatchPlan
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
    """master, param, reduce"""
    build: Callable[[], nn.Module]
    """The model on meta, as it is trained."""
    samples: SizedDataset
    root: nn.Module
    units: Sequence[Sequence[nn.Module]]
    optimizer: torch.optim.Optimizer | None = None
    phases: Phases | None = None


@dataclass
class OutOfMemoryHandler:
    """Around the run: an error that says memory is out leaves as OutOfMemory, its page written. Others pass."""

    config: Config
    env: DistEnv
    run_dir: Path
    scene: OomContext | None = None
    beyond: int = field(default=0, init=False)

    def sees(self, scene: OomContext) -> None:
        """The model is real, nothing has run: what the process holds beyond it is its own, not a step's."""
        self.scene = scene
        resting = sum(tally(scene.root, None, "cpu").values())
        self.beyond = max(0, process_bytes().get("rss_anon", 0) - resting)

    def __enter__(self) -> OutOfMemoryHandler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if error is not None and is_out_of_memory(error):
            raise self.verdict(error) from error

    def verdict(self, error: BaseException) -> OutOfMemory:
        """Writes the page, prints it, and says it in one line."""
        facts = self._look(error)
        let_go(error)
        advice, note = (
            self._advice(facts) if self.scene is not None else (None, "it failed before the model was there")
        )
        text = oom_page.text(facts, advice, note)
        path = self.run_dir / f"oom-rank{self.env.rank}.txt"
        path.write_text(text, encoding="utf-8")
        path.with_suffix(".html").write_text(oom_page.html_page(facts, advice, note), encoding="utf-8")
        print(text, file=sys.stderr, flush=True)
        first = advice.first if advice is not None else None
        hint = (
            f"{first.flags} gives back {human(first.bytes)}; {path} says more"
            if first
            else f"{path} says more"
        )
        return OutOfMemory(
            f"{facts.where()}: {by_size(facts.kinds)} stood, {human(facts.asked)} more were asked.", hint
        )

    def _look(self, error: BaseException) -> oom_page.OomFacts:
        """While the failed step's tensors are still there."""
        scene, device = self.scene, self.env.device
        kinds = tally(scene.root, scene.optimizer, device.type) if scene is not None else {}
        process, allocator = process_bytes(), device_bytes(device)
        held = allocator["allocated"] if allocator else max(0, process.get("rss_anon", 0) - self.beyond)
        if scene is not None:
            kinds["activations"] = max(0, held - sum(kinds.values()))
        phases = scene.phases if scene is not None else None
        said = " ".join(str(error).split()) or type(error).__name__
        return oom_page.OomFacts(
            rank=self.env.rank,
            ranks=self.env.world_size,
            host=socket.gethostname(),
            device=str(device),
            phase=phases.name if phases else "start",
            step=phases.step if phases else 0,
            said=said[:400],
            kinds=kinds,
            held=held,
            asked=asked_bytes(said),
            process=process,
            allocator=allocator,
            limits=limits(),
        )

    def _advice(self, facts: oom_page.OomFacts) -> tuple[Advice | None, str]:
        assert self.scene is not None
        footprint = footprint_of(self.config, self.scene, self.env.device)
        activations = Counting(
            self.scene, self.config, self.env.device, footprint, facts.kinds["activations"]
        )
        advice = advise(footprint, activations, facts.held, facts.asked, self.env.device.type)
        special = comes_first(self.config, self.scene, facts, sum(advice.needs.values()))
        if special is not None:
            advice.others, advice.first = [one for one in (advice.first, *advice.others) if one], special
        return advice, activations.note


@dataclass
class Counting:
    """Activations by micro-batch and checkpointing, each counted once. `held` is what the failed step had of
    them.
    """

    scene: OomContext
    config: Config
    device: torch.device
    now: Footprint
    held: int
    note: str = field(default="", init=False)
    _known: dict[tuple[int, str], int] = field(default_factory=dict, init=False)

    def __call__(self, micro: int, checkpointing: str) -> int:
        if (micro, checkpointing) not in self._known:
            try:
                found = self._count(micro, checkpointing)
            except Exception as error:
                # A person's own model may do what fake tensors cannot: the page says so, and reckons from
                # what was held.
                said = " ".join(str(error).split())[:200]
                self.note = f"not every case could be counted on fake tensors: {type(error).__name__}: {said}"
                found = self._known.get((micro, self.now.checkpointing), self.held * micro // self.now.micro)
            self._known[micro, checkpointing] = found
        return self._known[micro, checkpointing]

    def _count(self, micro: int, checkpointing: str) -> int:
        kind: Any = checkpointing
        memory = dataclasses.replace(self.config.memory, activation_checkpointing=kind)

        def prepare(model: nn.Module) -> None:
            apply_activation_checkpointing(find_units(model, self.config.mesh.wrap), memory)

        batch = self.scene.samples.batch(np.arange(micro, dtype=np.int64) % len(self.scene.samples))
        return activation_bytes(self.scene.build(), batch, self.device, self.scene.dtypes[1], prepare)


def footprint_of(config: Config, scene: OomContext, device: torch.device) -> Footprint:
    """The configuration in numbers. Parameters of one unit are no other's; what is in none is the root's."""
    seen: set[int] = set()

    def count(modules: Sequence[nn.Module]) -> int:
        fresh = {id(p): p.numel() for module in modules for p in module.parameters() if id(p) not in seen}
        seen.update(fresh)
        return sum(fresh.values())

    units = (*(count(unit) for unit in scene.units), count([scene.root]))
    resting = resting_bytes(config.optim, scene.root.parameters(), scene.dtypes[0])
    master, param, reduce = (dtype.itemsize for dtype in scene.dtypes)
    trained = resting.gradients // master
    return Footprint(
        units=units,
        trained=trained,
        shard=scene.sizes.shard,
        replicate=scene.sizes.replicate,
        master=master,
        param=param,
        reduce=reduce,
        state=resting.optimizer / max(1, trained),
        reshard=reshard_policy(config.mesh.reshard_after_forward),
        accumulate=config.mesh.accumulate,
        accumulation=scene.batch.accumulation,
        micro=scene.batch.micro_batch,
        checkpointing=config.memory.activation_checkpointing,
        counted=param,
        offload=config.memory.cpu_offload and device.type == "cuda",
        nvme=getattr(config.memory, "nvme", "off") != "off",
        ddp=scene.sizes.strategy == "ddp",
        recomputes=bool(blocks_of([list(unit) for unit in scene.units])),
    )


def comes_first(config: Config, scene: OomContext, facts: oom_page.OomFacts, needs: int) -> Suggestion | None:
    """What an evaluation or a save holds and no step does; what no tensor holds, but the allocator keeps."""
    if facts.phase == "evaluate":
        rows = config.train.eval_batch or scene.batch.micro_batch
        if rows > 1:
            return Suggestion(
                f"--train.eval_batch {-(-rows // 2)}",
                facts.kinds["activations"] // 2,
                "smaller evaluation batches",
            )
    if facts.phase == "save" and config.checkpoint.mode == "async":
        copied = facts.kinds["parameters"] + facts.kinds["optimizer"]
        return Suggestion("--checkpoint.mode blocking", copied, "training waits for each save")
    if facts.allocator:
        unused = facts.allocator["reserved"] - facts.allocator["allocated"]
        if unused > facts.asked and unused > KEPT * facts.held:
            return Suggestion(
                "PYTORCH_ALLOC_CONF=expandable_segments:True",
                unused,
                "in the environment: its free blocks join",
            )
    elif facts.held - needs > KEPT * needs:
        return Suggestion(
            "MALLOC_MMAP_THRESHOLD_=131072 MALLOC_TRIM_THRESHOLD_=131072",
            facts.held - needs,
            "in the environment: freed blocks go back at once, at the price of page faults",
        )
    return None


# ---------------------------------------------------------------- the error and the limits


def is_out_of_memory(error: BaseException) -> bool:
    """The error or what caused it."""
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, ShardrunError):
            return False
        if isinstance(chain, (torch.OutOfMemoryError, MemoryError)):
            return True
        if isinstance(chain, RuntimeError) and any(words in str(chain) for words in WORDS):
            return True
        if isinstance(chain, OSError) and chain.errno == errno.ENOMEM:
            return True
        chain = chain.__cause__ or chain.__context__
    return False


def asked_bytes(said: str) -> int:
    """What could not be had, in torch's own words; 0 where they do not say."""
    found = re.search(r"tried to allocate ([\d.]+) ?(bytes|KiB|MiB|GiB|TiB)", said, re.IGNORECASE)
    if not found:
        return 0
    scale = {"bytes": 0, "kib": 1, "mib": 2, "gib": 3, "tib": 4}[found[2].lower()]
    return round(float(found[1]) * 1024**scale)


def let_go(error: BaseException) -> None:
    """The frames that an error keeps alive hold the step's tensors: the page needs their room."""
    chain: BaseException | None = error
    while chain is not None:
        if chain.__traceback__ is not None:
            traceback.clear_frames(chain.__traceback__)
        chain = chain.__cause__ or chain.__context__
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def limits() -> dict[str, int]:
    """What bounds this process, in bytes, by the name that a person would look for."""
    found = {}
    for name, which in (("ulimit -v", resource.RLIMIT_AS), ("ulimit -d", resource.RLIMIT_DATA)):
        soft, _ = resource.getrlimit(which)
        if soft != resource.RLIM_INFINITY:
            found[name] = soft
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limit = Path(name).read_text(encoding="ascii").strip()
        except OSError:
            continue
        if limit.isdigit() and int(limit) < 1 << 60:
            found["the cgroup"] = int(limit)
    return found
