"""See the run from outside its ranks, and say which one did not come.

    cells.py      what a rank tells: one page of shared memory, written with plain stores
    calls.py      the collectives, begun and ended, told into the cells
    device.py     on CUDA the device's own times of the phases, and what it waited for communication
    witness.py    a thread in the rank that answers the monitor: stacks, flight recorder; or leaves at its word
    rank.py       a rank's side: starts all this, ends it, hands over its last words
    monitor.py    a process of its own on each node, without torch: looks, judges, says, ends the job
    crew.py       the ranks of a node together: all looked at, asked, kept the stacks of, ended
    look.py       what one look at a rank finds: cells, /proc, the witness's answer
    evidence.py   what was found of one rank, and what its stack alone says
    verdict.py    from what was found to who it was; nothing is read or done there
    nodes.py      the monitors of several nodes, over TCP
    farewell.py   how a failed rank leaves: after the monitor has printed the failure, and within a bound
    words.py      a rank's last words, and whose failure they tell
    lateness.py   who arrives late at the collectives
    ledger.py     while nothing is wrong: who is late, and where each rank's time goes
    files.py      what stays in RUN/watch/, written by a thread that may wait for storage
    numbers.py    replicas compared, gradient norms by unit, the samples of a spike

The monitor imports crew, look, evidence, verdict, cells, ledger, lateness, nodes, orders and files: none of
them may import torch. A rank that is stopped, dead or stuck with Python's lock in its hand cannot speak; its
page can still be read.
"""
