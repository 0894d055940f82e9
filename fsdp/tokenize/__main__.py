"""Turn files of text, conversations or pairs into token files, by parallel processes.

    python -m fsdp.tokenize 'corpus/*.jsonl.gz' tokens/ --tokenizer DIR --workers 8
    torchrun --nproc_per_node=8 train.py --data.name tokens/

SOURCE is a file of rows (.jsonl, .json, .parquet, .csv, …), or of text (.txt), a folder of them, a pattern in
quotes, or hf:NAME, a data set in Hugging Face's cache here.
Killed and started again, it keeps the finished shards of OUT. OUT's bytes are the same at any number of
workers. Formats: docs/data.md.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from fsdp.base.errors import ShardrunError
from fsdp.base.text import print_line
from fsdp.config.command_line import CommandParser, number, one_of, prints_errors, whole_number
from fsdp.tokenize.conversations import DocumentOptions, template_text
from fsdp.tokenize.rows import held_out_line
from fsdp.tokenize.shards import SHARD_BYTES, TokenizeJob, cores, run_job, tokenize


@prints_errors("fsdp.tokenize")
def main(argv: Sequence[str]) -> int:
    if argv[:1] == ["--job"]:
        return run_job(argv[1:])
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
        ("workers", whole_number(1), cores(), "processes (default: the cores)"),
        ("shard-mb", whole_number(1), SHARD_BYTES >> 20, "MiB of the source per shard (default: 64)"),
    ):
        parser.add_argument(f"--{name}", type=kind, default=default, help=text)
    try:
        flags = parser.parse(argv)
        options = DocumentOptions(flags.tokenizer, flags.text, flags.loss, template_text(flags.chat_template))
        shard_bytes = flags.shard_mb << 20
        job = TokenizeJob(flags.source, options, flags.heldout, shard_bytes, flags.config, flags.split)
        total = tokenize(job, flags.out, flags.workers)
    except ShardrunError as error:
        text = str(error).replace("--data.args.chat_template", "--chat-template")  # flags of train.py
        print_line(
            f"fsdp.tokenize: {text.replace('--data.args.', '--').replace('--data.tokenizer', '--tokenizer')}"
        )
        return error.exit_code
    except KeyboardInterrupt:
        print("fsdp.tokenize: stopped. HINT: the same command continues", file=sys.stderr)
        return 130
    empty = f", {total['empty']:,} rows without a token to train on left out" if total["empty"] else ""
    print_line(
        f"{flags.out}: {total['tokens']:,} tokens, {total['documents']:,} documents{empty}", sys.stdout
    )
    if held := job.find().held_out():
        print_line(f"fsdp.tokenize: {held_out_line(held)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
