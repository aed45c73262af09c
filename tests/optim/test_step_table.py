"""Steps and what users do between them: case x scenario x path, against one oracle in plain torch.

A case says what is stored. A move says what happens between two steps, or in place of one: the same
verbs of a run of ``FP4Adam`` and of ``step_reference.Oracle``, and what a framework does to the run
alone. A scenario is a sequence from the start: each move between steps, some before the first one,
and some more; random programs take moves in any order. In the end, every bit of parameters and
states is compared. A new situation is a new move, of 5 to 15 lines.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn import Parameter
from torch.optim import AdamW
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

from fp4adam import (
    Float8BlockQuantizer,
    Float8Quantizer,
    FP4Adam,
    FusedAdam,
    MasterWeightOptimizer,
    MXFP4Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    QuantizedTensor,
    use_plain_state_dict,
)
from fp4adam.optim.te_layout import stored_state
from fp4adam.tensors import backend
from helpers import WithGradient, addresses, assert_identical, random, through_a_file
from late_link import LateLink, offload_to
from step_reference import Cell, Oracle, quantize

QUANTIZERS = {  # by the names in format_reference
    "nvfp4_2d": NVFP4Quantizer(),
    "nvfp4_1d": NVFP4Quantizer(two_dimensional=False),
    "mxfp8": MXFP8Quantizer(),
    "mxfp8_2d": MXFP8Quantizer(two_dimensional=True),
    "mxfp4": MXFP4Quantizer(),
    "float8_fp32": Float8Quantizer(),
    "float8_delayed": Float8Quantizer(scaling="delayed", amax_history_len=3),
    "fp8block_2d_pow2": Float8BlockQuantizer(),
    "fp8block_2d_fp32": Float8BlockQuantizer(force_pow_2_scales=False),
    "fp8block_1d_pow2": Float8BlockQuantizer(two_dimensional=False),
}
# exp_avg, exp_avg_sq, masters of quantized weights, masters of BF16 parameters.
STATES = {
    "32bit": ("float32", "float32", "float32", "float32"),
    "16bit": ("bfloat16", "bfloat16", "float16", "float16"),
    "8bit": ("float8", "float8", "int8", "remainder"),
    "fp16 moments": ("float16", "float16", "float32", "float32"),
    "fp8, fp32": ("float8", "float32", "float32", "remainder"),
    "fp8 without masters": ("float8", "float8", "none", "none"),
    "factored": ("float8", "factored", "int8", "remainder"),
    "factored without masters": ("bfloat16", "factored", "none", "none"),
}
DTYPES = {"float8": torch.float8_e4m3fn, "int8": torch.int8, "factored": "factored"} | {
    name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")
}
# What the table of options varies; learning rates are large, so that codes change.
ADAMW = dict(lr=1e-2, weight_decay=0.1)
L2 = dict(lr=3e-3, adam_w_mode=False, betas=(0.0, 0.4))
AMSGRAD = dict(lr=1e-2, amsgrad=True)
ASCENDING = dict(lr=1e-2, maximize=True)
UNCORRECTED = dict(lr=1e-2, bias_correction=False, eps=1e-3, betas=(0.5, 0.9))
THROUGH_DTYPE = dict(lr=1e-2, quantize_from="param_dtype")


@dataclasses.dataclass(frozen=True)
class Case:
    """What an optimizer steps, and how it stores it: names of ``QUANTIZERS`` and ``STATES``."""

    format: str
    states: str = "32bit"
    grad_dtype: torch.dtype | None = None  # that of decoupled gradients
    options: Any = dataclasses.field(default_factory=lambda: ADAMW)
    shapes: tuple[tuple[int, int], ...] = ((32, 64), (64, 32))
    sharing: int = 0  # how many weights share a scale: both or none

    @functools.cached_property
    def arguments(self) -> dict[str, Any]:
        exp_avg, exp_avg_sq, master, plain = STATES[self.states]
        stored = dict(exp_avg_dtype=DTYPES[exp_avg], exp_avg_sq_dtype=DTYPES[exp_avg_sq])
        if master != "none":
            stored["master_weight_dtype"] = DTYPES[master]
        return self.options | stored | dict(
            master_weights=master != "none",
            store_param_remainders=plain == "remainder",
            use_decoupled_grad=self.grad_dtype is not None,
        )  # fmt: skip


FP16, FP32 = torch.float16, torch.float32
RAGGED = ((130, 20), (5, 3))
# By pairs: each format, storage, gradient dtype and set of options meets most of the others'.
CASES = {
    "nvfp4": Case("nvfp4_2d"),
    "nvfp4 8bit": Case("nvfp4_2d", "8bit", None, THROUGH_DTYPE),
    "nvfp4 16bit": Case("nvfp4_2d", "16bit", FP32, L2, ((16, 80), (48, 16))),
    "nvfp4 1d": Case("nvfp4_1d", "fp16 moments", FP16, ASCENDING, sharing=2),
    "nvfp4 1d 8bit": Case("nvfp4_1d", "8bit", FP32, UNCORRECTED),
    "mxfp8": Case("mxfp8", "fp8, fp32", None, AMSGRAD),
    "mxfp8 none": Case("mxfp8", "fp8 without masters", FP16),
    "mxfp8 2d 8bit": Case("mxfp8_2d", "8bit", FP16, L2),
    "nvfp4 factored": Case("nvfp4_2d", "factored", None, UNCORRECTED, ((80, 64), (80, 32))),
    "factored": Case("mxfp8", "factored without masters", FP32, ADAMW, ((32, 320), (288, 32))),
    "block factored": Case("fp8block_2d_pow2", "factored", FP16, ASCENDING, ((130, 32), (5, 32))),
    "mxfp4 16bit": Case("mxfp4", "16bit", None, THROUGH_DTYPE),
    "mxfp4 8bit": Case("mxfp4", "8bit", FP32, ASCENDING),
    "float8": Case("float8_fp32", "fp16 moments", FP32, THROUGH_DTYPE, RAGGED, 2),
    "nvfp4 shared": Case("nvfp4_2d", "8bit", None, ADAMW, ((32, 64), (16, 64)), 2),
    "float8 8bit": Case("float8_fp32", "8bit", None, UNCORRECTED, sharing=2),
    "float8 delayed": Case("float8_delayed", "32bit", None, UNCORRECTED, RAGGED),
    "float8block": Case("fp8block_2d_pow2", "32bit", FP32, AMSGRAD, RAGGED),
    "float8block none": Case("fp8block_2d_pow2", "fp8 without masters", None, L2, RAGGED),
    "float8block fp32": Case("fp8block_2d_fp32", "16bit", FP16, UNCORRECTED, RAGGED),
    "float8block 1d": Case("fp8block_1d_pow2", "8bit", None, ADAMW, RAGGED),
}


class Run:
    """A model with two quantized weights, a BF16 and an FP32 parameter, and its optimizer."""

    turn = 0  # what seeds of moves start from, which choose among their variants

    def __init__(self, case: Case, device: str, path: str) -> None:
        if path == "any optimizer":
            case = dataclasses.replace(case, states="32bit", grad_dtype=None)
        self.case, self.device, self.path = case, device, path
        self.model = nn.Module()
        for i, shape in enumerate(case.shapes):
            start = random(shape, i, device, scale=0.1).bfloat16()
            weight = Parameter(QUANTIZERS[case.format].quantize(start))
            if i == 0:
                weight._high_precision_init_val = start
            self.model.register_parameter(f"weight{i}", weight)
        self.model.narrow = Parameter(random((41,), 7, device).bfloat16())
        self.model.wide = Parameter(random((5, 7), 8, device))
        self.optimizer = self.optimizer_of(self.params)

    def optimizer_of(self, params: list[Parameter]) -> Any:
        options = self.case.arguments | dict(offload_states=self.path == "offload")
        groups = iter([self.params[:2]]) if self.case.sharing else None
        optimizer = FP4Adam(params, scale_groups=groups, **options)  # which forms the groups
        if self.path == "any optimizer":  # of which FP4Adam is one, on FP32 masters
            return MasterWeightOptimizer(params, FP4Adam, **self.case.options)
        return optimizer

    @property
    def params(self) -> list[Parameter]:
        return [*self.model.parameters()]

    def grads(self, seed: int, absent: tuple[int, ...] = (), scale: float = 1.0) -> list:
        """Gradients of a step, in the dtype of the case."""
        grads: list[Tensor | None] = []
        for i, param in enumerate(self.params):
            dtype = self.case.grad_dtype or param.dtype
            size = scale * 10.0 ** (seed % 3 - 1)
            grad = random(tuple(param.shape), 1000 * seed + i, scale=size).to(dtype)
            grads.append(None if i in absent else grad)
        return grads

    def set_grads(self, grads: list[Tensor | None]) -> None:
        name = "grad" if self.case.grad_dtype is None else "decoupled_grad"
        for param, grad in zip(self.params, grads, strict=True):
            setattr(param, name, None if grad is None else grad.to(param.device, copy=True))

    def grad(self, i: int) -> Tensor:
        return getattr(self.params[i], "grad" if self.case.grad_dtype is None else "decoupled_grad")

    def step(self, grads: list[Tensor | None]) -> None:
        if self.path == "release":
            self.release(grads)
        else:
            self.set_grads(grads)
        self.optimizer.step()

    def release(self, grads: list[Tensor | None]) -> None:
        """The optimizer, or a copy of one, steps parameters in their backward passes."""
        if self.optimizer._release is None:
            self.optimizer.enable_gradient_release()
        self.optimizer.zero_grad()
        for param, grad in zip(self.params, grads, strict=True):
            if grad is not None:
                WithGradient.apply(param, grad.to(self.device)).backward()
        self.left = [param for param in self.params if param.grad is not None]

    def states(self) -> list[dict[str, Tensor]]:
        """As they are stored, once there have been steps."""
        return [stored_state(self.optimizer.state.get(param, {})) for param in self.params]

    @torch.no_grad()
    def overwrite(self, values: list[Tensor | None]) -> None:
        for param, value in zip(self.params, values, strict=True):
            if value is not None:
                param.copy_(value)

    def contents(self) -> list[dict[str, Any]]:
        """Parameters, states as they are stored and step counts, on the CPU."""
        save = getattr(self.optimizer, "compact_state_dict", self.optimizer.state_dict)
        states = save()["state"]
        found = []
        for i, param in enumerate(self.params):
            fields = {"": param.detach()}
            if isinstance(param, QuantizedTensor):
                names = quantize(self.case.format, torch.ones(32, 32))
                fields = {name: getattr(param, name) for name in names}
            state = {n: t for n, t in states.get(i, {}).items() if n in STORED}
            if state:
                state["step"] = int(state["step"])
            tensors = ((n, torch.as_tensor(x)) for n, x in (fields | state).items())
            found.append({n: x.detach().cpu().clone() for n, x in tensors})
        return found


STORED = ("step", "max_exp_avg_sq", "param_remainder") + tuple(
    f"{name}{suffix}"
    for name in ("exp_avg", "exp_avg_sq", "master_param")
    for suffix in ("", "_scale")
)


def make_oracle(run: Run) -> Oracle:
    """The oracle of a run that has just been made."""
    case = run.case
    exp_avg, exp_avg_sq, master, plain = STATES[case.states]
    cells = []
    for i, shape in enumerate(case.shapes):
        start = random(shape, i, scale=0.1).bfloat16()
        content = quantize(case.format, start.float())
        cells.append(Cell(case.format, start.dtype, content, master, start if i == 0 else None))
    narrow, wide = random((41,), 7).bfloat16(), random((5, 7), 8)
    cells.append(Cell(None, narrow.dtype, {"": narrow}, plain))
    cells.append(Cell(None, wide.dtype, {"": wide}, "none"))
    stored = dict(exp_avg_dtype=exp_avg, exp_avg_sq_dtype=exp_avg_sq)
    return Oracle(cells, case.sharing, **case.options, **stored)


def both(run: Run, oracle: Oracle, *seeds: int, absent: tuple[int, ...] = ()) -> None:
    """A step of both for each seed."""
    for seed in seeds:
        grads = run.grads(seed, absent)
        run.step(grads)
        oracle.step(grads)


SCENARIOS: dict[str, Callable[[Run, Oracle], object]] = {}
MOVES: dict[str, Callable[[Run, Oracle, int], object]] = {}


def move(function: Callable[[Run, Oracle, int], object]) -> Callable[[Run, Oracle, int], object]:
    MOVES[function.__name__] = function
    return function


def scenario(function: Callable[[Run, Oracle], object]) -> Callable[[Run, Oracle], object]:
    SCENARIOS[function.__name__] = function
    return function


# Moves: what happens between steps, or as one, with any seed and after any other


@move
def step_of_some(run: Run, oracle: Oracle, seed: int) -> None:
    """Each parameter has its own step count."""
    both(run, oracle, seed, absent=((2,), (0, 2), (1, 3))[seed % 3])


@move
def lr_zero(run: Run, oracle: Oracle, seed: int) -> None:
    """Moments are gathered while weights rest."""
    group, lr = run.optimizer.param_groups[0], oracle.options["lr"]
    for each in (run, oracle):
        each.overwrite([None, None, None, torch.full((5, 7), -0.0)])
    oracle.options["lr"] = group["lr"] = 0.0
    both(run, oracle, seed)
    assert run.model.wide.signbit().all()
    oracle.options["lr"] = group["lr"] = lr


@move
def other_hyper_parameters(run: Run, oracle: Oracle, seed: int) -> None:
    lr = (torch.tensor(1e-2), 0.5, np.float32(2**-9), -1e-2, 1e-6)[seed % 5]
    own = dict(lr=lr, weight_decay=0.1 * seed, betas=(0.8, 0.9), eps=1e-5, maximize=seed % 3 == 1)
    oracle.options |= own
    run.optimizer.param_groups[0].update(own)
    both(run, oracle, seed)
    if isinstance(lr, np.floating):  # which torch.load() takes for unsafe
        oracle.options["lr"] = run.optimizer.param_groups[0]["lr"] = float(lr)


@move
def a_gradient_of_another_size(run: Run, oracle: Oracle, seed: int) -> None:
    """The largest weight grows, shrinks and moves: bounds from earlier steps do not hold."""
    grads = run.grads(seed, scale=1e-6 if seed % 2 else 1.0)
    for grad in grads:
        grad.view(-1)[seed * 101 % grad.numel()] = 10.0 ** (seed - 3)
    run.step(grads)
    oracle.step(grads)


@move
def gradients_of_other_layouts(run: Run, oracle: Oracle, seed: int) -> None:
    grads = run.grads(seed)
    strided = [
        grads[0].t().contiguous().t(),
        torch.cat((grads[1].new_zeros(1), grads[1].flatten()))[1:].view(grads[1].shape),
        torch.stack((grads[2], grads[2]), 1).flatten()[::2],
        grads[3][:, :1].expand(grads[3].shape),
    ]
    run.step(strided)
    oracle.step([grad.clone().contiguous() for grad in strided])


@move
def clipped(run: Run, oracle: Oracle, seed: int) -> None:
    """As by ``torch.nn.utils.clip_grad_norm_``, for one step; the gradients stay as they are."""
    grads = run.grads(seed)
    run.set_grads(grads)
    run.optimizer.clip_grad_norm_(1e-3)
    run.grad(1).mul_(2)
    with pytest.raises(RuntimeError, match="must not change between .* got 1 of 4 that have"):
        run.optimizer.step()
    run.optimizer.zero_grad()
    both(run, oracle, seed)
    run.set_grads(grads)
    norm = run.optimizer.clip_grad_norm_(0.5).cpu()
    torch.testing.assert_close(norm, torch.nn.utils.get_total_norm(grads).to(norm.dtype))
    run.optimizer.step()
    oracle.step(grads, clip=(0.5 / (norm.float() + 1e-6)).clamp(max=1.0))


@move
def found_inf(run: Run, oracle: Oracle, seed: int) -> None:
    """GradScaler divides gradients by its scale, and skips steps that overflow."""
    scale = torch.full((1,) * (seed % 3), 3.0, dtype=torch.float64 if seed % 2 else torch.float32)
    for overflow in (False, True, False):
        run.optimizer.grad_scale = scale.to(run.device)
        run.optimizer.found_inf = torch.tensor(float(overflow), device=run.device)
        grads = run.grads(seed)
        run.step(grads)
        if not overflow:
            oracle.step(grads, grad_scale=scale.float())
        counts = [state["step"].item() for state in run.states()]
        assert counts == [cell.step for cell in oracle.cells]
    del run.optimizer.grad_scale, run.optimizer.found_inf


@move
def refused_states(run: Run, oracle: Oracle, seed: int) -> None:
    """Kernels would read them wrongly, or past their end: nothing is stepped, of no parameter."""
    i, sharing = (1, True) if run.case.sharing else (seed % 4, False)
    state = run.states()[i]
    before = run.contents()
    for name in [name for name in state if name not in ("step", "weight_digest")]:
        kept = state[name]
        for wrong in (kept.double(), kept.to("meta"), kept.view(-1)[: kept.numel() // 2]):
            state[name] = wrong
            if not sharing:  # else the gradient of the other is enough to read them
                run.step([None] * 4)
            run.set_grads(run.grads(seed, absent=(i,) * sharing))
            with pytest.raises((RuntimeError, ValueError), match="must have the shape|must be"):
                run.optimizer.step()
        state[name] = kept
    assert_identical(run.contents(), before)


@move
def release_that_fails(run: Run, oracle: Oracle, seed: int) -> None:
    """What the backward pass has reached is stepped; the rest is as it was."""
    if run.case.grad_dtype is not None:
        pytest.skip("gradients are released as backward passes make them")
    released, failing = run.path == "release", seed % 4
    handle = None if released else run.optimizer.enable_gradient_release()
    grads = run.grads(seed)
    run.release([grad if i < failing else None for i, grad in enumerate(grads)])
    with pytest.raises(RuntimeError, match="out of memory"):
        WithGradient.apply(run.params[failing], None).backward()
    run.optimizer.zero_grad()
    run.optimizer.step()
    if handle is not None:
        handle.remove()
    stepped = 0 if failing < run.case.sharing else failing
    oracle.step([grad if i < stepped else None for i, grad in enumerate(grads)])


@move
def closure(run: Run, oracle: Oracle, seed: int) -> None:
    grads = run.grads(seed)

    def evaluate() -> float:
        assert torch.is_grad_enabled()
        run.set_grads(grads)
        return 17.0

    assert run.optimizer.step(evaluate) == 17.0
    oracle.step(grads)


# Writes by others


def values_of(run: Run, oracle: Oracle) -> list[Tensor]:
    """Others after each step, as values that are there already leave masters alone."""
    first = 70 + 10 * sum(cell.step for cell in oracle.cells)
    return [random(tuple(p.shape), first + i, scale=0.2) for i, p in enumerate(run.params)]


@move
def some_overwritten(run: Run, oracle: Oracle, seed: int) -> None:
    """The masters restart; moments and step counts go on."""
    values = values_of(run, oracle)
    for each in (run, oracle):
        each.overwrite([None if (i + seed) % 2 else value for i, value in enumerate(values)])


def _by_quantizer(param: Tensor, value: Tensor) -> Tensor:
    if isinstance(param, QuantizedTensor):
        return param.quantizer.quantize(value.to(param.device, param.dtype))
    return value.to(param.device, param.dtype)


WRITES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "copy_": lambda p, value: p.copy_(value),
    "copy_ of the same format": lambda p, value: p.copy_(_by_quantizer(p, value)),
    "detach().copy_": lambda p, value: p.detach().copy_(value),
    "copy_ in inference mode": torch.inference_mode()(lambda p, value: p.copy_(value)),
    "data =": lambda p, value: setattr(p, "data", _by_quantizer(p, value)),
    "foreach_copy_": lambda p, value: torch._foreach_copy_([p], [value.to(p.device, p.dtype)]),
    "swap_tensors": lambda p, value: torch.utils.swap_tensors(
        p, Parameter(_by_quantizer(p, value))
    ),
    "quantize_": lambda p, value: getattr(p, "quantize_", p.copy_)(value.to(p.device)),
    "load_state_dict": lambda p, value: nn.ParameterList([p]).load_state_dict({"0": value}),
}


def write_by(run: Run, oracle: Oracle, seed: int, how: str) -> None:
    others = ("data =", "swap_tensors")
    if run.case.format == "float8_delayed" and how in (*others, "copy_ of the same format"):
        pytest.skip("a tensor that is made anew has another history of scales")
    if run.case.sharing and how in others:
        pytest.skip("a tensor that is made anew shares no scale")
    values = [value.bfloat16().float() for value in values_of(run, oracle)]
    with torch.no_grad():
        for param, value in zip(run.params, values, strict=True):
            WRITES[how](param, value)
    # What was quantized elsewhere has no other value.
    oracle.overwrite(values, how not in (*others, "copy_ of the same format"))


MOVES |= {how: functools.partial(write_by, how=how) for how in WRITES}


def moved(run: Run, oracle: Oracle) -> None:
    """Parameters have their values, but in other memory: only whole masters go on."""
    if STATES[run.case.states][2] == "int8":
        for cell in oracle.cells[:2]:
            cell.restart()


def swap_in_and_out(param: Tensor) -> None:
    for own in (param.detach().clone(), param.detach().float().clone()):
        param.copy_(random(tuple(param.shape), 3))
        param.copy_(own)


MEMORY: dict[str, Callable[[Tensor], object]] = {
    "average swapped in and out": swap_in_and_out,  # for a validation
    "data = clone": lambda p: setattr(p, "data", p.detach().clone()),
    "swapped with a clone": lambda p: torch.utils.swap_tensors(p, Parameter(p.detach().clone())),
    "shared memory": lambda p: p.share_memory_(),
}


def move_by(run: Run, oracle: Oracle, seed: int, how: str) -> None:
    with torch.no_grad():
        for param in run.params:
            MEMORY[how](param)
    if how != "average swapped in and out":
        moved(run, oracle)


MOVES |= {how: functools.partial(move_by, how=how) for how in MEMORY}


@move
def written_by_another_optimizer(run: Run, oracle: Oracle, seed: int) -> None:
    """It steps the same parameters, and continues from masters of its own."""
    run.set_grads(run.grads(seed))
    own = dict(master_weights=False) if run.case.states.endswith("without masters") else {}
    use_decoupled_grad = run.case.grad_dtype is not None
    FP4Adam(run.params, lr=0.05, use_decoupled_grad=use_decoupled_grad, **own).step()
    oracle.overwrite_with(run.contents())


@move
def averaged(run: Run, oracle: Oracle, seed: int) -> None:
    """An average in high precision leaves the training alone."""
    average = AveragedModel(nn.Sequential(run.model), avg_fn=get_ema_avg_fn(0.5))
    average.update_parameters(run.model)
    first = oracle.cells[0].decoded()
    both(run, oracle, seed)
    average.update_parameters(run.model)
    assert not any(isinstance(param, QuantizedTensor) for param in average.parameters())
    expected = (first + oracle.cells[0].decoded()) / 2
    found = average.module[0].weight0.detach().float().cpu()  # in BF16
    torch.testing.assert_close(found, expected, rtol=0, atol=expected.abs().max().item() / 128)


@move
def states_changed_by_hand(run: Run, oracle: Oracle, seed: int) -> None:
    """In place, by other tensors, and step counts."""
    if run.case.states != "32bit":
        pytest.skip("writes states as they are stored")
    both(run, oracle, seed)
    for param, cell in zip(run.params, oracle.cells, strict=True):
        state = run.optimizer.state[param]
        for entry in (state, cell.moments):
            entry["exp_avg"].mul_(50.0)
            entry["exp_avg_sq"] = entry["exp_avg_sq"] * 0.25
        state["step"].fill_(100.0)
        cell.step = 100
        if "master_param" in state:
            state["master_param"].view(-1)[5] = 40.0
            cell.value.view(-1)[5] = 40.0
    both(run, oracle, seed)


@move
def states_elsewhere(run: Run, oracle: Oracle, seed: int) -> None:
    """In other memory, in another layout, in other dictionaries: bytes alone count."""
    states = run.states() if seed % 3 else [*run.optimizer.state_dict()["state"].values()]
    if run.path != "offload":  # where a step may still be on its way to what is kept
        both(run, oracle, seed)
    for param, state in [*zip(run.params, states, strict=False)][seed % 4 :]:
        for name, value in state.items():
            if seed % 2:
                value.data = value.clone()
            else:
                is_plain = value.dim() == 2 and run.case.states == "32bit"
                state[name] = value.t().contiguous().t() if is_plain else value.clone()
        if seed % 3:
            run.optimizer.state[param] = dict(state)


@move
def states_forgotten(run: Run, oracle: Oracle, seed: int) -> None:
    """Training starts anew, from the weights."""
    run.optimizer.state.clear()
    for cell in oracle.cells:
        cell.forget()


@move
def reset_master_weights(run: Run, oracle: Oracle, seed: int) -> None:
    run.optimizer.reset_master_weights(run.params[:1] if seed % 2 else None)
    for cell in oracle.cells[: 1 if seed % 2 else None]:
        cell.restart()


# The optimizer and its groups


@move
def regrouped(run: Run, oracle: Oracle, seed: int) -> None:
    """A parameter goes to another group, which has its own options, and back."""
    first = run.optimizer.param_groups[0]
    moved, own = run.params[3], dict(lr=2e-3, betas=(0.7, 0.9), eps=1e-6, weight_decay=0.0)
    own |= {name: oracle.options[name] for name in ("amsgrad", "maximize")}
    first["params"] = [param for param in first["params"] if param is not moved]
    run.optimizer.add_param_group({"params": [moved], **own})
    oracle.groups[3] = own
    both(run, oracle, seed)
    first["params"].append(run.optimizer.param_groups.pop()["params"][0])
    del oracle.groups[3]


@move
def replaced(run: Run, oracle: Oracle, seed: int) -> None:
    """A new parameter in the place of one starts anew, and the old one is freed."""
    i = (seed + 1) % 4
    name = ("weight0", "weight1", "narrow", "wide")[i]
    old, cell = getattr(run.model, name), oracle.cells[i]
    new = Parameter(old.detach().clone())
    setattr(run.model, name, new)
    run.optimizer.param_groups[0]["params"][i] = new
    del run.optimizer.state[old]
    gone = weakref.ref(old)
    del old
    cell.forget()
    both(run, oracle, seed)
    gc.collect()
    assert gone() is None or run.case.sharing  # which the optimizer was given as lists


@move
def amsgrad_turned_on(run: Run, oracle: Oracle, seed: int) -> None:
    if oracle.options["exp_avg_sq_dtype"] != "float32":
        pytest.skip("its second moments are in float32")
    oracle.options["amsgrad"] = run.optimizer.param_groups[0]["amsgrad"] = True


@move
def cast_and_back(run: Run, oracle: Oracle, seed: int) -> None:
    """Weights keep codes and masters; a BF16 parameter is its own master while it is FP32."""
    if "quantize_from" in run.case.options:
        pytest.skip("weights are rounded through another dtype")
    *weights, narrow, wide = oracle.cells
    kind, narrow.master, narrow.dtype = narrow.master, "none", torch.float32
    narrow.content, narrow.value = {"": narrow.decoded()}, narrow.decoded()
    narrow.stored = {n: t for n, t in narrow.stored.items() if n.startswith(("exp", "max"))}
    for cell in weights:
        cell.dtype = torch.float32
    run.model.float()
    moved(run, oracle)
    both(run, oracle, seed)
    for cell in (*weights, narrow):
        cell.dtype = torch.bfloat16
    narrow.master, narrow.value = kind, None
    for cell in (narrow, wide):
        cell.content = {"": cell.content[""].bfloat16().to(cell.dtype)}
    wide.value = wide.decoded()
    run.model.bfloat16()
    run.model.wide.data = run.model.wide.float()
    moved(run, oracle)


@move
def under_other_defaults(run: Run, oracle: Oracle, seed: int) -> None:
    """What helps a step is made where it is needed."""
    grads = run.grads(seed)
    run.set_grads(grads)
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.bfloat16)
    try:
        run.optimizer.load_state_dict(run.optimizer.state_dict())
        run.optimizer.clip_grad_norm_(1e9)
        run.optimizer.step()
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    oracle.step(grads)


@move
def frozen_for_a_while(run: Run, oracle: Oracle, seed: int) -> None:
    run.params[0].requires_grad_(False)
    both(run, oracle, seed, absent=(0,))
    run.params[0].requires_grad_(True)


# Copies and checkpoints


def continue_with(run: Run, oracle: Oracle, seed: int, copied: tuple[nn.Module, FP4Adam]) -> None:
    """Go on with a copy of model and optimizer; the original must not change."""
    original = copy.copy(run)
    before = copy.deepcopy(original.contents())
    run.model, run.optimizer = copied
    some_overwritten(run, oracle, seed)
    both(run, oracle, seed)
    assert_identical(original.contents(), before)


@move
def deepcopy_(run: Run, oracle: Oracle, seed: int) -> None:
    run.optimizer.param_groups[0].pop("fused")  # as before there was such an option
    continue_with(run, oracle, seed, copy.deepcopy((run.model, run.optimizer)))


@move
def pickle_(run: Run, oracle: Oracle, seed: int) -> None:
    copied = through_a_file((run.model, run.optimizer), weights_only=False)
    continue_with(run, oracle, seed, copied)


def resumed(run: Run, oracle: Oracle, seed: int, compact: bool, model_first: bool) -> None:
    """In a new process, with other weights: model and optimizer are loaded in either order."""
    save = run.optimizer.compact_state_dict if compact else run.optimizer.state_dict
    model, state = through_a_file((run.model.state_dict(), save()))
    fresh = Run(run.case, run.device, run.path)
    fresh.overwrite(values_of(fresh, oracle))
    loads = [
        lambda: fresh.model.load_state_dict(model),
        lambda: fresh.optimizer.load_state_dict(state),
    ]
    for load in loads if model_first else reversed(loads):
        load()
    run.model, run.optimizer = fresh.model, fresh.optimizer
    both(run, oracle, seed)


for compact in (False, True):
    for model_first in (False, True):
        name = f"resumed{', compact' if compact else ''}{', model first' if model_first else ''}"
        MOVES[name] = functools.partial(resumed, compact=compact, model_first=model_first)


@move
def resumed_from_plain_values(run: Run, oracle: Oracle, seed: int) -> None:
    """The weights are those of the masters again, bit for bit."""
    if run.case.states != "32bit" or run.case.format == "float8_delayed":
        pytest.skip("what narrow masters are to other bytes is for tests of their own")
    plain = use_plain_state_dict(copy.deepcopy(run.model)).state_dict()
    assert not any(isinstance(value, QuantizedTensor) for value in plain.values())
    weight0 = copy.deepcopy(run.model.state_dict()["weight0"])
    model, state = through_a_file((plain, run.optimizer.state_dict()))
    fresh = Run(run.case, run.device, run.path) if seed % 2 else run
    fresh.step(fresh.grads(seed))  # which goes back
    if run.path != "any optimizer":  # where the model comes first
        fresh.optimizer.load_state_dict(copy.deepcopy(state))
        fresh.model.load_state_dict(model)
        assert_identical(fresh.contents(), oracle.contents())
        fresh.step(fresh.grads(seed))
    fresh.model.load_state_dict(model | {"weight0": weight0})
    fresh.optimizer.load_state_dict(state)
    assert not hasattr(fresh.params[1], "get_high_precision_init_val")
    assert_identical(fresh.contents(), oracle.contents())
    run.model, run.optimizer = fresh.model, fresh.optimizer


@move
def through_adamw(run: Run, oracle: Oracle, seed: int) -> None:
    """torch's optimizer loads the state, and saves whole masters with it."""
    if "adam_w_mode" in run.case.options:
        pytest.skip("counts steps in groups, as Transformer Engine does")
    adamw = AdamW([Parameter(torch.zeros(param.shape)) for param in run.params])
    adamw.load_state_dict(run.optimizer.state_dict())
    run.optimizer.load_state_dict(adamw.state_dict())


