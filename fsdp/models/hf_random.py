"""Random weights of a model of transformers, drawn module by module: no more than one module is held.

A module's values are a function of the seed and its name. Its own initialisation runs first, then those of
the modules around it, which may scale it again (GPT-2's projections). Not here: who receives them
(fsdp/parallel/materialize.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fsdp.models.hf import initialise
from fsdp.models.init import name_seed
from fsdp.models.parameter_names import first_names

log = logging.getLogger(__name__)


class ModuleDraws(Mapping[str, Tensor]):
    """The state dict of a model that `build` makes; a tied tensor is drawn under the first of its names.

    Where transformers' initialisation leaves a value to the constructor, `build_whole` makes the model on the
    host, once.
    """

    def __init__(
        self, build: Callable[[], nn.Module], seed: int, build_whole: Callable[[], nn.Module]
    ) -> None:
        with torch.device("meta"):
            self._model: Any = build()
        self._seed, self._build_whole = seed, build_whole
        self._first = first_names(self._model)
        self._last: tuple[str | None, dict[str, Tensor]] = (None, {})
        self._whole: dict[str, Tensor] = {}

    def take(self, name: str) -> Tensor | None:
        return self[name] if name in self._first else None

    def __getitem__(self, name: str) -> Tensor:
        path, _, key = self._first[name].rpartition(".")
        if self._last[0] != path:
            self._last = (None, {})  # freed before the next is drawn
            self._last = (path, self._drawn(path))
        tensor = self._last[1][key]
        return tensor if _is_filled(tensor) else self._of_constructor(self._first[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._model.state_dict())

    def __len__(self) -> int:
        return len(self._model.state_dict())

    def _drawn(self, path: str) -> dict[str, Tensor]:
        module = self._model.get_submodule(path)
        on_meta = dict([*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)])
        real = {key: _unfilled(tensor) for key, tensor in on_meta.items()}
        for key, tensor in real.items():
            setattr(module, key, nn.Parameter(tensor) if isinstance(on_meta[key], nn.Parameter) else tensor)
        parts = path.split(".") if path else []
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.manual_seed(name_seed(self._seed, path, 4))
                for depth in range(len(parts), -1, -1):
                    initialise(self._model, ".".join(parts[:depth]), ())
            return {key: getattr(module, key).detach() for key in real}
        finally:
            for key, tensor in on_meta.items():
                setattr(module, key, tensor)

    def _of_constructor(self, name: str) -> Tensor:
        if not self._whole:
            log.warning(
                "transformers does not initialise %s: the model is built whole on the host once", name
            )
            model = self._build_whole()
            self._whole = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        return self._whole[name].detach()


def _unfilled(tensor: Tensor) -> Tensor:
    value = torch.nan if tensor.is_floating_point() else 0 if tensor.dtype == torch.bool else -77
    return torch.full_like(tensor, value, device="cpu", requires_grad=False)


def _is_filled(tensor: Tensor) -> bool:
    if tensor.is_floating_point():
        return not bool(tensor.isnan().any())
    return tensor.dtype != torch.bool and not bool((tensor == -77).any())
