"""Turn files of text, conversations or pairs into token files, by parallel processes.

    python -m fsdp.tokenize 'corpus/*.jsonl.gz' tokens/ --tokenizer DIR --workers 8
    torchrun --nproc_per_node=8 train.py --data.name tokens/
    python -m fsdp.tokenize --check chats.jsonl --model.name hf:FOLDER --data.seq_len 2048

SOURCE is a file of rows (.jsonl, .json, .parquet, .csv, …), or of text (.txt), a folder of them, a pattern in
quotes, or hf:NAME, a data set in Hugging Face's cache here.
Killed and started again, it keeps the finished shards of OUT. OUT's bytes are the same at any number of
workers. Formats: docs/data.md. --check FILE, with a run's flags, shows what the run reads of it.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from fsdp.base.errors import ConfigError, ShardrunError
from fsdp.base.text import print_line
from fsdp.config import load
from fsdp.config.command_line import CommandParser, number, one_of, prints_errors, whole_number
from fsdp.tokenize.conversations import DocumentOptions, template_text
from fsdp.tokenize.rows import MANIFEST, held_out_line
from fsdp.tokenize.shards import SHARD_BYTES, TokenizeJob, cores, left_out_lines, run_job, tokenize


@prints_errors("fsdp.tokenize")
def main(argv: Sequence[str]) -> int:
    if argv[:1] == ["--job"]:
        return run_job(argv[1:])
    if any(word.partition("=")[0] == "--check" for word in argv):
        return check(argv)
    parser = CommandParser("fsdp.tokenize", __doc__)
    parser.add_argument("source", metavar="SOURCE", help="file, folder, pattern or hf:NAME")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder of the token files")
    for name, kind, default, text in (
        ("tokenizer", str, "", "folder or cached id; empty: bytes"),
        ("text", str, "", "column of the text; empty: messages, prompt and completion, or text"),
        ("config", str, "", "configuration of hf:NAME"),
        ("split", str, "", "split of hf:NAME (default: train)"),
        ("loss", one_of("assistant", "all", "last"), "assistant", "targets: assistant, all or last"),
        ("chat-template", str, "", "file with a chat template, in place of the tokenizer's"),
        ("heldout", number(0, 0.5), 0.01, "part of the documents to hold out, every Nth (default: 0.01)"),
        ("bad-rows", one_of("stop", "skip"), "stop", "rows that cannot be read: stop, or skip them"),
        ("workers", whole_number(1), cores(), "processes (default: the cores)"),
        ("shard-mb", whole_number(1), SHARD_BYTES >> 20, "MiB of the source per shard (default: 64)"),
    ):
        parser.add_argument(f"--{name}", type=kind, default=default, help=text)
    try:
        flags = parser.parse(argv)
        options = DocumentOptions(flags.tokenizer, flags.text, flags.loss, template_text(flags.chat_template))
        shard_bytes = flags.shard_mb << 20
        job = TokenizeJob(
            flags.source, options, flags.heldout, shard_bytes, flags.config, flags.split, flags.bad_rows
        )
        total = tokenize(job, flags.out, flags.workers)
    except ShardrunError as error:
        text = re.sub(r"--data\.args\.(chat|bad)_", r"--\1-", str(error))  # flags of train.py
        print_line(
            f"fsdp.tokenize: {text.replace('--data.args.', '--').replace('--data.tokenizer', '--tokenizer')}"
        )
        return error.exit_code
    except KeyboardInterrupt:
        print("fsdp.tokenize: stopped. HINT: the same command continues", file=sys.stderr)
        return 130
    print_line(f"{flags.out}: {total['tokens']:,} tokens, {total['documents']:,} documents", sys.stdout)
    for line in left_out_lines(json.loads((flags.out / MANIFEST).read_text(encoding="utf-8"))["left_out"]):
        print_line(line)
    if held := job.find().held_out():
        print_line(f"fsdp.tokenize: {held_out_line(held)}")
    return 0


def check(argv: Sequence[str]) -> int:
    """The other flags are those of train.py."""
    from fsdp.data.check import check_rows

    parser = CommandParser("fsdp.tokenize", __doc__)
    parser.add_argument("--check", metavar="FILE", required=True)
    options, flags = parser.parse_with_run_flags(argv)
    text, stops = check_rows(
        load(flags, {"data.name": options.check, "data.dir": "", "data.sources": "none"})
    )
    print_line(text, sys.stdout)
    return ConfigError.exit_code if stops else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
