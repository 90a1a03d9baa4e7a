"""Small problems with names, and the reason why each exists.

Each problem knows its inputs, its exact results (float64, wider for float64 arrays) and its plain
ones. Results are computed once per problem and dtype, and must not be written to.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import cupyattn
import numpy as np
import oracle
import plain
from kinds import DTYPES, Guard, capture, lower, mk, raw, wide
from tolerance import agree, identical


def once(method):
    """Compute a method's result once for each problem and dtype."""
    results = {}

    @functools.wraps(method)
    def remembered(*arguments):
        if arguments not in results:
            results[arguments] = method(*arguments)
        return results[arguments]

    return remembered


@dataclass(frozen=True)
class Call:
    """A public function with its arguments; calling it gives the tuple of its results."""

    function: Callable
    arrays: tuple
    options: dict

    def __call__(self, out=None):
        if out is not None and self.function is cupyattn.multi_token_attention:
            (out,) = out
        results = self.function(*self.arrays, **self.options, out=out)
        return results if isinstance(results, tuple) else (results,)

    def explain(self):
        """Which row does this."""
        return cupyattn.explain(self.function, *self.arrays, **self.options)

    def plan(self):
        """The same call, captured."""
        return cupyattn.plan(self.function, *self.arrays, **self.options)


def flat(*values):
    """All arrays inside nested tuples, None left out."""
    return [y for x in values for y in (flat(*x) if isinstance(x, tuple) else [x])
            if y is not None]


def check(problem, kind, dtype, put=None, row=""):
    """Run a problem forward and backward and hold every result to the rule of `tolerance`."""
    hold(problem, dtype, problem.run(kind, dtype, put), row)


def hold(problem, dtype, ours, row="", part=slice(None)):
    """Hold results (NumPy arrays in the order of `problem.results[part]`) to the rule."""
    named = {}
    for name, *values in zip(problem.results[part], ours, problem.exact(dtype)[part],
                             problem.plain(dtype)[part]):
        if values[1] is None:
            assert values[0] is None, f"{problem.name}: {name} is not None"
            continue
        assert values[0].shape == values[1].shape, f"{problem.name}: shape of {name}"
        assert name == "lse" or values[0].dtype == DTYPES[dtype], f"{problem.name}: {name}"
        label = problem.together.get(name, name)
        named.setdefault(label, []).append([v.reshape(-1) for v in values]
                                           if name in problem.together else values)
    for label, parts in named.items():
        joined = parts[0] if len(parts) == 1 else [np.concatenate(p) for p in zip(*parts)]
        agree(*joined, what=f"{problem.name} {dtype}: {label}", row=row)


def placed(values, put):
    """Put NumPy arrays, also those inside tuples, with a function."""
    if isinstance(values, tuple):
        return tuple(placed(v, put) for v in values)
    return put(values) if isinstance(values, np.ndarray) else values


# --- neighborhood attention ------------------------------------------------------------------


