"""Commands that check the claims of FSDP tutorials listed in docs/claims.md.

    python -m bench.claims                 all of them, a line each
    python -m bench.claims half_storage    one, with the details

Claims about time or memory at a size are measured by bench.knobs instead. No GPU and no network is needed.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

RANKS = 2


@dataclass(frozen=True)
class Seen:
    """Whether the claim holds here, and what happened."""

    holds: bool
    what: str


@dataclass(frozen=True)
class Claim:
    says: str
    try_it: Callable[[], Seen]
    ranks: int = 1


CLAIMS: dict[str, Claim] = {}


def claim(says: str, ranks: int = 1) -> Callable[[Callable[[], Seen]], Callable[[], Seen]]:
    """Registers a function under its own name. With ranks, every rank runs it and rank 0's result counts."""

    def register(function: Callable[[], Seen]) -> Callable[[], Seen]:
        CLAIMS[function.__name__] = Claim(says, function, ranks)
        return function

    return register


def error_of(act: Callable[[], Any]) -> str:
    """The exception in one line; empty without one."""
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:140]}"
    return ""


# ---------------------------------------------------------------- calls that are printed


@claim("OffloadPolicy(offload_type=...) chooses where to offload")
def offload_type() -> Seen:
    from torch.distributed.fsdp import OffloadPolicy

    make: Any = OffloadPolicy
    said = error_of(lambda: make(offload_type="cpu"))
    return Seen(not said, said or "it was taken")


@claim("fully_shard(model, mesh_dim=...) names the axis to shard over")
def mesh_dim() -> Seen:
    import torch
    from torch.distributed.fsdp import fully_shard

    call: Any = fully_shard
    said = error_of(lambda: call(torch.nn.Linear(2, 2), mesh_dim="dp"))
    return Seen(not said, said or "it was taken")


@claim("FileSystemWriter(path).save(...) and FileSystemReader(path).load(...) write and read a checkpoint")
def writer_save() -> Seen:
    from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

    there = [hasattr(FileSystemWriter, "save"), hasattr(FileSystemReader, "load")]
    return Seen(
        all(there),
        f"has save: {there[0]}, has load: {there[1]}; dcp.save and dcp.load take them as arguments",
    )


@claim("model.to_empty(device=...); model.reset_parameters() fills a model that was built on meta")
def reset_parameters() -> Seen:
    from torch import nn

    from fsdp.base.torchvision_import import import_torchvision

    import_torchvision()
    from torchvision.models import VisionTransformer

    kinds: list[type[nn.Module]] = [
        VisionTransformer,
        nn.Transformer,
        nn.MultiheadAttention,
        nn.TransformerEncoderLayer,
    ]
    without = [kind.__name__ for kind in kinds if not hasattr(kind, "reset_parameters")]
    return Seen(not without, f"no reset_parameters: {', '.join(without)}")


@claim("CPUOffloadPolicy() can be tried on a machine without an accelerator")
def offload_on_cpu() -> Seen:
    import torch
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    with alone():
        said = error_of(lambda: fully_shard(torch.nn.Linear(4, 4), offload_policy=CPUOffloadPolicy()))
        unpinned = error_of(
            lambda: fully_shard(torch.nn.Linear(4, 4), offload_policy=CPUOffloadPolicy(pin_memory=False))
        )
    return Seen(
        not said, f"{said or 'it worked'}; with pin_memory=False: {unpinned or 'taken, and moves nothing'}"
    )


@claim("torch.profiler's export_memory_timeline(….html) is the way to see memory")
def memory_timeline() -> Seen:
    import torch

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        kinds = {"record_shapes": True, "profile_memory": True, "with_stack": True}
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, **kinds) as profile:  # type: ignore[arg-type]
            torch.ones(8, 8) @ torch.ones(8, 8)
        said = error_of(
            lambda: profile.export_memory_timeline(str(Path(folder, "memory.html")), device="cpu")
        )
    old = [str(one.message) for one in heard if "memory_timeline" in str(one.message)]
    return Seen(
        not (old or said), "; ".join([*(line.split(". ")[0] for line in old[:1]), *([said] if said else [])])
    )


# ---------------------------------------------------------------- mixed precision


