"""Each recipe that ships is planned for the hardware that it names, as typed: it fits, as fast as its own
comment says.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fsdp.config import load
from fsdp.plan.__main__ import main

ROOT = Path(__file__).parents[2]
SHAPE = dict.fromkeys(("sft", "lora"), " --model.name transformer --model.preset llama-8b")
"""Of recipes for a model of the user."""
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))
ROW = re.compile(
    r"^(?:# )? +(?P<mesh>\d+×\d+( [a-z]+ \d+)*) .* (?P<peak>\d+\.\d) +(?P<fits>yes|no) +"
    r"(?P<step>\d+\.\d{3}) ",
    re.MULTILINE,
)


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(
            one,
            marks=[pytest.mark.long] * (one.stem not in ("digits", "mixture"))
            + [pytest.mark.needs("transformers")] * (one.stem == "experts"),
        )
        for one in RECIPES
    ],
    ids=lambda path: path.stem,
)
def test_a_recipe_fits_its_hardware_as_its_comment_says(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # rates that somebody measured here are not the table's
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(ROOT)
    assert load(["--config", str(recipe)]).plan.gpus > 0
    words = f"--config recipes/{recipe.name}{SHAPE.get(recipe.stem, '')}"
    assert main(words.split()) == 0
    printed = capsys.readouterr().out
    text = recipe.read_text(encoding="utf-8")
    assert f"# python -m fsdp.plan {words}:\n#   {printed.splitlines()[0]}\n" in text
    now, said = ROW.search(printed), ROW.search(text)
    assert now is not None
    assert said is not None, printed
    assert (now["mesh"], now["fits"]) == (said["mesh"], "yes")
    # Other versions of torch keep and launch a little more or less; the last printed digit counts for small
    # figures.
    assert float(said["peak"]) == pytest.approx(float(now["peak"]), rel=0.02, abs=0.1), printed
    page = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    row = next(line for line in page.splitlines() if line.startswith(f"| [{recipe.name}]"))
    assert [said["mesh"], said["peak"], said["step"]] == [row.split(" | ")[at] for at in (2, 5, 6)], row
    assert float(said["step"]) == pytest.approx(float(now["step"]), rel=0.05, abs=0.001), printed


def test_the_readme_has_the_recipes_row() -> None:
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    told = re.search(r"llama-8b\.toml takes ([\d.]+) GiB and ([\d.]+) s", readme)
    row = ROW.search((ROOT / "recipes/llama-8b.toml").read_text(encoding="utf-8"))
    assert told is not None
    assert row is not None
    assert told.groups() == (row["peak"], row["step"])
