"""Commands in messages, as a person types them: those of a clone, or of the installed `shardrun`.

Messages name the commands of a clone, `python train.py` and `python -m fsdp.plan`; `as_typed` replaces them
where `shardrun` started the run: it sets SHARDRUN_INSTALLED for itself and its children.
"""

from __future__ import annotations

import os
import re

INSTALLED = "SHARDRUN_INSTALLED"
_TOOL = re.compile(r"python -m (?:fsdp|launch)\.(\w+)")
_UNDER_A_LAUNCHER = re.compile(r"((?:torchrun|srun)\b[^`]*? )(?:python )?train\.py")


def as_typed(text: str) -> str:
    """The text with each command of a clone as `shardrun NAME`, if that is installed."""
    if INSTALLED not in os.environ:
        return text
    text = _TOOL.sub(r"shardrun \1", text)
    text = _UNDER_A_LAUNCHER.sub(lambda found: _ranks(found[1]), text)
    return text.replace("python train.py", "shardrun train")


def _ranks(launcher: str) -> str:
    return f"{launcher}{'-m shardrun' if launcher.startswith('torchrun') else 'shardrun'} train"
