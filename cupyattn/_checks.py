"""Argument checks, one wording for all operators, before anything is allocated or launched.

Each operator has a function from layouts and options to its frozen problem. Wrong kinds raise
`TypeError`, wrong values `ValueError`, with the argument's name, the value, what is accepted.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Mapping
from typing import Any

import numpy as np

from ._arrays import FLOAT_NAMES
from ._program import FLOATS, Layout, accumulator, dense_like
from .configs import fused_neighborhood as fused_configs
from .configs import multi_token as multi_token_configs
from .configs import neighborhood as neighborhood_configs
from .configs import rope as rope_configs

Layouts = Mapping[str, "Layout | None"]

# ---------------------------------------------------------------------------------- scalars


def integer(name: str, value: Any) -> int:
    """Return an int for anything `operator.index` takes, except booleans."""
    if type(value) is int:
        return value
    if isinstance(value, np.ndarray) and value.shape == () and value.dtype.kind in "iu":
        return int(value)
    if isinstance(value, (bool, np.bool_)) or getattr(value, "shape", ()) != ():
        raise TypeError(f"{name} is {value!r}; accepted is an integer")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}, a {type(value).__name__}; accepted is an integer"
                        ) from None


def boolean(name: str, value: Any) -> bool:
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise TypeError(f"{name} is {value!r}, a {type(value).__name__}; accepted are True and False")


def choice(name: str, value: Any, accepted: tuple[str, ...]) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}, a {type(value).__name__}; accepted are "
                        f"{', '.join(map(repr, accepted))}")
    if value not in accepted:
        raise ValueError(f"{name} is {value!r}; accepted are {', '.join(map(repr, accepted))}")
    return value


def real(name: str, value: Any) -> float:
    """Return a finite float for a Python or NumPy real number."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (numbers.Real, np.number)):
        raise TypeError(f"{name} is {value!r}, a {type(value).__name__}; accepted is a real number")
    result = float(value)
    if not math.isfinite(result):
        raise ValueError(f"{name} is {value!r}; accepted is a finite number")
    return result


def scale(value: Any) -> float | None:
    return None if value is None else real("scale", value)


def per_axis(name: str, value: Any, rank: int, item: Any = integer) -> tuple:
    """Return one value per axis from one value or a tuple or list of them."""
    if isinstance(value, (tuple, list)):
        if len(value) != rank:
            raise ValueError(f"{name} is {value!r} with {len(value)} values; accepted are one "
                             f"value or one for each of the {rank} axes")
        return tuple(item(f"{name}[{a}]", x) for a, x in enumerate(value))
    return (item(name, value),) * rank


# ---------------------------------------------------------------------------------- layouts


def rank(name: str, layout: Layout, accepted: tuple[int, ...], form: str) -> None:
    if len(layout.shape) not in accepted:
        raise ValueError(f"{name} has shape {layout.shape}; accepted is {form}")


def shape(name: str, layout: Layout | None, expected: tuple[int, ...], why: str) -> None:
    if layout is not None and layout.shape != expected:
        raise ValueError(f"{name} has shape {layout.shape}; expected {expected} ({why})")


def same_dtype(layouts: Layouts, names: tuple[str, ...]) -> str:
    """Return the dtype tag that all the named arrays share; it is a float type."""
    first = ""
    dtype = ""
    for name in names:
        layout = layouts.get(name)
        if layout is None:
            continue
        if layout.dtype not in FLOATS:
            raise TypeError(f"{name} has dtype {FLOAT_NAMES[layout.dtype]}; accepted are float16, "
                            "bfloat16, float32, float64")
        if not first:
            first, dtype = name, layout.dtype
        elif layout.dtype != dtype:
            raise TypeError(f"{name} has dtype {FLOAT_NAMES[layout.dtype]} and {first} "
                            f"{FLOAT_NAMES[dtype]}; pass arrays of one dtype")
    return dtype


def statistics_dtype(name: str, layout: Layout | None, dtype: str) -> None:
    """Check lse or dlse: float32, or float64 beside float64 arrays."""
    if layout is not None and layout.dtype != accumulator(dtype):
        raise TypeError(f"{name} has dtype {FLOAT_NAMES[layout.dtype]}; accepted is "
                        f"{FLOAT_NAMES[accumulator(dtype)]} beside {FLOAT_NAMES[dtype]} arrays")


