"""FusedAdam for parameters that are stored in 4 or 8 bits."""

import pickle
from collections.abc import Hashable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fp4adam.distributed.collectives import guard_zero
from fp4adam.distributed.dtensor import local
from fp4adam.formats.scale_groups import (
    ScaleGroup,
    ScaleGroups,
    form_scale_group,
    lists_of_members,
    resolve_scale_groups,
)
from fp4adam.optim import checks
from fp4adam.optim.fused_adam import FusedAdam
from fp4adam.optim.param_view import Storing
from fp4adam.tensors.quantized_tensor import QuantizedTensor

_CAPTURE_AROUND = (
    "capture forward and backward, and call step() outside the graph: it writes weights at the "
    "addresses that the graph reads"
)


class FP4Adam(FusedAdam):
    """``torch.optim.AdamW`` for :class:`QuantizedTensor` parameters and plain ones.

    Parameters may also be ``NVFP4Tensor``, ``MXFP8Tensor``, ``Float8BlockwiseQTensor`` and
    ``Float8Tensor`` of Transformer Engine, ``NVFP4Tensor`` and ``MXTensor`` of
    torchao, or of any class with a :class:`TensorAdapter`. The step writes their memory in place.

    A quantized parameter has an FP32 master weight in the optimizer's state. One kernel reads the
    gradient (BF16, FP16 or FP32), updates master and moments in FP32 and writes the re-quantized
    weight in place. After every step the bytes of a parameter are those of
    ``param.quantizer.quantize(master_param)``; with delayed scaling those of the master under the
    scale of earlier values. State: 12 bytes per element.

    The master starts from the high-precision initial value if the parameter still has it, and frees
    it; otherwise it starts from its decoded values. If other code overwrites the parameter
    later (``load_state_dict``, weight averaging), the master restarts from the new value. A step
    with lr = 0 leaves the bytes alone.

    NVFP4 and Float8 weights of a scale group are quantized with one amax, the largest magnitude in
    all of their masters. Each member stores it, so a server can fuse them without re-quantizing. If
    any member has a gradient, all members are written and have a state. The step is fastest if all
    of them have gradients.

    Args:
        params: Parameters, (name, parameter) pairs or dicts of parameter groups; those of a model
            after ``quantize_model``.
        lr: Learning rate, >= 0; a one-element tensor is read at every step.
        betas: Decay rates of the first and second moment, in [0, 1).
        eps: Term added to the denominator, >= 0.
        weight_decay: Weight decay coefficient, >= 0.
        amsgrad: Divide by the largest second moment so far.
        bias_correction: Correct the moments for their start at zero.
        adam_w_mode: Decoupled decay (AdamW); False adds ``weight_decay * param`` to the gradient.
        master_weights: Keep FP32 masters of BF16 and FP16 parameters; quantized ones have to.
        exp_avg_dtype: Storage of first moments: float32, bfloat16, float16 or float8_e4m3fn; see
            :class:`FusedAdam`.
        exp_avg_sq_dtype: The same of second moments; not with ``amsgrad`` unless float32.
        master_weight_dtype: Storage of masters: float32 or float16.
        store_param_remainders: Keep of the FP32 master of a BF16 parameter only what the parameter
            lacks. Quantized parameters keep their masters.
        use_decoupled_grad: Read ``param.decoupled_grad`` instead of ``param.grad``.
        offload_states: Keep masters and moments in pinned host memory; see :class:`FusedAdam`.
        set_grad_none: Deprecated: what ``zero_grad`` does by default.
        maximize: Ascend instead of descend.
        foreach: Accepted for compatibility; updates are always batched.
        capturable: Not supported; capture forward and backward, and call ``step()`` outside of the
            CUDA graph. It writes weights in place, where the graph reads them.
        differentiable: Not supported.
        fused: False takes plain torch operators instead of the kernels, with the same results.
        quantize_from: "master" quantizes the FP32 master itself; "param_dtype" rounds it to the
            parameter's nominal dtype first, as Megatron's distributed optimizer does.
        scale_groups: The NVFP4 or Float8 weights that share one amax, from the first step on: lists
            of lists of parameters or names, or a rule such as :func:`hf_scale_groups`. Names and
            rules need ``params=model.named_parameters()``. None keeps the groups made by
            ``quantize_model(..., scale_groups=...)``; () means no groups.

    Raises:
        NotImplementedError: For ``capturable=True``, and for DTensors of other packages' tensors
            that ``fully_shard`` has not made.
        TypeError: If a parameter is of another package's class without an adapter, or
            ``scale_groups`` is neither lists nor a rule.
        ValueError: For ``master_weights=False`` with quantized parameters, an unknown
            ``quantize_from``, or another package's tensor that the kernels cannot write; if a
            member of a scale group is unknown, not NVFP4 or Float8 with current scaling, or in two
            groups.
    """

    _option_names = (*FusedAdam._option_names, "quantize_from", "scale_groups")
    _takes_quantized = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        master_weights: bool = True,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        master_weight_dtype: torch.dtype = torch.float32,
        store_param_remainders: bool = False,
        use_decoupled_grad: bool = False,
        offload_states: bool = False,
        set_grad_none: bool | None = None,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        quantize_from: Literal["master", "param_dtype"] = "master",
        scale_groups: ScaleGroups | None = None,
    ) -> None:
        checks.check_quantize_from(quantize_from)
        guard_zero()
        self.quantize_from = quantize_from
        self.scale_groups = None
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            bias_correction=bias_correction,
            adam_w_mode=adam_w_mode,
            master_weights=master_weights,
            exp_avg_dtype=exp_avg_dtype,
            exp_avg_sq_dtype=exp_avg_sq_dtype,
            master_weight_dtype=master_weight_dtype,
            store_param_remainders=store_param_remainders,
            use_decoupled_grad=use_decoupled_grad,
            offload_states=offload_states,
            set_grad_none=set_grad_none,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
        )
        if scale_groups is not None and not callable(scale_groups):
            scale_groups = lists_of_members(scale_groups)
        self.scale_groups = scale_groups
        self._form_scale_groups()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        try:
            self._form_scale_groups()
        except Exception:
            self.param_groups.pop()
            raise
        finally:
            if getattr(self, "_release", None) is not None:
                self._release.attach()  # to the parameters, together with their scale groups

    def _form_scale_groups(self) -> None:
        if self.scale_groups is None:
            return
        params = [param for group in self.param_groups for param in group["params"]]
        names = [name for group in self.param_groups for name in group.get("param_names", ())]
        quantized = [
            own if isinstance(own, QuantizedTensor) else None for own in map(local, params)
        ]
        groups = resolve_scale_groups(
            self.scale_groups,
            params,
            names or None,
            [None if own is None else own.quantizer for own in quantized],
        )
        for own in quantized:
            if own is not None:
                own._shared.scale_group = None
        for group in groups:
            members = [quantized[i] for i in group]
            form_scale_group(members, [names[i] if names else f"parameter {i}" for i in group])

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if callable(self.scale_groups):
            try:
                pickle.dumps(self.scale_groups)
            except (pickle.PicklingError, AttributeError):
                # A lambda cannot be pickled. The groups that it has formed live in the weights.
                state["scale_groups"] = None
        return state

    @property
    def _storing(self) -> Storing:
        return Storing(*super()._storing[:5], self.quantize_from)

    def _scales_of(self, param: Tensor) -> Hashable:
        own = local(param)
        group = own._shared.scale_group if isinstance(own, QuantizedTensor) else None
        return param if group is None else group

    def _check_sharing(self, peers: list[Tensor]) -> None:
        group = self._scales_of(peers[0])
        if not isinstance(group, ScaleGroup):
            return
        checks.check_scale_group(peers, group)
        for param in peers:
            checks.check_steppable(type(self).__name__, param)
            self._check_state(param)

    def _check_capturable_option(self, options: Mapping[str, Any]) -> None:
        if options["capturable"]:
            raise NotImplementedError(
                "capturable must be False for FP4Adam, got True: re-quantization takes its scales "
                "from values that exist on the device only between launches, and a CUDA graph "
                f"would replay the step with the scalars of its capture; {_CAPTURE_AROUND}"
            )

    def _capture_error(self) -> str:
        return (
            "step() of FP4Adam must not be captured in a CUDA graph, got a call in a capture: "
            f"replays would repeat its scalars; {_CAPTURE_AROUND}"
        )
