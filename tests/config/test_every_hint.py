"""Every text that names a flag, a command or a file; and what hints say is typed, in one process: each row of
the table of conflicts, each field's wrong values, and what only a job can know.
"""

from __future__ import annotations

import ast
import itertools
import json
import re
import shlex
import typing
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from fsdp.base.errors import ConfigError
from fsdp.config import FIELDS, load
from fsdp.config.checks import ROWS
from fsdp.run.job import prepare, trained_model
from fsdp.run.summary import describe
from tests.support.hints import FLAG, PAGE, ROOT, SOURCES, TOOL, follow, literals, problems

NO_TEXT = ("srun() {", " --nnodes=", "judge_and_act", "A flag is --")
"""Commands that the product composes, and the page of --help."""


def test_every_flag_command_and_file_in_a_text_is_there() -> None:
    wrong, count = [], 0
    for source in SOURCES:
        for line, text in literals(ast.parse(source.read_text(encoding="utf-8"))):
            hint = text.rpartition("HINT: ")[2]
            named = FLAG.search(hint) or TOOL.search(hint) or PAGE.search(hint)
            if named and " " in hint.strip() and "\n" not in hint and not hint.startswith(NO_TEXT):
                count += 1
                wrong += [f"{source.relative_to(ROOT)}:{line}: {hint}: {why}" for why in problems(hint)]
    assert count > 300
    assert not wrong, "\n".join(wrong)


def values(name: str) -> list[str]:
    """The default, each choice, and values on both sides of the conditions of ROWS."""
    spec = FIELDS[name]
    choices = typing.get_args(spec.type) if typing.get_origin(spec.type) is typing.Literal else ()
    choices = choices or spec.meta["names"] or ("true", "false") * (spec.type is bool)
    numbers = ("1", "2", "0.5", "1000", "0") if spec.type in (int, float) else ()
    default = str(spec.default).lower() if spec.type is bool else str(spec.default)
    return list(dict.fromkeys([*OTHER.get(name, ("a:b",)), *choices, *numbers, default]))


OTHER = {
    "mesh.reshard_after_forward": ("false", "2", "step"),
    "data.validation": ("0.1",),
    "memory.nvme_dir": ("/tmp",),
    "data.args": ("heldout=1",),
    "profile.steps": ("2:3",),
    "ray.num_workers": ("2", "2:4"),
    "checkpoint.keep_best_metric": ("eval_ema_loss", "eval_loss"),
    "checkpoint.resume": ("auto",),
    "optim.muon_lr": ("1",),
    "train.epochs": ("1", "0"),
    "train.eval_every_steps": ("0",),
}
BESIDE = {
    "memory.nvme": "--memory.nvme_dir /tmp",
    "optim.momentum": "--optim.name sgd",
    "optim.fused mesh.strategy": "--optim.name sgd",
    "ray.num_workers": "--backend ray",
    "checkpoint.keep_best_metric": "--checkpoint.keep_best 1",
    "precision.frozen": "--lora.rank 1",
}
"""What some fields need beside them."""


def conflict(field: str, other: str) -> list[str]:
    """Flags that meet this row of the table and none before it."""
    started = re.compile(rf"--{re.escape(field)} .* and --{re.escape(other)} .* do not go together")
    beside = [word for name in (field, other, f"{field} {other}") for word in BESIDE.get(name, "").split()]
    for one, two in itertools.product(values(field), values(other)):
        words = [*beside, f"--{field}", one, f"--{other}", two]
        try:
            load(words)
        except ConfigError as error:
            if started.match(str(error)):
                return words
    raise AssertionError(f"nothing meets {field} beside {other}")


def test_the_hint_of_each_conflict_is_typed_and_leads_on() -> None:
    for field, other in dict.fromkeys(row[:2] for row in ROWS):
        follow(conflict(field, other), load)


