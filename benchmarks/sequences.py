"""Random programs of what users do around FP4Adam, each compared with an exact oracle.

    python benchmarks/sequences.py [--device cuda] [--path kernels] [--programs 1000 | --minutes 60]

A program is some eight moves with a step after each: other groups, overwritten weights, copies,
checkpoints, clipping, gradient release, and more, with weights of any format and states of any
storage. The moves and the oracle are those of tests/optim/test_step_table.py. A failing program is
shortened and printed. --json keeps how many have been run, and what failed.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
AT_A_TIME = 100


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--path", choices=("operators", "kernels"), default="operators")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--programs", type=int, default=AT_A_TIME, help=f"how many ({AT_A_TIME})")
    parser.add_argument("--minutes", type=float, help="how long, in place of --programs")
    parser.add_argument("--seed", type=int, default=0, help="of the first hundred; others follow")
    parser.add_argument("--json", type=Path, help="where results are written")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    places = ("tests", "tests/references", "tests/optim", "benchmarks")
    sys.path[:0] = [str(ROOT / place) for place in places]
    if args.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
        import interpreter

        interpreter.install()
    import torch
    from provenance import about
    from test_step_table import check_programs

    torch.set_num_threads(1)
    start, failures, count, seed = time.monotonic(), [], 0, args.seed
    while time.monotonic() - start < 60 * args.minutes if args.minutes else count < args.programs:
        some = AT_A_TIME if args.minutes else min(AT_A_TIME, args.programs - count)
        try:
            check_programs(args.path, args.device, some, seed)
        except Exception as error:
            program = "\n".join(getattr(error, "__notes__", []))
            failures.append({"seed": seed, "error": str(error), "program": program})
            print(f"seed {seed}: {error}\n{program}", flush=True)
        count, seed = count + some, seed + 1
        print(f"{time.monotonic() - start:6.0f} s  {count} programs", flush=True)
    if args.json is not None:
        summary = {
            "about": about(args.device),
            "path": args.path,
            "first_seed": args.seed,
            "programs": count,
            "seconds": round(time.monotonic() - start, 1),
            "failures": failures,
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(summary, indent=1) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
