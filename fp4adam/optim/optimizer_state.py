"""The state that an optimizer keeps per parameter, and what a saved one has to look like."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fp4adam.optim.state_codec import STATE_BLOCK, codec_of_codes

STATE_NAMES = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master_param"}


def state_like(param: Tensor) -> Tensor:
    """Plain zeros in the layout of ``param``: float32, or float64 for a float64 parameter."""
    dtype = torch.float64 if param.dtype == torch.float64 else torch.float32
    return torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)


def saved_states(
    param_groups: list[dict[str, Any]], state_dict: dict[str, Any]
) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """Parameters of ``param_groups`` with the state that ``state_dict`` has for them."""
    for param, key in saved_keys(param_groups, state_dict):
        yield param, state_dict["state"][key]


def saved_keys(
    param_groups: list[dict[str, Any]], state_dict: dict[str, Any]
) -> Iterator[tuple[Tensor, Any]]:
    """Parameters that ``state_dict`` has a state for, with the key of that state."""
    for group, saved in zip(param_groups, state_dict["param_groups"], strict=True):
        for param, key in zip(group["params"], saved["params"], strict=True):
            if key in state_dict["state"]:
                yield param, key


def check_state_dict(param_groups: list[dict[str, Any]], state_dict: dict[str, Any]) -> None:
    """Raise ValueError if ``state_dict`` holds states that these parameters cannot take over.

    Groups of other sizes pass: ``torch.optim`` refuses them, in its own words.
    """
    if not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError(
            f"state_dict must have state and param_groups, got {sorted(map(str, state_dict))[:3]}; "
            "pass what optimizer.state_dict() returned, a model's goes to the model"
        )
    sizes = [len(group["params"]) for group in state_dict["param_groups"]]
    if sizes != [len(group["params"]) for group in param_groups]:
        return
    for i, (param, saved) in enumerate(saved_states(param_groups, state_dict)):
        if saved and not {"step", "exp_avg", "exp_avg_sq"} <= saved.keys():
            raise ValueError(
                f"state of parameter {i} must hold step, exp_avg and exp_avg_sq, got "
                f"{sorted(saved)}; it was saved by another kind of optimizer"
            )
        if saved and not _is_number(saved["step"]):
            raise ValueError(
                f"step of parameter {i} must be one number >= 0, got {saved['step']!r}; the "
                "checkpoint is damaged"
            )
        for name in sorted(STATE_NAMES & saved.keys()):
            what = f"{name} of parameter {i}"
            if f"{name}_scale" in saved:
                _check_saved_codes(what, name, saved, param)
            else:
                _check_saved_tensor(what, saved[name], param)
        if "param_remainder" in saved:
            _check_saved_remainder(f"param_remainder of parameter {i}", saved, param)


def _check_saved_tensor(what: str, value: Any, param: Tensor) -> None:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"{what} must be a floating point tensor, got {kind}; such a checkpoint has to be "
            "converted first"
        )
    if value.layout != torch.strided or (value.is_meta and not param.is_meta):
        raise ValueError(
            f"{what} must be a dense tensor with a value, got {value.layout} on {value.device}; "
            "the checkpoint is damaged"
        )
    _check_shape(what, value, param.shape)


def _check_saved_codes(what: str, name: str, saved: dict[str, Any], param: Tensor) -> None:
    codes, scales = saved[name], saved[f"{name}_scale"]
    dtype = codes.dtype if isinstance(codes, Tensor) else type(codes).__name__
    if not isinstance(codes, Tensor) or codec_of_codes(name, dtype) is None:
        raise ValueError(
            f"{what} must be codes of a known dtype beside {name}_scale, got {dtype}; the "
            "checkpoint is damaged"
        )
    _check_shape(what, codes, param.shape)
    n_blocks = -(-param.numel() // STATE_BLOCK)
    if not isinstance(scales, Tensor) or scales.dtype != torch.uint8:
        kind = scales.dtype if isinstance(scales, Tensor) else type(scales).__name__
        raise ValueError(f"{what} must have uint8 scales, got {kind}; the checkpoint is damaged")
    _check_shape(f"the scales of {what}", scales, (n_blocks,))


def _check_saved_remainder(what: str, saved: dict[str, Any], param: Tensor) -> None:
    remainder = saved["param_remainder"]
    if not isinstance(remainder, Tensor) or remainder.dtype != torch.int16:
        kind = remainder.dtype if isinstance(remainder, Tensor) else type(remainder).__name__
        raise ValueError(f"{what} must be int16, got {kind}; the checkpoint is damaged")
    if param.dtype != torch.bfloat16:
        raise ValueError(
            f"{what} must belong to a bfloat16 parameter, got {param.dtype}; save state_dict(), "
            "which has whole masters, to change the dtype"
        )
    _check_shape(what, remainder, param.shape)


def _check_shape(what: str, value: Tensor, shape: tuple[int, ...]) -> None:
    if value.shape != shape:
        raise ValueError(
            f"{what} must have shape {tuple(shape)}, got {tuple(value.shape)}; load it into the "
            "model that it was saved from"
        )


def _is_number(step: Any) -> bool:
    if isinstance(step, Tensor):
        if step.numel() != 1 or step.is_complex():
            return False
        return step.is_meta or 0 <= step.item() < math.inf
    return isinstance(step, (int, float)) and 0 <= step < math.inf
