"""fsdp.predict reads and writes text with the tokenizer of the run's documents."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp.predict.__main__ import main
from tests.support.data_cache import on_a_rank
from tests.support.data_cache import own_cache as own_cache
from tests.support.world import run_world
from tests.tokenize.chat import save_tokenizer
from tests.tokenize.rows import texts, write_lines

pytestmark = pytest.mark.needs("transformers")


@pytest.mark.long
@pytest.mark.slow
def test_a_prompt_and_its_continuation_are_text(
    tmp_path: Path, own_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_lines(tmp_path / "a.jsonl", texts(100))
    tokenizer = save_tokenizer(tmp_path / "tokenizer", None)
    words = [
        "--run.dir", str(tmp_path / "run"), "--data.name", str(path), "--data.tokenizer", str(tokenizer),
        "--data.seq_len", "16", "--model.name", "transformer", "--model.preset", "toy", "--train.steps", "4",
        "--train.global_batch", "8", "--watch.enabled", "false",
    ]  # fmt: skip
    assert run_world(1, on_a_rank, words, str(own_cache)) == [None]
    assert main([str(tmp_path / "run"), "--prompt", "Document", "--tokens", "8"]) == 0
    assert capsys.readouterr().out.startswith("Document")
    assert main([str(tmp_path / "run"), "--tokens", "8"]) == 0
    assert "Document 99: once" in capsys.readouterr().out
