"""The README's own examples, as they stand there."""

import re
from pathlib import Path

import cupyattn
import numpy as np
import pytest
from kinds import mk
from tolerance import identical

README = (Path(__file__).resolve().parent.parent / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)


def block(text):
    """Return the one example that holds a text."""
    (found,) = (code for code in BLOCKS if text in code)
    return found


def test_numpy():
    names = {}
    exec(block("# NumPy"), names)
    assert names["y"].shape == names["q"].shape and np.isfinite(names["y"]).all()


@pytest.mark.gpu
def test_cupy():
    names = {"cupyattn": cupyattn}
    exec(block("# CuPy"), names)
    assert names["dq"].shape == names["dk"].shape == names["q"].shape


@pytest.mark.gpu
@pytest.mark.torch
def test_torch():
    pytest.importorskip("torch")
    names = {"cupyattn": cupyattn}
    exec(block("# torch"), names)
    assert names["k_out"].shape == names["k"].shape


@pytest.mark.gpu
@pytest.mark.torch
def test_autograd(torch_kind):
    """Its gradients are the backward's; a second derivative is refused, not wrong."""
    check_autograd(torch_kind.xp, [torch_kind.put(x) for x in arrays()], torch_kind.get)


def arrays():
    return [mk(seed, (1, 9, 8, 2, 16), "f32") for seed in range(4)]


def check_autograd(torch, tensors, get):
    *leaves, dy = tensors
    for x in leaves:
        x.requires_grad_()
    names = {"torch": torch, "cupyattn": cupyattn}
    exec(block("autograd.Function"), names)
    assert torch.isfinite(names["x"].grad).all()
    function, options = names["NeighborhoodAttention"], {"dilation": (2, 1)}
    y = function.apply(*leaves, (3, 5), options)
    y.backward(dy)
    plain = [x.detach() for x in leaves]
    right, lse = cupyattn.neighborhood_attention(*plain, (3, 5), return_lse=True, **options)
    gradients = cupyattn.neighborhood_attention_backward(
        dy, *plain, right, lse, (3, 5), **options)
    identical(get(y.detach()), get(right))
    for x, gradient in zip(leaves, gradients):
        identical(get(x.grad), get(gradient))
    first = torch.autograd.grad(function.apply(*leaves, (3, 5), options).sum(), leaves[0],
                                create_graph=True)[0]
    with pytest.raises(RuntimeError):
        first.sum().backward()
