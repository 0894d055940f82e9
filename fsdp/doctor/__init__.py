"""Before it starts: are these nodes fit to train together, and if not, which of them is to be left out.

    torchrun --nproc_per_node=4 -m fsdp.doctor          or under srun; alone it starts its own ranks
    sbatch slurm/fsdp.sbatch --preflight                in a job's place, on the job's nodes

__main__.py starts the ranks where nobody else did; rank.py is one of them; examine.py takes it through the
stages; network.py, device.py, links.py and storage.py look, each at its own thing, and judge nothing;
verdict.py judges, and is a pure function of what they saw; table.py shows it.
"""
