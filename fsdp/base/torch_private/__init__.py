"""Every use of a private name of torch: names with a leading underscore, and attributes of private classes.

    fsdp      FSDP2's parameter groups
    core      tensors, modules, optimizers, fake tensors, process groups, DDP, autograd, CUDA's allocator, DCP
    names     strings; imports no torch

tests/base/test_torch_private.py guards each function; tests/test_house.py refuses a private name elsewhere.

`Seen on` means that the tests of the function ran on that version; without it: 2.11.0, 2.13.0, 2.15.0, on
CPU.
"""
