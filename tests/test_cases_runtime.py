"""Reported faults B77 to B99: scalars, dtypes, devices, compilation, streams. See CASES.md."""

import gc
import itertools
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import cupyattn
import numpy as np
import oracle
import problems
import pytest
from cupyattn._arrays import external_stream
from kinds import KINDS, call, capture, lower, mk, mta, na, raw, rope, spin
from problems import check
from tolerance import agree, identical

ROOT = Path(__file__).resolve().parent.parent
ONE_OF_EACH = [next(p for p in group if p.name == name) for group, name in (
    (problems.NEIGHBORHOOD, "grouped"), (problems.MULTI_TOKEN, "groups"), (problems.ROPE, "ids"),
    (problems.FUSED, "rotated"))]


def everything(kind, dtype="f32"):
    """Every operation, forward and backward, against the oracle."""
    for problem in ONE_OF_EACH:
        check(problem, kind, dtype)


# --- scalars and dtypes ----------------------------------------------------------------------


def test_b77_kinds_of_scale(kind):
    arrays = [mk(i, (1, 16, 2, 8)) for i in range(3)]
    quarter = na(kind, *arrays, 3, scale=0.25)
    for scale in (np.float32(0.25), np.float64(0.25), np.float16(0.25)):
        for a, b in zip(na(kind, *arrays, 3, scale=scale), quarter):
            identical(a, b)
    one = na(kind, *arrays, 3, scale=1.0)
    for scale in (1, np.int64(1)):
        for a, b in zip(na(kind, *arrays, 3, scale=scale), one):
            identical(a, b)
    with pytest.raises(TypeError, match="scale"):
        na(kind, *arrays, 3, scale="0.25")
    agree(quarter[0], oracle.na(*arrays, 3, scale=0.25)[0], case=True)


@pytest.mark.gpu
def test_b77_scale_on_the_device(cupy_kind):
    """A host scalar is wanted: to read one from the device would be a stall."""
    arrays = [cupy_kind.put(mk(i, (1, 16, 2, 8))) for i in range(3)]
    with pytest.raises(TypeError, match="scale"):
        cupyattn.neighborhood_attention(*arrays, 3, scale=cupy_kind.xp.array(0.25, np.float32))


def test_b77_kinds_of_base_and_offset(kind):
    x = mk(0, (1, 4, 2, 8))
    tables = [cupyattn.rope_table(9, 8, base=base) for base in (10000, 10000.0, np.float32(1e4))]
    for table in tables[1:]:
        for a, b in zip(table, tables[0]):
            identical(a, b)
    five = rope(kind, x, *tables[0], offset=5)
    for offset in (np.int32(5), np.int64(5)):
        identical(rope(kind, x, *tables[0], offset=offset), five)
    lifted = [kind.put(a) for a in (x, *tables[0])]
    zero_d = cupyattn.rope(lifted[0], None, *lifted[1:], offset=np.array(5), layout="bshd")[0]
    identical(kind.get(zero_d), five)
    for offset in (5.0, True, "5"):
        with pytest.raises(TypeError, match="offset"):
            rope(kind, x, *tables[0], offset=offset)


@pytest.mark.parametrize("argument, dtypes", [("k", "f16 f32 f16"), ("v", "f32 f32 bf16"),
                                              ("v", "f64 f64 f32")])
def test_b78_mixed_dtypes_neighborhood(kind, argument, dtypes):
    arrays = [mk(i, (1, 8, 1, 8), dtype) for i, dtype in enumerate(dtypes.split())]
    with pytest.raises(TypeError, match=rf"\b{argument}\b.*float"):
        na(kind, *arrays, 3)


@pytest.mark.parametrize("dtype", [np.int32, np.complex64, np.bool_, np.uint8])
def test_b78_other_dtypes(kind, dtype):
    x = np.ones((1, 8, 1, 8), dtype)
    with pytest.raises(TypeError, match=rf"(?s)\bq\b.*{np.dtype(dtype).name}.*float16"):
        na(kind, x, x, x, 3)
    scores = np.ones((1, 1, 4, 4), dtype)
    with pytest.raises(TypeError, match=rf"(?s)scores.*{np.dtype(dtype).name}.*float16"):
        mta(kind, scores, scores)


