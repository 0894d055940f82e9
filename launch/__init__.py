"""Adapters: make this process, or N of them, ranks; then call fsdp.run.loop.train."""
