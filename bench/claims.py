"""Commands that check the claims of FSDP tutorials listed in docs/claims.md.

    python -m bench.claims                 all of them, a line each
    python -m bench.claims half_storage    one, with the details

Claims about time or memory at a size are measured by bench.knobs instead. No GPU and no network is needed.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

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


@claim("OffloadPolicy(offload_type=), fully_shard(mesh_dim=) and FileSystemWriter(path).save() are calls")
def calls() -> Seen:
    import torch
    from torch.distributed.checkpoint import FileSystemWriter
    from torch.distributed.fsdp import OffloadPolicy, fully_shard

    offload, shard, writer = (cast(Any, one) for one in (OffloadPolicy, fully_shard, FileSystemWriter))
    tried = (
        error_of(lambda: offload(offload_type="cpu")),
        error_of(lambda: shard(torch.nn.Linear(2, 2), mesh_dim="dp")),
        error_of(lambda: writer.save),
    )
    return Seen(not any(tried), "; ".join(tried))


@claim("model.to_empty(device=...); model.reset_parameters() fills a model that was built on meta")
def reset_parameters() -> Seen:
    from torch import nn
    from torchvision.models import VisionTransformer

    kinds = VisionTransformer, nn.Transformer, nn.MultiheadAttention, nn.TransformerEncoderLayer
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


# ---------------------------------------------------------------- sharding


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
    import torch
    from torchvision.models import VisionTransformer

    own = {"num_layers": 10, "num_heads": 2, "hidden_dim": 128, "mlp_dim": 128, **sizes}
    model = VisionTransformer(image_size=28, patch_size=7, num_classes=10, **own)
    model.conv_proj = torch.nn.Conv2d(1, own["hidden_dim"], 7, 7)
    return model


@claim("encoder blocks are the largest layers; one of 12 layers, 3840 wide, has 180M parameters")
def vit_parameters() -> Seen:
    import torch

    with torch.device("meta"):
        models = _ray_vit(), _ray_vit(num_layers=12, num_heads=8, hidden_dim=3840, mlp_dim=768)
    small, wide = (sum(p.numel() for p in model.parameters()) for model in models)
    blocks = sum(p.numel() for p in models[0].encoder.layers.parameters()) / small
    told = f"{small:,} parameters, {small * 4 / 2**20:.1f} MiB in fp32, {blocks:.1%} of them in blocks"
    return Seen(blocks > 0.5 and 0.9 < wide / 180e6 < 1.1, f"{told}; {wide:,} of the wide one")


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


# ---------------------------------------------------------------- loops and launches


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
        print(
            f"{unknown[0]} is not a claim: {known}. HINT: python -m bench.claims vit_parameters",
            file=sys.stderr,
        )
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
