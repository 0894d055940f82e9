"""--model.frozen: what its patterns mean, that only the rest is trained, and what is said of a pattern that
means nothing.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fsdp import config as configuration
from fsdp.base.errors import ConfigError
from fsdp.data import build_dataset
from fsdp.models import build_real, resolve
from fsdp.models.lora import freeze
from tests.support import user_code
from tests.support.runs import flags, run


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("stem", r"HINT: --model.frozen stem\.\*"),
        ("norm.weight", r"HINT: --model.frozen \*\.norm\.weight"),
        ("stem.wieght", "HINT: --model.frozen stem.weight"),
        ("stem.*,hat.*", "--model.frozen hat.* matches no parameter"),
    ],
)
def test_a_pattern_that_means_nothing_is_refused(text: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        freeze(user_code.Uneven(), text)
    assert hint.replace("\\", "") in str(caught.value)


def initial(*more: str) -> dict[str, Tensor]:
    config = configuration.load(flags(*more))
    model = build_real(resolve(config.model, build_dataset(config.data).info.facts), config.run.seed)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("mesh", ["", "--mesh.strategy ddp"])
def test_what_is_frozen_keeps_its_bits_and_the_rest_moves(mesh: str, tmp_path: Path) -> None:
    found = run(2, tmp_path, mesh, "--train.steps 3 --model.frozen stem.*,blocks.1.*,*.bias").parameters
    for name, value in initial().items():
        kept = name.startswith(("stem.", "blocks.1.")) or name.endswith(".bias")
        assert torch.equal(found[name], value) is kept, name