@move
def through_the_other_layout(run: Run, oracle: Oracle, seed: int) -> None:
    """FusedAdam counts in groups, as Transformer Engine does; its names for states are others."""
    if "factored" in run.case.states:
        pytest.skip("that layout has no factors")
    options = dict(run.case.arguments)
    kind = FP4Adam if options.pop("adam_w_mode", None) is False else FusedAdam
    other = kind(run.params, **options)
    for source, target in ((run.optimizer, other), (other, run.optimizer)):
        compact = seed % 2 and source.compact_state_dict()
        target.load_state_dict(copy.deepcopy(compact or source.state_dict()))


@move
def states_set_by_name(run: Run, oracle: Oracle, seed: int) -> None:
    """What is read in FP32 is written as it was."""
    is_factored = "factored" in run.case.states  # which loses what is not of rank one
    for param, cell in zip(run.params, oracle.cells, strict=True):
        for name, value in cell.moments.items():
            if name != "max_exp_avg_sq" and not (is_factored and name == "exp_avg_sq"):
                found = run.optimizer.get_unscaled_state(param, name)
                assert torch.equal(found.cpu(), value)
                run.optimizer.set_scaled_state(param, name, found.clone())
        if cell.master in ("float32", "float16", "int8"):
            found = run.optimizer.get_unscaled_state(param, "master_param")
            assert torch.equal(found.cpu(), cell.value)
            run.optimizer.set_scaled_state(param, "master_param", found.clone())


