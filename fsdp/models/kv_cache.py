"""Turns off key-value caches, which only generation uses, in a Hugging Face model's configurations.

Recomputation calls a block twice: with a cache the second call would append the same keys again. transformers
is not imported: a configuration is any object with `to_dict()` that is the `config` of a module or an
attribute of such an object.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn


def turn_caches_off(model: nn.Module) -> None:
    """Sets `use_cache` to False in every module's configuration and in the configurations nested in it."""
    for config in _configs(model):
        if getattr(config, "use_cache", False):
            config.use_cache = False


def _configs(model: nn.Module) -> Iterator[Any]:
    """Yields each once: an encoder and a decoder have copies, most other modules share the model's."""
    found: dict[int, Any] = {}
    waiting = [module.config for module in model.modules() if _is_config(getattr(module, "config", None))]
    while waiting:
        config = waiting.pop()
        if id(config) not in found:
            found[id(config)] = config
            waiting += [value for value in vars(config).values() if _is_config(value)]
    yield from found.values()


def _is_config(value: Any) -> bool:
    return (
        callable(getattr(value, "to_dict", None))
        and hasattr(value, "__dict__")
        and not isinstance(value, (type, nn.Module))
    )
