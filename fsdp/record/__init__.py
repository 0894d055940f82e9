"""Where a run's numbers go, from rank 0.

    recorder      writes them to metrics.jsonl, TensorBoard's files, the console, the Reporter and every sink
    console       the live line, or a line per record
    sinks         the launcher's Reporter, Weights & Biases, MLflow, sinks of the user

Not here: the records of the watch (fsdp/watch/records.py).
"""
