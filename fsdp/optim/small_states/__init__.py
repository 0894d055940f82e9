"""Adam with moments in bf16 or in 8 bits: half, or a quarter, of fp32's memory. The arithmetic is fp32.

bf16 is rounded stochastically, by a number that follows from the step and the element's place in the whole
parameter: a moment that changes by less than bf16 can represent still moves as far on average, and the bits
are the same at any number of ranks and after any restart. bf16 parameters (--precision.master bf16) are
rounded the same way, by random bits of their own. 8 bits are an index into a table of 256 values
(Dettmers' dynamic map, arXiv 2110.02861, as in bitsandbytes and torchao), times the largest of its block of
256; a block never crosses a row, so codes and scales are sharded as parameters are.

Vectors, and matrices with short rows, keep fp32 moments under 8 bits. A checkpoint's moments in another form
are converted.

    adam       the optimizer
    bits       the arithmetic of few bits
    compiled   the update as compiled functions

Not here: which optimizer a run has (fsdp/optim/optimizer.py).
"""

from fsdp.optim.small_states.adam import (
    Kind,
    SmallStateAdam,
    adapt_states,
    moment_bytes,
    new_state,
)
from fsdp.optim.small_states.bits import dynamic_map

__all__ = [
    "Kind",
    "SmallStateAdam",
    "adapt_states",
    "dynamic_map",
    "moment_bytes",
    "new_state",
]
