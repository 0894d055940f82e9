"""Errors, digests, devices, phases of a step: what every room uses. Standard library only, but for devices
and digests.
"""
