"""Array libraries: torch and DLPack, streams, memory, threads, what is refused."""

import concurrent.futures
import gc

import cupyattn
import ml_dtypes
import numpy as np
import oracle
import problems
import pytest
from cupyattn import _arrays
from cupyattn._arrays import external_stream
from kinds import DTYPES, KINDS, LAYOUTS, lower, mk, raw, spin
from problems import check, check_layouts, check_out, flat
from tolerance import agree, identical

EACH = [next(p for p in group if p.name == name) for group, name in (
    (problems.NEIGHBORHOOD, "anisotropic"), (problems.MULTI_TOKEN, "causal_dilated"),
    (problems.ROPE, "ids_each"), (problems.FUSED, "rotated_pairs"))]
gpu, torch_mark = pytest.mark.gpu, pytest.mark.torch


def by_type(problem):
    return type(problem).__name__


each = pytest.mark.parametrize("problem", EACH, ids=by_type)


# --- what a repeated call is known by --------------------------------------------------------


@pytest.mark.parametrize("public", [False, True])
def test_signatures_tell_layouts_apart(public, monkeypatch):
    """With CuPy's own note of contiguity, and without it."""
    cupy = pytest.importorskip("cupy")
    memory = cupy.cuda.UnownedMemory(1 << 20, 1 << 20, None, 0)

    def array(shape=(2, 6), dtype="f", offset=0, strides=None):
        return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, offset), strides)

    if public:
        monkeypatch.setattr(_arrays, "hasattr", lambda x, name: False, raising=False)
    library = _arrays.CuPy()
    assert ("read" in vars(library)) == public
    unlike = [None, array(), array((6, 2)), array((12,)), array((2, 6, 1)), array(dtype="e"),
              array(offset=4), array(offset=8), array(strides=(4, 8)), array(strides=(48, 8)),
              array(strides=(0, 4)), array(strides=(24, -4), offset=64)]
    signatures = [library.read([x, unlike[1]])[0] for x in unlike]
    assert len(set(signatures)) == len(unlike)
    again, addresses = library.read([array(offset=256), None])
    assert again == library.read([unlike[1], None])[0] and addresses == [(1 << 20) + 256, 0]
    if not public:  # how far apart single rows are says nothing
        one = [library.read([array((1, 6), strides=(s, 4))])[0] for s in (24, 400)]
        assert one[0] == one[1]


# --- torch -----------------------------------------------------------------------------------


@gpu
@torch_mark
@each
@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_gives_the_bits_of_cupy(torch_kind, cupy_kind, problem, dtype):
    for a, b in zip(problem.calls(torch_kind, dtype), problem.calls(cupy_kind, dtype)):
        theirs, ours = flat(a()), flat(b())
        assert all(type(x) is torch_kind.xp.Tensor and x.is_cuda for x in theirs)
        for x, y in zip(theirs, ours):
            identical(torch_kind.get(x), cupy_kind.get(y), what=problem.name)
    check(problem, torch_kind, dtype)


@gpu
@torch_mark
@each
def test_torch_out(torch_kind, problem):
    check_out(problem, torch_kind, "bf16", LAYOUTS["guarded"])


@gpu
@torch_mark
@each
@pytest.mark.parametrize("layout", ["guarded", "padded", "stepped", "fortran"])
def test_torch_layouts(torch_kind, problem, layout):
    check_layouts(problem, torch_kind, "bf16", LAYOUTS[layout])


@gpu
@torch_mark
def test_results_are_allocated_by_torch(torch_kind):
    """And by CuPy not a byte."""
    import cupy

    torch, pool = torch_kind.xp, cupy.get_default_memory_pool()
    x = torch.ones((1, 4, 1024, 256), dtype=torch.bfloat16, device="cuda")
    table = torch.ones((1024, 128), device="cuda")
    y = cupyattn.rope(x, None, table, table)[0]
    del y
    pool.free_all_blocks()
    before, ours = torch.cuda.memory_allocated(), pool.total_bytes()
    y = cupyattn.rope(x, None, table, table)[0]
    assert torch.cuda.memory_allocated() - before == x.numel() * 2
    assert pool.total_bytes() == ours
    assert y.is_contiguous() and y.untyped_storage().nbytes() == x.numel() * 2
    del y
    assert torch.cuda.memory_allocated() == before


