"""Pinned behaviour: configurations with their losses and weights, old run directories, kills."""
