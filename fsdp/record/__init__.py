"""Where a run's numbers go, from rank 0.

    metrics                   StepMetrics, one step's numbers, and Reporter, which passes them to a launcher
    recorder                  writes them to metrics.jsonl, the console, the Reporter and every sink
    console                   the live line, or a line per record
    tensorboard               event files of TensorBoard, without its package
    wandb_sink, mlflow_sink   Weights & Biases, MLflow
    custom_sinks              sinks of the user
    sender                    a sink's thread, for servers that are slow; records that a sink has lost

Not here: the records of the watch (fsdp/watch/records.py).
"""
