"""FusedAdam for parameters that are stored in 4 or 8 bits."""

from fp4adam.optim.fused_adam import FusedAdam


class FP4Adam(FusedAdam):
    """``torch.optim.AdamW`` for models whose weights live in 4 or 8 bits, and plain parameters too.

    ::

        model = fp4adam.quantize_model(model, "nvfp4")
        optimizer = fp4adam.FP4Adam(model.parameters(), lr=3e-4)

    Parameters may also be ``NVFP4Tensor``, ``MXFP8Tensor``, ``Float8BlockwiseQTensor`` and
    ``Float8Tensor`` of Transformer Engine, ``NVFP4Tensor`` and ``MXTensor`` of
    torchao, or of any class with a :class:`TensorAdapter`. The step writes their memory in place.

    A quantized parameter has an FP32 master weight in the optimizer's state, 12 bytes per element
    with its moments. After every step its bytes are those of
    ``param.quantizer.quantize(master_param)``; with delayed scaling those of the master under the
    scale of earlier values.

    With ``states="8bit"`` it takes 3.06: FP8 moments, and ``master_weight_dtype=torch.int8``. The
    master is then the weight and an int8 remainder, rounded stochastically, in units of 1/239 of
    the gap between codes. ``state_dict()`` has FP32 masters. A remainder is of use only with its
    codes: if other code writes the weight, even the same bytes, or moves it between two steps, the
    master restarts from the weight, with a warning.

    With ``master_weights=False`` MXFP8 weights, and Float8Block ones with scales that are powers of
    two, have no master: each update is rounded stochastically to what E4M3 codes can hold. With
    ``states="8bit"`` the state then takes 2.06 bytes per element.

    With ``states="factored"`` the second moments of quantized matrices are means of squares by row
    and by column, whose product a step takes for what was before it. The state takes 2.03 bytes per
    element then, and 1.03 without masters. Other second moments, such as those of embeddings, stay
    in ``exp_avg_dtype``. A gradient that is not finite makes those of its whole matrix NaN.
    ``state_dict()`` has the product as ``exp_avg_sq``; from another one the means are taken.

    The master starts from the value before quantization if the parameter still has it, otherwise
    from its decoded values. If other code overwrites the parameter later (``load_state_dict``,
    weight averaging), it restarts from the new value. A step with lr = 0 leaves the bytes alone.

    NVFP4 and Float8 weights of a scale group are quantized with one amax, the largest magnitude in
    all of their masters, so a server can fuse them without re-quantizing. If any member has a
    gradient, all members are written and have a state.

    States, groups and checkpoints look like those of ``torch.optim``. :class:`FusedAdam` is the
    same optimizer with the layout of Transformer Engine's. Args are those of :class:`FusedAdam`,
    and its defaults. For quantized parameters ``capturable`` must stay False: the step writes them
    in place, where a CUDA graph of forward and backward reads them.

    Raises:
        NotImplementedError: For ``capturable=True`` with quantized parameters, for DTensors of
            other packages' tensors that ``fully_shard`` has not made, and for factored second
            moments of shards that ``fully_shard`` alone has not made, or of other packages.
        TypeError: If a parameter is of another package's class without an adapter, or
            ``scale_groups`` is neither lists nor a rule.
        ValueError: For ``master_weights=False`` with weights in other formats, an unknown
            ``quantize_from``, or another package's tensor that the kernels cannot write; if a
            member of a scale group is unknown, not NVFP4 or Float8 with current scaling, or in two
            groups.
    """

    _has_te_layout = False
