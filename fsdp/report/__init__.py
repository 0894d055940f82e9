"""One offline HTML page per run: outcome, curves, time, memory, checkpoints, starts, configuration.

    python -m fsdp.report RUN [RUN] [--out FILE]
    python -m fsdp.report RUN RUN RUN --out FILE
    python -m fsdp.report RUN --serve

Reads a run directory and runs nothing from it. run_data.py, series.py, watch_records.py, profile_section.py
and profile_files.py read; page.py arranges the sections of one run, two_runs.py of two, sweep.py of more;
serve.py serves them; templates/ holds their HTML.
"""
