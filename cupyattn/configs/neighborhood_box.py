"""Neighborhood attention on matrix units by warp (kernels/neighborhood_box_fwd.cu)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .._program import CTYPE, Device, Kernel, Layout, Program, Row, Step, cdiv, few
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

    DIMS = (16, 32, 48, 64, 80, 96, 112, 128)
    BOXES = {1: ((1, 1, 64), (1, 1, 128)),
             2: ((1, 8, 8), (1, 16, 4), (1, 4, 16), (1, 16, 8), (1, 8, 16), (1, 16, 16)),
             3: ((4, 4, 4), (8, 4, 2), (8, 4, 4), (4, 4, 8), (8, 8, 4), (4, 8, 8))}
    CHUNKS = ((128, 3), (128, 2), (64, 3), (64, 2), (32, 2))  # rows, and how many at once
    HELD = 216 << 10  # bytes of shared memory that blocks of a multiprocessor share

    @property
    def name(self) -> str:
        return f"box_{self.dtype}"

    def refuses(self, problem: Problem, device: Device) -> str | None:
        head_dim = problem.head_dim
        if problem.q.dtype != self.dtype:
            return f"dtype {problem.q.dtype} is not {self.dtype}"
        if problem.value_dim != head_dim:
            return f"value_dim {problem.value_dim} is not head_dim {head_dim}"
        if head_dim not in self.DIMS:
            return f"head_dim {head_dim} is not among {self.DIMS}"
        if max(problem.space) >= 2**31:
            return f"a space extent of {max(problem.space)} exceeds {_LARGEST}"
        if problem.scale and not 1e-30 < abs(problem.scale) < 1e30:
            return f"scale {problem.scale} is not 0 and not between 1e-30 and 1e30 in size"
        for name in ("q", "k", "v"):
            layout = getattr(problem, name)
            if not rows_aligned(layout):
                return f"{name} has rows that do not start at multiples of {_VECTOR} bytes"
        tile = self._tile(problem, device)
        if isinstance(tile, str):
            return tile
        for name, extents in (("q", tile.box), ("k", tile.reach), ("v", tile.reach),
                              ("y_layout", tile.box)):
            steps = _three(getattr(problem, name).strides[1:-2], 0)
            # Of positions, not of tokens: an axis of one may have any stride.
            length = sum(abs(s) * d * (min(n, cdiv(size, d)) - 1) for s, d, n, size in
                         zip(steps, _three(problem.dilation), extents, _three(problem.space))) * 2
            if length > _LARGEST:
                return f"a tile of {name} is {length} bytes long, more than {_LARGEST}"
        grid = self._grid(problem, tile)
        if grid[0] > _LARGEST or max(grid[1:]) > _GRID:
            return f"a grid of {grid} blocks exceeds {_LARGEST}, {_GRID}, {_GRID}"
        return None

    @staticmethod
    def _grid(problem: Problem, tile: Tile) -> tuple[int, int, int]:
        tiles = [d * cdiv(cdiv(length, d), b) for length, d, b in
                 zip(_three(problem.space), _three(problem.dilation), tile.box)]
        return tiles[2] * problem.heads, tiles[1], tiles[0] * problem.batch

    @staticmethod
    def _reach(problem: Problem, box: tuple[int, ...]) -> tuple[int, int, int]:
        """Return how many key positions the queries of a box see, at most, on each axis."""
        return tuple(min(w + b + s - 2, cdiv(length, d)) for length, w, d, s, b in  # type: ignore
                     zip(_three(problem.space), _three(problem.kernel_size),
                         _three(problem.dilation), _three(problem.stride), box))

    def _shared(self, head_dim: int, rank: int, tile: Tile) -> int:
        rows = math.prod(tile.box) + 2 * tile.stages * tile.keys
        return rows * head_dim * 2 + (tile.stages * tile.keys * 4 if rank > 1 else 0)

    def _inner(self, problem: Problem) -> bool:
        """Return whether a warp meets many keys that all of its queries see."""
        return len(problem.space) == 1 and problem.kernel_size[0] + problem.stride[0] >= 49

    def _warps(self, problem: Problem) -> int:
        """Return how many warps of a multiprocessor have enough registers."""
        few = len(problem.space) < 3 and not self._inner(problem)
        if problem.head_dim <= 32:
            return 28 if few else 24
        if problem.head_dim <= 64:
            return 20 if few else 16
        return 16 if problem.head_dim <= 80 else 12

    def _tile(self, problem: Problem, device: Device) -> Tile | str:
        """Return the tile of least cost, or why there is none."""
        tiles = [self._fitted(problem, device, box) for box in self.BOXES[len(problem.space)]
                 if math.prod(box) <= 16 * self._warps(problem)]
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
        for keys, stages in ((rows, 1), *self.CHUNKS):  # if need be the smallest chunks
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
        cost = (500 + span * (3.8 + head_dim / 36) + rows * head_dim / 8 / (32 * warps) * 20)
        cost *= 1 + 2 / (most // warps * warps)  # the fewer warps, the more they wait for memory
        # Clocks of a block: warps share four schedulers, at best three quarters busy; copies come
        # from L2 at 24 bytes a clock. Warps of a block wait for each other.
        work, copies = warps * cost / 3, rows * head_dim * 4 / 24
        clocks = max(work, copies) + 0.1 * min(work, copies) + 10 * warps
        if most // warps == 1:  # nobody works while the block waits
            clocks *= 1.2
        blocks = math.prod(self._grid(problem, tile))
        return Tile(box, reach, tile.keys, tile.stages,
                    cdiv(blocks, device.multiprocessors) * clocks)

    def _kernel(self, problem: Problem, tile: Tile) -> Kernel:
        rank, head_dim, heads = len(problem.space), problem.head_dim, problem.heads
        shared, clip = heads // problem.kv_heads, problem.boundary == "clip"
        alike = problem.k.strides == problem.v.strides
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

        name = (f"neighborhood_fwd__{self.name}__d{head_dim}_h{heads}_g{shared}"
                + "".join(f"_{what[0].lower()}{join(x[3 - rank:])}" for what, x in axes.items())
                + f"_n{tile.keys}x{tile.stages}_b{blocks}" + "_clip" * clip + "_alike" * alike)
        return Kernel(
            name=name, source="neighborhood_box_fwd.cu", function="neighborhood_box_forward",
            params="NeighborhoodParams",
            config=(f"using T = {CTYPE[self.dtype]};",
                    f"static constexpr int kDim = {head_dim}, kRank = {rank};",
                    *(f"static constexpr int k{what}0 = {x[0]}, k{what}1 = {x[1]}, "
                      f"k{what}2 = {x[2]};" for what, x in axes.items()),
                    f"static constexpr int kKeys = {tile.keys}, kStages = {tile.stages};",
                    f"static constexpr int kHeads = {heads}, kShared = {shared};",
                    *(f"static constexpr bool k{what} = {str(on).lower()};" for what, on in
                      (("Clip", clip), ("Alike", alike), ("Bits", bits), ("Inner", inner)))),
            threads=32 * tile.warps, blocks=blocks)

    def kernels(self) -> tuple[Kernel, ...]:
        device = Device(0, "", (8, 0), 108, 163 << 10, 40 << 20)
        examples = (
            self._example((4096,), (7,), "clip"), self._example((4096,), (256,)),
            self._example((56, 56), (7, 7)), self._example((96, 96), (24, 24)),
            self._example((16, 32, 32), (8, 8, 8)))
        return tuple(self._kernel(x, tile) for x in few(self.dtype, examples)
                     if isinstance(tile := self._tile(x, device), Tile))

    def _example(self, space: tuple[int, ...], window: tuple[int, ...], boundary: str = "shift"
                 ) -> Problem:
        layout, ones = Layout((1, *space, 8, 64), self.dtype), (1,) * len(space)
        return Problem(layout, layout, layout, window, ones, ones, (False,) * len(space), 0.125,
                       boundary)

    def program(self, problem: Problem, device: Device) -> Program:
        tile = self._tile(problem, device)
        assert isinstance(tile, Tile)
        buffers = ("q", "k", "v", "y", *(("lse",) if problem.return_lse else ()))
        shared = self._shared(problem.head_dim, len(problem.space), tile)
        return Program((Step(self._kernel(problem, tile), self._grid(problem, tile),
                             values(problem), {f"{name}.data": name for name in buffers},
                             shared=shared),))
