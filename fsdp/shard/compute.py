"""How units compute: --speed.compile, --speed.float8, --speed.attention.

Compilation: on a GPU torch's compiler needs Triton, and Triton a C compiler, once for its launcher.
Containers made for running, not for building, often have none; without a compiler the default trains eager.

float8, by torchao: weights, inputs and gradients are scaled and rounded on the way into each product.
tensorwise has one scale a tensor and gathers sharded weights in float8, a byte an element; rowwise has a
scale a row, is closer to bf16, and gathers weights as they are computed in. Layers are converted within the
model's blocks, where sizes are multiples of 16: a head and an embedding keep their precision. What is kept
and updated stays fp32. It needs compute capability 8.9 (rowwise 9.0). --speed.float8_emulate does the
rounding anywhere, in slow products: for tests.

Attention: auto leaves the kernel to torch, call by call. One that is named is used everywhere or the run
ends: a slower one never takes its place in silence. fa3 and fa4 are FlashAttention's own packages, which
torch calls in place of its flash kernel. Not here: what is compiled (shard.py), and models that call other
kernels.

The user's own communication in place of FSDP's, reductions that sum, and parameters that --mesh.unsharded
keeps whole on each rank.

    --comm.all_gather, --comm.reduce_scatter
        package.module:function(output, input, group, …) → work, or None when it is done; or a class whose
        instance is called so and may allocate(size, dtype=, device=)
    --comm.all_reduce_hook
        package.module:function(gradient), after the reduction of each unit, in place

The process groups are those of the mesh. A function must be the same on every rank; nothing here can check
that. FSDP ignores whole parameters (`ignored_params`): it neither gathers nor casts them, and does not reduce
their gradients. Not here: what is gathered when (shard.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import logging
import math
import os
import shutil
import stat
import sysconfig
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    restore_flash_attention_impl,
    sdpa_kernel,
)

from fsdp.base.errors import ConfigError, first_line
from fsdp.config import CommSection, SpeedSection
from fsdp.distributed.env import set_variable
from fsdp.models import load_attribute
from fsdp.models.units import blocks_of

log = logging.getLogger(__name__)

COMPILERS = ("gcc", "clang")
FOLDERS = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def compiles(speed: SpeedSection, device: torch.device) -> bool:
    """auto compiles on CUDA, where that is possible."""
    if speed.compile != "auto":
        return speed.compile == "true"
    return device.type == "cuda" and not missing()


@functools.cache
def missing() -> str:
    """What Triton needs and this machine lacks; empty if nothing. Logs it, once a process."""
    lacks = ""
    if importlib.util.find_spec("triton") is None:
        lacks = "the package triton"
    elif not (os.environ.get("CC") or any(map(shutil.which, COMPILERS))):
        lacks = "a C compiler (gcc, clang, or CC)"
    elif not _header().exists():
        lacks = f"{_header()} (the package python3-dev)"
    if lacks:
        log.warning(
            "--speed.compile auto: units are not compiled, which is slower: Triton needs %s. "
            "HINT: install it, or --speed.compile false",
            lacks,
        )
    return lacks


def _header() -> Path:
    return Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")


def set_kernel_folders() -> None:
    """Where torch and Triton keep kernels, if the environment does not say: on the node's disk. Triton's own
    place is the home, which may be read-only, full, or shared by nodes that meet each other's locks.
    """
    torchs, tritons = FOLDERS
    if not os.environ.get(torchs):
        set_variable(torchs, str(_own_folder()))
    if not os.environ.get(tritons):
        set_variable(tritons, str(Path(os.environ[torchs], "triton").absolute()))


def _own_folder() -> Path:
    """Under a name that anybody could have taken, and what lies there is executed."""
    folder = Path(tempfile.gettempdir(), f"shardrun-compile-{os.getuid()}")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        about = folder.lstat()
        ours = about.st_uid == os.getuid() and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        wrong = "" if ours and folder.is_dir() else "others can write to it, and what lies there is executed"
    except OSError as error:
        wrong = str(error.strerror)
    if wrong:
        hint = f"export {FOLDERS[0]}=FOLDER, one of your own on the node's disk; or --speed.compile false"
        raise ConfigError(f"--speed.compile: no kernels can lie in {folder}: {wrong}.", hint, scope="node")
    return folder


NEEDED = {"tensorwise": (8, 9), "rowwise": (9, 0)}


def check_float8(speed: SpeedSection, device: torch.device) -> None:
    """Checks that this machine supports the flags, before any process group exists."""
    if speed.float8 == "off":
        return
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError(
            f"--speed.float8 {speed.float8} needs torchao, which is not installed.", "pip install torchao"
        )
    if speed.float8_emulate:
        return
    has = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    if has < (needed := NEEDED[speed.float8]):
        raise ConfigError(
            f"--speed.float8 {speed.float8} needs a GPU of compute capability {needed[0]}.{needed[1]}, and "
            f"this {device.type} has {has[0]}.{has[1]}.",
            "--speed.float8 off, or --speed.float8_emulate true to try the rounding",
        )


def check_float8_tokens(speed: SpeedSection, samples: int, seq_len: int) -> None:
    """Checks the tokens of a micro-batch: products for weights' gradients sum over them in steps of 16, and
    padding would copy them. `seq_len` is 0 for data that are not tokens.
    """
    tokens = samples * seq_len
    if speed.float8 == "off" or speed.float8_emulate or tokens % 16 == 0:
        return
    raise ConfigError(
        f"--speed.float8 {speed.float8} needs micro-batches of a multiple of 16 tokens, and "
        f"--train.micro_batch times --data.seq_len is {tokens:,}.",
        f"--data.seq_len {math.ceil(seq_len / 16) * 16}, or --speed.float8 off",
    )


def apply_float8(units: Sequence[Sequence[nn.Module]], speed: SpeedSection, *, sharded: bool) -> None:
    """Applied before checkpointing, compile and sharding."""
    if speed.float8 == "off":
        return
    blocks = blocks_of([list(unit) for unit in units])
    layers = [module for block in blocks for module in block.modules() if type(module) is nn.Linear]
    # The hardware requires sizes that are multiples of 16.
    chosen = {id(layer) for layer in layers if layer.in_features % 16 == layer.out_features % 16 == 0}
    if not chosen:
        fault = (
            f"--speed.float8 {speed.float8}: no nn.Linear of the blocks has sizes that are multiples of 16."
        )
        raise ConfigError(fault, "--speed.float8 off, or --model.args with such widths")
    torchao: Any = importlib.import_module("torchao.float8")
    recipe = dataclasses.replace(
        torchao.Float8LinearConfig.from_recipe_name(speed.float8),
        emulate=speed.float8_emulate,
        enable_fsdp_float8_all_gather=sharded and speed.float8 == "tensorwise",
        # Rows of images, and of the tokens that an expert gets, are no multiple of 16: zeros are added to
        # the products that sum over them. Others are computed as they are.
        pad_inner_dim=True,
    )
    for block in blocks:
        torchao.convert_to_float8_training(
            block, config=recipe, module_filter_fn=lambda layer, _: id(layer) in chosen
        )


def refresh_of_scales(root: nn.Module, speed: SpeedSection, *, sharded: bool) -> Callable[[], None] | None:
    """Computes the scales of all sharded float8 weights at once, after an update, instead of one sum over
    ranks a weight later.
    """
    if not sharded or speed.float8 != "tensorwise":
        return None
    compute: Any = importlib.import_module("torchao.float8").precompute_float8_dynamic_scale_for_fsdp
    return functools.partial(compute, root)


# ---------------------------------------------------------------- attention

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
ON_CUDA_ONLY = ("cudnn", "efficient", "fa3", "fa4")
PACKAGES = ("fa3", "fa4")
"""FlashAttention's own, which torch imports when they are activated."""
AUTO = "--speed.attention auto"


