"""The built-in transformer with weights of transformers' Llama family: sizes, logits, refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp.base.errors import ConfigError
from fsdp.base.torchvision_import import prepare_torchvision
from fsdp.checkpoint.pretrained import PretrainedWeights
from fsdp.config import ModelSection
from fsdp.models import ModelSpec, build_real, resolve
from fsdp.models.llama_folder import from_sizes

pytestmark = [pytest.mark.slow, pytest.mark.needs("transformers")]

SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 256,
}  # fmt: skip
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rms_norm_eps": 1e-5}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "linear": (
        "Llama",
        {
            "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "qwen2": ("Qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen3": ("Qwen3", {"head_dim": 24, "rope_parameters": YARN}),
    "mistral": ("Mistral", {"head_dim": 16, "sliding_window": None}),
}
FACTS = {"vocab_size": 90, "seq_len": 120}
TOKENS = torch.randint(0, 90, (2, 120), generator=torch.Generator().manual_seed(1))


def reference(name: str) -> Any:
    """Biases and scales differ from their initial constants: a tensor in a wrong place changes the logits."""
    prepare_torchvision()
    import transformers

    family, fields = CASES[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **fields})
    model: Any = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def write(name: str, folder: Path) -> Any:
    model = reference(name)
    model.save_pretrained(folder)
    return model


def ours(spec: ModelSpec) -> nn.Module:
    model = build_real(spec, 0).eval()
    assert spec.pretrained is not None
    model.load_state_dict(dict(PretrainedWeights(spec.pretrained, 0)))
    return model


@contextmanager
def floats_of_64_bits() -> Iterator[None]:
    """transformers computes rotary frequencies in the dtype torch.float, whatever the model's."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("float", "float32"):
            patch.setattr(torch, name, torch.float64)
        yield


