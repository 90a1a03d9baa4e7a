"""Neighborhood attention against the oracle: results, windows, layouts, rows, streams."""

import dataclasses
import itertools
import math

import cupyattn
import numpy as np
import oracle
import plain
import pytest
from cupyattn import _device, _launch, _select
from cupyattn._program import Device, Layout
from cupyattn.configs import neighborhood_band as configs
from cupyattn.configs import neighborhood_box as box_configs
from cupyattn.configs import neighborhood_hopper
from cupyattn.configs.neighborhood_problem import Problem
from kinds import DTYPES, KINDS, LAYOUTS, Guard, call, mk, na, na_bwd
from problems import (
    NEIGHBORHOOD,
    NEIGHBORHOOD_FEW,
    Neighborhood,
    check,
    check_capture,
    check_layouts,
    check_out,
    check_repeat,
    check_row,
    neighborhood_of_size,
    row_names,
)
from tolerance import agree, eps, identical

H200 = Device(0, "NVIDIA H200", (9, 0), 132, 232448, 60 << 20)


def by_name(problem):
    return problem.name


@pytest.mark.parametrize("problem", NEIGHBORHOOD, ids=by_name)
def test_results(kind, problem):
    check(problem, kind, "f32")


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f64"])
@pytest.mark.parametrize("problem", NEIGHBORHOOD_FEW, ids=by_name)
def test_dtypes(kind, problem, dtype):
    check(problem, kind, dtype)


@pytest.mark.parametrize("head_dim, value_dim", [(3, 130), (65, 64), (200, 7), (257, 300),
                                                 (512, 512)])
def test_head_dims(kind, head_dim, value_dim):
    check(neighborhood_of_size(head_dim, value_dim), kind, "f32")


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_precision(kind, precision):
    """One TF32 product may lose 13 bits; float32 none. Other dtypes do not look at it."""
    q, k, v, dy, _ = NEIGHBORHOOD[0].inputs("f32")
    y, _ = na(kind, q, k, v, 7, precision=precision)
    exact, _ = oracle.na(q, k, v, 7)
    agree(y, exact, case=2e-3 if precision == "tf32" else True)
    half = [x.astype(np.float16) for x in (q, k, v, dy)]
    for a, b in zip(na_bwd(kind, *half, 7, precision=precision), na_bwd(kind, *half, 7)):
        identical(a, b)


def test_lse_is_optional(kind):
    arrays = NEIGHBORHOOD[0].inputs("f16")[:3]
    y = call(kind, cupyattn.neighborhood_attention, *arrays, 7)
    identical(y, na(kind, *arrays, 7)[0])


def test_gradient_through_lse_alone(kind):
    """With dy = 0 only the gradient of lse is left, and none for v."""
    q, k, v, dy, dlse = NEIGHBORHOOD[0].inputs("f32")
    zero = np.zeros_like(dy)
    ours = na_bwd(kind, q, k, v, zero, 7, dlse=dlse)
    for name, a, b in zip(("dq", "dk", "dv"), ours,
                          oracle.na_bwd(q, k, v, zero, 7, dlse=dlse)):
        agree(a, b, case=True, what=name)
    assert not ours[2].any()


# --- windows as exact sets -------------------------------------------------------------------


def windows():
    """(space, options): every border of every rule, one axis at a time and together."""
    for length, size, dilation, stride, causal in itertools.product(
            (1, 7, 12, 29), (1, 2, 3, 6, 7), (1, 2, 4), (1, 2, 3, 5), (False, True)):
        if size * dilation <= length and stride <= size:
            yield (length,), dict(kernel_size=size, dilation=dilation, stride=stride,
                                  is_causal=causal)
    for length, size, dilation, causal in itertools.product((1, 7, 12), (1, 3, 7, 15), (1, 3),
                                                            (False, True)):
        yield (length,), dict(kernel_size=size, dilation=dilation, is_causal=causal,
                              boundary="clip")
    yield (6, 7), dict(kernel_size=(4, 3), dilation=(1, 2), stride=(3, 2), is_causal=(True, False))
    yield (5, 8), dict(kernel_size=(5, 4), dilation=(1, 2), stride=(2, 4))
    yield (5, 8), dict(kernel_size=(3, 5), dilation=(2, 1), boundary="clip",
                       is_causal=(False, True))
    yield (3, 4, 5), dict(kernel_size=(2, 2, 3), dilation=(1, 2, 1), stride=(2, 1, 3),
                          is_causal=(True, False, False))
    yield (3, 4, 5), dict(kernel_size=3, boundary="clip", is_causal=(False, True, False))


def test_windows_are_exact_sets(kind):
    """Zero queries and one-hot values: a result shows which keys its query saw."""
    for space, options in windows():
        tokens = math.prod(space)
        expected = oracle.mask(space, **{"causal" if k == "is_causal" else k: v
                                         for k, v in options.items()})
        zero = np.zeros((1, *space, 1, 1), np.float32)
        one_hot = np.eye(tokens, dtype=np.float32).reshape(1, *space, 1, tokens)
        y, lse = na(kind, zero, zero, one_hot, **options)
        y = y.reshape(tokens, tokens)
        assert ((y > 0) == expected).all(), (space, options)
        count = expected.sum(1, keepdims=True)
        assert np.abs(y * count - expected).max() <= 1e-6, (space, options)
        assert np.abs(np.exp(lse.reshape(-1, 1)) / count - 1).max() <= 1e-6, (space, options)
        # Backward: the gradient of v shows which queries saw each key.
        dv = na_bwd(kind, zero, zero, one_hot, one_hot, **options)[2].reshape(tokens, tokens)
        assert ((dv > 0) == expected.T).all(), (space, options)


# --- layouts, out=, repeats, capture ---------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f16", "f32"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("problem", NEIGHBORHOOD_FEW, ids=by_name)
def test_layouts(kind, problem, layout, dtype):
    if layout.__name__ in ("swapped", "backwards"):
        layout = heads_first_or_same(layout)
    check_layouts(problem, kind, dtype, layout)


def heads_first_or_same(layout):
    """These two make sense for arrays with a heads and a features axis; lse has none."""
    return lambda x: layout(x) if x.ndim >= 4 else LAYOUTS["guarded"](x)


@pytest.mark.parametrize("layout", [LAYOUTS[n] for n in ("guarded", "padded", "stepped")],
                         ids=lambda f: f.__name__)
