"""Rotary position embedding: the problem and the table of rows."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from .._program import CTYPE, FLOATS, ITEMSIZE, Device, Kernel, Layout, Program, Row, Step, cdiv

_MAX_GRID = 2**31 - 1


@dataclass(frozen=True)
class Problem:
    """One call. q, k as [batch, seq, heads, head_dim], tables as [1 or batch, table, width]."""

    q: Layout | None
    k: Layout | None
    q_out: Layout | None
    k_out: Layout | None
    cos: Layout
    sin: Layout
    position_ids: Layout | None  # [1 or batch, seq]; None: token t reads row t + offset
    offsets: tuple[int, int] | None  # least and greatest of one offset per batch item, which are
    # in the int64 buffer "offsets"; None: one offset, a scalar of the call
    rotary_dim: int
    interleaved: bool
    inverse: bool
    seq_first: bool = True  # the caller's axis order is [batch, seq, heads, head_dim]

    @property
    def given(self) -> dict[str, Layout]:
        """Return the arrays that are there, in the caller's axis order."""
        order = (0, 1, 2, 3) if self.seq_first else (0, 2, 1, 3)
        return {name: Layout(tuple(x.shape[a] for a in order), x.dtype,
                             tuple(x.strides[a] for a in order), x.align)
                for name, x in (("q", self.q), ("k", self.k)) if x is not None}

    @property
    def some(self) -> Layout:
        """Return q, or k where there is no q."""
        layout = self.q or self.k
        assert layout is not None
        return layout

    @property
    def heads(self) -> tuple[int, int]:
        """Return how many heads q and k have; 0 where absent."""
        q, k = (0 if x is None else x.shape[2] for x in (self.q, self.k))
        return q, k

    @property
    def table_step(self) -> int:
        """Return how many columns of the table lie between one pair's angle and the next."""
        # Tables as wide as rotary_dim repeat each value: neighbours if interleaved, else halves.
        return 2 if self.interleaved and self.cos.shape[-1] == self.rotary_dim else 1


def values(problem: Problem) -> dict[str, object]:
    """Return the constant fields of `RopeParams`."""
    batch, seq, _, head_dim = problem.some.shape

    def shared(layout: Layout) -> tuple[int, ...]:
        return (0 if layout.shape[0] == 1 else layout.strides[0], *layout.strides[1:])

    out: dict[str, object] = {
        "batch": batch, "seq": seq, "table": problem.cos.shape[1], "head_dim": head_dim,
        "rotary_dim": problem.rotary_dim, "table_step": problem.table_step,
        "inverse": int(problem.inverse), "interleaved": int(problem.interleaved),
        "cos_stride": shared(problem.cos),
        "sin_stride": shared(problem.sin)}
    for name in ("q", "k", "q_out", "k_out"):
        layout = getattr(problem, name)
        if layout is not None:
            out[f"{name}_stride"] = layout.strides[:3]
            out[f"{name[0]}_heads"] = layout.shape[2]
    if problem.position_ids is not None:
        out["position_stride"] = shared(problem.position_ids)
        out["wide_positions"] = int(problem.position_ids.dtype == "i64")
    return out


def buffers(problem: Problem) -> dict[str, str]:
    """Return the pointer fields of `RopeParams` that are set."""
    names = [name for name in ("q", "k", "q_out", "k_out", "position_ids")
             if getattr(problem, name) is not None] + ["cos", "sin"]
    if problem.offsets:
        names.append("offsets")
    if problem.offsets or problem.position_ids is not None:
        names.append("fault")  # else the host knows every row and has checked it
    return {name: name for name in names}


