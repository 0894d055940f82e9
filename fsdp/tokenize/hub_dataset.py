"""hf:NAME, a data set of Hugging Face in this machine's cache, or hf:FOLDER, one of save_to_disk.

The datasets library reads them, offline. Its rows are mapped files; pictures and sounds are left out. Not
here: conversations (documents.py).
"""

from __future__ import annotations

import errno
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp.base.errors import ConfigError
from fsdp.config.sections import expanded
from fsdp.tokenize.cache import identity
from fsdp.tokenize.packages import optional
from fsdp.tokenize.rows import SourceRow, without_nulls
from fsdp.tokenize.source_names import PREFIX, SAVED

MEDIA = ("Image", "Audio", "Video", "Pdf")
_ID = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
READ_AT_ONCE = 1024


@dataclass(frozen=True)
class HubName:
    """A data set by name, with --data.args.config and --data.args.split."""

    name: str
    config: str = ""
    split: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, (f"{PREFIX}{self.name}", self.config, self.split)))


class DatasetRows:
    """Rows of one split."""

    def __init__(self, name: HubName) -> None:
        made = _load(name)
        self.name = name
        self._made = made.remove_columns([one for one, kind in made.features.items() if _is_media(kind)])
        self._files = [Path(one["filename"]) for one in made.cache_files]
        self.count = len(made)
        if not self.count:
            raise ConfigError(f"{name} has no rows.", "--data.args.split NAME, another split")

    def identity(self) -> list[Any]:
        return [str(self.name), self.count, *(identity(path) for path in self._files)]

    def read(self, first: int, last: int) -> Iterator[SourceRow]:
        for start in range(first, last, READ_AT_ONCE):
            columns = without_nulls(self._made[start : min(last, start + READ_AT_ONCE)])
            for n, values in enumerate(zip(*columns.values(), strict=True), start + 1):
                yield SourceRow(f"{self.name} row {n}", dict(zip(columns, values, strict=True)))

    def cuts(self, size: int) -> list[int]:
        """By the mean size of a row."""
        whole = max(1, sum(path.stat().st_size for path in self._files))
        rows = max(1, self.count * size // whole)
        return [*range(rows, self.count, rows), self.count]


def _is_media(kind: Any) -> bool:
    """Also a list of them, of any depth: reading a row would decode each."""
    while isinstance(kind, list) or hasattr(kind, "feature"):
        kind = kind[0] if isinstance(kind, list) else kind.feature
    return type(kind).__name__ in MEDIA


def _load(name: HubName) -> Any:
    if not name.name:
        raise ConfigError(
            f"--data.name {PREFIX} names no data set.", f"--data.name {PREFIX}ORG/NAME, or {PREFIX}FOLDER"
        )
    os.environ.update(HF_DATASETS_OFFLINE="1", HF_HUB_OFFLINE="1")  # read when the library is imported
    library = optional("datasets", f"{PREFIX}{name.name}")
    library.config.HF_HUB_OFFLINE = True
    library.disable_progress_bars()
    library.logging.set_verbosity_error()
    folder = expanded(name.name)
    try:
        found = _from_folder(library, folder, name) if folder.is_dir() else _from_cache(library, name)
    except ConfigError:
        raise
    except Exception as error:  # the library raises what its readers raise
        raise _unreadable(name, folder, error) from None
    return found[_split_of(found, name)] if isinstance(found, dict) else found


def _from_folder(library: Any, folder: Path, name: HubName) -> Any:
    if not any((folder / file).is_file() for file in SAVED):
        raise ConfigError(
            f"{PREFIX}{name.name} has none of {', '.join(SAVED)}, the files of save_to_disk.",
            f"--data.name {shlex.quote(name.name)} reads row files",
        )
    if name.config:
        raise ConfigError(
            f"--data.args.config {name.config} has no effect on a folder of save_to_disk.", "leave it out"
        )
    found = library.load_from_disk(str(folder))
    if name.split and not isinstance(found, dict):
        raise ConfigError(
            f"--data.args.split {name.split} has no effect: {PREFIX}{name.name} holds one split.",
            "leave it out",
        )
    return found


def _from_cache(library: Any, name: HubName) -> Any:
    if not _ID.fullmatch(name.name):
        raise ConfigError(
            f"{name} is neither a folder nor the name of a data set.", "--data.name hf:ORG/NAME"
        )
    return library.load_dataset(name.name, name.config or None, split=name.split or None)


def _split_of(found: Any, name: HubName) -> str:
    split = name.split or ("train" if "train" in found or len(found) != 1 else next(iter(found)))
    if split not in found:
        raise ConfigError(
            f"{PREFIX}{name.name} has no split {split}; it has {', '.join(found)}.",
            f"--data.args.split {next(iter(found))}",
        )
    return split


def _unreadable(name: HubName, folder: Path, error: Exception) -> ConfigError:
    what = " ".join(str(error).split())[:300].rstrip(".")
    if getattr(error, "errno", None) in (errno.EACCES, errno.ENAMETOOLONG) or folder.is_dir():
        return ConfigError(
            f"{name} cannot be read: {what}.",
            f"copy it again; ls -l {shlex.quote(name.name)} shows its files",
        )
    given = ", ".join(repr(one) for one in (name.name, name.config) if one)
    return ConfigError(
        f"{name} cannot be read from this machine's cache of Hugging Face: {what}.",
        f"""python -c "import datasets; datasets.load_dataset({given})" on a machine with a network; """
        "--data.args.config NAME and --data.args.split NAME select a part",
    )
