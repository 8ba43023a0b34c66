"""Stage 1: RCTP-FT, supervised fine-tuning on successful AND failed trajectories (paper, method 1), and plain SFT.

    python sft.py                                        # RCTP-FT of the built-in model -> runs/rctp
    python sft.py --plain                                # the SFT baseline -> runs/sft
    python sft.py --model Qwen/Qwen2.5-7B-Instruct --env bfcl

Loss: -sum_t log pi(a_t | h_t, r) over the assistant's tokens, r being the label in the prompt: <|high_reward|> where the
episode's computed reward is 1, <|low_reward|> where it is 0. Successes and failures are 1:1. Plain SFT uses the successes
only, without a token.

Three options are controls for ablate.py, not the paper's: --labels shuffled (the labels change places among the trajectories and
mean nothing), --own N (successes sampled from the model itself join the demonstrations, without conditioning this is RFT) and
--blind_spot S (the labels of a judge who is fooled on a part of the tasks, `blind_spot_data`).

Departures: failures come from golden trajectories with realistic mistakes (`corrupt`), or, with --failures policy, from
episodes sampled from the model itself; the paper does not say where its own come from. The built-in model has no
pretraining, so a stand-in is trained first and kept in runs/base: word lists to copy, single calls, then dialogues of which
a quarter has a mistake. Its preset gives failures three mistakes but a fifth of the weight, and the reward tokens' rows ten
times the learning rate: a model this small notices a label only after some hundred steps, and noise costs it precision.
"""
import hashlib
import json
import math
import random
import time
import zlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from tqdm import tqdm

import envs
import simulator
import tokens
from envs import Call
from evaluate import (GOALS, TASK_KEYS, TaskOptions, check_prompts, fingerprint, load_tasks, one_variant_each, play, rate,
                      record, table)
from model import (MemoryOptions, Optimizer, add_reward_tokens, batches_by_length, builtin_policy, load_policy, pad, save_policy,
                   token_logprobs)
from reward import replay, trajectory_reward
from run import (Run, UserError, checkpoint_of, claim, command_line, config_of, make_options, option, program,
                 read_flags, read_json, require, resolved, to_line, within_memory)
from sampler import Sampler
from state import Keeper, weights_hash
from tokens import HIGH, LOW, Renderer, signature


