"""The rows of a source's files by number.

    .jsonl, .ndjson, .json (.gz too)      the standard library: lines are mapped, by an index in the cache
    .txt                                  a file is a row with the column text
    .parquet, .csv, .tsv, .arrow, .tar    the package datasets, which keeps an Arrow copy in the cache;
    (WebDataset), .jsonl.zst, hf:NAME     hf:NAME and folders of save_to_disk too, offline

Not here: which files a source has (sources.py), and what a row's columns mean (conversations.py).
"""

from __future__ import annotations

import gzip
import json
import mmap
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from fsdp.base.errors import ConfigError, message_line
from fsdp.base.proc import cache_folder
from fsdp.base.text import byte_size, quoted
from fsdp.config.fields import expanded
from fsdp.tokenize.cache import identity, made_once

LINES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
JSON = (".json", ".json.gz")
BUILDERS = {
    ".parquet": "parquet", ".csv": "csv", ".tsv": "csv", ".arrow": "arrow", ".tar": "webdataset",
    ".jsonl.zst": "json", ".ndjson.zst": "json", ".json.zst": "json",
}  # fmt: skip
"""Suffixes that the package datasets reads, each with the name of its builder."""
OFFSET = np.dtype(np.int64)
BLOCK = 1 << 24
UNPACKED, UNPACKED_TIMES = 1 << 30, 200
"""What a compressed file may unpack to: so many bytes, or so many times its own size if that is more."""
T = TypeVar("T")


@dataclass(frozen=True)
class SourceRow:
    place: str
    """The file and the line, as messages name it."""
    values: Mapping[str, Any]
    """By column."""


# ---------------------------------------------------------------- JSON and text


class LineRows:
    """Lines of JSON; `plain` is the file to map, `name` the one that messages name."""

    def __init__(self, plain: Path, name: str, unit: str = "line") -> None:
        self._plain, self._name, self._unit = plain, name, unit
        # Mapped where it is read: a map holds a descriptor, and a source may have more files than the limit.
        self._index = made_once("lines", identity(plain), lambda aside: _index_lines(plain, aside))
        self.count = self._index.stat().st_size // OFFSET.itemsize - 1

    def read(self, first: int, last: int) -> Iterator[SourceRow]:
        """A blank line has no row."""
        starts = np.memmap(self._index, OFFSET, "r")
        with self._plain.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            for number in range(first, last):
                line = text[int(starts[number]) : int(starts[number + 1])]
                if line.strip():
                    yield SourceRow(f"{self._name} {self._unit} {number + 1}", self._values(number + 1, line))

    def cuts(self, size: int) -> list[int]:
        """Rows at which the file may be cut into parts of about `size` bytes; the last is `count`."""
        starts = np.memmap(self._index, OFFSET, "r")
        rows = np.unique(np.searchsorted(starts, np.arange(size, int(starts[-1]), size)))
        return [int(row) for row in rows if 0 < row < self.count] + [self.count]

    def _values(self, number: int, line: bytes) -> Mapping[str, Any]:
        try:
            values = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"{self._name} {self._unit} {number} is not JSON in UTF-8: {message_line(error)}.",
                f"sed -n {number}p {quoted(self._plain)} shows it",
            ) from None
        if not isinstance(values, dict):
            raise ConfigError(
                f"{self._name} {self._unit} {number} is a {type(values).__name__}, not an object.",
                """an object for each row, such as {"text": "Once upon a time"}""",
            )
        return values


def _index_lines(path: Path, aside: Path) -> None:
    """Writes the offset of each line, and of the end."""
    done, last = 0, b"\n"
    with path.open("rb") as file, aside.open("wb") as out:
        np.zeros(1, OFFSET).tofile(out)
        while block := file.read(BLOCK):
            ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + (done + 1)
            ends.astype(OFFSET).tofile(out)
            done, last = done + len(block), block[-1:]
        if last != b"\n":
            np.array([done], OFFSET).tofile(out)


