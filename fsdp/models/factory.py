"""What registry.py builds from: callables of the user, folders of save_pretrained, sizes of built-in models,
and checks of a model on meta.

Callables, `package.module:factory`, are loaded for models, data, losses, hooks and optimizers; an error in
one is reported with the flag that named it and the line that failed. Sizes of a built-in model are a frozen
dataclass whose fields are the names of --model.args. Of a folder nothing is downloaded. Checked is what FSDP
cannot shard, or would train otherwise without an error. Not here: which model is built.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fsdp.base.errors import ConfigError, one_line
from fsdp.base.text import nearest
from fsdp.base.torch_private.core import gradient_hooks, prepare_torchvision
from fsdp.config.fields import expanded
from fsdp.models.packed import check_positions

PREFIX = "hf:"
ADAPTER = "adapter_config.json"

Facts = Mapping[str, Any]
"""What the data say of themselves: vocab_size, seq_len, num_classes, …"""
Sizes = TypeVar("Sizes")


# ---------------------------------------------------------------- a user's callable


def load_attribute(path: str, flag: str) -> Callable[..., Any]:
    """Returns the callable `package.module:attribute`, with the current directory importable as for a script
    in it.
    """
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"{flag} {path} is not package.module:factory.", f"{flag} my_module:build")
    if not {"", str(Path.cwd())} & set(sys.path):
        sys.path.insert(0, str(Path.cwd()))
    prepare_torchvision()  # the module, or transformers within it, may import torchvision
    try:
        owner: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        own = f"{module_name}.".startswith(f"{missing}.")
        hint = "start in the folder of the module, or set PYTHONPATH=FOLDER"
        hint = hint if own else f"pip install {missing.split('.')[0]}"
        raise ConfigError(f"{flag} {path}: there is no module {missing}.", hint) from error
    except Exception as error:
        hint = f'python -c "import {module_name}"'
        raise ConfigError(f"{flag} {path}: importing it failed: {blame(error)}.", hint) from error
    for part in attribute.split("."):
        if not hasattr(owner, part):
            public = [n for n, value in vars(owner).items() if callable(value) and not n.startswith("_")]
            listing = f'python -c "import {module_name}; print(dir({module_name}))"'
            hint = nearest(part, public, f"{flag} {module_name}:{{}}", listing, cutoff=0.5)
            raise ConfigError(f"{flag} {path}: {getattr(owner, '__name__', owner)} has no {part}.", hint)
        owner = getattr(owner, part)
    if not callable(owner):
        kind = type(owner).__name__
        raise ConfigError(f"{flag} {path} is a {kind}, which cannot be called.", "name a class or a function")
    return owner


def blame(error: BaseException) -> str:
    """Formats an error in a user's code as one line with file and line number."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{one_line(error)} ({frame.filename}:{frame.lineno})"


@dataclass(frozen=True)
class Parameters:
    """Parameters of a callable that can be passed by name; `any_name` if it also accepts **kwargs."""

    named: Mapping[str, inspect.Parameter]
    any_name: bool

    def accepts(self, name: str) -> bool:
        return name in self.named or self.any_name

    def check(self, names: Iterable[str], flag: str, owner: str) -> None:
        for name in names:
            if not self.accepts(name):
                raise unknown_argument(name, list(self.named), flag, owner)

    def missing(self, args: Mapping[str, Any]) -> list[str]:
        return [n for n, p in self.named.items() if p.default is p.empty and n not in args]


def parameters_of(factory: Callable[..., Any]) -> Parameters | None:
    """Reads a callable's parameters; None for a builtin without a signature."""
    try:
        parameters = inspect.signature(factory).parameters
    except ValueError:
        return None
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = {name: parameter for name, parameter in parameters.items() if parameter.kind in by_name}
    return Parameters(named, any(p.kind is p.VAR_KEYWORD for p in parameters.values()))


def unknown_argument(name: str, known: list[str], flag: str, owner: str) -> ConfigError:
    takes = f"it accepts {', '.join(known)}" if known else "it accepts none"
    hint = nearest(name, known, f"{flag}.{{}} VALUE", takes, cutoff=0.5)
    return ConfigError(f"{flag}.{name} is not an argument of {owner}.", hint)


# ---------------------------------------------------------------- checks of a model on meta


def check_model(model: nn.Module, name: str, facts: Facts) -> None:
    """Checks of a model on meta that a person has named, with this data."""
    flag = f"--model.name {name}"
    check_parameters(model, flag)
    find = getattr(model, "get_input_embeddings", None)
    if "vocab_size" in facts and callable(find):
        tokens = facts["vocab_size"]
        rows = getattr(find(), "num_embeddings", tokens)
        if rows < tokens:
            raise ConfigError(
                f"{flag} has embeddings for {rows} tokens, but the data has {tokens}.",
                f"the model's own tokenizer, or vocab_size={tokens} in the model's configuration",
            )
    check_positions(model, name, facts)


def check_parameters(model: nn.Module, whose: str) -> None:
    """Checks, before sharding, what would be trained otherwise without an error, or fail without a name.

    Messages begin with `whose`.
    """
    for fault, hint in (*_embedding_faults(model), *_parameter_faults(model)):
        raise ConfigError(f"{whose}: {fault}.", hint)


def _embedding_faults(model: nn.Module) -> Iterator[tuple[str, str]]:
    for key, module in model.named_modules():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            continue
        if module.sparse:
            yield f"{key} has sparse gradients, which are neither reduced nor clipped", "sparse=False"
        if module.max_norm is not None:
            fault = f"{key} has max_norm {module.max_norm:g}: its forward writes into rows of one rank alone"
            yield fault, "max_norm=None, and scale the rows after the lookup"


