"""A Ray of one's own that cannot come up, once or each time."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp.base.errors import ConfigError, LaunchError
from fsdp.config import load
from fsdp.rundir.history import choose
from launch import ray_cluster
from launch.ray_cluster import with_address
from tests.ray.cluster import REPOSITORY, clean_environment

pytestmark = pytest.mark.ray


def run(*command: str, open_files: int = 4096) -> subprocess.CompletedProcess[str]:
    words = ["bash", "-c", f'ulimit -n {open_files}; exec "$@"', "bash", sys.executable, *command]
    return subprocess.run(
        words, cwd=REPOSITORY, env=clean_environment(), capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize(
    ("flag", "variable", "address"),
    [
        ("", "", ""),
        ("", "head:6379", "head:6379"),
        ("auto", "head:6379", "head:6379"),
        ("auto", "", "127.0.0.9:1"),
        ("local", "head:6379", ""),
        ("", "http://127.0.0.1:8265", ""),
    ],
)
def test_the_address_is_that_of_the_flag_or_of_the_environment(
    flag: str, variable: str, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ray.init reads it; `ray job submit` has an address of another kind in the same variable."""
    monkeypatch.setenv("RAY_ADDRESS", variable)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("127.0.0.9:1")  # of the last `ray start`
    assert with_address(load(["--backend", "ray", "--ray.address", flag])).ray.address == address


def test_a_run_in_the_folder_that_a_job_of_ray_deletes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ray job submit --working-dir .` copies the folder, and the driver's relative paths lie in the copy."""
    folder = tmp_path / "session_1" / "runtime_resources" / "working_dir_files" / "_ray_pkg_0123"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    for flags in ([], ["--run.dir", "runs/mine"]):
        with pytest.raises(
            ConfigError, match=r"Ray's copy of the working directory.* HINT: --run\.dir \$HOME"
        ):
            choose(load(flags))
    assert choose(load(["--run.dir", str(tmp_path)])).path == tmp_path


def test_a_cluster_that_wants_a_token_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    def refused(**_: object) -> None:
        raise ray.exceptions.AuthenticationError("InvalidAuthToken: the token does not match")

    monkeypatch.setattr(ray, "init", refused)
    config = load(["--backend", "ray", "--ray.address", "auto"])
    with pytest.raises(LaunchError) as told, ray_cluster.connected(None, config):
        pass
    assert "InvalidAuthToken: the token does not match" in str(told.value)
    assert "export RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN" in str(told.value)


def test_a_cluster_that_does_not_answer_ends_in_time_with_its_address() -> None:
    """Its port accepts connections and says nothing: ray.init waits in Ray's core."""
    program = (
        "import socket, sys; from launch import ray_cluster; from fsdp.config import load\n"
        "server = socket.create_server(('127.0.0.1', 0)); ray_cluster.INIT_S = 3.0\n"
        "address = f'127.0.0.1:{server.getsockname()[1]}'\n"
        "with ray_cluster.connected(None, load(['--backend', 'ray', '--ray.address', address])): pass"
    )
    done = run("-c", program)
    assert done.returncode == 3, done.stderr
    assert re.search(r"--ray\.address 127\.0\.0\.1:\d+: no answer within 3 s\. HINT: ray status", done.stderr)


def test_ray_client_without_its_package_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(["--backend", "ray", "--ray.address", "ray://head:10001"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    said = r"needs Ray Client.* HINT: pip install 'ray\[client\]'"
    with pytest.raises(LaunchError, match=said), ray_cluster.connected(None, config):
        pass
