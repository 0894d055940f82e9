"""Compares sharded training with unsharded training of the same model.

    __main__    the command: meshes and trainings, the ranks that train sharded, differences and their bounds
    reference   the plain unsharded loop, written independently of the run

Not here: the training that is compared (fsdp/run/loop.py).
"""
