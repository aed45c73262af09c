"""What happens to all parameters of an optimizer when it is given them."""

import warnings
from typing import Any

from torch import Tensor

from fp4adam.distributed.dtensor import local
from fp4adam.formats.scale_groups import ScaleGroups, form_scale_group, resolve_scale_groups
from fp4adam.interop.adapter import is_foreign
from fp4adam.tensors.quantized_tensor import QuantizedTensor


def join_scale_groups(groups: list[dict[str, Any]], scale_groups: ScaleGroups | None) -> None:
    """Make quantized weights members of these scale groups, and no others; None leaves them.

    Raises:
        ValueError: If a member is unknown, not NVFP4 or Float8 with current scaling, or in two
            groups; all weights are in the scale groups of before then.
    """
    if scale_groups is None:
        return
    params = [param for group in groups for param in group["params"]]
    names = [name for group in groups for name in group.get("param_names", ())]
    found = map(local, params)
    quantized = [own if isinstance(own, QuantizedTensor) else None for own in found]
    quantizers = [None if own is None else own.quantizer for own in quantized]
    chosen = resolve_scale_groups(scale_groups, params, names or None, quantizers)
    for own in quantized:
        if own is not None:
            own.scale_group = None
    for group in chosen:
        members = [quantized[i] for i in group]
        form_scale_group(members, [names[i] if names else f"parameter {i}" for i in group])


def warn_of_plain_matrices(params: list[Tensor]) -> None:
    """Warn if ``quantize_model`` seems to have been forgotten."""
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
