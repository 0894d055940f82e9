"""Is training your model sharded the same as training it plainly? Starts the ranks itself and prints a table and a verdict.

    python -m fsdp.parity
    python -m fsdp.parity --model.name my_package.models:build --data.name my_package.data:build --parity.ranks 4

takes train.py's flags, and --parity.ranks N (2), --parity.dtype fp64|fp32|bf16|fp16 (fp64), --parity.steps N (20). Each mesh
trains from the same initial weights on the same samples as an unsharded loop in one process that is written out below; compared
are all parameters at the end. In fp64 the difference is the worst parameter's, ‖a - b‖ / ‖b‖, and rounding cannot hide a wrong
reduction; in a lower precision it is the whole model's. Exit code 0 where every mesh is within its bound, else 1; 2 for a flag.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import multiprocessing
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp import config as configuration
from fsdp.config import Config
from fsdp.errors import ConfigError, ShardrunError, TrainingError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fsdp.job import Job

BOUNDS = {"fp64": 1e-10, "fp32": 1e-4, "bf16": 2e-2, "fp16": 2e-2}
PRECISION: Mapping[str, Mapping[str, Any]] = {
    "fp64": {"precision.master": "fp64", "precision.param": "fp64", "precision.reduce": "auto", "precision.output": "auto"},
    **{d: {"precision.master": "fp32", "precision.param": d, "precision.reduce": "auto"} for d in ("fp32", "bf16", "fp16")},
}
DEFAULTS = {"ranks": "2", "dtype": "fp64", "steps": "20"}


@dataclass(frozen=True)
class Row:
    """One mesh to try."""

    strategy: str
    replicate: int
    shard: int
    reshard: str
    micro_batches: int

    def overrides(self, share: int) -> dict[str, Any]:
        return {
            "mesh.strategy": self.strategy, "mesh.replicate": self.replicate, "mesh.shard": self.shard,
            "mesh.reshard_after_forward": self.reshard, "train.micro_batch": -(-share // self.micro_batches),
        }  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """What to compare: the flags of the run, and how many ranks, in which dtype, for how many steps."""

    words: list[str]
    ranks: int
    dtype: str
    steps: int

    def config(self, row: Row | None, folder: str) -> Config:
        fixed: dict[str, Any] = {
            "backend": "torchrun", "run.dir": folder, "train.steps": self.steps, "train.epochs": 0, "train.stop_after": 0,
            "train.eval_every_steps": 0, "train.eval_samples": 1, "checkpoint.dir": "", "checkpoint.every_steps": 10**9,
            "checkpoint.every_minutes": 0.0, "checkpoint.export": True, "checkpoint.export_format": "torch",
            "checkpoint.resume": "auto", "checkpoint.keep_best": 0, "stop.file": "", "stop.deadline_s": 0.0,
            **PRECISION[self.dtype],
        }  # fmt: skip
        given = configuration.load(self.words, {**fixed, "mesh.strategy": "auto", "mesh.replicate": 0, "mesh.shard": 0})
        if row is None:
            return given
        share = -(-given.train.global_batch // self.ranks)
        return configuration.load(self.words, {**fixed, **row.overrides(share)})


def rows(ranks: int) -> list[Row]:
    """What this many ranks can form; the last have several micro-batches."""
    found = [Row("fsdp", 1, ranks, "true", 1), Row("fsdp", 1, ranks, "false", 2), Row("fsdp", 1, ranks, "step", 2)]
    if ranks > 1:
        found += [Row("ddp", ranks, 1, "true", 1), Row("ddp", ranks, 1, "true", 2)]
    if ranks % 2 == 0:
        found += [Row("hsdp", 2, ranks // 2, "true", 1), Row("hsdp", 2, ranks // 2, "true", 2)]
    if ranks % 2 == 0 and ranks > 2:
        found.append(Row("fsdp", 1, ranks, "2", 1))
    return found


def main(argv: Sequence[str]) -> int:
    if "--help" in argv or "-h" in argv:
        print(__doc__)
        return 0
    try:
        asked = _ask(argv)
        differences = compare(asked)
    except ShardrunError as error:
        print(f"fsdp.parity: {error}", file=sys.stderr)
        return error.exit_code
    return _show(asked, differences)


def _ask(argv: Sequence[str]) -> Asked:
    own, words = dict(DEFAULTS), []
    for name, value in configuration.pair_flags(argv):
        section, _, key = name.partition(".")
        if section != "parity":
            words += [f"--{name}={value}"]
        elif key not in own:
            raise ConfigError(f"--{name} is not a flag.", "--parity.ranks, --parity.dtype or --parity.steps")
        else:
            own[key] = value
    for key in ("ranks", "steps"):
        if not own[key].isdigit() or int(own[key]) < 1:
            raise ConfigError(f"--parity.{key} {own[key]} is not a whole number from 1.", f"--parity.{key} {DEFAULTS[key]}")
    if own["dtype"] not in BOUNDS:
        raise ConfigError(f"--parity.dtype {own['dtype']} is not one of {', '.join(BOUNDS)}.", "--parity.dtype fp64")
    asked = Asked(words, int(own["ranks"]), own["dtype"], int(own["steps"]))
    asked.config(None, "")  # a wrong flag is said before torch is loaded
    return asked


def _show(asked: Asked, differences: Mapping[Row, float]) -> int:
    bound = BOUNDS[asked.dtype]
    print(
        f"{'mesh':<10} {'reshard':<8} {'micro-batches':<14} {'dtype':<6} {'max relative difference':<24} {'bound':<7} verdict"
    )
    for row, found in differences.items():
        mesh, verdict = f"{row.strategy} {row.replicate}×{row.shard}", "same" if found <= bound else "DIFFERS"
        reshard = "-" if row.strategy == "ddp" else row.reshard
        print(f"{mesh:<10} {reshard:<8} {row.micro_batches:<14} {asked.dtype:<6} {found:<24.3e} {bound:<7.0e} {verdict}")
    wrong = sum(not found <= bound for found in differences.values())
    said = "every mesh trains as one process does" if not wrong else f"{wrong} of {len(differences)} meshes differ"
    verdict = "PARITY FAILS" if wrong else "parity holds"
    print(f"{verdict}: {said}, {asked.steps} steps on {asked.ranks} ranks in {asked.dtype}")
    return 1 if wrong else 0


# ---------------------------------------------------------------- the two sides


def compare(asked: Asked) -> dict[Row, float]:
    """Each mesh's difference from the plain loop. The ranks train while the plain loop does."""
    import torch

    from fsdp.job import prepare

    on_cuda = torch.cuda.is_available() and torch.cuda.device_count() >= asked.ranks
    device = torch.device("cuda", 0) if on_cuda else torch.device("cpu")
    # More threads than free cores wait for one another in each product: minutes instead of seconds.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // (asked.ranks + 1)))
    tried = rows(asked.ranks)
    for row in tried:
        job = prepare(asked.config(row, ""), world_size=asked.ranks, num_nodes=1, device=device)
    _refuse_chance(job)
    with tempfile.TemporaryDirectory(prefix="parity-") as folder, _ranks(asked, tried, folder, on_cuda) as finish:
        plain = train_plainly(asked, job, device)
        finish()
        whole = [
            torch.load(Path(folder, str(at), "full_model", "full-model.pt"), weights_only=True) for at in range(len(tried))
        ]
        return {row: difference(found, plain, each=asked.dtype == "fp64") for row, found in zip(tried, whole, strict=True)}


