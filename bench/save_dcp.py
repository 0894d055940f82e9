"""dcp.async_save at its best, the contender of bench/save_rank.py: one stager for all saves, which copies in
a thread while the next forward and backward run.

torch's documentation (torch/distributed/checkpoint/staging.py) gives StagingOptions for this: the stager of
the caller keeps its buffers from save to save, use_async_staging copies in the background, use_shared_memory
spares the process mode a second copy. Pinned memory and non-blocking copies need an accelerator. Parameters
may change once `staging_completion` is set: before_update() waits for it.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions


class AsyncSaver:
    """dcp.async_save in a thread, with its stager."""

    def __init__(self, group: dist.ProcessGroup, device: str) -> None:
        self.group, cuda = group, device == "cuda"
        self.stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=cuda,
                use_shared_memory=False,
                use_async_staging=True,
                use_non_blocking_copy=cuda,
            )
        )
        self._staged: Future[None] | None = None
        self._written: Future[Any] | None = None

    def save(self, state: dict[str, Any], folder: str) -> None:
        """The save before must be complete: the buffers are the same ones."""
        self.finish()
        response: Any = dcp.async_save(
            state, checkpoint_id=folder, process_group=self.group, async_stager=self.stager
        )
        self._staged, self._written = response.staging_completion, response.upload_completion

    def before_update(self) -> None:
        if self._staged is not None:
            self._staged.result()
            self._staged = None

    def finish(self) -> None:
        """Waits for the save that is in flight."""
        self.before_update()
        if self._written is not None:
            self._written.result()
            self._written = None

    def close(self) -> None:
        self.finish()
        self.stager.close()
