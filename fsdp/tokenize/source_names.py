"""How a source's name, or a file in its folder, tells what it is. Every run imports it: no reader here."""

from __future__ import annotations

from fsdp.base.object_client import is_url

PREFIX = "hf:"
"""Of a data set of Hugging Face: hf:ORG/NAME, or hf:FOLDER of save_to_disk."""
SAVED = ("state.json", "dataset_dict.json")
"""The files that save_to_disk writes for one split, and for several."""
MANIFEST = "tokenize.json"
"""In a folder of fsdp.tokenize: what its tokens are made of and, once all are written, what they hold."""


def is_remote(name: str) -> bool:
    """Whether a client reads it, whose threads a forked process would lose."""
    return name.startswith(PREFIX) or is_url(name)
