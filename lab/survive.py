"""Does a run survive being killed? Kill sft.py and rcgrpo.py at random moments, resume, compare with an unharmed run.

    python lab/survive.py                                # 25 kills a program, a minute or two on a CPU
    python lab/survive.py --kills 200 --seed 1 --init runs/rctp

Every kill is SIGKILL, which no program can see coming: at a random moment, or (every second one) as soon as the
temporary name of a saved state appears. Then the run is resumed, and killed again, until it gets to its end; then the
next run begins, until there were enough kills. What must be the same, bit for bit: weights, metrics and episodes, times
left out. It exits 1 if anything differs.

Importing torch takes seconds, so a run is a fork of this process, which has imported everything. This process itself
never computes anything, and every run has one thread: there are no threads that a fork could lose.
"""
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ["TOKENIZERS_PARALLELISM"] = "false"           # threads, else

import torch
from tqdm import tqdm

import rcgrpo
import sft
import tokens
from builtin import builtin_policy
from evaluate import one_variant_each
from model import add_reward_tokens, save_policy
from run import (UserError, config_of, make_options, option, program, read_flags, read_json, read_jsonl,
                 require)
from state import damage

LIMITS = "--eval_tasks 4 --rows 16 --max_message 24 --max_messages 4 --device cpu --threads 1 --save_every 2"
tqdm.monitor_interval = 0          # no thread of tqdm's either
TIMES = {"seconds", "sample_seconds", "update_seconds", "tok_s"}


@dataclass
class Options:
    kills: int = option(25, "kills of each program", least=1)
    seed: int = option(0, "seed of the moments", least=0)
    init: str = option("", "run folder of a built-in model, e.g. runs/rctp; default: a tiny one, made on the spot")
    steps: int = option(12, "steps of rcgrpo.py (sft.py has about as many)", least=1)
    programs: str = option("sft,rcgrpo", "programs to kill, comma-separated", some=True)


