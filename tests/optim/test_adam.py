"""The update in torch operators: parts of a tensor give the bits of the whole, roots are exact."""

import pytest
import torch
from torch import Tensor

from fp4adam.optim import adam
from fp4adam.optim.adam import adam_, adam_scalars
from fp4adam.tensors import backend

OPTIONS = dict(
    lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, maximize=False,
    bias_correction=True, adam_w_mode=True,
)  # fmt: skip
LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t().contiguous().t(),
    "gaps": lambda x: x.repeat_interleave(2, dim=1)[:, ::2],
}


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("layouts", [*[(name,) * 5 for name in LAYOUTS], (*LAYOUTS, *LAYOUTS)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_tensor_in_parts_gives_the_bits_of_the_whole(dtype, layouts, amsgrad, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    shape = (67, 131)
    value, grad = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    moments = torch.zeros(3, *shape, dtype=torch.promote_types(dtype, torch.float32))
    results = []
    for size, names in ((1000, layouts), (2**40, ("contiguous",) * 5)):
        monkeypatch.setattr(backend, "cpu_chunk_numel", lambda size=size: size)
        tensors = [
            LAYOUTS[name](t.clone())
            for t, name in zip((value, grad, *moments), names, strict=False)
        ]
        version = tensors[0]._version
        for step in (1, 2):
            scalars = adam_scalars(OPTIONS, step)
            largest = tensors[4] if amsgrad else None
            adam_(*tensors[:4], largest, scalars, True, torch.tensor([4.0]))
        assert tensors[0]._version > version
        results.append(tensors)
    for in_parts, whole in zip(*results, strict=True):
        assert torch.equal(in_parts, whole)
    assert not torch.equal(results[0][0], value)


def sqrt(x: Tensor) -> Tensor:
    return adam._sqrt(x, torch.empty_like(x, dtype=torch.float64), out=torch.empty_like(x))


@pytest.mark.parametrize("first", [1.0, 2.0, 2.0**-126, 2.0**-149, 2.0**127])
def test_square_root_is_the_nearest_float32(first):
    # The roots of [1, 4) are those of every normal number but for a power of two.
    start = torch.tensor(first).view(torch.int32)
    x = torch.arange(2**23 - 1, dtype=torch.int32).add_(start).view(torch.float32)
    root = sqrt(x)
    below, above = (root.view(torch.int32) + i for i in (-1, 1))
    # Ties between float32 numbers have 25 bits: their squares are exact in float64.
    low, high = ((root.double() + n.view(torch.float32)) / 2 for n in (below, above))
    assert (low * low < x).all() and (x < high * high).all()


def test_square_roots_of_special_values():
    x = torch.tensor([0.0, -0.0, torch.inf, torch.nan, -1.0])
    assert str(sqrt(x)) == str(torch.tensor([0.0, -0.0, torch.inf, torch.nan, torch.nan]))
