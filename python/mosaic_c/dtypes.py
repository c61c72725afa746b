"""How many bits an element of each storage type takes. What the engine computes with is decided where weights are
bound and packs are read; mosaic_c/dtype.c has its own table, held against this one by a test."""

from __future__ import annotations

# The types of a safetensors header.
SAFETENSORS = {
    "F32": 32, "BF16": 16, "F16": 16, "F8_E4M3": 8, "F64": 64, "F8_E5M2": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4, "C64": 64, "BOOL": 8,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8,
}  # fmt: skip
BITS = SAFETENSORS | {"INT4": 4}  # of expert packs only
