"""Resolves --model.name to a ModelSpec: the built-in models, folders of transformers, and users' factories.

Callables, `package.module:factory`, are loaded for models, data, losses, hooks and optimizers; an error in
one is reported with the flag that named it and the line that failed. A factory's model is built once on the
meta device when it is resolved, so that errors come before any process group exists. Sizes of a built-in
model are a frozen dataclass whose fields are the names of --model.args. Checked is what FSDP cannot shard, or
would train otherwise without an error. Not here: weights, sharding; folders of transformers (hf.py).
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fsdp.base.errors import ConfigError, one_line
from fsdp.base.text import nearest, quoted
from fsdp.base.torch_private import gradient_hooks, uncompiled
from fsdp.config import ModelSection
from fsdp.config.sections import exists, expanded
from fsdp.models.init import draw_parameters, fill_buffers, seeded, to_empty

if TYPE_CHECKING:
    from fsdp.models.hf_weights import ModuleDraws

PREFIX = "hf:"
BUILT_INS = {"vit": "vision", "transformer": "transformer", "mlp": "vision"}
"""--model.name → the module that has it."""
_DATA_FOR = {"num_classes": ("images", "digits"), "vocab_size": ("tokens", "text")}

Facts = Mapping[str, Any]
"""What the data say of themselves: vocab_size, seq_len, num_classes, …"""
POSITIONS = "position_ids"
ROW_POSITIONS = "row_positions"
"""Positions of whole rows, where a rank has a part of each."""
PACKED = "packed"
"""The fact of data whose samples hold several documents, with position_ids."""
WHOLE_ROWS = "--data.args.rows document"
IGNORED = -100
"""A label that counts nowhere, as in torch."""
LOSS = "--train.loss"
LOSS_EXAMPLE = "cross_entropy(output, batch['targets'], reduction='none')"
Sizes = TypeVar("Sizes")


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """build() creates the module on torch's default device; on a real one it draws from torch's generator."""

    name: str
    build: Callable[[], nn.Module]
    sizes: Mapping[str, Any]
    knows_inits: bool
    takes: Mapping[str, inspect.Parameter] | None = None
    """The parameters of the forward of a factory's model."""
    pretrained: Any = None
    """The hf.PretrainedFolder of a model of transformers."""

    def draws(self, seed: int) -> ModuleDraws | None:
        """Random weights module by module, for a model of transformers that --model.name names."""
        if self.pretrained is None:
            return None
        from fsdp.models.hf_weights import ModuleDraws

        return ModuleDraws(self.build, seed)


def resolve(section: ModelSection, facts: Facts) -> ModelSpec:
    """Resolves the section for this data. Facts fill only what preset and args leave open."""
    name = section.name
    is_folder = name.startswith(PREFIX)
    if is_folder and section.preset:
        fault = f"--model.preset {section.preset} has no effect on {name}: config.json has its sizes."
        raise ConfigError(fault, "leave it out; --model.args.NAME VALUE sets a size")
    check_name(name)
    if ":" in name and not is_folder:
        return _of_factory(section, facts)
    module: Any = importlib.import_module(f"fsdp.models.{'hf' if is_folder else BUILT_INS[name]}")
    if is_folder:
        folder = module.resolve_folder(name, section.args, facts)
        args = dict(section.args)
        return ModelSpec(name=name, build=folder.build, sizes=args, knows_inits=False, pretrained=folder)
    model: BuiltIn = module.BUILT_IN[name]
    sizes = model.sized(section, facts)
    return ModelSpec(name=name, build=partial(model.build, sizes), sizes=asdict(sizes), knows_inits=True)


def check_name(name: str) -> None:
    """Raises ConfigError for the name of no model."""
    if ":" in name or name in BUILT_INS:
        return
    hint = "--model.name package.module:factory for your own model"
    if (folder := model_folder(name)) is not None:
        reason = f"--model.name {name} is a folder of transformers, whose name begins with {PREFIX}"
        raise ConfigError(f"{reason}.", f"--model.name {quoted(f'{PREFIX}{folder}')}")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name, re.ASCII) and not exists(name):
        hint = f"--model.name {PREFIX}{name}, if it is a model of the hub"
    raise ConfigError(
        f"--model.name {name} is not {', '.join(BUILT_INS)}, hf:FOLDER or package.module:factory.",
        nearest(name, BUILT_INS, "--model.name {}", hint, cutoff=0.5),
    )


def model_folder(path: str) -> Path | None:
    """The folder of save_pretrained at a path: itself, a run's export in it, or another folder in it."""
    root = expanded(path)
    folders = (root, root / "full_model", *sorted(entry for entry in root.glob("*") if entry.is_dir()))
    return next((folder for folder in folders if exists(folder / "config.json")), None)


