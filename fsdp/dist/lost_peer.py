"""Errors of collectives that another rank's end has caused, recognised by the texts of gloo, NCCL and c10d.

These libraries raise a plain RuntimeError (or a subclass, torch.distributed.DistError) for them.
"""

from __future__ import annotations

PEER_GONE = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "remote process exited",
    "NCCL communicator was aborted",
)
TRANSPORT = ("gloo/transport", "Watchdog caught collective operation timeout")
"""gloo names the source file of its transport in all its errors, time-outs too."""


def is_lost_peer(error: BaseException) -> bool:
    """Whether a collective failed because another rank has ended: that rank's error is the first one."""
    return _has_text(error, PEER_GONE)


def is_peer_failure(error: BaseException) -> bool:
    """Whether a collective failed because of another rank, which has ended or did not come in time; or
    whether such a failure is the cause of this error.
    """
    return any(
        _has_text(one, (*PEER_GONE, *TRANSPORT)) for one in (error, error.__cause__) if one is not None
    )


def _has_text(error: BaseException, texts: tuple[str, ...]) -> bool:
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)
