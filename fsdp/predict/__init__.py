"""Predictions of a trained run: classes with probabilities and accuracy, or generated text.

    __main__   the command: python -m fsdp.predict RUN
    trained    a run directory's model, on one rank or sharded over several, with the data it was trained on
    answers    classes of samples or of image files with the accuracy, or text, one token at a time

Not here: how an export is made (fsdp/checkpoint).
"""
