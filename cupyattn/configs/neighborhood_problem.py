"""Neighborhood attention: what a call is, whichever row does it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .._program import ITEMSIZE, Layout, accumulator, cdiv, token_view
from ..reference import neighborhood as reference


@dataclass(frozen=True)
class Problem:
    """One call. Arrays are heads-last: q [batch, *space, heads, head_dim]."""

    q: Layout
    k: Layout
    v: Layout
    kernel_size: tuple[int, ...]
    dilation: tuple[int, ...]
    stride: tuple[int, ...]
    is_causal: tuple[bool, ...]
    scale: float
    boundary: str  # "shift" | "clip"
    precision: str = "fp32"  # concerns float32 arrays only: "fp32" | "tf32"
    return_lse: bool = False  # forward only
    dy: Layout | None = None  # these four: backward only
    y: Layout | None = None
    lse: Layout | None = None
    dlse: Layout | None = None

    @property
    def batch(self) -> int:
        return self.q.shape[0]

    @property
    def space(self) -> tuple[int, ...]:
        return self.q.shape[1:-2]

    @property
    def heads(self) -> int:
        return self.q.shape[-2]

    @property
    def kv_heads(self) -> int:
        return self.k.shape[-2]

    @property
    def head_dim(self) -> int:
        return self.q.shape[-1]

    @property
    def value_dim(self) -> int:
        return self.v.shape[-1]

    @property
    def y_layout(self) -> Layout:
        return Layout((*self.q.shape[:-1], self.value_dim), self.q.dtype)

    @property
    def lse_layout(self) -> Layout:
        return Layout(self.q.shape[:-1], accumulator(self.q.dtype))


def _statistics(layout: Layout | None) -> Layout | None:
    """Return lse, dlse or delta as a heads-last array with one feature."""
    if layout is None:
        return None
    return Layout((*layout.shape, 1), layout.dtype, (*layout.strides, 1))


def values(problem: Problem) -> dict[str, object]:
    """Return the constant fields of `NeighborhoodParams`."""
    views = {"q": problem.q, "k": problem.k, "v": problem.v, "y": problem.y or problem.y_layout,
             "lse": _statistics(problem.lse or problem.lse_layout), "dy": problem.dy,
             "dlse": _statistics(problem.dlse), "delta": _statistics(problem.lse_layout),
             "dq": Layout(problem.q.shape, problem.q.dtype),
             "dk": Layout(problem.k.shape, problem.k.dtype),
             "dv": Layout(problem.v.shape, problem.v.dtype)}
    out: dict[str, object] = {f"{name}.{field}": value for name, layout in views.items()
                              for field, value in token_view(layout).items()}

    def axes(given, missing):
        return (missing,) * (3 - len(given)) + tuple(int(x) for x in given)

    out.update(batch=problem.batch, space=axes(problem.space, 1), heads=problem.heads,
               kv_heads=problem.kv_heads, head_dim=problem.head_dim, value_dim=problem.value_dim,
               window=axes(problem.kernel_size, 1), dilation=axes(problem.dilation, 1),
               stride=axes(problem.stride, 1), causal=axes(problem.is_causal, 0),
               clip=int(problem.boundary == "clip"), scale=problem.scale)
    return out


def rows_aligned(layout: Layout) -> bool:
    """Whether every row along the last axis starts at a multiple of 16 bytes."""
    size = ITEMSIZE[layout.dtype]
    return layout.align == 16 and all(
        n == 1 or s * size % 16 == 0 for n, s in zip(layout.shape[:-1], layout.strides[:-1]))


@dataclass(frozen=True)
class Visits:
    """What boxes of queries (or keys) meet on their walks over boxes of the other side."""

    boxes: int  # walked, over all tiles, heads and batch items
    open: int  # of these, boxes in which every pair counts
    pairs: int  # in them, padding included
    windows: int  # pairs that count

    def __str__(self) -> str:
        return (f"{self.boxes:,} boxes, {100 * (1 - self.open / self.boxes):.0f} % with masks; "
                f"{self.pairs / self.windows:.2f} times the pairs of the windows")


def visits(problem: Problem, own: Sequence[int], seen: Sequence[int], inverse: bool = False
           ) -> Visits:
    """Count the boxes of `seen` positions that boxes of `own` positions walk.

    A walk starts where the first position's interval starts and ends where the last one's does;
    `inverse`: keys own, and walk over the queries that see them.
    """
    interval = reference.inverse_window if inverse else reference.window
    boxes = inside = windows = 1
    for length, window, dilation, stride, causal, n_own, n_seen in zip(
            problem.space, problem.kernel_size, problem.dilation, problem.stride,
            problem.is_causal, own, seen):
        axis_boxes = axis_inside = axis_windows = 0
        for group in range(min(dilation, length)):
            n = cdiv(length - group, dilation)
            start, end = interval(n, window, 1, stride, causal, problem.boundary)
            first = np.arange(0, n, n_own)
            last = np.minimum(first + n_own, n) - 1
            axis_windows += int((end - start).sum())
            for low, high, from_, to in zip(start[first], end[last], start[last], end[first]):
                at = np.arange(low, high, n_seen)
                axis_boxes += len(at)
                axis_inside += int(((at >= from_) & (at + n_seen <= to)).sum())
        boxes, inside, windows = boxes * axis_boxes, inside * axis_inside, windows * axis_windows
    heads = problem.batch * (problem.kv_heads if inverse else problem.heads)
    shared = problem.heads // problem.kv_heads if inverse else 1
    return Visits(boxes * heads * shared, inside * heads * shared,
                  boxes * heads * shared * math.prod(own) * math.prod(seen),
                  windows * problem.batch * problem.heads)
