"""Runs of --model.name transformer that start from a folder of transformers, or end in one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp.base.torchvision_import import prepare_torchvision
from fsdp.checkpoint.__main__ import main as checkpoint
from fsdp.predict.__main__ import main as predict
from tests.run.hf_folders import write_folder
from tests.run.test_pretrained import write_tokenizer
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
    prepare_torchvision()
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        found: Tensor = model.eval()(TOKENS).logits
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = write_folder("qwen3", tmp_path / "source")
    write_tokenizer(found)
    return found


def test_weights_go_in_and_come_out(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    still = "--train.steps 1 --optim.lr 1e-12 --optim.weight_decay 0"
    train(2, tmp_path / "still", f"--model.weights hf:{folder} {still}")
    assert torch.allclose(logits(tmp_path / "still" / "full_model"), logits(folder), atol=1e-5)
    train(2, tmp_path / "run", f"--model.weights {folder} --train.steps 4 --train.stop_after 2")
    train(3, tmp_path / "run", f"--model.weights {folder} --train.steps 4")
    full = tmp_path / "run" / "full_model"
    assert json.loads((full / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
    assert (full / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    trained = logits(full)
    assert not torch.allclose(trained, logits(folder), atol=1e-2)
    assert checkpoint([str(tmp_path / "run"), "export", "--out", str(tmp_path / "again")]) == 0
    assert torch.equal(logits(tmp_path / "again"), trained)
    shutil.rmtree(folder)  # the export alone is read
    prompt = ["--prompt", "1 2 3 4", "--tokens", "3", "--temperature", "0"]
    capsys.readouterr()
    assert predict([str(tmp_path / "run"), *prompt]) == 0
    assert len(capsys.readouterr().out.split()) == 7


def test_a_folder_that_is_gone_is_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"--model.weights {folder} --train.steps 2"
    train(2, tmp_path / "whole", words)
    train(1, tmp_path / "part", f"{words} --train.stop_after 1 --optim.ema 0.5")
    shutil.rmtree(folder)
    missing = f"--model.weights {folder} does not exist. HINT: "
    for run, hint in (("part", "put it back"), ("whole", f"--model.weights {tmp_path / 'whole/full_model'}")):
        flags = f"--run.dir {tmp_path / run} --model.name transformer {DATA} {QUIET} {words}"
        [said] = run_world(1, on_a_rank, flags.split())
        assert said is not None
        assert missing + hint in said
    train(1, tmp_path / "whole", f"--model.weights {tmp_path / 'whole/full_model'} --train.steps 3")
    assert checkpoint([str(tmp_path / "part"), "export"]) == 2
    assert f"has --model.weights {folder}, which no longer exists. HINT: put it back, or --format torch" in (
        capsys.readouterr().err
    )
    for more in ([], ["--ema"]):
        assert checkpoint([str(tmp_path / "part"), "export", "--format", "torch", *more]) == 0


def test_a_model_from_scratch_is_exported_as_llama(tmp_path: Path) -> None:
    words = "--model.args.width 24 --model.args.heads 2 --model.args.kv_heads 1 --train.steps 2"
    train(2, tmp_path / "run", f"{words} --checkpoint.export_format hf")
    full = tmp_path / "run" / "full_model"
    assert json.loads((full / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    found = logits(full)
    train(2, tmp_path / "next", f"--model.weights {full} --train.steps 1 --optim.lr 1e-12")
    assert torch.allclose(logits(tmp_path / "next" / "full_model"), found, atol=1e-5)
    for form, folders in (("hf", True), ("safetensors", False)):
        out = tmp_path / form
        assert checkpoint([str(tmp_path / "run"), "export", "--format", form, "--out", str(out)]) == 0
        assert (out / "config.json").exists() is folders, form


@pytest.mark.long
def test_adapters_have_the_names_of_transformers(folder: Path, tmp_path: Path) -> None:
    words = f"--model.weights {folder} --train.steps 2 --lora.rank 2 --lora.targets q,down"
    train(2, tmp_path / "run", words)
    full = tmp_path / "run" / "full_model"
    about = json.loads((full / "adapter" / "adapter_config.json").read_text())
    assert about["base_model_name_or_path"] == str(folder)
    assert about["target_modules"][0] == "model.layers.0.mlp.down_proj"
    assert not torch.allclose(logits(full), logits(folder), atol=1e-3)


def test_a_format_that_the_model_has_not_is_refused(tmp_path: Path) -> None:
    flags = f"--run.dir {tmp_path} {QUIET} --checkpoint.export_format hf --model.name"
    [said] = run_world(1, on_a_rank, f"{flags} mlp".split())
    assert said is not None
    assert "--checkpoint.export_format hf: mlp is no model of transformers." in said
    [said] = run_world(1, on_a_rank, f"{flags} transformer {DATA} --model.args.out_bias true".split())
    assert said is not None
    assert "no class of transformers has out_bias and no more" in said
