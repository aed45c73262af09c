"""FusedAdam for parameters that live in 4 or 8 bits."""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fp4adam import row_window
from fp4adam.adam import moves
from fp4adam.fused_adam import FusedAdam
from fp4adam.local_tensor import local
from fp4adam.quantized_tensor import QuantizedTensor
from fp4adam.shared_scales import Place, write_shards

QUANTIZE_FROM = ("master", "param_dtype")


class FP4Adam(FusedAdam):
    """``torch.optim.AdamW`` for :class:`QuantizedTensor` parameters beside plain ones.

    So are ``NVFP4Tensor``, ``MXFP8Tensor`` and ``Float8BlockwiseQTensor`` parameters of Transformer
    Engine, ``NVFP4Tensor`` and ``MXTensor`` of torchao, and other classes that have a
    :class:`TensorAdapter`: their memory is written in place.

    A quantized parameter has an FP32 master weight in the optimizer's state. One kernel reads the
    gradient (BF16, FP16 or FP32), updates master and moments in FP32 and writes the re-quantized
    weight in place. After every step the bytes of a parameter are those of
    ``param.quantizer.quantize(master_param)``. State: 12 bytes per element.

    The master starts from the value before quantization where the parameter still has it (it is
    freed then), else from ``param.dequantize()``. A parameter that something else overwrites later
    (``load_state_dict``, an average) is where its master restarts from. A step with lr = 0 leaves
    the bytes alone.

    Args:
        params: As for :class:`FusedAdam`, as are all other arguments.
        quantize_from: "master" quantizes the FP32 master itself; "param_dtype" rounds it to the
            parameter's nominal dtype first, as Megatron's distributed optimizer does.

    Raises:
        NotImplementedError: For ``capturable=True``, and DTensors of other packages' tensors.
        TypeError: For tensors of a class that only an adapter could know, and that has none.
        ValueError: For ``master_weights=False`` with quantized parameters, an unknown
            ``quantize_from``, or a tensor of another package that no kernel can write.
    """

    _option_names = (*FusedAdam._option_names, "quantize_from")
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
        **kwargs: Any,
    ) -> None:
        if quantize_from not in QUANTIZE_FROM:
            raise ValueError(
                f"quantize_from must be one of {', '.join(QUANTIZE_FROM)}, got {quantize_from!r}; "
                "'master' keeps the most precision"
            )
        self.quantize_from = quantize_from
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **kwargs)

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

    def _write_params(self, owners: list[Tensor]) -> None:
        # Whether a rank has something to write or not, others wait for it.
        every_owner = [param for group in self.param_groups for param in group["params"]]
        places = {owner: Place.of(owner) for owner in every_owner if not owner.is_meta}
        sharing = {owner: place for owner, place in places.items() if place is not None}
        super()._write_params([owner for owner in owners if owner not in sharing])
        shards, written = [*map(local, sharing)], set(owners)
        values = [
            self._master_of(shard, self.state[owner]).contiguous() if owner in written else None
            for owner, shard in zip(sharing, shards, strict=True)
        ]
        dtypes = [*map(self._write_dtype, shards)]
        with torch.no_grad():
            write_shards(shards, [*sharing.values()], values, dtypes)
        for owner in owners:
            if isinstance(local(owner), QuantizedTensor):
                _free_init_val(local(owner))

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
        expected = param.quantizer.quantize(value)
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
