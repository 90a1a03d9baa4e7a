"""Matrix products as steps: the building blocks of the fused module's rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .._program import CTYPE, Kernel, Layout, Step, cdiv

_TILE, _THREADS, _MAX_GRID = 64, 256, 2**31 - 1


class Matrix(NamedTuple):
    """A named buffer seen as a matrix; strides in elements."""

    buffer: str
    rows: int
    columns: int
    row_stride: int
    column_stride: int

    @property
    def T(self) -> Matrix:
        return Matrix(self.buffer, self.columns, self.rows, self.column_stride, self.row_stride)


def matrix(buffer: str, layout: Layout) -> Matrix:
    """See an array as (all leading axes, last axis); its leading axes must be collapsible."""
    rows, stride = collapsed(layout)
    return Matrix(buffer, rows, layout.shape[-1], stride, layout.strides[-1])


def collapsed(layout: Layout) -> tuple[int, int]:
    """Return extent and stride of the leading axes as one axis.

    Raises
    ------
    ValueError
        If no single stride describes them.
    """
    rows, stride = 1, None
    for extent, step in reversed(list(zip(layout.shape[:-1], layout.strides[:-1]))):
        if extent == 1:
            continue
        if stride is None:
            stride = step
        elif step != rows * stride:
            raise ValueError(f"leading axes of strides {layout.strides} are not one axis")
        rows *= extent
    return rows, layout.shape[-1] if stride is None else stride


def product_kernel(dtype: str) -> Kernel:
    return Kernel(f"linear__plain_{dtype}__product", "linear.cu", "linear_product",
                  "LinearParams", (f"using T = {CTYPE[dtype]};",), _THREADS)


def column_sum_kernel(dtype: str) -> Kernel:
    return Kernel(f"linear__plain_{dtype}__column_sum", "linear.cu", "linear_column_sum",
                  "LinearParams", (f"using T = {CTYPE[dtype]};",), _THREADS)


def product(dtype: str, c: Matrix, terms: Sequence[tuple[Matrix, Matrix]],
            bias: str | None = None, bias_stride: int = 1) -> Step:
    """Return the step ``c = sum of a @ b.T (+ bias)`` over one to three pairs (a, b)."""
    values: dict[str, object] = {
        "rows": c.rows, "columns": c.columns, "products": len(terms), "bias_stride": bias_stride,
        "c.row": c.row_stride, "c.column": c.column_stride}
    buffers = {"c.data": c.buffer}
    for i, (a, b) in enumerate(terms):
        values |= {f"a.{i}.row": a.row_stride, f"a.{i}.column": a.column_stride,
                   f"b.{i}.row": b.row_stride, f"b.{i}.column": b.column_stride,
                   f"depth.{i}": a.columns}
        buffers |= {f"a.{i}.data": a.buffer, f"b.{i}.data": b.buffer}
    if bias is not None:
        buffers["bias"] = bias
    tiles = cdiv(c.rows, _TILE) * cdiv(c.columns, _TILE)
    return Step(product_kernel(dtype), (min(tiles, _MAX_GRID), 1, 1), values, buffers)


def column_sum(dtype: str, buffer: str, a: Matrix) -> Step:
    """Return the step that adds the rows of `a` into the vector `buffer`."""
    values = {"rows": a.rows, "columns": a.columns, "a.0.row": a.row_stride,
              "a.0.column": a.column_stride, "c.column": 1}
    return Step(column_sum_kernel(dtype), (min(cdiv(a.columns, 32), _MAX_GRID), 1, 1), values,
                {"a.0.data": a.buffer, "c.data": buffer})
