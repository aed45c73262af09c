"""FusedAdam for parameters that live in 4 or 8 bits."""

from collections import defaultdict
from collections.abc import Hashable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fp4adam.distributed.collectives import guard_zero
from fp4adam.distributed.dtensor import local
from fp4adam.distributed.scale_exchange import Place, write_shards
from fp4adam.formats.scale_groups import (
    ScaleGroup,
    ScaleGroups,
    form_scale_group,
    lists_of_members,
    resolve_scale_groups,
    write_together,
)
from fp4adam.optim.adam import moves
from fp4adam.optim.fused_adam import FusedAdam
from fp4adam.tensors import row_window
from fp4adam.tensors.quantized_tensor import QuantizedTensor

QUANTIZE_FROM = ("master", "param_dtype")


class FP4Adam(FusedAdam):
    """``torch.optim.AdamW`` for :class:`QuantizedTensor` parameters beside plain ones.

    Parameters may also be ``NVFP4Tensor``, ``MXFP8Tensor`` and ``Float8BlockwiseQTensor`` of
    Transformer Engine, ``NVFP4Tensor`` and ``MXTensor`` of torchao, and of other classes that have
    a :class:`TensorAdapter`: their memory is written in place.

    A quantized parameter has an FP32 master weight in the optimizer's state. One kernel reads the
    gradient (BF16, FP16 or FP32), updates master and moments in FP32 and writes the re-quantized
    weight in place. After every step the bytes of a parameter are those of
    ``param.quantizer.quantize(master_param)``. State: 12 bytes per element.

    The master starts from the value before quantization where the parameter still has it (it is
    freed then), else from ``param.dequantize()``. A parameter that something else overwrites later
    (``load_state_dict``, an average) is where its master restarts from. A step with lr = 0 leaves
    the bytes alone.

    NVFP4 weights of a scale group are quantized with one amax, the largest of their masters, which
    each of them stores: a server that fuses them needs no other one. When some of them have
    gradients, all are written, and have a state; the step is fastest if all have.

    Args:
        params: As for :class:`FusedAdam`, as are all other arguments.
        quantize_from: "master" quantizes the FP32 master itself; "param_dtype" rounds it to the
            parameter's nominal dtype first, as Megatron's distributed optimizer does.
        scale_groups: Which NVFP4 weights share one amax, from the first step on: lists of lists of
            parameters or names, or a rule such as :func:`hf_scale_groups`; names are those of
            ``model.named_parameters()``, which ``params`` has to be then. None leaves it at the
            groups that ``quantize_model(..., scale_groups=...)`` made, () at none.

    Raises:
        NotImplementedError: For ``capturable=True``, and DTensors of other packages' tensors.
        TypeError: For tensors of a class that only an adapter could know, and that has none; if
            ``scale_groups`` is neither lists nor a rule.
        ValueError: For ``master_weights=False`` with quantized parameters, an unknown
            ``quantize_from``, or a tensor of another package that no kernel can write. If a member
            of a scale group is unknown, not NVFP4, or in two groups.
    """

    _option_names = (*FusedAdam._option_names, "quantize_from", "scale_groups")
    _updates_quantized = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        quantize_from: Literal["master", "param_dtype"] = "master",
        scale_groups: ScaleGroups | None = None,
        **kwargs: Any,
    ) -> None:
        if quantize_from not in QUANTIZE_FROM:
            raise ValueError(
                f"quantize_from must be one of {', '.join(QUANTIZE_FROM)}, got {quantize_from!r}; "
                "'master' keeps the most precision"
            )
        guard_zero()
        self.quantize_from = quantize_from
        self.scale_groups = None
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **kwargs)
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
                own._origin.scale_group = None
        for group in groups:
            members = [quantized[i] for i in group]
            form_scale_group(members, [names[i] if names else f"parameter {i}" for i in group])

    def _scales_of(self, param: Tensor) -> Hashable:
        own = local(param)
        group = own._origin.scale_group if isinstance(own, QuantizedTensor) else None
        return param if group is None else group

    def _check_sharing(self, mates: list[Tensor]) -> None:
        group = self._scales_of(mates[0])
        if not isinstance(group, ScaleGroup):
            return
        if len(mates) != len(group.names):
            raise ValueError(
                "all members of a scale group must be parameters of one optimizer, got "
                f"{len(mates)} of {', '.join(group.names)}; pass those without gradients as well, "
                "or scale_groups=()"
            )
        for param in mates:
            self._check_steppable(param)
            self._check_state(param)
            own = local(param)
            if own._origin.whole is None and not row_window.is_all(own):
                raise NotImplementedError(
                    "members of a scale group must be whole tensors, got some rows of one, of "
                    f"shape {tuple(own.shape)}; leave it out"
                )
        if len({place and place.group for place in map(Place.of, mates)}) > 1:
            raise NotImplementedError(
                "members of a scale group must be sharded over the same ranks, got "
                f"{', '.join(group.names)} sharded differently; shard them by one fully_shard"
            )

    def _capturable_error(self) -> str:
        return (
            "capturable must be False for FP4Adam, got True: re-quantization takes its scales from "
            "values that exist on the device only between launches, and a CUDA graph would replay "
            "the step with the scalars of its capture; capture forward and backward, and call "
            "step() outside the graph"
        )

    def _check_param(self, param: Tensor) -> None:
        super()._check_param(param)
        if isinstance(self._own(param), QuantizedTensor) and not self.master_weights:
            kind = type(local(param)).__name__
            raise ValueError(
                f"master_weights must be True for {kind} parameters, got False: updates "
                "are smaller than the steps between codes and would be lost; leave it True"
            )

    def _needs_master(self, param: Tensor) -> bool:
        return isinstance(param, QuantizedTensor) or super()._needs_master(param)

    def _new_master(self, owner: Tensor) -> Tensor:
        param = self._own(owner)
        if not isinstance(param, QuantizedTensor):
            return super()._new_master(owner)
        if owner in self._borrowed:
            return self._borrowed[owner].value()
        value = written_value(param)
        if value is None:
            return param.detach().dequantize(torch.float32)
        # A copy, since a state_dict taken before quantize_model may hold the same storage.
        return value.to(param.device, torch.float32, copy=True).contiguous()

    def _state_of(self, group: dict[str, Any], owner: Tensor) -> dict[str, Any]:
        state = super()._state_of(group, owner)
        if isinstance(local(owner), QuantizedTensor):
            # The master is here, from this value or from a checkpoint.
            if moves(group):
                local(owner).clear_high_precision_init_val()
            else:
                _free_init_val(local(owner))
        if owner in self._borrowed:
            self._borrowed[owner].clear_high_precision_init_val()
        return state

    def _write_dtype(self, param: Tensor) -> torch.dtype:
        if isinstance(param, QuantizedTensor) and self.quantize_from == "master":
            return torch.float32
        return param.dtype

    def _write_param(self, param: Tensor, master: Tensor) -> None:
        if isinstance(param, QuantizedTensor):
            param.quantize_(master.to(self._write_dtype(param)))
        else:
            super()._write_param(param, master)

    @torch.no_grad()
    def _write_params(self, owners: list[Tensor]) -> None:
        quantized = {owner for owner in owners if isinstance(local(owner), QuantizedTensor)}
        super()._write_params([owner for owner in owners if owner not in quantized])
        sharing: dict[Hashable, list[Tensor]] = defaultdict(list)
        for group in self.param_groups:
            for owner in group["params"]:
                if isinstance(local(owner), QuantizedTensor) and not owner.is_meta:
                    sharing[self._scales_of(owner)].append(owner)
        shards = []
        for scales, mates in sharing.items():
            own = [*map(local, mates)]
            is_new = not quantized.isdisjoint(mates)
            values = [self._value_of(owner) if is_new else None for owner in mates]
            dtypes = [*map(self._write_dtype, own)]
            place = Place.of(mates[0])
            if place is not None:
                # Whether a rank has something to write or not, others wait for it.
                alike = [[place] * len(own), values, dtypes, [scales] * len(own)]
                shards += zip(own, *alike, strict=True)
            elif is_new:
                write_together(own, [*map(Tensor.to, values, dtypes)])
        if shards:
            write_shards(*zip(*shards, strict=True))
        for owner in quantized:
            _free_init_val(local(owner))

    def _value_of(self, owner: Tensor) -> Tensor:
        """What this rank has of the master weight of a parameter, or of what that starts from."""
        param, state = local(owner), self.state.get(owner, {})
        has_master = "master_param" in state
        value = self._master_of(param, state) if has_master else self._new_master(param)
        return value.contiguous()

    def _param_is_of(self, owner: Tensor, master: Tensor) -> bool:
        param = self._own(owner)
        if not isinstance(param, QuantizedTensor):
            return super()._param_is_of(owner, master)
        written = written_value(param)
        if written is not None and torch.equal(written, master.to(written.dtype)):
            return True  # a high-precision copy of the weights, beside their masters
        value = master.to(self._write_dtype(param))
        if owner in self._borrowed:
            return self._borrowed[owner].is_of(value)
        if param._origin.whole is not None:
            return row_window.is_of(param, value)
        expected = param.quantizer.make_empty(tuple(value.shape), value.dtype, value.device)
        # The amax may be that of another member of its scale group.
        expected._write(value, amax=param.settled()._amax)
        return all(
            torch.equal(inner, expected.storage_tensors()[name])
            for name, inner in param.settled().storage_tensors().items()
        )


def written_value(param: QuantizedTensor) -> Tensor | None:
    """The value that a parameter has got before any step, where it still has it unrounded."""
    pending = param.pending_value()
    return param.get_high_precision_init_val() if pending is None else pending


def _free_init_val(param: QuantizedTensor) -> None:
    """Free the value before quantization; the next one that is written is kept instead."""
    value = param._high_precision_init_val
    if value is not None:
        param._high_precision_init_val = value.to("meta")
