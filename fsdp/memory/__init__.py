"""Memory of a rank: an account by kind, its profile, and the explanation of an out-of-memory error.

    account                            memory by kind, read from the objects that own it
    account_storages, account_cuda     every block over time, on the CPU and on CUDA
    live_storages, account_timeline    the storages that exist; peaks by phase, and the curve
    startup, resting                   four points of a start; bytes of parameters and states, from shapes
    profile                            --profile.*: its start, its end and its files
    profile_trace                      torch's trace as a table
    oom, oom_error                     catches an out-of-memory error; how it is recognised
    oom_report, oom_advice, oom_text   what held the memory; what each flag frees; both as text
    oom_estimate                       activations of a micro-batch, on fake tensors

Not here: sharding (fsdp/parallel/shard.py), recomputation and offloading (fsdp/parallel/).
"""
