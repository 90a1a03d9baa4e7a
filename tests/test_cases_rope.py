"""Reported faults B50 to B76: rotary position embedding. See CASES.md."""

import json
import math
import subprocess
import sys
from pathlib import Path

import cupyattn
import numpy as np
import oracle
import pytest
from kinds import DTYPES, lift, mk, rope
from tolerance import agree, identical

ROOT = Path(__file__).resolve().parent.parent


def turn(kind, x, positions, rotary_dim=None, base=10000.0, scaling=None, how="table", **options):
    """Rotate [batch, seq, heads, head_dim] by positions, in one of the ways to say so.

    "table": a table with a row per token; "ids": a table of all positions and position_ids.
    """
    positions = np.asarray(positions)
    rotary_dim = rotary_dim or x.shape[-1]
    dtype = DTYPES["f64" if x.dtype == np.float64 else "f32"]
    common = dict(base=base, scaling=scaling, dtype=dtype)
    if how == "table":
        tables = cupyattn.rope_table(None, rotary_dim, positions=positions, **common)
        return rope(kind, x, *tables, rotary_dim=rotary_dim, **options)
    tables = cupyattn.rope_table(int(positions.max()) + 1, rotary_dim, **common)
    return rope(kind, x, *tables, rotary_dim=rotary_dim, position_ids=positions, **options)


WAYS = ("table", "ids")


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("heads", [(2, 1), (1, 1), (1, 2)])
@pytest.mark.parametrize("batch, seq", [(1, 2), (1, 1), (2, 3)])
def test_b50_one_head(kind, heads, batch, seq, layout):
    cos, sin = cupyattn.rope_table(seq, 128)
    arrays = [mk(i, (batch, seq, h, 128)) for i, h in enumerate(heads)]
    exact = [oracle.rope(x, np.arange(seq), oracle.inv_freq(128)) for x in arrays]
    if layout == "bhsd":
        arrays, exact = ([np.ascontiguousarray(x.swapaxes(1, 2)) for x in xs]
                         for xs in (arrays, exact))
    q, k, c, s = (kind.put(x) for x in (*arrays, cos, sin))
    new = cupyattn.rope(q, k, c, s, layout=layout)
    for ours, right, x in zip(new, exact, arrays):
        agree(kind.get(ours), right, case=True)
        if seq > 1:
            assert (kind.get(ours) != x).any()
    in_place = cupyattn.rope(q, k, c, s, layout=layout, out=(q, k))
    for a, b, x in zip(in_place, new, (q, k)):
        assert a is x
        identical(kind.get(a), kind.get(b))


EACH = np.array([[0, 1, 2, 3, 4], [7, 8, 9, 10, 11], [4, 3, 2, 1, 0]])


def test_b51_positions_per_item(kind):
    x, frequencies = mk(0, (3, 5, 2, 16)), oracle.inv_freq(16)
    exact = oracle.rope(x, EACH, frequencies)
    for how in WAYS:
        ours = turn(kind, x, EACH, how=how)
        agree(ours, exact, case=True)
        identical(ours[1:2], turn(kind, x[1:2], EACH[1:2], how=how), what="item 1 alone")
    one = cupyattn.rope_table(5, 16)
    exact = oracle.rope(x, np.arange(5), frequencies)
    agree(rope(kind, x, *one), exact, case=True)
    agree(rope(kind, x, *(t[None] for t in one)), exact, case=True)
    offsets = (0, 7, 100)
    exact = oracle.rope(x, np.arange(5) + np.array(offsets)[:, None], frequencies)
    long = cupyattn.rope_table(105, 16)
    for given in (offsets, list(offsets)):
        agree(rope(kind, x, *long, offset=given), exact, case=True)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [8, 16])
