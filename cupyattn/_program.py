"""What tables are made of: layouts, kernels, steps, programs, rows. No array library needed.

A *problem* (one frozen dataclass per operator, in ``configs/``) says everything about a call
except addresses. The first *row* of a table that does not refuse the problem turns it into a
*program*: the kernels to launch one after the other, the values of their parameters, and the
scratch memory between them. Buffers are named; addresses arrive when the program runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar

# Size in bytes and the C++ name of every element type that kernels know.
ITEMSIZE = {"f16": 2, "bf16": 2, "f32": 4, "f64": 8, "i32": 4, "i64": 8}
CTYPE = {"f16": "f16", "bf16": "bf16", "f32": "float", "f64": "double", "i32": "int",
         "i64": "long long"}
FLOATS = ("f16", "bf16", "f32", "f64")


def accumulator(dtype: str) -> str:
    """Return the dtype in which sums over `dtype` are kept."""
    return "f64" if dtype == "f64" else "f32"


def few(dtype: str, examples: Sequence[Any]) -> Sequence[Any]:
    """Return the examples of which to compile kernels ahead of time; the first one stands for f16.

    Its code is that of bf16 but for conversions.
    """
    return examples[:1] if dtype == "f16" else examples


def cdiv(a: int, b: int) -> int:
    """Return a / b rounded up."""
    return -(-a // b)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of a C-ordered array of this shape."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


@dataclass(frozen=True)
class Layout:
    """An array without its memory: shape, strides in elements, dtype tag, alignment in bytes."""

    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...] = ()
    align: int = 16

    def __post_init__(self):
        if not self.strides:
            object.__setattr__(self, "strides", contiguous_strides(self.shape))

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * ITEMSIZE[self.dtype]

    @property
    def unit_last(self) -> bool:
        """Whether neighbours on the last axis are neighbours in memory."""
        return not self.shape or self.shape[-1] <= 1 or self.strides[-1] == 1


def dense_like(layout: Layout) -> Layout:
    """Return the layout of a new array without gaps, whose axes lie in memory as this one's do."""
    order = sorted(range(len(layout.shape)), key=lambda axis: -abs(layout.strides[axis]))
    strides, step = [0] * len(order), 1
    for axis in reversed(order):
        strides[axis] = step
        step *= max(layout.shape[axis], 1)
    dense = Layout(layout.shape, layout.dtype, tuple(strides))
    return dense if dense.unit_last else Layout(layout.shape, layout.dtype)


@dataclass(frozen=True)
class Device:
    """What a row may ask about a GPU."""

    index: int
    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_memory: int  # bytes a block may opt in to
    l2: int  # bytes

    @property
    def target(self) -> str:
        return "sm_{}{}".format(*self.capability)


@dataclass(frozen=True)
class Kernel:
    """One instance of a device template: all that its source text depends on.

    `function` is a ``template <class Config> __device__ void`` in `source`; `config` are the
    members of ``struct Config``; `params` is the struct it takes; `blocks` of it must fit a
    multiprocessor at once, which bounds the registers; `target` is set for rows that need one
    architecture, such as ``"sm_90a"``. What `early` names may touch no memory but its block's own,
    and prefetch.
    """

    name: str
    source: str
    function: str
    params: str
    config: tuple[str, ...]
    threads: int
    blocks: int = 1
    target: str | None = None
    early: str | None = None  # device template that is called before the wait for earlier work


_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class TensorMap:
    """An array as the copy engine of sm_90 sees it, and the box that it copies at a time.

    Innermost axis first. `strides` are bytes, of the axes from the second on, multiples of 16; the
    address must be one too. `dtype` may be "tf32": float32 rounded to it on the way. A row of a
    box takes 128 or 64 bytes, and its sixteenths are swizzled. Along an axis every so many elements
    are taken of a box (`steps`, none unless given).
    """

    dtype: str
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    steps: tuple[int, ...] = ()


@dataclass(frozen=True)
class Step:
    """One launch: the kernel, its grid, and where each parameter comes from.

    `values` are constants, `buffers` maps pointer fields to buffer names, `scalars` maps fields
    to values that may change from call to call, `maps` describes tensor maps, whose `address` is
    among the pointer fields. Fields of nested structs are written with dots.
    """

    kernel: Kernel
    grid: tuple[int, int, int]
    values: Mapping[str, Any]
    buffers: Mapping[str, str]
    scalars: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    shared: int = 0
    maps: Mapping[str, TensorMap] = field(default_factory=lambda: _NOTHING)

    def renamed(self, names: Mapping[str, str]) -> Step:
        return replace(self, buffers={k: names.get(b, b) for k, b in self.buffers.items()})


@dataclass(frozen=True)
class Program:
    """The launches of one call, in order, and the scratch buffers that they share."""

    steps: tuple[Step, ...]
    scratch: Mapping[str, Layout] = field(default_factory=lambda: _NOTHING)

    def renamed(self, names: Mapping[str, str]) -> Program:
        """Return the same launches on buffers of other names (to compose programs)."""
        return Program(tuple(step.renamed(names) for step in self.steps),
                       {names.get(n, n): layout for n, layout in self.scratch.items()})

    def __add__(self, other: Program) -> Program:
        return Program(self.steps + other.steps, {**self.scratch, **other.scratch})

    @property
    def scratch_bytes(self) -> int:
        return sum(layout.nbytes for layout in self.scratch.values())


@dataclass(frozen=True)
class Row:
    """One way to do a problem. Tables list rows in order of preference, the plain ones last."""

    target: ClassVar[str | None] = None  # an architecture such as "sm_90a"; None: sm_80 and up

    @property
    def name(self) -> str:
        raise NotImplementedError

    def kind(self) -> tuple:
        """Return what a problem must have whatever its sizes, such as the dtype."""
        return tuple(getattr(self, name, None) for name in ("dtype", "table_dtype", "activation"))

    def refuses(self, problem: Any, device: Device) -> str | None:
        """Return the reason why this row cannot do the problem, or None if it can."""
        raise NotImplementedError

    def program(self, problem: Any, device: Device) -> Program:
        """Return what to launch. Only called when the row does not refuse."""
        raise NotImplementedError

    def kernels(self) -> tuple[Kernel, ...]:
        """Return every kernel that the row may launch, for compilation ahead of time."""
        raise NotImplementedError

    def notes(self, problem: Any, device: Device) -> list[str]:
        """Return what people may want to know of how the row does a problem, for `explain`."""
        return []


def token_view(layout: Layout | None) -> dict[str, Any]:
    """Return the strides of `TokenView` (kernels/common/params.cuh) for a heads-last array.

    `layout` is (batch, *space, heads, features) of rank 4 to 6; missing leading space axes
    have extent 1 and stride 0. None (an absent array) gives zeros.
    """
    if layout is None:
        return {"batch": 0, "space": (0, 0, 0), "head": 0}
    space = layout.strides[1:-2]
    return {"batch": layout.strides[0], "space": (0,) * (3 - len(space)) + space,
            "head": layout.strides[-2]}
