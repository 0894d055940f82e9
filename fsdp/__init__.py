"""What one rank does. Imports torch; imports no launcher: neither ray nor submitit nor launch/."""

from __future__ import annotations

import sys


class RenamedRooms:
    """The last finder of modules: an import of a room's old name ends with the new one."""

    NAMES = {"fsdp.dist": "fsdp.distributed", "fsdp.parallel": "fsdp.shard"}  # noqa: RUF012

    @classmethod
    def find_spec(cls, name: str, *_: object) -> None:
        if name in cls.NAMES:
            raise ModuleNotFoundError(f"{name} has a new name. HINT: import {cls.NAMES[name]}", name=name)


sys.meta_path.append(RenamedRooms)  # type: ignore[arg-type]
