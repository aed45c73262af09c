"""MasterWeightOptimizer over optimizers of pytorch_optimizer: SOAP, Shampoo, Lion and others."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import pytorch_optimizer
import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from fp4adam import MasterWeightOptimizer
from helpers import (
    RECIPES,
    all_params,
    assert_bytes_are_of_masters,
    assert_identical,
    make_weight,
    set_grads,
)


def muon(params: Iterable[Any], **options: Any) -> Optimizer:
    """Its Muon wants to be told which groups are its own."""
    groups = list(params)
    groups = groups if isinstance(groups[0], dict) else [{"params": groups}]
    groups = [{**group, "use_muon": True} for group in groups]
    return pytorch_optimizer.Muon(groups, **options)


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "Muon": muon,
    **{
        name: getattr(pytorch_optimizer, name)
        for name in ("SOAP", "Shampoo", "ScalableShampoo", "Lion", "Adan", "ScheduleFreeAdamW")
    },
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_bits_of_the_optimizer_on_fp32(kind: str) -> None:
    make = OPTIMIZERS[kind]
    params = [make_weight(q, "cpu", seed=seed) for seed, q in enumerate(RECIPES.values())]
    twins = [Parameter(param.detach().dequantize(torch.float32)) for param in params]
    optimizer, twin = MasterWeightOptimizer(params, make, lr=1e-2), make(twins, lr=1e-2)
    for seed in range(4):
        set_grads(params, seed)
        for param, copied in zip(params, twins, strict=True):
            copied.grad = param.grad.float()
        optimizer.step()
        twin.step()
    masters = [optimizer.state[param]["master_param"] for param in params]
    assert_identical(masters, [value.detach() for value in twins])
    assert_bytes_are_of_masters(optimizer)
    resumed = MasterWeightOptimizer(copy.deepcopy(params), make, lr=1.0)
    resumed.load_state_dict(optimizer.state_dict())
    for one in (optimizer, resumed):
        set_grads(all_params(one), 4)
        one.step()
        assert_bytes_are_of_masters(one)
    assert_identical(*([p.detach() for p in all_params(one)] for one in (optimizer, resumed)))
