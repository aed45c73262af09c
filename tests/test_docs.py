"""README and docs: their Python blocks run, their links lead somewhere, quoted errors exist."""

import ast
import os
import re
import runpy
import socket
import sys
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
BENCHMARKS = ROOT / "benchmarks"
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
    names = ("torch", "fp4adam", "FP4Adam", "FusedAdam", "quantize_model")
    known = {name: globals()[name] for name in names} | dict(path="checkpoint.pt", x=torch.ones(4))
    known |= dict(model=model, new_model=Model(), optimizer=optimizer, param=param)
    return known | dict(batch=batch, microbatches=batch.chunk(2))


def run(block: str) -> None:
    for package in re.findall(r"^(?:import|from) (transformers|lightning)\b", block, re.MULTILINE):
        pytest.importorskip(package)
    exec(compile(block, "<documentation>", "exec"), preamble(block))


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


@needs_docs
def test_largest_models_are_those_of_the_plan():
    page = (DOCS / "formats.md").read_text()
    for setup in plan.SETUPS:
        sizes = [f"{plan.largest(setup, card) / 1e9:.1f}" for card in (24, 32, 48, 80, 141)]
        assert " | ".join([f"| {setup.name}", *sizes]) in page
        if setup.states == "8bit" or setup.states == "":
            assert f"| {plan.bytes_per_parameter(setup)[0]:.2f}".removesuffix(".00") in page
    theirs, lean = plan.SETUPS[2], plan.SETUPS[-1]
    ours = next(setup for setup in plan.SETUPS if setup.states == "factored")
    sizes = [f"{plan.largest(s, card) / 1e9:.2g} B" for s in (ours, theirs) for card in (24, 80)]
    sizes[0] = f"{plan.largest(ours, 24) / 1e9:.1f} B"
    gain = "**{} parameters on 24 GB, {} on 80 GB**, where AdamW8bit takes {} and {}"
    assert gain.format(*sizes) in README.read_text()
    assert gain.format(*sizes) in (DOCS / "index.md").read_text()
    assert f"**{plan.bytes_per_parameter(lean)[0]:.2f} bytes**" in README.read_text()


@needs_docs
@pytest.mark.skipif(not (BENCHMARKS / "h200").is_dir(), reason="there are no records beside this")
def test_figures_are_those_of_the_records(monkeypatch):
    """A new record changes the pages, and a page cannot change without one."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(sys, "argv", ["measurements.py", "--check"])
    monkeypatch.delitem(sys.modules, "report", raising=False)  # the examples have one as well
    runpy.run_path(str(BENCHMARKS / "measurements.py"), run_name="__main__")
    monkeypatch.delitem(sys.modules, "report")


@pytest.mark.skipif(not MAKEFILE.is_file(), reason="there is none beside this copy of tests/")
def test_commands_and_extras_that_texts_name_exist():
    targets = set(re.findall(r"^([\w-]+):", MAKEFILE.read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", README.read_text(), re.MULTILINE))
    assert {"demo", "test"} <= named <= targets
    project = (ROOT / "pyproject.toml").read_text()
    table = project.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    extras = set(re.findall(r"^(\w+) = \[", table, re.MULTILINE))
    folders = (ROOT / name for name in ("fp4adam", "examples", "benchmarks", "docs"))
    files = [f for folder in folders for f in folder.rglob("*") if f.suffix in (".py", ".md")]
    texts = [f.read_text() for f in [README, *files]]
    named = re.findall(r"install '?(?:\.|fp4adam)\[(\w+)\]", "\n".join(texts))
    assert len(named) > 10 and set(named) <= extras
    # Unquoted brackets are a pattern of file names to zsh.
    assert not any(re.search(r"install [^'\"\s]\S*\[", text) for text in texts)


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
