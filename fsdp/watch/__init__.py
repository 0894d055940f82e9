"""The watch: names the rank that hangs, fails or is slow, from a monitor process on each node. In reading order:

    status_page, collective_calls, cuda_timing   a rank writes its phase, collectives and times into shared memory
    responder            a thread in the rank that sends its stacks to the monitor, or ends the process on its order
    rank                 a rank's side: starts the parts above and the node's monitor, hands over its failure
    failure_report       an exception as values: kind, ranks, hint; last_process: how a failed process ends
    monitor              the process: observe, judge, print, end the job; monitor_options: its command line
    node_ranks, observe, observation      the ranks of one node; what one look at a rank finds; that as a value
    hang_verdict         from the observations of all ranks to a verdict: pure functions
    monitor_links        the TCP connections between the monitors of several nodes
    stragglers, timing, records           slow ranks; time by rank and phase; the files in RUN/watch/
    branch_check, replica_checks          inside the ranks: different parts of a model, diverged replicas, spikes

A monitor starts in 0.13 s and holds little memory because nothing that it imports may import torch.
"""