@dataclass(frozen=True)
class Plain(Row):
    """A block per token, any problem of one dtype and one dtype of tables."""

    dtype: str
    table_dtype: str

    THREADS = 128

    @property
    def name(self) -> str:
        return f"plain_{self.dtype}_table_{self.table_dtype}"

    def refuses(self, problem: Problem, device: Device) -> str | None:
        if problem.some.dtype != self.dtype:
            return f"dtype {problem.some.dtype} is not {self.dtype}"
        if problem.cos.dtype != self.table_dtype:
            return f"dtype {problem.cos.dtype} of the tables is not {self.table_dtype}"
        for name in ("q", "k", "q_out", "k_out"):
            layout = getattr(problem, name)
            if layout is not None and not layout.unit_last:
                return f"{name} has stride {layout.strides[-1]} on head_dim, not 1"
        return None

    def kernels(self) -> tuple[Kernel, ...]:
        return (Kernel(name=f"rope__{self.name}", source="rope.cu", function="rope",
                       params="RopeParams",
                       config=(f"using T = {CTYPE[self.dtype]};",
                               f"using Table = {CTYPE[self.table_dtype]};"),
                       threads=self.THREADS),)

    def program(self, problem: Problem, device: Device) -> Program:
        batch, seq = problem.some.shape[:2]
        return Program((Step(self.kernels()[0], (min(batch * seq, _MAX_GRID), 1, 1),
                             values(problem), buffers(problem), {"offset": "offset"}),))


_VECTOR = 16  # bytes of the widest access


