"""Turn files of text, conversations or pairs into token files, by parallel processes.

    python -m fsdp.tokenize 'corpus/*.jsonl.gz' tokens/ --tokenizer DIR --workers 8
    torchrun --nproc_per_node=8 train.py --data.name tokens/

SOURCE is a .jsonl, .json (.gz or .zst), .parquet or .txt file, a folder of them, a pattern in quotes, the
same in a store (s3://bucket/prefix), or hf:NAME, a data set in Hugging Face's cache of this machine.
Killed and started again, it keeps the finished shards of OUT. OUT's bytes are the same at any number of
workers. Formats: docs/data.md.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from fsdp.base.errors import ShardrunError
from fsdp.base.streams import print_line
from fsdp.config.command_line import CommandParser, number, one_of, prints_errors, whole_number
from fsdp.tokenize.documents import DocumentOptions, template_text
from fsdp.tokenize.locate import notes_on
from fsdp.tokenize.progress import ProgressLine, cores
from fsdp.tokenize.shard_plan import SHARD_BYTES, TokenizeJob
from fsdp.tokenize.shards import tokenize
from fsdp.tokenize.split_names import held_out_line


@prints_errors("fsdp.tokenize")
def main(argv: Sequence[str]) -> int:
    parser = CommandParser("fsdp.tokenize", __doc__)
    parser.add_argument("source", metavar="SOURCE", help="file, folder, pattern, s3://… or hf:NAME")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder of the token files")
    for name, kind, default, text in (
        ("tokenizer", str, "", "folder, tokenizer.json, or cached id; empty: bytes"),
        ("text", str, "", "column of the text; empty: messages, prompt and completion, or text"),
        ("config", str, "", "configuration of hf:NAME"),
        ("split", str, "", "split of hf:NAME (default: train)"),
        ("loss", one_of("assistant", "all", "last"), "assistant", "targets: assistant, all or last"),
        ("chat-template", str, "", "file with a chat template, in place of the tokenizer's"),
        (
            "heldout",
            number(0, 0.5),
            0.01,
            "part of the documents to hold out: every Nth, N its inverse rounded (default: 0.01)",
        ),
        ("workers", whole_number(1), cores(), "processes (default: the cores)"),
        ("shard-mb", whole_number(1), SHARD_BYTES >> 20, "MiB of the source per shard (default: 64)"),
    ):
        parser.add_argument(f"--{name}", type=kind, default=default, help=text)
    try:
        given = parser.parse(argv)
        options = DocumentOptions(given.tokenizer, given.text, given.loss, template_text(given.chat_template))
        shard_bytes = given.shard_mb << 20
        job = TokenizeJob(given.source, options, given.heldout, shard_bytes, given.config, given.split)
        line = ProgressLine()
        found = tokenize(job, given.out, given.workers, line.show)
        line.end()
    except ShardrunError as error:
        print_line(f"fsdp.tokenize: {_with_own_flags(str(error))}")
        return error.exit_code
    except KeyboardInterrupt:
        print("fsdp.tokenize: stopped. HINT: the same command continues", file=sys.stderr)
        return 130
    empty = f", {found.empty:,} rows without a token to train on left out" if found.empty else ""
    print_line(f"{given.out}: {found.tokens:,} tokens, {found.documents:,} documents{empty}", sys.stdout)
    held = job.place.held_out()
    for noted in [*notes_on(given.source), *([held_out_line(held)] if held else [])]:
        print_line(f"fsdp.tokenize: {noted}")
    return 0


def _with_own_flags(text: str) -> str:
    """Messages name the flags of train.py."""
    for theirs, ours in (
        ("--data.args.chat_template", "--chat-template"),
        ("--data.args.", "--"),
        ("--data.tokenizer", "--tokenizer"),
    ):
        text = text.replace(theirs, ours)
    return text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
