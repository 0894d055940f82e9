"""The doctor: checks before a run starts whether these nodes can train together, and which of them to
exclude.

    torchrun --nproc_per_node=4 -m fsdp.doctor          or under srun; alone it starts its own ranks
    sbatch slurm/fsdp.sbatch --preflight                in place of a job, on the job's nodes

Its modules:

    __main__   starts the ranks if no launcher did
    rank       one of the ranks: its checks in order
    measure    device, names and ports, links, storage, NCCL's transport
    findings   judges the measurements, in pure functions
    table      the result as text
"""
