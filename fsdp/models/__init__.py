"""Models: plain nn.Modules that run alone on one device, and the registry that finds them.

A model describes itself as data, and imports no torch.distributed. All of it is optional:

    units()               the modules to shard, each a module or a list of modules gathered together
    param_inits()         {parameter name: Init}, the distribution of each: a rank draws its shard alone
    init_buffers(device)  fills the buffers (rotary tables), which are in no checkpoint and no broadcast

A module that has none of them still trains.
"""

from fsdp.models.factory import load_attribute
from fsdp.models.registry import BUILT_INS, ModelSpec, resolve
from fsdp.models.unsharded import build_real, to_empty

__all__ = ["BUILT_INS", "ModelSpec", "build_real", "load_attribute", "resolve", "to_empty"]