def build_real(spec: ModelSpec, seed: int, device: str | torch.device = "cpu") -> nn.Module:
    """Builds the model with a run's initial weights; on the host first if it has no param_inits()."""
    if spec.knows_inits:
        with torch.device("meta"):
            model = spec.build()
        to_empty(model, device)
        draw_parameters(model, seed)
        fill_buffers(model, device)
        return model
    with seeded(seed), torch.device("cpu"):
        model = spec.build()
    draws = spec.draws(seed)
    if draws is not None:
        model.load_state_dict(draws)
    return model.to(device)


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
    try:
        owner: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            owner = getattr(owner, part)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        is_users = f"{module_name}.".startswith(f"{missing}.")
        hint = "start in the folder of the module, or set PYTHONPATH=FOLDER"
        hint = hint if is_users else f"pip install {missing.split('.')[0]}"
        raise ConfigError(f"{flag} {path}: there is no module {missing}.", hint) from error
    except Exception as error:
        hint = f'python -c "import {module_name}; print(dir({module_name}))"'
        hint = nearest(attribute, dir(sys.modules.get(module_name)), f"{flag} {module_name}:{{}}", hint)
        raise ConfigError(f"{flag} {path}: importing it failed: {blame(error)}.", hint) from error
    if not callable(owner):
        kind = type(owner).__name__
        raise ConfigError(f"{flag} {path} is a {kind}, which cannot be called.", "name a class or a function")
    return owner  # type: ignore[no-any-return]


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


def _of_factory(section: ModelSection, facts: Facts) -> ModelSpec:
    """The arguments are --model.args, then the facts that the factory has parameters for."""
    factory = load_attribute(section.name, "--model.name")
    args, takes = dict(section.args), parameters_of(factory)
    if takes is not None:
        if section.preset and not takes.accepts("preset"):
            raise ConfigError(f"{section.name} has no --model.preset {section.preset}.", "--model.preset ''")
        args |= {"preset": section.preset} if section.preset else {}
        takes.check(args, "--model.args", section.name)
        args |= {name: facts[name] for name in takes.named if name in facts and name not in args}
        if missing := takes.missing(args):
            hint = f"--model.args.{missing[0]} VALUE"
            raise ConfigError(f"{section.name} needs {', '.join(missing)}.", hint)
    build = partial(_built, section.name, factory, args)
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        trial = build()
    check_model(trial, section.name, facts)
    knows_inits = callable(getattr(trial, "param_inits", None))
    forward = inspect.signature(trial.forward).parameters
    return ModelSpec(name=section.name, build=build, sizes=args, knows_inits=knows_inits, takes=forward)


ON_META = (
    "it is built on the meta device first, where tensors have no values: leave out .to(DEVICE), .cuda() and "
    ".cpu(), and make values that it reads with device='cpu', as torch.linspace(0, 0.1, 12, device='cpu'); "
    "with torch.device('cpu'): around from_pretrained, or --model.name hf:FOLDER"
)


def _built(path: str, factory: Callable[..., Any], args: Mapping[str, Any]) -> nn.Module:
    try:
        model = factory(**args)
    except ConfigError:
        raise
    except Exception as error:
        meta = torch.get_default_device().type == "meta"
        hint = ON_META if meta else "the error is on that line of the factory"
        raise ConfigError(f"--model.name {path} failed: {blame(error)}.", hint) from error
    # Of a wrapper forward takes any arguments: which data the model gets could not be read from it.
    plain = isinstance(model, nn.Module) and not isinstance(model, nn.DataParallel)
    if not plain or uncompiled(model) is not model:
        raise ConfigError(
            f"--model.name {path} returned a {type(model).__name__}, not a model of its own.",
            "return the nn.Module itself; --speed.compile true compiles its units",
        )
    return model  # type: ignore[no-any-return]


# ---------------------------------------------------------------- a loss of the user


