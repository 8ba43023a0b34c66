"""What a real run measured, next to the propositions: Proposition 4.3 on its rollouts, 4.2 on its two policies.

    python lab/run_theory.py runs/rcgrpo                 # a table, runs/run_theory.png and .json

Its figure shows both: the propositions of theory.py, and the run's rewards and variances.

Reads the run folder of rcgrpo.py or grpo.py. `from_run` needs its rollouts only (episodes.jsonl); `policy_of_run` plays
held-out tasks with the policy that the run started from and with the one that it ended with. Exits 1 if a line fails.
"""
import math
import sys
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import evaluate
import grpo
import model as policy
import theory
from run import (COLOURS, UserError, check_file, checkpoint_of, make_options, option, program, read_flags, read_json,
                 read_jsonl, require, require_package, run_of)
from sampler import Sampler
from sft import demonstrate
from theory import Row
from tokens import HIGH, LOW


@dataclass
class Options:
    run: str = option("runs/rcgrpo", "run folder of rcgrpo.py or grpo.py")
    tasks: int = option(96, "held-out tasks on which collapse and gradients are measured", least=8)
    seed: int = option(0, "seed of the tasks and of sampling", least=0)
    out: str = option("runs/run_theory.png", "the figure; all lines go into a JSON file beside it")

    def check(self):
        require(Path(self.out).suffix in (".png", ".pdf", ".svg"),
                f"--out takes a .png, .pdf or .svg file; got {self.out}")
        check_file(self.out)


def read_groups(folder: Path | str) -> dict[int, list[list[dict]]]:
    """episodes.jsonl of an RL run -> its groups by step. Raises UserError where there are none."""
    file, groups = Path(folder) / "episodes.jsonl", {}
    require(file.exists(), f"there is no {file}; give the run folder of rcgrpo.py or grpo.py")
    for number, row in enumerate(read_jsonl(file), 1):
        try:
            row = {key: row[key] for key in ("step", "group", "token", "reward", "advantage")}
        except KeyError:
            raise UserError(f"line {number} of {file} is no rollout of an RL run; "
                            "give the run folder of rcgrpo.py or grpo.py")
        if row["advantage"] is not None:                                     # else NaN: the step was left out
            groups.setdefault(row["step"], {}).setdefault(row["group"], []).append(row)
    require(bool(groups), f"{file} has no episodes")
    return {number: list(of_step.values()) for number, of_step in sorted(groups.items())}


def bound_and_exact(rewards: torch.Tensor, high: torch.Tensor, p: float, how: str) -> tuple[float, torch.Tensor]:
    """Proposition 4.3's bound for a step's mean sigma_g^2, and the exact value of each group with at least two rows of
    each token. rewards, high: (P, G)."""
    G, n, m, spread = rewards.shape[1], {}, {}, {}                                       # by token, of each group: (P,)
    for token, where in (("high", high), ("low", ~high)):
        n[token] = where.sum(1)
        m[token] = (rewards * where).sum(1) / n[token].clamp_min(1)
        spread[token] = ((rewards - m[token][:, None]) ** 2 * where).sum(1) / (n[token] - 1).clamp_min(1)
    noise = sum(spread[token] / n[token].clamp_min(1) for token in n)                    # of the difference of means
    exact = theory.variance_value(G, p, (m["high"] - m["low"]) ** 2 - noise, spread["high"], spread["low"], how)
    exact = exact[(n["high"] >= 2) & (n["low"] >= 2)]
    if high.all() or not high.any():
        return 0.0, exact
    mean = {"high": float(rewards[high].mean()), "low": float(rewards[~high].mean())}
    influence = [n[token] * (m[token] - mean[token]) / n[token].sum() for token in n]    # of a group on each mean
    squared = (mean["high"] - mean["low"]) ** 2 - float(((influence[0] - influence[1]) ** 2).sum())
    return theory.between(G, p, how) * max(0.0, squared), exact


