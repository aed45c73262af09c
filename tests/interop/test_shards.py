"""Shards of other packages' tensors on several ranks; stand-ins play Transformer Engine."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.nn import Parameter
from torch.nn.functional import linear

from fp4adam import Float8Quantizer, FP4Adam, MasterWeightOptimizer, MXFP8Quantizer, Quantizer
from fp4adam.distributed.dtensor import like
from helpers import RECIPES, random
from ranks import all_ranks, run_ranks, use_kernels
from te_stand_ins import Wrapper, assert_same, stand_in, te_tensor

# World size and shape of each case.
CASES = {
    "cut": ("float8", 2, (48, 32)),
    "whole": ("float8", 2, (64, 32)),
    "uneven": ("float8", 3, (32, 48)),
    "empty": ("float8", 3, (2, 16, 32)),
    "nvfp4": ("nvfp4", 2, (64, 32)),
    "nvfp4-empty": ("nvfp4", 3, (2, 16, 32)),
    "mxfp8": ("mxfp8", 2, (64, 32)),
    "float8block": ("float8block", 2, (256, 32)),
}
OPTIONS = dict(lr=1e-2, weight_decay=0.1)


def chunk_of(x: Tensor) -> slice:
    chunk = -(-x.shape[0] // dist.get_world_size())
    first = min(dist.get_rank() * chunk, x.shape[0])
    return slice(first, min(first + chunk, x.shape[0]))


def distributed(local: Wrapper, value: Tensor, placement: Placement = Shard(0)) -> Parameter:  # noqa: B008
    """A DTensor of a value, of which a stand-in is the part of this rank."""
    meta = TensorMeta(value.shape, value.stride(), value.dtype)
    spec = DTensorSpec(all_ranks(), (placement,), tensor_meta=meta)
    return Parameter(DTensor(local, spec, requires_grad=False))


def sharded(quantizer: Quantizer, value: Tensor) -> Parameter:
    """A stand-in per rank: as Transformer Engine quantizes the rows of each."""
    local = value[chunk_of(value)]
    own = quantizer.make_empty(local.shape, dtype=value.dtype)
    matrix = local.reshape(-1, local.shape[-1])
    known = {}
    if quantizer.layout.tensor_scale == "current":
        known["amax"] = own._amax.copy_(value.float().abs().amax())
    if len(matrix):
        quantizer.write(matrix.contiguous(), own.inner, **known)
    return distributed(stand_in(own), value)


def set_grads(params: list[Tensor], step: int) -> None:
    for i, param in enumerate(params):
        grad = random(tuple(param.shape), 10 * step + i).to(param.dtype)
        if isinstance(param, DTensor):
            grad = like(param, grad[chunk_of(grad)].contiguous())
        param.grad = grad


def step_shards(rank: int, name: str, shape: tuple, kernels: bool, optimizer_class: str) -> None:
    """Each rank has the bytes of its rows of a tensor that one process trains."""
    quantizer = RECIPES[name]
    values = [random(shape, i, scale=0.1).bfloat16() for i in range(2)]
    wholes = [Parameter(quantizer.quantize(value)) for value in values]
    shards = [sharded(quantizer, value) for value in values]
    for shard, whole in zip(shards, wholes, strict=True):
        assert_same_bytes(shard, whole)
    if kernels:
        use_kernels()
    calls = []
    all_reduce = dist.all_reduce
    dist.all_reduce = lambda *args, **kwargs: (calls.append(args[0]), all_reduce(*args, **kwargs))
    make = FP4Adam
    if optimizer_class == "MasterWeightOptimizer":
        make = partial(MasterWeightOptimizer, optimizer_class=torch.optim.AdamW)
    optimizers = [make(params, **OPTIONS) for params in (wholes, shards)]
    for step in range(3):
        for optimizer, params in zip(optimizers, (wholes, shards), strict=True):
            set_grads(params, step)
            calls.clear()
            optimizer.step()
        # One for all parameters.
        assert len(calls) == (quantizer.layout.tensor_scale == "current")
        for shard, whole in zip(shards, wholes, strict=True):
            master = optimizers[0].state[whole]["master_param"]
            own = optimizers[1].state[shard]["master_param"]
            assert isinstance(own, DTensor) and own.shape == master.shape
            assert_same(own._local_tensor, master[chunk_of(master)], "master_param")
            assert_same_bytes(shard, whole)


def assert_same_bytes(shard: Parameter, whole: Parameter) -> None:
    """Codes of all formats, and the scale or amax of those with one per tensor."""
    source, rows = shard._local_tensor, chunk_of(whole)
    codes = source._data if hasattr(source, "_data") else source._rowwise_data
    expected = whole.rowwise_data.view(*whole.shape[:-1], -1)[rows]
    assert_same(codes.view(expected.shape), expected, "codes")
    if hasattr(source, "_data"):
        assert_same(source._scale_inv, whole.rowwise_scale_inv, "scale")
        if not source._transpose_invalid:
            assert_same(source._transpose, source._data.view(-1, whole.shape[-1]).t(), "transpose")
    elif getattr(source, "_amax_rowwise", None) is not None:
        assert_same(source._amax_rowwise, whole.amax_rowwise, "amax")
        assert_same(source._amax_columnwise, whole.amax_rowwise, "amax")


@pytest.mark.parametrize(
    ("case", "kernels", "optimizer"),
    [
        ("cut", False, "FP4Adam"),
        ("nvfp4-empty", False, "FP4Adam"),
        ("nvfp4", True, "FP4Adam"),
        ("empty", False, "MasterWeightOptimizer"),
        *(
            pytest.param(case, kernels, optimizer, marks=pytest.mark.exhaustive)
            for optimizer, kernels, cases in (
                ("FP4Adam", False, "uneven empty mxfp8 float8block"),
                ("FP4Adam", True, "cut whole empty"),
                ("MasterWeightOptimizer", False, "uneven mxfp8 float8block"),
            )
            for case in cases.split()
        ),
    ],
)
def test_shards_have_the_bytes_of_one_process(case, kernels, optimizer):
    name, world_size, shape = CASES[case]
    if kernels and torch.cuda.is_available():
        pytest.skip("stand-ins are on the CPU, and there is no interpreter; benchmarks/te_fsdp.py")
    run_ranks(step_shards, world_size, name, shape, kernels, optimizer)


def start_from_initial_values(rank: int) -> list:
    """Initial values are kept by the local tensors; under a scale of all ranks."""
    value = random((48, 32), 0).bfloat16()
    shard = sharded(Float8Quantizer(), value)
    kept, local = [value[chunk_of(value)]], shard._local_tensor
    local.get_high_precision_init_val = lambda: kept[0] if kept else None
    local.clear_high_precision_init_val = kept.clear
    optimizer = FP4Adam([shard], **OPTIONS)
    optimizer.initialize_state(shard)
    master = optimizer.state[shard]["master_param"]._local_tensor.clone()
    assert torch.equal(master, kept[0].float())
    set_grads([shard], 0)
    optimizer.step()
    assert not kept
    return [master.abs().max().item(), local._scale_inv.item()]


def test_masters_start_from_the_initial_values_of_shards():
    first, second = run_ranks(start_from_initial_values, 2)
    assert first[0] != second[0] and first[1] == second[1]


def refuse_shards_that_cut_blocks(rank: int) -> None:
    value = random((96, 32), 0)
    whole = distributed(stand_in(MXFP8Quantizer().quantize(value)), value, Replicate())
    optimizer = FP4Adam([whole], **OPTIONS)
    whole.grad = like(whole, random((96, 32), 1))
    optimizer.step()
    expected = MXFP8Quantizer().quantize(optimizer.state[whole]["master_param"]._local_tensor)
    assert_same(whole._local_tensor._rowwise_data, expected.rowwise_data, "codes")
    with pytest.raises(NotImplementedError, match="fully_shard alone, to have factored .*96, 32"):
        FP4Adam([sharded(Float8Quantizer(), value)], states="factored")
    local = stand_in(MXFP8Quantizer().quantize(value[: 64 - 32 * rank]))
    with pytest.raises(ValueError, match=r"MXFP8Tensor must have multiples of 32 rows.*got 48"):
        FP4Adam([distributed(local, value)])
    with pytest.raises(ValueError, match=r"must be multiples of 32, got shape \(80, 32\)"):
        FP4Adam([distributed(local, random((80, 32), 0))])
    with pytest.raises(NotImplementedError, match=r"by fully_shard along one.*Shard\(dim=1"):
        FP4Adam([distributed(local, value, Shard(1))])


def test_replicas_are_stepped_and_shards_that_cut_blocks_refused_on_every_rank():
    run_ranks(refuse_shards_that_cut_blocks, 2)


class Decode(torch.autograd.Function):
    """The values of a stand-in for Transformer Engine's Float8Tensor."""

    @staticmethod
    def forward(ctx, weight: Tensor) -> Tensor:
        return weight.dequantize(torch.float32)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad.bfloat16()


