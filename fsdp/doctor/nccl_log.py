"""NCCL's transport between ranks, read from the log that NCCL_DEBUG=INFO writes, with a verdict in words.

The formats are those of NCCL 2.18 to 2.28, from logs in public issues. Reading needs no device.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

_DEVICES = re.compile(r"NCCL INFO NET/(IB|Socket)\w* ?: Using ([^;\n]*)")
"""What follows ";" is the interface of NCCL's own connections."""
_DEVICE = re.compile(r"\[\d+\]\{?([^\s:;\[\]{}]+)")
_PATH = re.compile(r"Channel \d+(?:/\d+)? ?: \d+\[\w+\] -> \d+\[\w+\](?: \[(?:send|receive)\])? via (\S+)")
_SET = re.compile(r"NCCL INFO (NCCL_\w+) set (?:by environment )?to (\S+?)\.?$", re.MULTILINE)
NOTHING = "no line of NCCL"


class Transport:
    """What one log says. `devices`: of InfiniBand and RoCE; `interfaces`: of NET/Socket."""

    def __init__(self, text: str) -> None:
        used = {kind: _DEVICE.findall(names) for kind, names in _DEVICES.findall(text)}
        self.devices, self.interfaces = used.get("IB", []), used.get("Socket", [])
        networks = re.findall(r"NCCL INFO Using network (\w+)", text)
        self.network = _without_plugin(networks[-1]) if networks else ""
        self.paths = Counter(map(path_kind, _PATH.findall(text)))
        self.nvlink = "+ NVL[" in text
        self.variables: dict[str, str] = dict(_SET.findall(text))
        versions = [f"NCCL {number}" for number in re.findall(r"NCCL version (\d+\.\d+\.\d+)", text)[:1]]
        parts = [*versions, *([f"network {self.network}"] if networks else [])]
        parts += [f"{path} {count}" for path, count in sorted(self.paths.items())]
        self.summary = ", ".join(parts) or NOTHING

    @property
    def between_nodes(self) -> bool:
        return any(path.startswith("NET/") for path in self.paths)

    def verdicts(self, nodes: int, host_devices: Sequence[str] = ()) -> list[tuple[str, str]]:
        """(statement, hint); the hint is empty where nothing is wrong. `host_devices`: those of
        /sys/class/infiniband on its node.
        """
        between = [self._between(", ".join((self.devices or host_devices)[:8]))] if nodes > 1 else []
        return between + ([self._within()] if self.paths["P2P"] + self.paths["SHM"] else [])

    def _between(self, devices: str) -> tuple[str, str]:
        direct, through = self.paths["NET/IB/GDRDMA"], self.paths["NET/IB"]
        if self.paths["NET/Socket"] or (not self.between_nodes and self.network == "Socket"):
            return self._over_sockets(devices)
        if through and not direct:
            what = f"NET/IB between nodes ({devices}) without GPUDirect RDMA: bytes go through host memory"
            return what, "lsmod | grep nvidia_peermem on each node; PCIe ACS must be off"
        if direct:
            part = f" for {direct} of {direct + through} connections" if through else ""
            return f"NET/IB with GPUDirect RDMA between nodes{part} ({devices})", ""
        return f"NET/{self.network or '?'} between nodes", ""

    def _over_sockets(self, devices: str) -> tuple[str, str]:
        what = f"NET/Socket between nodes ({', '.join(self.interfaces) or 'TCP'})"
        for name, usual in (("NCCL_IB_DISABLE", "0"), ("NCCL_NET", "IB")):
            if (value := self.variables.get(name, usual)) != usual:
                return f"{what}: {name} is {value}", f"unset {name}"
        if devices:
            hint = "ibstat shows whether their ports are active; a container needs --device=/dev/infiniband"
            return f"{what} though InfiniBand devices exist ({devices})", hint
        return f"{what}: the node has no InfiniBand device", ""

    def _within(self) -> tuple[str, str]:
        direct, shared = self.paths["P2P"], self.paths["SHM"]
        links, topology = "NVLink" if self.nvlink else "P2P", "nvidia-smi topo -m shows the links"
        if not shared:
            return f"{links} within the node", ""
        if direct:
            return f"{links} for {direct} of {direct + shared} connections within the node", topology
        what = "SHM within the node: its GPUs exchange through host memory"
        if self.variables.get("NCCL_P2P_DISABLE", "0") != "0":
            return f"{what}, because NCCL_P2P_DISABLE is set", "unset NCCL_P2P_DISABLE"
        return what, f"{topology}; PCIe ACS and some virtual machines prevent P2P"


def path_kind(path: str) -> str:
    """NET/IB/3/GDRDMA → NET/IB/GDRDMA, P2P/CUMEM/read → P2P: without numbers of devices."""
    kind, *more = path.split("/")
    if kind != "NET":
        return kind
    return f"NET/{_without_plugin(more[0])}" + ("/GDRDMA" if "GDRDMA" in more else "")


def _without_plugin(network: str) -> str:
    """IBext_v8, the plug-in of NVIDIA's own network, is IB."""
    return "IB" if network.startswith("IB") else network