@dataclass(frozen=True)
class Neighborhood:
    """One call of neighborhood_attention."""

    results = ("y", "lse", "dq", "dk", "dv")
    forward_results = 2
    together = {}

    name: str
    why: str
    space: tuple[int, ...]
    kernel_size: int | tuple[int, ...]
    dilation: int | tuple[int, ...] = 1
    stride: int | tuple[int, ...] = 1
    causal: bool | tuple[bool, ...] = False
    boundary: str = "shift"
    batch: int = 1
    heads: int = 2
    kv_heads: int | None = None
    head_dim: int = 16
    value_dim: int | None = None
    scale: float | None = None

    @property
    def options(self):
        """Keywords of the public function, but for kernel_size."""
        return dict(dilation=self.dilation, stride=self.stride, is_causal=self.causal,
                    boundary=self.boundary, scale=self.scale)

    @property
    def arguments(self):
        """The same in the words of the oracle."""
        return dict(kernel_size=self.kernel_size, dilation=self.dilation, stride=self.stride,
                    causal=self.causal, boundary=self.boundary, scale=self.scale)

    @once
    def inputs(self, dtype):
        """q, k, v, dy and dlse."""
        kv_heads = self.kv_heads or self.heads
        value_dim = self.value_dim or self.head_dim
        at = (self.batch, *self.space)
        shapes = ((self.heads, self.head_dim), (kv_heads, self.head_dim), (kv_heads, value_dim),
                  (self.heads, value_dim))
        arrays = [mk(seed, at + shape, dtype) for seed, shape in enumerate(shapes)]
        return (*arrays, mk(4, at + (self.heads,), "f64" if dtype == "f64" else "f32"))

    @once
    def exact(self, dtype):
        """y, lse, dq, dk, dv; the gradients through lse included."""
        q, k, v, dy, dlse = self.inputs(dtype)
        options = dict(self.arguments, wide=wide(dtype))
        return (*oracle.na(q, k, v, **options), *oracle.na_bwd(q, k, v, dy, dlse=dlse, **options))

    @once
    def plain(self, dtype):
        """The same from the textbook sequence."""
        q, k, v, dy, dlse = self.inputs(dtype)
        return (*plain.na(q, k, v, **self.arguments),
                *plain.na_bwd(q, k, v, dy, dlse=dlse, **self.arguments))

    def calls(self, kind, dtype, put=None):
        """Return the forward and the backward on arrays of a kind."""
        q, k, v, dy, dlse = placed(self.inputs(dtype), put or kind.put)
        forward = Call(cupyattn.neighborhood_attention, (q, k, v, self.kernel_size),
                       dict(self.options, return_lse=True))
        y, lse = forward()
        if put is not None:
            y, lse = placed(lower(kind, (y, lse)), put)
        return forward, Call(cupyattn.neighborhood_attention_backward,
                             (dy, q, k, v, y, lse, self.kernel_size),
                             dict(self.options, dlse=dlse))

    def run(self, kind, dtype, put=None):
        """Every result, as NumPy arrays."""
        forward, backward = self.calls(kind, dtype, put)
        return lower(kind, (*forward(), *backward()))


NEIGHBORHOOD = (
    Neighborhood("prime_1d", "a length that no tile divides", (97,), 7, heads=3, batch=2),
    Neighborhood("one_token", "everything has extent 1 but head_dim", (1,), 3, boundary="clip",
                 heads=1),
    Neighborhood("window_is_axis", "every query sees every key", (33,), 33),
    Neighborhood("even", "one key more on the left", (40,), 8, head_dim=20),
    Neighborhood("strided", "a stride that does not divide the length", (50,), 9, stride=4),
    Neighborhood("stride_is_window", "blocked attention", (41,), 6, stride=6),
    Neighborhood("causal", "fewer keys at the start", (70,), 16, causal=True, heads=4),
    Neighborhood("causal_strided", "a window that ends before its leader", (43,), 8, stride=5,
                 causal=True),
    Neighborhood("dilated", "groups of different length", (61,), 5, dilation=4),
    Neighborhood("all_at_once_1d", "dilation, stride and causal together", (77,), 6, dilation=3,
                 stride=4, causal=True),
    Neighborhood("clipped", "the band is cut at both ends", (65,), 13, boundary="clip",
                 head_dim=33),
    Neighborhood("clipped_dilated", "a band with gaps", (37,), 7, dilation=3, boundary="clip"),
    Neighborhood("clipped_causal", "half a band", (37,), 9, causal=True, boundary="clip"),
    Neighborhood("clipped_wide", "a band wider than the axis", (9,), 31, boundary="clip"),
    Neighborhood("grouped", "six query heads share two", (31,), 5, heads=6, kv_heads=2, batch=2),
    Neighborhood("one_key_head", "all query heads share one", (29,), 6, heads=5, kv_heads=1),
    Neighborhood("narrow_values", "value_dim below head_dim", (45,), 9, head_dim=40, value_dim=8),
    Neighborhood("wide_values", "value_dim above head_dim", (45,), 9, head_dim=8, value_dim=72),
    Neighborhood("tiny_heads", "head_dim 1", (23,), 5, head_dim=1, heads=3),
    Neighborhood("scale_zero", "scale 0.0 is not None: the mean over the window", (20,), 5,
                 scale=0.0),
    Neighborhood("scale_given", "a scale of the caller's", (20,), 5, scale=-0.75),
    Neighborhood("square", "two axes, partial tiles on both", (11, 13), (5, 3), heads=3),
    Neighborhood("anisotropic", "every option differs by axis", (12, 10), (6, 5), dilation=(2, 1),
                 stride=(3, 2), causal=(False, True), kv_heads=1),
    Neighborhood("row_of_one", "an axis of extent 1", (1, 19), (1, 7)),
    Neighborhood("clipped_2d", "bands on both axes", (7, 9), (3, 5), dilation=(1, 2),
                 causal=(True, False), boundary="clip", batch=2),
    Neighborhood("cube", "three axes, all even and odd kinds", (5, 6, 7), (3, 4, 5), heads=1),
    Neighborhood("video", "causal in time only, strided in space", (4, 8, 6), (3, 4, 3),
                 stride=(1, 4, 2), causal=(True, False, False), dilation=(1, 2, 1)),
    Neighborhood("clipped_3d", "bands on three axes", (3, 5, 4), (3, 3, 5), boundary="clip"),
)

