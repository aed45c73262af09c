"""Groups of NVFP4 or Float8 weights that share one amax, because they are served as one matrix.

A server fuses q, k and v into one weight with one per-tensor scale. If they share their amax in
training, the bytes of each member are its rows of the fused weight.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence

import torch
from torch import Tensor

from fp4adam.tensors.quantized_tensor import QuantizedTensor
from fp4adam.tensors.quantizer import Quantizer

# A rule returns the same key for members of one group, and None for weights in no group.
Rule = Callable[[str], Hashable | None]
ScaleGroups = Rule | Iterable[Iterable[str | Tensor]]

# Layer names in Hugging Face models, and the layer that vLLM and SGLang fuse them into.
_PARTS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "w13": ("w1", "w3"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "qkv": ("query", "key", "value"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
_FUSED = {part: whole for whole, parts in _PARTS.items() for part in parts}


def hf_scale_groups(name: str) -> str | None:
    """The rule for Hugging Face models: q, k and v share an amax, and so do gate and up.

    Args:
        name: The name of a parameter, such as ``model.layers.0.self_attn.q_proj.weight``.

    Returns:
        The name of the fused layer, such as ``model.layers.0.self_attn.qkv_proj``, or None if the
        weight is not fused.
    """
    layer, _, kind = name.rpartition(".")
    whole, _ = fused_layer(layer)
    return whole if kind == "weight" else None


def fused_layer(layer: str) -> tuple[str | None, tuple[str, ...]]:
    """The layer that engines fuse a layer into, or None, and the layers in it, from the first row.

    Args:
        layer: The name of a layer, such as ``model.layers.0.self_attn.q_proj``.
    """
    parent, dot, part = layer.rpartition(".")
    if part not in _FUSED:
        return None, ()
    whole = _FUSED[part]
    return f"{parent}{dot}{whole}", tuple(f"{parent}{dot}{each}" for each in _PARTS[whole])


@dataclasses.dataclass(frozen=True, eq=False)
class ScaleGroup:
    """A scale group. It is compared by identity, so copies are different groups.

    Attributes:
        names: The names of the members.
    """

    names: tuple[str, ...]


def resolve_scale_groups(
    scale_groups: ScaleGroups,
    params: Sequence[Tensor],
    names: Sequence[str] | None,
    quantizers: Sequence[Quantizer | None],
) -> list[list[int]]:
    """The indices of the members of each group with at least two members.

    Args:
        scale_groups: A rule, which skips parameters without a per-tensor scale, or groups of names
            or parameters.
        params: All parameters that can be in a group.
        names: Their names, or None if they have none.
        quantizers: Their quantizers, None for plain parameters.

    Raises:
        ValueError: If a member is unknown, not NVFP4, or in two groups, or if names are needed but
            missing.
        TypeError: If ``scale_groups`` is neither.
    """
    can_share = [q is not None and q.layout.tensor_scale == "current" for q in quantizers]
    if callable(scale_groups):
        _check_named(names, "a rule")
        by_key: dict[Hashable, list[int]] = defaultdict(list)
        for i, name in enumerate(names or ()):
            key = scale_groups(name)
            if key is not None and can_share[i]:
                by_key[key].append(i)
        groups = [*by_key.values()]
    else:
        numbers: dict[str | Tensor, int] = {param: i for i, param in enumerate(params)}
        numbers.update((name, i) for i, name in enumerate(names or ()))
        groups, seen = [], set()
        for group in lists_of_members(scale_groups):
            for member in group:
                if isinstance(member, str):
                    _check_named(names, repr(member))
                _check_member(member, numbers, quantizers, seen)
                seen.add(numbers[member])
            groups.append([numbers[member] for member in group])
    return [group for group in groups if len(group) > 1]


def lists_of_members(scale_groups: Iterable[Iterable[str | Tensor]]) -> list[list[str | Tensor]]:
    """Convert groups given as iterables of members to lists; raises TypeError for anything else."""
    is_list = _is_list(scale_groups)
    lists = list(scale_groups) if is_list else [scale_groups]
    for group in lists:
        if not _is_list(group):
            raise TypeError(
                "scale_groups must be a rule or a list of lists of names or parameters, got "
                f"{type(group).__name__}{' in the list' if is_list else ''}; pass "
                "hf_scale_groups, or [[name, name], ...]"
            )
    return [list(group) for group in lists]


def _is_list(members: object) -> bool:
    return isinstance(members, Iterable) and not isinstance(members, str | Tensor)


def _check_named(names: Sequence[str] | None, what: str) -> None:
    if names is None:
        raise ValueError(
            f"params must have names for scale_groups, got {what} and parameters without; pass "
            "model.named_parameters(), or lists of parameters"
        )


def _check_member(
    member: str | Tensor,
    numbers: dict[str | Tensor, int],
    quantizers: Sequence[Quantizer | None],
    seen: set[int],
) -> None:
    if not isinstance(member, str | Tensor):
        raise TypeError(
            f"members of a scale group must be names or parameters, got {type(member).__name__}"
        )
    what = repr(member) if isinstance(member, str) else f"one of shape {tuple(member.shape)}"
    if member not in numbers:
        known = sum(q is not None for q in quantizers)
        raise ValueError(
            f"members of a scale group must be among the {known} quantized weights, got {what}; "
            "take names from model.named_parameters()"
        )
    quantizer = quantizers[numbers[member]]
    if quantizer is None or quantizer.layout.tensor_scale != "current":
        kind = "a plain tensor" if quantizer is None else quantizer.tensor_class.__name__
        raise ValueError(
            f"members of a scale group must be NVFP4 or Float8 weights, got {what}, {kind}: there "
            "is no scale of the whole tensor to share; leave it out"
        )
    if numbers[member] in seen:
        raise ValueError(f"a weight must be in one scale group, got {what} twice; join the groups")


def form_scale_group(members: Sequence[QuantizedTensor], names: Iterable[str]) -> None:
    """Make NVFP4 tensors members of a new group, without changing their bytes."""
    group = ScaleGroup(tuple(names))
    for member in members:
        member.scale_group = group


torch.serialization.add_safe_globals([ScaleGroup])
