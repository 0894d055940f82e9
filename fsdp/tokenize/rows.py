"""A source by its name, its files, and their rows; and a folder that is made once.

    .jsonl, .ndjson (.gz too), .json.gz   the standard library: a line is a row
    .txt                                  a file is a row with the column text
    .json, .parquet, .csv, .tsv, .arrow   the package datasets, which keeps an Arrow copy in the cache;
                                          hf:NAME and hf:FOLDER of save_to_disk too, offline

~/.cache/shardrun/data has what ranks, runs and nodes share. A lock (flock, which ends with its process) lets
one process make it while others wait. Where a file system has none, two may make it at once: each writes
aside, and a rename decides. Not here: what a row's columns mean (conversations.py).
"""

from __future__ import annotations

import fcntl
import glob
import gzip
import hashlib
import itertools
import json
import os
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePath
from typing import IO, Any, NamedTuple, cast

import numpy as np

from fsdp.base.errors import ConfigError, message_line
from fsdp.base.proc import cache_folder
from fsdp.base.text import byte_size, quoted
from fsdp.config.sections import expanded

PREFIX = "hf:"
"""Of a data set of Hugging Face: hf:ORG/NAME, or hf:FOLDER of save_to_disk."""
MANIFEST = "tokenize.json"
"""In a folder of fsdp.tokenize: what its tokens are made of and, once all are written, what they hold."""
LINES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz", ".json.gz")
BUILDERS = {".json": "json", ".parquet": "parquet", ".csv": "csv", ".tsv": "csv", ".arrow": "arrow"}
"""Suffixes that the package datasets reads, each with the name of its builder."""
ROWS = (*LINES, *BUILDERS)
SETTINGS = ("config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""Files beside those of rows, as the libraries of Hugging Face write them."""
ABOUT = ("README", "LICENSE")
"""How the names of files about a folder begin, which are none of its data."""
NO_WEIGHTS = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
"""Files of a model's configuration and its tokenizer."""
UNPACKED, UNPACKED_TIMES = 1 << 30, 200
"""What a compressed file may unpack to: so many bytes, or so many times its own size if that is more."""


@dataclass(frozen=True)
class SourceRow:
    place: str
    """The file and the line, as messages name it."""
    content: Mapping[str, Any] | ConfigError

    @property
    def values(self) -> Mapping[str, Any]:
        """By column. Raises ConfigError if the row cannot be read."""
        if isinstance(self.content, ConfigError):
            raise self.content
        turns = self.content.get("conversations")
        if not isinstance(turns, list) or "messages" in self.content:
            return self.content
        return {**self.content, "messages": [_message(turn) for turn in turns]}


ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}
"""Of ShareGPT's column `conversations`."""


def _message(turn: Any) -> Any:
    if not isinstance(turn, dict) or not turn.keys() >= {"from", "value"}:
        return turn
    return {"role": ROLES.get(str(turn["from"]), turn["from"]), "content": turn["value"]}


class RowRange(NamedTuple):
    """Rows `row` to row + rows of a file; `first` and `last` are its bytes, or again numbers of rows."""

    first: int
    last: int
    row: int
    rows: int


def by_number(ends: Iterable[int], count: int) -> list[RowRange]:
    """Parts of `count` rows that end at these numbers."""
    cuts = sorted({0, count, *(int(end) for end in ends if 0 < end < count)})
    return [RowRange(first, last, first, last - first) for first, last in itertools.pairwise(cuts)]


# ---------------------------------------------------------------- made once


def identity(path: Path) -> list[Any]:
    """What a cached file of it is known by. Reading the contents would take as long as tokenizing them."""
    return [str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns]


def made_once(name: str, key: Any, make: Callable[[Path], None]) -> Path:
    """Returns the folder of this key in the cache; `make` writes it where it is absent.

    `make` gets the same path again after a killed start, and may continue what is there.
    """
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:20]
    cached = cache_folder("data") / f"{name}-{digest}"
    if cached.exists():
        return cached
    try:
        with locked(cached.with_name(f"{cached.name}.lock")) as alone:
            if not cached.exists():
                partial = Path(f"{cached}.partial{'' if alone else os.urandom(4).hex()}")
                make(partial)
                try:
                    partial.rename(cached)
                except OSError:
                    if not cached.exists():  # another process was first, without a lock between them
                        raise
    except OSError as error:
        reason = f"{cached.parent} cannot be written ({error.strerror or error})."
        raise ConfigError(reason, "XDG_CACHE_HOME=FOLDER before the command names another place") from None
    return cached


@contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Waits for the lock. Yields False on a file system without locks, or that cannot be written."""
    alone = False
    with ExitStack() as opened:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            fcntl.flock(opened.enter_context(path.open("w")), fcntl.LOCK_EX)
            alone = True
        yield alone


# ---------------------------------------------------------------- readers


def check_unpacked(size: int, path: Path) -> int:
    """What the compressed file may unpack to; ConfigError if it does to `size` bytes, which are more."""
    most = max(UNPACKED, UNPACKED_TIMES * path.stat().st_size)
    if size > most:
        raise ConfigError(
            f"{path} unpacks to more than {byte_size(most)}.",
            f"ls -l {quoted(path)}; if that is meant, write its rows as plain lines of JSON",
        )
    return most


class LineRows:
    """Lines of JSON. A compressed file is unpacked as it is read, up to a limit."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def _open(self) -> IO[bytes]:
        packed = ends_with(self._path.name, (".gz",))
        return cast(IO[bytes], gzip.open(self._path)) if packed else self._path.open("rb")

    def parts(self, size: int) -> list[RowRange]:
        """Each begins at the first line that starts at a multiple of `size`, or behind it."""
        made: list[RowRange] = []
        first = row = end = lines = 0
        most = check_unpacked(0, self._path)
        try:
            with self._open() as file:
                for lines, line in enumerate(iter(lambda: file.readline(most + 1), b""), 1):
                    if end // size > first // size:
                        made.append(RowRange(first, end, row, lines - 1 - row))
                        first, row = end, lines - 1
                    end += len(line)
                    if end > most:
                        check_unpacked(end, self._path)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            reason = f"{self._path} is damaged: {error}."
            raise ConfigError(reason, f"gzip -t {quoted(self._path)}") from None
        return [*made, RowRange(first, end, row, lines - row)]

    def read(self, part: RowRange) -> Iterator[SourceRow]:
        """A blank line has no row."""
        end = part.first
        with self._open() as file:
            file.seek(end)
            for number, line in enumerate(file, part.row + 1):
                if end >= part.last:
                    return
                end += len(line)
                if line.strip():
                    yield SourceRow(f"{self._path} line {number}", self._content(number, line))

    def _content(self, number: int, line: bytes) -> Mapping[str, Any] | ConfigError:
        try:
            values = json.loads(line)
            if not isinstance(values, dict):
                raise ValueError(f"a {type(values).__name__}, not an object such as {{'text': 'Once'}}")
        except (ValueError, RecursionError) as error:
            reason = f"{self._path} line {number} is not an object of JSON: {message_line(error)}."
            return ConfigError(reason, f"sed -n {number}p {quoted(self._path)} shows it")
        return values