@move
def resumed_in_other_storage(run: Run, oracle: Oracle, seed: int) -> None:
    """As if the numbers had been saved."""
    others = ("32bit", "16bit", "8bit") if not oracle.options["amsgrad"] else ("fp8, fp32", "32bit")
    if "adam_w_mode" in run.case.options or run.case.states.endswith("without masters"):
        pytest.skip("Transformer Engine's layout has remainders alone")
    others = ("32bit",) if run.case.states == "16bit" else others  # remainders have no ties
    states = others[seed % len(others)]
    # Codes of the same kind would be taken as they are.
    is_compact = seed % 2 and states != run.case.states
    saved = run.optimizer.compact_state_dict() if is_compact else run.optimizer.state_dict()
    run.case = dataclasses.replace(run.case, states=states)
    resumed = run.optimizer_of(run.params)
    resumed.load_state_dict(copy.deepcopy(saved))
    run.optimizer = resumed
    exp_avg, exp_avg_sq, master, plain = STATES[states]
    oracle.options |= dict(exp_avg_dtype=exp_avg, exp_avg_sq_dtype=exp_avg_sq)
    for cell, kind in zip(oracle.cells, (master, master, plain, "none"), strict=True):
        cell.store_otherwise(kind, oracle.options)
    assert_identical(run.contents(), oracle.contents())  # as small at once


