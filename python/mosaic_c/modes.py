"""The names of cache policies and of ways to read, as users give them; engine.py has their values in C.

Needs no extension: --help and bad arguments do without it.
"""

from __future__ import annotations

POLICIES = ("auto", "lfu", "lru", "layer-lru", "belady")
REPLAY_ONLY = ("belady",)  # it knows the future
MODEL_POLICIES = tuple(p for p in POLICIES if p not in REPLAY_ONLY)
PER_LAYER = ("layer-lru",)  # `slots` are of each layer; the others share all of them
IO_MODES = ("auto", "pread", "direct", "uring", "mmap")
HOT_AFTER, HOT_WINDOW = 3, 16  # mc_tier_opts: who goes to the GPU