def large_calls(kind, dtype):
    """(label, bytes of the smallest large input, function of nothing) with `out=` given."""
    def zeros(*shape):
        return kind.put(np.zeros(shape, DTYPES[dtype]))

    tokens = [zeros(1, 8192, 8, 64) for _ in range(4)]
    q, k, v, y = tokens
    size = 8192 * 8 * 64 * DTYPES[dtype].itemsize
    yield "na", size, lambda: cupyattn.neighborhood_attention(q, k, v, 3, out=y)
    first = [kind.put(np.zeros((1, 8, 8192, 64), DTYPES[dtype])).swapaxes(1, 2) for _ in range(3)]
    yield "na, heads first", size, lambda: cupyattn.neighborhood_attention(*first, 3, out=y)
    table = kind.put(np.ones((8192, 32), np.float32))
    yield ("rope", size, lambda: cupyattn.rope(q, k, table, table, layout="bshd", out=(y, v)))
    scores, weights = zeros(1, 2, 1024, 1024), zeros(2, 2, 3, 3)
    out = zeros(1, 2, 1024, 1024)
    yield ("mta", 2 * 1024 * 1024 * DTYPES[dtype].itemsize,
           lambda: cupyattn.multi_token_attention(scores, weights, out=out))


@gpu
@torch_mark
@pytest.mark.parametrize("name", ["cupy", "torch"])
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_no_input_is_copied(name, dtype):
    """No allocator gives out as much as the smallest input while a call runs."""
    import cupy

    torch = pytest.importorskip("torch")
    pool = cupy.get_default_memory_pool()
    for label, size, function in large_calls(KINDS[name], dtype):
        function()
        torch.cuda.synchronize()
        gc.collect()
        pool.free_all_blocks()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated(), pool.total_bytes()
        function()
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() - before[0] < size // 2, label
        assert pool.total_bytes() - before[1] < size // 2, label


@gpu
@torch_mark
def test_bfloat16_through_dlpack_both_ways(torch_kind):
    """A torch tensor becomes a CuPy array and a result a tensor, in the same memory."""
    import cupy

    torch = torch_kind.xp
    x = mk(0, (1, 2, 6, 8), "bf16")
    tensor, table = torch_kind.put(x), cupy.ones((6, 4), np.float32)
    array = cupy.from_dlpack(tensor)
    assert array.data.ptr == tensor.data_ptr() and array.dtype == ml_dtypes.bfloat16
    y = cupyattn.rope(array, None, table, table)[0]
    back = torch.from_dlpack(y)
    assert back.data_ptr() == y.data.ptr and back.dtype == torch.bfloat16
    rows = np.ones((6, 4))
    exact = oracle.rotate(x.swapaxes(1, 2), rows, rows).swapaxes(1, 2)
    agree(torch_kind.get(back), exact, case=True)


@gpu
@torch_mark
def test_parameters_without_gradient(torch_kind):
    """Weights of a frozen module are tensors like others."""
    torch = torch_kind.xp
    problem = EACH[1]
    scores, weight, _, _ = problem.inputs("f32")
    frozen = torch.nn.Parameter(torch_kind.put(weight), requires_grad=False)
    y = cupyattn.multi_token_attention(torch_kind.put(scores), frozen, **problem.options)
    assert type(y) is torch.Tensor
    agree(torch_kind.get(y), problem.exact("f32")[0], case=True)


@gpu
@torch_mark
@pytest.mark.parametrize("argument", ["q", "k", "v", "out"])
def test_gradients_are_refused_for_every_argument(torch_kind, argument):
    torch = torch_kind.xp
    arrays = {name: torch.ones((1, 8, 1, 8), device="cuda") for name in ("q", "k", "v", "out")}
    cupyattn.neighborhood_attention(**arrays, kernel_size=3)  # the same call, but for the gradient
    arrays[argument] = arrays[argument].requires_grad_()
    with pytest.raises((TypeError, ValueError), match=rf"(?s)\b{argument}\b.*grad.*detach"):
        cupyattn.neighborhood_attention(**arrays, kernel_size=3)


