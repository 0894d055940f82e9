"""Checkpoints that cannot be lost: save, seal, verify, restore, prune, export; local disk and object stores.

A sealed checkpoint is plain torch Distributed Checkpoint inside (`dcp.load` and `dcp_to_torch_save` read it)
with a manifest beside: every file's size and checksum, every tensor's digest. The manifest is written last;
what has none does not count.
"""

from fsdp.checkpoint.checkpointer import Checkpointer, Sealed
from fsdp.checkpoint.restore import Restored

__all__ = ["Checkpointer", "Restored", "Sealed"]
