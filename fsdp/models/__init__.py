"""Models: plain nn.Modules that run alone on one device, and the registry that finds them.

A model hands over data about itself and imports no torch.distributed:

    units()               the modules to shard, as data: each a module, or a list of modules gathered together; optional
    param_inits()         {parameter name: Init} says how each is drawn, so that a rank can draw its shard alone; optional
    init_buffers(device)  fills the buffers (rotary tables), which neither checkpoint nor broadcast carries; optional

A module that has none of it still trains.
"""

from fsdp.models.factory import load_attribute
from fsdp.models.registry import BUILT_INS, ModelSpec, resolve
from fsdp.models.unsharded import build_real, to_empty

__all__ = ["BUILT_INS", "ModelSpec", "build_real", "load_attribute", "resolve", "to_empty"]
