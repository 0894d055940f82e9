"""Imported last in the process that ranks are forked from: collections pass over all modules until then."""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
