"""--precision.output casts the model's output, and no block's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.runs import on_a_rank
from tests.support.world import run_world

FLAGS = (
    "--data.name text --data.seq_len 32 --data.args.max_mb 0.2 --model.name transformer "
    "--model.args.width 32 --model.args.heads 2 --model.args.layers 2 --train.steps 2 --train.global_batch 4 "
    "--train.eval_samples 4 --watch.enabled false --checkpoint.every_steps 0 --checkpoint.export false"
)


@pytest.mark.parametrize("wrap", ["auto", "root"])
def test_a_decoder_in_bf16_with_an_output_in_fp32(wrap: str, tmp_path: Path) -> None:
    words = [*FLAGS.split(), "--precision.param", "bf16", "--precision.output", "fp32", "--mesh.wrap", wrap]
    assert run_world(2, on_a_rank, ["--run.dir", str(tmp_path), *words]) == [None, None]
