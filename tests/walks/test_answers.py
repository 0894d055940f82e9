"""A chat model fine-tuned on conversations gives the same answer from its run, from a checkpoint's path and
from its export by transformers' generate.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp.checkpoint import __main__ as checkpoints
from fsdp.predict.__main__ import main
from tests.run.test_answers import CHATS, chat_model, of_transformers
from tests.support.data_cache import own_cache as own_cache
from tests.tokenize.chat import STYLES
from tests.tokenize.rows import write_lines

ROOT = Path(__file__).parents[2]
TEMPLATE = STYLES["chatml"].plain.replace("You are helpful.", "Name a city.")
FLAGS = (
    "--data.name chats.jsonl --data.seq_len 64 --data.args.rows packed --data.args.heldout 0.2 "
    "--data.args.chat_template own.jinja --train.steps 12 --train.global_batch 8 --optim.lr 1e-2 "
    "--train.eval_every_steps 4 --checkpoint.every_steps 4 --run.dir runs/mine"
)


@pytest.mark.slow
@pytest.mark.needs("transformers")
def test_run_checkpoint_and_export_give_one_answer(
    tmp_path: Path, own_cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = chat_model(tmp_path / "model")
    write_lines(tmp_path / "chats.jsonl", CHATS)
    (tmp_path / "own.jinja").write_text(TEMPLATE)
    run = tmp_path / "runs" / "mine"
    started = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [
            *started,
            str(ROOT / "train.py"),
            "--model.name",
            f"hf:{model}",
            "--run.dir",
            str(run),
            *FLAGS.split(),
        ],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "--trust-code" not in done.stdout
    assert done.stdout.count("  answer     ") == 6
    assert all(word in done.stdout for word in ("tok/s", "  question   ", "  reference  "))
    record = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    assert record["positions_per_s"] > record["per_s"] > 0
    assert 0 < record["padding"] < 1
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "")  # the command sets it
    assert checkpoints.main(["runs/mine", "export", "--out", "again"]) == 0
    for name in ("chat_template.jinja", "tokenizer_config.json", "tokenizer.json"):
        assert (run / "full_model" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    settings = json.loads((tmp_path / "again" / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == (tmp_path / "again" / "chat_template.jinja").read_text() == TEMPLATE
    capsys.readouterr()
    talk = [CHATS[7]["messages"][0], {"role": "assistant", "content": "7: Rome."}, CHATS[8]["messages"][0]]
    greedy = ["--prompt", json.dumps(talk), "--temperature", "0", "--tokens", "24"]
    _, expected = of_transformers(run / "full_model", talk, 24)
    for place in ("runs/mine", "runs/mine/checkpoints/step-00000012"):
        assert main([place, *greedy]) == 0
        assert capsys.readouterr().out == f"{expected}\n"
    logged = json.loads((run / "answers.jsonl").read_text().splitlines()[0])
    texts = [[message["content"] for message in row["messages"]] for row in CHATS]
    (question,) = (text for text, reference in texts if reference == logged["reference"])
    flags = ["--prompt", question, "--temperature", "0", "--tokens", "128"]
    assert main(["runs/mine/checkpoints/step-00000004", *flags]) == 0
    assert " ".join(capsys.readouterr().out.split()) == " ".join(logged["answer"].split())
    asked = [str(row["messages"][0]["content"]) for row in CHATS[:2]]
    assert main(["runs/mine", *(word for text in asked for word in ("--prompt", text)), *greedy[2:]]) == 0
    lines = capsys.readouterr().out.split("\n\n")
    for text, part in zip(asked, lines, strict=True):
        _, answer = of_transformers(run / "full_model", [{"role": "user", "content": text}], 24)
        assert part.rstrip("\n") == f"question   {text}\nanswer     {answer}"
