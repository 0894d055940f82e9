"""Runs of drawn flags: interrupted and resumed, they are to be the runs that nothing happens to."""
