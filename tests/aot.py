"""Compile kernels ahead of time for a GPU that need not be there, and tell what came out.

That takes a process of its own, because Triton decides at its import whether it compiles or
interprets. It calls a function of a test module for the jobs.
"""

import contextlib
import importlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

# Opcodes that round otherwise than correctly rounded operations in turn; a bound's roots may, and
# products that cut codes in FP16, where what is subnormal is 0. Saturated sums have exact products.
INEXACT = r"^fma(?!\.rn\.sat)|^div\.full|^(?!rsqrt\.approx|mul\.rn\.ftz\.f16x2).*(approx|\.ftz)"

Facts = dict[str, Any]


class Job(NamedTuple):
    """A kernel, its arguments as Triton writes their types, its constants, and the target."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    divisible_by_16: list[str]
    sm: int
    options: dict[str, Any]


def compile_ahead_of_time(jobs_of: Callable[..., dict[str, Job]], *arguments: Any) -> Any:
    """By name the facts of the jobs that ``jobs_of(*arguments)`` returns in one new process.

    Raises:
        RuntimeError: With the compiler's words, if one fails.
    """
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # The modules of the jobs must be found as they are here, test modules included.
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    program = "import aot, sys; aot.print_facts(*sys.argv[1:])"
    given = [jobs_of.__module__, jobs_of.__name__, json.dumps(arguments)]
    with tempfile.TemporaryDirectory() as cache:
        process = subprocess.run(
            [sys.executable, "-c", program, *given],
            env=env | {"TRITON_CACHE_DIR": cache},
            capture_output=True,
            text=True,
        )
    if process.returncode:
        raise RuntimeError(f"ahead-of-time compilation failed:\n{process.stderr}")
    return json.loads(process.stdout)


def print_facts(module: str, name: str, arguments: str) -> None:
    jobs = getattr(importlib.import_module(module), name)(*json.loads(arguments))
    print(json.dumps({name: _compile(job) for name, job in jobs.items()}))


def count(facts: Facts, opcode: str) -> int:
    """How many PTX instructions have an opcode in which the regular expression is found."""
    return sum(n for name, n in facts["instructions"].items() if re.search(opcode, name))


def _compile(job: Job) -> Facts:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = job.kernel.arg_names
    signature = {name: job.signature.get(name, "constexpr") for name in names}
    divisible = {(names.index(name),): [["tt.divisibility", 16]] for name in job.divisible_by_16}
    source = ASTSource(job.kernel, signature, job.constants, divisible)
    triton.knobs.nvidia.dump_ptxas_log = True
    options = dict(num_warps=4, num_stages=3, enable_fp_fusion=False) | job.options
    with contextlib.redirect_stdout(io.StringIO()) as log:
        compiled = triton.compile(source, target=GPUTarget("cuda", job.sm, 32), options=options)
    return {
        "instructions": _opcodes(compiled.asm["ptx"]),
        # What the assembler says; the compiled kernel itself would tell only a GPU.
        "spilled_bytes": sum(map(int, re.findall(r"(\d+) bytes spill", log.getvalue()))),
        "shared_bytes": compiled.metadata.shared,
        "is_plain": job.constants.get("PLAIN") is True,
    }


def _opcodes(ptx: str) -> dict[str, int]:
    # All but the assembly of kernels/adam.py, which approximates and corrects.
    # tests/kernels/test_update_quotient.py says whether that is exact.
    ptx = re.sub(r"\{ \.reg \.pred outside,.*?DONE: \}", "", ptx, flags=re.DOTALL)
    code = re.sub(r"//.*|^\s*\.(file|loc)\b.*", "", ptx, flags=re.MULTILINE)
    return Counter(re.findall(r"(?<![%.$\w])[a-z]\w*(?:\.[\w:]+)+(?=\s)", code))
