"""The client of object stores such as s3://bucket/prefix, through fsspec: opening, retries, redaction.

Endpoint and keys come from fsspec's environment variables. Not here: checkpoints in a store
(fsdp/checkpoint/store.py).
"""

from __future__ import annotations

import errno
import logging
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from urllib.parse import urlsplit

from fsdp.base.errors import ShardrunError

log = logging.getLogger(__name__)

PAUSES_S = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Between retries, beside those of the client itself."""
PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}
OBJECT_STORES = (*PACKAGES, "adl")
"""The schemes of URLs that a run may name: others of fsspec's run code from files, or log in at any host."""
UNCHANGED_BY_A_RETRY = ("NoCredentialsError", "ParamValidationError", "CheckpointError")
EXPIRED = ("400", "ExpiredToken", "ExpiredTokenException", "InvalidToken", "TokenRefreshRequired")
"""Codes of S3 for credentials that have expired; a request without a body, HEAD, has the status alone."""

_IMPATIENT, _FAILED = threading.Event(), threading.Event()
"""Whether a failed run ends; whether the last request failed."""

T = TypeVar("T")


def is_url(place: str) -> bool:
    """Whether a place that a user names is in an object store, and not a folder."""
    return "://" in place


def open_url(url: str, error: type[ShardrunError], example: str) -> tuple[Any, str]:
    """The file system of fsspec and the path in it. `error` is raised if there is none."""
    scheme = urlsplit(url).scheme
    try:
        import fsspec

        fs, root = fsspec.core.url_to_fs(url)
    except ImportError:
        package = PACKAGES.get(scheme, f"fsspec[{scheme}]")
        raise error(f"{scheme}:// needs {package}.", f"pip install {package}") from None
    except ValueError:
        raise error(f"fsspec has no file system for {scheme}://.", example) from None
    return fs, root.rstrip("/")


def without_secrets(url: str) -> str:
    """The URL without user, password and query, which may hold keys. A `#` belongs to an object's name."""
    parts = urlsplit(url, allow_fragments=False)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}".rstrip("/")


def is_s3(fs: Any) -> bool:
    return "s3" in ((fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol)


def retried(request: Callable[[], T], what: str, fs: Any = None) -> T:
    """The request's result, retried after growing pauses, except on errors that a retry cannot change.

    `fs`: the client. If the server refuses its credentials they are read anew, once: a client keeps those of
    its start, and a file or a variable may have newer ones.
    """
    check_worth_trying(what)
    for pause in (*PAUSES_S, None):
        try:
            result = request()
            _FAILED.clear()
            return result
        except FileNotFoundError as error:
            _FAILED.clear()  # the server has answered
            raise type(error)(error.errno or errno.ENOENT, f"{what}: {redacted(error)}") from None
        except Exception as error:  # each client has its own classes for a server that is busy, slow or gone
            refused = isinstance(error, PermissionError) or error_code(error) in EXPIRED
            if refused and pause is not None and fs is not None and is_s3(fs):
                log.info("%s: %s; reading the credentials anew", what, redacted(error))
                _renew_credentials(fs)
                fs = None
                continue
            _FAILED.set()
            if isinstance(error, PermissionError):
                raise PermissionError(error.errno or errno.EACCES, f"{what}: {redacted(error)}") from None
            last = pause is None or type(error).__name__ in UNCHANGED_BY_A_RETRY or _IMPATIENT.is_set()
            if not last:
                log.info("%s: %s; retrying in %g s", what, redacted(error), pause)
                last = _IMPATIENT.wait(pause)
            if last:
                raise OSError(errno.ETIMEDOUT, f"{what}: {redacted(error)}") from None
    raise AssertionError("not reached")


@contextmanager
def impatient() -> Iterator[None]:
    """While a failed run ends, no request is repeated, and none follows a failed one: to a server that is
    gone each takes up to a minute and a half, and the monitor ends a failed rank after 15 s. Pauses of other
    threads end too: a save that is still written would be given up, so only after the checkpointer is closed.
    """
    _IMPATIENT.set()
    try:
        yield
    finally:
        _IMPATIENT.clear()


def check_worth_trying(what: str) -> None:
    """Raises OSError while a failed run ends and the last request failed."""
    if _IMPATIENT.is_set() and _FAILED.is_set():
        raise OSError(errno.ETIMEDOUT, f"{what}: not tried, the request before it failed")


def _renew_credentials(fs: Any) -> None:
    try:
        fs.connect(refresh=True)
    except Exception as error:  # the request is repeated, and its error counts
        log.info("the credentials cannot be read anew: %s", redacted(error))


def error_code(error: BaseException | None) -> str:
    """The server's error code, from the client's error below fsspec's; empty if there is none."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code", ""))
        error = error.__cause__
    return ""


def redacted(error: BaseException) -> str:
    """The first line of a client's error, without what looks like a key."""
    text = str(error).partition("\n")[0]
    text = re.sub(r"(?i)((?:key|secret|token|signature|credential|password)\w*[=:]\s*)\S+", r"\1…", text)
    return f"{type(error).__name__}: {text}"[:300]
