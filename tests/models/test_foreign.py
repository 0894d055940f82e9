"""Models of transformers and timm train on every mesh, with recomputation, as a plain loop does: in float64,
without the models' own casts to float32, to rounding. docs/models.md names them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.foreign import KINDS, MESHES, TIMM, differences
from tests.support import needs
from tests.support.marks import sample_are

pytestmark = pytest.mark.slow

CASES = [(model, *how) for model in KINDS for how in (("2 ranks", "ops"), ("hsdp 2×2", "full"))]
SAMPLE = [("qwen3_moe", "2 ranks", "ops")]


@pytest.mark.parametrize(("model", "mesh", "recomputed"), sample_are(SAMPLE, CASES))
def test_a_foreign_model_trains_exactly(model: str, mesh: str, recomputed: str, tmp_path: Path) -> None:
    needs.check("timm" if model in TIMM else "transformers")
    ranks, words = MESHES[mesh]
    how = f"--memory.activation_checkpointing {recomputed}"
    assert max(differences(model, ranks, 1, tmp_path, words, how, exact=True)) <= 1e-12
