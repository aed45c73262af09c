"""AdamW with FP32 master weights and moments; one fused kernel per kind of parameter."""

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from fp4adam.formats.scale_groups import ScaleGroups, lists_of_members
from fp4adam.optim import capturable as capturing
from fp4adam.optim import checks, grouping, te_layout, te_states
from fp4adam.optim import state_dict as saving
from fp4adam.optim.engine import Engine, Group, Signals
from fp4adam.optim.gradient_release import GradientRelease
from fp4adam.optim.hyper_parameters import check_hyper_parameters
from fp4adam.optim.offload import OffloadedEngine
from fp4adam.optim.options import Options, storage
from fp4adam.optim.target import State, Targets
from fp4adam.tensors import backend


class Option:
    """An attribute of an optimizer that reads one of its :class:`Options`, or replaces it."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, optimizer: "FusedAdam", owner: type) -> Any:
        return self if optimizer is None else getattr(optimizer._targets.options, self._name)

    def __set__(self, optimizer: "FusedAdam", value: Any) -> None:
        targets = optimizer._targets
        targets.options = dataclasses.replace(targets.options, **{self._name: value})


class FusedAdam(Optimizer):
    """Drop-in ``FusedAdam`` of Transformer Engine, AdamW with master weights.

    For code of Transformer Engine and Megatron-LM: states and groups look like theirs. ``state``
    shows moments and masters alone, and ``group["step"]`` counts the steps; the entries named below
    that it does not show can be read by name. In place of ``torch.optim.AdamW`` use
    :class:`FP4Adam`, the same optimizer with torch's layout. Both take plain and quantized
    parameters, and load the checkpoints of both and of torch.

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

    ``states`` chooses all of it: "32bit" is FP32, the default; "16bit" BF16 moments and FP16
    masters; "8bit" FP8 moments, int8 masters of quantized weights (see :class:`FP4Adam`) and 16-bit
    remainders of BF16 parameters. The single options go before it.

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
        adam_w_mode: Decoupled decay (AdamW), the default; False adds ``weight_decay * param`` to
            the gradient. This is Transformer Engine's keyword: an :class:`FP4Adam` that is given it
            has the layout of :class:`FusedAdam`, as Megatron-LM expects.
        master_weights: Keep FP32 masters of BF16, FP16 and quantized parameters.
        states: "8bit", "16bit" or "32bit", the storage of masters and moments.
        exp_avg_dtype: Storage dtype of first moments: float32, bfloat16, float16 or float8_e4m3fn
            (uint8 is accepted as a synonym); None for that of ``states``.
        exp_avg_sq_dtype: Storage dtype of second moments, from the same list; float32 only with
            ``amsgrad``.
        master_weight_dtype: Storage dtype of masters, also of quantized parameters: float32,
            float16, or int8 for quantized parameters alone.
        store_param_remainders: Store only the low 16 bits of the FP32 master of a BF16 parameter.
            The parameter is the upper half, the master rounded with ties away from zero. Quantized
            parameters keep whole masters.
        use_decoupled_grad: Read ``param.decoupled_grad`` instead of ``param.grad``; its dtype may
            differ from the parameter's.
        maximize: Ascend instead of descend.
        offload_states: Keep masters and moments in pinned host memory. They stream through the GPU
            during the step, which gives the same bits. Parameters must be on a GPU.
        quantize_from: "master" quantizes the FP32 master itself; "param_dtype" rounds it to the
            parameter's nominal dtype first, as Megatron's distributed optimizer does.
        scale_groups: The NVFP4 or Float8 weights that share one amax, from the first step on: lists
            of lists of parameters or names, or a rule such as :func:`hf_scale_groups`. Names and
            rules need ``params=model.named_parameters()``. None keeps the groups made by
            ``quantize_model(..., scale_groups=...)``; () means no groups.
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
    # Whether states and groups look like those of Transformer Engine's FusedAdam, or torch.optim's.
    _has_te_layout = True
    master_weights, exp_avg_dtype, exp_avg_sq_dtype, master_weight_dtype = (
        Option() for _ in range(4)
    )
    store_param_remainders, use_decoupled_grad, offload_states, set_grad_none = (
        Option() for _ in range(4)
    )
    quantize_from = Option()

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
        master_weights: bool = True,
        states: Literal["8bit", "16bit", "32bit"] = "32bit",
        exp_avg_dtype: torch.dtype | None = None,
        exp_avg_sq_dtype: torch.dtype | None = None,
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
        if scale_groups is not None and not callable(scale_groups):
            scale_groups = lists_of_members(scale_groups)
        # Transformer Engine's keyword, which torch does not have, tells whose code this is.
        self._has_te_layout = self._has_te_layout or adam_w_mode is not None
        adam_w_mode = adam_w_mode is None or adam_w_mode
        self.scale_groups = None
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
        stored = storage(
            states,
            master_weights,
            exp_avg_dtype=exp_avg_dtype,
            exp_avg_sq_dtype=exp_avg_sq_dtype,
            master_weight_dtype=master_weight_dtype,
            store_param_remainders=store_param_remainders,
        )
        options = Options(
            name=type(self).__name__,
            capturable=capturable,
            master_weights=master_weights,
            **stored,
            use_decoupled_grad=use_decoupled_grad,
            offload_states=offload_states,
            set_grad_none=set_grad_none,
            quantize_from=quantize_from,
        )
        if set_grad_none is not None:
            warnings.warn(
                "set_grad_none is deprecated; call zero_grad(set_to_none=...)",
                DeprecationWarning,
                stacklevel=2,
            )
        self._set_up(options)
        self._check_options(defaults)
        if isinstance(betas[0], Tensor):
            defaults["betas"] = tuple(beta.squeeze() for beta in betas)
        super().__init__(params, defaults)
        self.scale_groups = scale_groups
        self._join_scale_groups()
        if not self._has_te_layout:
            grouping.warn_of_plain_matrices(self._engine.params)

    def __repr__(self) -> str:
        """What ``torch.optim`` says, after how and where states are stored."""
        head = self._targets.options.describe()
        head += f"Gradient release: {self._is_releasing}\n"
        return super().__repr__().replace("(\n", f"(\n{head}", 1)

    def _set_up(self, options: Options) -> None:
        self._targets = Targets(options)
        self._whole = self._new_engine({})
        self._release: GradientRelease | None = None
        # Memory that captured steps use, once per plan; graphs outlive plans and loaded states.
        self._captured: list = []

    def _new_engine(self, states: dict[Tensor, State]) -> Engine:
        kind = OffloadedEngine if self.offload_states else Engine
        return kind(self._targets, [], states)

    @property
    def _engine(self) -> Engine:
        """The engine of all parameters, with groups as they are now; it holds the states."""
        self._whole.groups = [Group(group, group["params"]) for group in self.param_groups]
        return self._whole

    def _forget(self) -> None:
        """Drop the plan, and all that is known of who has written to the parameters."""
        self._targets.forget_marks()
        self._whole.forget()
        if self._is_releasing:
            self._release.forget(self._engine)

    @property
    def _is_releasing(self) -> bool:
        return self._release is not None and self._release.is_enabled

    @property
    def state(self) -> dict[Any, Any]:
        """State per parameter, as in ``torch.optim.Optimizer``; of ``FusedAdam`` a view of it.

        If the device may have skipped the last step, this waits for it, so that ``step`` is right.
        Offloaded states are CPU tensors. This waits until they have arrived, so read them through
        this property after every step.
        """
        engine = self._whole
        engine.settle()
        if self._has_te_layout:
            self._take_steps(self._engine)
            self._show_steps(self._engine)
        elif not self._targets.options.hides_states:
            return engine.states
        if engine.view is None or engine.view.data is not engine.states:
            # Megatron asks a state for a master with decoupled gradients, without them for none.
            shows_own_masters = self.master_weights and self.use_decoupled_grad
            engine.view = te_layout.StatesView(
                engine.states, self._has_te_layout and shows_own_masters, not self._has_te_layout
            )
        return engine.view

    @state.setter
    def state(self, state: dict[Any, Any]) -> None:
        stored = state.data if isinstance(state, te_layout.StatesView) else state
        self.__dict__["state"] = self._whole.states = stored

    def _check_options(self, group: Mapping[str, Any]) -> None:
        """Raise if a hyper-parameter is out of range or a flag is not supported."""
        options = self._targets.options
        capturing.check_option(options, group)
        check_hyper_parameters(options.name, group)
        checks.check_options(options, group["amsgrad"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; its options are checked like the constructor's.

        Nothing has changed if it raises.
        """
        if isinstance(param_group, dict):
            self._check_options({**self.defaults, **param_group})
        count = len(self.param_groups)
        try:
            super().add_param_group(param_group)
            for param in self.param_groups[-1]["params"]:
                checks.check_param(self._targets.options, param)
            self._targets.meet(self.param_groups[-1]["params"])
            self._join_scale_groups()
        except BaseException:
            del self.param_groups[count:]
            raise
        if self._is_releasing:
            self._release.attach(self._engine)

    def _join_scale_groups(self) -> None:
        if self.scale_groups is not None:
            grouping.join_scale_groups(self.param_groups, self.scale_groups)

    def __getstate__(self) -> dict[str, Any]:
        own = {"scale_groups": self.scale_groups, "_has_te_layout": self._has_te_layout}
        state = {**super().__getstate__(), **own, "options": self._targets.options}
        # Copies know nothing of who wrote what, so remainders take along which codes they are for.
        engine = self._engine
        state["state"] = saving.with_digests(engine, engine.states)
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
                applies to the next step. With gradient release that holds for the parameters that
                still have gradients; those released during the backward pass have been stepped.
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
        if self.offload_states != isinstance(self._whole, OffloadedEngine):
            capturing.check_option(self._targets.options, self.defaults)
            self._whole.settle()
            self._whole = self._new_engine(self._whole.states)
        # Reads attributes of tensor subclasses directly, in a tenth of the time.
        with torch._C.DisableTorchFunctionSubclass():
            self._step()
        return loss

    # torch.compile would trace into this, but addresses and tables cannot be traced.
    @torch._disable_dynamo
    def _step(self) -> None:
        engine, options = self._engine, self._targets.options
        if self._is_releasing:
            signals = Signals(*(vars(self).pop(name, None) for name in Signals._fields))
            self._release.finish_step(signals, engine)
            return self._show_steps(engine)
        captures = backend.is_capturing()
        if captures or options.capturable:
            engine.check_call()
        if captures:
            capturing.check_capture(engine, self._captured)
        elif options.capturable:
            capturing.put_rates_on_devices(engine)
        signals = Signals(*(getattr(self, name, None) for name in Signals._fields))
        self._take_steps(engine)
        engine.step(signals, captures)
        self._show_steps(engine)

    def _take_steps(self, engine: Engine) -> None:
        if self._has_te_layout:
            te_layout.take_steps(engine, engine.shown_steps)

    def _show_steps(self, engine: Engine) -> None:
        if self._has_te_layout:
            engine.shown_steps = te_layout.show_steps(engine)

    # Gradients

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Reset the gradients, including ``decoupled_grad`` if it is in use.

        Args:
            set_to_none: Free gradients instead of zeroing them; None means the ``set_grad_none`` of
                the constructor, or else True.

        Raises:
            ValueError: If it contradicts ``set_grad_none``.
        """
        default = getattr(self, "set_grad_none", None)
        if default is not None and set_to_none not in (None, default):
            raise ValueError(
                f"set_to_none must be {default} for an optimizer made with set_grad_none={default},"
                f" got {set_to_none}; leave set_grad_none out"
            )
        if set_to_none is None:
            set_to_none = default is None or default
        super().zero_grad(set_to_none)
        self._whole.clipping = None
        if self._is_releasing:
            self._release.drop_gradients()
        if self.use_decoupled_grad:
            for param in self._engine.params:
                if getattr(param, "decoupled_grad", None) is not None:
                    param.decoupled_grad = None if set_to_none else param.decoupled_grad.zero_()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip the total norm of all gradients in the next step.

        Like ``torch.nn.utils.clip_grad_norm_`` on all parameters, but the gradients stay unchanged:
        the step multiplies each by min(max_norm / (norm + 1e-6), 1) when it reads it, and does not
        round the product to the gradient's dtype. This costs one more read of the gradients, no
        write, and no device sync. With a ``GradScaler``, call ``scaler.unscale_(optimizer)`` first.
        With sharded parameters, call it on every rank.

        The coefficient holds for these gradients and one step, which raises if any of them has
        changed since; ``optimizer.zero_grad()`` drops it.

        Args:
            max_norm: Largest norm that is not clipped, >= 0; infinity only measures.
            norm_type: That of ``torch.nn.utils.get_total_norm``.
            error_if_nonfinite: Raise if the norm is NaN or infinite; this syncs the device.

        Returns:
            The norm before clipping, as ``torch.nn.utils.get_total_norm`` returns it; of DTensors
            the whole norm as a plain tensor.

        Raises:
            ValueError: If an argument is out of range.
            RuntimeError: With ``error_if_nonfinite``, if the norm is not finite; with gradient
                release; while a CUDA graph is captured.
        """
        if self._is_releasing:
            raise RuntimeError(
                "clip_grad_norm_ must not be called while gradients are released, got a call after "
                "the step they were for; leave clipping out, or remove() the handle"
            )
        return self._engine.measure(max_norm, norm_type, error_if_nonfinite)

    def enable_gradient_release(self) -> GradientRelease:
        """Step each parameter as soon as its gradient is complete, and free the gradient.

        The weights get the same bits as from ``step()`` after the backward pass, but gradients no
        longer exist all at once. Keep the training loop as it is: ``step()`` steps parameters that
        still have a gradient, such as one set by hand, and ends the step. It has to be called after
        each backward pass, except those in :meth:`GradientRelease.accumulate`. Members of a scale
        group are stepped once all of those that require gradients have one, or else in ``step()``.

        Works with FSDP2, which calls the hooks with reduced gradients.
        ``torch.nn.parallel.DistributedDataParallel`` averages gradients after the hooks, so
        ``step()`` refuses what it leaves, and ``GradScaler``. Nothing can clip by a norm that is
        known only after the steps: ``torch.nn.utils.clip_grad_norm_`` finds no gradients and
        returns 0. In transformers' Trainer set ``max_grad_norm=0``, and leave
        ``gradient_accumulation_steps`` 1.

        Returns:
            A handle; ``remove()`` returns to stepping in ``step()``. Copies of the optimizer do not
            release gradients.

        Raises:
            RuntimeError: If gradients are released already.
            NotImplementedError: With ``use_decoupled_grad`` or ``capturable``, and for parameters
                that FSDP2 offloads to the CPU.
        """
        if self._is_releasing:
            raise RuntimeError(
                "gradient release must be enabled once, got a second call; remove() the handle "
                "that the first one returned"
            )
        self._release = GradientRelease(self)
        return self._release

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The state in FP32 under the names of ``torch.optim.AdamW``, whatever the storage dtypes.

        As in ``torch.optim``, tensors that are FP32 already are the optimizer's own, not copies. If
        other code has written to a parameter, its value replaces the outdated master.

        That of ``FusedAdam`` has the layout of Transformer Engine's: ``step`` is in the groups, and
        in states that have another count. With ``store_param_remainders``, ``master_param`` is the
        int16 remainder, which is valid with the parameters of the same step; load these first.
        """
        return self._saved(compact=False)

    def compact_state_dict(self) -> dict[str, Any]:
        """The state as it is stored; :meth:`load_state_dict` restores it bit for bit.

        Moments have the dtypes ``exp_avg_dtype`` and ``exp_avg_sq_dtype``, with ``exp_avg_scale``
        and ``exp_avg_sq_scale`` if blocks of 32 elements share a scale. Two float8_e4m3fn moments
        take 2 + 2/32 bytes per element instead of 8. ``param_remainder`` takes 2 bytes instead of
        the 4 of ``master_param``; it is valid only with the parameters of the same step, which must
        be loaded first. Any optimizer of this class can load the result, whatever its own storage
        dtypes; ``torch.optim.AdamW`` cannot. The tensors are the optimizer's own, not copies.

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
        engine.settle()
        if self._has_te_layout:
            self._take_steps(engine)
            self._show_steps(engine)
        state_dict = saving.saved(engine, compact, self._has_te_layout)
        return self._passed(self._optimizer_state_dict_post_hooks, state_dict)

    def _passed(self, hooks: dict[int, Callable], state_dict: dict[str, Any]) -> dict[str, Any]:
        """A state dict after it has gone through the hooks that users have registered."""
        for hook in hooks.values():
            result = hook(self, state_dict)
            state_dict = state_dict if result is None else result
        return state_dict

    def _current_masters(self) -> Callable[[Tensor], Tensor | None]:
        self._whole.settle()
        return saving.current_masters(self._engine)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state saved by this class, compact or not, by ``torch.optim.AdamW``, or by
        Transformer Engine's ``FusedAdam``.

        Moments and masters are not rounded to the dtype of their parameters; they are converted to
        the storage dtypes of this optimizer. Nothing is shared with ``state_dict``.

        Load the model first. A loaded master stands if it belongs to the weight: every element is
        within a gap between codes of the weight's value, whatever has rounded that. A weight that
        was loaded as plain values gets the bytes of its rounded master then. Otherwise the model
        wins, and the master restarts from the weight; the log counts these masters, and quantized
        weights that the state has none for. If the model is loaded after the optimizer, the next
        step decides. A parameter without a master of its own, such as a float32 one, takes over a
        stored master that rounds to its value.

        With sharded parameters, call it on every rank, with states of its shards or of whole
        parameters.

        Raises:
            ValueError: If groups, shapes, dtypes, placements or numbers do not fit; nothing has
                changed then.
            TypeError: If a hyper-parameter is not a number.
        """
        hooks = self._optimizer_load_state_dict_pre_hooks
        state_dict = self._passed(hooks, state_dict.copy())
        engine, capturable = self._engine, self._targets.options.capturable
        with torch._C.DisableTorchFunctionSubclass():
            states, groups, given = saving.loaded(engine, state_dict, self.defaults)
            saving.complete_groups(groups, self.defaults, capturable)
            self.state = saving.with_counts(states, capturable)
            for group, new in zip(self.param_groups, groups, strict=True):
                group.clear()
                group.update(new)
            self._forget()
            saving.load_masters(self._engine, given)
        self._show_steps(engine)
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    # What Transformer Engine's optimizer has

    @torch.no_grad()
    def initialize_state(self, param: Tensor, store_param_remainders: bool | None = None) -> None:
        """Create the state of a parameter before its first step, or start it anew.

        Moments and step count become zero. The master starts as it does in the first step; the
        parameter keeps a high-precision initial value until then.

        Args:
            param: A parameter of this optimizer.
            store_param_remainders: That of the optimizer, or None; also False for a parameter
                that has no remainder.

        Raises:
            ValueError: If ``param`` is none of its parameters, or ``store_param_remainders`` is
                another one.
        """
        te_states.initialize(self._engine, param, store_param_remainders)

    @torch.no_grad()
    def get_unscaled_state(
        self, param: Tensor, state_name: str, skip_unscale: bool = False
    ) -> Tensor:
        """The local part of a state of a parameter, in FP32.

        Args:
            param: A parameter of this optimizer with a state.
            state_name: "exp_avg", "exp_avg_sq" or "master_param".
            skip_unscale: Return a BF16 state as it is.

        Returns:
            The state itself if it is stored in FP32, else a decoded copy. For ``master_param`` with
            ``store_param_remainders``, the int16 remainder of a BF16 parameter. An FP32 parameter
            is its own master.

        Raises:
            ValueError: If ``param`` is none of its parameters or has no state yet, or there is no
                such state.
        """
        return te_states.read(self._engine, param, state_name, skip_unscale)

    @torch.no_grad()
    def set_scaled_state(self, param: Tensor, state_name: str, unscaled_state: Tensor) -> None:
        """Set a state of a parameter from FP32 values, converted to its storage dtype.

        A master is authoritative: the next step continues from it, whatever the parameter holds.
        The state is created first if there is none; ``unscaled_state`` is only read.

        An FP32 parameter is stepped itself, and takes a master only if it equals it rounded, as in
        :meth:`load_state_dict`: Transformer Engine saves the first value of such a parameter.

        Args:
            param: A parameter of this optimizer.
            state_name: "exp_avg", "exp_avg_sq" or "master_param".
            unscaled_state: Float32 of the shape of the local part of ``param``, on any device. For
                ``master_param`` with ``store_param_remainders``, the int16 remainder.

        Raises:
            ValueError: If ``param`` is none of its parameters, there is no such state, or the shape
                differs.
            TypeError: If the dtype differs.
        """
        te_states.write(self._engine, param, state_name, unscaled_state)

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
        engine = self._engine
        known = engine.params
        params = known if params is None else [*params]
        checks.check_known(params, known)
        with torch._C.DisableTorchFunctionSubclass():
            engine.reset_masters(params)
