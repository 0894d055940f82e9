"""Requests to object stores: what is repeated, and credentials that have expired."""

from __future__ import annotations

import threading

import pytest

from fsdp.base.object_client import impatient, retried


class Refusal(OSError):
    """As s3fs raises it, from the client's error."""

    def __init__(self, code: str) -> None:
        super().__init__("refused")
        self.__cause__ = ClientError(code)


class ClientError(Exception):
    def __init__(self, code: str) -> None:
        self.response = {"Error": {"Code": code}}


class Client:
    """Refuses requests until its credentials have been read `after` times."""

    def __init__(self, error: Exception, after: int = 1, protocol: object = ("s3", "s3a")) -> None:
        self.protocol, self.read, self._error, self._after = protocol, 0, error, after

    def connect(self, refresh: bool) -> None:
        assert refresh
        self.read += 1

    def request(self) -> str:
        if self.read < self._after:
            raise self._error
        return "done"


EXPIRED = [PermissionError("The provided token has expired."), Refusal("400"), Refusal("ExpiredToken")]


@pytest.mark.parametrize("error", EXPIRED, ids=["403", "of a HEAD", "of another request"])
def test_credentials_that_the_server_refuses_are_read_anew(error: Exception) -> None:
    client = Client(error)
    assert retried(client.request, "reading", client) == "done"
    assert client.read == 1


@pytest.mark.parametrize(
    ("kind", "line"), [(FileNotFoundError, "[Errno 2] reading x"), (PermissionError, "[Errno 13] reading x")]
)
def test_an_error_without_a_number_gets_that_of_its_class(kind: type[OSError], line: str) -> None:
    """The line of a bucket that does not exist began with `[Errno None]`."""

    def request() -> None:
        raise kind("gone")

    with pytest.raises(kind) as caught:
        retried(request, "reading x")
    assert str(caught.value) == f"{line}: {kind.__name__}: gone"


def test_a_failed_run_that_ends_waits_for_no_retry() -> None:
    """The monitor ended rank 0 with SIGKILL while it repeated requests to a server that was gone."""
    asked = threading.Semaphore(0)
    said: list[str] = []

    def request() -> None:
        asked.release()
        raise ConnectionError("gone")

    def repeat() -> None:
        with pytest.raises(OSError, match="gone") as caught:
            retried(request, "reading x")
        said.append(str(caught.value))

    thread = threading.Thread(target=repeat)
    thread.start()
    assert asked.acquire(timeout=60)
    with impatient():
        thread.join(60)
        assert said, "it ends in its pause"
        asked = threading.Semaphore(0)
        with pytest.raises(OSError, match="reading x: not tried, the request before it failed"):
            retried(request, "reading x")
        assert not asked.acquire(blocking=False)
    assert retried(lambda: 3, "reading x") == 3
    with impatient():
        assert retried(lambda: 4, "reading x") == 4
