"""Memory of a rank: an account by kind, its profile page, and the page of an out-of-memory error.

Not here: sharding (fsdp/parallel/shard.py), recomputation and offloading (fsdp/parallel/).
"""
