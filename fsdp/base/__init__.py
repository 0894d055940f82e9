"""Errors, digests, devices, phases of a step, /proc, HTML, private names of torch: what every room uses.

Standard library only, except devices, digest, html, torch_private and torchvision_import.
"""
