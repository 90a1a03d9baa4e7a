"""Neighborhood attention: what a call is, whichever row does it."""

from __future__ import annotations

from dataclasses import dataclass

from .._program import ITEMSIZE, Layout, accumulator, token_view


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
