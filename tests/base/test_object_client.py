"""Requests to object stores: what is repeated, and credentials that have expired."""

from __future__ import annotations

import pytest

from fsdp.base.object_client import retried


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


def test_they_are_read_anew_once() -> None:
    client = Client(PermissionError(13, "Access Denied"), after=2)
    with pytest.raises(PermissionError, match=r"reading: PermissionError: .*Access Denied"):
        retried(client.request, "reading", client)
    assert client.read == 1


def test_the_clients_of_other_stores_keep_theirs() -> None:
    client = Client(PermissionError(13, "Access Denied"), protocol="memory")
    with pytest.raises(PermissionError):
        retried(client.request, "reading", client)
    assert client.read == 0
