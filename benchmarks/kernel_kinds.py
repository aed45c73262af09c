"""What the kernels of forward and backward passes are for, as far as their names tell."""

# By what is in a name, in lower case; the first that fits. Names that the compiler makes up come
# first, because they list what was fused and what was next to it.
KINDS = {
    "other": ("triton_",),
    "dequantize": ("_dequantize_",),
    "operand": ("_quantize_", "_amax_kernel", "_transpose_", "_swizzle_"),
    "attention": ("flash", "fmha", "sdpa"),
    "matmul": ("gemm", "nvjet", "cutlass", "cublas", "splitk"),
}


def kind_of(kernel: str) -> str:
    """The key of KINDS for the name of a kernel; "other" for one that fits nowhere."""
    name = kernel.lower()
    fits = (kind for kind, parts in KINDS.items() if any(part in name for part in parts))
    return next(fits, "other")
