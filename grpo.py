"""GRPO for multi-turn tool calling: group advantages, the clipped loss with a KL term, and the training loop.

    python grpo.py                                       # SFT + GRPO, from runs/sft -> runs/grpo
    python grpo.py --init runs/rctp                      # RCTP-FT + GRPO: every rollout under the high token

Implements, by the paper's equation numbers: (6) A_j = (R_j - mu_g) / (sigma_g + eps_stab) with the population standard
deviation over a group of G rollouts of one task; (8), (9) the token-level clipped surrogate and the KL to the frozen
reference, both under the rollout's own prompt. A rollout just has a prompt: which one is the choice of the function
`condition` that train() is given, and this is all that rcgrpo.py changes.

Departures from the usual GRPO and points where the paper is silent:
  1. One update per batch of rollouts by default; the old log-probs are then the current ones, detached, and the ratio
     is 1. With --updates > 1 the trainer computes them before the first update (the sampler's differ by rounding).
  2. The normaliser belongs to the whole step: micro-batches do not change the gradient. --norm sequence is the paper's
     1/G sum_j 1/|tau_j| sum_t; --norm token weighs every token of the step alike.
  3. KL is the k3 estimator, continued along its tangent beyond a log-ratio of 10, so that a gap of 100 stays finite.
  4. Groups whose rewards are all equal have exactly zero advantage (tested as max == min, not by dividing rounding
     noise by eps_stab). With beta > 0 they still pull towards the reference, unless --skip_flat leaves them out.
  5. Everything random is a function of (seed, step): to resume needs weights, moments and the step number (state.py).
  6. A step with NaN or infinity in a reward, the loss or the gradient changes nothing but its line in the metrics.
  7. What the rollouts of a group have in common, all up to the reward token, is computed once where that saves a
     quarter of the update's tokens (`plan_micro_batches`). It changes no gradient.
"""
import json
import math
import os
import random
import time
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch

from evaluate import (CONDITIONS, TASK_KEYS, TaskOptions, check_prompts, held_out_tasks, load_tasks, play, rate, record,
                      run_config, sample, table, verdict)
from lora import base_weights
from model import (MemoryOptions, Optimizer, batches_by_length, load_policy, pad, reference_policy, save_policy,
                   token_logprobs)
from run import (COLOURS, Run, checkpoint_of, claim, command_line, config_of, data, make_options, memory, method,
                 optimisation, program, read_flags, read_json, require_package, running)
from sampler import Sampler, Trajectory
from state import Keeper

EPS_STAB = 1e-4            # of the advantages
BETAS = (0.9, 0.99)        # of AdamW
CLIP_NORM = 1.0            # of the gradient
RATIO_BOUND = 20.0         # log-ratios are cut here before exp: far outside any clip range
KL_BOUND = 10.0            # from here on k3 continues as its tangent


@dataclass
class Options(MemoryOptions, TaskOptions):
    """Defaults for pretrained models: the paper's (appendix, tables 10 and 12), where it gives them."""
    group: int = method(5, "rollouts of a task (G, table 10); one alone has no variance", builtin=8, least=2)
    beta: float = method(0.1, "weight of the KL to the reference policy (table 10)", builtin=0.02, least=0)
    clip: float = method(0.2, "clip range of the ratio, symmetric (table 10)", above=0)
    temperature: float = method(1.0, "of sampler and trainer (the paper gives none)", above=0)
    norm: str = method("sequence", "loss normaliser of the step: sequence (1/N sum_j 1/len_j) or token (1/tokens)",
                       choices=("sequence", "token"))
    updates: int = method(1, "updates on the same rollouts", least=1)
    skip_flat: bool = method(False, "leave rollouts with zero advantage out (drops their KL, too)", builtin=True)
    tasks: int = data(51, "tasks in a step (P); table 12 has a batch of 256 for RC-GRPO, 64 for GRPO, without a unit: "
                      "taken as rollouts, and the same for both", builtin=32, least=1)
    eval_tasks: int = data(80, "held-out tasks, before and after; 0: none", builtin=300, least=0)
    steps: int = optimisation(400, "training steps (table 12: epochs)", builtin=40, least=1)
    lr: float = optimisation(1e-6, "learning rate (table 12)", builtin=5e-4, above=0)
    warmup: int = optimisation(10, "steps of linear warm-up; the rate is constant afterwards", least=0)
    token_budget: int = memory(16384, "tokens of a micro-batch, at most, padding included", builtin=4096, least=1)
    rows: int = memory(16, "episodes side by side in the sampler", builtin=256, least=1)
    max_message: int = memory(512, "tokens of one assistant message, at most", builtin=64, least=1)
    max_messages: int = memory(40, "assistant messages of one episode, at most (the paper gives none)", builtin=16,
                               least=1)
    init: str = running("runs/sft", "where to start, also the frozen reference: run or checkpoint folder, hub name")
    out: str = running("runs/grpo", "run folder")
    save_every: int = running(10, "steps between saved states", least=1)
    resume: bool = running(False, "go on with the interrupted run in <out>.partial")
    overwrite: bool = running(False, "replace an older run in <out> when this one is complete")


