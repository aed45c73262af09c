"""FusedAdam for parameters that are stored in 4 or 8 bits."""

import inspect
import pickle
import warnings
from typing import Any, Literal

from torch.optim.optimizer import ParamsT

from fp4adam.distributed.dtensor import local
from fp4adam.formats.scale_groups import (
    ScaleGroups,
    form_scale_group,
    lists_of_members,
    resolve_scale_groups,
)
from fp4adam.interop.adapter import is_foreign
from fp4adam.optim import checks
from fp4adam.optim.fused_adam import FusedAdam, Option
from fp4adam.tensors.quantized_tensor import QuantizedTensor


class FP4Adam(FusedAdam):
    """``torch.optim.AdamW`` for models whose weights live in 4 or 8 bits, and plain parameters too.

    ::

        model = fp4adam.quantize_model(model, "nvfp4")
        optimizer = fp4adam.FP4Adam(model.parameters(), lr=3e-4)

    Parameters may also be ``NVFP4Tensor``, ``MXFP8Tensor``, ``Float8BlockwiseQTensor`` and
    ``Float8Tensor`` of Transformer Engine, ``NVFP4Tensor`` and ``MXTensor`` of
    torchao, or of any class with a :class:`TensorAdapter`. The step writes their memory in place.

    A quantized parameter has an FP32 master weight in the optimizer's state. One kernel reads the
    gradient (BF16, FP16 or FP32), updates master and moments in FP32 and writes the re-quantized
    weight in place. After every step the bytes of a parameter are those of
    ``param.quantizer.quantize(master_param)``; with delayed scaling those of the master under the
    scale of earlier values. State: 12 bytes per element.

    With ``states="8bit"`` it takes 3.06: FP8 moments, and ``master_weight_dtype=torch.int8``. The
    master is then the weight and an int8 remainder, rounded stochastically, in units of 1/239 of
    the gap between codes. Codes and scales are those of the updated value before its remainder
    is rounded. ``state_dict()`` has FP32 masters. A remainder is of use only with its codes: if
    other code writes the weight, even the same bytes, or moves it to other memory between two
    steps, the master restarts from the weight, with a warning in the log.

    With ``master_weights=False`` MXFP8 weights, and Float8Block ones with scales that are powers of
    two, have no master: each update is rounded stochastically to what E4M3 codes can hold. With
    ``states="8bit"`` the state then takes 2.06 bytes per element.

    The master starts from the high-precision initial value if the parameter still has it, and frees
    it; otherwise it starts from its decoded values. If other code overwrites the parameter
    later (``load_state_dict``, weight averaging), the master restarts from the new value. A step
    with lr = 0 leaves the bytes alone.

    NVFP4 and Float8 weights of a scale group are quantized with one amax, the largest magnitude in
    all of their masters. Each member stores it, so a server can fuse them without re-quantizing. If
    any member has a gradient, all members are written and have a state. The step is fastest if all
    of them have gradients.

    States, groups and checkpoints look like those of ``torch.optim``. :class:`FusedAdam` is the
    same optimizer with the layout of Transformer Engine's. This one has that layout too if it is
    made with ``adam_w_mode``, as Megatron-LM makes its optimizers.

    Args:
        params: Parameters, (name, parameter) pairs or dicts of parameter groups; those of a model
            after ``quantize_model``.
        *args: Those of :class:`FusedAdam`, by position.
        **options: The same by name; for quantized parameters ``capturable`` must stay False:
            capture forward and backward, and call ``step()`` outside of the CUDA graph. It writes
            weights in place, where the graph reads them.
        quantize_from: "master" quantizes the FP32 master itself; "param_dtype" rounds it to the
            parameter's nominal dtype first, as Megatron's distributed optimizer does.
        scale_groups: The NVFP4 or Float8 weights that share one amax, from the first step on: lists
            of lists of parameters or names, or a rule such as :func:`hf_scale_groups`. Names and
            rules need ``params=model.named_parameters()``. None keeps the groups made by
            ``quantize_model(..., scale_groups=...)``; () means no groups.

    Raises:
        NotImplementedError: For ``capturable=True`` with quantized parameters, and for DTensors of
            other packages' tensors that ``fully_shard`` has not made.
        TypeError: If a parameter is of another package's class without an adapter, or
            ``scale_groups`` is neither lists nor a rule.
        ValueError: For ``master_weights=False`` with weights in other formats, an unknown
            ``quantize_from``, or another package's tensor that the kernels cannot write; if a
            member of a scale group is unknown, not NVFP4 or Float8 with current scaling, or in two
            groups.
    """

    quantize_from = Option()

    def __init__(
        self,
        params: ParamsT,
        *args: Any,
        quantize_from: Literal["master", "param_dtype"] = "master",
        scale_groups: ScaleGroups | None = None,
        **options: Any,
    ) -> None:
        checks.check_quantize_from(quantize_from)
        self.scale_groups = None
        # Transformer Engine's keyword, which torch does not have, tells whose code this is.
        self._has_te_layout = "adam_w_mode" in options
        super().__init__(params, *args, **options)
        if quantize_from != self.quantize_from:
            self.quantize_from = quantize_from
        if scale_groups is not None and not callable(scale_groups):
            scale_groups = lists_of_members(scale_groups)
        self.scale_groups = scale_groups
        self._join_groups()
        self._warn_of_plain_matrices()

    def _join_groups(self) -> None:
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
        shared = [own._shared for own in quantized if own is not None]
        before = [each.scale_group for each in shared]
        try:
            for each in shared:
                each.scale_group = None
            for group in groups:
                members = [quantized[i] for i in group]
                form_scale_group(members, [names[i] if names else f"parameter {i}" for i in group])
        except BaseException:
            for each, scale_group in zip(shared, before, strict=True):
                each.scale_group = scale_group
            raise

    def _warn_of_plain_matrices(self) -> None:
        """Warn if ``quantize_model`` seems to have been forgotten."""
        params = [param for group in self.param_groups for param in group["params"]]
        # Those of adapters are plain beside a frozen base.
        if QuantizedTensor.exists or any(is_foreign(local(param)) for param in params):
            return
        if any(param.dim() > 1 for param in params):
            warnings.warn(
                "FP4Adam was given no quantized weights and trains everything in high precision; "
                "call quantize_model(model, ...) before creating the optimizer, or ignore this "
                "warning if that is intended",
                stacklevel=3,
            )

    def __getstate__(self) -> dict[str, Any]:
        own = {"scale_groups": self.scale_groups, "_has_te_layout": self._has_te_layout}
        state = {**super().__getstate__(), **own}
        if callable(self.scale_groups):
            try:
                pickle.dumps(self.scale_groups)
            except (pickle.PicklingError, AttributeError):
                # A lambda cannot be pickled. The groups that it has formed live in the weights.
                state["scale_groups"] = None
        return state


def _signature() -> inspect.Signature:
    """The arguments of ``FusedAdam``, which ``FP4Adam`` passes on, and its own."""
    inherited = inspect.signature(FusedAdam.__init__).parameters.values()
    own = inspect.signature(FP4Adam.__init__).parameters.values()
    own = [each for each in own if each.kind is inspect.Parameter.KEYWORD_ONLY]
    return inspect.Signature([*inherited, *own], return_annotation=None)


FP4Adam.__init__.__signature__ = _signature()
