"""A wheel of this repository, installed beside the packages that are here: the command `shardrun`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import textwrap
import venv
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.launch.test_local import ROOT

pytest.importorskip("setuptools", "77", "a wheel needs setuptools 77 (pip install setuptools)")
SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "train.py", "shardrun", "fsdp", "launch",
           "slurm", "recipes")  # fmt: skip
SHORT = "--train.steps 3 --watch.enabled false --checkpoint.export false"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a virtual environment that sees this one's packages, with the wheel of the sdist."""
    folder = tmp_path_factory.mktemp("installed")
    for name in SOURCES:
        source = ROOT / name
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, folder / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    offline = ["--quiet", "--no-deps", "--no-index"]
    build = "from setuptools.build_meta import build_sdist; build_sdist('wheels')"
    run([sys.executable, "-c", build], folder)
    (sdist,) = (folder / "wheels").glob("shardrun-*.tar.gz")
    run([*pip, "wheel", *offline, "--no-build-isolation", "-w", str(folder / "wheels"), str(sdist)], folder)
    venv.create(folder / "venv", symlinks=True)
    here = sysconfig.get_paths(vars={"base": str(folder / "venv"), "platbase": str(folder / "venv")})[
        "purelib"
    ]
    Path(here, "these.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    wheel = next((folder / "wheels").glob("shardrun-*.whl"))
    run([*pip, "--python", str(folder / "venv/bin/python"), "install", *offline, str(wheel)], folder)
    return folder / "venv" / "bin"


def run(
    words: list[str], cwd: Path, environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(words, cwd=cwd, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def typed(command: str, installed: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """`command` with the environment's programs first, and nothing of the repository."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environ |= {"PATH": f"{installed}{os.pathsep}{environ['PATH']}", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, shell=True, cwd=cwd, env=environ, capture_output=True, text=True, timeout=300
    )


@pytest.mark.long
@pytest.mark.slow
def test_the_command_trains_from_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    done = typed(f"shardrun train --config recipes/digits.toml {SHORT} --run.dir mine", installed, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "next:\n  shardrun train --config mine/config.toml --run.dir mine" in done.stdout
    assert "  shardrun report mine\n  shardrun checkpoint mine" in done.stdout
    report = typed("shardrun report mine && shardrun checkpoint mine", installed, tmp_path)
    assert report.returncode == 0, report.stderr
    assert "sealed" in report.stdout


def test_names_and_mistakes(installed: Path, tmp_path: Path) -> None:
    """No fsdp and no launch in site-packages; hints name the installed command."""
    code = "import importlib.util as u; print(u.find_spec('fsdp'), u.find_spec('launch'))"
    assert typed(f'python -c "{code}"', installed, tmp_path).stdout == "None None\n"
    flag = typed("shardrun train --nothing.like.it 3", installed, tmp_path)
    assert flag.returncode == 2
    assert flag.stderr.endswith("is not a flag. HINT: shardrun train --help-all lists them\n")
    found = "print(*find_folder('hf:recipes/qwen3-30b-a3b').iterdir())"
    code = f"import shardrun; from fsdp.models.hf import find_folder; {found}"
    assert "config.json" in typed(f'python -c "{code}"', installed, tmp_path).stdout, "a recipe's model"
    assert "shardrun plan | doctor | submit" in typed("shardrun --help", installed, tmp_path).stdout


def blocks(page: str) -> list[str]:
    """The indented Python of a page: blocks that import."""
    found = re.findall(r"(?:^    .*\n|^\n(?=    ))+", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
    return [
        text for block in found if re.search(r"^(import|from) ", text := textwrap.dedent(block), re.MULTILINE)
    ]


@pytest.mark.long
@pytest.mark.slow
def test_the_code_of_the_library_page_runs_from_another_folder(installed: Path, tmp_path: Path) -> None:
    whole, _ = blocks("docs/library.md")
    (tmp_path / "whole.py").write_text(whole.replace("steps=200", "steps=20"))
    shutil.copy(ROOT / "examples/own_loop.py", tmp_path)
    done = typed("python whole.py", installed, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "20 None Evaluation(" in done.stdout
    torchrun = "python -m torch.distributed.run --standalone --nproc_per_node=2"
    done = typed(f"{torchrun} own_loop.py --run.dir own --train.steps 4", installed, tmp_path)
    assert done.returncode == 0, done.stderr
    done = typed(f"{torchrun} -m shardrun train {SHORT} --run.dir mine", installed, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "next:\n  torchrun --nproc_per_node=2 -m shardrun train --config mine/config.toml" in done.stdout
    done = typed(
        '''ls "$(python -c 'import shardrun; print(shardrun.CODE)')/slurm/fsdp.sbatch"''', installed, tmp_path
    )
    assert done.stdout.startswith(str(installed.parent)), done.stderr
