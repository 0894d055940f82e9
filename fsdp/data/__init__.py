"""Data sets, and the one global cursor that every rank slices.

    types                   DataSet (train and held-out samples, DataInfo), Samples, Batch; Where; and Cursor:
                            (seed, step, global batch) → samples; knows no world size
    registry                the DataSet of --data.name: a name, a path, or code; the model's tokenizer for it
    mixture                 several data sets as one; MixCursor, the order of their samples
    stream                  data without a length; StreamCursor, their order and states
    loader                  Loader: a step's micro-batches for one rank, read ahead and copied to its device
    images                  digits, fashion_mnist, folder: images in memory or as files; random samples
    tokens                  files of tokens, as one row cut into windows; text as bytes
    check                   what a run reads of a file of rows, for python -m fsdp.tokenize --check
    documents               rows of text and conversations, tokenized once; several documents a sample

Not here: how a batch becomes a loss (fsdp/models/loss.py).
"""

from fsdp.data.loader import Loader, heldout_batches
from fsdp.data.registry import BUILT_INS, build_dataset
from fsdp.data.types import Batch, Cursor, DataInfo, DataSet, Samples, StepBatch

__all__ = [
    "BUILT_INS", "Batch", "Cursor", "DataInfo", "DataSet", "Loader", "Samples", "StepBatch",
    "build_dataset",
    "heldout_batches",
]  # fmt: skip
