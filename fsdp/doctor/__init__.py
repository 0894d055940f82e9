"""The doctor: checks before a run starts whether these nodes can train together, and which of them to
exclude.

    torchrun --nproc_per_node=4 -m fsdp.doctor          or under srun; alone it starts its own ranks
    sbatch slurm/fsdp.sbatch --preflight                in place of a job, on the job's nodes

Its modules:

    __main__   the command, and one rank's stages in order
    checks     device, ports, links, storage, NCCL's log; a table of checks on them; the result as text
"""
