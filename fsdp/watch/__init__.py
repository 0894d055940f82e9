"""The watch: names the rank that hangs, fails or is slow, from a monitor process on each node.

In reading order:

    status_page, counters   a rank writes phases, collectives and times to shared memory
    failure                 an exception as values; how a failed process ends
    rank                    starts the parts above, a thread that sends stacks, and the monitor
    monitor                 the process that observes, judges, ends the job
    observation             one rank as it was observed, and what that shows by itself
    node_ranks              the ranks of a node: observed, asked, ended
    verdict                 from all ranks' observations to a verdict: pure functions
    links                   TCP connections between monitors, and what they carry
    stragglers, records     slow ranks, times by rank and phase; the files in RUN/watch/
    replica_checks          in the ranks: differing parts of a model, replicas, spikes of the gradient norm

Modules that the monitor imports may not import torch: it starts in 0.13 s and holds little memory.
"""
