"""Multi-token attention, backward: the rows and their table."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TypeVar

from .._program import (CTYPE, FLOATS, ITEMSIZE, Device, Kernel, Layout, Program, Row, Step, cdiv,
                        few)
from .multi_token import (ACTIVATIONS, MAX_GRID, Plain, Problem, group_heads, statistics_blocks,
                          statistics_kernel, statistics_step, values, vector_of)

_AnyTile = TypeVar("_AnyTile", bound="_Tile")


@dataclass(frozen=True)
class RingBackward(Row):
    """Both gradients on matrix units, by blocks that walk down the rows: all is read once.

    A step's rows are those that its warps, `tasks` * 128 columns of a quad of heads each, hold in
    registers. Kernel size and heads of a group are compiled in.
    """

    dtype: str
    threads: int
    blocks: int  # on a multiprocessor
    tasks: int = 2
    heads: int = 4  # of a group, at most: more cost registers
    taps: int = 9  # of the kernel, at most: likewise

    MAX_COLUMNS = 7  # of taps

    @property
    def name(self) -> str:
        return (f"ring_{self.dtype}_t{self.threads}_b{self.blocks}_c{self.tasks * 128}"
                f"_h{self.heads}")

    def refuses(self, problem: Problem, device: Device) -> str | None:
        if problem.scores.dtype != self.dtype:
            return f"dtype {problem.scores.dtype} is not {self.dtype}"
        if problem.activation != "softmax":
            return f"activation {problem.activation} is not softmax"
        if problem.dilation != (1, 1) and max(problem.reach) > 0:
            return f"dilation {problem.dilation} is not 1"
        assert problem.dy is not None
        if not problem.scores.unit_last or not problem.dy.unit_last:
            return "scores or dy have no unit stride on the last axis"
        channels, outputs = group_heads(problem)
        kh, kw = problem.weight.shape[2:]
        if max(channels, outputs) > self.heads:
            return f"{max(channels, outputs)} heads in a group exceed {self.heads}"
        if kh * kw > self.taps or kw > self.MAX_COLUMNS:
            return f"kernel ({kh}, {kw}) exceeds {self.taps} taps or {self.MAX_COLUMNS} columns"
        if cdiv(outputs, 4) > 2 * cdiv(channels, 4) or self.threads // 32 % cdiv(channels, 4):
            return f"{channels} and {outputs} heads in a group do not share the warps evenly"
        if problem.seq > self._teams(problem) * self.tasks * 128:
            return f"seq {problem.seq} exceeds {self._teams(problem) * self.tasks * 128}"
        shared = self._shared(problem) + self._declared(problem)
        if shared > device.shared_memory:
            return f"{shared} bytes of shared memory exceed {device.shared_memory}"
        if problem.batch * problem.groups > MAX_GRID // 2:
            return f"{problem.batch * problem.groups} items and groups exceed a grid"
        return None

    def _teams(self, problem: Problem) -> int:
        return self.threads // 32 // cdiv(group_heads(problem)[0], 4)

    def _plane(self, problem: Problem) -> int:
        """Return the bytes of a plane of the ring, `Sizes::plane` in the source."""
        teams, kh = self._teams(problem), problem.weight.shape[2]
        return max((2 * (teams // line) + kh - 1) * (self.tasks * 16 * line + 1)
                   for line in range(1, teams + 1)) * cdiv(group_heads(problem)[1], 4) * 16

    def _shared(self, problem: Problem) -> int:
        channels, outputs = (cdiv(heads, 4) for heads in group_heads(problem))
        staged = self.threads * cdiv(outputs, channels) * self.tasks // 2 * 64
        return 4 * self._plane(problem) + staged

    def _declared(self, problem: Problem) -> int:
        """Return the bytes of shared memory that the source declares itself."""
        channels, outputs = (cdiv(heads, 4) for heads in group_heads(problem))
        kh, kw = problem.weight.shape[2:]
        span = (kw + 4) // 4 * 2
        parts = outputs * (kh // 2 * span + kh % 2 * span // 2)
        return (256 * channels * parts + self.threads // 32 * (48 + 128 * cdiv(outputs, channels))
                + 16)

    def _vector(self, problem: Problem) -> int:
        """Return how many elements an access may take."""
        assert problem.dy is not None
        return math.gcd(8, problem.seq, *(
            n for array in (problem.scores, problem.dy)
            for n in (array.align // 2, *array.strides[:-1])))

    def _parts(self, problem: Problem, device: Device) -> int:
        """Return into how many blocks the rows of an item and group are divided: one wave."""
        wave = device.multiprocessors * self.blocks
        return max(1, min(wave // (problem.batch * problem.groups), cdiv(problem.seq, 4)))

    def _kernel(self, problem: Problem) -> Kernel:
        (channels, outputs), (kh, kw) = group_heads(problem), problem.weight.shape[2:]
        vector = self._vector(problem)
        numbers = {"In": channels, "Out": outputs, "Kh": kh, "Kw": kw, "Vector": vector,
                   "Tasks": self.tasks, "Plane": self._plane(problem)}
        return Kernel(name=f"multi_token_bwd__{self.name}__h{channels}x{outputs}_k{kh}x{kw}"
                           f"_v{vector}",
                      source="multi_token_ring_bwd.cu", function="multi_token_ring_bwd",
                      params="MultiTokenParams",
                      config=(f"using T = {CTYPE[self.dtype]};",
                              *(f"static constexpr int k{k} = {n};" for k, n in numbers.items())),
                      threads=self.threads, blocks=self.blocks)

    def kernels(self) -> tuple[Kernel, ...]:
        """Return the kernels of a few common problems; others are compiled when they are met."""
        def problem(heads: int, kernel: int, seq: int) -> Problem:
            square = Layout((1, heads, seq, seq), self.dtype)
            return Problem(square, Layout((heads, heads, kernel, kernel), self.dtype), None,
                           square, 1, (1, 1), "same", "softmax")

        common = [problem(heads, kernel, seq)
                  for heads, kernel, seq in few(self.dtype, (
                      (self.heads, 3, 16), (self.heads, 3, 15), (self.heads, 5, 16)))
                  if kernel * kernel <= self.taps]
        return (*(self._kernel(one) for one in common),
                Plain(self.dtype, "softmax", True)._kernel("d_weight"))

    def program(self, problem: Problem, device: Device) -> Program:
        constant = values(problem)
        parts = self._parts(problem, device)
        chunks = constant["chunks"] = problem.batch * parts
        d_bias = ("d_bias",) if problem.bias else ()
        elements = math.prod(problem.weight.shape) + (problem.heads_out if problem.bias else 0)

        def step(kernel: Kernel, blocks: int, shared: int, *buffers: str) -> Step:
            return Step(kernel, (blocks, 1, 1), constant,
                        {name: name for name in (*buffers, *d_bias)}, shared=shared)

        return Program(
            (step(self._kernel(problem), chunks * problem.groups, self._shared(problem),
                  "scores", "weight", "dy", "d_scores", "partial"),
             step(Plain(self.dtype, "softmax", True)._kernel("d_weight"), elements, 0,
                  "partial", "d_weight")),
            {"partial": Layout((elements, chunks), "f32")})


@dataclass(frozen=True)
class HeadsBackward(Row):
    """Both gradients on matrix units, with all heads of a position side by side in shared memory.

    Row statistics, the sums of d_weight, which give the means of the rows too, then d_scores.
    Kernel size and heads of a group are compiled in.
    """

    dtype: str
    staged: bool  # scores wait in shared memory for their gradients

    MOST_TAPS = 9
    HEADS = 17, 32  # of a group, from .. to
    THREADS = 256

    @property
    def name(self) -> str:
        return f"heads_{self.dtype}_" + ("staged" if self.staged else "direct")

    def refuses(self, problem: Problem, device: Device) -> str | None:
        if problem.scores.dtype != self.dtype:
            return f"dtype {problem.scores.dtype} is not {self.dtype}"
        if problem.activation != "softmax":
            return f"activation {problem.activation} is not softmax"
        if problem.dilation != (1, 1) and max(problem.reach) > 0:
            return f"dilation {problem.dilation} is not 1"
        assert problem.dy is not None
        if not problem.scores.unit_last or not problem.dy.unit_last:
            return "scores or dy have no unit stride on the last axis"
        heads, taps = max(group_heads(problem)), math.prod(problem.weight.shape[2:])
        if not self.HEADS[0] <= heads <= self.HEADS[1]:
            return f"{heads} heads in a group are outside {self.HEADS}"
        if taps > self.MOST_TAPS:
            return f"kernel {problem.weight.shape[2:]} exceeds {self.MOST_TAPS} taps"
        if self.staged and _vector(problem) < 8:
            return "rows of scores or dy do not begin at 16-byte boundaries"
        shared = max(self._shared(problem, part) for part in ("weight", "scores"))
        if shared > device.shared_memory:
            return f"{shared} bytes of shared memory exceed {device.shared_memory}"
        if max(self._scores_blocks(problem), statistics_blocks(problem)) > MAX_GRID:
            return "blocks exceed a grid"
        return None

    @staticmethod
    def _scores_blocks(problem: Problem) -> int:
        spans, strips = cdiv(problem.seq, 256), cdiv(problem.seq, 8)
        return problem.batch * problem.groups * spans * strips

    def _shared(self, problem: Problem, part: str) -> int:
        """Return the bytes of shared memory of a block; the source asserts that they agree."""
        (kh, kw), taps = problem.weight.shape[2:], math.prod(problem.weight.shape[2:])
        rows, keys = (2, 128) if part == "weight" else (8, 64)
        blocks = cdiv(kw - 1 - kw // 2, 8) + keys // 8 + cdiv(kw // 2, 8)
        tile = (rows + kh - 1) * blocks * 512
        if part == "weight":
            return tile + rows * keys * 64 + taps * 4096 + rows * 256 + rows * 512
        return tile + taps * 2048 + rows * 512 + 16 + self.staged * self.THREADS * 128

    def _kernel(self, problem: Problem, part: str) -> Kernel:
        (channels, outputs), (kh, kw) = group_heads(problem), problem.weight.shape[2:]
        vector = _vector(problem)
        numbers = {"In": channels, "Out": outputs, "Kh": kh, "Kw": kw, "Vector": vector}
        config = [f"using T = {CTYPE[self.dtype]};"]
        tag = f"h{channels}x{outputs}_k{kh}x{kw}"
        if part != "table":
            tag += f"_v{vector}"
            numbers["Shared"] = self._shared(problem, part)
        if part == "scores":
            config.append(f"static constexpr bool kStaged = {str(self.staged).lower()};")
        return Kernel(name=f"multi_token_bwd__{self.name}_{part}__{tag}",
                      source="multi_token_heads_bwd.cu", function=f"multi_token_heads_{part}",
                      params="MultiTokenParams",
                      config=(*config, *(f"static constexpr int k{k} = {n};"
                                         for k, n in numbers.items())),
                      threads=self.THREADS,
                      blocks=2 if part != "table" and vector == 8 and kh <= 3 else 1)

    def kernels(self) -> tuple[Kernel, ...]:
        """Return the kernels of a few common problems; others are compiled when they are met."""
        def problem(heads: int, seq: int) -> Problem:
            square = Layout((1, heads, seq, seq), self.dtype)
            return Problem(square, Layout((heads, heads, 3, 3), self.dtype), None, square, 1,
                           (1, 1), "same", "softmax")

        sizes = few(self.dtype, ((32, 16), (24, 16)) if self.staged else ((32, 15), (24, 16)))
        common = [problem(heads, seq) for heads, seq in sizes]
        return (statistics_kernel(common[0]),
                *(self._kernel(one, part) for one in common
                  for part in ("table", "weight", "scores")),
                Plain(self.dtype, "softmax", True)._kernel("d_weight"))

    def program(self, problem: Problem, device: Device) -> Program:
        constant, taps = values(problem), math.prod(problem.weight.shape[2:])
        chunks = constant["chunks"] = max(1, min(
            problem.batch * cdiv(problem.seq, 2), 2 * device.multiprocessors // problem.groups))
        d_bias = ("d_bias",) if problem.bias else ()
        elements = math.prod(problem.weight.shape) + (problem.heads_out if problem.bias else 0)
        words = taps * 256  # of 16 bytes, of the table of a group

        def step(kernel: Kernel, blocks: int, shared: int, *buffers: str) -> Step:
            return Step(kernel, (blocks, 1, 1), constant, {name: name for name in buffers},
                        shared=shared)

        known = ("shift", "factor")
        return Program(
            (statistics_step(problem),
             step(self._kernel(problem, "table"), problem.groups * cdiv(words, self.THREADS), 0,
                  "weight", "table"),
             step(self._kernel(problem, "weight"), problem.groups * chunks,
                  self._shared(problem, "weight"), "scores", "dy", *known, "table", "mean",
                  "partial", *d_bias),
             step(self._kernel(problem, "scores"), self._scores_blocks(problem),
                  self._shared(problem, "scores"), "scores", "dy", *known, "table", "mean",
                  "d_scores"),
             step(Plain(self.dtype, "softmax", True)._kernel("d_weight"), elements, 0,
                  "partial", "d_weight", *d_bias)),
            {**{name: problem.statistics_layout for name in (*known, "mean")},
             "table": Layout((problem.groups, words * 4), "f32"),
             "partial": Layout((elements, chunks), "f32")})


def _vector(problem: Problem) -> int:
    """Return how many elements of scores and dy an access may take, at most 16 bytes."""
    assert problem.dy is not None
    dy = problem.dy
    return math.gcd(vector_of(problem), dy.align // 2, *dy.strides[:-1])


@dataclass(frozen=True)
class _Tile:
    """Sizes of one of the two kernels of a problem: the names of its compile-time values."""

    channels: int  # heads of the scores that a thread has
    rows: int  # queries of a strip
    outputs: int = 0  # heads of dy in shared memory at a time
    shared: int = 0  # bytes

    def filled(self: _AnyTile, problem: Problem, outputs: int, extra: int) -> _AnyTile:
        """Return the same with `outputs` of dy in a tile, and `extra` floats beside them."""
        (kh, kw), step = problem.weight.shape[2:], problem._dilation[1]
        reach = (kw - 1) * step
        skip = (kw // 2 * step - reach) % 4
        width = cdiv(skip + reach + 128, 4) * 4
        floats = outputs * (self.rows + kh - 1) * width + extra
        return replace(self, outputs=outputs, shared=4 * floats)


@dataclass(frozen=True)
class _Scores(_Tile):
    tiles: int = 1  # of channels, in a block
    table: int = 0  # outputs whose weights are in shared memory

    @property
    def threads(self) -> int:
        return 32 * self.rows * self.tiles


@dataclass(frozen=True)
class _Weight(_Tile):
    taps: int = 1  # in a piece: neighbours in a row of the kernel
    pieces: int = 1  # of a warp
    sets: int = 1  # of pieces, in a block
    splits: int = 1  # warps that share a set

    @property
    def threads(self) -> int:
        return 32 * self.sets * self.splits


@dataclass(frozen=True)
class TileBackward(Row):
    """A block per strip of rows for d_scores, per element and chunk of strips for d_weight.

    Products in float32 on CUDA cores, dy in shared memory. Kernel size, the columns' dilation and
    what follows from the heads of a group are compiled in.
    """

    dtype: str
    activation: str
    shared: int = 104 << 10  # bytes of a block, unless one head of dy needs more

    # Sums of a thread in the pass over d_weight: those of a warp's pieces, of one piece.
    SUMS = 72, 80

    @property
    def name(self) -> str:
        return f"tile_{self.dtype}_{self.activation}_s{self.shared // 1024}"

    def refuses(self, problem: Problem, device: Device) -> str | None:
        if problem.scores.dtype != self.dtype:
            return f"dtype {problem.scores.dtype} is not {self.dtype}"
        if problem.activation != self.activation:
            return f"activation {problem.activation} is not {self.activation}"
        if max(problem.reach) >= 2**30 or problem.seq >= 2**27:
            return f"taps lie {max(problem.reach)} apart, or there are 2**27 keys or more"
        shared = max(self._scores(problem, device).shared, self._weight(problem).shared)
        if shared > device.shared_memory:
            return f"{shared} bytes of shared memory exceed {device.shared_memory}"
        blocks = self._scores_blocks(problem, self._scores(problem, device))
        if max(blocks, self._weight_blocks(problem, device)[0]) > MAX_GRID:
            return "blocks exceed a grid"
        return None

    @staticmethod
    def _channels(heads: int, sizes: tuple[int, ...]) -> int:
        """Return how many heads a thread takes: few passes, few heads that do not exist."""
        return min(sizes, key=lambda size: cdiv(heads, size) * (size + 2))

    @staticmethod
    def _strips(problem: Problem, rows: int) -> int:
        step = problem._dilation[0]
        return cdiv(problem.seq, rows * step) * step

    def _scores(self, problem: Problem, device: Device) -> _Scores:
        channels, outputs = group_heads(problem)
        kernel = problem.weight.shape[2:]
        size = self._channels(channels, (8, 4, 2, 1))
        many = cdiv(channels, size)
        tiles = cdiv(many, cdiv(many, 8))
        rows = 8 // tiles
        # A short sequence has more blocks with fewer rows.
        pairs = problem.batch * problem.groups * cdiv(many, tiles)
        while rows > 2 and pairs * self._strips(problem, rows) < 2 * device.multiprocessors:
            rows //= 2
        # All weights stay in shared memory if they leave half of it to dy. Then few turns of
        # equal size over the outputs, as fit; one output at least.
        floats = math.prod(kernel) * tiles * size  # of an output
        whole = 4 * floats * outputs <= self.shared // 2
        for turns in range(1, outputs + 1):
            some = cdiv(outputs, turns)
            table = outputs if whole else some
            tile = _Scores(size, rows, tiles=tiles, table=table).filled(
                problem, some, floats * table)
            if tile.shared <= self.shared:
                break
        return tile

    def _weight(self, problem: Problem) -> _Weight:
        channels, outputs = group_heads(problem)
        kernel = problem.weight.shape[2:]
        of_warp, of_piece = self.SUMS
        taps = kernel[1] if kernel[1] <= 12 else 8
        size = self._channels(channels, tuple(n for n in (8, 4, 2, 1) if n * taps <= of_piece))
        per_output = kernel[0] * cdiv(kernel[1], taps)
        pieces = outputs * per_output
        sets = cdiv(pieces, max(1, of_warp // (taps * size)))
        each = cdiv(pieces, sets)
        sets = cdiv(sets, cdiv(sets, 8))
        first = range(0, pieces, sets * each)
        most = max((min(n + sets * each, pieces) - 1) // per_output - n // per_output + 1
                   for n in first)
        for rows in (8, 4, 2, 1):
            tile = _Weight(size, rows, taps=taps, pieces=each, sets=sets,
                           splits=min(8 // sets, rows))
            filled = tile.filled(problem, most, size * rows * 128)
            if filled.shared <= self.shared:
                break
        return filled

    def _scores_blocks(self, problem: Problem, tile: _Scores) -> int:
        sets = cdiv(group_heads(problem)[0], tile.tiles * tile.channels)
        return problem.batch * problem.groups * sets * self._strips(problem, tile.rows)

    def _weight_blocks(self, problem: Problem, device: Device) -> tuple[int, int]:
        """Return the blocks of the pass over d_weight, and the chunks of strips among them."""
        tile = self._weight(problem)
        channels, outputs = group_heads(problem)
        pieces = outputs * problem.weight.shape[2] * cdiv(problem.weight.shape[3], tile.taps)
        elements = (problem.groups * cdiv(channels, tile.channels)
                    * cdiv(pieces, tile.sets * tile.pieces))
        strips = problem.batch * self._strips(problem, tile.rows)
        # Blocks for four turns of a device; sums of a few hundred rows at most stay accurate.
        chunks = min(strips, max(cdiv(8 * device.multiprocessors, elements),
                                 cdiv(strips * tile.rows, 256)))
        return elements * chunks, chunks

    def _vector(self, problem: Problem) -> int:
        """Return how many elements an access of scores and dy may take, at most four."""
        assert problem.dy is not None
        size, vector = ITEMSIZE[self.dtype], math.gcd(4, problem.seq)
        for array in (problem.scores, problem.dy):
            unit = vector if array.unit_last else 1
            vector = math.gcd(unit, array.align // size, *array.strides[:-1])
        return vector

    def _kernel(self, problem: Problem, tile: _Scores | _Weight) -> Kernel:
        (kh, kw), step = problem.weight.shape[2:], problem._dilation[1]
        vector = self._vector(problem)
        sparsemax = "true" if self.activation == "sparsemax" else "false"
        numbers = {"Vector": vector, "Kh": kh, "Kw": kw, "KeyStep": step, "Rows": tile.rows,
                   "Channels": tile.channels, "Outputs": tile.outputs, "Shared": tile.shared}
        tag = f"k{kh}x{kw}_d{step}_v{vector}_r{tile.rows}_c{tile.channels}x"
        if isinstance(tile, _Scores):
            part = "scores"
            numbers |= {"Tiles": tile.tiles, "Table": tile.table}
            tag += f"{tile.tiles}_o{tile.outputs}_w{tile.table}"
        else:
            part = "weight"
            numbers |= {"Pieces": tile.pieces, "Taps": tile.taps, "Splits": tile.splits}
            tag += f"{tile.pieces}_t{tile.taps}_o{tile.outputs}_w{tile.sets}x{tile.splits}"
        # 16 warps a multiprocessor: 128 registers a thread.
        return Kernel(name=f"multi_token_bwd__{self.name}_{part}__{tag}",
                      source="multi_token_tile_bwd.cu", function=f"multi_token_tile_{part}",
                      params="MultiTokenParams",
                      config=(f"using T = {CTYPE[self.dtype]};",
                              f"static constexpr bool kSparsemax = {sparsemax};",
                              *(f"static constexpr int k{k} = {n};" for k, n in numbers.items())),
                      threads=tile.threads, blocks=max(1, 512 // tile.threads))

    def kernels(self) -> tuple[Kernel, ...]:
        """Return the kernels of a few common problems; others are compiled when they are met."""
        device = Device(0, "", (9, 0), 132, 227 << 10, 50 << 20)
        kernels = []
        sizes = few(self.dtype, ((4, 3, 1024), (4, 7, 1023), (32, 3, 2048)))
        if self.activation == "sparsemax":  # another statistic, and then the same code
            sizes = sizes[:1]
        for heads, kernel, seq in sizes:
            square = Layout((2, heads, seq, seq), self.dtype)
            problem = Problem(square, Layout((heads, heads, kernel, kernel), self.dtype), None,
                              square, 1, (1, 1), "same", self.activation)
            kernels += [self._kernel(problem, self._scores(problem, device)),
                        self._kernel(problem, self._weight(problem))]
        plain = Plain(self.dtype, self.activation, True)
        return (plain._kernel("statistics"), *dict.fromkeys(kernels), plain._kernel("d_weight"))

    def program(self, problem: Problem, device: Device) -> Program:
        scores, weight = self._scores(problem, device), self._weight(problem)
        blocks, chunks = self._weight_blocks(problem, device)
        chunks *= weight.splits
        constant = {**values(problem), "chunks": chunks}
        plain = Plain(self.dtype, self.activation, True)
        d_bias = ("d_bias",) if problem.bias else ()
        elements = math.prod(problem.weight.shape) + (problem.heads_out if problem.bias else 0)
        statistics = problem.batch * problem.heads_in * problem.seq

        def step(kernel: Kernel, blocks: int, shared: int, *buffers: str) -> Step:
            return Step(kernel, (min(blocks, MAX_GRID), 1, 1), constant,
                        {name: name for name in buffers}, shared=shared)

        return Program(
            (step(plain._kernel("statistics"), statistics, 0, "scores", "shift", "factor"),
             step(self._kernel(problem, scores), self._scores_blocks(problem, scores),
                  scores.shared, "scores", "shift", "factor", "weight", "dy", "d_scores"),
             step(self._kernel(problem, weight), blocks, weight.shared, "scores", "shift",
                  "factor", "dy", "partial", *d_bias),
             step(plain._kernel("d_weight"), elements, 0, "partial", "d_weight", *d_bias)),
            {"shift": problem.statistics_layout, "factor": problem.statistics_layout,
             "partial": Layout((elements, chunks), "f32")})


# In the order of speed where several can. Tiles take what matrix units do not.
BACKWARD = (
    *(row for dtype in ("bf16", "f16") for row in (
        RingBackward(dtype, 256, 2),
        RingBackward(dtype, 512, 1),
        RingBackward(dtype, 256, 1, taps=49),
        RingBackward(dtype, 384, 1, heads=8),
        RingBackward(dtype, 256, 1, tasks=4, heads=8),
        RingBackward(dtype, 256, 1, tasks=4, heads=16),
        HeadsBackward(dtype, staged=True),
        HeadsBackward(dtype, staged=False))),
    *(TileBackward(dtype, activation) for dtype in ("bf16", "f16", "f32")
      for activation in ACTIVATIONS),
    *(Plain(dtype, activation, True) for dtype in FLOATS for activation in ACTIVATIONS),
)
