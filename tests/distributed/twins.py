"""Twins: one model in one process, and the same one over ranks, that take the same calls.

After each call, what ranks hold between them has the bits of the model in one process.
"""

import contextlib
import copy
import warnings
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable import checkpoint
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from fp4adam import (
    Float8BlockQuantizer,
    Float8Quantizer,
    FP4Adam,
    MasterWeightOptimizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    QuantizedTensor,
    Recipe,
    check_shards,
    quantize_model,
)
from fp4adam.distributed.dtensor import is_dtensor, like, local, part_for, sharded_dims
from fp4adam.distributed.tensor_parallel import gather_whole
from fp4adam.optim.state_tensor import SCALES
from helpers import assert_identical, random, value_of
from ranks import all_ranks, home

FORMATS = ("nvfp4", "mxfp8", "float8block", "float8")
OPTIONS = dict(lr=1e-2, weight_decay=0.1)
FULL = StateDictOptions(full_state_dict=True)
TO_RANK_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)

# By name weights have one direction, which leaves less to gather.
RECIPES = {
    "mxfp8": MXFP8Quantizer(),
    "float8block": Float8BlockQuantizer(),
    "float8block-fp32": Float8BlockQuantizer(force_pow_2_scales=False),
    "delayed": Float8Quantizer(scaling="delayed", amax_history_len=3),
    "nvfp4-rowwise": NVFP4Quantizer(columnwise=False),
    "nvfp4-gemm": NVFP4Quantizer(optimize_for_gemm=True),
    "mxfp8-rowwise": MXFP8Quantizer(columnwise=False),
    "mxfp8-gemm": MXFP8Quantizer(optimize_for_gemm=True),
    "nvfp4, fake": Recipe("nvfp4", activations="fake"),
    **{
        f"{name}, codes": Recipe(name, activations=True, gradients=True, emulate=True)
        for name in FORMATS
    },
}
STATES: dict[str, dict[str, Any]] = {
    "": {},
    "from dtype": {"quantize_from": "param_dtype"},
    "amsgrad": {"amsgrad": True},
    "bf16": {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16},
    "fp8": {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.float8_e4m3fn},
    "fp16 masters": {"master_weight_dtype": torch.float16},
    "16-bit rest": {"store_param_remainders": True},
    "int8": {"master_weight_dtype": torch.int8, "exp_avg_dtype": torch.bfloat16},
    "8bit": {"states": "8bit"},
    "factored": {"states": "factored"},
    "l2": {"of_others": {"decoupled_weight_decay": False}},
    "no masters": {"master_weights": False, "exp_avg_dtype": torch.bfloat16},
    "offloaded": {"offload_states": True},
    "released": {"releases": True},
    "any optimizer": {"optimizer_class": partial(MasterWeightOptimizer, optimizer_class=AdamW)},
}


def build(
    rows: int,
    cols: int,
    recipe: Any,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **options: Any,
) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(cols, rows), nn.Tanh(), nn.Linear(rows, cols, bias=False))
    model.to(dtype)
    if not model[0].weight.is_meta:
        model.to(home())
    return quantize_model(model, RECIPES.get(recipe, recipe), **options) if recipe else model


