"""Checkpoints: save, seal, verify, restore, prune and export, on local disks and object stores.

A sealed checkpoint is a torch Distributed Checkpoint (`dcp.load` and `dcp_to_torch_save` read it) with a
manifest: the size and checksum of every file, the digest of every tensor. The manifest is written last; a
folder without one does not count as a checkpoint.

    checkpointer                        what the training loop calls: saves beside the steps, restores
    saver, local_saver                  one save: copy, write, gather, seal, prune; one on the node's own disk
    snapshot, pieces                    TrainState as named pieces; boxes within a tensor
    write_plan, layout, layout_file     which rank writes which rows, as columns of numbers, and their file
    staging, packed, rank_file          one rank's file: in memory, held compressed, written with checksums
    torch_file, metadata_pickle         bytes that `torch.save` and DCP would write
    crc, manifest, file_names           joined checksums, the seal, the names in a checkpoint's folder
    store, open_store                   where checkpoints lie: the interface, and the store of a folder or URL
    local_store, object_store           a folder, s3://bucket/prefix
    local_tier, local_names             checkpoints on the nodes' own disks, and the name of their folders
    near_store, copier                  reads from a node's own copy; copies to the shared store
    discovery, restore, load            what rank 0 finds; which checkpoint is restored; how it is read
    stored_parts, tensor_reader         where a tensor's rows lie in the files, and reading them
    torch_archive                       zips of torch.save, checked before torch unpacks them
    metadata, pickle_opcodes            DCP's `.metadata`, read without executing its code
    tensor_keys, foreign_dcp            the run's tensors → a checkpoint's keys, another program's too
    pretrained, full_state              folders of safetensors by rows; one state dict, read lazily
    adapter_weights                     checkpoints of adapters alone, and the weights under them
    export, export_files                a checkpoint's model as one state dict, and its files
    pretrained_export                   an export that `from_pretrained` reads
    retention, inspect                  which checkpoints are kept; the list of whole and broken ones
    run_files, run_mirror, run_source   a run directory in an object store: files, copies, reading
    __main__                            the command that lists, verifies, prunes and exports
"""

from fsdp.checkpoint.checkpointer import Checkpointer, Sealed
from fsdp.checkpoint.restore import Restored

__all__ = ["Checkpointer", "Restored", "Sealed"]
