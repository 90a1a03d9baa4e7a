"""Neighborhood attention with narrow windows (kernels/neighborhood_band_*.cu)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from .._program import (CTYPE, ITEMSIZE, Device, Kernel, Layout, Program, Row, Step, cdiv, few,
                        token_view)
from .neighborhood_problem import Problem, rows_aligned, values

_VECTOR = 16  # bytes of the widest access
_LANES = 32  # of a warp
_LARGEST = 2**31 - 1


@dataclass(frozen=True)
class Shape:
    """How a band kernel deals a problem to threads."""

    vectors: int  # of 16 bytes that a lane has of a row
    run: int  # neighbouring tokens that share their lanes
    ahead: int  # rows of the other side on their way
    threads: int = 128
    blocks: int = 1  # that must fit a multiprocessor


@dataclass(frozen=True)
class Band(Row):
    """A few lanes per run of neighbouring tokens, 16-byte accesses; for narrow windows."""

    dtype: str
    small: bool = False  # only what other rows of the table are slower for

    MOST_KEYS = 512  # of a window
    LONGEST = 127  # on the last axis
    WIDEST = 256  # head_dim
    BUSY = 512  # threads of a multiprocessor; below that, more of them do less each
    # Keys of a window on one, two and three axes, see `narrow`; of 16-bit by instructions.
    NARROW: ClassVar[Mapping[str, tuple[int, int, int]]] = {
        "bf16": (16, 16, 16), "fp32": (32, 32, 48), "tf32": (12, 12, 12)}
    FEW = 8192  # queries and heads; 16-bit: with more, matrix units are as fast for any window

    @property
    def name(self) -> str:
        return f"band_small_{self.dtype}" if self.small else f"band_{self.dtype}"

    def narrow(self, problem: Problem) -> int:
        """Return up to how many keys of a window bands are faster than matrix units."""
        precision = problem.precision if self.dtype == "f32" else "bf16"
        return self.NARROW[precision][len(problem.space) - 1]

    def refuses(self, problem: Problem, device: Device) -> str | None:
        if self.small and problem.q.dtype == self.dtype:
            if self.dtype != "f32" and _runs(problem, 1) * problem.heads >= self.FEW:
                return (f"{_runs(problem, 1) * problem.heads} queries and heads are not below "
                        f"{self.FEW}")
            if math.prod(problem.kernel_size) > self.narrow(problem):
                return (f"a window of {math.prod(problem.kernel_size)} keys exceeds "
                        f"{self.narrow(problem)}")
        size, head_dim, window = ITEMSIZE[self.dtype], problem.head_dim, problem.kernel_size
        if problem.q.dtype != self.dtype:
            return f"dtype {problem.q.dtype} is not {self.dtype}"
        if problem.value_dim != head_dim:
            return f"value_dim {problem.value_dim} is not head_dim {head_dim}"
        if head_dim * size % _VECTOR:
            return f"head_dim {head_dim} is not a multiple of {_VECTOR // size}"
        if head_dim > self.WIDEST:
            return f"head_dim {head_dim} exceeds {self.WIDEST}"
        if window[-1] > self.LONGEST:
            return f"kernel_size {window[-1]} on the last axis exceeds {self.LONGEST}"
        if math.prod(window) > self.MOST_KEYS:
            return f"a window of {math.prod(window)} keys exceeds {self.MOST_KEYS}"
        if _runs(problem, 1) * problem.heads > _LARGEST:
            return f"batch, space and heads of q {problem.q.shape} exceed {_LARGEST} together"
        for name in ("q", "k", "v", "dy"):
            layout = getattr(problem, name)
            if layout is None:
                continue
            if not rows_aligned(layout):
                return f"{name} has rows that do not start at multiples of {_VECTOR} bytes"
            # Results are contiguous.
            step = max(abs(layout.strides[-3]), layout.shape[-2] * head_dim) * size
            if step * problem.dilation[-1] > _LARGEST:
                return f"neighbours in a window are more than {_LARGEST} bytes apart in {name}"
        for name in ("lse", "dlse"):
            layout = getattr(problem, name)
            if layout is not None and (
                    abs(layout.strides[-2]) * problem.dilation[-1] * 4 > _LARGEST):
                return f"neighbours in a window are more than {_LARGEST} bytes apart in {name}"
        return None

    def _lanes(self, head_dim: int, shape: Shape) -> tuple[int, int]:
        """Return how many vectors of a row a lane has, and how many lanes that takes."""
        row = head_dim * ITEMSIZE[self.dtype] // _VECTOR
        vectors = min(max(shape.vectors, cdiv(row, _LANES)), row)
        return vectors, 1 << (cdiv(row, vectors) - 1).bit_length()

    def _kernel(self, part: str, shape: Shape, *, head_dim: int, heads: int, shared: int = 1,
                dilation: int = 1, outer: bool = False, keep: bool = True) -> Kernel:
        """Return the kernel of a shape; `heads` are those of the runs."""
        vectors, lanes = self._lanes(head_dim, shape)
        run, tile = min(shape.run, lanes), math.gcd(heads, _LANES // lanes)
        full = lanes * vectors * _VECTOR == head_dim * ITEMSIZE[self.dtype]
        stem = f"neighborhood_{'fwd' if part == 'forward' else 'bwd'}"
        name = (f"{stem}__band_{self.dtype}__{part}_l{lanes}_v{vectors}_r{run}_a{shape.ahead}"
                f"_h{tile}x{heads // tile}_g{shared}_d{dilation}_t{shape.threads}_b{shape.blocks}")
        flags = {"Full": full, "Outer": outer, **({"Keep": keep} if part == "dq" else {})}
        return Kernel(
            name="_".join([name, *(flag.lower() for flag, on in flags.items() if on)]),
            source=f"{stem.replace('_', '_band_')}.cu", function=f"neighborhood_band_{part}",
            params="NeighborhoodParams",
            config=(f"using T = {CTYPE[self.dtype]};",
                    f"static constexpr int kLanes = {lanes}, kVectors = {vectors};",
                    f"static constexpr int kRun = {run}, kAhead = {shape.ahead};",
                    f"static constexpr int kHeads = {tile}, kHeadTiles = {heads // tile};",
                    f"static constexpr int kShared = {shared}, kDilation = {dilation};",
                    *(f"static constexpr bool k{flag} = {str(on).lower()};"
                      for flag, on in flags.items())),
            threads=shape.threads, blocks=shape.blocks)

    def _values(self, problem: Problem) -> dict[str, object]:
        return values(problem)

    def _step(self, problem: Problem, part: str, shape: Shape, buffers: tuple[str, ...],
              keep: bool = True, shared: int = 0) -> Step:
        heads = problem.kv_heads if part == "dkdv" else problem.heads
        kernel = self._kernel(part, shape, head_dim=problem.head_dim, heads=heads,
                              shared=problem.heads // problem.kv_heads,
                              dilation=problem.dilation[-1],
                              outer=math.prod(problem.space[:-1]) > 1, keep=keep)
        lanes = self._lanes(problem.head_dim, shape)[1]
        teams = _runs(problem, min(shape.run, lanes)) * heads
        return Step(kernel, (cdiv(teams * lanes, shape.threads), 1, 1), self._values(problem),
                    {f"{name}.data": name for name in buffers}, shared=shared)

    def _shape(self, problem: Problem, device: Device, heads: int, shapes: tuple[Shape, ...]
               ) -> Shape:
        """Return the first shape that keeps the device busy, or the last."""
        for shape in shapes[:-1]:
            lanes = self._lanes(problem.head_dim, shape)[1]
            threads = _runs(problem, min(shape.run, lanes)) * heads * lanes
            if threads >= device.multiprocessors * self.BUSY:
                return shape
        return shapes[-1]


def _runs(problem: Problem, run: int) -> int:
    """Return the number of runs of so many tokens: as many in every dilation group."""
    *outer, last = problem.space
    step = problem.dilation[-1]
    return problem.batch * math.prod(outer) * step * cdiv(cdiv(last, step), run)


@dataclass(frozen=True)
class BandForward(Band):
    """The band kernel of the forward."""

    NARROW: ClassVar[Mapping[str, tuple[int, int, int]]] = {
        "bf16": (16, 16, 16), "fp32": (16, 25, 32), "tf32": (8, 8, 8)}

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Return the shapes, the largest share of a thread first."""
        if self.dtype == "f32":
            return Shape(2, 2, 4), Shape(2, 1, 4)
        return Shape(2, 2, 2), Shape(1, 2, 4), Shape(1, 1, 4)

    def kernels(self) -> tuple[Kernel, ...]:
        return tuple(self._kernel("forward", shape, head_dim=64, heads=8, outer=outer)
                     for shape in few(self.dtype, self.shapes) for outer in (False, True))

    def program(self, problem: Problem, device: Device) -> Program:
        shape = self._shape(problem, device, problem.heads, self.shapes)
        lse = ("lse",) if problem.return_lse else ()
        return Program((self._step(problem, "forward", shape, ("q", "k", "v", "y", *lse)),))