def distribute(model: nn.Sequential, layout: str) -> nn.Sequential:
    """The model over all ranks, in a layout with options after commas."""
    kind, *variants = layout.split(", ")
    mesh, options = all_ranks(), {}
    if kind == "alone":
        return model
    if kind == "ddp":
        if "views" in variants:
            options = dict(gradient_as_bucket_view=True, bucket_cap_mb=0.001)
        model = DistributedDataParallel(model, static_graph="static" in variants, **options)
        if "compiled" in variants:
            model.compile(backend="aot_eager")
        return model
    if kind == "replicated":
        mesh = init_device_mesh(home().type, (dist.get_world_size(),), mesh_dim_names=("r",))
        for module in (model[0], model[2], model):
            replicate(module, mesh=mesh)
        return model
    if kind == "hybrid":
        mesh = init_device_mesh(home().type, (2, 2), mesh_dim_names=("replicate", "shard"))
    if kind == "parallel":
        mesh = init_device_mesh(
            home().type, (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp")
        )
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        if mesh["dp"].size() == 1:
            return model
        mesh = mesh["dp"]
    if "kept" in variants:
        options["reshard_after_forward"] = False
    if "bfloat16" in variants:
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    if "offloaded" in variants:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=home().type == "cuda")
    for layer in (model[0], model[2]) if kind != "root" else ():
        if "recomputed" in variants:
            checkpoint(layer)
        if "compiled" in variants:
            layer.compile(backend="aot_eager", dynamic=False)  # symbolic codes take minutes
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    if "prefetched" in variants:
        model[0].set_modules_to_forward_prefetch([model[2]])
        model[2].set_modules_to_backward_prefetch([model[0]])
        model.set_unshard_in_backward(True)
    return model.to_empty(device=home()) if "meta" in variants else model


def part(param: Tensor, value: Tensor) -> Tensor:
    """What belongs to a parameter of a whole plain value, placed like it."""
    return like(param, part_for(param, value).contiguous())


