"""Neighborhood attention: the plain rows and the tables."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .._program import CTYPE, FLOATS, Device, Kernel, Program, Row, Step, cdiv
from . import neighborhood_hopper
from .neighborhood_band import BandBackward, BandForward
from .neighborhood_box import BoxBackward, BoxForward
from .neighborhood_problem import Problem, values

__all__ = ["BACKWARD", "FORWARD", "Problem", "values"]


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
_MATRIX = (("bf16", False), ("f16", False), ("f32", False), ("f32", True))  # and whether TF32
# In the order of speed where several can: windows of many keys first, then narrow windows where
# matrix units have too little to do, then all others.
FORWARD: tuple[Row, ...] = (
    *neighborhood_hopper.ROWS,
    *(BandForward(dtype, small=True) for dtype in ("bf16", "f16", "f32")),
    *(BoxForward(dtype, tf32) for dtype, tf32 in _MATRIX),
    *(BandForward(dtype) for dtype in ("f32", "bf16", "f16")),
    *(Plain(dtype, dim, False) for dtype in FLOATS for dim in _DIMS))
BACKWARD: tuple[Row, ...] = (
    *neighborhood_hopper.BACKWARD,
    BandBackward("f32", small=True),
    *(BoxBackward(dtype, tf32) for dtype, tf32 in _MATRIX),
    *(BandBackward(dtype) for dtype in FLOATS if dtype != "f64"),
    *(Plain(dtype, dim, True) for dtype in FLOATS for dim in _DIMS))
