"""Folders of save_pretrained by `hf:FOLDER` or `hf:ORG/NAME`; nothing is downloaded."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

from fsdp.base.errors import ConfigError
from fsdp.base.regular_file import SETTINGS, regular_text
from fsdp.config.fields import expanded

PREFIX = "hf:"
ADAPTER = "adapter_config.json"
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)


def find_folder(name: str, flag: str = "--model.name") -> Path:
    """The folder itself, or the newest snapshot of a hub id in huggingface_hub's cache."""
    place = name.removeprefix(PREFIX)
    folder = expanded(place)
    try:
        if folder.is_dir():
            return folder
    except OSError as error:  # a folder above it may not be searched
        line = f"{flag} {name} cannot be read ({error.strerror})."
        raise on_this_node(ConfigError(line, f"ls -ld {shlex.quote(str(folder))}")) from None
    if not _HUB_ID.fullmatch(place):
        raise on_this_node(
            ConfigError(
                f"{flag} {name}: the folder {place} does not exist.", f"{flag} hf:FOLDER or hf:ORG/NAME"
            )
        )
    try:
        from huggingface_hub import snapshot_download
    except ModuleNotFoundError as error:
        raise on_this_node(
            ConfigError(
                f"{flag} {name} needs {error.name}, which is not installed.", "pip install transformers"
            )
        ) from None
    try:
        return Path(snapshot_download(place, local_files_only=True))
    except Exception as error:  # several classes, which differ between versions
        raise on_this_node(
            ConfigError(
                f"{flag} {name}: {place} is neither a folder nor in huggingface_hub's cache "
                f"({type(error).__name__}).",
                f"hf download {place}",
            )
        ) from None


def check_no_adapter(place: Path, flag: str, given: str) -> None:
    """Refuses a folder of the peft library's, or its weights, with the command that merges it."""
    file = place / ADAPTER if place.is_dir() else place.with_name(ADAPTER)
    if not file.is_file() or not (place.is_dir() or place.name.startswith("adapter_model.")):
        return
    try:
        base = json.loads(regular_text(file, SETTINGS))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        base = "a model that it does not name"
    raise on_this_node(
        ConfigError(
            f"{flag} {given} is an adapter of peft over {base}, without the weights of that model.",
            f'in Python, peft.AutoPeftModelForCausalLM.from_pretrained("{file.parent}").merge_and_unload()'
            '.save_pretrained("MERGED"), then --model.name hf:MERGED',
        )
    )


def on_this_node(error: ConfigError) -> ConfigError:
    """Marks an error that other nodes may not have: files differ between nodes."""
    error.scope = "node"
    return error
