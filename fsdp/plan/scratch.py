"""Bytes that operators take beside tensors on a CPU: copies in oneDNN's blocks, buffers, generated code.

They are allocated and freed within one call of an operator, or kept by a library, so that no tensor shows
them. Each rule follows from what torch and oneDNN do; `python -m bench.plan_operators` measures it, operator
by operator. One thread a rank, as torchrun sets it, on a processor with AVX-512.

Not here: tensors (tracker.py), and CUDA, whose kernels have the margin instead (estimate.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fsdp.base.torch_private.names import ATTENTION_OPERATORS
from fsdp.dist.shards import tensors_in

MIB = 1 << 20
BLOCK = 16
"""Channels of a block: 64 bytes of fp32 (nChw16c)."""

HEAP = 128 << 10
"""Bytes below which glibc takes a storage from its heap: M_MMAP_THRESHOLD's default. Freed, they stay
resident below what is still in use: the heap is as large as it ever was.
"""

SGEMM_BUFFERS = 8 * MIB
"""What MKL keeps for packed operands of fp32 products after the first of them: 6.6 MiB measured for
256 × 512 × 8192, 8.3 MiB for a whole encoder.
"""

PRIMITIVE_CODE = 0.52 * MIB
"""What oneDNN keeps for each distinct bf16 product: the generated code of a primitive, in a cache of 1024.
0.45 to 0.70 MiB measured for 33 products, of 4 to 16384 rows.
"""
CACHED_PRIMITIVES = 1024
ONEDNN_PRODUCT = 16**3
"""Multiplications from which on torch gives a bf16 product to oneDNN (native/mkldnn/Matmul.cpp)."""

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
ATTENTION_BACKWARD_PRODUCTS = 4
"""Distinct bf16 products of torch's attention backward on a CPU: 1.4 to 2.0 MiB measured."""

VECTORIZED_UPSAMPLE = 128
"""Height plus width of an output up to which torch upsamples in channels-last order (UpSampleKernel.cpp)."""


class Kept:
    """Bytes that libraries keep from the first use of a product on."""

    def __init__(self) -> None:
        self._seen: set[Any] = set()
        self._sgemm = False

    @property
    def bytes(self) -> int:
        code = PRIMITIVE_CODE * min(len(self._seen), CACHED_PRIMITIVES)
        return int(code + SGEMM_BUFFERS * self._sgemm)

    def use(self, name: str, args: Sequence[Any]) -> None:
        attention = name.startswith(ATTENTION_OPERATORS) and name.endswith("backward")
        if name not in PRODUCTS and not attention:
            return
        tensors = [tensor for tensor in tensors_in(args) if tensor.dim() > 1]
        halved = tensors[0].dtype is torch.bfloat16
        if name in PRODUCTS:
            left, right = tensors[-2:]
            if not halved:
                self._sgemm = True
            elif left.numel() * right.shape[-1] > ONEDNN_PRODUCT:
                self._seen.add((name, *((one.shape, one.stride()) for one in (left, right))))
        elif halved:
            for product in range(ATTENTION_BACKWARD_PRODUCTS):
                self._seen.add((name, tensors[1].shape, tensors[2].shape, product))


def scratch_bytes(name: str, args: Sequence[Any], out: Any) -> int:
    """The most that a call holds beside its inputs and outputs. `name` is the operator's, without aten::."""
    rule = RULES.get(name)
    return rule(args, out) if rule is not None else 0


# ---------------------------------------------------------------- convolutions


def _blocks(tensor: Tensor) -> int:
    """Bytes of a batch in blocks of channels."""
    channels = tensor.shape[1]
    return tensor.nbytes // channels * _rounded(channels)


def _weight_blocks(weight: Tensor) -> int:
    inner = weight.shape[1]
    inner_blocks = inner if inner < 4 else _rounded(inner)
    return weight.nbytes // (weight.shape[0] * inner) * _rounded(weight.shape[0]) * inner_blocks


