"""Peak memory of loading a quantized checkpoint, in anonymous pages; file pages are not counted.

glibc keeps freed memory for later, up to 32 MiB apart from what is in use. Here it gives it back at
once (MALLOC_MMAP_THRESHOLD_), so that only what is in use counts.

    python benchmarks/loading_memory.py [--json FILE] [--size WIDTH LAYERS ...]

Each way runs in a process of its own: into a model on the meta device, and into one that exists in
BF16. Both give the same bytes. The weights of a model are LAYERS matrices, WIDTH by WIDTH.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from provenance import about
from torch import nn

import fp4adam

FORMATS = {"mxfp4": "compressed-tensors", "nvfp4": "compressed-tensors", "float8block": "fp8"}
SIZES = ([2048, 16], [8192, 2])
MIB = 2**20


def build(width: int, layers: int, device: str) -> nn.Module:
    with torch.device(device):
        stack = [nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(layers)]
    return nn.Sequential(*stack)


def anonymous() -> int:
    """Bytes of anonymous memory in use."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status must have RssAnon")


def load(size: list[int], format: str, folder: str, device: str, answers: Any) -> None:
    """Measure one import; answers with the peak and the bytes of the quantized weights."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as small:  # what is imported on the first use
        fp4adam.export_checkpoint(fp4adam.quantize_model(build(128, 1, "cpu"), "mxfp8"), small)
        fp4adam.import_checkpoint(build(128, 1, "meta"), small)
    before, peak, done = anonymous(), [0], threading.Event()

    def watch() -> None:
        while not done.is_set():
            peak[0] = max(peak[0], anonymous() - before)
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    model = build(*size, device)
    quantizer = {
        "mxfp4": fp4adam.MXFP4Quantizer(),
        "nvfp4": fp4adam.NVFP4Quantizer(columnwise=False),
        "float8block": fp4adam.Float8BlockQuantizer(columnwise=False),
    }[format]
    fp4adam.import_checkpoint(model, folder, quantizer)
    done.set()
    watcher.join()
    answers.put((peak[0], sum(p.nbytes_stored for p in model.parameters())))


def main() -> None:
    """Print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--size", type=int, nargs=2, action="append", metavar=("WIDTH", "LAYERS"), dest="sizes"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    os.environ["MALLOC_MMAP_THRESHOLD_"] = os.environ["MALLOC_TRIM_THRESHOLD_"] = "65536"
    context, rows = multiprocessing.get_context("spawn"), []  # which the processes read
    for size, (format, layout) in itertools.product(args.sizes or SIZES, FORMATS.items()):
        with tempfile.TemporaryDirectory() as folder:
            model = fp4adam.quantize_model(build(*size, "cpu"), format)
            fp4adam.export_checkpoint(model, folder, layout)
            del model
            for device in ("meta", "cpu"):
                answers = context.Queue()
                process = context.Process(target=load, args=(size, format, folder, device, answers))
                process.start()
                peak, quantized = answers.get()
                process.join()
                rows.append(
                    {
                        "matrices": size[1],
                        "width": size[0],
                        "format": format,
                        "model on": device,
                        "quantized MiB": round(quantized / MIB, 1),
                        "peak MiB": round(peak / MIB, 1),
                        "one matrix in BF16, MiB": size[0] ** 2 * 2 / MIB,
                    }
                )
                print(rows[-1], flush=True)
    if args.json:
        args.json.write_text(json.dumps({**about("cpu"), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
