"""Import of torchvision with a CPU build of torch and PyPI's torchvision, which is built for CUDA.

torchvision's extension then cannot load, and `import torchvision` fails at the two operators that it
registers fakes for. Declaring their schemas first is enough: nothing here uses an operator of torchvision.
If the extension loads, nothing is declared.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch

from fsdp.base.errors import ConfigError

_OPERATORS = ("nms", "qnms")
_library: torch.library.Library | None = None  # a schema lives as long as its Library does


def import_torchvision() -> ModuleType:
    """The torchvision package, imported at the first call."""
    prepare_torchvision()
    try:
        return importlib.import_module("torchvision")
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed.", "pip install -r requirements.txt") from None


def prepare_torchvision() -> bool:
    """Make any later `import torchvision` work; true if schemas were declared. Imports nothing itself."""
    global _library
    if _library is not None:
        return True
    if "torchvision" in sys.modules:
        return False
    extension = _extension()
    if extension is None or _loads(extension):
        return False
    # A fragment: other code may have declared the namespace, or an operator, before.
    _library = torch.library.Library("torchvision", "FRAGMENT")
    for name in _OPERATORS:
        if not hasattr(torch.ops.torchvision, name):
            _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return True


def _extension() -> Path | None:
    """torchvision's compiled file, found without importing the package."""
    spec = importlib.util.find_spec("torchvision")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for suffix in importlib.machinery.EXTENSION_SUFFIXES:
            if (path := Path(folder, f"_C{suffix}")).is_file():
                return path
    return None


def _loads(extension: Path) -> bool:
    try:
        torch.ops.load_library(str(extension))
    except OSError:
        return False
    return True
