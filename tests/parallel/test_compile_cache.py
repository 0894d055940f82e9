"""--speed.compile_cache: where it is, whose it must be, and that a second start compiles nothing."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from fsdp.base.errors import ConfigError
from fsdp.config import SpeedSection
from fsdp.parallel.compile_cache import (
    VARIABLE,
    CompileCache,
    Places,
    maybe_compile_cache,
    places,
    torch_default,
)
from tests.support.env import env_of
from tests.support.runs import flags

ROOT = Path(__file__).parents[2]

ONE_START = """
import json, sys
import torch.distributed as dist
from torch._dynamo.utils import counters
from fsdp import config
from fsdp.run.loop import train
from tests.support.env import env_of
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
train(config.load(sys.argv[1:]), env_of(0, 1))
print(json.dumps({"inductor": dict(counters["inductor"]), "aot_autograd": dict(counters["aot_autograd"])}))
"""


def start(run_dir: Path, *more: str, **environ: str) -> dict[str, int]:
    """A process of its own, as a requeued job is; misses and hits of both of torch's caches."""
    words = ["--run.dir", str(run_dir), *flags("--train.steps 2 --speed.compile true", *more)]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHINDUCTOR", "TORCH_COMPILE"))}
    done = subprocess.run(
        [sys.executable, "-c", ONE_START, *words],
        cwd=ROOT,
        env={**clean, "OMP_NUM_THREADS": "1", **environ},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    counted = json.loads(done.stdout.splitlines()[-1])
    return {
        what: counted["inductor"].get(f"fxgraph_cache_{what}", 0)
        + counted["aot_autograd"].get(f"autograd_cache_{what}", 0)
        for what in ("miss", "hit")
    }


@pytest.mark.slow
@pytest.mark.long
def test_the_second_start_compiles_nothing(tmp_path: Path) -> None:
    first = start(tmp_path / "a", "--speed.compile_cache", str(tmp_path / "cache"))
    second = start(tmp_path / "b", "--speed.compile_cache", str(tmp_path / "cache"))
    assert first["miss"] > 0
    assert second["miss"] == 0
    assert second["hit"] > 0


@pytest.mark.slow
@pytest.mark.long
def test_a_start_on_another_node_compiles_nothing(tmp_path: Path) -> None:
    """Two nodes are two temporary folders; the second has nothing but the home."""
    nodes = [tmp_path / "node1", tmp_path / "node2"]
    counted = []
    for node in nodes:
        node.mkdir()
        counted.append(
            start(tmp_path / f"run-{node.name}", TMPDIR=str(node), XDG_CACHE_HOME=str(tmp_path / "home"))
        )
    assert counted[0]["miss"] > 0
    assert counted[1]["miss"] == 0
    assert counted[1]["hit"] > 0


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A node's temporary folder, and a home, in which nothing is yet."""
    folder = tmp_path / "node"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv(VARIABLE, f"{torch_default()}somebody")  # torch writes its own default there
    return folder


COMPILED = SpeedSection(compile="true")


def test_by_default_it_is_the_nodes_own_and_a_copy_in_the_users_cache(
    node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = node / f"shardrun-compile-{os.getuid()}"
    assert places(SpeedSection()) == Places(own, tmp_path / "home" / "shardrun" / "compile")
    assert places(SpeedSection(compile_cache="off")) is None
    monkeypatch.setenv(VARIABLE, "/elsewhere")
    assert places(SpeedSection()) is None
    assert places(SpeedSection(compile_cache=str(tmp_path))) == Places(tmp_path, None)


def test_it_is_set_where_something_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "/before")
    section = SpeedSection(compile="true", compile_cache=str(tmp_path / "c"))
    maybe_compile_cache(SpeedSection(compile_cache=str(tmp_path / "c")), env_of(0, 1))
    assert os.environ[VARIABLE] == "/before"
    assert maybe_compile_cache(section, env_of(0, 1)) is None, "a folder that was named is copied nowhere"
    assert os.environ[VARIABLE] == str(tmp_path / "c")
    assert (tmp_path / "c").stat().st_mode & 0o777 == 0o700


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / name.replace("__in__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_kernels_are_read_from_the_home_and_new_ones_copied_there(node: Path, tmp_path: Path) -> None:
    shared = tmp_path / "home" / "shardrun" / "compile"
    shared.mkdir(mode=0o700, parents=True)
    write(shared, ab__in__old="old")
    cache = maybe_compile_cache(COMPILED, env_of(0, 1))
    assert isinstance(cache, CompileCache)
    own = Path(os.environ[VARIABLE])
    assert own.parent == node
    assert own.stat().st_mode & 0o777 == 0o700
    assert names(own) == {"ab/old"}
    write(own, ab__in__new="new", locks__in__x="", ab__in__half="half")
    (own / "ab" / "half").rename(own / "ab" / ".half.tmp")
    (own / "ab" / "new").chmod(0o711)
    cache.publish(wait=False)
    cache.publish(wait=True)
    assert names(shared) == {"ab/old", "ab/new"}
    assert (shared / "ab" / "new").stat().st_mode & 0o777 == 0o711, "what a linker makes stays executable"


def test_a_file_that_a_linker_writes_is_not_copied(node: Path, tmp_path: Path) -> None:
    cache = maybe_compile_cache(COMPILED, env_of(0, 1))
    assert cache is not None
    own, shared = Path(os.environ[VARIABLE]), tmp_path / "home" / "shardrun" / "compile"
    write(own, ab__in__kernel="half")
    (own / "ab" / "kernel").rename(own / "ab" / "kernel.main.so")
    write(own, locks__in__lock="")
    (own / "locks" / "lock").rename(own / "locks" / "kernel.lock")
    with (own / "locks" / "kernel.lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        cache.publish(wait=True)
        assert names(shared) == set()
    cache.publish(wait=True)
    assert names(shared) == {"ab/kernel.main.so"}


def test_the_nodes_first_rank_fills_and_rank_0_alone_publishes(node: Path, tmp_path: Path) -> None:
    shared = tmp_path / "home" / "shardrun" / "compile"
    shared.mkdir(mode=0o700, parents=True)
    write(shared, old="old")
    assert maybe_compile_cache(COMPILED, env_of(1, 2)) is None
    assert names(node) == set()
    first_of_another = dataclasses.replace(env_of(1, 2), local_rank=0)
    assert maybe_compile_cache(COMPILED, first_of_another) is None
    assert {Path(name).name for name in names(node)} == {"old"}


@pytest.mark.usefixtures("node")
@pytest.mark.parametrize("home", ["cannot be made", "others write", "none"])
def test_without_a_usable_home_the_nodes_own_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, home: str
) -> None:
    monkeypatch.setattr(logging.getLogger("fsdp"), "propagate", True)
    if home == "cannot be made":
        monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nothing")
    elif home == "others write":
        shared = tmp_path / "home" / "shardrun" / "compile"
        shared.mkdir(parents=True)
        shared.chmod(0o777)
        write(shared, evil="code")
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(
            Path, "home", classmethod(lambda cls: (_ for _ in ()).throw(RuntimeError("no home")))
        )
    assert maybe_compile_cache(COMPILED, env_of(0, 1)) is None
    own = Path(os.environ[VARIABLE])
    assert own.name == f"shardrun-compile-{os.getuid()}"
    assert names(own) == set()
    assert ("compiled kernels stay on this node" in caplog.text) == (home != "none")


def test_a_folder_that_others_can_write_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "/before")
    tmp_path.chmod(0o777)
    with pytest.raises(
        ConfigError, match=r"can be written by others, and what lies there is run as code.*chmod 700"
    ):
        maybe_compile_cache(SpeedSection(compile="true", compile_cache=str(tmp_path)), env_of(0, 1))
    with pytest.raises(ConfigError, match="cannot be made"):
        maybe_compile_cache(SpeedSection(compile="true", compile_cache="/proc/nothing"), env_of(0, 1))
