"""Tables of plans beside real runs, a row each model and variant; rows of an earlier call stay."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.plan import Row
from fsdp.rundir.atomic_write import write_atomically

HEADS = ("model", "variant", "tensor bytes, MiB", "planned", "error", "process, MiB", "planned", "error")


@dataclass(frozen=True)
class KeptTable:
    file: Path
    models: Sequence[str]
    """In the order of the rows."""
    title: Sequence[str]

    def write(self, rows: Iterable[tuple[str, str, Row]]) -> int:
        """Writes each row as it comes, in the place of an earlier one; prints the table."""
        lines = {tuple(_cells(line)[1:3]): line for line in self._kept()}
        text = ""
        for name, variant, row in rows:
            lines[name, variant] = line_of(name, variant, row)
            print(lines[name, variant], file=sys.stderr, flush=True)
            ordered = sorted(lines.values(), key=lambda line: list(self.models).index(_cells(line)[1]))
            text = "\n".join([*self.title, "", *table(ordered)])
            write_atomically(self.file, text + "\n")
        print(text)
        return 0

    def _kept(self) -> list[str]:
        text = self.file.read_text(encoding="utf-8").splitlines() if self.file.exists() else []
        return [line for line in text if len(_cells(line)) > 2 and _cells(line)[1] in self.models]


def line_of(name: str, variant: str, row: Row) -> str:
    real = row.measured
    tensors = f"{real.tensors / 2**20:.2f} | {row.predicted / 2**20:.2f} | {row.error:+.3%}"
    process = f"{real.process / 2**20:.0f} | {row.predicted_process / 2**20:.0f} | {row.process_error:+.1%}"
    return f"| {name} | {variant} | {tensors} | {process} |"


def table(lines: Sequence[str]) -> list[str]:
    errors = [[abs(float(cells[at].strip("%"))) for at in (5, 8)] for cells in map(_cells, lines)]
    tensors, process = (list(one) for one in zip(*errors, strict=True))
    heads = [f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|"]
    summary = (
        f"{len(lines)} runs. Tensor bytes: median error {statistics.median(tensors):.3f}%, worst "
        f"{max(tensors):.3f}%. Process: median {statistics.median(process):.1f}%, worst {max(process):.1f}%."
    )
    return [*heads, *lines, "", summary]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")]
