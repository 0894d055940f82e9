"""Ranks and what they exchange: DistEnv, the process group, the mesh, collectives, the stop decision, and the
checks before training.
"""
