"""``python -m fp4adam``: what is installed, and what each format takes on each device.

``python -m fp4adam --plan 8e9`` says on which cards a model of 8 billion parameters can be trained.
"""

import argparse
import math
import platform
from collections.abc import Sequence

import torch

import fp4adam
from fp4adam import plan
from fp4adam.nn.hardware import GROUPED_MAJOR, REQUIREMENTS
from fp4adam.tensors import backend
from fp4adam.tensors.quantizer import Quantizer

FORMATS: dict[str, type[Quantizer]] = {
    "NVFP4": fp4adam.NVFP4Quantizer,
    "MXFP8": fp4adam.MXFP8Quantizer,
    "MXFP4": fp4adam.MXFP4Quantizer,
    "Float8Block": fp4adam.Float8BlockQuantizer,
    "Float8": fp4adam.Float8Quantizer,
}
PARTS = ("fused step", "quantize, dequantize", "weight-only matmul", "quantized matmul")
WHY = {
    "native": "Triton kernels, and torch.nn.functional.scaled_mm for quantized matmuls",
    "emulated": "plain torch operators, as kernels need a CUDA device; steps and codes have their "
    "bits, sums of matmuls another order",
    "missing": "the kernels of CUDA devices need Triton 3.6 or newer: pip install triton",
    "dequantized": "weights are decoded to the dtype of the activations for torch's own matmul",
}
RECIPE = (
    "quantized matmul: what Recipe(..., activations=True, gradients=True) takes; with emulate=True "
    "it is emulated on any device; grouped_linear takes it for MXFP8 and NVFP4 stacks, on GPUs of "
    f"capability {GROUPED_MAJOR}.x"
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the report, or a plan."""
    parser = argparse.ArgumentParser(
        prog="python -m fp4adam", description="Says what is installed and what runs here."
    )
    parser.add_argument(
        "--plan",
        type=plan.parse_count,
        nargs="?",
        const=None,
        default=math.nan,
        metavar="PARAMETERS",
        help="say instead which cards take full fine-tuning of a model of this size, such as 8e9; "
        "without a size, how large a model each card takes",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=plan.TOKENS,
        help=f"of the one sequence that --plan counts activations of (default: {plan.TOKENS})",
    )
    args = parser.parse_args(arguments)
    if args.plan is not None and math.isnan(args.plan):
        return print(report())
    try:
        print(plan.table(args.plan, args.tokens))
    except ValueError as error:
        parser.error(str(error))


def report() -> str:
    """Versions, devices, and a table of formats and parts per device; computes nothing."""
    triton, problem = _triton()
    threads = f"{platform.machine()}, {torch.get_num_threads()} threads"
    devices = [(torch.device("cpu"), threads, (0, 0))]
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            devices.append((torch.device("cuda", i), *_describe(i)))
    lines = [
        f"fp4adam {fp4adam.__version__}, torch {torch.__version__}, triton {triton}, "
        f"Python {platform.python_version()}, CUDA {torch.version.cuda or 'none'}"
    ]
    if problem:
        lines.append(f"triton could not be imported: {problem}")
    if len(devices) == 1:
        lines.append(f"no CUDA device: {_why_no_cuda()}")
    met: set[str] = set()
    for device, description, capability in devices:
        lines += ["", f"{device}: {description}", _row("", PARTS)]
        for name, quantizer in FORMATS.items():
            cells = support(quantizer, device, capability, has_triton=not problem)
            met.update(cells)
            lines.append(_row(name, cells))
    lines += ["", *(f"{word}: {why}" for word, why in WHY.items() if word in met), RECIPE]
    return "\n".join(lines)


def support(
    quantizer: type[Quantizer], device: torch.device, capability: tuple[int, int], has_triton: bool
) -> tuple[str, ...]:
    """What takes the place of each of ``PARTS`` for a format on a device."""
    cast = "emulated"
    if backend.uses_kernels(device):
        cast = "native" if has_triton else "missing"
    matmul, needed = cast, REQUIREMENTS.get(quantizer)
    if needed is None:
        matmul = "missing: weights alone"
    elif backend.uses_kernels(device) and not needed.is_met_by(capability):
        matmul = f"missing: needs capability {needed.capabilities}"
    return cast, cast, "missing" if cast == "missing" else "dequantized", matmul


def _row(name: str, cells: tuple[str, ...]) -> str:
    return f"  {name:<12} " + " ".join(f"{cell:<21}" for cell in cells).rstrip()


def _triton() -> tuple[str, str]:
    """Its version, and why it cannot be imported, if so."""
    try:
        import triton
    except Exception as error:  # a broken installation may raise anything
        return "missing", str(error) or type(error).__name__
    return triton.__version__, ""


def _describe(i: int) -> tuple[str, tuple[int, int]]:
    gpu = torch.cuda.get_device_properties(i)
    gib = gpu.total_memory / 2**30
    description = f"{gpu.name}, capability {gpu.major}.{gpu.minor}, {gib:.1f} GiB"
    return description, (gpu.major, gpu.minor)


def _why_no_cuda() -> str:
    if torch.version.cuda is None:
        return "this torch was built without CUDA"
    return "torch finds no NVIDIA GPU or driver"


if __name__ == "__main__":
    main()