# ---------------------------------------------------------------------------------------------------------------------
# the equations

def group_advantages(rewards: torch.Tensor, eps: float = EPS_STAB) -> torch.Tensor:
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


def clipped_loss(logp, old_logp, ref_logp, advantages, mask, clip: float, beta: float, weights):
    """Eq. (8), (9): the clipped surrogate minus beta * KL, summed over tokens with one weight per rollout.

    logp, old_logp, ref_logp: (B, T) fp32; ref_logp may be None if beta is 0. advantages: (B,); mask: (B, T) bool.
    weights: (B,), what each token of a rollout counts: loss_weights of the whole step, not of this micro-batch.
    Returns (loss, totals): sums over this batch's tokens (kl, clipped, tokens), so that micro-batches add up.
    Whatever stands where mask is False, NaN included, changes nothing; an all-False mask gives 0, and backward works.
    """
    logp, old_logp = logp.masked_fill(~mask, 0.0), old_logp.masked_fill(~mask, 0.0)      # fills: NaN * 0 is NaN
    advantages = advantages.float()[:, None]                                             # (B, 1)
    ratio = (logp - old_logp).clamp(-RATIO_BOUND, RATIO_BOUND).exp()                     # (B, T)
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    clipped = ((ratio > 1 + clip) & (advantages > 0)) | ((ratio < 1 - clip) & (advantages < 0))
    kl = torch.zeros_like(logp)
    if ref_logp is not None:
        gap = ref_logp.masked_fill(~mask, 0.0) - logp                                    # log of pi_ref / pi
        excess = (gap - KL_BOUND).relu()                                                 # k3, beyond it its tangent
        bounded = torch.where(gap > KL_BOUND, KL_BOUND, gap)                             # a clamp's gradient varies
        kl = bounded.expm1() - bounded + math.expm1(KL_BOUND) * excess
        objective = objective - beta * kl
    loss = -(weights[:, None] * objective * mask).sum()
    return loss, {"kl": float((kl.detach() * mask).sum()), "clipped": int((clipped & mask).sum()),
                  "tokens": int(mask.sum())}


def loss_weights(lengths: torch.Tensor, norm: str) -> torch.Tensor:
    """(N,) sampled tokens of ALL rollouts of the step -> (N,) weight of each of their tokens in the loss."""
    lengths = lengths.float().clamp_min(1)
    if norm == "sequence":
        return 1.0 / (len(lengths) * lengths)
    return torch.full_like(lengths, 1.0 / float(lengths.sum()))


# ---------------------------------------------------------------------------------------------------------------------
# one step