# One of each kind, for the tests that repeat over dtypes, layouts and streams.
NEIGHBORHOOD_FEW = tuple(p for p in NEIGHBORHOOD if p.name in (
    "prime_1d", "grouped", "wide_values", "anisotropic", "clipped_2d", "video"))


def neighborhood_of_size(head_dim, value_dim=None):
    """Return a problem of any head_dim."""
    return Neighborhood(f"d{head_dim}_{value_dim or head_dim}", "this head_dim", (37,), 5, heads=2,
                        kv_heads=1, head_dim=head_dim, value_dim=value_dim, dilation=2)


# --- fused module ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Fused:
    """One call of fused_neighborhood_attention."""

    results = ("y", "d_hidden_states", "d_q_weight", "d_k_weight", "d_v_weight", "d_out_weight",
               "d_q_bias", "d_k_bias", "d_v_bias", "d_out_bias")
    # One array in a packed projection. On its own d_k_bias is 0 but for rounding: adding a vector
    # to every key changes no softmax; two roundings of 0 cannot be held against each other.
    forward_results = 1
    together = {f"d_{x}_bias": "d_qkv_bias" for x in "qkv"}

    name: str
    why: str
    space: tuple[int, ...]
    kernel_size: int | tuple[int, ...]
    hidden: int = 32
    heads: int = 4
    kv_heads: int | None = None
    head_dim: int = 8
    dilation: int | tuple[int, ...] = 1
    stride: int | tuple[int, ...] = 1
    causal: bool | tuple[bool, ...] = False
    boundary: str = "clip"
    scale: float | None = None
    batch: int = 2
    biases: str = "qkvo"  # which of the four there are
    rope: str = ""  # "", "half", "full" or "interleaved"

    @property
    def options(self):
        """Keywords of the public function, but for kernel_size and rope."""
        return dict(num_heads=self.heads, num_kv_heads=self.kv_heads, dilation=self.dilation,
                    stride=self.stride, is_causal=self.causal, boundary=self.boundary,
                    scale=self.scale)

    @once
    def inputs(self, dtype):
        """x, the weights, the biases, dy; weights keep projections near unit variance."""
        kv = self.kv_heads or self.heads
        rows = [n * self.head_dim for n in (self.heads, kv, kv)]
        shapes = [(n, self.hidden) for n in rows] + [(self.hidden, rows[0])]
        x, dy = (mk(seed, (self.batch, *self.space, self.hidden), dtype) for seed in (0, 1))
        weights = tuple((mk(2 + i, s) / math.sqrt(s[1])).astype(DTYPES[dtype])
                        for i, s in enumerate(shapes))
        biases = tuple(mk(6 + i, s[:1], dtype) if letter in self.biases else None
                       for i, (s, letter) in enumerate(zip(shapes, "qkvo")))
        return x, weights, biases, dy

    @once
    def tables(self, dtype):
        """cos and sin in the half form, one row per token; None without rotation."""
        if not self.rope:
            return None
        angle = (np.arange(math.prod(self.space), dtype=np.float64)[:, None]
                 * oracle.inv_freq(self.head_dim))
        table = DTYPES["f64" if dtype == "f64" else "f32"]
        return np.cos(angle).astype(table), np.sin(angle).astype(table)

    def rope_argument(self, dtype):
        """The value of `rope=`."""
        if not self.rope:
            return None
        if self.rope == "interleaved":
            return (*self.tables(dtype), True)
        if self.rope == "full":
            return tuple(np.concatenate((t, t), -1) for t in self.tables(dtype))
        return self.tables(dtype)

    def _arguments(self, dtype):
        return dict(num_heads=self.heads, num_kv_heads=self.kv_heads,
                    rope_tables=self.tables(dtype), interleaved=self.rope == "interleaved",
                    kernel_size=self.kernel_size, dilation=self.dilation, stride=self.stride,
                    causal=self.causal, boundary=self.boundary, scale=self.scale)

    @once
    def exact(self, dtype):
        """y and the nine gradients."""
        x, weights, biases, dy = self.inputs(dtype)
        options = dict(self._arguments(dtype), wide=wide(dtype))
        return (oracle.fused(x, weights, biases, **options),
                *oracle.fused_bwd(x, weights, biases, dy, **options))

    @once
    def plain(self, dtype):
        """The same from the textbook sequence."""
        x, weights, biases, dy = self.inputs(dtype)
        options = self._arguments(dtype)
        return (plain.fused(x, weights, biases, **options),
                *plain.fused_bwd(x, weights, biases, dy, **options))

    def calls(self, kind, dtype, put=None):
        """Return the forward (y and the residuals) and the backward on arrays of a kind."""
        put = put or kind.put
        x, weights, biases, dy = placed(self.inputs(dtype), put)
        options = dict(self.options, kernel_size=self.kernel_size,
                       rope=placed(self.rope_argument(dtype), put))
        forward = Call(cupyattn.fused_neighborhood_attention, (x, *weights, *biases),
                       dict(options, return_residuals=True))
        return forward, Call(cupyattn.fused_neighborhood_attention_backward,
                             (dy, x, *weights, *biases, forward()[1]), options)

    def run(self, kind, dtype, put=None):
        """Every result, as NumPy arrays."""
        forward, backward = self.calls(kind, dtype, put)
        return lower(kind, (*forward()[:1], *backward()))


