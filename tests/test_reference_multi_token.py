"""The multi-token attention reference: its values, its gradients, and its triangle."""

import itertools
import json
import pathlib

import loops
import ml_dtypes
import numpy as np
import pytest

from cupyattn.reference import multi_token
from cupyattn.reference.softmax import softmax, sparsemax

FIXTURES = np.load(pathlib.Path(__file__).parent / "fixtures" / "multi_token.npz")
CASES = sorted({name.split("/")[0] for name in FIXTURES.files if "/" in name})

# heads_in, heads_out, seq, kh, kw, groups, dilation
PROBLEMS = [
    (1, 1, 4, 1, 1, 1, (1, 1)),
    (2, 3, 6, 3, 3, 1, (1, 1)),
    (4, 2, 5, 2, 4, 2, (1, 1)),
    (3, 3, 7, 3, 2, 3, (2, 1)),
    (2, 2, 7, 4, 3, 1, (1, 3)),
    (1, 2, 3, 5, 7, 1, (2, 2)),
]


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


def problem_arrays(heads_in, heads_out, seq, kh, kw, groups, batch=2):
    return (
        normal(0, batch, heads_in, seq, seq),
        normal(1, heads_out, heads_in // groups, kh, kw),
        normal(2, heads_out),
    )


def last_row(row):
    """A score map of zeros whose last row is given."""
    scores = np.zeros((1, 1, len(row), len(row)))
    scores[0, 0, -1] = row
    return scores


ONE = np.ones((1, 1, 1, 1))


@pytest.mark.parametrize("activation", ["softmax", "sparsemax"])
@pytest.mark.parametrize("padding", ["same", "causal"])
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_forward_equals_loops(problem, padding, activation):
    *sizes, groups, dilation = problem
    arrays = problem_arrays(*sizes, groups)
    options = (groups, dilation, padding, activation)
    y = multi_token.forward(*arrays, *options)
    np.testing.assert_allclose(y, loops.multi_token(*arrays, *options), rtol=1e-12, atol=1e-13)
    without = (arrays[0], arrays[1], None)
    y = multi_token.forward(*without, *options)
    np.testing.assert_allclose(y, loops.multi_token(*without, *options), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("activation", ["softmax", "sparsemax"])
@pytest.mark.parametrize("padding", ["same", "causal"])
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_gradients_equal_central_differences(problem, padding, activation):
    *sizes, groups, dilation = problem
    arrays = problem_arrays(*sizes, groups, batch=1)
    options = (groups, dilation, padding, activation)
    dy = normal(3, 1, sizes[1], sizes[2], sizes[2])
    gradients = multi_token.backward(dy, *arrays, *options)
    for place, gradient in enumerate(gradients):
        expected = loops.central_difference(
            lambda x, place=place: (
                dy * multi_token.forward(*arrays[:place], x, *arrays[place + 1 :], *options)
            ).sum(),
            arrays[place],
        )
        np.testing.assert_allclose(gradient, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("case", CASES)
def test_equals_torch(case):
    options = json.loads(str(FIXTURES[f"{case}/options"]))
    names = ("scores", "weight", "bias", "dy", "y", "d_scores", "d_weight", "d_bias")
    scores, weight, bias, dy, y, *gradients = (
        FIXTURES.get(f"{case}/{name}", None) for name in names
    )
    ours = multi_token.forward(scores, weight, bias, **options)
    np.testing.assert_allclose(ours, y, rtol=1e-12, atol=1e-13)
    for our, gradient in zip(multi_token.backward(dy, scores, weight, bias, **options), gradients):
        if gradient is None:
            assert our is None
        else:
            np.testing.assert_allclose(our, gradient, rtol=1e-11, atol=1e-12)


def test_counts_in_the_gradients_of_a_uniform_map():
    scores, weight = np.zeros((2, 1, 3, 3)), np.ones((1, 1, 3, 3))
    _, d_weight, d_bias = multi_token.backward(
        np.ones(scores.shape), scores, weight, np.zeros(1), 1, (1, 1), "same", "softmax"
    )
    np.testing.assert_allclose(d_bias, [12])
    expected = np.array([[4, 4, 1], [7 / 3, 6, 7 / 3], [2 / 3, 7 / 3, 7 / 3]])
    np.testing.assert_allclose(d_weight[0, 0], expected, rtol=1e-14)


def test_two_groups_of_two_channels():
    scores = np.zeros((1, 4, 2, 2))
    scores[0, :, 1, 1] = range(4)
    weight = np.zeros((4, 2, 1, 1))
    for row, (channel, value) in enumerate([(0, 1), (1, 2), (0, 3), (1, 4)]):
        weight[row, channel] = value
    y = multi_token.forward(scores, weight, None, 2, (1, 1), "same", "softmax")
    expected = [[0.5, 0.5], [0.53788, 1.46212], [0.35761, 2.64239], [0.18970, 3.81030]]
    np.testing.assert_allclose(y[0, :, 1], expected, atol=1e-5)


@pytest.mark.parametrize(
    ("groups", "heads_out", "size"), list(itertools.product((1, 2, 3, 6), (6, 12), (1, 3, 5)))
)
def test_groups_equal_a_block_diagonal_kernel(groups, heads_out, size):
    scores, weight = normal(0, 2, 6, 11, 11), normal(1, heads_out, 6 // groups, size, size)
    dy = normal(2, 2, heads_out, 11, 11)
    dense = np.zeros((heads_out, 6, size, size))
    blocks = []
    for o in range(heads_out):
        group = o // (heads_out // groups)
        blocks.append((o, slice(group * (6 // groups), (group + 1) * (6 // groups))))
        dense[blocks[-1]] = weight[o]
    options = ((1, 1), "same", "softmax")
    y = multi_token.forward(scores, weight, None, groups, *options)
    expected = multi_token.forward(scores, dense, None, 1, *options)
    np.testing.assert_allclose(y, expected, rtol=1e-12, atol=1e-13)
    d_scores, d_weight, _ = multi_token.backward(dy, scores, weight, None, groups, *options)
    expected, d_dense, _ = multi_token.backward(dy, scores, dense, None, 1, *options)
    np.testing.assert_allclose(d_scores, expected, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(
        d_weight, [d_dense[block] for block in blocks], rtol=1e-11, atol=1e-12
    )


def test_kernel_larger_than_the_map():
    y = multi_token.forward(
        np.zeros((1, 1, 2, 2)), np.ones((1, 1, 5, 5)), None, 1, (1, 1), "same", "softmax"
    )
    np.testing.assert_allclose(y[0, 0], [[2, 0], [2, 2]], rtol=1e-14)
    weight = np.arange(9.0).reshape(1, 1, 3, 3)
    y = multi_token.forward(np.zeros((1, 1, 1, 1)), weight, None, 1, (1, 1), "same", "sparsemax")
    np.testing.assert_allclose(y[0, 0], [[4]])


def test_even_kernel_looks_back():
    y = multi_token.forward(
        np.zeros((1, 1, 3, 3)), np.ones((1, 1, 2, 2)), None, 1, (1, 1), "same", "softmax"
    )
    expected = [[1, 0, 0], [3 / 2, 2, 0], [5 / 6, 5 / 3, 7 / 6]]
    np.testing.assert_allclose(y[0, 0], expected, rtol=1e-14)


def test_dilation_far_beyond_the_map_leaves_the_centre_tap():
    scores, weight = normal(0, 1, 1, 5, 5), normal(1, 1, 1, 3, 3)
    far = (10**9, 10**9)
    y = multi_token.forward(scores, weight, None, 1, far, "same", "softmax")
    centre = multi_token.forward(scores, weight[:, :, 1:2, 1:2], None, 1, (1, 1), "same", "softmax")
    np.testing.assert_allclose(y, centre, rtol=1e-14)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([0, 0.5, 1], [0, 0.25, 0.75]),
        ([0.1, 0.2, 0.3, 0.4, 0.5], [0, 0.1, 0.2, 0.3, 0.4]),
        ([0.175, 0, -2], [0.5875, 0.4125, 0]),
        ([1, 1, 1, 0], [1 / 3, 1 / 3, 1 / 3, 0]),
    ],
)
def test_sparsemax_of_known_rows(row, expected):
    y = multi_token.forward(last_row(row), ONE, None, 1, (1, 1), "same", "sparsemax")
    np.testing.assert_allclose(y[0, 0, -1], expected, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("spread", [0.05, 1, 20, 1e6])
def test_sparsemax_equals_loops(spread):
    rows = spread * normal(5, 8, 64)
    rows[1, ::2] = -np.inf
    rows[2] += 1e5
    ours = sparsemax(rows)
    for row, expected in zip(ours, rows):
        finite = [float(value) for value in expected if np.isfinite(value)]
        np.testing.assert_allclose(
            row[np.isfinite(expected)], loops.sparsemax(finite), rtol=1e-9, atol=1e-10
        )
    np.testing.assert_allclose(ours.sum(-1), 1, rtol=1e-12)
    np.testing.assert_array_equal(ours[1, ::2], 0)


def test_sparsemax_of_huge_scores():
    np.testing.assert_array_equal(sparsemax([[1e300, -1e300, 1e300, 0]]), [[0.5, 0, 0.5, 0]])


def test_sparsemax_gradient_of_a_known_row():
    dy = last_row([1, 2, 3])
    d_scores, _, _ = multi_token.backward(
        dy, last_row([0, 0.5, 1]), ONE, None, 1, (1, 1), "same", "sparsemax"
    )
    np.testing.assert_allclose(d_scores[0, 0, -1], [0, -0.5, 0.5], atol=1e-15)


@pytest.mark.parametrize("function", [lambda x: softmax(x)[0], sparsemax])
@pytest.mark.parametrize(
    "row", [[np.nan, 0, 1], [np.inf, 0, 1], [-np.inf, -np.inf, -np.inf], [np.nan, np.inf, -1]]
)
def test_rows_without_an_activation_are_nan(function, row):
    assert np.isnan(function(np.array([row]))).all()


@pytest.mark.parametrize("seq", [31, 32, 33, 1023, 1024, 1025, 2049])
def test_long_rows(seq):
    diagonal = np.arange(seq)
    scores = np.zeros((1, 1, seq, seq))
    scores[..., diagonal, diagonal] = np.log(np.maximum(diagonal, 1))
    y = multi_token.forward(scores, ONE, None, 1, (1, 1), "same", "softmax")[0, 0]
    expected = np.tril(np.broadcast_to(0.5 / np.maximum(diagonal, 1)[:, None], (seq, seq)), -1)
    expected[diagonal, diagonal] = 0.5
    expected[0, 0] = 1
    np.testing.assert_allclose(y, expected, rtol=1e-11)

    scores[..., diagonal, diagonal] = 0.5
    y = multi_token.forward(scores, ONE, None, 1, (1, 1), "same", "sparsemax")[0, 0]
    expected = np.tril(np.broadcast_to(0.5 / (diagonal + 1)[:, None], (seq, seq)))
    expected[diagonal, diagonal] += 0.5
    np.testing.assert_allclose(y, expected, rtol=1e-11)


@pytest.mark.parametrize("activation", ["softmax", "sparsemax"])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_upper_triangle_never_matters(activation, poison):
    scores, weight, bias = problem_arrays(2, 2, 6, 3, 3, 1)
    dy = normal(3, 2, 2, 6, 6)
    options = (1, (1, 1), "same", activation)
    above = np.triu(np.ones((6, 6), bool), 1)
    poisoned, poisoned_dy = (np.where(above, poison, x) for x in (scores, dy))
    y = multi_token.forward(poisoned, weight, bias, *options)
    np.testing.assert_array_equal(y, multi_token.forward(scores, weight, bias, *options))
    assert not y[:, :, above].any()
    ours = multi_token.backward(poisoned_dy, poisoned, weight, bias, *options)
    clean = multi_token.backward(dy, scores, weight, bias, *options)
    for a, b in zip(ours, clean):
        np.testing.assert_array_equal(a, b)
    assert not ours[0][:, :, above].any()


@pytest.mark.parametrize("activation", ["softmax", "sparsemax"])
def test_nan_reaches_only_rows_whose_taps_hold_it(activation):
    scores, weight, bias = problem_arrays(1, 1, 9, 3, 3, 1)
    scores[0, 0, 4, 2] = np.nan
    y = multi_token.forward(scores, weight, bias, 1, (1, 1), "same", activation)
    row, column = np.ogrid[:9, :9]
    # Row 4 of the weights is NaN in columns 0 to 4; a tap reaches one further each way.
    touched = (abs(row - 4) <= 1) & (column <= 5) & (column <= row)
    np.testing.assert_array_equal(np.isnan(y[0, 0]), touched)
    assert np.isfinite(y[1]).all()


@pytest.mark.parametrize("activation", ["softmax", "sparsemax"])
def test_nan_gradient_passes_by_rows_that_it_meets_above_the_diagonal(activation):
    scores, weight, bias = problem_arrays(1, 1, 9, 3, 1, 1)
    dy = normal(3, 2, 1, 9, 9)
    dy[0, 0, 4, 4] = np.nan
    d_scores, _, _ = multi_token.backward(dy, scores, weight, bias, 1, (1, 1), "same", activation)
    # Its taps are (3, 4), which is no weight, (4, 4) and (5, 4).
    reached = np.isnan(d_scores[0, 0]).any(-1)
    np.testing.assert_array_equal(np.flatnonzero(reached), [4, 5])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("activation", ["softmax", "sparsemax"])
def test_sixteen_bit_scores_of_zero(dtype, activation):
    scores = np.zeros((2, 2, 5, 5), dtype)
    weight, bias = normal(1, 2, 2, 3, 3).astype(dtype), normal(2, 2).astype(dtype)
    options = (1, (1, 1), "same", activation)
    y = multi_token.forward(scores, weight, bias, *options)
    wide = [x.astype(np.float64) for x in (scores, weight, bias)]
    assert y.dtype == np.float64
    np.testing.assert_allclose(y, loops.multi_token(*wide, *options), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("activation", ["softmax", "sparsemax"])
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
@pytest.mark.parametrize("size", [1, 1500, 6000])
def test_blocks_do_not_change_results(problem, activation, size, monkeypatch):
    *sizes, groups, dilation = problem
    arrays = problem_arrays(*sizes, groups, batch=3)
    dy = normal(3, 3, sizes[1], sizes[2], sizes[2])
    options = (groups, dilation, "same", activation)
    whole = (
        multi_token.forward(*arrays, *options),
        *multi_token.backward(dy, *arrays, *options),
    )
    monkeypatch.setattr(multi_token, "BLOCK_BYTES", size)
    parts = (
        multi_token.forward(*arrays, *options),
        *multi_token.backward(dy, *arrays, *options),
    )
    for a, b in zip(parts, whole):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("shape", [(0, 2, 4, 4), (2, 2, 0, 0)])
def test_empty_arrays(shape):
    scores, weight, bias = np.zeros(shape), np.ones((2, 2, 3, 3)), np.ones(2)
    options = (1, (1, 1), "same", "sparsemax")
    y = multi_token.forward(scores, weight, bias, *options)
    assert y.shape == shape
    d_scores, d_weight, d_bias = multi_token.backward(y, scores, weight, bias, *options)
    assert d_scores.shape == shape
    np.testing.assert_array_equal(d_weight, np.zeros((2, 2, 3, 3)))
    np.testing.assert_array_equal(d_bias, np.zeros(2))


def test_views_with_strides_and_inputs_left_alone():
    large, kernel = normal(0, 2, 2, 15, 15), normal(1, 3, 3, 2, 2)
    scores, weight = large[:, :, 3:12, 3:12], kernel.transpose(2, 3, 0, 1)
    dy, bias = normal(2, 2, 9, 9, 2).transpose(0, 3, 1, 2), normal(3, 2)
    options = (1, (1, 1), "causal", "softmax")
    copies = [np.ascontiguousarray(x) for x in (dy, scores, weight)]
    y = multi_token.forward(scores, weight, bias, *options)
    expected = multi_token.forward(*copies[1:], bias, *options)
    np.testing.assert_allclose(y, expected, rtol=1e-12, atol=1e-13)  # strides order the sums
    for a, b in zip(
        multi_token.backward(dy, scores, weight, bias, *options),
        multi_token.backward(*copies, bias, *options),
    ):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12)
    for array, copy in zip((dy, scores, weight), copies):
        np.testing.assert_array_equal(array, copy)
