"""``python -m fp4adam``: what is installed, and what each format takes on each device."""

import platform

import torch

import fp4adam
from fp4adam import backend

FORMATS = ("NVFP4", "MXFP8", "Float8Block")
PARTS = ("fused step", "quantize, dequantize", "matmul")
WHY = {
    "native": "Triton kernels",
    "emulated": "plain torch operators, with the bits of the kernels: they need a CUDA device",
    "missing": "the kernels of CUDA devices need Triton 3.6 or newer: pip install triton",
    "dequantized": "weights are decoded to the dtype of the activations for torch's own matmul, as "
    "no block-scaled GEMM is used yet",
}


def main() -> None:
    """Print the report."""
    print(report())


def report() -> str:
    """Versions, devices, and a table of formats and parts per device; computes nothing."""
    triton, problem = _triton()
    devices = [(torch.device("cpu"), f"{platform.machine()}, {torch.get_num_threads()} threads")]
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            devices.append((torch.device("cuda", i), _describe(i)))
    lines = [
        f"fp4adam {fp4adam.__version__}, torch {torch.__version__}, triton {triton}, "
        f"Python {platform.python_version()}, CUDA {torch.version.cuda or 'none'}"
    ]
    if problem:
        lines.append(f"triton could not be imported: {problem}")
    if len(devices) == 1:
        lines.append(f"no CUDA device: {_why_no_cuda()}")
    met: set[str] = set()
    for device, description in devices:
        cells = support(device, has_triton=not problem)
        met.update(cells)
        lines += ["", f"{device}: {description}", _row("", PARTS)]
        lines += [_row(name, cells) for name in FORMATS]
    lines += ["", *(f"{word}: {why}" for word, why in WHY.items() if word in met)]
    return "\n".join(lines)


def support(device: torch.device, has_triton: bool) -> tuple[str, str, str]:
    """What takes the place of each of ``PARTS`` on a device, the same for all formats."""
    cast = "emulated"
    if backend.uses_kernels(device):
        cast = "native" if has_triton else "missing"
    return cast, cast, "dequantized"


def _row(name: str, cells: tuple[str, ...]) -> str:
    return f"  {name:<12} " + " ".join(f"{cell:<21}" for cell in cells).rstrip()


def _triton() -> tuple[str, str]:
    """Its version, and why it cannot be imported, if so."""
    try:
        import triton
    except Exception as error:  # a broken installation may raise anything
        return "missing", str(error) or type(error).__name__
    return triton.__version__, ""


def _describe(i: int) -> str:
    gpu = torch.cuda.get_device_properties(i)
    return f"{gpu.name}, capability {gpu.major}.{gpu.minor}, {gpu.total_memory / 2**30:.1f} GiB"


def _why_no_cuda() -> str:
    if torch.version.cuda is None:
        return "this torch was built without CUDA"
    return "torch finds no NVIDIA GPU or driver"


if __name__ == "__main__":
    main()
