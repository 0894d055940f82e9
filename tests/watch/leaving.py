"""A model that fails on rank 1 in its third forward, in a module with an atexit handler, for --model.name."""

from __future__ import annotations

import atexit
import os
from pathlib import Path
from typing import Any

from tests.support.user_code import Uneven

FOLDER, RANK = Path(os.environ["LEAVING"]), os.environ["RANK"]

atexit.register(lambda: (FOLDER / f"left-{RANK}").touch())


class Fails(Uneven):
    calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        Fails.calls += 1
        if RANK == "1" and Fails.calls == 3:
            (FOLDER / "failed").touch()
            raise ValueError("a sample of a length that nobody expected")
        return super().forward(*args, **kwargs)
