"""The start of a data set against its size, for bench/data.py and its test.

    python -m bench.data_start FORM FOLDER SIZE       one start, in a process of its own; prints JSON

Every form is on disk as the product writes it, at a size that needs no such disk: token files are sparse,
the shards of documents are hard links of one, and the names of pictures come from a generator in place of a
listing of folders (a batch reads their paths and classes). A start builds the data set and reads three
batches of 16 over it; the second start finds in the cache what the first one made.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench import processes
from fsdp.base import proc

ROOT = Path(__file__).resolve().parents[1]
VOCAB, SEQ_LEN, BATCH = 50_257, 1024, 16
CLASSES = 1000
SHARD = 100_000
"""Documents of a shard."""
Starts = dict[str, dict[str, dict[str, float]]]


@dataclass(frozen=True)
class Form:
    """A kind of data: what is written for a size, and the arguments of its data set."""

    name: str
    """Of --data.name."""
    noun: str
    write: Callable[[Path, int], None]
    args: Mapping[str, Any]
    sizes: tuple[int, ...]
    """Those of the full bench."""


# ---------------------------------------------------------------- on disk


def token_files(root: Path, tokens: int) -> None:
    """Files of zeros that take no blocks on disk, of 10⁸ tokens at most."""
    root.mkdir()
    sidecar = {"dtype": "uint16", "vocab_size": VOCAB}
    (root / "tokens.json").write_text(json.dumps(sidecar), encoding="utf-8")
    each = min(tokens, 10**8)
    for n in range(tokens // each):
        with (root / f"{n:05}.bin").open("wb") as file:
            os.truncate(file.fileno(), 2 * each)


def document_shards(root: Path, documents: int) -> None:
    """A folder of fsdp.tokenize: the index of each shard has log-normal lengths, its tokens are zeros."""
    from fsdp.tokenize.shard_files import index_bytes
    from fsdp.tokenize.source_names import MANIFEST

    root.mkdir()
    each = min(documents, SHARD)
    lengths = np.random.default_rng(0).lognormal(np.log(300), 1.2, each).astype(np.int64) + 2
    facts = {"dtype": "uint16", "vocab_size": VOCAB, "tokens": int(lengths.sum()), "documents": each}
    (root / ".one.idx").write_bytes(index_bytes(lengths.tolist(), np.dtype("<u2")))
    (root / ".one.bin.json").write_text(json.dumps(facts), encoding="utf-8")
    with (root / ".one.bin").open("wb") as file:
        os.truncate(file.fileno(), 2 * int(lengths.sum()))
    names = [f"train-{n:05}" for n in range(documents // each)]
    for name in names:
        for suffix in (".bin", ".bin.json", ".idx"):
            os.link(root / f".one{suffix}", root / f"{name}{suffix}")
    manifest = {
        "key": {}, "form": "text", "masked": False, "files": [f"{name}.bin" for name in names],
        "vocab_size": VOCAB, "end": 0, "tokenizer": "bytes", "fingerprint": f"{documents}",
    }  # fmt: skip
    (root / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")


def picture_folders(root: Path, pictures: int) -> None:
    for label in range(min(CLASSES, pictures)):
        (root / f"n{label:08}").mkdir(parents=True)


FORMS = {
    "tokens": Form("tokens", "tokens", token_files, {}, (10**6, 10**9, 10**12)),
    "documents": Form("documents", "documents", document_shards, {"rows": "document"}, (10**3, 10**6, 10**9)),
    "packed": Form(
        "documents", "packed documents", document_shards, {"rows": "packed"}, (10**3, 10**6, 10**7)
    ),
    "pictures": Form("folder", "pictures", picture_folders, {"image_size": 8}, (10**3, 10**5, 10**7)),
}


# ---------------------------------------------------------------- one start


def start(form: str, folder: Path, size: int) -> dict[str, float]:
    from fsdp.config import DataSection
    from fsdp.data import Cursor, build_dataset

    kind = FORMS[form]
    if form == "pictures":
        _replace_listing(size)
    importlib.import_module(f"fsdp.data.{kind.name}")
    processes.reset_peak_memory()
    before, began = _memory(), time.perf_counter()
    train = build_dataset(DataSection(name=kind.name, dir=str(folder), seq_len=SEQ_LEN, args=kind.args)).train
    cursor = Cursor(seed=1, samples=len(train), global_batch=BATCH)
    for step in (0, cursor.steps_per_epoch // 2, cursor.steps_per_epoch - 1):
        train.batch(cursor.indices(step))
    seconds = time.perf_counter() - began
    rise = {name: (value - before[name]) / 2**20 for name, value in _memory().items()}
    return {"samples": len(train), "seconds": seconds, **rise}


def _memory() -> dict[str, int]:
    found = proc.memory_bytes()
    return {
        "heap_mib": found["RssAnon"],
        "private_mib": processes.private_bytes(),
        "peak_mib": found["VmHWM"],
    }


def _replace_listing(pictures: int) -> None:
    """The names that folders of so many pictures have, and a picture of zeros for each."""
    from fsdp.data import folder

    def find(
        root: Path, classes: Sequence[str], visit: folder.Visit | None = None, *, warns: bool = True
    ) -> Iterator[folder.Listed]:
        each = pictures // len(classes)
        for label, name in enumerate(classes):
            if visit is not None:
                visit(f"{root}/{name}")
            yield from ((f"{root}/{name}/{n:08}.jpeg", label) for n in range(each))

    def read(self: folder.ImageFiles, path: str) -> np.ndarray:
        return np.zeros((3, 8, 8), np.float32)

    vars(folder).update({"_find": find, "_many": lambda *_: pictures > folder.MANY})
    folder.ImageFiles._read = read  # type: ignore[method-assign]


def starts(place: Path, form: str, sizes: Sequence[int]) -> Starts:
    """The first and the second start of each size, each in a process of its own."""
    found: Starts = {}
    environ = {**os.environ, "XDG_CACHE_HOME": str(place / f"{form}-cache"), "OMP_NUM_THREADS": "1"}
    for size in sizes:
        folder = place / f"{form}-{size}"
        FORMS[form].write(folder, size)
        command = [sys.executable, "-m", "bench.data_start", form, str(folder), str(size)]
        for which in ("first", "second"):
            out = subprocess.run(command, cwd=ROOT, env=environ, check=True, capture_output=True, text=True)
            found.setdefault(f"{size:,}", {})[which] = json.loads(out.stdout.splitlines()[-1])
    return found


def main(argv: Sequence[str]) -> int:
    form, folder, size = argv
    print(json.dumps(start(form, Path(folder), int(size))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