def _parameter_faults(model: nn.Module) -> Iterator[tuple[str, str]]:
    for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            fault = f"{key} has no shape before the first forward, but sharding comes before it"
            yield (
                fault,
                "nn.Linear(IN, OUT) in place of nn.LazyLinear(OUT), and likewise for every lazy module",
            )
    for key, parameter in model.named_parameters():
        kind = type(parameter)
        if parameter.is_complex():
            fault = f"parameter {key} is {parameter.dtype}, which FSDP does not reduce"
            yield fault, "nn.Parameter(torch.view_as_real(VALUES)), and torch.view_as_complex in forward"
        if gradient_hooks(parameter):
            fault = f"parameter {key} has a gradient hook, which sharding would lose"
            yield fault, "change the gradient by a torch.autograd.Function in forward: docs/library.md"
        # A tensor of another library (torchao's NF4Tensor) with operations of its own.
        dispatches = kind.__torch_dispatch__ is not Tensor.__torch_dispatch__
        if dispatches and not kind.__module__.startswith("torch."):
            fault = (
                f"parameter {key} is of type {kind.__name__}, whose packed values cannot be cut into shards"
            )
            yield fault, f"{key} as it was before quantization; --precision.frozen bf16 halves what is frozen"


# ---------------------------------------------------------------- a folder of save_pretrained


def find_folder(name: str, flag: str = "--model.name") -> Path:
    """The folder itself, or the newest snapshot of a hub id in huggingface_hub's cache."""
    path = name.removeprefix(PREFIX)
    fault, hint = f"the folder {path} does not exist", f"{flag} hf:FOLDER or hf:ORG/NAME"
    try:
        if expanded(path).is_dir():
            return expanded(path)
        if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path, re.ASCII):
            from huggingface_hub import snapshot_download

            return Path(snapshot_download(path, local_files_only=True))
    except Exception as error:  # several classes, which differ between versions
        fault = f"{path} is neither a folder nor in huggingface_hub's cache ({type(error).__name__})"
        hint = f"hf download {path}"
    raise ConfigError(f"{flag} {name}: {fault}.", hint, scope="node")  # files differ between nodes


def check_no_adapter(path: Path, flag: str, text: str) -> None:
    """Refuses a folder of the peft library's, or its weights, with the command that merges it."""
    file = path / ADAPTER if path.is_dir() else path.with_name(ADAPTER)
    if file.is_file() and (path.is_dir() or path.name.startswith("adapter_model.")):
        raise ConfigError(
            f"{flag} {text} is an adapter of peft, without the weights of its model.",
            f'in Python, peft.AutoPeftModelForCausalLM.from_pretrained("{file.parent}").merge_and_unload()'
            '.save_pretrained("MERGED"), then --model.name hf:MERGED',
            scope="node",
        )


# ---------------------------------------------------------------- a built-in model


@dataclass(frozen=True, kw_only=True)
class BuiltIn:
    """A built-in model. The first preset is the default."""

    sizes: type[Any]
    presets: Mapping[str, Mapping[str, Any]]
    reads: str
    """The fact that identifies its kind of data: vocab_size for tokens, num_classes for images."""
    facts: Mapping[str, str]
    """Size → the fact of the data that it is filled from, and that it must cover."""
    exact: tuple[str, ...] = ()
    """Sizes that must equal their fact."""
    build: Callable[[Any], nn.Module]

    def sized(self, facts: Facts, args: Mapping[str, Any], owner: str) -> Any:
        """From the data's facts and from `args`, which go before them; checked against the facts."""
        filled = {size: facts[fact] for size, fact in self.facts.items() if fact in facts}
        sizes = make_sizes(self.sizes, {**filled, **args}, owner)
        for name, fact in self.facts.items():
            value, needed = getattr(sizes, name), facts.get(fact)
            if needed is not None and (value != needed if name in self.exact else value < needed):
                problem = "does not fit" if name in self.exact else "is too few"
                raise ConfigError(
                    f"--model.args.{name} {value} {problem}: the data has {fact} {needed}.",
                    f"--model.args.{name} {needed}",
                )
        return sizes


def make_sizes(cls: type[Sizes], args: Mapping[str, Any], owner: str) -> Sizes:
    """Builds sizes from free arguments. A default gives its field's type; a whole number is at least 1 unless
    its default is 0, a number at least 0.
    """
    fields: Any = dataclasses.fields(cls)  # type: ignore[arg-type]
    defaults = {field.name: field.default for field in fields}
    for name, value in args.items():
        if name not in defaults:
            raise unknown_argument(name, list(defaults), "--model.args", owner)
        default, kind = defaults[name], type(defaults[name])
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        least = 1 if kind is int and default else 0
        if not (isinstance(value, bool) if kind is bool else number and kind(value) == value >= least):
            wanted = {bool: "true or false", int: f"a whole number from {least}", float: "a number from 0"}
            hint = f"--model.args.{name} {str(default).lower()}"
            raise ConfigError(f"--model.args.{name} {value} is not {wanted[kind]}.", hint)
    return cls(**{name: type(defaults[name])(value) for name, value in args.items()})


def check_multiple(sizes: Any, product: str, factor: str) -> None:
    """The hint is the nearest smaller factor that divides the product."""
    total, part = getattr(sizes, product), getattr(sizes, factor)
    if total % part:
        fitting = max(n for n in range(1, min(part, total) + 1) if total % n == 0)
        raise ConfigError(
            f"--model.args.{product} {total} is not a multiple of --model.args.{factor} {part}.",
            f"--model.args.{factor} {fitting}",
        )
