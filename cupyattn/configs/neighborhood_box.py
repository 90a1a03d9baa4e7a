"""Neighborhood attention on matrix units by warp (kernels/neighborhood_box_*.cu)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from .._program import (CTYPE, ITEMSIZE, Device, Kernel, Layout, Program, Row, Step, cdiv, few,
                        token_view)
from .neighborhood_problem import Problem, rows_aligned, values

_VECTOR = 16  # bytes of the widest access
_LARGEST = 2**31 - 1
_GRID = 65535  # of the second and third axis


@dataclass(frozen=True)
class Tile:
    """How the box kernel deals a problem to blocks."""

    box: tuple[int, int, int]  # query positions of a block, 16 a warp
    reach: tuple[int, int, int]  # key positions, at most
    keys: int  # rows of a chunk
    stages: int  # chunks in shared memory
    cost: float = 0.0

    @property
    def warps(self) -> int:
        return math.prod(self.box) // 16


def _three(x: tuple[int, ...], missing: int = 1) -> tuple[int, int, int]:
    """Return one value per axis, with leading axes that have `missing`."""
    return (*(missing,) * (3 - len(x)), *map(int, x))  # type: ignore[return-value]


@dataclass(frozen=True)
class BoxForward(Row):
    """A box of queries per block, 16 a warp, and the box of keys that they see."""

    dtype: str
    tf32: bool = False  # one TF32 product for float32

    PART = "fwd"  # of names
    SOURCE = "neighborhood_box_fwd.cu"
    FUNCTION = "neighborhood_box_forward"
    OWN: ClassVar[tuple[str, ...]] = ("q",)  # arrays whose rows a block has one box of
    OTHERS: ClassVar[tuple[str, ...]] = ("k", "v")  # and those that it walks over
    READ: ClassVar[tuple[str, ...]] = ()  # further arrays of which it reads its own rows
    NUMBERS = 0  # bytes for a byte of an element, of a row that it walks over

    DIMS = (16, 32, 48, 64, 80, 96, 112, 128)
    WIDE_DIMS = (32, 64, 96, 128)  # of float32
    BOXES = {1: ((1, 1, 64), (1, 1, 128)),
             2: ((1, 8, 8), (1, 16, 4), (1, 4, 16), (1, 16, 8), (1, 8, 16), (1, 16, 16)),
             3: ((4, 4, 4), (8, 4, 2), (8, 4, 4), (4, 4, 8), (8, 8, 4), (4, 8, 8))}
    CHUNKS = ((128, 3), (128, 2), (64, 3), (64, 2), (32, 2))  # rows, and how many at once
    HELD = 216 << 10  # bytes of shared memory that blocks of a multiprocessor share

    @property
    def name(self) -> str:
        return _name(self)

    @property
    def size(self) -> int:
        """Return the bytes of an element."""
        return ITEMSIZE[self.dtype]

    def refuses(self, problem: Problem, device: Device) -> str | None:
        head_dim, dims = problem.head_dim, self.WIDE_DIMS if self.dtype == "f32" else self.DIMS
        if problem.q.dtype != self.dtype:
            return f"dtype {problem.q.dtype} is not {self.dtype}"
        if self.dtype == "f32" and (problem.precision == "tf32") != self.tf32:
            return f"precision {problem.precision} is another row's"
        if problem.value_dim != head_dim:
            return f"value_dim {problem.value_dim} is not head_dim {head_dim}"
        if head_dim not in dims:
            return f"head_dim {head_dim} is not among {dims}"
        if max(problem.space) >= 2**31:
            return f"a space extent of {max(problem.space)} exceeds {_LARGEST}"
        if problem.scale and not 1e-30 < abs(problem.scale) < 1e30:
            return f"scale {problem.scale} is not 0 and not between 1e-30 and 1e30 in size"
        for name in (*self.OWN, *self.OTHERS, *self.READ):
            if not rows_aligned(getattr(problem, name)):
                return f"{name} has rows that do not start at multiples of {_VECTOR} bytes"
        tile = self._tile(problem, device)
        if isinstance(tile, str):
            return tile
        for extents, names in ((tile.box, (*self.OWN, *self.READ)), (tile.reach, self.OTHERS)):
            for name in names:
                if (most := self._length(problem, getattr(problem, name), extents)) > _LARGEST:
                    return f"a tile of {name} is {most} bytes long, more than {_LARGEST}"
        for name, layout, extents in self._made(problem, tile):
            if (most := self._length(problem, layout, extents)) > _LARGEST:
                return f"a tile of {name} is {most} bytes long, more than {_LARGEST}"
        grid = self._grid(problem, tile)
        if grid[0] > _LARGEST or max(grid[1:]) > _GRID:
            return f"a grid of {grid} blocks exceeds {_LARGEST}, {_GRID}, {_GRID}"
        return None

    @staticmethod
    def _length(problem: Problem, layout: Layout, extents: tuple[int, int, int]) -> int:
        """Return how many bytes apart the first and the last position of a box are, at most."""
        # Of positions, not of tokens: an axis of one may have any stride.
        return sum(abs(s) * d * (min(n, cdiv(size, d)) - 1) for s, d, n, size in
                   zip(_three(layout.strides[1:-2], 0), _three(problem.dilation), extents,
                       _three(problem.space))) * ITEMSIZE[layout.dtype]

    def _made(self, problem: Problem, tile: Tile
              ) -> tuple[tuple[str, Layout, tuple[int, int, int]], ...]:
        """Return the contiguous arrays that the program makes, and boxes in them."""
        return (("y", problem.y_layout, tile.box),)

    def _heads(self, problem: Problem) -> int:
        return getattr(problem, self.OWN[0]).shape[-2]

    def _grid(self, problem: Problem, tile: Tile) -> tuple[int, int, int]:
        tiles = [d * cdiv(cdiv(length, d), b) for length, d, b in
                 zip(_three(problem.space), _three(problem.dilation), tile.box)]
        return tiles[2] * self._heads(problem), tiles[1], tiles[0] * problem.batch

    @staticmethod
    def _reach(problem: Problem, box: tuple[int, ...]) -> tuple[int, int, int]:
        """Return how many key positions the queries of a box see, at most, on each axis."""
        return tuple(min(w + b + s - 2, cdiv(length, d)) for length, w, d, s, b in  # type: ignore
                     zip(_three(problem.space), _three(problem.kernel_size),
                         _three(problem.dilation), _three(problem.stride), box))

    def _shared(self, head_dim: int, rank: int, tile: Tile) -> int:
        rows = len(self.OWN) * math.prod(tile.box) + 2 * tile.stages * tile.keys
        beside = self.NUMBERS * self.size + 4 * (rank > 1)
        return rows * head_dim * self.size + tile.stages * tile.keys * beside

    def _chunks(self, problem: Problem, rows: int) -> tuple[tuple[int, int], ...]:
        """Return how many rows of a box may be in shared memory, and how often, best first."""
        return ((rows, 1), *self.CHUNKS)

    def _inner(self, problem: Problem) -> bool:
        """Return whether a warp meets many keys that all of its queries see."""
        if self.dtype == "f32":  # masks are a small part of the work
            return False
        return len(problem.space) == 1 and problem.kernel_size[0] + problem.stride[0] >= 49

    def _warps(self, problem: Problem) -> int:
        """Return how many warps of a multiprocessor have enough registers."""
        if self.dtype == "f32":
            return 16 if problem.head_dim <= 32 else 12 if problem.head_dim <= 64 else 8
        few = len(problem.space) < 3 and not self._inner(problem)
        if problem.head_dim <= 32:
            return 28 if few else 24
        if problem.head_dim <= 64:
            return 20 if few else 16
        return 16 if problem.head_dim <= 80 else 12

    def _tile(self, problem: Problem, device: Device) -> Tile | str:
        """Return the tile of least cost, or why there is none."""
        most = self._warps(problem)
        boxes = [box for box in self.BOXES[len(problem.space)] if math.prod(box) <= 16 * most]
        if self.dtype == "f32":  # no registers that nobody has
            boxes = [box for box in boxes if most % (math.prod(box) // 16) == 0] or boxes
        tiles = [self._fitted(problem, device, box) for box in boxes]
        fit = [tile for tile in tiles if isinstance(tile, Tile)]
        return min(fit, key=lambda tile: tile.cost) if fit else tiles[0]

    def _fitted(self, problem: Problem, device: Device, box: tuple[int, int, int]) -> Tile | str:
        """Return the tile of a box of queries, or why there is none."""
        rank, head_dim = len(problem.space), problem.head_dim
        reach = self._reach(problem, box)
        most = {1: 2**30, 2: 32000, 3: 480}[rank]  # what `Sight` has fields for
        if max(reach) > most or math.prod(reach) > 2**30:
            return f"windows of a tile reach over {reach} keys, more than {most} on an axis"
        warps, rows = math.prod(box) // 16, cdiv(math.prod(reach), 16) * 16
        most = self._warps(problem)
        share = min(self.HELD, device.shared_memory) * warps // most
        for keys, stages in self._chunks(problem, rows):  # if need be the smallest
            tile = Tile(box, reach, keys, stages)
            if self._shared(head_dim, rank, tile) <= share:
                break
        if self._shared(head_dim, rank, tile) > device.shared_memory:
            return f"a tile does not fit {device.shared_memory} bytes of shared memory"
        # Keys that a warp's 16 queries see, from its first to its last one.
        warp, left = [1, 1, 1], 16
        for a in (2, 1, 0):
            warp[a] = min(box[a], left)
            left //= warp[a]
        seen = self._reach(problem, tuple(warp))
        span = 0
        for a in range(3):
            span = span * reach[a] + seen[a] - 1
        span = cdiv(span + 1, 16) * 16
        # Instructions of a warp: to start and to end, for keys in fragments, to copy rows.
        vectors = rows * head_dim * self.size / _VECTOR / (32 * warps)
        cost = self._instructions(head_dim, span, vectors)
        cost *= 1 + 2 / (most // warps * warps)  # the fewer warps, the more they wait for memory
        # Clocks of a block: warps share four schedulers, at best three quarters busy; copies come
        # from L2 at 24 bytes a clock. Warps of a block wait for each other.
        work, copies = warps * cost / 3, 2 * rows * head_dim * self.size / 24
        clocks = max(work, copies) + 0.1 * min(work, copies) + 10 * warps
        if most // warps == 1:  # nobody works while the block waits
            clocks *= 1.2
        blocks = math.prod(self._grid(problem, tile))
        return Tile(box, reach, tile.keys, tile.stages,
                    cdiv(blocks, device.multiprocessors) * clocks)

    def _instructions(self, head_dim: int, span: int, copies: float) -> float:
        """Return those of a warp for a number of keys, and of copies of two vectors a lane."""
        if self.dtype == "f32":
            return self._wide_instructions(head_dim, span, copies)
        return 500 + span * (3.8 + head_dim / 36) + copies * 20

    # Float32: instructions of a key, and of it and a feature, with three products and with one; the
    # wait for fragments, as if these were instructions, of a key and a feature.
    WIDE: ClassVar[tuple[tuple[float, float], tuple[float, float]]] = ((10.3, 0.38), (10.6, 0.078))
    WIDE_WAIT = 0.23

    def _wide_instructions(self, head_dim: int, span: int, copies: float) -> float:
        key, feature = self.WIDE[self.tf32]
        work = max(key + feature * head_dim, self.WIDE_WAIT * head_dim)
        return 600 + span * work + copies * (64 if self.tf32 else 20)  # rounded by who copies

    def _further(self, problem: Problem) -> tuple[str, ...]:
        """Return further lines of the kernel's configuration."""
        if self.dtype == "f32":
            return (f"static constexpr bool kTf32 = {str(self.tf32).lower()};",)
        return ()

    def _kernel(self, problem: Problem, tile: Tile) -> Kernel:
        rank, head_dim, heads = len(problem.space), problem.head_dim, self._heads(problem)
        shared, clip = problem.heads // problem.kv_heads, problem.boundary == "clip"
        alike = len({getattr(problem, name).strides for name in self.OTHERS}) == 1
        further = self._further(problem)
        axes = {"Box": tile.box, "Reach": tile.reach, "Dilation": _three(problem.dilation),
                "Window": _three(problem.kernel_size), "Stride": _three(problem.stride),
                "Causal": _three(problem.is_causal, 0)}
        # As in `Sight`: positions on the inner axes, and those of a chunk on the first one.
        pitch = math.prod(tile.reach[4 - rank:])
        outer = min((tile.keys + pitch - 2) // pitch + 1, tile.reach[3 - rank])
        bits = rank > 1 and sum(tile.reach[4 - rank:]) + outer <= 31
        inner = self._inner(problem)
        blocks = self._warps(problem) // tile.warps

        def join(x):
            return "x".join(map(str, x))

        name = (f"neighborhood_{self.PART}__{self.name}__d{head_dim}_h{heads}_g{shared}"
                + "".join(f"_{what[0].lower()}{join(x[3 - rank:])}" for what, x in axes.items())
                + f"_n{tile.keys}x{tile.stages}_b{blocks}" + "_clip" * clip + "_alike" * alike)
        return Kernel(
            name=name, source=self.SOURCE, function=self.FUNCTION,
            params="NeighborhoodParams",
            config=(f"using T = {CTYPE[self.dtype]};",
                    f"static constexpr int kDim = {head_dim}, kRank = {rank};",
                    *(f"static constexpr int k{what}0 = {x[0]}, k{what}1 = {x[1]}, "
                      f"k{what}2 = {x[2]};" for what, x in axes.items()),
                    f"static constexpr int kKeys = {tile.keys}, kStages = {tile.stages};",
                    f"static constexpr int kHeads = {heads}, kShared = {shared};",
                    *further,
                    *(f"static constexpr bool k{what} = {str(on).lower()};" for what, on in
                      (("Clip", clip), ("Alike", alike), ("Bits", bits), ("Inner", inner)))),
            threads=32 * tile.warps, blocks=blocks)

    def kernels(self) -> tuple[Kernel, ...]:
        device = Device(0, "", (8, 0), 108, 163 << 10, 40 << 20)
        examples = [
            self._example((4096,), (7,), "clip"), self._example((4096,), (256,)),
            self._example((56, 56), (7, 7)), self._example((96, 96), (24, 24)),
            self._example((16, 32, 32), (8, 8, 8))]
        if self.dtype == "f32":
            examples = examples[2:3] if self.tf32 else examples[2::2]
        return tuple(self._kernel(x, tile) for x in few(self.dtype, examples)
                     if isinstance(tile := self._tile(x, device), Tile))

    def _example(self, space: tuple[int, ...], window: tuple[int, ...], boundary: str = "shift"
                 ) -> Problem:
        layout, ones = Layout((1, *space, 8, 64), self.dtype), (1,) * len(space)
        return Problem(layout, layout, layout, window, ones, ones, (False,) * len(space), 0.125,
                       boundary, "tf32" if self.tf32 else "fp32", dy=layout, y=layout)

    def notes(self, problem: Problem, device: Device) -> list[str]:
        tile, rank = self._tile(problem, device), len(problem.space)
        assert isinstance(tile, Tile)
        own, reach = ("x".join(map(str, x[3 - rank:])) for x in (tile.box, tile.reach))
        products = "" if self.dtype != "f32" else (
            ", one TF32 product" if self.tf32 else ", three TF32 products of split numbers")
        return [f"{self.PART}: blocks of {own} positions, 16 a warp, read boxes of at most "
                f"{reach}, {tile.keys} rows at a time{products}"]

    def program(self, problem: Problem, device: Device) -> Program:
        tile = self._tile(problem, device)
        assert isinstance(tile, Tile)
        buffers = ("q", "k", "v", "y", *(("lse",) if problem.return_lse else ()))
        shared = self._shared(problem.head_dim, len(problem.space), tile)
        return Program((Step(self._kernel(problem, tile), self._grid(problem, tile),
                             values(problem), {f"{name}.data": name for name in buffers},
                             shared=shared),))


def _name(row: BoxForward | BoxBackward) -> str:
    return f"box_{'tf32' if row.tf32 else row.dtype}"


def _sums(problem: Problem) -> Layout:
    """Return the layout of lse and delta, side by side; of float32, 1 / sum of weights, too."""
    return Layout((*problem.lse_layout.shape, 4 if problem.q.dtype == "f32" else 2), "f32")


@dataclass(frozen=True)
class BoxGradient(BoxForward):
    """A kernel of the backward."""

    SOURCE = "neighborhood_box_bwd.cu"
    BUFFERS: ClassVar[tuple[str, ...]] = ()
    # Up to which head_dim and rank: warps of a multiprocessor, whether their own rows stay in
    # registers, and how many times 16 rows of the other side a warp takes at once.
    REGISTERS: ClassVar[tuple[tuple[int, int, int, bool, int], ...]] = ()
    WIDE_REGISTERS = ((64, 3, 12, False, 1), (128, 3, 8, False, 1))  # of float32

    BOXES = {1: ((1, 1, 64), (1, 1, 128)),
             2: ((1, 8, 8), (1, 16, 4), (1, 4, 16), (1, 16, 8), (1, 8, 16)),
             3: ((4, 4, 4), (8, 4, 2), (8, 4, 4), (4, 4, 8))}

    def _registers(self, problem: Problem) -> tuple[int, bool, int]:
        limits = self.WIDE_REGISTERS if self.dtype == "f32" else self.REGISTERS
        return next((warps, held, units) for head_dim, rank, warps, held, units in limits
                    if problem.head_dim <= head_dim and len(problem.space) <= rank)

    def _warps(self, problem: Problem) -> int:
        return self._registers(problem)[0]

    def _further(self, problem: Problem) -> tuple[str, ...]:
        _, held, units = self._registers(problem)
        return (*super()._further(problem),
                f"static constexpr bool kHeld = {str(held).lower()};",
                f"static constexpr int kUnits = {units};",
                f"static constexpr float kEps = {self._eps}f;")

    @property
    def _eps(self) -> float:
        """Return what part of sum |ds| a sum of ds may be."""
        if self.dtype == "f32":
            return 2.0 ** -10 if self.tf32 else 2.0 ** -21
        return {"f16": 2.0 ** -10, "bf16": 2.0 ** -7}[self.dtype]

    def step(self, problem: Problem, device: Device) -> Step:
        """Return the launch."""
        tile = self._tile(problem, device)
        assert isinstance(tile, Tile)
        sums = token_view(_sums(problem))
        constants = {**values(problem),
                     **{f"delta.{field}": value for field, value in sums.items()}}
        buffers = (*self.BUFFERS, *(("dlse",) if problem.dlse and "lse" in self.BUFFERS else ()))
        shared = self._shared(problem.head_dim, len(problem.space), tile)
        return Step(self._kernel(problem, tile), self._grid(problem, tile), constants,
                    {f"{name}.data": name for name in buffers}, shared=shared)


@dataclass(frozen=True)
class BoxQueries(BoxGradient):
    """A box of queries per block: dq, and delta for the other kernel."""

    PART = "bwd_dq"
    FUNCTION = "neighborhood_box_dq"
    OWN = ("q", "dy")
    READ = ("y",)
    BUFFERS = ("q", "k", "v", "dy", "y", "lse", "delta", "dq")
    REGISTERS = ((32, 2, 20, True, 1), (32, 3, 16, True, 1), (64, 3, 12, True, 1),
                 (96, 2, 8, True, 2), (128, 3, 8, True, 1))

    def _made(self, problem, tile):
        return (("dq", Layout(problem.q.shape, self.dtype), tile.box),)

    WIDE, WIDE_WAIT = ((14.5, 0.7), (11.5, 0.123)), 0.47

    def _instructions(self, head_dim: int, span: int, copies: float) -> float:
        if self.dtype == "f32":
            return self._wide_instructions(head_dim, span, copies)
        # Fragments come from shared memory at 128 bytes a clock: then schedulers wait.
        return 800 + span * max(4.6 + head_dim / 28, head_dim / 7) + copies * 20


@dataclass(frozen=True)
class BoxKeys(BoxGradient):
    """A box of keys per block, and the box of queries that see them: dk and dv."""

    PART = "bwd_dkdv"
    FUNCTION = "neighborhood_box_dkdv"
    OWN = ("k", "v")
    OTHERS = ("q", "dy")
    NUMBERS = 4
    BUFFERS = ("q", "k", "v", "dy", "lse", "delta", "dk", "dv")
    REGISTERS = ((32, 3, 16, True, 2), (64, 3, 12, True, 1),
                 (96, 3, 8, True, 2), (112, 3, 8, True, 1), (128, 3, 8, False, 2))

    def refuses(self, problem: Problem, device: Device) -> str | None:
        if problem.heads * max(problem.q.shape) > _LARGEST:  # heads that share one, too
            return f"q {problem.q.shape} has too many heads"
        return super().refuses(problem, device)

    def _made(self, problem, tile):
        return (("dk", Layout(problem.k.shape, self.dtype), tile.box),
                ("scratch", _sums(problem), tile.reach))

    def _chunks(self, problem, rows):
        if problem.heads == problem.kv_heads:
            return super()._chunks(problem, rows)
        return ((rows, 2), *self.CHUNKS)  # those of the next head come meanwhile

    @staticmethod
    def _reach(problem: Problem, box: tuple[int, ...]) -> tuple[int, int, int]:
        """Return how many query positions see the keys of a box, at most, on each axis."""
        return tuple(  # type: ignore
            max(_seeing(n, w, s, b, causal, problem.boundary == "clip")
                for n in {cdiv(length, d), max(length // d, 1)})
            for length, w, d, s, causal, b in
            zip(_three(problem.space), _three(problem.kernel_size), _three(problem.dilation),
                _three(problem.stride), _three(problem.is_causal, 0), box))

    WIDE, WIDE_WAIT = ((12.0, 0.955), (12.0, 0.165)), 0.56

    def _instructions(self, head_dim: int, span: int, copies: float) -> float:
        if self.dtype == "f32":
            return self._wide_instructions(head_dim, span, copies)
        return 600 + span * max(4.2 + head_dim / 20, head_dim / 5) + copies * 20


def _seeing(n: int, window: int, stride: int, box: int, causal: bool, clip: bool) -> int:
    """Return how many of n queries see keys of one box, at most; see `Axis` in window.cuh."""
    most = window + box + stride - 2
    if not causal and not clip:
        # Windows are moved inward, so keys near a border are seen from there on: those of the last
        # box with a key among the first `window`, and of the first one with a key of the last.
        first = (window - 1) // box * box
        end = max(first + box + window // 2 - stride // 2, 1)
        most = max(most, cdiv(end, stride) * stride)
        first = max(cdiv(n - window - box + 1, box), 0) * box
        start = max(first - window + window // 2 + 1 - stride // 2, 0) if first >= window else 0
        most = max(most, n - cdiv(start, stride) * stride)
    return min(most, n)


@dataclass(frozen=True)
class BoxBackward(Row):
    """Two kernels: of boxes of queries, then of boxes of keys."""

    dtype: str
    tf32: bool = False

    @property
    def name(self) -> str:
        return _name(self)

    @property
    def parts(self) -> tuple[BoxGradient, ...]:
        """Return the rows of the kernels."""
        return BoxQueries(self.dtype, self.tf32), BoxKeys(self.dtype, self.tf32)

    def refuses(self, problem: Problem, device: Device) -> str | None:
        return next((why for part in self.parts if (why := part.refuses(problem, device))), None)

    def kernels(self) -> tuple[Kernel, ...]:
        return tuple(kernel for part in self.parts for kernel in part.kernels())

    def notes(self, problem: Problem, device: Device) -> list[str]:
        return [note for part in self.parts for note in part.notes(problem, device)]

    def program(self, problem: Problem, device: Device) -> Program:
        return Program(tuple(part.step(problem, device) for part in self.parts),
                       {"delta": _sums(problem)})