def test_b52_backward_of_both_styles(kind, interleaved, rotary_dim):
    positions = np.array([3, 1, 4, 159])
    tables = cupyattn.rope_table(160, rotary_dim)
    arrays = {"q": mk(0, (2, 4, 3, 16)), "k": mk(2, (2, 4, 1, 16))}
    gradients = {"q": mk(1, (2, 4, 3, 16)), "k": mk(3, (2, 4, 1, 16))}
    q, k, dq, dk, cos, sin, ids = lift(kind, (*arrays.values(), *gradients.values(), *tables,
                                              positions))
    options = dict(interleaved=interleaved, rotary_dim=rotary_dim, position_ids=ids, layout="bshd")
    forward = cupyattn.rope(q, k, cos, sin, **options)
    backward = cupyattn.rope_backward(dq, dk, cos, sin, **options)
    for name, y, dx in zip(("q", "k"), forward, backward):
        exact = oracle.rope(arrays[name], positions, oracle.inv_freq(rotary_dim), interleaved)
        agree(kind.get(y), exact, case=True)
        left = (kind.get(y).astype(float) * gradients[name]).sum()
        right = (arrays[name] * kind.get(dx).astype(float)).sum()
        assert abs(left - right) <= 1e-5 * max(1, abs(left))
    for name, back in zip(("q", "k"), cupyattn.rope_backward(*forward, cos, sin, **options)):
        assert np.abs(kind.get(back) - arrays[name]).max() <= 1e-5
    in_place = cupyattn.rope_backward(dq, dk, cos, sin, out=(dq, dk), **options)
    for a, b in zip(in_place, backward):
        identical(kind.get(a), kind.get(b))


def test_b52_four_features(kind):
    x = np.array([1, 2, 3, 4], np.float32).reshape(1, 1, 1, 4)
    for interleaved, expected in ((False, [-1.98411, 1.95990, 2.46238, 4.01980]),
                                  (True, [-1.14264, 1.92208, 2.95985, 4.02980])):
        ours = turn(kind, x, [1], interleaved=interleaved).reshape(-1)
        assert np.abs(ours - expected).max() <= 2e-5


@pytest.mark.gpu
@pytest.mark.large
def test_b54_past_2_31_elements(cupy_kind):
    cp, kind = cupy_kind.xp, cupy_kind
    last = mk(0, (1, 90, 48, 72), "bf16")
    x = cp.zeros((7200, 90, 48, 72), np.uint16).view(DTYPES["bf16"])
    x[-1:] = kind.put(last)
    cos, sin = (kind.put(t) for t in cupyattn.rope_table(90, 72))
    options = dict(interleaved=True, layout="bshd")
    for name, inverse in (("rope", False), ("rope_backward", True)):
        exact = oracle.rope(last, np.arange(90), oracle.inv_freq(72), True, inverse=inverse)
        function = getattr(cupyattn, name)
        y = function(x, None, cos, sin, **options)[0]
        agree(kind.get(y[-1:]), exact, case=True)
        assert not (y[:-1].view(np.uint16) & 0x7FFF).any()
        del y
    y = cupyattn.rope(x, None, cos, sin, out=(x, None), **options)[0]
    exact = oracle.rope(last, np.arange(90), oracle.inv_freq(72), True)
    agree(kind.get(y[-1:]), exact, case=True)
    assert not (x[:-1].view(np.uint16) & 0x7FFF).any()


@pytest.mark.parametrize("dtype, tolerance", [("f16", 2e-3), ("bf16", 1e-2)])
def test_b55_table_is_not_in_half_precision(kind, dtype, tolerance):
    x = np.zeros((1, 1, 1, 32), DTYPES[dtype])
    x[..., 1] = 1
    for how in WAYS:
        y = turn(kind, x, [1857], how=how).reshape(-1).astype(float)
        assert abs(y[1] - 0.3067) <= tolerance and abs(y[17] - 0.9518) <= tolerance
    ours = cupyattn.rope_table(1858, 32, dtype=DTYPES[dtype])
    angle = np.arange(1858)[:, None] * oracle.inv_freq(32)
    for table, exact in zip(ours, (np.cos(angle), np.sin(angle))):
        identical(table, exact.astype(np.float32).astype(DTYPES[dtype]) if dtype == "bf16"
                  else exact.astype(DTYPES[dtype]))


FAR = np.array([0, 1, 500, 2000, 8000, 16000, 32768, 48039, 131071, 1000000])


def test_b57_large_angles(kind):
    frequencies = oracle.inv_freq(8)
    x = np.zeros((1, len(FAR), 1, 8), np.float32)
    for pair in range(4):
        one = x.copy()
        one[..., pair] = 1
        y = turn(kind, one, FAR)[0, :, 0].astype(float)
        angle = FAR * frequencies[pair]
        tolerance = 1e-5 if pair == 0 else 2e-5
        assert np.abs(y[:, pair] - np.cos(angle)).max() <= tolerance
        assert np.abs(y[:, pair + 4] - np.sin(angle)).max() <= tolerance
    one = x.copy()
    one[..., 0] = 1
    y = turn(kind, one, FAR)[0, 8, 0]
    assert abs(y[0] + 0.8179835) <= 1e-5 and abs(y[4] + 0.5752417) <= 1e-5


