"""The outputs of a run's numbers: the recorder, metrics, the console, TensorBoard, Weights & Biases, MLflow,
sinks of the user.
"""
