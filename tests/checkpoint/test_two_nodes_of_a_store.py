"""--run.dir s3://… on two nodes that share no folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fsdp.checkpoint.object_store import ObjectStore
from launch.rendezvous import free_port
from tests.checkpoint.test_run_in_store import ENDS_S, MORE, losses, records, started, url
from tests.support.runs import flags

__all__ = ["url"]


@pytest.mark.needs("s3")
@pytest.mark.slow
@pytest.mark.long
def test_each_node_has_a_folder_of_its_own(url: str, tmp_path: Path) -> None:
    meeting = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1"]
    meeting += [f"--master-port={free_port(os.getpid())}"]
    words = [*flags(MORE), "--watch.enabled", "true"]
    nodes = [
        started(
            tmp_path / f"node{rank}",
            url,
            *("-m", "torch.distributed.run", *meeting, f"--node-rank={rank}", "train.py", *words),
        )
        for rank in (0, 1)
    ]
    said = [node.communicate(timeout=ENDS_S)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    assert "shared storage" not in said[0]
    assert set(losses(records(url, "metrics.jsonl"))) == set(range(1, 31))
    names = set(ObjectStore(url).objects())
    assert {"DONE", "config.toml", "full_model/full-model.pt"} <= names
    folders = [next((tmp_path / f"node{rank}").glob("shardrun/runs/*/a")) for rank in (0, 1)]
    assert (folders[0] / "metrics.jsonl").exists()
    assert not (folders[1] / "metrics.jsonl").exists()
