"""Float8: the scales of current and delayed scaling, by Transformer Engine's formulas in torch."""

import pytest
import torch

from fp4adam import Float8Quantizer
from fp4adam.distributed.cast import PartialCast
from helpers import random

FP32_MAX = torch.finfo(torch.float32).max


def e4m3(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


# The recipe of delayed scaling, with its own layout: entry 0 is being written, the rest rolls.
class Recipe:
    def __init__(self, length: int, algorithm: str, margin: int) -> None:
        self.history, self.scale = torch.zeros(length), torch.ones(())
        self.algorithm, self.margin = algorithm, margin

    def record(self, amax: torch.Tensor) -> None:
        self.history[0] = amax

    def update(self) -> None:
        amax = self.history.max() if self.algorithm == "max" else self.history[0].clone()
        self.history = self.history.roll(-1)
        self.history[0] = 0
        new = (torch.tensor(448.0) / amax) / 2.0**self.margin
        if amax > 0 and amax.isfinite():
            self.scale = new.clamp(max=FP32_MAX)


@pytest.mark.parametrize(
    ("length", "algorithm", "margin"),
    [(1, "max", 0), (3, "max", -100), (4, "most_recent", 0), (4, "max", 2), (2, "max", 100)],
)
def test_delayed_scaling_is_that_of_the_recipe(length, algorithm, margin, path_device):
    quantizer = Float8Quantizer(
        scaling="delayed", amax_history_len=length, amax_compute_algo=algorithm, margin=margin
    )
    tensor = quantizer.make_empty((32, 48), device=path_device)
    recipe = Recipe(length, algorithm, margin)
    largest = [1.0, 5.0, 0.5, 0.0, 2.0, float("inf"), 0.25, 3.0, 0.125, 0.5]
    for i, amax in enumerate(largest):
        x = random((32, 48), i).clamp(-1, 1) * 0.5
        x[3, 5] = 1
        x = x * amax if amax < float("inf") else x.masked_fill(x == 1, amax)
        recipe.update()  # at the end of the iteration before
        tensor.quantize_(x.to(path_device))
        assert tensor.scale.item() == recipe.scale.item()
        assert torch.equal(tensor.rowwise_data.cpu(), e4m3(x * recipe.scale))
        assert torch.equal(tensor.columnwise_data, tensor.rowwise_data.t())
        recipe.record(x.abs().max())
        assert torch.equal(tensor.amax_history.cpu(), recipe.history)
        assert tensor.rowwise_scale_inv.item() == (1 / recipe.scale).item()


def test_tensors_without_a_known_amax_keep_the_scales_that_they_have(path_device):
    quantizer = Float8Quantizer(scaling="delayed", amax_history_len=1)
    values = [random((32, 48), seed, path_device) * 8**seed for seed in range(2)]
    tensors = [quantizer.quantize(value) for value in values]
    zeros = [torch.zeros(32 * 48, device=path_device) for _ in tensors]
    cast = PartialCast(tensors, [0, 0], [32 * 48] * 2, [torch.float32] * 2)
    for _ in range(2):  # the history is of zeros after the first
        cast.measure(zeros)
        cast.write(zeros)
    for tensor, value in zip(tensors, values, strict=True):
        assert torch.equal(tensor.scale, 448 / value.abs().max().view(1))
