"""Memory of a rank: what it holds by kind, its profile, and the explanation of an out-of-memory error.

    account      bytes from shapes, and from the objects that own them
    storages     storages as operations create and release them
    oom          catches an out-of-memory error and explains it: exit code 6 and a page
    oom_advice   what a step needs, and what each flag frees
    profile      --profile.*: its start, its end and its files

Not here: sharding (fsdp/shard/shard.py), recomputation and offloading (fsdp/shard/).
"""