def _uncompressed(path: Path, name: str) -> Path:
    """The file itself, or the contents of a .gz file in the cache."""
    if path.suffix.lower() != ".gz":
        return path
    most = max(UNPACKED, UNPACKED_TIMES * path.stat().st_size)

    def write(aside: Path) -> None:
        try:
            with gzip.open(path, "rb") as packed, aside.open("wb") as out:
                while block := packed.read(BLOCK):
                    if out.write(block) and out.tell() > most:
                        raise ConfigError(
                            f"{name} unpacks to more than {byte_size(most)}.",
                            f"gunzip {quoted(path)} if that is meant",
                        )
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ConfigError(
                f"{name} is damaged or cut short: {error}.",
                f"copy it again; gzip -t {quoted(path)} checks it",
            ) from None

    return made_once("plain", identity(path), write)


def _json_rows(path: Path, name: str) -> LineRows:
    """The rows of a .json file, which is read whole: a list, an object with one list, or lines of objects."""
    with path.open("rb") as file:
        try:
            is_row = isinstance(json.loads(file.readline().decode("utf-8-sig")), dict)
        except (ValueError, RecursionError):
            is_row = False
        if is_row and file.read(BLOCK).strip():
            return LineRows(path, name)

    def write(aside: Path) -> None:
        try:
            rows = json.loads(path.read_text("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"{name} is not JSON in UTF-8: {message_line(error)}.",
                f"python -m json.tool {quoted(path)}; lines of JSON are a .jsonl file",
            ) from None
        if isinstance(rows, dict) and not {"messages", "text", "prompt"} & rows.keys():
            lists = [key for key, value in rows.items() if isinstance(value, list)]
            if len(lists) != 1:
                raise ConfigError(
                    f"{name} is an object that holds {', '.join(lists) or 'no'} list.",
                    """one list of rows, such as [{"text": "a"}]; to read it as text: """
                    f"--data.name text --data.dir {quoted(path)}",
                )
            rows = rows[lists[0]]
        rows = rows if isinstance(rows, list) else [rows]
        if not rows:
            raise ConfigError(f"{name} has no rows.", f"rm {quoted(path)}, or write it again")
        aside.write_text("".join(json.dumps(row) + "\n" for row in rows))

    return LineRows(made_once("elements", identity(path), write), name, "element")


class TextFiles:
    """Files of UTF-8; each is a row with the column text."""

    def __init__(self, paths: Sequence[Path], names: Mapping[Path, str]) -> None:
        self._paths, self._names = paths, names
        self.count = len(paths)

    def read(self, first: int, last: int) -> Iterator[SourceRow]:
        for path in self._paths[first:last]:
            yield SourceRow(self._names[path], {"text": checked_text(path.read_bytes(), path)})

    def cuts(self, size: int) -> list[int]:
        sums = np.cumsum([path.stat().st_size for path in self._paths])
        rows = np.unique(np.searchsorted(sums, np.arange(size, int(sums[-1]), size)) + 1)
        return [int(row) for row in rows if row < self.count] + [self.count]


def checked_text(raw: bytes, path: Path) -> str:
    """UTF-8 without zero bytes; ConfigError otherwise."""
    zero = raw.find(b"\0")
    try:
        if zero < 0:
            return raw.decode("utf-8-sig")
        what = f"at byte {zero}, which is zero"
    except UnicodeDecodeError as error:
        what = f"at byte {error.start}: {error.reason}"
    raise ConfigError(
        f"{path} is not text in UTF-8 {what}.",
        f"file {quoted(path)} names its kind; iconv -f utf-16 {quoted(path)} > NEW converts such text",
    )


# ---------------------------------------------------------------- what the package datasets reads


class DatasetRows:
    """Rows of a data set of the package datasets; columns of pictures, sounds and videos are left out."""

    def __init__(self, dataset: Any, name: str) -> None:
        from datasets.features.features import require_decoding

        media = [column for column, kind in dataset.features.items() if require_decoding(kind)]
        # As Arrow, since a dataset's own format would decode what Python has no value for.
        self._dataset, self._name = dataset.remove_columns(media).with_format("arrow"), name
        self.files = [Path(file["filename"]) for file in dataset.cache_files]
        self.count = len(dataset)
        if not self.count:
            raise ConfigError(f"{name} has no rows.", "another file, or --data.args.split NAME")

    def read(self, first: int, last: int) -> Iterator[SourceRow]:
        for start in range(first, last, 1024):
            try:
                rows = self._dataset[start : min(last, start + 1024)].to_pylist()
            except Exception as error:  # Arrow raises what its types raise
                raise ConfigError(
                    f"{self._name} cannot be read from row {start + 1} on: {message_line(error)}.",
                    "write it again",
                ) from None
            for number, values in enumerate(rows, start + 1):
                columns = {column: without_nulls(value) for column, value in values.items()}
                yield SourceRow(f"{self._name} row {number}", columns)

    def cuts(self, size: int) -> list[int]:
        """By the mean size of a row."""
        rows = max(1, self.count * size // max(1, sum(path.stat().st_size for path in self.files)))
        return [*range(rows, self.count, rows), self.count]


def without_nulls(value: Any) -> Any:
    """A value of a column of Arrow, whose objects all have the keys of each other: a null is a key that the
    row was written without, such as another tool's argument, and a chat template would write it.
    """
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return value


def _datasets(name: str) -> Any:
    os.environ.update(HF_DATASETS_OFFLINE="1", HF_HUB_OFFLINE="1")  # read when the library is imported
    try:
        import datasets
    except ImportError:
        raise ConfigError(f"{name} needs the package datasets.", "pip install datasets") from None
    datasets.config.HF_HUB_OFFLINE = True
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    return datasets


def _file_of_datasets(path: Path, name: str, builder: str) -> DatasetRows:
    more = {"sep": "\t"} if path.name.lower().endswith(".tsv") else {}
    library = _datasets(name)
    try:
        made = library.load_dataset(
            builder, data_files=str(path), split="train", cache_dir=str(cache_folder("datasets")), **more
        )
    except Exception as error:  # the library raises what its readers raise
        cause = error.__cause__ or error
        raise ConfigError(
            f"{name} cannot be read as {builder}: {message_line(cause)}.",
            f"copy it again; head -c 300 {quoted(path)} shows its beginning",
        ) from None
    return DatasetRows(made, name)


def hub_rows(name: str, config: str, split: str) -> DatasetRows:
    """hf:NAME of this machine's cache, or a folder of save_to_disk."""
    shown = " ".join(filter(None, (f"hf:{name}", config, split)))
    library, folder = _datasets(shown), expanded(name)
    try:
        if folder.is_dir():
            found = library.load_from_disk(str(folder))
        else:
            found = library.load_dataset(name, config or None)
        if isinstance(found, dict):
            split = split or ("train" if "train" in found else next(iter(found)))
            if split not in found:
                raise ValueError(f"no split {split}; it has {', '.join(found)}")
            found = found[split]
    except Exception as error:  # the library raises what its readers raise
        words = ", ".join(repr(word) for word in (name, config) if word)
        raise ConfigError(
            f"{shown} cannot be read from this machine: {message_line(error, 300)}.",
            f"""python -c "import datasets; datasets.load_dataset({words})" on a machine with a network; """
            "--data.args.config NAME and --data.args.split NAME select a part",
        ) from None
    return DatasetRows(found, shown)


SourceRows = LineRows | TextFiles | DatasetRows
"""Rows of a file, or of several, by number."""


# ---------------------------------------------------------------- a file's reader


def open_rows(files: Sequence[Path], names: Mapping[Path, str] | None = None) -> list[SourceRows]:
    """One source a row file; the .txt files are one source together. `names` are shown in messages."""
    shown = {path: str(path) for path in files} | dict(names or {})
    texts = [path for path in files if ends_with(path.name, (".txt",))]
    opened = [_opened(path, shown[path]) for path in files if path not in texts]
    return [*opened, TextFiles(texts, shown)] if texts else opened


def _opened(path: Path, name: str) -> SourceRows:
    builder = next((name for suffix, name in BUILDERS.items() if ends_with(path.name, (suffix,))), "")
    if builder:
        return _file_of_datasets(path, name, builder)
    plain = _uncompressed(path, name)
    return LineRows(plain, name) if ends_with(path.name, LINES) else _json_rows(plain, name)


def ends_with(name: str, suffixes: tuple[str, ...]) -> bool:
    """Whether the name has one of the suffixes, in upper or lower case."""
    return name.lower().endswith(suffixes)


def grouped(items: Iterable[T], size: Callable[[T], int], at_least: int) -> Iterator[list[T]]:
    """Lists of consecutive items whose sizes add up to `at_least` or more; the last one may be smaller."""
    waiting: list[T] = []
    total = 0
    for item in items:
        waiting.append(item)
        total += size(item)
        if total >= at_least:
            yield waiting
            waiting, total = [], 0
    if waiting:
        yield waiting
