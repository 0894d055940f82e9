"""A pretrained model on one's own text, begun under torchrun, ended under Ray, read by transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.ray.runs import Run
from tests.ray.test_continued import typed
from tests.run.hf_folders import write_folder
from tests.run.test_pretrained import write_tokenizer

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.long, pytest.mark.needs("transformers")]

STEPS, SEQ_LEN = 24, 16
TRAIN = (
    "torchrun --nproc_per_node=2 train.py --model.name hf:{folder} --data.name {text} "
    f"--data.tokenizer {{folder}} --data.seq_len {SEQ_LEN} --train.steps {STEPS} --train.global_batch 8 "
    "--run.log_every_steps 1 --optim.lr 1e-2 --run.dir RUN"
)


def write_text(place: Path) -> Path:
    """Documents in which each word follows from the one before."""
    rows = [" ".join(f"w{(start + 3 * at) % 30 + 1}" for at in range(40)) for start in range(60)]
    place.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return place


def loss_on(folder: Path, text: str) -> float:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids
    with torch.no_grad():
        return float(model(input_ids=tokens, labels=tokens).loss)


def test_begun_under_torchrun_ended_under_ray_and_better_on_its_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder, text = write_folder("llama", tmp_path / "source"), write_text(tmp_path / "text.jsonl")
    write_tokenizer(folder, eos_token="w0")
    command = TRAIN.format(folder=folder, text=text)
    straight, parts = tmp_path / "straight", tmp_path / "parts"
    whole = typed(command, straight)
    assert whole.returncode == 0, whole.stdout + whole.stderr
    begun = typed(command, parts, "--train.stop_after", "10")
    assert begun.returncode == 0, begun.stdout + begun.stderr
    ended = typed(
        "python train.py --backend ray --ray.num_workers 2 --config RUN/config.toml --run.dir RUN",
        parts,
        "--train.stop_after",
        "0",
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert [start["launcher"] for start in Run(parts).starts] == ["torchrun", "ray"]
    assert Run(parts).losses == Run(straight).losses
    spoken = " ".join(f"w{(7 + 3 * at) % 30 + 1}" for at in range(30))
    assert loss_on(parts / "full_model", spoken) < loss_on(folder, spoken) - 0.5
