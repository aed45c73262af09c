"""NVFP4, MXFP8, Float8 and Float8Block in plain NumPy: what the package must compute, bit for bit.

It imports nothing from the package and goes other ways than the package where there is a choice:
elements are encoded by searching a table of rounding midpoints, scales by frexp, layouts by
reshaping. Every operation on float32 arrays is one IEEE rounding; NumPy neither fuses nor flushes.
"""

from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float32]
Codes: TypeAlias = NDArray[np.uint8]
Fields: TypeAlias = dict[str, NDArray]

FLOAT32_MAX = np.finfo(np.float32).max
BFLOAT16_MAX = np.uint32(0x7F7F0000).view(np.float32)
ONE_SIXTH = np.uint32(0x3E2AAAAB).view(np.float32)
ONE_448TH = np.uint32(0x3B124925).view(np.float32)

FIELDS = "rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv"
E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
# Subnormals are m * 2**-9, normals (8 + m) * 2**(e - 10); code 0x7F would be 480 but means NaN.
E4M3_VALUES = np.concatenate(
    [np.arange(8) * 2.0**-9, *((8 + np.arange(8)) * 2.0 ** (e - 10) for e in range(1, 16))]
)[:-1].astype(np.float32)


def nearest_even(x: NDArray, values: NDArray) -> NDArray[np.int64]:
    """Index of the value nearest to |x|, on a tie the even one, past the end the last one."""
    values = values.astype(np.float64)
    midpoints = (values[1:] + values[:-1]) / 2  # exact
    below = np.searchsorted(midpoints, np.abs(x), side="left")
    above = np.searchsorted(midpoints, np.abs(x), side="right")
    return np.where(below % 2 == 0, below, above)


def encode_e2m1(x: Floats) -> Codes:
    """Nearest even, saturating at 6; NaN becomes +6, the sign of a zero is kept."""
    code = nearest_even(x, E2M1_VALUES) | np.signbit(x).astype(int) << 3
    return np.where(np.isnan(x), 0x7, code).astype(np.uint8)


def encode_e4m3(x: Floats) -> Codes:
    """Nearest even, saturating at 448; NaN becomes 0x7F, the sign of a zero is kept."""
    code = nearest_even(x, E4M3_VALUES) | np.signbit(x).astype(int) << 7
    return np.where(np.isnan(x), 0x7F, code).astype(np.uint8)


def encode_e8m0(x: Floats) -> Codes:
    """Byte e of the smallest 2**(e - 127) not below x >= 0, at most 254; NaN becomes 255."""
    mantissa, exponent = np.frexp(np.where(np.isfinite(x), x, 1))
    byte = np.clip(exponent + 127 - (mantissa == 0.5), 0, 254)
    byte = np.where(x == 0, 0, np.where(np.isinf(x), 254, byte))
    return np.where(np.isnan(x), 255, byte).astype(np.uint8)


def decode_e2m1(code: Codes) -> Floats:
    """Value of a code in 0..15."""
    return np.concatenate([E2M1_VALUES, -E2M1_VALUES])[code]


def decode_e4m3(code: Codes) -> Floats:
    """Value of a byte."""
    half = np.append(E4M3_VALUES, np.float32(np.nan))
    return np.concatenate([half, -half])[code]


def decode_e8m0(code: Codes) -> Floats:
    """Value of a byte; 2**-127 is a subnormal, 255 is NaN."""
    power = np.ldexp(np.float32(1), code.astype(np.int32) - 127)
    return np.where(code == 255, np.float32(np.nan), power).astype(np.float32)


def pack_e2m1(code: Codes) -> Codes:
    """Two codes per byte along the last dimension, the even element in the low nibble."""
    return code[:, 0::2] | code[:, 1::2] << 4


def unpack_e2m1(packed: Codes) -> Codes:
    """Inverse of :func:`pack_e2m1`."""
    return np.stack([packed & 0xF, packed >> 4], axis=-1).reshape(
        packed.shape[0], 2 * packed.shape[1]
    )


