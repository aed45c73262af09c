"""The step in torch operators, one parameter at a time: the arithmetic of the kernels."""

from torch import Tensor

from fp4adam.optim.adam import Scalars
from fp4adam.optim.master_weights import master_of
from fp4adam.optim.param_state import ParamState
from fp4adam.optim.stored_state import adam_stored_
from fp4adam.tensors.changes import recorded


def step_by_operators(
    member: ParamState,
    grad: Tensor,
    scalars: Scalars,
    grad_scale: Tensor | None,
    clip: Tensor | None,
) -> None:
    """Update a parameter and its state, with the same bits as the kernels.

    Args:
        member: The parameter.
        grad: Its gradient, of any floating dtype and strides.
        scalars: The scalars of this step.
        grad_scale: One-element tensor that divides the gradient, or None.
        clip: One-element tensor that multiplies it after that, or None.
    """
    if grad_scale is not None:
        grad_scale = grad_scale.to(grad.device)
    with recorded(member.param):
        adam_stored_(
            member.stored_value(),
            grad,
            member.stored("exp_avg"),
            member.stored("exp_avg_sq"),
            member.max_exp_avg_sq,
            scalars,
            member.group["adam_w_mode"],
            grad_scale,
            clip,
            member.first_element,
        )
        if member.view.has_master and member.updates and not member.quantized_after_step:
            member.view.write(master_of(member.view, member.tensors))
