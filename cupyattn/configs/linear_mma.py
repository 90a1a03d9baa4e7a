"""Matrix products by warps on matrix units, sm_80 and up (kernels/linear_mma.cu)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .._program import CTYPE, ITEMSIZE, Device, Kernel, Layout, Program, Row, Step, cdiv, few
from .._select import forced
from .linear_problem import Matrix, Problem, values

_THREADS = 256

# What the cost rule knows besides the rows' own times, as measured on an H200: it only ranks rows.
_START_US = 2.0  # of a launch, its first slices and the writing of its results
_REDUCE_US = 2.2  # of the launch that adds the chunks
_BYTES_A_US = 3.0e6  # of the chunks' sums, written and read again


@dataclass(frozen=True)
class Mma(Row):
    """A tile m x n of c per block, by warps that multiply fragments (kernels/linear_mma.cu).

    Of the rows of a dtype the one with the least `cost` takes a problem.
    """

    dtype: str
    tf32: bool  # one TF32 product for float32
    m: int
    n: int
    warps: tuple[int, int, int]  # of a tile: along m, n, depth
    depth: int  # of a slice
    stages: int
    blocks: int  # that a multiprocessor should hold: bounds the registers
    first: float  # us of a slice where a multiprocessor has one block
    more: float  # us that the slice of each further block adds

    @property
    def name(self) -> str:
        split = f"_k{self.warps[2]}" if self.warps[2] > 1 else ""
        return f"mma_{'tf32' if self.tf32 else self.dtype}_{self.m}x{self.n}{split}"

    @property
    def threads(self) -> int:
        return 32 * self.warps[0] * self.warps[1] * self.warps[2]

    @property
    def _shared(self) -> int:
        return self.stages * (self.m + self.n) * self.depth * ITEMSIZE[self.dtype]

    def refuses(self, problem: Problem, device: Device) -> str | None:
        reason = self._mismatch(problem, device)
        if reason is None:
            rivals = [row for row in ROWS if row._mismatch(problem, device) is None]
            rivals = [row for row in rivals if row.name.startswith(forced())] or rivals
            best = min(rivals, key=lambda row: row.cost(problem, device))
            if best != self:
                return (f"takes {self.cost(problem, device)[0]:.3g} us by the cost rule, "
                        f"{best.name} {best.cost(problem, device)[0]:.3g}")
        return reason

    def _mismatch(self, problem: Problem, device: Device) -> str | None:
        """Return why this row cannot do the problem, or None."""
        if problem.dtype != self.dtype:
            return f"dtype {problem.dtype} is not {self.dtype}"
        if self.dtype == "f32" and (problem.precision == "tf32") != self.tf32:
            return f"precision {problem.precision} is another row's"
        if device.capability < (8, 0):
            return f"needs sm_80, the device is {device.target}"
        if self._shared + 4 * self.n > device.shared_memory:
            return f"{self._shared} bytes of shared memory exceed {device.shared_memory}"
        for name in ("a", "b"):
            views = [getattr(product, name) for product in problem.products]
            reasons = [_unreadable(views, self.dtype, along) for along in (True, False)]
            if all(reasons):
                return f"{name} is neither {reasons[0]} nor {reasons[1]}"
        for product in problem.results:
            if product.c.columns > 1 and product.c.column_stride != 1:
                return f"c ({product.c.buffer}) has no unit column stride"
        if self._tiles(problem) >= 2**31:
            return "tiles exceed a grid"
        return None

    def _tiles(self, problem: Problem) -> int:
        return sum(cdiv(p.a.rows, self.m) * cdiv(p.b.rows, self.n) for p in problem.results)

    def _slices(self, problem: Problem) -> int:
        each = [cdiv(product.a.columns, self.depth) for product in problem.products]
        return sum(each) if problem.summed else max(each)

    def cost(self, problem: Problem, device: Device) -> tuple[float, int]:
        """Return (us, chunks of depth): the estimate that chooses among tiles and chunks.

        The busiest multiprocessor gets so many blocks, whose slices follow one another. More than
        one chunk costs the writing of its sums and a second launch that reads them.
        """
        tiles, slices = self._tiles(problem), self._slices(problem)
        sums = sum(p.a.rows * p.b.rows for p in problem.results)
        best = (0.0, 0)
        chunks = 1
        while True:
            blocks = cdiv(tiles * chunks, device.multiprocessors)
            us = _START_US + cdiv(slices, chunks) * (self.first + (blocks - 1) * self.more)
            if chunks > 1:
                us += _REDUCE_US + 8 * chunks * sums / _BYTES_A_US
            if best[1] == 0 or us < best[0]:
                best = (us, chunks)
            if slices < 16 * chunks or blocks > 4:  # chunks of 8 slices or more; enough blocks
                return best
            chunks *= 2

    def _kernel(self, along_a: bool, along_b: bool) -> Kernel:
        numbers = {"M": self.m, "N": self.n, "Depth": self.depth, "Stages": self.stages,
                   "WarpsM": self.warps[0], "WarpsN": self.warps[1], "WarpsK": self.warps[2]}
        flags = {"Tf32": self.tf32, "AlongA": along_a, "AlongB": along_b}
        layout = ("k" if along_a else "m") + ("k" if along_b else "n")
        return Kernel(f"linear__{self.name}_{layout}", "linear_mma.cu", "linear_mma",
                      "LinearParams",
                      (f"using T = {CTYPE[self.dtype]};",
                       *(f"static constexpr int k{k} = {n};" for k, n in numbers.items()),
                       *(f"static constexpr bool k{k} = {str(v).lower()};"
                         for k, v in flags.items())), self.threads, self.blocks)

    def _reduce_kernel(self) -> Kernel:
        return Kernel(f"linear__mma_{self.dtype}_reduce", "linear_mma.cu", "linear_mma_reduce",
                      "LinearParams", (f"using T = {CTYPE[self.dtype]};",), _THREADS)

    def kernels(self) -> tuple[Kernel, ...]:
        """Return the kernels of a projection and of the gradients of its input and weight."""
        layouts = few(self.dtype, ((True, True), (True, False), (False, False)))
        return (*(self._kernel(*along) for along in layouts), self._reduce_kernel())

    def program(self, problem: Problem, device: Device) -> Program:
        along_a, along_b = (
            _unreadable([getattr(p, name) for p in problem.products], self.dtype, True) is None
            for name in ("a", "b"))
        _, chunks = self.cost(problem, device)
        share = cdiv(self._slices(problem), chunks)
        chunks = max(1, cdiv(self._slices(problem), max(1, share)))
        numbers, buffers = values(problem)
        lines = min(cdiv(p.a.rows, self.m) for p in problem.results)
        numbers |= {"chunks": chunks, "share": share,
                    "group": max(1, min(1024 // self.m, lines))}
        step = Step(self._kernel(along_a, along_b), (self._tiles(problem), chunks, 1), numbers,
                    buffers, shared=self._shared)
        if chunks == 1:
            return Program((step,))
        size = sum(p.a.rows * cdiv(p.b.rows, 8) * 8 for p in problem.results)
        # Named by its size: programs that are joined share scratch of one name.
        name = f"linear_partial_{chunks * size}"
        buffers = {**buffers, "partial": name}
        blocks = min(cdiv(size // 4, _THREADS), 8 * device.multiprocessors)
        return Program((replace(step, buffers=buffers),
                        Step(self._reduce_kernel(), (blocks, 1, 1), numbers, buffers)),
                       {name: Layout((chunks * size,), "f32")})


def least(problem: Problem, device: Device) -> tuple[float, str] | None:
    """Return the least time by the cost rule, and the row, of those that can do a problem."""
    return min(((row.cost(problem, device)[0], row.name) for row in ROWS
                if row._mismatch(problem, device) is None), default=None)


def _unreadable(views: Sequence[Matrix], dtype: str, along: bool) -> str | None:
    """Return what matrices lack to be copied by 16 bytes along depth (or across), or None."""
    size = ITEMSIZE[dtype]
    for m in views:
        (unit, length), (step, lines) = ((m.column_stride, m.columns), (m.row_stride, m.rows))[
            ::1 if along else -1]
        axis = "columns" if along else "rows"
        if length > 1 and unit != 1:
            return f"of unit stride along {axis} ({m.buffer}: {unit})"
        if (lines > 1 and step * size % 16) or m.align % 16:
            return (f"aligned to 16 bytes along {axis} ({m.buffer}: address {m.align}, stride "
                    f"{step * size})")
    return None


def _rows(dtype: str, tf32: bool, *tiles: tuple) -> tuple[Mma, ...]:
    return tuple(Mma(dtype, tf32, *tile) for tile in tiles)


# m, n, warps along (m, n, depth), depth of a slice, stages, blocks, first, more
_HALF = ((128, 128, (2, 4, 1), 64, 3, 2, 1.15, 1.05),
         (64, 64, (2, 2, 1), 128, 3, 2, 0.66, 0.56),
         (64, 32, (2, 1, 2), 128, 3, 3, 0.48, 0.31),
         (32, 32, (1, 1, 4), 256, 2, 3, 0.53, 0.55))

ROWS = (
    *_rows("f16", False, *_HALF),
    *_rows("bf16", False, *_HALF),
    *_rows("f32", False,
           (128, 128, (2, 4, 1), 32, 3, 1, 2.82, 2.78),
           (64, 64, (2, 2, 1), 32, 4, 2, 0.91, 0.71),
           (32, 32, (1, 1, 4), 128, 3, 2, 0.91, 0.80)),
    *_rows("f32", True,
           (64, 64, (2, 2, 1), 32, 4, 3, 0.57, 0.40),
           (64, 32, (2, 1, 2), 32, 4, 3, 0.35, 0.23),
           (32, 32, (1, 1, 4), 128, 3, 2, 0.60, 0.55)),
)
