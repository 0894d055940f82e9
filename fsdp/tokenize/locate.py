"""A source by its name: row files here or in an object store, or a data set of Hugging Face (hf:NAME)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fsdp.base.errors import ConfigError
from fsdp.base.object_client import is_url
from fsdp.tokenize.cache import identity
from fsdp.tokenize.hub_dataset import DatasetRows, HubName
from fsdp.tokenize.object_files import fetched, find_objects
from fsdp.tokenize.rows import SourceRows
from fsdp.tokenize.source_names import PREFIX, is_remote
from fsdp.tokenize.sources import find_files, left_out, open_rows, other_splits


def notes_on(name: str) -> list[str]:
    """Lines about files of a source on this machine that are left out, or named after another split."""
    return [] if is_remote(name) else [line for line in (left_out(name), other_splits(name)) if line]


@dataclass(frozen=True)
class SourceName:
    name: str
    config: str = ""
    split: str = ""

    def identity(self) -> list[Any]:
        """Changes with the data: names, sizes and times, or versions."""
        if self.name.startswith(PREFIX):
            return DatasetRows(self._of_hub()).identity()
        self._check_nothing_selected()
        if is_url(self.name):
            return [[one.url, one.size, one.version] for one in find_objects(self.name)]
        return [identity(path) for path in find_files(self.name)]

    def open(self) -> list[SourceRows]:
        if self.name.startswith(PREFIX):
            return [DatasetRows(self._of_hub())]
        if is_url(self.name):
            objects = find_objects(self.name)
            copies = fetched(self.name, objects)
            return open_rows(copies, {copy: one.url for copy, one in zip(copies, objects, strict=True)})
        return open_rows(find_files(self.name))

    def _of_hub(self) -> HubName:
        return HubName(self.name.removeprefix(PREFIX), self.config, self.split)

    def _check_nothing_selected(self) -> None:
        for flag, value in (("config", self.config), ("split", self.split)):
            if value:
                raise ConfigError(
                    f"--data.args.{flag} {value} has no effect on {self.name}.",
                    f"leave it out; it selects a part of {PREFIX}NAME",
                )
