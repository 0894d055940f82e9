"""Data sets, and the one global cursor that every rank slices.

    types                                DataSet (train and held-out samples, DataInfo), Samples, Batch
    registry, arguments                  the DataSet of --data.name, and checks of --data.args
    cursor                               Cursor: (seed, step, global batch) → samples; knows no world size
    mixture, mixing_order                several data sets as one; MixCursor, the order of their samples
    stream, stream_cursor                data without a length; StreamCursor, their order and states
    loader                               Loader: a step's micro-batches for one rank, read ahead
    reader_threads, threaded             threads that prepare steps; a call for each of many items
    device_prefetch                      the next step's batch on its way to a CUDA device
    digits, fashion_mnist, folder        data sets of images, named as in --data.name
    synthetic, text, documents, tokens   data sets of random samples, of text and of tokens, named likewise
    custom, path_reader                  --data.name package.module:factory; --data.name PATH
    images                               images as samples
    token_file, token_reader             a checked file of tokens; reading tokens of an open file
    token_width                          the format of a raw token file
    next_token, packing                  windows of tokens as inputs and targets; documents in rows
    model_tokenizer                      the tokenizer of a model's folder
    download                             files downloaded once per node

Not here: how a batch becomes a loss (fsdp/models/loss.py).
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
