"""Launches: what the driver is given, dependent and plain, and their order against other work."""

import ctypes
import os
import subprocess
import sys

import cupyattn
import numpy as np
import pytest
from kinds import mk

from cupyattn import _device, _jit, _launch
from cupyattn._errors import KernelError
from cupyattn._program import Device, Kernel, Step

H200 = Device(0, "NVIDIA H200", (9, 0), 132, 232448, 60 << 20)
STEP = Step(Kernel("k", "rope.cu", "rope", "RopeParams", (), 96), (5, 4, 3), {"seq": 7},
            {"cos": "cos", "q": "q"}, {"offset": "offset"}, shared=1000)


class Driver:
    """Stands for the driver; keeps what each launch was given."""

    def __init__(self, dependent=0, plain=None):
        self.answer, self.failure = dependent, plain
        self.dependent, self.plain = [], []

    def launch_kernel_ex(self, config, function, arguments, nothing):
        c = _device.LaunchConfig.from_address(config)
        attributes = [(c.attributes[i].id, c.attributes[i].value[0]) for i in range(c.count)]
        self.dependent.append((tuple(c.grid), tuple(c.block), c.shared, c.stream, attributes,
                               function, self.read(arguments), nothing))
        return self.answer

    def launch(self, function, *rest):
        *sizes, stream, arguments, nothing = rest
        if self.failure:
            raise self.failure
        self.plain.append((tuple(sizes[:3]), tuple(sizes[3:6]), sizes[6], stream, function,
                           self.read(arguments), nothing))

    @staticmethod
    def read(arguments):
        block = ctypes.c_void_p.from_address(arguments).value
        words = _launch.STRUCTS["RopeParams"]
        values = np.frombuffer((ctypes.c_char * words.itemsize).from_address(block), words)[0]
        return tuple(int(values[n]) for n in ("q", "k", "cos", "seq", "offset"))


@pytest.fixture
def launch_on(monkeypatch):
    """Make the launch of STEP on a stand-in for the driver, in which the kernel is 77."""
    pytest.importorskip("cupy")

    def make(driver, dependent=True):
        monkeypatch.setattr(_jit, "load", lambda kernel, device: _jit.Compiled(kernel, 77, 0, 0,
                                                                               None))
        monkeypatch.setattr(_device, "launch_kernel_ex",
                            lambda index: driver.launch_kernel_ex if dependent else None)
        launch = _launch.Launch(STEP, H200, {"q": 0, "cos": 1, "offset": 2})
        launch._launch = driver.launch
        return launch

    return make


def test_structures_are_those_of_the_driver():
    config, attribute = _device.LaunchConfig, _device.LaunchAttribute
    assert (ctypes.sizeof(config), ctypes.sizeof(attribute)) == (56, 72)
    assert [getattr(config, n).offset for n, _ in config._fields_] == [0, 12, 24, 32, 40, 48]
    assert attribute.value.offset == 8


def test_a_dependent_launch(launch_on):
    driver = Driver()
    launch = launch_on(driver)
    launch([10, 20, 30], 0)
    launch([11, 21, 31], 9)
    launch([11, 22, 32], 0)
    shape = (5, 4, 3), (96, 1, 1), 1000
    assert driver.dependent == [(*shape, None, [(6, 1)], 77, (10, 0, 20, 7, 30), None),
                                (*shape, 9, [(6, 1)], 77, (11, 0, 21, 7, 31), None),
                                (*shape, None, [(6, 1)], 77, (11, 0, 22, 7, 32), None)]
    assert not driver.plain


def test_a_plain_launch(launch_on):
    driver = Driver()
    launch_on(driver, dependent=False)([10, 20, 30], 9)
    assert driver.plain == [((5, 4, 3), (96, 1, 1), 1000, 9, 77, (10, 0, 20, 7, 30), 0)]
    assert not driver.dependent


def test_the_switch(launch_on, monkeypatch):
    monkeypatch.setattr(_launch, "_PDL", False)
    driver = Driver()
    launch_on(driver)([10, 20, 30], 9)
    assert driver.plain and not driver.dependent


def test_a_refused_dependent_launch_becomes_a_plain_one(launch_on):
    driver = Driver(dependent=1)
    launch = launch_on(driver)
    for _ in range(3):
        launch([10, 20, 30], 9)
    assert len(driver.dependent) == 1 and len(driver.plain) == 3


def test_a_launch_that_fails_both_ways_is_an_error(launch_on):
    driver = Driver(dependent=700, plain=RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS"))
    launch = launch_on(driver)
    with pytest.raises(KernelError, match=r"k did not launch with grid \(5, 4, 3\).*ILLEGAL"):
        launch([10, 20, 30], 9)
    driver.answer = 0  # what failed was not the form of the launch
    launch([10, 20, 30], 9)
    assert len(driver.dependent) == 2


@pytest.mark.parametrize("capability, version, works", [
    ((9, 0), 12030, True), ((12, 0), 13000, True), ((8, 9), 13000, False), ((9, 0), 12020, False)])
def test_where_dependent_launches_work(monkeypatch, capability, version, works):
    runtime = pytest.importorskip("cupy").cuda.runtime

    class Library:
        def __init__(self, name):
            self.cuLaunchKernelEx = lambda: 0

    monkeypatch.setattr(_device, "device", lambda i: Device(i, "", capability, 1, 1, 1))
    monkeypatch.setattr(runtime, "driverGetVersion", lambda: version)
    monkeypatch.setattr(ctypes, "CDLL", Library)
    assert (_device.launch_kernel_ex.__wrapped__(0) is not None) == works
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())  # a driver without the function
    assert _device.launch_kernel_ex.__wrapped__(0) is None


