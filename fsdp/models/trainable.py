"""Selects parameters by name pattern and freezes them. Not here: adapters (lora.py)."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import nn

from fsdp.base.errors import ConfigError

FROZEN = "--model.frozen"


def patterns(text: str) -> list[str]:
    """Splits `a.*, b` into patterns, in their order."""
    return [part.strip() for part in text.split(",") if part.strip()]


def matching(wanted: Sequence[str], names: Sequence[str], flag: str, what: str) -> list[str]:
    """Returns the names that match a pattern, in the model's order; a pattern without a match is an error
    with similar names as its hint.
    """
    for pattern in wanted:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise _nothing(pattern, names, flag, what)
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in wanted)]


def _nothing(pattern: str, names: Sequence[str], flag: str, what: str) -> ConfigError:
    below = f"{pattern}.*"
    if any(fnmatchcase(name, below) for name in names):
        near = [below]
    elif any(fnmatchcase(name, f"*.{pattern}") for name in names):
        near = [f"*.{pattern}"]
    else:
        near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3) or list(names[:3])
    hint = f"{flag} {','.join(near)}" if near else f"leave {flag} out"
    return ConfigError(f"{flag} {pattern} matches no {what} of this model (of {len(names)}).", hint)


def freeze(model: nn.Module, text: str) -> list[str]:
    """Freezes the parameters whose names match, and returns the names. A tied parameter matches by any of its
    names.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    frozen = matching(patterns(text), list(named), FROZEN, "parameter")
    for name in frozen:
        named[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            f"{FROZEN} {text} leaves nothing to train.", f"a narrower pattern: {FROZEN} {_half(frozen)}"
        )
    return frozen


def _half(names: Iterable[str]) -> str:
    first = next(iter(names))
    return f"{first.partition('.')[0]}.*" if "." in first else first
