"""FP4Adam with quantized tensors of other packages.

Transformer Engine cannot run here: its classes are played by stand-ins, with the bytes of own
tensors, which tests/golden compares. The real torchao is tested in tests/integrations.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import fp4adam
from fp4adam import (
    Float8Quantizer,
    FP4Adam,
    FusedAdam,
    MasterWeightOptimizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    QuantizationMonitor,
    Quantizer,
    TensorAdapter,
)
from fp4adam.formats import minifloat
from fp4adam.interop.borrowed_tensor import borrow
from helpers import random, take_steps
from te_stand_ins import (
    QUANTIZERS,
    SHAPE,
    Wrapper,
    assert_bytes,
    assert_same,
    te_bytes,
    te_class,
    te_tensor,
)

every_format = pytest.mark.parametrize("quantizer", QUANTIZERS.values(), ids=QUANTIZERS)


KINDS = {
    "32bit": FP4Adam,
    "8bit": partial(FP4Adam, states="8bit"),
    "another": partial(MasterWeightOptimizer, optimizer_class=torch.optim.AdamW),
}


def step_each(optimizers: Iterable[FP4Adam], seeds: Iterable[int]) -> None:
    for seed in seeds:
        for optimizer in optimizers:
            take_steps(optimizer, [seed])


def master_of(optimizer: FP4Adam, param: Tensor) -> Tensor:
    return optimizer.state[param]["master_param"]


def stepped(
    quantizer: Quantizer, device: str = "cpu", lr: float = 1e-2, **attributes: object
) -> tuple[Parameter, FP4Adam]:
    """A stand-in after a step; its optimizer has one of the same kind before it, and another."""
    values = [random(SHAPE, seed, device).bfloat16() for seed in (9, 0)]
    alike = [te_tensor(quantizer, value, **attributes) for value in values]
    param, other = alike[1], te_tensor(Float8Quantizer(columnwise=False), values[0])
    optimizer = FP4Adam([other, *alike], lr=lr)
    take_steps(optimizer, [0])
    return param, optimizer


def pair_of(
    quantizer: Quantizer, value: Tensor, kind: Callable[..., FP4Adam] = FP4Adam
) -> tuple[list[Parameter], list[FP4Adam]]:
    """A tensor of this package and a stand-in of the same value, each with its optimizer."""
    params = [Parameter(quantizer.quantize(value)), te_tensor(quantizer, value)]
    return params, [kind([param], lr=1e-2) for param in params]


def assert_bytes_of_master(optimizer: FP4Adam, param: Tensor, quantizer: Quantizer) -> None:
    assert_bytes(param, te_tensor(quantizer, master_of(optimizer, param)))


# All of the operators, and some of the kernels, as the interpreter is slow.
TRAINED = [("torch", name, kind) for name in QUANTIZERS for kind in KINDS]
TRAINED += [("kernel", name, "32bit") for name in ("nvfp4", "nvfp4-1d", "mxfp8", "float8block")]


@pytest.mark.parametrize(("path_device", "name", "kind"), TRAINED, indirect=["path_device"])
def test_training_is_that_of_own_tensors(name, kind, path_device):
    """Other optimizers write the memory of the other package as the fused step does."""
    quantizer, value = QUANTIZERS[name], random(SHAPE, 0, path_device, scale=0.1).bfloat16()
    params, optimizers = pair_of(quantizer, value, KINDS[kind])
    step_each(optimizers, range(3))
    pairs = [*zip(optimizers, params, strict=True)]
    if kind == "8bit":  # the remainder, and what it completes
        assert torch.equal(*(o.get_unscaled_state(p, "master_param") for o, p in pairs))
    else:
        assert_bytes_of_master(optimizers[1], params[1], quantizer)
    assert torch.equal(*(master_of(*pair) for pair in pairs))
    measured = (QuantizationMonitor(torch.nn.ParameterList([p]), o).measure() for o, p in pairs)
    assert next(measured) == next(measured)
    if isinstance(optimizers[1], FP4Adam):
        plan = optimizers[1]._whole.plan
        take_steps(optimizers[1], [3])
        assert optimizers[1]._whole.plan is plan  # nothing is worked out again


@pytest.mark.parametrize("kind", KINDS)
def test_autograd_sees_every_write(kind):
    params = [te_tensor(NVFP4Quantizer(), random(SHAPE, seed).bfloat16()) for seed in range(2)]
    before = [param._version for param in params]
    take_steps(KINDS[kind](params, lr=1e-2), [0])
    assert all(param._version > old for param, old in zip(params, before, strict=True))


def test_padding_is_left_alone():
    param, optimizer = stepped(NVFP4Quantizer())
    padding = param._rowwise_scale_inv[32:], param._columnwise_scale_inv[:, 3:]
    for scales in padding:
        scales.fill_(7)
    take_steps(optimizer, [1])
    assert all((scales == 7).all() for scales in padding)
    param = te_tensor(MXFP8Quantizer(), random(SHAPE, 0).bfloat16())
    assert not borrow(param).copies  # kernels write its scales themselves


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("overwritten", [False, True])
def test_masters_start_from_the_value_before_quantization_if_it_is_that(overwritten, dtype):
    value, other = random(SHAPE, 0).to(dtype), random(SHAPE, 1).bfloat16()
    if dtype == torch.bfloat16:  # in other strides
        value = value.t().contiguous().t()
    kept = [value]
    param = te_tensor(
        NVFP4Quantizer(),
        value,
        get_high_precision_init_val=lambda: kept[0] if kept else None,
        clear_high_precision_init_val=kept.clear,
    )
    start = value.float()
    if overwritten:
        with torch.no_grad():
            param.copy_(te_tensor(NVFP4Quantizer(), other))
        start = NVFP4Quantizer().quantize(other).dequantize(torch.float32)
    optimizer = FP4Adam([param], lr=0.0)
    take_steps(optimizer, [0])
    master = master_of(optimizer, param)
    assert torch.equal(master, start) and master.is_contiguous()
    assert master.data_ptr() != value.data_ptr() and not kept


@pytest.mark.parametrize("by_kernels", [False, True])
@every_format
def test_a_parameter_that_is_overwritten_is_where_its_master_restarts(quantizer, by_kernels):
    param, optimizer = stepped(quantizer, lr=1e-3)
    other = te_tensor(quantizer, random(SHAPE, 1).bfloat16())
    if by_kernels:  # which raise the version of the parameter alone
        for name in te_bytes(other):
            getattr(param, name).data.copy_(getattr(other, name))
        torch.autograd.graph.increment_version(param)
    else:
        with torch.no_grad():
            param.copy_(other)
    start = quantizer.quantize(random(SHAPE, 1).bfloat16()).dequantize(torch.float32)
    assert torch.equal(optimizer.state_dict()["state"][2]["master_param"], start)
    take_steps(optimizer, [1])
    assert (master_of(optimizer, param) - start).abs().max() < 2e-3
    assert_bytes_of_master(optimizer, param, quantizer)


@every_format
def test_a_remainder_that_is_set_is_written_by_a_step_that_changes_nothing(quantizer):
    param = te_tensor(quantizer, random(SHAPE, 0).bfloat16())
    optimizer = FP4Adam([param], lr=0.0, master_weight_dtype=torch.int8)
    take_steps(optimizer, [0])
    master = random(SHAPE, 5)
    optimizer.set_scaled_state(param, "master_param", master)
    before, param.grad = param._version, None
    optimizer.step()
    assert_bytes(param, te_tensor(quantizer, master))
    assert param._version > before


@pytest.mark.parametrize("master_dtype", [torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("model_first", [False, True])
def test_checkpoints_keep_masters_in_either_order(model_first, master_dtype):
    quantizer = NVFP4Quantizer()
    options = dict(lr=1e-2, exp_avg_dtype=torch.bfloat16, master_weight_dtype=master_dtype)
    trained, resumed = (te_tensor(quantizer, random(SHAPE, i).bfloat16()) for i in range(2))
    optimizer, other = (FP4Adam([param], **options) for param in (trained, resumed))
    take_steps(optimizer, [0])
    take_steps(other, [5])
    for loads_model in (model_first, not model_first):
        if loads_model:
            with torch.no_grad():
                resumed.copy_(trained)
        else:
            other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert_bytes(resumed, trained)
    step_each((optimizer, other), [1])
    assert torch.equal(master_of(other, resumed), master_of(optimizer, trained))
    assert_bytes(resumed, trained)


def assert_unchanged(param: Tensor, before: dict[str, Tensor]) -> None:
    assert all(torch.equal(x, before[name]) for name, x in te_bytes(param).items())


@pytest.mark.parametrize(
    ("path_device", "reason"),
    [("torch", "lr"), ("torch", "overflow"), ("torch", "no gradient"), ("kernel", "overflow")],
    indirect=["path_device"],
)
def test_a_step_that_changes_nothing_leaves_the_bytes_alone(reason, path_device):
    values = [random(SHAPE, i, path_device).bfloat16() for i in range(2)]
    params = [te_tensor(NVFP4Quantizer(), value) for value in values]
    optimizer = FP4Adam(params, lr=0.0 if reason == "lr" else 1e-2)
    before = [*map(te_bytes, params)]
    params[0].grad = torch.ones_like(values[0])
    if reason == "overflow":
        optimizer.found_inf = torch.ones((), device=path_device)
    optimizer.step()
    i = int(reason == "no gradient")
    assert_unchanged(params[i], before[i])


def made_by(**options: object) -> dict[str, object]:
    return dict(_quantizer=SimpleNamespace(**options))


E5M2 = SimpleNamespace(name="kFloat8E5M2")
UE5M3, E8M0 = SimpleNamespace(name="kFloat8UE5M3"), SimpleNamespace(name="kFloat8E8M0")
OUTLIERS = dict(_INNER_TENSORS=(("_rowwise_data", "rowwise_data"), ("_outliers", "outliers")))
REFUSED = {
    "e4m3_max": ("nvfp4", dict(_nvfp4_e4m3_max=256), "must be 448 to be stepped, got 256"),
    "rht": ("nvfp4", made_by(with_rht=True), "with_rht"),
    "no quantizer": ("nvfp4", dict(_quantizer=None), "got None.*quantized_model_init"),
    "e5m2": ("mxfp8", dict(_fp8_dtype=E5M2), "be kFloat8E4M3"),
    "e5m2 float8": ("float8", dict(_fp8_dtype=E5M2), "a Float8Tensor must be k"),
    "ue5m3": ("nvfp4", dict(_scale_dtype=UE5M3), "kFloat8E4M3 .* got kFloat8UE5M3"),
    "another dtype": ("mxfp8", dict(_scale_dtype=E8M0), "must be absent"),
    "one level": ("nvfp4", made_by(disable_second_level_scale=True), "of a NVFP4T.* be False"),
    "more memory": ("mxfp8", OUTLIERS, "got _outliers as well; quantize"),
    "row-scaled": ("nvfp4", dict(_row_scaled_nvfp4=True), "_row_scaled_nvfp4 of a NVFP4T"),
}  # fmt: skip


@pytest.mark.table
@pytest.mark.parametrize(("name", "attributes", "words"), REFUSED.values(), ids=REFUSED)
def test_what_no_kernel_writes_is_refused(name, attributes, words):
    param = te_tensor(QUANTIZERS[name], random(SHAPE, 0).bfloat16(), **attributes)
    with pytest.raises(ValueError, match=words):
        FP4Adam([param])


class Packed(Wrapper):
    """NVFP4 of a package that keeps a multiplier and scales without padding."""


class PackedAdapter(TensorAdapter):
    attributes = ("packed", "scales", "multiplier")

    def quantizer(self, tensor):
        return NVFP4Quantizer(columnwise=False, two_dimensional=False)

    def fields(self, tensor):
        return {
            "rowwise_data": tensor.packed,
            "rowwise_scale_inv": tensor.scales,
            "per_tensor_scale": tensor.multiplier,
        }


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr("fp4adam.interop.adapter._ADAPTERS", {})


def packed(value: Tensor) -> Parameter:
    tensor = PackedAdapter().quantizer(None).quantize(value)
    rows, cols = value.shape
    return Parameter(
        Packed(
            (rows, cols),
            value.dtype,
            packed=tensor.rowwise_data,
            scales=tensor.rowwise_scale_inv[:rows, : cols // 16].clone(),
            multiplier=(tensor.amax_rowwise / torch.tensor([2688.0])).view(()),
        )
    )


@pytest.mark.parametrize("name", [Packed, f"{__name__}.Packed", "te_stand_ins.Wrapper"])
def test_a_class_with_an_adapter_is_stepped(name, registry):
    fp4adam.register_adapter(name, PackedAdapter())
    param = packed(random(SHAPE, 0).bfloat16())
    optimizer = FP4Adam([param], lr=1e-2)
    step_each([optimizer], range(2))
    assert_bytes(param, packed(master_of(optimizer, param)))

    def replace():
        new = param.multiplier.detach() * 2
        torch.autograd.graph.increment_version([new] * param.multiplier._version)
        param.multiplier = new

    for overwrite in (lambda: param.multiplier.mul_(2), replace):
        before = master_of(optimizer, param).norm()
        overwrite()
        take_steps(optimizer, [2])
        assert (master_of(optimizer, param).norm() / before - 2).abs() < 0.1
    with pytest.raises(TypeError, match=r"dtype of a .*Packed must be .*, got torch\.float64"):
        FP4Adam([Parameter(Packed(SHAPE, torch.float64, packed=param.packed))])
    with pytest.raises(ValueError, match=r"must be multiples of 16, got shape \(8, 96\)"):
        FP4Adam([Parameter(Packed((8, 96), torch.float32, packed=param.packed))])


def test_an_unknown_class_is_refused_by_name(registry):
    param = packed(random(SHAPE, 0).bfloat16())
    for optimizer in (FP4Adam, FusedAdam, partial(FusedAdam, capturable=True)):
        with pytest.raises(TypeError, match=r"test_adapters.Packed; register a .*TensorAdapter"):
            optimizer([param])
    hybrid = te_class("HybridQuantizedTensor", "hybrid_tensor")
    with pytest.raises(TypeError, match=r"have an adapter, got .*hybrid_tensor.HybridQuantized"):
        FP4Adam([Parameter(hybrid(SHAPE, torch.bfloat16, _rowwise_storage=torch.zeros(SHAPE)))])
    with pytest.raises(TypeError, match="derived from TensorAdapter, got <class .* and <class"):
        fp4adam.register_adapter(Packed, PackedAdapter)


zeros = partial(torch.zeros, dtype=torch.uint8)
WRONG_FIELDS = {
    "missing": (dict(rowwise_data=None), "rowwise_data of .*Packed must be torch.uint8 on cpu"),
    "dtype": (dict(per_tensor_scale=torch.zeros(1).double()), "must be torch.float32 on cpu, got"),
    "extent": (dict(rowwise_scale_inv=zeros(32, 5)), r"least \[32, 6\], got torch.uint8 \(32, 5\)"),
    "numel": (dict(rowwise_data=zeros(32, 47)), r"as large as \(32, 48\)"),
    "strides": (dict(rowwise_data=zeros(48, 32).t()), "be contiguous"),
    "scale": (dict(per_tensor_scale=...), "amax_columnwise or per_tensor_scale, got NoneType"),
}  # fmt: skip


@pytest.mark.parametrize(("wrong", "words"), WRONG_FIELDS.values(), ids=WRONG_FIELDS)
def test_fields_are_checked(wrong, words, registry, monkeypatch):
    fields = PackedAdapter.fields

    def changed(self, tensor):
        found = {**fields(self, tensor), **wrong}
        return {name: value for name, value in found.items() if value is not ...}

    monkeypatch.setattr(PackedAdapter, "fields", changed)
    fp4adam.register_adapter(Packed, PackedAdapter())
    with pytest.raises(ValueError, match=words):
        FP4Adam([packed(random(SHAPE, 0).bfloat16())])


@pytest.mark.parametrize("scaling", ["current", "delayed"])
@pytest.mark.parametrize("shape", [(24, 64), (1000, 48), (3, 8, 16)])
def test_float8_weights_of_any_rows(shape, scaling, path_device):
    """Transformer Engine's matmuls take rows in multiples of eight."""
    value = random(shape, 0, path_device, scale=0.1).bfloat16()
    (own, theirs), optimizers = pair_of(Float8Quantizer(scaling=scaling), value)
    for seed in range(3):
        step_each(optimizers, [seed])
        if scaling == "delayed":  # as its next forward pass does
            theirs._quantizer.scale.copy_(448 / own.amax_history.max())
    assert torch.equal(*map(master_of, optimizers, (own, theirs)))
    assert_same(theirs._data, own._data, "codes")
    assert_same(theirs._transpose, own.columnwise_data, "transposed codes")
    assert_same(theirs._scale_inv, own._scale_inv, "scale")