@dataclass(frozen=True)
class CustomLoss:
    """A loss of the user, `--train.loss package.module:function`, and the checks of what it returns:

        function(output, batch) → losses, or (losses, weights)

    `output` is what the model returned, `batch` the data of these rows ("inputs", "targets", …). `losses` has
    one number for each sample, or for each token of each sample: its first dimension is that of the batch.
    `weights`, of the same shape, are bools or numbers from 0; without them each number counts once. The loss
    of a step is Σ losses · weights / Σ weights over the global batch, however it is divided.
    """

    path: str
    function: Callable[..., Any]

    def weighted(self, output: Any, batch: Mapping[str, Tensor], valid: Tensor) -> tuple[Tensor, Tensor]:
        """The weighted losses, in at least fp32, and the weights; 0 in rows that are not valid."""
        try:
            returned = self.function(output, batch)
        except (ConfigError, torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:
            hint = f"it is called with (output, batch): batch has {', '.join(batch)}"
            raise ConfigError(f"{LOSS} {self.path} failed: {blame(error)}.", hint) from error
        pair = isinstance(returned, tuple) and len(returned) == 2
        losses, weights = returned if pair else (returned, None)
        each = isinstance(losses, Tensor) and losses.is_floating_point() and losses.shape[:1] == valid.shape
        if not each or (weights is not None and getattr(weights, "shape", None) != losses.shape):
            shapes = [tuple(getattr(part, "shape", ())) for part in (losses, weights) if part is not None]
            raise ConfigError(
                f"{LOSS} {self.path} returned {' and weights '.join(map(str, shapes))} for {len(valid)} "
                "samples.",
                f"return a loss for each sample or token, and weights of its shape: {LOSS_EXAMPLE}",
            )
        losses = at_least_fp32(losses)
        weights = torch.ones_like(losses) if weights is None else weights.detach().to(losses.dtype)
        weights = torch.where(valid.view(-1, *[1] * (losses.dim() - 1)), weights, 0)
        # Not a product alone: 0 times an infinity is NaN.
        return torch.where(weights != 0, losses, 0) * weights, weights


def load_loss(path: str) -> CustomLoss | None:
    """The function that --train.loss names; None without one. Raises ConfigError."""
    if not path:
        return None
    function: Any = load_attribute(path, LOSS)
    parameters = function.named_parameters() if isinstance(function, nn.Module) else iter(())
    if (parameter := next(parameters, None)) is not None:  # as metric learning has them
        raise ConfigError(
            f"{LOSS} {path} has a parameter of its own, {parameter[0]}, which is no part of the model and "
            "would not be trained.",
            "make it a part of the model, whose forward takes targets and returns the loss",
        )
    return CustomLoss(path, function)


def at_least_fp32(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()


# ---------------------------------------------------------------- checks of a model on meta


def check_model(model: nn.Module, name: str, facts: Facts) -> None:
    """Checks of a model on meta that a person has named, with this data."""
    check_parameters(model, f"--model.name {name}")
    find: Any = getattr(model, "get_input_embeddings", lambda: None)
    tokens = facts.get("vocab_size", 0)
    rows = getattr(find(), "num_embeddings", tokens)
    if rows < tokens:
        raise ConfigError(
            f"--model.name {name} has embeddings for {rows} tokens, but the data has {tokens}.",
            f"the model's own tokenizer, or vocab_size={tokens} in the model's configuration",
        )
    if facts.get(PACKED) and POSITIONS not in inspect.signature(model.forward).parameters:
        raise ConfigError(
            f"--model.name {name}: the forward of {type(model).__name__} has no parameter {POSITIONS}, "
            "without which attention crosses the documents of packed rows.",
            WHOLE_ROWS,
        )


def check_parameters(model: nn.Module, owner: str) -> None:
    """Checks, before sharding, what would be trained otherwise without an error, or fail without a name.

    Messages begin with `owner`.
    """
    for fault, hint in _faults(model):
        raise ConfigError(f"{owner}: {fault}.", hint)


def _faults(model: nn.Module) -> Iterator[tuple[str, str]]:
    for key, module in model.named_modules():
        if getattr(module, "sparse", False) and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            yield f"{key} has sparse gradients, which are neither reduced nor clipped", "sparse=False"
        if getattr(module, "max_norm", None) is not None:
            fault = f"{key} has max_norm: its forward writes into rows of one rank alone"
            yield fault, "max_norm=None, and scale the rows after the lookup"
    for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            yield f"{key} has no shape before the first forward", "nn.Linear in place of nn.LazyLinear"
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
            fault = f"parameter {key} is a {kind.__name__}, whose packed values cannot be cut into shards"
            yield fault, f"{key} as it was before quantization; --precision.frozen bf16 halves what is frozen"


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

    def sized(self, section: ModelSection, facts: Facts) -> Any:
        """From the data's facts, the preset and --model.args, which go before them; checked against the
        facts.
        """
        preset = section.preset or next(iter(self.presets))
        if preset not in self.presets:
            raise ConfigError(
                f"--model.preset {preset} is not one of {section.name}'s: {', '.join(self.presets)}.",
                f"--model.preset {next(iter(self.presets))}",
            )
        other = next((fact for fact in _DATA_FOR if fact != self.reads and fact in facts), None)
        if other is not None and self.reads not in facts:
            reads, data = _DATA_FOR[self.reads]
            fault = f"--model.name {section.name} reads {reads}, but the data holds {_DATA_FOR[other][0]}."
            raise ConfigError(fault, f"--data.name {data}")
        if {"channels", "image_size"} <= facts.keys():
            facts = {**facts, "pixels": facts["channels"] * facts["image_size"] ** 2}
        filled = {size: facts[fact] for size, fact in self.facts.items() if fact in facts}
        filled |= {**self.presets[preset], **section.args}
        sizes = make_sizes(self.sizes, filled, f"--model.name {section.name}")
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
        fits = type(value) is kind or (kind is float and type(value) is int)
        least = 1 if kind is int and default else 0
        if not fits or value < least:
            fault = f"--model.args.{name} {value} is no {kind.__name__} from {least}."
            raise ConfigError(fault, f"--model.args.{name} {str(default).lower()}")
    return cls(**{name: type(defaults[name])(value) for name, value in args.items()})


def check_multiple(sizes: Any, product: str, factor: str) -> None:
    total, part = getattr(sizes, product), getattr(sizes, factor)
    if total % part:
        raise ConfigError(
            f"--model.args.{product} {total} is not a multiple of --model.args.{factor} {part}.",
            f"--model.args.{factor} {max(n for n in range(1, part + 1) if not total % n)}",
        )
