"""Spreads a model over ranks: sharding, materialization, communication, float8, compilation, recomputation,
offload.

    shard         the order of all steps
    expert        experts divided over ranks, their tokens exchanged
    ddp           DDP around a model whose weights are real
    materialize   a meta model made real
    activations   recomputation
    offload       activations and optimizer states in host memory
    nvme          optimizer states, parameters and gradients in files
    tensor        layers divided over tensor ranks
    context       rows of tokens divided over ranks (Ulysses)
    compute       compilation, float8, attention's kernel; the user's communication; whole parameters
    checks        the device's support, initial values, the first forward, errors of a forward
"""