FUSED = (
    Fused("published", "the published form: clipped, biases, one axis", (40,), 7),
    Fused("dilated", "the published form with dilation 2", (33,), 7, dilation=2),
    Fused("one_token", "a sequence of one", (1,), 3, batch=1),
    Fused("grouped", "fewer key heads than query heads", (24,), 5, kv_heads=2),
    Fused("no_biases", "all biases None", (19,), 5, biases="", boundary="shift"),
    Fused("some_biases", "only those of query and value", (19,), 5, biases="qv", causal=True),
    Fused("narrow", "heads * head_dim differs from hidden, nothing divides anything", (21,), 5,
          hidden=29, heads=3, kv_heads=1, head_dim=10),
    Fused("rotated", "rotation between projection and attention", (17,), 5, rope="half"),
    Fused("rotated_full", "tables with each value repeated", (17,), 5, rope="full", kv_heads=2),
    Fused("rotated_pairs", "neighbouring pairs, one row per token of a plane", (4, 5), 3,
          rope="interleaved"),
    Fused("square", "two axes, even window, stride", (6, 8), (4, 3), stride=(2, 1),
          boundary="shift"),
    Fused("video", "three axes, causal in time", (3, 4, 5), (3, 2, 3),
          causal=(True, False, False), boundary="shift", scale=0.3, batch=1),
)

FUSED_FEW = tuple(p for p in FUSED if p.name in ("grouped", "narrow", "rotated_pairs", "video"))


# --- multi-token attention -------------------------------------------------------------------


