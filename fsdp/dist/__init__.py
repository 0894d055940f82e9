"""Ranks and what they exchange, from DistEnv to the decision to stop.

    env, launcher_hints           DistEnv from the launcher's variables; what a person types under a launcher
    process_group, addresses      the default process group; this host's own addresses
    mesh, shards                  the DeviceMesh; rows of a shard, a DTensor's local part
    collectives                   sums, and objects from rank 0 or of all ranks
    preflight                     checks before training
    stop                          stop requests: all ranks stop at the same step
    lost_peer, nccl_log           errors that another rank's end causes; NCCL's transport by its log

Not here: the launchers (launch/).
"""
