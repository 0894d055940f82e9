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
_INFO = re.compile(r"NCCL (?:INFO|WARN) (.*)")
_NETWORK = re.compile(r"Using network (.+)")
_DEVICES = re.compile(r"NET/(IB\w*|Socket) ?: Using (.*)")
_DEVICE = re.compile(r"\[\d+\](?:\{)?([^\s:;\[\]{}]+)")
_PATH = re.compile(r"Channel \d+(?:/\d+)? ?: (\d+)\[\w+\] -> (\d+)\[\w+\](?: \[(?:send|receive)\])? via (.+)")
_CHANNELS = re.compile(r"(\d+) coll channels, (?:(\d+) collnet channels, )?(?:(\d+) nvls channels)?")
_RING = re.compile(r"Channel (\d+)/\d+ ?: (?: *\d+)+$")
_SET = re.compile(r"(NCCL_\w+) set (?:by environment )?to (\S+?)\.?$")


@dataclass(frozen=True)
class Transport:
    """What one log says; counts are of channels of all its connections."""

    version: str = ""
    network: str = ""
    """The one that NCCL chose between nodes: IB, Socket, or a plug-in's name."""
    devices: tuple[str, ...] = ()
    """InfiniBand and RoCE devices that NCCL found."""
    interfaces: tuple[str, ...] = ()
    """Interfaces of NET/Socket."""
    paths: Mapping[str, int] = field(default_factory=dict)
    """NET/IB/GDRDMA, NET/IB, NET/Socket, P2P, SHM → connections."""
    channels: int = 0
    rings: int = 0
    nvls: int = 0
    nvlink: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)
    """NCCL_… variables that the log shows."""

    def total(self, prefix: str) -> int:
        return sum(count for path, count in self.paths.items() if path.startswith(prefix))


NOTHING = "no line of NCCL"


@dataclass(frozen=True)
class TransportVerdict:
    """A statement about a transport. `hint` is empty where nothing is wrong."""

    what: str
    hint: str = ""


def read_log(lines: Iterable[str]) -> Transport:
    version = network = ""
    devices: dict[str, None] = {}
    interfaces: dict[str, None] = {}
    paths: Counter[str] = Counter()
    variables: dict[str, str] = {}
    rings: set[str] = set()
    channels = nvls = 0
    nvlink = False
    for line in lines:
        if found := _VERSION.search(line):
            version = version or found[1]
        if (info := _INFO.search(line)) is None:
            continue
        text = info[1].strip()
        if found := _PATH.search(text):
            paths[path_kind(found[3])] += 1
        elif found := _NETWORK.fullmatch(text):
            network = network_name(found[1])
        elif found := _DEVICES.match(text):
            # what follows ";" is the interface of NCCL's own connections
            names = _DEVICE.findall(found[2].partition(";")[0])
            (interfaces if found[1] == "Socket" else devices).update(dict.fromkeys(names))
        elif found := _CHANNELS.match(text):
            channels, nvls = max(channels, int(found[1])), max(nvls, int(found[3] or 0))
        elif found := _RING.fullmatch(text):
            rings.add(found[1])
        elif found := _SET.search(text):
            variables[found[1]] = found[2]
        nvlink = nvlink or "+ NVL[" in text
    return Transport(
        version,
        network,
        tuple(devices),
        tuple(interfaces),
        dict(paths),
        channels,
        len(rings),
        nvls,
        nvlink,
        variables,
    )


def path_kind(path: str) -> str:
    """NET/IB/3/GDRDMA → NET/IB/GDRDMA, P2P/CUMEM/read → P2P: without numbers of devices."""
    kind, _, rest = path.partition("/")
    if kind != "NET":
        return kind.split()[0]
    name, *more = rest.split("/")
    return f"NET/{network_name(name)}" + ("/GDRDMA" if "GDRDMA" in more else "")


def network_name(text: str) -> str:
    """IBext_v8, the plug-in of NVIDIA's own network, is IB."""
    return "IB" if text.startswith("IB") else text.strip()


