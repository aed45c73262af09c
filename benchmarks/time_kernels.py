"""Time the optimizer's step by these kernels and by those of another checkout, and compare bytes.

    python benchmarks/time_kernels.py --other ../before --out h100/kernels.json

The kernels of the other checkout are imported under another name, so that both run in one process,
in turns. Exits with 1 if any byte of a weight or a state differs.
"""

import argparse
import gc
import importlib
import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from provenance import about

import fp4adam
from fp4adam.kernels import step
from fp4adam.tensors.quantizer import Quantizer

DEVICE = "cuda"
SHAPES = [(6144, 2048), (2048, 2048), (5632, 2048), (5632, 2048), (2048, 5632)]
WEIGHTS = {
    "NVFP4": fp4adam.NVFP4Quantizer(),
    "NVFP4 rowwise": fp4adam.NVFP4Quantizer(columnwise=False),
    "NVFP4 swizzled": fp4adam.NVFP4Quantizer(optimize_for_gemm=True),
    "NVFP4 1D": fp4adam.NVFP4Quantizer(two_dimensional=False),
    "MXFP8": fp4adam.MXFP8Quantizer(),
    "MXFP8 rowwise": fp4adam.MXFP8Quantizer(columnwise=False),
    "MXFP8 2D": fp4adam.MXFP8Quantizer(two_dimensional=True),
    "MXFP4": fp4adam.MXFP4Quantizer(),
    "Float8": fp4adam.Float8Quantizer(),
    "Float8 delayed": fp4adam.Float8Quantizer(scaling="delayed", amax_history_len=16),
    "Float8Block": fp4adam.Float8BlockQuantizer(),
    "Float8Block rowwise": fp4adam.Float8BlockQuantizer(columnwise=False),
    "Float8Block 1D": fp4adam.Float8BlockQuantizer(two_dimensional=False),
    "Float8Block ragged": fp4adam.Float8BlockQuantizer(),
}
STATES: dict[str, dict[str, Any]] = {
    "32bit": {},
    "8bit": dict(states="8bit"),
    "16bit": dict(states="16bit"),
}


def import_others(checkout: Path) -> None:
    """Make the kernels of another checkout importable as ``other_kernels``."""
    folder = Path(tempfile.mkdtemp())
    shutil.copytree(checkout / "kernels", folder / "other_kernels")
    for path in folder.rglob("*.py"):
        path.write_text(path.read_text().replace("fp4adam.kernels", "other_kernels"))
    sys.path.insert(0, str(folder))


def other_launch(kind: Any, tensors: tuple) -> Any:
    """The step of the other checkout."""
    variant = importlib.import_module("other_kernels.adam").Variant(*kind.variant())
    given = SimpleNamespace(
        quantizer=kind.quantizer, groups=kind.groups, write_dtype=kind.write_dtype,
        variant=lambda: variant,
    )  # fmt: skip
    return importlib.import_module("other_kernels.step").StepLaunch(given, tensors)


class Steps:
    """An optimizer whose launches are made by ``launch``, or by the quantizer's own."""

    def __init__(self, quantizer: Quantizer, shapes: list, options: dict, launch: Any) -> None:
        generator = torch.Generator(DEVICE).manual_seed(0)

        def randn(shape: tuple[int, int], scale: float) -> torch.Tensor:
            x = torch.randn(shape, device=DEVICE, generator=generator)
            return x.mul_(scale).bfloat16()

        self.params = [torch.nn.Parameter(quantizer.quantize(randn(s, 0.02))) for s in shapes]
        for p in self.params:
            p.grad = randn(p.shape, 1.0)
        self.optimizer = fp4adam.FP4Adam(self.params, lr=1e-3, **options)
        with mock.patch.object(step, "StepLaunch", launch or step.StepLaunch):
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


def compare(weights: str, states: str, repeats: int, launches: dict[str, Any]) -> dict[str, Any]:
    """Times of several launches, and whether all of them have the same bytes."""
    shapes = [(r + 1, c - 9) for r, c in SHAPES] if "ragged" in weights else SHAPES
    given = WEIGHTS[weights], shapes * repeats, STATES[states]
    steps = {name: Steps(*given, launch) for name, launch in launches.items()}
    first, *rest = (one.tensors() for one in steps.values())
    same = all(are_equal(first, each) for each in rest)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(5):
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
    import_others(args.other)
    rows = []
    for weights in WEIGHTS:
        for states in STATES:
            if args.only not in f"{weights}, {states}":
                continue
            if "ragged" in weights and states != "32bit":
                continue  # steps of operators
            launches = {"other": other_launch, "these": None}
            row = compare(weights, states, args.repeats, launches)
            rows.append(row)
            before, now = row["ms"]["other"], row["ms"]["these"]
            print(f"{weights}, {states}: {before:.3f} ms -> {now:.3f} ms, {now / before:.3f}", row)
    if args.out is not None:
        args.out.write_text(json.dumps(dict(**about("cuda"), rows=rows), indent=1) + "\n")
    sys.exit(not all(row["same_bytes"] for row in rows))


if __name__ == "__main__":
    main()
