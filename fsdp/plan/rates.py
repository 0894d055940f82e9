"""Rates that devices and links sustain, from published measurements of kernels and links, none from training
runs.

matmul       the mean of the best shape that mamf-finder found (github.com/stas00/ml-engineering,
             compute/accelerator, "Maximum Achievable Matmul FLOPS"), times SUSTAINED: a model's shapes are
             not the best one, and minutes of it draw full power
attention    FlashAttention-2 with causal masks, forward and backward together: on A100 its paper (arXiv
             2307.08691, 50-73% of peak), on Hopper 35% of peak (arXiv 2407.08608, abstract); heads of 64 on
             Hopper by bench.gpu_attention on an H100, without the casts that it then timed too
memory       the data sheet's, times STREAMED, which large copies reach
links        NVLink one way (the same repository, network/README.md: 300, 450, 900 GB/s), times BUS: its
             nccl-tests and pairwise copies reach about 80%. Between nodes: all adapters of a node, at their
             nominal rate

cpu          an order of magnitude of one core with AVX-512, not a measurement: its seconds are not reliable

Not measured, at 80% of the data sheet as the others: matmul of PCIe, NVL, L4 and L40S, and all rates of
UNMEASURED, whose attention is 35% of it, as on Hopper. A flag of --plan overrides each figure. Not here: how
a step uses them (step_time.py).
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from dataclasses import dataclass
from typing import Any

from fsdp.base.devices import DEVICES, find
from fsdp.base.errors import ConfigError
from fsdp.config import Config

GIB = 2**30
NARROW_HEADS = 64
HOPPER_NARROW = 200e12
SUSTAINED, STREAMED, BUS = 0.9, 0.85, 0.8
FLOAT8 = 1402.6 / 794.5
"""Over bf16, of the same table's H100."""
UNMEASURED = ("gh200", "gb200", "b300", "mi300x", "mi250x")
SHORT_NAMES = ("a100", "a100-40gb", "h100", "h100-pcie", "h200", "b200", "l4", "l40s", *UNMEASURED, "cpu")
CHANNELS = 16
"""Processors that a collective occupies: NCCL's channels on a node of eight."""

TABLE = {
    # GiB that a process can have, matmul and attention in TFLOP/s, GB/s one way of a GPU's links in a node,
    # of all adapters of a node, of the bus to the host, and the device's processors
    "A100 40GB": (39.4, 271.2, 185, 300, 200, 25, 108),
    "A100 80GB": (79.1, 271.2, 185, 300, 200, 25, 108),
    "H100 SXM": (79.1, 794.5, 346, 450, 400, 50, 132),
    "H100 PCIe": (79.1, 607.0, 265, 50, 50, 50, 114),
    "H100 NVL": (93.0, 670.0, 292, 300, 200, 50, 132),
    "H200": (139.8, 794.5, 346, 450, 400, 50, 132),
    "B200": (178.3, 1745.0, 790, 900, 400, 50, 148),
    "GH200": (94.5, 791.5, 346, 450, 50, 450, 132),
    "GB200": (184.0, 2000.0, 875, 900, 400, 225, 148),
    "B300": (268.0, 1800.0, 787, 900, 800, 50, 160),
    "MI300X": (191.0, 1045.9, 457, 448, 400, 50, 304),
    "MI250X GCD": (63.5, 153.2, 67, 50, 100, 25, 110),
    "L4": (22.0, 97.0, 60, 25, 25, 25, 58),
    "L40S": (44.4, 290.0, 180, 25, 50, 25, 142),
}
assert {device.name for device in DEVICES} <= TABLE.keys()


@dataclass(frozen=True)
class Rates:
    """Bytes and operations a second; memory is the bytes that a process can have. By default a CPU's."""

    name: str = "cpu"
    memory: float = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    matmul: float = 200e9
    matmul_fp32: float = 100e9
    attention: float = 50e9
    attention_narrow: float = 50e9
    """With heads of NARROW_HEADS or less."""
    peak: float = 100e9
    """The data sheet's bf16 rate, the base of MFU."""
    bandwidth: float = 20e9
    link: float = 1e9
    """One GPU's, within a node, one way."""
    node_link: float = 1e9
    """All adapters of a node, one way."""
    gpus_a_node: int = os.cpu_count() or 1
    host_link: float = 20e9
    overhead: float = 0.0
    """Bytes that the driver's context and NCCL hold beside the allocator."""
    launch_s: float = 5e-6
    """Least time of a kernel."""
    issue_s: float = 0.0
    """Host time of an operation in eager mode."""
    contention: float = 0.0
    """The share of the device that a collective beside a product takes."""
    shared: bool = True
    """Whether `memory` is a machine's, of all its ranks together."""

    @property
    def has_allocator(self) -> bool:
        return self.name != "cpu"

    def of_each(self, ranks: int) -> Rates:
        """With the memory that each of so many ranks can have."""
        part = min(ranks, self.gpus_a_node) if self.shared else 1
        return dataclasses.replace(self, memory=self.memory / part, shared=False)


def rates_for(config: Config) -> Rates:
    """The device that --plan.gpu names, with --plan's own figures over the table's."""
    plan = config.plan
    figures: dict[str, Any] = {
        "memory": plan.memory_gib * GIB,
        "link": plan.link_gb_s * 1e9 * BUS,
        "node_link": plan.node_link_gb_s * 1e9 * BUS,
        "gpus_a_node": plan.gpus_per_node,
        "bandwidth": plan.memory_gb_s * 1e9 * STREAMED,
        "matmul": plan.tflops * 1e12 * SUSTAINED,
    }
    figures = {name: value for name, value in figures.items() if value}
    base = Rates() if plan.gpu == "cpu" else _from_table(plan.gpu)
    return dataclasses.replace(base, **figures, shared=base.shared and "memory" not in figures)


def _from_table(name: str) -> Rates:
    device = find(name, typed=True)
    if device is None:
        near = difflib.get_close_matches(name.lower(), SHORT_NAMES, n=2, cutoff=0.3)
        raise ConfigError(
            f"--plan.gpu {name} is not in the table: {', '.join(SHORT_NAMES)}.",
            f"--plan.gpu {' or '.join(near) if near else 'h100'}",
        )
    gib, products, attends, link, node_link, host_link, processors = TABLE[device.name]
    matmul, attention = products * 1e12 * SUSTAINED, attends * 1e12
    return Rates(
        name=device.name,
        memory=gib * GIB,
        matmul=matmul,
        matmul_fp32=matmul / 2,
        attention=attention,
        attention_narrow=min(attention, HOPPER_NARROW) if device.name[0] == "H" else attention,
        peak=device.bf16_tflops * 1e12,
        bandwidth=device.memory_gb_s * 1e9 * STREAMED,
        link=link * 1e9 * BUS,
        node_link=node_link * 1e9 * BUS,
        gpus_a_node=8,
        host_link=host_link * 1e9 * BUS,
        overhead=1.5 * GIB,
        launch_s=3e-6,
        issue_s=7e-6,
        contention=CHANNELS / processors,
        shared=False,
    )
