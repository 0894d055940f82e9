"""Seconds: each figure of a device or a link changes what it should, and communication hides where FSDP hides
it.
"""

from __future__ import annotations

import pytest

from fsdp.config import load
from fsdp.distributed.mesh import MeshSizes
from fsdp.plan.step_time import rates_for, send
from tests.plan.asked import plan
from tests.support.marks import quick_are

WORDS = (
    "--model.args.width 4096 --model.args.heads 32 --data.seq_len 1024 --speed.compile false "
    "--mesh.strategy fsdp"
)
BIG = tuple(WORDS.split())


def seconds(*flags: str, gpus: int = 16) -> float:
    return plan(*BIG, *flags, gpus=gpus).step.seconds


NODE_LINK = "--plan.node_link_gb_s"
FASTER = [
    ("--plan.tflops 2000", ""),
    ("--plan.memory_gb_s 20000", ""),
    (f"--plan.link_gb_s 5000 {NODE_LINK} 8000", f"--plan.link_gb_s 10 {NODE_LINK} 8"),
    (f"{NODE_LINK} 800", f"{NODE_LINK} 2"),
    (f"--plan.gpus_per_node 16 {NODE_LINK} 4", f"--plan.gpus_per_node 2 {NODE_LINK} 4"),
    ("--plan.gpu b200", "--plan.gpu a100"),
    ("--memory.activation_checkpointing none", "--memory.activation_checkpointing full"),
    (f"--mesh.reshard_after_forward false {NODE_LINK} 2", f"--mesh.reshard_after_forward true {NODE_LINK} 2"),
    ("--memory.cpu_offload false", "--memory.cpu_offload true"),
]


@pytest.mark.parametrize(("fast", "slow"), quick_are(FASTER[:1], FASTER, FASTER[-3:]))
def test_a_faster_device_takes_less_time(fast: str, slow: str) -> None:
    assert seconds(*fast.split()) < seconds(*slow.split())


def test_a_gather_within_a_node_is_a_ring_of_its_links() -> None:
    rates, sizes = rates_for(load(["--plan.link_gb_s", "100"])), MeshSizes("fsdp", 1, 8)
    assert send("all_gather", 8e9, sizes, rates, "dp_shard") == pytest.approx(7e9 / 80e9, rel=0.01)
    assert send("all_reduce", 8e9, sizes, rates, "dp_replicate") == 0


def test_between_nodes_the_adapters_are_shared() -> None:
    """Two nodes of eight, sharded within: each of eight groups of two sends its shard's part over a node's
    adapters.
    """
    rates, shard = rates_for(load(["--plan.node_link_gb_s", "100"])), 1e9
    sent = send("all_reduce", shard, MeshSizes("hsdp", 2, 8), rates, "dp_replicate")
    assert sent == pytest.approx(2 * shard / 2 / (80e9 / 8), rel=0.01)


def test_communication_is_hidden_behind_computation() -> None:
    fast = plan(*BIG, "--plan.node_link_gb_s", "400", "--train.global_batch", "128", gpus=16).step
    slow = plan(*BIG, "--plan.node_link_gb_s", "4", "--train.global_batch", "128", gpus=16).step
    assert fast.exposed < fast.parts["communication"]
    assert slow.exposed > 0.5 * slow.parts["communication"]
    assert slow.bound_by == "communication"


def test_an_update_reads_and_writes_its_states() -> None:
    """Parameters, gradients and two moments are read, all but the gradients are written, four bytes an
    element.
    """
    one = plan(*BIG, gpus=8)
    elements = one.memory.state / 12
    assert one.step.parts["optimizer"] * one.rates.bandwidth == pytest.approx(elements * 4 * 7, rel=0.05)


@pytest.mark.parametrize(
    ("batch", "micro", "filled"),
    [("10", "3", "12"), ("40", "4", "48")],  # shares of 2 and 3 samples; shares of 10 in 4, 4 and 2
)
def test_padding_takes_time_and_is_no_sample(batch: str, micro: str, filled: str) -> None:
    """4 ranks take as long for a batch that a run pads as for one that fills every row."""
    padded = plan("--train.micro_batch", micro, "--train.global_batch", batch)
    whole = plan("--train.micro_batch", micro, "--train.global_batch", filled)
    assert padded.step.seconds == whole.step.seconds
    part = int(batch) / int(filled)
    assert padded.tokens_s == pytest.approx(part * whole.tokens_s)
    assert padded.mfu == pytest.approx(part * whole.mfu)
