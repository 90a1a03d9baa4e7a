"""Matrix products and column sums: every projection of the fused module and every gradient.

A `Problem` is one to four products that share a launch. The first row of `TABLE` that does not
refuse it does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .._program import CTYPE, FLOATS, ITEMSIZE, Device, Kernel, Layout, Program, Row, Step
from .._program import accumulator, cdiv
from .._select import choose
from . import linear_hopper, linear_mma, linear_teams
from .linear_problem import Matrix, Problem, Product, matrix, needs_copy, values

__all__ = ["Matrix", "Problem", "Product", "TABLE", "column_sums", "matrix", "needs_copy",
           "program", "values"]

_TILE, _THREADS, _MAX_GRID = 64, 256, 2**31 - 1


def program(problem: Problem, device: Device) -> Program:
    """Return what to launch for a problem, by the row that is chosen for it."""
    return choose("linear", TABLE, problem, device).program(problem, device)


# ------------------------------------------------------------------------------------ plain rows


@dataclass(frozen=True)
class Plain(Row):
    """Tiles of 64 x 64 on the CUDA cores; every dtype, layout and size."""

    dtype: str

    @property
    def name(self) -> str:
        return f"plain_{self.dtype}"

    def refuses(self, problem: Problem, device: Device) -> str | None:
        return None if problem.dtype == self.dtype else f"dtype {problem.dtype} is not {self.dtype}"

    def kernels(self) -> tuple[Kernel, ...]:
        return (Kernel(f"linear__{self.name}__product", "linear.cu", "linear_product",
                       "LinearParams", (f"using T = {CTYPE[self.dtype]};",), _THREADS),)

    def program(self, problem: Problem, device: Device) -> Program:
        tiles = sum(cdiv(p.a.rows, _TILE) * cdiv(p.b.rows, _TILE) for p in problem.results)
        (kernel,) = self.kernels()
        return Program((Step(kernel, (min(tiles, _MAX_GRID), 1, 1), *values(problem)),))


# ----------------------------------------------------------------------------------- column sums


def _sum_kernel(from_dtype: str, to_dtype: str, vector: int) -> Kernel:
    return Kernel(f"linear__column_sums_{from_dtype}_{to_dtype}_v{vector}", "linear.cu",
                  "linear_column_sums", "LinearParams",
                  (f"using T = {CTYPE[from_dtype]};", f"using Out = {CTYPE[to_dtype]};",
                   f"static constexpr int kVector = {vector};"), _THREADS)


def column_sum_kernels(dtype: str) -> tuple[Kernel, ...]:
    """Return every kernel that `column_sums` launches for a dtype."""
    wide = accumulator(dtype)
    pairs = {(dtype, wide): None, (wide, dtype): None, (dtype, dtype): None}
    return tuple(_sum_kernel(*pair, vector) for pair in pairs
                 for vector in {1, _vector(pair[0])})


def _vector(dtype: str) -> int:
    return 1 if dtype == "f64" else 16 // ITEMSIZE[dtype]


def _by_vectors(dtype: str, a: Matrix) -> bool:
    size = ITEMSIZE[dtype]
    return (a.column_stride == 1 and a.columns * size % 16 == 0 and a.row_stride * size % 16 == 0
            and a.align % 16 == 0)


def column_sums(dtype: str, sums: Sequence[tuple[Matrix, str]], device: Device) -> Program:
    """Return what adds the rows of one to four matrices into a vector each.

    Rows are summed in chunks, as many as fill the device, and then the chunks' sums.
    """
    if not sums:
        return Program(())
    vector = _vector(dtype) if all(_by_vectors(dtype, a) for a, _ in sums) else 1
    rows = max(a.rows for a, _ in sums)
    tiles = sum(cdiv(a.columns, 32 * vector) for a, _ in sums)
    # A block's warps add 4 to 32 rows each, and more only if the chunks' sums would take long.
    share = max(32, cdiv(rows, max(1, cdiv(8 * device.multiprocessors, tiles))), cdiv(rows, 512))
    chunks = max(1, cdiv(rows, share))
    if chunks == 1:
        return Program((_sum_step(dtype, dtype, vector, sums, share, {}),))
    wide = accumulator(dtype)
    partial = {f"column_sums_{i}_{chunks}x{a.columns}": Layout((chunks, a.columns), wide)
               for i, (a, _) in enumerate(sums)}
    parts = [Matrix(name, chunks, a.columns, a.columns, 1)
             for name, (a, _) in zip(partial, sums)]
    by = _vector(wide) if all(_by_vectors(wide, part) for part in parts) else 1
    first = _sum_step(dtype, wide, vector, [(a, part.buffer) for (a, _), part in zip(sums, parts)],
                      share, {f"c.{i}.row": part.row_stride for i, part in enumerate(parts)})
    last = _sum_step(wide, dtype, by, [(part, to) for part, (_, to) in zip(parts, sums)], chunks,
                     {})
    return Program((first, last), partial)


def _sum_step(from_dtype: str, to_dtype: str, vector: int, sums: Sequence[tuple[Matrix, str]],
              share: int, extra: dict[str, int]) -> Step:
    numbers: dict[str, object] = {"products": len(sums), "share": share, **extra}
    buffers: dict[str, str] = {}
    for i, (a, to) in enumerate(sums):
        numbers |= {f"a.{i}.row": a.row_stride, f"a.{i}.column": a.column_stride,
                    f"rows.{i}": a.rows, f"columns.{i}": a.columns, f"c.{i}.column": 1}
        buffers |= {f"a.{i}.data": a.buffer, f"c.{i}.data": to}
    tiles = sum(cdiv(a.columns, 32 * vector) for a, _ in sums)
    chunks = max(1, *(cdiv(a.rows, share) for a, _ in sums))
    return Step(_sum_kernel(from_dtype, to_dtype, vector), (tiles, chunks, 1), numbers, buffers)


TABLE: tuple[Row, ...] = (*linear_teams.ROWS, *linear_hopper.ROWS, *linear_mma.ROWS,
                          *(Plain(dtype) for dtype in FLOATS))
