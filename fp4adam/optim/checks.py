"""Checks of everything that the optimizers refuse. They raise, and change nothing."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fp4adam.distributed.dtensor import is_dtensor, local, sharded_dims
from fp4adam.distributed.scale_exchange import ShardInfo
from fp4adam.formats.scale_groups import ScaleGroup
from fp4adam.interop.adapter import adapter_of, is_foreign
from fp4adam.optim.options import Options
from fp4adam.optim.state_codec import FACTORED, FLOAT32, FLOAT64, PLAIN
from fp4adam.optim.state_tensor import SCALES, is_dense
from fp4adam.tensors import rows
from fp4adam.tensors.quantized_tensor import QuantizedTensor

GRAD_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PARAM_DTYPES = (torch.float64, *GRAD_DTYPES)
_OF_OPTIMIZER = {*Options.__dataclass_fields__, "scale_groups"} - {"name", "capturable"}
CAPTURE_AROUND = (
    "capture forward and backward, and call step() outside the graph: it writes weights at the "
    "addresses that the graph reads"
)


def check_options(options: Options, group: Mapping[str, Any], as_te: bool = False) -> None:
    codec = options.codecs(torch.float32)["exp_avg_sq"]
    master = options.master_weight_dtype if options.master_weights else None
    decouples = codec is not FACTORED or group["decoupled_weight_decay"]
    if codec is FACTORED and (as_te or not decouples or master not in (None, torch.int8)):
        raise NotImplementedError(
            "factored second moments must come with decoupled_weight_decay, int8 masters or none, "
            f"and without Transformer Engine's layout, got {decouples}, {master} and {options.name}"
            f" with as_te={as_te}; pass states='factored' to FP4Adam, without adam_w_mode"
        )
    if not codec.exact and group["amsgrad"]:
        raise NotImplementedError(
            f"exp_avg_sq_dtype must be float32 with amsgrad, got {options.exp_avg_sq_dtype}: the "
            "maximum of many rounded numbers is biased upwards; leave amsgrad False"
        )


def check_mode() -> None:
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "step() must not be called in inference mode, got torch.inference_mode(): state "
            "created there cannot be updated outside; call it outside inference mode"
        )


def check_quantize_from(quantize_from: str) -> None:
    if quantize_from not in ("master", "param_dtype"):
        raise ValueError(
            f"quantize_from must be one of master, param_dtype, got {quantize_from!r}; 'master' "
            "keeps the most precision"
        )


def check_group_names(options: Options, group: Mapping[str, Any]) -> None:
    # Wrappers, such as torch's ZeroRedundancyOptimizer, repeat the options of the optimizer.
    for name in sorted(group.keys() & _OF_OPTIMIZER):
        if group[name] not in (None, getattr(options, name, None)):
            raise ValueError(
                f"{name} must be an option of the optimizer, got it in a parameter group, where it "
                "would have no effect; pass it to the constructor, or make an optimizer for each"
            )
    if "adam_w_mode" in group:
        raise ValueError(
            "decoupled_weight_decay must be set in a parameter group that is in use, got "
            'adam_w_mode; it is called group["decoupled_weight_decay"] there, as in torch.optim'
        )


def is_quantized(param: Tensor) -> bool:
    """True for quantized tensors of any package, and DTensors of them."""
    own = local(param)
    return isinstance(own, QuantizedTensor) or is_foreign(own)


def is_factored(param: Tensor) -> bool:
    """Whether second moments of a parameter can be factored: those of quantized matrices."""
    return is_quantized(param) and param.dim() == 2 and param.numel() > 0


def check_param(options: Options, param: Tensor) -> None:
    name, own = options.name, local(param)
    if is_foreign(own):
        adapter_of(own)  # raises if there is none
    if is_quantized(own) and options.capturable:
        raise NotImplementedError(
            "capturable must be False for quantized parameters, got True: re-quantization takes "
            "its scales from values that exist on the device only between launches, and a CUDA "
            f"graph would replay the step with the scalars of its capture; {CAPTURE_AROUND}"
        )
    if options.exp_avg_sq_dtype == "factored" and is_factored(param) and sharded_dims(param):
        spec = getattr(own, "global_spec", None)
        if spec is None or spec.is_parallel or ShardInfo.of_rows(param) is None:
            raise NotImplementedError(
                "weights must be replicated, or quantized by this package and sharded by "
                "fully_shard alone, to have factored second moments, got one of shape "
                f"{tuple(param.shape)} with placements {param.placements}; pass states='8bit'"
            )
    if is_quantized(own) and not options.master_weights:
        _check_needs_no_master(own)
    if param.is_complex() or param.layout != torch.strided:
        raise ValueError(
            f"parameters must be real and dense for {name}, got {param.dtype} with layout "
            f"{param.layout}; use torch.view_as_real(param), or torch.optim.SparseAdam"
        )
    if param.requires_grad:
        _check_dtype(name, param)
    tensors = own.storage_tensors().values() if isinstance(own, QuantizedTensor) else (own,)
    if any(map(Tensor.is_inference, tensors)):
        raise RuntimeError(
            f"parameters must be ordinary tensors for {name}, got one that was made in inference "
            "mode; build or quantize the model outside torch.inference_mode(), or clone the "
            "parameter there"
        )


def _check_needs_no_master(own: Tensor) -> None:
    known = isinstance(own, QuantizedTensor)
    layout = (own.quantizer if known else adapter_of(own).quantizer(own)).layout
    has_power_of_two = layout.scale_type == "e8m0" or layout.scale_rule.force_pow_2_scales
    if layout.code_type.name == "e4m3" and layout.tensor_scale is None and has_power_of_two:
        return
    raise ValueError(
        f"master_weights must be True for {type(own).__name__} parameters, got False: without "
        "masters, updates round codes stochastically, which needs E4M3 codes and scales that are "
        "powers of two (MXFP8, or Float8Block with force_pow_2_scales); leave it True. "
        "states='8bit' keeps a master in one byte"
    )


def check_known(params: Sequence[Tensor], known: Iterable[Tensor]) -> None:
    known = set(known)
    for i, param in enumerate(params):
        if param not in known:
            raise ValueError(
                "params must be parameters of this optimizer, got number "
                f"{i}, of shape {tuple(param.shape)}, which is in none of its groups; pass "
                "tensors from param_groups"
            )


def check_distinct(params: Sequence[Tensor]) -> None:
    seen: set[Any] = set()
    for i, param in enumerate(params):
        memory = {param, getattr(local(param), "_shared", param)}
        if not seen.isdisjoint(memory):
            raise ValueError(
                f"each parameter must be in the groups once, got number {i}, of shape "
                f"{tuple(param.shape)}, twice: both updates would write its memory; remove one"
            )
        seen |= memory


def check_scale_group(peers: Sequence[Tensor], group: ScaleGroup) -> None:
    """Raise if ``peers``, an optimizer's parameters of a group, cannot be quantized together."""
    if len(peers) != len(group.names):
        raise ValueError(
            "all members of a scale group must be parameters of one optimizer, got "
            f"{len(peers)} of {', '.join(group.names)}; pass those without gradients as well, "
            "or scale_groups=()"
        )
    if len({tuple(info.group for info in ShardInfo.of(peer)) for peer in peers}) > 1:
        raise NotImplementedError(
            "members of a scale group must be sharded over the same ranks, got "
            f"{', '.join(group.names)} sharded differently; shard them in one fully_shard call"
        )


