"""Configurations of other trainers: --config lists their entries, `migrate` writes a recipe that runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsdp.base.errors import ConfigError
from fsdp.config import Config, load
from fsdp.config.__main__ import main
from fsdp.config.foreign_files import read_foreign
from fsdp.dist.env import from_environment
from fsdp.run.job import dry_run

FILES = sorted((Path(__file__).parent / "foreign").iterdir())


def recipe(source: Path, folder: Path) -> tuple[Config, str]:
    out = folder / "recipe.toml"
    assert main(["migrate", str(source), "--out", str(out)]) == 0
    return load(["--config", str(out)]), out.read_text()


@pytest.mark.parametrize("source", FILES, ids=lambda path: path.stem)
def test_the_recipe_passes_a_dry_run(source: Path, tmp_path: Path) -> None:
    config, text = recipe(source, tmp_path)
    assert "parameters" in dry_run(config, from_environment(device="cpu"))
    for entry in read_foreign(source).entries:
        assert entry.name in text


@pytest.mark.parametrize("source", FILES, ids=lambda path: path.stem)
def test_config_lists_every_entry_with_its_counterpart(source: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        load(["--config", str(source)])
    first, *lines = str(refused.value).splitlines()
    trainer = {"accelerate": "Accelerate", "deepspeed": "DeepSpeed"}.get(source.stem, source.stem)
    assert first == f"--config {source} is a file of {trainer}, not a recipe. Its entries are here:"
    assert lines.pop() == f" HINT: python -m fsdp.config migrate {source}"
    entries = read_foreign(source).entries
    assert len(lines) == len(entries)
    for line, entry in zip(lines, entries, strict=True):
        assert line.startswith(f"  {entry.name} "[:60])
        assert line.endswith(entry.here)
        assert "no counterpart is known" not in line


def test_deepspeed(tmp_path: Path) -> None:
    config, text = recipe(FILES[0].with_name("deepspeed.json"), tmp_path)
    assert (config.train.global_batch, config.train.micro_batch, config.train.steps) == (32, 4, 1000)
    assert (config.optim.name, config.optim.lr, config.optim.schedule) == ("adamw", 3e-4, "linear")
    assert (config.optim.beta1, config.optim.beta2, config.optim.warmup_steps) == (0.9, 0.95, 100)
    assert (config.precision.param, config.mesh.strategy, config.memory.cpu_offload) == ("bf16", "fsdp", True)
    assert config.memory.nvme_dir == "/local_nvme"
    assert "--mesh.reshard_after_forward 8, on a multiple of that many ranks" in text


def test_torchtitan(tmp_path: Path) -> None:
    config, text = recipe(FILES[0].with_name("torchtitan.toml"), tmp_path)
    assert (config.model.name, config.model.preset, config.data.seq_len) == ("transformer", "8b", 8192)
    assert (config.data.name, config.train.eval_every_steps) == ("text", 0)
    assert (config.checkpoint.every_steps, config.checkpoint.export_dtype) == (500, "fp32")
    assert (config.optim.schedule, config.optim.decay_share) == ("wsd", 0.8)
    assert "decay_type linear: --optim.decay_share 0.8 has no effect" in text
    assert "--speed.float8 tensorwise, on GPUs that multiply in float8" in text


def test_accelerate(tmp_path: Path) -> None:
    config, text = recipe(FILES[0].with_name("accelerate.yaml"), tmp_path)
    assert (config.mesh.strategy, config.mesh.reshard_after_forward) == ("fsdp", "false")
    assert (config.memory.activation_checkpointing, config.precision.param) == ("full", "bf16")
    assert "# torchrun --nproc_per_node=8 train.py --config " in text
    assert "class:LlamaDecoderLayer, once --model.name is the model with these layers" in text


def test_samples_of_a_step_follow_from_those_of_a_rank(tmp_path: Path) -> None:
    source = tmp_path / "args.yaml"
    source.write_text("per_device_train_batch_size: 4\ngradient_accumulation_steps: 8\nnum_processes: 16\n")
    config, text = recipe(source, tmp_path)
    assert (config.train.micro_batch, config.train.global_batch) == (4, 512)
    assert "# 4 × 8 accumulated × 16 ranks" in text


def test_an_entry_that_turns_something_off_counts_in_any_order(tmp_path: Path) -> None:
    for lines in (["save_strategy: 'no'", "save_steps: 50"], ["save_steps: 50", "save_strategy: 'no'"]):
        source = tmp_path / "args.yaml"
        source.write_text("\n".join(["output_dir: out", *lines]))
        (tmp_path / "recipe.toml").unlink(missing_ok=True)
        assert recipe(source, tmp_path)[0].checkpoint.every_steps == 0


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "{", "a.json cannot be parsed: Expecting property name"),
        ("a.yaml", "a: [", "a.yaml cannot be parsed: "),
        ("a.yaml", "- a", "a.yaml holds no names with values. HINT: a configuration in YAML, JSON or TOML"),
        ("a.json", '{"a": "\\ud800"}', "a.json cannot be parsed: 'utf-8' codec can't encode character"),
        ("absent.yaml", "", "absent.yaml cannot be read (No such file or directory). HINT: "),
        ("exists.yaml", "a: 1", "exists.recipe.toml exists. HINT: python -m fsdp.config migrate "),
    ],
)
def test_a_wrong_file_is_one_line(
    name: str, text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / name
    if text:
        source.write_text(text)
    (tmp_path / "exists.recipe.toml").write_text("")
    assert main(["migrate", str(source)]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1


def test_a_recipe_of_train_py_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "mine.toml"
    source.write_text('[model]\nname = "mlp"\nargs.width = 8\n[train]\nsteps = 3\n')
    assert main(["migrate", str(source)]) == 2
    message = f"{source} is a recipe of train.py already. HINT: python train.py --config {source} --dry-run"
    assert capsys.readouterr().err == f"fsdp.config: {message}\n"
    assert list(tmp_path.iterdir()) == [source]


def test_wrong_actions(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, message in (
        (["migrat"], "migrat is not one of migrate, table. HINT: python -m fsdp.config --help"),
        (["migrate"], "migrate: FILE is missing. HINT: python -m fsdp.config migrate FILE"),
        ([], "ACTION is missing. HINT: python -m fsdp.config --help"),
    ):
        assert main(argv) == 2
        assert capsys.readouterr().err == f"fsdp.config: {message}\n"


@pytest.mark.parametrize("nodes", ["0", "9" * 5000])
def test_a_number_of_nodes_that_is_none_counts_as_one(nodes: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"num_processes": 4, "num_machines": nodes}))
    assert main(["migrate", str(tmp_path / "a.json")]) == 0
    assert "torchrun --nproc_per_node=4 " in (tmp_path / "a.recipe.toml").read_text()