def plan_micro_batches(rollouts: list[Trajectory], used: list[int], group: int, budget: int):
    """The rollouts in use as micro-batches: a list of (rows, number of leading tokens that they share: computed once).

    group: every `group` rollouts are of one task. They share their prompt where that saves a quarter of their tokens;
    less does not pay, since larger batches are faster. All other rollouts are batched by length. No micro-batch has
    more than `budget` tokens unless a single rollout does.
    """
    sharing, others = [], []
    for _, members in groupby(used, lambda i: i // group):
        members = list(members)
        rows = [rollouts[i] for i in members]
        shared = min(len(os.path.commonprefix([row.ids for row in rows])), *(row.mask.index(True) - 1 for row in rows))
        own = [len(row.ids) - shared for row in rows]
        parts = batches_by_length(own, budget - shared)
        tokens = sum(shared + len(part) * own[part[-1]] for part in parts)                # the last one is the longest
        if shared and 4 * tokens <= 3 * sum(len(row.ids) for row in rows):
            sharing += [([members[k] for k in part], shared) for part in parts]
        else:
            others += members
    return sharing + [([others[k] for k in part], 0)
                      for part in batches_by_length([len(rollouts[i].ids) for i in others], budget)]


@dataclass
class MicroBatch:
    """Some rollouts as tensors: what one forward and backward pass takes."""
    shared: int                             # leading tokens that all rows have in common: computed once
    ids: torch.Tensor                       # (B, T)
    mask: torch.Tensor                      # (B, T) bool, True on sampled tokens
    sampled: torch.Tensor                   # (B, T) the sampler's log-probs; NaN: not sampled under this prompt
    advantages: torch.Tensor                # (B,)
    weights: torch.Tensor                   # (B,)
    old: torch.Tensor | None = None         # (B, T) log-probs before the first update; None: the current ones
    reference: torch.Tensor | None = None   # (B, T) those of the reference; None: no KL


def make_micro_batch(model, reference, rollouts, rows, shared, advantages, weights, o) -> MicroBatch:
    """The chosen rows, scored by all that does not move during the updates."""
    ids, mask, sampled = (pad([getattr(rollouts[i], name) for i in rows], fill, model.device)
                          for name, fill in (("ids", 0), ("mask", False), ("logprobs", 0.0)))
    b = MicroBatch(shared, ids, mask, sampled, advantages[rows].to(model.device), weights[rows].to(model.device))
    with torch.no_grad():
        if o.updates > 1:
            b.old = token_logprobs(model, ids, mask, o.temperature, shared)
        if o.beta > 0:
            with base_weights(reference):
                b.reference = token_logprobs(reference, ids, mask, o.temperature, shared)
    return b


def update(model, reference, optimizer: Optimizer, rollouts: list[Trajectory], advantages: torch.Tensor,
           weights: torch.Tensor, lr: float, o, make_batch=make_micro_batch) -> dict:
    """o.updates optimizer steps on N rollouts; returns what is to be logged.

    advantages: (N,); weights: (N,), what each of a rollout's tokens counts in the loss (loss_weights of the whole step,
    which is why micro-batches do not change the gradient). make_batch makes a micro-batch.
    """
    pull = o.beta > 0 and not o.skip_flat                                                # the KL of flat groups counts
    used = [i for i, r in enumerate(rollouts) if r.sampled and weights[i] > 0 and (advantages[i] != 0 or pull)]
    stats = {"loss": 0.0, "kl": 0.0, "clip_fraction": 0.0, "grad_norm": 0.0, "logprob_gap": 0.0, "logprob_gap_max": 0.0,
             "used_rollouts": len(used), "tokens_saved": 0.0, "skipped": 0}
    if not used:
        return stats                                                                     # nothing to learn: no step
    parts = plan_micro_batches(rollouts, used, o.group, o.token_budget)
    saved = sum(shared * (len(rows) - 1) for rows, shared in parts)
    stats["tokens_saved"] = saved / sum(len(rollouts[i].ids) for i in used)
    batches = [make_batch(model, reference, rollouts, rows, shared, advantages, weights, o) for rows, shared in parts]
    gaps = []                                                                            # of sampler and trainer
    for number in range(o.updates):
        totals = {"kl": 0.0, "clipped": 0, "tokens": 0}
        for b in batches:
            logp = token_logprobs(model, b.ids, b.mask, o.temperature, b.shared)         # (B, T)
            old = logp.detach() if b.old is None else b.old
            loss, part = clipped_loss(logp, old, b.reference, b.advantages, b.mask, o.clip, o.beta, b.weights)
            loss.backward()
            stats["loss"] += float(loss.detach()) / o.updates
            totals = {key: totals[key] + part[key] for key in totals}
            if number == 0:
                gaps.append((logp.detach() - b.sampled).abs()[b.mask & ~b.sampled.isnan()])
        finite = math.isfinite(stats["loss"])
        stats["grad_norm"] = optimizer.step(lr, CLIP_NORM) if finite else optimizer.discard()
        stats["skipped"] += not math.isfinite(stats["grad_norm"])
    stats["kl"], stats["clip_fraction"] = totals["kl"] / totals["tokens"], totals["clipped"] / totals["tokens"]
    if len(gap := torch.cat(gaps)):
        stats |= {"logprob_gap": float(gap.double().mean()), "logprob_gap_max": float(gap.max())}
    return stats


def share(flags) -> float | None:
    """Mean of booleans or numbers; None if there are none (JSON has no NaN)."""
    flags = list(flags)
    return sum(flags) / len(flags) if flags else None


def describe(rollouts: list[Trajectory], advantages: torch.Tensor) -> dict:
    """A step's P * G rollouts in numbers, advantages (P, G); the README defines every name."""
    P, G = advantages.shape
    groups = [rollouts[i * G:(i + 1) * G] for i in range(P)]
    rewards = [[r.reward for r in group] for group in groups]
    by = {name: [[r.reward for r in group if r.token == token] for group in groups]
          for name, token in CONDITIONS.items()}                                         # name -> P lists of rewards
    stats = {"reward": float(torch.tensor(rewards).mean()),
             "zero_variance": share(min(row) == max(row) for row in rewards),
             "advantage_gap": float((advantages.amax(1) - advantages.amin(1)).mean()),
             "advantage_spread": float(advantages.max() - advantages.min()) * math.sqrt((G - 1) / G)}
    for name, rows in by.items():
        if any(rows):
            stats[f"reward_{name}"] = share(reward for row in rows for reward in row)
            stats[f"zero_variance_{name}"] = share(min(row) == max(row) for row in rows if len(row) > 1)
    if any(by["high"]) and any(by["low"]):
        stats["separation"] = stats["reward_high"] - stats["reward_low"]
        both = [(high, low) for high, low in zip(by["high"], by["low"]) if high and low]
        stats["high_fails_low_succeeds"] = share(max(high) == 0 and max(low) > 0 for high, low in both)
    tokens = sum(r.sampled for r in rollouts)
    turns = sum(sum(message["role"] == "user" for message in r.episode.messages) for r in rollouts)
    stats["entropy"] = -sum(sum(r.logprobs) for r in rollouts) / max(1, tokens)          # nats a token, from samples
    stats["calls_per_turn"] = sum(len(r.episode.calls) for r in rollouts) / turns
    stats["truncated"] = share(r.truncated for r in rollouts)
    stats["sampled_tokens"] = tokens
    return stats


# ---------------------------------------------------------------------------------------------------------------------
# the loop

def pick_tasks(o: Options, pool: list | None, step: int) -> list:
    """The P tasks of a step: fresh ones from the simulator, or the pool's in an order shuffled every epoch."""
    if pool is None:
        return load_tasks(o, "train", o.tasks, seed=(o.seed + 1) * 100_000 + step)
    picked = []
    for k in range(step * o.tasks, (step + 1) * o.tasks):
        order = list(range(len(pool)))
        random.Random(f"{o.seed}-epoch-{k // len(pool)}").shuffle(order)
        picked.append(pool[order[k % len(pool)]])
    return picked


def train(o: Options, condition, command: list[str], roll=sample, learn=update, pool=None, held_out=None):
    """Train the policy in o.init with GRPO into the run folder o.out.

    condition(P, G, seed) -> for each of P tasks a list of G reward tokens, one a rollout (None: no token).
    command: its words, for messages. roll, learn: how to sample and to update. pool, held_out: tasks to train on, to
    measure success on; by default those of o.env.
    """
    claim(o.out, o.resume, o.overwrite, o.init)                                          # before all that takes long
    require_package("matplotlib", "figure.png of a run")
    model, tokenizer = load_policy(checkpoint_of(o.init), o.torch_device())
    o.prepare(model, o.seed)                                                             # LoRA, gradient checkpointing
    reference = reference_policy(model) if o.beta > 0 else None                          # frozen
    sampler = Sampler(model, tokenizer, o.rows, o.max_message, o.max_messages)
    if pool is None and o.env == "bfcl":
        pool = load_tasks(o, "train", 0, 0)                                              # None: fresh tasks every step
    held_out = held_out_tasks(o) if held_out is None else held_out
    first = pool or pick_tasks(o, None, 0)
    check_prompts(sampler, held_out + first)
    made, name = config_of(o.init), Path(command[1]).name
    config = run_config(o, name, made.get("builtin", False), made.get("token", "none"), sampler, first[0])
    optimizer = Optimizer(model, o.lr, betas=BETAS)

    with (Run(o.out, config, o.resume, o.overwrite, command) as run,
          Keeper(run, model, tokenizer, o.save_every) as keeper):
        measure(keeper, "before", sampler, held_out, o.seed)
        for step in keeper.steps(o.steps, optimizer, name):                              # goes on after a stop, saves
            began = time.time()
            tasks = pick_tasks(o, pool, step)                                            # P
            tokens = condition(len(tasks), o.group, (o.seed, step))                      # P lists of G
            repeated = [task for task in tasks for _ in range(o.group)]                  # P * G: AAABBB
            rollouts = roll(sampler, repeated, sum(tokens, []), o.temperature, (o.seed, 1 + step))
            halfway = time.time()
            rewards = torch.tensor([r.reward for r in rollouts]).view(-1, o.group)       # (P, G)
            finite = bool(rewards.isfinite().all())                                      # else the update is left out
            advantages = group_advantages(rewards) if finite else rewards * math.nan     # (P, G)
            weights = loss_weights(torch.tensor([r.sampled for r in rollouts]), o.norm)  # (P * G,): of the whole step
            lr = o.lr * min(1.0, (step + 1) / max(1, o.warmup))
            stats = learn(model, reference, optimizer, rollouts, advantages.flatten(), weights, lr, o)
            stats |= {"lr": lr, "sample_seconds": halfway - began, "update_seconds": time.time() - halfway}
            log(keeper, step + 1, rollouts, advantages, stats)
        save_policy(model, tokenizer, run.folder / "checkpoint")
        figure(run.rows("metrics.jsonl"), run.final, run.folder / "figure.png")
        measure(keeper, "after", sampler, held_out, o.seed)
        report(run)
        run.finish()
    print(f"wrote {run.final}/ (checkpoint, config.json, metrics.jsonl, episodes.jsonl, figure.png)")


def log(keeper: Keeper, step: int, rollouts: list[Trajectory], advantages: torch.Tensor, stats: dict):
    """A line of metrics.jsonl, and every rollout into episodes.jsonl."""
    tok_s = sum(len(r.ids) for r in rollouts) / (stats["sample_seconds"] + stats["update_seconds"])
    keeper.log({"step": step, **describe(rollouts, advantages), **stats, "tok_s": tok_s},
               *({"step": step, "group": i // advantages.shape[1], "advantage": float(a), **record(r)}
                 for i, (r, a) in enumerate(zip(rollouts, advantages.flatten()))))


def measure(keeper: Keeper, name: str, sampler: Sampler, tasks: list, seed: int):
    """Success on held-out tasks under each token and without, into <name>.json, unless that was done before a stop."""
    if tasks and not (keeper.run.folder / f"{name}.json").exists():
        with keeper.interruptible():
            rollouts = play(sampler, tasks, seed=seed, title=f"success {name}")
        keeper.run.write(f"{name}.json", json.dumps([verdict(r) for r in rollouts]))


def report(run: Run):
    """Print success before and after with intervals, and what the groups looked like."""
    if (run.folder / "after.json").exists():
        before, after = (read_json(run.folder / f"{name}.json") for name in ("before", "after"))
        tasks = len({row["task"] for row in after})
        print(f"held-out success ({tasks} tasks, temperature 1), before\n{table(before)}\nafter\n{table(after)}")
        for token in CONDITIONS:
            print(f"change under {token}: {100 * (rate(after, token=token) - rate(before, token=token)):+.1f} points")
    for name in ("zero_variance", "advantage_gap", "separation"):
        values = [row[name] for row in run.rows("metrics.jsonl") if row.get(name) is not None]
        if values:
            k = min(10, len(values))
            print(f"{name:>16}: first {k} steps {sum(values[:k]) / k:.3f}, last {k} steps {sum(values[-k:]) / k:.3f}")


def figure(rows: list[dict], run: Path, path: Path):
    """The paper's Figure 2 and what it leaves out: over the steps, success by token, groups without variance, gaps."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator
    words = {"": "all rollouts", "_high": "high token", "_none": "no token", "_low": "low token"}
    panels = {"training success": "reward", "groups without variance": "zero_variance",
              "advantage gap of a group": "advantage_gap"}
    fig, axes = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    fig.suptitle(f"{run}: thin lines are steps, thick ones means of five")
    for axis, (title, key) in zip(axes, panels.items()):
        for end, label in words.items():
            points = [(row["step"], row[key + end]) for row in rows if row.get(key + end) is not None]
            if points and (end != "_high" or any(row.get(key + "_low") is not None for row in rows)):
                steps, values = zip(*points)
                smooth = [share(values[max(0, i - 4):i + 1]) for i in range(len(values))]
                colour = COLOURS.get(end[1:], "k")
                axis.plot(steps, values, color=colour, linewidth=0.6, alpha=0.5, marker="." if len(steps) < 5 else None)
                axis.plot(steps, smooth, color=colour, linewidth=2, label=label)
        axis.set(ylabel=title, xlabel="step", ylim=(0, None))
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.spines[["top", "right"]].set_visible(False)
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    fig.savefig(path, dpi=120)
    plt.close(fig)


def read_options(options_class, argv=None):
    """Options of an RL program: tasks and preset are those of the run that it starts from, where no flag is given."""
    given = read_flags(options_class, argv)
    config = config_of(given.get("init", options_class.init))
    tasks = {key: value for key, value in config.get("tasks", {}).items() if key in TASK_KEYS}
    return make_options(options_class, {**tasks, **given}, config.get("builtin", False))


def main(argv=None):
    o = read_options(Options, argv)
    token = CONDITIONS[config_of(o.init).get("token", "none")]                           # after RCTP-FT: high
    train(o, lambda groups, size, seed: [[token] * size for _ in range(groups)], command_line("grpo.py", argv))


if __name__ == "__main__":
    program(main)
