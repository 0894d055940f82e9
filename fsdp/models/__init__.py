"""Models: plain nn.Modules that run alone on one device, and the registry that finds them.

A model describes itself as data, and imports no torch.distributed. All of it is optional:

    units()               the modules to shard, each a module or a list of modules gathered together
    param_inits()         {parameter name: Init}, the distribution of each: a rank draws its shard alone
    init_buffers(device)  fills the buffers (rotary tables), which are in no checkpoint and no broadcast

A module that has none of them still trains. The modules here:

    registry, builtin, factory            --model.name → ModelSpec: built-in models, factories of the user
    mlp, vit, transformer, rope           the built-in models; rotary frequencies
    hub, source_folder, llama_folder      folders of save_pretrained: found, read by rows, Llama and its like
    hf, hf_names, hf_random               models of transformers: built, tensor names, random weights
    experts, kv_cache, packed_attention   experts of a mixture; caches turned off; attention within documents
    packed_check, checks                  checks of packed rows; checks of parameters, indices and losses
    blocks, parameter_names               the units to shard; names of tied and wrapped tensors
    init, device_draw, unsharded          initial values, on CUDA too; a whole model on one device
    lora, trainable                       adapters; parameters frozen by pattern
    loss, model_output                    a micro-batch's loss; loss and logits in what a model returns
    cross_entropy, chunked_loss           the sum of cross entropies, in chunks of tokens
    hf_loss, custom_loss                  transformers' own cross entropy; a loss of the user
"""

from fsdp.models.factory import load_attribute
from fsdp.models.registry import BUILT_INS, ModelSpec, resolve
from fsdp.models.unsharded import build_real, to_empty

__all__ = ["BUILT_INS", "ModelSpec", "build_real", "load_attribute", "resolve", "to_empty"]
