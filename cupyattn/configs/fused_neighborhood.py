"""The fused neighborhood attention module: the problem and the tables of rows.

A row composes programs: projections (``linear``), optional rotation (``rope``), attention
(``neighborhood``), output projection. The parts choose their own rows from their own tables.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from .._program import FLOATS, Device, Kernel, Layout, Program, Row, accumulator
from .._select import choose
from . import linear, neighborhood
from . import rope as rotary
from .linear import Matrix, Product, matrix
from .linear_hopper import planes_first

WEIGHTS = ("q_weight", "k_weight", "v_weight", "out_weight")
BIASES = ("q_bias", "k_bias", "v_bias", "out_bias")


@dataclass(frozen=True)
class Problem:
    """One call. hidden_states [batch, *space, hidden]; weights [out features, in features]."""

    hidden_states: Layout
    q_weight: Layout
    k_weight: Layout
    v_weight: Layout
    out_weight: Layout
    q_bias: Layout | None
    k_bias: Layout | None
    v_bias: Layout | None
    out_bias: Layout | None
    cos: Layout | None  # [1 or batch, tokens, width]
    sin: Layout | None
    interleaved: bool
    heads: int
    kv_heads: int
    kernel_size: tuple[int, ...]
    dilation: tuple[int, ...]
    stride: tuple[int, ...]
    is_causal: tuple[bool, ...]
    scale: float
    boundary: str
    precision: str
    return_residuals: bool = False  # forward only
    dy: Layout | None = None  # backward only

    @property
    def dtype(self) -> str:
        return self.hidden_states.dtype

    @property
    def lead(self) -> tuple[int, ...]:
        return self.hidden_states.shape[:-1]

    @property
    def head_dim(self) -> int:
        return self.q_weight.shape[0] // self.heads

    @property
    def q_layout(self) -> Layout:
        return Layout((*self.lead, self.heads, self.head_dim), self.dtype)

    @property
    def kv_layout(self) -> Layout:
        return Layout((*self.lead, self.kv_heads, self.head_dim), self.dtype)

    @property
    def lse_layout(self) -> Layout:
        return Layout((*self.lead, self.heads), accumulator(self.dtype))

    @property
    def residuals(self) -> dict[str, Layout]:
        """What the backward needs of the forward, by buffer name."""
        return {"q": self.q_layout, "k": self.kv_layout, "v": self.kv_layout,
                "attn": self.q_layout, "lse": self.lse_layout}

    def attention(self, backward: bool) -> neighborhood.Problem:
        q, kv = self.q_layout, self.kv_layout
        problem = neighborhood.Problem(
            q, kv, kv, self.kernel_size, self.dilation, self.stride, self.is_causal, self.scale,
            self.boundary, self.precision, return_lse=self.return_residuals)
        return replace(problem, dy=q, y=q, lse=self.lse_layout) if backward else problem

    def rotation(self, inverse: bool) -> rotary.Problem | None:
        if self.cos is None or self.sin is None:
            return None
        tokens = math.prod(self.lead[1:])
        q, k = (Layout((self.lead[0], tokens, heads, self.head_dim), self.dtype)
                for heads in (self.heads, self.kv_heads))
        width = self.cos.shape[-1]
        return rotary.Problem(
            q, k, q, k, self.cos, self.sin, None, None,
            self.head_dim if width == self.head_dim else 2 * width, self.interleaved, inverse)


def features(buffer: str, layout: Layout) -> Matrix:
    """See a contiguous [*lead, heads, head_dim] array as (tokens, heads * head_dim)."""
    columns = layout.shape[-2] * layout.shape[-1]
    return Matrix(buffer, math.prod(layout.shape[:-2]), columns, columns, 1)


def _rotate(problem: Problem, device: Device, names: tuple[str, str], inverse: bool) -> Program:
    rotation = problem.rotation(inverse)
    if rotation is None:
        return Program(())
    row = choose("rope", rotary.TABLE, rotation, device)
    q, k = names
    program = row.program(rotation, device).renamed({"q": q, "k": k, "q_out": q, "k_out": k})
    # The module's tables have a row per token: no offset to pass at call time.
    return Program(tuple(type(s)(s.kernel, s.grid, {**s.values, "offset": 0}, s.buffers)
                         for s in program.steps), program.scratch)


@dataclass(frozen=True)
class Composed(Row):
    """Every part by the row it chooses from its own table."""

    dtype: str

    @property
    def name(self) -> str:
        return f"composed_{self.dtype}"

    def refuses(self, problem: Problem, device: Device) -> str | None:
        if problem.dtype != self.dtype:
            return f"dtype {problem.dtype} is not {self.dtype}"
        if problem.head_dim > 512:
            return f"head_dim {problem.head_dim} exceeds 512"
        return None

    def kernels(self) -> tuple[Kernel, ...]:
        """Return the kernels that no part's table has."""
        return ()


