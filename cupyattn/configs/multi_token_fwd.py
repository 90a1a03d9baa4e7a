"""Multi-token attention, forward: the rows and their table."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .._program import CTYPE, FLOATS, Device, Kernel, Layout, Program, Row, Step, cdiv, few
from .multi_token import (ACTIVATIONS, MAX_GRID, Plain, Problem, group_heads, statistics_blocks,
                          statistics_kernel, statistics_step, values, vector_of)


def _register_blocks(blocks: int, problem: Problem) -> int:
    """Return how many blocks a multiprocessor should hold: two where more would spill."""
    easy = vector_of(problem) == 8 and math.prod(problem.weight.shape[2:]) <= 9
    return blocks if easy else min(blocks, 2)


def _ring_plane(seq: int, quads: int, warps: int, kh: int) -> int:
    """Return the bytes of a plane of the ring: RingShape in the source, for any width of rows.

    A kernel is compiled for each value, so rows count as the next power of two of 256 columns.
    """
    most = 0
    for per_line in range(1, 2 ** (cdiv(seq, 256) - 1).bit_length() + 1):
        slots = max(1, warps // (per_line * quads)) + kh - 1
        most = max(most, slots * (per_line * 32 + 2) * 16)
    return most


def _parts(problem: Problem, device: Device, blocks: int, least: int) -> int:
    """Return into how many blocks to divide the rows of a group, `least` rows or more each.

    `blocks` of them fit a multiprocessor: one wave of them, or many.
    """
    pairs, slots = problem.batch * problem.groups, device.multiprocessors * blocks
    most = max(1, problem.seq // least)
    if pairs >= slots // 2:  # whole waves do not come out: make the last one small
        return min(most, cdiv(8 * slots, pairs))
    return min(most, slots // pairs)


class Compiled(Row):
    """What the rows share whose kernels have heads of a group and kernel size compiled in."""

    dtype: str

    def refuses(self, problem: Problem, device: Device) -> str | None:
        if problem.scores.dtype != self.dtype:
            return f"dtype {problem.scores.dtype} is not {self.dtype}"
        if not problem.scores.unit_last:
            return "scores have no unit stride on the last axis"
        reason = self._mismatch(problem)
        if reason is None and self._shared(problem) > device.shared_memory:
            return f"{self._shared(problem)} bytes of shared memory exceed {device.shared_memory}"
        return reason

    def _mismatch(self, problem: Problem) -> str | None:
        """Return why this row cannot do scores of its dtype on any device, or None."""
        raise NotImplementedError

    def _shared(self, problem: Problem) -> int:
        """Return the bytes of shared memory of a block."""
        raise NotImplementedError

    @staticmethod
    def _buffers(problem: Problem) -> dict[str, str]:
        """Return the buffers of a kernel that computes the statistics of softmax itself."""
        more = [("bias", problem.bias), *((name, problem.activation == "sparsemax")
                                          for name in ("shift", "factor"))]
        return {name: name for name in ("scores", "weight", "y", *(n for n, on in more if on))}

    def _before(self, problem: Problem, device: Device) -> Program:
        """Return the plain row's statistics for sparsemax, nothing for softmax."""
        if problem.activation == "softmax":
            return Program(())
        plain = Plain(self.dtype, "sparsemax", False).program(problem, device)
        return Program(plain.steps[:1], plain.scratch)


