"""The columns of the tables that kernels read, shared by the kernels and the code that fills them.

Does not import Triton, which the code that fills them does not need.
"""

# One int64 row of addresses and sizes per tensor. Each table has the columns of one of these.
STEP = (
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
    "dither_start",  # index of its first element for the dither
)
CAST = (
    # The span of elements. Addresses of values and codes are extrapolated to the matrix's first.
    "start",
    "stop",
    "value",
    "tensor_amax",  # amaxes of the values: of the tensor, and grids of those of blocks
    "rowwise_amax",
    "columnwise_amax",
    *STEP[6:13],
)
SWIZZLE = (
    "plain",
    "swizzled",
    "scale_rows",  # of the swizzled scales, without padding
    "scale_cols",
    "row_stride",  # of the plain scales, in bytes
    "col_stride",
    "repeats",  # rows of the swizzled scales per row of the plain ones
)
TABLE_WIDTH = len(STEP)


def column(name: str) -> int:
    """The column of this name, which is at the same place in every table that has it."""
    return {each: i for table in (STEP, CAST, SWIZZLE) for i, each in enumerate(table)}[name]


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
    "dither_upper",  # 16-bit halves of the step's dither origin, which float32 represents exactly
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
