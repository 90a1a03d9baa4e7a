"""Source assembly: includes in line, line marks, struct checks, errors at the real place."""

import subprocess
import sys
from dataclasses import replace

import pytest

from cupyattn import _jit, _select, _source
from cupyattn._errors import KernelError

KERNEL = next(k for row in _select.tables()["neighborhood_fwd"] for k in row.kernels()
              if row.name.startswith("plain"))


def folder(tmp_path, **files):
    for name, text in files.items():
        (tmp_path / name.replace("_cu", ".cu").replace("_h", ".cuh")).write_text(text)
    return tmp_path


def expanded(path, name):
    return _source._expanded.__wrapped__(name, path)


def test_each_header_once_depth_first_with_line_marks(tmp_path):
    path = folder(tmp_path, a_cu='#include "b.cuh"\n#include "c.cuh"\nlast\n',
                  b_h='#pragma once\n#include "c.cuh"\nin b\n', c_h="#pragma once\nin c\n")
    assert expanded(path, "a.cu").splitlines() == [
        '#line 1 "kernels/a.cu"', '#line 1 "kernels/b.cuh"', "", '#line 1 "kernels/c.cuh"', "",
        "in c", '#line 3 "kernels/b.cuh"', "in b", '#line 2 "kernels/a.cu"',
        '#line 3 "kernels/a.cu"', "last"]


def test_a_cycle_is_an_error_with_its_chain(tmp_path):
    path = folder(tmp_path, a_cu='#include "b.cuh"\n', b_h='#include "b.cuh"\n')
    with pytest.raises(ValueError, match="a.cu -> b.cuh -> b.cuh"):
        expanded(path, "a.cu")


def test_a_missing_header_is_an_error_with_its_chain(tmp_path):
    path = folder(tmp_path, a_cu='#include "gone.cuh"\n')
    with pytest.raises(FileNotFoundError, match="a.cu -> gone.cuh: no such file"):
        expanded(path, "a.cu")


def test_no_toolkit_header_is_used():
    for path in _source.kernels_folder().rglob("*.cu*"):
        assert "#include <" not in path.read_text(), path


def test_a_compile_error_names_file_and_line(tmp_path):
    pytest.importorskip("cupy")
    broken = replace(KERNEL, config=(*KERNEL.config, "static constexpr int kBroken = undefined;"))
    with pytest.raises(KernelError, match='"undefined" is undefined') as caught:
        _jit.compile_cubin(broken, "sm_90")
    assert f"generated for {broken.name}" in str(caught.value)
    missing = replace(KERNEL, config=tuple(c for c in KERNEL.config if "kDim" not in c))
    with pytest.raises(KernelError, match=r"kernels/neighborhood_fwd\.cu\(\d+\)"):
        _jit.compile_cubin(missing, "sm_90")


def test_a_struct_that_differs_stops_compilation(monkeypatch):
    pytest.importorskip("cupy")
    import numpy as np

    from cupyattn import _params

    fields = _params.STRUCTS["NeighborhoodParams"]
    wrong = np.dtype([(n, *((fields[n].base, fields[n].shape) if fields[n].shape else (fields[n],)))
                      for n in reversed(fields.names)], align=True)
    monkeypatch.setitem(_params.STRUCTS, "NeighborhoodParams", wrong)
    with pytest.raises(KernelError, match=r"NeighborhoodParams\.\w+: offset differs"):
        _jit.compile_cubin(KERNEL, "sm_90")


def test_every_kernel_waits_for_earlier_work_first():
    """Launches may overlap (`_launch.Launch`): nothing of a kernel may stand before its wait."""
    for table in _select.tables().values():
        for kernel in (k for row in table for k in row.kernels()):
            entry = _source.assemble(kernel).partition(f"{kernel.name}(const __grid_constant__")[2]
            lines = entry.splitlines()
            if kernel.early:  # may touch only the block's own shared memory
                assert lines.pop(1) == f"  {kernel.early}<Config>(p);"
            assert lines[1:3] == ["#if __CUDA_ARCH__ >= 900",
                                  '  asm volatile("griddepcontrol.wait;" ::: "memory");']
            assert lines[4:] == ["#endif", f"  {kernel.function}<Config>(p);", "}"]


def test_the_text_is_the_same_in_every_process():
    code = ("import hashlib; from cupyattn import _select, _source; print(hashlib.sha256(''.join("
            "_source.assemble(k) for t in _select.tables().values() for r in t "
            "for k in r.kernels()).encode()).hexdigest())")
    digests = {subprocess.run([sys.executable, "-c", code], env={"PYTHONHASHSEED": seed,
                              "PYTHONPATH": ":".join(sys.path)}, check=True, text=True,
                              capture_output=True).stdout for seed in ("1", "2")}
    assert len(digests) == 1 and len(digests.pop().strip()) == 64
