"""Who a process is and how ranks talk: DistEnv, the mesh, collectives, a stop that all ranks agree on, the
check before training.
"""
