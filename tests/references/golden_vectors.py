"""Loader of the golden vectors in tests/golden; its README says what they are and where from."""

import functools
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from format_reference import transpose_e2m1
from fp4adam import Float8BlockQuantizer, MXFP8Quantizer, NVFP4Quantizer, Quantizer

GOLDEN = Path(__file__).parents[1] / "golden"
FORMATS = (
    "fp8block_2d_pow2",
    "fp8block_2d_fp32",
    "fp8block_1d_pow2",
    "fp8block_1d_fp32",
    "mxfp8",
    "nvfp4_2d",
    "nvfp4_1d",
)
# Bytes are stored as differences, modulo 256, from bytes that are nearly the same.
_BASES = {
    ("fp8block_2d_fp32", "rowwise_data"): "fp8block_2d_pow2",
    ("fp8block_1d_pow2", "rowwise_data"): "fp8block_2d_pow2",
    ("fp8block_1d_fp32", "rowwise_data"): "fp8block_1d_pow2",
    ("mxfp8", "rowwise_data"): "fp8block_2d_pow2",
    ("nvfp4_1d", "rowwise_data"): "nvfp4_2d",
}

Arrays = Mapping[str, NDArray]


@dataclass(frozen=True)
class GoldenCase:
    """One input, the variant of it that was quantized, and the bytes it must become."""

    format: str
    entry: str
    case: str
    variant: str
    amax_epsilon: float
    shape: tuple[int, int]
    sha16: Mapping[str, str]

    @property
    def input(self) -> Tensor:
        """Float32 or bfloat16 [M, K], a new tensor on the CPU."""
        x = read_input(self.case)
        return x.to(torch.bfloat16) if self.variant == "bf16" else x

    @property
    def expected(self) -> dict[str, Tensor]:
        """Storage by field name, in the layout of Transformer Engine with zeros as padding."""
        fields = _read_format(self.format)[self.entry]
        return {name: torch.from_numpy(array.copy()) for name, array in fields.items()}

    def quantizer(self, rowwise: bool = True, columnwise: bool = True) -> Quantizer:
        options = self.format.split("_")
        if self.format == "mxfp8":
            return MXFP8Quantizer(rowwise, columnwise)
        if "nvfp4" in options:
            return NVFP4Quantizer(rowwise, columnwise, "2d" in options)
        return Float8BlockQuantizer(
            rowwise, columnwise, "2d" in options, "pow2" in options, self.amax_epsilon
        )

    def __str__(self) -> str:
        return f"{self.format}/{self.entry}"


@functools.cache
def read_index() -> dict[str, Any]:
    return json.loads((GOLDEN / "index.json").read_text())


@functools.cache
def read_arrays(name: str) -> dict[str, NDArray]:
    with np.load(GOLDEN / f"{name}.npz", allow_pickle=False) as archive:
        return dict(archive)


def read_input(case: str) -> Tensor:
    """Float32 or bfloat16 [M, K] from its byte planes, the lowest byte first."""
    planes = read_arrays("inputs")[case]
    values = torch.from_numpy(np.moveaxis(planes, 0, -1).copy())
    return values.view(torch.float32 if len(planes) == 4 else torch.bfloat16).squeeze(-1)


def golden_cases(format: str) -> Iterator[GoldenCase]:
    for entry, item in read_index()[format].items():
        case, variant, *epsilon = entry.split("/")
        amax_epsilon = float(epsilon[0].removeprefix("eps=")) if epsilon else 0.0
        shape = tuple(read_index()["cases"][case]["shape"])
        yield GoldenCase(format, entry, case, variant, amax_epsilon, shape, item["sha16"])


def sha16(x: NDArray | Tensor) -> str:
    """First 16 hexadecimal digits of the SHA-256 of the row-major, little-endian bytes."""
    array = np.ascontiguousarray(x.numpy() if isinstance(x, Tensor) else x)
    return hashlib.sha256(array.tobytes()).hexdigest()[:16]


def _base(
    format: str, entry: str, field: str, formats: Mapping[str, Mapping[str, Arrays]]
) -> NDArray | None:
    """The bytes from which those of this field are stored as a difference."""
    case, variant = entry.split("/")[:2]
    for sibling in (f"{case}/{variant}", f"{case}/fp32"):
        if sibling != entry and field in formats[format].get(sibling, {}):
            return formats[format][sibling][field]
    if field == "columnwise_data":
        rowwise = formats[format][entry]["rowwise_data"]
        if format == "mxfp8":
            return rowwise
        return transpose_e2m1(rowwise) if format.startswith("nvfp4") else rowwise.T
    other = formats[_BASES[format, field]] if (format, field) in _BASES else {}
    return other.get(entry, {}).get(field)


@functools.cache
def _read_format(format: str) -> dict[str, dict[str, NDArray]]:
    others = {_BASES[key] for key in _BASES if key[0] == format}
    formats = {other: _read_format(other) for other in others}
    formats[format] = entries = {}
    stored, offsets = read_arrays(format), dict.fromkeys(read_arrays(format), 0)
    for entry, item in read_index()[format].items():
        entries[entry] = fields = {}
        for field, shape in item["fields"].items():
            start = offsets[field]
            offsets[field] += int(np.prod(shape))
            array = stored[field][start : offsets[field]].reshape(shape)
            base = _base(format, entry, field, formats) if array.dtype == np.uint8 else None
            fields[field] = array if base is None else array + base
    return entries
