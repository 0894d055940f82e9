"""A source by its name: files here, objects in a store (copied into the cache once a machine), or a data set
of Hugging Face; and which of its files are held out. Not here: the rows of a file (rows.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any, TypeVar

from fsdp.base.errors import ConfigError
from fsdp.base.object_client import OBJECT_STORES, is_url, open_url, retried, without_secrets
from fsdp.base.text import quoted
from fsdp.config.fields import expanded
from fsdp.tokenize.cache import identity, made_once
from fsdp.tokenize.rows import BUILDERS, JSON, LINES, DatasetRows, SourceRows, ends_with, hub_rows, open_rows

PREFIX = "hf:"
"""Of a data set of Hugging Face: hf:ORG/NAME, or hf:FOLDER of save_to_disk."""
MANIFEST = "tokenize.json"
"""In a folder of fsdp.tokenize: what its tokens are made of and, once all are written, what they hold."""
ROWS = (*LINES, *JSON, *BUILDERS)
SUFFIXES = (*ROWS, ".txt")
SETTINGS = frozenset(
    {"config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
)
"""Files beside those of rows, as the libraries of Hugging Face write them."""
ABOUT = ("README", "LICENSE")
"""How the names of files about a folder begin, which are none of its data."""
LISTED = ".jsonl, .json, .txt, .parquet, .csv, .tsv, .arrow or .tar"
HINT = f"a {LISTED} file, a folder of them, or a pattern in quotes"
T = TypeVar("T")


# ---------------------------------------------------------------- files


def find_files(name: str) -> list[Path]:
    """The files of a path or a pattern, in the order of names; of a folder, those of `row_files`."""
    root = expanded(name)
    if root.is_dir():
        found = row_files(files_below(root), lambda path: path.name)
    elif root.exists():
        found = [root] if ends_with(root.name, SUFFIXES) else []
    else:
        found = matching(name)
        if not found:
            raise ConfigError(f"{name} does not exist or matches no file.", HINT)
    if not found:
        raise ConfigError(f"{name} has no {LISTED} file.", HINT)
    for path in found:
        if not path.exists():
            raise ConfigError(f"{path} is a link to a file that does not exist.", f"rm {quoted(path)}")
        if not path.stat().st_size:
            raise ConfigError(f"{path} is empty.", f"rm {quoted(path)}, or write it again")
    return found


def files_below(root: Path) -> list[Path]:
    """Sorted, without hidden ones. A folder that cannot be listed is an error: its rows would lack."""
    found: list[Path] = []
    for folder, folders, names in os.walk(root, onerror=_raise):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "lost+found"]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted(found)


def _raise(error: OSError) -> None:
    raise error


def row_files(files: Iterable[T], name: Callable[[T], str]) -> list[T]:
    """Of a folder: its lines of JSON and Parquet, else its .json or .txt, whichever are more, else tables."""
    named = [(name(file), file) for file in files if not name(file).upper().startswith(ABOUT)]

    def of(*suffixes: str) -> list[T]:
        return [file for name, file in named if ends_with(name, suffixes) and name not in SETTINGS]

    lines = of(*LINES, ".parquet", ".jsonl.zst", ".ndjson.zst")
    whole, texts = of(*JSON, ".json.zst"), of(".txt")
    return lines or (whole if len(whole) > len(texts) else texts or whole) or of(*BUILDERS)


def is_pattern(name: str) -> bool:
    return any(sign in name for sign in "*?[")


def matching(name: str) -> list[Path]:
    """The files of a pattern such as 'corpus/**/*.jsonl', hidden ones left out; empty if it is none."""
    if not is_pattern(name):
        return []
    pattern = expanded(name)
    found = Path(pattern.anchor).glob(str(pattern.relative_to(pattern.anchor)))
    return sorted(path for path in found if not path.is_dir() and not path.name.startswith("."))


# ---------------------------------------------------------------- splits by name


def is_train(name: str) -> bool:
    """Whether it is `train`, also with a number, a suffix or another end: train-00000-of-00002.parquet."""
    return re.fullmatch(r"train(ing|val)?([-_.\d].*)?", name, re.I) is not None


def is_other(name: str) -> bool:
    """Whether it is the name of another split, as in test.jsonl."""
    names = r"(val|valid|validation|dev|eval|test|testing)([-_.\d].*)?"
    return re.fullmatch(names, name, re.I) is not None


def held_out(files: Sequence[str]) -> list[str]:
    """Of files that are read together those named after another split, or in a folder that is, where others
    are named after that of training.
    """
    base = PurePath(os.path.commonpath(files)) if files else PurePath()

    def split(file: str) -> str:
        parts = PurePath(file).relative_to(base).parts
        return next((part for part in parts if is_train(part) or is_other(part)), "")

    splits = {file: split(file) for file in files}
    return (
        [file for file, name in splits.items() if is_other(name)]
        if any(map(is_train, splits.values()))
        else []
    )


def held_out_line(files: Sequence[str]) -> str:
    """What a start says of them."""
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    return f"{files[0]}{more}: held out, as the name says, and nothing else"


# ---------------------------------------------------------------- sources


def is_saved_dataset(folder: Path) -> bool:
    """Whether datasets' save_to_disk has written it: one split, or several."""
    marked = (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()
    return marked and next(folder.rglob("*.arrow"), None) is not None


def is_remote(name: str) -> bool:
    """Whether a client reads it, whose threads a forked process would lose."""
    return name.startswith(PREFIX) or is_url(name) or is_saved_dataset(Path(name))


@dataclass(frozen=True)
class Source:
    """A source by its name; `config` and `split` select a part of hf:NAME."""

    name: str
    config: str = ""
    split: str = ""

    def identity(self) -> list[Any]:
        """Changes with the data: names, sizes and times, or versions."""
        if self._hub is not None:
            return [self._hub_shown, self._hub.count, *map(identity, self._hub.files)]
        if self.config or self.split:
            raise ConfigError(
                f"--data.args.config and split have no effect on {self.name}.",
                f"they select a part of {PREFIX}NAME",
            )
        if is_url(self.name):
            return [[url, size, version] for url, (_, size, version) in self._objects.items()]
        return [identity(path) for path in find_files(self.name)]

    def held_out(self) -> list[str]:
        """The files that are held out by their names."""
        return [] if self._hub is not None else held_out(self._files())

    def open(self) -> list[SourceRows]:
        """What is trained on."""
        if self._hub is not None:
            return [self._hub]
        held = self.held_out()
        return self._open([file for file in self._files() if file not in held])

    def open_held_out(self) -> list[SourceRows]:
        return self._open(self.held_out())

    def _open(self, files: Sequence[str]) -> list[SourceRows]:
        if not is_url(self.name):
            return open_rows([Path(file) for file in files])
        with ThreadPoolExecutor(8) as pool:
            copies = list(pool.map(self._copied, files))
        return open_rows(copies, dict(zip(copies, files, strict=True)))

    def _files(self) -> list[str]:
        return list(self._objects) if is_url(self.name) else [str(path) for path in find_files(self.name)]

    @cached_property
    def _hub(self) -> DatasetRows | None:
        saved = is_saved_dataset(Path(self.name))
        if not (self.name.startswith(PREFIX) or saved):
            return None
        return hub_rows(self.name.removeprefix(PREFIX), self.config, self.split)

    @property
    def _hub_shown(self) -> str:
        return " ".join(filter(None, (self.name, self.config, self.split)))

    # ------------------------------------------------------------ objects in a store

    @cached_property
    def _objects(self) -> dict[str, tuple[str, int, str]]:
        """Path, size and version of each object, by the URL that messages name, which has no keys."""
        shown = without_secrets(self.name)
        example = (
            "s3://bucket/prefix, one object, or a pattern such as 's3://bucket/prefix/*.jsonl' in quotes"
        )
        if self.name.partition("://")[0] not in OBJECT_STORES or "::" in self.name:
            raise ConfigError(f"{shown} is not a URL of {', '.join(OBJECT_STORES)}.", example)
        fs, root = open_url(self.name, ConfigError, example)
        find = fs.glob if is_pattern(root) else fs.find
        try:
            listed = retried(lambda: find(root, detail=True), f"listing {shown}")
        except OSError as error:
            raise ConfigError(
                f"{shown} cannot be read: {error.strerror or error}.",
                "AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment of s3://",
            ) from None
        scheme = shown.partition("://")[0]
        found = {
            f"{scheme}://{path}": (path, int(facts["size"]), _version(facts))
            for path, facts in sorted(listed.items())
            if facts.get("type") == "file" and facts["size"] and not PurePath(path).name.startswith(".")
        }
        rows = row_files(found, lambda url: PurePath(url).name)
        if not rows:
            raise ConfigError(f"{shown} has no {LISTED} object with a byte in it.", example)
        return {url: found[url] for url in rows}

    def _copied(self, url: str) -> Path:
        """The object's copy in the cache, under its own name."""
        path, size, version = self._objects[url]
        name = PurePath(path).name

        def make(aside: Path) -> None:
            fs, _ = open_url(self.name, ConfigError, "")
            aside.mkdir(exist_ok=True)
            retried(lambda: fs.get_file(path, str(aside / name)), f"reading {url}")
            if (aside / name).stat().st_size != size:
                raise ConfigError(f"{url} did not arrive whole.", "the same command again")

        return made_once("object", [url, path, size, version], make) / name


def _version(facts: Mapping[str, Any]) -> str:
    return str(
        facts.get("ETag") or facts.get("etag") or facts.get("LastModified") or facts.get("updated") or ""
    )