def check_attention(speed: SpeedSection, device: torch.device) -> None:
    """Checks that the device has the kernel, before any process group exists."""
    if speed.attention in ON_CUDA_ONLY and device.type != "cuda":
        raise ConfigError(
            f"--speed.attention {speed.attention} is a kernel of CUDA, and this is {device.type}.", AUTO
        )


def attention_kernel(speed: SpeedSection) -> contextlib.AbstractContextManager[None]:
    """Context of a run. The setting is the process's: recomputation on autograd's thread has it too."""
    if speed.attention in PACKAGES:
        return _flash_of_a_package(speed.attention)
    return contextlib.nullcontext() if speed.attention == "auto" else sdpa_kernel(KERNELS[speed.attention])


@contextlib.contextmanager
def _flash_of_a_package(name: str) -> Iterator[None]:
    """torch's flash operators are the package's; it refuses what it does not compute by itself."""
    try:
        activate_flash_attention_impl(name.upper())
    except (ImportError, RuntimeError, ValueError) as error:
        what = f"--speed.attention {name} cannot be activated ({first_line(error)})."
        raise ConfigError(what, AUTO) from error
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            yield
    finally:
        restore_flash_attention_impl()


# ---------------------------------------------------------------- comm

CALLS = {
    "all_reduce_hook": ("gradient",),
    "all_gather": ("output", "input", "group"),
    "reduce_scatter": ("output", "input", "group", "op"),
}
"""The arguments with which FSDP calls the function of each flag."""


@dataclass(frozen=True)
class Hooks:
    """Imported and created before any process group exists; None leaves the operation to FSDP."""

    all_reduce: Callable[[Tensor], None] | None
    all_gather: Any
    reduce_scatter: Any