def transpose_e2m1(packed: Codes) -> Codes:
    """Packed codes of the transposed matrix."""
    return pack_e2m1(unpack_e2m1(packed).T)


def swizzle(scale: Codes) -> Codes:
    """Scale bytes [R, C] in the tiles of 128 x 4 that GEMMs read; R % 128 == 0, C % 4 == 0."""
    rows, columns = scale.shape
    tiles = scale.reshape(rows // 128, 4, 32, columns // 4, 4)
    return tiles.transpose(0, 3, 2, 1, 4).reshape(rows, columns)


def _pad(x: NDArray, rows: int, columns: int) -> NDArray:
    """Zeros below and to the right, up to multiples of ``rows`` and ``columns``."""
    return np.pad(x, [(0, -x.shape[0] % rows), (0, -x.shape[1] % columns)])


def _block_amax(x: Floats, rows: int, columns: int, keeps_nan: bool = False) -> Floats:
    """Largest |x| of every rows x columns block; ragged blocks are filled with 0.

    NaN is ignored, or stays where codes have none.
    """
    padded = _pad(np.abs(x), rows, columns)
    m, k = padded.shape
    blocks = padded.reshape(m // rows, rows, k // columns, columns)
    larger = np.maximum if keeps_nan else np.fmax
    return larger.reduce(larger.reduce(blocks, axis=3, initial=0), axis=1, initial=0)


def _spread(blocks: NDArray, rows: int, columns: int, shape: tuple[int, ...]) -> NDArray:
    """One value per element from one value per block."""
    return blocks.repeat(rows, 0).repeat(columns, 1)[: shape[0], : shape[1]]


@np.errstate(all="ignore")
def _nvfp4_rowwise(x: Floats, tile_rows: int, least: float) -> tuple[Codes, Codes, Floats]:
    amax = np.fmax.reduce(np.abs(x).ravel(), initial=least).astype(np.float32)
    global_encode = min(np.float32(2688) / amax, FLOAT32_MAX)
    if amax == 0 or global_encode == 0:
        global_encode = np.float32(1)
    global_decode = np.float32(1) / global_encode
    factor = global_encode * ONE_SIXTH
    # Transformer Engine passes over NaN, and shows it in no code of E2M1.
    block_amax = _block_amax(x, tile_rows, 16, keeps_nan=True)
    scale = encode_e4m3(np.minimum(block_amax * factor, FLOAT32_MAX))
    encode = np.minimum(np.float32(1) / (decode_e4m3(scale) * global_decode), FLOAT32_MAX)
    codes = encode_e2m1(x * _spread(encode, tile_rows, 16, x.shape))
    return pack_e2m1(codes), scale.repeat(tile_rows, 0), amax.reshape(1)


def quantize_nvfp4(x: Floats, two_dimensional: bool = True, least: float = 0.0) -> Fields:
    """NVFP4 of x [M, K], M and K multiples of 16; ``least`` is an amax that others share."""
    fields = {}
    for usage, matrix in (("rowwise", x), ("columnwise", np.ascontiguousarray(x.T))):
        data, scale, amax = _nvfp4_rowwise(matrix, 16 if two_dimensional else 1, least)
        fields |= {f"{usage}_data": data, f"{usage}_scale_inv": _pad(scale, 128, 4)}
        fields[f"amax_{usage}"] = amax
    return fields


@np.errstate(all="ignore")
def dequantize_nvfp4(fields: Fields) -> Floats:
    """Float32 [M, K] from the rowwise fields."""
    codes = unpack_e2m1(fields["rowwise_data"])
    m, k = codes.shape
    scale = decode_e4m3(fields["rowwise_scale_inv"][:m, : k // 16])
    factor = scale * fields["amax_rowwise"] * (np.float32(1) / np.float32(2688))
    return decode_e2m1(codes) * _spread(factor, 1, 16, codes.shape)


@np.errstate(all="ignore")
def _mxfp8(x: Floats, rows: int, columns: int) -> tuple[Codes, Codes]:
    scale = encode_e8m0(_block_amax(x, rows, columns) * ONE_448TH)
    encode = np.ldexp(np.float32(1), 127 - scale.astype(np.int32))
    return encode_e4m3(x * _spread(encode, rows, columns, x.shape)), scale


def quantize_mxfp8(x: Floats, two_dimensional: bool = False) -> Fields:
    """MXFP8 of x [M, K], M and K multiples of 32."""
    data, scale = _mxfp8(x, 32 if two_dimensional else 1, 32)
    columnwise_data, columnwise_scale = _mxfp8(x, 32, 32 if two_dimensional else 1)
    if two_dimensional:
        scale, columnwise_scale = np.repeat(scale, 32, 0), np.repeat(scale, 32, 1)
    stored = data, _pad(scale, 128, 4), columnwise_data, _pad(columnwise_scale, 4, 128)
    return dict(zip(FIELDS, stored, strict=True))


@np.errstate(all="ignore")
def dequantize_mxfp8(fields: Fields, usage: Literal["rowwise", "columnwise"] = "rowwise") -> Floats:
    """Float32 [M, K] from the fields of one usage."""
    data = fields[f"{usage}_data"]
    rows, columns = (1, 32) if usage == "rowwise" else (32, 1)
    m, k = data.shape
    scale = fields[f"{usage}_scale_inv"][: m // rows, : k // columns]
    return _spread(decode_e8m0(scale), rows, columns, data.shape) * decode_e4m3(data)


@np.errstate(all="ignore")
def _float8(
    x: Floats, rows: int, columns: int, pow_2_scales: bool, amax_epsilon: float, largest: np.float32
) -> tuple[Codes, Floats]:
    amax = np.maximum(_block_amax(x, rows, columns), np.float32(amax_epsilon))
    scale = np.float32(448) / amax
    scale = np.where(np.isinf(scale), largest, scale)
    scale = np.where((amax == 0) | np.isinf(amax), np.float32(1), scale)
    if pow_2_scales:
        scale = np.ldexp(np.float32(1), np.frexp(scale)[1] - 1)
    return encode_e4m3(x * _spread(scale, rows, columns, x.shape)), np.float32(1) / scale


def quantize_float8_block(
    x: Floats,
    two_dimensional: bool = True,
    pow_2_scales: bool = True,
    amax_epsilon: float = 0.0,
    largest: np.float32 = FLOAT32_MAX,
) -> Fields:
    """Float8Block of x [M, K]; ``largest`` is the largest finite value of the input's dtype."""
    options = (128 if two_dimensional else 1, 128, pow_2_scales, amax_epsilon, largest)
    data, scale_inv = _float8(x, *options)
    columnwise_data, columnwise_scale_inv = _float8(np.ascontiguousarray(x.T), *options)
    if not two_dimensional:
        # 1 x 128 blocks keep their scales with the block index first.
        scale_inv, columnwise_scale_inv = scale_inv.T, columnwise_scale_inv.T
    stored = data, _pad(scale_inv, 1, 4), columnwise_data, _pad(columnwise_scale_inv, 1, 4)
    return dict(zip(FIELDS, stored, strict=True))


@np.errstate(all="ignore")
def dequantize_float8_block(fields: Fields, two_dimensional: bool = True) -> Floats:
    """Float32 [M, K] from the rowwise fields."""
    data, scale_inv = fields["rowwise_data"], fields["rowwise_scale_inv"]
    m, k = data.shape
    if two_dimensional:
        scale_inv = _spread(scale_inv[:, : -(-k // 128)], 128, 128, data.shape)
    else:
        scale_inv = _spread(scale_inv[:, :m].T, 1, 128, data.shape)
    return decode_e4m3(data) * scale_inv


def quantize_float8(x: Floats, pow_2_scales: bool = False, amax_epsilon: float = 0.0) -> Fields:
    """Float8 of x [M, K] with current scaling: one block."""
    whole = x if x.size else np.zeros((1, 1), np.float32)
    data, scale_inv = _float8(whole, *whole.shape, pow_2_scales, amax_epsilon, FLOAT32_MAX)
    data, scale_inv = np.resize(data, x.shape), scale_inv.reshape(1)
    stored = data, scale_inv, np.ascontiguousarray(data.T), scale_inv
    return dict(zip(FIELDS, stored, strict=True))


@np.errstate(all="ignore")
def dequantize_float8(fields: Fields) -> Floats:
    """Float32 [M, K] from the rowwise fields."""
    return decode_e4m3(fields["rowwise_data"]) * fields["rowwise_scale_inv"]


@np.errstate(all="ignore")
def quantize_mxfp4(x: Floats, rounding: str = "even") -> Fields:
    """MXFP4 of x [M, K], K a multiple of 32; the rowwise fields."""
    amax = _block_amax(x, 1, 32, keeps_nan=True)
    mantissa, exponent = np.frexp(np.minimum(amax.astype(np.float64), 2.0**128))
    goes_up = {"floor": False, "even": mantissa >= 0.875, "up": mantissa > 0.75}[rounding]
    scale = np.where(mantissa == 0, 0, np.maximum(exponent - 3 + goes_up + 127, 0))
    scale = np.where(np.isnan(amax), 255, scale).astype(np.uint8)
    encode = np.ldexp(np.float32(1), 127 - scale.astype(np.int32))
    encode = np.where(scale == 255, np.float32(np.nan), encode)
    codes = encode_e2m1(x * _spread(encode, 1, 32, x.shape))
    return {"rowwise_data": pack_e2m1(codes), "rowwise_scale_inv": _pad(scale, 128, 4)}


@np.errstate(all="ignore")
def dequantize_mxfp4(fields: Fields) -> Floats:
    """Float32 [M, K] from the rowwise fields."""
    codes = unpack_e2m1(fields["rowwise_data"])
    m, k = codes.shape
    scale = decode_e8m0(fields["rowwise_scale_inv"][:m, : k // 32])
    return decode_e2m1(codes) * _spread(scale, 1, 32, codes.shape)


def quantize(
    format: str, x: Floats, amax_epsilon: float = 0.0, largest: np.float32 = FLOAT32_MAX
) -> Fields:
    """Dispatch by name.

    nvfp4_{2d,1d}, mxfp8, mxfp8_2d, mxfp4, mxfp4_{floor,even,up}, float8_{pow2,fp32},
    fp8block_{2d,1d}_{pow2,fp32}.
    """
    if format.startswith("nvfp4"):
        return quantize_nvfp4(x, format.endswith("2d"), amax_epsilon)
    if format.startswith("mxfp4"):
        return quantize_mxfp4(x, format.partition("_")[2] or "even")
    if format.startswith("mxfp8"):
        return quantize_mxfp8(x, format.endswith("2d"))
    if format.startswith("float8"):
        return quantize_float8(x, format.endswith("pow2"), amax_epsilon)
    _, block, scale = format.split("_")
    return quantize_float8_block(x, block == "2d", scale == "pow2", amax_epsilon, largest)


def dequantize(format: str, fields: Fields) -> Floats:
    """Float32 [M, K] from the rowwise fields of the named format."""
    if format.startswith("nvfp4"):
        return dequantize_nvfp4(fields)
    if format.startswith("mxfp4"):
        return dequantize_mxfp4(fields)
    if format.startswith("mxfp8"):
        return dequantize_mxfp8(fields)
    if format.startswith("float8"):
        return dequantize_float8(fields)
    return dequantize_float8_block(fields, format.startswith("fp8block_2d"))
