"""One rank's way through the stages. What it sees goes into the meeting's store at once, so that rank 0 can
tell of it even when a later stage hangs; a process group is only tried when every connection stood.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fsdp.dist.env import DistEnv, interface_is_given, meeting_address
from fsdp.dist.preflight import facts_of
from fsdp.dist.process_group import meeting_store, process_group
from fsdp.doctor import device, links, network, storage
from fsdp.doctor.findings import NodeReports, can_meet, slow_ranks

log = logging.getLogger(__name__)

AGAIN = 2
"""A rank that looks slow may have been disturbed: all measure so often again, and the best counts."""
LEAVE_S = 5.0


@dataclass
class Visit:
    """One rank, its store, and what it has seen so far."""

    env: DistEnv
    store: dist.Store
    folder: Path
    ends: float
    look: dict[str, Any] = field(default_factory=dict)

    def stage(self, name: str) -> None:
        self.store.set(f"stage/{self.env.rank}", name)

    def tell(self, **seen: Any) -> None:
        self.look |= seen
        self.store.set(f"look/{self.env.rank}", json.dumps(self.look))

    @property
    def left_s(self) -> float:
        return max(0.1, self.ends - time.monotonic())

    def everyone(self, key: str, ranks: Sequence[int] | None = None) -> dict[int, Any]:
        """What each rank (or each of these) has put under this key; waits for them."""
        wanted = range(self.env.world_size) if ranks is None else ranks
        self.store.wait([f"{key}/{rank}" for rank in wanted], timedelta(seconds=self.left_s))
        return {rank: json.loads(self.store.get(f"{key}/{rank}")) for rank in wanted}

    def meet(self, name: str) -> dict[int, dict[str, Any]]:
        """Everybody's look as it stands after a stage."""
        self.stage(f"waiting for the others after {name}")
        self.store.set(f"{name}/{self.env.rank}", json.dumps(self.look))
        return self.everyone(name)


def examine(visit: Visit) -> None:
    """All stages. Raises what a store or a collective raises when time is up; what was seen until then has
    been told.
    """
    env = visit.env
    visit.stage("meeting the others")
    place = {"node": env.node_rank, "local_rank": env.local_rank, "host": facts_of(env).host}
    visit.store.set(f"here/{env.rank}", json.dumps(place))
    visit.tell(facts=facts_of(env).as_json())
    visit.everyone("here")
    _look_at_network(visit)
    _look_at_device(visit)
    looks = visit.meet("device")
    if can_meet(looks) and env.world_size > 1:
        _look_at_links(visit)
    _look_at_storage(visit)
    visit.stage("done")
    visit.tell(done=True)
    # Rank 0 tells of all, and must not do so while another is about to say that it is done.
    over(visit)
    visit.everyone("over")


def over(visit: Visit) -> None:
    """This rank says nothing more."""
    visit.store.set(f"over/{visit.env.rank}", "true")


def nodes_of(here: dict[int, Any]) -> list[list[int]]:
    """The ranks of each node, its first rank first."""
    count = max(one["node"] for one in here.values()) + 1
    return [[rank for rank in sorted(here) if here[rank]["node"] == node] for node in range(count)]


