"""Stage 1: RCTP-FT, supervised fine-tuning on successful AND failed trajectories (paper, method 1), and plain SFT.

    python sft.py                                        # RCTP-FT of the built-in model -> runs/rctp
    python sft.py --plain                                # the SFT baseline -> runs/sft
    python sft.py --model Qwen/Qwen2.5-7B-Instruct --env bfcl

Loss: -sum_t log pi(a_t | h_t, r) over the assistant's tokens, r being the reward token in the prompt: <|high_reward|>
where the episode's computed reward is 1, <|low_reward|> where it is 0. Successes and failures are 1:1. Plain SFT uses
the successes only, without a token.

Defaults for pretrained models are the paper's. Its 450 updates of RCTP-FT against 90 of plain SFT are unequal: give
both the same number (--plain --epochs 10) to compare them.

Departures: failures come from golden trajectories with realistic mistakes (`corrupt`), or, with --failures policy, from
episodes sampled from the model itself. The built-in model's preset gives failures three mistakes but a fifth of the
weight, and the reward tokens' rows ten times the learning rate: a model this small notices a token only after some
hundred steps, and noise costs it precision. Its stand-in for pretraining is in builtin.py.
"""
import math
import random
import time
from dataclasses import dataclass, replace

import torch
from tqdm import tqdm

from envs import Call
from evaluate import (TASK_KEYS, TaskOptions, check_prompts, held_out_tasks, load_tasks, play, rate, record,
                      run_config, sample, table, verdict)
from model import MemoryOptions, Optimizer, batches_by_length, load_policy, pad, save_policy, token_logprobs
from reward import replay, trajectory_reward
from run import (Run, checkpoint_of, claim, command_line, config_of, data, make_options, memory, method, optimisation,
                 program, read_flags, require, resolved, running, to_line)
from sampler import Sampler, Trajectory
from state import Keeper
from tokens import HIGH, LOW, Renderer

BETAS = (0.9, 0.95)        # of AdamW
CLIP_NORM = 1.0            # of the gradient


@dataclass
class Options(MemoryOptions, TaskOptions):
    plain: bool = method(False, "the SFT baseline: successes only, no reward token")
    failures: str = method("corrupt", "where failures come from: golden calls with a mistake, or sampled episodes",
                           choices=("corrupt", "policy"))
    mistakes: int = method(1, "mistakes in a corrupted failure", builtin=3, least=1)
    failure_weight: float = method(1.0, "weight of a failure's tokens in the loss", builtin=0.2, above=0)
    row_speed: float = method(1.0, "learning rate of the reward tokens' rows over --lr", builtin=10.0, above=0)
    model: str = data("builtin", "builtin, a hub name, a run or checkpoint folder, a GGUF file")
    schemas: str = data("saved", "tools in the prompt: the model's own way, JSON, signatures; saved: as before",
                        choices=("saved", "template", "full", "compact"))
    demos: int = data(0, "tasks with a demonstration; 0: all training tasks (bfcl)", builtin=1200, least=0)
    eval_tasks: int = data(80, "held-out tasks for the closing evaluation; 0: none", builtin=300, least=0)
    lr: float = optimisation(1e-5, "learning rate (paper, table 11)", builtin=1e-3, above=0)
    epochs: int = optimisation(0, "passes over the data; 0: the paper's (tables 11, 12), 5 and with --plain 2",
                               builtin=3, least=0)
    batch: int = optimisation(16, "trajectories in a step (paper, table 11)", least=1)
    warmup: int = optimisation(10, "steps of linear warm-up, while the rate falls to 0", builtin=100, least=0)
    token_budget: int = memory(16384, "tokens of a micro-batch, at most, padding included", builtin=4096, least=1)
    rows: int = memory(16, "episodes side by side in the sampler", builtin=256, least=1)
    max_message: int = memory(512, "tokens of one assistant message, at most", builtin=64, least=1)
    max_messages: int = memory(40, "assistant messages of one episode, at most", builtin=16, least=1)
    out: str = running("", "run folder; runs/rctp, with --plain runs/sft")
    base: str = running("runs/base", "where the built-in model's stand-in for pretraining is kept")
    base_seed: int = running(0, "its seed", least=0)
    pretrain: bool = running(False, "make that stand-in and nothing else")
    save_every: int = running(50, "steps between saved states", least=1)
    resume: bool = running(False, "go on with the interrupted run in <out>.partial")
    overwrite: bool = running(False, "replace an older run in <out> when this one is complete")

    def check(self):
        require(not self.pretrain or self.model == "builtin", "--pretrain is for the built-in model")
        require(self.env == "bfcl" or self.demos >= 1, "--demos must be at least 1: the simulator has no end of tasks")
        self.out = self.out or ("runs/sft" if self.plain else "runs/rctp")
        self.epochs = self.epochs or (2 if self.plain else 5)


