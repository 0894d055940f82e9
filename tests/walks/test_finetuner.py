"""The first hour of a fine-tuner: the commands and the Python of docs/finetune.md as typed, with a chat model
made on the spot and a file with six odd conversations and a broken one.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import ROOT, commands, text_of
from tests.tokenize import chat

pytestmark = [pytest.mark.slow, pytest.mark.needs("transformers")]

PAGE = ROOT / "docs" / "finetune.md"
ODD: list[Any] = [
    [{"role": "user", "content": "and nobody answers"}],
    [*chat.said("Hi"), {"role": "assistant", "content": "not this", "weight": 0}],
    chat.said("An empty answer", ""),
    chat.said("Wie geht's? 🙂", "Gut, danke — und dir? 你好", system="Answer in kind."),
    chat.said("Hello there, how are you? " * 300, "Well"),
    [{"role": "user", "content": [{"type": "image"}]}, {"role": "assistant", "content": "A picture"}],
]
Typed = Callable[..., subprocess.CompletedProcess[str]]


def chats(count: int, first: int = 0) -> list[str]:
    talks = [chat.said(f"the capital of {n}", f"Paris {n}") for n in range(first, first + count)]
    return [json.dumps({"messages": talk}) for talk in talks]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a clone is, with a model and conversations in it."""
    folder = tmp_path_factory.mktemp("home")
    for name in ("train.py", "fsdp", "launch", "recipes"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "bin").mkdir()
    for name, before in (("python", ""), ("torchrun", " -m torch.distributed.run --standalone")):
        (folder / "bin" / name).write_text(f'#!/bin/sh\nexec "{sys.executable}"{before} "$@"\n')
        (folder / "bin" / name).chmod(0o755)
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = LlamaConfig(vocab_size=360, num_key_value_heads=1, eos_token_id=340, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder / "MODEL")
    chat.save_tokenizer(folder / "MODEL", chat.PLAIN)
    odd = [*(json.dumps({"messages": talk}) for talk in ODD), '{"messages": [{"role": "us']
    (folder / "chats.jsonl").write_text("\n".join([*chats(150), *odd, *chats(50)]))
    (folder / "val.jsonl").write_text("\n".join(chats(30, 200)))
    (folder / "test.jsonl").write_text("\n".join(chats(20, 300)))
    return folder


@pytest.fixture(scope="module")
def typed(home: Path) -> Typed:
    """Runs the command of the page that has the word, with further flags behind it."""

    def run(word: str, more: str = "") -> subprocess.CompletedProcess[str]:
        (command,) = (one for one in commands(PAGE) if re.search(word, one))
        environment = {
            **os.environ,
            "PATH": f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "XDG_CACHE_HOME": str(home / "cache"),
        }
        line = f"{command} {more}"
        return subprocess.run(
            line,
            shell=True,
            cwd=home,
            env=environment,
            capture_output=True,
            text=True,
            timeout=200,
        )

    return run


def records(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def run(home: Path, typed: Typed) -> Path:
    """Checked, and fine-tuned in two starts."""
    done = typed("fsdp.tokenize")
    assert done.returncode == 2, done.stdout + done.stderr
    for line in (
        "chats.jsonl: 207 rows, 203 conversations",
        "cut are 1 of 203, ",
        "2 rows left out, without a token to train on:\n",
        "  chats.jsonl line 151: no message is the assistant's",
        "2 bad rows left out:\n  chats.jsonl line 156: message 1 has a part of type 'image', and parts",
        "  chats.jsonl line 157 is not an object of JSON",
        "assistant\n  ⟦Paris 0<|im_end|>⟧",
        "HINT: mend them, or --data.args.bad_rows skip",
    ):
        assert line in done.stdout, done.stdout
    more = "--data.args.bad_rows skip --data.validation val.jsonl --optim.lr 3e-3"
    more += " --train.stop_after 1 --train.eval_answers 0"
    done = typed("sft.toml .*--run.dir", more)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 bad rows left out:" in done.stderr + done.stdout
    done = typed("--train.epochs 3", "--train.stop_after 0")
    assert done.returncode == 0, done.stdout + done.stderr
    return home / "runs" / "chat"


def test_a_model_and_conversations_become_a_folder_for_from_pretrained(
    home: Path, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [record for record in records(run) if "loss" in record]
    assert [record["step"] for record in steps] == list(range(1, len(steps) + 1))
    assert steps[-1]["epoch"] == 3
    (*_, last) = (record for record in records(run) if "eval_loss" in record)
    assert last["eval_perplexity"] == pytest.approx(math.exp(last["eval_loss"]))
    (code,) = re.findall(r"```python\n(.*?)```", text_of(PAGE), re.DOTALL)
    monkeypatch.chdir(home)
    capsys.readouterr()
    names: dict[str, Any] = {}
    exec(code, names)
    assert capsys.readouterr().out.endswith("\n")
    from transformers import AutoModelForCausalLM

    before = AutoModelForCausalLM.from_pretrained("MODEL").state_dict()
    after = names["model"].state_dict()
    assert before.keys() == after.keys()
    assert any(not before[name].equal(after[name]) for name in before)


@pytest.mark.long
def test_the_other_commands_of_the_page(home: Path, run: Path, typed: Typed) -> None:
    done = typed("evaluate_only", "--data.args.rows document")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "data test.jsonl, 20 samples" in done.stderr + done.stdout
    done = typed("lora.toml", "--data.args.bad_rows skip --train.epochs 1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (home / "runs/lora/full_model/adapter/adapter_model.safetensors").is_file()
    done = typed("fsdp.predict")
    assert (done.returncode, bool(done.stdout)) == (0, True), done.stderr
    assert typed("fsdp.plan").returncode == 0
