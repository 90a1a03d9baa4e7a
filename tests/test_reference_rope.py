"""The rotary embedding reference: the rotation, and the tables of every scaling rule."""

import json
import math
import pathlib
from decimal import Decimal, localcontext

import loops
import ml_dtypes
import numpy as np
import pytest

from cupyattn.reference import rope

FOLDER = pathlib.Path(__file__).parent / "fixtures"
ROTATIONS = np.load(FOLDER / "rope_rotation.npz")
FREQUENCIES = np.load(FOLDER / "rope_frequencies.npz")


def cases(fixtures):
    return sorted({name.split("/")[0] for name in fixtures.files if "/" in name})


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


def rotate_at(x, positions, rotary_dim, interleaved=False, inverse=False, base=10000.0):
    """Rotate through a table that holds exactly the rows of these positions."""
    positions = np.asarray(positions)
    cos, sin = rope.table(None, rotary_dim, base, None, positions.ravel())
    rows = np.arange(positions.size).reshape(-1, positions.shape[-1])
    return rope.rotate(x, cos[None], sin[None], rotary_dim, interleaved, rows, inverse)


# The rotation


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(8, 8), (8, 2), (9, 6), (33, 32)])
def test_rotation_equals_loops(head_dim, rotary_dim, interleaved, inverse):
    x = normal(0, 2, 4, 3, head_dim)
    positions = np.array([[3, 1, 4, 159], [0, 7, 7, 2]])
    y = rotate_at(x, positions, rotary_dim, interleaved, inverse)
    inv_freq = np.array([10000.0 ** (-2 * i / rotary_dim) for i in range(rotary_dim // 2)])
    angles = positions[..., None] * inv_freq * (-1 if inverse else 1)
    expected = loops.rotate(x, angles, rotary_dim, interleaved)
    np.testing.assert_allclose(y, expected, rtol=1e-11, atol=1e-12)
    np.testing.assert_array_equal(y[..., rotary_dim:], x[..., rotary_dim:])


@pytest.mark.parametrize("case", cases(ROTATIONS))
def test_rotation_equals_transformers(case):
    options = json.loads(str(ROTATIONS[f"{case}/options"]))
    arrays = {
        name: ROTATIONS[f"{case}/{name}"]
        for name in ("q", "k", "cos", "sin", "q_out", "k_out", "dq", "dk", "grad_q", "grad_k")
    }
    tables = arrays["cos"][None], arrays["sin"][None]
    rows = np.arange(5)[None]

    def rotate(x, inverse):
        return rope.rotate(x, *tables, **options, rows=rows, inverse=inverse)

    for x in "qk":
        y, gradient = rotate(arrays[x], False), rotate(arrays[f"d{x}"], True)
        np.testing.assert_allclose(y, arrays[f"{x}_out"], rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(gradient, arrays[f"grad_{x}"], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("interleaved", [False, True])
def test_full_form_equals_half_form(interleaved):
    x, rows = normal(0, 2, 5, 3, 10), np.array([[4, 0, 2, 2, 1]])
    cos, sin = normal(1, 1, 6, 4), normal(2, 1, 6, 4)
    half = rope.rotate(x, cos, sin, 8, interleaved, rows, False)
    if interleaved:
        cos, sin = np.repeat(cos, 2, -1), np.repeat(sin, 2, -1)
    else:
        cos, sin = np.concatenate([cos, cos], -1), np.concatenate([sin, sin], -1)
    np.testing.assert_array_equal(rope.rotate(x, cos, sin, 8, interleaved, rows, False), half)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [8, 16])
def test_inverse_is_the_transpose_and_undoes_the_rotation(rotary_dim, interleaved):
    x, y = normal(0, 2, 4, 3, 16), normal(1, 2, 4, 3, 16)
    positions = [3, 1, 4, 159]
    turned = rotate_at(x, positions, rotary_dim, interleaved)
    back = rotate_at(y, positions, rotary_dim, interleaved, inverse=True)
    np.testing.assert_allclose((turned * y).sum(), (x * back).sum(), rtol=1e-12)
    undone = rotate_at(turned, positions, rotary_dim, interleaved, inverse=True)
    np.testing.assert_allclose(undone, x, rtol=1e-12, atol=1e-13)


def test_four_features_at_position_one():
    x = np.array([1.0, 2, 3, 4]).reshape(1, 1, 1, 4)
    half_split, interleaved = (rotate_at(x, [1], 4, flag).ravel() for flag in (False, True))
    np.testing.assert_allclose(half_split, [-1.98411, 1.95990, 2.46238, 4.01980], atol=1e-5)
    np.testing.assert_allclose(interleaved, [-1.14264, 1.92208, 2.95985, 4.02980], atol=1e-5)


def test_partial_rotation_takes_exponents_of_the_rotary_size():
    inv_freq, _ = rope.frequencies(8, 10000.0, None, None)
    np.testing.assert_allclose(inv_freq, [1, 0.1, 0.01, 0.001], rtol=1e-14)
    y = rotate_at(np.arange(1.0, 17).reshape(1, 1, 1, 16), [3], 8).ravel()
    turned = [-1.69559, 0.13755, 2.78868, 3.97598, -4.80884, 6.32306, 7.08684, 8.01196]
    np.testing.assert_allclose(y, [*turned, *range(9, 17)], atol=1e-5)


def test_rows_differ_per_batch_item():
    x = normal(0, 3, 5, 2, 16)
    positions = np.array([[0, 1, 2, 3, 4], [7, 8, 9, 10, 11], [4, 3, 2, 1, 0]])
    cos, sin = rope.table(12, 16, 10000.0, None, None)
    shared = rope.rotate(x, cos[None], sin[None], 16, False, positions, False)
    for item in range(3):
        alone = rope.rotate(
            x[item : item + 1], cos[None], sin[None], 16, False, positions[item : item + 1], False
        )
        np.testing.assert_array_equal(shared[item : item + 1], alone)
    # A table per item, read in order, is the same thing.
    in_order = np.arange(5)[None]
    own = rope.rotate(x, cos[positions], sin[positions], 16, False, in_order, False)
    np.testing.assert_array_equal(own, shared)
    # So is a table per item with rows per item.
    mirrored = rope.rotate(
        x,
        cos[positions][:, ::-1],
        sin[positions][:, ::-1],
        16,
        False,
        np.broadcast_to(in_order[:, ::-1], (3, 5)),
        False,
    )
    np.testing.assert_array_equal(mirrored, shared)


def test_position_zero_is_the_identity():
    x = normal(0, 1, 3, 2, 16).astype(np.float32)
    for interleaved in (False, True):
        y = rotate_at(x, [0, 1, 2], 16, interleaved)
        np.testing.assert_array_equal(y[:, 0], x[:, 0])
        assert abs(y[:, 1:] - x[:, 1:]).max() > 0.1


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_narrow_inputs_and_tables_are_read_exactly(dtype):
    x = np.zeros((1, 1, 1, 32), dtype)
    x[..., 1] = 1
    y = rotate_at(x, [1857], 32)
    assert y.dtype == np.float64
    np.testing.assert_allclose(y[0, 0, 0, [1, 17]], [0.3067, 0.9518], atol=5e-5)
    cos, sin = (normal(seed, 1, 4, 4).astype(dtype) for seed in (1, 2))
    x, rows = normal(3, 1, 4, 1, 8).astype(dtype), np.arange(4)[None]
    wide = [a.astype(np.float64) for a in (x, cos, sin)]
    np.testing.assert_array_equal(
        rope.rotate(x, cos, sin, 8, False, rows, False),
        rope.rotate(*wide, 8, False, rows, False),
    )


def test_views_with_strides_and_inputs_left_alone():
    large = normal(0, 2, 9, 4, 192)
    x, copy = large[..., 64:128], large[..., 64:128].copy()
    tables = rope.table(9, 64, 10000.0, None, None)
    cos, sin = (np.asfortranarray(a)[None] for a in tables)
    rows = np.arange(18)[None, ::2] // 2
    y = rope.rotate(x, cos, sin, 64, False, rows, False)
    expected = rope.rotate(copy, *(a[None] for a in tables), 64, False, np.arange(9)[None], False)
    np.testing.assert_array_equal(y, expected)
    np.testing.assert_array_equal(x, copy)
    assert not np.shares_memory(x, y)


@pytest.mark.parametrize("shape", [(0, 5, 2, 8), (2, 0, 2, 8), (2, 5, 0, 8)])
def test_empty_arrays(shape):
    cos = np.ones((1, shape[1], 4))
    y = rope.rotate(np.zeros(shape), cos, cos, 8, True, np.arange(shape[1])[None], False)
    assert y.shape == shape


# The tables


def test_angles_at_large_positions():
    positions = np.array([0, 1, 500, 2000, 8000, 16000, 32768, 48039, 131071, 1000000])
    x = np.zeros((1, len(positions), 1, 8))
    x[..., 0] = 1
    y = rotate_at(x, positions, 8)[0, :, 0]
    np.testing.assert_allclose(y[:, 0], [math.cos(p) for p in positions], atol=1e-15)
    np.testing.assert_allclose(y[:, 4], [math.sin(p) for p in positions], atol=1e-15)
    np.testing.assert_allclose(y[-2, [0, 4]], [-0.8179835, -0.5752417], atol=1e-7)


def test_angles_of_every_pair_at_position_one_million():
    """Against angles taken in 60 decimal digits and reduced to one turn."""
    cos, sin = rope.table(None, 64, 500000.0, None, np.array([1_000_000]))
    with localcontext() as context:
        context.prec = 60
        two_pi = 2 * Decimal("3.14159265358979323846264338327950288419716939937510582097494459")
        for pair in range(32):
            angle = 10**6 * Decimal(500000) ** (Decimal(-2 * pair) / 64) % two_pi
            assert abs(cos[0, pair] - math.cos(angle)) < 5e-10
            assert abs(sin[0, pair] - math.sin(angle)) < 5e-10


def test_table_shapes():
    for positions, shape in ((None, (7, 4)), (np.arange(6).reshape(2, 3), (2, 3, 4))):
        cos, sin = rope.table(7, 8, 10000.0, None, positions)
        assert cos.shape == sin.shape == shape
        assert cos.dtype == sin.dtype == np.float64
    assert rope.table(0, 8, 10000.0, None, None)[0].shape == (0, 4)
    assert rope.table(None, 8, 10000.0, None, np.zeros((2, 0), int))[0].shape == (2, 0, 4)


@pytest.mark.parametrize("case", cases(FREQUENCIES))
def test_frequencies_equal_transformers(case):
    options = json.loads(str(FREQUENCIES[f"{case}/options"]))
    rule = options["rotary_dim"], options["base"], options["scaling"]
    seq, attention_factor = options["seq"], options["attention_factor"]
    theirs = FREQUENCIES[f"{case}/inv_freq"]
    inv_freq, factor = rope.frequencies(*rule, seq)
    np.testing.assert_allclose(inv_freq, theirs, rtol=2e-6)
    np.testing.assert_allclose(factor, attention_factor, rtol=1e-14)
    # Their table holds the last four positions; its angles are products in float32.
    positions = np.arange(max(seq - 4, 0), seq)
    cos, sin = rope.table(None, *rule, positions)
    angle = positions[:, None] * theirs.astype(np.float64)
    bound = factor * (2.2e-6 * angle + 2e-7)
    assert (abs(cos - FREQUENCIES[f"{case}/cos"]) <= bound).all()
    assert (abs(sin - FREQUENCIES[f"{case}/sin"]) <= bound).all()


def test_dynamic_changes_nothing_within_the_trained_length():
    scaling = {"rope_type": "dynamic", "factor": 4.0, "max_position_embeddings": 2048}
    plain, _ = rope.frequencies(64, 10000.0, None, None)
    for seq in (None, 1, 2047, 2048):
        np.testing.assert_array_equal(rope.frequencies(64, 10000.0, scaling, seq)[0], plain)
    for seq, base in ((2049, 10020.162), (4096, 52664.434)):
        inv_freq, _ = rope.frequencies(64, 10000.0, scaling, seq)
        np.testing.assert_allclose(inv_freq, base ** (-np.arange(32) / 32), rtol=1e-6)


def test_dynamic_keeps_no_state():
    scaling = {"rope_type": "dynamic", "factor": 4.0, "max_position_embeddings": 2048}
    long, short, long_again, short_again = (
        rope.table(seq, 64, 10000.0, scaling, None) for seq in (4096, 128, 4096, 128)
    )
    unscaled = rope.table(128, 64, 10000.0, None, None)
    for part in range(2):
        np.testing.assert_array_equal(short[part], unscaled[part])
        np.testing.assert_array_equal(short_again[part], unscaled[part])
        np.testing.assert_array_equal(long[part], long_again[part])
    assert abs(long[0][:128] - unscaled[0]).max() > 1e-3


def test_length_comes_from_seq_else_from_positions():
    scaling = {"rope_type": "dynamic", "factor": 4.0, "max_position_embeddings": 64}
    last = np.array([99])
    whole = rope.table(100, 16, 10000.0, scaling, None)[0]
    np.testing.assert_array_equal(rope.table(None, 16, 10000.0, scaling, last)[0], whole[-1:])
    np.testing.assert_array_equal(rope.table(100, 16, 10000.0, scaling, last - 50)[0], whole[49:50])


def test_dynamic_with_one_pair():
    scaling = {"rope_type": "dynamic", "factor": 4.0, "max_position_embeddings": 64}
    np.testing.assert_array_equal(rope.frequencies(2, 10000.0, scaling, 1000)[0], [1])


def test_llama3_ratios():
    scaling = {
        "rope_type": "llama3",
        "factor": 8,
        "low_freq_factor": 1,
        "high_freq_factor": 4,
        "original_max_position_embeddings": 8192,
    }
    ratio = _ratio(128, 500000.0, scaling)
    np.testing.assert_array_equal(ratio[:29], 1)
    middle = [0.828168, 0.643743, 0.493507, 0.371122, 0.271425, 0.190211]
    np.testing.assert_allclose(ratio[29:35], middle, rtol=1e-5)
    np.testing.assert_allclose(ratio[35:], 0.125, rtol=1e-14)


@pytest.mark.parametrize(
    ("truncate", "expected"),
    [
        (True, [1, 1, 0.903125, 0.6125, 0.128125, 0.03125, 0.03125]),
        (False, [1, 1, 0.905551, 0.593227, 0.072688, 0.03125, 0.03125]),
    ],
)
def test_yarn_ratios(truncate, expected):
    scaling = {
        "rope_type": "yarn",
        "factor": 32,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "truncate": truncate,
    }
    ratio = _ratio(64, 150000.0, scaling)
    np.testing.assert_allclose(ratio[[0, 8, 9, 12, 17, 18, 31]], expected, rtol=1e-5)
    _, attention_factor = rope.frequencies(64, 150000.0, scaling, None)
    np.testing.assert_allclose(attention_factor, 0.1 * math.log(32) + 1)


def _ratio(rotary_dim, base, scaling):
    plain, _ = rope.frequencies(rotary_dim, base, None, None)
    return rope.frequencies(rotary_dim, base, scaling, None)[0] / plain


def test_attention_factor_is_multiplied_in():
    scaling = {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.25,
    }
    cos, sin = rope.table(5, 16, 10000.0, scaling, None)
    np.testing.assert_allclose(cos**2 + sin**2, 1.25**2, rtol=1e-14)


def test_proportional_pairs_stand_still():
    scaling = {"rope_type": "proportional", "partial_rotary_factor": 0.3}
    inv_freq, _ = rope.frequencies(32, 10000.0, scaling, None)
    plain, _ = rope.frequencies(32, 10000.0, None, None)
    np.testing.assert_array_equal(inv_freq[:4], plain[:4])
    np.testing.assert_array_equal(inv_freq[4:], 0)


def test_legacy_and_trained_length_names():
    new = {"rope_type": "linear", "factor": 4.0}
    old = {"type": "linear", "factor": 4}
    np.testing.assert_array_equal(
        rope.frequencies(16, 10000.0, new, None)[0], rope.frequencies(16, 10000.0, old, None)[0]
    )
    for name in ("yarn", "dynamic"):
        first, second = (
            rope.frequencies(16, 10000.0, {"rope_type": name, "factor": 4.0, field: 512}, 999)[0]
            for field in ("original_max_position_embeddings", "max_position_embeddings")
        )
        np.testing.assert_array_equal(first, second)


def test_rope_theta_stands_for_base():
    scaling = {"rope_type": "default", "rope_theta": 500000.0}
    expected = rope.frequencies(16, 500000.0, None, None)[0]
    for base in (10000.0, 500000.0):
        np.testing.assert_array_equal(rope.frequencies(16, base, scaling, None)[0], expected)
    with pytest.raises(ValueError, match="rope_theta"):
        rope.frequencies(16, 20000.0, scaling, None)


LENGTH = {"original_max_position_embeddings": 64}
LISTS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


@pytest.mark.parametrize(
    ("scaling", "error", "words"),
    [
        ({"rope_type": "ntk", "factor": 2.0}, ValueError, ["ntk", *rope.ROPE_TYPES]),
        ("linear", TypeError, ["scaling", "linear"]),
        ({"rope_type": "linear"}, ValueError, ["factor", "linear"]),
        ({"rope_type": "linear", "factor": "4"}, TypeError, ["factor", "'4'"]),
        ({"rope_type": "linear", "factor": True}, TypeError, ["factor", "True"]),
        ({"rope_type": "linear", "factor": 0.0}, ValueError, ["factor", "0.0"]),
        ({"rope_type": "linear", "factor": math.nan}, ValueError, ["factor", "nan"]),
        ({"rope_type": "dynamic", "factor": 2.0}, ValueError, ["max_position_embeddings"]),
        ({"rope_type": "dynamic", **LENGTH}, ValueError, ["factor"]),
        ({"rope_type": "yarn", "factor": 2.0}, ValueError, ["original_max_position_embeddings"]),
        ({"rope_type": "yarn", **LENGTH}, ValueError, ["'factor'"]),
        ({"rope_type": "longrope", **LISTS}, ValueError, ["original_max_position_embeddings"]),
        ({"rope_type": "longrope", **LISTS, **LENGTH}, ValueError, ["'factor'"]),
        (
            {"rope_type": "longrope", **LENGTH, "factor": 2, "short_factor": [1.0] * 8},
            ValueError,
            ["long_factor"],
        ),
        (
            {"rope_type": "longrope", **LENGTH, **LISTS, "factor": 2, "long_factor": [1.0]},
            ValueError,
            ["long_factor", "8"],
        ),
        (
            {"rope_type": "llama3", "factor": 2, "high_freq_factor": 4, **LENGTH},
            ValueError,
            ["low_freq_factor"],
        ),
        (
            {"rope_type": "llama3", "factor": 2, "low_freq_factor": 1, **LENGTH},
            ValueError,
            ["high_freq_factor"],
        ),
        (
            {"rope_type": "llama3", "factor": 2, "low_freq_factor": 1, "high_freq_factor": 4},
            ValueError,
            ["original_max_position_embeddings"],
        ),
        (
            {"rope_type": "proportional", "partial_rotary_factor": 1.5},
            ValueError,
            ["partial_rotary_factor", "1.5"],
        ),
    ],
)
def test_errors_name_the_field(scaling, error, words):
    with pytest.raises(error) as raised:
        rope.frequencies(16, 10000.0, scaling, None)
    for word in words:
        assert word in str(raised.value)
