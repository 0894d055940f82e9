"""Commands in messages, as a person types them: those of a clone, or of the installed `shardrun`.

Messages name the commands of a clone, `python train.py` and `python -m fsdp.plan`; `as_typed` replaces them
where `shardrun` started the run: it sets SHARDRUN_INSTALLED for itself and its children. `from_here` names
the clone where the working directory is another one.
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

INSTALLED = "SHARDRUN_INSTALLED"
_TOOL = re.compile(r"python -m (?:fsdp|launch)\.(\w+)")
_UNDER_A_LAUNCHER = re.compile(r"((?:torchrun|srun)\b[^`]*? )(?:python )?train\.py")


def quoted(word: object) -> str:
    """A word of a shell's line; where characters do not print, as a line break, in bash's $'…'."""
    text = str(word)
    return shlex.quote(text) if text.isprintable() else f"$'{''.join(map(_escaped, text))}'"


def _escaped(sign: str) -> str:
    if sign.isprintable() and sign not in "\\'":
        return sign
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(sign))


def as_typed(text: str) -> str:
    """The text with each command of a clone as `shardrun NAME`, if that is installed."""
    if INSTALLED not in os.environ:
        return text
    text = _TOOL.sub(r"shardrun \1", text)
    text = _UNDER_A_LAUNCHER.sub(lambda found: _ranks(found[1]), text)
    return text.replace("python train.py", "shardrun train")


def from_here(text: str) -> str:
    """The commands of `as_typed` with the clone's place, if they are to be typed elsewhere."""
    clone = Path(__file__).parents[2]
    if INSTALLED in os.environ or not (clone / "train.py").is_file() or _is_here(clone):
        return text
    place, paths = shlex.quote(str(clone)), os.environ.get("PYTHONPATH", "")
    if str(clone) not in paths.split(os.pathsep):
        more = ":$PYTHONPATH" if paths else ""
        text = re.sub(r"(?<!\S)(?=python -m (fsdp|launch)\.)", lambda _: f"PYTHONPATH={place}{more} ", text)
    return re.sub(r"(?<= )(?=train\.py|slurm/\w+\.sbatch)", lambda _: f"{place}/", text)


def _is_here(clone: Path) -> bool:
    try:
        return Path.cwd() == clone
    except FileNotFoundError:  # it has been removed meanwhile
        return True


def _ranks(launcher: str) -> str:
    return f"{launcher}{'-m shardrun' if launcher.startswith('torchrun') else 'shardrun'} train"
