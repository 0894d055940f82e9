"""Checkpoints: save, seal, verify, restore, prune and export, on local disks and object stores.

A sealed checkpoint is a torch Distributed Checkpoint (`dcp.load` and `dcp_to_torch_save` read it) with a
manifest: the size and checksum of every file, the digest of every tensor. The manifest is written last; a
folder without one does not count as a checkpoint.
"""

from fsdp.checkpoint.checkpointer import Checkpointer, Sealed
from fsdp.checkpoint.restore import Restored

__all__ = ["Checkpointer", "Restored", "Sealed"]
