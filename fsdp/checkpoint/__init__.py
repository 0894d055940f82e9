"""Checkpoints: save, seal, verify, restore, prune and export, on local disks and object stores.

A sealed checkpoint is a torch Distributed Checkpoint (`dcp.load` and `dcp_to_torch_save` read it) with a
manifest: the size and checksum of every file, the digest of every tensor. The manifest is written last; a
folder without one does not count as a checkpoint.

    checkpointer                        what the training loop calls: saves beside the steps, restores
    save, sealing                       each rank's file beside the steps; all ranks' files sealed, or nothing
    state                               TrainState as named pieces, boxes in a tensor, and what a load fills
    manifest                            names, the seal, and `.metadata`, read without executing its code
    inspect                             a store's checkpoints: listed, opened, verified, pruned by one process
    store                               where checkpoints lie: a folder, s3://bucket/prefix
    local_tier                          checkpoints on the nodes' own disks, and their copies
    restore                             which checkpoint is restored; how it is read
    pretrained                          weights in files: one state dict, a folder by rows, under adapters
    export                              a checkpoint's model as one state dict, or for `from_pretrained`
    __main__                            the command that lists, verifies, prunes and exports
"""

from fsdp.checkpoint.checkpointer import Checkpointer, Sealed
from fsdp.checkpoint.restore import Restored

__all__ = ["Checkpointer", "Restored", "Sealed"]