def test_b78_mixed_dtypes_elsewhere(kind):
    with pytest.raises(TypeError, match="weight.*float64"):
        mta(kind, mk(0, (1, 1, 4, 4), "f16"), mk(1, (1, 1, 3, 3), "f64"))
    q, y = mk(0, (1, 8, 1, 8), "f16"), mk(1, (1, 8, 1, 8), "f32")
    lse = np.zeros((1, 8, 1), np.float32)
    with pytest.raises(TypeError, match=r"\bdy\b|\bq\b"):
        call(kind, cupyattn.neighborhood_attention_backward, y, q, q, q, q, lse, 3)
    with pytest.raises(TypeError, match="lse"):
        call(kind, cupyattn.neighborhood_attention_backward, q, q, q, q, q, lse.astype(q.dtype), 3)


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32", "f64"])
@pytest.mark.parametrize("table", ["f16", "bf16", "f32", "f64"])
def test_b78_tables_of_any_float(kind, dtype, table):
    check(problems.with_table(problems.ROPE[0], table), kind, dtype)


def test_b78_float64_throughout(kind):
    everything(kind, "f64")


# --- two devices -----------------------------------------------------------------------------


class OnDevice:
    """CuPy arrays on a device that need not be the current one."""

    name, on_gpu = "cupy", True

    def __init__(self, index):
        self.index = index

    def put(self, x):
        import cupy

        with cupy.cuda.Device(self.index):
            return KINDS["cupy"].put(x)

    def get(self, a):
        assert a.device.id == self.index
        with a.device:
            return KINDS["cupy"].get(a)


@pytest.mark.gpu
@pytest.mark.multigpu
@pytest.mark.parametrize("current, other", [(0, 1), (1, 0)])
def test_b09_arrays_on_another_device(cupy_kind, current, other):
    cp = cupy_kind.xp
    pool = cp.get_default_memory_pool()
    with cp.cuda.Device(current):
        everything(OnDevice(other))
        pool.free_all_blocks()
        before = pool.total_bytes()
        arrays = [mk(i, (1, 128, 4, 64), "f16") for i in range(4)]
        q, k, v, dy = map(OnDevice(other).put, arrays)
        y, lse = cupyattn.neighborhood_attention(q, k, v, 7, return_lse=True)
        assert cp.cuda.runtime.getDevice() == current
        grads = cupyattn.neighborhood_attention_backward(dy, q, k, v, y, lse, 7)
        assert cp.cuda.runtime.getDevice() == current
        assert pool.total_bytes() == before  # the pool of the current device
        exact = (oracle.na(*arrays[:3], 7)[0], *oracle.na_bwd(*arrays, 7))
        for a, b in zip((y, *grads), exact):
            agree(OnDevice(other).get(a), b, case=True)
        with pytest.raises(ValueError):
            cupyattn.neighborhood_attention(q, k, v, 129)
        assert cp.cuda.runtime.getDevice() == current


@pytest.mark.gpu
@pytest.mark.multigpu
def test_b79_two_devices_in_turn(cupy_kind):
    cp = cupy_kind.xp
    for index in (0, 1, 0, 1):
        with cp.cuda.Device(index):
            everything(cupy_kind)
    kernels = cupyattn.cache_info().kernels
    with cp.cuda.Device(1):
        everything(cupy_kind)
    assert cupyattn.cache_info().kernels == kernels


@pytest.mark.gpu
@pytest.mark.multigpu
@pytest.mark.slow
def test_b79_first_use_on_the_second_device(tmp_path):
    script = WORKER.replace("# before", "import cupy; cupy.cuda.Device(1).use()")
    assert json.loads(worker(tmp_path / "cache", script=script))["right"]


@pytest.mark.gpu
@pytest.mark.multigpu
def test_b96_arrays_on_two_devices(cupy_kind):
    a, b = OnDevice(0), OnDevice(1)
    x, scores, weight = mk(0, (1, 8, 1, 8)), mk(0, (1, 1, 4, 4)), mk(1, (1, 1, 3, 3))
    table, ids = mk(2, (8, 4)), np.arange(8)
    mixtures = [
        lambda: cupyattn.neighborhood_attention(a.put(x), b.put(x), a.put(x), 3),
        lambda: cupyattn.multi_token_attention(a.put(scores), b.put(weight)),
        lambda: cupyattn.rope(b.put(x), None, b.put(table), b.put(table), layout="bshd",
                              position_ids=a.put(ids)),
        lambda: cupyattn.neighborhood_attention(a.put(x), a.put(x), a.put(x), 3, out=b.put(x))]
    for mixture, name in zip(mixtures, ("k", "weight", "position_ids", "out")):
        with pytest.raises(ValueError, match=rf"(?s)\b{name}\b.*device"):
            mixture()
    for device in (a, b):
        everything(device)