@claim("MixedPrecisionPolicy(param_dtype=torch.float16) stores parameters in half precision")
def half_storage() -> Seen:
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    with alone():
        model = torch.nn.Linear(64, 64)
        sharded: Any = fully_shard(
            model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16)
        )
        model(torch.ones(1, 64)).float().sum().backward()
        sharded.reshard()
        weight: Any = model.weight
        kept, grad = weight.to_local().dtype, weight.grad.to_local().dtype
    return Seen(
        kept == torch.float16,
        f"between steps the shard is {kept}, its gradient {grad}: only what is gathered is half",
    )


@claim("fp16 needs no more than the policy: stability is maintained")
def half_gradients() -> Seen:
    """A gradient of 1e-8 with a loss scale and without: fp32 and bf16 can hold it, fp16 cannot."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    def gradient(dtype: Any, scale: float) -> float:
        model = torch.nn.Linear(4, 1, bias=False)
        fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype))
        (model(torch.full((1, 4), 1e-4)).sum() * 1e-4 * scale).backward()
        weight: Any = model.weight
        return float(weight.grad.to_local().abs().max()) / scale

    with alone():
        bare, scaled = gradient(torch.float16, 1.0), gradient(torch.float16, 1024.0)
        other = gradient(torch.bfloat16, 1.0)
    return Seen(
        bare > 0,
        f"a gradient of 1e-8 arrives as {bare:.1g} in fp16, {scaled:.1e} with a loss scale, {other:.1e} in "
        f"bf16",
    )


@claim("with mixed precision the peak memory of activations is halved")
def half_activations() -> Seen:
    """On the model of the tutorial that says so: the ViT of Ray's, in its own precision."""
    import torch

    with alone():
        full, half = (_saved_by_a_vit(dtype, batch=4) for dtype in (None, torch.float16))
    return Seen(
        0.48 <= half / full <= 0.55,
        f"of the ViT, {half / full:.1%} of the bytes that forward keeps for backward: {half:,} of {full:,} "
        "for 4 images",
    )