@move
def own_state_loaded(run: Run, oracle: Oracle, seed: int) -> None:
    """As trainers do with what they have just saved; nothing is shared with it."""
    saved = getattr(run.optimizer, "compact_state_dict", run.optimizer.state_dict)()
    run.optimizer.load_state_dict(saved)
    for state in saved["state"].values():
        for value in filter(torch.is_tensor, state.values()):
            value.zero_()
    both(run, oracle, seed)


@move
def older_state_loaded(run: Run, oracle: Oracle, seed: int) -> None:
    """Its masters are not those of the weights, which keep their values."""
    both(run, oracle, seed)
    saved = copy.deepcopy(run.optimizer.state_dict())
    values = values_of(run, oracle)
    for each in (run, oracle):
        each.overwrite(values)
    for cell in oracle.cells:
        # Transformer Engine's layout has remainders alone, which complete any parameter.
        if cell.master == "remainder" and "adam_w_mode" not in run.case.options:
            cell.restart()
    run.optimizer.load_state_dict(saved)


@move
def flattened_by_dcp(run: Run, oracle: Oracle, seed: int) -> None:
    """``torch.distributed.checkpoint`` saves states by name, and steps with a rate of zero."""
    if run.case.grad_dtype is not None or run.case.states != "32bit":
        pytest.skip("sets plain gradients, and reads states under the names of these")
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    saved = get_optimizer_state_dict(run.model, run.optimizer, options=options)
    set_optimizer_state_dict(run.model, run.optimizer, copy.deepcopy(saved), options=options)


