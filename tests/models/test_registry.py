"""--model.name, preset and args: what resolves, and each way to get it wrong read as a person would."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from fsdp.base.errors import ConfigError
from fsdp.config import ModelSection, load
from fsdp.models import ModelSpec, resolve
from fsdp.run.job import prepare

DIGITS = {"num_classes": 10, "image_size": 28, "channels": 1}
BYTES = {"vocab_size": 256, "seq_len": 128}

MODULE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes, width=8):
        super().__init__()
        self.head = nn.Linear(width, num_classes)

def net(num_classes: int, image_size: int = 1, *, width: int = 8):
    assert torch.get_default_device().type in ("cpu", "meta")
    return nn.Linear(image_size * width, num_classes)

def breaks():
    raise RuntimeError("no such\\nshape")

def moves():
    return nn.Linear(2, 2).to("cpu")

def no_module():
    return {"a": 1}

constant = 3
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of a person's own, started in: nothing of it is installed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(Path.cwd()))])
    for name in [name for name in sys.modules if name.startswith("my_")]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "my_models.py").write_text(MODULE)
    return tmp_path


def spec(name: str, preset: str = "", facts: dict[str, Any] | None = None, **args: Any) -> ModelSpec:
    return resolve(ModelSection(name=name, preset=preset, args=args), facts or {})


# ---------------------------------------------------------------- built-in


def test_sizes_come_from_args_then_preset_then_the_data_then_defaults() -> None:
    sizes = spec("transformer", "124m", {"vocab_size": 256, "seq_len": 128}, layers=3).sizes
    assert (sizes["layers"], sizes["vocab_size"], sizes["width"], sizes["rope_theta"]) == (
        3,
        50_304,
        768,
        10_000.0,
    )
    toy = spec("transformer", "", BYTES).sizes
    assert (toy["vocab_size"], toy["max_seq_len"], toy["kv_heads"], toy["ffn"]) == (256, 128, 4, 384)


# ---------------------------------------------------------------- a person's own


def test_a_factory_beside_the_start_directory_is_found_and_given_the_datas_facts() -> None:
    made = spec("my_models:net", facts=DIGITS, width=2)
    assert made.sizes == {"width": 2, "num_classes": 10, "image_size": 28}
    model = made.build()
    assert isinstance(model, nn.Linear)
    assert (model.in_features, model.out_features) == (56, 10)


def test_a_class_is_a_factory_and_args_come_before_facts() -> None:
    made = spec("my_models:Net", facts=DIGITS, num_classes=3)
    assert made.build().head.out_features == 3  # type: ignore[union-attr]
    assert not made.knows_inits


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"name": "transfomer"}, "transfomer is not vit, transformer, mlp", "--model.name transformer"),
    ({"name": "vit", "preset": "smal"}, "smal is not one of vit's: small, wide", "--model.preset small"),
    ({"name": "transformer", "layer": 3}, "layer is not an argument", "--model.args.layers"),
    ({"name": "transformer", "layers": 0}, "0 is no int from 1", "--model.args.layers 2"),
    ({"name": "transformer", "width": 100, "heads": 8}, "not a multiple", "--model.args.heads 5"),
    ({"name": "vit", "image_size": 30}, "image_size 30 is not a multiple", "patch_size 6"),
    ({"name": "transformer", "facts": DIGITS}, "reads tokens, but the data holds images", "--data.name text"),
    ({"name": "transformer", "facts": BYTES, "vocab_size": 100}, "is too few", "--model.args.vocab_size 256"),
    ({"name": "my_modelz:net"}, "there is no module my_modelz", "PYTHONPATH"),
    ({"name": "my_models:nett"}, "failed: AttributeError", "--model.name my_models:net"),
    ({"name": "my_models:net", "widht": 3, "facts": DIGITS}, "widht is not an argument", "args.width"),
    ({"name": "my_models:net"}, "my_models:net needs num_classes", "--model.args.num_classes VALUE"),
    ({"name": "my_models:breaks"}, "RuntimeError: no such shape", "meta device"),
    ({"name": "my_models:moves"}, "failed: NotImplementedError", "leave out .to(DEVICE), .cuda() and .cpu()"),
    ({"name": "my_models:no_module"}, "returned a dict", "return the nn.Module"),
    ({"name": "my_broken:net"}, "ZeroDivisionError: division by zero", "import my_broken"),
    ({"name": "my_needy:net"}, "there is no module not_a_package", "pip install not_a_package"),
]


@pytest.mark.parametrize(("given", "says", "hint"), WRONG, ids=lambda v: v if isinstance(v, str) else None)
def test_what_is_wrong_is_one_line_with_a_hint(
    given: dict[str, Any], says: str, hint: str, here: Path
) -> None:
    (here / "my_broken.py").write_text("1 / 0\n")
    (here / "my_needy.py").write_text("import not_a_package.part\n")
    with pytest.raises(ConfigError) as error:
        spec(**given)
    message = str(error.value)
    assert says in message.partition("HINT: ")[0], message
    assert hint in message.partition("HINT: ")[2], message
    assert "\n" not in message


@pytest.mark.needs("transformers")
def test_a_forgotten_prefix_and_a_name_of_nothing_are_found_before_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("chat", "run/full_model"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    hints = {
        "chat": "--model.name hf:chat",
        "run": "--model.name hf:run/full_model",
        "hf:run": "--model.name hf:run/full_model",
        "hf:empty": "a folder that save_pretrained wrote, in --model.name",
        "resnet": "--model.name package.module:factory for your own model",
        "org/chat": "--model.name hf:org/chat, if it is a model of the hub",
        "hf:chat": "pip install -U transformers, .*",
    }
    for name, hint in hints.items():
        config = load(["--model.name", name, "--data.name", "gone.jsonl"])
        with pytest.raises(ConfigError, match=rf"--model.name {name}\b.* HINT: {hint}$"):
            prepare(config, world_size=1, num_nodes=1, device=None)
