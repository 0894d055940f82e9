"""A resume does not draw weights that its checkpoint overwrites: a large model's would take minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdp.distributed.env import DistEnv
from fsdp.shard import materialize
from tests.support.runs import flags, on_a_rank
from tests.support.world import run_world

SAVES = "--checkpoint.every_steps 1 --train.stop_after 2"


def drawn_on_a_rank(env: DistEnv, words: list[str]) -> tuple[str | None, int]:
    """The error, and how many tensors the rank drew or was sent."""
    count, before = [0], (materialize.draw_into, materialize._send_all)

    def counted(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            count[0] += 1
            return original(*args, **kwargs)

        return call

    materialize.draw_into, materialize._send_all = map(counted, before)
    try:
        return on_a_rank(env, words), count[0]
    finally:
        materialize.draw_into, materialize._send_all = before


@pytest.mark.parametrize("how", ["--mesh.strategy fsdp", "--mesh.strategy ddp", "--model.init broadcast"])
def test_weights_come_from_the_checkpoint_alone(how: str, tmp_path: Path) -> None:
    words = ["--run.dir", str(tmp_path / "run"), *flags(how, SAVES)]
    first = run_world(2, drawn_on_a_rank, words)
    assert all(said is None and count > 0 for said, count in first), first
    again = run_world(2, drawn_on_a_rank, [*words, "--train.stop_after", "3"])
    assert again == [(None, 0), (None, 0)]
