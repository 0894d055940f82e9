"""Errors, digests, devices, phases of a step: modules that every room uses. Standard library alone, except
devices, digest and torchvision_import.
"""