def _saved_by_a_vit(dtype: Any, batch: int) -> int:
    """Bytes that the forward of Ray's ViT and its loss keep for backward, without the weights."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import DTensor

    torch.manual_seed(0)
    model = _ray_vit()
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    for block in model.encoder.layers:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    kept: dict[int, Any] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        gathered = (p for p in model.parameters() if not isinstance(p, DTensor))
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in {p.untyped_storage().data_ptr() for p in gathered}:
            kept[storage.data_ptr()] = storage
        return tensor

    images, labels = torch.randn(batch, 1, 28, 28), torch.arange(batch)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
    del loss
    return sum(storage.nbytes() for storage in kept.values())


@claim("mixed precision halves the activations of any model")
def half_activations_of_a_decoder() -> Seen:
    full, half = (_account("--precision.param", kind) for kind in ("fp32", "bf16"))
    ratio = _at_end_of_forward(half)["activations"] / _at_end_of_forward(full)["activations"]
    whole = half["peak"]["bytes"] / full["peak"]["bytes"]
    return Seen(
        0.48 <= ratio <= 0.55,
        f"activations after forward are {ratio:.0%}, the peak of everything is {whole:.0%}",
    )


# ---------------------------------------------------------------- sharding


@claim("reshard_after_forward=True frees gathered parameters after forward, False keeps them to backward")
def reshard_frees() -> Seen:
    true, false = (_account("--mesh.reshard_after_forward", kind, ranks=RANKS) for kind in ("true", "false"))
    gathered = [_at_end_of_forward(one)["gathered"] for one in (true, false)]
    whole = true["parameters"] * 4
    return Seen(
        gathered[0] < 0.5 * whole <= gathered[1],
        f"gathered after forward: {gathered[0] / whole:.0%} of the model with True (the root's own stay), "
        f"{gathered[1] / whole:.0%} with False",
    )


@claim("sharded state dicts need no communication", ranks=RANKS)
def quiet_state_dict() -> Seen:
    import torch
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.debug import CommDebugMode

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    fully_shard(model)
    with CommDebugMode() as counted:
        model.state_dict()
    return Seen(counted.get_total_counts() == 0, f"{counted.get_total_counts()} collectives in state_dict()")


@claim(
    "for p in model.parameters(): dist.broadcast(p.data, src=0) gives all ranks rank 0's weights", ranks=RANKS
)
def broadcast_on_shards() -> Seen:
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    wanted = model.weight.detach().clone()
    fully_shard(model)
    weight: Any = model.weight
    said = error_of(lambda: dist.broadcast(weight.data, src=0))
    dist.broadcast(weight.to_local().detach(), src=0)
    whole = weight.full_tensor()
    half = len(whole) // RANKS
    copied = bool(torch.equal(whole[:half], whole[half:]))
    return Seen(
        bool(torch.equal(whole, wanted)),
        f"on the DTensor: {said or 'taken'}; on its shard, in silence, every rank gets rank 0's rows: "
        f"{'yes' if copied else 'no'}",
    )


@claim("FSDP does not shard parameters, only gradients and optimizer states", ranks=RANKS)
def shards_parameters() -> Seen:
    import torch
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    whole = sum(p.numel() for p in model.parameters())
    fully_shard(model)
    parameters: Any = list(model.parameters())
    kept = sum(p.to_local().numel() for p in parameters)
    return Seen(kept == whole, f"each of {RANKS} ranks keeps {kept} of {whole} elements")


@claim("a sharded parameter has a smaller shape", ranks=RANKS)
def smaller_shapes() -> Seen:
    import torch
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Linear(8, 8)
    fully_shard(model)
    weight: Any = model.weight
    shape, local = tuple(weight.shape), tuple(weight.to_local().shape)
    return Seen(shape != (8, 8), f"the DTensor's shape is {shape}, its local tensor's {local}")


@claim("clip_grad_norm_ needs the parameters unsharded first", ranks=RANKS)
def clipping_needs_unshard() -> Seen:
    """The norm of sharded gradients, beside that of the same model on one device."""
    import copy

    import torch
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).double()
    whole = copy.deepcopy(model)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    inputs = torch.randn(4, 8, dtype=torch.float64)
    for one in (model, whole):
        one(inputs).square().sum().backward()
    found, wanted = (torch.nn.utils.clip_grad_norm_(one.parameters(), 1.0) for one in (model, whole))
    norm = float(getattr(found, "full_tensor", lambda: found)())
    return Seen(
        abs(norm - float(wanted)) > 1e-9,
        f"on shards the norm is {norm:.6f}, on the whole model {float(wanted):.6f}",
    )


@claim("with one seed on all ranks, parameters drawn after sharding are those of one process", ranks=RANKS)
def seeded_shards() -> Seen:
    import torch
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    wanted = torch.nn.Linear(8, 8).weight.detach().clone()
    with torch.device("meta"):
        model = torch.nn.Linear(8, 8)
    fully_shard(model)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.reset_parameters()
    weight: Any = model.weight
    whole = weight.full_tensor()
    same = bool(torch.equal(whole[:4], whole[4:]))
    return Seen(
        bool(torch.equal(whole, wanted)), f"on CPU every rank draws the same rows: {'yes' if same else 'no'}"
    )


# ---------------------------------------------------------------- the vision example


def _ray_vit(**sizes: int) -> Any:
    """The ViT of Ray's tutorial, or of other sizes."""
    from fsdp.base.torchvision_import import import_torchvision

    import_torchvision()
    import torch
    from torchvision.models import VisionTransformer

    own = {"num_layers": 10, "num_heads": 2, "hidden_dim": 128, "mlp_dim": 128, **sizes}
    model = VisionTransformer(image_size=28, patch_size=7, num_classes=10, **own)
    model.conv_proj = torch.nn.Conv2d(1, own["hidden_dim"], 7, 7)
    return model


@claim("the encoder blocks are the largest layers, so sharding them is what counts")
def vit_parameters() -> Seen:
    model = _ray_vit()
    total = sum(p.numel() for p in model.parameters())
    blocks = sum(p.numel() for p in model.encoder.layers.parameters())
    megabytes = total * 4 / 2**20
    return Seen(
        blocks / total > 0.5,
        f"{total:,} parameters, {megabytes:.1f} MiB in fp32, {blocks / total:.1%} of them in blocks",
    )


@claim("a ViT of 12 layers, 3840 wide, has 180M parameters")
def vit_180m() -> Seen:
    import torch

    with torch.device("meta"):
        model = _ray_vit(num_layers=12, num_heads=8, hidden_dim=3840, mlp_dim=768)
    total = sum(p.numel() for p in model.parameters())
    return Seen(0.9 < total / 180e6 < 1.1, f"{total:,} parameters, {total * 4 / 2**30:.2f} GiB in fp32")