def difference(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], *, each: bool) -> float:
    """‖a - b‖ / ‖b‖ of the worst parameter, or of all of them together; a number that is none is infinitely far."""
    squares = [
        (float((ours[n].double() - b.double()).square().sum()), float(b.double().square().sum())) for n, b in theirs.items()
    ]
    pairs = squares if each else [(sum(apart for apart, _ in squares), sum(size for _, size in squares))]
    found = [math.sqrt(apart / max(size, 1e-60)) if math.isfinite(apart) else math.inf for apart, size in pairs]
    return max(found, default=0.0)


def _refuse_chance(job: Job) -> None:
    """Where chance or the company of other rows decides, no two splits of a batch give the same numbers."""
    from torch import nn
    from torch.nn.modules.batchnorm import _BatchNorm
    from torch.nn.modules.dropout import _DropoutNd

    from fsdp.job import meta_model

    for name, module in meta_model(job.spec).named_modules():
        if (isinstance(module, _DropoutNd) and module.p) or (isinstance(module, nn.MultiheadAttention) and module.dropout):
            raise ConfigError(f"{name} drops values at random: runs cannot be compared.", "--model.args.dropout 0.0")
        if isinstance(module, _BatchNorm):
            raise ConfigError(
                f"{name} normalises over the rows that a rank has: runs cannot be compared.", "a model without BatchNorm"
            )