def scene_of(visit: Visit, store: dist.Store) -> NodeReports:
    """What is known now, without waiting for anybody: through a store of its own, as the main thread may
    stand in another.
    """
    env = visit.env
    here = _known(store, "here", env.world_size)
    looks = _known(store, "look", env.world_size)
    # A rank that never came has its node's place, where launchers give each node as many as this one.
    per_node = max(1, env.local_world_size)
    for rank in range(env.world_size):
        here.setdefault(
            rank,
            {"node": min(rank // per_node, env.num_nodes - 1), "local_rank": rank % per_node, "host": ""},
        )
    nodes = nodes_of(here)
    hosts = [
        next((here[r]["host"] for r in ranks if here[r]["host"]), f"node {n}")
        for n, ranks in enumerate(nodes)
    ]
    stages = {
        rank: store.get(f"stage/{rank}").decode() for rank, look in looks.items() if not look.get("done")
    }
    return NodeReports(looks, nodes, hosts, stages)


def _known(store: dist.Store, key: str, ranks: int) -> dict[int, Any]:
    return {
        rank: json.loads(store.get(f"{key}/{rank}"))
        for rank in range(ranks)
        if store.check([f"{key}/{rank}"])
    }


# ---------------------------------------------------------------- stages


def _heads(visit: Visit) -> list[int]:
    return [ranks[0] for ranks in nodes_of(visit.everyone("here")) if ranks]


def _look_at_network(visit: Visit) -> None:
    visit.stage("names and ports")
    env, heads = visit.env, _heads(visit)
    if env.rank not in heads or len(heads) == 1:
        return
    seen = network.look(visit.look["facts"]["host"], meeting_address()) | {"interface": interface_is_given()}
    with network.listener() as port:
        visit.store.set(f"place/{env.rank}", json.dumps([seen["address"], port]))
        places = visit.everyone("place", heads)
        found = network.reach(env.node_rank, {node: tuple(places[rank]) for node, rank in enumerate(heads)})
        visit.tell(network=seen, ports=found)
        visit.store.set(f"reached/{env.rank}", "true")
        visit.stage("waiting for the others' connections")
        visit.everyone("reached", heads)  # the port stays open until nobody needs it


def _look_at_device(visit: Visit) -> None:
    """All at once, as in training; again where one looks slow."""
    env = visit.env
    for turn in range(1 + AGAIN):
        visit.meet(f"before-product-{turn}")
        visit.stage("a matrix product")
        seen = device.look(env.device, visit.look["facts"]["device"])
        before = visit.look.get("device", {}).get("tflops", 0.0)
        visit.tell(device=seen | {"tflops": max(seen["tflops"], before)})
        if not slow_ranks(visit.meet(f"product-{turn}")):
            return


def _look_at_links(visit: Visit) -> None:
    visit.stage("forming a process group")
    nodes = nodes_of(visit.everyone("here"))
    with process_group(visit.env, visit.left_s, dist.PrefixStore("group", visit.store)):
        visit.tell(links=links.look(visit.env, nodes, visit.stage))
        visit.meet("links")


def _look_at_storage(visit: Visit) -> None:
    """One rank of each node writes; all look for all files; each reads its neighbour's; then each removes its
    own.
    """
    visit.stage("storage")
    env, heads = visit.env, _heads(visit)
    if env.rank not in heads:
        return
    folder = visit.folder / "doctor"
    name = f"probe-{env.node_rank}-{secrets.token_hex(4)}"
    seen: dict[str, Any] = {"folder": str(visit.folder)}
    try:
        seen |= storage.write(folder, name, (256 << 20) if env.device.type == "cuda" else (16 << 20))
        visit.store.set(f"wrote/{env.rank}", json.dumps(name))
        names = dict(enumerate(visit.everyone("wrote", heads).values()))
        seen["unseen"] = storage.unseen(folder, names)
        neighbour = (env.node_rank + 1) % len(heads)
        if neighbour not in seen["unseen"]:
            seen |= storage.read(folder / names[neighbour])
        visit.tell(storage=seen)
        visit.store.set(f"read/{env.rank}", "true")
        visit.everyone("read", heads)
    finally:
        with contextlib.suppress(OSError):  # storage that fails has been told of, and is not written to
            (folder / name).unlink(missing_ok=True)


# ---------------------------------------------------------------- its own time


@contextlib.contextmanager
def bounded(visit: Visit, limit_s: float, tell: Callable[[NodeReports], int], late: int) -> Iterator[None]:
    """When time is up this process ends, wherever it stands, with the code `late`: rank 0 after it has told
    what is known, and with what telling returned.
    """

    def end() -> None:
        code = late
        try:
            if visit.env.is_main:
                code = tell(
                    scene_of(visit, dist.PrefixStore("doctor", meeting_store(visit.env, 10.0, serves=False)))
                )
        finally:
            sys.stdout.flush()
            os._exit(code)

    # Rank 0 speaks first: its store is what it has to tell from, and other ranks that leave would disturb
    # that.
    timer = threading.Timer(limit_s if visit.env.is_main else limit_s + LEAVE_S, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
