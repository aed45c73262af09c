"""The figures of the README and of docs/, as the records have them; measurements.py checks them."""

import json
import statistics
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parent
Figures = Iterator[tuple[str, str]]


class Record:
    """A file of a folder of records."""

    def __init__(self, name: str) -> None:
        content = json.loads((BENCHMARKS / f"{name}.json").read_text())
        runs = content.get("rows") or content.get("runs", [content])
        self.rows = [row for run in runs for row in run.get("results", [run])]

    def get(self, field: str, name: str, **fields: str) -> float:
        """A field of the row with this name, or of the only one that begins with it."""
        rows = [row for row in self.rows if fields.items() <= row.items()]
        exact = [row for row in rows if row.get("name", row.get("what")) == name]
        (row,) = exact or [row for row in rows if row["name"].startswith(name)]
        return row[field]

    def ends(self) -> dict[str, float]:
        """Losses at the end, by run."""
        rows = self.rows
        return {row["name"]: statistics.fmean(row["last_validation_losses"]) for row in rows}


def figures_of_steps() -> Figures:
    compiled, te = Record("h200/training_4k_compiled"), Record("h200/te_check")
    times = "FusedAdam, BF16", "FP4Adam, Float8Block, quantized"
    plain, fast = (compiled.get("ms", name) for name in times)
    yield "docs/matmuls.md", f"is {plain / fast:.2f} times as fast so as with BF16"
    for format, recipe in (
        ("Float8Block", "Float8BlockScaling"),
        ("Float8", "Float8CurrentScaling"),
        ("Float8 delayed", "DelayedScaling"),
    ):
        names = (f"{who} on TE's tensors" for who in ("TE FusedAdam", "FP4Adam"))
        theirs, ours = (te.get("ms", name, part="times", format=format) for name in names)
        yield "docs/from_te.md", f"`{recipe}` | FusedAdam | {theirs:.2f} |"
        yield "docs/from_te.md", f"| FP4Adam | {ours:.2f} |"
        if format == "Float8Block":
            times = f"a step of **{ours:.2f} ms** in place of {theirs:.2f}"
            temporary = te.get("temporary MiB", "TE FusedAdam on TE's tensors", format=format)
            yield "README.md", f"{times}, and {temporary:,.0f} MiB of temporary"
            yield "docs/index.md", times
    for title, name in (
        ("torch AdamW fused, BF16, no masters", "torch AdamW fused, BF16 (no masters)"),
        ("torch AdamW fused, FP32", "torch AdamW fused, FP32"),
        ("`FusedAdam` of this package, BF16 with FP32 masters", "FusedAdam, BF16 + FP32 masters"),
        ("**`FP4Adam`, NVFP4 weights**", "FP4Adam, NVFP4 rowwise"),
        ('the same, `states="8bit"`', "FP4Adam, NVFP4 rowwise, 8-bit states"),
    ):
        step = Record("h200/step")
        fields = "weight_bytes_per_param", "state_bytes_per_param", "ms", "share_of_copy"
        weight, state, ms, share = (step.get(field, name, model="gpt") for field in fields)
        nbytes = weight + state + (4 if weight == 4 else 2)
        bold = "**" if title.startswith("**") else ""
        cells = (f"{ms:.2f}", f"{100 * share:.0f} %", f"{nbytes:.1f}")
        yield "README.md", " | ".join([title, *(f"{bold}{x}{bold}" for x in cells)])
    kinds = ", 8-bit states", ", factored second moments", ""
    times = (step.get("ms", f"FP4Adam, NVFP4 rowwise{kind}", model="gpt") for kind in kinds)
    words = "{:.1f} ms for 973 M NVFP4 weights, factored ones {:.1f}, FP32 states {:.1f}"
    yield "README.md", words.format(*times)
    two, eager = Record("h200/torchtitan_2gpu"), Record("h200/scaling_2gpu_eager")
    names = ("FP4Adam, Float8", "torch AdamW fused, BF16", "torch AdamW fused, torchao")
    rates = (two.get("tokens_per_second", name) for name in names)
    yield "README.md", "**{:,.0f}** in place of {:,.0f} and {:,.0f}".format(*rates)
    compiled = Record("h200/scaling_2gpu_compiled")
    for record, words in (
        (eager, "{:.0f} to {:.0f} % of BF16's"),
        (compiled, "compiled {:.0f} to {:.0f}"),
    ):
        bf16 = record.get("train_ms", "FusedAdam, BF16")
        names = (f"FP4Adam, {name}" for name in ("NVFP4", "MXFP8", "Float8Block"))
        shares = [100 * record.get("train_ms", name) / bf16 for name in names]
        for page in ("README.md", "docs/several_gpus.md"):
            yield page, words.format(min(shares), max(shares))
    full, fp8 = Record("h200/full_finetune"), Record("h200/training_4k_compiled")
    block = "FP4Adam, Float8Block, factored second moments, no masters"
    three = (block, "flashoptim FlashAdamW, BF16", "torch AdamW fused, BF16 (no masters)")
    peaks = "a peak of **{:.1f} GiB** (Float8Block, factored) where flashoptim takes {:.1f} and "
    peaks += "torch's AdamW {:.1f}"
    released = (full.get("peak_GiB", f"{name}, released") for name in three)
    yield "README.md", peaks.format(*released)
    kept = (full.get("peak_GiB", name) for name in three)
    words = "With gradients kept it is {:.1f}, {:.1f} and {:.1f}, and {:.1f} with Gefen-X"
    yield "README.md", words.format(*kept, full.get("peak_GiB", "Gefen-X, BF16"))
    ours, theirs = (full.get("tokens_per_second", f"{n}, released") for n in three[::2])
    yield "README.md", f"at {100 * ours / theirs:.0f} % of AdamW's tokens per second"
    names = ("FusedAdam, BF16", "FP4Adam, Float8, quantized", "FusedAdam, torchao float8 tensor")
    bf16, *others = (fp8.get("ms", name) for name in names)
    for page in ("README.md", "docs/index.md"):
        yield page, f"step of **{others[0]:.1f} ms** in place of {bf16:.1f}"
    yield "docs/matmuls.md", "| {:.1f} | **{:.1f}** | {:.1f} |".format(bf16, *others)
    offload, lora = Record("h200/offload_32").rows[0], Record("h200/lora_memory")
    yield "docs/offload.md", f"[{offload['ms'] / 1e3:.1f} s on an H200]"
    yield "docs/models.md", f"takes {lora.get('base_B', 'NVFP4, rowwise'):.3f} bytes"


