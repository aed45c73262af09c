"""Calls as Megatron's distributed optimizer makes them, with the names that it imports."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fp4adam.fp4_utils as fp4_utils  # the path that stands in for megatron.core.fp4_utils
from fp4adam import (
    Float8BlockQuantizer,
    Float8Quantizer,
    FP4Adam,
    FusedAdam,
    MXFP8Quantizer,
    NVFP4Quantizer,
    NVFP4Tensor,
    cast_master_weights_to_nvfp4,
    post_all_gather_processing,
    quantize_master_weights,
)
from ranks import run_ranks

QUANTIZERS = {
    "nvfp4": NVFP4Quantizer(),
    "mxfp8": MXFP8Quantizer(),
    "float8block": Float8BlockQuantizer(),
    "float8": Float8Quantizer(),
    "float8-delayed": Float8Quantizer(scaling="delayed", amax_history_len=4),
}
SIZE = 32
OPTIONS = dict(lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)


class Model(nn.Module):
    """One layer per format, with weights that every rank has in full."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.initial, weights = [], []
        for quantizer in QUANTIZERS.values():
            value = (torch.randn(SIZE, SIZE, generator=generator) * 0.2).bfloat16()
            weight = nn.Parameter(quantizer.quantize(value))
            weight._high_precision_init_val = value
            self.initial.append(value)
            weights.append(weight)
        self.weights = nn.ParameterList(weights)

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(nn.functional.linear(x, weight.dequantize(torch.float32)))
        return x


def batch(step: int) -> Tensor:
    return torch.randn(16, SIZE, generator=torch.Generator().manual_seed(1000 + step))


def backward(model: Model, step: int) -> float:
    x = batch(step)
    loss = (model(x) - x.roll(1, dims=1)).square().mean()
    loss.backward()
    return loss.item()


class DistributedOptimizer:
    """ZeRO-1: this rank's slices of the masters, quantized into the weights, codes gathered."""

    def __init__(self, model: Model, group: dist.ProcessGroup) -> None:
        self.model_params, self.group = list(model.weights), group
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        n = SIZE * SIZE // size
        self.range = slice(rank * n, (rank + 1) * n)
        self.main_params: list[Tensor] = []
        for model_param in self.model_params:
            value = model_param.get_high_precision_init_val()
            main = value.detach().view(-1)[self.range].clone().float()
            self.main_params.append(nn.Parameter(main))
            model_param.clear_high_precision_init_val()
        self.start_offsets = [self.range.start] * len(self.main_params)
        self.optimizer = FusedAdam(self.main_params, **OPTIONS)

    def step(self, manual: bool) -> None:
        for model_param, main in zip(self.model_params, self.main_params, strict=True):
            main.grad = model_param.grad.view(-1)[self.range].float()
            model_param.grad = None
        self.optimizer.step()
        self._copy_main_params_to_model_params(manual)
        self._all_gather()
        if manual:
            post_all_gather_processing(self.model_params)

    def _copy_main_params_to_model_params(self, manual: bool) -> None:
        of_fp4 = [i for i, p in enumerate(self.model_params) if fp4_utils.is_nvfp4tensor(p)]
        others = [i for i in range(len(self.model_params)) if i not in of_fp4]

        def lists(indices: list[int]) -> list[list]:
            columns = (self.model_params, self.main_params, self.start_offsets)
            return [[column[i] for i in indices] for column in columns]

        if manual:
            fp4_utils.quantize_nvfp4_param_shard(*lists(of_fp4), self.group)
        else:
            cast_master_weights_to_nvfp4(*lists(of_fp4), self.group)
        quantize_master_weights(
            *lists(others), self.group, None, manual_post_all_gather_processing=manual
        )

    def _all_gather(self) -> None:
        for param in self.model_params:
            directions = [param._rowwise_data]
            if isinstance(param.quantizer, MXFP8Quantizer):
                directions.append(param._columnwise_data)
            for codes in directions:
                flat = codes.view(-1)
                own = flat.chunk(dist.get_world_size(self.group))[dist.get_rank(self.group)]
                dist.all_gather_into_tensor(flat, own.clone(), self.group)


def train_sharded(rank: int, iterations: int, manual: bool) -> tuple[list, list]:
    model = Model()
    optimizer = DistributedOptimizer(model, dist.group.WORLD)
    losses = []
    for step in range(iterations):
        losses.append(backward(model, step))
        optimizer.step(manual)
    return losses, [(p.quantizer.columnwise, p.storage_tensors()) for p in model.weights]