def test_a_transpose_that_is_invalid_is_left_to_transformer_engine():
    param, optimizer = stepped(Float8Quantizer(), _transpose_invalid=True)
    stale = te_tensor(Float8Quantizer(), random(SHAPE, 0).bfloat16())._transpose
    assert torch.equal(param._transpose, stale)
    master = master_of(optimizer, param).clone()
    assert torch.equal(param._data, Float8Quantizer().quantize(master).rowwise_data)
    # It has made the transpose since.
    param._transpose, param._transpose_invalid = param._data.t().contiguous(), False
    take_steps(optimizer, [1])
    assert_bytes_of_master(optimizer, param, Float8Quantizer())
    assert (master - master_of(optimizer, param)).abs().max() < 0.1


def test_buffers_of_a_quantizer_do_not_make_its_scaling_delayed():
    """With current scaling, Transformer Engine has had them up to 2.15, with any contents."""
    quantizer = Float8Quantizer(force_pow_2_scales=True, amax_epsilon=9.0)
    options = dict(vars(quantizer), scale=torch.tensor([7.0]), amax=torch.zeros(1))
    param, optimizer = stepped(quantizer, **made_by(**options))
    assert_bytes_of_master(optimizer, param, quantizer)


def assert_delayed(param: Tensor, master: Tensor) -> None:
    """Codes and decode scale are of a master under the scale that the quantizer gives."""
    assert torch.equal(param._data, minifloat.e4m3_code(master * param._quantizer.scale))
    assert torch.equal(param._scale_inv, 1 / param._quantizer.scale)


