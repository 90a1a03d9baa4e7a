"""plan, explain, warmup, show_config, cache_info, check_errors, and errors of compilation."""

import io
import os
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import cupyattn
import numpy as np
import problems
import pytest
from cupyattn import _arrays, _device, _launch
from cupyattn._program import Device
from kinds import KINDS, LAYOUTS, lower, mk, place, raw, spin
from problems import flat
from tolerance import identical

ROOT = Path(__file__).resolve().parent.parent
EACH = [next(p for p in group if p.name == name) for group, name in (
    (problems.NEIGHBORHOOD, "grouped"), (problems.MULTI_TOKEN, "groups"), (problems.ROPE, "ids"),
    (problems.FUSED, "rotated_full"))]
OPERATORS = ["neighborhood_attention", "neighborhood_attention_backward",
             "fused_neighborhood_attention", "fused_neighborhood_attention_backward",
             "multi_token_attention", "multi_token_attention_backward", "rope", "rope_backward"]


def by_type(problem):
    return type(problem).__name__


each = pytest.mark.parametrize("problem", EACH, ids=by_type)


def calls(problem, kind, dtype="f32", put=None):
    return problem.calls(kind, dtype, put)


def rolled(kind, x):
    """Change the contents of an array along its first axis of more than one."""
    bits = raw(x)
    axis = next(a for a, n in enumerate(x.shape) if n > 1)
    bits[...] = kind.xp.roll(bits, 1, axis=axis).copy()


# --- plan ------------------------------------------------------------------------------------


@each
@pytest.mark.parametrize("layout", [None, "padded", "stepped"])
def test_plan_follows_the_contents(kind, problem, layout):
    """`p()` recomputes from what the arrays hold then, copies of strided ones included."""
    put = layout and (lambda x: place(kind, x, LAYOUTS[layout]))
    for call in calls(problem, kind, "f32", put):
        p = call.plan()
        first = lower(kind, tuple(flat(call())))
        for a, b in zip(flat(p.outputs), first):
            identical(np.array(kind.get(a)), b, what="outputs of a new plan")
        outputs = flat(p.outputs)
        rolled(kind, call.arrays[0])
        results = p()
        for a, b, fresh in zip(flat(results), outputs, flat(call())):
            assert a is b
            identical(kind.get(a), kind.get(fresh), what=problem.name)


@pytest.mark.parametrize("operation", ["rope", cupyattn.rope])
def test_plan_by_name_and_by_function(kind, operation):
    x, table = kind.put(mk(0, (1, 2, 5, 8))), kind.put(mk(1, (5, 4)))
    p = cupyattn.plan(operation, x, None, table, table)
    assert p.outputs[1] is None and p()[1] is None
    identical(kind.get(p()[0]), kind.get(cupyattn.rope(x, None, table, table)[0]))


def test_plan_refuses_what_the_operator_refuses(kind):
    x = kind.put(mk(0, (1, 8, 1, 8)))
    with pytest.raises(ValueError, match="kernel_size"):
        cupyattn.plan(cupyattn.neighborhood_attention, x, x, x, 9)
    with pytest.raises(ValueError, match="out"):
        cupyattn.plan(cupyattn.neighborhood_attention, x, x, x, 3, out=x.copy())
    for op in ("attention", cupyattn.plan, None):
        with pytest.raises(ValueError, match="(?s)op.*rope"):
            cupyattn.plan(op, x, x, x, 3)


@pytest.mark.gpu
@each
def test_plan_allocates_nothing_and_does_not_wait(cupy_kind, problem):
    cp = cupy_kind.xp
    pool = cp.get_default_memory_pool()
    for call in calls(problem, cupy_kind, "bf16"):
        p = call.plan()
        stream = cp.cuda.Stream(non_blocking=True)
        cp.cuda.Device().synchronize()
        before = pool.used_bytes()
        with stream:
            p()
            stream.synchronize()
            spin(100)
            busy = stream.record()
            p()
            assert not busy.done
            stream.synchronize()
        assert pool.used_bytes() == before


