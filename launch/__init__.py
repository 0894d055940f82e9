"""Adapters: make this process, or N of them, ranks; then call fsdp.loop.train."""