def fixed_grads(model: nn.Module, seed: int) -> list[Tensor]:
    """Gradients of whole parameters, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(param.shape, generator=generator)
        .mul_(10.0 ** (i - 1))
        .to(param.device if not is_dtensor(param) else home(), param.dtype)
        for i, param in enumerate(model.parameters())
    ]


def set_grads(model: nn.Module, grads: list[Tensor | None]) -> None:
    """Give each parameter its part of its gradient."""
    for param, grad in zip(model.parameters(), grads, strict=True):
        if grad is not None:
            grad = part(param, grad.clone())
            grad = grad.to(local(param).device)
        param.grad = grad


PARTS = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
PARTS += ("_rowwise_gemm_scale_inv", "_columnwise_gemm_scale_inv", "_amax")


def bytes_of(param: Tensor) -> dict[str, Tensor]:
    """What a whole parameter consists of, and its value."""
    if not isinstance(param, QuantizedTensor):
        return {"value": param.detach().clone()}
    parts = {name: getattr(param, name) for name in PARTS}
    existing = {name: inner.clone() for name, inner in parts.items() if inner is not None}
    return {"value": param.detach().dequantize(param.dtype), **existing}


def whole_of(param: Tensor) -> Tensor:
    """A parameter, put together from the parts of all ranks."""
    if is_dtensor(param) and isinstance(local(param), QuantizedTensor):
        return gather_whole(param)
    return full(param.detach()).to(home())  # an offloaded one is on the CPU


def full(value: Tensor) -> Tensor:
    if not is_dtensor(value):
        return value
    # gloo gathers no int16, which remainders are in.
    is_int16 = value.dtype == torch.int16
    return value.int().full_tensor().short() if is_int16 else value.full_tensor()


def whole_bytes(model: nn.Module) -> list[dict[str, Tensor]]:
    return [bytes_of(whole_of(param)) for param in model.parameters()]


def gathered_bytes(model: nn.Module) -> list[dict[str, Tensor]]:
    """The bytes of whole parameters; FSDP2 gathers their values, or these bytes."""
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in modules:  # first, as it settles what has been written
        module.unshard()
    gathered = [bytes_of(local(param)) for param in model.parameters()]
    for module in modules:
        module.reshard()
    for found, expected in zip(gathered, whole := whole_bytes(model), strict=True):
        both = found.keys() & expected.keys()  # replicas do without what can be derived
        assert_identical({n: found[n] for n in both}, {n: expected[n] for n in both})
    return whole


def initialize(model: nn.Module, seed: int = 1) -> None:
    """Fill in parameters; shards take their part of what a whole one would get."""
    with torch.no_grad():
        for i, param in enumerate(model.parameters()):
            param.copy_(part(param, random(tuple(param.shape), 10 * seed + i, home().type, 0.1)))


def take_step(model: nn.Module, optimizer: Optimizer, grads: list[Tensor | None]) -> None:
    set_grads(model, grads)
    optimizer.step()
    optimizer.zero_grad()


def zero_redundancy_optimizer() -> type[Optimizer]:
    with warnings.catch_warnings():  # it compiles functions with torch.jit.script
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer


class Twin:
    """A model in one process and over ranks, with some of ``STATES``, by commas."""

    def __init__(
        self,
        layout: str,
        recipe: Any,
        rows: int,
        cols: int,
        states: str = "",
        dtype: torch.dtype = torch.bfloat16,
        **options: Any,
    ) -> None:
        if "grouped" in layout:
            options["scale_groups"] = [["0.weight", "2.weight"]]
        self.build = partial(build, rows, cols, recipe, dtype, **options)
        self.layout, self.states = layout, states
        # Ranks need not begin with the same parts: those of the first one are distributed.
        is_sent = layout.startswith(("parallel", "ddp"))
        self.model = self.distributed(dist.get_rank() % 2 if is_sent else 0)
        self.models = self.whole, self.model = self.build(), self.model
        if "meta" in layout:
            load_values(self, 0)
        self.optimizers = [*map(self.optimizer_of, self.models)]

    def distributed(self, seed: int) -> nn.Module:
        with torch.device("meta" if "meta" in self.layout else "cpu"):
            return distribute(self.build(seed=seed), self.layout)

    def renew(self) -> None:
        """Another model over ranks, of other values, with its optimizer."""
        self.models = self.whole, self.model = self.whole, self.distributed(9)
        self.optimizers[1] = self.optimizer_of(self.model)

    def optimizer_of(self, model: nn.Module) -> Optimizer:
        settings: dict[str, Any] = dict(OPTIONS)
        for name in self.states.split(", "):
            settings |= STATES[name]
        releases = settings.pop("releases", False)
        if model is self.whole:
            settings.pop("offload_states", None)
        kind = settings.pop("optimizer_class", FP4Adam)
        if "zero" in self.layout and model is self.model:
            return zero_redundancy_optimizer()(model.parameters(), kind, **settings)
        first, *others = model.parameters()
        groups = [{"params": [first]}, {"params": others, **settings.pop("of_others", {})}]
        optimizer = kind(groups, **settings)
        if releases and model is self.model:
            self.accumulate = optimizer.enable_gradient_release().accumulate
        return optimizer

    def params(self, i: int) -> list[Tensor]:
        """Both of a parameter."""
        return [[*model.parameters()][i % 3] for model in self.models]

    def step(self, grads: list[Tensor | None]) -> None:
        shards = [*map(local, self.model.parameters())]
        versions = [shard._version for shard in shards]
        shared = [getattr(shard, "_shared", None) for shard in shards]
        # Those of scale groups, and written ones, may be quantized without a gradient, too.
        free = [x is not None and (x.scale_group or x.unsettled) for x in shared]
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            take_step(model, optimizer, grads)
        for shard, version, grad, is_free in zip(shards, versions, grads, free, strict=True):
            is_written = shard._version > version  # which autograd sees
            assert is_written == (grad is not None) or is_free and is_written
        self.check(gathers=False)

    @torch.no_grad()
    def check(self, where: str = "", gathers: bool = True) -> None:
        """What ranks hold, or else each rank by itself, is what one process has, bit for bit."""
        if "bfloat16" in self.layout:
            return  # activations are rounded, too
        for (name, param), whole in zip(
            self.model.named_parameters(), self.whole.parameters(), strict=True
        ):
            if gathers:
                found, value = bytes_of(whole_of(param)), bytes_of(whole)
                assert_identical(found, {key: value[key] for key in found}, f"{where} {name}")
            else:  # what the others hold is checked by them, and by the next call that gathers
                found, value = value_of(local(param)), part_for(param, value_of(whole))
                assert_identical(found.to(home()), value.contiguous(), f"{where} {name}")
        if "zero" in self.layout:
            return  # each rank has the states of some parameters
        alone, own = (optimizer.state_dict()["state"] for optimizer in self.optimizers)
        assert own.keys() == alone.keys(), where
        for i, param in enumerate(self.model.parameters()):
            if i not in alone:
                continue
            assert own[i].keys() == alone[i].keys(), where
            # Scales are of each rank's memory.
            for key in alone[i].keys() - {*SCALES.values()}:
                mine, expected = local(own[i][key]), part_for(param, alone[i][key])
                assert_identical(mine.to(expected.device), expected.contiguous(), f"{where} {key}")


# Calls that both take; numbers follow from the seed.

Call = Callable[[Twin, int], None]


def step(twin: Twin, seed: int) -> None:
    twin.step(fixed_grads(twin.whole, seed))


def freeze(twin: Twin, seed: int) -> None:
    """A step without a gradient of one parameter."""
    grads: list[Tensor | None] = [*fixed_grads(twin.whole, seed)]
    grads[seed % 3] = None
    twin.step(grads)


def clip(twin: Twin, seed: int) -> None:
    for model, optimizer in zip(twin.models, twin.optimizers, strict=True):
        set_grads(model, fixed_grads(twin.whole, seed))
        norm_type = (2.0, 1.0, float("inf"))[seed % 3]
        grads = [p.grad for p in model.parameters()]
        expected = nn.utils.get_total_norm(grads, norm_type)
        norm = optimizer.clip_grad_norm_(1.0, norm_type)
        torch.testing.assert_close(full(norm), full(expected).to(full(norm)), rtol=1e-5, atol=0)
    # The last bits of a norm depend on the number of ranks.
    clippings = [optimizer._whole.clipping for optimizer in twin.optimizers]
    clippings[0].coefficient = clippings[1].coefficient
    for optimizer in twin.optimizers:
        optimizer.step()
        optimizer.zero_grad()
    twin.check()


def poison(twin: Twin, seed: int) -> None:
    """The largest weight becomes NaN, which is on one rank."""
    grads = fixed_grads(twin.whole, seed)
    largest = twin.whole[0].weight.dequantize(torch.float32).abs().argmax()
    grads[0].view(-1)[largest] = float("nan")
    twin.step(grads)


def train(twin: Twin, seed: int) -> None:
    """The same two batches on every rank, so that the mean gradient is exact."""
    generator = torch.Generator().manual_seed(seed)
    batches = torch.randn(2, 8, twin.whole[0].in_features, generator=generator)
    losses = []
    for model, optimizer in zip(twin.models, twin.optimizers, strict=True):
        releases = model is twin.model and "released" in twin.states
        torch.manual_seed(seed)  # NVFP4 rounds gradients at random
        for i, x in enumerate(batches.to(home(), twin.whole[0].bias.dtype)):
            # Gradients are added before they are reduced, or after that.
            later = i == 0 and seed % 2 == 0
            adds: Any = contextlib.nullcontext()
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(i == 1 or later)
                adds = twin.accumulate() if releases and later else adds
            elif model is not twin.whole and i == 0 and "static" not in twin.layout:
                adds = model.no_sync()
            with adds:
                losses.append(model(x).square().mean())
                losses[-1].backward()
        assert all((param.grad is None) == releases for param in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    alone, own = losses[:2], losses[2:]
    tolerance = 0.02 if "bfloat16" in twin.layout else 0
    torch.testing.assert_close([x.float() for x in own], alone, rtol=tolerance, atol=0)
    twin.check()


def gather(twin: Twin, seed: int) -> None:
    """What FSDP2 gathers: values, or codes of quantized matmuls."""
    if not isinstance(twin.model, FSDPModule) or twin.layout in ("parallel", "sharded, bfloat16"):
        return
    gathered_bytes(twin.model)
    twin.check()
    param = twin.whole[0].bias
    with torch.inference_mode():
        twin.model(torch.ones(2, twin.whole[0].in_features, device=home()).to(param.dtype))
        twin.model.reshard()


def _random(twin: Twin, i: int, seed: int) -> Tensor:
    shape, dtype = twin.params(i)[0].shape, twin.params(i)[0].dtype
    value = random(tuple(shape), seed, home().type, 10.0 ** (seed % 3 - 1)).to(dtype)
    return value.t().contiguous().t()  # in another layout


@torch.no_grad()
def overwrite(twin: Twin, seed: int) -> None:
    value = _random(twin, seed, seed)
    for param in twin.params(seed):
        param.copy_(part(param, value))


@torch.no_grad()
def overwrite_parts(twin: Twin, seed: int) -> None:
    value = _random(twin, seed, seed)
    for param in twin.params(seed):
        local(param).copy_(part_for(param, value))


@torch.no_grad()
def fill(twin: Twin, seed: int) -> None:
    for param in twin.params(seed):
        param.fill_(0.01 * seed)


@torch.no_grad()
def overwrite_elsewhere(twin: Twin, seed: int) -> None:
    """Some ranks write the values that they have, after which masters would go on."""
    whole, param = twin.params(seed)
    is_quantized = isinstance(whole, QuantizedTensor)
    old = whole.dequantize(torch.float32) if is_quantized else whole.detach().clone()
    value = part(param, old)
    if writes(param):
        local(value).copy_(part_for(param, _random(twin, seed, seed)))
    param.copy_(value)
    whole.copy_(full(value))
    for optimizer in twin.optimizers:
        optimizer.reset_master_weights()


def writes(param: Tensor) -> bool:
    """Whether this rank is one of those that write to its part; replicas of a part are alike."""
    dims = sharded_dims(param)
    return not dims or sum(map(param.device_mesh.get_local_rank, dims)) % 2 == 1


@torch.no_grad()
def write_states(twin: Twin, seed: int) -> None:
    """Some ranks write to a moment, and have a master in another layout."""
    params = twin.params(0)
    alone, own = (each.state[param] for each, param in zip(twin.optimizers, params, strict=True))
    of_whole, moment = alone["exp_avg"], own["exp_avg"]
    if writes(params[1]):
        local(moment).mul_(0.5)
        master = local(own.get("master_param", moment))
        if master.dtype == torch.float32:
            master.data = master.t().contiguous().t()
    of_whole.copy_(full(moment.to(home())))


def load_values(twin: Twin, seed: int) -> None:
    """Plain values of the nominal dtype, as a checkpoint of plain training has them."""
    names = [name for name, _ in twin.whole.named_parameters()]
    values = {name: _random(twin, i, seed) * 0.1 for i, name in enumerate(names)}
    for model in twin.models:
        model.load_state_dict({n: part(p, values[n]) for n, p in model.named_parameters()})


def reload(twin: Twin, seed: int) -> None:
    for model, optimizer in zip(twin.models, twin.optimizers, strict=True):
        model.load_state_dict(model.state_dict())
        optimizer.load_state_dict(saved := copy.deepcopy(optimizer.state_dict()))
        torch.utils._pytree.tree_map_only(Tensor, Tensor.zero_, saved["state"])  # nothing is shared


def load_whole(twin: Twin, seed: int, put: StateDictOptions = FULL) -> None:
    """Other weights and states in one process; ranks take their parts of what it would save."""
    take_step(twin.whole, twin.optimizers[0], fixed_grads(twin.whole, seed))
    set_states(twin, copy.deepcopy(get_state_dict(twin.whole, twin.optimizers[0])), put)


def set_states(twin: Twin, states: Any, options: StateDictOptions) -> None:
    if options.broadcast_from_rank0 and dist.get_rank():
        states = {}, {}
    set_model_state_dict(twin.model, states[0], options=options)
    set_optimizer_state_dict(twin.model, twin.optimizers[1], states[1], options=options)
    twin.check()


def transfer(
    twin: Twin, seed: int, get: StateDictOptions, put: StateDictOptions | None = None
) -> None:
    """Other model and optimizer over ranks take what the last ones hold."""
    alone = twin.optimizers[0]  # loading rounds masters to int8 that no step has rounded
    alone.load_state_dict(copy.deepcopy(alone.state_dict()))
    states = get_state_dict(twin.model, twin.optimizers[1], options=get)
    twin.renew()
    set_states(twin, states, put or get)


def compact(twin: Twin, seed: int) -> None:
    """States in their own dtypes, which are refused where each rank has other scales."""
    optimizer, weights = twin.optimizers[1], twin.model.state_dict()
    if any(name in state for state in optimizer.state.values() for name in SCALES.values()):
        with pytest.raises(NotImplementedError, match="got .*(int8 masters|_scale)"):
            optimizer.compact_state_dict()
        return
    twin.renew()
    twin.model.load_state_dict(weights)
    twin.optimizers[1].load_state_dict(optimizer.compact_state_dict())
    twin.check()


def model_last(twin: Twin, seed: int) -> None:
    """The model is loaded after its optimizer, before a forward pass or a step."""
    optimizer, weights = twin.optimizers[1], twin.model.state_dict()
    twin.renew()
    twin.optimizers[1].load_state_dict(optimizer.state_dict())
    twin.model.load_state_dict(weights)
    if seed % 2:
        gather(twin, seed)
    twin.check()


def back(twin: Twin, seed: int) -> None:
    """What was saved before a step is loaded after it: torch loads the optimizer's state first."""
    both = [*zip(twin.models, twin.optimizers, strict=True)]
    saved = [copy.deepcopy(get_state_dict(model, optimizer)) for model, optimizer in both]
    step(twin, seed)
    for (model, optimizer), (weights, states) in zip(both, saved, strict=True):
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    if twin.states not in ("int8", "8bit"):  # whose remainders complete the codes that there are
        assert_identical(get_model_state_dict(twin.whole), saved[0][0])


