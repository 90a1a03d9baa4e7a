"""Matrix products: what one to four products that share a launch are, whichever row does them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .._program import ITEMSIZE, Layout


class Matrix(NamedTuple):
    """A named buffer seen as a matrix; strides in elements.

    `align` are bytes that divide the address of its first element.
    """

    buffer: str
    rows: int
    columns: int
    row_stride: int
    column_stride: int
    align: int = 16

    @property
    def T(self) -> Matrix:
        return Matrix(self.buffer, self.columns, self.rows, self.column_stride, self.row_stride,
                      self.align)


@dataclass(frozen=True)
class Product:
    """``c = a @ b.T + bias``: a [rows, depth], b [columns, depth], c [rows, columns]."""

    a: Matrix
    b: Matrix
    c: Matrix
    bias: str | None = None
    bias_stride: int = 1


@dataclass(frozen=True)
class Problem:
    """One to four products; `summed`: all add into the first one's c, with its bias.

    `precision` ("fp32" or "tf32") concerns float32.
    """

    dtype: str
    precision: str
    products: tuple[Product, ...]
    summed: bool = False

    @property
    def results(self) -> tuple[Product, ...]:
        """The products whose c is written."""
        return self.products[:1] if self.summed else self.products


def matrix(buffer: str, layout: Layout) -> Matrix:
    """See an array as (all leading axes, last axis); its leading axes must be collapsible."""
    rows, stride = collapsed(layout)
    return Matrix(buffer, rows, layout.shape[-1], stride, layout.strides[-1], layout.align)


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


def needs_copy(layout: Layout) -> bool:
    """Whether a contiguous copy of an array is a better operand than the array itself.

    Matrix units are fed by 16 bytes: lines must lie apart by multiples of them, along one axis or
    the other.
    """
    try:
        rows, stride = collapsed(layout)
    except ValueError:
        return True
    size, columns = ITEMSIZE[layout.dtype], layout.shape[-1]
    if size == 8 or columns * size % 16:
        return False
    inside = layout.strides[-1]
    ready = layout.align >= 16 and ((inside == 1 and stride * size % 16 == 0) or
                                    (stride == 1 and inside * size % 16 == 0))
    return not ready and rows > 0 < columns


def values(problem: Problem) -> tuple[dict[str, object], dict[str, str]]:
    """Return what `LinearParams` (kernels/common/params.cuh) takes of a problem.

    The first dictionary holds numbers, the second the buffers' names.
    """
    numbers: dict[str, object] = {"products": len(problem.products), "summed": problem.summed}
    buffers: dict[str, str] = {}
    for i, product in enumerate(problem.products):
        views = {"a": product.a, "b": product.b}
        if i < len(problem.results):
            views["c"] = product.c
            if product.bias is not None:
                buffers[f"bias.{i}"] = product.bias
        for name, view in views.items():
            numbers |= {f"{name}.{i}.row": view.row_stride,
                        f"{name}.{i}.column": view.column_stride}
            buffers[f"{name}.{i}.data"] = view.buffer
        numbers |= {f"rows.{i}": product.a.rows, f"columns.{i}": product.b.rows,
                    f"depth.{i}": product.a.columns, f"bias_stride.{i}": product.bias_stride}
    return numbers, buffers
