"""This host's own addresses, of IPv4 and IPv6: on the route to another host, and that of its name. Imports no
torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

SIOCGIFADDR = 0x8915


def resolves(name: str) -> str:
    """The address of a name; empty if it does not resolve."""
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return ""


def address_towards(host: str) -> str:
    """This host's own address on the route to another; empty if there is no route. Nothing is sent."""
    with contextlib.suppress(OSError):  # the name does not resolve
        for family, kind, protocol, _, where in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(where)
                return str(probe.getsockname()[0])
    return ""


def interface_of(address: str) -> str:
    """The name of the network interface with this address; empty if there is none."""
    bare = address.partition("%")[0]  # a link's own address has its interface behind it
    names = (name for _, name in socket.if_nameindex())
    return next((name for name in names if bare in (_address4(name), *_addresses6(name))), "")


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def listen(port: int, backlog: int) -> socket.socket:
    """A socket that accepts connections on all of this host's addresses; port 0 is any free one."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # turned off in this network namespace; or the port is taken
            return socket.create_server(
                ("", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True
            )
    return socket.create_server(("", port), backlog=backlog)


def _address4(name: str) -> str | None:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # the kernel returns an error for an interface without an IPv4 address
        reply = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(reply[20:24])
    return None


def _addresses6(name: str) -> list[str]:
    table = Path("/proc/net/if_inet6")
    rows = [line.split() for line in table.read_text().splitlines()] if table.exists() else []
    return [socket.inet_ntop(socket.AF_INET6, bytes.fromhex(row[0])) for row in rows if row[-1] == name]