def verdicts(transport: Transport, *, nodes: int, host_devices: Sequence[str] = ()) -> list[TransportVerdict]:
    """Statements about this transport; `host_devices` are those of /sys/class/infiniband on its node."""
    found = [_between(transport, host_devices)] if nodes > 1 else []
    return [*found, *_within(transport)]


def _between(transport: Transport, host_devices: Sequence[str]) -> TransportVerdict:
    sockets = transport.total("NET/Socket")
    if sockets or (not transport.total("NET/") and transport.network == "Socket"):
        return _over_sockets(transport, host_devices)
    direct, through = transport.total("NET/IB/GDRDMA"), transport.paths.get("NET/IB", 0)
    names = ", ".join(transport.devices[:8])
    if through and not direct:
        return TransportVerdict(
            f"NET/IB between nodes ({names}) without GPUDirect RDMA: each byte goes through host memory",
            "lsmod | grep nvidia_peermem on each node; PCIe ACS must be off; NCCL_NET_GDR_LEVEL=SYS tries",
        )
    if direct or through:
        part = "" if not through else f" for {direct} of {direct + through} connections"
        return TransportVerdict(f"NET/IB with GPUDirect RDMA between nodes{part} ({names})")
    if transport.network:
        return TransportVerdict(f"NET/{transport.network} between nodes")
    return TransportVerdict("the log has no connection between nodes")


def _over_sockets(transport: Transport, host_devices: Sequence[str]) -> TransportVerdict:
    names = ", ".join(transport.interfaces) or "TCP"
    there = ", ".join((transport.devices or tuple(host_devices))[:8])
    what = f"NET/Socket between nodes ({names})"
    if transport.variables.get("NCCL_IB_DISABLE", "0") not in ("0", ""):
        found = f", and {there} exist" if there else ""
        return TransportVerdict(f"{what}: NCCL_IB_DISABLE is set{found}", "unset NCCL_IB_DISABLE")
    if transport.variables.get("NCCL_NET", "").lower() == "socket":
        return TransportVerdict(f"{what}: NCCL_NET is Socket", "unset NCCL_NET")
    if there:
        return TransportVerdict(
            f"{what} though InfiniBand devices exist ({there})",
            "ibstat shows whether their ports are active; a container needs --device=/dev/infiniband and "
            "libibverbs; NCCL_IB_HCA must name one of them",
        )
    if any(name == "lo" or name.startswith("docker") for name in transport.interfaces):
        return TransportVerdict(
            f"{what}: that interface reaches no other node", "NCCL_SOCKET_IFNAME=eth0, or its like"
        )
    return TransportVerdict(f"{what}: the node has no InfiniBand device", "")


def _within(transport: Transport) -> list[TransportVerdict]:
    direct, shared = transport.total("P2P"), transport.total("SHM")
    if not direct and not shared:
        return []
    links = "NVLink" if transport.nvlink else "P2P"
    if not direct:
        disabled = transport.variables.get("NCCL_P2P_DISABLE", "0") not in ("0", "")
        return [
            TransportVerdict(
                f"SHM within the node: its GPUs exchange through host memory"
                f"{', because NCCL_P2P_DISABLE is set' if disabled else ''}",
                "unset NCCL_P2P_DISABLE"
                if disabled
                else "nvidia-smi topo -m shows the links; PCIe ACS and some virtual machines prevent P2P",
            )
        ]
    if shared:
        what = f"{links} for {direct} of {direct + shared} connections within the node, SHM for the others"
        return [TransportVerdict(what, "nvidia-smi topo -m shows which GPUs have no direct link")]
    return [TransportVerdict(f"{links} within the node")]


def summary(transport: Transport) -> str:
    """One line: version, network, channels, connections by path."""
    parts = [f"NCCL {transport.version}"] if transport.version else []
    parts += [f"network {transport.network}"] if transport.network else []
    parts += [f"{transport.channels} channels"] if transport.channels else []
    parts += [f"{transport.rings} rings"] if transport.rings else []
    parts += [f"{transport.nvls} of NVLink SHARP"] if transport.nvls else []
    parts += [f"{path} {count}" for path, count in sorted(transport.paths.items())]
    return ", ".join(parts) or NOTHING