def other_model(twin: Twin, seed: int) -> None:
    """Another model that is loaded after the optimizer restarts the masters."""
    others = twin.build(seed=7), twin.distributed(7)
    for model, optimizer, other in zip(twin.models, twin.optimizers, others, strict=True):
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        model.load_state_dict(other.state_dict())


def rounded_weights(twin: Twin, seed: int) -> None:
    """Masters beside weights that are these in fewer bits, in any order: masters lose nothing."""
    for dtype, model_first in product((torch.bfloat16, torch.float32), (True, False)):
        states = copy.deepcopy(twin.optimizers[0].state_dict())
        weights = {
            name: state["master_param"].to(dtype)
            for (name, _), state in zip(
                twin.whole.named_parameters(), states["state"].values(), strict=True
            )
        }
        twin.renew()
        if not model_first:
            twin.optimizers[1].load_state_dict(states)
        set_model_state_dict(twin.model, weights, options=FULL)
        if model_first:
            twin.optimizers[1].load_state_dict(states)
            twin.check()
        step(twin, seed)


def move(twin: Twin, seed: int) -> None:
    for model in twin.models:
        model._apply(lambda tensor: tensor.to(home(), copy=True))


CALLS: dict[str, Call] = {
    call.__name__: call
    for call in (
        *(step, freeze, clip, poison, train, gather, reload, load_whole, move),
        *(overwrite, overwrite_parts, overwrite_elsewhere, fill, load_values, write_states),
        *(compact, model_last, back, other_model, rounded_weights),
    )
}
# The functions of torch.distributed.checkpoint.state_dict.
TRANSFERS: dict[str, Call] = {
    "as it is": partial(transfer, get=StateDictOptions()),
    "to the host": partial(transfer, get=StateDictOptions(cpu_offload=True)),
    "flattened": partial(transfer, get=StateDictOptions(flatten_optimizer_state_dict=True)),
    "full": partial(transfer, get=FULL),
    "from rank 0": partial(transfer, get=TO_RANK_0, put=FROM_RANK_0),
    "whole, from rank 0": partial(load_whole, put=FROM_RANK_0),
}
CALLS |= TRANSFERS


def run_calls(twin: Twin, calls: list[str] | list[tuple[str, int]], where: str = "") -> None:
    for i, each in enumerate(calls):
        name, seed = (each, i) if isinstance(each, str) else each
        try:
            CALLS[name](twin, seed)
        except Exception as error:
            raise AssertionError(f"{where}, call {i} of {calls}: {error}") from error
    twin.check(where)
    check_shards(twin.model)
