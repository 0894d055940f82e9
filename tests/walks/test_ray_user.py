"""The first hour of a Ray user, with what docs/ray.md says alone: a running cluster, a trainer of one's own,
a checkpoint that a program with an AppState loads, Ray Data, ASHA.
"""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, text_of
from tests.ray.cluster import Cluster
from tests.ray.conftest import need_ray

pytestmark = [pytest.mark.ray, pytest.mark.slow]

APP_STATE = """
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful

class AppState(Stateful):
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state):
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
        )

import shardrun, torch
from fsdp.models.vision import Mlp, MlpSizes
model = Mlp(MlpSizes(in_features=784))
optimizer = torch.optim.AdamW(model.parameters())
"""
"""As in Ray's own tutorial."""


def test_a_ray_user_s_first_hour(tmp_path: Path) -> None:
    need_ray()
    page = text_of(ROOT / "docs" / "ray.md")
    section = page.partition("## A trainer of your own")[2].partition("\n## ")[0]
    trainer = textwrap.dedent("\n".join(re.findall(r"^    .*|^$", section, re.MULTILINE)))
    trainer = trainer.replace("/shared/ray", str(tmp_path / "shared"))
    load = re.findall(r"^`(dcp\.load\(.*)`\.$", page, re.MULTILINE)[0]
    load = load.replace("RUN/", f"{tmp_path}/shared/mine/")
    with Cluster([4]) as cluster:
        env = cluster.environment(RAY_ADDRESS=cluster.address, PYTHONPATH=str(ROOT))

        def typed(*words: str) -> str:
            command = [sys.executable, *words]
            done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=150)
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout

        printed = typed(
            "-c", f"import ray; ray.init(runtime_env={{'env_vars': {{'PYTHONPATH': '{ROOT}'}}}})\n{trainer}"
        )
        assert re.search(r"^4(\.0)? .*shared/mine/checkpoints/step-00000004$", printed, re.MULTILINE), printed
        weights = "print(optimizer.state[next(model.parameters())]['step'].item())"
        assert typed("-c", f"{APP_STATE}\n{load}\n{weights}") == "4.0\n"
        data = typed(f"{ROOT}/examples/ray_data.py", "--train.steps", "12", "--checkpoint.every_steps", "6")
        assert re.search(
            r"^step 12: loss \d\.\d+, .*runs/ray/data/checkpoints/step-00000012", data, re.MULTILINE
        )
        asha = typed(f"{ROOT}/examples/ray_asha.py", "--model.name", "mlp", "--train.steps", "12")
        assert re.search(r"^lr 0\.001: loss \S+, ended at step 12$", asha, re.MULTILINE), asha
        assert re.search(r"^lr 1e-06: loss \S+, ended at step 5$", asha, re.MULTILINE), asha
        assert re.search(r"^best lr 0\.001$", asha, re.MULTILINE), asha  # Ray may print after it
