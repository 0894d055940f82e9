"""--model.name, preset and args: what resolves, and each way to get it wrong read as a person would."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
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


def test_a_spec_builds_on_meta_and_for_real() -> None:
    made = spec("mlp", hidden=4)
    with torch.device("meta"):
        assert next(made.build().parameters()).is_meta
    assert not next(made.build().parameters()).is_meta


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
    (
        {"name": "transformer", "preset": "125m"},
        "--model.preset 125m is not one of transformer's",
        "--model.preset 124m",
    ),
    (
        {"name": "mlp", "load_in_4bit": True},
        "--model.args.load_in_4bit is not an argument of --model.name mlp",
        "it accepts in_features, hidden, classes",
    ),
    ({"name": "transformer", "layer": 3}, "--model.args.layer is not an argument", "--model.args.layers"),
    (
        {"name": "mlp", "xyz": 3},
        "--model.args.xyz is not an argument of --model.name mlp",
        "in_features, hidden, classes",
    ),
    (
        {"name": "transformer", "layers": "two"},
        "--model.args.layers two is not a whole number",
        "--model.args.layers 2",
    ),
    (
        {"name": "transformer", "layers": 1.5},
        "--model.args.layers 1.5 is not a whole number",
        "--model.args.layers",
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
    (
        {"name": "transformer", "heads": 8, "kv_heads": 3},
        "--model.args.heads 8 is not a multiple of --model.args.kv_heads 3",
        "--model.args.kv_heads 2",
    ),
    ({"name": "transformer", "width": 12, "heads": 4}, "head_dim 3", "--model.args.head_dim 4"),
    (
        {"name": "vit", "image_size": 30},
        "--model.args.image_size 30 is not a multiple of --model.args.patch_size 7",
        "patch_size 6",
    ),
    (
        {"name": "vit", "heads": 3},
        "--model.args.width 128 is not a multiple of --model.args.heads 3",
        "--model.args.heads 2",
    ),
    (
        {"name": "transformer", "facts": DIGITS},
        "--model.name transformer reads tokens, but the data holds images",
        "--data.name text",
    ),
    (
        {"name": "vit", "facts": BYTES},
        "--model.name vit reads images, but the data holds tokens",
        "--data.name digits",
    ),
    (
        {"name": "transformer", "facts": BYTES, "vocab_size": 100},
        "the data has 256 different tokens",
        "--model.args.vocab_size 256",
    ),
    (
        {"name": "transformer", "facts": BYTES, "max_seq_len": 64},
        "the data has 128 tokens a sample",
        "--model.args.max_seq_len 128",
    ),
    (
        {"name": "vit", "facts": DIGITS, "num_classes": 5},
        "the data has 10 classes",
        "--model.args.num_classes 10",
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


@pytest.mark.parametrize(
    "given", [given for given, _, hint in BAD_BUILT_IN if hint.startswith("--model.args.") and " " in hint]
)
def test_a_hint_works_as_typed(given: dict[str, Any]) -> None:
    """Typing the hint instead of the wrong value is enough, or leads to a different error."""
    with pytest.raises(ConfigError) as error:
        spec(**given)
    flag, value = str(error.value.hint).split(" ", 1)
    from fsdp.config import parse_free_value

    spec(**{**given, flag.removeprefix("--model.args."): parse_free_value(value)})


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


def test_a_factory_that_takes_anything_gets_only_what_was_given() -> None:
    assert spec("my_models:anything", facts=DIGITS, width=5).sizes == {"width": 5}


def test_a_factory_may_have_presets() -> None:
    assert spec("my_models:preset", "b").build().in_features == 2  # type: ignore[comparison-overlap]


def test_a_factory_that_says_its_inits_is_known_to() -> None:
    assert spec("my_models:Drawn").knows_inits


def test_looking_at_a_factory_leaves_torchs_random_numbers_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    spec("my_models:net", facts=DIGITS)
    assert torch.equal(torch.get_rng_state(), before)


BAD_FACTORIES: list[tuple[dict[str, Any], str, str]] = [
    ({"name": "my_modelz:net"}, "there is no module my_modelz", "PYTHONPATH"),
    ({"name": "my_models.sub:net"}, "there is no module my_models.sub", "PYTHONPATH"),
    ({"name": ":net"}, "--model.name :net is not package.module:factory", "my_module:build"),
    ({"name": "my_models:"}, "--model.name my_models: is not package.module:factory", "my_module:build"),
    ({"name": "my_models:nett"}, "my_models has no nett", "--model.name my_models:net"),
    ({"name": "my_models:Zoo.buidl"}, "Zoo has no buidl", "my_models:"),
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
    ({"name": "my_models:reads_values"}, "failed: RuntimeError", "torch.linspace(0, 0.1, 12, device='cpu')"),
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


def test_an_error_in_a_factory_names_its_own_line() -> None:
    with pytest.raises(ConfigError, match=r"my_models.py:\d+\)") as error:
        spec("my_models:breaks")
    assert isinstance(error.value.__cause__, RuntimeError)
