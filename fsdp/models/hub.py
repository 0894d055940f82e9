"""Folders of save_pretrained by `hf:FOLDER` or `hf:ORG/NAME`; nothing is downloaded."""

from __future__ import annotations

import json
import re
from pathlib import Path

from fsdp.base.errors import ConfigError
from fsdp.base.regular_file import SETTINGS, regular_text
from fsdp.config.fields import expanded

PREFIX = "hf:"
ADAPTER = "adapter_config.json"
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)


def find_folder(name: str, flag: str = "--model.name") -> Path:
    """The folder itself, or the newest snapshot of a hub id in huggingface_hub's cache."""
    path = name.removeprefix(PREFIX)
    fault, hint = f"the folder {path} does not exist", f"{flag} hf:FOLDER or hf:ORG/NAME"
    try:
        if expanded(path).is_dir():
            return expanded(path)
        if _HUB_ID.fullmatch(path):
            from huggingface_hub import snapshot_download

            return Path(snapshot_download(path, local_files_only=True))
    except Exception as error:  # several classes, which differ between versions
        fault = f"{path} is neither a folder nor in huggingface_hub's cache ({type(error).__name__})"
        hint = f"hf download {path}"
    raise ConfigError(f"{flag} {name}: {fault}.", hint, scope="node")  # files differ between nodes


def check_no_adapter(path: Path, flag: str, text: str) -> None:
    """Refuses a folder of the peft library's, or its weights, with the command that merges it."""
    file = path / ADAPTER if path.is_dir() else path.with_name(ADAPTER)
    if not file.is_file() or not (path.is_dir() or path.name.startswith("adapter_model.")):
        return
    try:
        base = json.loads(regular_text(file, SETTINGS))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        base = "a model that it does not name"
    raise ConfigError(
        f"{flag} {text} is an adapter of peft over {base}, without the weights of that model.",
        f'in Python, peft.AutoPeftModelForCausalLM.from_pretrained("{file.parent}").merge_and_unload()'
        '.save_pretrained("MERGED"), then --model.name hf:MERGED',
        scope="node",
    )
