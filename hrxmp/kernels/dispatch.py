"""The kernel library's front: one function an op, from traits and sizes to a launch.

The executor's lowering and warm-up call these; each family has its own module. Nothing here
touches a device.
"""

from __future__ import annotations

from hrxmp.kernels.attention import flash_attn, fuses_rope, rope_flash_attn, rope_set_rows
from hrxmp.kernels.elementwise_ops import binary, cpy, scale, silu, swiglu
from hrxmp.kernels.mul_mat import (
    MAX_WEIGHTS,
    Epilogue,
    WeightSpec,
    fuses_norm,
    mul_mat,
    weight_layout,
)
from hrxmp.kernels.nvidia import mixes, pack_rows, packed_row_bytes, packs_rows
from hrxmp.kernels.row_ops import argmax, get_rows, rms_norm, rope, set_rows, soft_max
from hrxmp.kernels.view import View

__all__ = [
    "MAX_WEIGHTS",
    "Epilogue",
    "View",
    "WeightSpec",
    "argmax",
    "binary",
    "cpy",
    "flash_attn",
    "fuses_norm",
    "fuses_rope",
    "get_rows",
    "mixes",
    "mul_mat",
    "pack_rows",
    "packed_row_bytes",
    "packs_rows",
    "rms_norm",
    "rope",
    "rope_flash_attn",
    "rope_set_rows",
    "scale",
    "set_rows",
    "silu",
    "soft_max",
    "swiglu",
    "weight_layout",
]
