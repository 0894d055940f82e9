"""DCP loads sealed checkpoints, and a run starts from checkpoints that dcp.save wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful

from fsdp.base.errors import CheckpointError
from fsdp.distributed.env import DistEnv
from tests.checkpoint.small import Kind, Run, bits, build, save_once
from tests.support.plain_loop import relative_difference, train_plainly
from tests.support.runs import failures, run, settings
from tests.support.world import run_world


def their_state(run: Run) -> dict[str, Any]:
    """The state of another program after a step: every parameter has optimizer state."""
    model, optimizer = run.state.model, run.state.optimizer
    return {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}


def load_with_dcp(env: DistEnv, kind: Kind, run_dir: str) -> dict[str, int]:
    """dcp.load alone, into a model that has trained one step: its optimizer has the same keys."""
    run = build(env, kind, run_dir + "-other", seed=99)
    run.state.model.unused.requires_grad_(False)  # type: ignore[union-attr, operator]
    run.step()
    theirs = their_state(run)
    del theirs["optim"]["param_groups"]
    dcp.load(theirs, checkpoint_id=f"{run_dir}/checkpoints/step-00000003")
    set_model_state_dict(run.state.model, theirs["model"])
    theirs["optim"]["param_groups"] = get_optimizer_state_dict(run.state.model, run.state.optimizer)[
        "param_groups"
    ]
    set_optimizer_state_dict(run.state.model, run.state.optimizer, theirs["optim"])
    run.checkpointer.close()
    return {name: value for name, value in bits(run.state).items() if name not in run.state.counters()}


@pytest.mark.parametrize(("kind", "ranks"), [("fsdp", 2), ("ddp", 3)])
def test_dcp_load_reads_a_sealed_checkpoint_without_this_project(
    tmp_path: Path, kind: Kind, ranks: int
) -> None:
    saved = run_world(2, save_once, "fsdp", str(tmp_path))[0]
    for loaded in run_world(ranks, load_with_dcp, kind, str(tmp_path)):
        assert loaded == {name: saved[name] for name in loaded}
        assert len(loaded) == len(saved) - 5  # the counters


class App(Stateful):
    """The state of Ray's FSDP2 tutorial."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def state_dict(self) -> dict[str, Any]:
        return their_state(self.run)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise NotImplementedError("only saved from here")


def save_theirs(env: DistEnv, form: str, place: str) -> dict[str, int]:
    run = build(env, "fsdp", place + "-unused")
    for _ in range(2):
        run.step()
    model, optimizer = run.state.model, run.state.optimizer
    forms: dict[str, dict[str, Any]] = {
        "nested": their_state(run),
        "ray": {"app": App(run)},
        "bare": dict(get_model_state_dict(model)),
        "wrapped": {
            "state": {f"module.{name}": value for name, value in get_model_state_dict(model).items()}
        },
        "optimizer": {
            "model": get_model_state_dict(model),
            "optimizer": get_optimizer_state_dict(model, optimizer),
        },
    }
    dcp.save(forms[form], checkpoint_id=place)
    run.checkpointer.close()
    return bits(run.state)


def start_from(env: DistEnv, place: str, run_dir: str) -> tuple[dict[str, int], int, str]:
    run = build(env, "fsdp", run_dir, seed=99, section={"resume": place})
    found = run.checkpointer.restore(run.state)
    assert found is not None
    run.checkpointer.close()
    return bits(run.state), found.step, found.notes[0]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["nested", "ray", "bare", "wrapped", "optimizer"])
def test_a_run_starts_from_another_programs_dcp_checkpoint(tmp_path: Path, form: str) -> None:
    place = str(tmp_path / "theirs")
    saved = run_world(2, save_theirs, form, place)[0]
    for found, step, note in run_world(3, start_from, place, str(tmp_path / "run")):
        whole = form not in ("bare", "wrapped")
        tensors = {name: value for name, value in found.items() if name not in ("step", "samples")}
        assert tensors == {name: saved[name] for name in tensors}
        assert any(name.endswith("exp_avg") for name in tensors) == whole
        assert step == 0
        assert note.startswith("weights and optimizer" if whole else "weights alone")


def start_from_nothing(env: DistEnv, place: str, run_dir: str) -> str:
    run = build(env, "fsdp", run_dir, section={"resume": place})
    try:
        run.checkpointer.restore(run.state)
    except CheckpointError as error:
        return str(error)
    finally:
        run.checkpointer.close()
    return "restored"


def save_stranger(env: DistEnv, place: str) -> None:
    dcp.save({"model": {"other.weight": torch.ones(3)}}, checkpoint_id=place)


def test_a_path_that_is_no_checkpoint_of_this_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    run_world(1, save_stranger, str(tmp_path / "stranger"))
    said = {
        name: run_world(2, start_from_nothing, str(tmp_path / name), str(tmp_path / "run"))[1]
        for name in ("empty", "stranger")
    }
    assert "is no checkpoint: it has no .metadata" in said["empty"]
    assert "does not hold this model" in said["stranger"]
    assert "model.other.weight" in said["stranger"]


def convert(env: DistEnv, sealed: str, place: str) -> None:
    dcp_to_torch_save(sealed, place + ".pt")
    state = torch.load(place + ".pt", weights_only=True)
    assert state["train"]["step"] == 8
    assert set(state) == {"model", "optim", "train"}
    torch_save_to_dcp(place + ".pt", place)


@pytest.mark.long
def test_one_full_file_and_back_continues_the_run(tmp_path: Path) -> None:
    """torch's converters both ways, then other ranks: the parameters of one uninterrupted process."""
    words = "--precision.master fp64"
    assert failures(2, tmp_path / "run", words, "--train.stop_after 8") == [None] * 2
    sealed = str(tmp_path / "run" / "checkpoints" / "step-00000008")
    run_world(1, convert, sealed, str(tmp_path / "converted"))
    found = run(3, tmp_path / "other", words, f"--checkpoint.resume {tmp_path / 'converted'}")
    assert [one["step"] for one in found.records if "loss" in one] == list(range(9, 21))
    plain = train_plainly(settings(words), dtype="fp64")
    assert relative_difference(found.parameters, plain.parameters) <= 1e-10