@pytest.mark.parametrize("value", ["nonsense", "-3", "2.5", "", "0", "1e400", "[1]"])
def test_the_hint_of_each_wrong_value_is_typed(value: str) -> None:
    for name in FIELDS:
        follow([f"--{name}", value], load)


TEXT = "--model.name transformer --data.name a.jsonl --data.seq_len 32 "
TOKENS = "--model.name transformer --data.name tokens --data.dir tokens --data.seq_len 16 "
OF_A_JOB = (
    "--model.name vitt | --model.preset smal | --model.args.heads 3 | --model.args.width 0 | "
    "--model.args.num_classes 3 | --model.args.patch_size 5 | --data.name digit | "
    "--data.name nowhere/x | --model.name transformer | --model.name transformer --data.name digits | "
    "TEXT --model.args.heads 3 | TEXT --model.args.vocab_size 8 | --model.name vit --data.name a.jsonl | "
    "--mesh.shard 3 | --mesh.replicate 3 | --mesh.strategy hsdp --mesh.shard 3 | "
    "--mesh.reshard_after_forward 3 | --mesh.context 3 | --mesh.context 2 | --mesh.tensor 2 | "
    "--mesh.tensor 3 | --mesh.expert 3 | --mesh.expert 2 | "
    "TEXT --mesh.context 4 --model.args.heads 2 --model.args.kv_heads 2 | "
    "TEXT --mesh.tensor 4 --model.args.heads 2 | --train.micro_batch 60 | --speed.attention flash | "
    "--speed.float8 tensorwise | --memory.activation_checkpointing full --mesh.wrap root | "
    "--memory.activation_budget 0.5 | --mesh.wrap class:Foo | --lora.rank 4 --lora.targets nothing | "
    "--model.frozen '*' | --model.frozen nothing | --checkpoint.export_format hf | "
    "--data.validation 0.9 | --data.name pictures --data.dir a.jsonl | --optim.name x: | "
    "--train.evaluate_only true | --run.dir s3://bucket/mine | --train.steps | --lr 1e-3 | "
    "--data.name pictures --data.args.mean '[1]' | --data.name pictures --data.args.mean 3 | "
    "--data.name pictures --data.args.image_size 0 | --data.name pictures --data.args.channels 2 | "
    "--model.name transformer --data.name tokens --data.dir tokens --data.seq_len 9000  | TOKENS  | "
    "TOKENS  | TEXT --data.args.heldout x | TEXT --data.args.rows x | "
    "--data.name synthetic --data.args.image_size x"
)


def test_recipes_are_named_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.toml").write_text("[")
    for name, place in (("nowhere.toml", "recipes"), ("bad.toml", "recipes/digits.toml")):
        with pytest.raises(ConfigError) as error:
            load(["--config", name])
        assert f" {ROOT / place}" in str(error.value.hint)


@pytest.mark.parametrize("ranks", [1, 4])
def test_what_only_the_job_can_know(ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import Image

    def dry_run(words: Sequence[str]) -> None:
        config = load(words)
        job = prepare(config, world_size=ranks, num_nodes=1, device=torch.device("cpu"))
        describe(config, job, trained_model(config, job))

    monkeypatch.chdir(tmp_path)
    rows = [json.dumps({"text": f"Once upon a time {n} "}) for n in range(200)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    for number, kind in enumerate("abababab"):
        (tmp_path / "pictures" / kind).mkdir(parents=True, exist_ok=True)
        pixels = np.full((28, 28, 3), number * 9, np.uint8)
        Image.fromarray(pixels).save(tmp_path / "pictures" / kind / f"{number}.png")
    (tmp_path / "tokens").mkdir()
    np.save(tmp_path / "tokens/a.npy", (np.arange(3000) % 200).astype(np.uint16))
    for words in OF_A_JOB.split(" | "):
        follow(shlex.split(words.replace("TEXT", TEXT).replace("TOKENS", TOKENS)), dry_run)