@dataclass(frozen=True)
class RingForward(Compiled):
    """A block walks down its rows, with P of the rows that taps reach in shared memory.

    Scores are read once. Kernel and heads of a group are compiled in. Sparsemax has the plain
    row's statistics, computed before.
    """

    dtype: str
    threads: int
    blocks: int  # that a multiprocessor should hold
    least: int  # rows of a block
    slope: float  # cost of a row: 1 + 2 slope row / seq
    ahead: bool  # scores of a step are asked for before the products of the step before
    heads: tuple[int, int] = (1, 4)  # of a group, from .. to
    to_seq: int = 2**31  # longer ones are left to the next row

    MOST_TAPS = 128

    @property
    def name(self) -> str:
        return f"ring_{self.dtype}_t{self.threads}_b{self.blocks}_h{self.heads[1]}"

    def _mismatch(self, problem: Problem) -> str | None:
        if problem.seq > self.to_seq:
            return f"seq {problem.seq} is above {self.to_seq}"
        kh, kw = problem.weight.shape[2:]
        if problem._dilation != (1, 1) and max(kh, kw) > 1:
            return f"dilation {problem.dilation} is not 1"
        if kh * kw > self.MOST_TAPS:
            return f"kernel ({kh}, {kw}) has more than {self.MOST_TAPS} taps"
        channels, outputs = group_heads(problem)
        if not self.heads[0] <= max(channels, outputs) <= self.heads[1]:
            return f"{max(channels, outputs)} heads in a group are outside {self.heads}"
        warps = cdiv(problem.seq, 256) * cdiv(channels, 4)
        if warps > self.threads // 32:
            return f"a row of {channels} heads of {problem.seq} takes {warps} warps"
        if problem.batch * problem.groups * problem.seq > MAX_GRID:
            return "rows exceed a grid"
        return None

    def _plane(self, problem: Problem) -> int:
        return _ring_plane(problem.seq, cdiv(group_heads(problem)[0], 4), self.threads // 32,
                           problem.weight.shape[2])

    def _shared(self, problem: Problem) -> int:
        (channels, outputs), (kh, kw) = group_heads(problem), problem.weight.shape[2:]
        warps, quads, tiles = self.threads // 32, cdiv(channels, 4), cdiv(outputs, 4)
        steps = cdiv(kh * quads * ((kw + 2) // 2), 2)
        poison = (warps + kh) * quads * 4 // 16 * 16 + 16
        return (steps * tiles * 256 + tiles * 16 + warps * 32 + poison
                + 4 * quads * self._plane(problem))

    def _kernel(self, problem: Problem) -> Kernel:
        (channels, outputs), (kh, kw) = group_heads(problem), problem.weight.shape[2:]
        vector, sparsemax = vector_of(problem), problem.activation == "sparsemax"
        numbers = {"Channels": channels, "Outputs": outputs, "Kh": kh, "Kw": kw, "Vector": vector,
                   "Plane": self._plane(problem)}
        return Kernel(name=f"multi_token_fwd__{self.name}__h{channels}x{outputs}_k{kh}x{kw}"
                           f"_v{vector}" + ("_sparsemax" if sparsemax else ""),
                      source="multi_token_ring_fwd.cu", function="multi_token_ring",
                      params="MultiTokenParams",
                      config=(f"using T = {CTYPE[self.dtype]};",
                              f"static constexpr bool kSparsemax = {str(sparsemax).lower()};",
                              f"static constexpr float kSlope = {self.slope}f, kFlat = 1;",
                              f"static constexpr bool kAhead = {str(self.ahead).lower()};",
                              *(f"static constexpr int k{k} = {n};" for k, n in numbers.items())),
                      threads=self.threads, blocks=_register_blocks(self.blocks, problem))

    def kernels(self) -> tuple[Kernel, ...]:
        """Return the kernels of a few common problems; others are compiled when they are met."""
        heads = self.heads[1]
        common = few(self.dtype, (("softmax", 3, 16), ("softmax", 5, 15), ("sparsemax", 3, 16)))
        problems = [Problem(Layout((1, heads, seq, seq), self.dtype),
                            Layout((heads, heads, kernel, kernel), self.dtype), None, None, 1,
                            (1, 1), "same", activation)
                    for activation, kernel, seq in common]
        return (*(self._kernel(problem) for problem in problems if not self._mismatch(problem)),
                Plain(self.dtype, "sparsemax", False)._kernel("statistics"))

    def program(self, problem: Problem, device: Device) -> Program:
        shared = self._shared(problem)
        fit = max(1, (device.shared_memory + 1024) // (shared + 1024))
        parts = _parts(problem, device, min(self.blocks, fit), self.least)
        return self._before(problem, device) + Program((Step(
            self._kernel(problem), (problem.batch * problem.groups * parts, 1, 1),
            {**values(problem), "chunks": parts}, self._buffers(problem), shared=shared),))


def _round_up(x: int, step: int) -> int:
    return cdiv(x, step) * step


@dataclass(frozen=True)
class Band(Compiled):
    """A warp walks down a band of 128 keys, with P of the rows that taps reach in shared memory.

    The statistics of the rows of scores have a kernel of their own, for sparsemax the plain row's.
    Kernel and heads of a group are compiled in.
    """

    dtype: str
    threads: int
    blocks: int  # that a multiprocessor should hold: bounds the registers
    rows: int  # of a warp's task
    heads: int = 4  # of a group, at most

    MOST_TAPS = 128

    @property
    def name(self) -> str:
        return f"band_{self.dtype}_t{self.threads}_b{self.blocks}_h{self.heads}"

    def _mismatch(self, problem: Problem) -> str | None:
        kh, kw = problem.weight.shape[2:]
        if problem._dilation != (1, 1) and max(kh, kw) > 1:
            return f"dilation {problem.dilation} is not 1"
        if kh * kw > self.MOST_TAPS or max(kh, kw) > 16:
            return f"kernel ({kh}, {kw}) exceeds {self.MOST_TAPS} taps or 16 in an axis"
        heads = max(group_heads(problem))
        if heads > self.heads:
            return f"{heads} heads in a group exceed {self.heads}"
        if self._blocks(problem) > MAX_GRID or statistics_blocks(problem) > MAX_GRID:
            return "tasks exceed a grid"
        return None

    def _blocks(self, problem: Problem) -> int:
        pairs = problem.batch * problem.groups
        tasks = cdiv(problem.seq, self.rows) * cdiv(problem.seq, 128)
        return pairs * cdiv(tasks, self.threads // 32)

    def _shared(self, problem: Problem) -> int:
        """Return the bytes of struct Band in the source, which asserts that they agree."""
        (channels, outputs), (kh, kw) = group_heads(problem), problem.weight.shape[2:]
        quads, pair = cdiv(channels, 4), outputs <= 4
        words = kh * cdiv((kw + pair) * quads, 4) * (1 if pair else cdiv(outputs, 8))
        rows = self.threads // 32 * (self.rows + kh - 1)
        windows = _round_up(words * 256 + cdiv(outputs, 8) * 32 + rows * quads * 32, 128)
        plane = cdiv(63 + kw, 8) * 128 + (32 if quads > 1 else 0)
        slots = kh + (1 if quads == 1 else 0)
        return windows + self.threads // 32 * _round_up(slots * quads * plane, 128)

    def _kernel(self, problem: Problem) -> Kernel:
        (channels, outputs), (kh, kw) = group_heads(problem), problem.weight.shape[2:]
        vector, sparsemax = vector_of(problem), problem.activation == "sparsemax"
        tiles = cdiv(outputs, 8)
        numbers = {"Rows": self.rows, "Channels": channels, "Outputs": outputs, "Kh": kh, "Kw": kw,
                   "Vector": vector, "Together": 2 if tiles % 2 == 0 else 1,
                   "Shared": self._shared(problem)}
        return Kernel(name=f"multi_token_fwd__{self.name}__h{channels}x{outputs}_k{kh}x{kw}"
                           f"_v{vector}" + ("_sparsemax" if sparsemax else ""),
                      source="multi_token_band_fwd.cu", function="multi_token_band",
                      params="MultiTokenParams",
                      config=(f"using T = {CTYPE[self.dtype]};",
                              f"static constexpr bool kSparsemax = {str(sparsemax).lower()};",
                              *(f"static constexpr int k{k} = {n};" for k, n in numbers.items())),
                      threads=self.threads, blocks=_register_blocks(self.blocks, problem))

    def kernels(self) -> tuple[Kernel, ...]:
        """Return the kernels of a few common problems; others are compiled when they are met."""
        meant = [heads for heads in (4, 8, 16, 32) if self.heads // 4 < heads <= self.heads]
        common = few(self.dtype, (*((heads, 3, 16) for heads in meant), (meant[0], 3, 15),
                                  (meant[0], 5, 16)))
        problems = [Problem(Layout((1, heads, seq, seq), self.dtype),
                            Layout((heads, heads, kernel, kernel), self.dtype), None, None, 1,
                            (1, 1), "same", activation)
                    for heads, kernel, seq in common for activation in ACTIVATIONS
                    if activation == "softmax" or (heads, kernel, seq) == (meant[0], 3, 16)]
        return (*(self._kernel(problem) for problem in problems if not self._mismatch(problem)),
                statistics_kernel(problems[0]),
                Plain(self.dtype, "sparsemax", False)._kernel("statistics"))

    def program(self, problem: Problem, device: Device) -> Program:
        constant, bias = values(problem), ("bias",) if problem.bias else ()
        known = ("shift", "factor")
        if problem.activation == "sparsemax":
            plain = Plain(self.dtype, "sparsemax", False).program(problem, device)
            before = plain.steps[0]
        else:
            before = statistics_step(problem)
        return Program(
            (before, Step(self._kernel(problem), (self._blocks(problem), 1, 1), constant,
                          {name: name for name in ("scores", "weight", "y", *bias, *known)},
                          shared=self._shared(problem))),
            {name: problem.statistics_layout for name in known})


@dataclass(frozen=True)
class HeadsForward(Compiled):
    """All heads of a position side by side in shared memory: products over heads, a tap each.

    The statistics of the rows of scores have a kernel of their own, for sparsemax the plain row's,
    and so have the weights. Kernel and heads of a group are compiled in.
    """

    dtype: str

    MOST_TAPS = 9
    HEADS = 17, 32  # of a group, from .. to
    THREADS = 256

    @property
    def name(self) -> str:
        return f"heads_{self.dtype}"

    def _mismatch(self, problem: Problem) -> str | None:
        if problem.dilation != (1, 1) and max(problem.reach) > 0:
            return f"dilation {problem.dilation} is not 1"
        heads, taps = max(group_heads(problem)), math.prod(problem.weight.shape[2:])
        if not self.HEADS[0] <= heads <= self.HEADS[1]:
            return f"{heads} heads in a group are outside {self.HEADS}"
        if taps > self.MOST_TAPS:
            return f"kernel {problem.weight.shape[2:]} exceeds {self.MOST_TAPS} taps"
        if max(self._blocks(problem), statistics_blocks(problem)) > MAX_GRID:
            return "blocks exceed a grid"
        return None

    @staticmethod
    def _blocks(problem: Problem) -> int:
        spans, strips = cdiv(problem.seq, 256), cdiv(problem.seq, 8)
        return problem.batch * problem.groups * spans * strips

    def _shared(self, problem: Problem) -> int:
        """Return the bytes of shared memory of a block; the source asserts that they agree."""
        kh, kw = problem.weight.shape[2:]
        rows, blocks = 8 + kh - 1, cdiv(kw // 2, 8) + 8 + cdiv(kw - 1 - kw // 2, 8)
        return rows * blocks * 512 + kh * kw * 2048 + rows * 256 + 144

    def _kernel(self, problem: Problem, part: str = "") -> Kernel:
        (channels, outputs), (kh, kw) = group_heads(problem), problem.weight.shape[2:]
        vector, sparsemax = vector_of(problem), problem.activation == "sparsemax"
        numbers = {"In": channels, "Out": outputs, "Kh": kh, "Kw": kw, "Vector": vector}
        config = [f"using T = {CTYPE[self.dtype]};"]
        tag = f"h{channels}x{outputs}_k{kh}x{kw}"
        if part == "":
            tag += f"_v{vector}" + ("_sparsemax" if sparsemax else "")
            numbers["Shared"] = self._shared(problem)
            config.append(f"static constexpr bool kSparsemax = {str(sparsemax).lower()};")
        return Kernel(name=f"multi_token_fwd__{self.name}{part}__{tag}",
                      source="multi_token_heads_fwd.cu", function=f"multi_token_heads{part}",
                      params="MultiTokenParams",
                      config=(*config, *(f"static constexpr int k{k} = {n};"
                                         for k, n in numbers.items())),
                      threads=self.THREADS,
                      blocks=2 if part == "" and vector == 8 and kh <= 3 else 1)

    def kernels(self) -> tuple[Kernel, ...]:
        """Return the kernels of a few common problems; others are compiled when they are met."""
        common = few(self.dtype, ((32, 16, "softmax"), (24, 16, "softmax"), (32, 15, "softmax"),
                                  (32, 16, "sparsemax")))
        problems = [Problem(Layout((1, heads, seq, seq), self.dtype),
                            Layout((heads, heads, 3, 3), self.dtype), None, None, 1, (1, 1), "same",
                            activation) for heads, seq, activation in common]
        return (*dict.fromkeys(self._kernel(problem, part) for problem in problems
                               for part in ("_table", "")),
                statistics_kernel(problems[0]),
                Plain(self.dtype, "sparsemax", False)._kernel("statistics"))

    def program(self, problem: Problem, device: Device) -> Program:
        constant, bias = values(problem), ("bias",) if problem.bias else ()
        words = math.prod(problem.weight.shape[2:]) * 128  # of 16 bytes, of the table of a group
        known = ("shift", "factor")

        def step(kernel: Kernel, blocks: int, shared: int, *buffers: str) -> Step:
            return Step(kernel, (blocks, 1, 1), constant, {name: name for name in buffers},
                        shared=shared)

        before = (self._before(problem, device) if problem.activation == "sparsemax" else
                  Program((statistics_step(problem),),
                          {name: problem.statistics_layout for name in known}))
        return before + Program(
            (step(self._kernel(problem, "_table"), problem.groups * cdiv(words, self.THREADS), 0,
                  "weight", "table"),
             step(self._kernel(problem), self._blocks(problem), self._shared(problem), "scores",
                  *known, "table", "y", *bias)),
            {"table": Layout((problem.groups, words * 4), "f32")})


@dataclass(frozen=True)
class Strip(Compiled):
    """A block per strip of query rows: statistics and convolution in one kernel.

    16-bit elements are multiplied on matrix units, float32 on the cores. Kernel, dilation and
    heads of a group are compiled in. Sparsemax has the plain row's statistics, computed before.
    """

    dtype: str
    rows: int  # of a strip
    columns: int  # of a warp's tile
    threads: int
    at_once: int  # rows whose statistics a warp takes at once
    loads: int  # packs of a row in flight per lane, there
    heads: int = 8  # of a group, at most: more need a block of fewer warps

    MOST_TAPS = 256  # more cost registers

    @property
    def name(self) -> str:
        return f"strip_{self.dtype}_r{self.rows}_c{self.columns}_t{self.threads}"

    @property
    def matrix(self) -> bool:
        return self.dtype != "f32"

    def _mismatch(self, problem: Problem) -> str | None:
        kh, kw = problem.weight.shape[2:]
        if kh * kw > self.MOST_TAPS:
            return f"kernel ({kh}, {kw}) has more than {self.MOST_TAPS} taps"
        reach = 32 if self.matrix else 16
        if max(problem.reach) > reach:
            return f"taps lie {max(problem.reach)} apart, more than {reach}"
        heads = max(group_heads(problem))
        if heads > self.heads:
            return f"{heads} heads in a group exceed {self.heads}"
        if self._blocks(problem) > MAX_GRID:
            return f"{self._blocks(problem)} blocks exceed a grid"
        return None

    def _blocks(self, problem: Problem) -> int:
        return problem.batch * problem.groups * cdiv(problem.seq, self.rows)

    def _shared(self, problem: Problem) -> int:
        """Return the bytes of struct Strip in the source, which asserts that they agree."""
        (channels, outputs), (kh, kw) = group_heads(problem), problem.weight.shape[2:]
        reach, column_reach = problem.reach
        tile_rows, quads = self.rows + reach, cdiv(channels, 4)
        before = kw // 2 * problem._dilation[1]
        step = 4 if not self.matrix else 2 if quads == 1 else 1
        width = cdiv(before, step) * step + self.columns + column_reach - before
        if self.matrix:
            out = 4 if outputs <= 4 else 8 if outputs <= 8 else 16
            steps = cdiv((16 // out + reach) * kw * quads, 4)
            table = steps * (cdiv(outputs, out) * 512 + 16)
            stride = cdiv(width * quads * 8 - 16, 64) * 64 + (32 if quads == 2 else 16)
        else:
            table = cdiv(outputs, 4) * channels * kh * kw * 16
            stride = cdiv(width + 4, 4) * 16 * channels
        return (table + cdiv(outputs, 16) * 64 + tile_rows * quads * 32
                + self.threads // 32 * tile_rows * stride)

    def _kernel(self, problem: Problem) -> Kernel:
        (channels, outputs), (kh, kw) = group_heads(problem), problem.weight.shape[2:]
        d0, d1 = problem._dilation
        vector = vector_of(problem)
        sparsemax = problem.activation == "sparsemax"
        numbers = {"Rows": self.rows, "Columns": self.columns, "AtOnce": self.at_once,
                   "Loads": self.loads, "Channels": channels, "Outputs": outputs, "Kh": kh,
                   "Kw": kw, "RowStep": d0, "ColumnStep": d1, "Vector": vector,
                   "Shared": self._shared(problem)}
        return Kernel(name=f"multi_token_fwd__{self.name}__h{channels}x{outputs}_k{kh}x{kw}"
                           f"_d{d0}x{d1}_v{vector}" + ("_sparsemax" if sparsemax else ""),
                      source="multi_token_strip_fwd.cu", function="multi_token_strip",
                      params="MultiTokenParams",
                      config=(f"using T = {CTYPE[self.dtype]};",
                              f"static constexpr bool kMatrix = {str(self.matrix).lower()};",
                              f"static constexpr bool kSparsemax = {str(sparsemax).lower()};",
                              *(f"static constexpr int k{k} = {n};" for k, n in numbers.items())),
                      threads=self.threads)

    def kernels(self) -> tuple[Kernel, ...]:
        """Return the kernels of a few common problems; others are compiled when they are met."""
        meant = [heads for heads in (4, 8, 16, 32) if self.heads // 4 <= heads <= self.heads]
        common = few(self.dtype, (*((heads, 3, 16) for heads in meant), (1, 1, 16),
                                  (meant[0], 3, 15), (meant[0], 11, 16)))
        problems = [Problem(Layout((1, heads, seq, seq), self.dtype),
                            Layout((heads, heads, kernel, kernel), self.dtype), None, None, 1,
                            (1, 1), "same", activation)
                    for heads, kernel, seq in common for activation in ACTIVATIONS
                    if activation == "softmax" or (heads, kernel) == (meant[0], 3)]
        return (*(self._kernel(problem) for problem in problems if not self._mismatch(problem)),
                Plain(self.dtype, "sparsemax", False)._kernel("statistics"))

    def program(self, problem: Problem, device: Device) -> Program:
        return self._before(problem, device) + Program((Step(
            self._kernel(problem), (self._blocks(problem), 1, 1), values(problem),
            self._buffers(problem), shared=self._shared(problem)),))


# In the order of speed where several can. A ring reads the scores once, but its rows must fit
# shared memory; a band reads them twice; a strip takes any dilation.
FORWARD = (
    *(row for dtype in ("bf16", "f16") for row in (
        RingForward(dtype, 128, 2, least=2, slope=0.0, ahead=False, to_seq=256),
        RingForward(dtype, 256, 2, least=2, slope=0.0, ahead=False, to_seq=512),
        RingForward(dtype, 256, 3, least=4, slope=1.0, ahead=False, to_seq=1024),
        RingForward(dtype, 512, 1, least=4, slope=1.0, ahead=True, to_seq=2048),
        RingForward(dtype, 256, 2, least=4, slope=1.0, ahead=True, heads=(5, 8)),
        RingForward(dtype, 512, 1, least=4, slope=1.0, ahead=True, heads=(9, 16)),
        Band(dtype, 256, 3, rows=16),
        Band(dtype, 128, 3, rows=8, heads=16),
        HeadsForward(dtype),
        Strip(dtype, 4, 32, 128, at_once=2, loads=2, heads=32))),
    Strip("f32", 4, 64, 128, at_once=1, loads=2),
    *(Plain(dtype, activation, False) for dtype in FLOATS for activation in ACTIVATIONS),
)
