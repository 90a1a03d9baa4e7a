"""Neighborhood attention: the problem and the tables of rows."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .._program import (CTYPE, FLOATS, ITEMSIZE, Device, Kernel, Layout, Program, Row, Step,
                        accumulator, cdiv, few, token_view)


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


_VECTOR = 16  # bytes of the widest access
_LANES = 32  # of a warp
_LARGEST = 2**31 - 1


def _rows_aligned(layout: Layout) -> bool:
    """Whether every row along the last axis starts at a multiple of 16 bytes."""
    size = ITEMSIZE[layout.dtype]
    return layout.align == _VECTOR and all(
        n == 1 or s * size % _VECTOR == 0 for n, s in zip(layout.shape[:-1], layout.strides[:-1]))


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

    MOST_KEYS = 512  # of a window
    LONGEST = 127  # on the last axis
    WIDEST = 256  # head_dim
    BUSY = 512  # threads of a multiprocessor; below that, more of them do less each

    @property
    def name(self) -> str:
        return f"band_{self.dtype}"

    def refuses(self, problem: Problem, device: Device) -> str | None:
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
            if not _rows_aligned(layout):
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
        name = (f"{stem}__{self.name}__{part}_l{lanes}_v{vectors}_r{run}_a{shape.ahead}"
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


_DIMS = (64, 128, 256, 512)
FORWARD: tuple[Row, ...] = (
    *(BandForward(dtype) for dtype in FLOATS if dtype != "f64"),
    *(Plain(dtype, dim, False) for dtype in FLOATS for dim in _DIMS))
BACKWARD: tuple[Row, ...] = (
    *(BandBackward(dtype) for dtype in FLOATS if dtype != "f64"),
    *(Plain(dtype, dim, True) for dtype in FLOATS for dim in _DIMS))
