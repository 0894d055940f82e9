"""Ranks and what they exchange, from DistEnv to the decision to stop.

    env                           DistEnv from the launcher's variables; hints; addresses; a peer that is gone
    process_group                 the default process group, and checks between its ranks before training
    mesh                          the DeviceMesh, the batch of a rank
    collectives                   sums, and objects from rank 0 or of all ranks; a DTensor's local part
    stop                          stop requests: all ranks stop at the same step

Not here: the launchers (launch/).
"""
