"""Matrix products for few tokens on sm_90a: multicast in clusters (kernels/linear_cluster.cu)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from .._program import CTYPE, ITEMSIZE, Device, Kernel, Program, Row, Step, TensorMap, cdiv
from .._select import forced
from . import linear_hopper, linear_mma
from .linear_problem import Matrix, Problem, values

_LINE = 128  # bytes of depth in a slice

# What the cost rule knows besides the tilings' own times, by arithmetic: it only ranks rows.
_START_US = 1.3  # of a launch, until its first slices are there
_END_US = 1.3  # of a tile: operands of the first slices, sums of the last
_MOST_WAVES = 2  # of blocks one after the other; rows whose blocks stay do more


class Tiling(NamedTuple):
    """A tile, what multiplies it, blocks of a cluster, the time of a slice in us.

    Tiles go over the columns of all results; a box of `unit` columns is of one operand.
    """

    rows: int  # 64 or 128: as many warpgroups in a team
    columns: int
    teams: int  # that take slices in turn
    stages: int
    cluster: tuple[int, int]  # along rows, along columns
    slice_us: float

    @property
    def unit(self) -> int:
        part = self.columns // self.cluster[0]
        return min(part & -part, 32)


class Plan(NamedTuple):
    tiling: Tiling
    waves: int
    us: float


@dataclass(frozen=True)
class Cluster(Row):
    """A tile per block; blocks of a cluster load for one another."""

    dtype: str
    precision: str  # "fp32": three TF32 products of float32; "tf32"; "" for 16-bit
    tilings: tuple[Tiling, ...]

    target: ClassVar[str | None] = "sm_90a"

    @property
    def name(self) -> str:
        return "cluster_" + (self.precision or self.dtype)

    def refuses(self, problem: Problem, device: Device) -> str | None:
        reason = self._mismatch(problem, device)
        if reason is None and not (forced() and self.name.startswith(forced())):
            _, waves, us = self.plan(problem, device)
            rival = self._rival(problem, device)
            if waves > _MOST_WAVES:
                return f"{waves} waves of blocks are more than {_MOST_WAVES}"
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
        costs = [(row.cost(problem, device)[0], row.name) for row in linear_mma.ROWS
                 if row._mismatch(problem, device) is None]
        costs += [(row.plan(problem, device).us, row.name) for row in linear_hopper.ROWS
                  if row.refuses(problem, device) is None]
        return min(costs, default=None)

    def plan(self, problem: Problem, device: Device) -> Plan:
        """Return the tiling that should take least time, and that.

        A block has a multiprocessor for itself. Clusters keep within one of the device's groups of
        16 or 18 multiprocessors, so those of four blocks leave some of them over.
        """
        slices = cdiv(problem.products[0].a.columns * ITEMSIZE[self.dtype], _LINE)
        plans = []
        for tiling in self._fitting(problem):
            whole = 2 if tiling.cluster[0] * tiling.cluster[1] <= 2 else 16
            together = max(1, device.multiprocessors // whole) * whole
            waves = cdiv(_blocks(problem, tiling), together)
            plans.append(Plan(tiling, waves,
                              _START_US + waves * (slices * tiling.slice_us + _END_US)))
        return min(plans, key=lambda plan: plan.us)

    def _kernel(self, tiling: Tiling) -> Kernel:
        m, n = tiling.cluster
        numbers = {"Halves": tiling.rows // 64, "Columns": tiling.columns, "Teams": tiling.teams,
                   "Stages": tiling.stages, "Unit": tiling.unit, "ClusterM": m, "ClusterN": n}
        return Kernel(f"linear__{self.name}__{tiling.rows}x{tiling.columns}_by_{m}x{n}",
                      "linear_cluster.cu", "linear_cluster", "LinearHopperParams",
                      (f"using T = {CTYPE[self.dtype]};",
                       f"static constexpr bool kTf32 = {str(self.precision == 'tf32').lower()};",
                       *(f"static constexpr int k{k} = {x};" for k, x in numbers.items())),
                      2 * tiling.rows * tiling.teams + 128, target="sm_90a", cluster=m * n,
                      early="linear_cluster_begin")

    def kernels(self) -> tuple[Kernel, ...]:
        return tuple(self._kernel(tiling) for tiling in self.tilings)

    def program(self, problem: Problem, device: Device) -> Program:
        tiling = self.plan(problem, device).tiling
        numbers, buffers = values(problem)
        a = problem.products[0].a
        maps = {"a_map.0": self._map(a, tiling.rows // tiling.cluster[1])}
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
                + 8 * buffers + 4 * tiling.columns)

    def _map(self, x: Matrix, rows: int) -> TensorMap:
        size = ITEMSIZE[self.dtype]
        dtype = "tf32" if self.precision == "tf32" else self.dtype
        stride = x.row_stride * size
        return TensorMap(dtype, (x.columns, x.rows, 1), (stride, stride), (_LINE // size, rows, 1))


def _blocks(problem: Problem, tiling: Tiling) -> int:
    """Return the blocks of whole clusters that cover all results."""
    m, n = tiling.cluster
    columns = sum(p.b.rows for p in problem.products)
    rows = problem.products[0].a.rows
    return m * n * cdiv(rows, tiling.rows * m) * cdiv(columns, tiling.columns * n)


# rows, columns, teams, stages, cluster, slice_us
_SINGLE = (Tiling(64, 16, 3, 16, (2, 2), 0.112), Tiling(64, 32, 3, 14, (2, 2), 0.135),
           Tiling(64, 48, 3, 14, (2, 2), 0.157), Tiling(64, 64, 3, 12, (2, 2), 0.180),
           Tiling(64, 96, 3, 10, (2, 1), 0.314))

ROWS = (
    Cluster("f32", "fp32", (
        Tiling(64, 16, 3, 16, (2, 2), 0.13), Tiling(64, 32, 3, 16, (2, 2), 0.18),
        Tiling(64, 48, 3, 13, (2, 2), 0.24), Tiling(64, 64, 2, 12, (2, 2), 0.29),
        Tiling(64, 80, 2, 10, (2, 1), 0.35), Tiling(64, 96, 2, 8, (2, 1), 0.40),
        Tiling(128, 64, 1, 8, (2, 1), 0.48), Tiling(128, 96, 1, 6, (2, 1), 0.66))),
    Cluster("f32", "tf32", _SINGLE),
    *(Cluster(dtype, "", _SINGLE) for dtype in ("bf16", "f16")),
)
