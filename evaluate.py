"""How good is a checkpoint: success by category and by reward token, with 95 % intervals (paper, Inference).

    python evaluate.py runs/rcgrpo                       # success under the high token, no token, the low token
    python evaluate.py runs/rctp --temperature 0 --show 3

`sample` is the one place where a prompt becomes a rollout and a rollout earns its reward: evaluation, training and
stage 1's sampled failures all call it. Success is R = R_state * R_action = 1 within the limits (reward.py). The paper
conditions on the high token and does not say what the others do; here all are measured on the same tasks. For --env
bfcl the verdict of the official checker, stricter about turns and looser about calls, stands beside ours.
"""
import hashlib
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tqdm import tqdm

import bfcl
import simulator
from envs import CATEGORIES, merge
from model import load_policy
from reward import trajectory_reward
from run import (UserError, check_file, checkpoint_of, code_hash, config_of, data, make_options, memory, method,
                 program, read_flags, require, running, to_line)
from sampler import Sampler, Trajectory
from state import weights_hash
from tokens import HIGH, LOW, REWARD_TOKENS

CONDITIONS = {"high": HIGH, "none": None, **REWARD_TOKENS}                              # what a rollout may be under
NAMES = {token: name for name, token in CONDITIONS.items()}
TASK_KEYS = ("env", "split", "dialogue", "categories", "turns", "calls", "tools", "clutter")
LONG = 2_000               # characters of one message in episodes.jsonl


@dataclass
class TaskOptions:
    """Which tasks: shared by all programs, and written down in a run's config.json for the next stage."""
    env: str = data("sim", "tasks: sim (simulator.py) or bfcl (the real benchmark, bfcl.py)", choices=("sim", "bfcl"))
    split: str = data("scenario", "bfcl: scenario (leak-free), paper (its 80 test tasks; leaks), random (leaks)",
                      choices=bfcl.SPLITS)
    dialogue: str = data("turns", "turns, or merged (the paper's): all user messages in one, the tool done ends it",
                         choices=("turns", "merged"))
    categories: str = data(",".join(CATEGORIES), "task categories", some=True)
    turns: int = data(2, "sim: user turns of a base task, at most", least=1)
    calls: int = data(1, "sim: golden calls of a turn, at most", least=1)
    tools: int = data(6, "sim: tools offered, distractors included", least=1)
    clutter: int = data(3, "sim: entries of clutter around a result in long_context", least=0)
    seed: int = running(0, "seed of tasks, their order, reward tokens and sampling", least=0)
    device: str = memory("auto", "auto, cpu, cuda, cuda:1, ...")
    threads: int = memory(0, "CPU threads; 0: torch's choice", least=0, most=1024)

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
    """n tasks of a part (train, validation, test) of the chosen environment; of BFCL as many as there are, all for 0.

    shift: of the simulator's one_variant_each.
    """
    categories = tuple(options.categories.split(","))
    dress = merge if options.dialogue == "merged" else lambda task: task
    if options.env == "sim":
        try:
            return list(map(dress, one_variant_each(n, seed, categories, shift, part=part, turns=(1, options.turns),
                                                    calls=(1, options.calls), tools=options.tools,
                                                    clutter=options.clutter)))
        except ValueError as error:
            raise UserError(f"the simulator's tasks: {error}")
    try:
        tasks = list(map(dress, bfcl.load_tasks(categories, split=options.split, part=part)))
    except (ModuleNotFoundError, ValueError) as error:
        raise UserError(str(error))
    if n <= 0 or n >= len(tasks):
        return tasks
    groups = [[task for task in tasks if task.category == name] for name in categories]  # from all categories alike
    alike = [task for row in zip(*groups) for task in row]
    return alike[:n] if n < len(alike) else tasks[:n]


def held_out_tasks(o, part: str = "test") -> list:
    """The tasks on which a training program measures success; none for --eval_tasks 0."""
    return load_tasks(o, part, o.eval_tasks, seed=10_000 + o.seed) if o.eval_tasks else []


