"""Optimizers, the learning rate, gradients, and TrainState.

    optimizer, custom_optimizer   the optimizers and their groups; one of the user
    muon, small_states            Muon on shards; Adam with moments in bf16 or 8 bits; a folder each
    schedule                      the learning rate as a function of the step
    gradients                     the gradient norm of the whole model, and clipping
    loss_scale, nonfinite         fp16's loss scale; steps whose numbers are not finite
    ema, train_state              the moving average of the weights; what a resume restores

Not here: where the states of an optimizer rest between updates (fsdp/parallel/update.py).
"""