@gpu
@torch_mark
def test_torch_autograd_function(torch_kind):
    """Autograd as a caller's few lines: forward, backward, and the gradient that torch gets."""
    torch = torch_kind.xp

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, kernel_size):
            q, k, v = q.detach(), k.detach(), v.detach()
            y, lse = cupyattn.neighborhood_attention(q, k, v, kernel_size, return_lse=True)
            ctx.save_for_backward(q, k, v, y, lse)
            ctx.kernel_size = kernel_size
            return y

        @staticmethod
        def backward(ctx, dy):
            q, k, v, y, lse = ctx.saved_tensors
            return (*cupyattn.neighborhood_attention_backward(
                dy, q, k, v, y.detach(), lse.detach(), ctx.kernel_size), None)

    problem = problems.NEIGHBORHOOD[0]
    q, k, v, dy, _ = problem.inputs("f32")
    tensors = [torch_kind.put(x).requires_grad_() for x in (q, k, v)]
    y = Attention.apply(*tensors, problem.kernel_size)
    (y * torch_kind.put(dy)).sum().backward()
    for tensor, exact in zip(tensors, oracle.na_bwd(q, k, v, dy, problem.kernel_size)):
        agree(tensor.grad.cpu().numpy(), exact, case=True)


@gpu
@torch_mark
def test_mixtures_are_refused(torch_kind, cupy_kind):
    x = mk(0, (1, 8, 1, 8))
    tensor, array = torch_kind.put(x), cupy_kind.put(x)
    for arrays, says in (((tensor, array, tensor), r"(?s)\bk\b.*cupy"),
                         ((array, array, tensor), r"(?s)\bv\b.*torch"),
                         ((tensor, tensor, x), r"(?s)\bv\b.*numpy")):
        with pytest.raises(TypeError, match=says):
            cupyattn.neighborhood_attention(*arrays, 3)
    with pytest.raises(TypeError, match="out"):
        cupyattn.neighborhood_attention(tensor, tensor, tensor, 3, out=array)
    cupyattn.neighborhood_attention(tensor, tensor, tensor, 3)
    with pytest.raises((TypeError, ValueError), match=r"(?s)\bk\b.*\.cuda\(\)"):
        cupyattn.neighborhood_attention(tensor, tensor.cpu(), tensor, 3)


# --- other libraries, through DLPack ---------------------------------------------------------


class Foreign:
    """An array of a library that knows DLPack and nothing else."""

    def __init__(self, array):
        self.array = array
        self.exports = 0

    def __dlpack__(self, **options):
        self.exports += 1
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def from_dlpack(x):
    """The library's import, found by the name of its module."""
    import cupy

    return Foreign(cupy.from_dlpack(x))


@gpu
def test_arrays_of_another_library(cupy_kind):
    problem = problems.NEIGHBORHOOD[0]
    q, k, v, dy, _ = problem.inputs("f32")
    arrays = [Foreign(cupy_kind.put(x)) for x in (q, k, v)]
    y, lse = cupyattn.neighborhood_attention(*arrays, problem.kernel_size, return_lse=True)
    assert type(y) is Foreign and type(lse) is Foreign
    assert [a.exports for a in arrays] == [1, 1, 1]
    grads = cupyattn.neighborhood_attention_backward(Foreign(cupy_kind.put(dy)), *arrays, y, lse,
                                                     problem.kernel_size)
    exact = (oracle.na(q, k, v, problem.kernel_size)[0],
             *oracle.na_bwd(q, k, v, dy, problem.kernel_size))
    for ours, right in zip((y, *grads), exact):
        agree(cupy_kind.get(ours.array), right, case=True)
    with pytest.raises(TypeError, match="(?s)test_arrays.*cupy"):
        cupyattn.neighborhood_attention(arrays[0], cupy_kind.put(k), arrays[2], 3)


# --- streams ---------------------------------------------------------------------------------


def streams(cp):
    """Name to stream: legacy default, per-thread default, one of its own, a wrapped one."""
    own = cp.cuda.Stream(non_blocking=True)
    return {"null": cp.cuda.Stream.null, "per_thread": cp.cuda.Stream.ptds, "own": own,
            "external": external_stream(own.ptr)}


@gpu
@each
@pytest.mark.parametrize("which", ["null", "per_thread", "own", "external"])
def test_calls_run_on_cupys_current_stream(cupy_kind, problem, which):
    """Inputs arrive late on that stream; a call on another one would read zeros."""
    cp = cupy_kind.xp
    named = streams(cp)  # alive throughout: the wrapped one does not own its stream
    stream = named[which]
    for call in problem.calls(cupy_kind, "f32"):
        expected = lower(cupy_kind, tuple(flat(call())))
        arrays = [x for x in flat(call.arrays) if isinstance(x, cp.ndarray)]
        kept = [x.copy() for x in arrays]
        for x in arrays:
            raw(x)[...] = 0
        cp.cuda.Device().synchronize()
        with stream:
            spin(20)
            for x, value in zip(arrays, kept):
                raw(x)[...] = raw(value)
            results = [cupy_kind.get(x) for x in flat(call())]
        for a, b in zip(results, expected):
            identical(a, b, what=problem.name)


