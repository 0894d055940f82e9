"""examples/lm_eval on an export: docs/models.md's command, with a chat model that has learnt the answers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, text_of
from tests.run.test_answers import chat_model
from tests.support.data_cache import on_a_rank
from tests.support.data_cache import own_cache as own_cache
from tests.support.world import run_world
from tests.tokenize.chat import said
from tests.tokenize.rows import write_lines

STEPS = "--data.seq_len 96 --train.steps 60 --train.global_batch 6 --optim.lr 1e-2 --data.args.heldout 0"


@pytest.mark.long
@pytest.mark.needs("transformers", "datasets", "lm_eval")
def test_lm_eval_finds_the_answers_that_were_trained_on(tmp_path: Path, own_cache: Path) -> None:
    lines = (ROOT / "examples" / "lm_eval" / "capitals.jsonl").read_text().splitlines()
    talks = [{"messages": said(row["question"], row["answer"])} for row in map(json.loads, lines)]
    path = write_lines(tmp_path / "chats.jsonl", talks * 4)
    model, run = chat_model(tmp_path / "model"), tmp_path / "run"
    flags = f"--model.name hf:{model} --data.name {path} --run.dir {run} --watch.enabled false {STEPS}"
    assert run_world(1, on_a_rank, flags.split(), str(own_cache)) == [None]
    (command,) = re.findall(r"^    (lm_eval .*)$", text_of(ROOT / "docs" / "models.md"), re.MULTILINE)
    words = command.replace("RUN", str(run)).split()
    done = subprocess.run(
        [sys.executable, "-m", *words, "--device", "cpu", "--output_path", str(tmp_path / "scores")],
        cwd=ROOT,
        env=os.environ | {"HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    (scores,) = (tmp_path / "scores").rglob("results_*.json")
    assert json.loads(scores.read_text())["results"]["capitals"]["exact_match,none"] == 1.0
