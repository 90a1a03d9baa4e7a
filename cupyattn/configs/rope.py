"""Rotary position embedding: the problem and the table of rows."""

from __future__ import annotations

from dataclasses import dataclass

from .._program import CTYPE, FLOATS, Device, Kernel, Layout, Program, Row, Step

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
        constant = values(problem)
        buffers = [name for name in ("q", "k", "q_out", "k_out", "position_ids")
                   if getattr(problem, name) is not None] + ["cos", "sin"]
        if problem.offsets:
            buffers.append("offsets")
        if problem.offsets or problem.position_ids is not None:
            buffers.append("fault")  # else the host knows every row and has checked it
        batch, seq = problem.some.shape[:2]
        return Program((Step(self.kernels()[0], (min(batch * seq, _MAX_GRID), 1, 1), constant,
                             {name: name for name in buffers}, {"offset": "offset"}),))


TABLE = tuple(Plain(dtype, table_dtype) for dtype in FLOATS for table_dtype in FLOATS)
