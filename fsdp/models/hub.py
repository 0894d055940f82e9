"""Folders of save_pretrained by `hf:FOLDER` or `hf:ORG/NAME`; nothing is downloaded."""

from __future__ import annotations

import re
from pathlib import Path

from fsdp.base.errors import ConfigError
from fsdp.config.values import expanded

PREFIX = "hf:"
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)


def find_folder(name: str, flag: str = "--model.name") -> Path:
    """The folder itself, or the newest snapshot of a hub id in huggingface_hub's cache."""
    place = name.removeprefix(PREFIX)
    folder = expanded(place)
    if folder.is_dir():
        return folder
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


def on_this_node(error: ConfigError) -> ConfigError:
    """Marks an error that other nodes may not have: files differ between nodes."""
    error.scope = "node"
    return error
