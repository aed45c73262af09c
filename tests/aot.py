"""Compile kernels ahead of time for a GPU that need not be there, and tell what came out.

As a program: a JSON list of jobs on stdin, the list of their facts on stdout. It runs in a process
of its own because Triton decides at its import whether it compiles or interprets.

A job names a kernel, the types of its arguments as Triton writes them, and the target:
    {"module": "fp4adam.kernels.plain_step", "kernel": "_block_kernel",
     "signature": {"x_ptr": "*fp32", "numel": "i32"}, "constexprs": {"BLOCK": 1024},
     "divisible_by_16": ["x_ptr"], "sm": 90}
and optionally num_warps, num_stages, enable_fp_fusion and maxnreg. What JSON cannot express is
{"import": "triton.language.bfloat16"}, or {"tuple": "fp4adam.kernels.format.Format", "fields": []}.
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
from pathlib import Path
from typing import Any

# Opcodes that round otherwise than one correctly rounded operation after the other.
INEXACT = r"^fma|^div\.full|approx|\.ftz"

Job = dict[str, Any]
Facts = dict[str, Any]


def compile_ahead_of_time(jobs: list[Job]) -> list[Facts]:
    """Compile every job in one new process; RuntimeError with the compiler's words if one fails."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # The modules of the jobs must be found as they are here, test modules included.
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    with tempfile.TemporaryDirectory() as cache:
        process = subprocess.run(
            [sys.executable, __file__],
            input=json.dumps(jobs),
            env=env | {"TRITON_CACHE_DIR": cache},
            capture_output=True,
            text=True,
        )
    if process.returncode:
        raise RuntimeError(f"ahead-of-time compilation failed:\n{process.stderr}")
    return json.loads(process.stdout)


def count(facts: Facts, opcode: str) -> int:
    """How many PTX instructions have an opcode in which the regular expression is found."""
    return sum(n for name, n in facts["instructions"].items() if re.search(opcode, name))


def _imported(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _constexpr(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if "import" in value:
        return _imported(value["import"])
    return _imported(value["tuple"])(*map(_constexpr, value["fields"]))


def _compile(job: Job) -> Facts:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(job["module"]), job["kernel"])
    constexprs = {name: _constexpr(value) for name, value in job["constexprs"].items()}
    signature = {name: job["signature"].get(name, "constexpr") for name in kernel.arg_names}
    divisible = [(kernel.arg_names.index(name),) for name in job.get("divisible_by_16", ())]
    source = ASTSource(
        kernel, signature, constexprs, {path: [["tt.divisibility", 16]] for path in divisible}
    )
    options = {
        "num_warps": job.get("num_warps", 4),
        "num_stages": job.get("num_stages", 3),
        "enable_fp_fusion": job.get("enable_fp_fusion", False),
        "maxnreg": job.get("maxnreg"),
    }
    triton.knobs.nvidia.dump_ptxas_log = True
    with contextlib.redirect_stdout(io.StringIO()) as log:
        compiled = triton.compile(source, target=GPUTarget("cuda", job["sm"], 32), options=options)
    return {
        "instructions": _opcodes(compiled.asm["ptx"]),
        **_resources(log.getvalue()),
        "shared_bytes": compiled.metadata.shared,
    }


def _opcodes(ptx: str) -> dict[str, int]:
    # All but the assembly of kernels/adam.py, which approximates and corrects.
    # tests/kernels/test_update_quotient.py says whether that is exact.
    ptx = re.sub(r"\{ \.reg \.pred outside,.*?DONE: \}", "", ptx, flags=re.DOTALL)
    code = re.sub(r"//.*|^\s*\.(file|loc)\b.*", "", ptx, flags=re.MULTILINE)
    return Counter(re.findall(r"(?<![%.$\w])[a-z]\w*(?:\.[\w:]+)+(?=\s)", code))


def _resources(log: str) -> dict[str, int]:
    """What the assembler says; the compiled kernel itself would tell only a GPU."""
    return {
        "registers": int(re.search(r"Used (\d+) registers", log)[1]),
        "spilled_bytes": sum(map(int, re.findall(r"(\d+) bytes spill", log))),
    }


if __name__ == "__main__":
    jobs = [json.dumps(job) for job in json.load(sys.stdin)]
    facts = {job: _compile(json.loads(job)) for job in dict.fromkeys(jobs)}
    json.dump([facts[job] for job in jobs], sys.stdout)
