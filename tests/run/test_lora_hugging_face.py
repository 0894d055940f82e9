"""Adapters on a Hugging Face model built from its config: they alone move, and the merged export answers as
they do.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp.checkpoint.full_state import FullState, open_safetensors
from fsdp.data import build_dataset
from fsdp.models.lora import adapted, apply_lora
from fsdp.predict.trained import open_run
from tests.run.test_lora_runs import plain_model, sizes_of
from tests.support.runs import Finished, run, settings

pytestmark = [pytest.mark.slow, pytest.mark.needs("transformers")]  # importing transformers takes seconds

LLAMA = "--model.name tests.support.llama:llama --data.name tests.support.user_code:sentences"
LORA = "--lora.rank 4 --lora.targets q_proj,v_proj --train.steps 6 --optim.warmup_steps 0"
TOKENS = torch.randint(0, 31, (3, 9), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module", params=["", "--model.args.tied true"])
def finished(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Finished, list[str]]:
    words = [LLAMA, LORA, request.param]
    return run(2, tmp_path_factory.mktemp("llama"), *words), words


def with_adapters(words: list[str], adapters: FullState) -> nn.Module:
    """The untouched base in one process, with what the run trained beside it."""
    config = settings(*words)
    model = plain_model(config).float()
    apply_lora(model, config.lora)
    for name, layer in adapted(model):
        with torch.no_grad():
            layer.lora_a.copy_(adapters[f"base_model.model.{name}.lora_A.weight"])
            layer.lora_b.copy_(adapters[f"base_model.model.{name}.lora_B.weight"])
    return model.eval()


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(TOKENS).logits
    return found


def loss_of(state: Mapping[str, Tensor], words: list[str]) -> float:
    """Over all sentences that were trained on: a step's own loss is another batch's each time."""
    config = settings(*words)
    model = plain_model(config).float().eval()
    model.load_state_dict(state)
    data = build_dataset(config.data).train
    batch = data.batch(np.arange(len(data)))
    with torch.no_grad():
        found = model(batch["inputs"]).logits
    return float(F.cross_entropy(found.flatten(0, 1), batch["targets"].flatten(), ignore_index=-100))


def test_only_adapters_move(finished: tuple[Finished, list[str]]) -> None:
    one, words = finished
    assert all(".lora_" in key for key in sizes_of(one.run))
    plain = plain_model(settings(*words)).float().state_dict()
    moved = {name for name, value in plain.items() if not torch.equal(value, one.parameters[name])}
    assert moved == {f"model.layers.{i}.self_attn.{p}_proj.weight" for i in range(2) for p in "qv"}
    assert loss_of(one.parameters, words) < loss_of(plain, words)


def test_the_merged_export_predicts_as_base_and_adapters_do(finished: tuple[Finished, list[str]]) -> None:
    one, words = finished
    stored = open_safetensors(one.run / "full_model/adapter/adapter_model.safetensors")
    adapters = FullState("adapter", dict(stored))
    beside = logits(with_adapters(words, adapters))
    plain = plain_model(settings(*words)).float().eval()
    before = logits(plain)
    plain.load_state_dict(one.parameters)
    assert float((logits(plain) - beside).abs().max()) < 1e-5
    assert float((before - beside).abs().max()) > 1e-3


def test_a_prediction_reads_the_merged_export(finished: tuple[Finished, list[str]]) -> None:
    one, words = finished
    plain = plain_model(settings(*words)).float().eval()
    plain.load_state_dict(one.parameters)
    asked = open_run(one.run, trusted=("tests.support.llama:llama", "tests.support.user_code:sentences"))
    assert torch.allclose(asked.logits(TOKENS), logits(plain), atol=1e-5)
