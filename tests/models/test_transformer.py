"""The decoder alone on one device: each part against the same thing written out by hand."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdp.config import Config, MeshSection, ModelSection, PrecisionSection
from fsdp.distributed.env import DistEnv
from fsdp.distributed.mesh import build_mesh
from fsdp.distributed.mesh import resolve as resolve_mesh
from fsdp.models import build_real, resolve, transformer
from fsdp.models.chunked_loss import ChunkedHead
from fsdp.models.loss import LossFunction
from fsdp.models.transformer import Rotary, Transformer, TransformerSizes, from_sizes
from fsdp.shard.shard import shard_model, sharding_of
from tests.support.world import run_world


def small(**changes: Any) -> Transformer:
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "width": 32, "layers": 2, "heads": 4, "max_seq_len": 64, **changes}
    return Transformer(TransformerSizes(**sizes))


def rotate_by_hand(x: Tensor, theta: float) -> Tensor:
    """Pair (i, i + d/2) at position p turns by p·theta^(-2i/d), as a complex number."""
    out = x.clone()
    d = x.shape[-1]
    for position in range(x.shape[-2]):
        for i in range(d // 2):
            angle = position * theta ** (-2 * i / d)
            pair = torch.complex(x[..., position, i], x[..., position, i + d // 2])
            turned = pair * complex(math.cos(angle), math.sin(angle))
            out[..., position, i], out[..., position, i + d // 2] = turned.real, turned.imag
    return out


def test_rotary_tables_keep_float32_under_bf16() -> None:
    model = small(max_seq_len=2048)
    expected = model.rotary_cos.clone()
    half = copy.deepcopy(model).to(torch.bfloat16)
    assert half.embedding.weight.dtype == torch.bfloat16
    assert torch.equal(half.rotary_cos, expected)
    x = torch.randn(1, 1, 2048, 8).bfloat16()
    turned = Rotary(half.rotary_cos, half.rotary_sin).turn(x)
    assert turned.dtype == torch.bfloat16
    # one rounding at the end, so half a unit in the last place and no more
    torch.testing.assert_close(turned.double(), rotate_by_hand(x.double(), 10_000.0), rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [
        ("124m", 123_587_328),
        ("1b", 1_235_814_400),
        ("7b", 6_738_415_616),
        ("llama-8b", 8_030_261_248),
        ("llama-70b", 70_553_706_496),
    ],
)
def test_presets_have_their_number_of_parameters(preset: str, parameters: int) -> None:
    spec = resolve(ModelSection(name="transformer", preset=preset), {})
    with torch.device("meta"):
        model = spec.build()
    assert sum(p.numel() for p in model.parameters()) == parameters


WRITTEN = {"vocab_size": 97, "width": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "max_seq_len": 256}
CASES: dict[str, dict[str, Any]] = {"tied": {"tied": True}, "apart": {"rope_theta": 1e6}}


@pytest.mark.slow
@pytest.mark.needs("transformers")
@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Biases and scales differ from their initial constants: a tensor in a wrong place changes the logits."""
    import transformers

    spec = resolve(ModelSection(name="transformer", args=WRITTEN | CASES[name]), {})
    own = build_real(spec, 0).eval()
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
    written = from_sizes(spec.sizes, spec.build)
    (tmp_path / "config.json").write_text(written.config_json(torch.float32))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["max_position_embeddings"] == 256
    theirs: Any = getattr(transformers, written.class_name)(config).eval()
    state = {
        k: t for key, one in own.state_dict().items() for k, t in written.reverted(own, key, one).items()
    }
    theirs.load_state_dict(state)
    data = torch.randint(0, 97, (2, 120), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, logits = theirs(data).logits, own(data)
    assert torch.allclose(logits, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


# ---------------------------------------------------------------- a tied weight's gradient

WORDS = torch.randint(0, 40, (2, 2, 48), generator=torch.Generator().manual_seed(1))


class Bytes(TorchDispatchMode):
    """Bytes that operations read and write: none of views, of index_add_ the rows, and of others that touch
    one element a row none. And the number of products.
    """

    few = ("gather", "scatter_", "nll_loss_forward", "index_add_")
    moved = products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), func.name().removeprefix("aten::").split(".")[0]
        self.products += name in ("mm", "addmm")
        if name in self.few:
            self.moved += 3 * args[3].nbytes if name == "index_add_" else 0
        elif not func.is_view and "empty" not in name:
            tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)]
            self.moved += sum(t.nbytes for t in tensors)
        return result


