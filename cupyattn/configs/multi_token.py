"""Multi-token attention: the problem and the tables of rows."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .._program import (CTYPE, FLOATS, ITEMSIZE, Device, Kernel, Layout, Program, Row, Step,
                        accumulator, cdiv)

_MAX_GRID = 2**31 - 1
_ACTIVATIONS = ("softmax", "sparsemax")


@dataclass(frozen=True)
class Problem:
    """One call: scores [batch, heads_in, seq, seq], weight [heads_out, per group, kh, kw]."""

    scores: Layout
    weight: Layout
    bias: Layout | None
    dy: Layout | None  # backward only
    groups: int
    dilation: tuple[int, int]  # rows, columns
    padding: str  # "same" | "causal"
    activation: str  # "softmax" | "sparsemax"

    @property
    def batch(self) -> int:
        return self.scores.shape[0]

    @property
    def heads_in(self) -> int:
        return self.scores.shape[1]

    @property
    def heads_out(self) -> int:
        return self.weight.shape[0]

    @property
    def seq(self) -> int:
        return self.scores.shape[-1]

    @property
    def y_layout(self) -> Layout:
        return Layout((self.batch, self.heads_out, self.seq, self.seq), self.scores.dtype)

    @property
    def statistics_layout(self) -> Layout:
        """Return the layout of each of the two numbers that sum up a row of scores."""
        return Layout(self.scores.shape[:-1], accumulator(self.scores.dtype))

    @property
    def reach(self) -> tuple[int, int]:
        """Return how far the first tap of the kernel is from its last, in rows and columns."""
        kh, kw = self.weight.shape[2:]
        d0, d1 = self._dilation
        return (kh - 1) * d0, (kw - 1) * d1

    @property
    def _dilation(self) -> tuple[int, int]:
        # A tap that is seq or more away is outside the matrix, however far: keep numbers small.
        d0, d1 = self.dilation
        return min(d0, self.seq), min(d1, self.seq)


def values(problem: Problem) -> dict[str, object]:
    """Return the constant fields of `MultiTokenParams`, `chunks` excepted."""
    kh, kw = problem.weight.shape[2:]
    d0, d1 = problem._dilation
    out: dict[str, object] = {
        "scores_stride": problem.scores.strides, "weight_stride": problem.weight.strides,
        "batch": problem.batch, "heads_in": problem.heads_in, "heads_out": problem.heads_out,
        "groups": problem.groups, "seq": problem.seq, "kh": kh, "kw": kw, "dilation": (d0, d1),
        "row_origin": (kh - 1 if problem.padding == "causal" else kh // 2) * d0,
        "column_origin": kw // 2 * d1}
    if problem.bias is not None:
        out["bias_stride"] = problem.bias.strides[0]
    if problem.dy is not None:
        out["dy_stride"] = problem.dy.strides
    return out


@dataclass(frozen=True)
class Plain(Row):
    """A block per row of scores or of y, any problem of one dtype and activation."""

    dtype: str
    activation: str
    backward: bool

    THREADS = 128

    @property
    def name(self) -> str:
        return f"plain_{self.dtype}_{self.activation}"

    def refuses(self, problem: Problem, device: Device) -> str | None:
        if problem.scores.dtype != self.dtype:
            return f"dtype {problem.scores.dtype} is not {self.dtype}"
        if problem.activation != self.activation:
            return f"activation {problem.activation} is not {self.activation}"
        if max(problem.reach) >= 2**31:
            return f"taps lie {max(problem.reach)} apart, more than 2**31 - 1"
        return None

    def _kernel(self, part: str) -> Kernel:
        # The backward computes the row statistics again, with the forward's kernel.
        forward = part in ("statistics", "convolution")
        stem = "multi_token_fwd" if forward else "multi_token_bwd"
        sparsemax = "true" if self.activation == "sparsemax" else "false"
        return Kernel(name=f"{stem}__{self.name}__{part}", source=f"{stem}.cu",
                      function=f"multi_token_{part}", params="MultiTokenParams",
                      config=(f"using T = {CTYPE[self.dtype]};",
                              f"static constexpr bool kSparsemax = {sparsemax};"),
                      threads=self.THREADS)

    def kernels(self) -> tuple[Kernel, ...]:
        parts = (("statistics", "d_scores", "d_weight_partial", "d_weight") if self.backward
                 else ("statistics", "convolution"))
        return tuple(self._kernel(part) for part in parts)

    def program(self, problem: Problem, device: Device) -> Program:
        constant = values(problem)
        scratch = {"shift": problem.statistics_layout, "factor": problem.statistics_layout}
        rows_in = problem.batch * problem.heads_in * problem.seq
        rows_out = problem.batch * problem.heads_out * problem.seq

        def step(part: str, blocks: int, *buffers: str) -> Step:
            return Step(self._kernel(part), (min(blocks, _MAX_GRID), 1, 1), constant,
                        {name: name for name in buffers})

        statistics = step("statistics", rows_in, "scores", "shift", "factor")
        if not self.backward:
            bias = ("bias",) if problem.bias else ()
            return Program((statistics,
                            step("convolution", rows_out, "scores", "shift", "factor", "weight",
                                 *bias, "y")), scratch)

        d_bias = ("d_bias",) if problem.bias else ()
        elements = math.prod(problem.weight.shape) + (problem.heads_out if problem.bias else 0)
        # Sums of up to seq terms in a few hundred rows at most stay accurate; and there are
        # blocks enough for any device, while large kernels keep `partial` small.
        pairs = problem.batch * problem.seq
        chunks = min(pairs, max(cdiv(4096, elements), cdiv(pairs, 256)))
        constant["chunks"] = chunks
        scratch["partial"] = Layout((elements, chunks), accumulator(self.dtype))
        return Program(
            (statistics,
             step("d_scores", rows_in, "scores", "shift", "factor", "weight", "dy", "d_scores"),
             step("d_weight_partial", elements * chunks, "scores", "shift", "factor", "dy",
                  "partial", *d_bias),
             step("d_weight", elements, "partial", "d_weight", *d_bias)), scratch)


@dataclass(frozen=True)
class Strip(Row):
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
    from_seq: int = 0  # shorter ones are left to rows with more blocks
    taps: int = 256  # of the kernel, at most: more cost registers
    whole: bool = False  # only scores that can be read 16 bytes at a time

    @property
    def name(self) -> str:
        return f"strip_{self.dtype}_r{self.rows}_c{self.columns}_t{self.threads}"

    @property
    def matrix(self) -> bool:
        return self.dtype != "f32"

    def refuses(self, problem: Problem, device: Device) -> str | None:
        reason = self._mismatch(problem)
        if reason is None and self._shared(problem) > device.shared_memory:
            return f"{self._shared(problem)} bytes of shared memory exceed {device.shared_memory}"
        return reason

    def _mismatch(self, problem: Problem) -> str | None:
        """Return why this row cannot do the problem on any device, or None."""
        scores = problem.scores
        if scores.dtype != self.dtype:
            return f"dtype {scores.dtype} is not {self.dtype}"
        if not scores.unit_last:
            return "scores have no unit stride on the last axis"
        if problem.seq < self.from_seq:
            return f"seq {problem.seq} is below {self.from_seq}"
        if self.whole and self._vector(problem) * ITEMSIZE[self.dtype] < 16:
            return "rows of scores are not whole multiples of 16 bytes"
        kh, kw = problem.weight.shape[2:]
        if kh * kw > self.taps:
            return f"kernel ({kh}, {kw}) has more than {self.taps} taps"
        reach = 32 if self.matrix else 16
        if max(problem.reach) > reach:
            return f"taps lie {max(problem.reach)} apart, more than {reach}"
        heads = max(self._heads(problem))
        if heads > self.heads:
            return f"{heads} heads in a group exceed {self.heads}"
        if self._blocks(problem) > _MAX_GRID:
            return f"{self._blocks(problem)} blocks exceed a grid"
        return None

    @staticmethod
    def _heads(problem: Problem) -> tuple[int, int]:
        return problem.heads_in // problem.groups, problem.heads_out // problem.groups

    def _blocks(self, problem: Problem) -> int:
        return problem.batch * problem.groups * cdiv(problem.seq, self.rows)

    def _shared(self, problem: Problem) -> int:
        """Return the bytes of struct Strip in the source, which asserts that they agree."""
        (channels, outputs), (kh, kw) = self._heads(problem), problem.weight.shape[2:]
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

    def _vector(self, problem: Problem) -> int:
        """Return how many elements an access of scores may take, at most 16 bytes."""
        size = ITEMSIZE[self.dtype]
        return math.gcd(16 // size, problem.seq, problem.scores.align // size,
                        *problem.scores.strides[:-1])

    def _kernel(self, problem: Problem) -> Kernel:
        (channels, outputs), (kh, kw) = self._heads(problem), problem.weight.shape[2:]
        d0, d1 = problem._dilation
        vector = self._vector(problem)
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
        seq = self.from_seq or 16
        common = [(heads, 3, seq) for heads in meant] + [(1, 1, seq), (meant[0], 3, 15)]
        common += [(meant[0], 11, seq)]
        problems = [Problem(Layout((1, heads, seq, seq), self.dtype),
                            Layout((heads, heads, kernel, kernel), self.dtype), None, None, 1,
                            (1, 1), "same", activation)
                    for heads, kernel, seq in common for activation in _ACTIVATIONS
                    if activation == "softmax" or (heads, kernel) == (meant[0], 3)]
        return (*(self._kernel(problem) for problem in problems if not self._mismatch(problem)),
                Plain(self.dtype, "sparsemax", False)._kernel("statistics"))

    def program(self, problem: Problem, device: Device) -> Program:
        sparsemax = problem.activation == "sparsemax"
        buffers = ("scores", "weight", "y", *(("bias",) if problem.bias else ()),
                   *(("shift", "factor") if sparsemax else ()))
        strip = Program((Step(
            self._kernel(problem), (self._blocks(problem), 1, 1), values(problem),
            {name: name for name in buffers}, shared=self._shared(problem)),))
        if not sparsemax:
            return strip
        plain = Plain(self.dtype, "sparsemax", False).program(problem, device)
        return Program(plain.steps[:1], plain.scratch) + strip


@dataclass(frozen=True)
class StripBackward(Row):
    """Both gradients on matrix units: a block per strip of rows, 16 // heads of a group of them.

    Kernel size and heads of a group are compiled in.
    """

    dtype: str
    tile: int  # bytes of shared memory that the tile of dy may take
    threads: int

    # Slices of 8 sums per thread quad that fit the registers.
    PARTS = 20

    @property
    def name(self) -> str:
        return f"strip_{self.dtype}_s{self.tile // 1024}_t{self.threads}"

    def refuses(self, problem: Problem, device: Device) -> str | None:
        if problem.scores.dtype != self.dtype:
            return f"dtype {problem.scores.dtype} is not {self.dtype}"
        if problem.activation != "softmax":
            return f"activation {problem.activation} is not softmax"
        heads = self._heads(problem)
        if any(16 % n for n in heads):
            return f"heads of a group {heads} do not divide 16"
        parts = self._slices(problem) * problem.weight.shape[3]
        if parts > self.PARTS:
            return f"{parts} slices of sums exceed {self.PARTS}"
        if max(problem.reach) >= 2**30 or problem.seq >= 2**26:
            return f"taps lie {max(problem.reach)} apart, or there are 2**26 keys or more"
        if self._strips(problem) * problem.groups > _MAX_GRID:
            return "strips of rows exceed a grid"
        if self._columns(problem) < 32:
            return f"taps lie {problem.reach[1]} columns apart, more than a tile holds"
        shared = self._shared(problem) + 768 * parts  # and what the source declares
        if shared > device.shared_memory:
            return f"{shared} bytes of shared memory exceed {device.shared_memory}"
        return None

    @staticmethod
    def _heads(problem: Problem) -> tuple[int, int]:
        return problem.heads_in // problem.groups, problem.heads_out // problem.groups

    def _rows(self, problem: Problem) -> int:
        return 16 // self._heads(problem)[0]

    def _slices(self, problem: Problem) -> int:
        rows = self._rows(problem) + problem.weight.shape[2] - 1
        return cdiv(rows * self._heads(problem)[1], 8)

    def _strips(self, problem: Problem) -> int:
        d0 = problem._dilation[0]
        return problem.batch * cdiv(problem.seq, self._rows(problem) * d0) * d0

    def _block(self, problem: Problem) -> int:
        """Return the bytes of 8 keys of the tile, `Strip::kBlock` in the source."""
        return 128 * (self._slices(problem) | 1) + 32

    @staticmethod
    def _halo(problem: Problem) -> int:
        """Return the keys of the tile beside those of the sweep."""
        right = problem.weight.shape[3] // 2 * problem._dilation[1]
        return (cdiv(right, 8) + cdiv(problem.reach[1] - right, 8)) * 8

    def _columns(self, problem: Problem) -> int:
        fit = self.tile // self._block(problem) * 8 - self._halo(problem)
        return min(fit // 32, cdiv(problem.seq, 32)) * 32

    def _shared(self, problem: Problem) -> int:
        keys = self._columns(problem) + self._halo(problem)
        return keys // 8 * self._block(problem)

    def _vector(self, problem: Problem) -> bool:
        assert problem.dy is not None
        return problem.seq % 8 == 0 and all(
            array.strides[-1] == 1 and array.align % 16 == 0
            and not any(stride % 8 for stride in array.strides[:-1])
            for array in (problem.scores, problem.dy))

    def _kernel(self, problem: Problem) -> Kernel:
        (channels, outputs), (kh, kw) = self._heads(problem), problem.weight.shape[2:]
        # Not the tile of a short sequence: it may be smaller than the kernel allows for.
        columns = (self.tile // self._block(problem) * 8 - self._halo(problem)) // 32 * 32
        vector = self._vector(problem)
        numbers = {"In": channels, "Out": outputs, "Kh": kh, "Kw": kw, "Columns": columns}
        return Kernel(name=f"multi_token_bwd__{self.name}__h{channels}x{outputs}_k{kh}x{kw}"
                           f"_c{columns}" + ("_v" if vector else ""),
                      source="multi_token_strip_bwd.cu", function="multi_token_strip_bwd",
                      params="MultiTokenParams",
                      config=(f"using T = {CTYPE[self.dtype]};",
                              f"static constexpr bool kVector = {str(vector).lower()};",
                              *(f"static constexpr int k{k} = {n};" for k, n in numbers.items())),
                      threads=self.threads)

    def kernels(self) -> tuple[Kernel, ...]:
        """Return the kernels of a few common problems; others are compiled when they are met."""
        def problem(heads: int, kernel: int, seq: int) -> Problem:
            square = Layout((1, heads, seq, seq), self.dtype)
            return Problem(square, Layout((heads, heads, kernel, kernel), self.dtype), None,
                           square, 1, (1, 1), "same", "softmax")

        common = ((4, 3, 16), (4, 3, 15), (4, 5, 16), (4, 1, 16), (8, 3, 16), (16, 3, 16))
        return (*(self._kernel(problem(*sizes)) for sizes in common),
                Plain(self.dtype, "softmax", True)._kernel("d_weight"))

    def program(self, problem: Problem, device: Device) -> Program:
        constant = values(problem)
        chunks = constant["chunks"] = self._strips(problem)
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


# Strips of 8 rows take a quarter of the rows twice, strips of 4 a half; but short sequences have
# too few strips of 8 to fill a device.
FORWARD = (
    *(row for dtype in ("bf16", "f16") for row in (
        Strip(dtype, 8, 64, 256, at_once=2, loads=2, from_seq=2048, whole=True),
        Strip(dtype, 4, 32, 256, at_once=3, loads=1, heads=4),
        Strip(dtype, 4, 32, 128, at_once=2, loads=2, heads=32))),
    Strip("f32", 4, 64, 128, at_once=1, loads=2),
    *(Plain(dtype, activation, False) for dtype in FLOATS for activation in _ACTIVATIONS),
)
BACKWARD = (
    *(StripBackward(dtype, 56 << 10, 128) for dtype in ("bf16", "f16")),
    *(Plain(dtype, activation, True) for dtype in FLOATS for activation in _ACTIVATIONS),
)