def test_delayed_scaling_takes_scales_and_returns_amaxes(path_device):
    """Scales as Transformer Engine's own, which it computes anew after each forward pass."""
    kinds = [Float8Quantizer(scaling="delayed", columnwise=i != 0) for i in range(3)]
    values = [random(SHAPE, i, path_device).bfloat16() for i in range(3)]
    params = [*map(te_tensor, kinds, values)]
    optimizer = FP4Adam(params, lr=1e-2)
    largest = [0.0] * 3
    for seed in range(3):
        for i, param in enumerate(params):
            amax = random((1,), 10 * seed + i, path_device).abs()
            # Not 448 / amax, which torch computes as a product with the reciprocal.
            param._quantizer.scale.copy_(torch.full_like(amax, 448) / amax / 2.0 ** (seed * i))
        plan = optimizer._whole.plan
        take_steps(optimizer, [seed])
        assert seed < 2 or optimizer._whole.plan is plan  # nothing is worked out again
        for i, param in enumerate(params):
            master = master_of(optimizer, param)
            assert_delayed(param, master)
            assert i == 0 or torch.equal(param._transpose, param._data.t())
            largest[i] = max(largest[i], master.abs().max().item())
            assert param._quantizer.amax.item() == largest[i]


def test_a_skipped_step_leaves_delayed_scaling_alone(path_device):
    param, optimizer = stepped(Float8Quantizer(scaling="delayed"), path_device)
    param._quantizer.scale.mul_(0.5)
    param._quantizer.amax.fill_(0.25)
    before = te_bytes(param)
    optimizer.found_inf = torch.ones((), device=path_device)
    take_steps(optimizer, [1])
    assert_unchanged(param, before)
    assert param._quantizer.amax.item() == 0.25
    optimizer.found_inf.zero_()
    take_steps(optimizer, [1])
    assert torch.equal(param._scale_inv, 1 / param._quantizer.scale)


def test_delayed_scaling_follows_a_quantizer_that_is_replaced():
    quantizers = Float8Quantizer(), *[Float8Quantizer(scaling="delayed")] * 2
    *others, param = (te_tensor(each, random(SHAPE, 0).bfloat16()) for each in quantizers)
    optimizer = FP4Adam([*others, param], lr=1e-2)
    take_steps(optimizer, [0])
    before = master_of(optimizer, param).clone()
    param._quantizer = SimpleNamespace(scale=torch.tensor([7.0]), amax=torch.zeros(1))
    take_steps(optimizer, [1])
    master = master_of(optimizer, param)
    assert (master - before).abs().max() < 0.02  # it went on from there
    assert_delayed(param, master)
    assert param._quantizer.amax.item() == master.abs().max().item()


def test_a_transpose_in_other_strides_is_declared_invalid():
    param = te_tensor(Float8Quantizer(), random(SHAPE, 0).bfloat16())
    param._transpose = torch.zeros(96, 40, dtype=torch.uint8)[:, :32]
    take_steps(FP4Adam([param]), [0])
    assert param._transpose_invalid and not param._transpose.any()
