"""What a trained run says of data: named classes with probabilities, accuracy, a picture; or text that goes
on.

    __main__     the command: python -m fsdp.predict RUN
    trained      a run directory's model in one process, beside the data that it was trained on
    images       classes of samples or of a person's own pictures, and the accuracy on held-out data
    picture      a grid of pictures with what was said of each
    language     text, a token at a time

The preprocessing is training's own: it comes from the data's DataInfo. Not here: shards, or how an export is
made.
"""