# Scenarios: from the start


@scenario
def overflow_at_the_first_step(run: Run, oracle: Oracle) -> None:
    """Masters still start from the values before quantization."""
    run.optimizer.found_inf = torch.ones((), device=run.device)
    run.step(run.grads(0, scale=torch.inf))
    del run.optimizer.found_inf
    run.optimizer.add_param_group({"params": []})
    both(run, oracle, 1, 2)


@scenario
def parameters_of_other_shapes_join(run: Run, oracle: Oracle) -> None:
    """An empty one, a scalar, and one in FP16 beside them, which count their own steps."""
    both(run, oracle, 0)
    values = [torch.zeros(0, 3).bfloat16(), torch.tensor(1.5), random((3, 5), 9).half()]
    master = STATES[run.case.states][3].replace("remainder", "float32")
    for i, value in enumerate(values):
        run.model.register_parameter(f"odd{i}", Parameter(value.to(run.device, copy=True)))
        kind = "none" if value.dtype == torch.float32 else master
        kind = STATES[run.case.states][3] if value.dtype == torch.bfloat16 else kind
        oracle.cells.append(Cell(None, value.dtype, {"": value}, kind, place=4 + i))
    run.optimizer.add_param_group({"params": run.params[4:]})
    run.optimizer.add_param_group({"params": []})
    both(run, oracle, 1, 2)