def _products(problem: Problem, device: Device, *products: Product, summed: bool = False
              ) -> Program:
    return linear.program(
        linear.Problem(problem.dtype, problem.precision, products, summed), device)


@dataclass(frozen=True)
class ComposedForward(Composed):
    def program(self, problem: Problem, device: Device) -> Program:
        x = matrix("hidden_states", problem.hidden_states)
        projections = _products(problem, device, *(
            _project(problem, features(name, layout), x, f"{name}_weight", f"{name}_bias")
            for name, layout in (("q", problem.q_layout), ("k", problem.kv_layout),
                                 ("v", problem.kv_layout))))
        attention = problem.attention(backward=False)
        row = choose("neighborhood_fwd", neighborhood.FORWARD, attention, device)
        y = Layout(problem.hidden_states.shape, problem.dtype)
        scratch = {} if problem.return_residuals else {
            name: layout for name, layout in problem.residuals.items() if name != "lse"}
        return planes_first(
            Program((), scratch)
            + projections
            + _rotate(problem, device, ("q", "k"), inverse=False)
            + row.program(attention, device).renamed({"y": "attn"})
            + _products(problem, device, _project(
                problem, matrix("y", y), features("attn", problem.q_layout), "out_weight",
                "out_bias")))


def _project(problem: Problem, c: Matrix, x: Matrix, weight: str, bias: str) -> Product:
    layout = getattr(problem, bias)
    return Product(x, matrix(weight, getattr(problem, weight)), c, bias if layout else None,
                   layout.strides[0] if layout else 1)


@dataclass(frozen=True)
class ComposedBackward(Composed):
    def kernels(self) -> tuple[Kernel, ...]:
        return linear.column_sum_kernels(self.dtype)

    def program(self, problem: Problem, device: Device) -> Program:
        assert problem.dy is not None
        dtype, q, kv = problem.dtype, problem.q_layout, problem.kv_layout
        x, dy = matrix("hidden_states", problem.hidden_states), matrix("dy", problem.dy)
        weight = {name: matrix(name, getattr(problem, name)) for name in WEIGHTS}
        # Contiguous results, named d_ and the array's name.
        result = {name: matrix(f"d_{name}", Layout(getattr(problem, name).shape, dtype))
                  for name in ("hidden_states", *WEIGHTS)}
        d_attn, attn = features("d_attn", q), features("attn", q)
        grads = {"q": features("dq", q), "k": features("dk", kv), "v": features("dv", kv)}

        attention = problem.attention(backward=True)
        row = choose("neighborhood_bwd", neighborhood.BACKWARD, attention, device)
        return planes_first(
            Program((), {"d_attn": q, "dq": q, "dk": kv, "dv": kv})
            + _products(problem, device, Product(dy, weight["out_weight"].T, d_attn))
            + row.program(attention, device).renamed({"dy": "d_attn", "y": "attn"})
            + _rotate(problem, device, ("dq", "dk"), inverse=True)
            + _products(problem, device, *(
                Product(g, weight[f"{n}_weight"].T, result["hidden_states"])
                for n, g in grads.items()), summed=True)
            + _products(problem, device, *(
                Product(g.T, x.T, result[f"{n}_weight"]) for n, g in grads.items()),
                Product(dy.T, attn.T, result["out_weight"]))
            + linear.column_sums(dtype, [
                (g, f"d_{n}_bias") for n, g in (*grads.items(), ("out", dy))
                if getattr(problem, f"{n}_bias")], device))


FORWARD = tuple(ComposedForward(dtype) for dtype in FLOATS)
BACKWARD = tuple(ComposedBackward(dtype) for dtype in FLOATS)