@claim("a transformer of 10 layers, 512 wide, with 1,024 tokens and 64 positions, has 50M parameters")
def transformer_50m() -> Seen:
    """The decoder of torch's FSDP2 example: attention and output without biases."""
    import torch
    from torch import nn

    width, layers, tokens, positions = 512, 10, 1024, 64

    def block() -> nn.Module:
        return nn.ModuleList(
            [
                *(nn.Linear(width, width, bias=False) for _ in range(4)),
                nn.Linear(width, 4 * width), nn.Linear(4 * width, width),
                nn.LayerNorm(width), nn.LayerNorm(width),
            ]
        )  # fmt: skip

    with torch.device("meta"):
        model = nn.ModuleList(
            [
                nn.Embedding(tokens, width), nn.Embedding(positions, width),
                *(block() for _ in range(layers)),
                nn.LayerNorm(width), nn.Linear(width, tokens, bias=False),
            ]
        )  # fmt: skip
    total = sum(p.numel() for p in model.parameters())
    return Seen(0.9 < total / 50e6 < 1.1, f"{total:,} parameters")


@claim("70B parameters train comfortably on 8 GPUs of 80 GB")
def llama_70b() -> Seen:
    """Parameters, gradients and Adam's moments alone, in fp32 and with everything in bf16."""
    import torch

    from fsdp.config import ModelSection
    from fsdp.models import resolve

    with torch.device("meta"):
        model = resolve(ModelSection(name="transformer", preset="70b"), {}).build()
    total = sum(p.numel() for p in model.parameters())
    whole, half = (4 * total * size / 8 / 1e9 for size in (4, 2))
    return Seen(
        half < 70,
        f"{total:,} parameters: {whole:.0f} GB a GPU in fp32, {half:.0f} GB with all four in bf16, without "
        "any activation",
    )


