"""Left operands of warpgroup products stay in their registers until the products are done.

The compiler does not always know that such a product goes on reading them, and may give the
registers to other numbers: what it made is disassembled. Needs nvdisasm of the CUDA toolkit, but no
GPU.
"""

import re
import shutil
import subprocess

import pytest

from cupyattn import _jit, _select

KERNELS = {kernel.name: kernel for table in _select.tables().values() for row in table
           for kernel in row.kernels() if kernel.target == "sm_90a"}
# Instructions whose first register is not written.
READERS = re.compile(
    r"(ST|RED|BAR|BRA|EXIT|WARPSYNC|SYNCS|UTMA|ISETP|FSETP|WARPGROUP|CALL|R2UR|NOP|BSSY|BSYNC|LDGSTS|"
    r"MEMBAR|FENCE|CCTL|VOTEU|R2P|PLOP3|RET|USETMAXREG)")


def written(instruction: str) -> set[int]:
    """Return the numbers of the registers that an instruction writes."""
    match = re.match(r"(?:@!?U?P\d+ )?(\S+) (?:!?U?P[\dT], )*R(\d+)", instruction)
    if not match or READERS.match(match[1]):
        return set()
    name, first = match[1], int(match[2])
    if name.startswith("LDSM"):
        count = int(name[-1]) if name[-2] == "." else 1
    elif name.startswith("LD"):
        count = 4 if ".128" in name else 2 if ".64" in name else 1
    else:
        count = 2 if re.search(r"\.WIDE|\.64|^CS2R", name) else 1
    return set(range(first, first + count))


def overwritten(text: str) -> list[str]:
    """Return the instructions that write registers which a product may still read."""
    groups: list[set[int]] = []  # of products, by what waits for them
    open_group: set[int] = set()
    found = []
    for instruction in re.findall(r"/\*[0-9a-f]{4,}\*/\s+([^;]*?)\s*;", text):
        wait = re.search(r"DEPBAR\.LE gsb0, (0x[0-9a-f]+)", instruction)
        if "HGMMA" in instruction:
            left = re.search(r"HGMMA\S* R\d+, R(\d+)(?:\.reuse)?, gdesc", instruction)
            if left:
                open_group |= set(range(int(left[1]), int(left[1]) + 4))
            if "gsb0" in instruction:
                groups.append(open_group)
                open_group = set()
        elif wait:
            groups = groups[len(groups) - min(int(wait[1], 16), len(groups)):]
        elif written(instruction) & open_group.union(*groups):
            found.append(instruction)
    return found


def test_an_overwritten_operand_is_found():
    product = "/*0010*/ HGMMA.64x48x16.F32.BF16 R24, R48, gdesc[UR8], R24, gsb0 ;\n"
    wait = "/*0030*/ WARPGROUP.DEPBAR.LE gsb0, 0x0 ;\n"
    load = "/*0020*/ LDSM.16.M88.4 R{}, [R6] ;\n"
    assert overwritten(product + load.format(46) + wait) == ["LDSM.16.M88.4 R46, [R6]"]
    assert not overwritten(product + load.format(44) + wait)
    assert not overwritten(product + wait + load.format(48))


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_left_operands_stay_until_products_are_done(name, tmp_path):
    pytest.importorskip("cupy")
    tool = shutil.which("nvdisasm")
    if tool is None:
        pytest.skip("nvdisasm is not installed")
    cubin, _ = _jit.compile_cubin(KERNELS[name], "sm_90")
    file = tmp_path / "kernel.cubin"
    file.write_bytes(cubin + b"\0" * 8)  # what NVRTC returns lacks the end of its last table
    text = subprocess.run([tool, "-c", file], check=True, capture_output=True, text=True).stdout
    assert "HGMMA" in text or name.endswith(("planes", "total"))
    assert not overwritten(text)
