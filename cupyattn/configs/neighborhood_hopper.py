"""Neighborhood attention on sm_90a: TMA and warpgroup products."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import ClassVar

from .._program import CTYPE, Device, Kernel, Layout, Program, Row, Step, TensorMap, cdiv
from .neighborhood import Problem, values

Box = tuple[int, int, int]
_ROWS, _STAGES, _THREADS = 128, 2, 384
# Boxes of 128 positions whose last extent is a multiple of 8, by rank of space.
_BOXES: dict[int, tuple[Box, ...]] = {
    1: ((1, 1, 128),),
    2: ((1, 8, 16), (1, 16, 8), (1, 4, 32)),
    3: ((2, 8, 8), (4, 4, 8), (1, 8, 16), (1, 16, 8), (2, 4, 16)),
}


@dataclass(frozen=True)
class HopperForward(Row):
    """128 queries a block, 128 keys at a time, both boxes of positions."""

    dtype: str
    dim: int
    least: int  # keys of a window, below which other rows are faster

    target: ClassVar[str | None] = "sm_90a"

    @property
    def name(self) -> str:
        return f"hopper_{self.dtype}_d{self.dim}"

    def refuses(self, problem: Problem, device: Device) -> str | None:
        if problem.q.dtype != self.dtype:
            return f"dtype {problem.q.dtype} is not {self.dtype}"
        for name in ("head_dim", "value_dim"):
            if getattr(problem, name) != self.dim:
                return f"{name} {getattr(problem, name)} is not {self.dim}"
        if math.prod(problem.kernel_size) < self.least:
            return f"a window of {math.prod(problem.kernel_size)} keys is below {self.least}"
        for name in ("q", "k", "v"):
            if _heads(getattr(problem, name)) is None:
                return (f"{name} has strides {getattr(problem, name).strides} or an address that "
                        "the copy engine does not take")
        if not _folded(problem):
            query, key = self.boxes(problem)
            space = (1,) * (3 - len(problem.space)) + problem.dilation
            for box in (query, key):
                if any(n * d > 256 or d > 8 for n, d in zip(box, space) if n > 1):
                    return f"dilation {problem.dilation} stretches a box of {box} beyond 256 tokens"
        if self._blocks(problem) >= 2**31:
            return "query boxes exceed a grid"
        return None

    def boxes(self, problem: Problem) -> tuple[Box, Box]:
        """Return the boxes of queries and of keys that visit fewest keys."""
        rank = len(problem.space)
        window = (1,) * (3 - rank) + problem.kernel_size

        def visited(query: Box, key: Box) -> int:
            return math.prod(cdiv(w + q - 1, k) * k for w, q, k in zip(window, query, key))

        return min(itertools.product(_BOXES[rank], repeat=2), key=lambda pair: visited(*pair))

    def _tiles(self, problem: Problem) -> tuple[int, ...]:
        rank = len(problem.space)
        space, dilation = ((1,) * (3 - rank) + x for x in (problem.space, problem.dilation))
        query, _ = self.boxes(problem)
        return tuple(cdiv(cdiv(n, d), q) for n, d, q in zip(space, dilation, query))

    def _blocks(self, problem: Problem) -> int:
        return (math.prod(self._tiles(problem)) * math.prod(problem.dilation) * problem.heads
                * problem.batch)

    def _kernel(self, query: Box, key: Box) -> Kernel:
        numbers = {"Dim": self.dim, "Stages": _STAGES,
                   **{f"Query{a}": n for a, n in zip("THW", query)},
                   **{f"Key{a}": n for a, n in zip("THW", key)}}
        boxes = "_".join("x".join(map(str, box)) for box in (query, key))
        return Kernel(f"neighborhood_fwd__{self.name}__{boxes}", "neighborhood_hopper_fwd.cu",
                      "neighborhood_hopper", "NeighborhoodHopperParams",
                      (f"using T = {CTYPE[self.dtype]};",
                       *(f"static constexpr int k{k} = {n};" for k, n in numbers.items())),
                      _THREADS, target="sm_90a")

    def kernels(self) -> tuple[Kernel, ...]:
        return tuple(self._kernel(boxes[0], boxes[0]) for boxes in _BOXES.values())

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
        shared = _ROWS * self.dim * 2 * (1 + 2 * _STAGES) + 8 * (1 + 4 * _STAGES)
        return Program((Step(self._kernel(query, key), (self._blocks(problem), 1, 1), numbers,
                             buffers, shared=shared, maps=maps),))

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


ROWS = tuple(HopperForward(dtype, dim, 96) for dtype in ("bf16", "f16") for dim in (64, 128))
