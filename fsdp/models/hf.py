"""Models of transformers: a folder with config.json, `--model.name hf:FOLDER` or `hf:ORG/NAME`, and what a
run reads and changes in any such model: its cross entropy, the kernel of its experts, key-value caches.

The class is chosen from config.json's `architectures` or by --model.args.head; other arguments replace fields
of config.json. Code from a folder or a hub is never run. A model computes its
cross entropy by `loss_function`, and forward adds to it what else the configuration asks for, such as the
loss of a mixture's router. Not here: the names under which the folder stores weights (hf_weights.py), reading
them (fsdp/checkpoint/pretrained.py), or which loss is trained (loss.py).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import inspect
import json
import logging
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fsdp.base.errors import ConfigError, first_line
from fsdp.base.proc import SETTINGS, regular_text
from fsdp.config.read import shipped
from fsdp.config.sections import expanded
from fsdp.models.attention import AttentionReader, Rows, attend_rows, read_rows, text_config
from fsdp.models.hf_weights import draw_missing, initialise, plan_names, reverted, saved_pieces, snapshot
from fsdp.models.registry import PREFIX, Facts, blame, check_model, model_folder, unknown_argument
from fsdp.models.transformer import LlamaFormat

log = logging.getLogger(__name__)

HEADS = {
    "causal": "CAUSAL_LM",
    "masked": "MASKED_LM",
    "seq2seq": "SEQ_TO_SEQ_CAUSAL_LM",
    "classification": "SEQUENCE_CLASSIFICATION",
    "image-classification": "IMAGE_CLASSIFICATION",
}
"""--model.args.head, and the name of transformers' mapping from a configuration to its class."""
GROUPED, LOOP = "grouped_mm", "eager"
ATTENTION = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3")
KERNELS = {"attn_implementation": ATTENTION, "experts_implementation": (LOOP, "batched_mm", GROUPED)}
DTYPE_FIELDS = ("dtype", "torch_dtype")
"""The first one that is set counts, as in transformers."""


@dataclass(frozen=True, kw_only=True)
class PretrainedFolder:
    """A folder of save_pretrained, with the class and configuration that it is read with."""

    name: str
    folder: Path
    cls: type[Any]
    config: Any
    new_head: bool
    """--model.args.head is given: weights that the folder lacks outside the base model are drawn."""
    tokenizer: str = ""
    """Of the data, where it may be another than the folder's."""
    chat_template: str = ""
    """The text of a template that conversations were written by in place of the tokenizer's."""

    @property
    def flag(self) -> str:
        return f"--model.name {self.name}"

    @property
    def class_name(self) -> str:
        return self.cls.__name__

    def build(self) -> nn.Module:
        """Builds the model on torch's default device, in torch's default dtype."""
        try:
            # A copy: a run changes use_cache in it.
            cls: Any = self.cls
            built: Any = _with_buffers(cls)(copy.deepcopy(self.config))
            if (self.folder / "generation_config.json").is_file() and built.can_generate():
                built.generation_config = cls.generation_config_class.from_pretrained(str(self.folder))
        except Exception as error:
            raise ConfigError(
                f"{self.flag}: {self.class_name} cannot be built: {blame(error)}.",
                f"look at {self.folder / 'config.json'} and --model.args",
            ) from error
        return built  # type: ignore[no-any-return]

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype that config.json names."""
        named = self.config.dtype
        return getattr(torch, named, None) if isinstance(named, str) else named

    plan_names = staticmethod(plan_names)
    saved_pieces = staticmethod(saved_pieces)
    reverted = staticmethod(reverted)

    def draw_missing(self, name: str, seed: int) -> torch.Tensor:
        return draw_missing(self.build, name, seed)

    def saved_layer(self, name: str) -> str:
        return name

    def config_json(self, dtype: torch.dtype) -> str:
        config = copy.deepcopy(self.config)
        config.architectures, config.dtype = [self.class_name], str(dtype).removeprefix("torch.")
        text: str = config.to_json_string()
        return text


SourceFolder = PretrainedFolder | LlamaFormat
"""The format of transformers in which a model is written."""


def find_folder(name: str, files: Sequence[str] = (), commit: str = "") -> Path:
    """The folder itself, or the snapshot of a hub id in huggingface_hub's cache, with `files` downloaded."""
    path = name.removeprefix(PREFIX)
    fault, hint = f"the folder {path} does not exist", "--model.name hf:FOLDER or hf:ORG/NAME"
    try:
        if (folder := shipped(expanded(path))).is_dir():
            return folder
        if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path, re.ASCII):
            return snapshot(path, files, commit)
    except Exception as error:  # several classes, which differ between versions
        fault = f"{path} is neither a folder nor in huggingface_hub's cache, and cannot be downloaded"
        fault += f" ({type(error).__name__}: {first_line(error, 80)})"
        hint = f"hf download {path}"
    raise ConfigError(f"--model.name {name}: {fault}.", hint, scope="node")  # files differ between nodes