def from_run(folder: Path | str, curve: dict):
    """Proposition 4.3 on a run's own rollouts: E[sigma_g^2] per step, the exact formula, the bound. curve["rows"] takes
    (step, bound, exact, measured, standard errors of measured and exact), exact nan where no group shows it.

    Exact: per task, with unbiased estimates from its own rollouts: sample variances under either token, and
    (difference of means)^2 less its own sampling variance for Delta^2. In these estimates the formula is an identity
    once the tokens are given, so what it tests is that tokens were drawn as P_sample says, row by row. Bound: from the
    separation of the whole step, squared, less its squared standard error; by Jensen's inequality the mean over tasks
    of Delta^2 is at least that. Tokens drawn once per group, say, break the bound. Errors are those of a group over the
    whole run, and of one more at the largest deviation there can be, range^2 / 8, as few groups show none.
    """
    options = read_json(Path(folder) / "config.json")["options"]
    G, p, how = options["group"], options.get("p_high"), options.get("how", "iid")
    worst, steps, scores = 0.0, [], []
    for number, groups in read_groups(folder).items():
        rewards, recorded = (torch.tensor([[row[key] for row in group] for group in groups])
                             for key in ("reward", "advantage"))                         # (P, G)
        worst = max(worst, float((grpo.group_advantages(rewards) - recorded).abs().max()))
        bound, exact = 0.0, torch.zeros(0)
        if p is not None:                                                    # plain GRPO has no token to separate
            high = torch.tensor([[row["token"] == "high" for row in group] for group in groups])
            bound, exact = bound_and_exact(rewards, high, p, how)
        steps.append((number, bound, exact, theory.sigma(rewards) ** 2))
        scores += rewards.flatten().tolist()
    largest, deviations = (max(scores) - min(scores)) ** 2 / 8, []
    for i in (3, 2):                                                         # over all groups: one step has few of them
        values = torch.cat([of_step[i] for of_step in steps])
        squares = float(((values - values.mean()) ** 2).sum()) + largest ** 2
        deviations.append(math.sqrt(squares / max(1, len(values))))
    curve["rows"] = [(number, bound, float(exact.mean()), float(measured.mean()),
                      deviations[0] / math.sqrt(len(measured)), deviations[1] / math.sqrt(max(1, len(exact))))
                     for number, bound, exact, measured in steps]
    yield Row("Run: recorded advantages, |difference|", str(folder), 0.0, 0.0, worst, worst < 1e-4, "as recomputed")
    every, known = max(1, len(steps) // 8), []
    for number, bound, exact, measured, error, exact_error in curve["rows"]:
        good, shown = measured >= bound - 5 * error - 1e-6, None
        if not math.isnan(exact):
            good, shown = good and abs(measured - exact) <= 5 * math.hypot(error, exact_error) + 1e-6, exact
            known.append((bound, exact, measured, error, exact_error))
        if number % every == 0 or number == 1 or not good:
            yield Row("Run: E[sigma^2]", f"step {number}, G={G}" + ("" if p is None else f" p={p} {how}"), bound, shown,
                      measured, good, "vacuous" if bound == 0 else "holds", error)
    if known:
        bound, exact, measured = (sum(values) / len(known) for values in list(zip(*known))[:3])
        error, exact_error = (math.sqrt(sum(row[i] ** 2 for row in curve["rows"])) / len(steps) for i in (4, 5))
        good = measured >= bound - 4 * error and abs(measured - exact) <= 4 * math.hypot(error, exact_error)
        yield Row("Run: E[sigma^2], mean", f"{len(steps)} steps", bound, exact, measured, good, "holds", error)


def policy_of_run(o: Options, source: str, options: dict, when: str):
    """Proposition 4.2 and the cosine of the two modes' gradients, measured on a checkpoint (start or end of the run).

    4.2: T eps is -log pi(demonstration), summed over its tokens, under the high token; the mean over tasks of both
    bounds next to the share of groups of G rollouts under the high token whose rewards are all equal.
    Cosine: the gradient of each mode's success on the same tasks, as grpo.update computes it, with undivided centred
    rewards for advantages. Noise would shorten it, so norms come from two independent halves of the rollouts (nan: they
    point apart, noise is all there is); standard error by the jackknife over tasks. Of a large model every k-th weight
    stands for all.
    """
    topics = evaluate.TaskOptions(**{key: options[key] for key in evaluate.TaskOptions.__dataclass_fields__})
    lm, tokenizer = policy.load_policy(source, topics.torch_device())
    sampler = Sampler(lm, tokenizer, options["rows"], options["max_message"], options["max_messages"])
    tasks, G, parts = evaluate.load_tasks(topics, "validation", o.tasks, seed=30_000 + o.seed), 8, 8
    played = [task for task in tasks for _ in range(G)]
    rollouts = evaluate.sample(sampler, played * 2, [HIGH] * len(played) + [LOW] * len(played), options["temperature"],
                               seed=(o.seed, 0))
    rewards = torch.tensor([r.reward for r in rollouts]).view(2, len(tasks), G)          # by mode

    nll = torch.zeros(len(tasks), dtype=torch.float64)
    for i, task in enumerate(tasks):
        tokens = sampler.renderer.conversation(demonstrate(task).messages, task.episode().tools, HIGH)
        ids, mask = (torch.tensor([row], device=lm.device) for row in tokens)
        with torch.no_grad():
            nll[i] = -float(policy.token_logprobs(lm, ids, mask, options["temperature"]).sum())
    flat, error = theory.estimate(theory.sigma(rewards[0]) == 0)
    least = (-G * nll).exp()                                                 # a task's P(collapse) is at least that
    sharp, spared = float(least.mean()), 4 * math.sqrt(float((least * (1 - least)).sum())) / len(tasks)
    bound = float((1 - G * nll).mean())
    yield Row(f"Run: P(collapse) under high, {when}",
              f"G={G}, T eps: median {float(nll.median()):.2f} nats, sharp {sharp:.3f}", bound, None, flat,
              flat >= sharp - spared, "vacuous" if bound <= 0 else "holds", error)

    half = G // 2
    halves, index = rewards.view(2, -1, 2, half), torch.arange(len(rollouts)).view(2, -1, 2, half)
    centred = (halves - halves.mean(3, keepdim=True)) * half / (half - 1)    # unbiased: its own reward is in the mean
    settings = SimpleNamespace(updates=1, beta=0.0, clip=theory.CLIP, group=half, token_budget=options["token_budget"],
                               temperature=options["temperature"])
    still = SimpleNamespace(step=lambda *_: 0.0, discard=lambda: math.nan)   # an optimizer that moves nothing
    stride = -(-sum(p.numel() for p in lm.parameters()) // 4_000_000)

    def gradient(mode: int, which: int, part: int) -> torch.Tensor:
        """Of the loss under one mode, from half of the rollouts on one part of the tasks; weights in one vector."""
        rows = [rollouts[i] for i in index[mode, part::parts, which].flatten()]
        weights = grpo.loss_weights(torch.tensor([r.sampled for r in rows]), "sequence")
        lm.zero_grad(set_to_none=True)
        grpo.update(lm, None, still, rows, centred[mode, part::parts, which].flatten(), weights, 0.0, settings)
        return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten()[::stride].float().cpu()
                          for p in lm.parameters()])
    sums = torch.stack([gradient(*which) for which in product((0, 1), (0, 1), range(parts))])
    sums = sums.unflatten(0, (2, 2, parts))                                              # (mode, half, part, weights)

    def cosines(keep: list[int]) -> list[float]:
        """cos(high, low) and <high, low> / <high, high>, from these parts."""
        g = sums[:, :, keep].sum(2)                                                      # (mode, half, weights)
        inner, high, low = float(g[0].mean(0) @ g[1].mean(0)), *(float(g[mode, 0] @ g[mode, 1]) for mode in (0, 1))
        return [inner / math.sqrt(high * low) if min(high, low) > 0 else math.nan,
                inner / high if high > 0 else math.nan]
    found = cosines(list(range(parts)))
    left_out = torch.tensor([cosines([k for k in range(parts) if k != part]) for part in range(parts)])  # (parts, 2)
    errors = ((parts - 1) / parts * ((left_out - left_out.mean(0)) ** 2).sum(0)).sqrt().tolist()
    success = " / ".join(f"{float(of_mode.mean()):.2f}" for of_mode in rewards)
    for title, value, error in zip(("cosine of the modes' gradients", "<high, low> / <high, high>"), found, errors):
        yield Row(f"Run: {title}, {when}", f"{len(tasks)} tasks x {G}, success {success}", None, None, value, True,
                  "measured" if math.isfinite(error) else "lost in noise", error)


