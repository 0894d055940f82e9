"""The run directory: its paths, its line files, its history, and the lock that says who writes to it.

    paths               its name, and the paths of its files
    line_files, tail    files of JSON lines: reading, appending, their ends
    history             history.jsonl, and the markers STOPPED, DONE and FAILED
    atomic_write        files written whole or not at all
    lock, lock_holder   the lock's file and its takeover; who holds it, and whether that process lives

Not here: checkpoints (fsdp/checkpoint).
"""