def run_config(o: TaskOptions, stage: str, builtin: bool, token: str, sampler: Sampler, task) -> dict:
    """config.json of a run: its options, and hashes of code, data, one whole prompt and the weights it starts from,
    since scores move when any of these does. token: name of the reward token that the policy is meant for."""
    episode = task.episode()
    prompt = sampler.renderer.prompt(episode.messages, episode.tools, HIGH)
    return {"stage": stage, "builtin": builtin, "token": token, "options": asdict(o),
            "tasks": {key: getattr(o, key) for key in TASK_KEYS},
            "hashes": {"code": code_hash(), "data": bfcl.data_hash() if o.env == "bfcl" else "simulator, see code",
                       "prompt": hashlib.sha256(str(prompt).encode()).hexdigest()[:16],
                       "policy": weights_hash(sampler.model)}}


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


def sample(sampler: Sampler, tasks: list, tokens: list, temperature=1.0, seed=0, guidance=0.0, **options):
    """Play one episode of each task under its reward token (None: no token) -> rollouts with token, outcome and reward.

    guidance: away from the low token, by w of Sampler.rollout. options: further ones of it. Raises UserError for a
    prompt that leaves no room in the context.
    """
    if guidance:                                         # each episode twice, under its token and under the low one
        tasks, tokens = [task for task in tasks for _ in range(2)], [each for token in tokens for each in (token, LOW)]
    episodes = [task.episode() for task in tasks]
    prompts = [sampler.renderer.prompt(episode.messages, episode.tools, token)
               for episode, token in zip(episodes, tokens, strict=True)]
    rollouts = sampler.rollout(episodes, prompts, temperature, seed=seed, guidance=guidance, **options)
    if guidance:
        rollouts, tokens = rollouts[::2], tokens[::2]
    for r, token in zip(rollouts, tokens):
        r.token, r.outcome = token, trajectory_reward(r.episode, r.truncated)
        r.reward = float(r.outcome.total)
    return rollouts


def play(sampler: Sampler, tasks: list, names=tuple(CONDITIONS), temperature: float = 1.0, seed: int = 0,
         title: str = "evaluating", **options) -> list[Trajectory]:
    """Every task once under each of these names of CONDITIONS, under a progress bar."""
    check_prompts(sampler, tasks)                        # so that the error stands alone, without a bar
    tokens = [CONDITIONS[name] for name in names for _ in tasks]
    with tqdm(total=len(tokens) * (2 if options.get("guidance") else 1), desc=title, unit="ep", leave=False) as bar:
        return sample(sampler, tasks * len(names), tokens, temperature, (seed, 0), progress=bar.update, **options)


def dialogue(r: Trajectory) -> list[dict]:
    """What was said in an episode, as it was said: users, the policy's own texts, results, what was cut off."""
    said, lines = iter(r.messages), []
    for message in r.episode.messages:
        text = next(said, "") if message["role"] == "assistant" else message["content"]
        if message.get("tools"):
            text += " (now available: " + ", ".join(tool["function"]["name"] for tool in message["tools"]) + ")"
        lines.append({"role": message["role"], "content": text})
    return lines + [{"role": "assistant", "content": text} for text in said]


def verdict(r: Trajectory) -> dict:
    """How a rollout came out, as plain data."""
    task = r.episode.task
    row = {"task": task.id, "category": task.category, "token": NAMES[r.token], "reward": r.reward,
           "success": r.outcome.total, "state": r.outcome.state, "action": r.outcome.action, "truncated": r.truncated}
    if isinstance(r.episode, bfcl.Episode):
        row["official"] = int(not r.truncated and bfcl.official_verdict(r.episode))
    return row


def record(r: Trajectory) -> dict:
    """A rollout as a line of episodes.jsonl: verdict, whole dialogue (long texts cut) and golden calls of each turn."""
    def cut(text):
        return text if len(text) <= LONG else f"{text[:LONG]} ... ({len(text) - LONG} characters more)"
    golden = [[{"name": call.name, "arguments": call.arguments} for call in turn] for turn in r.episode.task.golden]
    said = [{**line, "content": cut(line["content"])} for line in dialogue(r)]
    return {**verdict(r), "dialogue": said, "golden": golden}


