"""The parameters of a module that can be quantized: weights of linear layers, stacks of experts."""

from collections.abc import Callable, Iterable

from torch import nn

Filter = Callable[[nn.Module, str], bool]


def check_module(model: nn.Module) -> None:
    """Raise TypeError unless ``model`` is an ``nn.Module``."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be an nn.Module, got {type(model).__name__}; pass the model itself"
        )


def check_filter(filter: Filter | None) -> None:
    """Raise TypeError unless ``filter`` is a function or None."""
    if not (filter is None or callable(filter)):
        raise TypeError(
            f"filter must be a function of a module and its name, got {filter!r}; pass "
            "lambda module, name: name != 'head'"
        )


def candidates(module: nn.Module) -> list[str]:
    """Names of the module's own parameters that :func:`fp4adam.quantize_model` would take.

    They are the weight of an ``nn.Linear``, and stacks of the weights of experts: 3-dimensional
    parameters of a module whose ``num_experts`` is their first size, as in transformers.
    """
    if isinstance(module, nn.Linear):
        return ["weight"]
    return [name for name in module._parameters if is_stack(module, name)]


def is_stack(module: nn.Module, name: str) -> bool:
    """Whether a parameter of a module is a stack of the weights of its experts."""
    param, experts = module._parameters.get(name), getattr(module, "num_experts", None)
    if param is None or isinstance(param, nn.UninitializedParameter):
        return False
    return isinstance(experts, int) and param.dim() == 3 and param.shape[0] == experts


def adapters(modules: Iterable[nn.Module]) -> set[nn.Module]:
    """The modules of PEFT's adapters, such as ``lora_A``, which the layers around them name."""
    found = set()
    for module in modules:
        names = getattr(module, "adapter_layer_names", ())
        for member in (getattr(module, name, None) for name in names):
            if isinstance(member, nn.Module):
                found.update(member.modules())
    return found
