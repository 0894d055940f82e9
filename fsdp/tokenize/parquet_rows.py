"""Rows of a Parquet file: read by row groups, of which one is in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fsdp.base.commands import quoted
from fsdp.base.errors import ConfigError, message_line
from fsdp.base.regular_file import check_unpacked
from fsdp.tokenize.packages import optional
from fsdp.tokenize.rows import SourceRow, without_nulls


class ParquetRows:
    """Rows of a Parquet file, a row group at a time."""

    def __init__(self, path: Path, name: str) -> None:
        self._path, self._name, self._place = path, name, ""
        self._arrow = optional("pyarrow", name)
        self._parquet = optional("pyarrow.parquet", name)
        with self._reading():
            facts = self._parquet.read_metadata(path)
        groups = [facts.row_group(n) for n in range(facts.num_row_groups)]
        self._ends = np.cumsum([0, *(group.num_rows for group in groups)])
        self._bytes = [group.total_byte_size for group in groups]
        check_unpacked(sum(self._bytes), path)
        self.count = int(self._ends[-1])
        if not self.count:
            raise ConfigError(f"{name} has no rows.", f"rm {quoted(path)}, or write it again")

    def read(self, first: int, last: int) -> Iterator[SourceRow]:
        with self._reading(), self._parquet.ParquetFile(self._path) as file:
            for group, start in enumerate(self._ends[:-1]):
                if start >= last or self._ends[group + 1] <= first:
                    continue
                number = int(start)
                self._place = f", rows {number + 1} to {self._ends[group + 1]}"
                for batch in file.iter_batches(1024, row_groups=[group], use_threads=False):
                    columns = ArrowColumns(batch, self._name, number)
                    for n in range(batch.num_rows):
                        number += 1
                        if first < number <= last:
                            yield SourceRow(f"{self._name} row {number}", ArrowRow(columns, n))

    def cuts(self, size: int) -> list[int]:
        """At row groups: a part of one would read it whole."""
        found, held = [], 0
        for end, held_here in zip(self._ends[1:-1], self._bytes[:-1], strict=True):
            held += held_here
            if held >= size:
                found.append(int(end))
                held = 0
        return [*found, self.count]

    def _reading(self) -> Any:
        return _ParquetErrors(self._path, lambda: f"{self._name}{self._place}", self._arrow)


class ArrowColumns:
    """A batch's columns, each made a list when it is first read: another one may hold what Python has no
    value for, such as nanoseconds, or be large.
    """

    def __init__(self, batch: Any, name: str, before: int) -> None:
        """`before` is the number of the file's rows before the batch."""
        self.names: list[str] = batch.schema.names
        self._batch, self._name, self._before = batch, name, before
        self._made: dict[str, list[Any]] = {}

    def values(self, name: str) -> list[Any]:
        if name not in self._made:
            try:
                self._made[name] = without_nulls(self._batch.column(name).to_pylist())
            except (KeyError, ValueError, OverflowError) as error:
                raise self._unreadable(name, error) from None
        return self._made[name]

    def _unreadable(self, name: str, error: Exception) -> ConfigError:
        """Names the first row: pyarrow does not check that text is UTF-8."""
        for n in range(self._batch.num_rows if isinstance(error, (ValueError, OverflowError)) else 0):
            place = f"{self._name} row {self._before + n + 1}: {name}"
            try:
                self._batch.column(name)[n].as_py()
            except UnicodeDecodeError as found:
                return ConfigError(
                    f"{place} is not UTF-8 at byte {found.start}: {found.reason}.",
                    "write the file again from text, such as with pyarrow.array(texts, pyarrow.string())",
                )
            except (ValueError, OverflowError) as found:
                return ConfigError(f"{place} cannot be read: {message_line(found)}.", _WITHOUT)
        return ConfigError(f"{self._name}: column {name} cannot be read: {message_line(error)}.", _WITHOUT)


_WITHOUT = "write the file again without it, or with text there"


class ArrowRow(Mapping[str, Any]):
    """A row of a batch, by column."""

    def __init__(self, columns: ArrowColumns, n: int) -> None:
        self._columns, self._n = columns, n

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise KeyError(name)
        return self._columns.values(name)[self._n]

    def __contains__(self, name: object) -> bool:
        return name in self._columns.names

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns.names)

    def __len__(self) -> int:
        return len(self._columns.names)


class _ParquetErrors:
    """Turns an error of pyarrow into one line."""

    def __init__(self, path: Path, place: Callable[[], str], arrow: Any) -> None:
        self._path, self._place, self._arrow = path, place, arrow

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, (self._arrow.ArrowException, OSError)):
            what = " ".join(str(error).split())[:200].rstrip(".")
            raise ConfigError(
                f"{self._place()} is not a whole Parquet file: {what}.",
                f"copy it again; ls -l {quoted(self._path)} shows its size",
            ) from None
