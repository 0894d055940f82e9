"""The watch: names the rank that hangs, fails or is slow, from a monitor process on each node.

In reading order:

    status_page, collective_calls, cuda_timing    a rank writes phases, collectives and times to shared memory
    responder         a thread in the rank that sends its stacks to the monitor, or ends the process
    rank              a rank's side: starts the parts above and the monitor, hands over its failure
    failure_report, last_process                  an exception as values; how a failed process ends
    monitor           the process: observe, judge, print, end the job (monitor_options: its arguments)
    node_ranks, observe, observation              the ranks of a node; one rank observed, and the result
    hang_verdict      from the observations of all ranks to a verdict: pure functions
    monitor_links     TCP connections between the monitors of several nodes
    stragglers, timing, records                   slow ranks; times by rank and phase; the files in RUN/watch/
    branch_check, replica_checks                  in the ranks: differing parts of a model, replicas, spikes

Modules that the monitor imports may not import torch: it starts in 0.13 s and holds little memory.
"""
