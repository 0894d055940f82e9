"""Adam whose moments are kept in bf16 or in 8 bits: half, or a quarter, of what they take in fp32. The
arithmetic is fp32.

bf16 is rounded at random, by a number that follows from the step and the element's place in the whole
parameter: a moment that changes by less than bf16 can show still moves as far on average, and the bits are
the same at any number of ranks and after any restart. 8 bits are a place in a table of 256 values (Dettmers'
dynamic map, arXiv 2110.02861, as bitsandbytes and torchao have it), times the largest of its block of 256; a
block never crosses a row, so codes and scales are sharded as parameters are.

Vectors, and matrices whose rows are short, keep fp32 moments under 8 bits. A moment that a checkpoint brings
in another form is brought into this optimizer's form. The optimizer is adam.py's, the arithmetic of few bits
is bits.py's. Not here: which optimizer a run has (fsdp/optim/optimizer.py).
"""

from fsdp.optim.small_states.adam import SmallStateAdam, adapt_states, moment_bytes, new_state, places_of
from fsdp.optim.small_states.bits import dynamic_map

__all__ = ["SmallStateAdam", "adapt_states", "dynamic_map", "moment_bytes", "new_state", "places_of"]