def check_steppable(name: str, param: Tensor) -> None:
    own = local(param)
    if is_dtensor(param):
        if any(place.is_partial() for place in param.placements):
            raise NotImplementedError(
                f"parameters must be replicated or sharded for {name}, got placements "
                f"{param.placements}; redistribute them"
            )
        ShardInfo.of(param)
    is_own = isinstance(own, QuantizedTensor) and own.global_spec is None
    if is_own and (own._shared.rows is not None or not rows.is_all(own)):
        raise NotImplementedError(
            f"parameters must be whole quantized tensors, got a slice of shape {tuple(own.shape)}, "
            "whose scales depend on other rows; pass the whole weight, or quantize the values: "
            "nn.Parameter(p.quantizer.quantize(p.detach().dequantize()))"
        )
    if param.is_meta or not param.is_floating_point():
        raise RuntimeError(
            "`fused=True` requires all the params to be floating point Tensors of a real "
            f"device, got {param.dtype} on {param.device}; materialize them with to_empty(), "
            "leave out integers"
        )
    _check_dtype(name, param)


def _check_dtype(name: str, param: Tensor) -> None:
    if param.dtype not in PARAM_DTYPES:
        raise TypeError(
            f"parameters must be float64, float32, bfloat16 or float16 for {name}, got "
            f"{param.dtype}; call quantize_model, or make_trainable for a model that was loaded "
            "in FP8, before creating the optimizer"
        )