class TextFiles:
    """Files of UTF-8; each is a row with the column text."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths

    def parts(self, size: int) -> list[RowRange]:
        sums = np.cumsum([path.stat().st_size for path in self._paths])
        cuts = np.unique(np.searchsorted(sums, np.arange(size, int(sums[-1]), size)) + 1)
        return by_number(cuts.tolist(), len(self._paths))

    def read(self, part: RowRange) -> Iterator[SourceRow]:
        for path in self._paths[part.first : part.last]:
            try:
                content: Mapping[str, Any] | ConfigError = {"text": checked_text(path.read_bytes(), path)}
            except ConfigError as error:
                content = error
            yield SourceRow(str(path), content)


def checked_text(raw: bytes, path: Path) -> str:
    """UTF-8 without zero bytes; ConfigError otherwise."""
    try:
        if (zero := raw.find(b"\0")) >= 0:
            raise UnicodeDecodeError("utf-8", raw, zero, zero + 1, "it is zero")
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        reason = f"{path} is not text in UTF-8 at byte {error.start}: {error.reason}."
        raise ConfigError(reason, f"iconv -f utf-16 {quoted(path)} > NEW, if it is text") from None


class DatasetRows:
    """Rows of the package datasets, offline: of a file, a folder of save_to_disk, or a cached data set."""

    def __init__(self, name: str, builder: str = "", config: str = "", split: str = "") -> None:
        self.name = name if builder else PREFIX + " ".join(filter(None, (name, config, split)))
        os.environ.update(HF_DATASETS_OFFLINE="1", HF_HUB_OFFLINE="1")  # read when the library is imported
        try:
            import datasets

            datasets.config.HF_HUB_OFFLINE = True
            datasets.disable_progress_bars()
            datasets.logging.set_verbosity_error()
            loaded = _loaded(datasets, name, builder, config)
            if isinstance(loaded, dict):
                loaded = loaded[split or ("train" if "train" in loaded else next(iter(loaded)))]
        except ConfigError:
            raise
        except Exception as error:  # the library raises what its readers raise
            reason = message_line(error.__cause__ or error, 300)
            hint = f'python -c "import datasets; datasets.load_dataset{name, config}" with a network'
            if builder:
                hint = f"pip install datasets; or, of a file that is empty or cut off: ls -l {quoted(name)}"
            raise ConfigError(f"{self.name} cannot be read from this machine: {reason}.", hint) from None
        # As Arrow, since a dataset's own format would decode what Python has no value for.
        self._dataset, self.count = loaded.with_format("arrow"), len(loaded)
        self.files = [Path(file["filename"]) for file in loaded.cache_files]

    def parts(self, size: int) -> list[RowRange]:
        """By the mean size of a row."""
        rows = max(1, self.count * size // max(1, sum(path.stat().st_size for path in self.files)))
        return by_number(range(rows, self.count, rows), self.count)

    def read(self, part: RowRange) -> Iterator[SourceRow]:
        for start in range(part.first, part.last, 1024):
            rows = self._dataset[start : min(part.last, start + 1024)].to_pylist()
            for number, values in enumerate(rows, start + 1):
                columns = {column: without_nulls(value) for column, value in values.items()}
                yield SourceRow(f"{self.name} row {number}", columns)


def _loaded(datasets: Any, name: str, builder: str, config: str) -> Any:
    if builder == "parquet":
        from pyarrow.parquet import read_metadata

        facts = read_metadata(name)
        sizes = (facts.row_group(number).total_byte_size for number in range(facts.num_row_groups))
        check_unpacked(sum(sizes), Path(name))
    if builder:
        options = {"sep": "\t"} if ends_with(name, (".tsv",)) else {}
        folder = str(cache_folder("datasets"))
        return datasets.load_dataset(builder, data_files=glob.escape(name), cache_dir=folder, **options)
    if expanded(name).is_dir():
        return datasets.load_from_disk(str(expanded(name)))
    return datasets.load_dataset(name, config or None)


def without_nulls(value: Any) -> Any:
    """A value of a column of Arrow, whose objects all have the keys of each other: a null is a key that the
    row was written without, such as another tool's argument, and a chat template would write it.
    """
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return value


SourceRows = LineRows | TextFiles | DatasetRows
"""`parts(size)` are all rows in parts of about `size` bytes, `read` gives those of a part."""


def open_rows(files: Sequence[Path]) -> list[SourceRows]:
    """One reader a row file; the .txt files have one together."""
    texts = [path for path in files if ends_with(path.name, (".txt",))]
    opened: list[SourceRows] = []
    for path in files:
        if builder := BUILDERS.get(path.suffix.lower()):
            opened.append(DatasetRows(str(path), builder))
        elif ends_with(path.name, LINES):
            opened.append(LineRows(path))
        elif path not in texts:
            raise ConfigError(f"{path} is not a file of rows.", f"{', '.join(ROWS)} or .txt")
    return [*opened, TextFiles(texts)] if texts else opened


# ---------------------------------------------------------------- files


def ends_with(name: str, suffixes: tuple[str, ...]) -> bool:
    """Whether the name has one of the suffixes, in upper or lower case."""
    return name.lower().endswith(suffixes)


def find_files(name: str) -> list[Path]:
    """The files of a path or a pattern, in the order of names; of a folder, those of `row_files`."""
    root = expanded(name)
    files = row_files(files_below(root)) if root.is_dir() else [root] if root.exists() else matching(name)
    if not files:
        reason = f"{name} does not exist, or has no file of rows ({', '.join(ROWS)}) or .txt."
        raise ConfigError(reason, "such a file, a folder of them, or a pattern in quotes")
    return files


def files_below(root: Path, skipped: Collection[str] = ()) -> list[Path]:
    """Sorted, without hidden ones and folders of the names `skipped`. A folder that cannot be listed is an
    error: its rows would lack.
    """
    files: list[Path] = []
    for entry in os.scandir(root):
        if not entry.name.startswith(".") and entry.name not in ("lost+found", *skipped):
            if entry.is_dir(follow_symlinks=False):
                files += files_below(Path(entry), skipped)
            elif not entry.is_dir():
                files.append(Path(entry))
    return sorted(files)


def row_files(files: Sequence[Path]) -> list[Path]:
    """Of a folder: its lines of JSON and Parquet, else its .json, else its .txt, else its tables."""
    data = [file for file in files if not (file.name.upper().startswith(ABOUT) or file.name in SETTINGS)]
    groups = (*LINES, ".parquet"), (".json",), (".txt",), tuple(BUILDERS)
    rows = ([file for file in data if ends_with(file.name, suffixes)] for suffixes in groups)
    return next(filter(None, rows), [])


def is_pattern(name: str) -> bool:
    return any(sign in name for sign in "*?[")


def matching(name: str) -> list[Path]:
    """The files of a pattern such as 'corpus/**/*.jsonl', hidden ones left out; empty if it is none."""
    pattern = expanded(name)
    matched = Path(pattern.anchor).glob(str(pattern.relative_to(pattern.anchor))) if is_pattern(name) else ()
    return sorted(path for path in matched if not path.is_dir() and not path.name.startswith("."))


# ---------------------------------------------------------------- splits by name


def is_train(name: str) -> bool:
    """Whether it is `train`, also with a number, a suffix or another end: train-00000-of-00002.parquet."""
    return re.fullmatch(r"train(ing|val)?([-_.\d].*)?", name, re.I) is not None


def is_other(name: str) -> bool:
    """Whether it is the name of another split, as in test.jsonl."""
    names = r"(val|valid|validation|dev|eval|test|testing)([-_.\d].*)?"
    return re.fullmatch(names, name, re.I) is not None


def held_out(files: Sequence[str], *, rows: bool = False) -> list[str]:
    """Of files that are read together those named after another split, or in a folder that is, where others
    are named after that of training; of files of rows where others are not named so.
    """
    base = PurePath(os.path.commonpath(files)) if files else PurePath()

    def split(file: str) -> str:
        parts = PurePath(file).relative_to(base).parts
        return next((part for part in parts if is_train(part) or is_other(part)), "")

    splits = {file: split(file) for file in files}
    others = [file for file in files if is_other(splits[file])]
    return others if any(map(is_train, splits.values())) or (rows and len(others) < len(files)) else []


def held_out_line(files: Sequence[str]) -> str:
    """What a start says of them."""
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    return f"{files[0]}{more}: held out, as the name says, and nothing else"


# ---------------------------------------------------------------- sources


@dataclass(frozen=True)
class Source:
    """A source by its name; `config` and `split` select a part of hf:NAME."""

    name: str
    config: str = ""
    split: str = ""

    def identity(self) -> list[Any]:
        """Changes with the data: names, sizes and times."""
        if self._table is not None:
            return [self._table.name, self._table.count, *map(identity, self._table.files)]
        return [identity(Path(file)) for file in self._files]

    def held_out(self) -> list[str]:
        """The files that are held out by their names."""
        return [] if self._table is not None else held_out(self._files, rows=True)

    def open(self, *, held: bool = False) -> list[SourceRows]:
        """What is trained on, or what the names hold out."""
        if self._table is not None:
            return [] if held else [self._table]
        named = self.held_out()
        return open_rows([Path(file) for file in self._files if (file in named) == held])

    @cached_property
    def _table(self) -> DatasetRows | None:
        if self.name.startswith(PREFIX):
            return DatasetRows(self.name.removeprefix(PREFIX), "", self.config, self.split)
        if self.config or self.split:
            reason = f"--data.args.config and split have no effect on {self.name}."
            raise ConfigError(reason, f"leave them out, or {PREFIX}NAME")
        return None

    @cached_property
    def _files(self) -> list[str]:
        return list(map(str, find_files(self.name)))