def test_b58_host_known_rows_outside_the_table(kind):
    x, table = mk(0, (1, 4, 1, 8)), mk(1, (16, 4))
    with pytest.raises(ValueError, match=r"(?s)\b17\b.*\b16\b"):
        rope(kind, x, table, table, offset=14)
    with pytest.raises(ValueError, match=r"(?s)-1\b.*\b16\b"):
        rope(kind, x, table, table, offset=-1)
    with pytest.raises(ValueError, match="sin"):
        rope(kind, x, table, table[:15])
    for rows in (1, 3):
        with pytest.raises(ValueError, match=rf"\b{rows}\b"):
            rope(kind, x, table[:rows], table[:rows])
    agree(rope(kind, x, table, table, offset=12), oracle.rotate(x, table[12:], table[12:]),
          case=True)


@pytest.mark.parametrize("positions, row, offset", [([3, 15, 16, 0], 16, 0), ([0, -1, 2, 3], -1, 0),
                                                    ([0, 1, 2, 9], 19, 10)])
def test_b58_positions_outside_the_table_numpy(positions, row, offset):
    x, table = mk(0, (1, 4, 1, 8)), mk(1, (16, 4))
    with pytest.raises(ValueError, match=rf"(?s)(?<!\d){row}\b.*\b16\b"):
        cupyattn.rope(x, None, table, table, position_ids=np.array(positions), offset=offset,
                      layout="bshd")


@pytest.mark.gpu
@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_b58_positions_outside_the_table_on_the_device(cupy_kind, index):
    """Such tokens are NaN, the others right; the error comes without a stall, and once."""
    kind, x, table = cupy_kind, mk(0, (2, 6, 3, 8), "f16"), mk(1, (16, 4))
    positions = np.array([[3, 16, 0, 15, -1, 2], [5, 6, 2 ** 31 - 1, -2 ** 31, 1, 0]], index)
    q, cos, ids = (kind.put(a) for a in (x, table, positions))
    for name in ("rope", "rope_backward"):
        y = kind.get(getattr(cupyattn, name)(q, q, cos, cos, position_ids=ids, layout="bshd")[1])
        good = (positions >= 0) & (positions < 16)
        rows = table[np.clip(positions, 0, 15)]
        exact = oracle.rotate(x, rows, rows, inverse=name == "rope_backward")
        agree(y[good], exact[good], case=True)
        assert np.isnan(y[~good]).all()
        with pytest.raises(ValueError, match="position_ids"):
            cupyattn.check_errors()
    cupyattn.check_errors()
    cupyattn.rope(q, None, cos, cos, position_ids=ids, layout="bshd")
    kind.sync()
    with pytest.raises(ValueError, match="position_ids"):  # the next call tells, too
        cupyattn.rope(q, None, cos, cos, layout="bshd")
    agree(kind.get(cupyattn.rope(q, None, cos, cos, layout="bshd")[0]),
          oracle.rotate(x, table[:6], table[:6]), case=True)


@pytest.mark.parametrize("head_dim, rotary_dim", [(33, 33), (33, 34), (64, 66), (64, 63),
                                                  (64, -2)])
