"""Every row of every table: unique, reachable, and compiled for every architecture (no GPU)."""

import itertools
import math
import os
import re
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import oracle
import pytest

from cupyattn import _jit, _select
from cupyattn._errors import KernelError
from cupyattn._program import Device, Kernel, Layout
from cupyattn.configs import (fused_neighborhood, linear, multi_token, neighborhood,
                              neighborhood_hopper, rope)
from cupyattn.configs.neighborhood_problem import visits

H200 = Device(0, "NVIDIA H200", (9, 0), 132, 232448, 60 << 20)
A100 = Device(0, "NVIDIA A100", (8, 0), 108, 166912, 40 << 20)  # no rows of one architecture
TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
TABLES = _select.tables()
KERNELS = {kernel.name: kernel for table in TABLES.values() for row in table
           for kernel in row.kernels()}
DTYPES = ("f16", "bf16", "f32", "f64")

# Bytes that a plain kernel may spill: around its 64-bit divisions, which are calls, and for
# float64 at 512 features, which takes all 255 registers. Tuned rows are made for sm_90 and may not
# spill there, but for rings of three blocks a multiprocessor, of 5 x 5 taps, of 16 heads: they are
# faster than rows with more registers; and the backward of float32 in boxes, which keeps there what
# it wants once a chunk. On other targets these do.
PLAIN_SPILLS = 256
KNOWN_SPILLS = {
    **dict.fromkeys(("sm_80", "sm_86", "sm_89"), {
        "multi_token_fwd__band_": 52, "multi_token_fwd__ring_": 308,
        "neighborhood_fwd__box_": 32, "neighborhood_bwd_dq__box_f32": 56,
        "neighborhood_bwd_dkdv__box_f32": 32}),
    "sm_90": {"multi_token_fwd__ring_": 44, "neighborhood_bwd_dq__box_f32": 96,
              "neighborhood_bwd_dkdv__box_f32": 48},
    "sm_100": {"linear__mma_": 56, "multi_token_fwd__ring_": 40, "multi_token_fwd__heads_": 138,
               "multi_token_bwd__ring_": 8, "multi_token_bwd__tile_": 8,
               "neighborhood_fwd__box_": 36, "neighborhood_bwd_dq__box_f32": 32,
               "neighborhood_bwd_dkdv__box_f32": 40},
    "sm_120": {"linear__mma_": 216, "multi_token_fwd__band_": 24, "multi_token_fwd__ring_": 76,
               "multi_token_fwd__strip_": 12,
               "multi_token_bwd__ring_": 24, "multi_token_bwd__tile_": 24,
               "neighborhood_fwd__box_": 36, "neighborhood_bwd_dkdv__box_f32": 40},
}


def report(kernel: Kernel, target: str) -> tuple[int, int, int]:
    """Compile; return (registers, bytes of spills, bytes of static shared memory)."""
    _, log = _jit.compile_cubin(kernel, target)
    if "serialized" in log:  # warpgroup products that wait for one another, by ptxas' remark
        raise KernelError(log)
    spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", log))
    shared = re.search(r"(\d+) bytes smem", log)
    return (int(re.search(r"Used (\d+) registers", log)[1]), spills,
            int(shared[1]) if shared else 0)


def _compile(job: tuple[str, str]) -> tuple[int, int, int] | str:
    target, name = job
    try:
        return report(KERNELS[name], target)
    except KernelError as error:
        return str(error)


