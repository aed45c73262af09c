"""README and docs: their Python blocks run, their links lead somewhere, quoted errors exist."""

import ast
import json
import os
import re
import runpy
import socket
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fp4adam
from fp4adam import FP4Adam, FusedAdam, plan, quantize_model
from ranks import run_ranks

ROOT = Path(__file__).resolve().parents[1]
README, DOCS, MAKEFILE, SETUP = (ROOT / n for n in ("README.md", "docs", "Makefile", "setup.py"))
PAGES = [README, *sorted(DOCS.glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
needs_docs = pytest.mark.skipif(not DOCS.is_dir(), reason="there is no docs/ beside this tests/")


def python_blocks() -> list:
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in BLOCK.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            marks = pytest.mark.exhaustive if "distributed" in match[1] else ()  # starts Python
            found.append(pytest.param(match[1], id=f"{page.name}:{line}", marks=marks))
    return found


class Model(nn.Module):
    """A model as the blocks know it: it has ``blocks``, and fits every format and recipe."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(128, 128) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = F.silu(block(x))
        return x


def preamble(block: str) -> dict[str, object]:
    """What a block takes for granted: a model, quantized unless the block does that itself."""
    model, batch = Model(), torch.randn(128, 128)
    starts_plain = re.search(r"quantize_model\(|FusedAdam|AdamW", block)
    if not starts_plain:
        quantize_model(model, "nvfp4")
    optimizer = FP4Adam(model.parameters())
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    param = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    if "reset_master_weights" in block:
        optimizer = FusedAdam([param])
    return {
        "torch": torch,
        "fp4adam": fp4adam,
        "FP4Adam": FP4Adam,
        "FusedAdam": FusedAdam,
        "quantize_model": quantize_model,
        "model": model,
        "new_model": Model(),
        "optimizer": optimizer,
        "batch": batch,
        "microbatches": batch.chunk(2),
        "param": param,
        "x": torch.ones(4),
        "path": "checkpoint.pt",
    }


def run(block: str) -> dict[str, object]:
    for package in re.findall(r"^(?:import|from) (transformers|lightning)\b", block, re.MULTILINE):
        pytest.importorskip(package)
    namespace = preamble(block)
    exec(compile(block, "<documentation>", "exec"), namespace)
    return namespace


def run_on_a_rank(rank: int, block: str) -> None:
    if "init_process_group" in block:
        # The environment that torchrun makes.
        dist.destroy_process_group()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    run(block)


@pytest.mark.table
@pytest.mark.parametrize("block", python_blocks())
def test_block_runs(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if "distributed" in block:
        run_ranks(run_on_a_rank, 1, block)
    else:
        run(block)


def test_the_swap_of_the_readme_trains_the_parameters_of_the_model():
    (swap,) = BLOCK.findall(README.read_text())
    namespace = run(swap)
    model, optimizer = namespace["model"], namespace["optimizer"]
    before = model.blocks[0].weight.dequantize()
    model(namespace["batch"]).square().sum().backward()
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.step()
    assert not torch.equal(model.blocks[0].weight.dequantize(), before)


def anchors(page: Path) -> set[str]:
    """Anchors of the headings of a page, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    words = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {word.strip().replace(" ", "-") for word in words}


@needs_docs
def test_links_of_the_readme_lead_somewhere():
    text = README.read_text()
    targets = dict(re.findall(r"^\[(.+?)\]: (\S+)$", text, re.MULTILINE))
    used = set(re.findall(r"\]\[(.+?)\]", text))
    assert used == targets.keys()
    assert not re.findall(r"\]\((?!https://)", text)  # definitions at the end, for setup.py
    for target in targets.values():
        path, _, anchor = target.partition("#")
        assert (ROOT / path).is_file(), target
        assert not anchor or anchor in anchors(ROOT / path), target


@pytest.mark.skipif(not SETUP.is_file(), reason="there is none beside this copy of tests/")
def test_links_work_on_a_package_index():
    index_page = runpy.run_path(str(SETUP))["index_page"]
    text = README.read_text()
    page = index_page(text, "https://example.org/fp4adam", "1.2.3")
    targets = re.findall(r"^\[.+?\]: (\S+)$", page, re.MULTILINE)
    assert len(targets) > 20 and all(target.startswith("https://") for target in targets)
    assert "https://example.org/fp4adam/raw/v1.2.3/benchmarks/h200/numerics.png" in targets
    assert "https://example.org/fp4adam/blob/v1.2.3/docs/models.md#lora" in targets
    # Without an address there is nothing to lead to.
    page = index_page(text, None, "1.2.3")
    assert "][" not in page and "]:" not in page and "![" not in page
    assert "Which GPU, format and memory" in page and "as well?\n\n50 M" in page


def test_readme_is_short():
    text = re.sub(r"^\[.+?\]: \S+$", "", README.read_text(), flags=re.MULTILINE)
    assert len(text.split()) <= 1000


RECORDS = ROOT / "benchmarks" / "h200"
needs_records = pytest.mark.skipif(not RECORDS.is_dir(), reason="there are no records beside this")


class Record:
    """A file of benchmarks/h200."""

    def __init__(self, name: str) -> None:
        content = json.loads((RECORDS / f"{name}.json").read_text())
        runs = content["runs"] if "runs" in content else [content]
        self.rows = runs if name == "numerics" else [r for run in runs for r in run["results"]]

    def get(self, field: str, name: str, **fields: str) -> float:
        """A field of the row with this name, or of the only one that begins with it."""
        rows = [row for row in self.rows if fields.items() <= row.items()]
        exact = [row for row in rows if row.get("name", row.get("what")) == name]
        (row,) = exact or [row for row in rows if row["name"].startswith(name)]
        return row[field]


def figures() -> list[tuple[str, str]]:
    """A page, and words of it with the figures of the records."""
    step, compiled, te = Record("step"), Record("te_training_compiled"), Record("te_check")
    plain = compiled.get("ms", "FusedAdam, BF16")
    fast = compiled.get("ms", "FP4Adam, Float8Block, quantized")
    found = [
        ("docs/matmuls.md", f"is {plain / fast:.2f} times as fast so as with BF16"),
    ]
    for format, recipe in (
        ("Float8Block", "Float8BlockScaling"),
        ("Float8", "Float8CurrentScaling"),
        ("Float8 delayed", "DelayedScaling"),
    ):
        names = (f"{who} on TE's tensors" for who in ("TE FusedAdam", "FP4Adam"))
        theirs, ours = (te.get("ms", name, part="times", format=format) for name in names)
        found.append(("docs/from_te.md", f"`{recipe}` | FusedAdam | {theirs:.2f} |"))
        found.append(("docs/from_te.md", f"| FP4Adam | {ours:.2f} |"))
        if format == "Float8Block":
            times = f"a step of **{ours:.2f} ms** in place of {theirs:.2f}"
            temporary = te.get("temporary MiB", "TE FusedAdam on TE's tensors", format=format)
            found.append(("README.md", f"{times}, and {temporary:,.0f} MiB of temporary"))
            found.append(("docs/index.md", times))
    for title, name in (
        ("torch AdamW fused, BF16, no masters", "torch AdamW fused, BF16 (no masters)"),
        ("torch AdamW fused, FP32", "torch AdamW fused, FP32"),
        ("`FusedAdam` of this package, BF16 with FP32 masters", "FusedAdam, BF16 + FP32 masters"),
        ("**`FP4Adam`, NVFP4 weights**", "FP4Adam, NVFP4 rowwise"),
        ('the same, `states="8bit"`', "FP4Adam, NVFP4 rowwise, 8-bit states"),
    ):
        step = Record("step_8bit" if "8-bit" in name else "step")
        weight = step.get("weight_bytes_per_param", name, model="gpt")
        state = step.get("state_bytes_per_param", name, model="gpt")
        nbytes = weight + state + (4 if weight == 4 else 2)
        ms, share = (step.get(field, name, model="gpt") for field in ("ms", "share_of_copy"))
        cells = (f"{ms:.2f}", f"{100 * share:.0f} %", f"{nbytes:.1f}")
        bold = "**" if title.startswith("**") else ""
        found.append(("README.md", " | ".join([title, *(f"{bold}{x}{bold}" for x in cells)])))
    numerics = Record("numerics")
    end = {row["name"]: statistics.fmean(row["last_validation_losses"]) for row in numerics.rows}
    first, second = (end.pop(f"BF16 + AdamW, seed {seed}") for seed in (0, 1))
    without = end.pop("NVFP4 without masters")
    lean = {name: end[name] for name in end if name.endswith("8bit states, seed 0")}
    gaps = (
        abs(loss - end["NVFP4 2D" if "NVFP4" in name else name.partition(",")[0]])
        for name, loss in lean.items()
    )
    words = f"within {max(gaps):.4f} nats of the same format with FP32 states"
    tuned = {
        row["name"].replace("NVFP4 2D", "NVFP4"): statistics.fmean(row["last_validation_losses"])
        for row in json.loads((RECORDS / "finetune_1e-5.json").read_text())["runs"]
    }

    unnamed = ", FP32 states, seed 0"

    def most(states: str) -> float:
        return max(
            abs(loss - tuned[name.replace(states, "FP32 states").removesuffix(unnamed)])
            for name, loss in tuned.items()
            if states in name
        )

    gap, with_fp16 = most("8bit states"), most("FP16 masters and FP8 moments")
    words += f", {gap:.4f} in fine-tuning at 1e-5, where it is {with_fp16:.4f} with FP16 masters"
    found.append(("README.md", words))
    largest = max(
        abs(loss - (second if name.endswith("seed 1") else first))
        for name, loss in end.items()
        if "BF16" not in name
    )
    found += [
        ("README.md", f"end within {largest:.4f} nats per byte of BF16"),
        ("README.md", f"two seeds of BF16 differ by {first - second:.4f}"),
        ("README.md", f"NVFP4 ends at {without:.2f} where the others end at {first:.2f}"),
        ("docs/faq.md", f"[{without:.2f} nats in place of {first:.2f}]"),
        ("docs/qat.md", f"[{end['NVFP4 2D'] - first:.4f} nats]"),
    ]
    eager = Record("scaling_2gpu_eager")
    shares = [
        eager.get("train_ms", f"FP4Adam, {name}") / eager.get("train_ms", "FusedAdam, BF16")
        for name in ("NVFP4", "MXFP8", "Float8Block")
    ]
    share = f"{100 * min(shares):.0f} to {100 * max(shares):.0f} % of BF16's"
    found += [("README.md", share), ("docs/several_gpus.md", share)]
    narrow, full, fp8 = (
        Record(name) for name in ("step_8bit", "../h100/full_finetune", "../h100/fp8_4k")
    )
    block = "FP4Adam, Float8Block, 8-bit moments, no masters"
    three = (block, "flashoptim FlashAdamW, BF16", "torch AdamW fused, BF16 (no masters)")
    released = [full.get("peak_GiB", f"{name}, released") for name in three]
    kept = [full.get("peak_GiB", name) for name in three]
    peaks = "a peak of **{:.1f} GiB** (Float8Block) where flashoptim takes {:.1f} and "
    peaks += "torch's AdamW {:.1f}"
    found.append(("README.md", peaks.format(*released)))
    found.append(("README.md", "With gradients kept it is {:.1f}, {:.1f} and {:.1f}".format(*kept)))
    speed = full.get("tokens_per_second", f"{block}, released")
    speed /= full.get("tokens_per_second", f"{three[2]}, released")
    found.append(("README.md", f"at {100 * speed:.0f} % of AdamW's tokens per second"))
    names = ("FusedAdam, BF16", "FP4Adam, Float8, quantized", "FusedAdam, torchao float8 tensor")
    bf16, *others = (fp8.get("ms", name) for name in names)
    times = f"step of **{others[0]:.1f} ms** in place of {bf16:.1f}"
    found += [("README.md", times), ("docs/index.md", times)]
    found.append(("docs/matmuls.md", "| {:.1f} | **{:.1f}** | {:.1f} |".format(bf16, *others)))
    names = ("NVFP4 rowwise, 8-bit states", "NVFP4 rowwise")
    times = (narrow.get("ms", f"FP4Adam, {name}") for name in names)
    block = narrow.get("ms", "FP4Adam, Float8Block, 8-bit states")
    slow = "{:.1f} ms for 973 M NVFP4 weights, where FP32 states take {:.1f}, ".format(*times)
    found.append(("README.md", f"{slow}{block:.1f} ms for Float8Block"))
    offload = Record("offload_32").rows[0]
    found.append(("docs/offload.md", f"[{offload['ms'] / 1e3:.1f} s on an H200]"))
    lora = Record("lora_memory")
    found.append(("docs/models.md", f"takes {lora.get('base_B', 'NVFP4, rowwise'):.3f} bytes"))
    return found


def figures_of_cpus() -> list[tuple[str, str]]:
    """The same of records in benchmarks/cpu."""
    page, found = "docs/train_checkpoints.md", []
    folder = RECORDS.parent / "cpu"
    rows = json.loads((folder / "loading_memory.json").read_text())["rows"]
    for width, title in ((2048, "16 matrices, 2,048 wide"), (8192, "2 matrices, 8,192 wide")):
        cells = [
            f"{row['quantized MiB']:.0f} → {row['peak MiB']:.0f} MiB"
            for row in rows
            if row["width"] == width and row["model on"] == "meta"
        ]
        found.append((page, " | ".join([title, *cells])))
    runs = json.loads((folder / "demo.json").read_text())["runs"]
    adamw, ours, lean = ([run["end_loss"] for run in runs[i::3]] for i in range(3))
    rounded = [run["rounded_afterwards"]["nvfp4"] for run in runs[::3]]
    parts = ("weight", "gradient", "optimizer")
    nbytes = sum(runs[2][f"{part}_bytes_per_parameter"] for part in parts)
    found.append(("docs/qat.md", f"| AdamW, FP32 weights | {statistics.fmean(adamw):.4f} | |"))
    for title, losses in (
        ("the same, rounded to NVFP4 afterwards", rounded),
        ("`FP4Adam`, trained in NVFP4", ours),
        (f"{nbytes:.1f} bytes per parameter with gradients in place of 16.0", lean),
    ):
        gaps = [a - b for a, b in zip(losses, adamw, strict=True)]
        gap = f"{statistics.fmean(gaps):+.4f} ± {statistics.stdev(gaps) / 3**0.5:.4f}"
        found.append(("docs/qat.md", f"{title} | {statistics.fmean(losses):.4f} | {gap} |"))
    gap = json.loads((folder / "demo_gap_small.json").read_text())["runs"]
    ends = defaultdict(list)
    for run in gap:
        ends[run["name"]].append(statistics.fmean(run["losses"]))
    adamw = ends.pop("AdamW, FP32")
    found.append(("docs/qat.md", " | ".join(["AdamW, FP32 weights", *(f"{x:.4f}" for x in adamw)])))
    for name, losses in ends.items():
        mean = statistics.fmean(losses) - statistics.fmean(adamw)
        cells = [f"| {name}", *(f"{loss:.4f}" for loss in losses), f"{mean:+.4f} |"]
        found.append(("docs/qat.md", " | ".join(cells)))
    runs = json.loads((folder / "finetune_rounded.json").read_text())["rows"]
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
        found.append((page, " | ".join([title, *gains[tuple(kind)]])))
    runs = json.loads((folder / "finetune_rounded_seed_1.json").read_text())["rows"]
    before = runs[0]["before"]
    for lr in (1e-5, 1e-4):
        gains = [f"{before - run['after']:.4f}" for run in runs if run["lr"] == lr]
        text = "BF16 {}, FP8 {}, with int8 masters {}, MXFP4 {}, with int8 masters {}".format(
            *gains
        )
        found.append((page, text))
    return found


@needs_docs
@needs_records
def test_figures_are_those_of_the_records():
    """A new record changes the pages, and a page cannot change without one."""
    for page, words in figures() + figures_of_cpus():
        text = " ".join((ROOT / page).read_text().split())
        assert words in text, f"{page} lacks {words!r}"


@needs_docs
def test_largest_models_are_those_of_the_plan():
    page = (DOCS / "formats.md").read_text()
    for setup in plan.SETUPS:
        sizes = [f"{plan.largest(setup, card) / 1e9:.1f}" for card in (24, 32, 48, 80, 141)]
        assert " | ".join([f"| {setup.name}", *sizes]) in page
        if setup.states == "8bit" or setup.states == "":
            assert f"| {plan.bytes_per_parameter(setup)[0]:.2f}".removesuffix(".00") in page
    theirs, lean = plan.SETUPS[2], plan.SETUPS[-1]
    ours = next(setup for setup in plan.SETUPS if not setup.masters)
    sizes = [f"{plan.largest(s, card) / 1e9:.2g} B" for s in (ours, theirs) for card in (24, 80)]
    sizes[0] = f"{plan.largest(ours, 24) / 1e9:.1f} B"
    gain = "**{} parameters on 24 GB, {} on 80 GB**, where AdamW8bit takes {} and {}"
    assert gain.format(*sizes) in README.read_text()
    assert gain.format(*sizes) in (DOCS / "index.md").read_text()
    assert f"**{plan.bytes_per_parameter(lean)[0]:.2f} bytes**" in README.read_text()


@pytest.mark.exhaustive  # starts Python
@needs_docs
@needs_records
def test_measurements_are_written_from_the_records():
    folder = ROOT / "benchmarks"
    command = [sys.executable, str(folder / "measurements.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not MAKEFILE.is_file(), reason="there is none beside this copy of tests/")
def test_commands_of_the_readme_exist():
    targets = set(re.findall(r"^([\w-]+):", MAKEFILE.read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", README.read_text(), re.MULTILINE))
    assert {"demo", "test"} <= named <= targets


@pytest.mark.skipif(not SETUP.is_file(), reason="there is none beside this copy of tests/")
def test_extras_that_texts_name_exist():
    project = (ROOT / "pyproject.toml").read_text()
    table = project.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    extras = set(re.findall(r"^(\w+) = \[", table, re.MULTILINE))
    folders = (ROOT / name for name in ("fp4adam", "examples", "benchmarks", "docs"))
    files = [f for folder in folders for f in folder.rglob("*") if f.suffix in (".py", ".md")]
    pattern = re.compile(r"install '?(?:\.|fp4adam)\[(\w+)\]")
    named = [n for f in [README, *files] for n in pattern.findall(f.read_text())]
    assert len(named) > 10 and set(named) <= extras
    # Unquoted brackets are a pattern of file names to zsh.
    assert not any(re.search(r"install [^'\"\s]\S*\[", f.read_text()) for f in [README, *files])


def messages() -> set[str]:
    """Every text of the package, with "..." for what is filled in."""
    texts = set()
    for path in Path(fp4adam.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (v.value if isinstance(v, ast.Constant) else "..." for v in node.values)
                texts.add("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.add(node.value)
    return texts


@needs_docs
def test_errors_that_the_troubleshooting_page_quotes_are_those_of_the_package():
    page = (DOCS / "troubleshooting.md").read_text()
    quoted = re.findall(r"^### `(.+)`$", page, re.MULTILINE)
    assert len(quoted) > 25
    texts = messages()
    for quote in quoted:
        # A name of an optimizer may be spelled out.
        pattern = re.escape(quote).replace(r"\.\.\.", ".*")
        pattern = re.sub("FusedAdam|FP4Adam$", ".*", pattern)
        assert any(re.search(pattern, text) for text in texts), quote
