"""Folders of Llama, Mistral, Qwen2 and Qwen3 for the built-in transformer: sizes, tensor names, config.json.

transformers is not imported. What the transformer does not compute is refused by the name of its field. Not
here: reading tensors (fsdp/checkpoint/pretrained.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fsdp.base.errors import ConfigError
from fsdp.base.regular_file import SETTINGS, regular_text
from fsdp.config.values import expanded
from fsdp.models.hf_names import NamePlan, Shape
from fsdp.models.hub import check_no_adapter, find_folder
from fsdp.models.parameter_names import all_names
from fsdp.models.rope import SCALINGS, yarn_attention
from fsdp.models.source_folder import FolderHints, named_dtype

CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
SIZES = {
    "vocab_size": "vocab_size", "width": "hidden_size", "layers": "num_hidden_layers",
    "heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "ffn": "intermediate_size",
    "head_dim": "head_dim", "norm_eps": "rms_norm_eps", "tied": "tie_word_embeddings",
}  # fmt: skip
"""Size of the transformer → field of config.json."""
NUMBERS = ("vocab_size", "width", "layers", "heads", "kv_heads", "ffn", "head_dim", "norm_eps")
REQUIRED = ("vocab_size", "width", "layers", "heads", "ffn")
SAVED = "a folder that save_pretrained wrote"
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "max_position_embeddings": 32_768},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32_768},
}
"""Those of transformers' configurations, for fields that a config.json leaves out."""
_OPEN = ("max_seq_len", "dropout")
"""Sizes that no weight depends on."""
_BLOCK = {
    "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attention.q": "self_attn.q_proj", "attention.k": "self_attn.k_proj", "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.o_proj", "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm", "ffn.gate": "mlp.gate_proj", "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
}  # fmt: skip
_OUTSIDE = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}


def saved_layer(name: str) -> str:
    """transformers' name of a module."""
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    _, number, part = name.split(".", 2)
    return f"model.layers.{number}.{_BLOCK[part]}"


def saved_name(name: str) -> str:
    layer, _, kind = name.rpartition(".")
    return f"{saved_layer(layer)}.{kind}"


# ---------------------------------------------------------------- config.json in


