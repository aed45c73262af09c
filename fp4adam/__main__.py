"""``python -m fp4adam``: what is installed, and what each format takes on each device.

``python -m fp4adam --plan 8e9`` says on which cards a model of 8 billion parameters can be trained.
"""

import argparse
import platform
from collections.abc import Sequence

import torch

import fp4adam
from fp4adam import plan
from fp4adam.nn.operand import FORMATS as OPERANDS
from fp4adam.nn.recipe import RECIPES, format_name
from fp4adam.tensors import backend
from fp4adam.tensors.quantizer import Quantizer

FORMATS = {format_name(quantizer): type(quantizer) for quantizer in RECIPES.values()}
NATIVE = "native kernels"
PARTS = ("fused step", "quantize, dequantize", "weight-only matmul", "quantized matmul")
WHY = {
    "native": "Triton kernels, and torch's scaled_mm for quantized matmuls",
    "emulated": "plain torch operators, as on all devices without kernels; steps and codes have "
    "their bits, sums of matmuls another order",
    "refused": "an error says why",
    "quantized matmul": "what Recipe(..., activations=True, gradients=True) takes; emulate=True "
    "runs it on any device",
    "dequantized": "weights are decoded to the dtype of the activations for torch's own matmul",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the report, or a plan."""
    parser = argparse.ArgumentParser(
        prog="python -m fp4adam", description="Says what is installed and what runs here."
    )
    parser.add_argument(
        "--plan",
        type=float,
        nargs="?",
        default=False,
        metavar="PARAMETERS",
        help="say instead which cards take full fine-tuning of a model of this size, such as 8e9; "
        "without a size, how large a model each card takes",
    )
    size = parser.parse_args(arguments).plan
    if size is False:
        return print(report())
    try:
        print(plan.table(size))
    except ValueError as error:
        parser.error(str(error))


def report() -> str:
    """Versions, devices, and a table of formats and parts per device; computes nothing."""
    triton, problem = _triton()
    threads = f"{platform.machine()}, {torch.get_num_threads()} threads"
    devices = [(torch.device("cpu"), threads, (0, 0), None)]
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        gpu = torch.cuda.get_device_properties(i)
        gib = gpu.total_memory / 2**30
        what = f"{gpu.name}, capability {gpu.major}.{gpu.minor}, {gib:.1f} GiB"
        capability, missing = (gpu.major, gpu.minor), backend.why_no_kernels(i)
        devices.append((torch.device("cuda", i), what, capability, missing))
    for kind in ("xpu", "mps"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_available():
            devices.append((torch.device(kind, 0), "not tried", (0, 0), None))
    lines = [
        f"fp4adam {fp4adam.__version__}, torch {torch.__version__}, triton {triton}, "
        f"Python {platform.python_version()}, CUDA {torch.version.cuda or 'none'}"
    ]
    if problem:
        lines.append(f"triton could not be imported: {problem}")
    if len(devices) == 1:
        built = torch.version.cuda is not None
        why = "torch finds no NVIDIA GPU or driver" if built else "this torch has no CUDA"
        lines.append(f"no CUDA device: {why}")
    met: set[str] = set()
    for device, description, capability, missing in devices:
        rows, verdict = {"": PARTS}, _verdict(device, missing)
        rows |= {name: support(x, capability, verdict) for name, x in FORMATS.items()}
        lines += ["", f"{device}: {description}", f"  {verdict}"]
        for name, cells in rows.items():
            met.update(cells)
            lines.append(f"  {name:<12} " + " ".join(f"{cell:<21}" for cell in cells).rstrip())
    lines += ["", *(f"{word}: {why}" for word, why in WHY.items() if word in met)]
    return "\n".join(lines)


def support(
    quantizer: type[Quantizer], capability: tuple[int, int], verdict: str
) -> tuple[str, ...]:
    """What takes the place of each of ``PARTS`` for a format."""
    if verdict.startswith("refused"):
        return ("refused",) * len(PARTS)
    cast = "native" if verdict == NATIVE else "emulated"
    matmul, needed = cast, OPERANDS.get(quantizer)
    if needed is None:
        matmul = "missing: weights alone"
    elif verdict == NATIVE and not needed.is_met_by(capability):
        matmul = f"missing: needs capability {needed.capabilities}"
    return cast, cast, "dequantized", matmul


def _verdict(device: torch.device, missing: str | None) -> str:
    """Native kernels, torch operators or refused, and why."""
    try:
        backend.check_device(device)
    except NotImplementedError as error:
        return f"refused: {error}"
    if missing is not None:
        return f"torch operators: {missing}"
    return NATIVE if device.type == "cuda" else "torch operators"


def _triton() -> tuple[str, str]:
    """Its version, and why it cannot be imported, if so."""
    try:
        import triton
    except Exception as error:  # a broken installation may raise anything
        return "missing", str(error) or type(error).__name__
    return triton.__version__, ""


if __name__ == "__main__":
    main()