def test_b59_odd_or_too_large_rotary_size(kind, head_dim, rotary_dim):
    table = np.ones((4, max(rotary_dim // 2, 1)), np.float32)
    with pytest.raises(ValueError, match=rf"(?s)rotary_dim.*{rotary_dim}"):
        rope(kind, mk(0, (1, 4, 1, head_dim)), table, table, rotary_dim=rotary_dim)


def test_b59_tables_wider_than_half_the_head(kind):
    for width in (33, 40, 63, 65):
        table = np.ones((4, width), np.float32)
        with pytest.raises(ValueError):
            rope(kind, mk(0, (1, 4, 1, 64)), table, table)
    with pytest.raises(ValueError, match="rotary_dim"):
        cupyattn.rope_table(4, 33)


@pytest.mark.parametrize("head_dim, rotary_dim", [(33, 32), (6, 2), (64, 0)])
def test_b59_partial(kind, head_dim, rotary_dim):
    x = mk(0, (2, 4, 3, head_dim))
    frequencies = oracle.inv_freq(rotary_dim) if rotary_dim else np.zeros(0)
    table = [f(np.arange(4)[:, None] * frequencies).astype(np.float32) for f in (np.cos, np.sin)]
    ours = rope(kind, x, *table, rotary_dim=rotary_dim)
    agree(ours, oracle.rope(x, np.arange(4), frequencies), case=True)
    identical(ours[..., rotary_dim:], x[..., rotary_dim:])


def test_b61_frequencies_of_the_rotary_size(kind):
    x = np.arange(1, 17, dtype=np.float32).reshape(1, 1, 1, 16)
    expected = [-1.69559, 0.13755, 2.78868, 3.97598, -4.80884, 6.32306, 7.08684, 8.01196,
                *range(9, 17)]
    for how in WAYS:
        ours = turn(kind, x, [3], rotary_dim=8, how=how).reshape(-1)
        assert np.abs(ours - expected).max() <= 1e-5 * 16


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
        "max_position_embeddings": 256}
VARIANTS = [dict(), dict(offset=5), dict(rotary_dim=32), dict(base=5e5), dict(dtype="f16"),
            dict(dtype="bf16"), dict(interleaved=True),
            dict(scaling={"rope_type": "linear", "factor": 4.0}), dict(scaling=YARN),
            dict(seq=600), dict(seq=6, offset=3)]


def variant(kind, seq=6, offset=0, rotary_dim=64, base=1e4, dtype="f32", interleaved=False,
            scaling=None):
    """One rotation, and what it should be: (ours, exact)."""
    x = mk(0, (1, seq, 2, 64), dtype)
    cos, sin = cupyattn.rope_table(seq + offset, rotary_dim, base=base, scaling=scaling)
    ours = rope(kind, x, cos, sin, rotary_dim=rotary_dim, offset=offset, interleaved=interleaved)
    frequencies, factor = oracle.inv_freq(rotary_dim, base), 1.0
    if scaling == YARN:
        frequencies, factor = yarn(rotary_dim, base, 4.0, 64), 0.1 * math.log(4) + 1
    elif scaling:
        frequencies = frequencies / 4
    return ours, oracle.rope(x, np.arange(seq) + offset, frequencies, interleaved, factor)


def yarn(rotary_dim, base, factor, original, fast=32, slow=1, truncate=True):
    """YaRN's frequencies, straight from its definition."""
    def pair_of(rotations):
        return rotary_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair_of(fast), pair_of(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    ramp = np.clip((np.arange(rotary_dim // 2) - low) / (high - low), 0, 1)
    f = oracle.inv_freq(rotary_dim, base)
    return f / factor * ramp + f * (1 - ramp)


def bits(kind, variants):
    """Sums that change with any bit of a result, per variant."""
    return [np.ascontiguousarray(variant(kind, **v)[0]).view(np.uint8).tobytes().hex()[:4000]
            for v in variants]


def test_b63_tables_are_nobody_elses(kind):
    for order in (VARIANTS, VARIANTS[::-1]):
        for options in order:
            agree(*variant(kind, **options), case=True, what=str(options))


@pytest.mark.slow
def test_b63_same_bits_in_a_fresh_process(kind):
    script = ("import sys, json; sys.path[:0] = sys.argv[1:3]; import test_cases_rope as t, kinds; "
              "print(json.dumps(t.bits(kinds.KINDS[sys.argv[3]], t.VARIANTS[::-1])))")
    output = subprocess.run([sys.executable, "-c", script, str(ROOT), str(ROOT / "tests"),
                             kind.name], capture_output=True, text=True, check=True, cwd=ROOT)
    assert json.loads(output.stdout.splitlines()[-1])[::-1] == bits(kind, VARIANTS)


def frequencies_of(seq, rotary_dim, **options):
    """Angle per position, read off the row of position 1."""
    cos, sin = cupyattn.rope_table(max(seq, 2) if "positions" not in options else seq, rotary_dim,
                                   dtype=np.float64, **options)
    row = 1 if "positions" not in options else 0
    return np.arctan2(sin[row], cos[row])


DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "max_position_embeddings": 2048}


@pytest.mark.parametrize("seq, base", [(1, 1e4), (2047, 1e4), (2048, 1e4), (2049, 10020.162),
                                       (4096, 52664.434)])
def test_b65_dynamic_scaling_of_long_inputs_only(seq, base):
    ours = frequencies_of(seq, 64, scaling=DYNAMIC, positions=np.array([1]))
    assert np.abs(ours / oracle.inv_freq(64, base) - 1).max() <= 1e-6
    if seq > 1:
        identical(frequencies_of(seq, 64, scaling=DYNAMIC), ours)


def test_b66_dynamic_scaling_leaves_no_trace():
    first, second, third, fourth = (cupyattn.rope_table(seq, 64, scaling=DYNAMIC)
                                    for seq in (4096, 128, 4096, 128))
    unscaled = cupyattn.rope_table(128, 64)
    for n in (0, 1):
        identical(second[n], unscaled[n])
        identical(fourth[n], unscaled[n])
        identical(first[n], third[n])
    assert (first[1][1] != second[1][1]).any()


def test_b68_llama3_scaling():
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    ratio = (frequencies_of(2, 128, base=5e5, scaling=scaling)
             / frequencies_of(2, 128, base=5e5))
    expected = np.concatenate((np.ones(29), [0.828168, 0.643743, 0.493507, 0.371122, 0.271425,
                                             0.190211], np.full(29, 0.125)))
    assert np.abs(ratio - expected).max() <= 1e-5


@pytest.mark.parametrize("truncate, expected", [
    (True, [1, 1, 0.903125, 0.6125, 0.128125, 0.03125, 0.03125]),
    (False, [1, 1, 0.905551, 0.593227, 0.072688, 0.03125, 0.03125])])
def test_b69_yarn(truncate, expected):
    scaling = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096,
               "max_position_embeddings": 131072, "beta_fast": 32, "beta_slow": 1,
               "truncate": truncate}
    ours = frequencies_of(2, 64, base=150000.0, scaling=scaling)
    ratio = ours / frequencies_of(2, 64, base=150000.0)
    assert np.abs(ratio[[0, 8, 9, 12, 17, 18, 31]] - expected).max() <= 1e-6
    whole = yarn(64, 150000.0, 32.0, 4096, truncate=truncate)
    assert np.abs(ours / whole - 1).max() <= 1e-12
    cos, sin = cupyattn.rope_table(2, 64, base=150000.0, scaling=scaling, dtype=np.float64)
    assert np.abs(np.hypot(cos, sin) - (0.1 * math.log(32) + 1)).max() <= 1e-12


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0 + i / 16 for i in range(16)],
            "long_factor": [2.0 + i for i in range(16)], "original_max_position_embeddings": 64,
            "max_position_embeddings": 256}


@pytest.mark.parametrize("rotary_dim, scaling", [(32, YARN), (32, LONGROPE), (16, None)],
                         ids=["yarn", "longrope", "partial"])
def test_b71_the_callers_array_stays(kind, rotary_dim, scaling):
    original = mk(0, (2, 5, 3, 4, 32))
    qkv = kind.put(original)
    tables = lift(kind, cupyattn.rope_table(5, rotary_dim, scaling=scaling))
    q, k = qkv[:, :, 0], qkv[:, :, 1]
    options = dict(rotary_dim=rotary_dim, layout="bshd")
    first = cupyattn.rope(q, k, *tables, **options)
    identical(kind.get(qkv), original)
    second = cupyattn.rope(q, k, *tables, **options)
    cupyattn.rope(q, k, *tables, out=(q, k), **options)
    after = np.array(kind.get(qkv))
    for n, (a, b) in enumerate(zip(first, second)):
        identical(kind.get(a), kind.get(b))
        identical(after[:, :, n], kind.get(a), what="in place")
    identical(after[:, :, 2], original[:, :, 2], what="v")
    identical(after[..., rotary_dim:], original[..., rotary_dim:], what="the rest of the heads")


def test_b72_position_zero_is_the_identity(kind):
    x, positions = mk(0, (1, 3, 2, 16)), np.arange(3)
    full = [np.concatenate((t, t), -1) for t in cupyattn.rope_table(3, 16)]
    results = [turn(kind, x, positions), turn(kind, x, positions, how="ids"),
               rope(kind, x, *cupyattn.rope_table(3, 16)), rope(kind, x, *full),
               rope(kind, x, *cupyattn.rope_table(3, 16), offset=0),
               rope(kind, x, *(t[None] for t in cupyattn.rope_table(3, 16)))]
    # The module rotates as well: with one key a query, its scores are <q, k> at equal positions.
    for ours in results:
        identical(ours[:, 0], x[:, 0])
        assert np.abs(ours - results[0]).max() <= 1e-6


def test_b72_fused_rotation_is_the_same(kind):
    """The module with rope= is the module without it on rotated projections."""
    x, one = mk(0, (1, 7, 16)), np.eye(16, dtype=np.float32)
    tables = cupyattn.rope_table(7, 8)
    arrays = [kind.put(a) for a in (x, one, one, one, one)]
    y = cupyattn.fused_neighborhood_attention(*arrays, num_heads=2, kernel_size=3,
                                              rope=lift(kind, tables))
    heads = x.reshape(1, 7, 2, 8)
    turned = rope(kind, heads, *tables)
    apart = cupyattn.neighborhood_attention(*lift(kind, (turned, turned, heads)), 3,
                                            boundary="clip")
    assert np.abs(kind.get(y) - kind.get(apart).reshape(1, 7, 16)).max() <= 1e-6


@pytest.mark.gpu
@pytest.mark.torch
@pytest.mark.parametrize("operation", ["na", "mta", "rope", "fused"])
def test_b73_a_tensor_that_requires_grad_is_refused(torch_kind, operation):
    torch = torch_kind.xp
    x = torch.ones((1, 2, 6, 6), device="cuda", requires_grad=True)
    weight = torch.ones((2, 2, 3, 3), device="cuda")
    square, table = torch.ones((6, 6), device="cuda"), torch.ones((2, 3), device="cuda")
    calls = {"na": lambda x: cupyattn.neighborhood_attention(x, x, x, 1),
             "mta": lambda x: cupyattn.multi_token_attention(x, weight),
             "rope": lambda x: cupyattn.rope(x, None, table, table, layout="bshd")[0],
             "fused": lambda x: cupyattn.fused_neighborhood_attention(
                 x[0], square, square, square, square, num_heads=1, kernel_size=1)}
    with pytest.raises((TypeError, ValueError), match=r"(?s)requires.grad.*detach.*_backward"):
        calls[operation](x)
    assert not calls[operation](x.detach()).requires_grad


INTEGERS = np.array([5, 0, 1048576, 3])


def far_table():
    """A table of 1048577 rows, zero but for the rows in use."""
    rows = np.zeros((2, 1048577, 4), np.float32)
    rows[:, INTEGERS] = mk(1, (2, 4, 4))
    return rows


def test_b76_integer_positions(kind):
    x, (cos, sin) = mk(0, (1, 4, 2, 8)), (kind.put(t) for t in far_table())
    exact = oracle.rotate(x, far_table()[0, INTEGERS], far_table()[1, INTEGERS])
    wide = kind.put(np.repeat(INTEGERS, 2))
    for ids in (kind.put(INTEGERS.astype(np.int32)), kind.put(INTEGERS), wide[::2],
                kind.put(INTEGERS[None].astype(np.int32))):
        y = cupyattn.rope(kind.put(x), None, cos, sin, position_ids=ids, layout="bshd")[0]
        agree(kind.get(y), exact, case=True)
    cupyattn.check_errors()


@pytest.mark.parametrize("dtype", ["uint32", "int16", "float32", "float64", "bool"])
def test_b76_other_positions_are_refused(kind, dtype):
    x, table = mk(0, (1, 4, 2, 8)), mk(1, (16, 4))
    with pytest.raises(TypeError, match=rf"(?s)position_ids.*{dtype}"):
        rope(kind, x, table, table, position_ids=np.array([1, 0, 1, 0]).astype(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("positions", [[5, 0, 2, 3], np.array([5, 0, 2, 3])], ids=["list", "numpy"])
def test_b76_positions_of_the_host_beside_device_arrays(cupy_kind, positions):
    x, table = cupy_kind.put(mk(0, (1, 4, 2, 8))), cupy_kind.put(mk(1, (16, 4)))
    with pytest.raises(TypeError, match="position_ids"):
        cupyattn.rope(x, None, table, table, position_ids=positions, layout="bshd")
