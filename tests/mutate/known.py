"""Mutations that once survived the tests, each with the tests that find it now.

A text that is no longer in its file is an error: the line has changed, and its entry changes with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutate.operators import Mutation


@dataclass(frozen=True)
class Known:
    name: str
    file: str
    before: str
    after: str
    tests: Sequence[str]

    def mutation(self, root: Path) -> Mutation:
        text = (root / self.file).read_text(encoding="utf-8")
        if text.count(self.before) != 1:
            raise SystemExit(
                f"known mutation {self.name!r}: {self.file} has {text.count(self.before)} of its text."
            )
        at = text.index(self.before)
        start = len(text[:at].encode())
        return Mutation(
            self.file,
            text[:at].count("\n") + 1,
            self.name,
            start,
            start + len(self.before.encode()),
            self.before,
            self.after,
        )


LOCAL_STORE = "fsdp/checkpoint/local_store.py"
CRASHES = ("tests/checkpoint/test_crashes.py",)

KNOWN = [
    Known("data file not synced", LOCAL_STORE, "            os.fsync(descriptor)\n", "", CRASHES),
    Known("staged folder not synced", LOCAL_STORE, "        sync_folder(self.root / staged)\n", "", CRASHES),
    Known(
        "rename not synced",
        LOCAL_STORE,
        "        rename(self.root / staged, self.root / final)\n        sync_folder(self.root)\n",
        "        rename(self.root / staged, self.root / final)\n",
        CRASHES,
    ),
    Known(
        "manifest removed last",
        LOCAL_STORE,
        "            (self.root / folder / file_names.MANIFEST).unlink()\n",
        "            pass\n",
        (*CRASHES, "tests/checkpoint/test_retention.py"),
    ),
    Known(
        "removed manifest not synced",
        LOCAL_STORE,
        "            sync_folder(self.root / folder)  # or",
        "            pass  # or",
        CRASHES,
    ),
    Known(
        "lock not compared before the seal",
        "fsdp/checkpoint/saver.py",
        "has taken over.\n        if (why := self._lock_lost()) is not None:",
        "has taken over.\n        if (why := None) is not None:",
        ("tests/checkpoint/test_retention.py",),
    ),
    Known(
        "manifest's own checksum not compared",
        "fsdp/checkpoint/manifest.py",
        " or crc32(text) != expected:",
        ":",
        ("tests/checkpoint/test_broken.py",),
    ),
    Known(
        "a path may leave the checkpoint",
        "fsdp/checkpoint/metadata.py",
        'any(part in ("", ".", "..") for part in path.split("/"))',
        "False",
        ("tests/security/test_files.py", "tests/checkpoint/test_broken.py"),
    ),
    Known(
        "a hole in .metadata is loaded",
        "fsdp/checkpoint/load.py",
        "if sum(math.prod(task.take_sizes) for task in tasks) != math.prod(piece.sizes):",
        "if False:",
        ("tests/checkpoint/test_broken.py",),
    ),
    Known(
        "skipped updates are never counted anew",
        "fsdp/optim/nonfinite.py",
        "    def _good(self) -> None:\n        self._skipped = 0\n",
        "    def _good(self) -> None:\n",
        ("tests/optim/test_nonfinite.py", "tests/optim/test_nonfinite_runs.py"),
    ),
    Known(
        "fp16's scale never grows",
        "fsdp/optim/loss_scale.py",
        "            self._state.loss_scale *= 2\n",
        "            pass\n",
        ("tests/optim/test_loss_scale.py",),
    ),
    Known(
        "good steps are kept after an overflow",
        "fsdp/optim/loss_scale.py",
        "        self._state.loss_scale /= 2\n        self._state.good_steps = 0\n",
        "        self._state.loss_scale /= 2\n",
        ("tests/optim/test_loss_scale.py",),
    ),
    Known(
        "0-dim parameters averaged by ranks",
        "fsdp/parallel/shard.py",
        "parameter.grad /= self.divisor",
        "parameter.grad /= self.ranks",
        ("tests/parallel/test_shard.py", "tests/parallel/test_comm_hooks.py"),
    ),
    Known(
        "a zombie holds the lock",
        "fsdp/rundir/lock.py",
        "return seen.alive and seen.start_ticks == holder.born",
        "return seen.start_ticks == holder.born",
        ("tests/rundir/test_lock.py", "tests/rundir/test_lock_hidden.py"),
    ),
    Known(
        "metrics are kept one step too far",
        "fsdp/rundir/history.py",
        'lambda record: record["step"] <= step)',
        'lambda record: record["step"] <= step + 1)',
        ("tests/rundir/test_full_disk.py", "tests/rundir/test_line_files.py"),
    ),
    Known(
        "the rate counts samples",
        "fsdp/record/recorder.py",
        "rate = metrics.tokens or metrics.samples",
        "rate = metrics.samples",
        ("tests/record/test_recorder.py",),
    ),
    Known(
        "the report's median is a mean",
        "fsdp/report/series.py",
        "float(np.median(self.finite.values))",
        "float(np.mean(self.finite.values))",
        ("tests/report/test_report.py",),
    ),
    Known(
        "half of the nodes excluded",
        "fsdp/doctor/findings.py",
        "few = len(out) * 2 <= len(reports.hosts)",
        "few = len(out) * 2 < len(reports.hosts)",
        ("tests/doctor/test_findings.py",),
    ),
    Known(
        "the local rank selects among one visible GPU",
        "fsdp/dist/env.py",
        'torch.device("cuda", local_rank if visible > 1 else 0)',
        'torch.device("cuda", local_rank)',
        ("tests/dist",),
    ),
    Known(
        "more ranks than GPUs pass",
        "fsdp/dist/env.py",
        "if visible > 1 and local_rank >= visible:",
        "if False:",
        ("tests/dist",),
    ),
    Known(
        "the head's own address preferred",
        "launch/rendezvous.py",
        "return (others or [seen[self.meeting.nodes[0]]])[0]",
        "return seen[self.meeting.nodes[0]]",
        ("tests/slurm/test_rendezvous.py",),
    ),
    Known(
        "the rate of Muon's original rule",
        "fsdp/optim/muon/optimizer.py",
        "rows / columns",
        "rows * columns",
        ("tests/optim/test_muon.py",),
    ),
    Known(
        "converted moments are not written",
        "fsdp/optim/small_states/adam.py",
        "_write(name, written, tables, first, rows, moment, None)",
        "pass",
        ("tests/optim/test_small_states.py",),
    ),
    Known(
        "a shard's scales are read at rows of the whole",
        "fsdp/optim/small_states/adam.py",
        "        if isinstance(scale, DTensor) or scale.shape[0] == _local(state[name]).shape[0]\n",
        "        if False\n",
        ("tests/optim/test_small_states.py",),
    ),
    Known(
        "a refused start leaves a file open",
        "fsdp/rundir/lock.py",
        "            os.close(descriptor)\n            staged.unlink(missing_ok=True)\n",
        "            staged.unlink(missing_ok=True)\n",
        ("tests/rundir/test_lock.py",),
    ),
    Known(
        "a repeated link is a refusal",
        "fsdp/rundir/lock.py",
        "if not _is_link_of(staged, file):",
        "if True:",
        ("tests/rundir/test_repeated_requests.py",),
    ),
    Known(
        "a repeated rename is an error",
        "fsdp/rundir/atomic_write.py",
        "        if not os.path.samestat(before, target.lstat()):\n            raise\n",
        "        raise\n",
        ("tests/rundir/test_repeated_requests.py",),
    ),
    Known(
        "a checkpoint with a late manifest is unfinished",
        "fsdp/checkpoint/object_store.py",
        "if _is_unsealed(folder, files) and",
        "if False and",
        ("tests/checkpoint/test_late_listing.py",),
    ),
    Known(
        "a head's message names any folder",
        "fsdp/watch/messages.py",
        "FOLDER.fullmatch(keep) is not None",
        "True",
        ("tests/watch/test_monitor_links.py",),
    ),
    Known(
        "six stops without a step",
        "launch/policy.py",
        "STOPS_WITHOUT_A_STEP = 5",
        "STOPS_WITHOUT_A_STEP = 6",
        ("tests/launch/test_policy.py",),
    ),
    Known(
        "four missed meetings",
        "launch/policy.py",
        "past.unmet >= MEETINGS_MISSED",
        "past.unmet > MEETINGS_MISSED",
        ("tests/launch/test_policy.py",),
    ),
    Known(
        "a batch shell of one task is a rank",
        "fsdp/dist/env.py",
        '> 1 and "SLURM_PROCID" in environ',
        '> 1 or "SLURM_PROCID" in environ',
        ("tests/dist/test_env.py",),
    ),
]
