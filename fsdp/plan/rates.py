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

A flag of --plan overrides each figure. Not here: how a step uses them (step_time.py).
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
SUSTAINED = 0.9
STREAMED = 0.85
BUS = 0.8
FLOAT8 = 1402.6 / 794.5
"""Over bf16, of the same table's H100."""
_UNMEASURED = ("gh200", "gb200", "b300", "mi300x", "mi250x")
"""Devices of which all rates are from data sheets: nobody's measurements are in the table."""
SHORT_NAMES = ("a100", "a100-40gb", "h100", "h100-pcie", "h200", "b200", "l4", "l40s", *_UNMEASURED, "cpu")


@dataclass(frozen=True)
class Rates:
    """Bytes and operations a second; memory is the bytes that a process can have."""

    name: str
    memory: float
    matmul: float
    matmul_fp32: float
    attention: float
    attention_narrow: float
    """With heads of NARROW_HEADS or less."""
    peak: float
    """The data sheet's bf16 rate, the base of MFU."""
    bandwidth: float
    link: float
    """One GPU's, within a node, one way."""
    node_link: float
    """All adapters of a node, one way."""
    gpus_a_node: int
    host_link: float
    overhead: float
    """Bytes that the driver's context and NCCL hold beside the allocator."""
    launch_s: float
    """Least time of a kernel."""
    issue_s: float
    """Host time of an operation in eager mode."""
    contention: float
    """The share of the device that a collective beside a product takes."""
    shared: bool = False
    """Whether `memory` is a machine's, of all its ranks together."""

    def of_each(self, ranks: int) -> Rates:
        """With the memory that each of so many ranks can have."""
        if not self.shared:
            return self
        return dataclasses.replace(self, memory=self.memory / min(ranks, self.gpus_a_node), shared=False)

    @property
    def has_allocator(self) -> bool:
        return self.name != "cpu"


@dataclass(frozen=True)
class _More:
    memory_gib: float
    matmul_tflops: float
    attention_tflops: float
    link_gb_s: float
    node_link_gb_s: float
    host_link_gb_s: float
    processors: int


_MORE = {
    "A100 40GB": _More(39.4, 271.2, 185, 300, 200, 25, 108),
    "A100 80GB": _More(79.1, 271.2, 185, 300, 200, 25, 108),
    "H100 SXM": _More(79.1, 794.5, 346, 450, 400, 50, 132),
    "H100 PCIe": _More(79.1, 607.0, 265, 50, 50, 50, 114),
    "H100 NVL": _More(93.0, 670.0, 292, 300, 200, 50, 132),
    "H200": _More(139.8, 794.5, 346, 450, 400, 50, 132),
    "B200": _More(178.3, 1745.0, 790, 900, 400, 50, 148),
    "GH200": _More(94.5, 791.5, 346, 450, 50, 450, 132),
    "GB200": _More(184.0, 2000.0, 875, 900, 400, 225, 148),
    "B300": _More(268.0, 1800.0, 787, 900, 800, 50, 160),
    "MI300X": _More(191.0, 1045.9, 457, 448, 400, 50, 304),
    "MI250X GCD": _More(63.5, 153.2, 67, 50, 100, 25, 110),
    "L4": _More(22.0, 97.0, 60, 25, 25, 25, 58),
    "L40S": _More(44.4, 290.0, 180, 25, 50, 25, 142),
}
"""Matmul rate of devices that the table of measurements lacks (PCIe, NVL, L4, L40S, the unmeasured): 80% of
the data sheet, as of the others; attention of the unmeasured: 35% of it, as on Hopper.
"""

_CHANNELS = 16
"""Multiprocessors that a collective occupies: NCCL's channels on a node of eight."""


def rates_for(config: Config) -> Rates:
    """The device that --plan.gpu names, with --plan's own figures over the table's."""
    plan = config.plan
    base = _from_table(plan.gpu) if plan.gpu != "cpu" else _cpu()
    figures = {
        "memory": plan.memory_gib * GIB, "link": plan.link_gb_s * 1e9 * BUS,
        "node_link": plan.node_link_gb_s * 1e9 * BUS, "gpus_a_node": plan.gpus_per_node,
        "bandwidth": plan.memory_gb_s * 1e9 * STREAMED, "matmul": plan.tflops * 1e12 * SUSTAINED,
    }  # fmt: skip
    typed: dict[str, Any] = {name: value for name, value in figures.items() if value}
    return dataclasses.replace(base, **typed, shared=base.shared and "memory" not in typed)


def _cpu() -> Rates:
    return Rates(
        name="cpu",
        memory=float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        matmul=200e9,
        matmul_fp32=100e9,
        attention=50e9,
        attention_narrow=50e9,
        peak=100e9,
        bandwidth=20e9,
        link=1e9,
        node_link=1e9,
        gpus_a_node=os.cpu_count() or 1,
        host_link=20e9,
        overhead=0.0,
        launch_s=5e-6,
        issue_s=0.0,
        contention=0.0,
        shared=True,
    )


def note_on_rates(gpu: str) -> str:
    """Says that a device's rates are unmeasured; empty of the others."""
    name = gpu.lower()
    return f"{gpu}: its rates are unmeasured, those of the vendor's data sheet" if name in _UNMEASURED else ""


def _from_table(name: str) -> Rates:
    device = find(name, typed=True)
    if device is None:
        near = difflib.get_close_matches(name.lower(), SHORT_NAMES, n=2, cutoff=0.3)
        raise ConfigError(
            f"--plan.gpu {name} is not in the table: {', '.join(SHORT_NAMES)}.",
            f"--plan.gpu {' or '.join(near) if near else 'h100'}",
        )
    more = _MORE[device.name]
    matmul, attention = more.matmul_tflops * 1e12 * SUSTAINED, more.attention_tflops * 1e12
    return Rates(
        name=device.name,
        memory=more.memory_gib * GIB,
        matmul=matmul,
        matmul_fp32=matmul / 2,
        attention=attention,
        attention_narrow=min(attention, HOPPER_NARROW) if device.name[0] == "H" else attention,
        peak=device.bf16_tflops * 1e12,
        bandwidth=device.memory_gb_s * 1e9 * STREAMED,
        link=more.link_gb_s * 1e9 * BUS,
        node_link=more.node_link_gb_s * 1e9 * BUS,
        gpus_a_node=8,
        host_link=more.host_link_gb_s * 1e9 * BUS,
        overhead=1.5 * GIB,
        launch_s=3e-6,
        issue_s=7e-6,
        contention=_CHANNELS / more.processors,
    )


assert {device.name for device in DEVICES} <= _MORE.keys()