def propositions(axes, seeds: int = 20):
    """Collapse and its bounds, what lies between, variance against p, alpha, and the training curves of remark 4.4."""
    G, T, eps = 4, 3, torch.logspace(-3, 0, 60, dtype=torch.float64)
    grid, q = torch.linspace(0.005, 0.995, 100).tolist(), (-T * eps).exp()
    shades = {2: "#c7b9dd", 4: "#a084c4", 8: "#7048a3", 16: "#3f1c70"}                   # by group size
    bounds, between_them, mix, step_size, helps, adds_nothing = axes

    bounds.set(title=f"Prop. 4.2: groups of a peaked policy collapse\n({G} rollouts, {T} messages each)", xscale="log",
               xlabel="eps: -log P(expert's message)", ylabel="P(all rewards equal)", ylim=(-0.05, 1.05))
    bounds.plot(eps, q ** G + (1 - q) ** G, "k", label="exact")
    bounds.plot(eps, (1 - eps).clamp_min(0) ** (G * T), "k--", label="bound (1 - eps)^(G T)")
    bounds.plot(eps, 1 - G * T * eps, "k:", label="bound 1 - G T eps")

    between_them.set(title="In between: how many groups of G collapse,\nand how hard a group pushes on average",
                     xlabel="success probability of a rollout", ylabel="P(all equal) (solid), push (dashed)")
    step_size.set(title="All that a mixed group's sigma changes\nin the expected update: the step size",
                  xlabel="mean success probability in the group", ylabel="step size alpha", ylim=(0, 4.2))
    for size, shade in shades.items():
        means = [theory.group_means(q, size) for q in grid]
        between_them.plot(grid, [at["P(sigma=0)"] for at in means], color=shade, label=f"G = {size}")
        between_them.plot(grid, [at["E[push]"] for at in means], "--", color=shade)
        step_size.plot(grid, [theory.step_factor(q, size) for q in grid], color=shade, label=f"G = {size}")

    kind = theory.REWARDS[1]
    mix.set(title=f"Prop. 4.3: mixed tokens in a group of {G},\nsuccess {kind.high} under high, {kind.low} under low",
            xlabel="p: probability of the high token", ylabel="expected variance of the rewards")
    for how, colour in (("iid", COLOURS["RC-GRPO"]), ("stratified", "C9")):
        exact = [theory.variance_value(G, p, kind.squared, *kind.variances, how) for p in grid]
        mix.plot(grid, exact, color=colour, label=f"{how} tokens")
        mix.plot(grid, [theory.between(G, p, how) * kind.squared for p in grid], ":", color=colour,
                 label=f"bound, {how}")

    for axis, setting, title in (
            (helps, "shortcut", "the high mode is sure\nof a wrong action: mixing helps"),
            (adds_nothing, "low learns it too", "the high mode learns\nalone: mixing adds nothing")):
        plain, mixed = (theory.train_tables(theory.Options(seeds=seeds), setting, conditioned)[0].mean(1)
                        for conditioned in (False, True))                                # (steps + 1, 2)
        axis.set(title=f"Remark 4.4: {title}", xlabel="training step", ylabel=f"success, mean of {seeds} seeds")
        axis.plot(plain[:, theory.HIGH_MODE], color=COLOURS["GRPO"], label="GRPO, high token")
        axis.plot(mixed[:, theory.HIGH_MODE], color=COLOURS["RC-GRPO"], label="RC-GRPO, high token")
        axis.plot(mixed[:, theory.LOW_MODE], "--", color=COLOURS["RC-GRPO"], label="RC-GRPO, low token")
        axis.plot(mixed[:, theory.HIGH_MODE] - mixed[:, theory.LOW_MODE], "k:", label="separation: high - low")


