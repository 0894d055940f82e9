"""Optimizers, the learning rate, gradients, and TrainState.

    optimizer     the optimizers and their groups; one of the user and the check of its states; the learning
                  rate as a function of the step; TrainState, and the moving average of the weights
    muon          Muon on shards
    small_states  Adam with moments in bf16 or 8 bits
    gradients     the gradient norm of the whole model, clipping, fp16's loss scale, steps that are not finite

Not here: where the states of an optimizer rest between updates (fsdp/shard/offload.py, nvme.py).
"""