@scenario
def steps(run: Run, oracle: Oracle) -> None:
    """In place, and a value before quantization is freed by the first one."""
    both(run, oracle, 0)
    before = addresses(run.optimizer)
    both(run, oracle, 1, 2)
    assert addresses(run.optimizer) == before
    assert run.params[0]._high_precision_init_val is None


@scenario
def late_and_missing_gradients(run: Run, oracle: Oracle) -> None:
    both(run, oracle, 0, absent=(0, 1, 2, 3))
    for seed in range(3):
        step_of_some(run, oracle, seed)


@scenario
def initialized_before_the_first_step(run: Run, oracle: Oracle) -> None:
    for param in run.params:
        run.optimizer.initialize_state(param)
        assert run.optimizer.state[param]["step"] == 0
        assert not run.optimizer.get_unscaled_state(param, "exp_avg").any()
    both(run, oracle, 0)


@scenario
def overwritten_and_resumed(run: Run, oracle: Oracle) -> None:
    """The state says that the masters are those of the weights now."""
    both(run, oracle, 0, 1)
    values = values_of(run, oracle)
    for each in (run, oracle):
        each.overwrite(values)
    own_state_loaded(run, oracle, 2)


def between_steps(run: Run, oracle: Oracle, move: Callable[[Run, Oracle, int], object]) -> None:
    both(run, oracle, 0, 1)
    move(run, oracle, 2 + run.turn)
    both(run, oracle, 5)
    if run.path == "release":  # new tensors are released after a step
        both(run, oracle, 6)
        assert run.case.sharing or not run.left