def measured_in(o: Options, curve: dict, by_token, variances):
    """Rewards by token and what their separation guarantees, next to the variance that was there."""
    by_token.set(title=f"{o.run}:\nreward of the rollouts", xlabel="training step", ylabel="mean reward")
    for name in ("high", "none", "low"):
        steps = {number: [row["reward"] for group in groups for row in group if row["token"] == name]
                 for number, groups in read_groups(o.run).items()}
        if any(steps.values()):
            points = [(number, sum(rewards) / len(rewards)) for number, rewards in steps.items() if rewards]
            by_token.plot(*zip(*points), color=COLOURS[name], label=f"{name} token" if name != "none" else "no token")
    number, bound, exact, measured, *_ = zip(*curve["rows"])
    variances.set(title=f"{o.run}, Prop. 4.3:\nvariance of the rewards in a group", xlabel="training step",
                  ylabel="mean variance")
    variances.plot(number, measured, "k", label="measured")
    if not all(map(math.isnan, exact)):
        variances.plot(number, exact, "k--", label="exact formula")
        variances.plot(number, bound, "k:", label="bound from the separation")


def figure(o: Options, curve: dict):
    """The propositions and the run in one picture, o.out."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    fig, axes = plt.subplots(2, 4, figsize=(17.6, 8.4), layout="constrained")
    propositions([*axes[0, :3], *axes[1, :3]])
    measured_in(o, curve, *axes[:, 3])
    fig.suptitle("The propositions of RC-GRPO in exact numbers, small policies in training, and a real run")
    for axis in axes.flat:                                                   # legends below the panels, not on data
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(fontsize=8, frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.17))
    fig.savefig(o.out, dpi=110)
    plt.close(fig)


def main(argv=None):
    o = make_options(Options, read_flags(Options, argv, positional="run"), False)
    require_package("matplotlib", "the figure")
    o.run = str(run_of(o.run))
    read_groups(o.run)                                                       # bad input fails before the work
    options, curve = read_json(Path(o.run) / "config.json")["options"], {}
    ends = [(checkpoint_of(options["init"]), "start"), (checkpoint_of(o.run), "end")]
    torch.manual_seed(o.seed)
    checks = [from_run(o.run, curve), *(policy_of_run(o, source, options, when) for source, when in ends)]
    failed = theory.report(checks, str(Path(o.out).with_suffix(".json")), asdict(o))
    figure(o, curve)
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    program(main)
