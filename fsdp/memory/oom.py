"""Context manager that catches out-of-memory errors and writes a page: memory by kind, flags to change.

    RUN/oom-rank3.txt, and the text on stderr

It costs nothing until an error reaches it; then oom_report.py is imported, which every other run is spared.
A process killed by the kernel's OOM killer gets no signal that it can handle and leaves no page: the watch
names it (fsdp/watch/verdict.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from fsdp.config import Config
from fsdp.dist.env import DistEnv
from fsdp.memory.account import process_bytes, tally
from fsdp.memory.oom_error import OomContext, is_out_of_memory


@dataclass
class OutOfMemoryHandler:
    """Writes the page for an out-of-memory error and raises OutOfMemory; other errors pass."""

    config: Config
    env: DistEnv
    run_dir: Path
    context: OomContext | None = None
    beyond: int = field(default=0, init=False)
    """Bytes of the process before the first step that belong to no tensor."""

    def set_context(self, context: OomContext) -> None:
        """Call it once the model is materialized and before the first step."""
        self.context = context
        resting = sum(tally(context.root, None, "cpu").values())
        self.beyond = max(0, process_bytes().get("rss_anon", 0) - resting)

    def __enter__(self) -> OutOfMemoryHandler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if error is not None and is_out_of_memory(error):
            from fsdp.memory.oom_report import OomReport

            report = OomReport(self.config, self.env, self.run_dir, self.context, self.beyond)
            raise report.write(error) from error
