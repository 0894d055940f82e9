"""Is training a model sharded the same as training it plainly?

__main__.py   the command: its flags, the table, the verdict
asked.py      what is compared: the meshes, the precisions, and the run's own flags put over them
plain.py      the unsharded loop, written out
ranks.py      the processes that train sharded, by fsdp.loop.train itself
compare.py    both sides started, and how far apart they end
"""

from fsdp.parity.asked import Row, rows
from fsdp.parity.compare import difference

__all__ = ["Row", "difference", "rows"]
