"""Float8: the scales of current and delayed scaling, by Transformer Engine's formulas in torch."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from fp4adam import Float8Quantizer, FP4Adam, dequantize_model, quantize_model
from fp4adam.distributed.cast import PartialCast
from helpers import random, through_a_file

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
        new = (torch.tensor(448.0) / amax) / 2**self.margin
        if amax > 0 and amax.isfinite():
            self.scale = new.clamp(max=FP32_MAX)


@pytest.mark.parametrize(
    ("length", "algorithm", "margin"),
    [(1, "max", 0), (3, "max", 0), (4, "most_recent", 0), (4, "max", 2), (2, "max", -1)],
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


def test_a_new_tensor_knows_the_amax_of_its_values(path_device):
    x = random((32, 32), 0, path_device)
    tensor = Float8Quantizer(scaling="delayed", amax_history_len=4).quantize(x)
    assert torch.equal(tensor.rowwise_data, Float8Quantizer().quantize(x).rowwise_data)
    empty = Float8Quantizer(scaling="delayed").make_empty((32, 32), device=path_device)
    assert empty.quantize_(x).scale == 1


@pytest.mark.parametrize("scaling", ["current", "delayed"])
def test_a_whole_shard_is_the_whole_cast(scaling, path_device):
    quantizer = Float8Quantizer(scaling=scaling)
    values = [random((32, 144), seed, path_device) for seed in range(3)]
    whole, part = (quantizer.quantize(values[0]) for _ in range(2))
    cast = PartialCast([part], [0], [32 * 144], [torch.float32])
    for value in values[1:]:
        cast.measure([value.flatten()])
        assert cast.amaxes.tolist() == [value.abs().max().item()]
        cast.write([value.flatten()])
        whole.quantize_(value)
        for name, inner in whole.storage_tensors().items():
            if name != "_columnwise_data":
                assert torch.equal(part.storage_tensors()[name], inner), name


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


@pytest.mark.parametrize("scaling", ["current", "delayed"])
def test_what_a_step_skips_keeps_its_scale(scaling, path_device):
    param = Parameter(Float8Quantizer(scaling=scaling).quantize(random((32, 64), 0, path_device)))
    optimizer = FP4Adam([param], lr=1e-2)
    param.grad = torch.ones_like(param)
    optimizer.step()
    before = {name: x.clone() for name, x in param.storage_tensors().items()}
    optimizer.found_inf = torch.ones(1, device=path_device)
    optimizer.step()
    assert all(torch.equal(x, before[name]) for name, x in param.storage_tensors().items())
    optimizer.found_inf = None
    optimizer.step()
    assert not torch.equal(param.storage_tensors()["_rowwise_data"], before["_rowwise_data"])


def test_members_of_a_scale_group_have_one_scale(path_device):
    params = [Parameter(Float8Quantizer().quantize(random((32, 64), i, path_device) * 10**i))
              for i in range(2)]  # fmt: skip
    optimizer = FP4Adam(params, lr=1e-2, scale_groups=[params])
    for _ in range(2):
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
    masters = [optimizer.state[param]["master_param"] for param in params]
    amax = torch.stack([master.abs().max() for master in masters]).max()
    scale = torch.tensor(448.0, device=path_device) / amax
    for param, master in zip(params, masters, strict=True):
        assert torch.equal(param.rowwise_data, e4m3(master * scale))


def test_a_loaded_master_is_compared_under_the_stored_scale():
    def build():
        quantizer = Float8Quantizer(scaling="delayed", amax_history_len=3)
        param = Parameter(quantizer.quantize(random((32, 64), 0)))
        return param, FP4Adam([param], lr=1e-2)

    def step(param, optimizer, seed):
        param.grad = random((32, 64), seed)
        optimizer.step()

    first, second = build(), build()
    for seed in range(4):
        step(*first, seed)
    with torch.no_grad():
        second[0].copy_(first[0])
    second[1].load_state_dict(first[1].state_dict())
    for each in (first, second):
        step(*each, 4)
    masters = [optimizer.state[param]["master_param"] for param, optimizer in (first, second)]
    assert torch.equal(*masters)
    assert torch.equal(*(each[0].amax_history for each in (first, second)))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (dict(scaling="block"), "scaling must be one of current, delayed, got 'block'"),
        (dict(amax_compute_algo="mean", scaling="delayed"), "one of max, most_recent, got 'mean'"),
        (dict(amax_epsilon=-1.0), "amax_epsilon must be finite and >= 0, got -1.0"),
        (dict(amax_history_len=0, scaling="delayed"), "amax_history_len must be >= 1, got 0"),
        (dict(margin=0.5, scaling="delayed"), "margin must be an integer .* got 0.5"),
        (dict(margin=1), "margin must be 0 with scaling='current', got 1; it is an option of"),
        (dict(force_pow_2_scales=True, scaling="delayed"), "force_pow_2_scales must be False with"),
        (dict(optimize_for_gemm=True), "optimize_for_gemm must be False for Float8"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        Float8Quantizer(**options)


# Rows of eight are what Transformer Engine's matmuls take; the others have odd strides.
@pytest.mark.parametrize("scaling", ["current", "delayed"])
@pytest.mark.parametrize("shape", [(24, 64), (8, 48), (7, 11), (3, 5, 7), (1, 40)])
def test_weights_of_any_shape_are_stepped(shape, scaling, path_device):
    value = random(shape, 0, path_device).bfloat16()
    param = Parameter(Float8Quantizer(scaling=scaling).quantize(value))
    beside = Parameter(Float8Quantizer(scaling=scaling).quantize(random((32, 64), 1, path_device)))
    plain = Parameter(value.float())
    optimizer = FP4Adam([param, beside], lr=1e-2, quantize_from="master")
    expected = FP4Adam([plain], lr=1e-2)
    plain.data.copy_(param)
    for step in range(3):
        param.grad = random(shape, 10 + step, path_device).bfloat16()
        beside.grad = torch.ones_like(beside)
        plain.grad = param.grad.float()
        scale = torch.tensor(448.0) / param.amax_history.max() if scaling == "delayed" else None
        optimizer.step()
        expected.step()
        master = optimizer.state[param]["master_param"]
        assert torch.equal(master, plain)
        if scale is None:
            scale = torch.tensor(448.0) / master.abs().max()
        matrix = master.reshape(-1, shape[-1])
        assert param.scale == scale
        assert torch.equal(param.rowwise_data, e4m3(matrix * scale))
        assert torch.equal(param.columnwise_data, param.rowwise_data.t())
        values = param.rowwise_data.view(torch.float8_e4m3fn).float() * (1 / scale)
        assert torch.equal(param.dequantize(torch.float32).view(matrix.shape), values)


def test_a_layer_of_any_shape_trains_and_is_saved(path_device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 24), nn.Tanh(), nn.Linear(24, 5)).to(path_device)
    quantize_model(model, "float8", filter=lambda *_: True)
    optimizer = FP4Adam(model.parameters(), lr=1e-2)
    x = random((8, 40), 0, path_device)
    losses = []
    for _ in range(5):
        loss = (model(x) - x[:, :5]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    again = copy.deepcopy(model)
    again.load_state_dict(through_a_file(model.state_dict()))
    expected = dequantize_model(model)
    assert torch.equal(again(x), expected(x))