def before_steps(run: Run, oracle: Oracle, move: Callable[[Run, Oracle, int], object]) -> None:
    move(run, oracle, run.turn)
    both(run, oracle, 1)


SCENARIOS |= {name: functools.partial(between_steps, move=each) for name, each in MOVES.items()}
SCENARIOS |= {
    f"{name}, first": functools.partial(before_steps, move=MOVES[name])
    for name in ("lr_zero", "some_overwritten", "deepcopy_", "under_other_defaults")
}


# Kernels and operators; states on the host, copied as late as may be; steps in backward passes.
PATHS = ("operators", "kernels", "offload", "release", "any optimizer")
# Of each case with states in FP32.
OF_WHOLE_STATES = ("states_changed_by_hand", "resumed_from_plain_values", "flattened_by_dcp")
# A norm is known, and an overflow found, after the backward pass.
QUICK = {"operators": 9, "kernels": 1, "offload": 2, "release": 3, "any optimizer": 3}
NOT_TAKEN = {
    "release": (
        "clipped", "found_inf", "overflow_at_the_first_step", "under_other_defaults",
        "under_other_defaults, first",
    ),
    "any optimizer": (
        "clipped", "found_inf", "overflow_at_the_first_step", "under_other_defaults",
        "under_other_defaults, first",
        "release_that_fails", "refused_states", "resumed, compact", "resumed, compact, model first",
        "resumed_in_other_storage", "through_the_other_layout", "states_set_by_name",
        "initialized_before_the_first_step",
    ),
}  # fmt: skip


