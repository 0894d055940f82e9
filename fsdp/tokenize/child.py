"""Tokenizing in a process of its own, for a run: the rank stays without its threads and packages.

The launcher may fork the rank later, and the threads of a tokenizer do not survive that.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import fsdp
from fsdp.base.errors import ConfigError, ShardrunError, without_hint
from fsdp.tokenize.documents import DocumentOptions
from fsdp.tokenize.progress import ProgressLine, cores
from fsdp.tokenize.shard_plan import TokenizeJob
from fsdp.tokenize.shards import tokenize
from fsdp.tokenize.source_names import is_remote


def tokenize_in_child(job: TokenizeJob, out: Path) -> None:
    """Writes OUT with a process per core. Raises the child's error."""
    _run_child(job, str(out))


def key_of(job: TokenizeJob) -> Any:
    """job.key(), found by a child where the source needs a client's threads."""
    return json.loads(_run_child(job)) if is_remote(job.source) else job.key()


def _run_child(job: TokenizeJob, *out: str) -> str:
    """Returns the last line of its output."""
    root = str(Path(fsdp.__file__).parents[1])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", ""))))
    done = subprocess.run(
        [sys.executable, "-P", "-m", "fsdp.tokenize.child", *out],
        input=json.dumps(asdict(job)),
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    last = done.stdout.strip().rpartition("\n")[2]
    if done.returncode == ConfigError.exit_code and last.startswith("["):
        raise ConfigError(*json.loads(last))
    source = shlex.quote(job.source)
    if done.returncode == -signal.SIGKILL:
        raise ShardrunError(
            f"tokenizing {source} was killed, as when memory runs out.",
            "a .txt file is one document, held in memory: split -C 64m --additional-suffix=.txt FILE FOLDER/ "
            "makes many of a large one",
        )
    if done.returncode:
        raise ShardrunError(
            f"tokenizing {job.source} ended with exit code {done.returncode}.",
            f"python -m fsdp.tokenize {source} tokens/ --workers 1 shows the error",
        )
    return last


def main(out: Sequence[str], given: dict[str, Any]) -> int:
    """Tokenizes into OUT; without one it prints the key."""
    job = TokenizeJob(**{**given, "options": DocumentOptions(**given["options"])})
    line = ProgressLine()
    try:
        if not out:
            print(json.dumps(job.key()))
            return 0
        tokenize(job, Path(out[0]), cores(), line.show)
    except ShardrunError as error:
        print(json.dumps([without_hint(error), error.hint]))
        return error.exit_code
    line.end()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], json.load(sys.stdin)))
