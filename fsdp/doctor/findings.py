"""What is to be thought of what the ranks saw: a pure function, so that every fault can be put before it.

A node is judged beside the others: the median is what is expected, and a maker's figure only where there is
one. A node that falls out gets its name on the exclude list, unless most of them would: then the fault is not
a node's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import median
from typing import Any, TypeVar

from fsdp.dist.preflight import RankFacts, differences

Key = TypeVar("Key")
Look = Mapping[str, Any]
"""What one rank saw, by stage; a stage that it did not come to is missing."""

SLOW_CUDA, SLOW_CPU = 0.85, 0.6
"""Of the median: GPUs of one kind differ by a few per cent, processes that share a CPU by more."""
OF_PEAK = 0.55
"""Of the maker's figure for dense products; 0.6 to 0.8 is usual for one of 8192 × 8192."""
LINK, DISK = 0.5, 0.25
SAME_PRODUCT = 1e-3
CLOCK_S = 1.0
FREE = 0.9
GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, where, and what to do. `out` where no training should be tried with it."""

    host: str
    rank: int | None
    what: str
    hint: str
    out: bool

    @property
    def where(self) -> str:
        return self.host + (f" (rank {self.rank})" if self.rank is not None else "")

    def __str__(self) -> str:
        return f"{self.where}: {self.what}. HINT: {self.hint}"


@dataclass(frozen=True)
class Diagnosis:
    findings: tuple[Finding, ...]
    exclude: tuple[str, ...]
    complete: bool
    nodes: int

    @property
    def fit(self) -> bool:
        return self.complete and not any(finding.out for finding in self.findings)

    def __str__(self) -> str:
        if self.fit:
            count = len(self.findings)
            odd = f"; {count} thing{'s are' if count > 1 else ' is'} odd" if count else ""
            return f"fit to train{odd}."
        if self.exclude:
            count = len(self.exclude)
            return (
                f"{count} node{'s fall' if count > 1 else ' falls'} out: --exclude={','.join(self.exclude)}"
            )
        return f"not fit to train{', and no single node is at fault' * (self.nodes > 1)}: see above."


@dataclass(frozen=True)
class NodeReports:
    """All looks, and who was to come: `hosts` by node as far as known, `nodes` the ranks of each."""

    looks: Mapping[int, Look]
    nodes: Sequence[Sequence[int]]
    hosts: Sequence[str]
    stages: Mapping[int, str]
    """Rank → the stage that it never came out of."""

    def host(self, rank: int) -> str:
        return self.hosts[next(n for n, ranks in enumerate(self.nodes) if rank in ranks)]

    def of_node(self, node: int, what: str, hint: str, *, out: bool) -> Finding:
        return Finding(self.hosts[node], None, what, hint, out)

    def of_rank(self, rank: int, what: str, hint: str, *, out: bool) -> Finding:
        return Finding(self.host(rank), rank, what, hint, out)

    def heads(self) -> Iterator[tuple[int, Look]]:
        """The first rank of each node, which looks at what the node shares."""
        return (
            (node, self.looks[ranks[0]]) for node, ranks in enumerate(self.nodes) if ranks[0] in self.looks
        )


def judge(scene: NodeReports) -> Diagnosis:
    judges: Sequence[Callable[[NodeReports], Iterator[Finding]]] = (
        _absent,
        _unfinished,
        _programs,
        _names,
        _ports,
        _devices,
        _memory,
        _within,
        _between,
        _storage,
        _disks,
        _clocks,
    )
    findings = [finding for one in judges for finding in one(scene)]
    out = list(dict.fromkeys(finding.host for finding in findings if finding.out))
    # With two nodes each is half: one may still be named. With one node there is none to leave out.
    few = len(out) * 2 <= len(scene.hosts) and len(scene.hosts) > 1
    complete = all(rank in scene.looks for ranks in scene.nodes for rank in ranks) and not scene.stages
    return Diagnosis(tuple(findings), tuple(out) if few else (), complete, len(scene.hosts))


# ---------------------------------------------------------------- who is there


def _absent(scene: NodeReports) -> Iterator[Finding]:
    for node, ranks in enumerate(scene.nodes):
        missing = [rank for rank in ranks if rank not in scene.looks]
        if missing:
            who = (
                "none of its ranks came"
                if len(missing) == len(ranks)
                else f"ranks {', '.join(map(str, missing))} never came"
            )
            yield scene.of_node(node, who, "see its log; does it reach the first node?", out=True)


def _unfinished(scene: NodeReports) -> Iterator[Finding]:
    """Those that others wait for are where no other is: the rarest stage names them."""
    if not scene.stages:
        return
    stages = list(scene.stages.values())
    rarest = min(stages, key=stages.count)
    for rank, stage in scene.stages.items():
        blamed = stage == rarest and len(set(stages)) > 1
        failure = scene.looks.get(rank, {}).get("failure")
        what = f"failed in: {stage} ({failure})" if failure else f"not done in time, still in: {stage}"
        yield scene.of_rank(rank, what, "--limit-s more, or leave it out", out=blamed)


def _programs(scene: NodeReports) -> Iterator[Finding]:
    everyone = [RankFacts(**look["facts"]) for look in scene.looks.values() if "facts" in look]
    for one in differences(everyone):
        for rank, value in list(one.others.items())[:8]:
            what = f"{one.what} {value or 'is missing'}, where most have {one.usual or 'none'}"
            yield scene.of_rank(rank, what, "the same environment on every node", out=one.fatal)


# ---------------------------------------------------------------- network


def _names(scene: NodeReports) -> Iterator[Finding]:
    for node, look in scene.heads():
        names = look.get("network", {})
        if names and not names["host_resolves"] and len(scene.nodes) > 1:
            hint = "add it to DNS or /etc/hosts, or export GLOO_SOCKET_IFNAME=INTERFACE"
            yield scene.of_node(
                node, f"its own name {names['host']} does not resolve", hint, out=not names["interface"]
            )


def _ports(scene: NodeReports) -> Iterator[Finding]:
    """Each broken pair is blamed on whichever of its two nodes is in more broken pairs, so that few are
    named.
    """
    broken: dict[tuple[int, int], str] = {}
    for node, look in scene.heads():
        for other, why in look.get("ports", {}).items():
            if why:
                broken[(node, int(other))] = why
    while broken:
        count = [sum(node in pair for pair in broken) for node in range(len(scene.nodes))]
        worst = max(range(len(count)), key=lambda node: (count[node], node))
        mine = {pair: why for pair, why in broken.items() if worst in pair}
        others = sorted({scene.hosts[node] for pair in mine for node in pair if node != worst})
        what = f"no connection between it and {', '.join(others[:4])} ({next(iter(mine.values()))})"
        yield scene.of_node(worst, what, "a firewall, a route, or a dead link", out=True)
        broken = {pair: why for pair, why in broken.items() if pair not in mine}


def can_meet(looks: Mapping[int, Look]) -> bool:
    """Whether a process group can be tried: every connection stood, and every rank speaks the same torch."""
    everyone = [RankFacts(**look["facts"]) for look in looks.values()]
    reached = not any(why for look in looks.values() for why in look.get("ports", {}).values())
    return reached and not any(one.fatal for one in differences(everyone))


# ---------------------------------------------------------------- devices


def _below(share: float, rates: Mapping[Key, float]) -> Iterator[tuple[Key, float, float]]:
    """Those that reach less than this share of the median: which, their rate, the median."""
    usual = median(rates.values()) if rates else 0.0
    yield from ((key, rate, usual) for key, rate in rates.items() if rate < share * usual)


def slow_ranks(looks: Mapping[int, Look]) -> dict[int, float]:
    """Rank → its share of the median among devices of its kind, where that is too little."""
    found = {}
    by_kind: dict[str, dict[int, float]] = {}
    for rank, look in looks.items():
        if "device" in look:
            by_kind.setdefault(look["facts"]["device"], {})[rank] = look["device"]["tflops"]
    for kind, rates in by_kind.items():
        found.update(
            {
                rank: rate / usual
                for rank, rate, usual in _below(SLOW_CPU if kind == "cpu" else SLOW_CUDA, rates)
            }
        )
    return found


def _devices(scene: NodeReports) -> Iterator[Finding]:
    seen = {rank: look for rank, look in scene.looks.items() if "device" in look}
    slow = slow_ranks(seen)
    for rank, share in slow.items():
        what = f"matrix product at {seen[rank]['device']['tflops']:.3g} TFLOP/s, {share:.0%} of the median"
        yield scene.of_rank(rank, what, "another job on it, its clocks, its cooling", out=True)
    products = {rank: look["device"]["product"] for rank, look in seen.items()}
    usual = median([value for value in products.values() if isfinite(value)] or [0.0])
    for rank, value in products.items():
        if not abs(value - usual) <= SAME_PRODUCT * abs(usual):  # also where it is not a number
            yield scene.of_rank(
                rank, f"computes wrong: {value:.6g} for {usual:.6g}", "take the device out", out=True
            )
    for rank, look in seen.items():
        for complaint in look["device"]["health"]:
            yield scene.of_rank(rank, complaint, "drain the node and reset the device", out=True)
        peak = look["device"]["peak_tflops"]
        if peak and look["device"]["tflops"] < OF_PEAK * peak and rank not in slow:
            what = (
                f"matrix product at {look['device']['tflops']:.0f} of {peak:.0f} TFLOP/s that its maker gives"
            )
            yield scene.of_rank(rank, what, "power limit, clocks, or another job on it", out=False)


def _memory(scene: NodeReports) -> Iterator[Finding]:
    for rank, look in scene.looks.items():
        about = look.get("device")
        if about and look["facts"]["device"] != "cpu" and about["memory_free"] < FREE * about["memory_total"]:
            used = (about["memory_total"] - about["memory_free"]) / GIB
            what = f"{used:.1f} of {about['memory_total'] / GIB:.0f} GiB of its device are taken"
            yield scene.of_rank(rank, what, "nvidia-smi on that node says by whom", out=True)


# ---------------------------------------------------------------- links


def _rate(link: Mapping[str, float]) -> float:
    return min(link["gather_gb_s"], link["scatter_gb_s"])


def _within(scene: NodeReports) -> Iterator[Finding]:
    rates = {
        node: _rate(look["links"]["within"])
        for node, look in scene.heads()
        if "within" in look.get("links", {})
    }
    for node, rate, usual in _below(LINK, rates):
        what = f"{rate:.3g} GB/s within the node, {rate / usual:.0%} of the median"
        yield scene.of_node(
            node, what, "NCCL_DEBUG=INFO says which way it goes; NVLink or PCIe is down", out=True
        )


def _between(scene: NodeReports) -> Iterator[Finding]:
    """A node all of whose links are slow is at fault; a single slow link is told of both its ends."""
    rates: dict[tuple[int, int], float] = {}
    for node, look in scene.heads():
        for other, link in look.get("links", {}).get("between", {}).items():
            pair = (min(node, int(other)), max(node, int(other)))
            rates[pair] = min(rates.get(pair, float("inf")), _rate(link))
    usual = median(rates.values()) if rates else 0.0
    slow = {pair for pair, _, _ in _below(LINK, rates)}
    for node in range(len(scene.nodes)):
        mine = [pair for pair in rates if node in pair]
        if slow and mine and all(pair in slow for pair in mine) and len(mine) > 1:
            what = f"{max(rates[pair] for pair in mine):.3g} GB/s to both its neighbours, where {usual:.3g} is usual"
            yield scene.of_node(
                node, what, "its network card, its cable, NCCL_IB_HCA or NCCL_SOCKET_IFNAME", out=True
            )
            slow -= set(mine)
    for one, other in sorted(slow):
        what = f"{rates[(one, other)]:.3g} GB/s to {scene.hosts[other]}, where {usual:.3g} is usual"
        yield scene.of_node(one, what, "the link between the two", out=False)


# ---------------------------------------------------------------- storage and clocks


def _storage(scene: NodeReports) -> Iterator[Finding]:
    heads = {node: look["storage"] for node, look in scene.heads() if "storage" in look}
    blind = {node: about["unseen"] for node, about in heads.items() if about.get("unseen")}
    for node, about in heads.items():
        if "error" in about:
            yield scene.of_node(
                node, f"{about['folder']} {about['error']}", "--dir FOLDER on shared storage", out=True
            )
    # What the first node wrote is what a run's checkpoints are: a node that does not see it does not share.
    for node, others in blind.items():
        if 0 in others and node:
            names = ", ".join(scene.hosts[other] for other in others[:4])
            what = f"does not see what {names} wrote into {heads[node]['folder']}"
            yield scene.of_node(
                node, what, "mount the shared storage there, or --dir FOLDER that is shared", out=True
            )


def _disks(scene: NodeReports) -> Iterator[Finding]:
    for name, words in (("write_mb_s", "writes"), ("read_mb_s", "reads")):
        rates = {
            node: look["storage"][name] for node, look in scene.heads() if name in look.get("storage", {})
        }
        for node, rate, usual in _below(DISK, rates):
            what = f"{words} {rate:.0f} MB/s, where {usual:.0f} is usual"
            yield scene.of_node(node, what, "its mount, or its way to the storage", out=False)


def _clocks(scene: NodeReports) -> Iterator[Finding]:
    for node, look in scene.heads():
        offset = look.get("links", {}).get("clock_s", 0.0)
        if abs(offset) > CLOCK_S:
            what = (
                f"its clock is {abs(offset):.1f} s {'ahead of' if offset > 0 else 'behind'} the first node's"
            )
            yield scene.of_node(node, what, "chronyc tracking, or timedatectl, on that node", out=False)
