"""A source by its name: row files here or in an object store, or a data set of Hugging Face (hf:NAME)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp.base.errors import ConfigError
from fsdp.base.object_client import is_url
from fsdp.tokenize.cache import identity
from fsdp.tokenize.hub_dataset import DatasetRows, HubName
from fsdp.tokenize.object_files import fetched, find_objects
from fsdp.tokenize.rows import SourceRows
from fsdp.tokenize.source_names import PREFIX, is_remote
from fsdp.tokenize.sources import find_files, left_out, open_rows
from fsdp.tokenize.split_names import held_out


def notes_on(name: str) -> list[str]:
    """A line about files of a source on this machine that are left out."""
    return [] if is_remote(name) else [line for line in (left_out(name),) if line]


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

    def held_out(self) -> list[str]:
        """The files that are held out by their names."""
        return [] if self.name.startswith(PREFIX) else held_out(self._files())

    def _files(self) -> list[str]:
        if is_url(self.name):
            return [one.url for one in find_objects(self.name)]
        return [str(path) for path in find_files(self.name)]

    def open(self) -> list[SourceRows]:
        """What is trained on."""
        if self.name.startswith(PREFIX):
            return [DatasetRows(self._of_hub())]
        held = self.held_out()
        return self._open([file for file in self._files() if file not in held])

    def open_held_out(self) -> list[SourceRows]:
        return self._open(self.held_out())

    def _open(self, files: Sequence[str]) -> list[SourceRows]:
        if not is_url(self.name):
            return open_rows([Path(file) for file in files])
        objects = [one for one in find_objects(self.name) if one.url in files]
        copies = fetched(self.name, objects)
        return open_rows(copies, {copy: one.url for copy, one in zip(copies, objects, strict=True)})

    def _of_hub(self) -> HubName:
        return HubName(self.name.removeprefix(PREFIX), self.config, self.split)

    def _check_nothing_selected(self) -> None:
        for flag, value in (("config", self.config), ("split", self.split)):
            if value:
                raise ConfigError(
                    f"--data.args.{flag} {value} has no effect on {self.name}.",
                    f"leave it out; it selects a part of {PREFIX}NAME",
                )