@pytest.mark.gpu
@each
def test_plan_runs_on_the_current_stream(cupy_kind, problem):
    cp = cupy_kind.xp
    for call in calls(problem, cupy_kind):
        p = call.plan()
        right = lower(cupy_kind, tuple(flat(p())))
        first = call.arrays[0]
        kept = first.copy()
        raw(first)[...] = 0
        cp.cuda.Device().synchronize()
        with cp.cuda.Stream(non_blocking=True):
            spin(20)
            raw(first)[...] = raw(kept)
            results = [cupy_kind.get(x) for x in flat(p())]
        for a, b in zip(results, right):
            identical(a, b, what=problem.name)


@pytest.mark.gpu
@pytest.mark.torch
@each
def test_plan_of_tensors(torch_kind, problem):
    torch = torch_kind.xp
    for call in calls(problem, torch_kind, "bf16"):
        p = call.plan()
        call.arrays[0].copy_(torch.roll(call.arrays[0], 1, 0))
        for a, b in zip(flat(p()), flat(call())):
            assert type(a) is torch.Tensor
            identical(torch_kind.get(a), torch_kind.get(b), what=problem.name)


# --- explain ---------------------------------------------------------------------------------


@each
def test_explain(kind, problem):
    from cupyattn import _select

    names = {row.name for table in _select.tables().values() for row in table}
    for call in calls(problem, kind):
        explanation = call.explain()
        assert explanation.row in names if kind.on_gpu else explanation.row == "reference"
        assert explanation.row in str(explanation)
        assert explanation.bytes > 0 and explanation.flops > 0
        if kind.on_gpu:
            assert explanation.floor_us > 0 and explanation.kernels
            assert all(reason for reason in explanation.refused.values())


def test_explain_counts_pairs_in_windows(kind):
    """4 * batch * heads * pairs * head_dim operations, with pairs by the windows."""
    arrays = [kind.put(mk(i, (2, 50, 3, 16))) for i in range(3)]
    for causal in (False, True):
        explanation = cupyattn.explain("neighborhood_attention", *arrays, 9, is_causal=causal)
        pairs = 50 * 9 if not causal else 50 * 9 - 36
        assert explanation.flops == 4 * 2 * 3 * pairs * 16
    assert explanation.bytes == 4 * 2 * 50 * 3 * 16 * 4


def test_explain_counts_operations_of_every_pass(kind):
    """Products of the useful part, two operations each; a backward has twice the products."""
    def flops(problem):
        return [call.explain().flops for call in problem.calls(kind, "f32")]

    p = problems.Neighborhood("", "", (50,), 9, heads=3, head_dim=16, value_dim=8, batch=2)
    pairs = 2 * 3 * 50 * 9
    assert flops(p) == [2 * pairs * (16 + 8), 2 * pairs * (3 * 16 + 2 * 8)]
    p = problems.Fused("", "", (50,), 9, hidden=24, heads=4, kv_heads=2, head_dim=8, batch=2,
                       boundary="shift")
    products, pairs = 2 * 2 * 50 * (24 * 32 + 2 * 24 * 16 + 32 * 24), 2 * 4 * 50 * 9
    assert flops(p) == [products + 4 * pairs * 8, 2 * products + 10 * pairs * 8]
    p = problems.MultiToken("", "", 10, channels=4, outs=6, groups=2, kernel=(3, 5), batch=2)
    once = 2 * 2 * 55 * 6 * 2 * 15
    assert flops(p) == [once, 2 * once]
    p = problems.Rope("", "", 7, head_dim=16, half=4, heads=(3, 1), batch=2)
    assert flops(p) == [3 * 2 * 7 * 4 * 8] * 2


def test_explain_refuses_what_the_operator_refuses(kind):
    x = kind.put(mk(0, (1, 8, 1, 8)))
    with pytest.raises(ValueError, match="kernel_size"):
        cupyattn.explain("neighborhood_attention", x, x, x, 9)
    with pytest.raises(TypeError, match="kernel_size"):
        cupyattn.explain("neighborhood_attention", x, x, x, 3.0)
    with pytest.raises(ValueError, match="(?s)op.*rope"):
        cupyattn.explain("attention", x)


