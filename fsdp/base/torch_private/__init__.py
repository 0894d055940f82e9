"""Private names of torch, all that are used here: names as strings, and functions in core and fsdp.

    core     torch without FSDP; the import of torchvision
    fsdp     FSDP2's parameter groups

Each function has a test in tests/base/test_torch_private.py, which fails first when torch changes. This file
imports no torch: the strings are functions in stack traces, packages, operators.
"""

from __future__ import annotations

BACKWARD_FUNCTION = "_engine_run_backward"
"""Innermost Python function (torch/autograd/graph.py) while the engine runs a backward in C++. The hang
verdict reads it in stacks; under another name a rank that waits for DDP's buckets is reported as busy in its
own code.
"""

COMPILER_PACKAGES = ("torch._dynamo", "torch._inductor", "torch._functorch", "triton")
"""Packages in which a rank compiles. Under other names the hang verdict calls a long compilation a hang."""

COMPILER_HELPERS = "torch._inductor.compile_worker"
"""Package of threads that the compiler leaves behind, where Triton is installed: they wait for the answers of
its worker processes until the run ends. Under another name, no rank of a compiled run is ever said to hang.
"""

WRAPPER_NAMES = frozenset({"_checkpoint_wrapped_module", "_orig_mod"})
"""What activation checkpointing and torch.compile put into parameter names. Other names would stay in
checkpoints, which then have other keys with and without these wrappers.
"""

COLLECTIVE_OPS = {
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "broadcast_": "all_reduce",
}
"""Operators of the c10d namespace → collective. One under another name is missing from a plan's
communication.
"""

WRITE_ONLY_OPS = frozenset(
    {"copy_", "fill_", "zero_", "normal_", "uniform_", "_foreach_copy_", "_foreach_zero_"}
)
"""In-place operators that do not read what they write. One under another name is planned as a read and a
write.
"""

EXTRA_STATE = "_extra_state"
"""The last part of the key under which a state dict has what a module's get_extra_state returns.

Without it, a file of a model with such a module is refused as no state dict.
"""

OPTIMIZER_IMPORT = "torch._dynamo"
"""A package that each optimizer of torch imports in its first step: 20 MiB and more."""

SNAPSHOT_VIEWER = "python -m torch.cuda._memory_viz trace_plot"
"""The command that draws a snapshot of CUDA's allocator, named in a profile's log and docs."""

DCP_PLACE = ("torch.distributed.checkpoint.filesystem", "_StorageInfo")
"""Module and name that `.metadata` has for the place of an item in a file. Files on disk hold it: a torch
that renames it breaks its own old checkpoints too.
"""

_OLD = "torch.distributed._shard.sharded_tensor.metadata"
DCP_OLD_PROPERTIES, DCP_OLD_UNREAD = (_OLD, "TensorProperties"), (_OLD, "MEM_FORMAT_ENCODING")
"""Names in older versions' `.metadata`: the same class with the same state, and a field's function."""

DCP_UNREAD = (
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.serialization", "_get_layout"),
)
"""Functions that `.metadata` calls for fields of a tensor that no reader here uses."""
