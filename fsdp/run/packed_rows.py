"""The check at the start of a run on packed rows: does attention stay within documents?

Not here: what is compared (fsdp/models/checks.py).
"""

from __future__ import annotations

from torch import Tensor

from fsdp.config import Config
from fsdp.data.loader import read_batch
from fsdp.models.checks import PACKED, check_chunks, check_documents_apart
from fsdp.models.cross_entropy import read_output
from fsdp.models.packed import POSITIONS
from fsdp.parallel.shard import Sharded
from fsdp.run.job import Job


def check_packed_rows(config: Config, job: Job, sharded: Sharded, step: int, rank: int) -> None:
    """Runs two forwards of one or two samples, the same on every rank. Collective. Skipped with float8: its
    scales depend on every token.
    """
    if not job.data.info.facts.get(PACKED):
        return
    check_chunks(sharded.root, job.spec.name, job.data.info.tokens_per_sample)
    if config.speed.float8 != "off":
        return
    rows = job.cursor.indices(step)[: min(2, job.batch.micro_batch)]
    data = read_batch(job.data.train, rows, f"rank {rank}, before the first step")

    def logits_of(tokens: Tensor, positions: Tensor) -> Tensor | None:
        return read_output(sharded.called(tokens, **{POSITIONS: positions})).logits

    with sharded.evaluating():
        tokens = data["inputs"].to(sharded.device)
        check_documents_apart(logits_of, tokens, sharded.root, job.spec.name)
