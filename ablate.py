"""The default run over seeds, next to what it must be compared with: the table in the README.

    python ablate.py                                     # seeds 0-4 -> runs/seeds/, about an hour on 2 cores
    python ablate.py --table_only                        # the table from the run folders that are there

Per seed: RCTP-FT, the SFT baseline on the same demonstrations (its learning rate chosen on validation tasks of seed 0),
RCTP-FT + GRPO and RCTP-FT + RC-GRPO, all on the test part, success at temperature 1 under the high token (SFT: no token).
Intervals are 95 % Student t intervals over the seeds. A run folder that exists is not run again.
"""
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from evaluate import rate
from run import UserError, make_options, option, program, read_flags, read_json, read_jsonl, require

T95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}     # Student t, by number of seeds


@dataclass
class Options:
    seeds: int = option(5, "seeds 0 .. n-1, at least 2")
    folder: str = option("runs/seeds", "where the run folders go")
    jobs: int = option(2, "programs side by side")
    threads: int = option(1, "CPU threads of each program")
    rates: str = option("5e-4,1e-3,2e-3", "learning rates of the SFT baseline to choose from, on validation tasks")
    table_only: bool = option(False, "run nothing, print the table")

    def check(self):
        require(2 <= self.seeds <= max(T95), f"--seeds must be between 2 and {max(T95)}")


def run_all(o: Options, commands: list[list[str]]):
    """Run programs that write --out, o.jobs at a time; those whose folder exists are skipped."""
    def one(command):
        out = command[command.index("--out") + 1]
        if not Path(out).exists():
            print("python", *command, flush=True)
            done = subprocess.run([sys.executable, *command, "--threads", str(o.threads)], capture_output=True, text=True,
                                  env={**os.environ, "OMP_NUM_THREADS": str(o.threads)})
            if done.returncode:
                raise UserError(f"python {' '.join(command)} failed: {done.stderr.strip().splitlines()[-1]}")
    with ThreadPoolExecutor(o.jobs) as pool:
        list(pool.map(one, commands))


def read(folder: Path, name: str) -> list[dict]:
    """The rows of a run folder's JSON or JSONL file."""
    return (read_json if name.endswith(".json") else read_jsonl)(folder / name)


def interval(values: list[float], digits: int = 1) -> str:
    """'mean [low, high]' over seeds."""
    n, mean = len(values), sum(values) / len(values)
    half = T95[n] * math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1) / n)
    return f"{mean:.{digits}f} [{mean - half:.{digits}f}, {mean + half:.{digits}f}]"


def main(argv=None):
    o = make_options(Options, read_flags(Options, argv), False)
    root, seeds = Path(o.folder), range(o.seeds)
    rates = o.rates.split(",")
    if not o.table_only:
        run_all(o, [["sft.py", "--out", f"{root}/rctp{seed}", "--seed", str(seed)] for seed in seeds][:1])       # makes the base model
        run_all(o, [["sft.py", "--plain", "--lr", lr, "--eval_part", "validation", "--out", f"{root}/sft-lr{lr}"] for lr in rates])
    best = max(rates, key=lambda lr: rate(read(root / f"sft-lr{lr}", "episodes.jsonl"), goal="none"))
    if not o.table_only:
        run_all(o, [["sft.py", "--out", f"{root}/rctp{seed}", "--seed", str(seed)] for seed in seeds]
                + [["sft.py", "--plain", "--lr", best, "--out", f"{root}/sft{seed}", "--seed", str(seed)] for seed in seeds])
        run_all(o, [[name, "--init", f"{root}/rctp{seed}", "--out", f"{root}/{name[:-3]}{seed}", "--seed", str(seed)]
                    for seed in seeds for name in ("rcgrpo.py", "grpo.py")])

    def over_seeds(run, file, **where):
        return [100 * rate(read(root / f"{run}{seed}", file), **where) for seed in seeds]

    def first_ten(run, name):
        return [sum(row[name] for row in read(root / f"{run}{seed}", "metrics.jsonl")[:10]) / 10 for seed in seeds]

    def difference(a, b):
        return [x - y for x, y in zip(a, b)]

    print("SFT's learning rate, success on validation tasks: " + ", ".join(
        f"{lr}: {100 * rate(read(root / f'sft-lr{lr}', 'episodes.jsonl'), goal='none'):.1f}" for lr in rates) + f" -> {best}")
    rctp = {goal: over_seeds("rctp", "episodes.jsonl", goal=goal) for goal in ("high", "none", "low")}
    sft = over_seeds("sft", "episodes.jsonl", goal="none")
    rc, plain = ({goal: over_seeds(run, "after.json", goal=goal) for goal in ("high", "none", "low")} for run in ("rcgrpo", "grpo"))
    rows = [("SFT, no token", sft)]
    rows += [(f"{name}, {goal} token" if goal != "none" else f"{name}, no token", values[goal])
             for name, values in (("RCTP-FT", rctp), ("RCTP-FT + GRPO", plain), ("RCTP-FT + RC-GRPO", rc)) for goal in ("high", "none", "low")]
    rows += [("RCTP-FT: high minus low", difference(rctp["high"], rctp["low"])),
             ("RC-GRPO: gain under the high token", difference(rc["high"], rctp["high"])),
             ("RC-GRPO high minus SFT", difference(rc["high"], sft)),
             ("RC-GRPO minus GRPO, high token", difference(rc["high"], plain["high"]))]
    print("\n| success % at temperature 1, test tasks | mean [95 %] over seeds | by seed |\n|---|---|---|")
    for title, values in rows:
        print(f"| {title} | {interval(values)} | {', '.join(f'{v:.1f}' for v in values)} |")
    print("\n| first 10 steps | GRPO | RC-GRPO | difference |\n|---|---|---|---|")
    for name in ("zero_variance", "advantage_gap"):
        a, b = first_ten("grpo", name), first_ten("rcgrpo", name)
        print(f"| {name} | {interval(a, 2)} | {interval(b, 2)} | {interval(difference(b, a), 2)} |")


if __name__ == "__main__":
    program(main)
