"""Ranks and what they exchange, from DistEnv to the decision to stop.

    env                           DistEnv from the launcher's variables; hints; addresses; a peer that is gone
    process_group                 the default process group, and checks between its ranks before training
    mesh                          the DeviceMesh, a rank's place on its axes, its batch
    collectives                   sums, and objects from rank 0 or of all ranks
    boxes                         which part of a tensor a rank holds
    stop                          stop requests: all ranks stop at the same step

Not here: the launchers (launch/).
"""
