"""examples/notebook.ipynb, its cells in order in a kernel of its own, in a clone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

NOTEBOOK = ROOT / "examples" / "notebook.ipynb"


def test_it_is_committed_without_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["outputs"] for cell in code] == [[]] * len(code)
    assert [cell["execution_count"] for cell in code] == [None] * len(code)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.needs("nbclient", "ipykernel")
def test_its_cells_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat
    from nbclient import NotebookClient

    for name in ("shardrun", "fsdp", "launch", "recipes", "train.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "examples").mkdir()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    place = {"metadata": {"path": str(tmp_path / "examples")}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=place).execute()
    shown = {cell["id"]: json.dumps(cell.get("outputs", "")) for cell in notebook.cells}
    assert "did you mean --train.steps" in shown["config"]
    assert "60" in shown["train"]
    assert "step 60" in shown["losses"]
    assert "'step': 80" in shown["continue"]
    run = tmp_path / "examples/runs/notebook"
    first, last = [json.loads(line)["loss"] for line in _steps(run)[:: len(_steps(run)) - 1]]
    assert last < first
    assert [json.loads(line)["step"] for line in _steps(run)] == list(range(1, 81))


def _steps(run: Path) -> list[str]:
    return [line for line in (run / "metrics.jsonl").read_text().splitlines() if '"loss"' in line]
