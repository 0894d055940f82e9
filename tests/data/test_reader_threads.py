"""Reading ahead with more threads than the system starts."""

from __future__ import annotations

import threading

import pytest

from fsdp.base.errors import ConfigError
from fsdp.data.loader import Readers


def test_too_many_threads_are_refused_and_those_that_started_end(monkeypatch: pytest.MonkeyPatch) -> None:
    started, start = list[threading.Thread](), threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if len(started) == 5:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(
        ConfigError,
        match=r"--data\.workers 100: this machine starts 5 threads more .*HINT: --data\.workers 2",
    ):
        Readers(lambda step: step, 100, ahead=2)
    assert not any(thread.is_alive() for thread in started)
