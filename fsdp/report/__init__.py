"""One offline HTML page per run: outcome, curves, time, memory, checkpoints, starts, configuration.

    python -m fsdp.report RUN [RUN] [--out FILE]

Reads a run directory and runs nothing from it. run_data.py, series.py and watch_records.py read; page.py
arranges the sections; templates/ holds their HTML.
"""
