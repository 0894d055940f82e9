"""Memory and step time of a configuration, predicted before the job is queued, on any machine without a GPU.

    python -m fsdp.plan --model.name transformer --model.preset llama-8b --data.seq_len 8192 \\
        --plan.gpus 64 --plan.gpu h100

    fake_step      the step of fsdp/run/step.py on one rank, in a fake process group of any size
    trace          each allocation, operation and collective of a step as numbers
    step_time      rates of devices and links; seconds: a roofline, and collectives in FSDP's order
    estimate       one configuration's plan, and the search: the meshes and knobs worth trying, ranked
    __main__       the command, python -m fsdp.plan: the table, the best line, the recipe

Nothing here runs on a GPU or trains; fsdp/run/summary.py compares a plan with what its run measured.
"""