def train_unsharded(iterations: int) -> tuple[list, Model]:
    model, losses = Model(), []
    optimizer = FP4Adam(model.parameters(), quantize_from="param_dtype", **OPTIONS)
    for step in range(iterations):
        losses.append(backward(model, step))
        optimizer.step()
        optimizer.zero_grad()
    return losses, model


@pytest.mark.parametrize(
    ("iterations", "manual"),
    [(20, True), (20, False), pytest.param(500, True, marks=pytest.mark.exhaustive)],
)
def test_two_ranks_train_as_one_process_bit_for_bit(iterations, manual):
    losses, model = train_unsharded(iterations)
    assert sum(losses[-10:]) < sum(losses[:10])
    for of_rank, weights in run_ranks(train_sharded, 2, iterations, manual):
        assert of_rank == losses
        for param, (columnwise, tensors) in zip(model.weights, weights, strict=True):
            keeps = manual or isinstance(param.quantizer, MXFP8Quantizer)
            assert columnwise == keeps
            for name, inner in param.storage_tensors().items():
                if keeps or not name.startswith("_columnwise"):
                    assert torch.equal(tensors[name], inner), name


def test_lists_of_other_formats_are_refused():
    weight = MXFP8Quantizer().make_empty((32, 32))
    with pytest.raises(ValueError, match=r"model_weights\[0\] must be an NVFP4Tensor, got a MXFP8"):
        cast_master_weights_to_nvfp4([weight], [None], [None], None)


def test_stacks_are_moved_with_their_slices():
    stack = NVFP4Quantizer().quantize(torch.randn(2, 16, 32))
    weight = NVFP4Quantizer().quantize(torch.randn(16, 32))
    assert fp4_utils.is_grouped_nvfp4tensor(stack)
    assert not fp4_utils.is_grouped_nvfp4tensor(weight)
    assert not fp4_utils.is_grouped_nvfp4tensor(torch.ones(2, 16, 32))
    second, values = stack[1:], stack.dequantize()
    buffer = torch.zeros(512, dtype=torch.uint8)
    fp4_utils.modify_grouped_nvfp4_rowwise_storage(stack, buffer)
    assert stack.data_ptr() == buffer.data_ptr() and torch.equal(stack.dequantize(), values)
    buffer[256:] = 0
    assert not second.dequantize().any() and torch.equal(stack.dequantize()[0], values[0])
    with pytest.raises(ValueError, match="must be contiguous uint8 of 512 bytes"):
        fp4_utils.modify_grouped_nvfp4_rowwise_storage(stack, buffer[:-1])
    with pytest.raises(ValueError, match=r"three dimensions, got a NVFP4Tensor of shape \(16, 32"):
        fp4_utils.modify_grouped_nvfp4_rowwise_storage(weight, buffer)


def config(**changes):
    values = dict(
        fp4="e2m1",
        fp4_param=True,
        fp4_recipe="nvfp4",
        num_layers=4,
        first_last_layers_bf16=True,
        num_layers_at_start_in_bf16=1,
        num_layers_at_end_in_bf16=1,
    )
    return SimpleNamespace(**{**values, **changes})


def test_layers_are_built_in_the_context_of_their_place():
    kinds = []
    for layer_no in (-1, *range(4)):
        with fp4_utils.get_fp4_context(config(), layer_no, is_init=True):
            layer = nn.Sequential(nn.Linear(32, 32, bias=False))
        with fp4_utils.get_fp4_context(config(), layer_no):
            layer(torch.ones(1, 32)).sum().backward()
        kinds.append(isinstance(layer[0].weight, NVFP4Tensor))
    assert kinds == [True, False, True, True, False]
    for changes in (dict(fp4_param=False), dict(fp4=None, fp4_param=False)):
        with fp4_utils.get_fp4_context(config(**changes), 1, is_init=True):
            assert type(nn.Linear(32, 32).weight.data) is Tensor
    assert fp4_utils.get_fp4_recipe(config()) == NVFP4Quantizer()
    with pytest.raises(ValueError, match="fp4_recipe must be 'nvfp4', got 'custom'"):
        fp4_utils.get_fp4_context(config(fp4_recipe="custom"), 1, is_init=True)


def test_flags_say_what_is_there():
    try:
        import transformer_engine  # noqa: F401
    except ImportError:
        assert not fp4_utils.HAVE_TE
    else:
        assert fp4_utils.HAVE_TE
    assert fp4_utils.HAVE_TE_FP4_TENSOR_CLASS and fp4_utils.FP4_TENSOR_CLASS is NVFP4Tensor
