"""AdamW with FP32 master weights and moments; one fused kernel per kind of parameter."""

import functools
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import (
    Optimizer,
    ParamsT,
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
)

from fp4adam.distributed.dtensor import first_element, like, local
from fp4adam.interop.borrowed_tensor import BorrowedTensor
from fp4adam.optim import checks
from fp4adam.optim.capturable import Capturable
from fp4adam.optim.grad_norm import GradNorm
from fp4adam.optim.gradients import Gradients
from fp4adam.optim.hyper_parameters import check_hyper_parameters, check_numbers, is_on_device
from fp4adam.optim.master_weights import MasterWeights, master_of
from fp4adam.optim.named_states import NamedStates
from fp4adam.optim.offload import StateOffload, moved
from fp4adam.optim.param_state import ParamState
from fp4adam.optim.param_view import ParamView, Storing, view_of
from fp4adam.optim.saved_states import SavedStates
from fp4adam.optim.state_codec import join_master, split_master
from fp4adam.optim.step_plan import StepPlan
from fp4adam.optim.stored_state import StoredState, state_like
from fp4adam.tensors import backend


class FusedAdam(Capturable, Gradients, SavedStates, NamedStates, Optimizer):
    """Drop-in ``torch.optim.AdamW`` that keeps FP32 master weights of 16-bit parameters.

    All arithmetic is FP32 and gives the same bits on a CPU and on a GPU (FP64 for FP64 parameters,
    where torch's own square root differs in the last bit).
    State per parameter: ``exp_avg`` and ``exp_avg_sq`` in FP32 (4 bytes per element each), one
    ``step``, ``max_exp_avg_sq`` with ``amsgrad`` (4 bytes), and ``master_param`` for BF16 and FP16
    parameters (4 bytes).

    Moments can be stored in fewer bits. The kernels decode, update in FP32 and encode again in one
    pass. Rounding is stochastic, so it is unbiased, and reproducible from run to run. Blocks of 32
    elements, in memory order, share a power-of-two scale in ``exp_avg_scale`` and
    ``exp_avg_sq_scale`` (uint8):

    =================  =====================  ==============================================
    dtype              bytes per element      ``exp_avg``; ``exp_avg_sq``
    =================  =====================  ==============================================
    float32            4                      FP32
    bfloat16           2                      BF16
    float16            2 + 1/32               FP16; 16-bit floats without sign
    float8_e4m3fn      1 + 1/32               E4M3; 8-bit floats without sign
    =================  =====================  ==============================================

    ``master_weight_dtype=torch.float16`` stores ``master_param`` in the float16 format of first
    moments, with ``master_param_scale``. With ``store_param_remainders`` a BF16 parameter is the
    upper half of its master, and ``param_remainder`` (int16, 2 bytes) is added to its bits to get
    the master. FP64 parameters keep FP64 moments.

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
        exp_avg_dtype: Storage dtype of first moments: float32, bfloat16, float16 or float8_e4m3fn
            (uint8 is accepted as a synonym).
        exp_avg_sq_dtype: Storage dtype of second moments, from the same list; float32 only with
            ``amsgrad``.
        master_weight_dtype: Storage dtype of masters, also of quantized parameters: float32 or
            float16.
        store_param_remainders: Store only the low 16 bits of the FP32 master of a BF16 parameter.
            The parameter is the upper half, the master rounded with ties away from zero. Quantized
            parameters keep whole masters.
        use_decoupled_grad: Read ``param.decoupled_grad`` instead of ``param.grad``; its dtype may
            differ from the parameter's.
        maximize: Ascend instead of descend.
        offload_states: Keep masters and moments in pinned host memory. They stream through the GPU
            during the step, which gives the same bits. Parameters must be on a GPU.
        set_grad_none: Deprecated, as in Transformer Engine: what :meth:`zero_grad` does by default.
        foreach: Accepted for compatibility; updates are always batched.
        capturable: Keep step counts and learning rates on the GPU, and compute the scalars of a
            step there, so that a CUDA graph can record ``step()``; see :meth:`step`.
        differentiable: Not supported.
        fused: False uses torch operators instead of the kernels, with the same results.

    Raises:
        ValueError: If a hyper-parameter is out of range, with the message of ``torch.optim``; if a
            state cannot be stored in the given dtype; for ``store_param_remainders`` without FP32
            masters; for ``capturable`` without the kernels, or in some groups only.
        NotImplementedError: For ``differentiable``, and for ``amsgrad`` with second moments that
            are not float32.
        RuntimeError: If ``fused`` and ``foreach`` are both True.
    """

    # Makes GradScaler set grad_scale and found_inf as attributes for the duration of a step.
    _step_supports_amp_scaling = True
    _takes_quantized = False
    # Options of the whole optimizer, which copies and pickles preserve.
    _option_names: tuple[str, ...] = (
        *Storing._fields[:5],
        "use_decoupled_grad",
        "offload_states",
        "set_grad_none",
    )
    # Optimizers that were pickled before these options existed have none.
    set_grad_none: bool | None = None
    offload_states: bool = False

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
            # Tells AdamW from Adam in a checkpoint of torch.optim.
            "decoupled_weight_decay": adam_w_mode,
        }
        self.exp_avg_dtype, self.exp_avg_sq_dtype = exp_avg_dtype, exp_avg_sq_dtype
        self.master_weight_dtype = master_weight_dtype
        self.store_param_remainders = store_param_remainders
        self.master_weights = master_weights
        self.use_decoupled_grad = use_decoupled_grad
        self.offload_states = offload_states
        self.set_grad_none = set_grad_none
        if set_grad_none is not None:
            warnings.warn(
                "set_grad_none is deprecated; call zero_grad(set_to_none=...)",
                DeprecationWarning,
                stacklevel=3 if self._takes_quantized else 2,
            )
        self._check_options(defaults)
        if isinstance(betas[0], Tensor):
            defaults["betas"] = tuple(beta.squeeze() for beta in betas)
        self._forget()
        super().__init__(params, defaults)

    def _forget(self) -> None:
        """Drop the plan and all notes of who has written to the parameters."""
        self._plan: StepPlan | None = None
        self._planned: tuple[list[dict], list[Tensor], list[dict]] = ([], [], [])
        self._masters = MasterWeights()
        self._grad_norm: GradNorm | None = None
        # Caches the views of other packages' tensors.
        self._borrowed: dict[Tensor, BorrowedTensor] = {}
        # The clipping coefficient of the next step, by device.
        self._clip: dict[torch.device, Tensor] = {}
        # Memory that captured steps use, once per plan; graphs outlive plans and loaded states.
        self.__dict__.setdefault("_captured", [])
        # Set while gradients are released; it outlives loaded states, but is not copied.
        self.__dict__.setdefault("_release", None)
        # None in the parts of an optimizer, whose states have been brought to their parameters.
        self.__dict__.setdefault("_offload", StateOffload() if self.offload_states else None)
        if self._offload is not None:
            self._offload.forget()
        if self._release is not None:
            self._release.forget()
        # Guards hooks that are registered for the duration of a call, as threads may save at the
        # same time. Loading calls this method while it holds the lock, so an existing one is kept.
        self.__dict__.setdefault("_saving", threading.RLock())

    # Options and parameters

    @property
    def _storing(self) -> Storing:
        return Storing(*(getattr(self, name) for name in Storing._fields[:5]))

    def _view(self, param: Tensor) -> ParamView:
        return view_of(param, self._storing, self._borrowed)

    def _params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    @property
    def state(self) -> dict[Any, Any]:
        """State per parameter, as in ``torch.optim.Optimizer``.

        If the device may have skipped the last step, this waits for it, so that ``step`` is right.
        Offloaded states are CPU tensors. This waits until they have arrived, so read them through
        this property after every step.
        """
        if getattr(self, "_offload", None) is not None:
            self._offload.settle()
        if getattr(self, "_plan", None) is not None:
            self._plan.settle()
        return self.__dict__["state"]

    @state.setter
    def state(self, state: dict[Any, Any]) -> None:
        self.__dict__["state"] = state

    def _check_options(self, options: Mapping[str, Any]) -> None:
        """Raise if a hyper-parameter is out of range or a flag is not supported."""
        self._check_capturable_option(options)
        check_hyper_parameters(type(self).__name__, options)
        checks.check_storing(self._storing, options["amsgrad"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; its options are checked like the constructor's."""
        if isinstance(param_group, dict):
            self._check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)
        try:
            for param in self.param_groups[-1]["params"]:
                checks.check_param(
                    type(self).__name__, param, self._takes_quantized, self.master_weights
                )
                if not param.is_meta:
                    self._view(param)
        except Exception:
            self.param_groups.pop()
            raise
        if getattr(self, "_release", None) is not None:
            self._release.attach()

    def __getstate__(self) -> dict[str, Any]:
        options = {name: getattr(self, name) for name in self._option_names}
        return {**super().__getstate__(), **options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            # A checkpoint of torch.optim carries the flags of the implementation that wrote it.
            group["capturable"], group["differentiable"] = self._is_capturable, False
            group["decoupled_weight_decay"] = group["adam_w_mode"]
            if self._is_capturable and not is_on_device(group["lr"]):
                group["lr"] = float(group["lr"])
        for param, values in self.state.items():
            if isinstance(values, dict) and "step" in values:
                device = param.device if self._is_capturable else "cpu"
                step = torch.as_tensor(values["step"], dtype=torch.float32, device=device)
                values["step"] = step.reshape(()).clone()

    # The step

    @staticmethod
    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``step`` as torch.optim does, for profilers and hooks, unless there are none.

        torch marks each step for profilers that may be attached, which takes some 20 us.
        """
        wrapped = Optimizer.profile_hook_step(func)

        @functools.wraps(wrapped)
        def step(self: "FusedAdam", *args: Any, **kwargs: Any) -> Any:
            if (
                self._optimizer_step_pre_hooks
                or self._optimizer_step_post_hooks
                or _global_optimizer_pre_hooks
                or _global_optimizer_post_hooks
                or torch.autograd._profiler_enabled()
            ):
                return wrapped(self, *args, **kwargs)
            return func(self, *args, **kwargs)

        return step

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None, **options: Any) -> float | None:
        """Update every parameter that has a gradient.

        With ``capturable=True`` a CUDA graph can record it. Run at least one step outside the
        graph first, which creates the states; its learning rates become float64 tensors on the
        GPU, which schedulers of torch and Megatron fill in place. A replay reads the gradients at
        the addresses of the capture, tensors among lr, betas, eps and weight decay, ``grad_scale``
        and ``found_inf``; other numbers are those of the capture. The bits are those of steps that
        are not captured. Capture again after loading a state, resetting masters or adding
        parameters, and keep the optimizer as long as the graph.

        Args:
            closure: Re-evaluates the model and returns the loss, or None.
            options: ``grad_scaler``, a ``torch.amp.GradScaler`` or None: step as
                ``grad_scaler.step(optimizer)`` does, which reads its scale and skips the step for
                infinite gradients. It has no name of its own in the signature, because GradScaler
                would take that for a request to pass itself.

        Returns:
            The loss from ``closure``, or None.

        Raises:
            RuntimeError: If a gradient is sparse, a parameter is on the meta device, a state does
                not fit its parameter, ``quantize_model`` has replaced a parameter since, or the
                call is in inference mode; if a CUDA graph is captured without ``capturable``, or
                before a step has run; if ``capturable`` and the kernels cannot step a parameter.
            TypeError: If a parameter or gradient has a dtype that Adam cannot update, or there are
                other ``options``.
            ValueError: If a hyper-parameter is NaN or out of range, or a parameter is in the groups
                twice. In all of these cases nothing has changed, and pending clipping still
                applies to the next step.
            MemoryError: If offloaded states do not fit into pinned host memory. Parameters before
                that have been stepped.
        """
        grad_scaler = options.pop("grad_scaler", None)
        if options:
            raise TypeError(
                f"step() got an unexpected keyword argument {next(iter(options))!r}; it takes "
                "closure and grad_scaler"
            )
        if grad_scaler is not None:
            arguments = () if closure is None else (closure,)
            return grad_scaler.step(self, *arguments)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.offload_states != (self._offload is not None):
            self._check_capturable_option(self.defaults)
            self._drop_plan()
            self._offload = StateOffload() if self.offload_states else None
        # Reads attributes of tensor subclasses directly, in a tenth of the time.
        with torch._C.DisableTorchFunctionSubclass():
            if self._release is not None:
                self._release.finish_step()
            elif self._offload is not None:
                self._step_offloaded()
            else:
                self._step()
        return loss

    # torch.compile would trace into this, but addresses and tables cannot be traced.
    @torch._disable_dynamo
    def _step(self) -> None:
        self._check_call()
        captures = backend.is_capturing()
        if captures:
            self._check_capture()
        elif self._is_capturable:
            self._put_rates_on_devices()
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        try:
            plan = self._plan if captures else self._fitting_plan()
            name = type(self).__name__
            for param, grad in plan.gradients_for_operators():
                checks.check_gradient(name, param, grad)
                self._check_state(param)
        except Exception:
            self._drop_plan()
            raise
        clip, self._clip = self._clip, {}
        try:
            plan.run(grad_scale, clip, found_inf, captures)
        except BaseException:
            # Some parameters may have been stepped, so no note can be trusted.
            self._forget()
            raise

    @torch._disable_dynamo
    def _step_offloaded(self) -> None:
        self._check_call()
        names = ("grad_scale", "found_inf")
        self._offload.step_all(self, **{name: getattr(self, name, None) for name in names})

    def _check_call(self) -> None:
        """Raise if a step is impossible here and now, whatever the parameters are."""
        if torch.is_inference_mode_enabled():
            raise RuntimeError(
                "step() must not be called in inference mode, got torch.inference_mode(): state "
                "created there cannot be updated outside; call it outside inference mode"
            )
        for group in self.param_groups:
            check_numbers(group, may_wait=False)

    def _fitting_plan(self) -> StepPlan:
        """The plan of the last step if it is still valid, else a new one."""
        structure = self._structure()
        return self._plan if self._has_fitting_plan(structure) else self._new_plan(structure)

    def _has_fitting_plan(self, structure: list | None = None) -> bool:
        """Whether the plan of the last step is valid for this one."""
        state = self.state
        groups, params, states = self._planned
        return (
            self._plan is not None
            and _are_same(self.param_groups, groups)
            and _are_same(chain.from_iterable(g["params"] for g in groups), params)
            and _are_same(state.values(), states)
            and self._plan.fits(self._structure() if structure is None else structure)
        )

    def _structure(self) -> list:
        """Everything but the tensors that the kernels and the layout of the state depend on."""
        options = [getattr(self, name) for name in self._option_names]
        names = ("amsgrad", "adam_w_mode", "fused")
        for group in self.param_groups:
            options += [group[name] for name in names]
            options += [len(group["params"]), self._updates(group)]
        return options

    def _drop_plan(self) -> None:
        """Drop the plan, but keep its notes of the parameters."""
        if self._plan is not None:
            self._plan.settle()
        self._take_notes()
        self._plan = None
        if self._offload is not None:
            self._offload.drop_plans()

    def _take_notes(self) -> None:
        """Collect the notes that the last steps have taken of the parameters."""
        if self._plan is not None:
            self._masters.update(self._plan.notes())
        if self._release is not None:
            self._masters.update(self._release.notes())
        if self._offload is not None:
            self._masters.update(self._offload.notes())

    def _keep_only(self, params: Sequence[Tensor]) -> None:
        """Forget all other parameters, which may have been taken out of the groups."""
        self._masters.keep_only(params)
        known = set(params)
        self._borrowed = {p: b for p, b in self._borrowed.items() if p in known}

    def _new_plan(self, structure: list) -> StepPlan:
        self._drop_plan()
        pairs = [(group, param) for group in self.param_groups for param in group["params"]]
        params = [param for _, param in pairs]
        self._keep_only(params)
        stepped, moving = self._check_all(pairs)
        views = {p: self._view(p) for p in params if self._scales_of(p) in stepped}
        left, _ = self._masters.left([*views.values()], self.state)
        members = []
        for group, param in pairs:
            if param not in views:
                continue
            view, scales = views[param], self._scales_of(param)
            state = self._complete_state(group, view, restart=view in left)
            members.append(
                ParamState(
                    group=group,
                    view=view,
                    state=state,
                    tensors={name: local(value) for name, value in state.items()},
                    shards=view.shards if scales in moving else (),
                    updates=scales in moving,
                    first_element=first_element(param),
                )
            )
        self._masters.note(view for view in views.values() if view.has_master)
        self._plan = StepPlan(
            members,
            [param for param in params if param not in views],
            structure,
            read_grad=self._read_grad,
            grads_vary=self.use_decoupled_grad,
            takes_kernels=lambda member: (
                backend.uses_kernels(member.param.device) and member.group["fused"] is not False
            ),
            capturable=self._is_capturable,
        )
        self._planned = list(self.param_groups), params, list(self.state.values())
        if not self._plan.fits(structure):
            raise RuntimeError("a step plan must fit what it was made from; please report this")
        return self._plan

    def _check_all(self, pairs: list[tuple[dict[str, Any], Tensor]]) -> tuple[set, set]:
        """Check all parameters of a new plan before anything changes.

        Returns:
            The ``scales`` keys of the parameters that are stepped, and of those that can change.
        """
        for group in self.param_groups:
            checks.check_storing(self._storing, group["amsgrad"])
        checks.check_distinct([param for _, param in pairs])
        name, read_grad = type(self).__name__, self._read_grad
        for _, param in pairs:
            grad = read_grad(param)
            if grad is not None:
                checks.check_gradient(name, param, grad)
                self._check_state(param)
                if self._is_capturable and not _fits_kernels(local(param), grad):
                    checks.check_capturable(local(param), grad)
            else:
                checks.check_in_use(param)
        # A new amax changes every tensor that shares it, even those without a gradient.
        sharing: dict[Hashable, list[tuple[dict[str, Any], Tensor]]] = defaultdict(list)
        for group, param in pairs:
            sharing[self._scales_of(param)].append((group, param))
        stepped, moving = set(), set()
        for scales, peers in sharing.items():
            if any(read_grad(p) is not None or self._is_in_training(p) for _, p in peers):
                stepped.add(scales)
                self._check_sharing([p for _, p in peers])
            if any(self._updates(group) for group, _ in peers):
                moving.add(scales)
        return stepped, moving

    def _scales_of(self, param: Tensor) -> Hashable:
        """A key that is equal for parameters that share a per-tensor amax."""
        return param

    def _check_sharing(self, peers: list[Tensor]) -> None:
        """Raise if parameters that share an amax cannot be stepped together."""

    def _is_in_training(self, param: Tensor) -> bool:
        """Whether a parameter without a gradient now has a valid state from earlier steps."""
        if not {"step", "exp_avg", "exp_avg_sq"} <= self.state.get(param, {}).keys():
            return False
        try:
            checks.check_steppable(type(self).__name__, param)
            self._check_state(param)
        except (RuntimeError, TypeError, NotImplementedError):
            return False  # the error is raised once the parameter has a gradient
        return True

    def _check_state(self, param: Tensor) -> None:
        """Raise if the state of a parameter does not fit it."""
        state, is_offloaded = self.state.get(param, {}), self._offload is not None
        checks.check_state(param, state, self._storing, is_offloaded)

    def _offloaded(self, param: Tensor, state: dict[str, Any]) -> dict[str, Any]:
        """A state that has just been made, on the host if states are offloaded."""
        return state if self._offload is None else moved(param, state, "cpu")

    def _complete_state(
        self, group: dict[str, Any], view: ParamView, restart: bool, frees: bool = True
    ) -> dict[str, Any]:
        """The state of a parameter; missing entries are created.

        Args:
            group: The parameter group.
            view: The parameter.
            restart: Whether the master restarts from the parameter.
            frees: Whether to free the high-precision initial value.
        """
        param, state = view.param, dict(self.state.get(view.owner, {}))
        new: dict[str, Any] = {}
        device = param.device if self._is_capturable else torch.device("cpu")
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
        elif self._is_capturable:
            state["step"] = state["step"].to(device, torch.float32).reshape(())
        for name, codec in view.codecs.items():
            if name not in state and name != "master_param":
                StoredState(codec, *codec.zeros_like(param)).put_into(new, name)
        if group["amsgrad"] and "max_exp_avg_sq" not in state:
            new["max_exp_avg_sq"] = state_like(param)
        if view.has_remainder:
            new.update(self._completed_remainder(view, state))
        if view.has_master and (restart or "master_param" not in state):
            codec = view.codecs["master_param"]
            StoredState.encode(codec, view.value()).put_into(new, "master_param")
        elif view.has_master and not view.value_codec.exact and "master_param_scale" not in state:
            master = master_of(view, state).contiguous()
            StoredState.encode(view.value_codec, master).put_into(new, "master_param")
        if not view.has_master:
            # The parameter is FP32 itself, or its remainder completes the master.
            state.pop("master_param", None)
            state.pop("master_param_scale", None)
        if not view.has_remainder:
            state.pop("param_remainder", None)
        for name, value in new.items():
            # Scales follow each rank's memory order, not the shape of the parameter: no DTensors.
            state[name] = value if name.endswith("_scale") else like(view.owner, value)
        # In one assignment, so that an interrupt leaves either the old state or the new one.
        self.state[view.owner] = state
        if frees:
            view.free_initial_value(self._updates(group))
        return state

    def _completed_remainder(self, view: ParamView, state: dict[str, Any]) -> dict[str, Any]:
        """The new ``param_remainder`` if the state has none; also repairs one that does not fit.

        Any parameter value with any remainder gives a master within half a BF16 step of that value.
        The exceptions are next to zero and infinity, where a stale remainder could give a NaN, so
        it is zeroed there.
        """
        param = view.param.detach()
        if "param_remainder" not in state:
            if "master_param" not in state or not view.is_rounded(local(state["master_param"])):
                return {"param_remainder": torch.zeros_like(param, dtype=torch.int16)}
            return {"param_remainder": split_master(local(state["master_param"]))[1]}
        if not self._masters.is_known(view):
            remainder = local(state["param_remainder"])
            upper, _ = split_master(join_master(param, remainder))
            remainder.masked_fill_(upper.view(torch.int16) != param.view(torch.int16), 0)
        return {}

    # Master weights

    @torch.no_grad()
    def reset_master_weights(self, params: Iterable[Tensor] | None = None) -> None:
        """Restart master weights from the current values of their parameters.

        A step does this by itself if it finds other bytes in a parameter than it left there. Call
        it after writes that go unnoticed (through ``.data`` of a plain parameter) or that leave the
        same bytes. Moments and step counts stay. A parameter without a master is unaffected: its
        master starts from its value anyway.

        Args:
            params: The parameters to restart; None for all.

        Raises:
            ValueError: If one is not a parameter of this optimizer.
        """
        known = self._params()
        params = known if params is None else [*params]
        checks.check_known(params, known)
        self._drop_plan()
        states, views = self.state, [*map(self._view, params)]
        with torch._C.DisableTorchFunctionSubclass():
            new: dict[ParamView, dict[str, Any]] = {}
            for view in views:
                if view.has_master and "master_param" in states.get(view.owner, {}):
                    master = new[view] = {}
                    codec = view.codecs["master_param"]
                    StoredState.encode(codec, view.value()).put_into(master, "master_param")
                    master["master_param"] = like(view.owner, master["master_param"])
                    new[view] = self._offloaded(view.owner, master)
        for view, master in new.items():
            states[view.owner].pop("master_param_scale", None)
            states[view.owner].update(master)
            view.free_initial_value(updates=True)
        self._masters.note(new)
        for view in views:
            state = states.get(view.owner, {})
            if not view.has_master:
                # A loaded master that would have become the remainder at the next step.
                state.pop("master_param", None)
                state.pop("master_param_scale", None)
            if view.has_remainder and "param_remainder" in state:
                local(state["param_remainder"]).zero_()


def _fits_kernels(param: Tensor, grad: Tensor) -> bool:
    """Whether kernels may step a plain parameter, as far as its states do not matter."""
    alike = param.stride() == grad.stride() or param.is_contiguous() and grad.is_contiguous()
    return alike and param.dtype != torch.float64 and backend.uses_kernels(param.device)


def _are_same(actual: Iterable, expected: list) -> bool:
    """Whether both contain the same objects in the same order."""
    actual = list(actual)
    return len(actual) == len(expected) and all(map(is_, actual, expected))
