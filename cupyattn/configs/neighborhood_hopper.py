"""Neighborhood attention on sm_90a: TMA and warpgroup products."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .._program import (CTYPE, Device, Kernel, Layout, Program, Row, Step, TensorMap, cdiv,
                        few, token_view)
from ..reference import neighborhood as reference
from .neighborhood_problem import Problem, values

Box = tuple[int, int, int]
Axis = tuple[int, int, int, int, bool, str]  # positions, window, dilation, stride, causal, boundary
_ROWS, _STAGES, _THREADS = 128, 2, 384
_PLACE = 104  # bytes of HopperPlace, which the source asserts
_KEYS = (96, 112, 128, 144, 160)  # of a box; more spill


def _factors(n: int, axes: int, last: int) -> list[Box]:
    """Return the boxes of n positions over the last `axes` axes, the last extent in steps."""
    some = [d for d in range(1, n + 1) if n % d == 0]
    boxes = [(n // (b * c), b, c) for b in some for c in some if n % (b * c) == 0 and c % last == 0]
    return [box for box in boxes if all(x == 1 for x in box[:3 - axes])]


@functools.lru_cache(maxsize=4096)
def _boxes(axes: tuple[Axis, ...], sizes: tuple[int, ...], inverse: bool, halves: bool,
           overhead: int) -> tuple[Box, Box] | None:
    """Return the box that a block owns and that which it walks, of least work by count, if any fit.

    `sizes` are those of the second; `inverse`: keys own and queries are walked; `halves`: each half
    of a block passes over boxes that it does not see; `overhead`: the cost of a walked box, in
    positions.
    """
    @functools.cache
    def work(a: int, own: int, seen: int, parts: int) -> int:
        """Count the pairs along an axis that is cut into so many parts, padding included."""
        n, window, dilation, stride, causal, boundary = axes[a - 3]
        if max(own, seen) * dilation > 256:
            return 0
        interval = reference.inverse_window if inverse else reference.window
        start, end = interval(n, window, 1, stride, causal, boundary)
        block = np.arange(0, n, own)
        count = 0
        for part in range(parts):
            first, last = (np.minimum(block + x, n - 1)
                           for x in (own * part // parts, own * (part + 1) // parts - 1))
            count += int((-((start[block] - end[last]) // seen)
                          - (start[first] - start[block]) // seen).sum())
        return count * own // parts * seen

    def cost(own: Box, seen: Box) -> float:
        cut = next((a for a in range(3) if own[a] > 1), 2)  # halves lie along the first such axis
        pairs = math.prod(work(a, own[a], seen[a], 1 + (halves and a == cut))
                          for a in range(3 - len(axes), 3))
        return pairs * (1 + overhead / math.prod(seen))

    boxes = [(own, seen) for n in sizes for seen in _factors(n, len(axes), 8)
             if len(axes) == 1 or seen[2] <= 32 for own in _factors(_ROWS, len(axes), 1)]
    costs = {pair: cost(*pair) for pair in boxes}
    fitting = [pair for pair in boxes if costs[pair] > 0]
    return min(fitting, key=costs.__getitem__, default=None)


@dataclass(frozen=True)
class Hopper(Row):
    """What forward and backward share."""

    dtype: str
    dim: int

    target: ClassVar[str | None] = "sm_90a"
    ARRAYS: ClassVar[tuple[str, ...]] = ("q", "k", "v")  # that the copy engine takes
    LEAST: ClassVar[int] = 576  # keys of a window, below which other rows are faster
    HALVES: ClassVar[bool] = False  # warpgroups pass over boxes that they do not see
    OVERHEAD: ClassVar[int] = 24  # of a walked box, in positions: barriers, exchange between lanes

    @property
    def name(self) -> str:
        return f"hopper_{self.dtype}_d{self.dim}"

    def refuses(self, problem: Problem, device: Device) -> str | None:
        if problem.q.dtype != self.dtype:
            return f"dtype {problem.q.dtype} is not {self.dtype}"
        for name in ("head_dim", "value_dim"):
            if getattr(problem, name) != self.dim:
                return f"{name} {getattr(problem, name)} is not {self.dim}"
        if problem.scale <= 0:
            return f"scale {problem.scale} is not positive"
        keys = math.prod(min(w, cdiv(n, d)) for w, n, d in zip(
            problem.kernel_size, problem.space, problem.dilation))
        if keys < self.LEAST:
            return f"a window of {keys} keys is below {self.LEAST}"
        for name in self.ARRAYS:
            if _heads(getattr(problem, name)) is None:
                return (f"{name} has strides {getattr(problem, name).strides} or an address that "
                        "the copy engine does not take")
        if not _folded(problem) and max(problem.dilation) > 8:
            return f"dilation {problem.dilation} exceeds 8, and its groups are not lines"
        return None

    def _fitted(self, problem: Problem, sizes: tuple[int, ...], inverse: bool = False
                ) -> tuple[Box, Box] | None:
        """Return the box that a block owns and that which it walks, if any fit."""
        step = (1,) if _folded(problem) else problem.dilation  # groups that are lines
        lengths = [cdiv(n, d) for n, d in zip(problem.space, problem.dilation)]
        axes = tuple(zip(lengths, problem.kernel_size, step, problem.stride, problem.is_causal,
                         (problem.boundary,) * len(lengths)))
        return _boxes(axes, sizes, inverse, self.HALVES, self.OVERHEAD)

    def _tiles(self, problem: Problem, own: Box) -> Box:
        """Return the boxes along each axis of the longest dilation group."""
        a, b, c = (cdiv(cdiv(n, d), q) for n, d, q in zip(
            _three(problem.space), _three(problem.dilation), own))
        return a, b, c

    def _blocks(self, problem: Problem, own: Box, heads: int) -> int:
        return (math.prod(self._tiles(problem, own)) * math.prod(problem.dilation) * heads
                * problem.batch)

    def _numbers(self, problem: Problem, own: Box) -> dict[str, object]:
        """Return the constant fields of `NeighborhoodHopperParams`."""
        numbers: dict[str, object] = {f"na.{k}": v for k, v in values(problem).items()}
        numbers |= {"tiles": self._tiles(problem, own), "folded": int(_folded(problem))}
        return numbers | {f"{name}_heads_first": int(_heads(getattr(problem, name)) == "first")
                          for name in self.ARRAYS}

    def _map(self, problem: Problem, layout: Layout, box: Box) -> TensorMap:
        rank = len(problem.space)
        some = 16 // 2  # a stride for axes of one element
        space = layout.shape[1:-2][::-1] + (1,) * (3 - rank)
        strides = layout.strides[1:-2][::-1] + (some,) * (3 - rank)
        steps = problem.dilation[::-1] + (1,) * (3 - rank)
        batch, batch_stride = layout.shape[0], layout.strides[0]
        heads, dim = layout.shape[-2:]
        if _heads(layout) == "first":
            inner, batch, batch_stride = dim, batch * heads, layout.strides[-2]
        else:
            inner = heads * dim
        extents = box[::-1]
        if _folded(problem):
            d = problem.dilation[0]
            space, strides = (space[0] // d, d, 1), (strides[0] * d, strides[0], some)
            steps = (1, 1, 1)
        return TensorMap(self.dtype, (inner, *space, batch),
                         tuple(2 * x for x in (*strides, batch_stride or some)),
                         (64, *(n * d for n, d in zip(extents, steps)), 1), (1, *steps, 1))


@dataclass(frozen=True)
class HopperForward(Hopper):
    """128 queries a block, 96 to 160 keys at a time, both boxes of positions."""

    LEAST: ClassVar[int] = 600

    def refuses(self, problem: Problem, device: Device) -> str | None:
        reason = super().refuses(problem, device)
        if reason is not None:
            return reason
        boxes = self._fitted(problem, _KEYS)
        if boxes is None:
            return f"dilation {problem.dilation} stretches every box beyond 256 tokens"
        if self._blocks(problem, boxes[0], problem.heads) >= 2**31:
            return "query boxes exceed a grid"
        return None

    def boxes(self, problem: Problem) -> tuple[Box, Box]:
        """Return the boxes of queries and of keys. Only called when the row does not refuse."""
        boxes = self._fitted(problem, _KEYS)
        assert boxes is not None
        return boxes

    def _kernel(self, query: Box, key: Box, axes: int) -> Kernel:
        numbers = {"Dim": self.dim, "Stages": _STAGES, "Axes": axes,
                   **{f"Query{a}": n for a, n in zip("THW", query)},
                   **{f"Key{a}": n for a, n in zip("THW", key)}}
        boxes = "_".join("x".join(map(str, box)) for box in (query, key))
        return Kernel(f"neighborhood_fwd__{self.name}__{axes}d_{boxes}",
                      "neighborhood_hopper_fwd.cu", "neighborhood_hopper",
                      "NeighborhoodHopperParams",
                      (f"using T = {CTYPE[self.dtype]};",
                       *(f"static constexpr int k{k} = {n};" for k, n in numbers.items())),
                      _THREADS, target="sm_90a")

    def kernels(self) -> tuple[Kernel, ...]:
        """Return the kernels of a few boxes; others are compiled when they are met."""
        return tuple(self._kernel(*boxes) for boxes in few(self.dtype, (
            ((1, 1, 128), (1, 1, 160), 1), ((1, 8, 16), (1, 10, 16), 2),
            ((4, 4, 8), (3, 3, 16), 3), ((16, 1, 8), (16, 1, 8), 3))))

    def program(self, problem: Problem, device: Device) -> Program:
        query, key = self.boxes(problem)
        buffers = {f"na.{name}.data": name
                   for name in ("q", "k", "v", "y", *(("lse",) if problem.return_lse else ()))}
        maps = {}
        for name, box in (("q", query), ("k", key), ("v", key)):
            maps[f"{name}_map"] = self._map(problem, getattr(problem, name), box)
            buffers[f"{name}_map.address"] = name
        positions = _ROWS + 2 * _STAGES * math.prod(key)
        shared = positions * self.dim * 2 + 8 * (1 + 4 * _STAGES) + _PLACE
        return Program((Step(self._kernel(query, key, len(problem.space)),
                             (self._blocks(problem, query, problem.heads), 1, 1),
                             self._numbers(problem, query), buffers, shared=shared,
                             maps=maps),))


@dataclass(frozen=True)
class HopperBackward(Hopper):
    """128 queries a block for dq, then 128 keys a block for dk and dv."""

    ARRAYS: ClassVar[tuple[str, ...]] = ("q", "k", "v", "dy")
    HALVES: ClassVar[bool] = True
    OVERHEAD: ClassVar[int] = 8
    _PLACE: ClassVar[int] = 176  # bytes of BoxPlace, which the source asserts
    _SHARED: ClassVar[int] = 227 << 10  # bytes of a block

    @property
    def keys(self) -> tuple[int, ...]:
        """Return how many keys a box of dq may have: what registers hold."""
        return (64, 80, 96) if self.dim == 128 else (64, 80, 96, 112, 128)

    @property
    def queries(self) -> tuple[int, ...]:
        """Return how many queries a box of dk and dv may have."""
        return (64,) if self.dim == 128 else (64, 80, 96)

    def boxes(self, problem: Problem, part: str) -> tuple[Box, Box] | None:
        """Return the box that a block of "dq" or "dkdv" owns and those that it walks, if any."""
        return (self._fitted(problem, self.keys) if part == "dq"
                else self._fitted(problem, self.queries, inverse=True))

    def refuses(self, problem: Problem, device: Device) -> str | None:
        reason = super().refuses(problem, device)
        if reason is not None:
            return reason
        for part, heads in (("dq", problem.heads), ("dkdv", problem.kv_heads)):
            boxes = self.boxes(problem, part)
            if boxes is None:
                return f"dilation {problem.dilation} stretches every box beyond 256 tokens"
            if self._blocks(problem, boxes[0], heads) >= 2**31:
                return "boxes exceed a grid"
        return None

    def _stages(self, part: str, seen: Box, axes: int) -> tuple[int, int]:
        """Return how many boxes are in flight, and the bytes of shared memory."""
        count = math.prod(seen)
        stage = 2 * count * self.dim * 2 + (8 * 4 if part == "dq" else 8 * count + 8 * 3)
        rest = 2 * _ROWS * self.dim * 2 + 8 + self._PLACE + 8 * axes * _ROWS
        stages = min((self._SHARED - rest) // stage, 4)
        return stages, rest + stages * stage

    def _kernel(self, part: str, own: Box, seen: Box, axes: int) -> Kernel:
        numbers = {"Dim": self.dim, "Stages": self._stages(part, seen, axes)[0], "Axes": axes,
                   **{f"Own{a}": n for a, n in zip("THW", own)},
                   **{f"Seen{a}": n for a, n in zip("THW", seen)}}
        boxes = "_".join("x".join(map(str, box)) for box in (own, seen))
        return Kernel(f"neighborhood_bwd__{self.name}__{part}_{axes}d_{boxes}",
                      "neighborhood_hopper_bwd.cu", f"neighborhood_hopper_{part}",
                      "NeighborhoodHopperParams",
                      (f"using T = {CTYPE[self.dtype]};",
                       f"static constexpr bool kInverse = {str(part == 'dkdv').lower()};",
                       *(f"static constexpr int k{k} = {n};" for k, n in numbers.items())),
                      _THREADS, target="sm_90a")

    def kernels(self) -> tuple[Kernel, ...]:
        """Return the kernels of a few boxes; others are compiled when they are met."""
        keys, queries = self.keys[-1] // 32, self.queries[-1] // 32
        cases = few(self.dtype, (
            ((1, 1, 128), (1, 1, keys * 32), (1, 1, queries * 32), 1),
            ((1, 8, 16), (1, keys * 2, 16), (1, queries * 2, 16), 2),
            ((4, 4, 8), (keys, 2, 16), (queries, 4, 8), 3)))
        return tuple(self._kernel(part, own, seen, axes) for own, *both, axes in cases
                     for part, seen in zip(("dq", "dkdv"), both))

    def _step(self, problem: Problem, part: str, heads: int, buffers: tuple[str, ...]) -> Step:
        boxes = self.boxes(problem, part)
        assert boxes is not None
        own, seen = boxes
        fields = {f"na.{name}.data": name for name in buffers}
        fields |= {f"{name}_map.address": name for name in self.ARRAYS}
        ours = ("q", "dy") if part == "dq" else ("k", "v")
        maps = {f"{name}_map": self._map(problem, getattr(problem, name),
                                         own if name in ours else seen) for name in self.ARRAYS}
        return Step(self._kernel(part, own, seen, len(problem.space)),
                    (self._blocks(problem, own, heads), 1, 1), self._numbers(problem, own), fields,
                    shared=self._stages(part, seen, len(problem.space))[1], maps=maps)

    def program(self, problem: Problem, device: Device) -> Program:
        dlse = ("dlse",) if problem.dlse else ()
        some = ("q", "k", "v", "dy", "lse", "delta")
        return Program((self._step(problem, "dq", problem.heads, (*some, "y", *dlse, "dq")),
                        self._step(problem, "dkdv", problem.kv_heads, (*some, "dk", "dv"))),
                       {"delta": _sums(problem)})

    def _numbers(self, problem: Problem, own: Box) -> dict[str, object]:
        view = token_view(_sums(problem))
        return (super()._numbers(problem, own)
                | {f"na.delta.{field}": value for field, value in view.items()})


def _sums(problem: Problem) -> Layout:
    """Return the layout of delta and of lse, side by side, both as the kernels need them."""
    return Layout((*problem.lse_layout.shape, 2), "f32")


def _three(x: tuple[int, ...]) -> Box:
    """Return one number per axis, 1 for leading axes that are missing."""
    a, b, c = (1,) * (3 - len(x)) + x
    return a, b, c


def _folded(problem: Problem) -> bool:
    """Whether the groups of a line are lines of an array of their own."""
    return (len(problem.space) == 1 and problem.dilation[0] > 1
            and problem.space[0] % problem.dilation[0] == 0)


def _heads(layout: Layout) -> str | None:
    """Say whether heads lie beside the features ("last") or with the batch ("first")."""
    heads, dim = layout.shape[-2:]
    batch = layout.shape[0]
    if not layout.unit_last or layout.align < 16 or any(
            s <= 0 or s * 2 % 16 for n, s in zip(layout.shape[:-1], layout.strides[:-1]) if n > 1):
        return None
    if heads == 1 or layout.strides[-2] == dim:
        return "last"
    if batch == 1 or layout.strides[0] == heads * layout.strides[-2]:
        return "first"
    return None


ROWS = tuple(HopperForward(dtype, dim) for dtype in ("bf16", "f16") for dim in (64, 128))
BACKWARD = tuple(HopperBackward(dtype, dim) for dtype in ("bf16", "f16") for dim in (64, 128))
