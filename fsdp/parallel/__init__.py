"""Spreads a model over ranks: sharding, materialization, communication, float8, compilation, recomputation,
offload.

    shard, ddp, whole_parameters            the order of all steps; DDP; parameters that stay whole
    device_check, attention, compiler       what the device supports; attention's kernel; --speed.compile
    materialize, init_check                 a meta model made real, and the check that every value was set
    activations, written_tensors, offload   recomputation, writes into what it keeps; activations on the host
    float8, comm_hooks                      matrix products in float8; the user's communication
    forward_check, forward_errors           checks of the first forward; its errors with a HINT
    update, state_parts                     the optimizer's update, whole or a few parameters at a time
    host_states, nvme, mapped_files         states in host memory or in files; mapped files
    traffic                                 bytes that a rank sends in a step, from shapes
"""
