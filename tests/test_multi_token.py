"""Multi-token attention against the oracle: results, taps, layouts, rows."""

import numpy as np
import oracle
import pytest
from cupyattn import _select
from kinds import DTYPES, KINDS, LAYOUTS, mk, mta, mta_bwd, place
from problems import (
    MULTI_TOKEN,
    MULTI_TOKEN_FEW,
    MultiToken,
    check,
    check_capture,
    check_layouts,
    check_out,
    check_repeat,
    check_row,
    row_names,
)
from tolerance import agree, identical


def by_name(problem):
    return problem.name


@pytest.mark.parametrize("problem", MULTI_TOKEN, ids=by_name)
def test_results(kind, problem):
    """Scores and dy are NaN above the diagonal; the results there are 0."""
    check(problem, kind, "f32")
    y, d_scores = problem.run(kind, "f32")[:2]
    for x in (y, d_scores):
        assert not x[..., ~np.tri(problem.seq, dtype=bool)].any()


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f64"])
@pytest.mark.parametrize("problem", MULTI_TOKEN_FEW, ids=by_name)
def test_dtypes(kind, problem, dtype):
    check(problem, kind, dtype)


@pytest.mark.parametrize("padding", ["same", "causal"])
@pytest.mark.parametrize("dilation", [1, (2, 1), (1, 3), 50])
def test_every_tap_by_itself(kind, padding, dilation):
    """A kernel of one tap moves the probabilities: which element goes where, exactly."""
    scores = mk(0, (1, 1, 9, 9))
    p = oracle.probabilities(scores, "softmax")
    for kh, kw in ((1, 1), (2, 3), (3, 2), (4, 4)):
        for u, v, down, right in oracle.taps((kh, kw), dilation, padding):
            weight = np.zeros((1, 1, kh, kw), np.float32)
            weight[0, 0, u, v] = 1
            y = mta(kind, scores, weight, padding=padding, dilation=dilation)
            agree(y, np.tril(oracle.shifted(p, down, right)), case=True, what=f"tap {u}, {v}")


def test_causal_padding_sees_no_later_query(kind):
    """A change of one row of scores reaches that row and later ones only ("causal")."""
    scores, weight = mk(0, (1, 2, 12, 12)), mk(1, (2, 2, 4, 3))
    other = scores.copy()
    other[:, :, 7] *= -1
    y, moved = (mta(kind, s, weight, padding="causal") for s in (scores, other))
    identical(moved[:, :, :7], y[:, :, :7])
    same = [mta(kind, s, weight) for s in (scores, other)]
    changed = (same[0] != same[1]).any((0, 1, 3))
    # "same" lets a row see weights of queries up to (kh - 1 - kh // 2) * d ahead: here 1.
    assert changed.tolist() == [n in (6, 7, 8, 9) for n in range(12)]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("activation", ["softmax", "sparsemax"])
def test_upper_triangle_of_scores_does_not_matter(kind, activation, value):
    upper = ~np.tri(13, dtype=bool)
    scores, weight, dy = mk(0, (2, 2, 13, 13)), mk(1, (2, 2, 3, 3)), mk(2, (2, 2, 13, 13))
    dirty, dirty_dy = scores.copy(), dy.copy()
    dirty[..., upper] = dirty_dy[..., upper] = value
    identical(mta(kind, dirty, weight, activation=activation),
              mta(kind, scores, weight, activation=activation))
    for a, b in zip(mta_bwd(kind, dirty, weight, None, dirty_dy, activation=activation)[:2],
                    mta_bwd(kind, scores, weight, None, dy, activation=activation)):
        identical(a, b)