def check_capturable(param: Tensor, grad: Tensor | None) -> None:
    """Raises for a parameter that kernels cannot step: operators count steps on the host."""
    if not param.numel():
        return
    got = f"a parameter of shape {tuple(param.shape)}, {param.dtype} on {param.device}"
    if grad is not None:
        got += f", with a gradient of strides {grad.stride()}"
    raise RuntimeError(
        "capturable=True needs parameters that the kernels step: on a GPU, not float64, dense, "
        f"aligned to 16 bytes, with gradients of the same strides, got {got}; move the model to "
        "the GPU first, make gradients contiguous, or leave capturable False"
    )


def check_gradient(name: str, param: Tensor, grad: Tensor) -> None:
    """``grad``: The local part."""
    if not isinstance(grad, Tensor) or isinstance(grad, QuantizedTensor):
        raise TypeError(
            f"gradients must be plain tensors for {name}, got a {type(grad).__name__}; assign a "
            "tensor of the shape of the parameter, such as grad.dequantize(), or None"
        )
    if grad.layout != torch.strided:
        raise RuntimeError(
            f"{name} does not support sparse gradients, got layout {grad.layout}; use "
            "torch.optim.SparseAdam, or sparse=False in the embedding"
        )
    check_steppable(name, param)
    if grad.dtype not in (PARAM_DTYPES if param.dtype == torch.float64 else GRAD_DTYPES):
        raise TypeError(
            f"gradients must be float32, bfloat16 or float16 for {name}, got {grad.dtype}; cast "
            "them"
        )
    own = local(param)
    if grad.shape != own.shape or grad.device != own.device:
        raise ValueError(
            f"the gradient must have the shape and device of its parameter, {tuple(own.shape)} on "
            f"{own.device}, got {tuple(grad.shape)} on {grad.device}; recompute it, or "
            "redistribute a DTensor like its parameter"
        )


def check_state(
    param: Tensor, state: dict[str, Any], options: Options, is_offloaded: bool = False
) -> None:
    """The kernels take bare addresses: they would write past the end of a tensor too small."""
    devices = {param.device, torch.device("cpu")} if is_offloaded else {param.device}
    own, codecs = local(param), options.codecs(param.dtype, is_factored(param))
    codecs["max_exp_avg_sq"] = FLOAT64 if param.dtype == torch.float64 else FLOAT32
    for name in (*SCALES, "param_remainder"):
        if name not in state:
            continue
        value, codes = state[name], local(state[name])
        codec = codecs.get(name)
        shape, of_scales = (codec or PLAIN).shapes(own.shape)
        is_alike = codes.shape == shape and (codec is FACTORED or value.shape == param.shape)
        if not is_alike or value.device not in devices:
            raise RuntimeError(
                "the state must have the shape and device of its parameter, "
                f"{tuple(param.shape)} on {param.device} ({tuple(own.shape)} on this rank), got "
                f"{name} {tuple(value.shape)} on {value.device} ({tuple(codes.shape)}); "
                "optimizer.load_state_dict(optimizer.state_dict()) moves it, for a new shape "
                "create a new optimizer"
            )
        is_fp32 = codes.dtype == torch.float32 and SCALES.get(name) not in state
        # A master that was just loaded; the next step encodes it.
        codec = None if name == "master_param" and is_fp32 else codec
        dtype = torch.int16 if name == "param_remainder" else codec and codec.dtype
        is_right = codec is None or codec.exact or is_dense(codes)
        wanted = found = None
        if codec is not None and codec.scaled:
            wanted = tuple(of_scales), codec.scale_dtype, codes.device, True
            if isinstance(scales := state.get(SCALES[name]), Tensor):
                found = tuple(scales.shape), scales.dtype, scales.device, scales.is_contiguous()
        if not is_right or dtype not in (None, codes.dtype) or found != wanted:
            raise RuntimeError(
                f"{name} must be dense and stored as {dtype}, with contiguous scales {wanted}, got "
                f"{codes.dtype} with strides {codes.stride()} and scales {found}; load states with "
                "load_state_dict()"
            )
