"""The battery for one CUDA device: what the product claims, run by its own commands.

    python -m bench.gpu                       all parts; no part starts after nine minutes
    python -m bench.gpu --only resume,saves   some of them; the other rows of the results stay
    python -m bench.gpu --resume              the parts that have neither passed nor been impossible yet
    python -m bench.gpu --run.device cpu      the same logic in a short form, on a machine without a GPU

Needs torch 2.11 or later; no network, Ray or Slurm. On a GPU, with 12 processors or more, six parts run at
once; those that measure time or fill the memory follow one by one. A part passed, failed, or is not possible
here, with the reason; parts that did not start are named with their command and count as not run. A part that
does not end within its limit is ended and named. Results, by the device's name: bench/results/gpu-NAME.json
and gpu-NAME.md, written after each part, so that an interrupted battery keeps its rows; what each part's
commands printed is in logs/NAME-PART.log beside them. Exit code 0 if no part failed and all started, else 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from bench import processes, tables
from bench.gpu_parts import PARTS, Part
from bench.gpu_runs import Bench, Failed, NotPossible
from fsdp.rundir.history import write_atomically

PASSED, FAILED, IMPOSSIBLE, NOT_RUN = "passed", "failed", "not possible here", "not run"
OVER = (PASSED, IMPOSSIBLE)
"""Results that --resume keeps."""
LAST_BEGIN, LAST_END = 9, 10
"""No part starts, and none runs on, after so many minutes."""
AT_ONCE, CORES_EACH = 6, 2
"""Parts that share a GPU, and the processors that each needs: several compile at times."""


@dataclass(frozen=True)
class Row:
    """How a part ended. `about` has its figures, or the reason."""

    part: str
    claim: str
    result: str
    about: str
    seconds: float


def device_name(device: str) -> str:
    """The name of the results: the GPU's, or the processor's."""
    if device == "cuda":
        import torch

        return torch.cuda.get_device_name(0)
    return f"cpu {platform.machine()}"


class Processes:
    """Those of the parts that run now."""

    def __init__(self) -> None:
        self._lock, self._ended = threading.Lock(), False
        self._running = set[subprocess.Popen[str]]()

    @contextlib.contextmanager
    def started(self, command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[str]]:
        """It and what it starts are killed on leaving."""
        with self._lock, log.open("w", encoding="utf-8") as errors:
            if self._ended:
                raise KeyboardInterrupt
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
            )
            self._running.add(process)
        with process:
            try:
                yield process
            finally:
                kill_tree(process)
                with self._lock:
                    self._running.discard(process)

    def end(self) -> None:
        """Kills them; none starts afterwards."""
        with self._lock:
            self._ended, running = True, list(self._running)
        for process in running:
            kill_tree(process)


def run_part(
    part: Part,
    device: str,
    folder: Path,
    results: Path,
    left_s: float = math.inf,
    running: Processes | None = None,
) -> Row:
    """Runs the part in a process of its own; it and what it started are killed at its limit, or when the
    battery's time is over.
    """
    began = time.monotonic()
    command = [sys.executable, "-m", "bench.gpu", "--run.device", device, "--results", str(results)]
    log = results / "logs" / f"{device}-{part.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with (running or Processes()).started([*command, "--inside", f"{part.name}:{folder}"], log) as process:
        try:
            text, _ = process.communicate(timeout=min(part.limit_s, left_s))
            result, about = json.loads(text.strip().splitlines()[-1])
        except subprocess.TimeoutExpired:
            result, about = FAILED, f"ended after {part.limit_s:.0f} s, its limit; {_last_line(log)}"
            if left_s < part.limit_s:
                result, about = NOT_RUN, f"{LAST_END} minutes were over while it ran: {_alone(part)}"
        except (IndexError, ValueError):
            result, about = FAILED, f"ended with exit code {process.returncode} without a result"
    return Row(part.name, part.claim, result, about, round(time.monotonic() - began, 1))


def _alone(part: Part) -> str:
    return f"python -m bench.gpu --only {part.name}"


def kill_tree(process: subprocess.Popen[str]) -> None:
    """SIGKILL to a process that still runs and to its descendants, which have sessions of their own. Waits
    for the end of each.
    """
    if process.poll() is not None:
        return
    killed = []
    for pid in (process.pid, *processes.descendants(process.pid)):
        with contextlib.suppress(ProcessLookupError):
            killed.append(os.pidfd_open(pid))
            os.kill(pid, signal.SIGKILL)
    process.wait()
    for descriptor in killed:
        select.select([descriptor], [], [])  # readable once the process has ended
        os.close(descriptor)


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return f"its log ends with: {lines[-1][-200:]}" if lines else "its log is empty"


def inside(name: str, device: str, folder: Path, results: Path = tables.RESULTS) -> tuple[str, str]:
    """The part itself, and its result as two words of JSON."""
    part = next(part for part in PARTS if part.name == name)
    try:
        figures = part.run(Bench(device, folder, results))
    except NotPossible as why:
        return IMPOSSIBLE, str(why)
    except Failed as why:
        return FAILED, str(why)
    except Exception as error:  # a part that cannot read what a run left has failed
        return FAILED, f"{type(error).__name__}: {error}"
    return PASSED, "; ".join(f"{key} {_short(value)}" for key, value in figures.items())


def _short(value: object) -> str:
    return f"{value:.2g}" if isinstance(value, float) else str(value)


def run_all(
    parts: Sequence[Part],
    device: str,
    results: Path,
    keep: Callable[[Row], object] = lambda row: None,
    at_once: int = 1,
) -> list[Row]:
    """Runs the parts, `at_once` of those that may share the device, then the others in turn; `keep` receives
    each row as soon as it is known.
    """
    battery = _Battery(device, results, keep)
    shared = [part for part in parts if not part.alone]
    for some, threads in ((shared, at_once), ([part for part in parts if part.alone], 1)):
        with ThreadPoolExecutor(threads) as pool:
            ran = [pool.submit(battery.run, part) for part in some]
            try:
                for one in as_completed(ran):
                    one.result()
            except BaseException:
                battery.end()
                pool.shutdown(cancel_futures=True)
                raise
    return battery.rows


class _Battery:
    """The rows of the parts that have ended, and the time that is left for others."""

    def __init__(self, device: str, results: Path, keep: Callable[[Row], object]) -> None:
        self._device, self._results = device, results
        self._keep, self._began = keep, time.monotonic()
        self._lock, self._processes, self._ended = threading.Lock(), Processes(), False
        self.rows = list[Row]()

    def run(self, part: Part) -> None:
        if self._ended:
            return
        try:
            self._add(self._row(part))
        except BaseException:
            self.end()  # before this thread takes another part
            raise

    def _row(self, part: Part) -> Row:
        took = time.monotonic() - self._began
        if took > 60 * LAST_BEGIN:
            about = f"{LAST_BEGIN} minutes were over: {_alone(part)}"
            return Row(part.name, part.claim, NOT_RUN, about, 0.0)
        with tempfile.TemporaryDirectory(prefix="gpu-", ignore_cleanup_errors=True) as folder:
            left_s = 60 * LAST_END - took
            return run_part(part, self._device, Path(folder), self._results, left_s, self._processes)

    def _add(self, row: Row) -> None:
        with self._lock:
            if self._ended:
                return  # it was killed
            self.rows.append(row)
            print(f"{row.result:<17} {row.part:<10} {row.seconds:6.1f} s  {row.about}", flush=True)
            self._keep(row)

    def end(self) -> None:
        """Kills the parts that run; they leave no row."""
        with self._lock:
            self._ended = True
        self._processes.end()


def at_once(device: str) -> int:
    return max(1, min(AT_ONCE, len(os.sched_getaffinity(0)) // CORES_EACH)) if device == "cuda" else 1


# ---------------------------------------------------------------- results


def merged(known: Sequence[dict[str, Any]], rows: Sequence[Row], of: str) -> list[dict[str, Any]]:
    """The rows of this call in place of earlier ones; a part that did not run keeps an earlier result. `of`:
    the torch and the commit of this call's rows.
    """
    found = {row["part"]: row for row in known}
    for row in rows:
        if row.result != NOT_RUN or found.get(row.part, {"result": NOT_RUN})["result"] == NOT_RUN:
            found[row.part] = asdict(row) | {"of": of}
    order = [part.name for part in PARTS]
    return sorted(
        (row for row in found.values() if row["part"] in order), key=lambda r: order.index(r["part"])
    )


def page(rows: Sequence[dict[str, Any]], name: str, about: str) -> str:
    counts = [
        f"{sum(row['result'] == kind for row in rows)} {kind}"
        for kind in (PASSED, FAILED, IMPOSSIBLE, NOT_RUN)
    ]
    names = ("part", "claim", "result", "about", "seconds", "of")
    lines = [[" ".join(str(row.get(one, "")).replace("|", "/").split()) for one in names] for row in rows]
    text = tables.table(["part", "claim", "result", "figures, or why", "s", "of"], lines)
    return f"# The battery on {name}\n\n{about}\n\n{', '.join(counts)} of {len(PARTS)} parts.\n\n{text}\n"


def results_file(name: str, results: Path) -> Path:
    return results / f"gpu-{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}.json"


def earlier(name: str, results: Path) -> list[dict[str, Any]]:
    """The rows of this device that stand in the results."""
    path = results_file(name, results)
    return json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []


def write(rows: Sequence[Row], name: str, results: Path) -> str:
    """Writes both files; returns the page."""
    path, known = results_file(name, results), earlier(name, results)
    import torch

    about = f"torch {torch.__version__}, Python {platform.python_version()}; {tables.machine()}"
    together = merged(known, rows, f"torch {torch.__version__}, {tables.checked_out()}".rstrip(", "))
    text = page(together, name, about)
    kept = {"device": name, "about": about, "rows": together}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(kept, indent=1) + "\n")
    write_atomically(path.with_suffix(".md"), text)
    return text


def chosen(parser: argparse.ArgumentParser, only: str) -> list[Part]:
    names = [name for name in only.split(",") if name]
    known = [part.name for part in PARTS]
    for name in names:
        if name not in known:
            parser.error(
                f"--only {name}: no such part. HINT: --only {known[0]}, one or more of {', '.join(known)}"
            )
    return [part for part in PARTS if not names or part.name in names]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run.device", "--device", dest="device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", default="", help="these parts: resume,saves")
    parser.add_argument("--resume", action="store_true", help="without parts that passed or are not possible")
    parser.add_argument("--results", type=Path, default=tables.RESULTS, help="folder of the result files")
    parser.add_argument("--inside", default="", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.inside:
        name, _, folder = options.inside.partition(":")
        print(json.dumps(inside(name, options.device, Path(folder), options.results)))
        return 0
    parts = chosen(parser, options.only)
    if options.device == "cuda" and not _cuda():
        told = "bench.gpu: no CUDA device is here. HINT: python -m bench.gpu --run.device cpu"
        print(told, file=sys.stderr)
        return 2
    name = device_name(options.device)
    if options.resume:
        over = {row["part"] for row in earlier(name, options.results) if row["result"] in OVER}
        parts = [part for part in parts if part.name not in over]
    signal.signal(signal.SIGTERM, _interrupted)
    write([_not_reached(part) for part in parts], name, options.results)
    results, most = options.results.absolute(), at_once(options.device)
    rows = run_all(parts, options.device, results, lambda row: write([row], name, results), most)
    print(f"\n{write(rows, name, options.results)}")
    return int(any(row.result in (FAILED, NOT_RUN) for row in rows))


def _not_reached(part: Part) -> Row:
    """Its row until it has another one: an interrupted battery has a row of each part."""
    return Row(part.name, part.claim, NOT_RUN, f"interrupted before: {_alone(part)}", 0.0)


def _interrupted(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
