"""Calls as Megatron's distributed optimizer makes them, with the names that it imports."""

import importlib.util
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
)
from fp4adam.formats.nvfp4 import NVFP4Tensor
from fp4adam.fp4_utils import cast_master_weights_to_nvfp4
from fp4adam.fp8_utils import post_all_gather_processing, quantize_master_weights
from fp4adam.interop.adapter import is_foreign
from fp4adam.interop.borrowed_tensor import BorrowedTensor
from helpers import assert_identical
from ranks import run_ranks
from te_stand_ins import te_bytes, te_tensor

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
    """One layer per format, with weights that every rank has in full.

    With ``te`` they are stand-ins for those of Transformer Engine.
    """

    def __init__(self, te: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        weights = []
        for quantizer in QUANTIZERS.values():
            value = (torch.randn(SIZE, SIZE, generator=generator) * 0.2).bfloat16()
            if te:
                weight = te_tensor(quantizer, value, **initial_value(value))
            else:
                weight = nn.Parameter(quantizer.quantize(value))
                weight._high_precision_init_val = value
            weights.append(weight)
        self.weights = nn.ParameterList(weights)

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            update_scale(weight)
            x = torch.tanh(nn.functional.linear(x, Decode.apply(weight)))
        return x


def initial_value(value: Tensor) -> dict:
    """The methods of Transformer Engine's tensors for the value before quantization."""
    kept = [value]
    return dict(
        get_high_precision_init_val=lambda: kept[0] if kept else None,
        clear_high_precision_init_val=kept.clear,
    )


class Decode(torch.autograd.Function):
    """The values of a weight of this package, or of a stand-in."""

    @staticmethod
    def forward(ctx, weight: Tensor) -> Tensor:
        own = BorrowedTensor(weight).tensor if is_foreign(weight) else weight
        return own.dequantize(torch.float32)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad.bfloat16()


def update_scale(weight: Tensor) -> None:
    """Delayed scaling as Transformer Engine's forward pass does it, with a history of 1."""
    quantizer = getattr(weight, "_quantizer", None)
    if hasattr(quantizer, "amax") and quantizer.amax > 0:
        quantizer.scale.copy_(448 / quantizer.amax)
        quantizer.amax.zero_()


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
            for codes in gathered_codes(param):
                flat = codes.view(-1)
                own = flat.chunk(dist.get_world_size(self.group))[dist.get_rank(self.group)]
                dist.all_gather_into_tensor(flat, own.clone(), self.group)


def gathered_codes(param: Tensor) -> list[Tensor]:
    """The codes that ranks gather: rowwise ones, of MXFP8 those of both directions."""
    if hasattr(param, "_data"):
        return [param._data]
    is_mxfp8 = type(param).__name__ == "MXFP8Tensor"
    return [param._rowwise_data] + is_mxfp8 * [param._columnwise_data]


def buffers(param: Tensor, manual: bool = True) -> dict[str, Tensor]:
    """All inner tensors that are valid, by name; else without those that are dropped."""
    found = te_bytes(param) if is_foreign(param) else param.storage_tensors()
    if getattr(param, "_transpose_invalid", False):
        found.pop("_transpose")
    keeps = manual or type(param).__name__ == "MXFP8Tensor"
    names = [n for n in found if keeps or not n.startswith(("_transpose", "_columnwise"))]
    return {name: found[name] for name in names}


def train_sharded(rank: int, iterations: int, manual: bool, te: bool) -> tuple[list, list]:
    model = Model(te)
    optimizer = DistributedOptimizer(model, dist.group.WORLD)
    losses = []
    for step in range(iterations):
        losses.append(backward(model, step))
        optimizer.step(manual)
    return losses, [*map(buffers, model.weights)]


def train_unsharded(iterations: int, te: bool) -> tuple[list, Model]:
    model, losses = Model(te), []
    optimizer = FP4Adam(model.parameters(), quantize_from="param_dtype", **OPTIONS)
    for step in range(iterations):
        losses.append(backward(model, step))
        optimizer.step()
        optimizer.zero_grad()
    return losses, model


@pytest.mark.parametrize(
    ("iterations", "manual", "te"),
    [
        (20, True, False),
        (20, False, False),
        (20, True, True),
        pytest.param(20, False, True, marks=pytest.mark.exhaustive),
        *(pytest.param(500, True, te, marks=pytest.mark.exhaustive) for te in (False, True)),
    ],
)
def test_two_ranks_train_as_one_process_bit_for_bit(iterations, manual, te):
    losses, model = train_unsharded(iterations, te)
    assert sum(losses[-10:]) < sum(losses[:10])
    for of_rank, weights in run_ranks(train_sharded, 2, iterations, manual, te):
        assert of_rank == losses
        expected = [buffers(param, manual) for param in model.weights]
        assert_identical(weights, expected)


def test_stacks_are_moved_with_their_slices():
    stack = NVFP4Quantizer().quantize(torch.randn(2, 16, 32))
    weight = NVFP4Quantizer().quantize(torch.randn(16, 32))
    assert fp4_utils.is_grouped_nvfp4tensor(stack)
    assert not fp4_utils.is_grouped_nvfp4tensor(weight)
    assert not fp4_utils.is_grouped_nvfp4tensor(torch.ones(2, 16, 32))
    second, values = stack[1:], stack.dequantize(torch.float32)
    buffer = torch.zeros(512, dtype=torch.uint8)
    fp4_utils.modify_grouped_nvfp4_rowwise_storage(stack, buffer)
    assert stack.data_ptr() == buffer.data_ptr() and torch.equal(
        stack.dequantize(torch.float32), values
    )
    buffer[256:] = 0
    assert not second.dequantize(torch.float32).any() and torch.equal(
        stack.dequantize(torch.float32)[0], values[0]
    )
    with pytest.raises(ValueError, match="must be contiguous uint8 of 512 bytes"):
        fp4_utils.modify_grouped_nvfp4_rowwise_storage(stack, buffer[:-1])


CONFIG = dict(fp4="e2m1", fp4_param=True, fp4_recipe="nvfp4", num_layers=4)
CONFIG |= dict(first_last_layers_bf16=True, num_layers_at_start_in_bf16=1)
CONFIG |= dict(num_layers_at_end_in_bf16=1)


def config(**changes):
    return SimpleNamespace(**CONFIG | changes)


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
    assert (importlib.util.find_spec("transformer_engine") is not None) == fp4_utils.HAVE_TE
    assert fp4_utils.HAVE_TE_FP4_TENSOR_CLASS and fp4_utils.FP4_TENSOR_CLASS is NVFP4Tensor
    assert fp4_utils.get_fp4_align_size() == 128


def test_transformer_engines_nvfp4_tensors_are_known_by_name():
    value = torch.randn(32, 64).bfloat16()
    weight = te_tensor(NVFP4Quantizer(), value)
    assert fp4_utils.is_nvfp4tensor(weight) and not fp4_utils.is_grouped_nvfp4tensor(weight)
    others = (te_tensor(MXFP8Quantizer(), value), MXFP8Quantizer().quantize(value), value, None)
    assert not any(map(fp4_utils.is_nvfp4tensor, others))
    expected = NVFP4Quantizer().quantize(value).dequantize(torch.bfloat16)
    assert torch.equal(fp4_utils.dequantize_fp4_tensor(weight), expected)
    buffer = torch.zeros(fp4_utils.get_nvfp4_rowwise_packed_shape(value.shape).numel())
    buffer = buffer.to(torch.uint8)
    fp4_utils.modify_nvfp4_rowwise_storage(weight, buffer)
    assert weight._rowwise_data.data_ptr() == buffer.data_ptr()
    assert torch.equal(fp4_utils.dequantize_fp4_tensor(weight), expected)


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", QUANTIZERS)
def test_slices_are_written_to_other_memory(name, alone):
    """As with Megatron's FSDP: codes go to a shard of the caller's, a tensor or bare memory."""
    quantizer, value = QUANTIZERS[name], (torch.randn(32, 64) * 0.1).bfloat16()
    weights = [te_tensor(quantizer, value) for _ in range(2)]
    before = te_bytes(weights[0])
    master, start = torch.randn(32 * 16), 64 * 4
    per_byte = 8 // quantizer.layout.code_type.bits
    outs = [torch.zeros(len(master) // per_byte, dtype=torch.uint8) for _ in range(2)]
    target = (outs[0], outs[1]) if name == "mxfp8" else outs[0]
    if name.startswith("float8") and name != "float8block":
        target = weights[0].on(outs[0])  # a Float8Tensor of the same codes
    quantize_master_weights([weights[0]], [master], [start], None, [target], True)
    quantize_master_weights([weights[1]], [master], [start], None, None, True)
    codes = [gathered_codes(weight) for weight in weights]
    own = slice(start // per_byte, start // per_byte + len(outs[0]))
    for out, elsewhere, within in zip(outs, *codes, strict=False):
        assert out.any() and torch.equal(out, within.view(-1)[own])
        assert any(torch.equal(elsewhere, x) for x in before.values())  # still the old codes
    scales = [{n: x for n, x in te_bytes(w).items() if "scale" in n} for w in weights]
    assert all(torch.equal(x, scales[1][n]) for n, x in scales[0].items())


def test_an_adapter_says_how_columnwise_codes_are_dropped(alone, monkeypatch):
    from fp4adam.interop import transformer_engine

    monkeypatch.delattr(transformer_engine.TransformerEngineAdapter, "drop_columnwise")
    weight, master = te_tensor(NVFP4Quantizer(), torch.ones(16, 32)), torch.randn(512)
    before = te_bytes(weight)
    with pytest.raises(
        NotImplementedError, match="drop_columnwise must be defined by TransformerEngineAd"
    ):
        quantize_master_weights([weight], [master], [0], None)
    assert all(torch.equal(x, before[name]) for name, x in te_bytes(weight).items())
    # None are dropped that are gathered, or that are not there.
    for quantizer in (MXFP8Quantizer(), NVFP4Quantizer(columnwise=False)):
        weight = te_tensor(quantizer, torch.ones(32, 32))
        quantize_master_weights([weight], [torch.randn(1024)], [0], None)