# ---------------------------------------------------------------------- neighborhood attention


def window(kernel_size, dilation, stride, is_causal, boundary: str, space: tuple[int, ...],
           empty: bool) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Check the window of every axis; return kernel_size, dilation and stride.

    Values far beyond the axis are brought down to ones that mean the same, so that they fit
    the kernels' 32-bit fields.
    """
    sizes, steps = [], []
    for a, (length, w, d, s) in enumerate(zip(space, kernel_size, dilation, stride)):
        for name, value in (("kernel_size", w), ("dilation", d), ("stride", s)):
            if value < 1:
                raise ValueError(f"{name}[{a}] is {value}; accepted is an integer of at least 1")
        if boundary == "clip":
            if w % 2 == 0:
                raise ValueError(f"kernel_size[{a}] is {w}; boundary 'clip' accepts odd sizes only")
            if s != 1:
                raise ValueError(f"stride[{a}] is {s}; boundary 'clip' accepts a stride of 1 only")
            w, d = min(w, 2 * length + 1), min(d, max(length, 1))
        elif s > w:
            raise ValueError(f"stride[{a}] is {s}; accepted is at most kernel_size[{a}] = {w}")
        elif not empty and w * d > length:
            raise ValueError(f"kernel_size[{a}] * dilation[{a}] is {w} * {d} = {w * d}, but the "
                             f"space extent there is {length}; accepted is at most that extent "
                             "(boundary 'clip' has no such limit)")
        sizes.append(w)
        steps.append(d)
    return tuple(sizes), tuple(steps), stride


def neighborhood(layouts: Layouts, options: tuple) -> neighborhood_configs.Problem:
    """Check a call of neighborhood attention, forward or backward."""
    (kernel_size, dilation, stride, is_causal, scale_, boundary, precision, return_lse) = options
    q, k, v = layouts["q"], layouts["k"], layouts["v"]
    assert q is not None and k is not None and v is not None
    dtype = same_dtype(layouts, ("q", "k", "v", "dy", "y"))
    rank("q", q, (4, 5, 6), "(batch, *space, heads, head_dim) with 1 to 3 space axes")
    for name, other in (("k", k), ("v", v)):
        rank(name, other, (len(q.shape),), f"rank {len(q.shape)}, that of q {q.shape}")
        if other.shape[:-2] != q.shape[:-2]:
            raise ValueError(f"{name} has shape {other.shape} and q {q.shape}; batch and space "
                             "axes must be the same")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k has shape {k.shape} and q {q.shape}; the last axis (head_dim) must "
                         "be the same")
    if v.shape[-2] != k.shape[-2]:
        raise ValueError(f"v has shape {v.shape} and k {k.shape}; kv_heads (axis -2) must be the "
                         "same")
    for name, layout in (("q", q), ("v", v)):
        if layout.shape[-1] == 0:
            raise ValueError(f"{name} has shape {layout.shape}; accepted is a last axis of at "
                             "least 1")
    heads, kv_heads = q.shape[-2], k.shape[-2]
    if (heads % kv_heads if kv_heads else heads) != 0:
        raise ValueError(f"q has {heads} heads and k {kv_heads}; the first must be a multiple of "
                         "the second")
    space = q.shape[1:-2]
    kernel_size, dilation, stride = window(kernel_size, dilation, stride, is_causal, boundary,
                                           space, empty=q.size == 0)
    head_dim = q.shape[-1]
    problem = neighborhood_configs.Problem(
        q, k, v, kernel_size, dilation, stride, is_causal,
        head_dim ** -0.5 if scale_ is None else scale_, boundary, precision, return_lse,
        layouts.get("dy"), layouts.get("y"), layouts.get("lse"), layouts.get("dlse"))
    for name in ("dy", "y"):
        shape(name, layouts.get(name), problem.y_layout.shape, "that of the forward's y")
    for name in ("lse", "dlse"):
        statistics_dtype(name, layouts.get(name), dtype)
        shape(name, layouts.get(name), problem.lse_layout.shape, "that of the forward's lse")
    return problem


# ------------------------------------------------------------------------------ fused module


def fused_neighborhood(layouts: Layouts, options: tuple) -> fused_configs.Problem:
    """Check a call of the fused module, forward or backward."""
    (heads, kv_heads, kernel_size, dilation, stride, is_causal, scale_, boundary, interleaved,
     precision, return_residuals) = options
    x = layouts["hidden_states"]
    assert x is not None
    weights: Any = [layouts[name] for name in fused_configs.WEIGHTS]
    biases: Any = [layouts[name] for name in fused_configs.BIASES]
    dtype = same_dtype(layouts, ("hidden_states", *fused_configs.WEIGHTS, *fused_configs.BIASES,
                                 "dy", "q", "k", "v", "attn"))
    rank("hidden_states", x, (3, 4, 5), "(batch, *space, hidden) with 1 to 3 space axes")
    hidden = x.shape[-1]
    if hidden == 0:
        raise ValueError(f"hidden_states has shape {x.shape}; accepted is a last axis of at "
                         "least 1")
    kv_heads = heads if kv_heads is None else kv_heads
    for name, value in (("num_heads", heads), ("num_kv_heads", kv_heads)):
        if value < 1:
            raise ValueError(f"{name} is {value}; accepted is an integer of at least 1")
    if heads % kv_heads:
        raise ValueError(f"num_heads is {heads} and num_kv_heads {kv_heads}; the first must be a "
                         "multiple of the second")
    for name, weight in zip(fused_configs.WEIGHTS, weights):
        rank(name, weight, (2,), "(output features, input features)")
    q_rows = weights[0].shape[0]
    if q_rows == 0 or q_rows % heads:
        raise ValueError(f"q_weight has shape {weights[0].shape}; accepted is a positive multiple "
                         f"of num_heads = {heads} rows")
    head_dim = q_rows // heads
    kv_rows = kv_heads * head_dim
    for name, weight, bias, out, into in zip(
            "q k v out".split(), weights, biases, (q_rows, kv_rows, kv_rows, hidden),
            (hidden, hidden, hidden, q_rows)):
        shape(f"{name}_weight", weight, (out, into),
              f"num_heads = {heads}, num_kv_heads = {kv_heads}, head_dim = {head_dim}, hidden = "
              f"{hidden}")
        shape(f"{name}_bias", bias, (out,), f"one value per row of {name}_weight")
    space = x.shape[1:-1]
    kernel_size, dilation, stride = window(kernel_size, dilation, stride, is_causal, boundary,
                                           space, empty=x.size == 0)
    shape("dy", layouts.get("dy"), x.shape, "that of hidden_states")
    cos, sin = layouts.get("cos"), layouts.get("sin")
    tokens = math.prod(space)
    if cos is not None and sin is not None:
        cos, sin, width = _tables(cos, sin, x.shape[0])
        _rotary_dim(None, width, head_dim)
        if cos.shape[1] != tokens:
            raise ValueError(f"rope[0] has {cos.shape[1]} rows; expected {tokens}, one per token")
    named: Any = dict(zip((*fused_configs.WEIGHTS, *fused_configs.BIASES), weights + biases))
    problem = fused_configs.Problem(
        hidden_states=x, **named, cos=cos, sin=sin, interleaved=interleaved, heads=heads,
        kv_heads=kv_heads, kernel_size=kernel_size, dilation=dilation, stride=stride,
        is_causal=is_causal, scale=head_dim ** -0.5 if scale_ is None else scale_,
        boundary=boundary, precision=precision, return_residuals=return_residuals,
        dy=layouts.get("dy"))
    for name, expected in problem.residuals.items():
        given = layouts.get(name)
        if name == "lse":
            statistics_dtype("residuals (lse)", given, dtype)
        shape(f"residuals ({name})", given, expected.shape,
              "pass what the forward returned for the same arguments")
    return problem


# ---------------------------------------------------------------------- multi-token attention


def multi_token(layouts: Layouts, options: tuple) -> multi_token_configs.Problem:
    """Check a call of multi-token attention, forward or backward."""
    groups, dilation, padding, activation = options
    scores, weight, bias = layouts["scores"], layouts["weight"], layouts["bias"]
    assert scores is not None and weight is not None
    same_dtype(layouts, ("scores", "weight", "bias", "dy"))
    rank("scores", scores, (4,), "(batch, heads_in, seq, seq)")
    rank("weight", weight, (4,), "(heads_out, heads_in // groups, kh, kw)")
    batch, heads_in, rows, columns = scores.shape
    if rows != columns:
        raise ValueError(f"scores has shape {scores.shape}; the last two axes must be the same")
    heads_out, per_group, kh, kw = weight.shape
    if groups < 1:
        raise ValueError(f"groups is {groups}; accepted is an integer of at least 1")
    for name, heads in (("scores", heads_in), ("weight", heads_out)):
        if heads % groups:
            raise ValueError(f"groups is {groups}; accepted is a divisor of the {heads} heads of "
                             f"{name} {layouts[name].shape}")  # type: ignore[union-attr]
    if per_group != heads_in // groups:
        raise ValueError(f"weight has shape {weight.shape}; expected heads_in // groups = "
                         f"{heads_in} // {groups} = {heads_in // groups} on axis 1")
    for name, value in (("kh", kh), ("kw", kw)):
        if value < 1:
            raise ValueError(f"weight has shape {weight.shape}; accepted is {name} of at least 1")
    for a, d in enumerate(dilation):
        if d < 1:
            raise ValueError(f"dilation[{a}] is {d}; accepted is an integer of at least 1")
    shape("bias", bias, (heads_out,), "one value per output head")
    shape("dy", layouts.get("dy"), (batch, heads_out, rows, rows), "that of the forward's y")
    # A dilation beyond the matrix moves every tap but the centre one outside: so does seq.
    dilation = tuple(min(d, max(rows, 1)) for d in dilation)
    return multi_token_configs.Problem(scores, weight, bias, layouts.get("dy"), groups, dilation,
                                       padding, activation)


# --------------------------------------------------------------------------------------- rope


def _tables(cos: Layout, sin: Layout, batch: int) -> tuple[Layout, Layout, int]:
    """Check the pair of tables; return them with a batch axis, and their width."""
    same_dtype({"cos": cos, "sin": sin}, ("cos", "sin"))
    rank("cos", cos, (2, 3), "(table, width) or (batch or 1, table, width)")
    if sin.shape != cos.shape:
        raise ValueError(f"sin has shape {sin.shape} and cos {cos.shape}; they must be the same")
    if len(cos.shape) == 3 and cos.shape[0] not in (1, batch):
        raise ValueError(f"cos has shape {cos.shape}; accepted is 1 or batch = {batch} on axis 0")
    if len(cos.shape) == 2:
        cos, sin = (Layout((1, *t.shape), t.dtype, (0, *t.strides), t.align) for t in (cos, sin))
    return cos, sin, cos.shape[-1]


def _rotary_dim(given: int | None, width: int, head_dim: int) -> int:
    """Return rotary_dim, from the tables' width where it is not given, or raise."""
    if given is None:
        rotary_dim = head_dim if width == head_dim else 2 * width
        if rotary_dim > head_dim or rotary_dim % 2:
            raise ValueError(f"cos has width {width}, which makes rotary_dim {rotary_dim}; "
                             f"accepted is an even rotary_dim of at most head_dim = {head_dim}")
        return rotary_dim
    if given < 0 or given % 2 or given > head_dim:
        raise ValueError(f"rotary_dim is {given}; accepted is an even number from 0 to head_dim = "
                         f"{head_dim}")
    if width not in (given, given // 2):
        raise ValueError(f"cos has width {width}; accepted is rotary_dim // 2 = {given // 2} or "
                         f"rotary_dim = {given}")
    return given


def heads_after_seq(layout: Layout | None, layout_name: str) -> Layout | None:
    """See a "bhsd" array in the axis order [batch, seq, heads, head_dim]."""
    if layout is None or layout_name == "bshd":
        return layout
    order = (0, 2, 1, 3)
    return Layout(tuple(layout.shape[a] for a in order), layout.dtype,
                  tuple(layout.strides[a] for a in order), layout.align)


def rope(layouts: Layouts, options: tuple) -> rope_configs.Problem:
    """Check a call of rope. The offset itself is checked by `rope_rows`, call by call."""
    rotary_dim, interleaved, inverse, layout_name, offsets = options
    cos, sin = layouts["cos"], layouts["sin"]
    assert cos is not None and sin is not None
    form = ("(batch, heads, seq, head_dim) for layout 'bhsd'" if layout_name == "bhsd"
            else "(batch, seq, heads, head_dim) for layout 'bshd'")
    same_dtype(layouts, ("q", "k"))
    for name in ("q", "k"):
        if layouts[name] is not None:
            rank(name, layouts[name], (4,), form)  # type: ignore[arg-type]
    q, k = (heads_after_seq(layouts[name], layout_name) for name in ("q", "k"))
    given = q or k
    if given is None:
        raise TypeError("q and k are both None; accepted is at least one array")
    if q is not None and k is not None:
        for axis, what in ((0, "batch"), (1, "seq"), (3, "head_dim")):
            if q.shape[axis] != k.shape[axis]:
                raise ValueError(f"{what} is {k.shape[axis]} in k and {q.shape[axis]} in q; it "
                                 "must be the same")
    batch, seq, _, head_dim = given.shape
    if head_dim == 0:
        raise ValueError(f"head_dim is 0; accepted is {form} with head_dim of at least 1")
    cos, sin, width = _tables(cos, sin, batch)
    rotary_dim = _rotary_dim(rotary_dim, width, head_dim)
    ids = layouts["position_ids"]
    if ids is not None:
        if ids.dtype not in ("i32", "i64"):
            raise TypeError(f"position_ids has dtype {FLOAT_NAMES[ids.dtype]}; accepted are int32 "
                            "and int64")
        rank("position_ids", ids, (1, 2), "(seq,) or (batch, seq)")
        if ids.shape[-1] != seq or (len(ids.shape) == 2 and ids.shape[0] not in (1, batch)):
            raise ValueError(f"position_ids has shape {ids.shape}; accepted are ({seq},) and "
                             f"({batch}, {seq})")
        if len(ids.shape) == 1:
            ids = Layout((1, seq), ids.dtype, (0, *ids.strides))
        elif ids.shape[0] == 1:
            ids = Layout((1, seq), ids.dtype, (0, ids.strides[1]))
    if offsets is not None and len(offsets) != batch:
        raise ValueError(f"offset has {len(offsets)} values; accepted are one, or one for each of "
                         f"the {batch} batch items")
    outs = [heads_after_seq(layouts[name], layout_name) or like and dense_like(like)
            for name, like in (("q_out", q), ("k_out", k))]
    return rope_configs.Problem(
        q, k, outs[0], outs[1], cos, sin, ids,
        (min(offsets), max(offsets)) if offsets else None, rotary_dim, interleaved, inverse,
        layout_name == "bshd")


def rope_rows(low: int, high: int, table: int) -> None:
    """Check that the rows low .. high of host-known positions are inside the table."""
    if low < 0 or high >= table:
        row = low if low < 0 else high
        raise ValueError(f"position row {row} is outside the table; cos and sin have {table} "
                         "rows, accepted are rows 0 to "
                         f"{table - 1} (position_ids, or the token's number, plus offset)")


# -------------------------------------------------------------------------- before the layouts


def space_rank(name: str, x: Any, without: int) -> int:
    """Return how many space axes an array has, so that options can be given one per axis.

    `without` counts its other axes. A wrong rank is reported with the other shapes, later.
    """
    return min(max(len(getattr(x, "shape", ())) - without, 1), 3)


def outputs(out: Any, count: int, most: int | None = None) -> tuple | None:
    """Return `out` as a tuple of `count` entries (None: allocate), or None."""
    if out is None:
        return None
    if not isinstance(out, (tuple, list)):
        if count == 1:
            return (out,)
        raise TypeError(f"out is a {type(out).__name__}; accepted is a tuple of {count} arrays")
    given = tuple(out)
    if len(given) != count and not (len(given) == most and not any(
            x is not None for x in given[count:])):
        raise ValueError(f"out has {len(given)} entries; accepted are {count}")
    return given[:count] if any(x is not None for x in given) else None