def resolve_folder(name: str, args: Mapping[str, Any], facts: Facts) -> PretrainedFolder:
    """Reads `hf:FOLDER` or `hf:ORG/NAME`; every error in it is a ConfigError."""
    folder = find_folder(name)
    try:
        importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        fault = f"--model.name {name} needs {error.name}, which is not installed."
        raise ConfigError(fault, "pip install transformers") from None
    fields = _read_config(name, folder)
    rest = dict(args)
    head = rest.pop("head", None)
    config = _configuration(name, fields, rest)
    cls = _class_for(name, config, fields, head)
    source = PretrainedFolder(name=name, folder=folder, cls=cls, config=config, new_head=head is not None)
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        trial = source.build()
    check_model(trial, name, facts)
    return source


# ---------------------------------------------------------------- config.json


def _read_config(name: str, folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    try:
        fields = json.loads(regular_text(file, SETTINGS))
        if not isinstance(fields, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        line = f"--model.name {name}: {file} cannot be read: {error}."
        inner = model_folder(str(folder))
        hint = f"--model.name hf:{inner}" if inner else "a folder that save_pretrained wrote, in --model.name"
        raise ConfigError(line, hint, scope="node") from None
    if fields.get("quantization_config"):
        raise ConfigError(
            f"--model.name {name}: its weights are quantized; FSDP trains floating-point ones.",
            "name a folder with the weights before quantization",
        )
    kind = fields.get("model_type")
    if not isinstance(kind, str) or kind not in _auto("configuration_auto").CONFIG_MAPPING:
        code = " It names code of its own (auto_map), which is not run." if "auto_map" in fields else ""
        raise ConfigError(
            f"--model.name {name}: the installed transformers has no model_type {kind!a}.{code}",
            "pip install -U transformers, or --model.name my_module:factory for code that you wrote",
        )
    return fields


def _auto(module: str) -> Any:
    return importlib.import_module(f"transformers.models.auto.{module}")


def _configuration(name: str, fields: dict[str, Any], overrides: dict[str, Any]) -> Any:
    """config.json with --model.args over it. Kernels are chosen by flags alone: a name may be a hub's."""
    kernels = {field: overrides.pop(field) for field in KERNELS if field in overrides}
    for field, value in kernels.items():
        if value not in KERNELS[field]:
            raise ConfigError(
                f"--model.args.{field} {value} is not one of {', '.join(KERNELS[field])}.",
                f"--model.args.{field} {KERNELS[field][1]}",
            )
    cls = _auto("configuration_auto").CONFIG_MAPPING[fields["model_type"]]
    try:
        known = cls.from_dict(_plain(fields))
        for field in overrides:
            if field.startswith("_") or field in ("auto_map", "model_type") or not hasattr(known, field):
                names = [*known.to_dict(), *KERNELS, "head"]
                raise unknown_argument(field, names, "--model.args", f"--model.name {name}")
        return cls.from_dict(_plain(fields) | overrides, **kernels)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"--model.name {name}: its config.json with --model.args is no {cls.__name__}: {blame(error)}.",
            "look at config.json and --model.args",
        ) from error


def _plain(fields: Any) -> Any:
    """The fields without those that name code or kernels, at any depth; `torch.bfloat16` as `bfloat16`."""
    if isinstance(fields, list):
        return [_plain(item) for item in fields]
    if not isinstance(fields, dict):
        return fields
    barred = ("auto_map", "custom_pipelines", "use_kernels", "kernel_config")
    return {
        key: value.removeprefix("torch.") if key in DTYPE_FIELDS and isinstance(value, str) else _plain(value)
        for key, value in fields.items()
        if key not in barred and not str(key).removeprefix("_").startswith(tuple(KERNELS))
    }


def _class_for(name: str, config: Any, fields: Mapping[str, Any], head: object) -> type[Any]:
    """Of the head that is asked for, or the first of `architectures`."""
    auto, kind = _auto("modeling_auto"), type(config)
    classes = {
        known: _first(getattr(auto, f"MODEL_FOR_{mapping}_MAPPING").get(kind, None))
        for known, mapping in HEADS.items()
    }
    fitting = {known: cls for known, cls in classes.items() if cls is not None}
    hint = f"--model.args.head {next(iter(fitting))}" if fitting else "--model.name my_module:factory"
    if head is not None:
        if head in fitting:
            return fitting[str(head)]
        heads = ", ".join(fitting) or "none"
        fault = f"--model.name {name}: a {config.model_type} has no head {head}, but {heads}."
        raise ConfigError(fault, hint)
    transformers: Any = importlib.import_module("transformers")
    listed = fields.get("architectures")
    architecture = str(listed[0]) if isinstance(listed, list) and listed else ""
    named: Any = getattr(transformers, architecture, None) if architecture.isidentifier() else None
    is_model = isinstance(named, type) and issubclass(named, transformers.PreTrainedModel)
    if is_model and named is not _first(auto.MODEL_MAPPING.get(kind, None)):
        return named
    fault = f"config.json names {architecture!a}, no class of transformers that returns logits or a loss"
    raise ConfigError(f"--model.name {name}: {fault}.", hint)


def _first(classes: Any) -> Any:
    return classes[0] if isinstance(classes, tuple) else classes


@functools.cache
def _with_buffers(cls: Any) -> Any:
    """The class with init_buffers(); its name stays, by which transformers chooses the loss."""
    return type(cls.__name__, (cls,), {"init_buffers": _fill_buffers, "__module__": cls.__module__})


def _fill_buffers(model: Any, device: torch.device) -> None:
    """Fills the buffers that no state dict holds, as transformers does when it loads, and no others."""
    saved = model.state_dict().keys()
    unsaved = (name for name, _ in model.named_buffers() if name not in saved)
    with torch.no_grad():
        for path in dict.fromkeys(name.rpartition(".")[0] for name in unsaved):
            initialise(model, path, {name for name in saved if name.startswith(f"{path}." if path else "")})


# ---------------------------------------------------------------- cross entropy

_SHIFTS = {
    "ForCausalLMLoss": True,
    "ForMaskedLMLoss": False,
    "ForTokenClassification": False,
    "ForSequenceClassificationLoss": False,
}
"""transformers' functions that are the mean cross entropy of logits; whether each predicts the next label."""


class HfEntropy:
    """The cross entropy of one model. `shifted`: its logits predict the next label."""

    def __init__(self, model: nn.Module, *, shifted: bool) -> None:
        self._model, self.shifted = model, shifted
        self._calls: list[bool] = []
        """For each call of a forward, whether it is the plain cross entropy."""
        self._stand_in = self._nothing  # one object: compiled code has a guard on it

    def _nothing(self, *args: Any, **more: Any) -> Tensor:
        self._calls.append(more.get("shift_labels") is None and more.get("ignore_index") is None)
        logits = next(x for x in (*args, *more.values()) if isinstance(x, Tensor) and x.is_floating_point())
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        return torch.zeros((), dtype=wide, device=logits.device)

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        """Context of one forward with labels, whose loss is what the model adds to its cross entropy."""
        self._calls.clear()
        self._model._loss_function = self._stand_in  # type: ignore[assignment]
        try:
            yield
        finally:
            del self._model._loss_function
        if self._calls != [True]:
            raise ConfigError(
                f"{type(self._model).__name__} does not compute one cross entropy of its logits and labels.",
                "--train.loss mine:function computes the losses from its output: docs/training.md",
            )


def maybe_entropy(model: nn.Module) -> HfEntropy | None:
    """None for other classes, a loss or a forward that was replaced, and a decoder, which reads labels."""
    config: Any = getattr(model, "config", None)
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    if not type(model).__module__.startswith("transformers.") or code is None or config is None:
        return None
    replaced = "forward" in vars(model) or hasattr(model, "_loss_function")
    if replaced or "loss_function" not in code.co_names or "shift_labels" in code.co_varnames:
        return None
    if getattr(config, "is_encoder_decoder", False):
        return None
    losses = sys.modules["transformers.loss.loss_utils"]
    function = losses.LOSS_MAPPING.get(getattr(model, "loss_type", None), losses.ForCausalLMLoss)
    shifted = _SHIFTS.get(function.__name__) if function.__module__ == losses.__name__ else None
    classes = function is not losses.ForSequenceClassificationLoss or (
        config.num_labels > 1 and config.problem_type in (None, "single_label_classification")
    )
    return HfEntropy(model, shifted=shifted) if classes and shifted is not None else None


def remarks(model: nn.Module) -> Iterator[str]:
    """Lines on configurations of transformers whose loss is not what one may expect."""
    config, text = getattr(model, "config", None), text_config(model)
    weight = getattr(text, "router_aux_loss_coef", 0.0)
    if weight and not getattr(text, "output_router_logits", True):
        yield (
            f"config.json has router_aux_loss_coef {weight:g} and output_router_logits false: the router's "
            "loss is not trained. HINT: --model.args.output_router_logits true"
        )
    if "ForCTC" in type(model).__name__ and getattr(config, "ctc_loss_reduction", "") == "sum":
        yield (
            "config.json has ctc_loss_reduction sum: the loss of a micro-batch is the sum over its rows, so "
            "that it grows with --train.micro_batch. HINT: --model.args.ctc_loss_reduction mean"
        )


# ---------------------------------------------------------------- kernels of experts, key-value caches


def select_experts_kernel(model: nn.Module, dtype: torch.dtype) -> None:
    """Replaces grouped products, transformers' default, where they cannot be computed in `dtype`:
    torch.nn.functional.grouped_mm takes float32, bfloat16 and float16, and rows of multiples of 16 bytes.
    """
    weights = _stacked_weights(model, GROUPED)
    unaligned = any(size * dtype.itemsize % 16 for weight in weights for size in weight.shape[1:])
    if weights and unaligned and dtype != torch.float64:
        log.info("experts are computed one after another: their rows have no multiple of 16 bytes")
    if weights and (unaligned or dtype == torch.float64):
        _select(model, LOOP)


def group_experts(model: nn.Module) -> None:
    """Grouped products in place of the loop, which reads how many tokens an expert has, for fake tensors."""
    if _stacked_weights(model, LOOP):
        _select(model, GROUPED)


def _select(model: nn.Module, kernel: str) -> None:
    for module in model.modules():
        select: Any = getattr(module, "set_experts_implementation", None)
        if callable(select):
            select(kernel)


def _stacked_weights(model: nn.Module, kernel: str) -> list[nn.Parameter]:
    """The stacked matrices of experts that are multiplied by this kernel. A model of several parts has a
    configuration for each.
    """
    return [
        parameter
        for module in model.modules()
        if hasattr(module, "num_experts")
        and getattr(getattr(module, "config", None), "_experts_implementation", None) == kernel
        for parameter in module.parameters(recurse=False)
        if parameter.dim() == 3
    ]


def turn_caches_off(model: nn.Module) -> None:
    """Sets `use_cache` to False in every module's configuration.

    Recomputation calls a block twice: with a cache the second call would append the same keys again.
    """
    for module in model.modules():  # an encoder and a decoder have copies
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False


# ---------------------------------------------------------------- attention of packed rows

CORE, READER = "shardrun", "shardrun_reader"
"""Names among transformers' attention functions."""


def attend_documents(model: Any, computed: torch.dtype, of: type[Rows] = Rows) -> str:
    """Replaces transformers' sdpa by the attention of rows of the type `of`, without a mask of transformers.
    Before sharding; the layers compute in `computed`.

    A forward of a copy on meta reads what the attention asks for. Where that is more than `attend` computes,
    the model keeps its attention and its mask; returns why.
    """
    if not hasattr(model, "set_attn_implementation"):
        return ""
    try:
        reader = _read_attention(model, computed)
        sdpa = model.config._attn_implementation == "sdpa" and bool(reader.layers)
        fault = reader.fault or ("" if sdpa else "it is not transformers' sdpa")
    except Exception as error:  # what a forward without values raises differs from model to model
        fault = f"it cannot be read on the meta device ({first_line(error, 80)})"
    if fault:
        return fault
    from transformers import AttentionInterface

    dtypes, head_dims, windows, heads = (set(values) for values in zip(*reader.layers.values(), strict=True))
    model.document_rows = rows = of(max(dtypes, key=lambda dtype: dtype.itemsize), head_dims, windows)
    rows.heads = heads
    for name in reader.layers:
        model.get_submodule(name).document_rows = rows
    model.register_forward_pre_hook(functools.partial(read_rows, rows, ""), with_kwargs=True)
    # It has no mask function: transformers then makes no mask, and reads no positions.
    AttentionInterface.register(CORE, attend_rows)
    model.set_attn_implementation(CORE)
    return ""


def _read_attention(model: nn.Module, computed: torch.dtype) -> AttentionReader:
    from transformers import AttentionInterface, AttentionMaskInterface

    trial: Any = copy.deepcopy(model).to("meta")
    group_experts(trial)
    for parameter in trial.parameters():  # as sharding casts them; buffers stay
        parameter.data = parameter.data.to(computed)
    tokens = torch.zeros(2, 8, dtype=torch.long, device="meta")
    reader = AttentionReader(trial, tokens.shape)
    AttentionInterface.register(READER, reader.attention)
    AttentionMaskInterface.register(READER, reader.mask)
    trial.set_attn_implementation(READER)
    for reader.packed in (False, True):
        with torch.no_grad(), reader:
            trial(tokens, position_ids=tokens)
    return reader
