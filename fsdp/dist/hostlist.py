"""Slurm's host lists, such as `gpu[01-03,7],login`, expanded without scontrol."""

from __future__ import annotations


def expand_hostlist(hosts: str) -> list[str]:
    """The host names in a list, as `scontrol show hostnames` prints them."""
    names: list[str] = []
    depth, start = 0, 0
    for at, char in enumerate(hosts + ","):
        depth += (char == "[") - (char == "]")
        if char == "," and depth == 0:
            names += _expand_one(hosts[start:at])
            start = at + 1
    return names


def _expand_one(pattern: str) -> list[str]:
    head, bracket, rest = pattern.partition("[")
    if not bracket:
        return [pattern] if pattern else []
    inside, _, tail = rest.partition("]")
    middles: list[str] = []
    for part in inside.split(","):
        low, dash, high = part.partition("-")
        middles += [str(n).zfill(len(low)) for n in range(int(low), int(high if dash else low) + 1)]
    return [head + middle + end for middle in middles for end in (_expand_one(tail) or [""])]
