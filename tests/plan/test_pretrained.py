"""python -m fsdp.plan of folders of transformers, from their config.json alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import plan_hf
from fsdp.plan.__main__ import main
from tests.models.more_hf import MODELS, build
from tests.support.marks import sample_are

pytestmark = [pytest.mark.slow, pytest.mark.needs("transformers")]

FIXED = ("--plan.fix", "true", "--plan.gpus", "4", "--train.global_batch", "8", "--data.seq_len", "64")


WORDS = ("--memory.activation_checkpointing ops", "--lora.rank 8")
CASES = [(model, words) for model in ("llama", "vit") for words in WORDS]
UNITS = {"llama": "tok/s/GPU", "vit": "sample/s/GPU"}


@pytest.mark.parametrize(("name", "words"), sample_are([("llama", WORDS[1])], CASES))
def test_a_folder_is_planned(
    name: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan_hf.write_folder(name, tmp_path)
    images = () if name == "llama" else plan_hf.IMAGES
    assert main(["--model.name", f"hf:{tmp_path}", *FIXED, *images, *words.split()]) == 0
    printed = capsys.readouterr().out
    assert UNITS[name] in printed


def test_a_model_that_reads_labels_needs_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan_hf.write_folder("bert", tmp_path)
    assert main(["--model.name", f"hf:{tmp_path}", *FIXED]) == 2
    assert "a BertForMaskedLM reads samples that need a --data.name. HINT: --data.name" in (
        capsys.readouterr().err
    )
    assert main(["--model.name", f"hf:{tmp_path}", *FIXED, "--data.name", "bench.plan_hf:texts"]) == 0


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("name", sample_are(["deepseek_v3"], ["deepseek_v3", "granitemoe", "qwen3_next"]))
def test_mixtures_of_experts_are_planned(
    name: str, dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where their sizes leave a run with the loop over experts, which reads values."""
    cls, fields = MODELS[name]
    build(cls, fields).save_pretrained(tmp_path)  # type: ignore[operator]
    assert main(["--model.name", f"hf:{tmp_path}", *FIXED, "--precision.param", dtype]) == 0
    assert "tok/s/GPU" in capsys.readouterr().out


def test_layers_dropped_at_random_are_planned_as_present(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--model.name tests.plan.own:Dropping --data.name synthetic --data.args.kind tokens"
    assert main([*words.split(), "--data.args.vocab_size", "31", *FIXED]) == 0
    assert "tok/s/GPU" in capsys.readouterr().out


@pytest.mark.parametrize("gpu", ["mi300x", "gb200"])
def test_a_card_that_nobody_measured_is_said_to_be(gpu: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--plan.gpu", gpu, *FIXED]) == 0
    assert f"{gpu}: its rates are unmeasured" in capsys.readouterr().out
