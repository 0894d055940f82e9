"""Models: plain nn.Modules that run alone on one device, and the registry that finds them.

A model hands over data about itself and imports no torch.distributed:

    units()               the modules to shard, as data (names or modules, outermost order); optional
    param_inits()         {parameter name: Init} says how each is drawn, so that a rank can draw its shard alone; optional
    init_buffers(device)  fills non-persistent buffers (rotary tables), which neither checkpoint nor broadcast carries; optional

A module that has none of it still trains.
"""
