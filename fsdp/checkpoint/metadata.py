"""DCP's `.metadata`, read without running anything that it says.

It is a pickle. This unpickler knows the types that DCP itself writes there and the few of torch inside them; any other name,
and so any call that a stranger put there, is refused before it is looked up.
"""

from __future__ import annotations

import io
import pickle
from pathlib import PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.metadata import Metadata

from fsdp import collector
from fsdp.checkpoint.manifest import Broken

_DCP = "torch.distributed.checkpoint.metadata"

_KNOWN: dict[tuple[str, str], Any] = {
    **{(_DCP, name): getattr(dcp, name) for name in dcp.__all__},
    (_DCP, "_MEM_FORMAT_ENCODING"): dcp._MEM_FORMAT_ENCODING,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("collections", "OrderedDict"): dict,
    ("pathlib", "PosixPath"): PurePosixPath,  # dcp.save notes where it wrote
    **{("torch", str(value).removeprefix("torch.")): value for value in vars(torch).values() if isinstance(value, torch.dtype)},
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = _KNOWN.get((module, name))
        if known is None:
            raise Broken(
                "foreign-pickle", f".metadata asks for {module}.{name}, which is no part of a checkpoint; nothing was run"
            )
        return known


def read(data: bytes) -> Metadata:
    """The metadata, or Broken."""
    try:
        with collector.held():
            found = _Reader(io.BytesIO(data)).load()
    except Broken:
        raise
    except Exception as error:  # a damaged pickle fails in any way it likes; each is the same news
        raise Broken("metadata", f".metadata cannot be read ({type(error).__name__}: {error})") from None
    if not isinstance(found, Metadata):
        raise Broken("metadata", ".metadata holds something else")
    return found
