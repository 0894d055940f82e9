"""Models: plain nn.Modules that run alone on one device, and the registry that finds them.

A model describes itself as data, and imports no torch.distributed. All of it is optional:

    units()               the modules to shard, each a module or a list of modules gathered together
    param_inits()         {parameter name: Init}, the distribution of each: a rank draws its shard alone
    init_buffers(device)  fills the buffers (rotary tables), which are in no checkpoint and no broadcast

A module that has none of them still trains. The modules here:

    registry                      --model.name → ModelSpec; callables of the user, sizes, checks on meta
    transformer, vision           the built-in models
    init, units, lora             initial weights; units to shard, names of tensors; adapters, freezing
    loss, chunked_loss            a micro-batch's loss: which one is trained; the output layer in chunks
    attention                     attention within the documents of packed rows, and its checks
    hf, hf_weights                models of transformers: folders, losses, kernels; names and draws
"""

from fsdp.models.init import to_empty
from fsdp.models.registry import BUILT_INS, ModelSpec, build_real, load_attribute, resolve

__all__ = ["BUILT_INS", "ModelSpec", "build_real", "load_attribute", "resolve", "to_empty"]
