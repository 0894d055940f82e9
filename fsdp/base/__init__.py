"""Errors, digests, devices, phases of a step, private names of torch: what every room uses. Standard library
only, but for devices, digests and torch_private.
"""