def rate(rows: list[dict], key: str = "success", **where) -> float:
    """Mean of `key` over the rows that match; nan where none does."""
    values = [row[key] for row in rows if all(row[name] == value for name, value in where.items())]
    return sum(values) / len(values) if values else math.nan


def table(rows: list[dict], key: str = "success") -> str:
    """Success in percent by token (lines) and category (columns), with Wilson 95 % intervals."""
    categories = sorted({row["category"] for row in rows}, key=CATEGORIES.index)
    lines = [f"{key + ' %':12}" + "".join(f"{name:>22}" for name in ["all"] + categories)]
    for name in dict.fromkeys(row["token"] for row in rows):
        line = f"{name:12}"
        for category in [None] + categories:
            values = [row[key] for row in rows if row["token"] == name and category in (None, row["category"])]
            low, high = wilson(sum(values), len(values))
            line += f"{100 * sum(values) / len(values):8.1f} [{100 * low:4.1f}, {100 * high:5.1f}]"
        lines.append(line)
    return "\n".join(lines)


def transcript(r: Trajectory) -> str:
    """A whole episode in readable form."""
    row = verdict(r)
    lines = [f"--- {row['task']} ({row['category']}), token: {row['token']}, R = {row['success']} "
             f"(state {row['state']}, action {row['action']}{', truncated' if r.truncated else ''})"]
    lines += [f"{line['role']:>10}: {line['content']}" for line in dialogue(r)]
    golden = [f"{call.name}({', '.join(f'{key}={value!r}' for key, value in call.arguments.items())})"
              for turn in r.episode.task.golden for call in turn]
    return "\n".join(lines + [f"{'golden':>10}: " + "; ".join(golden)])


@dataclass
class Options(TaskOptions):
    checkpoint: str = method("runs/rcgrpo", "run folder, checkpoint folder, GGUF file or hub name")
    tokens: str = method(",".join(CONDITIONS), "reward tokens to condition on", some=True)
    temperature: float = method(1.0, "sampling temperature; 0: greedy", least=0)
    top_p: float = method(1.0, "nucleus sampling", above=0, most=1)
    top_k: int = method(0, "top-k sampling; 0: off", least=0)
    guidance: float = method(0.0, "w > 0: sample from (1 + w) log p(.|token) - w log p(.|low token)", least=0)
    part: str = data("test", "part of the split", choices=("train", "validation", "test"))
    n: int = data(400, "tasks; 0: all that the part has (bfcl)", least=0)
    rows: int = memory(16, "episodes side by side", builtin=256, least=1)
    max_message: int = memory(512, "tokens of one assistant message, at most", builtin=64, least=1)
    max_messages: int = memory(40, "assistant messages of one episode, at most", builtin=16, least=1)
    show: int = running(0, "print this many whole episodes", least=0)
    out: str = running("", "write all episodes to this JSONL file")

    def check(self):
        require(self.n >= 1 or (self.env == "bfcl" and self.n == 0), "--n must be at least 1 (0, all, for bfcl)")
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
    names = o.tokens.split(",")
    if o.guidance:                                       # without a token the two prompts differ in length
        names = [name for name in names if name in REWARD_TOKENS]
        require(bool(names), f"--guidance needs one of the tokens {', '.join(REWARD_TOKENS)}")
    rollouts = play(sampler, tasks, names, o.temperature, o.seed, top_p=o.top_p, top_k=o.top_k, guidance=o.guidance)
    if o.out:                                                            # first, whatever happens to what is printed
        Path(o.out).write_text("".join(to_line(record(r)) for r in rollouts), encoding="utf-8")
        print(f"wrote {o.out}")
    how = "greedy" if o.temperature == 0 else f"temperature {o.temperature:g}"
    how += f", guidance {o.guidance:g}" * bool(o.guidance)
    print(f"{o.checkpoint}: {len(tasks)} {o.part} tasks of {o.env}, {how}")
    rows = [verdict(r) for r in rollouts]
    print(table(rows))
    if "official" in rows[0]:
        print(table(rows, "official"))
    for r in rollouts[:o.show]:
        print(transcript(r))


if __name__ == "__main__":
    program(main)
