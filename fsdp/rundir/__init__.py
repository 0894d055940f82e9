"""The run directory: its paths, its records, and the lock that says who writes to it.

    paths      its name and files; files written whole or not at all
    history    files of JSON lines, of which history.jsonl has each start and end; the markers of an end
    lock       the lock's file, its holder and its takeover

Not here: checkpoints (fsdp/checkpoint).
"""
