"""The watch: names the rank that hangs, fails or is slow, from a monitor process on each node.

In reading order:

    status_page        what a rank writes into shared memory: phases, collectives, times, its failure; its end
    rank               starts the parts above, a thread that sends stacks, and the monitor
    monitor            the process that judges and ends the job
    observe            the ranks of a node: observed, asked, ended; what one observation shows by itself
    verdict            from all ranks' observations to a verdict: pure functions
    links              TCP connections between monitors, and what they carry
    records            the files in RUN/watch/; slow ranks, times by rank and phase
    replica_checks     in the ranks: differing parts of a model, replicas

Modules that the monitor imports may not import torch: it starts in 0.13 s and holds little memory.
"""
