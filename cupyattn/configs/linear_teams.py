"""Matrix products for few tokens on sm_90a: a tile a block (kernels/linear_teams.cu)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from .._program import (CTYPE, ITEMSIZE, Device, Kernel, Program, Row, Step, TensorMap, cdiv, few)
from .._select import forced
from . import linear_hopper, linear_mma
from .linear_problem import Matrix, Problem, values

_LINE = 128  # bytes of depth in a slice

# Up to so many slices one wave of these blocks was faster than every other row on an H200, in all
# precisions (128 to 1024 tokens, hidden 512 and 768). Deeper problems are compared by the rows'
# cost rules, for others divide the depth among blocks.
_MEASURED = 24


class Tiling(NamedTuple):
    """A tile, what multiplies it, and times in us, fitted to those measured on an H200.

    Tiles go over the columns of all results; a box of `unit` columns is of one operand.
    """

    rows: int  # 64 or 128: as many warpgroups in a team
    columns: int
    teams: int  # that take slices in turn
    stages: int
    start_us: float  # of a tile, its first operands and the sum of its teams included
    slice_us: float

    @property
    def unit(self) -> int:
        return min(self.columns & -self.columns, 32)


class Plan(NamedTuple):
    tiling: Tiling
    waves: int
    us: float


@dataclass(frozen=True)
class Teams(Row):
    """A tile per block, whose teams of warpgroups take slices of its depth in turn."""

    dtype: str
    precision: str  # "fp32": three TF32 products of float32; "tf32"; "" for 16-bit
    tilings: tuple[Tiling, ...]

    target: ClassVar[str | None] = "sm_90a"

    @property
    def name(self) -> str:
        return "teams_" + (self.precision or self.dtype)

    def refuses(self, problem: Problem, device: Device) -> str | None:
        reason = self._mismatch(problem, device)
        if reason is None and not (forced() and self.name.startswith(forced())):
            _, waves, us = self.plan(problem, device)
            if waves > 1:
                return f"{waves} waves of blocks are more than one"
            if self._slices(problem) > _MEASURED:
                rival = self._rival(problem, device)
                if rival is not None and rival[0] < us:
                    return f"takes {us:.3g} us by the cost rule, {rival[1]} {rival[0]:.3g}"
        return reason

    def _mismatch(self, problem: Problem, device: Device) -> str | None:
        """Return why this row cannot do the problem, or None."""
        if problem.dtype != self.dtype:
            return f"dtype {problem.dtype} is not {self.dtype}"
        if self.precision and problem.precision != self.precision:
            return f"precision {problem.precision} is not {self.precision}"
        if problem.summed:
            return "products that add are other rows'"
        size = ITEMSIZE[self.dtype]
        for product in problem.products:
            extents = product.a[1:3] + product.b[1:3]
            if not 0 < min(extents) <= max(extents) < 2**30:
                return f"extents {extents} are not in 1 to 2**30 - 1"
            for name in ("a", "b", "c"):
                x = getattr(product, name)
                if x.column_stride != 1 or x.row_stride <= 0 or x.row_stride * size % 16 or (
                        x.align % 16):
                    return (f"{name} ({x.buffer}) has strides {x[3:5]} or an address that are no "
                            "16-byte steps along its columns")
            if product.b.rows % 8:
                return f"{product.b.rows} columns are not a multiple of 8"
        if len({product.a for product in problem.products}) > 1:
            return "products differ in a"
        if not self._fitting(problem):
            return "no tiling has boxes that each of the results is made of"
        return None

    def _fitting(self, problem: Problem) -> list[Tiling]:
        """Return the tilings none of whose boxes lies in two operands."""
        return [tiling for tiling in self.tilings
                if not any(p.b.rows % tiling.unit for p in problem.products[:-1])]

    def _rival(self, problem: Problem, device: Device) -> tuple[float, str] | None:
        """Return the least time, and the row, of the other rows on matrix units."""
        costs = [(row.plan(problem, device).us, row.name) for row in linear_hopper.ROWS
                 if row._mismatch(problem, device) is None]
        warps = linear_mma.least(problem, device)
        return min(costs + ([warps] if warps else []), default=None)

    def plan(self, problem: Problem, device: Device) -> Plan:
        """Return the tiling that should take least time, and that.

        A block has a multiprocessor for itself.
        """
        slices = self._slices(problem)
        plans = []
        for tiling in self._fitting(problem):
            waves = cdiv(_blocks(problem, tiling), device.multiprocessors)
            plans.append(Plan(tiling, waves,
                              waves * (tiling.start_us + slices * tiling.slice_us)))
        return min(plans, key=lambda plan: plan.us)

    def _slices(self, problem: Problem) -> int:
        return cdiv(problem.products[0].a.columns * ITEMSIZE[self.dtype], _LINE)

    def _kernel(self, tiling: Tiling) -> Kernel:
        numbers = {"Halves": tiling.rows // 64, "Columns": tiling.columns, "Teams": tiling.teams,
                   "Stages": tiling.stages, "Unit": tiling.unit}
        return Kernel(f"linear__{self.name}__{tiling.rows}x{tiling.columns}",
                      "linear_teams.cu", "linear_teams", "LinearHopperParams",
                      (f"using T = {CTYPE[self.dtype]};",
                       f"static constexpr bool kTf32 = {str(self.precision == 'tf32').lower()};",
                       *(f"static constexpr int k{k} = {x};" for k, x in numbers.items())),
                      2 * tiling.rows * tiling.teams + 128, target="sm_90a",
                      early="linear_teams_begin")

    def kernels(self) -> tuple[Kernel, ...]:
        return tuple(self._kernel(tiling) for tiling in few(self.dtype, self.tilings))

    def program(self, problem: Problem, device: Device) -> Program:
        tiling = self.plan(problem, device).tiling
        numbers, buffers = values(problem)
        a = problem.products[0].a
        maps = {"a_map.0": self._map(a, tiling.rows)}
        buffers["a_map.0.address"] = a.buffer
        for s, product in enumerate(problem.products):
            maps[f"b_map.{s}"] = self._map(product.b, tiling.unit)
            buffers[f"b_map.{s}.address"] = product.b.buffer
        return Program((Step(self._kernel(tiling), (_blocks(problem, tiling), 1, 1), numbers,
                             buffers, shared=self._shared(tiling), maps=maps),))

    def _shared(self, tiling: Tiling) -> int:
        """Return the bytes of shared memory, as in the source."""
        buffers = tiling.teams * (tiling.rows // 64 + 1)
        low = buffers * tiling.columns * _LINE if self.precision == "fp32" else 0
        return (tiling.stages * ((tiling.rows + tiling.columns) * _LINE + 16) + low
                + 8 * (buffers + 1) + 4 * tiling.columns)

    def _map(self, x: Matrix, rows: int) -> TensorMap:
        size = ITEMSIZE[self.dtype]
        dtype = "tf32" if self.precision == "tf32" else self.dtype
        stride = x.row_stride * size
        return TensorMap(dtype, (x.columns, x.rows, 1), (stride, stride), (_LINE // size, rows, 1))


def _blocks(problem: Problem, tiling: Tiling) -> int:
    """Return the tiles that cover all results."""
    columns = sum(p.b.rows for p in problem.products)
    return cdiv(problem.products[0].a.rows, tiling.rows) * cdiv(columns, tiling.columns)


# rows, columns, teams, stages, start_us, slice_us: those that are at least 4 % faster than any
# other for some number of tokens
_HALF = (Tiling(64, 32, 2, 16, 1.9, 0.155), Tiling(64, 64, 2, 12, 2.7, 0.12),
         Tiling(64, 96, 3, 10, 3.0, 0.19), Tiling(128, 96, 1, 6, 3.8, 0.24))

ROWS = (
    Teams("f32", "fp32", (
        Tiling(64, 16, 2, 16, 2.0, 0.21), Tiling(64, 32, 2, 16, 1.85, 0.26),
        Tiling(64, 48, 3, 13, 2.8, 0.265), Tiling(64, 64, 3, 10, 3.25, 0.30),
        Tiling(64, 80, 2, 10, 3.4, 0.41), Tiling(64, 96, 2, 8, 3.35, 0.49),
        Tiling(128, 96, 1, 6, 5.1, 0.955))),
    Teams("f32", "tf32", (
        Tiling(64, 32, 2, 16, 1.9, 0.155), Tiling(64, 48, 3, 12, 2.45, 0.145),
        Tiling(64, 64, 2, 12, 2.95, 0.133), Tiling(64, 96, 3, 10, 3.15, 0.163),
        Tiling(128, 96, 1, 6, 4.7, 0.233))),
    *(Teams(dtype, "", _HALF) for dtype in ("bf16", "f16")),
)
