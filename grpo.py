"""GRPO for multi-turn tool calling: group advantages, the clipped loss with a KL term, and the training loop.

    python grpo.py                                       # SFT + GRPO, from runs/sft -> runs/grpo
    python grpo.py --init runs/rctp                      # RCTP-FT + GRPO: every rollout under the high token (--goal low: a control)

Implements, by the paper's equation numbers: (6) A_j = (R_j - mu_g) / (sigma_g + eps_stab) with the population standard
deviation over a group of G rollouts of one task; (8), (9) the token-level clipped surrogate and the KL to the frozen
reference, both under the rollout's own prompt. A rollout just has a prompt: which one is the choice of the function
`condition` that train() is given, and this is all that rcgrpo.py changes.

Departures from the usual GRPO and points where the paper is silent:
  1. One update per batch of rollouts by default; the old log-probs are then the current ones, detached, and the ratio is 1.
     With --updates > 1 they are recomputed by the trainer before the first update (the sampler's own differ by rounding).
  2. The normaliser belongs to the whole step: micro-batches do not change the gradient. --norm sequence is the paper's
     1/G sum_j 1/|tau_j| sum_t; --norm token weighs every token of the step alike.
  3. KL is the k3 estimator, continued along its tangent beyond a log-ratio of 10, so that a gap of 100 stays finite.
  4. Truncated episodes get reward 0. Groups whose rewards are all equal have exactly zero advantage (tested as max == min,
     not by dividing rounding noise by eps_stab); with beta > 0 they still pull towards the reference, unless --skip_flat.
  5. Everything random is a function of (seed, step): nothing but weights, moments and the step number is needed to resume (state.py).
  6. A step with NaN or infinity in a reward, the loss or the gradient changes nothing but its line in the metrics.
  7. What the rollouts of a group have in common, all up to the reward token, is computed once where that saves a quarter of the
     update's tokens (`micro_batches`). It changes no gradient.
"""
import json
import math
import os
import random
import time
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

import torch
from tqdm import tqdm

from evaluate import GOALS, TASK_KEYS, TaskOptions, check_prompts, fingerprint, load_tasks, outcome, play, rate, table
from lora import base_weights
from model import MemoryOptions, Optimizer, batches_by_length, load_policy, pad, reference_policy, save_policy, token_logprobs
from reward import trajectory_reward
from run import (Run, UserError, checkpoint_of, claim, command_line, config_of, make_options, option, program,
                 read_flags, read_json, require, require_package, within_memory)
from sampler import Sampler, Trajectory
from state import Keeper, weights_hash

RATIO_BOUND = 20.0         # log-ratios are cut here before exp: far outside any clip range
KL_BOUND = 10.0            # from here on k3 continues as its tangent
NAMES = {goal: name for name, goal in GOALS.items()}


@dataclass
class Options(MemoryOptions, TaskOptions):
    """The paper's values (second-hand, sources disagree: G 4 or 5, beta 0.05 or 0.1, lr 1e-5 or 1e-6) for pretrained models."""
    init: str = option("runs/sft", "where to start: run folder, checkpoint folder or hub name; it is the frozen reference too")
    out: str = option("runs/grpo", "run folder")
    steps: int = option(100, "training steps", builtin=40, least=1)
    tasks: int = option(8, "tasks in a step (P)", builtin=32, least=1)
    group: int = option(4, "rollouts of a task (G); one alone has no variance and teaches nothing", builtin=8, least=2)
    lr: float = option(1e-6, "learning rate", builtin=5e-4, above=0)
    warmup: int = option(10, "steps of linear warm-up; the rate is constant afterwards", least=0)
    beta: float = option(0.05, "weight of the KL to the reference policy", builtin=0.02, least=0)
    clip: float = option(0.2, "clip range of the ratio, symmetric", above=0)
    goal: str = option("auto", "grpo.py: token of all rollouts; auto: high after RCTP-FT, none after SFT", choices=("auto", *GOALS))
    pool: str = option("fresh", "sim: tasks to train on, fresh ones or the demonstrated ones of stage 1", choices=("fresh", "stage1"))
    updates: int = option(1, "updates on the same rollouts", least=1)
    norm: str = option("sequence", "loss normaliser over the whole step: sequence (1/N sum_j 1/len_j) or token (1/tokens)",
                       choices=("sequence", "token"))
    eps_stab: float = option(1e-4, "eps_stab of the advantages", least=0)
    temperature: float = option(1.0, "sampling temperature, the same in sampler and trainer", above=0)
    skip_flat: bool = option(False, "leave rollouts with zero advantage out of the update (saves time; drops their KL term)", builtin=True)
    weight_decay: float = option(0.0, "AdamW's weight decay", least=0)
    beta2: float = option(0.99, "AdamW's second beta", least=0, below=1)
    clip_norm: float = option(1.0, "gradient norm, at most", above=0)
    token_budget: int = option(16384, "tokens of one micro-batch, at most, padding included (at least one rollout)",
                               builtin=4096, least=1)
    rows: int = option(16, "episodes side by side in the sampler", builtin=256, least=1)
    max_message: int = option(512, "tokens of one assistant message, at most", builtin=64, least=1)
    max_messages: int = option(40, "assistant messages of one episode, at most", builtin=16, least=1)
    eval_tasks: int = option(40, "held-out tasks, before and after; 0: none", builtin=300, least=0)
    eval_part: str = option("test", "what before and after are measured on: a part of the split, or siblings (sim: other variants of stage 1's scenarios)",
                           choices=("validation", "test", "siblings"))
    save_every: int = option(10, "steps between saved states", least=1)
    max_skips: int = option(5, "steps in a row with NaN or infinity after which the run stops", least=1)
    resume: bool = option(False, "go on with the interrupted run in <out>.partial")
    overwrite: bool = option(False, "replace an older run in <out> when this one is complete, a stopped one at once")

    def check(self):
        require(self.env == "sim" or (self.pool == "fresh" and self.eval_part != "siblings"),
                "--pool and --eval_part siblings are the simulator's; bfcl always trains on its pool, and --split random tests on siblings")