def load_hooks(section: CommSection) -> Hooks:
    """The objects that the flags name, or a ConfigError."""
    loaded: dict[str, Any] = dict.fromkeys(CALLS)
    for name, arguments in CALLS.items():
        if path := getattr(section, name):
            function: Any = load_attribute(path, f"--comm.{name}")
            try:
                function = function() if inspect.isclass(function) else function
                inspect.signature(function).bind(*arguments)
            except Exception as error:
                hint = f"it is called with ({', '.join(arguments)}); a class is created without arguments"
                raise ConfigError(f"--comm.{name} {path}: {error}.", hint) from error
            loaded[name] = function if name == "all_reduce_hook" else _Collective(function)
    return Hooks(*loaded.values())


class _Collective:
    """The user's function behind torch's AllGather and ReduceScatter interfaces. FSDP calls with
    output_tensor= and input_tensor=; the function may name them otherwise. torch allocates the memory unless
    it does.
    """

    def __init__(self, function: Any) -> None:
        self._function = function
        if callable(getattr(function, "allocate", None)):
            self.allocate = function.allocate  # type: ignore[method-assign]

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, *args: Any, **more: Any
    ) -> Any:
        return self._function(output_tensor, input_tensor, group, *args, **more)


class OneBuffer:
    """FSDP copies the only rank's gradients from a reduction's input to its output: one tensor is both, and
    no copy is made.
    """

    _given: Tensor | None = None

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        given, self._given = self._given, None
        if given is None:
            given = self._given = torch.empty(*size, dtype=dtype, device=device)
        return given

    def __call__(self, *args: Any, **more: Any) -> Any:
        raise AssertionError("one rank reduces nothing")


def apply_comm(root: nn.Module, hooks: Hooks, *, sums: bool) -> None:
    """Applied to each unit after fully_shard: torch's setters do not recurse by themselves."""
    for module in root.modules():
        if not isinstance(module, FSDPModule):
            continue
        unit: Any = module
        if hooks.all_reduce is not None:
            module.set_all_reduce_hook(hooks.all_reduce)
        if hooks.all_gather is not None:
            unit.set_custom_all_gather(hooks.all_gather)
        if hooks.reduce_scatter is not None:
            unit.set_custom_reduce_scatter(hooks.reduce_scatter)
        if sums:
            module.set_gradient_divide_factor(1.0)
            # A factor other than the group's size becomes ReduceOp.PREMUL_SUM: gloo refuses it, and NCCL up
            # to torch 2.13 returns zeros for it in bf16 (pytorch #190747).
            module.set_force_sum_reduction_for_comms(True)


# ---------------------------------------------------------------- parameters that stay whole

FLAG = "--mesh.unsharded"


def whole_parameters(model: nn.Module, text: str) -> dict[str, nn.Parameter]:
    """All names of the parameters that match `text`; a tied parameter matches by any of its names."""
    if not text:
        return {}
    from fsdp.models.lora import matching, patterns

    named = dict(model.named_parameters(remove_duplicate=False))
    chosen = {named[name] for name in matching(patterns(text), list(named), FLAG, "parameter")}
    if len(chosen) == len(set(named.values())):
        raise ConfigError(f"{FLAG} {text} leaves nothing to shard.", "--mesh.strategy ddp")
    return {name: parameter for name, parameter in named.items() if parameter in chosen}


def apply_casts(
    model: nn.Module, whole: Collection[nn.Parameter], master: torch.dtype, param: torch.dtype
) -> None:
    """Lets modules with whole parameters compute in their dtype, `master`; outputs have `param` again."""
    if master == param:
        return
    for module in model.modules():
        if any(parameter in whole for parameter in module.parameters(recurse=False) if parameter.dim()):
            module.register_forward_pre_hook(lambda _, args: _cast(args, master))
            module.register_forward_hook(lambda _, args, output: _cast(output, param))


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple):
        return tuple(_cast(item, dtype) for item in value)
    return value


@torch.no_grad()
def reduce_gradients(parameters: Sequence[nn.Parameter], divisor: int) -> None:
    """Sums the gradients over all ranks in one all-reduce and divides them. Collective.

    A parameter that no rank's loss depends on keeps no gradient; one that some do gets zeros from the others.
    """
    if not parameters:
        return
    like = parameters[0]
    counts = like.new_ones(len(parameters))
    if absent := [at for at, p in enumerate(parameters) if p.grad is None]:
        counts[absent] = 0.0  # a copy from the host, for which a device is waited for
    parts = [p.new_zeros(p.numel()) if p.grad is None else p.grad.reshape(-1) for p in parameters]
    packed = torch.cat([counts, *parts])
    dist.all_reduce(packed)
    counts, *sums = packed.split([len(parameters), *(p.numel() for p in parameters)])
    used = counts.tolist() if absent else [1.0] * len(parameters)
    for parameter, part, count in zip(parameters, sums, used, strict=True):
        if count:
            parameter.grad = (part / divisor).view_as(parameter)
