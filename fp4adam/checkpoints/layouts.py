"""The layouts of quantized checkpoints: how each stores weights and describes itself.

An encoding says which tensors a quantized weight is stored as; nothing is rounded. A layout has an
encoding for every format that it can hold, and describes it in ``config.json``. ``LAYOUTS``, at the
end, lists all of them.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4adam.formats import nvfp4
from fp4adam.formats.float8_block import BLOCK as FLOAT8_BLOCK
from fp4adam.formats.float8_block import Float8BlockQuantizer
from fp4adam.formats.mx import BLOCK as MX_BLOCK
from fp4adam.formats.mxfp4 import MXFP4Quantizer
from fp4adam.formats.mxfp8 import MXFP8Quantizer
from fp4adam.formats.nvfp4 import NVFP4Quantizer
from fp4adam.tensors.blocks import flat_shape
from fp4adam.tensors.quantized_tensor import QuantizedTensor
from fp4adam.tensors.quantizer import Quantizer
from fp4adam.tensors.storage import Storage
from fp4adam.tensors.swizzle import build_gemm_scales
from fp4adam.tensors.transpose import build_columnwise

E4M3 = torch.float8_e4m3fn
Shapes = dict[str, tuple[tuple[int, ...], tuple[torch.dtype, ...]]]
Names = Sequence[str]


@dataclasses.dataclass(frozen=True)
class Encoding:
    """How a layout stores weights of one format, as tensors ``<layer>.<name>``.

    Args:
        format: The layout's name for it.
        codes: Name of the tensor of codes.
        scale: Name of the tensor of block scales.
        stacked: What the names of whole stacks of experts end in, by the names of tensors.
    """

    format: str
    codes: str = "weight"
    scale: str = "weight_scale"
    stacked: dict[str, str] = dataclasses.field(default_factory=dict)

    quantizer_class: ClassVar[type[Quantizer]]
    bits: ClassVar[int]  # of a code
    block: ClassVar[tuple[int, int]]  # rows and columns that one scale is for
    code_dtype: ClassVar[torch.dtype]
    scale_dtypes: ClassVar[tuple[torch.dtype, ...]]  # that are read; the first is written
    largest_scale: ClassVar[int] = 254  # the bits of the largest one of 1 byte; above it are NaN

    def refusal(self, quantizer: Quantizer) -> str | None:
        """The rule of the layout that tensors of ``quantizer`` break, or None."""
        return None if quantizer.rowwise else "the layout stores rowwise codes: rowwise=True"

    def shapes(self, rows: int = 0, cols: int = 0) -> Shapes:
        """Shape and readable dtypes, the first of them written, of what stores a [rows, cols]."""
        grid = -(-rows // self.block[0]), -(-cols // self.block[1])
        return {
            self.codes: ((rows, cols * self.bits // 8), (self.code_dtype,)),
            self.scale: (grid, self.scale_dtypes),
        }

    def encode(self, weight: QuantizedTensor) -> dict[str, Tensor]:
        """The tensors that a weight [rows, cols] is stored as, with its own bytes."""
        (rows, cols), (dtype, *_) = self.shapes(*weight.shape)[self.scale]
        scale = weight.rowwise_scale_inv if self.block[0] == 1 else weight._block_scale_inv
        return {
            self.codes: weight.rowwise_data.view(self.code_dtype),
            self.scale: scale[:rows, :cols].contiguous().view(dtype),
        }

    def of_stack(
        self, stored: dict[str, Tensor], shape: Sequence[int], name: str
    ) -> dict[str, Tensor]:
        """The tensors of a whole stack [experts, rows, cols], given those of it as one matrix."""
        sizes = {key: (*shape[:-2], -1, x.shape[-1]) for key, x in stored.items()}
        sizes[self.codes] = (*shape[:-1], -1, self.block[1] // 2)  # a block of 4-bit codes each
        return {name + end: stored[key].view(sizes[key]) for key, end in self.stacked.items()}

    def cut(self, stored: dict[str, Tensor], rows: tuple[int, int]) -> dict[str, Tensor]:
        """The tensors of rows first to last - 1, both multiples of ``block[0]``."""
        first, last = rows
        scales = stored[self.scale][first // self.block[0] : last // self.block[0]]
        return {**stored, self.codes: stored[self.codes][first:last], self.scale: scales}

    def is_in(self, names: set[str], dtype_of: Callable[[str], Any]) -> bool:
        """True if a checkpoint has a layer or a stack whose tensors have these names and dtypes."""
        kinds = {key: dtypes for key, (_, dtypes) in self.shapes().items()}
        for ends in filter(None, ({key: f".{key}" for key in kinds}, self.stacked)):
            mark = ends[self.scale]
            for layer in (name.removesuffix(mark) for name in names if name.endswith(mark)):
                stored = {key: layer + end for key, end in ends.items()}
                if all(x in names and dtype_of(x) in kinds[key] for key, x in stored.items()):
                    return True
        return False

    def check(
        self, layer: str, found: Callable[[str], tuple[Sequence[int], Any]], shape: Sequence[int]
    ) -> None:
        """Raise ValueError or TypeError unless :meth:`wrap` takes what is ``found`` by name."""
        for key, (expected, dtypes) in self.shapes(*flat_shape(tuple(shape))).items():
            name = f"{layer}.{key}"
            actual, kind = found(name)
            is_scalar = actual in ((), (1,)) and expected in ((), (1,))
            if actual != expected and not is_scalar:
                raise ValueError(
                    f"{name!r} must have shape {expected} for a weight {tuple(shape)} in blocks of "
                    f"{self.block[0]}x{self.block[1]}, got {actual}; build the model from the "
                    "checkpoint's config.json; other blocks are not read"
                )
            if kind not in dtypes:
                raise TypeError(
                    f"{name!r} must be {' or '.join(map(str, dtypes))}, got {kind}; the "
                    "checkpoint is damaged"
                )

    def quantizer_for(self, scales: Iterable[Tensor]) -> Quantizer:
        """The quantizer for all weights of a checkpoint, given their block scales."""
        return self.quantizer_class(columnwise=False)

    def wrap(
        self,
        stored: dict[str, Tensor],
        shape: Sequence[int],
        dtype: torch.dtype,
        quantizer: Quantizer,
        amax: Tensor | None = None,
    ) -> QuantizedTensor:
        """A tensor on the memory of stored codes, and of scales that lie as the format has them.

        Args:
            stored: As :meth:`encode` returns it, with any of ``scale_dtypes``, on one device.
            shape: Shape of the tensor; a stack of matrices is stored as one matrix.
            dtype: Its nominal dtype.
            quantizer: Its quantizer. What it keeps besides is derived, in new memory; ValueError if
                it does not suit the scales, or these are invalid.
            amax: Its amax, if known more exactly than from the stored scale.
        """
        codes, scale = stored[self.codes], self._scales(stored[self.scale])
        inner = {"rowwise_data": codes.view(torch.uint8)}
        if self.block[0] == 1 and "block_scale_inv" in quantizer.layout.inner:
            if not _is_square(scale, side := quantizer.layout.block):
                raise ValueError(
                    f"{self.scale} must be equal for the {side} rows of each block to be taken "
                    "over with two_dimensional=True, got others; set it to False, and NVFP4's "
                    "columnwise as well"
                )
            inner["block_scale_inv"] = scale[::side].contiguous()
        else:
            inner["rowwise_scale_inv" if self.block[0] == 1 else "block_scale_inv"] = scale
        inner |= self._tensor_scales(stored, amax)
        whole = {}
        for name, (size, kind) in quantizer.layout.shapes(*flat_shape(tuple(shape))).items():
            given = inner[name] if name in inner else codes.new_zeros(size, dtype=kind)
            pads = [(0, n - known) for n, known in zip(size, given.shape, strict=True)]
            whole[name] = given if given.shape == size else F.pad(given, sum(pads[::-1], ()))
        out = quantizer.tensor_class(tuple(shape), dtype, quantizer, Storage.of(whole))
        if quantizer.layout.is_square:
            build_columnwise([out])
        elif quantizer.columnwise:
            self._derive(out)
        build_gemm_scales([out])
        return out

    def _scales(self, stored: Tensor) -> Tensor:
        """Block scales as the format has them; raises ValueError for those that cannot be."""
        scale = stored.view(torch.uint8)
        _check_scales(self.scale, scale <= self.largest_scale, stored)
        return scale

    def _tensor_scales(self, stored: dict[str, Tensor], amax: Tensor | None) -> dict[str, Tensor]:
        """The inner tensors that formats with one scale for a tensor have besides."""
        return {}

    def _derive(self, out: QuantizedTensor) -> None:
        """Make columnwise codes that have blocks of their own."""
        raise ValueError(
            "quantizer must have columnwise=False to take over blocks of rows, whose scales differ "
            f"from those of columns, got {out.quantizer}; set it to False"
        )


@dataclasses.dataclass(frozen=True)
class NVFP4Encoding(Encoding):
    """Packed codes, E4M3 scales of 1x16 blocks, an FP32 scale of the tensor.

    Args:
        tensor_scale: Name of the scale of the tensor.
        divides: True if values are divided by it, which is 2688 / amax; else it is amax / 2688.
    """

    tensor_scale: str = "weight_scale_2"
    divides: bool = False

    quantizer_class = NVFP4Quantizer
    bits, block = 4, (1, nvfp4.BLOCK)
    code_dtype, scale_dtypes, largest_scale = torch.uint8, (E4M3,), 0x7E

    def shapes(self, rows: int = 0, cols: int = 0) -> Shapes:
        shape = (1,) if self.divides else ()
        return {**super().shapes(rows, cols), self.tensor_scale: (shape, (torch.float32,))}

    def encode(self, weight: QuantizedTensor) -> dict[str, Tensor]:
        shape, _ = self.shapes()[self.tensor_scale]
        amax, scale = weight._amax, self._scale_of(weight._amax)
        if not (scale.isfinite() & (scale > 0)):
            raise ValueError(
                f"amax must be finite and at least 1e-35 for {self.format}, got {amax.item()}; the "
                "weight has overflowed or vanished: export a healthy one"
            )
        return {**super().encode(weight), self.tensor_scale: scale.reshape(shape)}

    def _scale_of(self, amax: Tensor) -> Tensor:
        """What an amax is stored as; 1 for zeros, whose codes and block scales are zero."""
        ratio = torch.full_like(amax, NVFP4Quantizer.largest_value)
        return torch.where(amax == 0, 1.0, ratio / amax if self.divides else amax / ratio)

    def quantizer_for(self, scales: Iterable[Tensor]) -> Quantizer:
        """Square blocks if the scales allow it."""
        is_square = all(_is_square(scale.view(torch.uint8), nvfp4.BLOCK) for scale in scales)
        return NVFP4Quantizer(two_dimensional=is_square, columnwise=False)

    def _tensor_scales(self, stored: dict[str, Tensor], amax: Tensor | None) -> dict[str, Tensor]:
        factor = stored[self.tensor_scale].reshape(1)
        _check_scales(self.tensor_scale, factor.isfinite() & (factor > 0), factor)
        ratio = torch.full_like(factor, NVFP4Quantizer.largest_value)
        rounded = ratio / factor if self.divides else factor * ratio
        if amax is not None:  # the scale may have been changed without the header
            amax = amax.to(rounded)
            is_zero = (stored[self.scale].view(torch.uint8) == 0).all()
            is_its = torch.where(amax == 0, is_zero, self._scale_of(amax) == factor)
            rounded = torch.where(is_its, amax, rounded)
        return {"amax": rounded}


@dataclasses.dataclass(frozen=True)
class MXFP8Encoding(Encoding):
    """E4M3 codes and E8M0 scales of 1x32 blocks."""

    quantizer_class = MXFP8Quantizer
    bits, block = 8, (1, MX_BLOCK)
    code_dtype, scale_dtypes = E4M3, (torch.uint8, torch.float8_e8m0fnu)

    def _derive(self, out: QuantizedTensor) -> None:
        # Blocks of columns, of the same values.
        columns = MXFP8Quantizer(rowwise=False).quantize(out._read(torch.float32))
        out._columnwise_data.copy_(columns._columnwise_data)
        out._columnwise_scale_inv.copy_(columns._columnwise_scale_inv)


@dataclasses.dataclass(frozen=True)
class MXFP4Encoding(Encoding):
    """Packed E2M1 codes and E8M0 scales of 1x32 blocks; its own quantizers round them so."""

    codes: str = "weight_packed"
    rounding: Literal["floor", "even", "up"] = "even"

    quantizer_class = MXFP4Quantizer
    bits, block = 4, (1, MX_BLOCK)
    code_dtype, scale_dtypes = torch.uint8, (torch.uint8, torch.float8_e8m0fnu)

    def quantizer_for(self, scales: Iterable[Tensor]) -> Quantizer:
        return MXFP4Quantizer(scale_rounding=self.rounding)


@dataclasses.dataclass(frozen=True)
class Float8BlockEncoding(Encoding):
    """E4M3 codes and FP32 scales of 128x128 blocks."""

    quantizer_class = Float8BlockQuantizer
    bits, block = 8, (FLOAT8_BLOCK, FLOAT8_BLOCK)
    code_dtype = E4M3
    scale_dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)

    def refusal(self, quantizer: Float8BlockQuantizer) -> str | None:
        if not quantizer.two_dimensional:
            return "the layout has blocks of 128x128: two_dimensional=True"
        return super().refusal(quantizer)

    def quantizer_for(self, scales: Iterable[Tensor]) -> Quantizer:
        """Scales that are powers of two if those of the checkpoint are."""
        fractions = (scale.float().frexp()[0] for scale in scales)
        is_pow_2 = all(bool(((x == 0.5) | (x == 0)).all()) for x in fractions)
        return Float8BlockQuantizer(columnwise=False, force_pow_2_scales=is_pow_2)

    def _scales(self, stored: Tensor) -> Tensor:
        scale = stored.float()
        _check_scales(self.scale, scale.isfinite() & (scale >= 0), scale)
        return scale


def _is_square(scale: Tensor, block: int) -> bool:
    """True if all rows of each block have the same scales."""
    if len(scale) % block:
        return False
    blocks = scale.unflatten(0, (-1, block))
    return bool((blocks == blocks[:, :1]).all())


def _check_scales(name: str, valid: Tensor, scale: Tensor) -> None:
    if not valid.all():
        kind = torch.uint8 if scale.element_size() == 1 else scale.dtype  # torch indexes few of FP8
        first = scale.view(kind)[~valid][:1].view(scale.dtype)
        raise ValueError(
            f"{name} must hold scales that are finite and not negative, got {first.item()}; the "
            "checkpoint is damaged"
        )


@dataclasses.dataclass(frozen=True)
class Layout:
    """A family of checkpoints, by the ``quant_method`` in their ``config.json``.

    Args:
        name: Its quant_method.
        encodings: One for every format that it can hold.
        describe: The rest of a model's quantization_config, given the encoding of its quantized
            weights; its modules with others; those of these that hold stacks, which engines may
            know as a module per expert.
        decoded_dtype: The dtype that readers decode to, whatever the model's, or None.
        keeps_stacks: True if it holds stacks of experts as they are, and nothing else.
    """

    name: str
    encodings: tuple[Encoding, ...]
    describe: Callable[[Encoding, Names, Names], dict[str, Any]]
    decoded_dtype: torch.dtype | None = None
    keeps_stacks: bool = False


def _describe_compressed_tensors(
    encoding: Encoding, excluded: Names, stacked: Names
) -> dict[str, Any]:
    blocks: dict[str, Any] = {"strategy": "group", "group_size": encoding.block[1]}
    if isinstance(encoding, NVFP4Encoding):
        blocks["strategy"] = "tensor_group"
    elif encoding.block[0] > 1:
        blocks = {"strategy": "block", "block_structure": [*encoding.block]}
    blocks |= {"num_bits": encoding.bits, "type": "float", "symmetric": True, "dynamic": False}
    weights = {**blocks, "scale_dtype": str(encoding.scale_dtypes[0])}
    group = {"targets": ["Linear"], "weights": weights, "format": encoding.format}
    return {
        "format": encoding.format,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {**group, "input_activations": None, "output_activations": None}
        },
        "ignore": [*excluded, *(rf"re:{re.escape(name)}\..*" for name in stacked)],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _describe_modelopt(encoding: Encoding, excluded: Names, stacked: Names) -> dict[str, Any]:
    config = {"quant_algo": encoding.format, "ignore": [*excluded], "producer": _producer()}
    if encoding.bits < 8:  # readers recognize 8 bits by quant_algo alone
        weights = {"num_bits": encoding.bits, "group_size": encoding.block[1]}
        group = {"weights": {**weights, "type": "float", "dynamic": False}, "targets": ["Linear"]}
        config["config_groups"] = {"group_0": group}
    return config


def hf_quant_config(encoding: Encoding, excluded: Names) -> dict[str, Any]:
    """ModelOpt's file beside ``config.json``, which says the same."""
    details = {"quant_algo": encoding.format, "kv_cache_quant_algo": None}
    details |= {"group_size": encoding.block[1], "exclude_modules": [*excluded]}
    return {"producer": _producer(), "quantization": details}