# ---------------------------------------------------------------------------------------------------------------------
# the equations

def group_advantages(rewards: torch.Tensor, eps: float = 1e-4) -> torch.Tensor:
    """Eq. (6): (P, G) rewards -> (P, G) advantages (R - mean) / (population std + eps), in fp32.

    Equal rewards give exact zeros (Definition 4.1). Raises ValueError for G < 2 or a reward that is not finite.
    """
    rewards = torch.as_tensor(rewards, dtype=torch.float32)
    if rewards.dim() != 2 or rewards.shape[1] < 2:
        raise ValueError(f"rewards must be (tasks, group) with at least 2 rollouts a group, not {tuple(rewards.shape)}")
    if not torch.isfinite(rewards).all():
        raise ValueError("a reward is NaN or infinite")
    spread = rewards - rewards.mean(1, keepdim=True)                                     # (P, G)
    advantages = spread / (rewards.std(1, unbiased=False, keepdim=True) + eps)
    flat = rewards.amax(1, keepdim=True) == rewards.amin(1, keepdim=True)                # (P, 1)
    return advantages.masked_fill(flat, 0.0)


def clipped_loss(logp, old_logp, ref_logp, advantages, mask, clip: float, beta: float, weights=None):
    """Eq. (8), (9): the clipped surrogate minus beta * KL, summed over tokens with one weight per rollout.

    logp, old_logp, ref_logp: (B, T) fp32; ref_logp may be None if beta is 0. advantages: (B,); mask: (B, T) bool.
    weights: (B,), a rollout's share of the step's normaliser (loss_weights); default: the mean over this batch's tokens.
    Returns (loss, totals): totals are sums over this batch's tokens (kl, clipped, tokens), so that micro-batches add up.
    Whatever stands where mask is False, NaN included, changes nothing; an all-False mask gives 0, and backward works.
    """
    if weights is None:
        weights = torch.full_like(advantages, 1.0 / max(1, int(mask.sum())), dtype=torch.float32)
    logp, old_logp = logp.masked_fill(~mask, 0.0), old_logp.masked_fill(~mask, 0.0)      # fills, so NaN * 0 cannot arise
    advantages = advantages.float()[:, None]                                             # (B, 1)
    ratio = (logp - old_logp).clamp(-RATIO_BOUND, RATIO_BOUND).exp()                     # (B, T)
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    clipped = ((ratio > 1 + clip) & (advantages > 0)) | ((ratio < 1 - clip) & (advantages < 0))
    kl = torch.zeros_like(logp)
    if ref_logp is not None:
        gap = ref_logp.masked_fill(~mask, 0.0) - logp                                    # log of pi_ref / pi
        bounded, excess = torch.where(gap > KL_BOUND, KL_BOUND, gap), (gap - KL_BOUND).relu()    # tangent beyond the bound
        kl = bounded.expm1() - bounded + math.expm1(KL_BOUND) * excess
        objective = objective - beta * kl
    loss = -(weights[:, None] * objective * mask).sum()
    return loss, {"kl": float((kl.detach() * mask).sum()), "clipped": int((clipped & mask).sum()), "tokens": int(mask.sum())}


