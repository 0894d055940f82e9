"""The run, in the order that data meets it. Read loop.py first.

    loop                   train(): the run on one page
    setup, job             the lock, model, data, records; what follows from flags and ranks alone
    weights, frozen_base   initial weights by the flags; the frozen weights under adapters
    training_loop, step    batch, step, record, vote, evaluation, save; one training step
    step_hooks             the hooks of a run in its steps
    evaluate, epochs       evaluation on held-out data; the epoch after each step
    source_losses          the loss of each source of a mixture
    packed_rows            the check that attention stays within documents
    flops, planned         operations of one sample; a plan's figures beside the run's own
    summary                the closing lines
    own_loop               the parts of a run for a training loop of one's own

Not here: the launchers, which call train() (launch/guard.py).
"""
