"""The tools on the URL of a run: predict, checkpoint."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from fsdp.checkpoint import __main__ as checkpoints
from fsdp.checkpoint import inspect
from fsdp.checkpoint.object_store import ObjectStore
from fsdp.checkpoint.open_store import open_store
from fsdp.dist.env import DistEnv
from fsdp.predict import __main__ as predict
from tests.checkpoint import s3_server
from tests.checkpoint.test_run_in_store import train_on
from tests.support.world import run_world

pytestmark = pytest.mark.needs("s3")
FLAGS = (
    "--model.name", "mlp", "--data.name", "synthetic", "--data.args.heldout", "20", "--train.steps", "6",
    "--train.global_batch", "12", "--checkpoint.every_steps", "2", "--watch.enabled", "false", "--run.dir",
)  # fmt: skip


@pytest.fixture(scope="module")
def url(server: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A finished run, whose folder on this machine is not the one of the tools."""
    import fsspec

    with pytest.MonkeyPatch.context() as patch:
        s3_server.use(server, patch.setenv)
        fsspec.filesystem("s3").mkdir("tools")
    url = "s3://tools/runs/mine"
    machine = str(tmp_path_factory.mktemp("machine"))
    assert run_world(2, train_on, server, machine, [*FLAGS, url]) == [None] * 2
    return url


@pytest.fixture(autouse=True)
def elsewhere(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    s3_server.use(server, monkeypatch.setenv)
    monkeypatch.chdir(tmp_path)


def printed(env: DistEnv, server: str, words: list[str]) -> str:
    s3_server.use(server)
    with redirect_stdout(io.StringIO()) as out:
        predict.answer_as_rank(words, env)
    return out.getvalue()


def test_a_prediction(url: str, server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert predict.main([url, "--samples", "3"]) == 0
    said = capsys.readouterr().out
    assert "accuracy" in said
    assert (tmp_path / "mine-predictions.png").exists() == ("picture   mine-predictions.png" in said)
    words = [url, "--samples", "3", "--out", str(tmp_path / "other.png")]
    sharded = run_world(2, printed, server, words)
    assert sharded[0].splitlines()[:3] == said.splitlines()[:3]
    assert sharded[1] == ""


def test_its_checkpoints(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert checkpoints.main([url]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == ["6", "4", "2"]
    assert checkpoints.main([f"{url}/checkpoints", "verify"]) == 0
    assert checkpoints.main([url, "export"]) == 2
    assert "HINT: --out FOLDER" in capsys.readouterr().err
    assert checkpoints.main([url, "export", "--out", "full", "--format", "safetensors"]) == 0
    assert Path("full/model-00001-of-00001.safetensors").exists()
    assert checkpoints.main([url, "prune", "--keep-last", "2"]) == 0
    assert [found.step for found in inspect.scan(open_store(f"{url}/checkpoints"))] == [6, 4]
    assert {"CLAIM", "checkpoints/CLAIM"}.isdisjoint(ObjectStore(url).objects())
    ObjectStore(url).delete("config.toml")  # a loop of one's own writes none
    capsys.readouterr()
    assert checkpoints.main([url]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_a_url_without_a_run_is_one_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    for tool in (predict.main, checkpoints.main):
        assert tool([f"{url}-absent"]) in (2, 4)
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert f"{url}-absent" in said
        assert "HINT: " in said