def takes(path: str, case: Case, name: str = "") -> bool:
    if path == "release" and case.grad_dtype or path == "any optimizer" and case.options is L2:
        return False
    return name not in NOT_TAKEN.get(path, ())


def rows() -> list[Any]:
    """All of the table; quick are half of it for operators, some of other paths; most are slow."""
    found = []
    for i, name in enumerate(SCENARIOS):
        for j, case in enumerate(CASES):
            for path in PATHS:
                if not takes(path, CASES[case], name):
                    continue
                of_whole = 7 * (name in OF_WHOLE_STATES)  # cases that differ in more than states
                turn = (5 * i + 8 * j + of_whole) % len(CASES)  # 0 for one case of each scenario
                quick = turn < QUICK[path] and (path != "kernels" or i % 2 == 0)
                later = [pytest.mark.slow if quick else pytest.mark.exhaustive]
                is_first = 3 * turn < QUICK[path] and (path != "kernels" or i % 4 == 0)
                marks = [] if is_first and quick else later
                if path == "kernels" and turn > 2 or path == "offload" and turn > 5:
                    marks = [pytest.mark.exhaustive, pytest.mark.nightly]
                found.append(
                    pytest.param(case, name, path, marks=marks, id=f"{name}-{case}-{path}")
                )
    return found


@contextlib.contextmanager
def taking(path: str, device: str) -> Iterator[str]:
    """The device of runs that take a path."""
    kernels = path == "kernels"
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setattr(backend, "uses_kernels", lambda d: kernels and d.type == device)
        if path == "offload":
            stack.enter_context(offload_to(LateLink(), 12 * 32 * 64))
        yield device if kernels else "cpu"


@pytest.mark.table
@pytest.mark.parametrize(("case", "name", "path"), rows())
def test_step(case: str, name: str, path: str, device: str) -> None:
    with taking(path, device) as where:
        of_run = dict(states="32bit", grad_dtype=None) if name in OF_WHOLE_STATES else {}
        run = Run(dataclasses.replace(CASES[case], **of_run), where, path)
        oracle, run.turn = make_oracle(run), [*CASES].index(case) % 3
        SCENARIOS[name](run, oracle)
        assert_identical(run.contents(), oracle.contents())


def check_programs(path: str, device: str, programs: int, number: int = 0) -> None:
    """Any moves with a step after each, of any case; other programs for each number."""
    moves = st.lists(
        st.tuples(st.sampled_from([*MOVES]), st.integers(0, 7)), min_size=2, max_size=8
    )
    cases = [name for name, case in CASES.items() if takes(path, case)]

    @hypothesis.seed(number)
    @settings(max_examples=programs, deadline=None, database=None)
    @given(case=st.sampled_from(cases), moves=moves)
    def check(case: str, moves: list[tuple[str, int]]) -> None:
        run = Run(CASES[case], where, path)
        oracle = make_oracle(run)
        both(run, oracle, 0)
        for name, of_move in moves:
            if name in NOT_TAKEN.get(path, ()):
                continue
            with contextlib.suppress(pytest.skip.Exception):  # it is not for this case
                MOVES[name](run, oracle, of_move)
            both(run, oracle, of_move + 1)
        assert_identical(run.contents(), oracle.contents())

    with taking(path, device) as where:
        check()


# Some write values to copies of copies, as averages do.
@pytest.mark.filterwarnings("ignore:values written to a copy of a model")
@pytest.mark.table
@pytest.mark.parametrize(
    ("path", "programs"),
    [(path, QUICK[path] // 2 + 1) for path in PATHS]
    + [
        pytest.param(path, 60 * n, marks=[pytest.mark.exhaustive, pytest.mark.nightly])
        for path, n in QUICK.items()
    ],
)
def test_programs(path: str, programs: int, device: str) -> None:
    check_programs(path, device, programs)