def figures_of_losses() -> Figures:
    end, tuned = Record("h200/numerics").ends(), Record("h200/finetune_1e-5").ends()
    first, second = (end.pop(f"BF16 + AdamW, seed {seed}") for seed in (0, 1))
    without = end.pop("NVFP4 without masters")
    tuned = {name.replace("NVFP4 2D", "NVFP4"): loss for name, loss in tuned.items()}
    gaps = [
        abs(loss - end["NVFP4 2D" if "NVFP4" in name else name.partition(",")[0]])
        for name, loss in end.items()
        if name.endswith("8bit states, seed 0")
    ]
    words = f"within {max(gaps):.4f} nats of the same format with FP32 states"

    def most(states: str) -> float:
        """The largest gap to FP32 states, which have no name at seed 0."""
        gaps, unnamed = [], ", FP32 states, seed 0"
        for name in tuned:
            if states in name:
                same = name.replace(states, "FP32 states").removesuffix(unnamed)
                gaps.append(abs(tuned[name] - tuned[same]))
        return max(gaps)

    gap, with_fp16 = most("8bit states"), most("FP16 masters and FP8 moments")
    words += f", {gap:.4f} in fine-tuning at 1e-5, where it is {with_fp16:.4f} with FP16 masters"
    yield "README.md", words
    gefen = min(tuned[f"Gefen-X, seed {i}"] - tuned[f"BF16 + AdamW, seed {i}"] for i in (0, 1))
    yield "README.md", f"Gefen-X ends {gefen:.2f} above BF16"
    products = end.pop("NVFP4, NVFP4 matmuls")
    yield "docs/matmuls.md", f"{products - first:.4f} nats above BF16"
    quantized = {name: loss for name, loss in end.items() if "BF16" not in name}
    base = {name: second if name.endswith("seed 1") else first for name in quantized}
    largest = max(abs(loss - base[name]) for name, loss in quantized.items())
    yield "README.md", f"end within {largest:.4f} nats per byte of BF16"
    yield "README.md", f"two seeds of BF16 differ by {first - second:.4f}"
    yield "README.md", f"NVFP4 ends at {without:.2f} where the others end at {first:.2f}"
    yield "docs/faq.md", f"[{without:.2f} nats in place of {first:.2f}]"
    yield "docs/qat.md", f"[{abs(end['NVFP4 2D'] - first):.4f} nats]"


