"""Is training a model sharded the same as training it plainly?

__main__.py   the command: its flags, the table, the verdict
asked.py      what is compared: the meshes, the trainings, the precisions, and the run's own flags put over them
plain.py      the unsharded loop, written out
ranks.py      the processes that train sharded, by fsdp.run.loop.train itself
measure.py    how far apart two trainings are, what is furthest, and why that may be
compare.py    both sides started, and each mesh judged
"""

from fsdp.parity.measure import relative_differences
from fsdp.parity.options import Comparison, Row, rows

__all__ = ["Comparison", "Row", "relative_differences", "rows"]
