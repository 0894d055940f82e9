"""Where a run's numbers go, from rank 0.

    metrics       StepMetrics, one step's numbers, and Reporter, which passes them to a launcher
    recorder      writes them to metrics.jsonl, the console, the Reporter and every sink
    console       the live line, or a line per record
    tensorboard   event files of TensorBoard, without its package
    sinks         Weights & Biases, MLflow, sinks of the user; records that a sink has lost

Not here: the records of the watch (fsdp/watch/records.py).
"""