@pytest.mark.parametrize("problem", NEIGHBORHOOD_FEW[:2], ids=by_name)
def test_out(kind, problem, layout):
    check_out(problem, kind, "bf16", layout)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("problem", NEIGHBORHOOD_FEW, ids=by_name)
def test_bits_are_the_same_every_time(cupy_kind, problem, dtype):
    check_repeat(problem, cupy_kind, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("problem", NEIGHBORHOOD_FEW, ids=by_name)
def test_capture(cupy_kind, problem, dtype):
    check_capture(problem, cupy_kind, dtype)


def test_heads_first_costs_no_copy(kind):
    """A transposed view: the same bits, and on the GPU no new memory but the result's."""
    arrays = [mk(i, (1, 64, 16, 64), "f16") for i in range(3)]
    views = [kind.put(np.ascontiguousarray(x.swapaxes(1, 2))).swapaxes(1, 2) for x in arrays]
    out = kind.put(np.zeros_like(arrays[0]))
    cupyattn.neighborhood_attention(*views, 5, out=out)
    identical(kind.get(out), na(kind, *arrays, 5)[0])
    if kind.on_gpu:
        pool = kind.xp.get_default_memory_pool()
        pool.free_all_blocks()
        before = pool.total_bytes()
        cupyattn.neighborhood_attention(*views, 5, out=out)
        assert pool.total_bytes() == before


@pytest.mark.gpu
def test_memory_is_linear_in_tokens(cupy_kind):
    """No attention matrix: forward and backward of 32768 tokens with a window of 2049."""
    arrays = [cupy_kind.put(mk(i, (1, 32768, 1, 8), "f16")) for i in range(4)]
    pool = cupy_kind.xp.get_default_memory_pool()
    q, k, v, dy = arrays
    pool.free_all_blocks()
    before = pool.total_bytes()
    y, lse = cupyattn.neighborhood_attention(q, k, v, 2049, return_lse=True)
    grads = cupyattn.neighborhood_attention_backward(dy, q, k, v, y, lse, 2049)
    assert pool.total_bytes() - before <= 16 * q.nbytes
    assert all(np.isfinite(cupy_kind.get(g)).all() for g in grads)


def test_no_query_heads(kind):
    """Gradients over no query are zeros of full shape, also in `out`."""
    q, k = np.zeros((2, 5, 0, 8), np.float32), mk(1, (2, 5, 2, 8))
    empty, lse, key = kind.put(q), kind.put(q[..., 0]), kind.put(k)
    arrays = (empty, empty, key, key, empty, lse, 3)
    out = [Guard(kind, x.shape, np.float32) for x in (q, k, k)]
    new = cupyattn.neighborhood_attention_backward(*arrays)
    cupyattn.neighborhood_attention_backward(*arrays, out=tuple(g.array for g in out))
    for x, guard, like in zip(new, out, (q, k, k)):
        for result in (kind.get(x), guard.check()):
            assert result.shape == like.shape and not result.any()


# --- rows ------------------------------------------------------------------------------------


def rows(name):
    """All but the one that wants another precision (test_box_rows_of_one_tf32_product)."""
    return [row for row in row_names(name) if row != "box_tf32"]


def candidates():
    """Problems for any row: every dtype with head_dims from the largest down, then every rank."""
    for dtype in DTYPES:
        for head_dim, value_dim in ((512, 512), (256, 200), (128, 100), (64, 64), (33, 48),
                                    (8, 1)):
            yield neighborhood_of_size(head_dim, value_dim), dtype
        for problem in NEIGHBORHOOD_FEW[2:]:
            yield problem, dtype
        if dtype in ("f16", "bf16"):
            for head_dim in neighborhood_hopper.DIMS:
                yield Neighborhood("many_keys", "more keys than rows for narrow windows take",
                                   (700,), 601, head_dim=head_dim), dtype
            yield Neighborhood("narrower_values", "a row of pairs", (90,), 40, head_dim=192,
                               value_dim=128), dtype


def take_windows(monkeypatch, least):
    """Let the rows of sm_90a take windows of so many keys, for which others are faster."""
    monkeypatch.setattr(neighborhood_hopper.Hopper, "_least", lambda row, problem: least)
    monkeypatch.setattr(_launch, "_memo", {})


@pytest.mark.gpu
@pytest.mark.parametrize("row", rows("neighborhood_fwd"))
def test_every_forward_row(cupy_kind, monkeypatch, row):
    take_windows(monkeypatch, 32)
    check_row(cupy_kind, "neighborhood_fwd", row, candidates())


@pytest.mark.gpu
@pytest.mark.parametrize("row", rows("neighborhood_bwd"))
def test_every_backward_row(cupy_kind, monkeypatch, row):
    take_windows(monkeypatch, 32)
    check_row(cupy_kind, "neighborhood_bwd", row, candidates())


# --- band rows -------------------------------------------------------------------------------

BANDS = (
    Neighborhood("published", "the window of the module", (70,), 7, dilation=2, boundary="clip",
                 heads=8, head_dim=64, batch=2),
    Neighborhood("ragged_runs", "groups of two lengths, lanes without features, shared heads",
                 (45,), 9, dilation=4, heads=6, kv_heads=3, head_dim=40),
    Neighborhood("more_groups_than_tokens", "groups without a token", (3,), 3, dilation=5,
                 boundary="clip", head_dim=8),
    Neighborhood("shared_windows", "stride, causal", (50,), 9, stride=4, causal=True, head_dim=24),
    Neighborhood("one_key", "no gradient of a score at all", (21,), 1, head_dim=32),
    Neighborhood("long_window", "more keys than a step takes", (90,), 63, head_dim=16, heads=3),
    Neighborhood("peaked", "weights from 0 to 1", (33,), 7, scale=6.0, head_dim=64),
    Neighborhood("wide_head", "a whole warp a token", (19,), 5, head_dim=256, heads=1),
    Neighborhood("square", "windows of two axes", (11, 13), (7, 7), head_dim=32, heads=4),
    Neighborhood("many_keys", "a window that is not kept between two walks", (20, 24), (11, 13),
                 head_dim=8, heads=1),
    Neighborhood("cube", "three axes, shared heads", (4, 5, 6), (3, 4, 3), dilation=(1, 1, 2),
                 stride=(2, 1, 2), causal=(True, False, False), head_dim=128, kv_heads=1),
)


def take_shapes(monkeypatch, dtype, number):
    """Let the band rows of a dtype deal problems to threads in one of their ways, where it can."""
    forward, backward = configs.BandForward(dtype), configs.BandBackward(dtype)

    def only(shapes, at):
        return shapes[at % len(shapes)], shapes[-1]  # the last one takes every problem

    chosen = only(backward.shapes, number)
    alike = [s for s in backward.key_shapes if s.vectors == chosen[0].vectors]
    monkeypatch.setattr(configs.Band, "BUSY", 0)
    monkeypatch.setattr(configs.BandForward, "shapes", only(forward.shapes, number))
    monkeypatch.setattr(configs.BandBackward, "shapes", chosen)
    monkeypatch.setattr(configs.BandBackward, "key_shapes",
                        (*only(alike, number), *backward.key_shapes))
    monkeypatch.setattr(_launch, "_memo", {})  # programs of the other shapes


SHAPES = range(4)  # as many as a table has; beyond its own number a dtype starts again


@pytest.mark.gpu
@pytest.mark.parametrize("turn", range(2))
@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
@pytest.mark.parametrize("problem", BANDS, ids=by_name)
def test_band_shapes(cupy_kind, monkeypatch, problem, dtype, turn):
    """Every way to deal a problem to threads, two for each problem, whatever its size."""
    number = (BANDS.index(problem) + 2 * turn) % len(SHAPES)
    take_shapes(monkeypatch, dtype, number)
    with _select.force("band_"):
        check(problem, cupy_kind, dtype, row=f"band_{dtype}, shape {number}")


@pytest.mark.gpu
@pytest.mark.parametrize("number", SHAPES)
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_band_windows_are_exact_sets(cupy_kind, monkeypatch, dtype, number):
    """As above, in arrays whose features a band row takes."""
    take_shapes(monkeypatch, dtype, number)
    slack = 2 * eps(DTYPES[dtype])
    for space, options in windows():
        tokens = math.prod(space)
        features = -(-tokens // 8) * 8
        expected = oracle.mask(space, **{"causal" if k == "is_causal" else k: v
                                         for k, v in options.items()})
        zero = np.zeros((1, *space, 1, features), DTYPES[dtype])
        one_hot = np.eye(tokens, features).astype(DTYPES[dtype]).reshape(zero.shape)
        with _select.force("band_"):
            y, lse = na(cupy_kind, zero, zero, one_hot, **options)
            dv = na_bwd(cupy_kind, zero, zero, one_hot, one_hot, **options)[2]
        y, dv = (x.astype(np.float64).reshape(tokens, features)[:, :tokens] for x in (y, dv))
        count = expected.sum(1, keepdims=True)
        assert np.abs(y * count - expected).max() <= slack, (space, options)
        assert np.abs(np.exp(lse.reshape(-1, 1)) / count - 1).max() <= 1e-6, (space, options)
        assert ((dv > 0) == expected.T).all(), (space, options)


@pytest.mark.gpu
@pytest.mark.parametrize("number", SHAPES)
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("problem", [p for p in BANDS if p.name in (
    "published", "shared_windows", "square", "many_keys")], ids=by_name)
def test_band_rows_keep_out_what_is_not_in_the_window(cupy_kind, monkeypatch, problem, dtype,
                                                      number):
    """NaN in one token: exactly the results that depend on it change."""
    take_shapes(monkeypatch, dtype, number)
    q, k, v, dy, _ = problem.inputs(dtype)
    sees = oracle.mask(problem.space, **{key: value for key, value in problem.arguments.items()
                                         if key != "scale"})
    tokens = len(sees)
    options = dict(problem.options, kernel_size=problem.kernel_size)

    def run(arrays):
        with _select.force("band_"):
            y, lse = na(cupy_kind, *arrays[:3], **options)
            return (y, lse, *na_bwd(cupy_kind, *arrays, **options))

    good, token = run((q, k, v, dy)), tokens // 2
    for at, queries in ((1, sees[:, token]), (2, sees[:, token]), (0, np.arange(tokens) == token),
                        (3, np.arange(tokens) == token)):
        poisoned = [x.copy() for x in (q, k, v, dy)]
        poisoned[at].reshape(problem.batch, tokens, -1)[:, token] = np.nan
        bad = run(poisoned)
        keys = sees[queries].any(0)
        for name, a, b, touched in zip(problem.results, bad, good,
                                       (queries, queries, queries, keys, keys)):
            a, b = (x.reshape(problem.batch, tokens, -1) for x in (a, b))
            identical(a[:, ~touched], b[:, ~touched], what=f"{name}, NaN in argument {at}")
        seen = bad[2] if at == 3 else bad[0]
        assert np.isnan(seen.astype(np.float32).reshape(problem.batch, tokens, -1)[:, queries]).any(
            -1).all()


# --- box rows --------------------------------------------------------------------------------

BOXES = (
    Neighborhood("published_box", "the window of the module", (300,), 7, dilation=2,
                 boundary="clip", heads=8, head_dim=64, batch=2),
    Neighborhood("ragged_boxes", "groups of two lengths, shared heads", (149,), 9, dilation=4,
                 heads=6, kv_heads=3, head_dim=48),
    Neighborhood("more_groups_than_tokens_box", "groups without a token", (3,), 3, dilation=5,
                 boundary="clip", head_dim=16),
    Neighborhood("strided_box", "stride, causal", (200,), 40, stride=7, causal=True, head_dim=80),
    Neighborhood("one_key_box", "a weight of 1", (70,), 1, head_dim=32),
    Neighborhood("long_window_box", "keys that every query of a warp sees", (400,), 130,
                 head_dim=128, heads=1),
    Neighborhood("peaked_box", "weights from 0 to 1", (90,), 63, scale=6.0, head_dim=64),
    Neighborhood("negative_scale_box", "the largest product has the least weight", (90,), 33,
                 scale=-0.7, head_dim=112, heads=1),
    Neighborhood("no_scale_box", "equal weights", (40,), 5, scale=0.0, head_dim=16),
    Neighborhood("square_box", "windows of two axes", (19, 21), (7, 7), head_dim=32, heads=4),
    Neighborhood("large_square_box", "more positions than a word has bits", (40, 43), (24, 25),
                 head_dim=16, heads=1),
    Neighborhood("flat_box", "one line, and no group of some", (2, 70), (1, 9), dilation=(3, 1),
                 boundary="clip", head_dim=64),
    Neighborhood("cube_box", "three axes, shared heads", (6, 9, 10), (3, 4, 3),
                 dilation=(1, 1, 2), stride=(2, 1, 2), causal=(True, False, False), head_dim=96,
                 kv_heads=1),
    Neighborhood("large_cube_box", "positions in fields", (13, 12, 12), (12, 11, 9), head_dim=16,
                 heads=1),
)


def in_boxes(problem, dtype):
    """The same with features that a box row of the dtype takes."""
    dims = box_configs.BoxForward.WIDE_DIMS if dtype == "f32" else box_configs.BoxForward.DIMS
    return dataclasses.replace(
        problem, head_dim=min(n for n in dims if n >= problem.head_dim))


def box_tiles(problem, dtype):
    """Every box of queries, with all keys at once where they fit and with small chunks."""
    row = box_configs.BoxForward
    most = {"f32": 32}.get(dtype, 64)  # features with registers for sixteen warps
    return [(box, chunks) for box in row.BOXES[len(problem.space)]
            if math.prod(box) <= (128 if dtype == "f32" else 192) or problem.head_dim <= most
            for chunks in (row.CHUNKS, ((64, 2),), ((32, 2),))]


def take_box(monkeypatch, rank, box, chunks):
    """Let the box rows deal problems to blocks in one way."""
    row = box_configs.BoxForward
    monkeypatch.setattr(row, "BOXES", {**row.BOXES, rank: (box,)})
    if chunks != row.CHUNKS:
        monkeypatch.setattr(row, "CHUNKS", chunks)
        monkeypatch.setattr(row, "HELD", 0)
    monkeypatch.setattr(_launch, "_memo", {})  # programs of the other tiles


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
@pytest.mark.parametrize("problem", BOXES, ids=by_name)
def test_box_tiles(cupy_kind, problem, dtype):
    """Every way to deal a problem to blocks, three for each problem, whatever its size."""
    number, problem = BOXES.index(problem), in_boxes(problem, dtype)
    arrays = problem.inputs(dtype)[:3]
    options = dict(problem.options, kernel_size=problem.kernel_size)
    exact = oracle.na(*arrays, **problem.arguments)
    rough = plain.na(*arrays, **problem.arguments)
    tiles = box_tiles(problem, dtype)
    first = number + (dtype == "f16")
    for box, chunks in {tiles[(first + n * 5) % len(tiles)]: None for n in range(3)}:
        with pytest.MonkeyPatch.context() as patch, _select.force("box_"):
            take_box(patch, len(problem.space), box, chunks)
            results = na(cupy_kind, *arrays, **options)
        for name, ours, good, other in zip(("y", "lse"), results, exact, rough):
            agree(ours, good, other, what=name, row=f"box_{dtype}, {box}, {chunks}")


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(4))  # a kernel each
@pytest.mark.parametrize("number, dtype, precision", [
    (0, "bf16", "fp32"), (1, "f16", "fp32"), (0, "f32", "tf32"), (1, "f32", "fp32")])
def test_box_windows_are_exact_sets(cupy_kind, monkeypatch, number, dtype, precision, part):
    """As above, in arrays whose features a box row takes."""
    slack = 2 * eps(DTYPES[dtype])
    if number:
        for rank in (1, 2, 3):
            boxes = box_configs.BoxForward.BOXES[rank]
            take_box(monkeypatch, rank, boxes[1 if dtype == "f32" else -1], ((32, 2),))
    for number, (space, options) in enumerate(windows()):
        # The float32 kernels meet a third: they have the same windows, by the same code.
        if number % 4 != part or (dtype == "f32" and len(space) == 1 and number % 12 != part):
            continue
        tokens = math.prod(space)
        features = min(n for n in box_configs.BoxForward.WIDE_DIMS if n >= tokens)
        expected = oracle.mask(space, **{"causal" if k == "is_causal" else k: v
                                         for k, v in options.items()})
        zero = np.zeros((1, *space, 1, features), DTYPES[dtype])
        one_hot = np.eye(tokens, features).astype(DTYPES[dtype]).reshape(zero.shape)
        with _select.force("box_"):
            y, lse = na(cupy_kind, zero, zero, one_hot, precision=precision, **options)
        y = y.astype(np.float64).reshape(tokens, features)[:, :tokens]
        count = expected.sum(1, keepdims=True)
        assert ((y > 0) == expected).all(), (space, options)
        assert np.abs(y * count - expected).max() <= slack, (space, options)
        assert np.abs(np.exp(lse.reshape(-1, 1)) / count - 1).max() <= 1e-6, (space, options)


@pytest.mark.gpu
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
@pytest.mark.parametrize("problem", [p for p in BOXES if p.name in (
    "published_box", "strided_box", "square_box", "large_square_box", "cube_box")], ids=by_name)
def test_box_rows_keep_out_what_is_not_in_the_window(cupy_kind, problem, dtype, value):
    """A token that is not finite: results that see it are the plain kernel's, others stay."""
    problem = in_boxes(problem, dtype)
    q, k, v = problem.inputs(dtype)[:3]
    sees = oracle.mask(problem.space, **{key: x for key, x in problem.arguments.items()
                                         if key != "scale"})
    tokens = len(sees)
    options = dict(problem.options, kernel_size=problem.kernel_size)

    def run(row, arrays):
        with _select.force(row):
            return na(cupy_kind, *arrays, **options)

    exact, rough = (of.na(q, k, v, **problem.arguments) for of in (oracle, plain))
    good, token = run("box_", (q, k, v)), tokens // 2
    for at, queries in ((1, sees[:, token]), (2, sees[:, token]), (0, np.arange(tokens) == token)):
        poisoned = [x.copy() for x in (q, k, v)]
        poisoned[at].reshape(problem.batch, tokens, -1)[:, token] = value
        for name, a, b, c, d, e in zip(problem.results, run("box_", poisoned),
                                       run("plain_", poisoned), good, exact, rough):
            a, b, c, *right = (x.reshape(problem.batch, tokens, -1) for x in (a, b, c, d, e))
            what = f"{name}, {value} in argument {at}"
            if at == 2:  # those of the same tile are computed again, key by key
                agree(a[:, ~queries], *(x[:, ~queries] for x in right), what=what)
            else:
                identical(a[:, ~queries], c[:, ~queries], what=what)
            a, b = (x[:, queries].astype(np.float64) for x in (a, b))
            assert (np.isfinite(a) == np.isfinite(b)).all(), (name, at)
            assert np.array_equal(a[~np.isfinite(a)], b[~np.isfinite(b)], equal_nan=True)


NANS = {"payload": 0x7fc00000, "of arithmetic": 0x7fffffff, "negative": 0xffffffff}


@pytest.mark.gpu
@pytest.mark.parametrize("bits", NANS.values(), ids=NANS)
@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_box_rows_lose_no_nan(cupy_kind, precision, bits):
    """Of float32: rounding to TF32 as an integer would make some of them numbers."""
    problem = in_boxes(BOXES[0], "f32")
    arrays = problem.inputs("f32")[:4]
    value = np.array(bits, np.uint32).view(np.float32)
    sees = oracle.mask(problem.space, **{key: x for key, x in problem.arguments.items()
                                         if key != "scale"})
    options = dict(problem.options, kernel_size=problem.kernel_size, precision=precision)
    tokens = len(sees)
    token = tokens // 2
    for at, queries in ((0, np.arange(tokens) == token), (1, sees[:, token]), (2, sees[:, token]),
                        (3, np.arange(tokens) == token)):
        poisoned = [x.copy() for x in arrays]
        poisoned[at].reshape(problem.batch, tokens, -1)[:, token] = value
        keys = sees[queries].any(0)
        with _select.force("box_"):
            y = na(cupy_kind, *poisoned[:3], **options)[0]
            gradients = na_bwd(cupy_kind, *poisoned, **options)
        for name, x, touched in zip(("y", "dq", "dk", "dv"), (y, *gradients),
                                    (queries, queries, keys, keys)):
            found = np.isnan(x.reshape(problem.batch, tokens, -1)).any(-1)
            if name == "y" and at == 3:
                touched = np.zeros_like(queries)
            elif name == "dv" and at == 2:  # not of v
                continue
            assert (found == touched).all(), (name, at)


@pytest.mark.gpu
@pytest.mark.parametrize("problem", [p for p in BOXES if p.name in (
    "ragged_boxes", "strided_box", "long_window_box", "no_scale_box", "square_box", "cube_box")],
    ids=by_name)
def test_box_rows_of_one_tf32_product(cupy_kind, monkeypatch, problem):
    """As close as operands of eleven bits allow."""
    monkeypatch.setattr(_launch, "_memo", {})
    problem = in_boxes(problem, "f32")
    arrays = problem.inputs("f32")[:4]
    options = dict(problem.options, kernel_size=problem.kernel_size)
    exact = (*oracle.na(*arrays[:3], **problem.arguments),
             *oracle.na_bwd(*arrays, **problem.arguments))
    with _select.force("box_"):
        ours = (*na(cupy_kind, *arrays[:3], precision="tf32", **options),
                *na_bwd(cupy_kind, *arrays, precision="tf32", **options))
    for name, a, right in zip(problem.results, ours, exact):
        agree(a, right, case=2e-3, what=name)
    assert {p.row.name for p in _launch._memo.values()} == {"box_tf32"}


@pytest.mark.gpu
@pytest.mark.parametrize("exponents", [(90, -90, 0), (-60, 60, 40), (0, 0, 120), (0, 0, -60)])
def test_box_rows_take_any_size_of_number(cupy_kind, exponents):
    """Float32 numbers far from 1, of which neither part may overflow or vanish."""
    problem = in_boxes(BOXES[0], "f32")
    q, k, v, dy = problem.inputs("f32")[:4]
    q, k, v = (x * np.float32(2.0 ** n) for x, n in zip((q, k, v), exponents))
    dy = dy * np.float32(2.0 ** -max(exponents[2] - 20, 0))
    options = dict(problem.options, kernel_size=problem.kernel_size)
    with _select.force("box_"):
        ours = (*na(cupy_kind, q, k, v, **options), *na_bwd(cupy_kind, q, k, v, dy, **options))
    for name, a, *right in zip(
            problem.results, ours,
            *((*of.na(q, k, v, **problem.arguments), *of.na_bwd(q, k, v, dy, **problem.arguments))
              for of in (oracle, plain))):
        agree(a, *right, what=name)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_box_rows_of_float32_repeat_their_bits(cupy_kind, precision):
    problem = in_boxes(BOXES[12], "f32")
    arrays = problem.inputs("f32")[:4]
    options = dict(problem.options, kernel_size=problem.kernel_size, precision=precision)
    with _select.force("box_"):
        runs = [(*na(cupy_kind, *arrays[:3], **options), *na_bwd(cupy_kind, *arrays, **options))
                for _ in range(3)]
    for other in runs[1:]:
        for name, a, b in zip(problem.results, runs[0], other):
            identical(a, b, what=name)


H200 = Device(0, "NVIDIA H200", (9, 0), 132, 232448, 60 << 20)


def wide(window, head_dim=64, precision="fp32", backward=False):
    """A float32 problem with a window of these keys on each axis."""
    space = (64,) * len(window)
    x, ones = Layout((1, *space, 4, head_dim), "f32"), (1,) * len(window)
    more = dict(dy=x, y=x, lse=Layout(x.shape[:-1], "f32")) if backward else {}
    return Problem(x, x, x, window, ones, ones, (False,) * len(window), 0.125, "shift", precision,
                   **more)


@pytest.mark.parametrize("problem, forward, backward", [
    (((16,),), "band_small", "band_small"), (((17,),), "box", "band_small"),
    (((33,),), "box", "box"), (((5, 5),), "band_small", "band_small"),
    (((5, 6),), "box", "band_small"), (((5, 7),), "box", "box"),
    (((3, 3, 3),), "band_small", "band_small"), (((4, 3, 3),), "box", "band_small"),
    (((4, 4, 4),), "box", "box"), (((8,), 64, "tf32"), "band_small", "band_small"),
    (((9,), 64, "tf32"), "box", "band_small"), (((13,), 64, "tf32"), "box", "box"),
    (((40,), 80), "band", "band"), (((40,), 96), "box", "box"), (((40,), 160), "band", "band")],
    ids=str)
def test_float32_rows_by_window(problem, forward, backward):
    """Bands up to where matrix units are as fast, and for features that boxes do not have."""
    for name, row in (("neighborhood_fwd", forward), ("neighborhood_bwd", backward)):
        asked = wide(*problem, backward=name.endswith("bwd"))
        found = _select.choose(name, _select.tables()[name], asked, H200).name
        units = "tf32" if asked.precision == "tf32" and row == "box" else "f32"
        assert found == f"{row}_{units}"


def test_float32_box_rows_refuse_by_reason():
    fp32, tf32 = box_configs.BoxForward("f32"), box_configs.BoxForward("f32", True)
    assert "precision tf32 is another row's" in fp32.refuses(wide((40,), precision="tf32"), H200)
    assert "precision fp32 is another row's" in tf32.refuses(wide((40,)), H200)
    assert "head_dim 80 is not among (32, 64, 96, 128)" in fp32.refuses(wide((40,), 80), H200)
    assert "dtype f32 is not bf16" in box_configs.BoxForward("bf16").refuses(wide((40,)), H200)
    small = Device(0, "", (8, 6), 84, 101376, 6 << 20)  # 99 KiB of shared memory
    backward = box_configs.BoxBackward("f32")
    assert backward.refuses(wide((40,), 96, backward=True), small) is None
    assert "101376 bytes of shared memory" in backward.refuses(wide((40,), 128, backward=True),
                                                               small)
    assert "three TF32 products" in fp32.notes(wide((40,)), H200)[0]
    assert "one TF32 product" in tf32.notes(wide((40,), precision="tf32"), H200)[0]


# --- box rows, backward ----------------------------------------------------------------------


def take_gradient_box(monkeypatch, number):
    """Let both kernels of the box rows deal problems to blocks in one of several ways."""
    row = box_configs.BoxGradient
    monkeypatch.setattr(row, "BOXES", {rank: (boxes[number % len(boxes)],)
                                       for rank, boxes in row.BOXES.items()})
    if number % 3:  # the third time all rows at once, where they fit
        monkeypatch.setattr(row, "CHUNKS", (((64, 2),), ((32, 3),))[number % 3 - 1])
        monkeypatch.setattr(row, "HELD", 0)
    monkeypatch.setattr(_launch, "_memo", {})  # programs of the other tiles


@pytest.mark.gpu
@pytest.mark.parametrize("turn", range(3))
@pytest.mark.parametrize("problem", BOXES, ids=by_name)
def test_box_gradients(cupy_kind, monkeypatch, problem, turn):
    """Three ways to deal each problem to blocks, one in each dtype."""
    number, dtype = BOXES.index(problem) + 2 * turn, ("bf16", "f16", "f32")[turn]
    problem = in_boxes(problem, dtype)
    take_gradient_box(monkeypatch, number)
    with _select.force("box_"):
        check(problem, cupy_kind, dtype, row=f"box_{dtype}, tile {number}")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("scale", [1.5, 6.0, 600.0])
def test_box_gradients_of_peaked_weights(cupy_kind, scale, dtype):
    """Where one key has nearly all the weight, the rounding of y must not show."""
    problem = dataclasses.replace(BOXES[0], scale=scale, dilation=1)
    q, k, v, dy, _ = problem.inputs(dtype)
    options = dict(problem.options, kernel_size=problem.kernel_size)
    with _select.force("box_"):
        ours = na_bwd(cupy_kind, q, k, v, dy, **options)
    for name, a, *right in zip(("dq", "dk", "dv"), ours,
                               *(of.na_bwd(q, k, v, dy, **problem.arguments)
                                 for of in (oracle, plain))):
        agree(a, *right, what=name)


@pytest.mark.gpu
@pytest.mark.parametrize("number, dtype", [(0, "bf16"), (1, "f16"), (2, "f32")])
def test_box_gradients_see_exact_sets(cupy_kind, monkeypatch, number, dtype):
    """Equal weights and one-hot arrays: each gradient shows its window."""
    take_gradient_box(monkeypatch, number)
    slack = 4 * eps(DTYPES[dtype])
    for space, options in (*itertools.islice(windows(), 3 * number, None, 7 + 7 * (number == 2)),
                           *((space, x) for space, x in windows() if len(space) > 1)):
        tokens = math.prod(space)
        features = min(n for n in box_configs.BoxForward.WIDE_DIMS if n >= tokens)
        sees = oracle.mask(space, **{"causal" if k == "is_causal" else k: v
                                     for k, v in options.items()})
        count = sees.sum(1)
        zero = np.zeros((1, *space, 1, features), DTYPES[dtype])
        one_hot = np.eye(tokens, features).astype(DTYPES[dtype]).reshape(zero.shape)
        lse = np.log(count).astype(np.float32).reshape(zero.shape[:-1])
        # With v = 0 and dlse = 1 the gradient of a score is its weight.
        with _select.force("box_"):
            got = [call(cupy_kind, cupyattn.neighborhood_attention_backward, one_hot, q, k, zero,
                        zero, lse, scale=1.0, dlse=np.ones_like(lse), **options)
                   for q, k in ((zero, one_hot), (one_hot, zero))]
        for name, x, expected in (("dq", got[0][0], sees), ("dv", got[0][2], sees.T),
                                  ("dk", got[1][1], sees.T)):
            x = x.astype(np.float64).reshape(tokens, features)[:, :tokens]
            weight = expected / (count[:, None] if name == "dq" else count)
            assert ((x > 0) == expected).all(), (name, space, options)
            assert np.abs(x - weight).max() <= slack, (name, space, options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("problem", [p for p in BOXES if p.name in (
    "published_box", "strided_box", "large_square_box", "cube_box")], ids=by_name)
def test_box_gradients_keep_out_what_is_not_in_the_window(cupy_kind, problem, value, dtype):
    """A token that is not finite: gradients that see it are the plain kernel's, others stay."""
    problem = in_boxes(problem, dtype)
    arrays = problem.inputs(dtype)[:4]
    sees = oracle.mask(problem.space, **{key: x for key, x in problem.arguments.items()
                                         if key != "scale"})
    tokens = len(sees)
    token = tokens // 2
    options = dict(problem.options, kernel_size=problem.kernel_size)

    def run(row, arrays):
        with _select.force(row):
            return na_bwd(cupy_kind, *arrays, **options)

    exact, rough = (of.na_bwd(*arrays, **problem.arguments) for of in (oracle, plain))
    for at, queries in ((0, np.arange(tokens) == token), (1, sees[:, token]),
                        (2, sees[:, token]), (3, np.arange(tokens) == token)):
        poisoned = [x.copy() for x in arrays]
        poisoned[at].reshape(problem.batch, tokens, -1)[:, token] = value
        keys = sees[queries].any(0)
        for name, a, b, right, other, touched in zip(
                ("dq", "dk", "dv"), run("box_", poisoned), run("plain_", poisoned), exact, rough,
                (queries, keys, keys)):
            a, b, right, other = (x.reshape(problem.batch, tokens, -1)
                                  for x in (a, b, right, other))
            agree(a[:, ~touched], right[:, ~touched], other[:, ~touched],
                  what=f"{name}, {value} in argument {at}")
            a, b = (x[:, touched].astype(np.float64) for x in (a, b))
            assert (np.isfinite(a) == np.isfinite(b)).all(), (name, at)


# --- rows of sm_90a ------------------------------------------------------------------------------

HOPPER = (
    Neighborhood("line", "boxes that stick out of the axis", (300,), 130, head_dim=64),
    Neighborhood("folded", "groups that are lines of their own, shared heads", (280,), 31,
                 dilation=4, head_dim=128, heads=4, kv_heads=2),
    Neighborhood("strided_boxes", "groups of two lengths", (131,), 40, dilation=2, head_dim=64),
    Neighborhood("shared", "stride, causal", (150,), 33, stride=5, causal=True, head_dim=64),
    Neighborhood("cut", "fewer keys at a border", (140,), 41, boundary="clip", head_dim=128,
                 batch=2),
    Neighborhood("all_keys", "a window as long as the axis", (130,), 130, head_dim=64),
    Neighborhood("grid", "two axes", (20, 37), (13, 9), dilation=(1, 2), head_dim=64, batch=2),
    Neighborhood("cube", "three axes", (6, 10, 17), (3, 7, 8), dilation=(2, 1, 2),
                 stride=(1, 2, 3), causal=(False, True, False), head_dim=128),
    Neighborhood("line_32", "rows of 64 bytes", (300,), 130, head_dim=32, heads=4, kv_heads=2),
    Neighborhood("grid_96", "three blocks of 32 features", (20, 37), (13, 9), dilation=(1, 2),
                 head_dim=96, batch=2),
    Neighborhood("line_192", "dk and dv apart", (200,), 90, causal=True, head_dim=192),
    Neighborhood("cube_256", "boxes of 32", (5, 9, 11), (3, 7, 8), head_dim=256),
    Neighborhood("spare", "spare features, heads an axis", (6, 10, 17), (3, 7, 8),
                 dilation=(2, 1, 2), head_dim=40, heads=4, kv_heads=2, batch=2),
    Neighborhood("folded_spare", "spare features of groups that are lines", (280,), 31, dilation=4,
                 head_dim=72, batch=2),
    Neighborhood("mixed", "wider keys than values", (20, 37), (13, 9), stride=(2, 1),
                 head_dim=192, value_dim=128),
    Neighborhood("mixed_spare", "wider values, spare features of both", (150,), 71,
                 boundary="clip", head_dim=24, value_dim=136),
)
POISONED = [HOPPER[i] for i in (0, 6, 9, 12, 14)]


@pytest.fixture
def hopper(cupy_kind, monkeypatch):
    """Force the rows of sm_90a, whatever the window."""
    if _device.device(0).capability != (9, 0):
        pytest.skip("needs sm_90")
    take_windows(monkeypatch, 0)
    with _select.force("hopper_"):
        yield cupy_kind


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("problem", HOPPER, ids=by_name)
def test_hopper_rows(hopper, problem, dtype):
    """Forward and backward."""
    check(problem, hopper, dtype, row="hopper")
    rows = [p.row.name for p in _launch._memo.values()]
    dim, values = (neighborhood_hopper._padded(n) for n in (
        problem.head_dim, problem.value_dim or problem.head_dim))
    assert rows == [f"hopper_{dtype}_d{dim if dim == values else 'xv'}"] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["guarded", "padded"])
def test_hopper_takes_views_of_both_orders(hopper, layout):
    """Heads beside the features, and heads first: the same bits, no copy."""
    q, k, v = (mk(i, (2, 150, 2, 64), "bf16") for i in range(3))
    y, lse = na(hopper, q, k, v, kernel_size=70)
    views = [hopper.put(np.ascontiguousarray(x.swapaxes(1, 2))).swapaxes(1, 2) for x in (q, k, v)]
    ours = cupyattn.neighborhood_attention(*views, 70, return_lse=True)
    assert {p.row.name for p in _launch._memo.values()} == {"hopper_bf16_d64"}
    for a, b in zip(ours, (y, lse)):
        identical(np.array(hopper.get(a)), b)


def hopper_windows():
    """Windows of at most 128 tokens, who sees whom, and zeros and one-hot rows that a row takes."""
    for space, options in windows():
        tokens = math.prod(space)
        if tokens > 128:
            continue
        sees = oracle.mask(space, **{"causal" if k == "is_causal" else k: v
                                     for k, v in options.items()})
        shape = (1, *space, 1, -(-tokens // 32) * 32)
        zero = np.zeros(shape, DTYPES["bf16"])
        yield space, options, sees, zero, np.eye(tokens, shape[-1]).astype(
            DTYPES["bf16"]).reshape(shape)


@pytest.mark.gpu
def test_hopper_windows_are_exact_sets(hopper):
    for space, options, sees, zero, one_hot in hopper_windows():
        try:
            y, lse = na(hopper, zero, zero, one_hot, **options)
        except NotImplementedError as refusal:
            assert "dilation" in str(refusal)  # one that stretches every box
            continue
        y = y.astype(np.float64).reshape(len(sees), -1)[:, :len(sees)]
        count = sees.sum(1, keepdims=True)
        assert np.abs(y * count - sees).max() <= 2 * eps(DTYPES["bf16"]), (space, options)
        assert np.abs(np.exp(lse.reshape(-1, 1)) / count - 1).max() <= 1e-6, (space, options)


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("problem", POISONED, ids=by_name)
def test_hopper_rows_keep_out_what_is_not_in_the_window(hopper, problem, bad):
    """A NaN or infinity in one token's key or value reaches exactly the queries that see it."""
    q, k, v, _, _ = problem.inputs("bf16")
    sees = oracle.mask(problem.space, **{key: value for key, value in problem.arguments.items()
                                         if key != "scale"})
    tokens = len(sees)
    token = tokens // 2
    options = dict(problem.options, kernel_size=problem.kernel_size)
    good = na(hopper, q, k, v, **options)
    for at in (1, 2):
        poisoned = [x.copy() for x in (q, k, v)]
        poisoned[at].reshape(problem.batch, tokens, -1)[:, token] = bad
        for ours, clean in zip(na(hopper, *poisoned, **options), good):
            ours, clean = (x.astype(np.float32).reshape(problem.batch, tokens, -1)
                           for x in (ours, clean))
            apart = ~sees[:, token]
            # Rows beside a poisoned one may be computed the plain way: other bits.
            np.testing.assert_allclose(ours[:, apart], clean[:, apart], atol=2.0 ** -7,
                                       rtol=2.0 ** -7)
        y = na(hopper, *poisoned, **options)[0].astype(np.float32)
        y = y.reshape(problem.batch, tokens, -1)
        if at == 2 or np.isnan(bad):
            assert (~np.isfinite(y[:, sees[:, token]])).any(-1).all()


@pytest.mark.gpu
def test_hopper_gradients_of_one_hot_values_are_the_windows(hopper):
    """With zero q and k all keys of a query weigh the same, and dv says who sees whom."""
    for space, options, sees, zero, one_hot in hopper_windows():
        try:
            dv = na_bwd(hopper, zero, zero, zero, one_hot, **options)[2]
        except NotImplementedError as refusal:
            assert "dilation" in str(refusal)  # one that stretches every box
            continue
        dv = dv.astype(np.float64).reshape(len(sees), -1)[:, :len(sees)]
        expected = (sees / sees.sum(1, keepdims=True)).T
        assert ((dv > 0) == (expected > 0)).all(), (space, options)
        np.testing.assert_allclose(dv, expected, rtol=2 * eps(DTYPES["bf16"]))


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("problem", POISONED, ids=by_name)
def test_hopper_gradients_keep_out_what_is_not_seen(hopper, problem, bad):
    """A NaN or infinity in one token reaches the gradients that it reaches in the plain rows."""
    q, k, v, dy, dlse = problem.inputs("bf16")
    for at in range(4):
        arrays = [x.copy() for x in (q, k, v, dy)]
        arrays[at].reshape(problem.batch, math.prod(problem.space), -1)[:, 50] = bad
        *qkv, d_y, d_lse = (hopper.put(x) for x in (*arrays, dlse))
        grads = {}
        with _select.force("plain_"):
            y, lse = cupyattn.neighborhood_attention(*qkv, problem.kernel_size, return_lse=True,
                                                     **problem.options)
        for row in ("hopper_", "plain_"):
            with _select.force(row):
                grads[row] = cupyattn.neighborhood_attention_backward(
                    d_y, *qkv, y, lse, problem.kernel_size, dlse=d_lse, **problem.options)
        for name, *both in zip(("dq", "dk", "dv"), *grads.values()):
            ours, theirs = (np.array(hopper.get(x)).astype(np.float64) for x in both)
            finite = np.isfinite(theirs)
            assert (np.isfinite(ours) == finite).all(), (name, at)
            np.testing.assert_allclose(ours[finite], theirs[finite], rtol=2.0 ** -5,
                                       atol=2.0 ** -6 * np.abs(theirs[finite]).max(), err_msg=name)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [32, 64, 72, 192])
@pytest.mark.parametrize("options", [
    {"kernel_size": 37}, {"kernel_size": (3, 9, 5), "is_causal": (True, False, False)},
    {"kernel_size": (5, 11), "dilation": (2, 1)}], ids=["line", "cube", "grid"])
def test_hopper_bits_do_not_depend_on_how_many_blocks_there_are(hopper, monkeypatch, options,
                                                                head_dim):
    """Blocks that go through all tiles, a third of them, or one each."""
    space = {1: (900,), 2: (27, 30), 3: (6, 11, 13)}[np.size(options["kernel_size"])]
    q, dy = (mk(i, (2, *space, 4, head_dim), "bf16") for i in (0, 3))
    k, v = (mk(i, (2, *space, 2, head_dim), "bf16") for i in (1, 2))
    real, results = _device.device(0), []
    for blocks in (1, 3, 10**6):
        some = dataclasses.replace(real, multiprocessors=blocks)
        monkeypatch.setattr(_device, "device", lambda index, some=some: some)
        monkeypatch.setattr(_launch, "_memo", {})
        results.append((*na(hopper, q, k, v, **options), *na_bwd(hopper, q, k, v, dy, **options)))
    for other in results[1:]:
        for a, b in zip(results[0], other):
            identical(a, b)


@pytest.mark.parametrize("groups", [2, 3])
def test_hopper_rows_of_a_warpgroup_are_a_box(groups):
    for axes in (1, 2, 3):
        for own in neighborhood_hopper._factors(64 * groups, axes, 1):
            if own[neighborhood_hopper._cut(own)] % groups:
                continue
            part = neighborhood_hopper._part(own, groups)
            for group in range(groups):
                rows = np.unravel_index(np.arange(group * 64, group * 64 + 64), own)
                assert tuple(np.ptp(at) + 1 for at in rows) == part, (own, group)


# --- a short run for the sanitizer -----------------------------------------------------------

SMOKE = Neighborhood("smoke", "ragged on two axes, shared heads", (5, 7), (3, 4), stride=(1, 2),
                     causal=(True, False), heads=2, kv_heads=1, head_dim=12, value_dim=10)


@pytest.mark.gpu
@pytest.mark.smoke
@pytest.mark.parametrize("dtype", DTYPES)
def test_smoke(cupy_kind, dtype):
    check(SMOKE, cupy_kind, dtype, lambda x: place_guarded(x))


def place_guarded(x):
    base, view = LAYOUTS["guarded"](x)
    return view(KINDS["cupy"].put(base))


@pytest.mark.gpu
@pytest.mark.smoke
@pytest.mark.parametrize("problem", [p for p in HOPPER if p.name in (
    "folded", "cube", "grid_96", "line_192")], ids=by_name)
def test_smoke_hopper(hopper, problem):
    check(problem, hopper, "bf16", row="hopper")


@pytest.mark.gpu
@pytest.mark.smoke
@pytest.mark.parametrize("row, dtype", [("band_", "bf16"), ("band_", "f32"), ("box_", "bf16"),
                                        ("box_", "f32")])
def test_smoke_narrow(cupy_kind, row, dtype):
    problem = next(p for p in (BANDS if row == "band_" else BOXES) if p.name.startswith("square"))
    with _select.force(row):
        check(in_boxes(problem, dtype), cupy_kind, dtype, row=row)


@pytest.mark.gpu
def test_hopper_gradients_of_short_walks_come_every_time(hopper):
    """Halves of a block pass over boxes while the other halves' stages are filled anew."""
    q, k, v, dy = (hopper.put(mk(i, (1, 16384, 16, 64), "bf16")) for i in range(4))
    y, lse = cupyattn.neighborhood_attention(q, k, v, 256, return_lse=True)
    first = cupyattn.neighborhood_attention_backward(dy, q, k, v, y, lse, 256)
    for _ in range(40):
        again = cupyattn.neighborhood_attention_backward(dy, q, k, v, y, lse, 256)
    for a, b in zip(again, first):
        identical(np.array(hopper.get(a)), np.array(hopper.get(b)))