@dataclass(frozen=True)
class VectorRow(Row):
    """16-byte accesses, several heads in flight a thread, a table row kept in registers.

    Two shapes of block: where all threads are resident at once the last load is to leave early,
    so that few threads have three heads each; beyond that, small shares keep more loads in
    flight. `kernels/README.md` has the sizes and times of both.
    """

    dtype: str
    table_dtype: str

    THREADS = 256  # at most; a whole number of tokens
    # Heads of one array that a block works on at a time, and heads a thread, q and k together.
    RESIDENT = (16, 3)  # in one wave of blocks
    STREAMED = (8, 2)
    RESIDENT_THREADS = 1024  # of a multiprocessor, at 64 registers

    @property
    def name(self) -> str:
        return f"vector_{self.dtype}_table_{self.table_dtype}"

    @property
    def size(self) -> int:
        """Return how many elements one access holds."""
        return _VECTOR // ITEMSIZE[self.dtype]

    def refuses(self, problem: Problem, device: Device) -> str | None:
        some, size = problem.some, self.size
        if some.dtype != self.dtype:
            return f"dtype {some.dtype} is not {self.dtype}"
        if problem.cos.dtype != self.table_dtype:
            return f"dtype {problem.cos.dtype} of the tables is not {self.table_dtype}"
        if problem.rotary_dim == 0 or problem.rotary_dim % (2 * size):
            return f"rotary_dim {problem.rotary_dim} is not a multiple of {2 * size}"
        if problem.rotary_dim > 2 * size * self.THREADS:
            return f"rotary_dim {problem.rotary_dim} exceeds {2 * size * self.THREADS}"
        if (some.shape[3] - problem.rotary_dim) % size:
            return f"head_dim {some.shape[3]} less rotary_dim is not a multiple of {size}"
        if some.shape[0] > 65535:
            return f"batch {some.shape[0]} exceeds 65535"
        if some.shape[1] * max(problem.heads) > _MAX_GRID:  # so may the grid
            return f"seq {some.shape[1]} times {max(problem.heads)} heads exceeds {_MAX_GRID}"
        for name in ("q", "k", "q_out", "k_out"):
            layout = getattr(problem, name)
            if layout is not None and not _rows_aligned(layout):
                return f"{name} has rows that do not start at multiples of {_VECTOR} bytes"
        return None

    def _kernel(self, *, lanes: int, slots: int, groups: int, shares: tuple[int, int],
                interleaved: bool, table_vectors: bool, rest: bool, positions: bool) -> Kernel:
        flags = (("interleaved", interleaved), ("table_vectors", table_vectors), ("rest", rest),
                 ("positions", positions))
        queries, keys = shares
        return Kernel(
            name="_".join([f"rope__{self.name}__l{lanes}_s{slots}_g{groups}_q{queries}_k{keys}",
                           *(name for name, given in flags if given)]),
            source="rope_vector.cu", function="rope_vector", params="RopeParams",
            config=(f"using T = {CTYPE[self.dtype]};", f"using Table = {CTYPE[self.table_dtype]};",
                    f"static constexpr int kLanes = {lanes}, kSlots = {slots}, kGroups = {groups};",
                    f"static constexpr int kQueries = {queries}, kKeys = {keys};",
                    *(f"static constexpr bool k{name.title().replace('_', '')} = "
                      f"{str(given).lower()};" for name, given in flags)),
            threads=self.THREADS // (slots * lanes) * slots * lanes)

    def kernels(self) -> tuple[Kernel, ...]:
        vectors = self._fits_vectors
        return (self._kernel(lanes=1, slots=16, groups=1, shares=(2, 1), interleaved=False,
                             table_vectors=False, rest=True, positions=False),
                self._kernel(lanes=4, slots=16, groups=1, shares=(2, 1), interleaved=False,
                             table_vectors=vectors, rest=False, positions=False),
                self._kernel(lanes=16, slots=8, groups=4, shares=(1, 1), interleaved=False,
                             table_vectors=vectors, rest=False, positions=False),
                self._kernel(lanes=16, slots=16, groups=2, shares=(0, 3), interleaved=True,
                             table_vectors=vectors, rest=True, positions=True))

    @property
    def _fits_vectors(self) -> bool:
        """Whether a thread's share of a table row is a whole number of accesses."""
        return self.size * ITEMSIZE[self.table_dtype] >= _VECTOR

    def _split(self, heads: tuple[int, int], lanes: int, shape: tuple[int, int]
               ) -> tuple[int, int, tuple[int, int]]:
        """Return slots, groups of heads, and heads of q and k a thread, for a shape of block."""
        slots, most = shape
        slots = min(slots, max(heads), self.THREADS // lanes)
        return slots, *_shares(heads, slots, most)

    def program(self, problem: Problem, device: Device) -> Program:
        batch, seq, _, head_dim = problem.some.shape
        lanes = problem.rotary_dim // (2 * self.size)
        slots, groups, shares = self._split(problem.heads, lanes, self.RESIDENT)
        if batch * seq * groups * slots * lanes > device.multiprocessors * self.RESIDENT_THREADS:
            slots, groups, shares = self._split(problem.heads, lanes, self.STREAMED)
        table_vectors = self._fits_vectors and problem.table_step == 1 and all(
            x.unit_last and _rows_aligned(x) for x in (problem.cos, problem.sin))
        kernel = self._kernel(
            lanes=lanes, slots=slots, groups=groups, shares=shares,
            interleaved=problem.interleaved, table_vectors=table_vectors,
            rest=problem.rotary_dim < head_dim, positions="fault" in buffers(problem))
        grid = (cdiv(seq, kernel.threads // (slots * lanes)) * groups, batch, 1)
        return Program((Step(kernel, grid, values(problem), buffers(problem),
                             {"offset": "offset"}),))


def _shares(heads: tuple[int, int], slots: int, most: int) -> tuple[int, tuple[int, int]]:
    """Return the fewest groups of heads, and how many heads of q and k a thread then has.

    `most` in all, or one of each array.
    """
    for groups in itertools.count(1):
        queries, keys = (cdiv(n, slots * groups) for n in heads)
        if queries + keys <= most or max(queries, keys) == 1:
            break
    return groups, (queries, keys)


def _rows_aligned(layout: Layout) -> bool:
    """Whether every row along the last axis starts at a multiple of 16 bytes."""
    size = ITEMSIZE[layout.dtype]
    return layout.align == _VECTOR and all(
        n == 1 or s * size % _VECTOR == 0 for n, s in zip(layout.shape[:-1], layout.strides[:-1]))


# 16-byte accesses where the shapes allow them; the plain kernel takes everything else.
TABLE: tuple[Row, ...] = (
    *(VectorRow(dtype, table) for dtype, table in (
        ("f16", "f16"), ("f16", "f32"), ("bf16", "bf16"), ("bf16", "f32"), ("f32", "f32"))),
    *(Plain(dtype, table) for dtype in FLOATS for table in FLOATS))
