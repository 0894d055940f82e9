"""One contender of bench.data in a process of its own: shuffled windows of tokens as batches of int64.

    python -m bench.data_reader WAY FOLDER     WAY: ours, datasets or streaming

FOLDER/tokens.bin holds the corpus as uint16. The contender's own form of it is written beside it, before the
first round. Each line of stdin is a round of so many batches; the answer is its tokens and seconds.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

SEQ_LEN, BATCH = 1024, 16
VOCAB = 50_257


def rows_of(folder: Path) -> np.ndarray:
    """Windows of seq_len + 1, as every contender serves them."""
    row = np.fromfile(folder / "tokens.bin", np.uint16)
    starts = np.arange((len(row) - 1) // SEQ_LEN) * SEQ_LEN
    return row[starts[:, None] + np.arange(SEQ_LEN + 1)]


def ours(folder: Path) -> Iterator[Any]:
    from fsdp.config import DataSection
    from fsdp.data import Cursor, build_dataset

    args = {"vocab_size": VOCAB, "heldout": 0}
    section = DataSection(name="tokens", dir=str(folder / "tokens.bin"), seq_len=SEQ_LEN, args=args)
    train = build_dataset(section).train
    cursor = Cursor(seed=1, samples=len(train), global_batch=BATCH)
    for step in itertools.count():
        batch = train.batch(cursor.indices(step))
        yield batch["inputs"], batch["targets"]


def _windows(loader: Any) -> Iterator[Any]:
    while True:
        for batch in loader:
            tokens = batch["tokens"].long()
            yield tokens[:, :-1], tokens[:, 1:]


def datasets(folder: Path) -> Iterator[Any]:
    from datasets import Dataset, load_from_disk
    from torch.utils.data import DataLoader

    Dataset.from_dict({"tokens": rows_of(folder)}).save_to_disk(str(folder / "arrow"))
    made: Any = load_from_disk(str(folder / "arrow")).with_format("torch")
    return _windows(DataLoader(made, batch_size=BATCH, shuffle=True))


def streaming(folder: Path) -> Iterator[Any]:
    from fsdp.base.torch_private.core import prepare_torchvision

    prepare_torchvision()  # streaming imports it
    from streaming import MDSWriter, StreamingDataset
    from torch.utils.data import DataLoader

    place = str(folder / "mds")
    with MDSWriter(out=place, columns={"tokens": f"ndarray:int32:{SEQ_LEN + 1}"}) as out:
        for row in rows_of(folder).astype(np.int32):
            out.write({"tokens": row})
    made: Any = StreamingDataset(local=place, shuffle=True, batch_size=BATCH)
    return _windows(DataLoader(made, batch_size=BATCH))


WAYS: dict[str, Callable[[Path], Iterator[Any]]] = {
    "ours": ours,
    "datasets": datasets,
    "streaming": streaming,
}


def main(way: str, folder: str) -> None:
    batches = WAYS[way](Path(folder))
    next(batches)
    print("ready", flush=True)
    for line in sys.stdin:
        began, tokens = time.perf_counter(), 0
        for _ in range(int(line)):
            inputs, targets = next(batches)
            assert inputs.shape == targets.shape
            tokens += inputs.numel()
        print(json.dumps({"tokens": tokens, "seconds": time.perf_counter() - began}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
