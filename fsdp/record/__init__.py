"""Where numbers go: the recorder, metrics, the console, TensorBoard, Weights & Biases."""