def _producer() -> dict[str, str]:
    from fp4adam import __version__

    return {"name": "fp4adam", "version": __version__}


def _describe_fp8(encoding: Encoding, excluded: Names, stacked: Names) -> dict[str, Any]:
    blocks = {"weight_block_size": [*encoding.block], "modules_to_not_convert": [*excluded]}
    return {"fmt": "e4m3", "activation_scheme": "dynamic", **blocks}


_IN_COMPRESSED_TENSORS = (
    NVFP4Encoding(
        "nvfp4-pack-quantized",
        codes="weight_packed",
        tensor_scale="weight_global_scale",
        divides=True,
    ),
    MXFP8Encoding("mxfp8-quantized"),
    MXFP4Encoding("mxfp4-pack-quantized"),
    Float8BlockEncoding("float-quantized"),
)
_IN_MODELOPT = (NVFP4Encoding("W4A16_NVFP4"), MXFP8Encoding("MXFP8"))
_IN_FP8 = Float8BlockEncoding(
    "128x128",
    scale="weight_scale_inv",
    stacked={"weight": "", "weight_scale_inv": "_scale_inv"},
)
_IN_MXFP4 = MXFP4Encoding(
    "MXFP4", stacked={"weight_packed": "_blocks", "weight_scale": "_scales"}, rounding="up"
)
LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        # https://github.com/vllm-project/compressed-tensors
        Layout(
            "compressed-tensors",
            _IN_COMPRESSED_TENSORS,
            _describe_compressed_tensors,
            decoded_dtype=torch.bfloat16,
        ),
        # https://nvidia.github.io/Model-Optimizer, "Unified HuggingFace Checkpoint"
        Layout("modelopt", _IN_MODELOPT, _describe_modelopt),
        # DeepSeek-V3's, https://huggingface.co/docs/transformers/quantization/finegrained_fp8
        Layout("fp8", (_IN_FP8,), _describe_fp8),
        # gpt-oss', https://huggingface.co/docs/transformers/quantization/mxfp4
        Layout(
            "mxfp4",
            (_IN_MXFP4,),
            lambda _, excluded, __: {"modules_to_not_convert": [*excluded]},
            keeps_stacks=True,
        ),
    )
}


def find_layout(name: str) -> Layout:
    """The layout of a name; raises ValueError for others."""
    if name not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {name!r}")
    return LAYOUTS[name]