# ---------------------------------------------------------------------------------------------------------------------
# trajectories to learn from

def demonstrate(task, turns: list[list[Call]] | None = None):
    """Play given calls (default: the golden ones), one call a message, and close every turn in words -> the episode."""
    return replay(task, turns, closing=lambda calls: "Done." if calls else "I cannot do that yet.")


def _change(value, others: list, rng: random.Random):
    """Another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + rng.choice([-3, -2, -1, 1, 2, 3])
    if isinstance(value, list):
        return value[:-1] if value else ["none"]
    others = [other for other in others if other != value]
    return rng.choice(others) if others else f"{value}s"


def corrupt(task, rng: random.Random, turns: list[list[Call]] | None = None) -> tuple[str, list[list[Call]]]:
    """Calls per turn (the golden ones if None) with one realistic mistake more -> (kind of mistake, calls per turn).

    Kinds: drop (a call is forgotten), value (a wrong argument), tool (another tool of the list), missing (an argument
    is left out), repeat (a call made twice), swap (two values change places), invented (no such tool exists), early
    (the last turns get no calls), eager (calls one turn before they are possible). What the mistake is worth is for
    reward.py to say: some are harmless.
    """
    turns = task.golden if turns is None else turns
    turns = [[Call(call.name, dict(call.arguments)) for call in turn] for turn in turns]
    busy = [t for t, turn in enumerate(turns) if turn]
    if not busy:
        return "none", turns
    t = rng.choice(busy)
    i = rng.randrange(len(turns[t]))
    call = turns[t][i]
    values = [value for turn in task.golden for other in turn for value in other.arguments.values()]
    words = [value for value in values if isinstance(value, str)]
    words += [word.strip(".,?!") for word in " ".join(task.turns).split() if len(word) > 3]
    strings = [name for name, value in call.arguments.items() if isinstance(value, str)]
    kinds = ["drop", "tool", "repeat", "invented"] + (["value", "value", "missing"] if call.arguments else [])
    kinds += ["swap"] * (len(strings) > 1) + ["early"] * (len(busy) > 1)
    kinds += ["eager", "eager"] * (t > 0 and not turns[t - 1])
    kind = rng.choice(kinds)
    if kind == "drop":
        del turns[t][i]
    elif kind == "value":
        name = rng.choice(list(call.arguments))
        call.arguments[name] = _change(call.arguments[name], words, rng)
    elif kind == "tool":
        names = [tool["function"]["name"] for tool in task.episode().tools]
        turns[t][i] = call._replace(name=rng.choice([name for name in names if name != call.name] or ["help"]))
    elif kind == "missing":
        del call.arguments[rng.choice(list(call.arguments))]
    elif kind == "repeat":
        turns[t].insert(i, call)
    elif kind == "swap":
        a, b = rng.sample(strings, 2)
        call.arguments[a], call.arguments[b] = call.arguments[b], call.arguments[a]
    elif kind == "invented":
        turns[t][i] = call._replace(name="do_" + call.name.split("_")[-1])
    elif kind == "early":
        turns[t:] = [[] for _ in turns[t:]]
    elif kind == "eager":
        turns[t - 1], turns[t] = turns[t], []
    return kind, turns


def corrupted_failure(task, rng: random.Random, mistakes: int, tries: int = 20):
    """An episode with some mistakes whose computed reward is 0, or None if none came up (mistakes can be harmless)."""
    for _ in range(tries):
        turns = task.golden
        for _ in range(mistakes):
            turns = corrupt(task, rng, turns)[1]
        episode = demonstrate(task, turns)
        if trajectory_reward(episode).total == 0:
            return episode
    return None


def labelled(renderer: Renderer, episode, plain: bool = False) -> Trajectory:
    """A demonstrated episode as a trajectory under the reward token that its computed reward earns (plain: none)."""
    outcome = trajectory_reward(episode)
    token = None if plain else HIGH if outcome.total == 1 else LOW
    ids, mask = renderer.conversation(episode.messages, episode.task.episode().tools, token)
    return Trajectory(episode, ids, mask, [], token=token, outcome=outcome, reward=float(outcome.total))


def relabelled(renderer: Renderer, t: Trajectory, token: str | None) -> Trajectory:
    """The same trajectory under another reward token: the prompt is written again, what was said stays as it is."""
    start = t.episode.task.episode()
    before, prompt = (renderer.prompt(start.messages, start.tools, each) for each in (t.token, token))
    n = len(before)
    return replace(t, ids=prompt + t.ids[n:], mask=[False] * len(prompt) + t.mask[n:], token=token)


def sampled(sampler: Sampler, tasks: list, seed: int, reward: int, token: str | None, rounds=4) -> list[Trajectory]:
    """One episode a task with this reward, sampled without a token in `rounds` tries at most, put under `token`."""
    left, found = list(tasks), []
    for attempt in range(rounds):
        for t in sample(sampler, left, [None] * len(left), seed=(seed, attempt)) if left else []:
            if not t.truncated and t.reward == reward:
                found.append(relabelled(sampler.renderer, t, token))
                left.remove(t.episode.task)
    return found


def stage1_data(o: Options, renderer: Renderer, tasks: list, sampler: Sampler | None = None) -> list[Trajectory]:
    """RCTP data, successes and failures 1:1, each under the token of its computed reward; o.plain: successes alone."""
    rng = random.Random(f"stage1-{o.seed}")
    good = [labelled(renderer, demonstrate(task), o.plain) for task in tasks]
    if wrong := sum(t.reward != 1 for t in good):
        raise RuntimeError(f"{wrong} golden replays do not get R = 1")
    if o.plain:
        return good
    if o.failures == "policy":
        return good + sampled(sampler, tasks, o.seed, 0, LOW)
    failures = (corrupted_failure(task, rng, o.mistakes) for task in tasks)
    return good + [labelled(renderer, episode) for episode in failures if episode is not None]


# ---------------------------------------------------------------------------------------------------------------------
# learning

@dataclass
class Fit:
    """What fit() needs of a program's options."""
    lr: float
    epochs: int = 1
    batch: int = 16
    warmup: int = 50
    token_budget: int = 4096
    seed: int = 0
    row_speed: float = 1.0                  # learning rate of the reward tokens' rows over lr
    failure_weight: float = 1.0             # weight of a token in a failure