@pytest.mark.gpu
@pytest.mark.multigpu
@pytest.mark.torch
def test_b96_torch_on_another_device_than_cupys(torch_kind):
    torch, x = torch_kind.xp, mk(0, (1, 8, 1, 8))
    on_one = torch.from_numpy(x).to("cuda:1")
    y = cupyattn.neighborhood_attention(on_one, on_one, on_one, 3)
    assert y.device == on_one.device
    agree(y.cpu().numpy(), oracle.na(x, x, x, 3)[0], case=True)
    with pytest.raises(ValueError, match="device"):
        cupyattn.neighborhood_attention(on_one, on_one.to("cuda:0"), on_one, 3)


@pytest.mark.gpu
def test_b96_arrays_of_two_kinds(cupy_kind):
    x = mk(0, (1, 8, 1, 8))
    with pytest.raises(TypeError, match=r"(?s)\bk\b.*numpy"):
        cupyattn.neighborhood_attention(cupy_kind.put(x), x, cupy_kind.put(x), 3)
    with pytest.raises(TypeError, match=r"(?s)out"):
        cupyattn.neighborhood_attention(*[cupy_kind.put(x)] * 3, 3, out=x.copy())
    everything(cupy_kind)


# --- compilation and its cache ---------------------------------------------------------------

WORKER = """
import json, sys
sys.path[:0] = [{root!r}, {root!r} + "/tests"]
# before
import cupy.cuda.compiler as compiler
compiled, original = [], compiler._NVRTCProgram.compile
def counted(self, *args, **options):
    if "__global__" in self.src:
        compiled.append(self.src)
    return original(self, *args, **options)
compiler._NVRTCProgram.compile = counted
import warnings
warnings.simplefilter("ignore")
import kinds, test_cases_runtime as t
# then
right = True
try:
    t.forward_of_each(kinds.KINDS["cupy"])
except AssertionError as error:
    right = str(error)
print(json.dumps(dict(compiled=len(compiled), right=right)))
""".format(root=str(ROOT))


def forward_of_each(kind):
    """The forward of every operation against the oracle; few kernels, so quickly compiled."""
    for problem in ONE_OF_EACH:
        forward, _ = problem.calls(kind, "f32")
        results = forward()
        if isinstance(problem, problems.Fused):
            results = results[:1]
        for ours, exact in zip(results, problem.exact("f32")):
            agree(kind.get(ours), exact, case=True, what=problem.name)


def start(folder, script=WORKER, **environment):
    return subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        cwd=ROOT, env={**os.environ, "CUPY_CACHE_DIR": str(folder), **environment})


def finished(process):
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err[-3000:]
    return out.splitlines()[-1]


def worker(folder, script=WORKER, **environment):
    """Run the operations in a fresh process; what it prints last."""
    return finished(start(folder, script, **environment))


def files_of(folder):
    return sorted(str(p.relative_to(folder)) for p in Path(folder).rglob("*") if p.is_file())


@pytest.mark.gpu
@pytest.mark.slow
def test_b83_disk_cache_hits_and_b84_bad_entries(tmp_path):
    folder = tmp_path / "cache"
    first = json.loads(worker(folder, PYTHONHASHSEED="1"))
    assert first["right"] is True and first["compiled"] > 0
    files = files_of(folder)
    second = json.loads(worker(folder, PYTHONHASHSEED="2"))
    assert second == {"compiled": 0, "right": True}
    assert files_of(folder) == files
    # A bad entry is built again.
    cubins = [folder / name for name in files if name.endswith(".cubin")]
    assert cubins
    for path in cubins:
        path.write_bytes(path.read_bytes()[:100])
    third = json.loads(worker(folder))
    assert third["right"] is True and third["compiled"] > 0