def in_float64(model: Any) -> Any:
    """The formulas of norms and tables, which transformers computes in float32; tables are rounded to it."""
    with floats_of_64_bits():
        frequencies = type(model.model.rotary_emb)(model.config)

    def norm(self: Any, x: Tensor) -> Tensor:
        return self.weight * (x / (x.square().mean(-1, keepdim=True) + self.variance_epsilon).sqrt())

    def tables(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[0, :, None].double() * frequencies.inv_freq
        both = torch.cat((angles, angles), -1)[None]
        scale = frequencies.attention_scaling
        return (both.cos() * scale).float().double(), (both.sin() * scale).float().double()

    model.double()
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = norm.__get__(module)
    model.model.rotary_emb.forward = tables
    return model


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = write(name, tmp_path)
    spec = resolve(ModelSection(name="transformer", weights=str(tmp_path)), FACTS)
    own = ours(spec)
    with torch.no_grad():
        expected, found = model(TOKENS).logits, own(TOKENS)
        assert torch.allclose(found, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
        expected, found = in_float64(model)(TOKENS).logits, own.double()(TOKENS)
    assert expected.dtype == found.dtype == torch.float64
    assert torch.allclose(found, expected, rtol=0, atol=1e-10)
    assert spec.sizes["max_seq_len"] == 120


@pytest.mark.parametrize("name", ["llama3", "linear", "qwen2", "qwen3"])
def test_a_model_without_a_folder_has_the_same_configuration(name: str, tmp_path: Path) -> None:
    write(name, tmp_path)
    spec = resolve(ModelSection(name="transformer", weights=str(tmp_path)), {})
    assert spec.pretrained is not None
    again = from_sizes(spec.sizes, spec.build)
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "config.json").write_text(again.config_json(torch.float32))
    read = resolve(ModelSection(name="transformer", weights=str(tmp_path / "again")), {})
    assert read.sizes == spec.sizes
    assert again.class_name == spec.pretrained.class_name


# ---------------------------------------------------------------- what does not fit


def refusal(folder: Path, preset: str = "", facts: Any = FACTS, **args: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(ModelSection(name="transformer", weights=str(folder), preset=preset, args=args), facts)
    return str(caught.value)


def edit(folder: Path, **fields: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_sizes_that_differ_from_the_folder_are_named(tmp_path: Path) -> None:
    write("llama", tmp_path)
    assert "--model.args.layers is 3, and 2 in" in refusal(tmp_path, layers=3)
    said = refusal(tmp_path, preset="llama-8b")
    assert "--model.preset llama-8b: vocab_size is 128256, and 97 in" in said
    assert "HINT: leave out --model.preset llama-8b" in said
    assert "max_position_embeddings 256, and the data 300 tokens" in refusal(
        tmp_path, facts={"vocab_size": 90, "seq_len": 300}
    )
    assert "the data has 98 different tokens" in refusal(tmp_path, facts={"vocab_size": 98, "seq_len": 20})
    section = ModelSection(name="transformer", weights=str(tmp_path))
    agreeing = replace(section, args={"layers": 2, "kv_heads": 2, "dropout": 0.1, "max_seq_len": 300})
    sizes = resolve(agreeing, {"vocab_size": 90, "seq_len": 300}).sizes
    assert (sizes["dropout"], sizes["max_seq_len"]) == (0.1, 300)


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("mistral", {"sliding_window": 64}, "sliding_window 64"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64}, "sliding_window 64"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act gelu: --model.name transformer computes silu alone"),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout 0.1"),
        ("llama", {"rope_parameters": {"rope_type": "longrope"}}, "rope_type longrope"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ("llama", {"model_type": "gpt2"}, "is of model_type 'gpt2'"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantized (gptq)"),
    ],
)
def test_what_the_transformer_does_not_compute_is_refused(
    name: str, fields: dict[str, Any], said: str, tmp_path: Path
) -> None:
    write(name, tmp_path)
    edit(tmp_path, **fields)
    assert said in refusal(tmp_path)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"hidden_size": "24"}, "has hidden_size '24', which is no positive number"),
        ({"num_attention_heads": 0}, "has num_attention_heads 0, which is no positive number"),
        ({"max_position_embeddings": "long"}, "has max_position_embeddings 'long'"),
        ({"rope_scaling": "linear"}, "has a field of another kind: "),
        ({"rope_parameters": {"rope_type": "linear", "factor": "two"}}, "has a field of another kind: "),
        ({"layer_types": 5}, "has a field of another kind: "),
        ({"quantization_config": "gptq"}, "has a field of another kind: "),
        ({"model_type": ["llama"]}, "is of model_type ['llama']"),
        ({"dtype": "bfloat17"}, "config.json has dtype 'bfloat17', which is no floating-point dtype"),
    ],
)
def test_a_field_of_another_kind_is_one_line(fields: dict[str, Any], said: str, tmp_path: Path) -> None:
    write("llama", tmp_path)
    edit(tmp_path, **fields)
    assert said in refusal(tmp_path)


def test_a_dtype_with_the_prefix_of_torch_is_read(tmp_path: Path) -> None:
    """As older exports have it: a trained model was written in float32, at twice the size."""
    write("llama", tmp_path)
    edit(tmp_path, dtype=None, torch_dtype="torch.bfloat16")
    spec = resolve(ModelSection(name="transformer", weights=str(tmp_path)), FACTS)
    assert spec.pretrained is not None
    assert spec.pretrained.dtype == torch.bfloat16


def test_a_field_without_a_value_is_as_if_left_out(tmp_path: Path) -> None:
    write("llama", tmp_path)
    edit(tmp_path, quantization_config=None, rope_scaling=None, layer_types=None)
    resolve(ModelSection(name="transformer", weights=str(tmp_path)), FACTS)


def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    write("llama", tmp_path)
    edit(tmp_path, intermediate_size=56)
    spec = resolve(ModelSection(name="transformer", weights=str(tmp_path)), FACTS)
    assert spec.pretrained is not None
    with pytest.raises(ConfigError, match=r"other shapes than the model: blocks\.0\.ffn\.gate\.weight"):
        PretrainedWeights(spec.pretrained, 0)