@pytest.fixture(scope="module")
def reports():
    pytest.importorskip("cupy")
    jobs = [(target, kernel.name) for target in TARGETS for kernel in KERNELS.values()
            if kernel.target is None or kernel.target.rstrip("a") == target]
    found: dict[str, dict[str, tuple[int, int, int] | str]] = {target: {} for target in TARGETS}
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for (target, name), result in zip(jobs, pool.map(_compile, jobs, chunksize=8)):
            found[target][name] = result
    return found


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles_without_spills(reports, target):
    assert reports[target], "no kernel was compiled"
    failed = {name: r for name, r in reports[target].items() if isinstance(r, str)}
    assert not failed, "\n".join(failed.values())
    for name, (registers, spills, shared) in reports[target].items():
        threads = KERNELS[name].threads
        known = KNOWN_SPILLS.get(target, {})
        limit = PLAIN_SPILLS if "__plain_" in name else max(
            (n for start, n in known.items() if name.startswith(start)), default=0)
        assert spills <= limit, f"{name} spills {spills} bytes on {target}"
        # a block must fit the 64 Ki registers of a multiprocessor, allotted in eights
        assert -(-registers // 8) * 8 * threads <= 65536, f"{name}: {registers} x {threads}"
        assert shared <= 49152, f"{name}: {shared} bytes of static shared memory on {target}"


def test_names_are_unique_and_legal():
    for name, table in TABLES.items():
        names = [row.name for row in table]
        assert len(set(names)) == len(names), f"{name} has rows of one name"
        assert all(re.fullmatch(r"\w+", n) for n in names)
    assert all(re.fullmatch(r"[A-Za-z_]\w*", n) for n in KERNELS)


def attention(dtype, head_dim, value_dim=None, backward=False):
    q = Layout((2, 5, 7, 4, head_dim), dtype)
    k, v = Layout((2, 5, 7, 2, head_dim), dtype), Layout((2, 5, 7, 2, value_dim or head_dim), dtype)
    y, lse = Layout((*q.shape[:-1], v.shape[-1]), dtype), Layout(q.shape[:-1], "f32")
    return neighborhood.Problem(q, k, v, (3, 3), (1, 1), (1, 1), (False, False), 1.0, "shift",
                                dy=y if backward else None, y=y if backward else None,
                                lse=lse if backward else None)


def line(dtype, head_dim, window, backward=False, value_dim=None, precision="fp32"):
    """One axis of 4096 tokens."""
    x, lse = Layout((1, 4096, 4, head_dim), dtype), Layout((1, 4096, 4), "f32")
    v = Layout((1, 4096, 4, value_dim or head_dim), dtype)
    more = dict(dy=v, y=v, lse=lse) if backward else {}
    return neighborhood.Problem(x, x, v, (window,), (1,), (1,), (False,), 1.0, "shift", precision,
                                **more)


def convolution(dtype, activation, heads=4, seq=9, kernel=3, dilation=1):
    scores, weight = Layout((2, heads, seq, seq), dtype), (heads, heads, kernel, kernel)
    return multi_token.Problem(scores, Layout(weight, dtype), Layout((heads,), dtype), scores, 1,
                               (dilation, dilation), "same", activation)


def rotation(dtype, table, rotary_dim):
    x, t = Layout((2, 5, 3, 16), dtype), Layout((1, 9, rotary_dim // 2), table)
    return rope.Problem(x, x, x, x, t, t, None, None, rotary_dim, False, False)


def module(dtype, backward=False):
    x, w = Layout((2, 9, 64), dtype), Layout((64, 64), dtype)
    return fused_neighborhood.Problem(
        hidden_states=x, q_weight=w, k_weight=w, v_weight=w, out_weight=w, q_bias=None,
        k_bias=None, v_bias=None, out_bias=None, cos=None, sin=None, interleaved=False, heads=4,
        kv_heads=4, kernel_size=(3,), dilation=(1,), stride=(1,), is_causal=(False,), scale=1.0,
        boundary="clip", precision="fp32", dy=x if backward else None)


def products(dtype, precision, tokens, hidden):
    """The products of the fused module and of its gradients."""
    def matrices(name, rows):
        return [linear.Matrix(f"{name}{i}", rows, hidden, hidden, 1) for i in range(4)]

    x, w, y, d = matrices("x", tokens)[0], *(
        matrices(name, rows) for name, rows in (("w", hidden), ("y", tokens), ("d", hidden)))
    lists = ([(x, w[i], y[i]) for i in range(3)], [(x, w[3], y[3])],
             [(y[i], w[i].T, x) for i in range(3)], [(y[i].T, x.T, d[i]) for i in range(3)])
    return [linear.Problem(dtype, precision, tuple(linear.Product(*p) for p in some), n == 2)
            for n, some in enumerate(lists)]


def problems(name):
    """One problem for each row that a table has to have."""
    backward = name.endswith("_bwd")
    if name == "linear":
        return [p for dtype in DTYPES for precision in ("fp32", "tf32")
                for size in ((9, 7), (128, 512), (256, 512), (512, 768), (1024, 512), (8192, 512))
                for p in products(dtype, precision, *size)]
    if name.startswith("neighborhood"):
        sizes = ((1, 1), (64, 64), (65, 8), (8, 129), (256, 256), (257, 3), (512, 1))
        lines = ((72, 7), (72, 63), (128, 7), (64, 63),
                 *((dim, 2048) for dim in neighborhood_hopper.DIMS))
        return [*(attention(d, dim, v, backward) for d in DTYPES for dim, v in sizes),
                *(line(d, *size, backward) for d in DTYPES for size in lines),
                *(line(d, 192, 1024, backward, 128) for d in DTYPES),
                line("f32", 64, 63, backward, precision="tf32")]
    if name.startswith("multi_token"):
        sizes = ((4, 9, 3), (4, 512, 3), (4, 1024, 3), (4, 2048, 3), (4, 4096, 3), (8, 9, 3),
                 (8, 2048, 3), (16, 9, 3), (32, 9, 3), (32, 16, 3), (4, 9, 5), (4, 9, 17),
                 (4, 9, 3, 2), (4, 9, 199))
        return [convolution(d, a, *s) for d in DTYPES for a in ("softmax", "sparsemax")
                for s in sizes]
    if name == "rope":
        return [rotation(d, t, r) for d in DTYPES for t in DTYPES for r in (16, 6)]
    return [module(d, backward) for d in DTYPES]


@pytest.mark.parametrize("name", TABLES)
def test_every_row_is_reached_and_makes_a_program(name):
    chosen = set()
    devices = (H200, A100) if name == "linear" else (H200,)
    for problem, device in itertools.product(problems(name), devices):
        row = _select.choose(name, TABLES[name], problem, device)
        program = row.program(problem, device)
        assert program.steps
        for step in program.steps:
            assert all(1 <= n <= limit for n, limit in zip(step.grid, (2**31 - 1, 65535, 65535)))
            assert step.kernel.threads <= 1024 and step.shared <= H200.shared_memory
            # Rows made for sizes list examples of their kernels, the others all of them.
            kernel, listed = step.kernel, row.kernels() if "fused" not in name else KERNELS.values()
            assert kernel.name in KERNELS or (
                not row.name.startswith("plain")
                and (kernel.source, kernel.function) in {(k.source, k.function) for k in listed})
        chosen.add(row.name)
    assert chosen == {row.name for row in TABLES[name]}


def test_refusal_lists_every_row_with_its_reason():
    with pytest.raises(NotImplementedError) as caught:
        _select.choose("neighborhood_fwd", TABLES["neighborhood_fwd"], attention("f32", 600), H200)
    text = str(caught.value)
    assert "plain_f32_d512:" in text and "head_dim 600 exceeds 512" in text
    assert "plain_f16_d64:" in text and "dtype f32 is not f16" in text


def test_force_considers_only_the_named_rows():
    problem = attention("f64", 16)
    with _select.force("plain_f64_d256"):
        row = _select.choose("neighborhood_fwd", TABLES["neighborhood_fwd"], problem, H200)
        assert row.name == "plain_f64_d256"
    row = _select.choose("neighborhood_fwd", TABLES["neighborhood_fwd"], problem, H200)
    assert row.name == "plain_f64_d64"


def test_architecture_specific_target_wins():
    pytest.importorskip("cupy")
    kernel = next(k for k in KERNELS.values() if k.source == "rope.cu")
    specific = Kernel(**{**kernel.__dict__, "target": "sm_90a", "name": "specific"})
    cubin, _ = _jit.compile_cubin(specific, "sm_90")
    plain, _ = _jit.compile_cubin(kernel, "sm_90")
    assert cubin[:4] == plain[:4] == b"\x7fELF"
    assert "-arch=sm_90a" in _jit.options(specific) and len(_jit.options(kernel)) == 1


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("space, window, dilation, stride, causal, own, seen", [
    ((37,), (8,), (3,), (2,), (False,), (4,), (5,)),
    ((40,), (11,), (1,), (3,), (True,), (8,), (8,)),
    ((13, 18), (5, 4), (1, 2), (2, 1), (False, True), (2, 4), (3, 8)),
])
def test_visits_are_those_of_a_walk(space, window, dilation, stride, causal, own, seen, inverse):
    """Counted box by box and pair by pair."""
    x = Layout((2, *space, 4, 16), "bf16")
    kv = Layout((2, *space, 2, 16), "bf16")
    problem = neighborhood.Problem(x, kv, kv, window, dilation, stride, causal, 1.0, "shift")
    boxes = inside = 0
    for group in itertools.product(*(range(d) for d in dilation)):
        lengths = [-(-(n - g) // d) for n, g, d in zip(space, group, dilation)]
        sees = [oracle.axis_mask(n, w, stride=s, causal=c)
                for n, w, s, c in zip(lengths, window, stride, causal)]
        sees = [m.T if inverse else m for m in sees]
        for tile in itertools.product(*(range(0, n, o) for n, o in zip(lengths, own))):
            rows = [m[t:t + o] for m, t, o in zip(sees, tile, own)]
            spans = [np.flatnonzero(r.any(0)) for r in rows]
            for at in itertools.product(*(range(s[0], s[-1] + 1, n)
                                          for s, n in zip(spans, seen))):
                boxes += 1
                inside += all(a + n <= r.shape[1] and r[:, a:a + n].all()
                              for r, a, n in zip(rows, at, seen))
    found = visits(problem, own, seen, inverse)
    assert (found.boxes, found.open) == (8 * boxes, 8 * inside)
    assert found.pairs == 8 * boxes * math.prod(own) * math.prod(seen)
    mask = oracle.mask(space, kernel_size=window, dilation=dilation, stride=stride, causal=causal)
    assert found.windows == 8 * mask.sum()
    assert str(found).startswith(f"{found.boxes:,} boxes, ")


# --- head sizes of the sm_90a rows of neighborhood attention ----------------------------------

PAIRS = list(itertools.product(neighborhood_hopper.DIMS, repeat=2))


@pytest.mark.parametrize("kind", [neighborhood_hopper.HopperForward,
                                  neighborhood_hopper.HopperBackward])
def test_every_pair_of_head_sizes_fits_the_device(kind):
    for row in (kind("bf16", *pair) for pair in PAIRS):
        for part, axes in itertools.product(row.parts, (1, 2, 3)):
            fits = [n for n in row._sizes(part) if row._bytes(part, axes, n)[1] > 1]
            assert fits, (row.name, part, axes)
            for _, stages, memory in (row._bytes(part, axes, n) for n in fits):
                assert 2 <= stages <= 6
                assert row.blocks * (memory + 1024) <= 228 << 10 and memory <= H200.shared_memory


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("head_dim, value_dim, name", [
    (8, 8, "d32"), (40, 64, "d64"), (80, 80, "d96"), (104, 128, "d128"), (136, 192, "d192"),
    (200, 256, "d256"), (64, 128, "dxv"), (192, 128, "dxv"), (256, 8, "dxv"), (24, 256, "dxv")])
def test_head_sizes_take_the_row_that_they_fill(head_dim, value_dim, name, backward):
    table = "neighborhood_bwd" if backward else "neighborhood_fwd"
    problem = line("bf16", head_dim, 1024, backward, value_dim)
    row = _select.choose(table, TABLES[table], problem, H200)
    assert row.name == f"hopper_bf16_{name}"
    for step in row.program(problem, H200).steps:
        assert f"kDim = {head_dim};" in " ".join(step.kernel.config)
        assert f"kValues = {value_dim};" in " ".join(step.kernel.config)
    assert len(row.notes(problem, H200)) == len(row.program(problem, H200).steps)


@pytest.mark.parametrize("head_dim, value_dim, reason", [
    (36, 36, "head_dim 36 is not a multiple of 8"), (64, 60, "value_dim 60 is not a multiple of 8"),
    (264, 264, "head_dim 264 exceeds 256"), (64, 512, "value_dim 512 exceeds 256")])
def test_head_sizes_that_no_sm_90a_row_takes(head_dim, value_dim, reason):
    problem = line("bf16", head_dim, 1024, False, value_dim)
    reasons = [why for row, why in _select.refusals(TABLES["neighborhood_fwd"], problem, H200)
               if row.name.startswith("hopper_bf16")]
    assert None not in reasons and reason in reasons


@pytest.mark.parametrize("shape, memory, extents, strides", [
    # Heads are an axis, the first axis and the batch another.
    ((2, 5, 6, 7, 4, 40), "last", (40, 4, 7, 6, 10), (80, 320, 2240, 13440)),
    ((2, 300, 4, 40), "first", (40, 4, 300, 1, 2), (24000, 80, 16, 96000)),
    # They do not follow one another: heads go with the batch.
    ((2, 5, 6, 7, 4, 40), "first", (40, 7, 6, 5, 8), (80, 560, 3360, 16800)),
])
def test_maps_of_spare_features_end_with_the_head(shape, memory, extents, strides):
    """What lies beyond the features of a head arrives as zeros."""
    order = [0, len(shape) - 2, *range(1, len(shape) - 2), len(shape) - 1]
    step, found = 1, [0] * len(shape)
    for axis in reversed(order if memory == "first" else range(len(shape))):
        found[axis], step = step, step * shape[axis]
    x, ones = Layout(shape, "bf16", tuple(found)), (1,) * (len(shape) - 3)
    problem = neighborhood.Problem(x, x, x, shape[1:-2], ones, ones, (False,) * len(ones), 1.0,
                                   "shift")
    row = neighborhood_hopper.HopperForward("bf16", 64, 64)
    assert row.refuses(problem, H200) is None
    step = row.program(problem, H200).steps[0]
    for name in ("q", "k", "v"):
        found = step.maps[f"{name}_map"]
        assert (found.extents, found.strides) == (extents, strides)
        assert step.values[f"{name}_heads_first"] == (extents[1] != 4)
