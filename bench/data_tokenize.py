"""Tokenizing: from .jsonl files to token files on disk, by each contender's whole command. For bench/data.py.

    python -m bench.data_tokenize WAY FOLDER WORKERS     WAY: datasets or streaming; prints the tokens

FOLDER/corpus holds the same files for all, FOLDER/tokenizer the same tokenizer (a byte-level BPE trained on
them). A round is one command with so many processes: `python -m fsdp.tokenize`; datasets' map(batched=True,
num_proc) and save_to_disk; for streaming, processes that tokenize the same way and write with MDSWriter each,
and merge_index. The peers get no end token, which fsdp.tokenize adds to each document.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench import tables
from bench.peers import setup

ROOT = Path(__file__).resolve().parents[1]
VOCAB, DOCUMENT, FILES = 8000, 2000, 8
"""The tokenizer's size, the characters of a document, the files of the corpus."""
BATCH = 1000
"""Rows that datasets gives map by default."""


def write_corpus(folder: Path, mib: int) -> int:
    """This repository's sources and pages, in documents, over and over; returns their number."""
    paths = [*sorted((ROOT / "fsdp").rglob("*.py")), *sorted((ROOT / "docs").glob("*.md"))]
    text = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    pieces = [text[at : at + DOCUMENT] for at in range(0, len(text), DOCUMENT)]
    _save_tokenizer(folder / "tokenizer", pieces)
    count = (mib << 20) // DOCUMENT
    (folder / "corpus").mkdir()
    for n in range(FILES):
        rows = (json.dumps({"text": pieces[at % len(pieces)]}) + "\n" for at in range(n, count, FILES))
        (folder / "corpus" / f"{n}.jsonl").write_text("".join(rows), encoding="utf-8")
    return count


def _save_tokenizer(folder: Path, texts: Sequence[str]) -> None:
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    made = ByteLevelBPETokenizer()
    made.train_from_iterator(texts, VOCAB, min_frequency=2, show_progress=False)
    made.add_special_tokens(["<|end|>"])
    whole: Any = PreTrainedTokenizerFast(tokenizer_object=made._tokenizer, eos_token="<|end|>")
    whole.save_pretrained(folder)


# ---------------------------------------------------------------- the peers


def _tokenizer(folder: Path) -> Any:
    """By its file alone: streaming brings an older transformers, which does not know our class."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))


def _tokens_of(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    found: list[list[int]] = tokenizer(texts, return_attention_mask=False, verbose=False)["input_ids"]
    return found


def datasets(folder: Path, workers: int) -> int:
    from datasets import load_dataset

    tokenizer = _tokenizer(folder / "tokenizer")
    files = sorted(map(str, (folder / "corpus").iterdir()))
    rows: Any = load_dataset("json", data_files=files, split="train")
    made = rows.map(
        lambda batch: {"tokens": _tokens_of(tokenizer, batch["text"])},
        batched=True,
        num_proc=workers,
        remove_columns=["text"],
    )
    made.save_to_disk(str(folder / "datasets" / "out"))
    import pyarrow.compute as compute

    return sum(compute.list_value_length(chunk).sum().as_py() for chunk in made.data["tokens"].chunks)


def streaming(folder: Path, workers: int) -> int:
    from fsdp.base.torchvision_import import prepare_torchvision

    prepare_torchvision()  # streaming imports it
    from streaming.base.util import merge_index

    out = folder / "streaming" / "out"
    files = sorted((folder / "corpus").iterdir())
    jobs = [(folder / "tokenizer", file, out / file.stem) for file in files]
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        counts = pool.map(_write_mds, jobs, chunksize=1)
    merge_index(str(out))
    return sum(counts)


def _write_mds(job: tuple[Path, Path, Path]) -> int:
    import numpy as np
    from streaming import MDSWriter

    place, file, out = job
    tokenizer, count = _tokenizer(place), 0
    with MDSWriter(out=str(out), columns={"tokens": "ndarray:uint16"}) as writer:
        for texts in _batches(file):
            for tokens in _tokens_of(tokenizer, texts):
                writer.write({"tokens": np.array(tokens, np.uint16)})
                count += len(tokens)
    return count


def _batches(file: Path) -> Iterator[list[str]]:
    texts: list[str] = []
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            texts.append(json.loads(line)["text"])
            if len(texts) == BATCH:
                yield texts
                texts = []
    if texts:
        yield texts


# ---------------------------------------------------------------- rounds


def one_round(way: str, folder: Path, workers: int) -> tuple[float, int]:
    """Seconds of the command, and the tokens that it has written."""
    shutil.rmtree(folder / way, ignore_errors=True)
    (folder / way).mkdir()
    environ = {
        **os.environ, "HF_HOME": str(folder / way / "hf"), "XDG_CACHE_HOME": str(folder / way / "cache"),
        "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [str(setup.python_of(way)), "-m", "bench.data_tokenize", way, str(folder), str(workers)]
    if way == "ours":
        flags = ["--tokenizer", str(folder / "tokenizer"), "--workers", str(workers), "--heldout", "0"]
        out = str(folder / "ours" / "out")
        command = [sys.executable, "-m", "fsdp.tokenize", str(folder / "corpus"), out, *flags]
    began = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    seconds = time.perf_counter() - began
    if done.returncode:
        raise SystemExit(f"bench.data: {way} ended with exit code {done.returncode}:\n{done.stderr[-2000:]}")
    if way == "ours":
        facts = json.loads((folder / "ours" / "out" / "tokenize.json").read_text(encoding="utf-8"))
        return seconds, int(facts["tokens"]) - int(facts["documents"])
    return seconds, int(done.stdout.split()[-1])


def speeds(names: Sequence[str], folder: Path, rounds: int, mib: int, workers: int) -> dict[str, list[float]]:
    """Tokens a second of each round. All contenders write the same number of tokens."""
    write_corpus(folder, mib)
    seen: dict[str, list[float]] = {name: [] for name in names}
    counts = {name: one_round(name, folder, workers)[1] for name in names}  # and once to warm up
    if len(set(counts.values())) > 1:
        raise SystemExit(f"bench.data: the contenders disagree on the tokens: {counts}")
    for nth in range(rounds):
        for name in tables.turned(list(names), nth):
            seconds, tokens = one_round(name, folder, workers)
            seen[name].append(tokens / seconds)
    return seen


def main(way: str, folder: str, workers: str) -> None:
    print({"datasets": datasets, "streaming": streaming}[way](Path(folder), int(workers)))


if __name__ == "__main__":
    main(*sys.argv[1:])
