"""Checkpoints that cannot be lost: save, seal, verify, restore, prune, export; local disk and object stores."""