@dataclass(frozen=True)
class BandBackward(Band):
    """The band kernels of the backward: for dq and delta, then for dk and dv.

    Both have the same vectors a lane, and so the same bits of every product: where a query has one
    key, its score has no gradient at all.
    """

    KEPT = 72 << 10  # bytes of shared memory of a block: three blocks a multiprocessor

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Return the shapes for dq, the largest share of a thread first."""
        if self.dtype == "f32":
            return Shape(2, 2, 2), Shape(2, 1, 4)
        return Shape(2, 2, 1), Shape(1, 2, 2), Shape(1, 1, 4)

    @property
    def key_shapes(self) -> tuple[Shape, ...]:
        """Return the shapes for dk and dv."""
        if self.dtype == "f32":
            return Shape(2, 2, 1), Shape(2, 1, 2)
        return Shape(2, 1, 1), Shape(1, 2, 2), Shape(1, 1, 2)

    def kernels(self) -> tuple[Kernel, ...]:
        kinds = [("dq", shape, True) for shape in few(self.dtype, self.shapes)]
        kinds += [("dq", self.shapes[-1], False)]
        kinds += [("dkdv", shape, True) for shape in few(self.dtype, self.key_shapes)]
        return tuple(self._kernel(part, shape, head_dim=64, heads=8, outer=outer, keep=keep)
                     for part, shape, keep in kinds for outer in (False, True))

    def program(self, problem: Problem, device: Device) -> Program:
        shape = self._shape(problem, device, problem.heads, self.shapes)
        kept = self._kept(problem, shape)
        keep, dlse = kept <= self.KEPT, ("dlse",) if problem.dlse else ()
        dq = self._step(problem, "dq", shape, ("q", "k", "v", "dy", "lse", *dlse, "delta", "dq"),
                        keep, kept if keep else 0)
        alike = tuple(x for x in self.key_shapes if x.vectors == shape.vectors)
        shape = self._shape(problem, device, problem.kv_heads, alike)
        dkdv = self._step(problem, "dkdv", shape, ("q", "k", "v", "dy", "lse", "delta", "dk", "dv"))
        return Program((dq, dkdv), {"delta": self._sums(problem)})

    def _sums(self, problem: Problem) -> Layout:
        """Return the layout of delta and of the factor of the weights, side by side."""
        return Layout((*problem.lse_layout.shape, 2), "f32")

    def _values(self, problem: Problem) -> dict[str, object]:
        sums = token_view(self._sums(problem))
        return {**values(problem), **{f"delta.{field}": value for field, value in sums.items()}}

    def _kept(self, problem: Problem, shape: Shape) -> int:
        """Return the bytes of a weight and a dp for every pair that a block looks at."""
        lengths = [cdiv(length, step) for length, step in zip(problem.space, problem.dilation)]
        *outer, last = (min(n, size) for n, size in zip(lengths, problem.kernel_size))
        lanes = self._lanes(problem.head_dim, shape)[1]
        run = min(shape.run, lanes)
        # The windows of a run start less than a run and a stride apart.
        keys = cdiv(min(last + run + problem.stride[-1] - 2, lengths[-1]), shape.ahead)
        return 8 * math.prod(outer) * keys * shape.ahead * run * (shape.threads // lanes)
