"""--mesh.expert: mixtures of transformers on every shape train as one process does, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp.base.errors import ConfigError
from fsdp.run.job import prepare, trained_model
from tests.models.small_hf import Texts
from tests.support.runs import Finished, failures, finished, run, settings

pytestmark = pytest.mark.needs("transformers")

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 32, "num_experts_per_tok": 2,
}  # fmt: skip
SMALL = {"moe_intermediate_size": 16, "num_experts": 8, "head_dim": 8}
ROUTER = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
LATENT = {
    "num_key_value_heads": 4, "n_routed_experts": 8, "n_group": 2, "topk_group": 1,
    "first_k_dense_replace": 1, "moe_intermediate_size": 16, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": SMALL | ROUTER,
    "DeepseekV3": LATENT,
    "GptOss": {"num_local_experts": 4, "head_dim": 8, "attn_implementation": "eager"},
    "Llama": {},
}
FLAGS = (
    "--data.name tests.models.small_hf:texts --data.args.kind causal --precision.master fp64 "
    "--train.steps 3 --train.global_batch 8 --optim.warmup_steps 0 --checkpoint.export_format torch"
)
HSDP = "--mesh.strategy hsdp --mesh.replicate 2 --mesh.shard 2 --mesh.expert 2"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers

    path = tmp_path_factory.mktemp("mixtures")
    for name, fields in MODELS.items():
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(**SIZES | fields)
        getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(path / name)
    return path


def largest_difference(one: Finished, other: Finished) -> float:
    """Of losses and norms, relative; of the parameters after the last step."""
    assert len(one.records) == len(other.records)
    apart = [float((one.parameters[name] - p).abs().max()) for name, p in other.parameters.items()]
    for mine, theirs in zip(one.records, other.records, strict=True):
        apart += [abs(mine[n] / theirs[n] - 1) for n in ("loss", "grad_norm", "aux_loss") if n in mine]
    return max(apart)


@pytest.mark.parametrize(
    ("model", "ranks", "shape", "micro"),
    [
        ("Mixtral", 2, "--mesh.expert 2 --memory.activation_checkpointing full", 2),
        pytest.param("Qwen3Moe", 4, HSDP, 1, marks=pytest.mark.long),
        ("DeepseekV3", 4, "--mesh.expert 2", 2),
        ("GptOss", 4, "--mesh.expert 4", 1),
        ("Qwen3Moe", 4, "--mesh.tensor 2 --mesh.expert 4", 1),
    ],
)
def test_experts_on_their_ranks_train_as_in_one_process(
    folders: Path, tmp_path: Path, model: str, ranks: int, shape: str, micro: int
) -> None:
    """Rows of the micro-batch are the same, on which a router's loss depends."""
    words = f"{FLAGS} --model.name hf:{folders / model} --train.micro_batch {micro}"
    one, other = run(1, tmp_path / "one", words), run(ranks, tmp_path / "other", words, shape)
    assert largest_difference(one, other) < 1e-10
    assert all(record["expert_load"] > 1 for record in other.records)


class _OneToken(Texts):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": torch.full((9,), 7), "labels": self.tokens[index]}


def one_token() -> Texts:
    return _OneToken(50, "causal")


def test_an_expert_rank_without_tokens(folders: Path, tmp_path: Path) -> None:
    """Equal tokens select two experts of eight: most ranks have none to compute."""
    data = "--data.name tests.shard.test_expert:one_token --train.micro_batch 1"
    words = f"{FLAGS.replace('--data.args.kind causal', '')} {data} --model.name hf:{folders / 'Qwen3Moe'}"
    one, other = run(1, tmp_path / "one", words), run(4, tmp_path / "other", words, "--mesh.expert 4")
    assert largest_difference(one, other) < 1e-10
    assert {(record["expert_load"], record["experts_idle"]) for record in other.records} == {(4, 12)}


@pytest.mark.long
def test_resumes_at_the_same_and_at_other_shapes(folders: Path, tmp_path: Path) -> None:
    words = f"{FLAGS} --model.name hf:{folders / 'Qwen3Moe'} --train.micro_batch 1 --optim.ema 0.9"
    words = words.replace("--train.steps 3", "--train.steps 4")
    dropping = f"{words} --model.args.attention_dropout 0.1 --mesh.expert 2"
    whole = run(4, tmp_path / "whole", dropping)
    assert failures(4, tmp_path / "same", dropping, "--train.stop_after 2") == [None] * 4
    same = run(4, tmp_path / "same", dropping)
    assert largest_difference(whole, same) == 0

    plain, path = run(4, tmp_path / "plain", words), tmp_path / "other"
    shapes = ((2, "--mesh.expert 2"), (4, ""), (4, HSDP), (4, "--mesh.expert 4"))
    for stop, (ranks, shape) in enumerate(shapes, 1):
        assert failures(ranks, path, words, shape, f"--train.stop_after {stop}") == [None] * ranks
    assert largest_difference(plain, finished(path)) < 1e-9


@pytest.mark.parametrize(
    ("model", "flags", "fault", "hint"),
    [
        ("Llama", "", "has no plan of transformers that divides experts", "--mesh.expert 1"),
        ("Mixtral", "--model.args.num_local_experts 6 --mesh.expert 4", "the 6 experts", "--mesh.expert 2"),
        ("Mixtral", "--speed.float8 tensorwise", "speed.float8", "--speed.float8 off"),
        ("Mixtral", "--mesh.reshard_after_forward 2", "reshard", "--mesh.reshard_after_forward true"),
        ("Mixtral", "--lora.rank 2 --lora.targets *experts*", "matches no", "leave --lora.targets out"),
        ("tests.models.unusual:Routed", "", "a module for each expert", "--mesh.expert 1"),
    ],
)
def test_what_experts_cannot_be_divided_with(
    folders: Path, model: str, flags: str, fault: str, hint: str
) -> None:
    name = model if ":" in model else f"hf:{folders / model}"

    def refused() -> None:
        config = settings(FLAGS, f"--mesh.expert 2 --model.name {name}", flags)
        trained_model(config, prepare(config, world_size=4, num_nodes=1, device=None))

    with pytest.raises(ConfigError, match=fault) as raised:
        refused()
    assert str(raised.value).endswith(f"HINT: {hint}")
