"""This host's own addresses, of IPv4 and IPv6: on the route to another host, and that of its name. And errors
of collectives that another rank's end has caused. Imports no torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import socket
from collections.abc import Iterator


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
    return next((name for name, own in _interfaces() if own == bare), "")


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


class _Entry(ctypes.Structure):
    """The first fields of `struct ifaddrs`."""

    _fields_ = (
        ("next", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("flags", ctypes.c_uint),
        ("address", ctypes.c_void_p),
    )


def _interfaces() -> Iterator[tuple[str, str]]:
    """Each interface's name with each of its addresses, the secondary ones too, as gloo looks them up."""
    libc, first = ctypes.CDLL(None, use_errno=True), ctypes.c_void_p()
    if libc.getifaddrs(ctypes.byref(first)):
        raise OSError(ctypes.get_errno(), "the network interfaces cannot be listed")
    try:
        place = first.value
        while place:
            entry = _Entry.from_address(place)
            name, where = entry.name.decode(), entry.address
            family = ctypes.c_ushort.from_address(where).value if where else socket.AF_UNSPEC
            if family == socket.AF_INET:
                yield name, socket.inet_ntop(family, ctypes.string_at(where + 4, 4))
            elif family == socket.AF_INET6:
                yield name, socket.inet_ntop(family, ctypes.string_at(where + 8, 16))
            place = entry.next
    finally:
        libc.freeifaddrs(first)


# ---------------------------------------------------------------- a peer that is gone

PEER_GONE = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "remote process exited",
    "NCCL communicator was aborted",
)
"""Texts of gloo, NCCL and c10d, which raise a plain RuntimeError or torch.distributed.DistError."""
TRANSPORT = ("gloo/transport", "Watchdog caught collective operation timeout")
"""gloo names the source file of its transport in all its errors, time-outs too."""


def is_lost_peer(error: BaseException) -> bool:
    """Whether a collective failed because another rank has ended: that rank's error is the first one."""
    return _has_text(error, PEER_GONE)


def is_peer_failure(error: BaseException) -> bool:
    """Whether a collective failed because of another rank, which has ended or did not come in time; or
    whether such a failure is the cause of this error.
    """
    return any(
        _has_text(one, (*PEER_GONE, *TRANSPORT)) for one in (error, error.__cause__) if one is not None
    )


def _has_text(error: BaseException, texts: tuple[str, ...]) -> bool:
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)
