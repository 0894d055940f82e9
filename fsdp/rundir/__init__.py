"""The run directory: its paths, its line files, its history, and the lock that says who writes to it."""
