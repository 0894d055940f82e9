"""The parameters that Muon updates, by name and shape alone: the same ones however the model is wrapped.

Keller Jordan's rule (github.com/KellerJordan/Muon): matrices of the body, without embeddings, head, norms and
biases. The body is what repeats: a numbered module is in it if another number in its place has a matrix of
the same name and shape.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from fnmatch import fnmatchcase

from torch import nn

from fsdp.base.errors import ConfigError
from fsdp.models.lora import matching, patterns
from fsdp.models.units import clean_name

FLAG = "--optim.muon_parameters"

Place = tuple[str, str]
"""A numbered module: the name of what holds it, and its number."""


def hidden_matrices(model: nn.Module, wanted: str = "") -> list[nn.Parameter]:
    """The trained matrices for Muon, in the model's order. `wanted`: patterns in place of the rule."""
    named = {clean_name(name): p for name, p in model.named_parameters(remove_duplicate=False)}
    if wanted:
        return _named(named, wanted)
    repeated = set(_repeated(named))
    embedded = {m.weight for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))}
    found = [
        parameter
        for name, parameter in named.items()
        if parameter.dim() == 2
        and parameter.requires_grad
        and parameter not in embedded
        and any(place in repeated for place, _ in _places(name))
    ]
    if not found:
        raise ConfigError(
            "--optim.name muon finds no matrix inside repeated blocks of this model.",
            f"{FLAG} '{_example(named)}' names them, or --optim.name adamw",
        )
    return list(dict.fromkeys(found))


def _named(named: dict[str, nn.Parameter], wanted: str) -> list[nn.Parameter]:
    trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    matrices = [name for name, parameter in trained.items() if parameter.dim() == 2]
    unknown = [one for one in patterns(wanted) if not any(fnmatchcase(name, one) for name in trained)]
    matching(unknown, matrices, FLAG, "trained matrix")  # its hint names a matrix
    names = matching(patterns(wanted), list(trained), FLAG, "trained parameter")
    for name in names:
        if trained[name].dim() != 2:
            matrix = next(iter(matrices), name)
            raise ConfigError(
                f"{FLAG} {wanted}: {name} is {tuple(trained[name].shape)}, and Muon updates matrices only.",
                f"{FLAG} {matrix}",
            )
    return list(dict.fromkeys(trained[name] for name in names))


def _places(name: str) -> Iterator[tuple[Place, str]]:
    """The numbered modules around a parameter, each with the parameter's name inside it."""
    parts = name.split(".")
    for at, part in enumerate(parts[:-1]):
        if part.isdigit():
            yield (".".join(parts[:at]), part), ".".join(parts[at + 1 :])


def _repeated(named: dict[str, nn.Parameter]) -> Iterator[Place]:
    alike: dict[tuple[str, str, tuple[int, ...]], set[Place]] = defaultdict(set)
    for name, parameter in named.items():
        for place, inside in _places(name) if parameter.dim() == 2 else ():
            alike[place[0], inside, tuple(parameter.shape)].add(place)
    for places in alike.values():
        if len(places) > 1:
            yield from places


def _example(named: dict[str, nn.Parameter]) -> str:
    return next((n for n, p in named.items() if p.dim() == 2 and p.requires_grad), "*.weight")
