"""Compares sharded training with unsharded training of the same model.

    __main__    the command: its flags, the table, the verdict
    options     what is compared: meshes, kinds of training, precisions, and the run's own flags
    reference   the plain unsharded loop, written independently of the run
    ranks       the processes that train sharded, by fsdp.run.loop.train itself
    compare     starts both sides and judges each mesh: the largest differences and their bounds

Not here: the training that is compared (fsdp/run/loop.py).
"""