def test_b83_source_text_is_the_same_in_every_process():
    """No addresses, times or order of a dict in what the compiler, and the cache's key, see."""
    script = ("import sys, hashlib; sys.path.insert(0, sys.argv[1])\n"
              "from cupyattn import _select, _source\n"
              "texts = [_source.assemble(k) for _, t in sorted(_select.tables().items())"
              " for row in t for k in row.kernels()]\n"
              "print(len(texts), hashlib.sha256(''.join(texts).encode()).hexdigest())")
    runs = [subprocess.Popen([sys.executable, "-c", script, str(ROOT)], stdout=subprocess.PIPE,
                             text=True, env={**os.environ, "PYTHONHASHSEED": seed})
            for seed in ("1", "2")]
    one, two = (run.communicate()[0] for run in runs)
    assert one == two and int(one.split()[0]) > 0


@pytest.mark.gpu
@pytest.mark.slow
def test_b84_processes_race_on_the_cache(tmp_path):
    # CuPy makes the folder on import; a file in its place is one that cannot be written to, for
    # any user.
    lost = tmp_path / "lost"
    lose = f"import os; os.rmdir({str(lost)!r}); open({str(lost)!r}, 'w')"
    blocked = WORKER.replace("# then", lose)
    processes = [start(tmp_path / "cache") for _ in range(8)] + [start(lost, blocked)]
    for process in processes:
        assert json.loads(finished(process))["right"] is True
    assert lost.is_file()


def test_b98_sources_include_their_own_headers_only():
    """Which half headers a toolkit has cannot matter; test_configs.py compiles every row."""
    sources = [p for p in (ROOT / "kernels").rglob("*") if p.suffix in (".cu", ".cuh")]
    assert sources
    for path in sources:
        for line in path.read_text().splitlines():
            if line.lstrip().startswith("#include"):
                assert re.match(r'\s*#include "', line), f"{path}: {line}"


# --- streams, capture, memory ----------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.torch
def test_b88_torch_streams(torch_kind):

    torch = torch_kind.xp
    source, (cos, sin) = mk(0, (2, 5, 3, 16)), cupyattn.rope_table(5, 16)
    exact = oracle.rope(source, np.arange(5), oracle.inv_freq(16))
    good, c, s = (torch_kind.put(t) for t in (source, cos, sin))
    side = torch.cuda.Stream()
    for _ in range(50):
        x = torch.zeros_like(good)
        side.wait_stream(torch.cuda.current_stream())
        with warnings.catch_warnings(), torch.cuda.stream(side):
            warnings.simplefilter("error")
            spin(10, external_stream(side.cuda_stream))
            x.copy_(good)
            y = cupyattn.rope(x, None, c, s, layout="bshd")[0]
            agree(y.cpu().numpy(), exact, case=True)  # orders on the side stream, and no other
            spin(10, external_stream(side.cuda_stream))
            x.mul_(2)
        torch.cuda.current_stream().wait_stream(side)
        y = cupyattn.rope(x, None, c, s, layout="bshd")[0]
        agree(y.cpu().numpy(), 2 * exact, case=True)
        del x, y


@pytest.mark.gpu
@pytest.mark.parametrize("which", ["null", "per_thread", "side", "external"])
def test_b88_cupy_streams(cupy_kind, which):
    cp = cupy_kind.xp
    side = cp.cuda.Stream(non_blocking=True)
    stream = {"null": cp.cuda.Stream.null, "per_thread": cp.cuda.Stream.ptds, "side": side,
              "external": external_stream(side.ptr)}[which]
    source, table = mk(0, (2, 5, 3, 16)), cupyattn.rope_table(5, 16)
    exact = oracle.rope(source, np.arange(5), oracle.inv_freq(16))
    good, cos, sin = (cupy_kind.put(t) for t in (source, *table))
    cp.cuda.Device().synchronize()
    for _ in range(20):
        with stream:
            x = cp.zeros_like(good)
            spin(5)
            x[...] = good
            y = cupyattn.rope(x, None, cos, sin, layout="bshd")[0]
            agree(cupy_kind.get(y), exact, case=True)


@pytest.mark.gpu
@pytest.mark.torch
@pytest.mark.parametrize("stepped", [False, True])
def test_b90_bfloat16_tensors(torch_kind, stepped):
    torch = torch_kind.xp
    for problem in ONE_OF_EACH:
        def put(x):
            tensor = torch_kind.put(x)
            if not stepped or x.ndim < 2:
                return tensor
            wide = torch.zeros((x.shape[0], 2 * x.shape[1], *x.shape[2:]), dtype=tensor.dtype,
                               device="cuda")
            wide[:, ::2] = tensor
            return wide[:, ::2]

        check(problem, torch_kind, "bf16", put)
        forward, _ = problem.calls(torch_kind, "bf16", put)
        y = forward()[0]
        assert y.dtype == torch.bfloat16 and y.device == forward.arrays[0].device


