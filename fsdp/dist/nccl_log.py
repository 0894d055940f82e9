"""NCCL's transport between ranks, read from the log that NCCL_DEBUG=INFO writes, with a verdict in words.

The formats are those of NCCL 2.18 to 2.28, from logs in public issues. Reading needs no device. Not here: who
turns the log on (fsdp/doctor/measure.py).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

_VERSION = re.compile(r"NCCL version (\d+\.\d+\.\d+)")
_NETWORK = re.compile(r"NCCL INFO Using network (.+)")
_DEVICES = re.compile(r"NCCL INFO NET/(IB|Socket)\w* ?: Using ([^;]*)")
"""What follows ";" is the interface of NCCL's own connections."""
_DEVICE = re.compile(r"\[\d+\]\{?([^\s:;\[\]{}]+)")
_PATH = re.compile(r"Channel \d+(?:/\d+)? ?: \d+\[\w+\] -> \d+\[\w+\](?: \[(?:send|receive)\])? via (.+)")
_SET = re.compile(r"NCCL INFO (NCCL_\w+) set (?:by environment )?to (\S+?)\.?$")
NOTHING = "no line of NCCL"


@dataclass(frozen=True)
class Transport:
    """What one log says."""

    version: str = ""
    network: str = ""
    """The one that NCCL chose between nodes: IB, Socket, or a plug-in's name."""
    devices: tuple[str, ...] = ()
    """InfiniBand and RoCE devices that NCCL found."""
    interfaces: tuple[str, ...] = ()
    """Interfaces of NET/Socket."""
    paths: Mapping[str, int] = field(default_factory=dict)
    """NET/IB/GDRDMA, NET/IB, NET/Socket, P2P, SHM → channels of all connections."""
    nvlink: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)
    """NCCL_… variables that the log shows."""

    def total(self, prefix: str) -> int:
        return sum(count for path, count in self.paths.items() if path.startswith(prefix))


@dataclass(frozen=True)
class TransportVerdict:
    """A statement about a transport. `hint` is empty where nothing is wrong."""

    what: str
    hint: str = ""


def read_log(lines: Iterable[str]) -> Transport:
    text = "\n".join(lines)
    devices: dict[str, dict[str, None]] = {"IB": {}, "Socket": {}}
    for kind, names in _DEVICES.findall(text):
        devices[kind].update(dict.fromkeys(_DEVICE.findall(names)))
    return Transport(
        next(iter(_VERSION.findall(text)), ""),
        network_name(next(reversed(_NETWORK.findall(text)), "")),
        tuple(devices["IB"]),
        tuple(devices["Socket"]),
        dict(Counter(map(path_kind, _PATH.findall(text)))),
        "+ NVL[" in text,
        dict(re.findall(_SET.pattern, text, re.MULTILINE)),
    )


def path_kind(path: str) -> str:
    """NET/IB/3/GDRDMA → NET/IB/GDRDMA, P2P/CUMEM/read → P2P: without numbers of devices."""
    kind, *more = path.split("/")
    if kind != "NET":
        return kind.split()[0]
    return f"NET/{network_name(more[0])}" + ("/GDRDMA" if "GDRDMA" in more else "")


def network_name(text: str) -> str:
    """IBext_v8, the plug-in of NVIDIA's own network, is IB."""
    return "IB" if text.startswith("IB") else text.strip()


def verdicts(transport: Transport, *, nodes: int, host_devices: Sequence[str] = ()) -> list[TransportVerdict]:
    """Statements about this transport; `host_devices` are those of /sys/class/infiniband on its node."""
    between = [TransportVerdict(*_between(transport, host_devices))] if nodes > 1 else []
    within = (
        [TransportVerdict(*_within(transport))] if transport.total("P2P") + transport.total("SHM") else []
    )
    return [*between, *within]


def _between(transport: Transport, host_devices: Sequence[str]) -> tuple[str, str]:
    direct, through = transport.total("NET/IB/GDRDMA"), transport.paths.get("NET/IB", 0)
    names = ", ".join((transport.devices or tuple(host_devices))[:8])
    if transport.total("NET/Socket") or (not transport.total("NET/") and transport.network == "Socket"):
        return _over_sockets(transport, names)
    if through and not direct:
        what = f"NET/IB between nodes ({names}) without GPUDirect RDMA: each byte goes through host memory"
        return (
            what,
            "lsmod | grep nvidia_peermem on each node; PCIe ACS must be off; NCCL_NET_GDR_LEVEL=SYS tries",
        )
    if direct:
        part = f" for {direct} of {direct + through} connections" if through else ""
        return f"NET/IB with GPUDirect RDMA between nodes{part} ({names})", ""
    if transport.network:
        return f"NET/{transport.network} between nodes", ""
    return "the log has no connection between nodes", ""


def _over_sockets(transport: Transport, devices: str) -> tuple[str, str]:
    what = f"NET/Socket between nodes ({', '.join(transport.interfaces) or 'TCP'})"
    disabled = {"NCCL_IB_DISABLE": ("", "0"), "NCCL_NET": ("", "IB")}
    for name, usual in disabled.items():
        value = transport.variables.get(name, "")
        if value not in usual:
            return f"{what}: {name} is {value}" + (
                f", and {devices} exist" if devices else ""
            ), f"unset {name}"
    if devices:
        hint = "ibstat shows whether their ports are active; a container needs --device=/dev/infiniband and "
        hint += "libibverbs; NCCL_IB_HCA must name one of them"
        return f"{what} though InfiniBand devices exist ({devices})", hint
    if any(name == "lo" or name.startswith("docker") for name in transport.interfaces):
        return f"{what}: that interface reaches no other node", "NCCL_SOCKET_IFNAME=eth0, or its like"
    return f"{what}: the node has no InfiniBand device", ""


def _within(transport: Transport) -> tuple[str, str]:
    direct, shared = transport.total("P2P"), transport.total("SHM")
    links = "NVLink" if transport.nvlink else "P2P"
    if direct and shared:
        what = f"{links} for {direct} of {direct + shared} connections within the node, SHM for the others"
        return what, "nvidia-smi topo -m shows which GPUs have no direct link"
    if direct:
        return f"{links} within the node", ""
    what = "SHM within the node: its GPUs exchange through host memory"
    if transport.variables.get("NCCL_P2P_DISABLE", "0") not in ("0", ""):
        return f"{what}, because NCCL_P2P_DISABLE is set", "unset NCCL_P2P_DISABLE"
    return what, "nvidia-smi topo -m shows the links; PCIe ACS and some virtual machines prevent P2P"


def summary(transport: Transport) -> str:
    """One line: version, network, connections by path."""
    parts = [f"NCCL {transport.version}"] if transport.version else []
    parts += [f"network {transport.network}"] if transport.network else []
    parts += [f"{path} {count}" for path, count in sorted(transport.paths.items())]
    return ", ".join(parts) or NOTHING
