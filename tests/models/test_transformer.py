"""The decoder alone on one device: each part against the same thing written out by hand."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp.base.errors import ConfigError
from fsdp.config import ModelSection
from fsdp.dist.env import DistEnv
from fsdp.models import build_real, resolve, to_empty
from fsdp.models.transformer import PRESETS, Attention, FeedForward, Rotary, Transformer, TransformerSizes
from tests.support.world import run_world


def small(**changes: Any) -> Transformer:
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "width": 32, "layers": 2, "heads": 4, "max_seq_len": 64, **changes}
    return Transformer(TransformerSizes(**sizes))


def tokens(length: int = 16, batch: int = 2) -> Tensor:
    return torch.randint(0, 50, (batch, length), generator=torch.Generator().manual_seed(1))


def loss_of(model: nn.Module, data: Tensor) -> Tensor:
    return F.cross_entropy(model(data[:, :-1]).flatten(0, 1), data[:, 1:].flatten())


@pytest.mark.parametrize(
    "changes", [{}, {"kv_heads": 2}, {"tied": True}, {"dropout": 0.1}, {"heads": 1}, {"layers": 1}]
)
def test_runs_alone_forward_and_backward(changes: dict[str, Any]) -> None:
    model = small(**changes)
    loss = loss_of(model, tokens())
    loss.backward()
    assert abs(loss.item() - math.log(50)) < 0.3  # small initial weights: all tokens about equally likely
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in model.parameters())


def test_no_position_sees_a_later_one() -> None:
    model, first = small(), tokens()
    second = first.clone()
    second[:, 9:] = (second[:, 9:] + 1) % 50
    a, b = model(first), model(second)
    assert torch.equal(a[:, :9], b[:, :9])
    assert (a[:, 9:] != b[:, 9:]).any(dim=-1).all()


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


def test_rotary_is_a_rotation_written_out() -> None:
    model = small(rope_theta=100.0)
    x = torch.randn(2, 4, 20, 8, dtype=torch.float64)
    turned = Rotary(model.rotary_cos[:20], model.rotary_sin[:20]).turn(x)
    torch.testing.assert_close(turned, rotate_by_hand(x, 100.0), rtol=0, atol=1e-6)


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


def sharded_bf16(env: DistEnv) -> tuple[str, float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model: Any = small()
    seen: list[Tensor] = []
    reference = model(tokens())
    mesh = init_device_mesh("cpu", (env.world_size,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model.blocks[1].attention.register_forward_pre_hook(lambda module, args: seen.append(args[1].cos))
    for unit in model.units():
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    with torch.no_grad():
        error = (model(tokens()).float() - reference).abs().max() / reference.abs().max()
    return str(seen[0].dtype), error.item()


def test_mixed_precision_of_fsdp_leaves_the_tables_alone() -> None:
    [(dtype, error)] = run_world(1, sharded_bf16)
    assert dtype == "torch.float32"
    assert error < 0.03


def test_grouped_queries_equal_attention_with_repeated_heads() -> None:
    sizes: dict[str, Any] = {"vocab_size": 50, "width": 32, "heads": 4, "max_seq_len": 64}
    grouped, full = Attention(TransformerSizes(**sizes, kv_heads=2)), Attention(TransformerSizes(**sizes))
    state = grouped.state_dict()
    for name in ("k.weight", "v.weight"):
        state[name] = state[name].view(2, 8, 32).repeat_interleave(2, dim=0).reshape(32, 32)
    full.load_state_dict(state)
    model, x = small(), torch.randn(2, 16, 32)
    rotary = Rotary(model.rotary_cos[:16], model.rotary_sin[:16])
    torch.testing.assert_close(grouped(x, rotary), full(x, rotary), rtol=1e-5, atol=1e-6)


def test_attention_and_feed_forward_are_their_formulas() -> None:
    sizes = TransformerSizes(vocab_size=50, width=32, heads=4, max_seq_len=64)
    attention, model, x = Attention(sizes).double(), small(), torch.randn(1, 16, 32, dtype=torch.float64)
    heads = [part(x).view(1, 16, 4, 8).transpose(1, 2) for part in (attention.q, attention.k, attention.v)]
    q, k = (rotate_by_hand(part, 10_000.0) for part in heads[:2])
    scores = (q @ k.transpose(-1, -2) / math.sqrt(8)).masked_fill(
        torch.ones(16, 16).triu(1).bool(), -math.inf
    )
    expected = attention.o((scores.softmax(-1) @ heads[2]).transpose(1, 2).reshape(1, 16, 32))
    actual = attention(x, Rotary(model.rotary_cos[:16], model.rotary_sin[:16]))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)
    ffn = FeedForward(sizes).double()
    gate = ffn.gate(x)
    torch.testing.assert_close(ffn(x), ffn.down(gate / (1 + torch.exp(-gate)) * ffn.up(x)))


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [
        ("toy", 459_392),
        ("124m", 123_587_328),
        ("1b", 1_235_814_400),
        ("7b", 6_738_415_616),
        ("13b", 13_015_864_320),
        ("8b", 8_030_261_248),
        ("llama-8b", 8_030_261_248),
        ("70b", 70_553_706_496),
        ("llama-70b", 70_553_706_496),
    ],
)
def test_presets_have_their_number_of_parameters(preset: str, parameters: int) -> None:
    spec = resolve(ModelSection(name="transformer", preset=preset), {})
    with torch.device("meta"):
        model = spec.build()
    assert sum(p.numel() for p in model.parameters()) == parameters


@pytest.mark.parametrize("preset", [name for name in PRESETS if "b" not in name])
def test_initial_weights_are_drawn_as_said(preset: str) -> None:
    spec = resolve(ModelSection(name="transformer", preset=preset, args={"layers": 2}), {})
    model = build_real(spec, seed=0)
    weights = dict(model.named_parameters())
    assert weights["blocks.0.attention.q.weight"].std().item() == pytest.approx(0.02, rel=0.02)
    # 0.02/√(2·2 layers)
    assert weights["blocks.1.ffn.down.weight"].std().item() == pytest.approx(0.01, rel=0.02)
    assert torch.equal(weights["norm.weight"], torch.ones_like(weights["norm.weight"]))


def test_built_on_meta_and_filled_it_is_the_model_built_alone() -> None:
    alone = small(tied=True)
    with torch.device("meta"):
        model = small(tied=True)
    to_empty(model, "cpu")
    model.load_state_dict(alone.state_dict())
    model.rotary_cos.fill_(math.nan)
    model.init_buffers("cpu")
    assert model.head.weight is model.embedding.weight
    assert torch.equal(model(tokens()), alone(tokens()))


@pytest.mark.parametrize("tied", [False, True])
def test_units_hold_each_parameter_at_most_once(tied: bool) -> None:
    model = small(tied=tied, vocab_size=1 << 15)
    modules = [module for unit in model.units() for module in (unit if isinstance(unit, list) else [unit])]
    held = [p for module in modules for p in module.parameters()]
    assert len(held) == len(set(held))
    assert (model.embedding.weight in set(held)) is not tied


def test_a_sequence_that_is_too_long_says_which_size_to_change() -> None:
    with pytest.raises(ConfigError, match=r"65 tokens .*max_seq_len 64.*HINT: --model.args.max_seq_len 65"):
        small()(tokens(65))
