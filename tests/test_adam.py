"""The update in torch operators: pieces of a tensor give the bits of the whole."""

import pytest
import torch

from fp4adam import adam
from fp4adam.adam import adam_, adam_scalars

OPTIONS = dict(
    lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, maximize=False,
    bias_correction=True, adam_w_mode=True,
)  # fmt: skip


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_tensor_in_chunks_gives_the_bits_of_the_whole(dtype, amsgrad, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    shape = (3, 2**15 + 5)
    value, grad = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    results = []
    for chunk in (2**15, 2**40):
        monkeypatch.setattr(adam, "_CHUNK", chunk)
        tensors = [value.clone(), grad.clone(), *torch.zeros(3, *shape)]
        version = tensors[0]._version
        for step in (1, 2):
            scalars = adam_scalars(OPTIONS, step)
            largest = tensors[4] if amsgrad else None
            adam_(*tensors[:4], largest, scalars, True, torch.tensor([4.0]))
        assert tensors[0]._version > version
        results.append(tensors)
    for chunked, whole in zip(*results, strict=True):
        assert torch.equal(chunked, whole)
    assert not torch.equal(results[0][0], value)