WEIGHTS = ["q_weight", "k_weight", "v_weight", "out_weight"]
COPIED = {("Neighborhood", "stepped"): ["q", "k", "v"],
          ("Neighborhood", "fortran"): ["q", "k", "v"],
          ("MultiToken", "stepped"): ["scores"], ("MultiToken", "fortran"): ["scores"],
          ("Rope", "stepped"): ["q", "k"], ("Rope", "fortran"): ["q", "k"],
          ("Fused", "padded"): ["hidden_states", *WEIGHTS],
          ("Fused", "stepped"): ["hidden_states", *WEIGHTS],
          ("Fused", "fortran"): ["hidden_states"]}


@pytest.mark.parametrize("layout", ["padded", "stepped", "fortran"])
@each
def test_explain_is_of_the_call_that_is_made(monkeypatch, problem, layout):
    """The copies that it makes first are named; all else is that of a call on such copies.

    On a GPU that is not there: arrays are asked for their layouts alone.
    """
    numpy = KINDS["numpy"]
    forward, backward = calls(problem, numpy, put=lambda x: place(numpy, x, LAYOUTS[layout]))
    monkeypatch.setattr(_arrays.NumPy, "on_device", True)
    monkeypatch.setattr(_arrays, "common_device", lambda library, arrays: 0)
    monkeypatch.setattr(_device, "device", lambda index: Device(
        0, "NVIDIA H200", (9, 0), 132, 232448, 60 << 20))

    def copied(explanation):
        return [note.split()[0] for note in explanation.notes if "is copied first" in note]

    assert copied(forward.explain()) == COPIED.get((by_type(problem), layout), [])
    for call in (forward, backward):
        names = _launch.request_of(call.function, call.arrays, call.options).operator.arrays
        ours = call.explain()
        dense = [np.array(x, order="C") if name in copied(ours) else x
                 for name, x in zip(names, call.arrays)]
        made = replace(call, arrays=(*dense, *call.arrays[len(names):]))
        other = made.explain()
        assert not copied(other)
        assert replace(ours, notes=[]) == replace(other, notes=[])


@pytest.mark.gpu
def test_explain_allocates_and_launches_nothing(cupy_kind):
    pool = cupy_kind.xp.get_default_memory_pool()
    for problem in EACH:
        for call in calls(problem, cupy_kind):
            before = pool.used_bytes(), cupyattn.cache_info().kernels
            call.explain()
            assert (pool.used_bytes(), cupyattn.cache_info().kernels) == before


# --- warmup, cache_info ----------------------------------------------------------------------


@each
def test_warmup(kind, problem):
    """After it, a call compiles nothing."""
    for call in calls(problem, kind):
        names = cupyattn.warmup(call.function, *call.arrays, **call.options)
        assert bool(names) == kind.on_gpu and all(isinstance(n, str) for n in names)
        compiled = cupyattn.cache_info().compiled
        call()
        assert cupyattn.cache_info().compiled == compiled


@pytest.mark.gpu
def test_cache_info_counts(cupy_kind):
    before = cupyattn.cache_info()
    q = cupy_kind.put(mk(0, (1, 8, 1, 8)))
    for _ in range(2):
        cupyattn.neighborhood_attention(q, q, q, 3)
    after = cupyattn.cache_info()
    assert after.kernels >= 1 and after.kernels >= before.kernels
    assert after.compiled >= before.compiled and after.folder


def test_cache_info_without_a_gpu():
    info = cupyattn.cache_info()
    assert info.kernels >= 0 and info.compiled >= 0 and info.hits >= 0


# --- show_config, check_errors ---------------------------------------------------------------


def test_show_config(capsys):
    cupyattn.show_config()
    text = capsys.readouterr().out
    assert cupyattn.__version__ in text and np.__version__ in text and "kernels" in text
    file = io.StringIO()
    cupyattn.show_config(file)
    assert file.getvalue() == text


@pytest.mark.gpu
def test_show_config_names_the_device(cupy_kind, capsys):
    cupyattn.show_config()
    text = capsys.readouterr().out
    name = cupy_kind.xp.cuda.runtime.getDeviceProperties(0)["name"].decode()
    assert name in text and cupy_kind.xp.__version__ in text and "driver" in text


