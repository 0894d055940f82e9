"""python -m fsdp.parity as a command: a table, a verdict, an exit code."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fsdp.base.errors import ConfigError
from fsdp.distributed.mesh import MeshSizes
from fsdp.models.attention import check_documents_apart
from fsdp.parity.__main__ import ParityOptions, Row, compare, difference_of, job_of, rows
from fsdp.parity.reference import PlainLoop, TrainingRecord
from fsdp.run.job import prepare, trained_model
from tests.models.small_hf import SIZES
from tests.run.hf_folders import DATA, write_folder
from tests.support.data_cache import own_cache as own_cache
from tests.support.runs import settings
from tests.test_house import imports
from tests.tokenize.rows import write_lines

ROOT = Path(__file__).parents[2]
OWN = "tests.support.user_code"
CPU = torch.device("cpu")
SMALL = f"--model.name {OWN}:Uneven --data.name {OWN}:vectors --train.global_batch 12".split()


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.needs("transformers")
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_a_folder_of_transformers_with_default_flags(name: str, tmp_path: Path) -> None:
    folder = write_folder(name, tmp_path / name)
    words = ["--model.name", f"hf:{folder}", *DATA[name].split(), "--train.global_batch", "7"]
    command = [sys.executable, "-m", "fsdp.parity", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    *table, verdict = done.stdout.splitlines()
    without, axes = table[1 : 1 + len(rows(2))], table[1 + len(rows(2)) :]
    assert all(line.endswith("same") for line in without)
    # one line for an axis that the model cannot run
    assert all(line.endswith("same") or "not possible: " in line for line in axes)
    assert "not possible: --mesh.expert" in axes[-1]
    assert "holds: every possible mesh trains as one process does" in verdict


@pytest.mark.slow
@pytest.mark.needs("transformers")
def test_the_plain_loop_has_documents_apart(tmp_path: Path, own_cache: Path) -> None:
    """By the mask of transformers, which makes none where the model has a cache of keys and values."""
    path = write_lines(tmp_path / "a.jsonl", [{"text": "once upon a time"[: 2 + n % 14]} for n in range(90)])
    words = f"--data.name {path} --data.args.rows packed --data.seq_len 16 --train.global_batch 4"
    options = ["--model.name", "tests.run.test_packed_runs:mistral", *words.split()]
    asked = ParityOptions(options, 2, "fp64", 1)
    job = job_of(asked, CPU)
    model = PlainLoop(asked.plain, job, CPU).model
    tokens = job.data.train.batch(np.arange(2))["inputs"]
    check_documents_apart(lambda row, at: model(row, position_ids=at).logits, tokens, model, "mistral")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tried", "words", "code", "reason", "verdict"),
    [
        # DDP reduces the gradient of every parameter, and one has none.
        pytest.param(
            [Row(MeshSizes("ddp", 2, 1), "true", 1), Row(MeshSizes("fsdp", 1, 2), "true", 1)],
            ["--model.name", "tests.models.unusual:Unused"], 0, "extra.weight", "1 of 2 meshes are not",
            marks=pytest.mark.long,
        ),
        ([Row(MeshSizes("ddp", 2, 1), "true", 1), Row(MeshSizes("hsdp", 2, 1), "true", 1)],
         ["--mesh.unsharded", "head.weight"], 0, "--mesh.unsharded", "1 of 2 meshes are not"),
        # The plain loop had KeyError: 'targets'.
        ([Row(MeshSizes("fsdp", 1, 2), "true", 1)],
         ["--data.name", "tests.models.unusual:numbers"], 2, "no targets", "no mesh was compared"),
    ],
    ids=["unused parameter", "refused flag", "logits without targets"],
)  # fmt: skip
def test_a_mesh_on_which_a_rank_fails_is_not_possible_and_the_next_is_compared(
    tried: list[Row],
    words: list[str],
    code: int,
    reason: str,
    verdict: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    assert compare(ParityOptions([*SMALL, *words], 2, "fp64", 2), tried) == code
    _, impossible, *compared, last = capsys.readouterr().out.splitlines()
    assert "not possible: " in impossible
    assert reason in impossible
    assert all(line.endswith("same") for line in compared)
    assert verdict in last
    assert ("holds" in last) is bool(compared)


@pytest.mark.needs("transformers")
def test_the_hint_for_dropout_turns_it_off(tmp_path: Path) -> None:
    """BERT's configuration has two fields for it, and none of the name dropout."""
    from transformers import BertConfig

    BertConfig(**SIZES, architectures=["BertForMaskedLM"]).save_pretrained(tmp_path)
    words = ["--model.name", f"hf:{tmp_path}", "--model.weights", "none", *DATA["bert"].split()]
    with pytest.raises(ConfigError, match=r"dropout drops values at random: .* HINT: --model") as caught:
        job_of(ParityOptions(words, 2, "fp64", 2), CPU)
    assert caught.value.hint is not None
    job_of(ParityOptions([*words, *caught.value.hint.split()], 2, "fp64", 2), CPU)


def test_batch_norm_is_refused_and_named_at_the_start_of_a_run(caplog: pytest.LogCaptureFixture) -> None:
    config = settings("--model.name tests.support.user_code:Buffers")
    for ranks, warnings in ((1, 0), (2, 1)):
        job = prepare(config, world_size=ranks, num_nodes=1, device=torch.device("cpu"))
        caplog.clear()
        trained_model(config, job)
        assert sum("BatchNorm over the rows that a rank has" in said for said in caplog.messages) == warnings
    with pytest.raises(ConfigError, match=r"norm normalises over the rows that a rank has"):
        job_of(ParityOptions([*SMALL, "--model.name", f"{OWN}:Buffers"], 2, "fp64", 2), CPU)


def test_a_difference_is_relative_to_the_change_of_the_model() -> None:
    """And infinite for NaN; the parameter that differs most is named."""
    start = {"large": torch.ones(4), "small": torch.ones(1)}
    plain = {"large": torch.full((4,), 11.0), "small": torch.full((1,), 2.0)}

    def difference(small: float) -> tuple[float, str]:
        ours = plain | {"small": torch.tensor([small])}
        return difference_of(ours, TrainingRecord(start, plain), plain, changes=True)

    assert difference(2.0)[0] == 0
    assert difference(2.5) == (pytest.approx(0.5 / 401**0.5), "small")
    assert difference(math.nan) == (math.inf, "small")


def test_the_plain_loop_shares_no_code_that_computes() -> None:
    """Of the run it imports where weights lie and a type; of the optimizers the rule that selects Muon's
    matrices, the user's factory and the learning rates.
    """
    modules = {module for _, module in imports(ROOT / "fsdp/parity/reference.py")}
    assert {module for module in modules if module.startswith(("fsdp.run", "fsdp.optim", "fsdp.shard"))} == {
        "fsdp.run.job.Job",
        "fsdp.run.build.maybe_folder",
        "fsdp.run.build.maybe_state",
        "fsdp.optim.muon.hidden_matrices",
        "fsdp.optim.optimizer.build_custom",
        "fsdp.optim.optimizer.Schedule",
    }
