"""Muon on shards (--optim.name muon): the matrices inside repeated blocks, the other parameters by AdamW.

Momentum is sharded as parameters are. An update needs the whole matrix: each matrix belongs to one rank,
which receives its rows, orthogonalizes it and returns the rows of the result. Replicas share this work. The
numbers are those of torch.optim.Muon on the whole model.

    optimizer    the update
    parameters   selects the matrices
    exchange     assigns them to ranks and moves their rows

Not here: which optimizer a run has (fsdp/optim/optimizer.py).
"""

from fsdp.optim.muon.optimizer import ShardedMuon
from fsdp.optim.muon.parameters import hidden_matrices

__all__ = ["ShardedMuon", "hidden_matrices"]
