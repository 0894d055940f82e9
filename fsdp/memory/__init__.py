"""Where memory goes and what may lie elsewhere: activations recomputed or offloaded, tensors in files,
updates by parts.

Each file holds one knob of `--memory.*` or one way to look at memory. Not here: sharding
(fsdp/parallel/shard.py).
"""
