"""How good is a checkpoint: success by category and by reward token, with 95 % intervals (paper, Inference).

    python evaluate.py runs/rcgrpo                       # success under the high token, no token, the low token
    python evaluate.py runs/rctp --temperature 0 --show 3

Success is R = R_state * R_action = 1 within the limits (reward.py). The paper conditions on the high token and does not say
what the others do; here all three are measured on the same tasks. For --env bfcl the verdict of the official checker, which
is stricter about turns and looser about calls, stands beside ours.
"""
import hashlib
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

import bfcl
import simulator
from model import load_policy
from reward import trajectory_reward
from run import (UserError, check_file, checkpoint_of, code_hash, config_of, make_options, option, program, read_flags,
                 require, to_line)
from sampler import Sampler
from tokens import HIGH, LOW

GOALS = {"high": HIGH, "none": None, "low": LOW}
TASK_KEYS = ("env", "split", "categories", "turns", "calls", "tools", "clutter")
CATEGORIES = ("base", "miss_func", "miss_param", "long_context")


@dataclass
class TaskOptions:
    """Which tasks: shared by all programs, and written down in a run's config.json for the next stage."""
    env: str = option("sim", "tasks: sim (simulator.py, no download) or bfcl (the real benchmark, bfcl.py)", choices=("sim", "bfcl"))
    split: str = option("scenario", "bfcl: scenario (leak-free) or random (the paper's, leaks)", choices=("scenario", "random"))
    categories: str = option(",".join(CATEGORIES), "task categories, comma-separated", some=True)
    turns: int = option(2, "sim: user turns of a base task, at most", least=1)
    calls: int = option(1, "sim: golden calls of a turn, at most", least=1)
    tools: int = option(6, "sim: tools offered, distractors included", least=1)
    clutter: int = option(3, "sim: entries of clutter around a result in long_context", least=0)
    seed: int = option(0, "seed of tasks, their order, reward tokens and sampling", least=0)
    device: str = option("auto", "auto, cpu, cuda, cuda:1, ...")
    threads: int = option(0, "CPU threads; 0 leaves torch's choice", least=0, most=1024)

    def torch_device(self) -> torch.device:
        if self.threads:
            torch.set_num_threads(self.threads)
        name = self.device if self.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        try:
            return torch.zeros(1, device=name).device
        except (RuntimeError, AssertionError) as error:
            raise UserError(f"--device {name} is not available: {str(error).splitlines()[0]}")


def one_variant_each(n: int, seed: int, categories=CATEGORIES, shift: int = 0, **regime) -> list:
    """n simulator tasks of n different scenarios, the categories taking turns: siblings would be nearly the same task.

    shift: start with another category. The same scenarios then, but other variants of them: the siblings.
    """
    tasks = simulator.make_tasks(n * len(categories), seed, categories=categories, **regime)
    return [tasks[i * len(categories) + (i + shift) % len(categories)] for i in range(n)]


def load_tasks(options: TaskOptions, part: str, n: int, seed: int, shift: int = 0) -> list:
    """n tasks of a part (train, validation, test) of the chosen environment; fewer where BFCL has no more (n <= 0: all).

    shift: of the simulator's one_variant_each.
    """
    categories = tuple(options.categories.split(","))
    if options.env == "sim":
        try:
            return one_variant_each(n, seed, categories, shift, part=part, turns=(1, options.turns), calls=(1, options.calls),
                                    tools=options.tools, clutter=options.clutter)
        except ValueError as error:
            raise UserError(f"the simulator's tasks: {error}")
    try:
        tasks = bfcl.load_tasks(categories, split=options.split, part=part)
    except (ModuleNotFoundError, ValueError) as error:
        raise UserError(str(error))
    if n <= 0 or n >= len(tasks):
        return tasks
    groups = [[task for task in tasks if task.category == name] for name in categories]     # take from all categories alike
    return [task for row in zip(*groups) for task in row][:n] if n < len(categories) * min(map(len, groups)) else tasks[:n]


def fingerprint(options: TaskOptions, sampler: Sampler, task) -> dict:
    """Hashes of code, data and one whole prompt, for config.json: scores move when any of these does."""
    episode = task.episode()
    ids = sampler.renderer.prompt(episode.messages, episode.tools, HIGH)
    return {"code": code_hash(), "data": bfcl.data_hash() if options.env == "bfcl" else "simulator, see code",
            "prompt": hashlib.sha256(str(ids).encode()).hexdigest()[:16]}


def check_prompts(sampler: Sampler, tasks: list):
    """UserError if the prompt of one of these tasks does not fit into the model's context."""
    for task in tasks:
        episode = task.episode()
        sampler.check_prompt(episode, sampler.renderer.prompt(episode.messages, episode.tools, HIGH))


def wilson(successes: float, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's 95 % interval of a proportion; (0, 1) for n = 0."""
    if n == 0:
        return 0.0, 1.0
    p = successes / n
    centre, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, (centre - half) / (1 + z * z / n)), min(1.0, (centre + half) / (1 + z * z / n))


def play(sampler: Sampler, tasks: list, goals=tuple(GOALS), temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0,
         seed: int = 0, title: str = "evaluating") -> list[dict]:
    """One episode per task and goal -> one row each: task, category, goal, success, ..., and the trajectory itself."""
    episodes = [(goal, task.episode()) for goal in goals for task in tasks]
    prompts = [sampler.renderer.prompt(episode.messages, episode.tools, GOALS[goal]) for goal, episode in episodes]
    for (_, episode), prompt in zip(episodes, prompts):
        sampler.check_prompt(episode, prompt)            # here too, so that the error stands alone, without a bar
    with tqdm(total=len(episodes), desc=title, unit="ep", leave=False) as bar:
        trajectories = sampler.rollout([episode for _, episode in episodes], prompts, temperature, top_p, top_k, seed=(seed, 0),
                                       progress=bar.update)
    rows = []
    for (goal, episode), trajectory in zip(episodes, trajectories):
        reward = trajectory_reward(episode)
        rows.append({"task": episode.task.id, "category": episode.task.category, "goal": goal,
                     "success": 0 if trajectory.truncated else reward.total, "state": reward.state, "action": reward.action,
                     "truncated": trajectory.truncated, "trajectory": trajectory})
        if isinstance(episode, bfcl.Episode):
            rows[-1]["official"] = int(not trajectory.truncated and bfcl.official_verdict(episode))
    return rows


