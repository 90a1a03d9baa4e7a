"""Multi-token attention: the problem, the plain row, and what the other rows share."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .._program import (CTYPE, ITEMSIZE, Device, Kernel, Layout, Program, Row, Step,
                        accumulator, cdiv)

MAX_GRID = 2**31 - 1
ACTIVATIONS = ("softmax", "sparsemax")


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
            return Step(self._kernel(part), (min(blocks, MAX_GRID), 1, 1), constant,
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


def vector_of(problem: Problem) -> int:
    """Return how many elements an access of scores may take, at most 16 bytes."""
    size = ITEMSIZE[problem.scores.dtype]
    return math.gcd(16 // size, problem.seq, problem.scores.align // size,
                    *problem.scores.strides[:-1])


def group_heads(problem: Problem) -> tuple[int, int]:
    """Return the heads in and out of a group."""
    return problem.heads_in // problem.groups, problem.heads_out // problem.groups


def statistics_blocks(problem: Problem) -> int:
    """Return the grid of `statistics_kernel`: a warp for each row of scores."""
    return cdiv(problem.batch * problem.heads_in * problem.seq, 8)


def statistics_kernel(problem: Problem) -> Kernel:
    """Return the kernel for the largest score of each row and log2 of its sum of exponentials."""
    dtype, vector = problem.scores.dtype, vector_of(problem)
    return Kernel(name=f"multi_token_fwd__band_{dtype}_statistics_v{vector}",
                  source="multi_token_band_fwd.cu", function="multi_token_band_statistics",
                  params="MultiTokenParams",
                  config=(f"using T = {CTYPE[dtype]};",
                          f"static constexpr int kVector = {vector};"),
                  threads=256)


def statistics_step(problem: Problem) -> Step:
    """Return the launch that leaves these in `shift` and `factor`."""
    return Step(statistics_kernel(problem), (statistics_blocks(problem), 1, 1), values(problem),
                {name: name for name in ("scores", "shift", "factor")})
