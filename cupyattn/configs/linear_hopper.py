"""Matrix products on sm_90a: TMA and warpgroup products (kernels/linear_hopper.cu)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

from .._program import (CTYPE, ITEMSIZE, Device, Kernel, Layout, Program, Row, Step, TensorMap,
                        cdiv, few)
from .._select import forced
from . import linear_mma
from .linear_problem import Matrix, Problem, values

_ROWS = 128  # of a tile
_THREADS = 384
_LAUNCH_US = 2.0  # of each launch, as measured on an H200
_BYTES_A_US = 3.0e6  # of planes, and of the splits' sums, written and read again


class Tiling(NamedTuple):
    """A tile's columns, stages of shared memory, depth of a step, its time, that of the epilogue.

    Times in us, as measured on an H200 with every multiprocessor busy; they only rank tilings.
    """

    columns: int
    stages: int
    depth: int
    step_us: float
    end_us: float


class Plan(NamedTuple):
    tiling: Tiling
    splits: int
    us: float


@dataclass(frozen=True)
class Hopper(Row):
    """A block per multiprocessor, one warpgroup that loads and two that multiply."""

    dtype: str
    precision: str  # "fp32": three bf16 planes of float32; "tf32"; "" for 16-bit
    tilings: tuple[Tiling, ...]

    target: ClassVar[str | None] = "sm_90a"

    @property
    def name(self) -> str:
        return "hopper_" + (self.precision or self.dtype)

    @property
    def planes(self) -> int:
        return 3 if self.precision == "fp32" else 1

    def _planes_of(self, problem: Problem) -> tuple[Matrix, ...]:
        """Return the operands b of which a kernel makes planes before the products."""
        unique = tuple(dict.fromkeys(product.b for product in problem.products))
        if self.precision == "tf32" and all(
                b.column_stride == 1 and _inside(b, self.dtype) for b in unique):
            return ()
        return unique if self.precision else ()

    def refuses(self, problem: Problem, device: Device) -> str | None:
        reason = self._mismatch(problem, device)
        if reason is None and not (forced() and self.name.startswith(forced())):
            us = self.plan(problem, device).us
            rival = linear_mma.least(problem, device)
            if rival is not None and rival[0] < us:
                return f"takes {us:.3g} us by the cost rule, {rival[1]} {rival[0]:.3g}"
        return reason

    def _mismatch(self, problem: Problem, device: Device) -> str | None:
        """Return why this row cannot do the problem, or None."""
        if problem.dtype != self.dtype:
            return f"dtype {problem.dtype} is not {self.dtype}"
        if self.precision and problem.precision != self.precision:
            return f"precision {problem.precision} is not {self.precision}"
        for product in problem.products:
            operands = {"a": product.a} if self.precision else {"a": product.a, "b": product.b}
            for name, x in operands.items():
                if not _inside(x, self.dtype):
                    return f"{name} has strides {x[3:5]} or an address that are no 16-byte steps"
            if product.b.rows % 8:
                return f"{product.b.rows} columns are not a multiple of 8"
            if max(product.a[1:3] + product.b[1:3]) >= 2**31:
                return "a size exceeds 2**31 - 1"
        for name in ("a", "b"):
            if len({getattr(product, name).column_stride == 1 for product in problem.products}) > 1:
                return f"the {name} of some products have rows inside, of others depth"
        for product in problem.results:
            c = product.c
            if c.column_stride != 1 or c.row_stride * ITEMSIZE[self.dtype] % 16 or c.align % 16:
                return f"c has strides {c[3:5]} or an address that are no 16-byte steps"
        return None

    def plan(self, problem: Problem, device: Device) -> Plan:
        """Return the tiling and the splits of the depth that should take least time."""
        numbers = sum(product.a.rows * product.b.rows for product in problem.results)
        # Of each number of b: float32 read, planes written.
        planes = sum(b.rows * b.columns for b in self._planes_of(problem))
        before = _LAUNCH_US + planes * (4 + _PLANES[self.planes][1]) / _BYTES_A_US if planes else 0
        best = None
        for tiling in self.tilings:
            tiles = sum(cdiv(product.a.rows, _ROWS) * cdiv(product.b.rows, tiling.columns)
                        for product in problem.results)
            steps = [cdiv(product.a.columns, tiling.depth) for product in problem.products]
            most = sum(steps) if problem.summed else max(steps)
            for splits in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16):
                if splits > 1 and min(steps) < 4 * splits:
                    break
                waves = cdiv(tiles * splits, device.multiprocessors)
                us = before + _LAUNCH_US * (1 + (splits > 1))
                us += waves * (cdiv(most, splits) * tiling.step_us + tiling.end_us)
                if splits > 1:  # write and read float32 sums
                    us += 8 * splits * numbers / _BYTES_A_US
                if best is None or us < best.us:
                    best = Plan(tiling, splits, us)
        assert best is not None
        return best

    def _kernel(self, columns: int, stages: int, rows_a: bool, rows_b: bool, function: str,
                threads: int) -> Kernel:
        numbers = {"Planes": self.planes, "Columns": columns, "Stages": stages,
                   "RowsA": int(rows_a), "RowsB": int(rows_b)}
        layout = "".join("nt"[rows] for rows in (rows_a, rows_b))
        part = {"linear_hopper": f"c{columns}_{layout}", "linear_total": "total",
                "linear_planes": "planes"}[function]
        return Kernel(f"linear__{self.name}__{part}", "linear_hopper.cu", function,
                      "LinearHopperParams",
                      (f"using T = {CTYPE[self.dtype]};",
                       *(f"static constexpr int k{k} = {n};" for k, n in numbers.items())),
                      threads, target="sm_90a")

    def _product_kernel(self, tiling: Tiling, rows_a: bool, rows_b: bool) -> Kernel:
        return self._kernel(tiling.columns, tiling.stages, rows_a, rows_b, "linear_hopper",
                            _THREADS)

    def _other_kernel(self, function: str) -> Kernel:
        tiling = self.tilings[0]
        return self._kernel(tiling.columns, tiling.stages, False, False, function, 256)

    def kernels(self) -> tuple[Kernel, ...]:
        layouts = [(False, False), (True, False)]
        if not self.precision:
            layouts = list(few(self.dtype, [(a, b) for a in (False, True) for b in (False, True)]))
        return (*(self._product_kernel(tiling, *layout) for tiling in self.tilings
                  for layout in layouts),
                self._other_kernel("linear_total"),
                *((self._other_kernel("linear_planes"),) if self.precision else ()))

    def program(self, problem: Problem, device: Device) -> Program:
        tiling, splits, _ = self.plan(problem, device)
        products, results = problem.products, problem.results
        rows_a = products[0].a.column_stride != 1
        rows_b = not self.precision and products[0].b.column_stride != 1
        numbers, buffers = values(problem)
        sizes = [product.a.rows * product.b.rows for product in results]
        numbers |= {"splits": splits, "numbers": sum(sizes)}
        numbers |= {f"first.{s}": sum(sizes[:s]) for s in range(len(sizes))}
        scratch: dict[str, Layout] = {}
        steps = []

        of = self._planes_of(problem)
        if of:
            scratch |= {_planes_name(b): self._planes_layout(b) for b in of}
            steps.append(self._planes_step(of))
        maps = {}
        for s, product in enumerate(products):
            maps[f"a_map.{s}"] = self._map(product.a, _ROWS, tiling.depth)
            buffers[f"a_map.{s}.address"] = product.a.buffer
            if of:
                layout = self._planes_layout(product.b)
                planes, rows, width = layout.shape
                size = ITEMSIZE[layout.dtype]
                maps[f"b_map.{s}"] = TensorMap(
                    "bf16" if planes == 3 else "tf32", (width, rows, planes),
                    (size * width, size * width * rows), (128 // size, tiling.columns, 1))
                buffers[f"b_map.{s}.address"] = _planes_name(product.b)
            else:
                maps[f"b_map.{s}"] = self._map(product.b, tiling.columns, tiling.depth)
                buffers[f"b_map.{s}.address"] = product.b.buffer
        if splits > 1:
            partial = f"linear_partial_{splits}x{sum(sizes)}"
            scratch[partial] = Layout((splits, sum(sizes)), "f32")
            buffers["partial"] = partial
        tiles = splits * sum(cdiv(product.a.rows, _ROWS) * cdiv(product.b.rows, tiling.columns)
                             for product in results)
        stage = (_ROWS * tiling.depth * ITEMSIZE[self.dtype]
                 + self.planes * tiling.columns * 128)
        steps.append(Step(self._product_kernel(tiling, rows_a, rows_b),
                          (min(tiles, device.multiprocessors), 1, 1), numbers, buffers,
                          shared=tiling.stages * (stage + 16) + self._results(tiling), maps=maps))
        if splits > 1:
            blocks = min(cdiv(sum(sizes), 1024), 8 * device.multiprocessors)
            steps.append(Step(self._other_kernel("linear_total"), (blocks, 1, 1), numbers,
                              {k: v for k, v in buffers.items() if "map" not in k}))
        return Program(tuple(steps), scratch)

    def _results(self, tiling: Tiling) -> int:
        """Return the bytes for bias and for results that wait to be copied, as in the source."""
        size, wide = ITEMSIZE[self.dtype], min(tiling.columns, 128)
        return 2 * wide * size + (0 if self.planes == 3 else _ROWS * (wide + 8) * size)

    def _planes_layout(self, b: Matrix) -> Layout:
        dtype, _ = _PLANES[self.planes]
        return Layout((self.planes, b.rows, cdiv(b.columns, 8) * 8), dtype)

    def _planes_step(self, unique: Sequence[Matrix]) -> Step:
        numbers: dict[str, object] = {"products": len(unique)}
        buffers: dict[str, str] = {}
        for s, b in enumerate(unique):
            numbers |= {f"b.{s}.row": b.row_stride, f"b.{s}.column": b.column_stride,
                        f"columns.{s}": b.rows, f"depth.{s}": b.columns}
            buffers |= {f"b.{s}.data": b.buffer, f"planes.{s}": _planes_name(b)}
        tiles = max(cdiv(b.rows, 64) * cdiv(b.columns, 64) for b in unique)
        return Step(self._other_kernel("linear_planes"), (tiles, len(unique), 1), numbers, buffers)

    def _map(self, x: Matrix, rows: int, depth: int) -> TensorMap:
        """Return the map of an operand; `rows` of a tile, `depth` of a step."""
        size = ITEMSIZE[self.dtype]
        dtype = "tf32" if self.precision == "tf32" else self.dtype
        inside, outside, stride, box = (
            (x.columns, x.rows, x.row_stride, rows) if x.column_stride == 1
            else (x.rows, x.columns, x.column_stride, depth))
        return TensorMap(dtype, (inside, outside, 1), (stride * size, stride * size),
                         (128 // size, box, 1))


def _inside(x: Matrix, dtype: str) -> bool:
    """Whether the copy engine takes it: one axis of unit stride, the other in 16-byte steps."""
    stride = x.row_stride if x.column_stride == 1 else x.column_stride
    return (1 in (x.column_stride, x.row_stride) and stride > 0
            and stride * ITEMSIZE[dtype] % 16 == 0 and x.align % 16 == 0)


def planes_first(program: Program) -> Program:
    """Return a program that makes all planes at its start, up to four matrices a launch.

    That is right where they are made of inputs, as those of weights are, and not of results.
    """
    steps = [step for step in program.steps if step.kernel.function == "linear_planes"]
    if len(steps) < 2:
        return program
    matrices = {}  # by the name of their planes: what the parameters say of each
    for step in steps:
        for s in range(step.grid[1]):
            name = step.buffers[f"planes.{s}"]
            fields = {path: step.values[path.format(s)]
                      for path in ("b.{}.row", "b.{}.column", "columns.{}", "depth.{}")}
            matrices[name] = (step.grid[0], fields, step.buffers[f"b.{s}.data"])
    joined, left = [], list(matrices.items())
    while left:
        now, left = left[:4], left[4:]
        numbers: dict[str, object] = {"products": len(now)}
        buffers: dict[str, str] = {}
        for s, (name, (_, fields, data)) in enumerate(now):
            numbers |= {path.format(s): value for path, value in fields.items()}
            buffers |= {f"b.{s}.data": data, f"planes.{s}": name}
        tiles = max(tiles for _, (tiles, _, _) in now)
        joined.append(replace(steps[0], grid=(tiles, len(now), 1), values=numbers, buffers=buffers))
    others = [step for step in program.steps if step.kernel.function != "linear_planes"]
    return Program((*joined, *others), program.scratch)


def _planes_name(b: Matrix) -> str:
    return f"planes_{b.buffer}_{b.rows}x{b.columns}_{b.row_stride}x{b.column_stride}"


_PLANES = {3: ("bf16", 6), 1: ("f32", 4)}  # by their number: dtype, bytes of a number in all


ROWS = (
    Hopper("f32", "tf32", (Tiling(256, 3, 32, 0.8, 1.0), Tiling(128, 4, 32, 0.42, 1.0))),
    Hopper("f32", "fp32", (Tiling(128, 2, 64, 2.3, 1.2), Tiling(64, 3, 64, 1.36, 1.2))),
    *(Hopper(dtype, "", (Tiling(256, 4, 64, 0.8, 1.0), Tiling(128, 5, 64, 0.42, 1.0)))
      for dtype in ("bf16", "f16")),
)