class Layer(nn.Module):
    """A linear layer, as those of Transformer Engine read a Float8Tensor."""

    def __init__(self, quantizer: Quantizer, rows: int, cols: int, seed: int) -> None:
        super().__init__()
        self.weight = te_tensor(quantizer, random((rows, cols), seed, scale=0.1).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(linear(x, Decode.apply(self.weight)))


def train_with_fsdp(rank: int, scaling: str, reshard: bool, releases: bool) -> None:
    quantizer = Float8Quantizer(scaling=scaling, columnwise=False)
    models = [nn.Sequential(*[Layer(quantizer, 48, 48, i) for i in range(2)]) for _ in range(2)]
    for layer in models[1]:
        fully_shard(layer, mesh=all_ranks(), reshard_after_forward=reshard)
    fully_shard(models[1], mesh=all_ranks())
    optimizers = [FP4Adam(model.parameters(), **OPTIONS) for model in models]
    if releases:
        optimizers[1].enable_gradient_release()
    losses: list[list[float]] = [[], []]
    for step in range(4):
        x = random((8, 48), 100 + step)
        for model, optimizer, found in zip(models, optimizers, losses, strict=True):
            loss = (model(x) - x.roll(1, dims=1)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        for whole, part in zip(*(model.parameters() for model in models), strict=True):
            local, rows = part._local_tensor, chunk_of(whole)
            assert type(local) is type(whole.data) and len(local) == 24
            assert_same(local._data, whole._data[rows], "codes")
            assert_same(local._scale_inv, whole._scale_inv, "scale")
            if scaling == "delayed":
                # Transformer Engine reduces amaxes over all ranks in the next forward pass.
                amax = local._quantizer.amax.clone()
                dist.all_reduce(amax, dist.ReduceOp.MAX)
                assert_same(amax, whole._quantizer.amax, "amax")
    assert losses[0] == losses[1] and losses[0][-1] < losses[0][0]


@pytest.mark.parametrize(
    ("scaling", "reshard", "releases"),
    [
        ("current", True, False),
        ("delayed", True, False),
        *(
            pytest.param("current", *how, marks=pytest.mark.exhaustive)
            for how in ((False, False), (True, True))
        ),
    ],
)
def test_fsdp_trains_as_one_process_bit_for_bit(scaling, reshard, releases):
    run_ranks(train_with_fsdp, 2, scaling, reshard, releases)
