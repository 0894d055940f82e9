"""From meta to real: uninitialised values are named on every rank, pretrained weights fit whole or are
refused, buffers are restored.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fsdp.base.errors import OtherRankFailed
from fsdp.checkpoint.pretrained import open_full_state
from fsdp.config import Config, MeshSection, PrecisionSection
from fsdp.distributed.boxes import local_tensor
from fsdp.distributed.env import DistEnv
from fsdp.distributed.mesh import Strategy, build_mesh, resolve
from fsdp.models import ModelSpec
from fsdp.run.job import meta_model
from fsdp.shard.checks import check_initialised
from fsdp.shard.materialize import _in_checkpoint, materialize
from fsdp.shard.shard import Sharded, shard_model, sharding_of
from tests.support import user_code
from tests.support.marks import sample_are
from tests.support.world import run_world


def made(
    env: DistEnv,
    build: Callable[[], nn.Module],
    *,
    strategy: Strategy = "fsdp",
    init: str = "shard",
    weights: str = "",
    precision: PrecisionSection | None = None,
) -> Sharded:
    sizes = resolve(MeshSection(strategy=strategy), env.world_size)
    spec = ModelSpec(name="own", build=build, sizes={}, knows_inits=False)
    sharded = shard_model(
        meta_model(spec),
        sharding_of(Config(precision=precision or PrecisionSection()), sizes, env.device),
        build_mesh(sizes, env.device),
    )
    source = (lambda: open_full_state(weights)) if weights else None
    materialize(sharded, spec=spec, seed=0, init=init, rank=env.rank, weights=source)
    return sharded


def said(act: Callable[[], object]) -> str:
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


# ---------------------------------------------------------------- uninitialised values


def building(env: DistEnv, name: str, init: str, arguments: tuple[str, ...] = ()) -> str:
    return said(lambda: made(env, lambda: getattr(user_code, name)(*arguments), init=init))


@pytest.mark.parametrize("init", ["shard", "broadcast"])
def test_a_parameter_that_its_constructor_left_empty(init: str) -> None:
    for text in run_world(3, building, "Unfilled", init):
        assert "parameter scale was never initialised" in text
        assert "HINT:" in text


@pytest.mark.parametrize("kind", ["float", "int", "bool", "complex"])
def test_a_buffer_that_init_buffers_forgets(kind: str) -> None:
    for text in run_world(2, building, "ForgetsBuffer", "shard", (kind,)):
        assert "buffer forgotten was never initialised" in text


# ---------------------------------------------------------------- shards that are wrong


def spoilt(env: DistEnv, strategy: Strategy, spoil: str) -> str:
    sharded = made(env, user_code.Uneven, strategy=strategy)
    parameters = dict(sharded.root.named_parameters())
    with torch.no_grad():
        if spoil == "one replica" and env.rank == 3:
            local_tensor(parameters["head.weight"])[0, 0] += 1e-3
    return said(lambda: check_initialised(sharded.root))


def test_replicas_that_differ_in_one_number() -> None:
    for text in run_world(4, spoilt, "hsdp", "one replica"):
        assert "head.weight differs between ranks 1 and 3, which hold the same shard" in text
    for text in run_world(4, spoilt, "ddp", "one replica"):
        assert "head.weight differs between ranks 0 and 3" in text


# ---------------------------------------------------------------- buffers, dtypes


# ---------------------------------------------------------------- pretrained weights


def whole_of(env: DistEnv, name: str, weights: str, strategy: Strategy = "fsdp") -> dict[str, Tensor] | str:
    found: dict[str, Tensor] = {}

    def act() -> None:
        sharded = made(env, getattr(user_code, name), weights=weights, strategy=strategy)
        for key, tensor in sharded.root.state_dict().items():
            found[key] = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()

    return said(act) or found


def save(state: dict[str, Tensor], path: Path) -> str:
    if path.suffix == ".pt":
        torch.save(state, path)
    else:
        save_file({name: tensor.clone().contiguous() for name, tensor in state.items()}, path)
    return str(path)


def trained_state(model: nn.Module) -> dict[str, Tensor]:
    """Nothing as a constructor makes it."""
    return {
        n: t + 1 if t.is_floating_point() or t.is_complex() else t.clone()
        for n, t in model.state_dict().items()
    }


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("name", sample_are(["Buffers"], ["Uneven", "Buffers", "PersistentTable"]))
def test_a_state_dict_is_where_a_run_starts_from(name: str, suffix: str, tmp_path: Path) -> None:
    if (name, suffix) == ("Buffers", ".safetensors"):
        state = trained_state(getattr(user_code, name)())
        state = {n: t for n, t in state.items() if not t.is_complex()}  # the format knows none
        texts = run_world(2, whole_of, name, save(state, tmp_path / f"weights{suffix}"))
        assert all("--model.weights has no waves_kept" in text for text in texts)
        return
    state = trained_state(getattr(user_code, name)())
    for found in run_world(3, whole_of, name, save(state, tmp_path / f"weights{suffix}")):
        assert found.keys() == state.keys()
        assert all(torch.equal(found[key], value) for key, value in state.items())


def test_tied_weights_that_differ_are_refused(tmp_path: Path) -> None:
    """Of a model that was trained without tying: its output layer was left out in silence."""
    state = trained_state(user_code.TiedWords())
    state["head.weight"] = state["head.weight"] * 2
    texts = run_world(2, whole_of, "TiedWords", save(state, tmp_path / "weights.safetensors"))
    said = "and the model has them as one tensor. HINT: "
    assert all("head.weight" in text and "words.weight" in text and said in text for text in texts), texts


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ("missing", "--model.weights has no blocks.1.up.bias (1 in all). HINT: "),
        ("shape", "--model.weights has head.weight as (7, 13), the model as (5, 13). HINT: "),
        ("over", "--model.weights has blocks.3.up.bias, which the model has not (1 in all). HINT: "),
        ("dtype", "--model.weights has head.weight as torch.int8, such as quantized weights, "),
    ],
)
def test_a_state_dict_that_does_not_fit_is_refused_on_every_rank(
    spoil: str, message: str, tmp_path: Path
) -> None:
    state = trained_state(user_code.Uneven())
    if spoil == "missing":
        del state["blocks.1.up.bias"]
    elif spoil == "shape":
        state["head.weight"] = torch.zeros(7, 13)
    elif spoil == "dtype":
        state["head.weight"] = (state["head.weight"] * 127).to(torch.int8)
    else:
        state["blocks.3.up.bias"] = torch.zeros(15)
    texts = run_world(3, whole_of, "Uneven", save(state, tmp_path / "weights.pt"))
    assert all(message in text for text in texts), texts
    assert [text.partition(":")[0] for text in texts] == [
        "ConfigError",
        OtherRankFailed.__name__,
        OtherRankFailed.__name__,
    ]


class OwnBuffer(nn.Module):
    """`persistent`: whether a checkpoint holds the buffer."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("scale", torch.ones(2), persistent=persistent)


class FillsItself(OwnBuffer):
    def init_buffers(self) -> None: ...


def test_a_resumed_run_computes_the_buffers_that_no_checkpoint_holds() -> None:
    assert _in_checkpoint(OwnBuffer(persistent=True))
    assert not _in_checkpoint(OwnBuffer(persistent=False))
    assert _in_checkpoint(FillsItself(persistent=False))
