"""NumPy twins of the structs in kernels/common/params.cuh, field by field.

The generated end of every kernel source asserts size and offsets, so a difference between the
two files stops compilation with the field's name.
"""

from __future__ import annotations

import numpy as np


def _struct(*fields, align: int = 8) -> np.dtype:
    """Return a struct as C++ lays it out, of a size that is a multiple of `align` bytes."""
    dtype = np.dtype(list(fields), align=True)
    size = -(-dtype.itemsize // align) * align
    assert dtype.fields is not None
    return np.dtype({"names": list(dtype.names or ()),
                     "formats": [dtype.fields[name][0] for name in dtype.names or ()],
                     "offsets": [dtype.fields[name][1] for name in dtype.names or ()],
                     "itemsize": size})


TOKEN_VIEW = _struct(("data", "u8"), ("batch", "i8"), ("space", "i8", 3), ("head", "i8"))
MATRIX_VIEW = _struct(("data", "u8"), ("row", "i8"), ("column", "i8"))
TENSOR_MAP = _struct(("address", "u8"), ("geometry", "u8", 15), align=64)
NEIGHBORHOOD = _struct(
    *((name, TOKEN_VIEW) for name in
      ("q", "k", "v", "y", "lse", "dy", "dlse", "delta", "dq", "dk", "dv")),
    ("batch", "i8"), ("space", "i4", 3), ("heads", "i4"), ("kv_heads", "i4"),
    ("head_dim", "i4"), ("value_dim", "i4"), ("window", "i4", 3), ("dilation", "i4", 3),
    ("stride", "i4", 3), ("causal", "i4", 3), ("clip", "i4"), ("scale", "f8"))

STRUCTS: dict[str, np.dtype] = {
    "TokenView": TOKEN_VIEW,
    "MatrixView": MATRIX_VIEW,
    "TensorMap": TENSOR_MAP,
    "NeighborhoodParams": NEIGHBORHOOD,
    "NeighborhoodHopperParams": _struct(
        *((f"{name}_map", TENSOR_MAP) for name in ("q", "k", "v", "dy")), ("na", NEIGHBORHOOD),
        ("tiles", "i4", 3), ("all_tiles", "i4"),
        *((f"{name}_heads_first", "i4") for name in ("q", "k", "v", "dy")), ("folded", "i4"),
        align=64),
    "LinearParams": _struct(
        ("a", MATRIX_VIEW, 4), ("b", MATRIX_VIEW, 4), ("c", MATRIX_VIEW, 4), ("bias", "u8", 4),
        ("bias_stride", "i8", 4), ("rows", "i8", 4), ("columns", "i8", 4), ("depth", "i8", 4),
        ("partial", "u8"), ("share", "i8"), ("products", "i4"), ("summed", "i4"),
        ("chunks", "i4"), ("group", "i4")),
    "LinearHopperParams": _struct(
        ("a_map", TENSOR_MAP, 4), ("b_map", TENSOR_MAP, 4), ("a", MATRIX_VIEW, 4),
        ("b", MATRIX_VIEW, 4), ("c", MATRIX_VIEW, 4), ("planes", "u8", 4), ("bias", "u8", 4),
        ("bias_stride", "i8", 4), ("partial", "u8"), ("first", "i8", 4), ("numbers", "i8"),
        ("rows", "i4", 4), ("columns", "i4", 4), ("depth", "i4", 4), ("products", "i4"),
        ("summed", "i4"), ("splits", "i4"), align=64),
    "MultiTokenParams": _struct(
        *((name, "u8") for name in ("scores", "weight", "bias", "y", "dy", "d_scores",
                                    "d_weight", "d_bias", "shift", "factor", "partial", "mean",
                                    "table")),
        ("scores_stride", "i8", 4), ("dy_stride", "i8", 4), ("weight_stride", "i8", 4),
        ("bias_stride", "i8"), ("batch", "i8"), ("heads_in", "i4"), ("heads_out", "i4"),
        ("groups", "i4"), ("seq", "i4"), ("kh", "i4"), ("kw", "i4"), ("dilation", "i4", 2),
        ("row_origin", "i4"), ("column_origin", "i4"), ("chunks", "i4")),
    "RopeParams": _struct(
        *((name, "u8") for name in ("q", "k", "q_out", "k_out", "cos", "sin", "position_ids",
                                    "offsets", "fault")),
        ("q_stride", "i8", 3), ("k_stride", "i8", 3), ("q_out_stride", "i8", 3),
        ("k_out_stride", "i8", 3), ("cos_stride", "i8", 3), ("sin_stride", "i8", 3),
        ("position_stride", "i8", 2), ("batch", "i8"), ("seq", "i8"), ("table", "i8"),
        ("offset", "i8"), ("q_heads", "i4"), ("k_heads", "i4"), ("head_dim", "i4"),
        ("rotary_dim", "i4"), ("table_step", "i4"), ("inverse", "i4"), ("interleaved", "i4"),
        ("wide_positions", "i4")),
}


def offset_of(struct: str, path: str) -> int:
    """Return the byte offset of a field such as ``"q.data"`` or ``"a.1.data"``."""
    dtype, offset = STRUCTS[struct], 0
    for part in path.split("."):
        if part.isdigit():
            base = dtype.base
            offset += int(part) * base.itemsize
            dtype = base
        else:
            assert dtype.fields is not None
            dtype, step = dtype.fields[part][:2]
            offset += step
    return offset