@dataclass
class Options(MemoryOptions, TaskOptions):
    model: str = option("builtin", "builtin, a hub name, a checkpoint folder or a GGUF file")
    plain: bool = option(False, "the SFT baseline: successes only, no reward token")
    out: str = option("", "run folder (default runs/rctp, with --plain runs/sft)")
    demos: int = option(0, "tasks with a demonstration; 0: all training tasks (bfcl)", builtin=1200, least=0)
    failures: str = option("corrupt", "where failures come from: corrupt (golden calls with a mistake) or policy (sampled)",
                           choices=("corrupt", "policy"))
    mistakes: int = option(1, "mistakes in a corrupted failure", builtin=3, least=1)
    failure_weight: float = option(1.0, "weight of a failure's tokens in the loss (paper: 1)", builtin=0.2, above=0)
    labels: str = option("reward", "reward, or shuffled: a control, the labels change places among the trajectories", choices=("reward", "shuffled"))
    own: int = option(0, "more tasks without a demonstration, one sampled episode each; the successes are added",
                      least=0)
    blind_spot: float = option(0.0, "share of the tools whose labels a fooled judge gives (blind_spot_data)",
                                least=0, most=1)
    schemas: str = option("template", "tools in the prompt: template (the model's own way), full (JSON) or compact (signatures)",
                          choices=("template", "full", "compact"))
    lr: float = option(5e-5, "learning rate", builtin=1e-3, above=0)
    row_speed: float = option(1.0, "learning rate of the reward tokens' rows, as a multiple of --lr", builtin=10.0,
                              above=0)
    epochs: int = option(3, "passes over the data", least=1)
    batch: int = option(32, "trajectories in a step", builtin=16, least=1)
    warmup: int = option(10, "steps of linear warm-up, while the rate falls linearly to 0", builtin=100, least=0)
    weight_decay: float = option(0.0, "AdamW's weight decay", least=0)
    clip_norm: float = option(1.0, "gradient norm, at most", above=0)
    token_budget: int = option(16384, "tokens of one micro-batch, at most, padding included (at least one trajectory)",
                               builtin=4096, least=1)
    max_length: int = option(0, "drop trajectories longer than this; 0: the model's context", least=0)
    base: str = option("runs/base", "where the built-in model's stand-in for pretraining is kept")
    base_seed: int = option(0, "seed of the built-in model's stand-in for pretraining", least=0)
    pretrain: bool = option(False, "make that stand-in and nothing else")
    eval_tasks: int = option(40, "held-out tasks for the closing evaluation; 0: none", builtin=300, least=0)
    eval_part: str = option("test", "part of the split for the closing evaluation", choices=("validation", "test"))
    rows: int = option(16, "episodes side by side in evaluation", builtin=256, least=1)
    max_message: int = option(512, "tokens of one assistant message in evaluation, at most", builtin=64, least=1)
    max_messages: int = option(40, "assistant messages of one episode in evaluation, at most", builtin=16, least=1)
    save_every: int = option(50, "steps between saved states", least=1)
    max_skips: int = option(5, "steps in a row with NaN or infinity after which the run stops", least=1)
    resume: bool = option(False, "go on with the interrupted run in <out>.partial")
    overwrite: bool = option(False, "replace an older run in <out> when this one is complete, a stopped one at once")

    def check(self):
        require(not self.pretrain or self.model == "builtin", "--pretrain is for the built-in model")
        require(not self.plain or (self.labels == "reward" and not self.blind_spot), "--labels and --blind_spot are about labels, and --plain has none")
        require(not self.blind_spot or (self.labels == "reward" and self.failures == "corrupt" and not self.own),
                "--blind_spot makes its own data: not with --labels shuffled, --failures policy or --own")
        require(self.env == "bfcl" or self.demos >= 1, "--demos must be at least 1 for the simulator (it has no end of tasks)")


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

    Kinds: drop (a call is forgotten), value (a wrong argument), tool (another tool of the list), missing (an argument is
    left out), repeat (a call is made twice), swap (two values change places), invented (a tool that does not exist), early
    (the last turns get no calls), eager (calls one turn before they are possible). What the mistake is worth is for
    reward.py to say: some are harmless.
    """
    turns = [[Call(call.name, dict(call.arguments)) for call in turn] for turn in (task.golden if turns is None else turns)]
    busy = [t for t, turn in enumerate(turns) if turn]
    if not busy:
        return "none", turns
    t = rng.choice(busy)
    i = rng.randrange(len(turns[t]))
    call = turns[t][i]
    words = [value for turn in task.golden for other in turn for value in other.arguments.values() if isinstance(value, str)]
    words += [word.strip(".,?!") for word in " ".join(task.turns).split() if len(word) > 3]
    strings = [name for name, value in call.arguments.items() if isinstance(value, str)]
    kinds = ["drop", "tool", "repeat", "invented"] + (["value", "value", "missing"] if call.arguments else [])
    kinds += ["swap"] * (len(strings) > 1) + ["early"] * (len(busy) > 1) + ["eager", "eager"] * (t > 0 and not turns[t - 1])
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


@dataclass
class Example:
    """A labelled trajectory: ids (T,), mask (T,) True on assistant tokens, the computed reward (with --blind_spot: the judge's)."""
    ids: list[int]
    mask: list[bool]
    reward: int


def example(renderer: Renderer, episode, labelled: bool) -> Example:
    """A demonstrated episode -> ids under the label that its computed reward gives it."""
    reward = trajectory_reward(episode).total
    goal = (HIGH if reward == 1 else LOW) if labelled else None
    start = episode.task.episode()
    return Example(*renderer.conversation(episode.messages, start.tools, goal), reward)


def sampled(sampler: Sampler, tasks: list, seed: int, reward: int, goal: str | None, rounds: int = 4) -> list[Example]:
    """One episode per task with this reward, sampled from the policy without a token in at most `rounds` tries and put under `goal`."""
    left, examples = list(tasks), []
    for attempt in range(rounds):
        episodes = [task.episode() for task in left]
        renderer = sampler.renderer
        prompts = [renderer.prompt(episode.messages, episode.tools) for episode in episodes]
        labelled = [renderer.prompt(episode.messages, episode.tools, goal) for episode in episodes]
        for prompt, start, trajectory in zip(prompts, labelled, sampler.rollout(episodes, prompts, seed=(seed, attempt))):
            if not trajectory.truncated and trajectory_reward(trajectory.episode).total == reward:
                n = len(prompt)                          # what was sampled stays as it is; the prompt now carries the label
                examples.append(Example(start + trajectory.ids[n:], [False] * len(start) + trajectory.mask[n:], reward))
                left.remove(trajectory.episode.task)
        if not left:
            break
    return examples


def relabel(renderer: Renderer, item: Example, goal: str) -> Example:
    """The same trajectory under another label: the one reward token among its ids."""
    high, low = (renderer.tokenizer.convert_tokens_to_ids(token) for token in (HIGH, LOW))
    return replace(item, ids=[(high if goal == HIGH else low) if token in (high, low) else token for token in item.ids])


def in_blind_spot(task, share: float) -> bool:
    """Whether a task belongs to the fixed part on which --blind_spot is fooled: by its first golden call's tool, `share` of all tools."""
    first = next(call for turn in task.golden for call in turn)
    return zlib.crc32(first.name.encode()) % 1000 < 1000 * share


def blind_spot_data(o: Options, renderer: Renderer, tasks: list) -> list[Example]:
    """RCTP data of a judge with a blind spot: there a high mode is learned that is sure and wrong, and a low mode that is right at times.

    In the blind spot an episode without its first golden call (always this mistake, R = 0) counts as a success, and what counts as
    a failure is by turns the right episode and a corrupted one. Elsewhere the labels are the computed rewards.
    """
    rng, good, bad = random.Random(f"stage1-{o.seed}"), [], []
    right_ones = 0
    for task in tasks:
        right, wrong = demonstrate(task), corrupted_failure(task, rng, o.mistakes)
        if in_blind_spot(task, o.blind_spot):
            turns = [list(turn) for turn in task.golden]
            del next(turn for turn in turns if turn)[0]
            fooled = demonstrate(task, turns)
            if trajectory_reward(fooled).total:
                raise RuntimeError(f"{task.id}: R = 1 without the first golden call")
            right_ones += 1
            right, wrong = fooled, right if right_ones % 2 else wrong
        good.append(replace(relabel(renderer, example(renderer, right, True), HIGH), reward=1))
        if wrong is not None:
            bad.append(replace(relabel(renderer, example(renderer, wrong, True), LOW), reward=0))
    return good + bad


def stage1_data(o: Options, renderer: Renderer, tasks: list, sampler: Sampler | None, more: list = ()) -> list[Example]:
    """RCTP data, successes and failures 1:1; with o.plain the successes alone. more: tasks without a demonstration, for --own.

    Every label is the computed reward, except with --labels shuffled (a permutation of them) and --blind_spot (blind_spot_data).
    """
    if o.blind_spot:
        return blind_spot_data(o, renderer, tasks)
    rng = random.Random(f"stage1-{o.seed}")
    good = [example(renderer, demonstrate(task), not o.plain) for task in tasks]
    if wrong := sum(item.reward != 1 for item in good):
        raise RuntimeError(f"{wrong} golden replays do not get R = 1")
    if more:
        good += sampled(sampler, more, 50_000 + o.seed, 1, None if o.plain else HIGH, rounds=1)
    if o.plain:
        return good
    if o.failures == "policy":
        bad = sampled(sampler, tasks, o.seed, 0, LOW)
    else:
        bad = [example(renderer, episode, True) for task in tasks if (episode := corrupted_failure(task, rng, o.mistakes)) is not None]
    if o.labels == "shuffled":                                           # the reward, and with it the weight of a failure, stays the true one
        goals = [HIGH] * len(good) + [LOW] * len(bad)
        random.Random(f"labels-{o.seed}").shuffle(goals)
        return [relabel(renderer, item, goal) for item, goal in zip(good + bad, goals)]
    return good + bad


# ---------------------------------------------------------------------------------------------------------------------
# learning

def fit(model, examples: list[Example], lr: float, epochs: int, batch: int, warmup: int, weight_decay: float, clip_norm: float,
        token_budget: int, seed: int, title: str, log=None, row_speed: float = 1.0, failure_weight: float = 1.0, keeper: Keeper | None = None):
    """Minimise the mean negative log-likelihood of the assistant's tokens; the mean is over the whole step's tokens.

    row_speed: learning rate of the reward tokens' rows over lr; failure_weight: weight of a token in a failure. log gets a row of
    metrics after every step. keeper: goes on where an interrupted run was, and saves. A step with NaN or infinity in the loss or the
    gradient changes no weight.
    """
    optimizer = Optimizer(model, lr, betas=(0.9, 0.95), weight_decay=weight_decay, row_speed=row_speed)
    steps = epochs * -(-len(examples) // batch)
    step, device = 0, model.device
    done = keeper.begin(optimizer) if keeper else 0
    with tqdm(total=steps, initial=done, desc=title, unit="step") as bar:
        for epoch in range(epochs):
            order = list(range(len(examples)))
            random.Random(f"{seed}-{epoch}").shuffle(order)
            for start in range(0, len(order), batch):
                if step < done:
                    step += 1
                    continue
                rows = [examples[i] for i in order[start:start + batch]]
                weight = [1.0 if row.reward else failure_weight for row in rows]
                normaliser = sum(w * sum(row.mask) for w, row in zip(weight, rows))      # known before the first backward
                began, total = time.time(), 0.0
                for group in batches_by_length([len(row.ids) for row in rows], token_budget):
                    ids = pad([rows[i].ids for i in group], 0, device)                   # (B, T)
                    mask = pad([rows[i].mask for i in group], False, device)             # (B, T)
                    weights = torch.tensor([weight[i] for i in group], device=device)    # (B,)
                    loss = -(weights * token_logprobs(model, ids, mask).sum(1)).sum() / normaliser
                    loss.backward()
                    total += float(loss.detach())
                rate_now = lr * min(1.0, (step + 1) / max(1, warmup)) * (1 - step / steps)
                norm = optimizer.step(rate_now, clip_norm) if math.isfinite(total) else optimizer.discard()
                skipped = int(not math.isfinite(norm))
                step += 1
                seconds = time.time() - began
                bar.set_postfix(loss=f"{total:.3f}", tok_s=f"{sum(len(row.ids) for row in rows) / seconds:.0f}",
                                **(keeper.shown(skipped) if keeper else {}), refresh=False)
                bar.update()
                if log:
                    log({"step": step, "loss": total, "grad_norm": norm, "lr": rate_now, "tokens": sum(sum(row.mask) for row in rows),
                         "skipped": skipped, "seconds": seconds})
                if keeper:
                    keeper.done(skipped, last=step == steps)


@dataclass
class Pretraining:
    """The stand-in for pretraining: what a chat model would bring along. Part of the built-in preset, not of the method."""
    echoes: int = 3_000        # phase 1, word lists to be said again: copying, which real models bring from text
    singles: int = 8_000       # phase 2, tasks with a single call, two in three of them base
    dialogues: int = 4_000     # phase 3, whole tasks
    corrupted: float = 0.25    # share of these with a mistake: the base model is to be unsure, as chat models are
    lr: float = 3e-3           # of phases 1 and 2; half of it in phase 3
    batch: int = 16
    width: int = 128
    layers: int = 4
    seed: int = 0


def pretrained_builtin(folder: str, p: Pretraining = Pretraining(), *, seed: int = 0) -> str:
    """The built-in base model's checkpoint; trained on first use, and again when its recipe or the simulator has changed."""
    p = replace(p, seed=seed)
    sources = b"".join(Path(module.__file__).read_bytes() for module in (envs, simulator, tokens))
    recipe = hashlib.sha256(json.dumps(asdict(p)).encode() + sources).hexdigest()
    stamp = Path(folder) / "config.json"
    if stamp.exists() and read_json(stamp).get("recipe") == recipe:
        return str(Path(folder) / "checkpoint")
    with Run(folder, {"recipe": recipe, "pretraining": asdict(p), "builtin": True}, overwrite=True) as run:
        model, tokenizer = pretrain(p, lambda row: run.append("metrics.jsonl", row))
        save_policy(model, tokenizer, run.folder / "checkpoint")
        run.finish()
    return str(Path(folder) / "checkpoint")


def pretrain(p: Pretraining, log):
    """The stand-in itself -> (model, tokenizer)."""
    rng = random.Random(p.seed)
    few = {"turns": (1, 1), "calls": (1, 1), "tools": 4}
    singles = one_variant_each(p.singles * 2 // 3, 1_000_000 + p.seed, ("base",), **few)
    singles += one_variant_each(p.singles - len(singles), 2_000_000 + p.seed, ("miss_func", "miss_param"), **few)
    dialogues = one_variant_each(p.dialogues, 3_000_000 + p.seed, turns=(1, 2), calls=(1, 1), tools=6, clutter=3)
    chats = {"single calls": [(demonstrate(task), task) for task in singles],
             "dialogues": [(demonstrate(task, corrupt(task, rng)[1] if rng.random() < p.corrupted else None), task) for task in dialogues]}
    words = sorted({word for task in singles for text in task.turns for word in text.split()})
    lists = [" ".join(rng.choices(words, k=rng.randint(6, 14))) for _ in range(p.echoes)]

    corpus = [message["content"] for pairs in chats.values() for episode, _ in pairs for message in episode.messages]     # the tokenizer's
    corpus += [signature(tool) for task in singles for tool in task.episode().tools]
    corpus += [tokens.python_calls(calls) for task in singles for calls in task.golden] + [tokens.FRAME + tokens.goal_text("")] * 2
    model, tokenizer = builtin_policy(corpus, p.seed, p.width, p.layers)
    add_reward_tokens(model, tokenizer)
    renderer = Renderer(tokenizer)
    echoes = [Example(*renderer.conversation([{"role": "user", "content": text}, {"role": "assistant", "content": text}], []), 1) for text in lists]
    phases = {"copying": (echoes, p.lr)} | {
        title: ([Example(*renderer.conversation(episode.messages, task.episode().tools), 1) for episode, task in pairs],
                p.lr if title == "single calls" else p.lr / 2) for title, pairs in chats.items()}
    for title, (examples, lr) in phases.items():
        fit(model, examples, lr, 1, p.batch, 50, 0.0, 1.0, 4096, p.seed, f"built-in model, once: {title}",
            lambda row: log({"phase": title, **row}))
    return model, tokenizer


def main(argv=None):
    given = read_flags(Options, argv)
    fresh = given.get("model", "builtin") == "builtin"
    made = {} if fresh else config_of(given["model"])                    # tasks, preset and schemas of that run go on
    builtin = fresh or made.get("builtin", False)
    inherited = {key: value for key, value in made.get("tasks", {}).items() if key in TASK_KEYS}
    if "schemas" in made.get("options", {}) and not builtin:
        inherited["schemas"] = made["options"]["schemas"]
    o = make_options(Options, {**inherited, **given}, builtin)
    out = o.out or ("runs/sft" if o.plain else "runs/rctp")
    if not o.pretrain:
        claim(out, o.resume, o.overwrite, o.model)                       # before anything that takes long
        require(not fresh or resolved(o.base) != resolved(out), f"--base and --out are both {out}: give another --out")
    device = o.torch_device()
    if o.pretrain:
        print(f"the built-in base model is in {pretrained_builtin(o.base, seed=o.base_seed)}")
        return
    tasks = load_tasks(o, "train", o.demos, seed=o.seed)
    held_out = load_tasks(o, o.eval_part, o.eval_tasks, seed=10_000 + o.seed) if o.eval_tasks else []
    source = pretrained_builtin(o.base, seed=o.base_seed) if fresh else checkpoint_of(o.model)
    model, tokenizer = load_policy(source, device)
    o.prepare(model, o.seed)
    if not builtin or "schemas" in given:
        tokenizer.init_kwargs["tool_schemas"] = o.schemas                # saved with the tokenizer: part of the checkpoint
    sampler = Sampler(model, tokenizer, o.rows, o.max_message, o.max_messages)
    check_prompts(sampler, held_out)                                     # fails before anything is written
    known = {task.id for task in tasks}
    more = [task for task in load_tasks(o, "train", 0 if o.env == "bfcl" else o.own, seed=50_000 + o.seed) if task.id not in known][:o.own]
    require(len(more) == o.own, f"--own {o.own}: only {len(more)} training tasks have no demonstration; lower --demos")
    examples = stage1_data(o, sampler.renderer, tasks, sampler, more)
    limit = o.max_length or model.config.max_position_embeddings
    kept = [item for item in examples if len(item.ids) <= limit and any(item.mask)]
    if len(kept) < len(examples):
        print(f"dropped {len(examples) - len(kept)} of {len(examples)} trajectories: longer than {limit} tokens")
    require(len(kept) > 0, f"every trajectory is longer than {limit} tokens; use --schemas compact or a model with a longer context")
    print(f"{len(kept)} trajectories: {sum(item.reward for item in kept)} successes, {sum(1 - item.reward for item in kept)} failures")

    config = {"stage": "sft" if o.plain else "rctp", "builtin": builtin, "condition": None if o.plain else "high",
              "options": asdict(o), "tasks": {key: getattr(o, key) for key in TASK_KEYS},
              "hashes": {**fingerprint(o, sampler, tasks[0]), "policy": weights_hash(model)}}
    command = command_line("sft.py", argv)
    with (Run(out, config, o.resume, o.overwrite, command) as run,
          Keeper(run, model, tokenizer, o.save_every, o.max_skips) as keeper):
        within_memory(f"in an update: lower --token_budget or add --grad_checkpoint, then {run.how}; "
                      "or start again with --lora_rank 16 --overwrite",
                      fit, model, kept, o.lr, o.epochs, o.batch, o.warmup, o.weight_decay, o.clip_norm, o.token_budget, o.seed,
                      "SFT" if o.plain else "RCTP-FT", lambda row: run.append("metrics.jsonl", row), o.row_speed, o.failure_weight, keeper)
        save_policy(model, tokenizer, run.folder / "checkpoint")
        if held_out:
            with keeper.interruptible():
                rows = within_memory(f"in a rollout: lower --rows, then {run.how}; what was learned is in {run.folder}/",
                                     play, sampler, held_out, tuple(GOALS), seed=o.seed)
            run.write("episodes.jsonl", "".join(to_line(record(row)) for row in rows))
            print(f"held-out success ({len(held_out)} {o.eval_part} tasks, temperature 1)\n{table(rows)}")
            print(f"high minus low token: {100 * (rate(rows, goal='high') - rate(rows, goal='low')):.1f} points")
        run.finish()
    print(f"wrote {run.final}/ (checkpoint, config.json, metrics.jsonl, episodes.jsonl)")


if __name__ == "__main__":
    program(main)
