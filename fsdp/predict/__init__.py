"""Predictions of a trained run: classes with probabilities and accuracy, or generated text.

    __main__   the command: python -m fsdp.predict RUN
    trained    a run directory's model in one process, with the data that it was trained on
    sharded    the same model sharded over the ranks of torchrun or srun
    images     classes of samples or of image files, and the accuracy on held-out data
    picture    a grid of images with their predicted classes
    language   text, one token at a time

Preprocessing is that of training: it comes from the data's DataInfo. Not here: shards, or how an export is
made.
"""
