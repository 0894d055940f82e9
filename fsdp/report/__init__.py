"""One offline HTML page per run: outcome, curves, time, memory, checkpoints, starts, configuration.

    python -m fsdp.report RUN [RUN] [--out FILE]
    python -m fsdp.report RUN RUN RUN --out FILE
    python -m fsdp.report RUN --serve

Reads a run directory and runs nothing from it. templates/ holds the pages' HTML.

    run_data, series               the files of a run directory; metrics.jsonl as series
    own_files, file_notes          files that may be anyone's; notes about those that cannot be read
    watch_records                  the watch's files
    transport_data                 NCCL's logs
    page, two_runs, sweep          the page of one run, of two, of more
    compare, curves, timing        differences of two runs; line charts; step time by rank
    plan_section, sample_section   the plan beside the measurements; predictions of the model
    profile_section                memory of a profiled run
    profile_files                  its time, and links to its files
    watch_section                  failures, late ranks, spikes
    serve, __main__                the page of runs in progress; the command
"""
