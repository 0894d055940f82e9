"""The doctor: checks before a run starts whether these nodes can train together, and which of them to
exclude.

    torchrun --nproc_per_node=4 -m fsdp.doctor          or under srun; alone it starts its own ranks
    sbatch slurm/fsdp.sbatch --preflight                in place of a job, on the job's nodes

__main__.py starts the ranks if no launcher did; rank.py is one of them; stages.py runs its checks in order.
network.py, device.py, links.py and storage.py measure; transport.py reads NCCL's log on CUDA. findings.py
judges the measurements, in pure functions; table.py shows the result, heat.py the maps of its page.
"""
