"""AdamW with FP32 master weights and moments; one fused kernel per kind of parameter."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from fp4adam.distributed.dtensor import local
from fp4adam.formats.scale_groups import ScaleGroups, form_scale_group, resolve_scale_groups
from fp4adam.interop.adapter import is_foreign
from fp4adam.optim import capturable as capturing
from fp4adam.optim import checks, te_layout, te_states
from fp4adam.optim import state_dict as saving
from fp4adam.optim.engine import Engine, Group, Signals
from fp4adam.optim.gradient_release import GradientRelease
from fp4adam.optim.hyper_parameters import check_hyper_parameters
from fp4adam.optim.offload import OffloadedEngine
from fp4adam.optim.options import Options
from fp4adam.optim.target import Targets
from fp4adam.tensors import backend
from fp4adam.tensors.quantized_tensor import QuantizedTensor


def _option(name: str) -> Any:
    """An attribute that shows one of the :class:`Options`, which only the constructor sets."""
    return property(lambda optimizer: getattr(optimizer._targets.options, name))


class FusedAdam(Optimizer):
    """Drop-in ``FusedAdam`` of Transformer Engine, AdamW with master weights.

    For code of Transformer Engine and Megatron-LM: states and groups look like theirs. ``state``
    shows moments and masters alone, and ``group["step"]`` counts the steps; the entries named below
    that it does not show can be read by name. In place of ``torch.optim.AdamW`` use
    :class:`FP4Adam`, the same optimizer with torch's layout. Both take plain and quantized
    parameters, and load the checkpoints of both and of torch.

    All arithmetic is FP32 and gives the same bits on a CPU and on a GPU (FP64 for FP64 parameters,
    where torch's own square root differs in the last bit). So are moments and masters, 4 bytes per
    element each; in fewer bits, every 32 elements in memory order have a power of two in
    ``exp_avg_scale``, ``exp_avg_sq_scale`` or ``master_param_scale`` (uint8).

    Args:
        params: Parameters, (name, parameter) pairs or dicts of parameter groups.
        lr: Learning rate, >= 0; a one-element tensor is read at every step. None is to be set in
            the groups before the first step.
        betas: Decay rates of the first and second moment, in [0, 1).
        eps: Term added to the denominator, >= 0.
        weight_decay: Weight decay coefficient, >= 0.
        amsgrad: Divide by the largest second moment so far.
        bias_correction: Correct the moments for their start at zero; False leaves them as they are.
        adam_w_mode: Transformer Engine's name of ``decoupled_weight_decay``. An :class:`FP4Adam`
            that is given it has the layout of :class:`FusedAdam`, as Megatron-LM expects.
        decoupled_weight_decay: AdamW, the default; False adds decay to the gradient (L2).
        master_weights: Keep FP32 masters of BF16, FP16 and quantized parameters.
        states: "factored", "8bit", "16bit" or "32bit", the storage of masters and moments.
        exp_avg_dtype: Storage dtype of first moments: float32, bfloat16, float16 or float8_e4m3fn
            (uint8 is a synonym); None for that of ``states``.
        exp_avg_sq_dtype: The same of second moments; float32 only with ``amsgrad``. "factored"
            keeps those of quantized matrices as means by row and column, see :class:`FP4Adam`.
        master_weight_dtype: Storage dtype of ``master_param``: float32, float16, or int8 for
            quantized parameters alone.
        store_param_remainders: Store only the low 16 bits of the FP32 master of a BF16 parameter,
            in ``param_remainder``. The parameter is the master rounded with ties away from zero.
        use_decoupled_grad: Read ``param.decoupled_grad``, of any dtype, instead of ``param.grad``.
        maximize: Ascend instead of descend.
        offload_states: Keep masters and moments in pinned host memory, with the same bits.
            Parameters must be on a GPU.
        quantize_from: "master" quantizes the FP32 master itself; "param_dtype" rounds it to the
            parameter's nominal dtype first, as Megatron's distributed optimizer does.
        scale_groups: The NVFP4 or Float8 weights that share one amax, from the first step on: lists
            of lists of parameters or names, or a rule such as :func:`hf_scale_groups`. Names and
            rules need ``params=model.named_parameters()``. None keeps the groups made by
            ``quantize_model(..., scale_groups=...)``; () means no groups.
        set_grad_none: Transformer Engine's: what :meth:`zero_grad` does by default.
        foreach: Accepted for compatibility; updates are always batched.
        capturable: Keep step counts and learning rates on the GPU, so that a CUDA graph can record
            ``step()``.
        differentiable: Not supported.
        fused: False uses torch operators instead of the kernels, with the same results.
    """

    # Makes GradScaler set grad_scale and found_inf as attributes for the duration of a step.
    _step_supports_amp_scaling = True
    # Whether states and groups look like those of Transformer Engine's FusedAdam, or torch.optim's.
    _has_te_layout = True
    master_weights, master_weight_dtype = _option("master_weights"), _option("master_weight_dtype")
    exp_avg_dtype, exp_avg_sq_dtype = _option("exp_avg_dtype"), _option("exp_avg_sq_dtype")
    store_param_remainders = _option("store_param_remainders")
    use_decoupled_grad, offload_states = _option("use_decoupled_grad"), _option("offload_states")
    quantize_from, set_grad_none = _option("quantize_from"), _option("set_grad_none")

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
        adam_w_mode: bool | None = None,
        decoupled_weight_decay: bool | None = None,
        master_weights: bool = True,
        states: Literal["factored", "8bit", "16bit", "32bit"] = "32bit",
        exp_avg_dtype: torch.dtype | None = None,
        exp_avg_sq_dtype: torch.dtype | Literal["factored"] | None = None,
        master_weight_dtype: torch.dtype | None = None,
        store_param_remainders: bool | None = None,
        use_decoupled_grad: bool = False,
        offload_states: bool = False,
        quantize_from: Literal["master", "param_dtype"] = "master",
        scale_groups: ScaleGroups | None = None,
        set_grad_none: bool | None = None,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        checks.check_quantize_from(quantize_from)
        # Transformer Engine's keyword, which torch does not have, tells whose code this is.
        self._has_te_layout = self._has_te_layout or adam_w_mode is not None
        self.scale_groups = None
        defaults = dict(
            lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad,
            bias_correction=bias_correction, maximize=maximize, foreach=foreach,
            capturable=capturable, differentiable=differentiable, fused=fused,
            decoupled_weight_decay=_decouples(adam_w_mode, decoupled_weight_decay),
        )  # fmt: skip
        options = dict(
            name=type(self).__name__, capturable=capturable, master_weights=master_weights,
            exp_avg_dtype=exp_avg_dtype, exp_avg_sq_dtype=exp_avg_sq_dtype,
            master_weight_dtype=master_weight_dtype, store_param_remainders=store_param_remainders,
            use_decoupled_grad=use_decoupled_grad, offload_states=offload_states,
            quantize_from=quantize_from, set_grad_none=set_grad_none,
        )  # fmt: skip
        self._set_up(Options.of(states, options))
        self._check_options(defaults)
        if isinstance(betas[0], Tensor):
            defaults["betas"] = tuple(beta.squeeze() for beta in betas)
        super().__init__(params, defaults)
        self._targets.are_shown = False  # there are none yet
        _join_scale_groups(self.param_groups, scale_groups)
        # For parameters that join; lists name those of now, and would keep them alive.
        self.scale_groups = scale_groups if callable(scale_groups) else None
        if not self._has_te_layout:
            _warn_of_plain_matrices(self._stepped.params)

    def _set_up(self, options: Options) -> None:
        self._targets = Targets(options)
        self._whole = (OffloadedEngine if options.offload_states else Engine)(self._targets, [], {})
        self._release: GradientRelease | None = None
        # Memory that captured steps use, once per plan; graphs outlive plans and loaded states.
        self._captured: list = []

    @property
    def _engine(self) -> Engine:
        """The engine of all parameters, for code that shows or changes states."""
        self._targets.are_shown = True
        self._stepped.settle()
        return self._whole

    @property
    def _stepped(self) -> Engine:
        self._whole.groups = [Group(group, group["params"]) for group in self.param_groups]
        return self._whole

    @property
    def state(self) -> dict[Any, Any]:
        """State per parameter, as in ``torch.optim.Optimizer``; of ``FusedAdam`` a view of it.

        It waits for the last step where that may be skipped, and for offloaded states; so read it
        anew after every step. From then on steps check that no other code has changed it.
        """
        engine = self._engine
        self._sync_steps(engine)
        if not (self._has_te_layout or self._targets.options.hides_states):
            return engine.states
        # Megatron asks a state for a master with decoupled gradients, without them for none.
        shows_own_masters = self.master_weights and self.use_decoupled_grad
        return te_layout.StatesView(
            engine.states, self._has_te_layout and shows_own_masters, not self._has_te_layout
        )

    @state.setter
    def state(self, state: dict[Any, Any]) -> None:
        self._targets.are_shown = True
        stored = state.data if isinstance(state, te_layout.StatesView) else state
        self.__dict__["state"] = self._whole.states = stored

    def _check_options(self, group: Mapping[str, Any]) -> None:
        options = self._targets.options
        capturing.check_option(options, group)
        # As in Transformer Engine, a learning rate may come later.
        group = {**group, "lr": 0.0} if group["lr"] is None else group
        check_hyper_parameters(options.name, group)
        checks.check_options(options, group, self._has_te_layout)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; nothing has changed if it raises."""
        if isinstance(param_group, dict):
            checks.check_group_names(self._targets.options, param_group)
            self._check_options({**self.defaults, **param_group})
        count = len(self.param_groups)
        try:
            super().add_param_group(param_group)
            for param in self.param_groups[-1]["params"]:
                checks.check_param(self._targets.options, param)
            self._targets.meet(self.param_groups[-1]["params"])
            _join_scale_groups(self.param_groups, self.scale_groups)
        except BaseException:
            del self.param_groups[count:]
            raise
        if self._release is not None:
            self._release.attach(self._stepped)

    def __getstate__(self) -> dict[str, Any]:
        own = {"scale_groups": self.scale_groups, "_has_te_layout": self._has_te_layout}
        state = {**super().__getstate__(), **own, "options": self._targets.options}
        state["state"] = saving.for_copies(self._engine)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A copy or a pickle.
        state = dict(state)
        states, options = state.pop("state"), state.pop("options")
        self._set_up(options)
        saving.complete_groups(state["param_groups"], state["defaults"], options.capturable)
        super().__setstate__(state)
        self.state = saving.with_counts(states, options.capturable)
        self._targets.meet(self._engine.params)

    # The step

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None, **options: Any) -> float | None:
        """Update every parameter that has a gradient.

        With ``capturable=True`` a CUDA graph can record it, after a step outside of the graph.

        Args:
            closure: Re-evaluates the model and returns the loss, or None.
            options: ``grad_scaler``, a ``torch.amp.GradScaler`` or None: step as
                ``grad_scaler.step(optimizer)`` does, which would pass itself to a keyword.

        Returns:
            The loss from ``closure``, or None.

        Raises:
            RuntimeError, TypeError, ValueError: If a parameter, gradient, state or hyper-parameter
                cannot be used. Nothing has changed then, and pending clipping still applies to the
                next step; but parameters whose gradients were released have been stepped.
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
            return grad_scaler.step(self, closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Reads attributes of tensor subclasses directly, in a tenth of the time.
        with torch._C.DisableTorchFunctionSubclass():
            self._step()
        return loss

    # torch.compile would trace into this, but addresses and tables cannot be traced.
    @torch._disable_dynamo
    def _step(self) -> None:
        engine, options = self._stepped, self._targets.options
        if self._release is not None:
            signals = Signals(*(vars(self).pop(name, None) for name in Signals._fields))
            self._release.finish_step(signals, engine)
            return self._sync_steps(engine)
        captures = backend.is_capturing()
        if captures:
            capturing.check_capture(engine, self._captured)
        elif options.capturable:
            engine.check_call()
            capturing.put_rates_on_devices(engine)
        signals = Signals(*(getattr(self, name, None) for name in Signals._fields))
        self._sync_steps(engine)
        engine.step(signals, captures)
        self._sync_steps(engine)

    def _sync_steps(self, engine: Engine) -> None:
        if self._has_te_layout:
            te_layout.take_steps(engine, engine.shown_steps)
            engine.shown_steps = te_layout.show_steps(engine)

    # Gradients

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Reset the gradients, including ``decoupled_grad`` if it is in use.

        ``set_to_none``: Free gradients instead of zeroing them; None means the ``set_grad_none`` of
        the constructor, which it must not contradict, or else True.
        """
        default = self.set_grad_none
        if default is not None and set_to_none not in (None, default):
            raise ValueError(
                f"set_to_none must be {default} for an optimizer made with set_grad_none={default},"
                f" got {set_to_none}; leave set_grad_none out"
            )
        if set_to_none is None:
            set_to_none = default is None or default
        super().zero_grad(set_to_none)
        self._whole.clipping = None
        if self._release is not None:
            self._release.drop_gradients()
        if self.use_decoupled_grad:
            for param in self._stepped.params:
                if getattr(param, "decoupled_grad", None) is not None:
                    param.decoupled_grad = None if set_to_none else param.decoupled_grad.zero_()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip the total norm of all gradients in the next step.

        Like ``torch.nn.utils.clip_grad_norm_`` on all parameters, but the gradients stay unchanged:
        the step multiplies each by min(max_norm / (norm + 1e-6), 1) when it reads it. This costs
        one more read of the gradients, no write, and no device sync unless
        ``error_if_nonfinite``. With a ``GradScaler``, call ``scaler.unscale_(optimizer)`` first.
        With sharded parameters, call it on every rank.

        The coefficient holds for these gradients and one step, which raises if any of them has
        changed since; ``optimizer.zero_grad()`` drops it.

        Returns:
            The norm before clipping; of DTensors the whole norm as a plain tensor.

        Raises:
            ValueError: If an argument is out of range.
            RuntimeError: With gradient release; while a CUDA graph is captured.
        """
        if self._release is not None:
            raise RuntimeError(
                "clip_grad_norm_ must not be called while gradients are released, got a call after "
                "the step they were for; leave clipping out, or remove() the handle"
            )
        return self._stepped.measure(max_norm, norm_type, error_if_nonfinite)

    def enable_gradient_release(self) -> GradientRelease:
        """Step each parameter as soon as its gradient is complete, and free the gradient.

        The weights get the same bits as from ``step()`` after the backward pass, but gradients no
        longer exist all at once. ``step()`` steps parameters that still have a gradient, and ends
        the step. It has to be called after each backward pass, except those in
        :meth:`GradientRelease.accumulate`. Members of a scale group are stepped together.

        Works with FSDP2; ``DistributedDataParallel``, ``GradScaler`` and clipping need all
        gradients before the first step. In transformers' Trainer set ``max_grad_norm=0``, and leave
        ``gradient_accumulation_steps`` 1. ``remove()`` of the handle returns to stepping in
        ``step()``. Copies of the optimizer do not release gradients.
        """
        self._release = GradientRelease(self)
        return self._release

    # Checkpoints

    def state_nbytes(self) -> dict[Tensor, int]:
        """Bytes of each parameter's state on this rank, also before the first step."""
        states = self._stepped.states
        return {
            param: self._targets[param].state_nbytes(group["amsgrad"])
            for group in self.param_groups
            for param in group["params"]
            if param.requires_grad or param in states
        }

    def state_dict(self) -> dict[str, Any]:
        """The state in FP32 under the names of ``torch.optim.AdamW``, whatever the storage dtypes.

        As in ``torch.optim``, FP32 tensors are the optimizer's own, not copies. ``FusedAdam`` has
        Transformer Engine's layout: ``step`` in the groups, ``master_param`` an int16 remainder
        with ``store_param_remainders``.
        """
        return self._saved(compact=False)

    def compact_state_dict(self) -> dict[str, Any]:
        """The state as it is stored; :meth:`load_state_dict` restores it bit for bit.

        Scales are beside their states. Remainders (``param_remainder``, int8 masters) are valid
        only with the parameters of the same step, which must be loaded first. Any optimizer of this
        class can load the result, whatever its own storage dtypes; ``torch.optim.AdamW`` cannot.

        Raises:
            NotImplementedError: For sharded parameters with scaled states: the blocks of 32
                elements follow each rank's memory and would not fit other shards.
        """
        saving.check_compact(self._engine.states)
        return self._saved(compact=True)

    def _saved(self, compact: bool) -> dict[str, Any]:
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        engine = self._engine
        self._sync_steps(engine)
        state_dict = saving.saved(engine, compact, self._has_te_layout)
        return self._passed(self._optimizer_state_dict_post_hooks, state_dict)

    def _passed(self, hooks: dict[int, Callable], state_dict: dict[str, Any]) -> dict[str, Any]:
        for hook in hooks.values():
            result = hook(self, state_dict)
            state_dict = state_dict if result is None else result
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state saved by this class, compact or not, by ``torch.optim.AdamW``, or by
        Transformer Engine's ``FusedAdam``.

        Moments and masters are converted to the storage dtypes of this optimizer. Nothing is shared
        with ``state_dict``. With sharded parameters, call it on every rank, with states of its
        shards or of whole parameters.

        Load the model first. A loaded master stands if every element is within a gap between codes
        of the weight's value; a weight that was loaded as plain values gets its bytes. Otherwise
        the master restarts from the weight, with a warning. If the model is loaded later, the next
        step decides.

        Raises:
            ValueError, TypeError: If groups, shapes, dtypes, placements or numbers do not fit;
                nothing has changed then.
        """
        state_dict = self._passed(self._optimizer_load_state_dict_pre_hooks, state_dict.copy())
        with torch._C.DisableTorchFunctionSubclass():
            states, groups, given = saving.loaded(self._engine, state_dict, self.defaults)
            self.state = states
            for group, new in zip(self.param_groups, groups, strict=True):
                group.clear()
                group.update(new)
            self._whole.forget()
            saving.load_masters(self._engine, given)
        self._sync_steps(self._engine)
        self._targets.are_shown = False  # all states are new
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    # What Transformer Engine's optimizer has
    initialize_state = te_states.initialize_state
    get_unscaled_state = te_states.get_unscaled_state
    set_scaled_state = te_states.set_scaled_state

    # Master weights

    def reset_master_weights(self, params: Iterable[Tensor] | None = None) -> None:
        """Restart master weights from the current values of their parameters.

        A step does this where it finds other bytes than it left. Call it after writes through
        ``.data`` of a plain parameter, which go unnoticed, or that leave the same bytes. Moments
        and step counts stay. ``params``: Some of its parameters; None for all.
        """
        self._engine.reset_masters(params)


def _decouples(adam_w_mode: bool | None, decoupled_weight_decay: bool | None) -> bool:
    given = {adam_w_mode, decoupled_weight_decay} - {None}
    if len(given) > 1:
        raise ValueError(
            "adam_w_mode and decoupled_weight_decay must be equal, as they are two names of one "
            f"flag, got {adam_w_mode} and {decoupled_weight_decay}; leave one out"
        )
    return given.pop() if given else True


def _join_scale_groups(groups: list[dict[str, Any]], scale_groups: ScaleGroups | None) -> None:
    """Make quantized weights members of these scale groups, and no others; None leaves them."""
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


def _warn_of_plain_matrices(params: list[Tensor]) -> None:
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
