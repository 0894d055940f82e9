"""python -m fsdp.predict on run directories as training writes them: accuracy, images, text, errors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from fsdp import config as configuration
from fsdp.config import Config
from fsdp.data import build_dataset
from fsdp.models import build_real, resolve
from fsdp.predict.__main__ import main

ROOT = Path(__file__).parents[2]
MLP: dict[str, Any] = {"model.name": "mlp", "model.args.hidden": 32}
LANGUAGE: dict[str, Any] = {
    "data.name": "text", "data.seq_len": 32, "data.args.max_mb": 0.2, "model.name": "transformer",
    "model.args.width": 32, "model.args.heads": 2, "model.args.layers": 1,
}  # fmt: skip

Made = tuple[Path, nn.Module, Config]


def make_run(folder: Path, fields: Mapping[str, Any], train_steps: int = 0) -> Made:
    """A run directory: the resolved configuration, and the whole model's state dict."""
    config = configuration.load([], fields)
    data = build_dataset(config.data)
    model = build_real(resolve(config.model, data.info.facts), seed=1)
    if train_steps:
        batch = data.train.batch(np.arange(len(data.train)))
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        for _ in range(train_steps):
            loss = nn.functional.cross_entropy(model(batch["inputs"]), batch["targets"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    (folder / "full_model").mkdir(parents=True)
    (folder / "config.toml").write_text(configuration.to_toml(config), encoding="utf-8")
    torch.save(model.state_dict(), folder / "full_model" / "full-model.pt")
    return folder, model.eval(), config


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make_run(tmp_path_factory.mktemp("digits") / "run", MLP, train_steps=40)


@pytest.fixture(scope="module")
def language(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make_run(tmp_path_factory.mktemp("language") / "run", LANGUAGE)


Command = Callable[..., str]


@pytest.fixture
def predict(capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*argv: object) -> str:
        assert main([str(word) for word in argv]) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return run


@pytest.fixture
def error_of(capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*argv: object) -> str:
        assert main([str(word) for word in argv]) == 2
        captured = capsys.readouterr()
        assert captured.err.count("\n") == 1
        assert captured.out == ""
        return captured.err

    return run


# ---------------------------------------------------------------- images


def test_the_accuracy_is_that_of_the_heldout_digits(digits: Made, predict: Command) -> None:
    run, model, config = digits
    heldout = build_dataset(config.data).heldout
    assert heldout is not None
    batch = heldout.batch(np.arange(len(heldout)))
    right = int((model(batch["inputs"]).argmax(-1) == batch["targets"]).sum())
    assert right > 0.85 * len(heldout)
    assert (
        f"accuracy  {right / len(heldout):.2%} of the held-out samples, {right} of {len(heldout)}\n"
        in predict(run)
    )


def test_image_files_are_preprocessed_as_in_training(digits: Made, predict: Command, tmp_path: Path) -> None:
    """A digit of the data, enlarged and in colour as a user's file would be, gets the same prediction."""
    run, _, _ = digits
    with np.load(ROOT / "fsdp" / "data" / "digits.npz") as file:
        source, labels = file["images"], file["labels"]
    right = 0
    for index in range(20):
        large = np.kron(source[index] / 16 * 255, np.ones((40, 40))).round().astype(np.uint8)
        Image.fromarray(large).convert("RGB").save(tmp_path / f"{index}.png")
        Image.fromarray(255 - large).save(tmp_path / f"dark{index}.png")
    files = [word for index in range(20) for word in ("--image", tmp_path / f"{index}.png")]
    light = predict(run, *files, "--out", tmp_path / "classes.txt").splitlines()
    assert (tmp_path / "classes.txt").read_text().splitlines() == light
    dark = predict(
        run, "--invert", *[str(word).replace(f"{tmp_path}/", f"{tmp_path}/dark") for word in files]
    ).splitlines()
    for index in range(20):
        assert light[index].split()[1:] == dark[index].split()[1:]
        right += light[index].split()[1] == str(labels[index])
    assert right >= 18
    assert not any(line.startswith("accuracy") for line in light)


def test_a_safetensors_export_has_the_same_predictions(
    digits: Made, predict: Command, tmp_path: Path
) -> None:
    run, model, _ = digits
    other = tmp_path / "run"
    (other / "full_model").mkdir(parents=True)
    (other / "config.toml").write_bytes((run / "config.toml").read_bytes())
    state = list(model.state_dict().items())
    parts = [state[:1], state[1:]]
    names = [f"model-{n + 1:05}-of-{len(parts):05}.safetensors" for n in range(len(parts))]
    for name, part in zip(names, parts, strict=True):
        save_file(dict(part), other / "full_model" / name)
    where = {key: name for name, part in zip(names, parts, strict=True) for key, _ in part}
    index = json.dumps({"metadata": {}, "weight_map": where})
    (other / "full_model" / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    assert predict(other).replace(str(other), "") == predict(run).replace(str(run), "")


# ---------------------------------------------------------------- language


def test_generated_text_is_deterministic_for_a_seed(language: Made, predict: Command) -> None:
    run = language[0]
    first = predict(run, "--prompt", "import ", "--tokens", 40)
    assert first.startswith("import ")
    assert predict(run, "--prompt", "import ", "--tokens", 40) == first
    assert predict(run, "--prompt", "import ", "--tokens", 40, "--seed", 1) != first


def test_greedy_tokens_are_the_models_argmax(language: Made, predict: Command) -> None:
    run, model, _ = language
    tokens = list(b"class Thing:")
    for _ in range(45):  # more than training's context of 32
        tokens.append(int(model(torch.tensor([tokens[-32:]]))[0, -1, :256].argmax()))
    text = predict(run, "--prompt", "class Thing:", "--tokens", 45, "--temperature", 0)
    assert text == bytes(tokens).decode(errors="replace") + "\n"
    assert predict(run, "--prompt", "class Thing:", "--tokens", 45, "--top-k", 1) == text


def test_token_numbers_where_training_read_numbers(
    tmp_path: Path, predict: Command, error_of: Command
) -> None:
    (np.arange(2000) % 50).astype(np.uint16).tofile(tmp_path / "tokens.bin")
    fields = LANGUAGE | {"data.name": "tokens", "data.dir": str(tmp_path), "data.args.vocab_size": 50}
    del fields["data.args.max_mb"]
    run, _, _ = make_run(tmp_path / "run", fields)
    numbers = [int(word) for word in predict(run, "--prompt", "1 2 3", "--tokens", 4).split()]
    assert numbers[:3] == [1, 2, 3]
    assert len(numbers) == 7
    assert max(numbers) < 50
    assert len(predict(run, "--tokens", 4).split()) == 20
    assert "is not a list of token numbers" in error_of(run, "--prompt", "abc")
    assert "token 50, beyond the vocabulary of 50" in error_of(run, "--prompt", "50")


# ---------------------------------------------------------------- errors


def test_a_run_without_an_export_and_a_checkpoint(tmp_path: Path, capsys: Any) -> None:
    run, _, _ = make_run(tmp_path / "run", MLP)
    (run / "full_model" / "full-model.pt").unlink()
    assert main([str(run)]) == 4
    error = capsys.readouterr().err
    assert f"{run} has neither an exported model nor a whole checkpoint. HINT: python -m fsdp." in error


def test_an_export_of_another_model(tmp_path: Path, error_of: Command) -> None:
    run, _, _ = make_run(tmp_path / "run", MLP)
    torch.save({"weight": torch.zeros(2)}, run / "full_model" / "full-model.pt")
    assert f"{run}/full_model has no hidden.weight" in error_of(run)


def test_sizes_that_the_export_does_not_have_take_no_memory(tmp_path: Path, error_of: Command) -> None:
    run, _, _ = make_run(tmp_path / "run", MLP)
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(text.replace("hidden = 32", "hidden = 4_000_000_000"))
    assert "4000000000" in error_of(run)


def test_an_export_that_would_run_code_is_refused(tmp_path: Path, error_of: Command) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "written",)

    run, _, _ = make_run(tmp_path / "run", MLP)
    torch.save({"weight": Evil()}, run / "full_model" / "full-model.pt")
    error_of(run)
    assert not (tmp_path / "written").exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--sample", "3"], "--sample is not a flag"),
        (["--samples", "few"], "--samples few is not a whole number from 0"),
        (["--temperature", "-1"], "--temperature -1 is not a number from 0"),
        (["--split", "test"], "--split test is not one of heldout, train"),
        (["--prompt", "hello"], "--prompt does not apply to"),
        (["--tokens", "5"], "--tokens does not apply to"),
        (["--image", "no/such.png"], "--image no/such.png does not exist"),
        (["--image", __file__], "is not an image"),
        (["--invert"], "--invert applies to --image alone. HINT: --image FILE --invert"),
        (["--data.dri", "x"], "--data.dri is not a flag. HINT: did you mean --data.dir?"),
        (["--model.name", "vit"], "--model.name is not a flag"),
    ],
)
def test_wrong_flags_are_one_line(digits: Made, error_of: Command, argv: list[str], message: str) -> None:
    assert message in error_of(digits[0], *argv)


# ---------------------------------------------------------------- what a run was, and is no more


def test_a_run_whose_first_weights_are_gone_is_read(digits: Made, predict: Command, tmp_path: Path) -> None:
    whole, model, _ = digits
    start = tmp_path / "start.pt"
    torch.save(model.state_dict(), start)
    run, *_ = make_run(tmp_path / "run", {**MLP, "model.weights": str(start)})
    shutil.copytree(whole / "full_model", run / "full_model", dirs_exist_ok=True)
    expected = predict(run)
    start.unlink()
    assert predict(run) == expected


def test_samples_of_a_stream_are_refused_in_a_line(error_of: Command, tmp_path: Path) -> None:
    stream = {"data.name": "tests.support.data_ids:classified", "train.steps": 3}
    run, *_ = make_run(tmp_path / "run", {"model.name": "tests.support.user_code:Uneven", **stream})
    named = (stream["data.name"], "tests.support.user_code:Uneven")
    trusted = [word for name in named for word in ("--trust-code", name)]
    for split in ("train", "heldout"):
        assert "HINT: --image FILE" in error_of(run, "--split", split, *trusted)


def test_a_model_that_diverged_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, model, _ = make_run(tmp_path / "run", LANGUAGE)
    state = {name: torch.full_like(value, torch.nan) for name, value in model.state_dict().items()}
    torch.save(state, next((run / "full_model").iterdir()))
    assert main([str(run)]) == 5
    assert "parameter embedding.weight was never initialised, or is NaN" in capsys.readouterr().err
