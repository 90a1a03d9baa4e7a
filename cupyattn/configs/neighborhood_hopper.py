"""Neighborhood attention on sm_90a: TMA and warpgroup products."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from .._program import (CTYPE, Device, Kernel, Layout, Program, Row, Step, TensorMap, cdiv,
                        few, token_view)
from ..reference import neighborhood as reference
from .neighborhood_box import BoxForward
from .neighborhood_problem import Problem, rows_aligned, values, visits

Box = tuple[int, int, int]
Axis = tuple[int, int, int, int, bool, str]  # positions, window, dilation, stride, causal, boundary
_OF_KEYS = ("dkdv", "dk", "dv")  # parts whose tiles are of keys
_SHARED = 228 << 10  # bytes of a multiprocessor, of which each block takes 1 KB


def _factors(n: int, axes: int, last: int) -> list[Box]:
    """Return the boxes of n positions over the last `axes` axes, the last extent in steps."""
    some = [d for d in range(1, n + 1) if n % d == 0]
    boxes = [(n // (b * c), b, c) for b in some for c in some if n % (b * c) == 0 and c % last == 0]
    return [box for box in boxes if all(x == 1 for x in box[:3 - axes])]


def _cut(own: Box) -> int:
    """Return the first axis on which a box has more than one position: parts lie along it."""
    return next((a for a in range(3) if own[a] > 1), 2)


def _part(own: Box, groups: int) -> Box:
    """Return the box of one of the warpgroups that own a box together."""
    a, b, c = (n // groups if axis == _cut(own) else n for axis, n in enumerate(own))
    return a, b, c


@functools.lru_cache(maxsize=4096)
def _boxes(axes: tuple[Axis, ...], sizes: tuple[int, ...], inverse: bool, groups: int,
           overhead: int, saved: float) -> tuple[Box, Box] | None:
    """Return the box of a tile and that which it walks, of least work by count, if any fit.

    `sizes` are those of the second; `inverse`: keys own and queries are walked; `groups`: so many
    parts of a tile pass over boxes that they do not see, which saves so much of their share of the
    time; `overhead`: the cost of a walked box, in positions.
    """
    @functools.cache
    def work(a: int, own: int, seen: int, parts: int) -> int:
        """Count the pairs along an axis that is cut into so many parts, padding included."""
        n, window, _, stride, causal, boundary = axes[a - 3]
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

    def fits(own: Box, seen: Box) -> bool:
        steps = (1,) * (3 - len(axes)) + tuple(axis[2] for axis in axes)
        return all(n * d <= 256 for box in (_part(own, groups), seen) for n, d in zip(box, steps))

    def cost(own: Box, seen: Box) -> float:
        all_pairs, visited = (math.prod(work(a, own[a], seen[a], parts if a == _cut(own) else 1)
                                        for a in range(3 - len(axes), 3)) for parts in (1, groups))
        return (all_pairs + saved * (visited - all_pairs)) * (1 + overhead / math.prod(seen))

    owns = [own for own in _factors(64 * groups, len(axes), 1) if own[_cut(own)] % groups == 0]
    pairs = [(own, seen) for n in sizes for seen in _factors(n, len(axes), 8)
             if len(axes) == 1 or seen[2] <= 32 for own in owns if fits(own, seen)]
    return min(pairs, key=lambda pair: cost(*pair), default=None)


def _padded(features: int) -> int:
    """Return how many features lie in shared memory, as `FeatureBlocks` has it."""
    step = 32 if features <= 128 else 64
    return cdiv(features, step) * step


@dataclass(frozen=True)
class Hopper(Row):
    """What forward and backward share."""

    dtype: str
    dim: int  # of q and k, padded
    values: int  # of v and y, padded

    target: ClassVar[str | None] = "sm_90a"
    ARRAYS: ClassVar[tuple[str, ...]] = ("q", "k", "v")  # that the copy engine takes
    # Keys of a window on one, two, three axes, below which the boxes of mma.sync are faster, by
    # `dim`; twice as many where features are spare. And where those refuse, which leaves slow rows.
    LEAST: ClassVar[Mapping[int, tuple[int, int, int]]] = {
        32: (1024, 2304, 2304), 64: (192, 384, 512), 96: (192, 256, 256), 128: (128, 128, 256)}
    ALONE: ClassVar[int] = 12
    GROUPS: ClassVar[int] = 2  # warpgroups that compute, 64 rows each
    OVERHEAD: ClassVar[int] = 24  # of a walked box, in positions: barriers, exchange between lanes
    SAVED: ClassVar[float] = 0.5  # by passing over: the other warpgroups go on alone
    STAGES: ClassVar[int] = 2  # walked boxes in flight before a second tile's own rows are

    @property
    def name(self) -> str:
        apart = "" if self.values == self.dim else f"x{self.values}"
        return f"hopper_{self.dtype}_d{self.dim}{apart}"

    @property
    def blocks(self) -> int:
        """Return how many blocks share a multiprocessor."""
        return 1

    @property
    def parts(self) -> tuple[str, ...]:
        """Return the launches: "fwd"; or "dq", and "dkdv" or "dk" and "dv"."""
        raise NotImplementedError

    def refuses(self, problem: Problem, device: Device) -> str | None:
        if problem.q.dtype != self.dtype:
            return f"dtype {problem.q.dtype} is not {self.dtype}"
        for name, most in (("head_dim", self.dim), ("value_dim", self.values)):
            features, fewest = getattr(problem, name), most - (24 if most <= 128 else 56)
            if features % 8:
                return f"{name} {features} is not a multiple of 8"
            if not fewest <= features <= most:
                return f"{name} {features} is not {fewest} to {most}"
        if problem.scale <= 0:
            return f"scale {problem.scale} is not positive"
        keys = math.prod(min(w, cdiv(n, d)) for w, n, d in zip(
            problem.kernel_size, problem.space, problem.dilation))
        least = self._least(problem)
        if keys < least:
            return f"a window of {keys} keys is below {least}"
        for name in self.ARRAYS:
            if _heads(getattr(problem, name)) is None:
                return (f"{name} has strides {getattr(problem, name).strides} or an address that "
                        "the copy engine does not take")
        if not _folded(problem) and max(problem.dilation) > 8:
            return f"dilation {problem.dilation} exceeds 8, and its groups are not lines"
        for part in self.parts:
            boxes = self.boxes(problem, part)
            if boxes is None:
                return f"dilation {problem.dilation} stretches every box beyond 256 tokens"
            if self._all_tiles(problem, boxes[0], self._heads_of(problem, part)) >= 2**31:
                return "tiles exceed an int"
        return None

    def _least(self, problem: Problem) -> int:
        """Return how many keys a window must have."""
        dim = problem.head_dim
        if dim != problem.value_dim or dim not in BoxForward.DIMS:
            return self.ALONE
        least = self.LEAST[self.dim][len(problem.space) - 1]
        return least if dim == self.dim else 2 * least

    def boxes(self, problem: Problem, part: str) -> tuple[Box, Box] | None:
        """Return the box of a tile of a part and that which it walks, if any fit."""
        raise NotImplementedError

    def _sizes(self, part: str) -> tuple[int, ...]:
        """Return how many positions a walked box may have: what registers hold."""
        raise NotImplementedError

    def notes(self, problem: Problem, device: Device) -> list[str]:
        rank, lines = len(problem.space), []
        for part in self.parts:
            boxes = self.boxes(problem, part)
            assert boxes is not None
            own, seen = (box[3 - rank:] for box in boxes)
            tile, walked = ("x".join(map(str, box)) for box in (own, seen))
            lines.append(f"{part}: tiles of {tile} positions, {self.GROUPS} warpgroups, walk boxes "
                         f"of {walked}: {visits(problem, own, seen, part in _OF_KEYS)}")
        return lines

    def _fitted(self, problem: Problem, part: str) -> tuple[Box, Box] | None:
        """Return the box of a tile and that which it walks, if any fit."""
        step = (1,) if _folded(problem) else problem.dilation  # groups that are lines
        lengths = [cdiv(n, d) for n, d in zip(problem.space, problem.dilation)]
        axes = tuple(zip(lengths, problem.kernel_size, step, problem.stride, problem.is_causal,
                         (problem.boundary,) * len(lengths)))
        sizes = tuple(n for n in self._sizes(part) if self._bytes(part, len(axes), n)[1] > 1)
        sizes = tuple(n for n in sizes if n >= 64) or sizes[-1:]
        return _boxes(axes, sizes, part in _OF_KEYS, self.GROUPS, self.OVERHEAD, self.SAVED)

    def _tiles(self, problem: Problem, own: Box) -> Box:
        """Return the tiles along each axis of the longest dilation group."""
        a, b, c = (cdiv(cdiv(n, d), q) for n, d, q in zip(
            _three(problem.space), _three(problem.dilation), own))
        return a, b, c

    def _all_tiles(self, problem: Problem, own: Box, heads: int) -> int:
        return (math.prod(self._tiles(problem, own)) * math.prod(problem.dilation) * heads
                * problem.batch)

    def _numbers(self, problem: Problem, own: Box, heads: int) -> dict[str, object]:
        """Return the constant fields of `NeighborhoodHopperParams`."""
        numbers: dict[str, object] = {f"na.{k}": v for k, v in values(problem).items()}
        numbers |= {"tiles": self._tiles(problem, own), "folded": int(_folded(problem)),
                    "all_tiles": self._all_tiles(problem, own, heads)}
        return numbers | {f"{name}_heads_first": int(_heads(getattr(problem, name)) == "first")
                          for name in self.ARRAYS}

    def _bytes(self, part: str, axes: int, seen: int) -> tuple[int, int, int]:
        """Return how many tiles' own rows and how many walked boxes fit, and all bytes.

        `seen`: positions of a walked box.
        """
        rows, both = 64 * self.GROUPS, 2 * (self.dim + self.values)  # bytes of a position
        stage = seen * both + (8 * seen + 8 * 3 if part in _OF_KEYS else 8 * 4)  # sums, barriers
        tile = rows * (self.dim * 2 if part in ("fwd", "dv") else both) + 8 * 2 * self.GROUPS
        plans = 2 * (80 + 48 * self.GROUPS + 8 * axes * rows + 8 * 2)
        memory = _SHARED // self.blocks - (1 << 10)
        stages = [min((memory - plans - n * tile) // stage, 6) for n in (1, 2)]
        owned = 2 if stages[1] >= min(stages[0], self.STAGES) else 1
        return owned, stages[owned - 1], plans + owned * tile + stages[owned - 1] * stage

    def _kernel(self, part: str, own: Box, seen: Box, axes: int,
                features: tuple[int, int] | None = None) -> Kernel:
        """Return the kernel of boxes; `features`: head_dim and value_dim, where some are spare."""
        owned, stages, _ = self._bytes(part, axes, math.prod(seen))
        dim, most = features or (self.dim, self.values)
        numbers = {"Dim": dim, "Values": most, "Groups": self.GROUPS, "Blocks": self.blocks,
                   "Owned": owned, "Stages": stages, "Axes": axes,
                   **{f"Own{a}": n for a, n in zip("THW", own)},
                   **{f"Seen{a}": n for a, n in zip("THW", seen)}}
        boxes = "_".join("x".join(map(str, box)) for box in (own, seen))
        direction = "fwd" if part == "fwd" else "bwd"
        function = "dkdv" if part in _OF_KEYS else part
        spare = "" if (dim, most) == (self.dim, self.values) else f"_of{dim}x{most}"
        return Kernel(f"neighborhood_{direction}__{self.name}__{part}_{axes}d_{boxes}{spare}",
                      f"neighborhood_hopper_{direction}.cu", f"neighborhood_hopper_{function}",
                      "NeighborhoodHopperParams",
                      (f"using T = {CTYPE[self.dtype]};",
                       *(f"static constexpr bool k{k} = {str(x).lower()};" for k, x in (
                           ("Inverse", part in _OF_KEYS), ("Dk", part in ("dkdv", "dk")),
                           ("Dv", part in ("dkdv", "dv")))),
                       *(f"static constexpr int k{k} = {n};" for k, n in numbers.items())),
                      128 * self.GROUPS + (128 if self.blocks == 1 else 64), self.blocks,
                      target="sm_90a")

    def _heads_of(self, problem: Problem, part: str) -> int:
        return problem.kv_heads if part in _OF_KEYS else problem.heads

    def _step(self, problem: Problem, device: Device, part: str, buffers: tuple[str, ...]) -> Step:
        boxes = self.boxes(problem, part)
        assert boxes is not None
        own, seen = boxes
        axes, heads = len(problem.space), self._heads_of(problem, part)
        fields = {f"na.{name}.data": name for name in buffers}
        fields |= {f"{name}_map.address": name for name in self.ARRAYS}
        ours = ("k", "v") if part in _OF_KEYS else ("q", "dy")
        maps = {f"{name}_map": self._map(problem, getattr(problem, name), _part(own, self.GROUPS)
                                         if name in ours else seen) for name in self.ARRAYS}
        blocks = min(self._all_tiles(problem, own, heads), device.multiprocessors * self.blocks)
        features = problem.head_dim, problem.value_dim
        return Step(self._kernel(part, own, seen, axes, features), (blocks, 1, 1),
                    self._numbers(problem, own, heads), fields,
                    shared=self._bytes(part, axes, math.prod(seen))[2], maps=maps)

    def _map(self, problem: Problem, layout: Layout, box: Box) -> TensorMap:
        rank = len(problem.space)
        some = 16 // 2  # a stride for axes of one element
        space = layout.shape[1:-2][::-1] + (1,) * (3 - rank)
        strides = layout.strides[1:-2][::-1] + (some,) * (3 - rank)
        steps = problem.dilation[::-1] + (1,) * (3 - rank)
        batch, batch_stride = layout.shape[0], layout.strides[0]
        heads, dim = layout.shape[-2:]
        extents = box[::-1]
        if _folded(problem):
            d = problem.dilation[0]
            space, strides = (space[0] // d, d, 1), (strides[0] * d, strides[0], some)
            steps = (1, 1, 1)
        block = 32 if _padded(dim) % 64 else 64
        taken = tuple(n * d for n, d in zip(extents, steps))
        order = _heads(layout)
        if order == "apart":  # heads are an axis; the batch is folded with the first one
            head_stride = layout.strides[-2] if heads > 1 else some
            if space[2] == 1:
                strides = (*strides[:2], batch_stride)
            return TensorMap(self.dtype, (dim, heads, *space[:2], space[2] * batch),
                             tuple(2 * (x or some) for x in (head_stride, *strides)),
                             (block, 1, *taken), (1, 1, *steps))
        if order == "first":
            inner, batch, batch_stride = dim, batch * heads, layout.strides[-2]
        else:
            inner = heads * dim
        return TensorMap(self.dtype, (inner, *space, batch),
                         tuple(2 * x for x in (*strides, batch_stride or some)),
                         (block, *taken, 1), (1, *steps, 1))


@dataclass(frozen=True)
class HopperForward(Hopper):
    """64 queries a warpgroup, 64 to 160 keys at a time, both boxes of positions."""

    LEAST: ClassVar[Mapping[int, tuple[int, int, int]]] = {
        32: (2048, 1600, 1024), 64: (192, 256, 768), 96: (192, 256, 256), 128: (96, 96, 256)}

    @property
    def blocks(self) -> int:
        """Return how many blocks share a multiprocessor: two where 96 registers hold y."""
        return 2 if self.values <= 64 and self.dim <= 128 else 1

    @property
    def parts(self) -> tuple[str, ...]:
        return ("fwd",)

    def boxes(self, problem: Problem, part: str = "fwd") -> tuple[Box, Box] | None:
        """Return the box of queries of a tile and that of keys that it walks, if any fit."""
        return self._fitted(problem, part)

    def _sizes(self, part: str) -> tuple[int, ...]:
        # A thread has scores, half as many weights, and y.
        held = (184 if self.blocks == 1 else 80) - self.values // 2
        return tuple(n for n in range(64, 161, 16) if n * 3 // 4 <= held)

    def kernels(self) -> tuple[Kernel, ...]:
        """Return the kernels of a few boxes; others are compiled when they are met."""
        most = [max(n for n in self._sizes("fwd") if self._bytes("fwd", axes, n)[1] > 1) // 16
                for axes in (1, 2)]
        boxes = (((1, 1, 128), (1, 1, most[0] * 16), 1), ((1, 8, 16), (1, most[1], 16), 2),
                 ((4, 4, 8), (2, 4, 8), 3))
        return tuple(self._kernel("fwd", *x) for x in _listed(self, boxes))

    def program(self, problem: Problem, device: Device) -> Program:
        lse = ("lse",) if problem.return_lse else ()
        return Program((self._step(problem, device, "fwd", ("q", "k", "v", "y", *lse)),))


@dataclass(frozen=True)
class HopperBackward(Hopper):
    """64 queries a warpgroup for dq, then 64 keys a warpgroup for dk and dv."""

    ARRAYS: ClassVar[tuple[str, ...]] = ("q", "k", "v", "dy")
    OVERHEAD: ClassVar[int] = 8
    SAVED: ClassVar[float] = 1.0
    STAGES: ClassVar[int] = 3

    @property
    def parts(self) -> tuple[str, ...]:
        return ("dq", "dkdv") if self.dim + self.values <= 256 else ("dq", "dk", "dv")

    def refuses(self, problem: Problem, device: Device) -> str | None:
        reason = super().refuses(problem, device)
        if reason is None and problem.y is not None and not rows_aligned(problem.y):
            return "y has rows that do not start at multiples of 16 bytes"
        return reason

    def boxes(self, problem: Problem, part: str) -> tuple[Box, Box] | None:
        """Return the box of a tile of a part and that which it walks, if any fit."""
        return self._fitted(problem, part)

    def _sizes(self, part: str) -> tuple[int, ...]:
        # A thread has half a box's scores, as many of dp, half as many operands, and sums. More
        # than 64 queries only where the next scores are asked for before the last sum is there.
        sums = (self.dim * (part != "dv") + self.values * (part in ("dkdv", "dv"))) // 2
        most, ahead = (192, 192) if part == "dq" else (208, 164)
        return tuple(n for n in range(32, 129, 16) if n * (3 if part == "dv" else 5) // 4
                     <= (most if n <= 64 else ahead) - sums)

    def kernels(self) -> tuple[Kernel, ...]:
        """Return the kernels of a few boxes; others are compiled when they are met."""
        most = {part: max(n for n in self._sizes(part) if self._bytes(part, 3, n)[1] > 1) // 32
                for part in self.parts}
        cases = _listed(self, (
            ((1, 1, 128), lambda _, n: (1, 1, n * 32), 1),
            ((1, 8, 16), lambda _, n: (1, n * 2, 16), 2),
            ((4, 4, 8), lambda part, n: (n, 2, 16) if part == "dq" else (n, 4, 8), 3)))
        parts = self.parts if self.dtype == "bf16" else self.parts[:2]
        return tuple(self._kernel(part, own, seen(part, most[part]), axes)
                     for own, seen, axes in cases for part in parts)

    def program(self, problem: Problem, device: Device) -> Program:
        dlse = ("dlse",) if problem.dlse else ()
        some = ("q", "k", "v", "dy", "lse", "delta")
        results = {"dq": ("y", *dlse, "dq"), "dkdv": ("dk", "dv"), "dk": ("dk",), "dv": ("dv",)}
        return Program(tuple(self._step(problem, device, part, (*some, *results[part]))
                             for part in self.parts), {"delta": _sums(problem)})

    def _numbers(self, problem: Problem, own: Box, heads: int) -> dict[str, object]:
        view = token_view(_sums(problem))
        return (super()._numbers(problem, own, heads)
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


def _listed(row: Hopper, cases: Sequence[Any]) -> Sequence[Any]:
    """Return those of which to compile kernels ahead of time.

    Sizes beside 64 and 128 are the same code with other counts: a line stands for all.
    """
    return few(row.dtype, cases) if row.dim in (64, 128) else cases[:1]


def _heads(layout: Layout) -> str | None:
    """Say where the copy engine counts heads.

    Beside the features ("last"), with the batch ("first"), or as an axis, with the batch beside the
    first axis ("apart"): the last two leave spare features zero.
    """
    heads, dim = layout.shape[-2:]
    batch = layout.shape[0]
    if not layout.unit_last or layout.align < 16 or any(
            s <= 0 or s * 2 % 16 for n, s in zip(layout.shape[:-1], layout.strides[:-1]) if n > 1):
        return None
    if _padded(dim) != dim:
        if len(layout.shape) < 6 or layout.shape[1] == 1 or (
                layout.strides[0] == layout.shape[1] * layout.strides[1]):
            return "apart"
    elif heads == 1 or layout.strides[-2] == dim:
        return "last"
    if batch == 1 or layout.strides[0] == heads * layout.strides[-2]:
        return "first"
    return None


@dataclass(frozen=True)
class HopperMixed(Row):
    """head_dim and value_dim that fill different numbers of features: a row for each pair."""

    dtype: str
    backward: bool

    target: ClassVar[str | None] = "sm_90a"

    @property
    def name(self) -> str:
        return f"hopper_{self.dtype}_dxv"

    def row(self, problem: Problem) -> Hopper:
        """Return the row of the pair, whose name its kernels bear."""
        kind = HopperBackward if self.backward else HopperForward
        return kind(self.dtype, _padded(problem.head_dim), _padded(problem.value_dim))

    def refuses(self, problem: Problem, device: Device) -> str | None:
        for name in ("head_dim", "value_dim"):
            if getattr(problem, name) > DIMS[-1]:
                return f"{name} {getattr(problem, name)} exceeds {DIMS[-1]}"
        row = self.row(problem)
        if row.dim == row.values:
            return f"head_dim {problem.head_dim} and value_dim {problem.value_dim} have another row"
        return row.refuses(problem, device)

    def kernels(self) -> tuple[Kernel, ...]:
        """Return those of the row of 192 features: the same code with other counts."""
        kind = HopperBackward if self.backward else HopperForward
        return kind(self.dtype, 192, 192).kernels()

    def notes(self, problem: Problem, device: Device) -> list[str]:
        return self.row(problem).notes(problem, device)

    def program(self, problem: Problem, device: Device) -> Program:
        return self.row(problem).program(problem, device)


DIMS = (32, 64, 96, 128, 192, 256)
ROWS: tuple[Row, ...] = (
    *(HopperForward(dtype, dim, dim) for dtype in ("bf16", "f16") for dim in DIMS),
    *(HopperMixed(dtype, False) for dtype in ("bf16", "f16")))
BACKWARD: tuple[Row, ...] = (
    *(HopperBackward(dtype, dim, dim) for dtype in ("bf16", "f16") for dim in DIMS),
    *(HopperMixed(dtype, True) for dtype in ("bf16", "f16")))