def train_plainly(asked: Asked, job: Job, device: Any) -> dict[str, Tensor]:
    """One process, the whole model, torch's own optimizer; the global batch cut in pieces only to fit in memory."""
    import torch

    from fsdp.checkpoint.full import open_full_state
    from fsdp.models import build_real
    from fsdp.optim import lr_at

    config = asked.config(None, "")
    model = build_real(job.spec, config.run.seed, device)
    if config.model.weights:
        model.load_state_dict(dict(open_full_state(config.model.weights)))
    kept, computed = (torch.float64,) * 2 if asked.dtype == "fp64" else (torch.float32, _lower(asked.dtype))
    model._apply(lambda tensor: tensor.to(kept) if tensor.is_floating_point() else tensor)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = _optimizer(config, trained)
    for step in range(asked.steps):
        indices = job.cursor.indices(step)
        whole = {name: value.to(device) for name, value in job.data.train.batch(indices).items()}
        optimizer.zero_grad()
        weight = max(1, int((whole["targets"] != -100).sum())) if _by_token(whole) else len(indices)
        for at in range(0, len(indices), job.batch.micro_batch):
            piece = {name: value[at : at + job.batch.micro_batch] for name, value in whole.items()}
            (_loss_sum(model, piece, computed) / weight).backward()
        if config.train.clip_grad_norm:
            torch.nn.utils.clip_grad_norm_(trained, config.train.clip_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = lr_at(config.optim, step + 1, asked.steps)
        optimizer.step()
    return {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}


def _by_token(batch: Mapping[str, Tensor]) -> bool:
    return "targets" in batch and batch["targets"].dim() > 1


def _lower(dtype: str) -> Any:
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]


def _loss_sum(model: nn.Module, batch: Mapping[str, Tensor], dtype: Any) -> Tensor:
    """Parameters are cast for the computation, their gradients are in the dtype they are kept in."""
    import torch
    import torch.nn.functional as F

    from fsdp.loss import loss_or_logits

    wanted = inspect.signature(model.forward).parameters
    more = any(p.kind is p.VAR_KEYWORD for p in wanted.values())
    cast = {n: v.to(dtype) if v.is_floating_point() else v for n, v in batch.items()}
    extra = {n: v for n, v in cast.items() if n != "inputs" and (n in wanted or (more and n != "targets"))}
    lower = {n: p.to(dtype) if p.dim() else p for n, p in model.named_parameters()}
    loss, logits = loss_or_logits(torch.func.functional_call(model, lower, (cast["inputs"],), extra))
    if loss is not None:
        return loss * len(batch["inputs"])
    assert logits is not None
    flat = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(flat.flatten(0, -2), batch["targets"].flatten(), ignore_index=-100, reduction="sum")


def _optimizer(config: Config, trained: list[Any]) -> Any:
    import torch

    section = config.optim
    decay = section.weight_decay if section.name == "adamw" else 0.0
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    if section.name == "sgd":
        return torch.optim.SGD(groups, lr=section.lr, momentum=section.momentum)
    kind = torch.optim.AdamW if section.name == "adamw" else torch.optim.Adam
    return kind(groups, lr=section.lr, betas=(section.beta1, section.beta2), eps=section.eps)


# ---------------------------------------------------------------- the ranks


@contextlib.contextmanager
def _ranks(asked: Asked, tried: list[Row], folder: str, on_cuda: bool) -> Iterator[Any]:
    """Processes that form one world; what is yielded waits for their end, and raises what the first of them met."""
    context = multiprocessing.get_context("spawn")
    members = [
        context.Process(target=_rank, args=(rank, asked, tried, folder, on_cuda), daemon=True) for rank in range(asked.ranks)
    ]
    for member in members:
        member.start()

    def finish() -> None:
        left = {member.sentinel: rank for rank, member in enumerate(members)}
        while left:
            for sentinel in wait(list(left)):
                rank = left.pop(sentinel)  # type: ignore[arg-type]
                members[rank].join()
                if members[rank].exitcode:
                    raise TrainingError(f"rank {rank} failed: {_last_words(Path(folder, f'rank-{rank}.log'))}.")

    try:
        yield finish
    finally:
        for member in members:
            if member.is_alive():
                member.kill()
            member.join()


def _last_words(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()] if log.exists() else []
    return lines[-1].strip().rstrip(".") if lines else "it said nothing"


def _rank(rank: int, asked: Asked, tried: list[Row], folder: str, on_cuda: bool) -> None:
    """One rank: the whole of fsdp.loop.train, mesh after mesh."""
    log = os.open(Path(folder, f"rank-{rank}.log"), os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    import torch
    import torch.distributed as dist

    from fsdp.env import DistEnv
    from fsdp.loop import train

    if not on_cuda:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // (asked.ranks + 1)))
    env = DistEnv(
        rank=rank, world_size=asked.ranks, local_rank=rank, local_world_size=asked.ranks, node_rank=0, num_nodes=1,
        device=torch.device("cuda", rank) if on_cuda else torch.device("cpu"), launcher="fsdp.parity",
    )  # fmt: skip
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_cuda else "gloo", store=dist.FileStore(str(Path(folder, "store")), asked.ranks),
        rank=rank, world_size=asked.ranks, timeout=timedelta(seconds=300),
    )  # fmt: skip
    try:
        for at, row in enumerate(tried):
            train(asked.config(row, str(Path(folder, str(at)))), env)
            shutil.rmtree(Path(folder, str(at), "checkpoints"), ignore_errors=True)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
