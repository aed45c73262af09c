"""Recipes: which of weights, activations and gradients linear layers quantize."""

import dataclasses
from typing import Literal

from fp4adam.formats.float8 import Float8Quantizer
from fp4adam.formats.float8_block import Float8BlockQuantizer
from fp4adam.formats.mxfp4 import MXFP4Quantizer
from fp4adam.formats.mxfp8 import MXFP8Quantizer
from fp4adam.formats.nvfp4 import NVFP4Quantizer
from fp4adam.nn.operand import FORMATS
from fp4adam.tensors.quantizer import Operands, Quantizer

FormatName = Literal["nvfp4", "mxfp8", "mxfp4", "float8block", "float8"]
# With the codes of both directions.
RECIPES: dict[FormatName, Quantizer] = {
    "nvfp4": NVFP4Quantizer(),
    "mxfp8": MXFP8Quantizer(),
    "mxfp4": MXFP4Quantizer(),
    "float8block": Float8BlockQuantizer(),
    "float8": Float8Quantizer(),
}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Which operands of linear layers are quantized; by default the weights alone.

    y = x W^T multiplies codes with ``activations``, dx = dy W with ``gradients``, and dW = dy^T x
    with both, but for MXFP8; all other products read the dequantized weight. They run on units of
    the GPU for the format of the weight: Float8 on compute capability 8.9 and later, Float8Block on
    9.0, MXFP8 and NVFP4 on 10.0 and later. A CPU multiplies the decoded operands instead. Casts are
    plain operators, which ``torch.compile`` fuses: compile the model. Stacks of experts are
    quantized alone, and under tensor parallelism dW stays in high precision. The blocks and codes
    of each format are in docs/matmuls.md.

    ``activations="fake"`` is fake quantization, for quantization-aware training (W4A4, W8A8) on any
    device: activations are quantized and decoded to their own dtype before an ordinary matmul, in
    the same blocks. Both gradients are those of that matmul, straight through the rounding.

    Args:
        weights: "nvfp4", "mxfp8", "mxfp4" (for weights alone), "float8block", "float8" or a
            quantizer. Weights of a name keep the codes that matmuls read, those of a quantizer what
            it says.
        activations: Quantize the inputs of linear layers; "fake" decodes them again.
        gradients: Quantize the gradients of their outputs; rounded to nearest but in NVFP4.
        weight_gradients: With False, gradients of weights are products in high precision, for which
            layers keep their inputs rather than the codes of these.
        emulate: Multiply decoded operands in FP32 on every device, as a CPU always does.

    Raises:
        ValueError: If the name is unknown, the weights lack the codes that a matmul reads, or
            ``activations="fake"`` comes with quantized gradients or emulation.
        TypeError: If ``weights`` is neither a name nor a quantizer, or another argument not a bool.
    """

    weights: FormatName | Quantizer
    activations: bool | Literal["fake"] = False
    gradients: bool = False
    emulate: bool = False
    weight_gradients: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.weights, Recipe):
            raise TypeError(
                f"weights must be a format name or a quantizer, got {self.weights}; change "
                "it with dataclasses.replace"
            )
        for name in ("activations", "gradients", "emulate", "weight_gradients"):
            value = getattr(self, name)
            if not (isinstance(value, bool) or (name, value) == ("activations", "fake")):
                allowed = 'True, False or "fake"' if name == "activations" else "True or False"
                raise TypeError(
                    f"{name} must be {allowed}, got {value!r}; operands have the format of the "
                    "weights"
                )
        if not (self.weight_gradients or (self.activations is True and self.gradients)):
            raise ValueError(
                "weight_gradients must be True unless activations and gradients are quantized, got "
                "False: gradients of weights are in high precision then anyway; leave it out"
            )
        weights = resolve_recipe(self.weights, columnwise=self.gradients)
        if (self.activations or self.gradients) and type(weights) not in FORMATS:
            names = ", ".join(name for name, each in RECIPES.items() if type(each) in FORMATS)
            raise ValueError(
                f"activations and gradients must be False unless weights are of {names}, got "
                f"{weights}; quantize the weights alone"
            )
        if self.activations == "fake":
            for name in ("gradients", "emulate"):
                if getattr(self, name):
                    raise ValueError(
                        f'{name} must be False with activations="fake", got True: its matmuls are '
                        "ordinary ones; pass activations=True for matmuls of codes"
                    )
            return
        for name, usage in (("activations", "rowwise"), ("gradients", "columnwise")):
            if getattr(self, name) and not getattr(weights, usage):
                raise ValueError(
                    f"{name}=True must have {usage} codes of the weights to multiply with, got "
                    f"{weights}; make it with {usage}=True"
                )

    @property
    def quantizer(self) -> Quantizer:
        """The quantizer of the weights, which also carries the other options of the recipe."""
        weights = resolve_recipe(self.weights, columnwise=self.gradients)
        codes, is_fake = self.activations is True, self.activations == "fake"
        operands = Operands(codes, self.gradients, self.emulate, is_fake, self.weight_gradients)
        # The optimizer then writes the scales as the GEMM reads them.
        swizzled = (codes or self.gradients) and FORMATS[type(weights)].is_swizzled
        return dataclasses.replace(
            weights, operands=operands, optimize_for_gemm=swizzled or weights.optimize_for_gemm
        )


def resolve_recipe(recipe: FormatName | Quantizer | Recipe, columnwise: bool = False) -> Quantizer:
    """The quantizer of weights for a recipe; ``columnwise`` codes are for gradients' products.

    Raises:
        ValueError: If the name is unknown.
        TypeError: If ``recipe`` is neither a name, a quantizer nor a recipe.
    """
    if isinstance(recipe, Recipe):
        return recipe.quantizer
    if isinstance(recipe, Quantizer):
        return recipe
    if not isinstance(recipe, str):
        raise TypeError(
            f"recipe must be a format name or a quantizer, got {type(recipe).__name__}; "
            f"pass one of {', '.join(RECIPES)}"
        )
    if recipe not in RECIPES:
        names = ", ".join(RECIPES)
        raise ValueError(f"recipe must be one of {names} or a quantizer, got {recipe!r}")
    return dataclasses.replace(RECIPES[recipe], columnwise=columnwise)


def format_name(quantizer: Quantizer) -> str:
    """The name of a format in tables: "NVFP4", "MXFP8", "Float8Block"."""
    return type(quantizer).__name__.removesuffix("Quantizer")


def describe(quantizer: Quantizer) -> str:
    """Its format and the options that are not the defaults, such as "NVFP4 (columnwise=False)"."""
    usual = type(quantizer)()
    options = {
        f.name: getattr(quantizer, f.name) for f in dataclasses.fields(quantizer) if f.compare
    }
    words = [f"{key}={value!r}" for key, value in options.items() if value != getattr(usual, key)]
    operands, usual = quantizer.operands._asdict(), usual.operands._asdict()
    words += [f"{key}={value}" for key, value in operands.items() if value != usual[key]]
    name = format_name(quantizer)
    return f"{name} ({', '.join(words)})" if words else name