def _rounded(channels: int) -> int:
    return -(-channels // BLOCK) * BLOCK


def _source_blocks(tensor: Tensor) -> int:
    """As the source of a first layer, pictures of up to three channels are read as they are."""
    return 0 if tensor.shape[1] < 4 else _blocks(tensor)


def _is_channels_last(*tensors: Tensor) -> bool:
    return any(
        tensor.dim() == 4
        and tensor.is_contiguous(memory_format=torch.channels_last)
        and not tensor.is_contiguous()
        for tensor in tensors
    )


def _is_pointwise(weight: Tensor) -> bool:
    return math.prod(weight.shape[2:]) == 1


def _is_plain(x: Tensor, weight: Tensor, stride: Sequence[int]) -> bool:
    """1 × 1 kernels in fp32 are a product without blocks, on one thread (ConvParams::use_mkldnn)."""
    return (
        x.dtype is torch.float32 and _is_pointwise(weight) and math.prod(stride) == 1 and x.shape[0] < BLOCK
    )


def _is_depthwise(weight: Tensor, groups: int) -> bool:
    return groups > 1 and weight.shape[1] == 1


def _convolution(args: Sequence[Any], out: Any) -> int:
    """Input and weights are copied into blocks; the output's blocks are copied into the output after them."""
    x, weight, stride, groups = args[0], args[1], args[3], args[8]
    if _is_plain(x, weight, stride):
        return 0
    if _is_channels_last(x, weight):
        # Activations are read as they are; weights are copied into channels-last order, then into blocks.
        return 0 if _is_depthwise(weight, groups) else 2 * weight.nbytes
    made = _blocks(out)
    return max(_source_blocks(x) + _weight_blocks(weight) + made - out.nbytes, made)


def _convolution_backward(args: Sequence[Any], out: Any) -> int:
    """The most of: the input's gradient; the weights' gradient; its copy out of blocks."""
    gradient, x, weight, stride, groups, wanted = *args[:3], args[4], args[9], args[10]
    if _is_plain(x, weight, stride):
        return 0
    halved = x.dtype is not torch.float32
    wide = weight.shape[-1] > 3
    if _is_channels_last(x, weight):
        if _is_depthwise(weight, groups):
            return _depthwise_blocks(gradient, x, weight) if wide else 0
        return weight.nbytes + (_halved(gradient, x, weight) if halved else 2 * _weight_blocks(weight))
    for_input = _blocks(gradient) + _blocks(x) - x.nbytes if wanted[0] else 0
    if _is_depthwise(weight, groups) and wide:
        return for_input  # the weights' gradient is computed without blocks
    for_weights = _source_blocks(x) + _blocks(gradient)
    if halved:
        return max(for_input, for_weights + _halved(gradient, x, weight))
    written = _weight_blocks(weight)
    return max(for_input, for_weights + written - weight.nbytes, written)


def _halved(gradient: Tensor, x: Tensor, weight: Tensor) -> int:
    """In bf16 weights' gradients add up in fp32, from transposed copies of one sample of each operand."""
    copies = 0 if _is_pointwise(weight) else _source_blocks(x) + _blocks(gradient)
    return 2 * _weight_blocks(weight) + copies // x.shape[0]


def _depthwise_blocks(gradient: Tensor, x: Tensor, weight: Tensor) -> int:
    """Kernels wider than three have no depthwise code: each channel is a group in a block of 16 × 16."""
    blocks = weight.numel() * BLOCK * BLOCK * 4
    if x.dtype is torch.float32:
        return blocks
    return blocks + blocks // 2 + BLOCK * (x.nbytes + gradient.nbytes) // x.shape[0]


# ---------------------------------------------------------------- recurrent layers


def _lstm(args: Sequence[Any], out: Any) -> int:
    """Both matrices of weights in blocks; in fp32 the gates of all steps."""
    return sum(weight.nbytes for weight in args[1:3]) + _gates(args[0], args[1])


def _lstm_backward(args: Sequence[Any], out: Any) -> int:
    """Both matrices in blocks, and their gradients in fp32 before they are copied out."""
    return sum(weight.nbytes + 4 * weight.numel() for weight in args[1:3]) + _gates(args[0], args[1])


def _gates(x: Tensor, weight: Tensor) -> int:
    return x.nbytes // x.shape[-1] * weight.shape[0] if x.dtype is torch.float32 else 0


def lstm_workspace_bytes(args: Sequence[Any]) -> int:
    """The tensor that oneDNN's forward keeps for its backward, of one layer and direction: gates in the
    data's type and in fp32, states, cells in fp32, and the output.

    Its fake counterpart is empty. Of six sizes, real ones are 22 to 60 KB larger, of 2 to 16 MB.
    """
    x, weight = args[0], args[1]
    steps, rows = x.shape[:2]
    width, size = weight.shape[0] // 4, x.element_size()

    def matrix(count: int, columns: int, size: int) -> int:
        line = -(-columns * size // 64) * 64
        return count * rows * (line + 64 if line % (256 * size) == 0 else line)

    gates = matrix(steps, 4 * width, size) + matrix(steps, 4 * width, 4)
    states = 2 * matrix(2 * (steps + 1), width, size) + matrix(2 * (steps + 1), width, 4)
    return gates + states + matrix(steps, width, size)


# ---------------------------------------------------------------- pictures


def _upsample(args: Sequence[Any], out: Any) -> int:
    x = args[0]
    if sum(out.shape[-2:]) > VECTORIZED_UPSAMPLE or x.is_contiguous(memory_format=torch.channels_last):
        return 0
    return x.nbytes + out.nbytes


def _upsample_backward(args: Sequence[Any], out: Any) -> int:
    gradient = args[0]
    return 0 if gradient.is_contiguous() or _is_channels_last(gradient) else gradient.nbytes


RULES: dict[str, Callable[[Sequence[Any], Any], int]] = {
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "mkldnn_rnn_layer": _lstm,
    "mkldnn_rnn_layer_backward": _lstm_backward,
    "upsample_nearest2d": _upsample,
    "upsample_nearest2d_backward": _upsample_backward,
}
