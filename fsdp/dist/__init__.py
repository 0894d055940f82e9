"""Ranks and what they exchange, from DistEnv to the decision to stop.

    env                           DistEnv from the launcher's variables; hints; addresses; a peer that is gone
    process_group                 the default process group
    mesh                          the DeviceMesh, the batch of a rank
    collectives                   sums, and objects from rank 0 or of all ranks; a DTensor's local part
    preflight                     checks before training
    stop                          stop requests: all ranks stop at the same step

Not here: the launchers (launch/).
"""
