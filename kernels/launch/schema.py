"""The columns of the tables that kernels read, shared by the kernels and the code that fills them.

Does not import Triton, which the code that fills them does not need.
"""

# One int64 row per tensor: addresses and sizes.
COLUMNS = (
    "grad",  # 0 if the tensor takes no part in this step
    "scalars",  # index of its row of scalars
    "value",
    "exp_avg",
    "exp_avg_sq",
    "max_exp_avg_sq",
    "rowwise_data",
    "rowwise_scale",
    "columnwise_data",
    "columnwise_scale",
    "amax",
    "rows",
    "cols",
    "value_extra",  # scales or remainders
    "exp_avg_scale",
    "exp_avg_sq_scale",
    "rowwise_gemm_scale",
    "columnwise_gemm_scale",
    "amax_history",
)
TABLE_WIDTH = len(COLUMNS)

# Other names of columns, for kernels that take no step, and for formats without a history.
_OTHER_NAMES = {
    "changed": "amax_history",  # flags of the units that a step changes
    # Casts
    "start": "grad",  # the span of elements
    "stop": "scalars",
    "tensor_amax": "exp_avg",  # amaxes of the values
    "rowwise_amax": "exp_avg_sq",
    "columnwise_amax": "max_exp_avg_sq",
    "choices": "value_extra",
    # Swizzles of ``rowwise_scale`` to ``rowwise_gemm_scale``
    "row_stride": "grad",
    "col_stride": "scalars",
    "repeats": "value",  # rows of the swizzled scales per row of the plain ones
}
INDEX = {name: i for i, name in enumerate(COLUMNS)}
INDEX |= {other: INDEX[name] for other, name in _OTHER_NAMES.items()}


def table_row(**fields: int) -> list[int]:
    """A row of the table with these columns, 0 in all others.

    Raises:
        KeyError: If there is no such column.
        ValueError: If two names are of one column.
    """
    row = [0] * TABLE_WIDTH
    for name, field in fields.items():
        row[INDEX[name]] = field
    if len({INDEX[name] for name in fields}) < len(fields):
        raise ValueError(f"fields must be of different columns, got {', '.join(fields)}")
    return row


# One float32 row per set of scalars. The first eight are those of ``fp4adam.optim.adam.Scalars``.
SCALAR_COLUMNS = (
    "grad_factor",
    "decay",
    "lerp_weight",
    "beta2",
    "one_minus_beta2",
    "eps",
    "step_size",
    "rsqrt_bias_correction2",
    "dither_upper",  # 16-bit halves of the dither origin, which float32 represents exactly
    "largest_update",  # bounds of the update, for ``amax_preview``
    "largest_decay",
    "dither_lower",
)
SCALARS_WIDTH = len(SCALAR_COLUMNS)

# One float64 row per parameter group whose scalars are computed on the device.
HYPER_COLUMNS = (
    "lr",
    "beta1",
    "beta2",
    "eps",
    "weight_decay",
    "grad_factor",  # -1 to maximize, else 1
    "bias_correction",  # 1 or 0
    "adam_w_mode",  # 1 or 0
)
