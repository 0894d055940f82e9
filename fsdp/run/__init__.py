"""The run, in the order that data meets it. Read loop.py first.

    loop            train(): the run on one page
    job             what follows from flags and ranks alone
    build           the parts of a run, one function a noun; initial weights by the flags
    training_loop   batch, step, record, vote, evaluation, save
    step            one training step
    evaluate        evaluation on held-out data
    answers         generated text: of prompts, and of held-out questions at an evaluation
    summary         the facts at the start and in a dry run, a plan's figures, the closing lines
    own_loop        the parts of a run for a training loop of one's own

Not here: the launchers, which call train() (launch/guard.py).
"""