def figures_of_cpus() -> Figures:
    page, qat = "docs/train_checkpoints.md", "docs/qat.md"
    rows = [r for r in Record("cpu/loading_memory").rows if r["model on"] == "meta"]
    for width, title in ((2048, "16 matrices, 2,048 wide"), (8192, "2 matrices, 8,192 wide")):
        sizes = [(r["quantized MiB"], r["peak MiB"]) for r in rows if r["width"] == width]
        yield page, " | ".join([title, *(f"{a:.0f} → {b:.0f} MiB" for a, b in sizes)])
    runs = Record("cpu/demo").rows
    adamw, ours, lean = ([run["end_loss"] for run in runs[i::3]] for i in range(3))
    rounded = [run["rounded_afterwards"]["nvfp4"] for run in runs[::3]]
    parts = ("weight", "gradient", "optimizer")
    nbytes = sum(runs[2][f"{part}_bytes_per_parameter"] for part in parts)
    yield qat, f"| AdamW, FP32 weights | {statistics.fmean(adamw):.4f} | |"
    for title, losses in (
        ("the same, rounded to NVFP4 afterwards", rounded),
        ("`FP4Adam`, trained in NVFP4", ours),
        (f"{nbytes:.1f} bytes per parameter with gradients in place of 16.0", lean),
    ):
        gaps = [a - b for a, b in zip(losses, adamw, strict=True)]
        gap = f"{statistics.fmean(gaps):+.4f} ± {statistics.stdev(gaps) / 3**0.5:.4f}"
        yield qat, f"{title} | {statistics.fmean(losses):.4f} | {gap} |"
    ends = defaultdict(list)
    for run in Record("cpu/demo_gap_small").rows:
        ends[run["name"]].append(statistics.fmean(run["losses"]))
    adamw = ends.pop("AdamW, FP32")
    yield qat, " | ".join(["AdamW, FP32 weights", *(f"{x:.4f}" for x in adamw)])
    for name, losses in ends.items():
        mean = statistics.fmean(losses) - statistics.fmean(adamw)
        yield qat, " | ".join([f"| {name}", *(f"{x:.4f}" for x in losses), f"{mean:+.4f} |"])
    runs = Record("cpu/finetune_rounded").rows
    before = next(run["before"] for run in runs if run["start"] == "BF16")
    gains = defaultdict(list)
    for run in runs:
        gains[run["start"], run["masters"]].append(f"{before - run['after']:.4f}")
    for title, *kind in (
        ("BF16 weights, from BF16", "BF16", "float32"),
        ("BF16 weights, from FP8, decoded", "BF16, rounded to FP8", "float32"),
        ("FP8 weights, the ones before rounding known", "FP8, unrounded known", "float32"),
        ("FP8 weights, from FP8", "FP8", "float32"),
        ("the same, masters in int8", "FP8", "int8"),
        ("BF16 weights, from MXFP4, decoded", "BF16, rounded to MXFP4", "float32"),
        ("MXFP4 weights, the ones before rounding known", "MXFP4, unrounded known", "float32"),
        ("MXFP4 weights, from MXFP4", "MXFP4", "float32"),
        ("the same, masters in int8", "MXFP4", "int8"),
    ):
        yield page, " | ".join([title, *gains[tuple(kind)]])
    runs = Record("cpu/finetune_rounded_seed_1").rows
    for lr in (1e-5, 1e-4):
        gains = [f"{runs[0]['before'] - run['after']:.4f}" for run in runs if run["lr"] == lr]
        text = "BF16 {}, FP8 {}, with int8 masters {}, MXFP4 {}, with int8 masters {}"
        yield page, text.format(*gains)


def differing() -> Iterator[str]:
    """What pages lack."""
    for page, words in (*figures_of_steps(), *figures_of_losses(), *figures_of_cpus()):
        text = " ".join((BENCHMARKS.parent / page).read_text().split())
        if words not in text:
            yield f"{page} lacks {words!r}"
