"""The kinds of workload: shapes, options, useful work and bytes, all from their definition.

Work counts the (query, key) pairs inside windows, not those inside tiles. Bytes count each array
that the operation must read or write once; intermediate results are not among them.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

DIRECTIONS = ("forward", "backward")
ITEMSIZE = {"bf16": 2, "f16": 2, "f32": 4, "f64": 8}
Shapes = dict[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Workload:
    """One problem of one operator; `arrays` and `results` give its shapes by name."""

    name: str
    operator: ClassVar[str]
    memory_bound: ClassVar[bool] = False

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    def arrays(self, direction: str) -> Shapes:
        """Return what the caller passes; backward adds the gradients of the results."""
        raise NotImplementedError

    def results(self, direction: str) -> Shapes:
        """Return what the call writes."""
        raise NotImplementedError

    def flops(self, direction: str) -> float:
        """Return the useful floating-point operations."""
        raise NotImplementedError

    def nbytes(self, direction: str) -> int:
        """Return the bytes that must be moved."""
        shapes = [*self.arrays(direction).values(), *self.results(direction).values()]
        return self.itemsize * sum(map(math.prod, shapes))

    @property
    def rate(self) -> str:
        """Return which measured product rate bounds it."""
        precision = getattr(self, "precision", "fp32")
        return {"f64": "f64", "f32": "tf32" if precision == "tf32" else "f32"}.get(
            self.dtype, "bf16"
        )


@dataclasses.dataclass(frozen=True)
class Rope(Workload):
    seq: int = 2048
    hidden: int = 2048
    batch: int = 1
    heads: int = 32
    kv_heads: int = 8
    dtype: str = "bf16"
    operator: ClassVar[str] = "rope"
    memory_bound: ClassVar[bool] = True

    @property
    def options(self) -> dict[str, Any]:
        return {"layout": "bhsd"}

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def _pair(self, q: str, k: str) -> Shapes:
        # Stored [batch, seq, heads, head_dim], as projections leave it; passed heads first.
        shape = (self.batch, self.seq)
        return {q: (*shape, self.heads, self.head_dim), k: (*shape, self.kv_heads, self.head_dim)}

    def arrays(self, direction: str) -> Shapes:
        table = (1, self.seq, self.head_dim)
        names = ("q", "k") if direction == "forward" else ("dq", "dk")
        return {**self._pair(*names), "cos": table, "sin": table}

    def results(self, direction: str) -> Shapes:
        return self._pair("q", "k")

    def flops(self, direction: str) -> float:
        return 3.0 * sum(map(math.prod, self.results(direction).values()))


@dataclasses.dataclass(frozen=True)
class MultiToken(Workload):
    batch: int = 2
    channels: int = 4
    kernel: int = 3
    seq: int = 256
    groups: int = 1
    activation: str = "softmax"
    dtype: str = "bf16"
    operator: ClassVar[str] = "multi_token"
    memory_bound: ClassVar[bool] = True

    @property
    def options(self) -> dict[str, Any]:
        return {"groups": self.groups, "activation": self.activation}

    def arrays(self, direction: str) -> Shapes:
        square = (self.batch, self.channels, self.seq, self.seq)
        weight = (self.channels, self.channels // self.groups, self.kernel, self.kernel)
        dy = {"dy": square} if direction == "backward" else {}
        return {**dy, "scores": square, "weight": weight, "bias": (self.channels,)}

    def results(self, direction: str) -> Shapes:
        inputs = self.arrays("forward")
        if direction == "forward":
            return {"y": inputs["scores"]}
        return {"d_" + name: shape for name, shape in inputs.items()}

    def flops(self, direction: str) -> float:
        pairs = self.batch * self.seq * (self.seq + 1) // 2
        taps = self.channels * (self.channels // self.groups) * self.kernel**2
        return 2.0 * pairs * taps * (1 if direction == "forward" else 3)

    def nbytes(self, direction: str) -> int:
        # Only the lower triangles are read; the result is written whole.
        maps = self.batch * self.channels
        triangle, square = maps * self.seq * (self.seq + 1) // 2, maps * self.seq**2
        return self.itemsize * ((1 if direction == "forward" else 2) * triangle + square)


class Windowed:
    """What neighborhood attention and its fused module share: windows over a space."""

    @property
    def boundary(self) -> str:
        return "shift"

    @property
    def window_options(self) -> dict[str, Any]:
        return {
            "kernel_size": self.kernel_size,
            "dilation": self.dilation,
            "stride": self.stride,
            "is_causal": self.is_causal,
        }

    @property
    def tokens(self) -> int:
        return math.prod(self.space)

    def axes(self) -> list[tuple[int, int, int, int, bool, str]]:
        """Return (length, window, dilation, stride, causal, boundary) of each axis."""
        options = [per_axis(value, len(self.space)) for value in self.window_options.values()]
        return [(*axis, self.boundary) for axis in zip(self.space, *options, strict=True)]

    def pairs(self) -> int:
        """Return the number of (query, key) pairs inside windows, of one head of one image."""
        from cupyattn.reference.neighborhood import window

        total = 1
        for axis in self.axes():
            start, end = window(*axis)
            total *= int((end - start).sum())
        return total


@dataclasses.dataclass(frozen=True)
class Fused(Windowed, Workload):
    batch: int = 2
    space: tuple[int, ...] = (512,)
    hidden: int = 512
    heads: int = 8
    kernel_size: Any = 7
    dilation: Any = 1
    stride: Any = 1
    is_causal: Any = False
    precision: str = "fp32"
    dtype: str = "f32"
    operator: ClassVar[str] = "fused_neighborhood"

    @property
    def boundary(self) -> str:
        return "clip"

    @property
    def options(self) -> dict[str, Any]:
        return {"num_heads": self.heads, **self.window_options, "precision": self.precision}

    def arrays(self, direction: str) -> Shapes:
        x = (self.batch, *self.space, self.hidden)
        names = [f"{part}_{kind}" for kind in ("weight", "bias") for part in ("q", "k", "v", "out")]
        parameters = {n: (self.hidden,) * (2 if n.endswith("weight") else 1) for n in names}
        dy = {"dy": x} if direction == "backward" else {}
        return {**dy, "hidden_states": x, **parameters}

    def results(self, direction: str) -> Shapes:
        inputs = self.arrays("forward")
        if direction == "forward":
            return {"y": inputs["hidden_states"]}
        return {"d_" + name: shape for name, shape in inputs.items()}

    def flops(self, direction: str) -> float:
        product = 8.0 * self.batch * self.tokens * self.hidden**2
        attention = 4.0 * self.batch * self.hidden * self.pairs()
        return product + attention if direction == "forward" else 2 * product + 2.5 * attention


@dataclasses.dataclass(frozen=True)
class Neighborhood(Windowed, Workload):
    batch: int = 1
    space: tuple[int, ...] = (1024,)
    heads: int = 8
    head_dim: int = 64
    kernel_size: Any = 63
    stride: Any = 1
    dilation: Any = 1
    is_causal: Any = False
    precision: str = "fp32"
    dtype: str = "bf16"
    operator: ClassVar[str] = "neighborhood"

    @property
    def options(self) -> dict[str, Any]:
        return {**self.window_options, "precision": self.precision}

    def arrays(self, direction: str) -> Shapes:
        shape = (self.batch, *self.space, self.heads, self.head_dim)
        return dict.fromkeys((["dy"] if direction == "backward" else []) + ["q", "k", "v"], shape)

    def results(self, direction: str) -> Shapes:
        names = ["y"] if direction == "forward" else ["dq", "dk", "dv"]
        return dict.fromkeys(names, self.arrays("forward")["q"])

    def flops(self, direction: str) -> float:
        work = 4.0 * self.batch * self.heads * self.pairs() * self.head_dim
        return work if direction == "forward" else 2.5 * work

    def nbytes(self, direction: str) -> int:
        # Backward reads y besides its arrays: q, k, v, y and their gradients, eight in all.
        one = self.itemsize * self.batch * self.tokens * self.heads * self.head_dim
        return one * (4 if direction == "forward" else 8)


KINDS: dict[str, type[Workload]] = {
    kind.operator: kind for kind in (Rope, MultiToken, Fused, Neighborhood)
}
OPERATORS = tuple(KINDS)


def per_axis(value: Any, rank: int) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,) * rank
