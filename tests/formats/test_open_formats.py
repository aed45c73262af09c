"""A format that this package does not list: its own arithmetic, and no kernels of another."""

import dataclasses

import pytest
import torch

from fp4adam import FP4Adam, MXFP8Quantizer, NVFP4Quantizer, Recipe
from fp4adam.distributed.cast import PartialCast
from fp4adam.formats import minifloat
from fp4adam.formats.mx import MXQuantizer, layout
from fp4adam.tensors import backend
from fp4adam.tensors.quantized_tensor import QuantizedTensor
from helpers import randn


@dataclasses.dataclass(frozen=True)
class Doubled(NVFP4Quantizer):
    """NVFP4 whose values are twice as large."""

    def decode(self, scales, tensor_amax):
        return 2 * super().decode(scales, tensor_amax)


@dataclasses.dataclass(frozen=True)
class Coarse(MXFP8Quantizer):
    """MXFP8 with scales twice as large."""

    def encode(self, amaxes, tensor_amax, dtype):
        return super().encode(2 * amaxes, tensor_amax, dtype)


class PlainTensor(QuantizedTensor):
    pass


@dataclasses.dataclass(frozen=True)
class Plain(MXQuantizer):
    """A format without kernels."""

    columnwise: bool = False
    tensor_class = PlainTensor

    def full_layout(self):
        return layout(minifloat.E4M3, is_square=False)

    def encode(self, amaxes, tensor_amax, dtype):
        scales = minifloat.e8m0_code_up(amaxes * (1 / 448))
        return scales, minifloat.e8m0_reciprocal(scales)


@pytest.mark.parametrize("quantizer", [Doubled(), Coarse(), Plain()], ids=repr)
def test_a_format_with_arithmetic_of_its_own_never_runs_the_kernels_of_another(
    quantizer, device, monkeypatch
):
    def trained(device: str) -> list[torch.Tensor]:
        param = torch.nn.Parameter(quantizer.quantize(randn(64, 96, device=device)))
        optimizer = FP4Adam([param], lr=1e-2)
        gathered = torch.empty(64, 96, device=device)
        for _ in range(2):
            param.grad = torch.ones_like(gathered)
            optimizer.step()
        quantizer.decoder(param.inner, gathered)()
        assert torch.equal(gathered, param.dequantize(torch.float32))
        return [gathered, *param.storage_tensors().values()]

    expected = trained("cpu")
    monkeypatch.setattr(backend, "uses_kernels", lambda each: each.type == device)
    for tensor, other in zip(trained(device), expected, strict=True):
        assert torch.equal(tensor.cpu(), other)
    with pytest.raises(ValueError, match="are of nvfp4, mxfp8, float8block, float8, got"):
        Recipe(quantizer, activations="fake")
    quantizers, x = (NVFP4Quantizer(), quantizer, Coarse()), randn(64, 96, device=device)
    weights = [each.make_empty((64, 96), device=device) for each in quantizers]
    cast = PartialCast(weights, [0] * 3, [64 * 96] * 3, [torch.float32] * 3)
    cast.measure([x.view(-1)] * 3)
    cast.write([x.view(-1)] * 3)
    for each in weights:
        assert torch.equal(each.rowwise_data, each.quantizer.quantize(x).rowwise_data)
