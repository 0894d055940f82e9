"""Will it fit, and how fast: asked before a job is queued, on any machine, without a GPU.

    python -m fsdp.plan --model.name transformer --model.preset llama-8b --plan.gpus 64 --plan.gpu h100 --data.seq_len 8192

    world.py     a fake process group of any size, and a model cut up in it by fsdp/parallel/shard.py itself
    track.py     what a step allocates, computes and sends, operation by operation
    tags.py      FSDP's own steps say what is gathered, waited for and reduced
    step.py      one step as fsdp/run/loop.py makes it, watched
    trace.py     what was watched, as numbers; blocks repeat, so few are watched and any number is composed
    count.py     which fake runs a question needs, and their composition
    memory.py    bytes by kind and phase, and what the allocator makes of them
    clock.py     seconds: a roofline for each operation, links for each collective, FSDP's own order between them
    search.py    every mesh and knob that is worth a look, ranked
    goodput.py   failures, saves and restarts replayed
    report.py    the table, the best line, the recipe

Nothing here runs on a GPU or trains; what a run measured afterwards is compared in fsdp/run/planned.py.
"""
