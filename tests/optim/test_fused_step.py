"""The fused kernels against the plain torch path: every bit of weights, masters and moments."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fp4adam
from fp4adam import (
    Float8BlockQuantizer,
    Float8Quantizer,
    FP4Adam,
    MXFP8Quantizer,
    NVFP4Quantizer,
    QuantizedTensor,
)
from fp4adam.tensors import backend
from helpers import assert_identical, written

# Whole tiles, edges in both directions, and the smallest matrix of each format.
QUANTIZERS = {
    "nvfp4": (NVFP4Quantizer(), [(64, 64), (144, 80), (16, 16)]),
    "nvfp4-rowwise": (NVFP4Quantizer(columnwise=False), [(48, 80)]),
    "nvfp4-columnwise": (NVFP4Quantizer(rowwise=False, optimize_for_gemm=True), [(48, 80)]),
    "nvfp4-swizzled": (NVFP4Quantizer(optimize_for_gemm=True), [(64, 64), (144, 16)]),
    "nvfp4-1d": (NVFP4Quantizer(two_dimensional=False), [(64, 128), (48, 80)]),
    "nvfp4-1d-swizzled": (
        NVFP4Quantizer(two_dimensional=False, optimize_for_gemm=True),
        [(64, 80)],
    ),
    "mxfp8": (MXFP8Quantizer(), [(32, 256), (64, 288)]),
    "mxfp8-rowwise": (MXFP8Quantizer(columnwise=False), [(32, 288)]),
    "mxfp8-columnwise": (MXFP8Quantizer(rowwise=False, optimize_for_gemm=True), [(32, 288)]),
    "mxfp8-swizzled": (MXFP8Quantizer(optimize_for_gemm=True), [(32, 256), (160, 32)]),
    "mxfp8-2d": (MXFP8Quantizer(two_dimensional=True), [(32, 256), (64, 288)]),
    "mxfp8-2d-swizzled": (
        MXFP8Quantizer(two_dimensional=True, optimize_for_gemm=True),
        [(32, 256), (160, 32)],
    ),
    "float8block": (Float8BlockQuantizer(), [(128, 128), (130, 20), (5, 3)]),
    "float8block-fp32": (
        Float8BlockQuantizer(force_pow_2_scales=False, amax_epsilon=1e-3),
        [(128, 128), (20, 48)],
    ),
    "float8block-1d": (Float8BlockQuantizer(two_dimensional=False), [(128, 128), (130, 20)]),
    "float8block-columnwise": (Float8BlockQuantizer(rowwise=False), [(30, 48)]),
    "float8": (Float8Quantizer(), [(64, 64), (144, 80), (16, 16)]),
    "float8-pow2": (Float8Quantizer(force_pow_2_scales=True, amax_epsilon=1e-3), [(64, 80)]),
    "float8-rowwise": (Float8Quantizer(columnwise=False), [(80, 64)]),
    "float8-columnwise": (Float8Quantizer(rowwise=False), [(48, 80)]),
    "float8-delayed": (
        Float8Quantizer(scaling="delayed", amax_history_len=3, margin=1),
        [(64, 64), (144, 80), (16, 16)],
    ),
    "float8-delayed-1": (
        Float8Quantizer(scaling="delayed", amax_history_len=1, amax_compute_algo="most_recent"),
        [(64, 80)],
    ),
}
OPTIONS = {
    "adamw": {},
    "through the parameter dtype": dict(quantize_from="param_dtype"),
    "amsgrad, ascending": dict(amsgrad=True, maximize=True),
    "L2, betas of zero and below a half": dict(adam_w_mode=False, betas=(0.0, 0.4)),
    "no bias correction": dict(bias_correction=False, eps=1e-3),
}
NARROW = {
    "bf16": dict(exp_avg_dtype=torch.bfloat16, exp_avg_sq_dtype=torch.bfloat16),
    "fp16": dict(exp_avg_dtype=torch.float16, exp_avg_sq_dtype=torch.float16),
    "fp8": dict(exp_avg_dtype=torch.float8_e4m3fn, exp_avg_sq_dtype=torch.uint8),
    "fp16 masters": dict(master_weight_dtype=torch.float16, exp_avg_dtype=torch.bfloat16),
    "fp8, fp32": dict(exp_avg_dtype=torch.float8_e4m3fn, amsgrad=True),
}


@pytest.fixture
def choose_path(monkeypatch, device):
    """Sends the tensors of the device through the kernels, or everything through torch."""

    def choose(kernel: bool) -> str:
        monkeypatch.setattr(backend, "uses_kernels", lambda d: kernel and d.type == device)
        return device if kernel else "cpu"

    return choose


def make_params(quantizer, shapes, dtype, device):
    generator = torch.Generator().manual_seed(0)
    params = []
    for shape in shapes:
        value = torch.randn(shape, generator=generator) * 0.02
        if quantizer is None:
            params.append(torch.nn.Parameter(value.to(dtype).to(device)))
        else:
            param = torch.nn.Parameter(quantizer.quantize(value.to(dtype).to(device)))
            param._high_precision_init_val = value.to(device)
            params.append(param)
    return params


def train(
    params, grad_dtype=torch.bfloat16, steps=2, scale=1e-2, grad_scale=None, lr=1e-2, **options
):
    generator = torch.Generator().manual_seed(1)
    optimizer = FP4Adam(params, lr=lr, weight_decay=0.1, use_decoupled_grad=True, **options)
    for _ in range(steps):
        for param in params:
            grad = torch.randn(param.shape, generator=generator) * scale
            param.decoupled_grad = grad.to(grad_dtype).to(param.device)
        if grad_scale is not None:
            optimizer.grad_scale = torch.tensor([grad_scale], device=params[0].device)
        optimizer.step()
    return optimizer


def with_options():
    """Options are orthogonal to usages and scalings: all of them for one quantizer of each format.

    In the quick run all with NVFP4, and each with one format more.
    """
    yield from ((name, "adamw") for name in QUANTIZERS)
    for i, option in enumerate([*OPTIONS][1:]):
        for name in ("nvfp4", "mxfp8", "float8block", "float8"):
            is_quick = name in ("nvfp4", ("mxfp8", "float8block")[i % 2])
            marks = () if is_quick else pytest.mark.exhaustive
            yield pytest.param(name, option, marks=marks)


@pytest.mark.parametrize(("name", "option"), list(with_options()))
def test_fused_step_gives_the_bits_of_the_torch_path(name, option, choose_path):
    quantizer, shapes = QUANTIZERS[name]
    options = OPTIONS[option]
    results = []
    for kernel in (True, False):
        params = make_params(quantizer, shapes, torch.bfloat16, choose_path(kernel))
        results.append(written(train(params, **options)))
    assert_identical(*results)


# Columns of codes begin at every byte of a word, in the first block of rows and in the next one;
# blocks have one part or all of them, with less than a word left at the end or none. A step that
# changes little keeps most scales, the first ones change many.
@pytest.mark.parametrize(
    "shapes",
    [
        [(1, 7), (2, 3), (3, 130), (6, 5), (9, 6), (126, 9)],
        [(129, 5), (130, 3), (131, 4)],
        pytest.param([(257, 131), (255, 130), (128, 129)], marks=pytest.mark.exhaustive),
    ],
    ids=["short", "tall", "blocks"],
)
@pytest.mark.parametrize("lr", [1e-2, 1e-6])
def test_float8_blocks_of_odd_sizes_have_the_bits_of_the_torch_path(shapes, lr, choose_path):
    results = []
    for kernel in (True, False):
        params = make_params(Float8BlockQuantizer(), shapes, torch.bfloat16, choose_path(kernel))
        results.append(written(train(params, steps=3, lr=lr)))
    assert_identical(*results)


# Whole tiles and edges; a matrix that has no whole blocks of 32 in a row.
NARROW_CASES = {
    "nvfp4": (NVFP4Quantizer(), [(64, 64), (16, 96), (16, 48)]),
    "mxfp8": (MXFP8Quantizer(), [(32, 256), (32, 32)]),
    "float8block": (Float8BlockQuantizer(), [(128, 128), (20, 160), (5, 3)]),
    "float8block-1d": (Float8BlockQuantizer(two_dimensional=False), [(130, 32)]),
    "float8": (Float8Quantizer(), [(64, 64), (16, 96), (16, 48)]),
    "plain": (None, [(1024,), (3, 5), (33,), (700,)]),
}
NARROW_IN_THE_QUICK_RUN = {
    "nvfp4": [*NARROW],
    "mxfp8": ["bf16", "fp8"],
    "float8block": ["fp8", "fp16 masters"],
    "float8block-1d": ["fp8, fp32"],
    "float8": ["fp16"],
    "plain": [*NARROW],
}


@pytest.mark.parametrize(
    ("case", "states"),
    [
        pytest.param(
            *(case, states),
            marks=() if states in NARROW_IN_THE_QUICK_RUN[case] else pytest.mark.exhaustive,
        )
        for case in NARROW_CASES
        for states in NARROW
    ],
)
def test_narrow_states_have_the_bits_of_the_torch_path(case, states, choose_path):
    quantizer, shapes = NARROW_CASES[case]
    results = []
    for kernel in (True, False):
        params = make_params(quantizer, shapes, torch.bfloat16, choose_path(kernel))
        optimizer = train(params, **NARROW[states])
        assert bool(optimizer._whole.plan._groups) == kernel
        results.append(written(optimizer))
    assert_identical(*results)


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", ["nvfp4", "mxfp8", "float8block"])
def test_fused_step_takes_other_gradient_dtypes(name, grad_dtype, choose_path):
    quantizer, shapes = QUANTIZERS[name]
    results = []
    for kernel in (True, False):
        params = make_params(quantizer, shapes, torch.float32, choose_path(kernel))
        results.append(written(train(params, grad_dtype, grad_scale=1024.0)))
    assert_identical(*results)


@pytest.mark.parametrize("master_weights", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", [OPTIONS["adamw"], OPTIONS["amsgrad, ascending"]], ids=str)
def test_fused_step_of_plain_parameters_gives_the_bits_of_the_torch_path(
    dtype, master_weights, options, choose_path
):
    shapes = [(1024,), (3, 5), (2049,), (64, 64)]
    results = []
    for kernel in (True, False):
        params = make_params(None, shapes, dtype, choose_path(kernel))
        results.append(written(train(params, master_weights=master_weights, **options)))
    assert_identical(*results)


@pytest.mark.parametrize("two_dimensional", [True, False])
def test_a_tensor_with_a_narrow_master_is_written_again(two_dimensional, choose_path):
    """Its largest weight grows in a tile of small ones, where the preview does not look."""
    quantizer = NVFP4Quantizer(two_dimensional=two_dimensional)
    results = []
    for kernel in (True, False):
        params = make_params(quantizer, [(80, 96)], torch.bfloat16, choose_path(kernel))
        params[0]._high_precision_init_val[64:] *= 0.01
        optimizer = FP4Adam(params, lr=1e-4, master_weight_dtype=torch.float16)
        for step in range(3):
            if step == 2:
                optimizer.state[params[0]]["master_param_scale"][70 * 3 + 1] += 12
            params[0].grad = torch.full_like(params[0], 0.01 * step)
            optimizer.step()
            if kernel:
                launch = optimizer._whole.plan._groups[0].launch
                assert (launch._exceeding > 0).tolist() == [step == 2]
        results.append(written(optimizer))
    assert_identical(*results)


@pytest.mark.parametrize(
    "options",
    [{}, OPTIONS["amsgrad, ascending"], NARROW["bf16"], NARROW["fp8"]],
    ids=["adamw", "amsgrad, ascending", "bf16", "fp8"],
)
def test_remainders_have_the_bits_of_the_torch_path(options, choose_path):
    results = []
    for kernel in (True, False):
        params = make_params(None, [(1024,), (3, 5), (2049,)], torch.bfloat16, choose_path(kernel))
        optimizer = train(params, store_param_remainders=True, **options)
        assert bool(optimizer._whole.plan._groups) == kernel
        results.append(written(optimizer))
    assert_identical(*results)


@pytest.mark.parametrize(
    "name, quantize_from",
    [
        ("nvfp4", "master"),
        ("nvfp4-1d", "param_dtype"),
        ("mxfp8", "master"),
        ("float8block", "param_dtype"),
        ("float8block-1d", "master"),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (
                ("nvfp4", "param_dtype"),
                ("nvfp4-1d", "master"),
                ("mxfp8", "param_dtype"),
                ("float8block", "master"),
                ("float8block-1d", "param_dtype"),
            )
        ),
    ],
)
def test_bytes_after_a_step_are_those_of_the_quantized_master(name, quantize_from, choose_path):
    quantizer, shapes = QUANTIZERS[name]
    params = make_params(quantizer, shapes[:2], torch.bfloat16, choose_path(True))
    optimizer = train(params, quantize_from=quantize_from)
    choose_path(False)
    for param in params:
        master = optimizer.state[param]["master_param"].cpu()
        source = master if quantize_from == "master" else master.bfloat16()
        expected = quantizer.quantize(source).storage_tensors()
        actual = {name: t.cpu() for name, t in param.storage_tensors().items()}
        assert_identical(actual, expected)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_zero_learning_rate_leaves_the_bytes_alone(name, choose_path):
    quantizer, shapes = QUANTIZERS[name]
    params = make_params(quantizer, shapes, torch.bfloat16, choose_path(True))
    before = [{n: t.clone() for n, t in p.storage_tensors().items()} for p in params]
    addresses = [[t.data_ptr() for t in p.storage_tensors().values()] for p in params]
    for param in params:
        param.clear_high_precision_init_val()
        param.grad = torch.zeros(param.shape, dtype=param.dtype, device=param.device)
    optimizer = FP4Adam(params, lr=0.0)
    optimizer.step()
    for param, bytes_before, where in zip(params, before, addresses, strict=True):
        assert_identical(param.storage_tensors(), bytes_before)
        assert [t.data_ptr() for t in param.storage_tensors().values()] == where
        assert optimizer.state[param]["step"] == 1


def test_extreme_gradients_give_the_bits_of_the_torch_path(choose_path):
    """NaN, infinities, subnormals and huge values: the codes agree wherever they end up."""
    specials = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e30, -1e-42, 0.0, -0.0])
    for name in ("nvfp4", "nvfp4-1d", "mxfp8", "float8block", "float8block-1d"):
        quantizer = QUANTIZERS[name][0]
        results = []
        for kernel in (True, False):
            params = make_params(quantizer, [(64, 64)] * 2, torch.float32, choose_path(kernel))
            params[1]._high_precision_init_val.zero_()
            optimizer = FP4Adam(params, lr=1e-2)
            for param in params:
                param.grad = torch.zeros(param.shape, device=param.device)
            params[0].grad.view(-1)[: 7 * 555 : 555] = specials.to(params[0].device)
            params[1].grad.view(-1)[::1001] = 1e-30
            optimizer.step()
            codes = [
                {n: t.cpu() for n, t in p.storage_tensors().items() if t.dtype == torch.uint8}
                for p in params
            ]
            results.append(codes)
        assert_identical(*results)


def test_groups_and_kinds_share_one_step(choose_path):
    """Plain and quantized parameters, several groups, a parameter without gradient."""
    results = []
    for kernel in (True, False):
        where = choose_path(kernel)
        generator = torch.Generator().manual_seed(0)
        weights = make_params(NVFP4Quantizer(), [(32, 64), (16, 32)], torch.bfloat16, where)
        weights += make_params(MXFP8Quantizer(), [(32, 64)], torch.bfloat16, where)
        plain = make_params(None, [(64,), (8, 8)], torch.float32, where)
        params = weights + plain
        groups = [{"params": weights, "lr": 1e-2}, {"params": plain, "weight_decay": 0.0}]
        optimizer = FP4Adam(groups, lr=1e-3)
        for step in range(4):
            for i, param in enumerate(params):
                grad = torch.randn(param.shape, generator=generator).to(param.dtype).to(where)
                param.grad = grad if (i + step) % 3 else None
            optimizer.step()
        results.append(written(optimizer))
    assert_identical(*results)


def test_strided_and_unaligned_tensors_are_stepped(choose_path):
    results = []
    for kernel in (True, False):
        where = choose_path(kernel)
        base = torch.arange(120.0).view(10, 12).to(where)
        params = [
            torch.nn.Parameter(base.clone().t()),
            torch.nn.Parameter(base.clone()[:, ::2]),
            torch.nn.Parameter(base.clone().view(-1)[1:101]),
        ]
        optimizer = FP4Adam(params, lr=1e-2)
        for _ in range(3):
            for param in params:
                param.grad = torch.ones_like(param).contiguous()
            optimizer.step()
        results.append(written(optimizer))
    assert_identical(*results)


@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_fused_step_holds_for_any_shape(data):
    """Random shapes, formats and hyper-parameters, kernel against torch."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    quantizer, unit, largest = data.draw(
        st.sampled_from(
            [
                (NVFP4Quantizer(), 16, 6),
                (NVFP4Quantizer(two_dimensional=False), 16, 5),
                (MXFP8Quantizer(), 32, 5),
                (Float8BlockQuantizer(), 1, 140),
                (None, 1, 60),
            ]
        )
    )
    size = st.integers(1, largest)
    shapes = [
        (unit * data.draw(size), unit * data.draw(size)) for _ in range(data.draw(size) % 3 + 1)
    ]
    options = dict(
        betas=(data.draw(st.floats(0, 0.99)), data.draw(st.floats(0, 0.999))),
        eps=data.draw(st.sampled_from([1e-8, 1e-5, 1e-12])),
        amsgrad=data.draw(st.booleans()),
        adam_w_mode=data.draw(st.booleans()),
        scale=data.draw(st.sampled_from([1e-12, 1e-3, 1.0, 1e12])),
    )
    results = []
    original = backend.uses_kernels
    for kernel in (True, False):
        where = device if kernel else "cpu"
        backend.uses_kernels = lambda d, kernel=kernel: kernel and d.type == device
        try:
            params = make_params(quantizer, shapes, torch.bfloat16, where)
            results.append(written(train(params, steps=2, **options)))
        finally:
            backend.uses_kernels = original
    assert_identical(*results)


def test_default_path_follows_the_device():
    assert not backend.uses_kernels(torch.device("cpu"))
    assert backend.uses_kernels(torch.device("cuda"))
    assert fp4adam.QuantizedTensor is QuantizedTensor