@dataclass(frozen=True)
class LlamaConfigFile:
    """A config.json of the family, found by --model.weights."""

    weights: str
    folder: Path
    fields: Mapping[str, Any]

    @property
    def file(self) -> Path:
        return self.folder / "config.json"

    def sizes(
        self, facts: Mapping[str, Any], preset: tuple[str, Mapping[str, Any]], args: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Sizes by the folder; a preset or an argument that differs from it is a ConfigError."""
        try:
            found = _sizes_of(self.file, self.fields)
        except (TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"{self.file} has a field of another kind: {error}.", SAVED) from None
        name, sizes = preset
        self._check_same(found, sizes, f"--model.preset {name}: ", f"leave out --model.preset {name}")
        self._check_same(found, args, "--model.args.", "leave it out: the folder has its sizes")
        found["max_seq_len"] = self._length(facts, {**sizes, **args})
        return {**found, **{key: value for key, value in {**sizes, **args}.items() if key not in found}}

    def _check_same(self, found: Mapping[str, Any], given: Mapping[str, Any], what: str, hint: str) -> None:
        for name, value in given.items():
            derived = name in ("kv_heads", "ffn", "head_dim") and value == 0
            if name in found and name not in _OPEN and value != found[name] and not derived:
                raise ConfigError(f"{what}{name} is {value}, and {found[name]} in {self.file}.", hint)

    def _length(self, facts: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
        """The data's length, up to the model's own; a longer one must be an argument."""
        own = _value(self.fields, "max_position_embeddings")
        if not _is_positive(own, whole=True):
            raise _no_number(self.file, "max_position_embeddings", own)
        length = given.get("max_seq_len", facts.get("seq_len", own))
        if "max_seq_len" not in given and length > own:
            raise ConfigError(
                f"{self.file} has max_position_embeddings {own}, and the data {length} tokens a sample.",
                f"--data.seq_len {own}, or --model.args.max_seq_len {length} to go beyond",
            )
        return length

    def source(self, sizes: Any, build: Callable[[], nn.Module]) -> LlamaFolder:
        return LlamaFolder(
            weights=self.weights, folder=self.folder, fields=self.fields, sizes=asdict(sizes), build=build
        )


def maybe_llama(weights: str) -> LlamaConfigFile | None:
    """The config.json that --model.weights names: a folder's, a run directory's export's, or a hub id's."""
    if weights.startswith("hf:"):
        return _read(weights, find_folder(weights, "--model.weights"))
    for folder in (expanded(weights), expanded(weights) / "full_model"):
        if weights and (folder / "config.json").is_file():
            return _read(weights, folder)
    return None


def _read(weights: str, folder: Path) -> LlamaConfigFile:
    file = folder / "config.json"
    try:
        fields = json.loads(regular_text(file, SETTINGS))
        kind = fields.get("model_type")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        check_no_adapter(folder, "--model.weights", weights)
        raise ConfigError(
            f"--model.weights {weights}: {file} cannot be read: {error}.",
            SAVED,
        ) from None
    if not isinstance(kind, str) or kind not in CLASSES:
        raise ConfigError(
            f"--model.weights {weights}: {file} is of model_type {kind!a}; --model.name transformer reads "
            f"{', '.join(CLASSES)}.",
            f"--model.name hf:{folder} without --model.weights",
        )
    named_dtype(file, fields)
    return LlamaConfigFile(weights, folder, fields)


def _value(fields: Mapping[str, Any], name: str, default: Any = None) -> Any:
    found = fields.get(name)
    if found is None and name not in fields:
        found = _DEFAULTS[fields["model_type"]].get(name)
    return default if found is None else found


def _sizes_of(file: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    _check_computed(file, fields)
    found = {name: _value(fields, field) for name, field in SIZES.items()}
    missing = [SIZES[name] for name in REQUIRED if found[name] is None]
    if missing:
        raise ConfigError(f"{file} has no {missing[0]}.", SAVED)
    for name in NUMBERS:
        if found[name] is not None and not _is_positive(found[name], whole=name != "norm_eps"):
            raise _no_number(file, SIZES[name], found[name])
    kind, bias = fields["model_type"], bool(fields.get("attention_bias"))
    found["kv_heads"] = found["kv_heads"] or found["heads"]
    found["head_dim"] = found["head_dim"] or found["width"] // found["heads"]
    found["norm_eps"] = 1e-6 if found["norm_eps"] is None else found["norm_eps"]
    found["tied"] = bool(found["tied"])
    takes_bias = kind in ("llama", "qwen3")
    return found | {
        "qk_norm": kind == "qwen3",
        "qkv_bias": kind == "qwen2" or (takes_bias and bias),
        "out_bias": takes_bias and bias,
        "ffn_bias": kind == "llama" and bool(fields.get("mlp_bias")),
        **_rope_of(file, fields),
    }


def _is_positive(value: object, *, whole: bool) -> bool:
    kinds = int if whole else (int, float)
    return isinstance(value, kinds) and not isinstance(value, bool) and value > 0


def _no_number(file: Path, field: str, value: object) -> ConfigError:
    return ConfigError(f"{file} has {field} {value!a}, which is no positive number of its kind.", SAVED)


def _refused(file: Path, field: str, value: object, what: str) -> ConfigError:
    return ConfigError(
        f"{file} has {field} {value}: --model.name transformer computes {what}.",
        f"--model.name hf:{file.parent} without --model.weights",
    )


def _check_computed(file: Path, fields: Mapping[str, Any]) -> None:
    """Refuses fields that change what the model computes, and that the transformer does not have."""
    if (quantized := fields.get("quantization_config")) is not None:
        method = quantized.get("quant_method", "")
        raise ConfigError(
            f"{file}: its weights are quantized ({method}); FSDP trains floating-point ones.",
            "name a folder with the weights before quantization",
        )
    if fields.get("hidden_act", "silu") not in ("silu", "swish"):
        raise _refused(file, "hidden_act", fields["hidden_act"], "silu alone")
    if fields.get("attention_dropout"):
        raise _refused(file, "attention_dropout", fields["attention_dropout"], "attention without dropout")
    window = _value(fields, "sliding_window")
    if window is not None and (fields["model_type"] == "mistral" or fields.get("use_sliding_window")):
        raise _refused(file, "sliding_window", window, "full attention alone")
    other = set(fields.get("layer_types") or ()) - {"full_attention"}
    if other and (window is not None or fields["model_type"] == "mistral"):
        raise _refused(file, "layer_types", sorted(other)[0], "full attention alone")


def _rope_of(file: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    given = {**(fields.get("rope_scaling") or {}), **(fields.get("rope_parameters") or {})}
    kind = given.get("rope_type", given.get("type", "default"))
    sizes = {"rope_theta": float(given.get("rope_theta", fields.get("rope_theta") or 10_000.0))}
    part = given.get("partial_rotary_factor", fields.get("partial_rotary_factor")) or 1.0
    if part != 1.0:
        raise _refused(file, "partial_rotary_factor", part, "rotary positions of whole heads")
    if kind == "default":
        return sizes | {"rope_scaling": ""}
    if kind not in SCALINGS or not given.get("truncate", True):
        name, value = ("rope_type", kind) if kind not in SCALINGS else ("truncate", "false")
        raise _refused(file, name, value, f"default, {', '.join(SCALINGS)}")
    length = given.get("original_max_position_embeddings") or fields.get("original_max_position_embeddings")
    own = _value(fields, "max_position_embeddings")
    names = {
        "low_freq_factor": "rope_low_freq", "high_freq_factor": "rope_high_freq",
        "beta_fast": "rope_beta_fast", "beta_slow": "rope_beta_slow",
    }  # fmt: skip
    found = {name: float(given[field]) for field, name in names.items() if given.get(field)}
    factor = given.get("factor") or own / (length or own)
    found |= {"rope_factor": float(factor), "rope_attention": _attention(given, float(factor))}
    return sizes | found | {"rope_scaling": kind, "rope_original_len": length or own}


def _attention(given: Mapping[str, Any], factor: float) -> float:
    scale, over = given.get("mscale"), given.get("mscale_all_dim")
    if given.get("attention_factor") is None and scale and over:
        return yarn_attention(factor, scale) / yarn_attention(factor, over)
    return float(given.get("attention_factor") or 0.0)


# ---------------------------------------------------------------- tensors and config.json out


@dataclass(frozen=True, kw_only=True)
class LlamaFolder:
    """A transformer in transformers' format: read from a folder, or written from sizes alone."""

    weights: str = ""
    folder: Path | None = None
    fields: Mapping[str, Any]
    sizes: Mapping[str, Any]
    build: Callable[[], nn.Module]

    @property
    def flag(self) -> str:
        return f"--model.weights {self.weights}"

    @property
    def class_name(self) -> str:
        return CLASSES[self.fields["model_type"]]

    @property
    def new_head(self) -> bool:
        return False

    @property
    def dtype(self) -> torch.dtype | None:
        return named_dtype(Path(self.folder or "", "config.json"), self.fields)

    @property
    def hints(self) -> FolderHints:
        whole = "a folder that save_pretrained wrote, whose config.json is that of its weights"
        return FolderHints(
            no_weights=f"in Python, {self.class_name}.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)",
            missing=whole,
            shape=whole,
            tied=f'"tie_word_embeddings": false in {self.folder}/config.json',
            untied=f'"tie_word_embeddings": true in {self.folder}/config.json, if it was saved so',
        )

    def plan_names(self, model: Any, files: Mapping[str, Shape]) -> NamePlan:
        plan, known = NamePlan(), all_names(model)
        for name, tensor in model.named_parameters():
            names = [saved_name(one) for one in known[name]]
            found = [one for one in names if one in files]
            if not found:
                plan.missing.append(name)
                continue
            plan.plain[name] = found
            if files[found[0]] != tuple(tensor.shape):
                plan.misshapen[name] = files[found[0]]
        read = {one for names in plan.plain.values() for one in names}
        plan.unexpected = [
            one for one in files if one not in read and not one.endswith("rotary_emb.inv_freq")
        ]
        return plan

    def draw_missing(self, name: str, seed: int) -> Tensor:
        raise NotImplementedError

    def saved_pieces(self, model: Any) -> dict[str, dict[str, Tensor]]:
        return {name: {saved_name(name): tensor} for name, tensor in model.named_parameters()}

    def reverted(self, model: Any, name: str, tensor: Tensor) -> dict[str, Tensor]:
        return {saved_name(name): tensor}

    def saved_layer(self, name: str) -> str:
        return saved_layer(name)

    def config_json(self, dtype: torch.dtype) -> str:
        stored = str(dtype).removeprefix("torch.")
        fields = {key: value for key, value in self.fields.items() if key not in ("torch_dtype", "auto_map")}
        fields |= {"architectures": [self.class_name], "dtype": stored}
        if self.sizes["max_seq_len"] > _value(fields, "max_position_embeddings"):
            fields["max_position_embeddings"] = self.sizes["max_seq_len"]
        return json.dumps(fields, indent=2, sort_keys=True) + "\n"


def from_sizes(sizes: Mapping[str, Any], build: Callable[[], nn.Module]) -> LlamaFolder:
    """A transformer that started from no folder, as the class of the family that computes the same."""
    return LlamaFolder(fields=_fields_of(sizes), sizes=sizes, build=build)


def _fields_of(sizes: Mapping[str, Any]) -> dict[str, Any]:
    kind = _kind_of(sizes)
    rope: dict[str, Any] = {
        "rope_type": sizes["rope_scaling"] or "default",
        "rope_theta": sizes["rope_theta"],
    }
    if sizes["rope_scaling"]:
        rope["factor"] = sizes["rope_factor"]
    if sizes["rope_scaling"] in ("llama3", "yarn"):
        rope["original_max_position_embeddings"] = sizes["rope_original_len"]
    if sizes["rope_scaling"] == "llama3":
        rope |= {"low_freq_factor": sizes["rope_low_freq"], "high_freq_factor": sizes["rope_high_freq"]}
    if sizes["rope_scaling"] == "yarn":
        rope |= {"beta_fast": sizes["rope_beta_fast"], "beta_slow": sizes["rope_beta_slow"]}
        rope |= {"attention_factor": sizes["rope_attention"]} if sizes["rope_attention"] else {}
    return {
        "model_type": kind, "hidden_act": "silu", **{field: sizes[name] for name, field in SIZES.items()},
        "max_position_embeddings": sizes["max_seq_len"], "rope_parameters": rope,
        # The older names of the same, which other programs read
        "rope_theta": rope["rope_theta"], "rope_scaling": rope if sizes["rope_scaling"] else None,
        "attention_bias": sizes["qkv_bias"], "mlp_bias": sizes["ffn_bias"], "attention_dropout": 0.0,
        "use_sliding_window": False, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip


def _kind_of(sizes: Mapping[str, Any]) -> str:
    kind = "qwen3" if sizes["qk_norm"] else "llama"
    if sizes["qkv_bias"] and not sizes["out_bias"]:
        kind = "" if sizes["qk_norm"] else "qwen2"
    fits = sizes["qkv_bias"] or not sizes["out_bias"]
    if not kind or not fits or (sizes["ffn_bias"] and kind != "llama"):
        chosen = ", ".join(name for name in ("qk_norm", "qkv_bias", "out_bias", "ffn_bias") if sizes[name])
        raise ConfigError(
            f"--checkpoint.export_format hf: no class of transformers has {chosen} and no more.",
            "--checkpoint.export_format safetensors",
        )
    return kind