@claim("accuracy on the split that was trained on is held-out accuracy")
def trained_on_its_test_split() -> Seen:
    """A small network trained on the held-out digits, and given digits that it never saw."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    from fsdp.config import DataSection
    from fsdp.data import build_dataset

    data = build_dataset(DataSection(name="digits"))
    (seen, labels), (unseen, others) = _everything(data.heldout), _everything(data.train)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(seen[0].numel(), 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(100):
        optimizer.zero_grad()
        F.cross_entropy(model(seen), labels).backward()
        optimizer.step()
    with torch.no_grad():
        own, other = (
            float((model(x).argmax(-1) == y).float().mean()) for x, y in ((seen, labels), (unseen, others))
        )
    return Seen(
        own - other < 0.02,
        f"{own:.1%} on the {len(seen)} digits that it was trained on, {other:.1%} on {len(unseen):,} others",
    )


# ---------------------------------------------------------------- loops and launches


@claim("StateDictOptions(full_state_dict==True) asks for a full state dict")
def full_state_dict() -> Seen:
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    said = error_of(
        lambda: eval("StateDictOptions(full_state_dict==True)", {"StateDictOptions": StateDictOptions})
    )
    return Seen(not said, said or "it was taken")


@claim("for epoch in range(start_epoch, epochs) resumes where the checkpoint's epoch ended")
def start_epoch() -> Seen:
    """The loop as printed: no line before it sets start_epoch."""
    loop = "for epoch in range(start_epoch, epochs):\n    seen.append(epoch)"
    seen: list[int] = []
    said = error_of(lambda: exec(loop, {"seen": seen, "epochs": 3, "state": {"epoch": 1}}))
    return Seen(seen == [2], said or f"epochs {seen}")


@claim("two torchrun commands with --node_rank 0 are two nodes of one job")
def both_node_rank_0() -> Seen:
    from torch.distributed.run import config_from_args, parse_args

    line = "--nnodes=2 --nproc_per_node=2 --node_rank={} --master_addr=one --master_port=29500 train.py"
    ranks = [
        config_from_args(parse_args(line.format(node).split()))[0].rdzv_configs["rank"] for node in (0, 0)
    ]
    return Seen(
        len(set(ranks)) == 2,
        f"the rendezvous gets ranks {ranks}: both nodes start ranks 0 and 1, and wait for 2 and 3 until the "
        "time-out; `srun torchrun --rdzv_backend=c10d` numbers them itself",
    )


@claim("without set_epoch all ranks train on the same data")
def no_set_epoch() -> Seen:
    from torch.utils.data import DistributedSampler

    samples: Any = range(12)
    samplers: list[DistributedSampler[Any]] = [
        DistributedSampler(samples, num_replicas=2, rank=rank) for rank in range(2)
    ]
    first = [list(one) for one in samplers]
    again = [list(one) for one in samplers]
    return Seen(
        first[0] == first[1],
        f"ranks share {len(set(first[0]) & set(first[1]))} of 12 samples; each epoch has the same order: "
        f"{first == again}",
    )


@claim(
    "a trained classifier may be given test_data.data[0].float(), though it was trained on "
    "Normalize((0.5,), (0.5,))"
)
def unnormalised() -> Seen:
    """The same weights on the same held-out digits: normalised as in training, and as cast bytes."""
    import torch
    import torch.nn.functional as F

    from fsdp.config import DataSection, ModelSection
    from fsdp.data import build_dataset
    from fsdp.models import resolve

    data = build_dataset(DataSection(name="digits"))
    torch.manual_seed(0)
    model = resolve(ModelSection(name="vit"), data.info.facts).build()
    inputs, targets = _everything(data.train)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(60):
        rows = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(step))[:64]
        optimizer.zero_grad()
        F.cross_entropy(model(inputs[rows]), targets[rows]).backward()
        optimizer.step()
    held, wanted = _everything(data.heldout)
    low, high = held.min(), held.max()
    as_bytes = (held - low) / (high - low) * 255
    model.eval()
    with torch.no_grad():
        good, bad = (float((model(x).argmax(-1) == wanted).float().mean()) for x in (held, as_bytes))
    return Seen(
        bad > good - 0.05,
        f"held-out accuracy {good:.0%} on normalised images, {bad:.0%} on the same images only cast",
    )


def _everything(samples: Any) -> tuple[Any, Any]:
    import numpy as np

    batch = samples.batch(np.arange(len(samples)))
    return batch["inputs"], batch["targets"]


# ---------------------------------------------------------------- ranks


@contextmanager
def alone() -> Iterator[None]:
    """A world of this process, unless there is one."""
    import torch.distributed as dist

    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


ACCOUNTED = (
    "--model.name", "transformer", "--data.name", "synthetic", "--data.args.kind", "tokens",
    "--model.args.width", "128",
    "--model.args.layers", "4", "--model.args.heads", "4", "--model.args.vocab_size", "256",
    "--data.seq_len", "64",
    "--data.args.heldout", "0", "--train.global_batch", "16", "--train.steps", "3",
    "--checkpoint.every_steps", "0",
    "--checkpoint.export", "false", "--profile.memory", "true", "--profile.steps", "2:2",
)  # fmt: skip


def _account(*flags: str, ranks: int = 1) -> dict[str, Any]:
    """Rank 0's account of one step of a small decoder."""
    import subprocess

    launcher = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    )
    with tempfile.TemporaryDirectory(prefix="claims-") as folder:
        words = [sys.executable, *launcher, "train.py", *ACCOUNTED, *flags, "--run.dir", folder]
        done = subprocess.run(
            words, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(done.stderr[-2000:])
        account: dict[str, Any] = json.loads(Path(folder, "profile", "rank0_memory.json").read_text())
        return account


def _at_end_of_forward(account: dict[str, Any]) -> dict[str, int]:
    kinds: dict[str, int] = next(end["kinds"] for end in account["ends"] if end["phase"] == "forward")
    return kinds


def _on_a_rank(name: str, rank: int, store: str, answers: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    wait = timedelta(seconds=60)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS, timeout=wait
    )
    seen = CLAIMS[name].try_it()
    if rank == 0:
        answers.put(seen)
    dist.barrier()
    dist.destroy_process_group()


def check(name: str) -> Seen:
    """Runs a claim on the number of ranks that it needs."""
    if CLAIMS[name].ranks == 1:
        return CLAIMS[name].try_it()
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory(prefix="claims-") as folder:
        places = [(name, rank, str(Path(folder, "store")), answers) for rank in range(RANKS)]
        ranks = [context.Process(target=_on_a_rank, args=place) for place in places]
        for process in ranks:
            process.start()
        seen: Seen = answers.get(timeout=90)
        for process in ranks:
            process.join()
    return seen


def main(argv: list[str]) -> int:
    from bench import claims  # the registry that the ranks unpickle, not __main__'s

    unknown = [name for name in argv if name not in claims.CLAIMS]
    if unknown:
        known = ", ".join(claims.CLAIMS)
        print(f"{unknown[0]} is not a claim: {known}. HINT: python -m bench.claims vit_180m", file=sys.stderr)
        return 2
    for name in argv or list(claims.CLAIMS):
        seen = claims.check(name)
        print(
            f"{name}: {claims.CLAIMS[name].says}\n  {'holds' if seen.holds else 'does not hold'}: "
            f"{seen.what}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