@pytest.mark.parametrize("dtype", ["f16", "f32"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("problem", MULTI_TOKEN_FEW, ids=by_name)
def test_layouts(kind, problem, layout, dtype):
    def every(x):
        return layout(x) if x.ndim == 4 else LAYOUTS["guarded"](x)

    check_layouts(problem, kind, dtype, every)


@pytest.mark.parametrize("layout", [LAYOUTS[n] for n in ("guarded", "padded", "stepped")],
                         ids=lambda f: f.__name__)
@pytest.mark.parametrize("problem", MULTI_TOKEN_FEW[:3], ids=by_name)
def test_out(kind, problem, layout):
    check_out(problem, kind, "bf16", layout)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("problem", MULTI_TOKEN_FEW, ids=by_name)
def test_bits_are_the_same_every_time(cupy_kind, problem, dtype):
    check_repeat(problem, cupy_kind, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("problem", MULTI_TOKEN_FEW, ids=by_name)
def test_capture(cupy_kind, problem, dtype):
    check_capture(problem, cupy_kind, dtype)


# --- rows ------------------------------------------------------------------------------------


# For rows that take many heads, or long rows.
HEADS = MultiToken("heads", "more heads than one product holds", 21, channels=12, outs=20)
EIGHT = MultiToken("eight", "two quads of heads, the last ragged", 45, channels=7, outs=8)
SIXTEEN = MultiToken("sixteen", "four quads of heads", 150, channels=16, outs=12, batch=1)
MANY = (
    MultiToken("many", "all heads of a tile, rows of whole tiles and a part", 72, channels=32,
               outs=32, batch=1),
    MultiToken("many_groups", "groups of ragged heads, three items", 24, channels=34, outs=48,
               groups=2, padding="causal", bias=False, batch=3),
    MultiToken("many_ragged", "an even kernel, keys that no tile divides", 131, channels=24,
               outs=19, kernel=(2, 4), batch=1))
LONG = MultiToken("long", "rows of several warps, several steps", 600, batch=1, channels=3, outs=2)


def candidates():
    for dtype in DTYPES:
        for problem in (HEADS, SIXTEEN, EIGHT):
            yield problem, dtype
        if dtype in ("f16", "bf16"):
            yield LONG, dtype
            for problem in MANY:
                yield problem, dtype
        for problem in MULTI_TOKEN_FEW:
            yield problem, dtype
        yield next(p for p in MULTI_TOKEN if p.name == "sparsemax_peaked"), dtype


@pytest.mark.gpu
@pytest.mark.parametrize("row", row_names("multi_token_fwd"))
def test_every_forward_row(cupy_kind, row):
    check_row(cupy_kind, "multi_token_fwd", row, candidates())


@pytest.mark.gpu
@pytest.mark.parametrize("row", row_names("multi_token_bwd"))
def test_every_backward_row(cupy_kind, row):
    check_row(cupy_kind, "multi_token_bwd", row, candidates())


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [LAYOUTS["guarded"], LAYOUTS["padded"]],
                         ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_many_heads_on_views(cupy_kind, dtype, layout):
    """Rows that begin anywhere: other accesses, the same bits."""
    check_layouts(MANY[0], cupy_kind, dtype, layout)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_many_heads_with_numbers_that_are_not_finite(cupy_kind, dtype, value):
    """A NaN of scores or dy reaches d_scores where the reference says so, rows and columns."""
    scores, weight, dy = (mk(n, shape, dtype) for n, shape in enumerate(
        ((1, 18, 40, 40), (20, 18, 3, 3), (1, 20, 40, 40))))
    scores[0, 3, 17, 5] = dy[0, 2, 33, 30] = value
    ours, expected = (mta_bwd(kind, scores, weight, None, dy)[0] for kind in
                      (cupy_kind, KINDS["numpy"]))
    assert (np.isnan(ours.astype(float)) == np.isnan(expected.astype(float))).all()


@pytest.mark.gpu
@pytest.mark.parametrize("row", row_names("multi_token_fwd"))
def test_nan_rows_reach_what_their_taps_reach(cupy_kind, row):
    """Rows that begin or end a task of a row's are NaN in turn; 74 is no multiple of any."""
    dtype, activation = row.split("_")[1], "sparsemax" if "sparsemax" in row else "softmax"
    ran = 0
    for heads in (4, 6, 12, 20):
        clean, weight = mk(0, (1, heads, 74, 74), dtype), mk(1, (heads, heads, 3, 3), dtype)
        for query in (0, 15, 16, 63, 64, 73):
            scores = clean.copy()
            scores[0, 1, query, query // 2] = np.nan
            with _select.force(row):
                try:
                    y = mta(cupy_kind, scores, weight, activation=activation)
                except NotImplementedError:
                    continue
            expected = mta(KINDS["numpy"], scores, weight, activation=activation)
            assert (np.isnan(y.astype(float)) == np.isnan(expected.astype(float))).all(), query
            ran += 1
    assert ran, f"no problem reaches {row}"


# --- a short run for the sanitizer -----------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.smoke
@pytest.mark.parametrize("activation", ["softmax", "sparsemax"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_smoke(cupy_kind, dtype, activation):
    problem = MultiToken("smoke", "ragged, groups", 19, channels=2, outs=4, groups=2,
                         kernel=(3, 2), activation=activation, batch=1)
    check(problem, cupy_kind, dtype, lambda x: place(cupy_kind, x, LAYOUTS["guarded"]))


def bf16_rows(name):
    return [row for row in row_names(name) if "bf16" in row and "plain" not in row]


@pytest.mark.gpu
@pytest.mark.smoke
@pytest.mark.parametrize("name, row", [
    (name, row) for name in ("multi_token_fwd", "multi_token_bwd") for row in bf16_rows(name)])
def test_smoke_rows(cupy_kind, name, row):
    few = MultiToken("smoke", "ragged, groups", 19, channels=2, outs=4, groups=2, kernel=(3, 2),
                     batch=1)
    sparse = MultiToken("smoke", "ragged, groups", 19, channels=2, outs=4, groups=2, kernel=(3, 2),
                        activation="sparsemax", batch=1)
    many = MultiToken("smoke", "many heads", 19, channels=10, outs=9, batch=1)
    most = MultiToken("smoke", "more heads, aligned", 24, channels=18, outs=20, batch=1)
    check_row(cupy_kind, name, row, [(EIGHT, "bf16"), (few, "bf16"), (sparse, "bf16"),
                                     (many, "bf16"), (most, "bf16")], most=2)