@pytest.mark.gpu
@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bool"])
def test_b90_other_types(torch_kind, dtype):
    torch = torch_kind.xp
    x = torch.zeros((1, 8, 1, 8), device="cuda").to(getattr(torch, dtype))
    with pytest.raises(TypeError, match=rf"(?s)\bq\b.*{dtype}.*bfloat16"):
        cupyattn.neighborhood_attention(x, x, x, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("problem", ONE_OF_EACH, ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_b92_capture(cupy_kind, problem, dtype):
    """Forward and backward in one graph; replays on other inputs equal eager calls."""
    cp, n = cupy_kind.xp, problem.forward_results
    forward, backward = problem.calls(cupy_kind, dtype)
    outs = [allocated(cupy_kind, call()) for call in (forward, backward)]

    def both():
        forward(outs[0])
        backward(outs[1])

    stream, graph = capture(both)
    first = forward.arrays[0]
    original = first.copy()
    for turn in (1, 2, 0):
        with stream:
            raw(first)[...] = cp.roll(raw(original), turn, axis=0)
        graph.launch(stream)
        stream.synchronize()
        for ours, eager in zip(problems.flat(*outs), problems.flat(forward(), backward())):
            identical(cupy_kind.get(ours), cupy_kind.get(eager))
    results = lower(cupy_kind, (*outs[0][:n], *outs[1]))
    problems.hold(problem, dtype, results)


def allocated(kind, results):
    """New arrays like results, for `out=`; None stays None."""
    if isinstance(results, tuple):
        return tuple(allocated(kind, r) for r in results)
    return None if results is None else kind.xp.zeros_like(results)


@pytest.mark.gpu
def test_b92_capture_in_place(cupy_kind):
    cp, table = cupy_kind.xp, cupyattn.rope_table(5, 16)
    x, cos, sin = (cupy_kind.put(t) for t in (mk(0, (2, 5, 3, 16)), *table))
    stream, graph = capture(lambda: cupyattn.rope(x, None, cos, sin, layout="bshd", out=(x, None)))
    for seed in (1, 2, 3):
        source = mk(seed, x.shape)
        x[...] = cupy_kind.put(source)
        cp.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        agree(cupy_kind.get(x), oracle.rope(source, np.arange(5), oracle.inv_freq(16)), case=True)


COLD_CAPTURE = """
import json, sys
sys.path[:0] = [{root!r}, {root!r} + "/tests"]
import cupy, cupyattn, kinds, test_cases_runtime as t
kind, message = kinds.KINDS["cupy"], ""
x, weight = (kind.put(kinds.mk(i, (1, 1, 4, 4))) for i in (0, 1))
out = cupy.zeros_like(x)
cupy.cuda.Device().synchronize()
pool = cupy.get_default_memory_pool()
pool.free_all_blocks()
level = pool.used_bytes()
stream = cupy.cuda.Stream(non_blocking=True)
with stream:
    stream.begin_capture()
    try:
        cupyattn.multi_token_attention(x, weight, out=out)
    except Exception as error:
        message = f"{{type(error).__name__}}: {{error}}"
    finally:
        try:
            graph = stream.end_capture()
        except Exception as error:
            message = message or f"{{type(error).__name__}}: {{error}}"
if not message:
    graph.launch(stream)
    stream.synchronize()
    captured = out.get()
    del graph
eager = cupyattn.multi_token_attention(x, weight).get()
if not message:
    assert (captured == eager).all()
with stream:
    t.forward_of_each(kind)
t.forward_of_each(kind)
grown = pool.used_bytes() - level
print(json.dumps(dict(message=message, grown=grown)))
"""


@pytest.mark.gpu
@pytest.mark.slow
def test_b94_capture_without_warm_up(tmp_path):
    script = COLD_CAPTURE.format(root=str(ROOT))
    outcome = json.loads(worker(tmp_path / "cache", script=script))
    assert not outcome["message"] or "warm" in outcome["message"], outcome["message"]
    assert outcome["grown"] <= 1 << 20


def poison_the_pool(cp):
    """Leave blocks of every small size in CuPy's pool, all NaN."""
    blocks = [cp.full(512 * n, 0xFF, np.uint8) for n in (*range(1, 65), 96, 128, 256, 1024, 4096)
              for _ in range(3)]
    del blocks


@pytest.mark.gpu
@pytest.mark.parametrize("problem", problems.NEIGHBORHOOD + problems.MULTI_TOKEN + problems.FUSED
                         + problems.ROPE, ids=lambda p: f"{type(p).__name__}-{p.name}")
def test_b95_results_are_written_everywhere(cupy_kind, problem):
    calls = problem.calls(cupy_kind, "f32")
    gc.collect()
    poison_the_pool(cupy_kind.xp)
    results = calls[0]()[:problem.forward_results] + calls[1]()
    results = lower(cupy_kind, results)
    assert all(x is None or np.isfinite(x).all() for x in results)
    problems.hold(problem, "f32", results)
    if isinstance(problem, problems.MultiToken):
        for x in results[:2]:
            assert not x[..., ~np.tri(problem.seq, dtype=bool)].any()


# --- caches ----------------------------------------------------------------------------------


def neighborhood_variants():
    for head_dim, kernel_size, dilation, stride, causal, boundary, dtype, kv_heads, length, scale \
            in itertools.product((32, 64), (3, 5), (1, 2), (1, 2), (False, True),
                                 ("shift", "clip"), ("f16", "bf16", "f32"), (1, 2), (17, 33),
                                 (None, 0.5)):
        if boundary == "shift" or stride == 1:
            yield problems.Neighborhood(
                "variant", "", (length,), kernel_size, dilation, stride, causal, boundary,
                heads=2, kv_heads=kv_heads, head_dim=head_dim, scale=scale), dtype


def multi_token_variants():
    for size, groups, bias, activation, dtype in itertools.product(
            (1, 3), (1, 2), (False, True), ("softmax", "sparsemax"), ("f16", "f32")):
        yield problems.MultiToken("variant", "", 12, kernel=(size, size), groups=groups,
                                  bias=bias, activation=activation), dtype


def test_b97_no_call_gets_anothers_kernel(kind):
    """All combinations in a shuffled order, twice: each right, and the second as the first."""
    variants = [*neighborhood_variants(), *multi_token_variants()]
    order = np.random.default_rng(0).permutation(len(variants))
    if not kind.on_gpu:
        order = order[::8]
    first = {}
    for turn in (1, 2):
        for n in order:
            problem, dtype = variants[n]
            y = kind.get(problem.calls(kind, dtype)[0]()[0])
            if turn == 1:
                q = problem.inputs(dtype)
                exact = (oracle.na(*q[:3], **problem.arguments)[0]
                         if isinstance(problem, problems.Neighborhood)
                         else oracle.mta(*q[:3], **problem.options))
                agree(y, exact, case=True, what=f"{problem} {dtype}")
                first[n] = y
            else:
                identical(y, first[n], what=f"{problem} {dtype}")


# --- leaks -----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.torch
@pytest.mark.slow
def test_b99_nothing_is_kept(torch_kind):
    import cupy

    torch = torch_kind.xp
    cos, sin = (torch_kind.put(t) for t in cupyattn.rope_table(256, 256))
    pool = cupy.get_default_memory_pool()

    def once(n):
        x = torch.randn(1, 1, 256 if n % 3 else 0, 256, device="cuda")
        y = cupyattn.rope(x, None, cos, sin)[0]
        if n % 5 == 0:
            with pytest.raises(ValueError):
                cupyattn.rope(x, None, cos, sin, rotary_dim=3)
        return y

    for n in range(30):
        once(n)
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated(), pool.used_bytes()
    for n in range(10000):
        y = once(n)
    del y
    torch.cuda.synchronize()
    gc.collect()
    after = torch.cuda.memory_allocated(), pool.used_bytes()
    assert all(b - a <= 1 << 20 for a, b in zip(before, after))


@pytest.mark.gpu
@pytest.mark.torch
def test_b99_results_outlive_their_inputs(torch_kind):
    torch = torch_kind.xp
    source, table = mk(0, (2, 5, 3, 16)), cupyattn.rope_table(5, 16)
    exact = oracle.rope(source, np.arange(5), oracle.inv_freq(16))
    x, cos, sin = (torch_kind.put(t) for t in (source, *table))
    y = cupyattn.rope(x, None, cos, sin, layout="bshd")[0]
    del x, cos, sin
    gc.collect()
    torch.empty(1 << 20, device="cuda").fill_(7)
    agree(y.cpu().numpy(), exact, case=True)
