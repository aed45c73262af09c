"""One optimizer step in plain torch and NumPy: AdamW, how its state is stored, what it writes.

It imports nothing from the package. Weights are encoded by ``format_reference``; states in float64,
where the package works on the bits of float32.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

import format_reference as formats

GROUP: dict[str, Any] = dict(
    lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, amsgrad=False, maximize=False,
    bias_correction=True, adam_w_mode=True, decoupled_weight_decay=True,
)  # fmt: skip


def adamw_(
    value: Tensor,
    moments: dict[str, Tensor],
    step: float,
    grad: Tensor,
    group: dict[str, Any],
    grad_scale: Tensor | None = None,
    clip: Tensor | None = None,
) -> Tensor:
    """Update ``step`` by a group, of a float32 value and its moments; returns the factor."""
    for name in ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])]:
        moments.setdefault(name, torch.zeros_like(value))
    lr, decay = float(group["lr"]), float(group["weight_decay"])
    beta1, beta2 = map(float, group["betas"])
    factor = torch.tensor(-1.0 if group["maximize"] else 1.0)
    if grad_scale is not None:
        factor = grad_scale.reshape(()).reciprocal() * factor
    if clip is not None:
        factor = clip.reshape(()) * factor
    g = grad.to(torch.float32) * factor.to(grad.device)
    if not group["adam_w_mode"] and decay:
        g = value * decay + g
    # The scalars are float64, each product and sum is rounded to float32. The first moment is
    # interpolated from the nearer end.
    exp_avg, exp_avg_sq = moments["exp_avg"], moments["exp_avg_sq"]
    exp_avg_sq.copy_(exp_avg_sq * beta2 + g * (1 - beta2) * g)
    weight, base = (1 - beta1, exp_avg) if 1 - beta1 < 0.5 else (-beta1, g)
    exp_avg.copy_((g - exp_avg) * weight + base)
    if group["amsgrad"]:
        largest = moments["max_exp_avg_sq"]
        exp_avg_sq = largest.copy_(torch.maximum(largest, exp_avg_sq))
    correction1 = correction2 = 1.0
    if group["bias_correction"]:
        correction1, correction2 = (1 - beta ** int(step) for beta in (beta1, beta2))
    if not lr:
        return factor
    if group["adam_w_mode"] and decay:
        value.mul_(1 - lr * decay)
    root = exp_avg_sq.double().sqrt().float()
    value.sub_(exp_avg * (lr / correction1) / (root * (1 / math.sqrt(correction2)) + group["eps"]))
    return factor


# Stochastic rounding


def _hashed(x: int) -> int:
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ x >> shift) * factor % 2**32
    return x ^ x >> 16


OWN = {"master_param": 0x1B56C4E9, "exp_avg": 0, "exp_avg_sq": 0x85EBCA6B}


def dither(name: str, shape: torch.Size, step: float, place: int = 0) -> np.ndarray:
    """Of a state in update number ``step``; ``place`` is that of the parameter in the optimizer."""
    origin = (_hashed(_hashed(0) ^ int(step)) + place * 0x9E3779B9) % 2**32
    count = np.arange(math.prod(shape), dtype=np.uint64) + origin
    x = (count * 0xC2B2AE35 + OWN[name]) % 2**32
    return (x * x % 2**32).astype(np.int64)


def _upper(random: np.ndarray | None, bits: int) -> Any:
    """The upper bits of a dither; half their range, which rounds to nearest, if there is none."""
    return 1 << (bits - 1) if random is None else random >> (32 - bits)


# States


@dataclasses.dataclass(frozen=True)
class Codec:
    """How float32 numbers are stored: codes, and a scale per 32 if ``largest`` is given."""

    dtype: torch.dtype = torch.float32
    mantissa: int = 23  # stored bits
    largest: float | None = None  # at scale 127
    smallest: float = 0.0  # signed numbers below it are zero, unsigned ones are it
    signed: bool = True

    def encode(self, x: Tensor, random: np.ndarray | None) -> tuple[dict[str, Tensor], Tensor]:
        """What is stored, by the suffix of its name, and the float32 numbers that it stands for."""
        if self.dtype == torch.float32:
            return {"": x.clone()}, x
        flat = x.flatten().numpy().astype(np.float64)
        dropped = 23 - self.mantissa
        carried = _upper(random, dropped) / 2.0**dropped
        if self.largest is None:  # BF16
            value = torch.from_numpy(self._round(flat, carried)).float().view(x.shape)
            return {"": value.to(self.dtype)}, value
        scale = self._scales(flat)
        unit = np.ldexp(1.0, scale.repeat(32)[: flat.size] - 127)
        scaled = np.abs(flat) / unit
        least = 2.0**-200 if self.signed else self.smallest
        rounded = self._round(np.maximum(scaled, least), carried)
        if self.signed:
            rounded = np.copysign(np.where(rounded < self.smallest, 0, rounded), flat)
            codes = torch.from_numpy(rounded).to(self.dtype)
            if self.dtype == torch.float8_e4m3fn:
                codes = codes.view(torch.uint8)
        else:
            # Zeros are at scale 0, whose smallest number is zero itself.
            rounded = np.where((scale.repeat(32)[: flat.size] == 0) & (flat == 0), 0, rounded)
            mantissa, exponent = np.frexp(np.where(rounded == 0, 1, rounded))
            code = ((exponent - 1) * 2.0**self.mantissa) + (mantissa * 2 - 1) * 2.0**self.mantissa
            codes = torch.from_numpy(np.where(rounded == 0, 0, code)).to(torch.int32).to(self.dtype)
        value = torch.from_numpy(rounded * unit).float().view(x.shape)
        stored = {"": codes.view(x.shape), "_scale": torch.from_numpy(scale.astype(np.uint8))}
        return stored, value

    def _round(self, x: np.ndarray, carried: Any) -> np.ndarray:
        """Round magnitudes down, after a fraction of a unit in the last place has been added."""
        magnitude = np.abs(x)
        exponent = np.frexp(np.where(magnitude == 0, 1, magnitude))[1] - 1
        unit = np.ldexp(1.0, np.maximum(exponent, -126) - self.mantissa)
        return np.copysign(np.floor(magnitude / unit + carried) * unit, x)

    def _scales(self, flat: np.ndarray) -> np.ndarray:
        """The smallest ones, from 0, under which no number of a block exceeds the largest."""
        blocks = np.abs(np.pad(flat, (0, -flat.size % 32))).reshape(-1, 32).max(1)
        mantissa, exponent = np.frexp(np.where(blocks == 0, 1, blocks))
        top_mantissa, top = np.frexp(self.largest)
        scale = exponent - top + (mantissa > top_mantissa) + 127
        return np.where(blocks == 0, 0, np.maximum(scale, 0))


FLOAT32 = Codec()
BFLOAT16 = Codec(torch.bfloat16, 7)
FLOAT16 = Codec(torch.float16, 10, 65504.0, 2.0**-14)
E4M3 = Codec(torch.float8_e4m3fn, 3, 448.0, 2.0**-6)
# Their codes count up from the smallest number of a block, 1 at scale 127.
SQUARES16 = Codec(torch.int16, 11, (2 - 2.0**-11) * 2.0**31, 1.0, signed=False)
SQUARES8 = Codec(torch.uint8, 4, (2 - 2.0**-4) * 2.0**15, 1.0, signed=False)
CODECS = {
    "exp_avg": {"float32": FLOAT32, "bfloat16": BFLOAT16, "float16": FLOAT16, "float8": E4M3},
    "exp_avg_sq": {
        "float32": FLOAT32, "bfloat16": BFLOAT16, "float16": SQUARES16, "float8": SQUARES8,
    },
}  # fmt: skip


def means(x: Tensor) -> list[Tensor]:
    """Of a matrix, by row and by column: of pairs, every 32nd of these in turn, then of pairs."""
    found = []
    for each, near in ((x.numpy(), 8), (x.numpy().T, 128)):
        total = np.pad(each, ((0, 0), (0, -each.shape[1] % (32 * near))))
        for size in (near, 32):
            total = total.reshape(len(each), -1, size)
            while total.shape[2] > 1:
                total = total[:, :, ::2] + total[:, :, 1::2]
            if size == near:
                total = np.add.accumulate(total.reshape(len(each), -1, 32), 1)[:, -1]
        found.append(torch.from_numpy(total.reshape(-1) / np.float32(each.shape[1])))
    return found


def high_half(value: Tensor) -> tuple[Tensor, Tensor]:
    """BF16, nearest with ties away from zero, and the int16 remainder of the bits of float32."""
    bits = value.numpy().view(np.int32).astype(np.int64)
    upper = (bits + 0x8000) >> 16
    remainder = torch.from_numpy((bits - (upper << 16)).astype(np.int16))
    return torch.from_numpy(upper.astype(np.int16)).view(torch.bfloat16), remainder


# Weights


def quantize(
    format: str, x: Tensor, before: dict[str, np.ndarray] | None = None, amax: float = 0.0
) -> dict:
    """The fields of a weight; ``before`` has those of delayed scaling, ``amax`` is a shared one."""
    if format != "float8_delayed":
        return formats.quantize(format, x.numpy(), amax)
    amax, largest = np.abs(x.numpy()).max(), np.float32(448)
    if before is None:
        # A new weight has seen its own amax in the step before.
        scale, history = largest / amax, np.array([0, 0, amax], np.float32)
    else:
        scale, history = largest / before["amax_history"].max(), np.roll(before["amax_history"], -1)
    history[0] = amax
    codes = formats.encode_e4m3(x.numpy() * scale)
    inverse = (np.float32(1) / scale).reshape(1)
    return {
        "rowwise_data": codes,
        "rowwise_scale_inv": inverse,
        "columnwise_data": np.ascontiguousarray(codes.T),
        "columnwise_scale_inv": inverse,
        "amax_history": history,
    }


def dequantize(format: str, fields: dict[str, np.ndarray]) -> Tensor:
    return torch.from_numpy(formats.dequantize(format, fields))


def units(format: str, fields: dict[str, np.ndarray]) -> Tensor:
    """What int8 remainders count: 1/239 of the gap from each code to the next larger one."""
    codes, fields = fields["rowwise_data"], dict(fields)
    if format.startswith(("nvfp4", "mxfp4")):
        exponents = np.maximum(formats.unpack_e2m1(codes) >> 1 & 3, 1)
        fields["rowwise_data"] = formats.pack_e2m1((exponents << 1).astype(np.uint8))
        if format.startswith("nvfp4"):
            scales = fields["rowwise_scale_inv"]
            fields["rowwise_scale_inv"] = np.maximum(scales, 4)
        return dequantize(format, fields) * (1 / 478)
    fields["rowwise_data"] = np.maximum(codes & 0x78, 8)
    return dequantize(format, fields) * (1 / 1912)


def remainders(format: str, fields: dict, value: Tensor, random: np.ndarray | None) -> Tensor:
    """The int8 remainders of a master whose codes are in ``fields``."""
    difference = value - dequantize(format, fields)
    steps = (difference * units(format, fields).reciprocal() + 384).clamp(384 - 127, 384 + 127)
    carried = torch.as_tensor(_upper(random, 16)).view(value.shape if random is not None else ())
    return (steps.double() - 384 + carried / 2.0**16).floor().to(torch.int8)


def round_to_e4m3(value: Tensor, random: np.ndarray) -> Tensor:
    """Four significant bits, rounded stochastically: what E4M3 codes can hold of a value."""
    flat = value.flatten().numpy().astype(np.float64)
    rounded = E4M3._round(flat, _upper(random, 20) / 2.0**20)
    return torch.from_numpy(rounded).float().view(value.shape)


@dataclasses.dataclass(eq=False)
class Cell:
    """What must be true of one parameter."""

    format: str | None  # of ``format_reference.quantize``, "float8_delayed", or None of a plain one
    dtype: torch.dtype  # the nominal one
    content: dict[str, Any]  # its fields, or its tensor by the name ""
    master: str  # how it is stored: "float32", "float16", "int8", "remainder" or "none"
    start: Tensor | None = None  # a value before quantization
    value: Tensor | None = None  # what training continues from, in float32, after the first step
    step: int = 0
    place: int = 0
    moments: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    stored: dict[str, Tensor] = dataclasses.field(default_factory=dict)

    def decoded(self) -> Tensor:
        if self.format is None:
            return self.content[""].to(torch.float32, copy=True)
        return dequantize(self.format, self.content)

    def restart(self) -> None:
        """Take the value of the parameter for its master, as stored without dither."""
        has_start = self.start is not None and self.master != "none"
        self.value = self.start.float() if has_start else self.decoded()
        self.start = None
        self._keep(None)

    def forget(self) -> None:
        self.step, self.moments, self.stored, self.value = 0, {}, {}, None

    def overwrite(self, value: Tensor, is_plain: bool = True) -> None:
        """Other code writes a value, which is quantized if it is plain; the master restarts."""
        remainder = self.stored.get("param_remainder")
        if remainder is not None:  # the lower bits of whatever the upper ones are now
            self.content = {"": value.to(self.dtype)}
            bits = self.content[""].view(torch.int16).int() << 16
            self.value = (bits + remainder).view(torch.float32)
            return
        self._write(value, False)
        if self.format is not None and self.master != "none":
            self.start = value if is_plain else None  # as it was written, until a step uses it
        if self.value is not None:
            self.restart()

    def _keep(self, random: np.ndarray | None) -> None:
        """Store the value, rounded to what the master can hold beside the parameter."""
        if self.master == "none":
            return
        if self.master == "remainder":
            self.stored["param_remainder"] = high_half(self.value)[1]
        elif self.master == "int8":
            kept = remainders(self.format, self.content, self.value, random)
            self.stored["master_param"] = kept
            self.value = self.decoded() + kept * units(self.format, self.content)
        else:
            codec = FLOAT32 if self.master == "float32" else FLOAT16
            kept, self.value = codec.encode(self.value, random)
            self.stored |= {f"master_param{suffix}": tensor for suffix, tensor in kept.items()}

    def _write(self, value: Tensor, through_dtype: bool, amax: float = 0.0) -> None:
        if through_dtype:
            value = value.to(self.dtype).float()
        if self.format is not None:
            self.content = quantize(self.format, value, self.content, amax)
        elif self.master == "remainder":
            self.content = {"": high_half(value)[0]}
        else:
            self.content = {"": value.to(self.dtype)}

    def update(self, grad: Tensor, options: dict[str, Any], **factors: Tensor | None) -> None:
        if self.value is None:
            self.restart()
        self.step += 1
        factor = adamw_(self.value, self.moments, self.step, grad, options, **factors)
        self.store_moments(options, grad, factor)

    def store_moments(self, options: dict[str, Any], *grad: Tensor) -> None:
        dithers = bool(grad)
        for name in ("exp_avg", "exp_avg_sq"):
            kind = options.get(f"{name}_dtype", "float32")
            if kind == "factored":
                if self.format is not None:
                    self._keep_means(float(options["betas"][1]), *grad)
                    continue
                kind = options["exp_avg_dtype"]
            codec = CODECS[name][kind]
            moment = self.moments[name]
            random = dither(name, moment.shape, self.step, self.place) if dithers else None
            kept, self.moments[name] = codec.encode(moment, random)
            self.stored |= {f"{name}{suffix}": tensor for suffix, tensor in kept.items()}
        if options["amsgrad"]:
            self.stored["max_exp_avg_sq"] = self.moments["max_exp_avg_sq"]

    def _keep_means(self, beta2: float, *given: Tensor) -> None:
        if not given:
            kept = means(self.moments["exp_avg_sq"])
        else:
            zero, scales = torch.zeros(1), self.stored.get("exp_avg_sq_scale", torch.zeros(2))
            old = self.stored.get("exp_avg_sq", zero), scales[:-1]
            new = [x * given[1] * given[1] for x in means(given[0].float().square())]
            kept = [x * beta2 + y * (1 - beta2) for x, y in zip(old, new, strict=True)]
        by_row, by_column = kept
        (mean,) = means(by_column[:, None])[1]
        inverse = 1 / mean if mean >= 2.0**-126 else torch.zeros(())
        scales = torch.cat((by_column, inverse[None]))
        self.stored |= {"exp_avg_sq": by_row, "exp_avg_sq_scale": scales}
        self.moments["exp_avg_sq"] = (by_row * inverse)[:, None] * by_column

    def round(self) -> None:
        random = dither("master_param", self.value.shape, self.step, self.place)
        if self.master == "none" and self.format is not None:
            self.value = round_to_e4m3(self.value, random)
        elif self.master not in ("int8", "remainder"):
            self._keep(random)

    def settle(self, through_dtype: bool, amax: float = 0.0) -> None:
        self._write(self.value, through_dtype and self.format is not None, amax)
        if self.master in ("int8", "remainder"):
            self._keep(dither("master_param", self.value.shape, self.step, self.place))
        elif self.master == "none":
            self.value = self.decoded()

    def store_otherwise(self, master: str, options: dict[str, Any]) -> None:
        self.stored, self.master = {}, master
        if self.master == "none":
            self.value = self.decoded()
        self.store_moments(options)
        self._keep(None)


class Oracle:
    """What a program makes of parameters, of which the first ``sharing`` ones share a scale."""

    def __init__(self, cells: list[Cell], sharing: int = 0, **options: Any) -> None:
        self.cells, self.sharing, self.options = cells, sharing, {**GROUP, **options}
        self.groups: dict[int, dict[str, Any]] = {}  # what single parameters have of their own
        for i, cell in enumerate(cells):
            cell.place = i

    def step(self, grads: list[Tensor | None], **factors: Tensor | None) -> None:
        written = []
        for i, (cell, grad) in enumerate(zip(self.cells, grads, strict=True)):
            if grad is not None:
                options = {**self.options, **self.groups.get(i, {})}
                cell.update(grad, options, **factors)
                written += [cell] if options["lr"] else []
        # Weights that share a scale are written together, those without a gradient, too.
        shared = self.cells[: self.sharing]
        shared = shared if any(cell in written for cell in shared) else []
        for cell in shared:
            if cell.value is None:
                cell.restart()
        written += [cell for cell in shared if cell not in written]
        for cell in written:
            cell.round()
        through_dtype = self.options.get("quantize_from") == "param_dtype"
        values = (c.value.to(c.dtype) if through_dtype else c.value for c in shared)
        amax = max((value.abs().max().item() for value in values), default=0.0)
        for cell in written:
            cell.settle(through_dtype, amax if cell in shared else 0.0)

    def overwrite(self, values: list[Tensor | None], are_plain: bool = True) -> None:
        for cell, value in zip(self.cells, values, strict=True):
            if value is not None:
                cell.overwrite(value, are_plain)

    def overwrite_with(self, contents: list[dict[str, Any]]) -> None:
        """Other code leaves other bytes: parameters take them, and the masters restart."""
        for cell, found in zip(self.cells, contents, strict=True):
            if cell.format is None:
                cell.overwrite(found[""].float())
                continue
            cell.content = {name: found[name].numpy() for name in cell.content}
            cell.restart()

    def contents(self) -> list[dict[str, Any]]:
        found = []
        for cell in self.cells:
            state = cell.stored | {"step": cell.step} if cell.step else {}
            found.append({n: torch.as_tensor(x) for n, x in (cell.content | state).items()})
        return found
