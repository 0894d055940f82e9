"""Token files from rows, written by parallel processes that can be killed and started again.

OUT holds, for each shard of the source, in the order of the rows:

    train-00000.bin         tokens, little-endian; val-00000.bin those of held-out documents
    train-00000.bin.json    its dtype, vocabulary, count and digest: the sidecar of --data.name tokens
    train-00000.idx         where its documents begin, in the form of Megatron's index
    train-00000.loss        a byte a token, 1 where it is a target; only if some are not
    00000.done              the shard is finished
    tokenize.json           what they were made from; a start with another source or tokenizer is refused

Which rows a shard holds depends on the source alone, so the files are the same for any number of processes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fsdp.base.errors import ConfigError
from fsdp.rundir.atomic_write import write_atomically
from fsdp.tokenize.documents import masks
from fsdp.tokenize.shard_files import SPLITS, Tokenized, TokenizerFacts
from fsdp.tokenize.shard_plan import Shard, TokenizeJob, TokenizePlan, plan_of
from fsdp.tokenize.shard_pool import write_shards
from fsdp.tokenize.source_names import MANIFEST
from fsdp.tokenize.tokenizer import load_tokenizer

Progress = Callable[[int, int, Tokenized], None]
"""(finished shards, all shards, what those hold)"""


def tokenize(job: TokenizeJob, out: Path, workers: int, progress: Progress) -> Tokenized:
    """Writes the shards that OUT lacks. Raises ConfigError for a wrong row, source or OUT."""
    key = job.key()
    _claim(out, key)
    try:
        return _tokenize(job, key, out, workers, progress)
    except ConfigError:
        _release(out)
        raise


def _tokenize(
    job: TokenizeJob, key: dict[str, Any], out: Path, workers: int, progress: Progress
) -> Tokenized:
    plan = plan_of(job, job.place.open(), job.place.open_held_out())
    done = {shard.number: found for shard in plan.shards if (found := _finished(out, shard)) is not None}
    total = sum(done.values(), Tokenized())
    progress(len(done), len(plan.shards), total)
    missing = [shard for shard in plan.shards if shard.number not in done]
    facts: TokenizerFacts | None = None
    for count, (found, written_by) in enumerate(write_shards(plan, missing, out, workers), len(done) + 1):
        total, facts = total + found, written_by
        progress(count, len(plan.shards), total)
    if not total.tokens:
        raise ConfigError(
            f"{job.source} gives no token to train on in {total.empty} rows.",
            "rows with text, or with an assistant's message; or --data.args.loss all",
        )
    _check_unchanged(job, key)
    facts = facts or TokenizerFacts.of(load_tokenizer(job.options.tokenizer))
    _write_manifest(out, plan, key, total, facts)
    return total


def _check_unchanged(job: TokenizeJob, key: dict[str, Any]) -> None:
    """Lines of a file that changed in the meantime may be of either content, or be missing."""
    before, after = (json.loads(json.dumps(one))["files"] for one in (key, job.key()))
    if before != after:
        changed = [one for one in before if one not in after] or [one for one in after if one not in before]
        name = changed[0][0] if isinstance(changed[0], list) else changed[0]
        raise ConfigError(
            f"{name} changed while it was tokenized.", "start again when nothing writes to it any more"
        )


# ---------------------------------------------------------------- OUT


def _claim(out: Path, key: dict[str, Any]) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        manifest = out / MANIFEST
        if manifest.is_file():
            begun = json.loads(manifest.read_text(encoding="utf-8"))
            if not isinstance(begun, dict) or begun.get("key") != json.loads(json.dumps(key)):
                raise ConfigError(
                    f"{out} holds tokens of another source, tokenizer or other flags.",
                    f"another folder, or rm -r {out}",
                )
        elif any(out.iterdir()):
            raise ConfigError(f"{out} is not empty, and {MANIFEST} is not in it.", "a new folder")
        else:
            write_atomically(manifest, json.dumps({"key": key}) + "\n")
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{out} cannot be used: {error}.", "another folder") from None


def _release(out: Path) -> None:
    """Leaves OUT to a corrected command if this one has finished no shard."""
    if [path.name for path in out.iterdir()] == [MANIFEST]:
        (out / MANIFEST).unlink()
        out.rmdir()


def _write_manifest(
    out: Path, plan: TokenizePlan, key: dict[str, Any], total: Tokenized, tokenizer: TokenizerFacts
) -> None:
    names = [path.name for split in SPLITS for path in sorted(out.glob(f"{split}-*.bin"))]
    sums = [json.loads((out / f"{name}.json").read_text(encoding="utf-8"))["sha256"] for name in names]
    options = plan.job.options
    facts = {
        "key": key, "form": plan.form, "masked": masks(plan.form, options), "files": names,
        "fingerprint": hashlib.sha256("".join(sums).encode()).hexdigest()[:16],
        "vocab_size": tokenizer.vocab_size, "end": tokenizer.end, "tokenizer": options.tokenizer or "bytes",
        **asdict(total),
    }  # fmt: skip
    write_atomically(out / MANIFEST, json.dumps(facts) + "\n")


def _finished(out: Path, shard: Shard) -> Tokenized | None:
    try:
        return Tokenized(**json.loads((out / f"{shard.number:05d}.done").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
