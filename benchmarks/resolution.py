"""How small an update a master can take: many tiny steps of one weight, beside FP32 masters.

    python benchmarks/resolution.py [--steps 10000] [--relative 1e-6] [--noise 0] [--device cpu]
        [--json FILE]

Each element's gradient has a constant sign, with normal noise of --noise times its size added. Adam
moves each by --relative of the rms weight per step. For each storage of the states it prints

- moved / wanted: the mean displacement of the masters, over that of FP32 masters with FP32 moments;
- deviation: the rms difference from those masters, in percent of the rms weight.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from provenance import about

import fp4adam

SIZE, RMS = (128, 128), 0.02
QUANTIZERS = {
    "nvfp4": fp4adam.NVFP4Quantizer(),
    "mxfp8": fp4adam.MXFP8Quantizer(),
    "float8block": fp4adam.Float8BlockQuantizer(),
}
STATES: dict[str, dict[str, Any]] = {
    "32bit": {},
    "int8 masters": {"master_weight_dtype": torch.int8},
    "16bit": {"states": "16bit"},
    "8bit": {"states": "8bit"},
    "no masters": {"states": "8bit", "master_weights": False},
}


def masters_after(args: argparse.Namespace, quantizer: fp4adam.Quantizer, **states: Any) -> tuple:
    """The FP32 masters before and after all steps."""
    generator = torch.Generator().manual_seed(5)
    start = torch.randn(SIZE, generator=generator) * RMS
    sign = torch.randn(SIZE, generator=generator).sign()
    param = torch.nn.Parameter(quantizer.quantize(start.to(args.device)))
    param._shared.init_val = start.to(args.device)
    optimizer = fp4adam.FP4Adam(
        [param], lr=args.relative * RMS, betas=(0.9, 0.95), weight_decay=0.0, **states
    )
    for _ in range(args.steps):
        noise = torch.randn(SIZE, generator=generator) if args.noise else 0.0
        param.grad = (sign + args.noise * noise).to(args.device)
        optimizer.step()
    state = optimizer.state_dict()["state"][0]
    return start, state.get("master_param", param.detach().dequantize(torch.float32)).cpu()


def main() -> None:
    """Print one line per format and storage."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--relative", type=float, default=1e-6)
    parser.add_argument("--noise", type=float, default=0.0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--formats", type=lambda text: text.split(","), default=[*QUANTIZERS])
    parser.add_argument("--json", type=Path, help="rows are added to those in this file")
    args = parser.parse_args()
    rows = json.loads(args.json.read_text())["rows"] if args.json and args.json.exists() else []
    print(f"{'':28}{'moved / wanted':>16}{'deviation, %':>16}")
    for name in args.formats:
        expected = None
        for states, options in STATES.items():
            if states == "no masters" and name == "nvfp4":
                continue
            start, after = masters_after(args, QUANTIZERS[name], **options)
            expected = after if expected is None else expected
            wanted = expected - start
            # Along the direction of FP32 masters, so that noise in both cancels out.
            moved = ((after - start) * wanted).sum() / wanted.square().sum()
            deviation = (after - expected).square().mean().sqrt() / RMS * 100
            print(f"{name + ', ' + states:28}{moved:16.4f}{deviation:16.3f}", flush=True)
            row = dict(format=name, states=states, steps=args.steps, relative=args.relative)
            row |= dict(noise=args.noise, moved=moved.item(), deviation=deviation.item())
            rows.append(row)
            if args.json:
                args.json.write_text(
                    json.dumps(about(args.device) | {"rows": rows}, indent=1) + "\n"
                )


if __name__ == "__main__":
    main()
