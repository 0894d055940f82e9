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
        "            (self.root / folder / file_names.MANIFEST).unlink(missing_ok=True)\n",
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
        "average_scalars(self.replicated, self.divisor)",
        "average_scalars(self.replicated, self.ranks)",
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
        "float(np.median(finite.values))",
        "float(np.mean(finite.values))",
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
        "            os.close(descriptor)\n                        staged.unlink(missing_ok=True)\n",
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
        'is_task = "SLURM_PROCID" in environ and',
        'is_task = "SLURM_STEP_NUM_TASKS" in environ and',
        ("tests/dist/test_env.py",),
    ),
    Known(
        "a new folder's own name not synced",
        LOCAL_STORE,
        "            sync_folder(one.parent)\n",
        "            pass\n",
        CRASHES,
    ),
    Known(
        "a node's disk is pruned before all nodes sealed",
        "fsdp/checkpoint/local_saver.py",
        "        self._local.seal(folder, final)\n",
        "        self._local.seal(folder, final)\n        self._prune_here({final})\n",
        ("tests/checkpoint/test_local_crashes.py",),
    ),
    Known(
        "a sealed step is saved again locally",
        "fsdp/checkpoint/local_saver.py",
        "self._refusal(job) or (",
        "self._refusal(job) and (",
        ("tests/checkpoint/test_local_tier.py",),
    ),
    Known(
        "a torn copy stays",
        "fsdp/checkpoint/copier.py",
        '            store.remove(staged, "failed")\n',
        "            pass\n",
        ("tests/checkpoint/test_local_tier.py",),
    ),
    Known(
        "a copier without peers reports nothing",
        "fsdp/checkpoint/copier.py",
        '            self._failure = CopyFailure(f"{type(error).__name__}: {error}")\n',
        "            pass\n",
        ("tests/checkpoint/test_local_tier.py",),
    ),
    Known(
        "a plan is kept though tensors changed",
        "fsdp/checkpoint/write_plan.py",
        "known.fingerprint != digest",
        "known.fingerprint == digest",
        ("tests/checkpoint/test_layout.py",),
    ),
    Known(
        "a tensor of another rank alone has no plan",
        "fsdp/checkpoint/write_plan.py",
        "    if not group.any_rank(bool(others)):",
        "    if group.any_rank(bool(others)):",
        ("tests/checkpoint/test_layout.py",),
    ),
    Known(
        "ranks on one GPU are not compared",
        "fsdp/dist/process_group.py",
        'if env.device.type == "cuda" and env.world_size > 1:',
        'if env.device.type != "cuda" and env.world_size > 1:',
        ("tests/dist/test_devices.py",),
    ),
    Known(
        "GPUs without NCCL",
        "fsdp/dist/process_group.py",
        "CUDA_BACKENDS if cuda else",
        "CUDA_BACKENDS if not cuda else",
        ("tests/dist/test_devices.py",),
    ),
    Known(
        "plain host names are lost",
        "fsdp/dist/hostlist.py",
        "return [pattern] if pattern else []",
        "return [pattern] if not pattern else []",
        ("tests/dist/test_env.py",),
    ),
    Known(
        "a released lock keeps its file open",
        "fsdp/rundir/lock.py",
        "            os.close(self._descriptor)\n",
        "            pass\n",
        ("tests/rundir/test_lock.py",),
    ),
    Known(
        "a run ends without its marker",
        "fsdp/rundir/history.py",
        "        write_atomically(marker, text)\n",
        "        pass\n",
        ("tests/rundir/test_odd_run.py",),
    ),
    Known(
        "a node's own file is not read",
        "fsdp/checkpoint/near_store.py",
        "        if file in self._near:\n            return self._local.read(",
        "        if file not in self._near:\n            return self._local.read(",
        ("tests/checkpoint/test_local_tier.py",),
    ),
    Known(
        "a write past the cache leaves O_DIRECT",
        LOCAL_STORE,
        "    finally:\n        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)\n",
        "    finally:\n        pass\n",
        ("tests/checkpoint/test_local_store.py",),
    ),
    Known(
        "a metric of any type",
        "fsdp/checkpoint/manifest.py",
        "(type(value) is int and abs(value) < 2**63)",
        "(type(value) is int or abs(value) < 2**63)",
        ("tests/checkpoint/test_broken.py",),
    ),
    Known(
        "a complex tensor's digest by numpy",
        "fsdp/checkpoint/pieces.py",
        'if tensor.device.type != "cpu" or tensor.is_complex() or not tensor.numel():',
        'if not (tensor.device.type != "cpu" or tensor.is_complex() or not tensor.numel()):',
        ("tests/checkpoint/test_torch_file.py",),
    ),
    Known(
        "decay of the checkpoint instead of the flag's",
        "fsdp/optim/optimizer.py",
        '        group["weight_decay"] = decay if group["params"][0].dim() >= 2 else 0.0\n',
        "        pass\n",
        ("tests/optim/test_sharded_adam.py",),
    ),
    Known(
        "buffers that no checkpoint holds stay empty",
        "fsdp/parallel/materialize.py",
        "len(persistent(root)) == sum(",
        "len(persistent(root)) != sum(",
        ("tests/parallel/test_materialize.py",),
    ),
    Known(
        "a piece is cut over replicas",
        "fsdp/dist/shards.py",
        "if placement.is_shard()]",
        "if not placement.is_shard()]",
        ("tests/parallel/test_nvme.py",),
    ),
    Known(
        "a linked kernel is not executable",
        "fsdp/parallel/compile_cache.py",
        "        shutil.copymode(source, aside)\n",
        "        pass\n",
        ("tests/parallel/test_compile_cache.py",),
    ),
    Known(
        "a whole parameter of one rank's loss is not averaged",
        "fsdp/parallel/whole_parameters.py",
        "enumerate(parameters) if p.grad is None]",
        "enumerate(parameters) if p.grad is not None]",
        ("tests/parallel/test_whole_parameters.py",),
    ),
    Known(
        "a 0-dim parameter without a gradient",
        "fsdp/parallel/whole_parameters.py",
        "torch.full_like(parameter, -0.0)",
        "torch.full_like(parameter, 0.0)",
        ("tests/parallel/test_whole_parameters.py",),
    ),
    Known(
        "another pickle protocol",
        "fsdp/checkpoint/torch_file.py",
        "protocol=2",
        "protocol=3",
        ("tests/checkpoint/test_torch_file.py",),
    ),
    Known(
        "a sum that waits for its peers",
        "fsdp/dist/collectives.py",
        "dist.all_reduce(self.tensor, group=self._group, async_op=True)",
        "dist.all_reduce(self.tensor, group=self._group, async_op=False)",
        ("tests/dist/test_collectives.py",),
    ),
    Known(
        "a probe that must exist to be removed",
        "fsdp/dist/preflight.py",
        "(run / token).unlink(missing_ok=True)",
        "(run / token).unlink(missing_ok=False)",
        ("tests/dist/test_preflight.py",),
    ),
    Known(
        "the shape of a device's loss",
        "fsdp/dist/stop.py",
        "return Sum(loss.view(-1))",
        "return Sum(loss.view(-2))",
        ("tests/dist/test_stop.py",),
    ),
    Known(
        "the code of 0",
        "fsdp/optim/small_states/adam.py",
        'return 127 if name == "exp_avg" else 0',
        'return 128 if name == "exp_avg" else 0',
        ("tests/optim/test_small_states.py",),
    ),
    Known(
        "a unit examined at every forward",
        "fsdp/parallel/activations.py",
        "        self._checked = True\n",
        "        self._checked = False\n",
        ("tests/parallel/test_activations.py",),
    ),
    Known(
        "operations counted without keyword arguments",
        "fsdp/parallel/activations.py",
        "count(*args, **(kwargs or {}), out_val=out)",
        "count(*args, **(kwargs and {}), out_val=out)",
        ("tests/parallel/test_activations.py",),
    ),
    Known(
        "the next part is not loaded ahead",
        "fsdp/parallel/nvme.py",
        "parts[at + 1] if at + 1 < len(parts) else ()",
        "parts[at + 1] if at + 1 > len(parts) else ()",
        ("tests/parallel/test_nvme.py",),
    ),
    Known(
        "a unit's pages stay after its forward",
        "fsdp/parallel/nvme.py",
        "        self._shelf.forget(self._own)\n",
        "        pass\n",
        ("tests/parallel/test_nvme.py",),
    ),
    Known(
        "a gradient's pages stay",
        "fsdp/parallel/nvme.py",
        "        self.forget([room])\n",
        "        pass\n",
        ("tests/parallel/test_nvme.py",),
    ),
    Known(
        "a decision that can be changed",
        "launch/policy.py",
        "@dataclass(frozen=True)\nclass Decision:",
        "@dataclass(frozen=False)\nclass Decision:",
        ("tests/launch/test_policy.py",),
    ),
    Known(
        "an allocation that restarts nothing unless it says so",
        "launch/policy.py",
        "    again: bool = True\n",
        "    again: bool = False\n",
        ("tests/launch/test_policy.py",),
    ),
    Known(
        "the exit code of a requeue",
        "launch/policy.py",
        "return Decision(Act.REQUEUE, 0, crashed)",
        "return Decision(Act.REQUEUE, 1, crashed)",
        ("tests/launch/test_policy.py",),
    ),
    Known(
        "an error at an equal step is another one",
        "launch/policy.py",
        "end.step <= one.step if",
        "end.step < one.step if",
        ("tests/launch/test_policy.py",),
    ),
]
