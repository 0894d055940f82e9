"""The built-in transformer written as a class of transformers: its logits there, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp.base.errors import ConfigError
from fsdp.base.torchvision_import import prepare_torchvision
from fsdp.config import ModelSection
from fsdp.models import build_real, resolve
from fsdp.models.llama_folder import from_sizes, saved_name

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "width": 32,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 48,
    "max_seq_len": 256,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": (
        "Llama",
        {"rope_scaling": "llama3", "rope_factor": 8.0, "rope_original_len": 64, "tied": True},
    ),
    "linear": ("Llama", {"rope_scaling": "linear", "rope_factor": 4.0, "ffn_bias": True}),
    "biases": ("Llama", {"qkv_bias": True, "out_bias": True}),
    "qwen2": ("Qwen2", {"qkv_bias": True, "rope_theta": 1e6}),
    "yarn": ("Qwen3", {"qk_norm": True, "rope_scaling": "yarn", "rope_factor": 4.0, "rope_original_len": 64}),
}
TOKENS = torch.randint(0, 97, (2, 120), generator=torch.Generator().manual_seed(1))


@pytest.mark.slow
@pytest.mark.needs("transformers")
@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Biases and scales differ from their initial constants: a tensor in a wrong place changes the logits."""
    prepare_torchvision()
    import transformers

    family, sizes = CASES[name]
    spec = resolve(ModelSection(name="transformer", args=SIZES | sizes), {})
    own = build_real(spec, 0).eval()
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
    written = from_sizes(spec.sizes, spec.build)
    (tmp_path / "config.json").write_text(written.config_json(torch.float32))
    assert written.class_name == f"{family}ForCausalLM"
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["max_position_embeddings"] == 256
    theirs: Any = getattr(transformers, written.class_name)(config).eval()
    state = {saved_name(key): tensor for key, tensor in own.state_dict().items()}
    theirs.load_state_dict(state)
    with torch.no_grad():
        expected, logits = theirs(TOKENS).logits, own(TOKENS)
    assert torch.allclose(logits, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


def test_sizes_that_no_class_computes_are_refused() -> None:
    spec = resolve(ModelSection(name="transformer", args={"out_bias": True}), {})
    with pytest.raises(ConfigError, match="no class of transformers has out_bias and no more"):
        from_sizes(spec.sizes, spec.build)


@pytest.mark.parametrize("weights", ["{}", "{}/run", "hf:{}"])
def test_a_folder_is_refused_with_the_flag_that_reads_it(weights: str, tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "run" / "full_model"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text("{}")
    with pytest.raises(ConfigError) as caught:
        resolve(ModelSection(name="transformer", weights=weights.format(tmp_path)), {})
    full = tmp_path / "run" / "full_model" if weights.endswith("run") else tmp_path
    assert f"HINT: --model.name hf:{full} without --model.weights" in str(caught.value)
