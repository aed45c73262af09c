"""AdamW with FP32 master weights and moments, one fused kernel per kind of parameter."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from itertools import chain
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, ParamsT
from torch.utils.weak import WeakTensorKeyDictionary

from fp4adam.distributed.dtensor import first_element, like, local, part_for, sharding_groups
from fp4adam.distributed.scale_exchange import ShardInfo
from fp4adam.interop.adapter import adapter_of, count_writes, is_foreign, memory
from fp4adam.interop.borrowed_tensor import BorrowedTensor, ScaleWriteback
from fp4adam.optim.adam import Scalars, moves
from fp4adam.optim.grad_norm import GradNorm
from fp4adam.optim.hyper_parameters import check_hyper_parameters, check_numbers
from fp4adam.optim.launch_group import Member
from fp4adam.optim.memory_layout import is_dense
from fp4adam.optim.optimizer_state import (
    STATE_NAMES,
    check_state_dict,
    saved_keys,
    saved_states,
    state_like,
)
from fp4adam.optim.state_codec import (
    FLOAT64,
    PLAIN,
    REMAINDER,
    StateCodec,
    join_master,
    split_master,
    state_codec,
)
from fp4adam.optim.step_plan import StepPlan
from fp4adam.optim.stored_state import StoredState, adam_stored_, restored
from fp4adam.tensors import backend
from fp4adam.tensors.quantized_tensor import QuantizedTensor

GRAD_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PARAM_DTYPES = (torch.float64, *GRAD_DTYPES)


class FusedAdam(Optimizer):
    """Drop-in ``torch.optim.AdamW`` that keeps 16-bit parameters exact through FP32 master weights.

    All arithmetic is FP32 and gives the same bits on a CPU and on a GPU (FP64 for FP64 parameters,
    where torch's own square root differs in the last bit).
    State per parameter: ``exp_avg`` and ``exp_avg_sq`` in FP32 (4 bytes per element each), one
    ``step``, ``max_exp_avg_sq`` with ``amsgrad`` (4 bytes), and ``master_param`` for BF16 and FP16
    parameters (4 bytes).

    Moments can be stored in less. The kernels decode, update in FP32 and encode again within the
    one pass, and round so that the expected value is exact: what a code has no room for decides how
    often it is rounded up, the same in every run. Blocks of 32 elements in the order of memory
    share a power of two, in ``exp_avg_scale`` and ``exp_avg_sq_scale`` (uint8):

    =================  =====================  ==============================================
    dtype              bytes per element      ``exp_avg``; ``exp_avg_sq``
    =================  =====================  ==============================================
    float32            4                      FP32
    bfloat16           2                      BF16
    float16            2 + 1/32               FP16; 16-bit floats without sign
    float8_e4m3fn      1 + 1/32               E4M3; 8-bit floats without sign
    =================  =====================  ==============================================

    ``master_weight_dtype=torch.float16`` stores ``master_param`` as first moments in float16, with
    ``master_param_scale``. With ``store_param_remainders`` a BF16 parameter is the upper half of
    its master, and ``param_remainder`` (int16, 2 bytes) what is to be added to the bits. FP64
    parameters keep FP64 moments.

    Args:
        params: Parameters, (name, parameter) pairs or dicts of parameter groups.
        lr: Learning rate, >= 0; a one-element tensor is read at every step.
        betas: Decay rates of the first and second moment, in [0, 1).
        eps: Term added to the denominator, >= 0.
        weight_decay: Weight decay coefficient, >= 0.
        amsgrad: Divide by the largest second moment so far.
        bias_correction: Correct the moments for their start at zero; False leaves them as they are.
        adam_w_mode: Decoupled decay (AdamW); False adds ``weight_decay * param`` to the gradient.
        master_weights: Keep FP32 masters of BF16 and FP16 parameters.
        exp_avg_dtype: Storage of first moments: float32, bfloat16, float16 or float8_e4m3fn, which
            may also be called uint8.
        exp_avg_sq_dtype: The same of second moments; not with ``amsgrad`` unless float32.
        master_weight_dtype: Storage of masters, those of quantized parameters included: float32, or
            float16.
        store_param_remainders: Keep of the FP32 master of a BF16 parameter only what the parameter
            lacks, which is then the master rounded with ties away from zero. Quantized parameters
            keep their masters.
        use_decoupled_grad: Read ``param.decoupled_grad`` instead of ``param.grad``; it may have
            another dtype than the parameter.
        maximize: Ascend instead of descend.
        foreach: Accepted for compatibility; updates are always batched.
        capturable: Not supported: the scalars of a step are computed on the host.
        differentiable: Not supported.
        fused: False takes plain torch operators instead of the kernels, with the same results.

    Raises:
        ValueError: If a hyper-parameter is out of range; the texts are those of ``torch.optim``. If
            there is no such storage of a moment, or for ``store_param_remainders`` without FP32
            masters.
        NotImplementedError: For ``capturable`` and ``differentiable``, and for ``amsgrad`` with
            second moments that are not float32.
        RuntimeError: If ``fused`` and ``foreach`` are both True.
    """

    # GradScaler then hands over grad_scale and found_inf as attributes for the time of a step.
    _step_supports_amp_scaling = True
    _updates_quantized = False
    # Options of the whole optimizer, which copies and pickles keep.
    _option_names: tuple[str, ...] = (
        "master_weights", "use_decoupled_grad", "exp_avg_dtype", "exp_avg_sq_dtype",
        "master_weight_dtype", "store_param_remainders",
    )  # fmt: skip

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
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "bias_correction": bias_correction,
            "adam_w_mode": adam_w_mode,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
            # What tells AdamW from Adam in a checkpoint of torch.optim.
            "decoupled_weight_decay": adam_w_mode,
        }
        self.exp_avg_dtype, self.exp_avg_sq_dtype = exp_avg_dtype, exp_avg_sq_dtype
        self.master_weight_dtype = master_weight_dtype
        self.store_param_remainders = store_param_remainders
        if store_param_remainders and master_weight_dtype != torch.float32:
            raise ValueError(
                "master_weight_dtype must be torch.float32 with store_param_remainders, got "
                f"{master_weight_dtype}: remainders complete FP32 masters; leave one of the two out"
            )
        if store_param_remainders and not master_weights:
            raise ValueError(
                "store_param_remainders must be False with master_weights=False, got True: there "
                "are no masters to keep a part of; leave master_weights True"
            )
        self._check_options(defaults)
        if isinstance(betas[0], Tensor):
            defaults["betas"] = tuple(beta.squeeze() for beta in betas)
        self.master_weights = master_weights
        self.use_decoupled_grad = use_decoupled_grad
        self._forget()
        super().__init__(params, defaults)

    def _forget(self) -> None:
        """Start without a plan and without knowledge of parameter versions."""
        self._plan: StepPlan | None = None
        self._planned: tuple[list[dict], list[Tensor], list[dict]] = ([], [], [])
        # Of parameters with masters, after the last step or load.
        self._versions: dict[Tensor, int] = {}
        # Of masters that state_dict() has returned: their versions, and marks of their parameters.
        self._handed_out = WeakTensorKeyDictionary()
        self._grad_norm: GradNorm | None = None
        # Of parameters of other packages.
        self._borrowed: dict[Tensor, BorrowedTensor] = {}
        # By device: what the next step multiplies gradients by.
        self._clip: dict[torch.device, Tensor] = {}

    @property
    def state(self) -> dict[Any, Any]:
        """State per parameter; as in ``torch.optim.Optimizer``.

        Waits for the device if it may have left out the last step, to say the right ``step``.
        """
        if getattr(self, "_plan", None) is not None:
            self._plan.settle()
        return self.__dict__["state"]

    @state.setter
    def state(self, state: dict[Any, Any]) -> None:
        self.__dict__["state"] = state

    def _check_options(self, options: Mapping[str, Any]) -> None:
        """Raise if hyper-parameters or flags of a group are out of range or not supported."""
        if options["capturable"]:
            raise NotImplementedError(self._capturable_error())
        check_hyper_parameters(type(self).__name__, options)
        self._check_storage(options)

    def _check_storage(self, options: Mapping[str, Any]) -> None:
        """Raise if the moments cannot be stored as they are to be."""
        codecs = self._codecs(torch.float32)
        if options["amsgrad"] and not codecs["exp_avg_sq"].exact:
            raise NotImplementedError(
                f"exp_avg_sq_dtype must be float32 with amsgrad, got {self.exp_avg_sq_dtype}: the "
                "largest of many rounded numbers is too large; leave amsgrad False"
            )

    def _codecs(self, param_dtype: torch.dtype) -> dict[str, StateCodec]:
        """How the states of a parameter are stored that can be stored in several ways."""
        if param_dtype == torch.float64:
            return dict.fromkeys(("exp_avg", "exp_avg_sq", "master_param"), FLOAT64)
        return {
            "master_param": state_codec("master_weight", self.master_weight_dtype),
            "exp_avg": state_codec("exp_avg", self.exp_avg_dtype),
            "exp_avg_sq": state_codec("exp_avg_sq", self.exp_avg_sq_dtype),
        }

    def _capturable_error(self) -> str:
        return (
            f"capturable must be False for {type(self).__name__}, got True: the scalars of each "
            "step are computed on the host in float64; run the step outside the CUDA graph"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its options are checked like those of the constructor."""
        if isinstance(param_group, dict):
            self._check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)
        try:
            for param in self.param_groups[-1]["params"]:
                self._check_param(param)
        except Exception:
            self.param_groups.pop()
            raise

    def _own(self, param: Tensor) -> Tensor:
        """What this rank has of a parameter, as a plain or quantized tensor of this package."""
        own = local(param)
        if not is_foreign(own):
            return own
        borrowed = self._borrowed.get(param)
        if borrowed is None or not borrowed.is_current():
            if borrowed is not None:
                self._versions[param] = -1  # other memory may have been written as often
            borrowed = self._borrowed[param] = BorrowedTensor(own)
        return borrowed.tensor

    def _check_param(self, param: Tensor) -> None:
        """Raise if the optimizer could never update ``param``."""
        own = local(param)
        foreign = is_foreign(own)
        if foreign:
            adapter_of(own)
        if (foreign or isinstance(own, QuantizedTensor)) and not self._updates_quantized:
            raise TypeError(
                f"parameters must be plain tensors for {type(self).__name__}, got "
                f"{type(own).__name__}; use FP4Adam"
            )
        if foreign and own is not param:
            raise NotImplementedError(
                "sharded quantized parameters must be made by quantize_model, got a DTensor of "
                f"{type(own).__name__}; the ranks would have to agree on its scales"
            )
        if param.is_complex():
            raise ValueError(
                f"parameters must be real for {type(self).__name__}, got {param.dtype}; optimize "
                "torch.view_as_real(param) instead"
            )
        if param.is_sparse or param.layout != torch.strided:
            raise ValueError(
                f"parameters must be dense for {type(self).__name__}, got layout {param.layout}; "
                "use torch.optim.SparseAdam"
            )
        inner = own.storage_tensors().values() if isinstance(own, QuantizedTensor) else (own,)
        if any(map(Tensor.is_inference, inner)):
            raise RuntimeError(
                f"parameters must be ordinary tensors for {type(self).__name__}, got one that was "
                "made in inference mode; build or quantize the model outside "
                "torch.inference_mode(), or clone the parameter there"
            )

    def __getstate__(self) -> dict[str, Any]:
        options = {name: getattr(self, name) for name in self._option_names}
        return {**super().__getstate__(), **options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            # A checkpoint of torch.optim brings the flags of the implementation that wrote it.
            group["capturable"] = group["differentiable"] = False
            group["decoupled_weight_decay"] = group["adam_w_mode"]
        for values in self.state.values():
            if isinstance(values, dict) and "step" in values:
                step = torch.as_tensor(values["step"], dtype=torch.float32, device="cpu")
                values["step"] = step.reshape(()).clone()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, ``decoupled_grad`` included where that is in use."""
        super().zero_grad(set_to_none)
        self._clip = {}
        if self.use_decoupled_grad:
            for group in self.param_groups:
                for param in group["params"]:
                    if getattr(param, "decoupled_grad", None) is not None:
                        param.decoupled_grad = None if set_to_none else param.decoupled_grad.zero_()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip the norm of all gradients together in the next step.

        As ``torch.nn.utils.clip_grad_norm_`` on all parameters, but the gradients stay as they are:
        the step multiplies each by min(max_norm / (norm + 1e-6), 1) when it reads it, without
        rounding the product. So they are read once more, and not written; nothing waits for the
        device. With a ``GradScaler``, call ``scaler.unscale_(optimizer)`` first. With sharded
        parameters every rank has to call it.

        Args:
            max_norm: Largest norm to leave alone, >= 0; infinity only measures.
            norm_type: 1, 2 or infinity.
            error_if_nonfinite: Raise if the norm is NaN or infinite, which the host waits for.

        Returns:
            The norm before clipping, a 0-dim float32 tensor on the device of the first gradient.

        Raises:
            ValueError: If an argument is out of range.
            RuntimeError: With ``error_if_nonfinite``, if the norm is not finite.
        """
        params = [param for group in self.param_groups for param in group["params"]]
        with torch._C.DisableTorchFunctionSubclass():
            groups = [*map(sharding_groups, params)]
            sizes = [*map(Tensor.numel, map(local, params))]
            known = self._grad_norm
            if known is None or (known.sizes, known.groups) != (sizes, groups):
                self._grad_norm = GradNorm(sizes, groups)
            grads = [*map(self._read_grad, params)]
            norm, self._clip = self._grad_norm(grads, max_norm, norm_type, error_if_nonfinite)
        return norm

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient.

        Args:
            closure: Re-evaluates the model and returns the loss, or None.

        Returns:
            What ``closure`` returned.

        Raises:
            RuntimeError: If a gradient is sparse, or a parameter is on the meta device.
            TypeError: If a parameter or gradient has a dtype that Adam cannot update.
            ValueError: If a hyper-parameter of a group has become NaN or is out of range, or a
                parameter is in the groups twice. Nothing has been changed in any of these cases.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Attributes of tensor subclasses are then read directly, which takes a tenth of the time.
        with torch._C.DisableTorchFunctionSubclass():
            self._step()
        return loss

    # Addresses and tables are no matter for torch.compile, which would trace into this.
    @torch._disable_dynamo
    def _step(self) -> None:
        if torch.is_inference_mode_enabled():
            raise RuntimeError(
                "step() must not be called in inference mode, got torch.inference_mode(): its "
                "state could not be updated outside; call it in torch.no_grad(), or just so"
            )
        for group in self.param_groups:
            check_numbers(group, may_wait=False)
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        clip, self._clip = self._clip, {}
        plan = self._fitting_plan()
        unfused = plan.unfused_gradients()
        for param, grad in unfused:
            self._check_gradient(param, grad)
            self._check_state(param)
        if unfused and found_inf is not None:
            # Kernels see for themselves, without the host waiting for it.
            if found_inf.item():
                return
            found_inf = None
        try:
            plan.run(self._update_by_operators, grad_scale, clip, found_inf)
        except BaseException:
            self._forget()
            raise

    def _fitting_plan(self) -> StepPlan:
        """The plan of the last step, or a new one if anything that it depends on has changed."""
        state = self.state
        groups, params, states = self._planned
        structure = self._structure()
        if (
            self._plan is not None
            and _are_same(self.param_groups, groups)
            and _are_same(chain.from_iterable(g["params"] for g in groups), params)
            and _are_same(state.values(), states)
            and self._plan.fits(structure)
        ):
            return self._plan
        return self._new_plan(structure)

    def _structure(self) -> list:
        """What the kernels and the layout of the state depend on, parameters aside."""
        options = [getattr(self, name) for name in self._option_names]
        names = ("amsgrad", "adam_w_mode", "fused")
        for group in self.param_groups:
            options += [group[name] for name in names]
            options += [len(group["params"]), moves(group)]
        return options

    def _known_writes(self) -> dict[Tensor, int]:
        """How often parameters had been written to when their masters last were theirs."""
        known = self._plan.known_writes() if self._plan is not None else {}
        return {**self._versions, **known}

    def _new_plan(self, structure: list) -> StepPlan:
        self._versions = self._known_writes()
        for group in self.param_groups:
            self._check_storage(group)
        pairs = [(group, param) for group in self.param_groups for param in group["params"]]
        _check_distinct([param for _, param in pairs])
        read_grad = self._read_grad
        for _, param in pairs:
            grad = read_grad(param)
            if grad is not None:
                self._check_gradient(param, grad)
                self._check_state(param)
        # A new amax changes all that share it, even what has no gradient.
        sharing: dict[Hashable, list[tuple[dict[str, Any], Tensor]]] = defaultdict(list)
        for group, param in pairs:
            sharing[self._scales_of(param)].append((group, param))
        stepped, moving = set(), set()
        for scales, mates in sharing.items():
            if any(read_grad(p) is not None or self._is_in_training(p) for _, p in mates):
                stepped.add(scales)
                self._check_sharing([p for _, p in mates])
            if any(moves(group) for group, _ in mates):
                moving.add(scales)
        members, outsiders = [], []
        for group, param in pairs:
            scales = self._scales_of(param)
            if scales not in stepped:
                outsiders.append(param)
                continue
            state = self._state_of(group, param)
            codecs = self._codecs(param.dtype)
            own = self._own(param)
            tensors = state
            if own is not param:
                tensors = {name: local(value) for name, value in state.items()}
            members.append(
                Member(
                    group=group,
                    owner=param,
                    param=own,
                    state=state,
                    tensors=tensors,
                    place=ShardInfo.of(param) if scales in moving else None,
                    scales=scales,
                    value=tensors["master_param"] if self._needs_master(own) else own,
                    moves=scales in moving,
                    write_dtype=self._write_dtype(own),
                    value_codec=self._value_codec(own),
                    exp_avg_codec=codecs["exp_avg"],
                    exp_avg_sq_codec=codecs["exp_avg_sq"],
                    first_element=first_element(param),
                    borrowed=self._borrowed.get(param),
                )
            )
        self._plan = StepPlan(
            members,
            outsiders,
            structure,
            read_grad=read_grad,
            grads_vary=self.use_decoupled_grad,
            takes_kernels=lambda member: (
                backend.uses_kernels(member.param.device) and member.group["fused"] is not False
            ),
        )
        self._planned = (
            list(self.param_groups),
            [param for _, param in pairs],
            list(self.state.values()),
        )
        if not self._plan.fits(structure):
            raise RuntimeError("a step plan must fit what it was made from; please report this")
        return self._plan

    @property
    def _read_grad(self) -> Callable[[Tensor], Tensor | None]:
        """Gives a parameter's gradient, or what this rank has of it, or None."""
        read = _decoupled_grad if self.use_decoupled_grad else attrgetter("grad")
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        if any(isinstance(param, DTensor) for param in params):
            return lambda param: local(read(param))
        return read

    def _scales_of(self, param: Tensor) -> Hashable:
        """What is equal for parameters that share the amax of the tensor."""
        return param

    def _check_sharing(self, mates: list[Tensor]) -> None:
        """Raise if parameters that share an amax cannot be stepped so."""

    def _is_in_training(self, param: Tensor) -> bool:
        """Whether a parameter without a gradient has a state to go on with when it gets one."""
        if not {"step", "exp_avg", "exp_avg_sq"} <= self.state.get(param, {}).keys():
            return False
        try:
            self._check_steppable(param)
            self._check_state(param)
        except (RuntimeError, TypeError, NotImplementedError):
            return False  # what is wrong will be said once it matters
        return True

    def _check_steppable(self, param: Tensor) -> None:
        name = type(self).__name__
        if isinstance(param, DTensor) and any(place.is_partial() for place in param.placements):
            raise NotImplementedError(
                f"parameters must be replicated or sharded for {name}, got placements "
                f"{param.placements}; redistribute them"
            )
        ShardInfo.of(param)
        if param.is_meta or not param.is_floating_point():
            raise RuntimeError(
                "`fused=True` requires all the params to be floating point Tensors of a real "
                f"device, got {param.dtype} on {param.device}; materialize them with to_empty(), "
                "leave out integers"
            )
        if param.dtype not in PARAM_DTYPES:
            raise TypeError(
                f"parameters must be float64, float32, bfloat16 or float16 for {name}, got "
                f"{param.dtype}; keep 8-bit weights as quantized tensors of FP4Adam"
            )

    def _check_gradient(self, param: Tensor, grad: Tensor) -> None:
        """Raise if ``grad``, what this rank has of the gradient, cannot update ``param``."""
        name = type(self).__name__
        if not isinstance(grad, Tensor):
            raise TypeError(
                f"gradients must be tensors for {name}, got a {type(grad).__name__}; assign a "
                "tensor of the shape of the parameter, or None"
            )
        if grad.layout != torch.strided:
            raise RuntimeError(
                f"{name} does not support sparse gradients, got layout {grad.layout}; use "
                "torch.optim.SparseAdam, or sparse=False in the embedding"
            )
        self._check_steppable(param)
        if isinstance(grad, QuantizedTensor):
            raise TypeError(
                f"gradients must be plain tensors for {name}, got {type(grad).__name__}; call "
                "dequantize()"
            )
        if grad.dtype not in (PARAM_DTYPES if param.dtype == torch.float64 else GRAD_DTYPES):
            raise TypeError(
                f"gradients must be float32, bfloat16 or float16 for {name}, got {grad.dtype}; "
                "cast them"
            )
        own = local(param)
        if grad.shape != own.shape or grad.device != own.device:
            raise ValueError(
                f"the gradient must have the shape and device of its parameter, "
                f"{tuple(own.shape)} on {own.device}, got {tuple(grad.shape)} on "
                f"{grad.device}; recompute it, or redistribute a DTensor as its parameter is"
            )

    def _check_state(self, param: Tensor) -> None:
        # The kernels take addresses: they would not notice either.
        state = self.state[param] if param in self.state else {}
        exp_avg = state.get("exp_avg", param)
        if exp_avg.shape != param.shape or exp_avg.device != param.device:
            raise RuntimeError(
                "the state must have the shape and device of its parameter, "
                f"{tuple(param.shape)} on {param.device}, got {tuple(exp_avg.shape)} on "
                f"{exp_avg.device}; optimizer.load_state_dict(optimizer.state_dict()) moves it, "
                "for a new shape create a new optimizer"
            )
        remainder = state.get("param_remainder")
        if remainder is not None and remainder.dtype != torch.int16:
            raise RuntimeError(
                f"param_remainder must be int16, got {remainder.dtype}; load states with "
                "load_state_dict()"
            )
        for name, codec in self._codecs(param.dtype).items():
            if name not in state:
                continue
            codes = local(state[name])
            if codes.dtype != codec.dtype or not (codec.exact or is_dense(codes)):
                raise RuntimeError(
                    f"{name} must be dense and stored as {codec.dtype}, got {codes.dtype} with "
                    f"strides {codes.stride()}; load states with load_state_dict()"
                )
            if codec.scaled and f"{name}_scale" not in state:
                raise RuntimeError(
                    f"{name}_scale must be there beside {name}, got {sorted(state)}; load states "
                    "with load_state_dict()"
                )

    def _update_by_operators(
        self,
        member: Member,
        grad: Tensor,
        scalars: Scalars,
        grad_scale: Tensor | None,
        clip: Tensor | None,
    ) -> None:
        state = member.tensors
        if grad_scale is not None:
            grad_scale = grad_scale.to(grad.device)
        exp_avg = StoredState.of(state, "exp_avg", member.exp_avg_codec)
        exp_avg_sq = StoredState.of(state, "exp_avg_sq", member.exp_avg_sq_codec)
        extra = member.state_scales[0] if member.remainder is None else member.remainder
        value = StoredState(member.value_codec, member.value, extra)
        adam_stored_(
            value,
            grad,
            exp_avg,
            exp_avg_sq,
            member.max_exp_avg_sq,
            scalars,
            member.group["adam_w_mode"],
            grad_scale,
            clip,
            member.first_element,
        )
        if member.value is not member.param and member.moves and not member.casts_apart:
            self._write_param(member.param, self._master_of(member.param, state))

    def _write_param(self, param: Tensor, master: Tensor) -> None:
        """Round the master weight to the parameter."""
        param.copy_(master)

    def _write_dtype(self, param: Tensor) -> torch.dtype:
        """The dtype that a master weight passes through on its way to the parameter."""
        return param.dtype

    def _needs_master(self, param: Tensor) -> bool:
        if self._keeps_remainder(param):
            return False
        return self.master_weights and param.dtype in (torch.bfloat16, torch.float16)

    def _value_codec(self, param: Tensor) -> StateCodec:
        """How what Adam updates is stored."""
        if self._keeps_remainder(param):
            return REMAINDER
        codec = self._codecs(param.dtype)["master_param"]
        return codec if self._needs_master(param) and not codec.exact else PLAIN

    def _master_of(self, param: Tensor, state: dict[str, Any]) -> Tensor:
        """What this rank has of the master weight, in FP32."""
        codec = self._codecs(param.dtype)["master_param"]
        own = {name: local(value) for name, value in state.items()}
        return StoredState.of(own, "master_param", codec).decode()

    def _keeps_remainder(self, param: Tensor) -> bool:
        """Whether the parameter itself is a part of its master."""
        return (
            self.store_param_remainders
            and param.dtype == torch.bfloat16
            and not isinstance(param, QuantizedTensor)
        )

    def _new_master(self, owner: Tensor) -> Tensor:
        return local(owner).detach().float()

    def _param_is_of(self, owner: Tensor, master: Tensor) -> bool:
        """Whether this rank has of a parameter what ``master`` rounds to."""
        param = local(owner)
        if self._keeps_remainder(param):
            master, _ = split_master(master)
        return _are_equal(param, master.to(param.dtype))

    def _state_of(self, group: dict[str, Any], owner: Tensor) -> dict[str, Any]:
        """The state of a parameter, created or completed where something is missing."""
        state, param = self.state[owner], self._own(owner)
        new: dict[str, Any] = {}
        if "step" not in state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32)
        for name, codec in self._codecs(param.dtype).items():
            if name not in state and name != "master_param":
                StoredState(codec, *codec.zeros_like(param)).put_into(new, name)
        if group["amsgrad"] and "max_exp_avg_sq" not in state:
            new["max_exp_avg_sq"] = state_like(param)
        is_known = self._versions.get(owner, written(owner)) == written(owner)
        if self._keeps_remainder(param):
            if "param_remainder" not in state:
                new["param_remainder"] = torch.zeros_like(param, dtype=torch.int16)
            elif not is_known:
                # Where another value has been written, what remains of the old one is less than
                # half a step, but next to zero or infinity it would make a NaN.
                remainder = local(state["param_remainder"])
                upper, _ = split_master(join_master(param.detach(), remainder))
                changed = upper.view(torch.int16) != param.detach().view(torch.int16)
                remainder.masked_fill_(changed, 0)
        if self._needs_master(param):
            # A parameter that something else has written is where training continues from.
            if "master_param" not in state or not (
                is_known or self._param_is_of(owner, self._master_of(param, state))
            ):
                codec = self._codecs(param.dtype)["master_param"]
                StoredState.encode(codec, self._new_master(owner)).put_into(new, "master_param")
        self._put(state, new, owner)
        return state

    def _put(self, state: dict[str, Any], new: dict[str, Any], owner: Tensor) -> None:
        """Put what this rank has of new states where those of a parameter are."""
        for name, value in new.items():
            # Scales follow the memory of each rank, and not the shape of the parameter.
            state[name] = value if name.endswith("_scale") else like(owner, value)

    def state_dict(self) -> dict[str, Any]:
        """The state in FP32 under the names of ``torch.optim.AdamW``, whatever it is stored in.

        As there, the tensors are those of the optimizer where these are FP32.
        """

        def decode(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
            states = state_dict["state"]
            for param, key in saved_keys(self.param_groups, state_dict):
                for name, codec in self._codecs(param.dtype).items():
                    if name in states[key] and not codec.exact:
                        own = {n: local(x) for n, x in states[key].items()}
                        value = StoredState.of(own, name, codec).decode()
                        scale = f"{name}_scale"
                        others = {n: x for n, x in states[key].items() if n != scale}
                        states[key] = {**others, name: like(param, value)}
                if "param_remainder" in states[key]:
                    others = dict(states[key])
                    remainder = local(others.pop("param_remainder"))
                    master = like(param, join_master(local(param).detach(), remainder))
                    states[key] = {**others, "master_param": master}

        handle = self.register_state_dict_post_hook(decode, prepend=True)
        try:
            saved = super().state_dict()
        finally:
            handle.remove()
        for param, state in saved_states(self.param_groups, saved):
            if "master_param" in state:
                master = local(state["master_param"])
                self._handed_out[master] = master._version, self._mark(param, master)
        return saved

    def _mark(self, owner: Tensor, master: Tensor) -> int:
        """What changes when another value is written to a parameter that has this master.

        Versions do not: what ``state_dict()`` hands out of a DTensor has versions of its own.
        """
        param = local(owner)
        is_quantized = isinstance(param, QuantizedTensor)
        return written(owner) if is_quantized else self._param_is_of(owner, master)

    def _is_outdated(self, owner: Tensor, master: Tensor, before: "_Before") -> bool:
        """Whether a master is the one from before, and its parameter has been overwritten."""
        param = self._own(owner)
        if master in before.handed_out:
            version, mark = before.handed_out[master]
            came_back = version == master._version and mark != self._mark(owner, master)
        else:
            state = before.states.get(owner, {})
            overwritten = before.writes.get(owner, written(owner)) != written(owner)
            came_back = overwritten and "master_param" in state
            master = master.to(param.device)
            came_back = came_back and _are_equal(self._master_of(param, state), master)
        return came_back and not self._param_is_of(owner, master)

    def compact_state_dict(self) -> dict[str, Any]:
        """The state as it is stored; :meth:`load_state_dict` takes it back, bit for bit.

        Moments are what the attributes ``exp_avg_dtype`` and ``exp_avg_sq_dtype`` say, with
        ``exp_avg_scale`` and ``exp_avg_sq_scale`` where 32 elements share a scale; 2 + 2/32 bytes
        per element in place of 8 with two float8_e4m3fn. ``param_remainder`` is 2 bytes in place of
        the 4 of ``master_param``; it belongs to the parameters of the same step, which have to be
        loaded first. Any optimizer of this class can load it, whatever it stores its own state in;
        ``torch.optim.AdamW`` cannot. The tensors are those of the optimizer.

        Raises:
            NotImplementedError: For sharded parameters with a state that has scales: 32 elements
                share one in the memory of each rank, which other shards would not fit.
        """
        for param, state in self.state.items():
            scaled = sorted(name for name in state if name.endswith("_scale"))
            if scaled and isinstance(param, DTensor):
                raise NotImplementedError(
                    f"states of sharded parameters must have no scales to be saved as they are, "
                    f"got {', '.join(scaled)}, which belong to the shards of this number of ranks; "
                    "save state_dict(), or store moments in bfloat16"
                )
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state saved by this class, compact or not, or by ``torch.optim.AdamW``.

        Moments and masters are taken unrounded whatever the dtype of the parameters, and stored as
        this optimizer stores them, and parameters become what their masters are rounded to. Nothing
        is shared with ``state_dict``, and masters that it lacks start from the parameters at the
        next step. So do those that it has already, if their parameters have been overwritten since
        then: what was loaded into the result of :meth:`state_dict` had no masters.

        With sharded parameters every rank has to call it, with states of its shards or of whole
        parameters.

        Raises:
            ValueError: If groups, shapes, dtypes or numbers do not fit; nothing has been changed
                then.
            TypeError: If a hyper-parameter is no number.
        """
        loaded: dict[str, Any] = {}
        with_master: list[Tensor] = []
        before = _Before(self.state, self._known_writes(), self._handed_out)

        def capture(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
            check_state_dict(self.param_groups, state_dict)
            for group in state_dict["param_groups"]:
                check_numbers({**self.defaults, **group})
                self._check_storage({"amsgrad": False, **group})
            loaded.update(state_dict)

        def restore(optimizer: Optimizer) -> None:
            for owner, saved in saved_states(self.param_groups, loaded):
                param = self._own(owner)
                codecs = self._codecs(param.dtype)
                saved = _part_of(owner, saved)
                if "master_param" in saved and "master_param_scale" not in saved:
                    if self._is_outdated(owner, saved["master_param"], before):
                        del saved["master_param"]
                state: dict[str, Any] = {}
                for name in STATE_NAMES & saved.keys():
                    if name in codecs:
                        stored = restored(StoredState.of_saved(saved, name), codecs[name], param)
                        stored.put_into(state, name)
                    else:
                        state[name] = state_like(param).copy_(saved[name])
                self._restore_master(param, state, saved)
                for name in (*STATE_NAMES, "param_remainder"):
                    self.state[owner].pop(name, None)
                    self.state[owner].pop(f"{name}_scale", None)
                self._put(self.state[owner], state, owner)
                if "master_param" in saved or "param_remainder" in saved:
                    with_master.append(owner)

        handles = (
            self.register_load_state_dict_pre_hook(capture),
            self.register_load_state_dict_post_hook(restore, prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()
        self._plan = None
        self._write_params([owner for owner in with_master if self._needs_master(self._own(owner))])
        self._versions = {
            param: written(param) for param in self.state if isinstance(param, Tensor)
        }

    @torch.no_grad()
    def _write_params(self, owners: list[Tensor]) -> None:
        """Round masters to their parameters."""
        for owner in owners:
            if not owner.is_meta:
                own = self._own(owner)
                self._write_param(own, self._master_of(own, self.state[owner]))
        borrowed = [self._borrowed[owner] for owner in owners if owner in self._borrowed]
        ScaleWriteback(borrowed)()
        torch.autograd.graph.increment_version([one.source for one in borrowed])
        for one in borrowed:
            one.clear_high_precision_init_val()
            one.note()

    def _restore_master(self, param: Tensor, state: dict[str, Any], saved: dict[str, Any]) -> None:
        """Make what ``saved`` has of a master what this optimizer keeps of it."""
        state.pop("param_remainder", None)
        remainder = saved.get("param_remainder")
        if self._keeps_remainder(param):
            if remainder is not None:
                zeros = torch.zeros_like(param, dtype=torch.int16)
                state["param_remainder"] = zeros.copy_(remainder)
            elif "master_param" in saved:
                upper, state["param_remainder"] = split_master(state["master_param"])
                param.detach().copy_(upper)
        elif remainder is not None and self._needs_master(param):
            master = join_master(param.detach(), remainder.to(param.device))
            codec = self._codecs(param.dtype)["master_param"]
            stored = StoredState.encode(codec, state_like(param).copy_(master))
            stored.put_into(state, "master_param")
        if not self._needs_master(param):
            state.pop("master_param", None)
            state.pop("master_param_scale", None)


class _Before(NamedTuple):
    """What an optimizer had before it loads a state.

    Attributes:
        states: By parameter.
        writes: What :func:`written` gave for parameters that have masters after the last step.
        handed_out: See ``FusedAdam._handed_out``.
    """

    states: dict[Any, Any]
    writes: dict[Tensor, int]
    handed_out: Mapping[Tensor, tuple[int, int]]


def written(param: Tensor) -> int:
    """A number that changes when something other than this optimizer writes to a parameter.

    Kernels leave the count of a quantized tensor alone, and raise the version of others; of tensors
    of other packages, that of the memory counts as well.
    """
    own = local(param)
    if isinstance(own, QuantizedTensor):
        return sum(inner._version for inner in own._shared.tensors.existing().values())
    if is_foreign(own):
        return count_writes(own, memory(own, adapter_of(own)))
    return param._version


def _part_of(owner: Tensor, saved: dict[str, Any]) -> dict[str, Any]:
    """What this rank has of a saved state; a dictionary of its own."""
    if not isinstance(owner, DTensor):
        return dict(saved)
    # Scales belong to the whole.
    numbers = {
        name: StoredState.of_saved(saved, name).decode() for name in STATE_NAMES & saved.keys()
    }
    parts = {**saved, **numbers}
    return {
        name: part_for(owner, value) if isinstance(value, Tensor) and name != "step" else value
        for name, value in parts.items()
        if not name.endswith("_scale")
    }


def _check_distinct(params: list[Tensor]) -> None:
    seen: set[Tensor] = set()
    for i, param in enumerate(params):
        if param in seen:
            raise ValueError(
                f"parameters must be in their groups once, got number {i}, of shape "
                f"{tuple(param.shape)}, twice: both updates would write its memory; remove one"
            )
        seen.add(param)


def _are_equal(a: Tensor, b: Tensor) -> bool:
    """As ``torch.equal``, but NaN, which uninitialized memory may hold, equals itself."""
    alike = (a.dtype, a.shape) == (b.dtype, b.shape)
    return alike and bool(((a == b) | (a.isnan() & b.isnan())).all())


def _decoupled_grad(param: Tensor) -> Tensor | None:
    return getattr(param, "decoupled_grad", None)


def _are_same(actual: Iterable, expected: list) -> bool:
    """Whether both hold the same objects."""
    actual = list(actual)
    return len(actual) == len(expected) and all(map(is_, actual, expected))
