"""The watch: names the rank that hangs, fails or is slow, from a monitor process on each node.

In reading order:

    status_page, collective_calls, cuda_timing   a rank writes phases, collectives and times to shared memory
    responder                                    a thread that sends the rank's stacks, or ends the process
    rank                                         starts the parts above and the monitor; reports a failure
    failure_report, last_process                 an exception as values; how a failed process ends
    monitor, monitor_options                     the process that observes, judges, ends the job; arguments
    node_ranks, observe, observation             the ranks of a node; one rank observed, and the result
    recorded_calls                               PyTorch's flight recorder, in brief
    hang_verdict                                 from all ranks' observations to a verdict: pure functions
    monitor_links, messages                      TCP connections between monitors, and what they carry
    stragglers, timing, records                  slow ranks; times by rank and phase; the files in RUN/watch/
    branch_check, replica_checks                 in the ranks: differing parts of a model, replicas, spikes

Modules that the monitor imports may not import torch: it starts in 0.13 s and holds little memory.
"""
