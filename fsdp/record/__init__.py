"""Where a run's numbers go, from rank 0.

    recorder      metrics.jsonl, TensorBoard's files, the console, the launcher's Reporter, every sink
    sinks         Weights & Biases, MLflow, sinks of the user

Not here: the records of the watch (fsdp/watch/records.py).
"""

import threading

STUCK = threading.Event()
"""A server has not taken its last records in time: its library may wait again at exit."""
