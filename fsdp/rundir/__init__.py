"""The run directory: its paths, its records, and the lock that says who writes to it.

    history    its name and files, written whole or not at all; its records, the markers of an end
    lock       the lock's file, its holder and its takeover

Not here: checkpoints (fsdp/checkpoint).
"""
