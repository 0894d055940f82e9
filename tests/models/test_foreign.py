"""Models of transformers and timm train on every mesh, with recomputation, as a plain loop does: in float64,
without the models' own casts to float32, to rounding. docs/models.md has the table.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.foreign import KIND_OF, KINDS, MESHES, TIMM, differences, main
from tests.support import needs
from tests.support.marks import sample_are

pytestmark = pytest.mark.slow

CASES = [(model, *how) for model in KINDS for how in (("2 ranks", "ops"), ("hsdp 2×2", "full"))]
"""The command runs every mesh with every recomputation: 272 runs."""
CASES += [(model, "2 ranks", "ops") for model in KIND_OF if model not in KINDS]
SAMPLE = [("qwen3_moe", "2 ranks", "ops"), ("convnext", "hsdp 2×2", "full"), ("switch", "2 ranks", "ops")]
DOCUMENTED = Path(__file__).parents[2] / "docs" / "models.md"


@pytest.mark.parametrize(("model", "mesh", "recomputed"), sample_are(SAMPLE, CASES))
def test_a_foreign_model_trains_exactly(model: str, mesh: str, recomputed: str, tmp_path: Path) -> None:
    needs.check("timm" if model in TIMM else "transformers")
    ranks, words = MESHES[mesh]
    how = f"--memory.activation_checkpointing {recomputed}"
    assert max(differences(model, ranks, 1, tmp_path, words, how, exact=True)) <= 1e-12


@pytest.mark.long
@pytest.mark.needs("transformers")
def test_the_command_of_the_page_prints_a_row_of_its_table(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["gpt2"]) == 0
    *_, heads, _, row = capfd.readouterr().out.splitlines()
    page = DOCUMENTED.read_text(encoding="utf-8")
    assert heads in page
    assert row.startswith("| gpt2 | ")
    assert all(f"| {model} | " in page for model in KIND_OF)
