"""A run imports what it uses: each module more is a wait at every start and restart, on every rank."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
RUN = """
import runpy, sys
try:
    runpy.run_path("train.py", run_name="__main__")
finally:
    print("imported:", *sys.modules, file=sys.stderr)
"""
SPARED = {
    "fsdp.checkpoint.export": "--checkpoint.export",
    "fsdp.checkpoint.local_tier": "--checkpoint.local_dir",
    "fsdp.checkpoint.pretrained": "--model.weights",
    "fsdp.config.aliases": "a wrong flag",
    "fsdp.config.command_line": "--help",
    "fsdp.config.trust": "a command that reads a run directory",
    "fsdp.data.documents": "rows of text",
    "fsdp.data.mixture": "[[data.sources]]",
    "fsdp.data.stream": "a stream",
    "fsdp.memory.oom_advice": "an out-of-memory error",
    "fsdp.models.chunked_loss": "--memory.loss_chunk",
    "fsdp.models.hf": "--model.name hf:",
    "fsdp.models.hf_weights": "--model.name hf:",
    "fsdp.optim.muon": "--optim.name muon",
    "fsdp.optim.small_states": "--optim.state",
    "fsdp.shard.activations": "--memory.activation_checkpointing",
    "fsdp.shard.tensor": "--mesh.tensor",
    "fsdp.shard.expert": "--mesh.expert",
    "fsdp.report": "the report",
    "fsdp.plan": "the planner",
    "fsdp.tokenize.conversations": "rows of text",
    "fsdp.tokenize.shards": "rows of text",
    "fsdp.tokenize.rows": "rows of text",
    "fsdp.watch.observation": "a monitor",
    "fsdp.watch.verdict": "a monitor",
    "launch.policy": "a failure",
}
"""Modules, and what needs them: a run of images on one node's disk does not."""


def test_a_run_of_images_imports_nothing_that_it_does_not_use(tmp_path: Path) -> None:
    words = f"--run.dir {tmp_path / 'run'} --model.name mlp --data.name digits --train.steps 1"
    ended = subprocess.run(
        [sys.executable, "-c", RUN, *words.split(), "--checkpoint.export", "false"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    imported = ended.stderr.rpartition("imported:")[2].split()
    assert "fsdp.run.loop" in imported
    assert {name: SPARED[name] for name in SPARED if name in imported} == {}
