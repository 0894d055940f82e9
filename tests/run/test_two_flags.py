"""A folder of save_pretrained and a .jsonl, by two flags: trained, exported, and read by from_pretrained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp.base.torch_private.core import prepare_torchvision
from tests.models import more_hf
from tests.support.data_cache import on_a_rank
from tests.support.data_cache import own_cache as own_cache
from tests.support.marks import sample_are
from tests.support.world import run_world
from tests.tokenize.chat import save_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.needs("transformers")]

TEXT = "the capital of France is Paris. Hello there, how are you?"
FLAGS = (
    "--train.steps 12 --train.global_batch 4 --data.seq_len 16 --optim.lr 1e-2 --checkpoint.every_steps 1000 "
    "--watch.enabled false --memory.activation_checkpointing ops"
)


def loss_of(folder: Path) -> float:
    """Of the text, by the folder's own tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tokens = torch.tensor([tokenizer(TEXT)["input_ids"]])
    with torch.no_grad():
        return float(model.eval()(input_ids=tokens, labels=tokens).loss)


@pytest.mark.parametrize("name", sample_are(["phi3"], ["phi3", "bloom", "jamba", "deepseek_v3"]))
def test_a_pretrained_folder_learns_a_text(name: str, tmp_path: Path, own_cache: Path) -> None:
    prepare_torchvision()
    import transformers

    cls_name, fields = more_hf.MODELS[name]
    cls: Any = getattr(transformers, cls_name)
    torch.manual_seed(0)
    folder = tmp_path / "model"
    cls(cls.config_class(**(fields | {"vocab_size": 352}))).save_pretrained(folder)
    save_tokenizer(folder, None)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": TEXT}) + "\n" for _ in range(60)))
    words = ["--run.dir", str(tmp_path / "run"), "--model.name", f"hf:{folder}", "--data.name", str(rows)]
    assert run_world(2, on_a_rank, [*words, *FLAGS.split()], str(own_cache)) == [None, None]
    assert loss_of(tmp_path / "run" / "full_model") < 0.8 * loss_of(folder)
