"""--model.name, preset and args: what resolves, and each way to get it wrong read as a person would."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from fsdp.base.errors import ConfigError
from fsdp.config import ModelSection
from fsdp.models import ModelSpec, resolve

DIGITS = {"num_classes": 10, "image_size": 28, "channels": 1}
BYTES = {"vocab_size": 256, "seq_len": 128}

MODULE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes, width=8):
        super().__init__()
        self.head = nn.Linear(width, num_classes)

class Zoo:
    @staticmethod
    def build(width: int = 4):
        return nn.Linear(width, 2)

def net(num_classes: int, image_size: int = 1, *, width: int = 8):
    assert torch.get_default_device().type in ("cpu", "meta")
    return nn.Linear(image_size * width, num_classes)

def anything(**sizes):
    return nn.Linear(sizes.get("width", 1), 1)

def preset(preset: str = "a"):
    return nn.Linear({"a": 1, "b": 2}[preset], 1)

def breaks():
    raise RuntimeError("no such\\nshape")

def moves():
    return nn.Linear(2, 2).to("cpu")


def reads_values():
    return nn.Linear(int(torch.ones(3).sum().item()), 1)

def no_module():
    return {"a": 1}

class Drawn(nn.Module):
    def __init__(self, complete=True, buffer=False):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(3)), nn.Parameter(torch.empty(3))
        self.names = ["weight", "bias"] if complete else ["weight"]
        if buffer:
            self.register_buffer("mask", torch.ones(3))

    def param_inits(self):
        from fsdp.models.init import Normal
        return {name: Normal(1.0) for name in self.names}

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


BAD_BUILT_IN: list[tuple[dict[str, Any], str, str]] = [
    (
        {"name": "transfomer"},
        "--model.name transfomer is not vit, transformer, mlp",
        "--model.name transformer",
    ),
    (
        {"name": "vit", "preset": "smal"},
        "--model.preset smal is not one of vit's: small, wide",
        "--model.preset small",
    ),
    ({"name": "transformer", "layer": 3}, "--model.args.layer is not an argument", "--model.args.layers"),
    (
        {"name": "transformer", "layers": "two"},
        "--model.args.layers two is not a whole number",
        "--model.args.layers 2",
    ),
    (
        {"name": "transformer", "tied": 1},
        "--model.args.tied 1 is not true or false",
        "--model.args.tied false",
    ),
    ({"name": "transformer", "layers": 0}, "layers 0 is not a whole number from 1", "--model.args.layers 2"),
    (
        {"name": "transformer", "width": 100, "heads": 8},
        "--model.args.width 100 is not a multiple of --model.args.heads 8",
        "--model.args.heads 5",
    ),
    ({"name": "transformer", "width": 12, "heads": 4}, "head_dim 3", "--model.args.head_dim 4"),
    (
        {"name": "vit", "image_size": 30},
        "--model.args.image_size 30 is not a multiple of --model.args.patch_size 7",
        "patch_size 6",
    ),
    (
        {"name": "transformer", "facts": DIGITS},
        "--model.name transformer reads tokens, but the data holds images",
        "--data.name text",
    ),
    (
        {"name": "transformer", "facts": BYTES, "vocab_size": 100},
        "the data has 256 different tokens",
        "--model.args.vocab_size 256",
    ),
    (
        {"name": "vit", "facts": DIGITS, "image_size": 14},
        "the data has image_size 28",
        "--model.args.image_size 28",
    ),
    (
        {"name": "mlp", "facts": DIGITS, "in_features": 1024},
        "channels × image_size² = 784",
        "--model.args.in_features 784",
    ),
]


@pytest.mark.parametrize(
    ("given", "says", "hint"), BAD_BUILT_IN, ids=lambda v: v if isinstance(v, str) else None
)
def test_a_wrong_size_is_one_line_with_a_hint(given: dict[str, Any], says: str, hint: str) -> None:
    with pytest.raises(ConfigError) as error:
        spec(**given)
    message = str(error.value)
    assert says in message.partition("HINT: ")[0], message
    assert hint in message.partition("HINT: ")[2], message
    assert "\n" not in message


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


BAD_FACTORIES: list[tuple[dict[str, Any], str, str]] = [
    ({"name": "my_modelz:net"}, "there is no module my_modelz", "PYTHONPATH"),
    ({"name": ":net"}, "--model.name :net is not package.module:factory", "my_module:build"),
    ({"name": "my_models:nett"}, "my_models has no nett", "--model.name my_models:net"),
    ({"name": "my_models:constant"}, "is a int, which cannot be called", "a class or a function"),
    (
        {"name": "my_models:net", "widht": 3, "facts": DIGITS},
        "--model.args.widht is not an argument of my_models:net",
        "args.width",
    ),
    ({"name": "my_models:net"}, "my_models:net needs num_classes", "--model.args.num_classes VALUE"),
    (
        {"name": "my_models:net", "preset": "a", "facts": DIGITS},
        "--model.preset a has no effect on my_models:net",
        "leave it out",
    ),
    ({"name": "my_models:breaks"}, "RuntimeError: no such shape", "meta device"),
    ({"name": "my_models:moves"}, "failed: NotImplementedError", "leave out .to(DEVICE), .cuda() and .cpu()"),
    ({"name": "my_models:no_module"}, "returned a dict", "return the nn.Module"),
    (
        {"name": "my_models:Drawn", "complete": False},
        "param_inits() has no entry for bias",
        "every parameter",
    ),
    ({"name": "my_models:Drawn", "buffer": True}, "nothing fills its buffer mask", "init_buffers(device)"),
    ({"name": "my_broken:net"}, "ZeroDivisionError: division by zero", "import my_broken"),
    ({"name": "my_needy:net"}, "imports not_a_package, which is not installed", "pip install not_a_package"),
]


@pytest.mark.parametrize(
    ("given", "says", "hint"), BAD_FACTORIES, ids=lambda v: v if isinstance(v, str) else None
)
def test_a_factory_that_does_not_work_is_one_line_with_a_hint(
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
