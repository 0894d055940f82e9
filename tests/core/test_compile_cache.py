"""--speed.compile_cache: where it is, whose it must be, and that a second start compiles nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fsdp.compile_cache import VARIABLE, place, set_compile_cache, torchs_own
from fsdp.config import SpeedSection
from fsdp.errors import ConfigError
from tests.core.runs import flags

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]

ONE_START = """
import json, sys
import torch.distributed as dist
from torch._dynamo.utils import counters
from fsdp import config
from fsdp.loop import train
from tests.world import _env
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
train(config.load(sys.argv[1:]), _env(0, 1))
print(json.dumps({"inductor": dict(counters["inductor"]), "aot_autograd": dict(counters["aot_autograd"])}))
"""


def start(run_dir: Path, cache: Path) -> dict[str, int]:
    """A process of its own, as a requeued job is; misses and hits of both of torch's caches."""
    words = ["--run.dir", str(run_dir), *flags("--train.steps 2 --speed.compile true --speed.compile_cache", str(cache))]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHINDUCTOR", "TORCH_COMPILE"))}
    done = subprocess.run(
        [sys.executable, "-c", ONE_START, *words],
        cwd=ROOT,
        env={**clean, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    counted = json.loads(done.stdout.splitlines()[-1])
    return {
        what: counted["inductor"].get(f"fxgraph_cache_{what}", 0) + counted["aot_autograd"].get(f"autograd_cache_{what}", 0)
        for what in ("miss", "hit")
    }


@pytest.mark.slow
@pytest.mark.long
def test_the_second_start_compiles_nothing(tmp_path: Path) -> None:
    first = start(tmp_path / "a", tmp_path / "cache")
    second = start(tmp_path / "b", tmp_path / "cache")
    assert first["miss"] > 0
    assert second["miss"] == 0
    assert second["hit"] > 0


def test_by_default_it_is_in_the_users_own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert place(SpeedSection()) == tmp_path / "shardrun" / "compile"
    assert place(SpeedSection(compile_cache="off")) is None
    monkeypatch.setenv(VARIABLE, f"{torchs_own()}somebody")  # torch writes its own default there
    assert place(SpeedSection()) == tmp_path / "shardrun" / "compile"
    monkeypatch.setenv(VARIABLE, "/elsewhere")
    assert place(SpeedSection()) is None
    assert place(SpeedSection(compile_cache=str(tmp_path))) == tmp_path


def test_it_is_set_where_something_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "/before")
    section = SpeedSection(compile="true", compile_cache=str(tmp_path / "c"))
    assert set_compile_cache(SpeedSection(compile_cache=str(tmp_path / "c")), CPU) is None
    assert os.environ[VARIABLE] == "/before"
    assert set_compile_cache(section, CPU) == tmp_path / "c"
    assert os.environ[VARIABLE] == str(tmp_path / "c")
    assert (tmp_path / "c").stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "/before")
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match=r"can be written by others, and what lies there is run as code.*chmod 700"):
        set_compile_cache(SpeedSection(compile="true", compile_cache=str(tmp_path)), CPU)
    with pytest.raises(ConfigError, match="cannot be made"):
        set_compile_cache(SpeedSection(compile="true", compile_cache="/proc/nothing"), CPU)
