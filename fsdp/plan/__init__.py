"""Memory and step time of a configuration, predicted before the job is queued, on any machine without a GPU.

    python -m fsdp.plan --model.name transformer --model.preset llama-8b --data.seq_len 8192 \\
        --plan.gpus 64 --plan.gpu h100

    fake_world.py   a fake process group of any size
    model_shapes.py the model, and the shapes of one sample
    step.py         the step of fsdp/run/step.py with marks where phases and blocks begin
    step_trace.py   the trace of one configuration's step on one rank
    tracker.py      each allocation, operation and collective of a step
    fsdp_events.py  FSDP's own gathers, waits and reductions
    trace.py        a trace as numbers; blocks repeat, so few are traced and any number is composed
    fake_runs.py    the fake runs that a plan needs, and their composition
    memory.py       bytes by kind and phase, and what the caching allocator holds for them
    rates.py        what devices and links sustain
    step_time.py    seconds: a roofline for each operation, links for each collective, in FSDP's order
    estimate.py     one configuration's plan: memory, step time, throughput
    search.py       the meshes and knobs worth trying, ranked
    goodput.py      failures, saves and restarts replayed
    report.py       the table, the best line, the recipe
    page.py         all plans as an HTML page: memory against time

Nothing here runs on a GPU or trains; fsdp/run/planned.py compares a plan with what its run measured.
"""