@gpu
@torch_mark
@each
def test_calls_run_on_torchs_current_stream(torch_kind, problem):
    """CuPy's current stream does not count for tensors."""
    import cupy

    torch = torch_kind.xp
    for call in problem.calls(torch_kind, "f32"):
        expected = [torch_kind.get(x) for x in flat(call())]
        arrays = [x for x in flat(call.arrays) if torch.is_tensor(x)]
        kept = [x.clone() for x in arrays]
        for x in arrays:
            x.zero_()
        torch.cuda.synchronize()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side), cupy.cuda.Stream(non_blocking=True):
            spin(20, external_stream(side.cuda_stream))
            for x, value in zip(arrays, kept):
                x.copy_(value)
            results = [torch_kind.get(x) for x in flat(call())]
        for a, b in zip(results, expected):
            identical(a, b, what=problem.name)


@gpu
@each
def test_calls_do_not_wait(cupy_kind, problem):
    """A warm call returns while the work before it still runs; with `out=` or without."""
    cp = cupy_kind.xp
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        for call in problem.calls(cupy_kind, "bf16"):
            out = call()
            for given in (None, out):
                call(given)
                stream.synchronize()
                spin(100)
                busy = stream.record()
                call(given)
                assert not busy.done
                stream.synchronize()


@gpu
@torch_mark
@each
def test_calls_on_tensors_do_not_wait(torch_kind, problem):

    torch = torch_kind.xp
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for call in problem.calls(torch_kind, "bf16"):
            out = call()
            for given in (None, out):
                call(given)
                side.synchronize()
                spin(100, external_stream(side.cuda_stream))
                busy = side.record_event()
                call(given)
                assert not busy.query()
                side.synchronize()


@gpu
@torch_mark
@each
def test_torch_graph(torch_kind, problem):
    """torch captures calls in its own graphs."""
    torch = torch_kind.xp
    for call in problem.calls(torch_kind, "bf16"):
        expected = flat(call())
        out = problems._out_of(call(), iter([torch.zeros_like(x) for x in expected]))
        call(out)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call(out)
        for x in flat(out):
            x.zero_()
        graph.replay()
        torch.cuda.synchronize()
        for a, b in zip(flat(out), expected):
            identical(torch_kind.get(a), torch_kind.get(b), what=problem.name)


# --- threads ---------------------------------------------------------------------------------


def test_threads(kind):
    """Many threads, the same and different problems, first calls included."""
    work = [(problem, dtype) for dtype in ("f32", "f16") for problem in EACH] * 4
    for problem, dtype in work:
        problem.exact(dtype), problem.plain(dtype)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(check, problem, kind, dtype) for problem, dtype in work]:
            future.result()


@gpu
def test_threads_with_streams_of_their_own(cupy_kind):
    cp = cupy_kind.xp

    def run(problem):
        with cp.cuda.Stream(non_blocking=True):
            check(problem, cupy_kind, "f32")

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(run, problem) for problem in EACH * 4]:
            future.result()


# --- NumPy -----------------------------------------------------------------------------------


def test_numpy_results_are_new_arrays():
    for problem in EACH:
        for call in problem.calls(KINDS["numpy"], "f32"):
            for x in flat(call()):
                assert type(x) is np.ndarray and x.flags.c_contiguous and x.flags.writeable


def test_numpy_subclasses_and_read_only_inputs():
    class Named(np.ndarray):
        pass

    x = mk(0, (1, 8, 1, 8))
    right = cupyattn.neighborhood_attention(x, x, x, 3)
    fixed = x.copy()
    fixed.flags.writeable = False
    for other in (x.view(Named), fixed):
        identical(np.asarray(cupyattn.neighborhood_attention(other, other, other, 3)), right)


def test_byte_order_of_another_machine_is_refused():
    x = mk(0, (1, 8, 1, 8)).astype(">f4")
    with pytest.raises(TypeError, match=r"(?s)\bq\b.*>f4.*float32"):
        cupyattn.neighborhood_attention(x, x, x, 3)


def test_read_only_out_is_refused():
    x, out = mk(0, (1, 8, 1, 8)), np.full((1, 8, 1, 8), 7, np.float32)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="out.*read-only|read-only"):
        cupyattn.neighborhood_attention(x, x, x, 3, out=out)
    assert (out == 7).all()
