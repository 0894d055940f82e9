"""One offline HTML page a run: what was asked, what the numbers did, which checkpoints there are, how each
start ended.

    python -m fsdp.report RUN [RUN] [--out FILE]

Reads a run directory and runs nothing from it. read.py and watched.py gather, curves.py draws, page.py lays
out.
"""