# --- order against other work, on the device ---------------------------------------------------

# Writes late: what does not wait for it reads the old values, or is overwritten.
SLOW = r"""
extern "C" __global__ void slow(float* x, int n, float value) {
  const long long start = clock64();
  while (clock64() - start < 100000) {
  }
  for (int i = threadIdx.x + blockIdx.x * blockDim.x; i < n; i += blockDim.x * gridDim.x) {
    x[i] = value;
  }
}
"""


class Chain:
    """Copies (rotations by no angle) among other work, each dependent on the one before."""

    def __init__(self, cp):
        self.cp, self.slow = cp, cp.RawKernel(SLOW, "slow")
        self.x, self.y, self.z, self.w = (cp.zeros((1, 64, 8, 64), np.float32) for _ in range(4))
        self.cos, self.sin = cp.ones((64, 32), np.float32), cp.zeros((64, 32), np.float32)
        self.copy(self.x, self.y)  # compiled before any capture
        self.write(self.x, 0)

    def copy(self, source, target):
        cupyattn.rope(source, None, self.cos, self.sin, layout="bshd", out=(target, None))

    def write(self, x, value):
        self.slow((16,), (256,), (x, np.int32(x.size), np.float32(value)))

    def queue(self, value, stream, other=None):
        x, y, z, w = self.x, self.y, self.z, self.w
        self.write(x, value)
        self.copy(x, y)   # after another library's kernel
        self.copy(y, z)   # after one of ours
        self.write(y, -1)  # another kernel overwrites what ours has read
        self.copy(z, w)
        if other is not None:  # another stream writes, joined by events
            self.wait(other, stream)
            with other:
                self.write(x, value + 0.5)
            self.copy(w, w)
            self.wait(stream, other)
            self.copy(x, y)   # after a kernel of this stream and one of the other
        z.data.memset_async(0, z.nbytes, stream)
        self.copy(z, x)   # after a memset
        self.copy(w, z)

    def wait(self, stream, other):
        event = self.cp.cuda.Event(disable_timing=True)
        event.record(other)
        stream.wait_event(event)

    def check(self, value, crossed):
        expected = (0, value + 0.5 if crossed else -1, value, value)
        for name, a, b in zip("xyzw", (self.x, self.y, self.z, self.w), expected):
            assert (a == b).all(), f"{name} is not {b} everywhere"


def streams(cp):
    return {"null": cp.cuda.Stream.null, "per thread": cp.cuda.Stream.ptds,
            "blocking": cp.cuda.Stream(), "non-blocking": cp.cuda.Stream(non_blocking=True)}


@pytest.mark.gpu
@pytest.mark.parametrize("crossed", [False, True])
@pytest.mark.parametrize("name", ["null", "per thread", "blocking", "non-blocking"])
def test_order_in_a_stream(cupy_kind, name, crossed):
    cp = cupy_kind.xp
    stream, other = streams(cp)[name], cp.cuda.Stream(non_blocking=True)
    with stream:
        chain = Chain(cp)
        for value in range(1, 21):
            chain.queue(value, stream, other if crossed else None)
            chain.check(value, crossed)


@pytest.mark.gpu
@pytest.mark.parametrize("crossed", [False, True])
@pytest.mark.parametrize("name", ["blocking", "non-blocking"])
def test_order_in_a_graph(cupy_kind, name, crossed):
    cp = cupy_kind.xp
    stream, other = streams(cp)[name], cp.cuda.Stream(non_blocking=True)
    with stream:
        chain = Chain(cp)
        stream.synchronize()
        stream.begin_capture()
        try:
            chain.queue(7, stream, other if crossed else None)
        finally:
            graph = stream.end_capture()
        for _ in range(20):
            graph.launch(stream)
        chain.check(7, crossed)


@pytest.mark.gpu
def test_order_between_the_null_stream_and_a_blocking_one(cupy_kind):
    """No event stands between them: the driver orders them by itself."""
    cp = cupy_kind.xp
    chain, blocking = Chain(cp), cp.cuda.Stream()
    for value in range(1, 21):
        with blocking:
            chain.write(chain.x, value)
        with cp.cuda.Stream.null:
            chain.copy(chain.x, chain.y)
        with blocking:
            chain.copy(chain.y, chain.z)
        with cp.cuda.Stream.null:
            chain.write(chain.z, -value)
        with blocking:
            chain.copy(chain.z, chain.w)
        cp.cuda.runtime.deviceSynchronize()
        assert (chain.y == value).all() and (chain.w == -value).all()


@pytest.mark.gpu
def test_the_switch_changes_no_bit(cupy_kind, tmp_path):
    """A module of many launches, in two processes."""
    code = ("import sys, cupy, numpy as np, cupyattn; x, w = (cupy.asarray(a) for a in "
            "np.load(sys.argv[1]).values()); y = cupyattn.fused_neighborhood_attention(x, w, w, w, "
            "w, num_heads=4, kernel_size=3); print(cupy.asnumpy(y).tobytes().hex())")
    path = str(tmp_path / "arrays.npz")
    np.savez(path, x=mk(0, (2, 9, 64)), w=mk(1, (64, 64)))
    results = {subprocess.run([sys.executable, "-c", code, path], check=True, text=True,
                              capture_output=True, env={**os.environ, "CUPYATTN_PDL": switch,
                                                        "PYTHONPATH": ":".join(sys.path)}
                              ).stdout for switch in ("0", "1")}
    assert len(results) == 1 and len(results.pop()) > 1000