def loss_weights(lengths: torch.Tensor, norm: str) -> torch.Tensor:
    """(N,) sampled tokens of ALL rollouts of the step -> (N,) weight of each of their tokens in the loss."""
    lengths = lengths.float().clamp_min(1)
    if norm == "sequence":
        return 1.0 / (len(lengths) * lengths)
    return torch.full_like(lengths, 1.0 / float(lengths.sum()))


# ---------------------------------------------------------------------------------------------------------------------
# one step

@dataclass
class Credited(Trajectory):
    """A rollout to be learned from under another prompt of the same length; logprobs are those under the prompt that it was sampled with.

    ratio: the importance ratio is over these logprobs; if not, it is 1 before the first update, as for a rollout of its own prompt.
    """
    ratio: bool = False


def micro_batches(trajectories: list[Trajectory], used: list[int], group: int, budget: int) -> list[tuple[list[int], int]]:
    """The rollouts in use as micro-batches: (indices, number of leading tokens that these rollouts share and that are computed once).

    group: every `group` rollouts are of one task. They share their prompt where that saves a quarter of their tokens; less does
    not pay, since larger batches are faster. All other rollouts are batched by length. No micro-batch has more than `budget`
    tokens unless a single rollout does.
    """
    sharing, others = [], []
    for _, members in groupby(used, lambda i: i // group):
        members = list(members)
        rows = [trajectories[i] for i in members]
        shared = min(len(os.path.commonprefix([row.ids for row in rows])), *(row.mask.index(True) - 1 for row in rows))
        parts = batches_by_length([len(row.ids) - shared for row in rows], budget - shared)
        tokens = sum(shared + len(part) * (len(rows[part[-1]].ids) - shared) for part in parts)          # the last one is the longest
        if shared and 4 * tokens <= 3 * sum(len(row.ids) for row in rows):
            sharing += [([members[k] for k in part], shared) for part in parts]
        else:
            others += members
    return sharing + [([others[k] for k in part], 0) for part in batches_by_length([len(trajectories[i].ids) for i in others], budget)]


def update(model, reference, optimizer: Optimizer, trajectories: list[Trajectory], advantages: torch.Tensor, lr: float, o: Options, weights=None) -> dict:
    """o.updates optimizer steps on one batch of N rows, advantages (N,); returns what is to be logged.

    weights: (N,) share of a row's token in the loss, 0 where nothing is to be learned from it; default: all rows are the step's rollouts.
    """
    device = model.device
    if weights is None:
        weights = loss_weights(torch.tensor([t.sampled for t in trajectories]), o.norm)  # (N,): before any row is left out
    used = [i for i in range(len(trajectories)) if trajectories[i].sampled and weights[i] > 0
            and not ((o.skip_flat or o.beta == 0) and advantages[i] == 0)]
    batches = micro_batches(trajectories, used, o.group, o.token_budget)
    stats = {"loss": 0.0, "kl": 0.0, "clip_fraction": 0.0, "grad_norm": 0.0, "logprob_gap": 0.0, "logprob_gap_max": 0.0,
             "used_rollouts": len(used), "tokens_saved": 0.0, "skipped": 0}
    if not used:
        return stats                                                                     # nothing to learn from: no step
    stats["tokens_saved"] = sum(shared * (len(group) - 1) for group, shared in batches) / sum(len(trajectories[i].ids) for i in used)
    tensors, gaps = [], []
    for group, shared in batches:
        ids = pad([trajectories[i].ids for i in group], 0, device)                       # (B, T)
        mask = pad([trajectories[i].mask for i in group], False, device)                 # (B, T)
        sampled = pad([trajectories[i].logprobs for i in group], 0.0, device)            # (B, T)
        with torch.no_grad():
            old = token_logprobs(model, ids, mask, o.temperature, shared) if o.updates > 1 else None
            ref = None
            if o.beta > 0:
                with base_weights(reference):
                    ref = token_logprobs(reference, ids, mask, o.temperature, shared)
        own = mask & torch.tensor([[not isinstance(trajectories[i], Credited)] for i in group], device=device)  # (B, T)
        fixed = torch.tensor([getattr(trajectories[i], "ratio", False) for i in group], device=device)[:, None]            # (B, 1)
        tensors.append((group, shared, ids, mask, sampled, ref, old, own, fixed))
    for round_ in range(o.updates):
        totals = {"kl": 0.0, "clipped": 0, "tokens": 0}
        for group, shared, ids, mask, sampled, ref, old, own, fixed in tensors:
            logp = token_logprobs(model, ids, mask, o.temperature, shared)
            before = torch.where(fixed, sampled, logp.detach() if old is None else old)
            loss, part = clipped_loss(logp, before, ref, advantages[group].to(device), mask,
                                      o.clip, o.beta, weights[group].to(device))
            loss.backward()
            stats["loss"] += float(loss.detach()) / o.updates
            totals = {key: totals[key] + part[key] for key in totals}
            if round_ == 0:
                gaps.append((logp.detach() - sampled)[own].abs())
        stats["grad_norm"] = optimizer.step(lr, o.clip_norm) if math.isfinite(stats["loss"]) else optimizer.discard()
        stats["skipped"] += not math.isfinite(stats["grad_norm"])
    stats["kl"] = totals["kl"] / totals["tokens"]
    stats["clip_fraction"] = totals["clipped"] / totals["tokens"]
    gap = torch.cat(gaps)  # of rows under their own prompt; there may be none
    if len(gap):
        stats |= {"logprob_gap": float(gap.double().mean()), "logprob_gap_max": float(gap.max())}
    return stats


def share(flags) -> float | None:
    """Mean of booleans; None if there are none (JSON has no NaN)."""
    flags = list(flags)
    return sum(flags) / len(flags) if flags else None


def describe(labels: list[list], rewards: torch.Tensor, advantages: torch.Tensor, trajectories: list[Trajectory]) -> dict:
    """The step's rollouts in numbers: labels P lists of G prompts' tokens, rewards and advantages (P, G); every name stands in the README."""
    by = {name: [[r for label, r in zip(row, values) if label == goal] for row, values in zip(labels, rewards.tolist())]
          for name, goal in GOALS.items()}                                               # name -> P lists of rewards
    stats = {"reward": float(rewards.mean()),
             "zero_variance": share(min(row) == max(row) for row in rewards.tolist()),
             "advantage_gap": float((advantages.amax(1) - advantages.amin(1)).mean())}
    for name, groups in by.items():
        if any(groups):
            stats[f"reward_{name}"] = share(r for rows in groups for r in rows)
            stats[f"zero_variance_{name}"] = share(min(rows) == max(rows) for rows in groups if len(rows) > 1)
    if any(by["high"]) and any(by["low"]):
        stats["separation"] = stats["reward_high"] - stats["reward_low"]
        both = [(high, low) for high, low in zip(by["high"], by["low"]) if high and low]
        stats["high_fails_low_succeeds"] = share(max(high) == 0 and max(low) > 0 for high, low in both)
    tokens = sum(t.sampled for t in trajectories)
    turns = sum(sum(message["role"] == "user" for message in t.episode.messages) for t in trajectories)
    stats["entropy"] = -sum(sum(t.logprobs) for t in trajectories) / max(1, tokens)      # nats a token, estimated by the samples
    stats["calls_per_turn"] = sum(len(t.episode.calls) for t in trajectories) / turns
    stats["truncated"] = share(t.truncated for t in trajectories)
    stats["sampled_tokens"] = tokens
    return stats


# ---------------------------------------------------------------------------------------------------------------------
# the loop

def stage1_tasks(o: Options, n: int, shift: int = 0) -> list:
    """The first n tasks (0: all) that the run o.init has demonstrations of; shift: the same scenarios, other variants (load_tasks)."""
    config = config_of(o.init)
    made_by, regime = config.get("options", {}), config.get("tasks", {})
    require("demos" in made_by, f"--pool stage1 and --eval_part siblings need a run folder of sft.py in --init, not {o.init}")
    require(n <= made_by["demos"], f"--eval_tasks {n}: {o.init} has demonstrations of {made_by['demos']} scenarios only")
    require(shift == 0 or "," in o.categories, "--eval_part siblings: a single category has none")
    other = [f"--{key} was {was} there and is {now} now" for key, was in regime.items()
             if was != (now := getattr(o, key, was))]
    require(not other, f"--pool stage1 and siblings are the tasks of {o.init}: {'; '.join(other)}. Leave it out")
    return load_tasks(o, "train", n or made_by["demos"], made_by["seed"], shift)


def pick_tasks(o: Options, pool: list | None, step: int) -> list:
    """The P tasks of a step: fresh ones from the simulator (pool None), or the pool in an order shuffled every epoch."""
    if pool is None:
        return load_tasks(o, "train", o.tasks, seed=(o.seed + 1) * 100_000 + step)
    picked = []
    for k in range(step * o.tasks, (step + 1) * o.tasks):
        order = list(range(len(pool)))
        random.Random(f"{o.seed}-epoch-{k // len(pool)}").shuffle(order)
        picked.append(pool[order[k % len(pool)]])
    return picked


def figure(rows: list[dict], path: Path):
    """The paper's Figure 2 and what it leaves out: reward by token, zero-variance fraction, advantage gap over steps."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    panels = [("reward", ["reward", "reward_high", "reward_none", "reward_low"]),
              ("zero-variance fraction", ["zero_variance", "zero_variance_high", "zero_variance_none", "zero_variance_low"]),
              ("advantage gap", ["advantage_gap"])]
    fig, axes = plt.subplots(1, 3, figsize=(12, 3.4), layout="constrained")
    for axis, (title, names) in zip(axes, panels):
        for name in names:
            points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
            if points:
                axis.plot(*zip(*points), label=name, linewidth=2 if name == names[0] else 1)
        axis.set(title=title, xlabel="step")
        axis.legend(fontsize=7, frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
    fig.savefig(path, dpi=120)
    plt.close(fig)


def train(o: Options, condition, goals: tuple[str, ...], command: list[str], revise=None):
    """Train o.init with GRPO into o.out.

    condition(groups, group_size, seed) -> for each of P tasks a list of G tokens for the prompts (None: no token).
    goals: names of the prompts under which success is measured before and after. command: its words (run.command_line).
    revise(model, rollouts, labels, advantages, weights), one entry each for N rollouts -> rows, advantages and weights to learn from (update).
    """
    began, program_name, made = time.time(), Path(command[1]).name, config_of(o.init)
    claim(o.out, o.resume, o.overwrite, o.init)                          # before anything that takes long
    require_package("matplotlib", "figure.png of a run")
    device = o.torch_device()
    source = checkpoint_of(o.init)
    model, tokenizer = load_policy(source, device)
    o.prepare(model, o.seed)
    reference = reference_policy(model) if o.beta > 0 else None
    sampler = Sampler(model, tokenizer, o.rows, o.max_message, o.max_messages)
    pool = load_tasks(o, "train", 0, 0) if o.env != "sim" else stage1_tasks(o, 0) if o.pool == "stage1" else None
    first = pool or pick_tasks(o, None, 0)
    held_out = ([] if not o.eval_tasks else stage1_tasks(o, o.eval_tasks, shift=1) if o.eval_part == "siblings"
                else load_tasks(o, o.eval_part, o.eval_tasks, seed=10_000 + o.seed))
    config = {"stage": program_name, "builtin": made.get("builtin", False), "condition": made.get("condition"),
              "options": asdict(o), "tasks": {key: getattr(o, key) for key in TASK_KEYS},
              "hashes": {**fingerprint(o, sampler, first[0]), "policy": weights_hash(model)}}
    check_prompts(sampler, held_out + first)                                             # fails before anything is written
    optimizer = Optimizer(model, o.lr, betas=(0.9, o.beta2), weight_decay=o.weight_decay)
    with (Run(o.out, config, o.resume, o.overwrite, command) as run,
          Keeper(run, model, tokenizer, o.save_every, o.max_skips) as keeper):
        start = keeper.begin(optimizer)
        require(start <= o.steps, f"--steps {o.steps}: {start} are done already")
        resume = f"then {run.how}; what is done is in {run.folder}/"
        in_rollout, in_update = f"in a rollout: lower --rows, {resume}", f"in an update: lower --token_budget or add --grad_checkpoint, {resume}"
        if held_out and not start:
            with keeper.interruptible():
                before = within_memory(in_rollout, play, sampler, held_out, goals, seed=o.seed, title="success before")
            run.write("before.json", json.dumps([outcome(row) for row in before]))

        with tqdm(range(start, o.steps), desc=program_name, unit="step", initial=start, total=o.steps) as bar:
            for step in bar:
                clock = time.time()
                tasks = pick_tasks(o, pool, step)
                labels = condition(len(tasks), o.group, (o.seed, step))                  # P lists of G
                episodes = [task.episode() for task in tasks for _ in range(o.group)]    # AAABBB
                flat = [label for row in labels for label in row]                        # one a rollout
                prompts = [sampler.renderer.prompt(episode.messages, episode.tools, label) for episode, label in zip(episodes, flat)]
                trajectories = within_memory(in_rollout, sampler.rollout, episodes, prompts, o.temperature, seed=(o.seed, 1 + step))
                outcomes = [trajectory_reward(episode) for episode in episodes]
                rewards = torch.tensor([0.0 if t.truncated else float(r.total) for t, r in zip(trajectories, outcomes)]).view(len(tasks), o.group)
                advantages = (group_advantages(rewards, o.eps_stab) if rewards.isfinite().all()
                              else torch.full_like(rewards, math.nan))                   # (P, G); with NaN the update is left out
                sampled_at = time.time()
                lr = o.lr * min(1.0, (step + 1) / max(1, o.warmup))
                rows, scores, weights = trajectories, advantages.view(-1), loss_weights(torch.tensor([t.sampled for t in trajectories]), o.norm)
                if revise:
                    rows, scores, weights = revise(model, rows, flat, scores, weights)
                row = {"step": step + 1, **describe(labels, rewards, advantages, trajectories),
                       **within_memory(in_update, update, model, reference, optimizer, rows, scores, lr, o, weights), "lr": lr}
                row |= {"sample_seconds": sampled_at - clock, "update_seconds": time.time() - sampled_at,
                        "tok_s": sum(len(t.ids) for t in trajectories) / (time.time() - clock)}
                run.append("metrics.jsonl", row)
                run.append("episodes.jsonl", *(
                    {"step": step + 1, "task": t.episode.task.id, "category": t.episode.task.category, "group": i // o.group, "goal": NAMES[label],
                     "reward": float(rewards.view(-1)[i]), "state": r.state, "action": r.action, "advantage": float(advantages.view(-1)[i]),
                     "truncated": t.truncated, "messages": t.messages}
                    for i, (t, r, label) in enumerate(zip(trajectories, outcomes, flat))))
                bar.set_postfix(reward=f"{row['reward']:.2f}", zero_var=f"{row['zero_variance']:.2f}", kl=f"{row['kl']:.3f}",
                                tok_s=f"{row['tok_s']:.0f}", **keeper.shown(row["skipped"]), refresh=False)
                keeper.done(row["skipped"], last=step + 1 == o.steps)

        save_policy(model, tokenizer, run.folder / "checkpoint")
        metrics = run.rows("metrics.jsonl")
        figure(metrics, run.folder / "figure.png")
        with keeper.interruptible():
            after = within_memory(in_rollout, play, sampler, held_out, goals, seed=o.seed, title="success after") if held_out else []
        report(o, run, metrics, after, len(held_out))
        run.finish()
    print(f"{time.time() - began:.0f} s; wrote {run.final}/ "
          "(checkpoint, config.json, metrics.jsonl, episodes.jsonl, figure.png)")


def report(o: Options, run: Run, metrics: list[dict], after: list[dict], n: int):
    """Print success before and after with intervals, and what the groups looked like."""
    if after:
        before = read_json(run.folder / "before.json")
        run.write("after.json", json.dumps([outcome(row) for row in after]))
        print(f"held-out success ({n} {o.eval_part} tasks, temperature 1), before\n{table(before)}\nafter\n{table(after)}")
        for goal in dict.fromkeys(row["goal"] for row in after):
            print(f"change under {goal}: {100 * (rate(after, goal=goal) - rate(before, goal=goal)):+.1f} points")
    for name in ("zero_variance", "advantage_gap", "separation"):
        values = [row[name] for row in metrics if row.get(name) is not None]
        if values:
            k = min(10, len(values))
            print(f"{name:>16}: first {k} steps {sum(values[:k]) / k:.3f}, last {k} steps {sum(values[-k:]) / k:.3f}")


def inherit(options_class, argv, default_init: str):
    """Options of an RL program: the tasks and the preset are those of the run that it starts from, unless flags say otherwise."""
    given = read_flags(options_class, argv)
    config = config_of(given.get("init", default_init))
    tasks = {key: value for key, value in config.get("tasks", {}).items() if key in TASK_KEYS}
    return make_options(options_class, {**tasks, **given}, config.get("builtin", False)), config


def main(argv=None):
    o, config = inherit(Options, argv, "runs/sft")
    goal = GOALS[(config.get("condition") or "none") if o.goal == "auto" else o.goal]    # RCTP-FT runs: the high token throughout
    train(o, lambda groups, group_size, seed: [[goal] * group_size for _ in range(groups)], tuple(GOALS),
          command_line("grpo.py", argv))


if __name__ == "__main__":
    program(main)
