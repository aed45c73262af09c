"""What is measured: models as lists of matrices, and optimizers by name.

Everyone gets the same values from the same seed. Gradients are BF16 unless the parameters are FP32.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import engine
import torch
from torch import Tensor
from torch.nn import Parameter

import fp4adam
from fp4adam import FP4Adam, FusedAdam, MasterWeightOptimizer
from fp4adam.tensors.quantizer import Quantizer

# Of a matrix, or of a vector: what is no weight of a linear layer is flat, and not quantized.
Shape = tuple[int, ...]

HYPER = dict(lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
FORMATS = {
    "NVFP4": fp4adam.NVFP4Quantizer(),
    "NVFP4 1D": fp4adam.NVFP4Quantizer(two_dimensional=False),
    "NVFP4 rowwise": fp4adam.NVFP4Quantizer(columnwise=False),
    "NVFP4 swizzled": fp4adam.NVFP4Quantizer(optimize_for_gemm=True),
    "MXFP8": fp4adam.MXFP8Quantizer(),
    "MXFP8 swizzled": fp4adam.MXFP8Quantizer(optimize_for_gemm=True),
    "Float8Block": fp4adam.Float8BlockQuantizer(),
    "Float8Block 1D": fp4adam.Float8BlockQuantizer(two_dimensional=False),
    "Float8": fp4adam.Float8Quantizer(),
    "Float8 delayed": fp4adam.Float8Quantizer(scaling="delayed"),
    "MXFP8 2D": fp4adam.MXFP8Quantizer(two_dimensional=True),
    "MXFP8 rowwise": fp4adam.MXFP8Quantizer(columnwise=False),
    "MXFP4": fp4adam.MXFP4Quantizer(),
    "Float8Block rowwise": fp4adam.Float8BlockQuantizer(columnwise=False),
}
UNFUSED = ("NVFP4", "MXFP8", "Float8Block")
NARROW = "FP4Adam, NVFP4, FP8 moments, FP16 masters"
SMALLEST = "8-bit states"
MOMENTS = {"BF16": torch.bfloat16, "FP8": torch.float8_e4m3fn}
# A side of a matrix has to be a multiple of this; 1 where it is not said.
MULTIPLE = {
    fp4adam.NVFP4Quantizer: 16,
    fp4adam.Float8Quantizer: 16,
    fp4adam.MXFP8Quantizer: 32,
    fp4adam.MXFP4Quantizer: 32,
}

# One layer of a GPT with hidden size 2048.
LAYER: list[Shape] = [(3072, 2048), (2048, 2048), (8192, 2048), (8192, 2048), (2048, 8192)]
RAGGED: list[Shape] = [
    (3000, 2000),
    (2000, 2100),
    (700, 5200),
    (5200, 700),
    (1100, 1300),
    (4100, 300),
    (90, 8200),
    (8200, 90),
]
# One layer of Llama-3.1-8B.
LLAMA_LAYER: list[Shape] = [
    (4096, 4096),
    (1024, 4096),
    (1024, 4096),
    (4096, 4096),
    (14336, 4096),
    (14336, 4096),
    (4096, 14336),
]


def _block(width: int) -> list[Shape]:
    """One layer of GPT-2 or of a vision transformer: two norms, and four weights with biases."""
    weights = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    return [*weights, *((rows,) for rows, _ in weights), *[(width,)] * 4]


# The parameters of one layer, and how many layers there are on a GPU.
MODELS: dict[str, tuple[list[Shape], int]] = {
    "gpt": (LAYER, 16),
    "small-tensors": ([(256, 256)] * 25, 80),
    "ragged": (RAGGED, 16),
    "large": ([(2 * rows, 2 * cols) for rows, cols in LAYER], 16),
    "huge": ([(32768, 65792)], 1),  # more than 2**31 elements
    "gpt2-124m": (_block(768), 12),
    "vit-l": (_block(1024), 24),
    "llama-8b": (LLAMA_LAYER, 32),
}
# What a model has beside its layers.
OTHERS: dict[str, list[Shape]] = {
    "gpt2-124m": [(50257 * 768,), (1024 * 768,), (768,), (768,)],
    "vit-l": [
        (1024 * 768,),
        (197 * 1024,),
        (1024,),
        (1024,),
        (1024,),
        (1024,),
        (1000, 1024),
        (1000,),
    ],
    "llama-8b": [(128256, 4096)] * 2,
}


def model_shapes(
    model: str, layers: int | None = None, scale: int = 1, multiple: int = 1
) -> list[Shape]:
    """The shapes of a model's parameters: of its matrices, for most models.

    Args:
        model: A key of MODELS.
        layers: How many layers, as many as in MODELS if None.
        scale: What the sides are divided by.
        multiple: What sides must be multiples of. Those of "ragged" are odd multiples, which leaves
            tails in any larger tile; all others are multiples of 32 for everyone.
    """
    layer, count = MODELS[model]
    shapes = layer * (layers or count) + OTHERS.get(model, [])
    if model == "ragged":
        return [tuple(_odd_multiple(n // scale, multiple) for n in shape) for shape in shapes]
    return [tuple(max(32, n // scale // 32 * 32) for n in shape) for shape in shapes]


def _odd_multiple(n: int, multiple: int) -> int:
    """The largest odd multiple that is not above ``n``, at least one."""
    return max(1, (n // multiple - 1) // 2 * 2 + 1) * multiple


def parameters(
    shapes: list[Shape], device: str, dtype: torch.dtype, quantizer: Quantizer | None = None
) -> list[Parameter]:
    """Parameters with gradients, from fixed seeds."""
    generator = torch.Generator(device).manual_seed(0)
    params = []
    for shape in shapes:
        value = torch.randn(shape, device=device, generator=generator).mul_(0.02).to(dtype)
        is_plain = quantizer is None or len(shape) == 1
        param = Parameter(value if is_plain else quantizer.quantize(value))
        grad = torch.randn(shape, device=device, generator=generator).mul_(1e-3)
        param.grad = grad.to(dtype)
        params.append(param)
    return params


class UnfusedAdam:
    """The step of block-scaled weights in separate parts, in the order of Transformer Engine's.

    FP32 copies of all gradients, one fused FP32 Adam over the master weights (torch's), then the
    weights are quantized one after another by the format's own kernels.
    """

    def __init__(self, params: list[Parameter]) -> None:
        self.params = params
        self.values = [param.detach().dequantize(torch.float32) for param in params]
        self.adam = torch.optim.AdamW(self.values, **HYPER, fused=True)

    @property
    def state(self) -> dict[Parameter, dict[str, Tensor]]:
        """The state per parameter, masters included."""
        pairs = zip(self.params, self.values, strict=True)
        return {p: {"master_param": master, **self.adam.state[master]} for p, master in pairs}

    @torch.no_grad()
    def step(self) -> None:
        """Update all parameters."""
        for param, master in zip(self.params, self.values, strict=True):
            master.grad = param.grad.float()
        self.adam.step()
        for param, master in zip(self.params, self.values, strict=True):
            param.quantize_(master)
        self.adam.zero_grad()  # the copies live as long as a step


class ClippedSteps:
    """Steps of an optimizer after clipping the norm of the gradients: all read once more."""

    grad_reads = 2

    def __init__(self, optimizer: torch.optim.Optimizer, params: list[Parameter]) -> None:
        self.optimizer = optimizer
        # fp4adam's method leaves the gradients alone; torch's function scales them in place.
        ours = getattr(optimizer, "clip_grad_norm_", None)
        self.clip = ours or functools.partial(torch.nn.utils.clip_grad_norm_, params)

    @property
    def state(self) -> dict[Parameter, dict[str, Tensor]]:
        """The state of the optimizer."""
        return self.optimizer.state

    def step(self) -> None:
        """Clip to a norm that is never exceeded, which takes as long, and step."""
        self.clip(1e6)
        self.optimizer.step()


class Contestant(NamedTuple):
    """An optimizer to measure; ``make(shapes, device)`` gives it and its parameters."""

    name: str
    kind: str
    make: Callable[[list[Shape], str], tuple[Any, list[Parameter]]]
    multiple: int = 1


def plain(optimizer: type, dtype: torch.dtype, **options: Any) -> Callable:
    """How to make an optimizer of plain parameters."""

    def make(shapes: list[Shape], device: str) -> tuple[Any, list[Parameter]]:
        params = parameters(shapes, device, dtype)
        return optimizer(params, **HYPER, **options), params

    return make


def quantized(
    optimizer: type,
    quantizer: Quantizer | None,
    dtype: torch.dtype = torch.bfloat16,
    **options: Any,
) -> Callable:
    """How to make an optimizer of quantized parameters, or of plain ones, with these options."""

    def make(shapes: list[Shape], device: str) -> tuple[Any, list[Parameter]]:
        params = parameters(shapes, device, dtype, quantizer)
        return optimizer(params, **options), params

    return make


def clipped(make: Callable) -> Callable:
    """How to make an optimizer that clips before each step."""

    def make_clipped(shapes: list[Shape], device: str) -> tuple[Any, list[Parameter]]:
        optimizer, params = make(shapes, device)
        return ClippedSteps(optimizer, params), params

    return make_clipped


def engine_tensors(optimizer: Callable[..., Any], format: str) -> Callable:
    """How to make an optimizer of Transformer Engine's own weights; an error without it."""

    def make(shapes: list[Shape], device: str) -> tuple[Any, list[Parameter]]:
        te, recipe = engine.recipe_of(format)
        params = []
        for shape in shapes:
            param = engine.linear(te, recipe, *shape).weight
            param.grad = torch.randn(shape, device=device).mul_(1e-3).bfloat16()
            params.append(param)
        return optimizer(params, **HYPER), params

    return make


def installed(module: str, name: str, **options: Any) -> Callable:
    """How to make another package's optimizer of BF16 parameters; ImportError without it."""

    def make(shapes: list[Shape], device: str) -> tuple[Any, list[Parameter]]:
        optimizer = getattr(importlib.import_module(module), name)
        return plain(optimizer, torch.bfloat16, **options)(shapes, device)

    return make


def _contestants() -> list[Contestant]:
    adamw, bf16, fp32 = torch.optim.AdamW, torch.bfloat16, torch.float32
    result = [
        Contestant("torch AdamW fused, FP32", "torch", plain(adamw, fp32, fused=True)),
        Contestant("torch AdamW fused, BF16 (no masters)", "torch", plain(adamw, bf16, fused=True)),
        Contestant("FusedAdam, FP32", "fp4adam", plain(FusedAdam, fp32)),
        Contestant("FusedAdam, BF16 + FP32 masters", "fp4adam", plain(FusedAdam, bf16)),
    ]
    for name, quantizer in FORMATS.items():
        make = quantized(FP4Adam, quantizer, **HYPER)
        result.append(Contestant(f"FP4Adam, {name}", "fp4adam", make, _multiple(quantizer)))
    make = plain(FusedAdam, bf16, store_param_remainders=True)
    result.append(Contestant("FusedAdam, BF16 + 16-bit remainders", "fp4adam", make))
    make = quantized(
        FP4Adam,
        FORMATS["NVFP4"],
        **HYPER,
        exp_avg_dtype=torch.float8_e4m3fn,
        exp_avg_sq_dtype=torch.float8_e4m3fn,
        master_weight_dtype=torch.float16,
    )
    result.append(Contestant(NARROW, "fp4adam", make, 16))
    for name in UNFUSED:
        make = quantized(FP4Adam, FORMATS[name], **HYPER, states="8bit")
        multiple = max(32, _multiple(FORMATS[name]))
        result.append(Contestant(f"FP4Adam, {name}, {SMALLEST}", "fp4adam", make, multiple))
    rowwise = dataclasses.replace(FORMATS["NVFP4"], columnwise=False)
    for states, label in (("8bit", SMALLEST), ("factored", "factored second moments")):
        for name in ("MXFP8", "Float8Block"):
            make = quantized(FP4Adam, FORMATS[name], **HYPER, states=states, master_weights=False)
            label_of_all = f"FP4Adam, {name}, {label}, no masters"
            result.append(Contestant(label_of_all, "fp4adam", make, 32))
        make = quantized(FP4Adam, rowwise, **HYPER, states=states)
        result.append(Contestant(f"FP4Adam, NVFP4 rowwise, {label}", "fp4adam", make, 32))
    for name, dtype in MOMENTS.items():
        moments = dict(exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype)
        make = plain(FusedAdam, bf16, **moments)
        result.append(
            Contestant(f"FusedAdam, BF16 + FP32 masters, {name} moments", "fp4adam", make)
        )
        make = quantized(FP4Adam, FORMATS["NVFP4"], **HYPER, **moments)
        result.append(Contestant(f"FP4Adam, NVFP4, {name} moments", "fp4adam", make, 16))
    for name, kind, make in (
        ("torch AdamW fused, FP32, clipped", "torch", result[0].make),
        ("FusedAdam, FP32, clipped", "fp4adam", result[2].make),
        ("FP4Adam, NVFP4, clipped", "fp4adam", result[4].make),
    ):
        result.append(Contestant(name, kind, clipped(make), 16))
    for name in UNFUSED:
        make = quantized(UnfusedAdam, FORMATS[name])
        result.append(Contestant(f"Unfused, {name}", "unfused", make, _multiple(FORMATS[name])))
        over_masters = dict(optimizer_class=adamw, **HYPER, fused=True)
        make = quantized(MasterWeightOptimizer, FORMATS[name], **over_masters)
        name, multiple = f"MasterWeightOptimizer, AdamW, {name}", _multiple(FORMATS[name])
        result.append(Contestant(name, "unfused", make, multiple))
    muon = dict(lr=1e-3, weight_decay=0.1)
    over_masters = dict(optimizer_class=torch.optim.Muon, **muon)
    for name, dtype in (("FP32", fp32), ("BF16 (no masters)", bf16)):
        make = quantized(torch.optim.Muon, None, dtype, **muon)
        result.append(Contestant(f"torch Muon, {name}", "torch", make))
    for name, quantizer in (("BF16 + FP32 masters", None), ("NVFP4", FORMATS["NVFP4"])):
        make = quantized(MasterWeightOptimizer, quantizer, **over_masters)
        result.append(Contestant(f"MasterWeightOptimizer, Muon, {name}", "unfused", make, 16))
    for name in engine.RECIPES:
        for package, optimizer in (("TE FusedAdam", engine.adam), ("FP4Adam", FP4Adam)):
            # In whole blocks for every format; kernels of both packages write these tensors.
            make = engine_tensors(optimizer, name)
            title = f"{package} on TE's tensors, {name}"
            result.append(Contestant(title, "Transformer Engine", make, 128))
    for name, (module, optimizer, options) in PEERS.items():
        result.append(Contestant(name, "other packages", installed(module, optimizer, **options)))
    return result


def _multiple(quantizer: Quantizer) -> int:
    return MULTIPLE.get(type(quantizer), 1)


# Other packages' optimizers of BF16 parameters: module, class, options.
PEERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Transformer Engine FusedAdam, masters": (
        "transformer_engine.pytorch.optimizers",
        "FusedAdam",
        dict(master_weights=True),
    ),
    "flashoptim FlashAdamW, 24-bit masters": ("flashoptim", "FlashAdamW", {}),
    "torchao AdamW8bit": ("torchao.optim", "AdamW8bit", {}),
    "torchao AdamW4bit": ("torchao.optim", "AdamW4bit", {}),
    "torchao AdamWFp8": ("torchao.optim", "AdamWFp8", {}),
    "torchao _AdamW, stochastic rounding": (
        "torchao.optim",
        "_AdamW",
        dict(bf16_stochastic_round=True),
    ),
    "bitsandbytes AdamW8bit": ("bitsandbytes.optim", "AdamW8bit", {}),
    "bitsandbytes AdamW, FP32 states": ("bitsandbytes.optim", "AdamW", {}),
}
PACKAGES = sorted({module.split(".")[0] for module, _, _ in PEERS.values()})
CONTESTANTS = _contestants()
# Who is measured on "llama-8b": what takes all of an H200, and what takes an H100.
LARGE_LIST = ("FP4Adam, NVFP4", NARROW)
# Who is measured on the others but "gpt".
SHORT_LIST = (
    "torch AdamW fused, FP32",
    "FusedAdam, BF16 + FP32 masters",
    "FP4Adam, NVFP4",
    "FP4Adam, MXFP8",
    "FP4Adam, Float8Block",
)
