"""The decoder alone on one device: each part against the same thing written out by hand."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp.base.torch_private import prepare_torchvision
from fsdp.config import ModelSection
from fsdp.models import build_real, resolve
from fsdp.models.transformer import Rotary, Transformer, TransformerSizes, from_sizes


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
    prepare_torchvision()
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