def outcome(row: dict) -> dict:
    """A row of play() without its trajectory: plain data for a file."""
    return {key: value for key, value in row.items() if key != "trajectory"}


def record(row: dict) -> dict:
    """A row of play() as a line of episodes.jsonl: the outcome and what the policy said."""
    return {**outcome(row), "messages": row["trajectory"].messages}


def rate(rows: list[dict], key: str = "success", **where) -> float:
    """Mean of `key` over the rows that match; nan where none does."""
    values = [row[key] for row in rows if all(row[name] == value for name, value in where.items())]
    return sum(values) / len(values) if values else math.nan


def table(rows: list[dict], key: str = "success") -> str:
    """Success in percent by goal (lines) and category (columns), with Wilson 95 % intervals."""
    categories = sorted({row["category"] for row in rows}, key=CATEGORIES.index)
    lines = [f"{key + ' %':12}" + "".join(f"{name:>22}" for name in ["all"] + categories)]
    for goal in dict.fromkeys(row["goal"] for row in rows):
        line = f"{goal:12}"
        for category in [None] + categories:
            values = [row[key] for row in rows if row["goal"] == goal and category in (None, row["category"])]
            low, high = wilson(sum(values), len(values))
            line += f"{100 * sum(values) / len(values):8.1f} [{100 * low:4.1f}, {100 * high:5.1f}]"
        lines.append(line)
    return "\n".join(lines)


def transcript(row: dict) -> str:
    """A whole episode in readable form."""
    trajectory = row["trajectory"]
    lines = [f"--- {row['task']} ({row['category']}), token: {row['goal']}, R = {row['success']} "
             f"(state {row['state']}, action {row['action']}{', truncated' if row['truncated'] else ''})"]
    said = iter(trajectory.messages)
    for message in trajectory.episode.messages:
        text = next(said, "") if message["role"] == "assistant" else message["content"]
        if message.get("tools"):
            text += " (now available: " + ", ".join(tool["function"]["name"] for tool in message["tools"]) + ")"
        lines.append(f"{message['role']:>10}: {text}")
    lines += [f"{'assistant':>10}: {text}" for text in said]
    golden = [call for turn in trajectory.episode.task.golden for call in turn]
    lines.append(f"{'golden':>10}: " + "; ".join(f"{call.name}({', '.join(f'{k}={v!r}' for k, v in call.arguments.items())})" for call in golden))
    return "\n".join(lines)


@dataclass
class Options(TaskOptions):
    checkpoint: str = option("runs/rcgrpo", "run folder, checkpoint folder, GGUF file or hub name")
    part: str = option("test", "part of the split", choices=("train", "validation", "test"))
    n: int = option(400, "tasks; 0: all that the part has (bfcl)", least=0)
    tokens: str = option("high,none,low", "reward tokens to condition on, comma-separated", some=True)
    temperature: float = option(1.0, "sampling temperature; 0 is greedy", least=0)
    top_p: float = option(1.0, "nucleus sampling (evaluation only)", above=0, most=1)
    top_k: int = option(0, "top-k sampling (evaluation only); 0 is off", least=0)
    rows: int = option(16, "episodes side by side", builtin=256, least=1)
    max_message: int = option(512, "tokens of one assistant message, at most", builtin=64, least=1)
    max_messages: int = option(40, "assistant messages of one episode, at most", builtin=16, least=1)
    show: int = option(0, "print this many whole episodes", least=0)
    out: str = option("", "write all episodes to this JSONL file")

    def check(self):
        require(self.n >= 1 or (self.env == "bfcl" and self.n == 0), "--n must be at least 1 (0, all, for bfcl)")
        require(not self.out or Path(self.out).absolute().parent.is_dir(), f"--out: there is no folder {Path(self.out).parent}")
        if self.out:
            check_file(self.out)


def main(argv=None):
    given = read_flags(Options, argv, positional="checkpoint")
    source = given.get("checkpoint", Options.checkpoint)
    path, config = checkpoint_of(source), config_of(source)
    inherited = {key: value for key, value in config.get("tasks", {}).items() if key in TASK_KEYS}
    o = make_options(Options, {**inherited, **given}, config.get("builtin", False))
    model, tokenizer = load_policy(path, o.torch_device())
    sampler = Sampler(model, tokenizer, o.rows, o.max_message, o.max_messages)
    tasks = load_tasks(o, o.part, o.n, seed=10_000 + o.seed)
    rows = play(sampler, tasks, o.tokens.split(","), o.temperature, o.top_p, o.top_k, o.seed)
    if o.out:                                                            # first, whatever happens to what is printed
        Path(o.out).write_text("".join(to_line(record(row)) for row in rows), encoding="utf-8")
        print(f"wrote {o.out}")
    print(f"{o.checkpoint}: {len(tasks)} {o.part} tasks of {o.env}, " + ("greedy" if o.temperature == 0 else f"temperature {o.temperature:g}"))
    print(table(rows))
    if "official" in rows[0]:
        print(table(rows, "official"))
    for row in rows[:o.show]:
        print(transcript(row))


if __name__ == "__main__":
    program(main)
