"""The norm of all gradients is the rounded true one, with the same bits on every path."""

import contextlib
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

from fp4adam import NVFP4Quantizer
from fp4adam.optim import grad_norm
from fp4adam.optim.grad_norm import LANES, SPAN, GradNorm
from fp4adam.tensors import backend
from waits import refusing_waits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NORM_TYPES = (1.0, 2.0, math.inf)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

every_norm = pytest.mark.parametrize("norm_type", NORM_TYPES)
both_paths = pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "torch"])
needs_cuda = pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA device")


@contextlib.contextmanager
def path(kernel):
    """Sends the tensors of the device through the kernels, or everything through torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "uses_kernels", lambda d: kernel and d.type == DEVICE)
        yield DEVICE if kernel else "cpu"


def on(device, grads):
    """The gradients there, each as far from a multiple of 16 bytes as before."""
    moved = []
    for grad in grads:
        if grad is not None and grad.device.type != device:
            offset = grad.storage_offset()
            base = torch.empty(offset + grad.numel(), dtype=grad.dtype, device=device)
            grad = base[offset:].copy_(grad)
        moved.append(grad)
    return moved


def sizes_of(grads):
    return [0 if grad is None else grad.numel() for grad in grads]


def norm_of(grads, *args, **kwargs):
    """Norm and coefficient of a single call."""
    norm, coefficients = GradNorm(sizes_of(grads))(grads, *args, **kwargs)
    return norm, *coefficients.values()


def true_norm(grads, norm_type):
    """The true norm, rounded once or, with the root, twice: by exact summation."""
    values = [x for grad in grads if grad is not None for x in grad.double().abs().cpu().tolist()]
    if norm_type == math.inf:
        norm = max(values, default=0.0)
    elif norm_type == 2:
        norm = math.sqrt(math.fsum(x * x for x in values))
    else:
        norm = math.fsum(values)
    return torch.tensor(norm, dtype=torch.float64).float()


def randn(size, dtype=torch.float32, seed=0, scale=1.0, offset=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(offset + size, generator=generator) * scale).to(dtype)[offset:]


def some_grads():
    """Several spans, tails of every kind, an unaligned view, all dtypes."""
    return [
        randn(2 * SPAN + 3 * LANES + 5, seed=1, scale=1e-3),
        randn(SPAN, torch.bfloat16, seed=2, scale=1e-2),
        randn(7, torch.float16, seed=3),
        randn(5 * LANES + 1, torch.bfloat16, seed=4, offset=1),
        randn(2 * LANES, seed=5, offset=3),
    ]


sizes = st.one_of(
    st.integers(0, 40),
    st.integers(0, 3 * LANES),
    st.sampled_from([LANES, SPAN - 1, SPAN, SPAN + 1, 2 * SPAN]),
)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_norm_is_the_rounded_true_one(data):
    grads = []
    for _ in range(data.draw(st.integers(1, 4))):
        dtype = data.draw(st.sampled_from(DTYPES))
        # Down to subnormals and up to values whose squares overflow in float32.
        exponent = st.integers(-24, 13) if dtype == torch.float16 else st.integers(-149, 120)
        scale = 2.0 ** data.draw(exponent)
        seed, offset = data.draw(st.integers(0, 2**32)), data.draw(st.integers(0, 8))
        grads.append(randn(data.draw(sizes), dtype, seed, scale, offset))
        if data.draw(st.integers(0, 4)) == 0:
            grads.append(None)
    norm_type = data.draw(st.sampled_from(NORM_TYPES))
    max_norm = data.draw(st.floats(0, 2.0**127, width=32))
    expected = true_norm(grads, norm_type)
    coefficient = torch.clamp(max_norm / (expected + 1e-6), max=1.0)
    for kernel in (True, False):
        with path(kernel) as device:
            norm, found = norm_of(on(device, grads), max_norm, norm_type)
        assert norm.item() == expected.item()
        assert found.item() == coefficient.item()


@every_norm
def test_kernels_add_in_the_order_of_the_torch_path(norm_type):
    """Every bit of the float64 sums, of which the norm shows only the upper half."""
    grads = [*some_grads(), None, randn(100, torch.float64)]
    results = []
    for kernel in (True, False):
        with path(kernel) as device:
            sizes = [500 if grad is None else grad.numel() for grad in grads]
            there = on(device, grads)
            sums = GradNorm(sizes)._span_sums(there, torch.device(device, 0), norm_type)
            total, result = grad_norm._finish(sums, 0.5, norm_type)
            results.append((sums.cpu(), total.cpu(), result.cpu()))
    for actual, expected in zip(*results, strict=True):
        assert torch.equal(actual, expected)


@both_paths
@every_norm
def test_bits_depend_neither_on_addresses_nor_on_the_call(kernel, norm_type):
    with path(kernel) as device:
        grads = on(device, some_grads())
        sums = GradNorm(sizes_of(grads))
        first, _ = sums(grads, norm_type=norm_type)
        again, _ = sums(grads, norm_type=norm_type)
        shifted = []
        for grad in grads:
            base = torch.empty(grad.numel() + 5, dtype=grad.dtype, device=device)
            shifted.append(base[5:].copy_(grad))
        moved, _ = sums(shifted, norm_type=norm_type)
    assert first.item() == again.item() == moved.item()


@both_paths
def test_gradients_may_come_and_go_and_change_their_dtype(kernel):
    with path(kernel) as device:
        a, b, c = on(device, [randn(1000), randn(3000, torch.bfloat16), randn(500, torch.float16)])
        measure = GradNorm([1000, 3000, 500])
        for grads in (
            [a, b, c],
            [a, None, c],
            [None, b, None],
            [None, b.float(), None],
            [a.bfloat16(), b, c],
        ):
            assert measure(grads)[0].item() == true_norm(grads, 2).item()


@both_paths
def test_every_layout_is_read_once(kernel):
    base = randn(60 * 70)
    with path(kernel) as device:
        grads = [
            base.to(device).view(60, 70).t(),
            base.to(device).view(60, 70)[:, 3:40],
            base.to(device).view(6, 10, 7, 10).permute(2, 0, 3, 1)[:, :, :1],
            base.to(device)[:1].expand(50, 3),
            base.to(device)[0],
        ]
        norm, _ = norm_of(grads)
    assert (
        norm.item()
        == true_norm([grad.flatten() for grad in grads if grad.dim()] + [base[:1]], 2).item()
    )


@both_paths
@every_norm
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("specials", ["nan", "inf", "-inf", "nan inf"])
def test_nonfinite_gradients_give_the_norm_of_torch(kernel, norm_type, dtype, specials):
    grads = [randn(LANES + 9, dtype), randn(20, dtype)]
    for i, special in enumerate(specials.split()):
        grads[i][3 + 5 * i] = float(special)
    expected = torch.nn.utils.get_total_norm(grads, norm_type)
    with path(kernel) as device:
        norm, coefficient = norm_of(on(device, grads), 1.0, norm_type)
    assert str(norm.item()) == str(expected.item())
    assert str(coefficient.item()) == str((1.0 / (expected + 1e-6)).clamp(max=1.0).item())


@both_paths
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_nonfinite_norm_raises_on_request(kernel, value):
    with path(kernel) as device:
        grads = [torch.tensor([1.0, float(value)], device=device)]
        with pytest.raises(RuntimeError, match=f"must be finite, got {value}.*norm_type 2.0"):
            norm_of(grads, 1.0, error_if_nonfinite=True)
        norm_of([torch.ones(2, device=device)], 1.0, error_if_nonfinite=True)


@both_paths
def test_large_norms_overflow_only_where_float32_does(kernel):
    with path(kernel) as device:
        large = torch.tensor([1e38, 3e38], device=device)
        assert norm_of([large])[0].item() == true_norm([large], 2).item() < math.inf
        assert norm_of([large], norm_type=1.0)[0].item() == math.inf
        wide = torch.full((3,), 1e100, dtype=torch.float64, device=device)
        assert norm_of([wide], norm_type=math.inf)[0].item() == math.inf


@both_paths
@every_norm
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_subnormal_gradients_count(kernel, norm_type, dtype):
    info = torch.finfo(dtype)
    grads = [torch.tensor([3.0, -2.0], dtype=torch.float64).mul(info.smallest_normal * info.eps)]
    with path(kernel) as device:
        norm, _ = norm_of([grads[0].to(dtype).to(device)], norm_type=norm_type)
    assert norm.item() == true_norm(grads, norm_type).item() > 0


@both_paths
def test_nothing_to_measure_has_norm_zero(kernel):
    with path(kernel) as device:
        empty = torch.ones(0, 3, device=device)
        for grads in ([], [None], [empty], [None, empty]):
            norm, coefficients = GradNorm(sizes_of(grads))(grads, 1.0)
            assert norm.item() == 0 and norm.shape == () and norm.dtype == torch.float32
            assert [c.tolist() for c in coefficients.values()] == [[1.0]] * (empty in grads[-1:])


@both_paths
def test_the_coefficient_clips_as_torch_does(kernel):
    with path(kernel) as device:
        grads = on(device, [*some_grads(), randn(9, torch.float64)])
        before = [grad.clone() for grad in grads]
        for max_norm in (0.0, 0.3, 1.0, 7.0, 1e6, math.inf):
            norm, coefficient = norm_of(grads, max_norm)
            assert norm.device == coefficient.device == grads[0].device
            assert coefficient.shape == (1,) and coefficient.dtype == torch.float32
            param = torch.nn.Parameter(torch.ones(1, device=device))
            param.grad = torch.ones(1, device=device)
            torch.nn.utils.clip_grads_with_norm_(param, max_norm, norm)
            assert torch.equal(coefficient, param.grad)
        assert all(torch.equal(grad, old) for grad, old in zip(grads, before, strict=True))


def test_norms_of_earlier_calls_are_kept():
    with path(True) as device:
        measure = GradNorm([3])
        norms = [measure([torch.full((3,), x, device=device)], norm_type=1)[0] for x in (1.0, 2.0)]
    assert [norm.item() for norm in norms] == [3.0, 6.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(norm_type=0), "norm_type must be 1, 2 or inf, got 0.0"),
        (dict(norm_type=3), "norm_type must be 1, 2 or inf, got 3.0"),
        (dict(norm_type=-math.inf), "norm_type must be 1, 2 or inf, got -inf"),
        (dict(max_norm=-1), "max_norm must be >= 0, got -1.0"),
        (dict(max_norm=math.nan), "max_norm must be >= 0, got nan"),
    ],
)
def test_other_norms_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        GradNorm([1])([torch.ones(1)], **options)


@pytest.mark.parametrize(
    ("grad", "error", "message"),
    [
        (lambda: torch.ones(3), ValueError, "gradient 1 must have 4 elements, got 3"),
        (lambda: torch.ones(4, dtype=torch.int32), TypeError, "got torch.int32; cast"),
        (lambda: torch.ones(4, dtype=torch.complex64), TypeError, "got torch.complex64; cast"),
        (lambda: torch.eye(2).to_sparse(), TypeError, "must be dense.*torch.sparse_coo"),
        (lambda: torch.eye(2).to_sparse_csr(), TypeError, "must be dense.*torch.sparse_csr"),
        (lambda: torch.ones(4, device="meta"), RuntimeError, "real device.*got one on meta"),
        (lambda: NVFP4Quantizer().quantize(torch.ones(16, 16)), TypeError, "got NVFP4Tensor; call"),
    ],
    ids=["size", "int32", "complex64", "coo", "csr", "meta", "quantized"],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_other_gradients_are_refused(grad, error, message):
    with pytest.raises(error, match=message):
        GradNorm([2, 4])([torch.ones(2), grad()])


def test_a_list_of_another_length_is_refused():
    with pytest.raises(ValueError, match="one entry per size, 2, got 1; pass None"):
        GradNorm([1, 1])([torch.ones(1)])


def test_dtensor_gradients_are_refused():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        grad = DTensor.from_local(torch.ones(4), mesh, [Replicate()])
        with pytest.raises(NotImplementedError, match="DTensor.*pass grad.to_local"):
            GradNorm([4])([grad])
    finally:
        torch.distributed.destroy_process_group()


def test_a_gradient_without_memory_of_its_own_is_refused():
    class Wrapper(torch.Tensor):
        __torch_dispatch__ = None

        @staticmethod
        def __new__(cls):
            return torch.Tensor._make_wrapper_subclass(cls, (4,), dtype=torch.float32)

    with pytest.raises(TypeError, match="got Wrapper without memory of its own; unwrap it"):
        GradNorm([4])([Wrapper()])


# On a GPU


def gpu_grads(n=200):
    """Gradients of several dtypes, sizes and alignments."""
    return [randn(1000 + 37 * i, DTYPES[i % 3], i, offset=i % 5).cuda() for i in range(n)]


@needs_cuda
@every_norm
def test_nothing_waits_for_the_device(norm_type):
    grads = gpu_grads()
    measure = GradNorm(sizes_of(grads))
    with refusing_waits():
        first, _ = measure(grads, 1.0, norm_type)
        moved, _ = measure([grad.clone() for grad in grads], 1.0, norm_type)
        partly, _ = measure([*grads[:-1], None], 1.0, norm_type)
    assert first.item() == moved.item() == true_norm(grads, norm_type).item()
    assert partly.item() == true_norm(grads[:-1], norm_type).item()


@needs_cuda
def test_a_call_launches_a_kernel_per_dtype_and_one():
    grads = gpu_grads()
    measure = GradNorm(sizes_of(grads))
    measure(grads, 1.0)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        measure(grads, 1.0)
        torch.cuda.synchronize()
    launched = [e.name for e in profile.events() if e.device_type.name == "CUDA"]
    assert len(launched) == 4, launched


@needs_cuda
def test_a_call_allocates_nothing_that_grows():
    grads = [torch.ones(2**20, device="cuda") for _ in range(64)]
    measure = GradNorm(sizes_of(grads))
    measure(grads, 1.0)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    norm, coefficients = measure(grads, 1.0)
    assert torch.cuda.max_memory_allocated() - before <= 2048
    assert norm.item() == 2.0**13


@needs_cuda
def test_devices_are_put_together():
    grads = some_grads()
    mixed = [grad if i % 2 else grad.cuda() for i, grad in enumerate(grads)]
    norm, coefficients = GradNorm(sizes_of(grads))(mixed, 0.5)
    assert norm.is_cuda and norm.item() == true_norm(grads, 2).item()
    assert {d.type for d in coefficients} == {"cuda", "cpu"}
    assert len({c.item() for c in coefficients.values()}) == 1


@needs_cuda
def test_elements_beyond_32_bit_indices_are_read():
    size = 2**31 + 5
    if torch.cuda.mem_get_info()[0] < 3 * size:
        pytest.skip(f"needs {3 * size / 2**30:.0f} GiB of GPU memory")
    grad = torch.zeros(size, dtype=torch.bfloat16, device="cuda")
    grad[-1] = grad[0] = 2.0
    assert norm_of([grad], norm_type=1.0)[0].item() == 4.0