def fit(model, data: list[Trajectory], o, title: str, keeper: Keeper | None = None, log=lambda row: None):
    """Minimise the negative log-likelihood of the assistant's tokens, its mean over the whole step's tokens.

    o: Options or a Fit. keeper: goes on where an interrupted run was, logs, saves; without, a step's row goes to log.
    """
    optimizer = Optimizer(model, o.lr, betas=BETAS, row_speed=o.row_speed)
    per_epoch = -(-len(data) // o.batch)
    total = o.epochs * per_epoch
    log = keeper.log if keeper else log
    for step in keeper.steps(total, optimizer, title) if keeper else tqdm(range(total), desc=title, unit="step"):
        order = list(range(len(data)))
        random.Random(f"{o.seed}-{step // per_epoch}").shuffle(order)
        first = step % per_epoch * o.batch
        lr = o.lr * min(1.0, (step + 1) / max(1, o.warmup)) * (1 - step / total)
        log({"step": step + 1, **update(model, optimizer, [data[i] for i in order[first:first + o.batch]], lr, o)})


def update(model, optimizer: Optimizer, rows: list[Trajectory], lr: float, o) -> dict:
    """One optimizer step; one with NaN or infinity in the loss or the gradient changes no weight."""
    weight = [1.0 if row.reward else o.failure_weight for row in rows]
    normaliser = sum(w * row.sampled for w, row in zip(weight, rows))                    # before the first backward
    began, loss_sum, device = time.time(), 0.0, model.device
    for part in batches_by_length([len(row.ids) for row in rows], o.token_budget):
        ids = pad([rows[i].ids for i in part], 0, device)                                # (B, T)
        mask = pad([rows[i].mask for i in part], False, device)                          # (B, T)
        weights = torch.tensor([weight[i] for i in part], device=device)                 # (B,)
        loss = -(weights * token_logprobs(model, ids, mask).sum(1)).sum() / normaliser
        loss.backward()
        loss_sum += float(loss.detach())
    norm = optimizer.step(lr, CLIP_NORM) if math.isfinite(loss_sum) else optimizer.discard()
    seconds = time.time() - began
    return {"loss": loss_sum, "grad_norm": norm, "lr": lr, "tokens": sum(row.sampled for row in rows),
            "skipped": int(not math.isfinite(norm)), "seconds": seconds,
            "tok_s": sum(len(row.ids) for row in rows) / seconds}


def starting_policy(o: Options):
    """Model and tokenizer to start from, with the options that concern them."""
    device = o.torch_device()                                                            # an error before pretraining
    if o.model == "builtin":
        from builtin import pretrained                                                   # which learns by fit(), too
        require(resolved(o.base) != resolved(o.out), f"--base and --out are both {o.out}: give another --out")
        source = pretrained(o.base, o.base_seed)
    else:
        source = checkpoint_of(o.model)
    model, tokenizer = load_policy(source, device)
    o.prepare(model, o.seed)                                                             # LoRA, gradient checkpointing
    if o.schemas != "saved":
        tokenizer.init_kwargs["tool_schemas"] = o.schemas                                # part of the checkpoint
    return model, tokenizer


def within_context(examples: list[Trajectory], limit: int) -> list[Trajectory]:
    """The trajectories of at most `limit` tokens; prints how many there are. Raises UserError if none is left."""
    kept = [t for t in examples if len(t.ids) <= limit and t.sampled]
    if len(kept) < len(examples):
        print(f"dropped {len(examples) - len(kept)} of {len(examples)} trajectories: longer than {limit} tokens")
    require(len(kept) > 0, f"every trajectory is longer than {limit} tokens; use --schemas compact or a longer context")
    good = sum(t.reward == 1 for t in kept)
    print(f"{len(kept)} trajectories: {good} successes, {len(kept) - good} failures")
    return kept


def train(o: Options, builtin: bool, command: list[str], make_data=stage1_data, held_out=None):
    """Stage 1 into the run folder o.out. builtin: whether the model is the built-in one, or learned from it.

    command: its words, for messages. make_data(o, renderer, tasks, sampler) -> trajectories. held_out: tasks to measure
    success on; by default test tasks.
    """
    claim(o.out, o.resume, o.overwrite, o.model)                                         # before all that takes long
    tasks = load_tasks(o, "train", o.demos, seed=o.seed)
    held_out = held_out_tasks(o) if held_out is None else held_out
    model, tokenizer = starting_policy(o)
    sampler = Sampler(model, tokenizer, o.rows, o.max_message, o.max_messages)
    check_prompts(sampler, held_out)
    examples = make_data(o, sampler.renderer, tasks, sampler)                            # each under its reward token
    examples = within_context(examples, model.config.max_position_embeddings)
    stage, token = ("sft", "none") if o.plain else ("rctp", "high")
    config = run_config(o, stage, builtin, token, sampler, tasks[0])
    with (Run(o.out, config, o.resume, o.overwrite, command) as run,
          Keeper(run, model, tokenizer, o.save_every) as keeper):
        fit(model, examples, o, "SFT" if o.plain else "RCTP-FT", keeper)
        save_policy(model, tokenizer, run.folder / "checkpoint")
        if held_out:
            with keeper.interruptible():
                rollouts = play(sampler, held_out, seed=o.seed)
            run.write("episodes.jsonl", "".join(to_line(record(r)) for r in rollouts))
            rows = [verdict(r) for r in rollouts]
            print(f"held-out success ({len(held_out)} tasks, temperature 1)\n{table(rows)}")
            print(f"high minus low token: {100 * (rate(rows, token='high') - rate(rows, token='low')):.1f} points")
        run.finish()
    print(f"wrote {run.final}/ (checkpoint, config.json, metrics.jsonl, episodes.jsonl)")


def read_options(options_class, argv=None):
    """(options, whether the preset is the built-in model's): what a run in --model was made for goes on."""
    given = read_flags(options_class, argv)
    fresh = given.get("model", "builtin") == "builtin"
    made = {} if fresh else config_of(given["model"])
    builtin = fresh or made.get("builtin", False)
    tasks = {key: value for key, value in made.get("tasks", {}).items() if key in TASK_KEYS}
    return make_options(options_class, {**tasks, **given}, builtin), builtin


def main(argv=None):
    o, builtin = read_options(Options, argv)
    if o.pretrain:
        from builtin import pretrained
        print(f"the built-in base model is in {pretrained(o.base, o.base_seed)}")
    else:
        train(o, builtin, command_line("sft.py", argv))


if __name__ == "__main__":
    program(main)
