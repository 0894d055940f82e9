"""The run, in the order that data meets it: setup, job, loop, step, evaluation, summary. Read loop.py."""
