"""Data sets, and the one global cursor every rank slices.

    DataSet      train samples, held-out samples, and what a model and a person need to know of them (DataInfo)
    Cursor       (seed, step, global batch) → sample indices; knows no world size
    Loader       a step's micro-batches for one rank, read ahead by threads

Not here: how a batch becomes a loss (fsdp/loss.py).
"""
