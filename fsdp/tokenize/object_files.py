"""Row files in an object store, such as s3://bucket/prefix/*.jsonl.gz: copied into the cache once a machine.

An object is known by its URL, size and version: a changed one is copied again. Not here: the client
(fsdp/base/object_client.py).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fsdp.base.errors import ConfigError
from fsdp.base.object_client import OBJECT_STORES, open_url, retried, without_secrets
from fsdp.tokenize.cache import made_once
from fsdp.tokenize.sources import LISTED, is_pattern, row_files

AT_ONCE = 8
"""Objects copied at the same time."""
EXAMPLE = "s3://bucket/prefix, one object, or a pattern such as 's3://bucket/prefix/*.jsonl' in quotes"


@dataclass(frozen=True)
class ObjectFile:
    url: str
    """As messages name it, without keys."""
    path: str
    size: int
    version: str


def find_objects(url: str) -> list[ObjectFile]:
    """An object, the row files below a prefix, or those of a pattern, sorted by name."""
    fs, root, shown = _opened(url)
    find = partial(fs.glob if is_pattern(root) else fs.find, root, detail=True)
    listed = _read(find, f"listing {shown}", shown)
    bucket = f"{shown.partition('://')[0]}://"
    found = [
        ObjectFile(f"{bucket}{path}", path, int(one["size"]), _version(one))
        for path, one in sorted(listed.items())
        if one.get("type") == "file" and int(one["size"]) and not path.rpartition("/")[2].startswith(".")
    ]
    rows, _ = row_files(found, lambda one: Path(one.path).name)
    if not rows:
        raise ConfigError(f"{shown} has no {LISTED} object with a byte in it.", EXAMPLE)
    return rows


def fetched(url: str, objects: list[ObjectFile]) -> list[Path]:
    """Local copies, under the objects' own names."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(partial(_copy, url), objects))


def _copy(url: str, one: ObjectFile) -> Path:
    def make(aside: Path) -> None:
        fs, _, shown = _opened(url)
        aside.mkdir(exist_ok=True)
        place = aside / Path(one.path).name
        _read(partial(fs.get_file, one.path, str(place)), f"reading {one.url}", shown)
        if place.stat().st_size != one.size:
            raise ConfigError(
                f"{one.url} has {one.size} bytes, and {place.stat().st_size} arrived.",
                "the same command again",
            )

    return made_once("object", astuple(one), make) / Path(one.path).name


def _opened(url: str) -> tuple[Any, str, str]:
    shown = without_secrets(url)
    if url.partition("://")[0] not in OBJECT_STORES or "::" in url:
        raise ConfigError(f"{shown} is not a URL of {', '.join(OBJECT_STORES)}.", EXAMPLE)
    fs, root = open_url(url, ConfigError, EXAMPLE)
    return fs, root, shown


def _read(request: Any, what: str, shown: str) -> Any:
    try:
        return retried(request, what)
    except FileNotFoundError:
        raise ConfigError(f"{shown} does not exist.", EXAMPLE) from None
    except OSError as error:
        raise ConfigError(
            f"{shown} cannot be read: {error.strerror}.",
            "AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment of s3://",
        ) from None


def _version(one: dict[str, Any]) -> str:
    return str(one.get("ETag") or one.get("etag") or one.get("LastModified") or one.get("updated") or "")