def tiny_run(folder: str):
    """The run folder of a tiny policy that has learnt little, for want of a better one."""
    tasks = one_variant_each(40, 7, turns=(1, 2), calls=(1, 1), tools=4)
    corpus = [message["content"] for task in tasks for message in sft.demonstrate(task).messages]
    corpus += [tokens.FRAME + tokens.goal_text("")] * 2
    corpus += [tokens.signature(tool) for task in tasks for tool in task.episode().tools]
    corpus += [tokens.python_calls(calls) for task in tasks for calls in task.golden]
    model, tokenizer = builtin_policy(corpus, width=32, layers=2)
    add_reward_tokens(model, tokenizer)
    data = sft.stage1_data(sft.Options(demos=40), tokens.Renderer(tokenizer), tasks[:8])
    sft.fit(model, data, sft.Fit(1e-2, epochs=30, batch=8, warmup=3), "tiny policy")
    save_policy(model, tokenizer, Path(folder) / "checkpoint")
    config = {"builtin": True, "token": "high", "tasks": {"turns": 2, "calls": 1, "tools": 4}}
    (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")


def start(function, log: Path) -> int:
    """function() in a fork of this process -> its process id. What it prints goes to the end of the file `log`."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        with open(log, "a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        torch.set_num_threads(1)
        function()
        status = 0
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)                                                 # nothing of the parent's is tidied up twice


def last_line(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1]


def finish(child: int, log: Path):
    """Wait for a process that nobody kills. Raises UserError if it fails."""
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        raise UserError(f"a run failed: {last_line(log)}")


def kill_at(child: int, patience: float, folder: Path, in_save: bool) -> bool:
    """SIGKILL after `patience` seconds, with in_save once a state's temporary name appears -> was anything to kill."""
    due = time.monotonic() + patience
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() >= due:
            names = []
            with contextlib.suppress(FileNotFoundError):
                names = os.listdir(folder / "states")
            if not in_save or any(name.endswith(".tmp") for name in names):
                os.kill(child, signal.SIGKILL)
                return os.WIFSIGNALED(os.waitpid(child, 0)[1])
        time.sleep(0.0002 if in_save else min(0.02, max(0.0, due - time.monotonic())))
    return False


def what_is_left(folder: Path) -> dict:
    """A killed run: was it in the middle of saving, how many steps were recorded and how many of them are safe."""
    states = sorted((folder / "states").iterdir()) if (folder / "states").exists() else []
    good = [int(state.name) for state in states if state.suffix != ".tmp" and not damage(state)]
    rows = read_jsonl(folder / "metrics.jsonl") if (folder / "metrics.jsonl").exists() else []
    return {"saving": any(state.suffix == ".tmp" for state in states), "redone": len(rows) - max(good, default=0)}


def outcome(folder: Path) -> dict:
    """Everything of a finished run that must be the same; times left out."""
    files = {file.name: read_jsonl(file) for file in folder.glob("*.jsonl")}
    files |= {name: read_json(folder / name) for name in ("before.json", "after.json") if (folder / name).exists()}
    files["metrics.jsonl"] = [{key: value for key, value in row.items() if key not in TIMES}
                              for row in files["metrics.jsonl"]]
    names = {path.name for path in folder.iterdir()} - {"lock", "states"}    # left by a late kill
    return files | {"weights": (folder / "checkpoint/model.safetensors").read_bytes(), "names": names}


def torture(name: str, main, argv: list[str], o: Options, room: Path) -> dict:
    """Kill main(argv) o.kills times -> what is to be printed."""
    rng, log, began = random.Random(f"{o.seed}-{name}"), room / f"{name}.log", time.monotonic()
    done = {"kills": 0, "saving": 0, "redone": 0, "runs": 0, "differ": []}
    finish(start(lambda: main([*argv, "--out", str(room / f"{name}-whole")]), log), log)
    length = time.monotonic() - began
    whole = outcome(room / f"{name}-whole")
    out = room / f"{name}-killed"
    partial = Path(f"{out}.partial")
    with tqdm(total=o.kills, desc=name, unit="kill") as bar:
        while done["kills"] < o.kills:
            resume = []
            while not out.exists():
                child = start(lambda: main([*argv, "--out", str(out), *resume]), log)
                if done["kills"] == o.kills:
                    finish(child, log)
                elif kill_at(child, rng.uniform(0, length), partial, in_save=done["kills"] % 2 == 1):
                    for key, count in {"kills": 1, **what_is_left(partial)}.items():
                        done[key] += count
                    bar.update()
                elif not out.exists():
                    raise UserError(f"a run failed: {last_line(log)}")
                resume = ["--resume"] if (partial / "config.json").exists() else []
            done["runs"] += 1
            found = outcome(out)
            differ = [key for key in whole | found if whole.get(key) != found.get(key)]
            done["differ"] += [f"run {done['runs']}: {key}" for key in differ]
            shutil.rmtree(out)
    return done | {"steps": len(whole["metrics.jsonl"]), "seconds": time.monotonic() - began}


def main(argv=None):
    o = make_options(Options, read_flags(Options, argv), False)
    with tempfile.TemporaryDirectory() as room:
        init, log = o.init or f"{room}/tiny", Path(room) / "tiny.log"
        if not o.init:
            finish(start(lambda: tiny_run(init), log), log)
        require(bool(config_of(init).get("builtin")), f"--init: {init} is no run folder of a built-in model")
        commands = {
            "sft": (sft.main, f"--model {init} --schemas compact --demos {2 * o.steps} --epochs 2 --batch 8 --lr 1e-3 "
                              "--tools 4"),
            "rcgrpo": (rcgrpo.main, f"--init {init} --steps {o.steps} --tasks 4 --group 4")}
        commands = {name: (main, f"{flags} {LIMITS}".split()) for name, (main, flags) in commands.items()}
        found = {name: torture(name, *commands[name], o, Path(room)) for name in o.programs.split(",")}
    print(f"{'program':10}{'steps':>7}{'runs':>6}{'kills':>7}{'while saving':>14}{'steps redone':>14}{'identical':>11}"
          f"{'time':>8}")
    for name, row in found.items():
        print(f"{name + '.py':10}{row['steps']:7}{row['runs']:6}{row['kills']:7}{row['saving']:14}{row['redone']:14}"
              f"{'no' if row['differ'] else 'yes':>11}{row['seconds']:6.0f} s")
    for name, row in found.items():
        for what in row["differ"]:
            print(f"DIFFERS: {name}.py, {what}")
    sys.exit(any(row["differ"] for row in found.values()))


if __name__ == "__main__":
    program(main)