def tied_gradients(
    env: DistEnv, dtype: Literal["fp32", "bf16"], chunk: int, scattered: int
) -> tuple[dict[str, Tensor], int]:
    """After two micro-batches, and the bytes of the last one's backward."""
    with mock.patch.object(transformer, "SCATTERED", scattered):
        model, counted = small(vocab_size=384, tied=True), Bytes()
        loss = LossFunction(model, head=ChunkedHead(model, chunk) if chunk else None)
        sizes = resolve_mesh(MeshSection(), env.world_size)
        sharding = sharding_of(Config(precision=PrecisionSection(param=dtype)), sizes, env.device)
        called = shard_model(model, sharding, build_mesh(sizes, env.device)).called
        for words in WORDS:
            counted.moved = 0
            data = {"inputs": words[[env.rank]], "targets": words[[env.rank]].roll(-1, 1)}
            total = loss(called, data, torch.ones(1, dtype=torch.bool), 1).loss_sum
            with counted:
                (total * 0.01).backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {n: getattr(grad, "full_tensor", lambda g=grad: g)() for n, grad in grads.items()}, counted.moved


@pytest.mark.parametrize("chunk", [0, 32])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_tied_gradient_is_added_to_the_heads_row_by_row(
    ranks: int, dtype: Literal["fp32", "bf16"], chunk: int
) -> None:
    """With the bits of torch's own two gradients and their sum, each of the weight's size."""
    both = [run_world(ranks, tied_gradients, dtype, chunk, scattered) for scattered in (1000, 4)]
    for (torchs, more), (ours, fewer) in zip(*both, strict=True):
        assert all(torch.equal(ours[name], grad) for name, grad in torchs.items())
        weight = torchs["embedding.weight"].numel() * (2 if dtype == "bf16" else 4)
        assert more - fewer > 3 * weight


@pytest.mark.long
def test_a_tied_model_compiles_as_one_graph() -> None:
    eager, compiled = small(vocab_size=384, tied=True), small(vocab_size=384, tied=True)
    eager(WORDS[0]).square().sum().backward()
    torch.compile(compiled, backend="aot_eager", fullgraph=True)(WORDS[0]).square().sum().backward()
    torch.testing.assert_close(compiled.head.weight.grad, eager.head.weight.grad)


def joined_gradients(env: DistEnv, joined: bool) -> tuple[dict[str, Tensor], int, int]:
    """Of fp64 shards; the products of compiled blocks, and the bytes kept for backward."""
    kept, counted = list[Tensor](), Bytes()

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with mock.patch.object(transformer, "joins", return_value=joined):
        torch._dynamo.reset()
        model: Any = small(kv_heads=2).double()
        for block in model.blocks:
            block.compile(backend="aot_eager_decomp_partition")
        sizes = resolve_mesh(MeshSection(), env.world_size)
        config = Config(precision=PrecisionSection(master="fp64"))
        shard_model(model, sharding_of(config, sizes, env.device), build_mesh(sizes, env.device))
        tokens = torch.randint(50, (2, 8, 64), generator=torch.Generator().manual_seed(1))[env.rank]
        with counted, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model(tokens).square().mean()
        held = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}
        with counted:
            loss.backward()
    return (
        {n: p.grad.full_tensor() for n, p in model.named_parameters()},
        counted.products,
        sum(held.values()),
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_products_of_one_input_are_joined(ranks: int) -> None:
    apart, together = (run_world(ranks, joined_gradients, joined)[0] for joined in (False, True))
    for name, grad in apart[0].items():
        torch.testing.assert_close(together[0][name], grad, rtol=1e-12, atol=1e-12 * float(grad.abs().max()))
    # a block's forward has two less, its backward four of six less for q, k, v and two of four for gate, up
    assert apart[1] - together[1] == 2 * (2 + 4 + 2)
    assert together[2] <= apart[2]


@mock.patch.object(Tensor, "is_cuda", True)
def test_layers_that_are_hooked_or_frozen_are_not_joined() -> None:
    layers, x = [torch.nn.Linear(8, 4) for _ in range(2)], torch.ones(16, 8)
    assert transformer.joins(x, *layers)
    with torch.no_grad():  # an evaluation
        assert not transformer.joins(x, *layers)
    assert not transformer.joins(x, *layers, *layers)  # rows enough for the weights alone to cost more
    layers[0].register_forward_hook(lambda *_: None)
    assert not transformer.joins(x, *layers)
    layers[1].weight.requires_grad_(False)
    assert not transformer.joins(x, layers[1], layers[1])
