"""One state, written at each layout of 4 ranks: the same bits, whole, and the same export."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fsdp.checkpoint.__main__ import main
from fsdp.distributed.mesh import resolve
from tests.golden.layouts import LAYOUTS
from tests.support import needs
from tests.support.marks import sample_are
from tests.support.runs import on_a_rank, settings
from tests.support.world import run_world

TRANSFORMER = (
    "--model.name transformer --model.args.width 16 --model.args.heads 4 --model.args.layers 1 "
    "--data.name tests.support.user_code:sentences --model.args.vocab_size 32 --model.args.max_seq_len 16"
)
MIXTRAL = (
    "--model.name tests.models.exact_hf:build --model.args.kind Mixtral "
    "--data.name tests.models.exact_hf:rows"
)
OTHERS = [name for name in LAYOUTS if name != "shard 4"]


def train(run: Path, layout: str, model: str, more: str = "") -> None:
    flags = f"--run.dir {run} {model} {LAYOUTS[layout]} --watch.enabled false --train.global_batch 8 "
    flags += f"--train.stop_after 3 --precision.master fp64 --optim.ema 0.9 {more}"
    assert run_world(4, on_a_rank, flags.split()) == [None] * 4


def digests(run: Path) -> dict[str, str]:
    [file] = run.glob("checkpoints/*/manifest.json")
    manifest = json.loads(file.read_text())["manifest"]
    found: dict[str, str] = manifest["digests"]
    return found


def exported(run: Path) -> dict[str, torch.Tensor]:
    assert main([str(run), "export"]) == 0
    state: dict[str, torch.Tensor] = torch.load(run / "full_model/full-model.pt", weights_only=True)
    return state


@pytest.mark.parametrize("layout", sample_are(["tensor 2"], OTHERS))
def test_a_state_has_the_same_bits_and_export_at_every_layout(
    layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, mesh = TRANSFORMER, resolve(settings(LAYOUTS[layout]).mesh, 4)
    if "expert" in layout:
        needs.check("transformers")
        model = MIXTRAL
    train(tmp_path / "whole", "shard 4", model)
    path = tmp_path / "whole"
    # a run that starts at its last step trains nothing, and saves
    for place, other in (("there", layout), ("back", "shard 4")):
        train(tmp_path / place, other, model, f"--checkpoint.resume {path}")
        path = tmp_path / place
        assert digests(path) == digests(tmp_path / "whole")
        assert main([str(path), "verify"]) == 0
        said = capsys.readouterr().out
        assert "verified" in said
        assert other != layout or f"  {mesh}  " in said
        weights, whole = exported(path), exported(tmp_path / "whole")
        assert weights.keys() == whole.keys()
        assert all(torch.equal(weights[name], tensor) for name, tensor in whole.items())
