"""Two linear layers with a ReLU between: 1024 → 1024 → 10, on flattened inputs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.functional import relu

from fsdp.models.factory import BuiltIn, Fact
from fsdp.models.init import Init, Uniform


@dataclass(frozen=True, kw_only=True)
class MlpSizes:
    in_features: int = 1024
    hidden: int = 1024
    classes: int = 10


class Mlp(nn.Module):
    """inputs [batch, …] → logits [batch, classes]."""

    def __init__(self, sizes: MlpSizes) -> None:
        super().__init__()
        self.hidden = nn.Linear(sizes.in_features, sizes.hidden)
        self.output = nn.Linear(sizes.hidden, sizes.classes)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.output(relu(self.hidden(inputs.flatten(1))))

    def param_inits(self) -> dict[str, Init]:
        """As nn.Linear: weight and bias within ±1/√inputs."""
        layers = {"hidden": self.hidden, "output": self.output}
        return {
            f"{name}.{part}": Uniform(1 / math.sqrt(layer.in_features))
            for name, layer in layers.items()
            for part in ("weight", "bias")
        }


BUILT_IN = BuiltIn(
    sizes=MlpSizes,
    presets={"base": {}},
    reads="num_classes",
    facts={
        "in_features": Fact("pixels", "channels × image_size² = {}", exact=True),
        "classes": Fact("num_classes", "{} classes"),
    },
    build=Mlp,
)
