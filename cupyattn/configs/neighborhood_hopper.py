"""Neighborhood attention on sm_90a: TMA and warpgroup products."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import ClassVar

from .._program import (CTYPE, Device, Kernel, Layout, Program, Row, Step, TensorMap, cdiv,
                        few)
from .neighborhood_problem import Problem, values

Box = tuple[int, int, int]
_ROWS, _STAGES, _THREADS = 128, 2, 384
_PLACE = 104  # bytes of HopperPlace, which the source asserts
_KEYS = (96, 112, 128, 144, 160)  # of a box; more spill
_BOX_COST = 24  # of a key box, in keys: its barriers and the exchange between lanes


def _factors(n: int, axes: int, last: int) -> list[Box]:
    """Return the boxes of n positions over the last `axes` axes, the last extent in steps."""
    some = [d for d in range(1, n + 1) if n % d == 0]
    boxes = [(n // (b * c), b, c) for b in some for c in some if n % (b * c) == 0 and c % last == 0]
    return [box for box in boxes if all(x == 1 for x in box[:3 - axes])]


@functools.lru_cache(maxsize=4096)
def _boxes(space: Box, window: Box, dilation: Box, stride: Box, axes: int
           ) -> tuple[Box, Box] | None:
    """Return the box of queries and that of keys that take least work by count, if any fit."""
    length = [cdiv(n, d) for n, d in zip(space, dilation)]
    best: tuple[float, Box, Box] | None = None
    keys = [box for n in _KEYS for box in _factors(n, axes, 8)]
    for query in _factors(_ROWS, axes, 1):
        if any(n * d > 256 for n, d in zip(query, dilation)):
            continue
        # Keys that the queries of a box see, and queries that a padded axis has for nothing.
        seen = [min(w + q + s - 2, n) for w, q, s, n in zip(window, query, stride, length)]
        waste = math.prod(cdiv(n, q) * q / n for n, q in zip(length, query))
        for key in keys:
            if any(n * d > 256 for n, d in zip(key, dilation)) or (axes > 1 and key[2] > 32):
                continue
            boxes = math.prod(cdiv(n, k) for n, k in zip(seen, key))
            cost = waste * boxes * (math.prod(key) + _BOX_COST)
            if best is None or cost < best[0]:
                best = (cost, query, key)
    return None if best is None else best[1:]


@dataclass(frozen=True)
class HopperForward(Row):
    """128 queries a block, 96 to 160 keys at a time, both boxes of positions."""

    dtype: str
    dim: int

    target: ClassVar[str | None] = "sm_90a"
    TURNS: ClassVar[bool] = False  # warpgroups take turns to ask for products
    LEAST: ClassVar[int] = 576  # keys of a window, below which other rows are faster

    @property
    def name(self) -> str:
        return f"hopper_{self.dtype}_d{self.dim}"

    def refuses(self, problem: Problem, device: Device) -> str | None:
        if problem.q.dtype != self.dtype:
            return f"dtype {problem.q.dtype} is not {self.dtype}"
        for name in ("head_dim", "value_dim"):
            if getattr(problem, name) != self.dim:
                return f"{name} {getattr(problem, name)} is not {self.dim}"
        if math.prod(problem.kernel_size) < self.LEAST:
            return f"a window of {math.prod(problem.kernel_size)} keys is below {self.LEAST}"
        for name in ("q", "k", "v"):
            if _heads(getattr(problem, name)) is None:
                return (f"{name} has strides {getattr(problem, name).strides} or an address that "
                        "the copy engine does not take")
        if not _folded(problem) and max(problem.dilation) > 8:
            return f"dilation {problem.dilation} exceeds 8, and its groups are not lines"
        if self._fitted(problem) is None:
            return f"dilation {problem.dilation} stretches every box beyond 256 tokens"
        if self._blocks(problem) >= 2**31:
            return "query boxes exceed a grid"
        return None

    def boxes(self, problem: Problem) -> tuple[Box, Box]:
        """Return the boxes of queries and of keys. Only called when the row does not refuse."""
        boxes = self._fitted(problem)
        assert boxes is not None
        return boxes

    def _fitted(self, problem: Problem) -> tuple[Box, Box] | None:
        space, window, dilation, stride = (_three(x) for x in (
            problem.space, problem.kernel_size, problem.dilation, problem.stride))
        if _folded(problem):  # groups are lines
            space, dilation = (1, 1, space[2] // dilation[2]), (1, 1, 1)
        return _boxes(space, window, dilation, stride, len(problem.space))

    def _tiles(self, problem: Problem) -> Box:
        query, _ = self.boxes(problem)
        a, b, c = (cdiv(cdiv(n, d), q) for n, d, q in zip(
            _three(problem.space), _three(problem.dilation), query))
        return a, b, c

    def _blocks(self, problem: Problem) -> int:
        return (math.prod(self._tiles(problem)) * math.prod(problem.dilation) * problem.heads
                * problem.batch)

    def _kernel(self, query: Box, key: Box, axes: int) -> Kernel:
        numbers = {"Dim": self.dim, "Stages": _STAGES, "Axes": axes,
                   **{f"Query{a}": n for a, n in zip("THW", query)},
                   **{f"Key{a}": n for a, n in zip("THW", key)}}
        boxes = "_".join("x".join(map(str, box)) for box in (query, key))
        return Kernel(f"neighborhood_fwd__{self.name}__{axes}d_{boxes}",
                      "neighborhood_hopper_fwd.cu", "neighborhood_hopper",
                      "NeighborhoodHopperParams",
                      (f"using T = {CTYPE[self.dtype]};",
                       f"static constexpr bool kTurns = {str(self.TURNS).lower()};",
                       *(f"static constexpr int k{k} = {n};" for k, n in numbers.items())),
                      _THREADS, target="sm_90a")

    def kernels(self) -> tuple[Kernel, ...]:
        """Return the kernels of a few boxes; others are compiled when they are met."""
        return tuple(self._kernel(*boxes) for boxes in few(self.dtype, (
            ((1, 1, 128), (1, 1, 160), 1), ((1, 8, 16), (1, 10, 16), 2),
            ((4, 4, 8), (3, 3, 16), 3), ((16, 1, 8), (16, 1, 8), 3))))

    def program(self, problem: Problem, device: Device) -> Program:
        query, key = self.boxes(problem)
        numbers: dict[str, object] = {f"na.{k}": v for k, v in values(problem).items()}
        numbers |= {"tiles": self._tiles(problem), "folded": int(_folded(problem))}
        buffers = {f"na.{name}.data": name
                   for name in ("q", "k", "v", "y", *(("lse",) if problem.return_lse else ()))}
        maps = {}
        for name, box in (("q", query), ("k", key), ("v", key)):
            layout = getattr(problem, name)
            numbers[f"{name}_heads_first"] = int(_heads(layout) == "first")
            maps[f"{name}_map"] = self._map(problem, layout, box)
            buffers[f"{name}_map.address"] = name
        positions = _ROWS + 2 * _STAGES * math.prod(key)
        shared = positions * self.dim * 2 + 8 * (1 + 4 * _STAGES) + _PLACE
        return Program((Step(self._kernel(query, key, len(problem.space)),
                             (self._blocks(problem), 1, 1), numbers, buffers, shared=shared,
                             maps=maps),))

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
