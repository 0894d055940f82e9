"""The run itself, in the order that data meets it: setup, job, loop, evaluation, summary. Read loop.py
first.
"""