@dataclass(frozen=True)
class MultiToken:
    """One call of multi_token_attention."""

    results = ("y", "d_scores", "d_weight", "d_bias")
    forward_results = 1
    together = {}

    name: str
    why: str
    seq: int
    channels: int = 2
    outs: int = 2
    kernel: tuple[int, int] = (3, 3)
    groups: int = 1
    dilation: int | tuple[int, int] = 1
    padding: str = "same"
    activation: str = "softmax"
    bias: bool = True
    batch: int = 2
    spread: float = 1.0  # standard deviation of the scores

    @property
    def options(self):
        """Keywords of the public function."""
        return dict(groups=self.groups, dilation=self.dilation, padding=self.padding,
                    activation=self.activation)

    @once
    def inputs(self, dtype):
        """scores (NaN above the diagonal), weight, bias, dy (NaN above the diagonal)."""
        weight = mk(1, (self.outs, self.channels // self.groups, *self.kernel), dtype)
        bias = mk(2, (self.outs,), dtype) if self.bias else None
        upper = ~np.tri(self.seq, dtype=bool)
        scores = (mk(0, (self.batch, self.channels, self.seq, self.seq)) * self.spread)
        dy = mk(3, (self.batch, self.outs, self.seq, self.seq))
        scores[..., upper] = dy[..., upper] = np.nan
        scores = scores.astype(DTYPES[dtype])
        if self.activation == "sparsemax":
            scores = oracle.untied(scores)
        return scores, weight, bias, dy.astype(DTYPES[dtype])

    @once
    def exact(self, dtype):
        """y, d_scores, d_weight and d_bias (None without a bias)."""
        scores, weight, bias, dy = self.inputs(dtype)
        options = dict(self.options, wide=wide(dtype))
        return (oracle.mta(scores, weight, bias, **options),
                *oracle.mta_bwd(scores, weight, bias, dy, **options))

    @once
    def plain(self, dtype):
        """The same from the textbook sequence."""
        scores, weight, bias, dy = self.inputs(dtype)
        return (plain.mta(scores, weight, bias, **self.options),
                *plain.mta_bwd(scores, weight, bias, dy, **self.options))

    def calls(self, kind, dtype, put=None):
        """Return the forward and the backward on arrays of a kind."""
        scores, weight, bias, dy = placed(self.inputs(dtype), put or kind.put)
        return (Call(cupyattn.multi_token_attention, (scores, weight, bias), self.options),
                Call(cupyattn.multi_token_attention_backward, (dy, scores, weight, bias),
                     self.options))

    def run(self, kind, dtype, put=None):
        """Every result, as NumPy arrays."""
        forward, backward = self.calls(kind, dtype, put)
        return lower(kind, (*forward(), *backward()))


MULTI_TOKEN = (
    MultiToken("published", "the published form", 32, channels=4, outs=4),
    MultiToken("prime", "a length that no tile divides", 37, channels=3, outs=5),
    MultiToken("one_token", "one row of one", 1),
    MultiToken("kernel_above_seq", "a kernel larger than the map", 3, kernel=(7, 9)),
    MultiToken("pointwise", "kernel 1: channels mix, tokens do not", 20, kernel=(1, 1), outs=3),
    MultiToken("even", "an even kernel: one tap more before", 21, kernel=(2, 4)),
    MultiToken("tall", "rows only", 22, kernel=(5, 1)),
    MultiToken("flat", "columns only", 22, kernel=(1, 6), bias=False),
    MultiToken("wide_kernel", "11 x 11", 40, kernel=(11, 11), channels=1, outs=2),
    MultiToken("causal", "rows of earlier queries only", 26, kernel=(4, 3), padding="causal"),
    MultiToken("causal_dilated", "earlier queries, two apart", 26, kernel=(3, 2), dilation=(2, 3),
               padding="causal", bias=False),
    MultiToken("dilated", "taps that differ by axis", 33, kernel=(3, 5), dilation=(4, 2)),
    MultiToken("groups", "two groups", 19, channels=4, outs=6, groups=2),
    MultiToken("depthwise", "one channel a group", 19, channels=3, outs=6, groups=3,
               kernel=(3, 2)),
    MultiToken("sparsemax", "zeros inside the triangle", 35, activation="sparsemax"),
    MultiToken("sparsemax_flat", "a support as long as the row", 45, activation="sparsemax",
               spread=0.01, channels=1, outs=1),
    MultiToken("sparsemax_peaked", "a support of one or two", 45, activation="sparsemax",
               spread=20.0, groups=2, kernel=(2, 3)),
    MultiToken("large_scores", "exponentials that overflow without the maximum", 24, spread=200.0),
    MultiToken("long", "rows longer than one pass of a block", 300, channels=1, outs=1, batch=1),
)

MULTI_TOKEN_FEW = tuple(p for p in MULTI_TOKEN if p.name in (
    "prime", "groups", "causal_dilated", "sparsemax", "even"))


# --- rotary position embedding ---------------------------------------------------------------


@dataclass(frozen=True)
class Rope:
    """One call of rope."""

    results = ("q_out", "k_out", "dq", "dk")
    forward_results = 2
    together = {}

    name: str
    why: str
    seq: int
    head_dim: int = 16
    heads: tuple[int, int] = (3, 1)
    batch: int = 2
    rotary_dim: int | None = None  # as passed; None leaves it to the table's width
    half: int | None = None  # pairs that turn; head_dim // 2 if None
    full: bool = False  # tables with each value repeated
    interleaved: bool = False
    ids: str = ""  # "", "seq" or "batch": position_ids [seq] or [batch, seq]
    index: str = "i64"
    offset: int | tuple[int, ...] = 0
    inverse: bool = False
    layout: str = "bhsd"
    batched_table: bool = False
    table_dtype: str = ""  # that of q if empty

    @property
    def options(self):
        """Keywords of the public function, but for position_ids."""
        return dict(rotary_dim=self.rotary_dim, interleaved=self.interleaved, offset=self.offset,
                    layout=self.layout)

    def position_ids(self):
        """The value of `position_ids=`."""
        if not self.ids:
            return None
        shape = (self.seq,) if self.ids == "seq" else (self.batch, self.seq)
        kind = np.int32 if self.index == "i32" else np.int64
        return np.random.default_rng(9).integers(0, 40, shape).astype(kind)

    def positions(self):
        """Table rows [batch, seq]."""
        ids = np.arange(self.seq) if not self.ids else self.position_ids()
        offset = np.broadcast_to(np.asarray(self.offset), (self.batch,))
        return np.broadcast_to(ids, (self.batch, self.seq)) + offset[:, None]

    @once
    def tables(self, dtype):
        """cos and sin as passed: [table, width] or [batch, table, width]."""
        half = self.half or self.head_dim // 2
        length = int(self.positions().max()) + 3
        lead = (self.batch,) if self.batched_table else ()
        # Not on the unit circle: a rotation by an attention factor, and tables need no relation.
        both = [mk(5 + i, (*lead, length, half), self.table_dtype or dtype) for i in (0, 1)]
        if self.full:
            both = [np.repeat(t, 2, -1) if self.interleaved else np.concatenate((t, t), -1)
                    for t in both]
        return tuple(both)

    @once
    def inputs(self, dtype):
        """q and k in the layout of the call."""
        shapes = [(self.batch, h, self.seq, self.head_dim) if self.layout == "bhsd"
                  else (self.batch, self.seq, h, self.head_dim) for h in self.heads]
        return tuple(mk(i, s, dtype) for i, s in enumerate(shapes))

    def _rotated(self, dtype, rotate, inverse):
        half = self.half or self.head_dim // 2
        rows = self.positions()
        item = np.arange(self.batch)[:, None]
        tables = []
        for t in self.tables(dtype):
            t = t[item, rows] if self.batched_table else t[rows]
            if self.full:
                t = t[..., ::2] if self.interleaved else t[..., :half]
            tables.append(t)
        results = []
        for x in self.inputs(dtype):
            x = x.swapaxes(1, 2) if self.layout == "bhsd" else x
            y = rotate(x, *tables, self.interleaved, inverse != self.inverse)
            results.append(y.swapaxes(1, 2) if self.layout == "bhsd" else y)
        return tuple(results)

    @once
    def exact(self, dtype):
        """q and k rotated, and rotated the other way: the gradients, q and k standing for dy."""
        rotate = functools.partial(oracle.rotate, wide=wide(dtype))
        return self._rotated(dtype, rotate, False) + self._rotated(dtype, rotate, True)

    @once
    def plain(self, dtype):
        """The same in float32 arithmetic with one rounding."""
        return (self._rotated(dtype, plain.rotate, False)
                + self._rotated(dtype, plain.rotate, True))

    def calls(self, kind, dtype, put=None):
        """Return the forward and the backward on arrays of a kind."""
        arrays = placed((*self.inputs(dtype), *self.tables(dtype)), put or kind.put)
        options = dict(self.options, position_ids=placed(self.position_ids(), put or kind.put))
        backward = cupyattn.rope if self.inverse else cupyattn.rope_backward
        return (Call(cupyattn.rope, arrays, dict(options, inverse=self.inverse)),
                Call(backward, arrays, options))

    def run(self, kind, dtype, put=None):
        """Every result, as NumPy arrays."""
        forward, backward = self.calls(kind, dtype, put)
        return lower(kind, (*forward(), *backward()))


ROPE = (
    Rope("llama", "half-split, heads first", 33, head_dim=64, heads=(4, 2)),
    Rope("one_token", "one of everything", 1, batch=1, heads=(1, 1), head_dim=2),
    Rope("full_tables", "halves repeated", 20, full=True),
    Rope("pairs", "neighbouring pairs", 23, interleaved=True, head_dim=20),
    Rope("pairs_full", "neighbours repeated", 23, interleaved=True, full=True),
    Rope("partial", "a part turns, by the table's width", 17, half=4),
    Rope("partial_named", "rotary_dim given", 17, half=6, rotary_dim=12, interleaved=True),
    Rope("partial_full", "rotary_dim given with full tables", 17, half=4, rotary_dim=8, full=True),
    Rope("odd_head", "head_dim 33, 32 of it turn", 12, head_dim=33, half=16, rotary_dim=32),
    Rope("odd_pairs", "an odd number of pairs", 12, head_dim=22, heads=(2, 3)),
    Rope("tokens_first", "layout bshd", 29, layout="bshd", heads=(5, 2)),
    Rope("offset", "a cache that holds 11 tokens", 6, offset=11),
    Rope("offset_each", "one cache length per item", 6, batch=3, offset=(0, 7, 19)),
    Rope("ids", "positions given once", 15, ids="seq"),
    Rope("ids_each", "positions per item, int32", 15, ids="batch", index="i32", layout="bshd"),
    Rope("ids_offset", "positions and an offset per item", 9, ids="batch", offset=(2, 5)),
    Rope("inverse", "the transpose", 14, inverse=True, interleaved=True),
    Rope("table_each", "tables per item", 13, batched_table=True, ids="seq"),
    Rope("wide_head", "more features than a block has threads for a row", 5, head_dim=512,
         heads=(2, 1)),
)

ROPE_FEW = tuple(p for p in ROPE if p.name in (
    "llama", "pairs_full", "partial_named", "odd_pairs", "ids_each", "offset_each"))


def with_table(problem, dtype):
    """Return a rope problem whose tables have another dtype than q."""
    return replace(problem, name=f"{problem.name}_{dtype}_table", table_dtype=dtype)


# --- what every operator's tests do ----------------------------------------------------------


def row_names(name):
    """Return the rows of a pass, such as "neighborhood_fwd", as pytest parameters."""
    from cupyattn import _select

    return [row.name for row in _select.tables()[name]]


def check_row(kind, name, row, candidates, most=4):
    """Force a row, and hold it to the rule on the first candidates that it takes.

    `candidates` are (problem, dtype); a row for another architecture is skipped.
    """
    import pytest
    from cupyattn import _device, _select

    (target,) = (r.target for r in _select.tables()[name] if r.name == row)
    device = _device.device(kind.xp.cuda.Device().id).target
    if target is not None and target.rstrip("a") != device:
        pytest.skip(f"{row} is for {target}, the device is {device}")
    ran = 0
    for problem, dtype in candidates:
        forward, backward = problem.calls(kind, dtype)
        n = problem.forward_results
        call, part = (backward, slice(n, None)) if name.endswith("_bwd") else (forward, slice(n))
        with _select.force(row):
            try:
                chosen = call.explain().row
            except NotImplementedError:
                continue
            assert chosen == row
            results = call()
        hold(problem, dtype, lower(kind, results), row, part)
        ran += 1
        if ran == most:
            return
    assert ran, f"no candidate problem reaches {row}"


def check_layouts(problem, kind, dtype, layout):
    """Views give the bits that contiguous copies give, and are not written.

    Neighborhood attention may take another kernel for views whose rows do not begin at 16-byte
    boundaries, the module for matrices whose depth is not inside, and NumPy other sums for other
    strides: those are held to the rule.
    """
    bases = []

    def put(x):
        base, view = layout(x)
        base = kind.put(base)
        bases.append((base, np.array(kind.get(base))))
        return view(base)

    ours = problem.run(kind, dtype, put)
    if not kind.on_gpu or isinstance(problem, (Neighborhood, Fused)) and _kernels(
            problem, kind, dtype, put) != _kernels(problem, kind, dtype):
        hold(problem, dtype, ours, "on views")
    else:
        for name, a, b in zip(problem.results, ours, problem.run(kind, dtype)):
            if b is not None:
                identical(a, b, what=f"{problem.name}: {name}")
    for base, before in bases:
        identical(np.array(kind.get(base)), before, what=f"{problem.name}: input")


def _kernels(problem, kind, dtype, put=None):
    """Return what is launched, whatever axis of its operands a product by warps finds inside."""
    return [[re.sub(r"^(linear__mma_\w+)_[km][kn]:", r"\1:", kernel)
             for kernel in call.explain().kernels] for call in problem.calls(kind, dtype, put)]


def check_out(problem, kind, dtype, layout):
    """`out=` in any layout is returned, gets the bits of a new result, and nothing else."""
    for call in problem.calls(kind, dtype):
        expected = call()
        guards = tuple(_guards(kind, expected, layout))
        out = _out_of(expected, iter([g.array for g in guards]))
        results = call(out)
        for given, got, guard, right in zip(flat(out), flat(results), guards, flat(expected)):
            assert got is given
            identical(guard.check(), kind.get(right), what=problem.name)
        # None entries are allocated.
        one = (None,) * (len(expected) - 1)
        if one and not isinstance(expected[-1], tuple) and expected[-1] is not None:
            guard = Guard(kind, expected[-1].shape, kind.get(expected[-1]).dtype, layout)
            results = call((*one, guard.array))
            for got, right in zip(flat(results), flat(expected)):
                identical(np.array(kind.get(got)), kind.get(right), what=problem.name)


def _guards(kind, expected, layout):
    for x in flat(expected):
        yield Guard(kind, tuple(x.shape), kind.get(x).dtype, layout)


def _out_of(expected, arrays):
    """The same nesting as `expected`, of other arrays."""
    if isinstance(expected, tuple):
        return tuple(_out_of(x, arrays) for x in expected)
    return None if expected is None else next(arrays)


def check_repeat(problem, kind, dtype, times=5):
    """The same bits every time."""
    for call in problem.calls(kind, dtype):
        first = [np.array(kind.get(x)) for x in flat(call())]
        for _ in range(times):
            for a, b in zip(flat(call()), first):
                identical(kind.get(a), b, what=problem.name)


def check_capture(problem, kind, dtype):
    """A graph of one call with `out=` writes what the call writes, again and again."""
    for call in problem.calls(kind, dtype):
        expected = call()
        out = _out_of(expected, iter([kind.xp.zeros_like(x) for x in flat(expected)]))
        stream, graph = capture(lambda call=call, out=out: call(out))
        for _ in range(2):
            with stream:
                for x in flat(out):
                    raw(x)[...] = 0
            graph.launch(stream)
            stream.synchronize()
            for a, b in zip(flat(out), flat(expected)):
                identical(kind.get(a), kind.get(b), what=problem.name)
