"""Time the optimizer's step by this package and by that of another checkout, and compare bytes.

    python benchmarks/time_kernels.py --other ../before --out h100/kernels.json

The other checkout is imported under another name, so that both run in one process, in turns. Exits
with 1 if any byte of a weight or a state differs; before the noise of parameters became independent
the bytes of 8-bit states and of masters in remainders were other ones.
"""

import argparse
import gc
import importlib
import json
import re
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from provenance import about

import fp4adam

DEVICE = "cuda"
SHAPES = [(6144, 2048), (2048, 2048), (5632, 2048), (5632, 2048), (2048, 5632)]
WEIGHTS: dict[str, tuple[str, dict[str, Any]]] = {
    "NVFP4": ("NVFP4Quantizer", {}),
    "NVFP4 rowwise": ("NVFP4Quantizer", dict(columnwise=False)),
    "NVFP4 swizzled": ("NVFP4Quantizer", dict(optimize_for_gemm=True)),
    "NVFP4 1D": ("NVFP4Quantizer", dict(two_dimensional=False)),
    "MXFP8": ("MXFP8Quantizer", {}),
    "MXFP8 rowwise": ("MXFP8Quantizer", dict(columnwise=False)),
    "MXFP8 2D": ("MXFP8Quantizer", dict(two_dimensional=True)),
    "MXFP4": ("MXFP4Quantizer", {}),
    "Float8": ("Float8Quantizer", {}),
    "Float8 delayed": ("Float8Quantizer", dict(scaling="delayed", amax_history_len=16)),
    "Float8Block": ("Float8BlockQuantizer", {}),
    "Float8Block rowwise": ("Float8BlockQuantizer", dict(columnwise=False)),
    "Float8Block 1D": ("Float8BlockQuantizer", dict(two_dimensional=False)),
    "Float8Block ragged": ("Float8BlockQuantizer", {}),
}
STATES: dict[str, dict[str, Any]] = {
    "32bit": {},
    "8bit": dict(states="8bit"),
    "16bit": dict(states="16bit"),
}


def import_other(checkout: Path) -> Any:
    """The package of another checkout, as ``other``."""
    folder = Path(tempfile.mkdtemp())
    ignored = shutil.ignore_patterns("kernels", "__pycache__")
    shutil.copytree(checkout / "fp4adam", folder / "other", ignore=ignored)
    shutil.copytree(checkout / "kernels", folder / "other" / "kernels")
    for path in folder.rglob("*.py"):
        path.write_text(re.sub(r"\bfp4adam\b", "other", path.read_text()))
    sys.path.insert(0, str(folder))
    return importlib.import_module("other")


class Steps:
    """An optimizer of a package, with weights and gradients."""

    def __init__(self, package: Any, weights: str, shapes: list, states: str) -> None:
        generator = torch.Generator(DEVICE).manual_seed(0)
        name, options = WEIGHTS[weights]
        quantizer = getattr(package, name)(**options)

        def randn(shape: tuple[int, int], scale: float) -> torch.Tensor:
            x = torch.randn(shape, device=DEVICE, generator=generator)
            return x.mul_(scale).bfloat16()

        self.params = [torch.nn.Parameter(quantizer.quantize(randn(s, 0.02))) for s in shapes]
        for p in self.params:
            p.grad = randn(p.shape, 1.0)
        self.optimizer = package.FP4Adam(self.params, lr=1e-3, **STATES[states])
        for _ in range(3):
            self.optimizer.step()

    def tensors(self) -> list[torch.Tensor]:
        found = []
        for p in self.params:
            found += p.storage_tensors().values()
            found += [t for t in self.optimizer.state[p].values() if t.dim()]
        return found

    def time(self, n: int = 5) -> float:
        """Milliseconds per step."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(n):
            self.optimizer.step()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / n


def are_equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    pairs = zip(a, b, strict=True)
    return all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in pairs)


def compare(weights: str, states: str, repeats: int, packages: dict[str, Any]) -> dict[str, Any]:
    """Times of several packages, and whether all of them have the same bytes."""
    shapes = [(r + 1, c - 9) for r, c in SHAPES] if "ragged" in weights else SHAPES
    steps = {
        name: Steps(package, weights, shapes * repeats, states)
        for name, package in packages.items()
    }
    first, *rest = (one.tensors() for one in steps.values())
    same = all(are_equal(first, each) for each in rest)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(7):
        for name, one in steps.items():
            times[name].append(one.time())
    medians = {name: round(statistics.median(each), 4) for name, each in times.items()}
    numel = sum(p.numel() for p in next(iter(steps.values())).params)
    del steps, first, rest
    gc.collect()
    torch.cuda.empty_cache()
    return dict(weights=weights, states=states, numel=numel, same_bytes=same, ms=medians)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--other", type=Path, required=True, help="another checkout")
    parser.add_argument("--out", type=Path, help="JSON to write")
    parser.add_argument("--only", default="", help="rows with this in their name")
    parser.add_argument("--repeats", type=int, default=4, help="51 M parameters each")
    args = parser.parse_args()
    packages = {"other": import_other(args.other), "these": fp4adam}
    rows = []
    for weights in WEIGHTS:
        for states in STATES:
            if args.only not in f"{weights}, {states}":
                continue
            if "ragged" in weights and states != "32bit":
                continue  # steps of operators
            row = compare(weights, states, args.repeats, packages)
            rows.append(row)
            before, now = row["ms"]["other"], row["ms"]["these"]
            print(f"{weights}, {states}: {before:.3f} ms -> {now:.3f} ms, {now / before:.3f}", row)
    if args.out is not None:
        args.out.write_text(json.dumps(dict(**about("cuda"), rows=rows), indent=1) + "\n")
    sys.exit(not all(row["same_bytes"] for row in rows))


if __name__ == "__main__":
    main()