def test_check_errors_has_nothing_to_say():
    assert cupyattn.check_errors() is None


@pytest.mark.gpu
def test_check_errors_waits(cupy_kind):
    """The call returns at once; `check_errors` waits for it and tells, once."""
    cp = cupy_kind.xp
    x, table = (cupy_kind.put(mk(i, s)) for i, s in ((0, (1, 1, 4, 8)), (1, (4, 4))))
    ids = cupy_kind.put(np.array([0, 1, 2, 4]))
    cupyattn.rope(x, None, table, table, position_ids=cupy_kind.put(np.arange(4)))
    with cp.cuda.Stream(non_blocking=True):
        spin(100)
        cupyattn.rope(x, None, table, table, position_ids=ids)
        with pytest.raises(ValueError, match="position_ids"):
            cupyattn.check_errors()
    cupyattn.check_errors()


# --- compilation, debugging ------------------------------------------------------------------


@pytest.mark.gpu
def test_a_kernel_that_does_not_compile(cupy_kind, monkeypatch):
    """KernelError with the compiler's log, from the cause; nothing is left half done."""
    from cupyattn import _jit, _launch, _source

    x = cupy_kind.put(mk(0, (1, 8, 1, 8)))
    right = cupy_kind.get(cupyattn.neighborhood_attention(x, x, x, 3))
    original, wrong = _source.assemble, '\n#line 7 "kernels/wrong.cu"\nint x = y;\n'
    with monkeypatch.context() as patch:
        patch.setattr(_jit, "_loaded", {})
        patch.setattr(_launch, "_memo", type(_launch._memo)())
        patch.setattr(_source, "assemble", lambda kernel: original(kernel) + wrong)
        with pytest.raises(cupyattn.KernelError) as caught:
            cupyattn.neighborhood_attention(x, x, x, 3)
        text = str(caught.value)
        assert "kernels/wrong.cu(7)" in text and "y" in text and caught.value.__cause__ is not None
    identical(cupy_kind.get(cupyattn.neighborhood_attention(x, x, x, 3)), right)


@pytest.mark.gpu
@pytest.mark.slow
def test_debug_output():
    """CUPYATTN_DEBUG names row, grid and registers; CUPYATTN_SYNC changes no result."""
    script = ("import cupy, cupyattn; x = cupy.ones((1, 8, 1, 8), 'f4'); "
              "print(float(cupyattn.neighborhood_attention(x, x, x, 3).sum()))")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True,
                          check=True, cwd=ROOT, env={**os.environ, "CUPYATTN_DEBUG": "1",
                                                     "CUPYATTN_SYNC": "1"})
    assert float(done.stdout) == 64
    assert "plain" in done.stderr or "row" in done.stderr
    for word in ("grid", "registers"):
        assert word in done.stderr


def test_every_operator_has_its_help(kind):
    """`warmup`, `explain` and `plan` take each operator by its name."""
    seen = set()
    for problem in EACH:
        for call in calls(problem, kind):
            name = call.function.__name__
            explanation = cupyattn.explain(name, *call.arrays, **call.options)
            assert explanation.row == call.explain().row
            seen.add(name)
    assert seen == set(OPERATORS)


@pytest.mark.gpu
def test_plain_rows_beside_faster_ones_warn_once(cupy_kind):
    """A size that the fast row refuses is said; another dtype, which has none, is not."""
    def rotate(head_dim, dtype):
        q = cupy_kind.put(mk(0, (1, 2, 6, head_dim), dtype))
        cos, sin = (cupy_kind.put(t) for t in cupyattn.rope_table(9, head_dim))
        return cupyattn.rope(q, None, cos, sin)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rotate(64, "f32")
        rotate(22, "f64")
        assert not caught
        rotate(22, "f32")
        rotate(22, "f32")
    assert len(caught) == 1 and caught[0].category is cupyattn.PerformanceWarning
    assert "vector_f32_table_f32: rotary_dim 22 is not a multiple of 8" in str(caught[0].message)
