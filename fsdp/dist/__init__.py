"""Ranks and what they exchange, from DistEnv to the decision to stop.

    env, launcher_hints           DistEnv from the launcher's variables; what a person types under a launcher
    process_group, network        the default process group; this host's addresses, a peer that is gone
    mesh, shards                  the DeviceMesh; rows of a shard, a DTensor's local part
    collectives                   sums, and objects from rank 0 or of all ranks
    preflight, nccl_log           checks before training; NCCL's transport by its log
    stop                          stop requests: all ranks stop at the same step

Not here: the launchers (launch/).
"""
