"""python -m fsdp.plan of folders of transformers, from their config.json alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import plan_hf
from fsdp.plan.__main__ import main
from tests.support.marks import sample_are

pytestmark = [pytest.mark.slow, pytest.mark.needs("transformers")]

FIXED = ("--plan.fix", "true", "--plan.gpus", "4", "--train.global_batch", "8", "--data.seq_len", "64")


WORDS = ("--memory.activation_checkpointing ops", "--lora.rank 8")
CASES = [(model, words) for model in ("llama", "vit") for words in WORDS]
UNITS = {"llama": "tok/s/GPU", "vit": "sample/s/GPU"}


@pytest.mark.parametrize(("name", "words"), sample_are([("llama", WORDS[1])], CASES))
def test_a_folder_is_planned_without_data(
    name: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan_hf.write_folder(name, tmp_path)
    assert main(["--model.name", f"hf:{tmp_path}", *FIXED, *words.split()]) == 0
    printed = capsys.readouterr().out
    assert UNITS[name] in printed
    assert "units: 8 of " in printed


def test_a_model_that_reads_labels_needs_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan_hf.write_folder("bert", tmp_path)
    assert main(["--model.name", f"hf:{tmp_path}", *FIXED]) == 2
    assert "a BertForMaskedLM reads samples that --data.name digits does not have. HINT: --data.name" in (
        capsys.readouterr().err
    )
    assert main(["--model.name", f"hf:{tmp_path}", *FIXED, "--data.name", "bench.plan_hf:texts"]) == 0
