"""Worker processes that write shards."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.context import BaseContext
from pathlib import Path

from fsdp.base.errors import ConfigError, ShardrunError, without_hint
from fsdp.tokenize.documents import DocumentOptions
from fsdp.tokenize.shard_files import ShardResult, ShardWriter
from fsdp.tokenize.shard_plan import Shard, TokenizePlan
from fsdp.tokenize.tokenizer import modules_of


def write_shards(plan: TokenizePlan, shards: list[Shard], out: Path, workers: int) -> Iterator[ShardResult]:
    """Yields each shard's result as it is finished: in this process, or by `workers` of them."""
    if not shards:
        return
    if workers < 2 or len(shards) < 2:
        for name in modules_of(plan.job.options.tokenizer):
            import_module(name)
        writer = ShardWriter(plan, out)
        for shard in shards:
            yield writer.write(shard)
        return
    pool = ProcessPoolExecutor(
        min(workers, len(shards)),
        mp_context=_context(plan.job.options),
        initializer=_start_worker,
        initargs=(plan, out, dict(os.environ)),
    )
    try:
        for one in as_completed([pool.submit(_write_in_worker, shard) for shard in shards]):
            found = one.result()
            if isinstance(found, ErrorParts):
                raise ConfigError(found.message, found.hint)
            yield found
    except BrokenProcessPool:
        raise ShardrunError(
            "a worker process died, as when memory runs out.",
            "the same command again keeps the finished shards; --workers 1 needs least memory",
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


@dataclass(frozen=True)
class ErrorParts:
    """An error's two parts, to travel: a ShardrunError's arguments are not those of its constructor."""

    message: str
    hint: str | None


_writer: ShardWriter | ErrorParts | None = None


def _context(options: DocumentOptions) -> BaseContext:
    """Workers are forked by a server without threads, which imports once what each of them needs."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload([__name__, *modules_of(options.tokenizer)])
    return found


def _start_worker(plan: TokenizePlan, out: Path, environ: dict[str, str]) -> None:
    global _writer
    os.environ.update(environ)  # the server's may be that of an earlier call
    try:
        _writer = ShardWriter(plan, out)
    except ShardrunError as error:
        _writer = _parts(error)


def _write_in_worker(shard: Shard) -> ShardResult | ErrorParts:
    assert _writer is not None
    if isinstance(_writer, ErrorParts):
        return _writer
    try:
        return _writer.write(shard)
    except ShardrunError as error:
        return _parts(error)


def _parts(error: ShardrunError) -> ErrorParts:
    return ErrorParts(without_hint(error), error.hint)
