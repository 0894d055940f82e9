"""What one rank does. Imports torch; imports no launcher: neither ray nor submitit nor launch/."""

from __future__ import annotations

import sys
from typing import Any


class RenamedRooms:
    """The last finder of modules: an import of a room's old name ends with the new one."""

    NAMES = {"fsdp.dist": "fsdp.distributed", "fsdp.parallel": "fsdp.shard"}  # noqa: RUF012

    @classmethod
    def find_spec(cls, name: str, *_: object) -> None:
        if name in cls.NAMES:
            raise ModuleNotFoundError(f"{name} has a new name. HINT: import {cls.NAMES[name]}", name=name)


class TorchvisionOperators:
    """The first finder of modules: makes `import torchvision` work with a CPU build of torch beside PyPI's
    torchvision, which is built for CUDA. Its extension then cannot load, and the import fails in the module
    named here, at the two operators that it registers fakes for: declaring their schemas is enough.

    `make setup` copies this file into .venv where it is needed, for imports that no module of ours precedes.
    """

    library: Any = None
    """The schemas live as long as it."""

    @classmethod
    def find_spec(cls, name: str, *_: object) -> None:
        if name == "torchvision._meta_registrations":
            import torch

            if not hasattr(torch.ops.torchvision, "nms"):
                cls.library = torch.library.Library("torchvision", "FRAGMENT")
                for operator in ("nms", "qnms"):
                    cls.library.define(
                        f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                    )


sys.meta_path.insert(0, TorchvisionOperators)  # type: ignore[arg-type]
sys.meta_path.append(RenamedRooms)  # type: ignore[arg-type]
