"""Neighborhood attention: the problem and the tables of rows."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .._program import (CTYPE, FLOATS, Device, Kernel, Layout, Program, Row, Step, accumulator,
                        cdiv, token_view)


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


@dataclass(frozen=True)
class Plain(Row):
    """A warp per query (or key), any problem of one dtype up to one head size."""

    dtype: str
    dim: int  # the largest head_dim and value_dim; sets the registers a lane needs
    backward: bool

    THREADS = 128

    @property
    def name(self) -> str:
        return f"plain_{self.dtype}_d{self.dim}"

    def refuses(self, problem: Problem, device: Device) -> str | None:
        if problem.q.dtype != self.dtype:
            return f"dtype {problem.q.dtype} is not {self.dtype}"
        if max(problem.space) >= 2**31:
            return f"a space extent of {max(problem.space)} exceeds 2**31 - 1"
        for name in ("head_dim", "value_dim"):
            if getattr(problem, name) > self.dim:
                return f"{name} {getattr(problem, name)} exceeds {self.dim}"
        return None

    def _kernel(self, part: str) -> Kernel:
        stem = "neighborhood_bwd" if self.backward else "neighborhood_fwd"
        return Kernel(name=f"{stem}__{self.name}__{part}", source=f"{stem}.cu",
                      function=f"neighborhood_{part}", params="NeighborhoodParams",
                      config=(f"using T = {CTYPE[self.dtype]};",
                              f"static constexpr int kDim = {self.dim};"),
                      threads=self.THREADS)

    def kernels(self) -> tuple[Kernel, ...]:
        parts = ("dq", "dkdv") if self.backward else ("forward",)
        return tuple(self._kernel(part) for part in parts)

    def program(self, problem: Problem, device: Device) -> Program:
        constant = values(problem)
        tokens = problem.batch * math.prod(problem.space)

        def step(part: str, heads: int, *buffers: str) -> Step:
            blocks = min(cdiv(tokens * heads, self.THREADS // 32), 2**31 - 1)
            return Step(self._kernel(part), (blocks, 1, 1), constant,
                        {f"{name}.data": name for name in buffers})

        if not self.backward:
            lse = ("lse",) if problem.return_lse else ()
            return Program((step("forward", problem.heads, "q", "k", "v", "y", *lse),))
        dlse = ("dlse",) if problem.dlse else ()
        return Program(
            (step("dq", problem.heads, "q", "k", "v", "dy", "lse", *dlse, "delta", "dq"),
             step("dkdv", problem.kv_heads, "q", "k", "v", "dy", "lse", "delta", "dk", "dv")),
            {"delta": problem.lse_layout})


_DIMS = (64, 128, 256, 512)
FORWARD = tuple(Plain(dtype, dim, False) for dtype in FLOATS for dim in _DIMS)
BACKWARD = tuple(Plain(dtype, dim, True) for dtype in FLOATS for dim in _DIMS)
