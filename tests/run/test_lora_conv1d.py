"""Adapters on GPT-2, whose layers are transformers' Conv1D: trained as by an independent loop and by PEFT,
saved as PEFT reads them, merged as PEFT merges them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp.config import Config
from fsdp.data import Cursor, build_dataset
from fsdp.models.lora import adapted, apply_lora
from tests.run.hf_folders import TEXTS, write_folder
from tests.support.adapters import draw_adapters
from tests.support.plain_loop import relative_difference
from tests.support.runs import Finished, run, settings

pytestmark = [pytest.mark.slow, pytest.mark.needs("transformers")]

LAYERS = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
RATE, STEPS, SCALE = 0.5, 5, 2.0
WORDS = (
    f"{TEXTS} causal --lora.rank 3 --lora.alpha 6 --precision.master fp64 --optim.name sgd "
    f"--optim.momentum 0 --optim.lr {RATE} --optim.schedule constant --optim.warmup_steps 0 "
    f"--train.clip_grad_norm 0 --train.steps {STEPS} --train.global_batch 6 --checkpoint.export_format both"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder("gpt2", tmp_path_factory.mktemp("gpt2"), torch.float64)


@pytest.fixture(scope="module")
def finished(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return run(2, tmp_path_factory.mktemp("run"), f"--model.name hf:{folder}", WORDS)


def base_of(folder: Path) -> Any:
    from transformers import GPT2LMHeadModel

    model: Any = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float64)
    return model


def first_adapters(folder: Path, config: Config) -> dict[str, Tensor]:
    """The initial A of each layer, which is drawn from the seed."""
    model = base_of(folder)
    apply_lora(model, config.lora)
    draw_adapters(model, config.run.seed)
    return {name: layer.lora_a.detach().clone() for name, layer in adapted(model)}


def batches(config: Config) -> list[dict[str, Tensor]]:
    data = build_dataset(config.data)
    cursor = Cursor(seed=config.run.seed, samples=len(data.train), global_batch=config.train.global_batch)
    return [data.train.batch(cursor.indices(step)) for step in range(STEPS)]


def loss_of(output: Any, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def step(loss: Tensor, trained: list[Tensor]) -> None:
    with torch.no_grad():
        for tensor, gradient in zip(trained, torch.autograd.grad(loss, trained), strict=True):
            tensor.sub_(RATE * gradient)


def trained_alone(folder: Path, config: Config) -> dict[str, Tensor]:
    """The whole weights W + s·(BA)ᵀ, by functional_call on the plain model."""
    model, a = base_of(folder), first_adapters(folder, config)
    plain = {name: p.detach() for name, p in model.named_parameters()}
    b = {name: torch.zeros(plain[f"{name}.weight"].shape[1], 3, dtype=torch.float64) for name in a}
    trained = [tensor.requires_grad_() for tensor in (*a.values(), *b.values())]

    def whole() -> dict[str, Tensor]:
        added = {f"{name}.weight": SCALE * (b[name] @ a[name]).T for name in a}
        return {name: value + added[name] if name in added else value for name, value in plain.items()}

    for batch in batches(config):
        given = {"attention_mask": batch["attention_mask"]}
        output = torch.func.functional_call(model, whole(), (batch["inputs"],), given)
        step(loss_of(output, batch), trained)
    return {name: value.detach() for name, value in whole().items()}


def test_adapters_on_conv1d_train_as_an_independent_loop(folder: Path, finished: Finished) -> None:
    config = settings(f"--model.name hf:{folder}", WORDS)
    expected = trained_alone(folder, config)
    plain = base_of(folder).state_dict()
    moved = {name for name in expected if not torch.equal(finished.parameters[name], plain[name])}
    assert moved == {f"transformer.h.{at}.{layer}.weight" for at in (0, 1) for layer in LAYERS}
    assert relative_difference(finished.parameters, expected) < 1e-12
    changes = [{n: state[n] - plain[n] for n in moved} for state in (finished.parameters, expected)]
    assert relative_difference(*changes) < 1e-10


@pytest.mark.needs("peft")
def test_peft_reads_and_merges_the_adapters_to_the_same_weights(folder: Path, finished: Finished) -> None:
    from peft import PeftModel

    beside = PeftModel.from_pretrained(base_of(folder), finished.run / "full_model" / "adapter").eval()
    inputs = torch.arange(1, 13).view(2, 6)
    whole = base_of(finished.run / "full_model").eval()
    with torch.no_grad():
        assert torch.allclose(beside(inputs).logits, whole(inputs).logits, rtol=0, atol=1e-12)
    merged = beside.merge_and_unload().state_dict()
    assert relative_difference(merged, finished.parameters) < 1e-14
