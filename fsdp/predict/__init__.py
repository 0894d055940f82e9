"""Predictions of a trained run: classes with probabilities and accuracy, or generated text.

    __main__   the command: python -m fsdp.predict RUN
    trained    the model, on one rank or sharded, and its answers: classes and accuracy, or text

Not here: how an export is made (fsdp/checkpoint).
"""
