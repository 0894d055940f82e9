"""Data sets, and the one global cursor that every rank slices.

    DataSet      train samples, held-out samples, and their description (DataInfo)
    Cursor       (seed, step, global batch) → sample indices; independent of the world size
    MixCursor    the same for a mixture of data sets ([[data.sources]])
    StreamCursor the same for data without a length
    Loader       a step's micro-batches for one rank, read ahead by threads

Each data set is one file here, named as in --data.name. Not here: how a batch becomes a loss
(fsdp/models/loss.py).
"""

from fsdp.data.cursor import Cursor
from fsdp.data.loader import Loader, heldout_batches
from fsdp.data.mixing_order import MixCursor
from fsdp.data.registry import BUILT_INS, build_dataset
from fsdp.data.types import Batch, DataInfo, DataSet, Samples, StepBatch

__all__ = [
    "BUILT_INS", "Batch", "Cursor", "DataInfo", "DataSet", "Loader", "MixCursor", "Samples", "StepBatch",
    "build_dataset",
    "heldout_batches",
]  # fmt: skip
