"""Runs of --model.name transformer that end in a folder of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp.checkpoint.__main__ import main as checkpoint
from tests.support.runs import on_a_rank
from tests.support.world import run_world

pytestmark = [pytest.mark.slow, pytest.mark.needs("transformers")]

DATA = "--data.name synthetic --data.args.kind tokens --data.args.vocab_size 31 --data.seq_len 8"
QUIET = "--train.global_batch 12 --checkpoint.every_steps 1000 --watch.enabled false --optim.lr 1e-2"
TOKENS = torch.arange(1, 17).view(2, 8)


def train(ranks: int, run: Path, words: str) -> None:
    flags = f"--run.dir {run} --model.name transformer {DATA} {QUIET} {words}"
    said = run_world(ranks, on_a_rank, flags.split())
    assert said == [None] * ranks, said


def logits(folder: Path) -> Tensor:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        found: Tensor = model.eval()(TOKENS).logits
    return found


@pytest.mark.long
def test_a_model_from_scratch_is_exported_as_llama(tmp_path: Path) -> None:
    words = "--model.args.width 24 --model.args.heads 2 --model.args.kv_heads 1 --train.steps 2"
    train(2, tmp_path / "run", f"{words} --checkpoint.export_format hf")
    full = tmp_path / "run" / "full_model"
    assert json.loads((full / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    train(2, tmp_path / "next", f"--model.name hf:{full} --train.steps 1 --optim.lr 1e-12")
    assert torch.allclose(logits(tmp_path / "next" / "full_model"), logits(full), atol=1e-5)
    for form, folders in (("hf", True), ("safetensors", False)):
        out = tmp_path / form
        assert checkpoint([str(tmp_path / "run"), "export", "--format", form, "--out", str(out)]) == 0
        assert (out / "config.json").exists() is folders, form
