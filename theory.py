"""The paper's definition, lemma, propositions and remark, and what they leave open, checked by numbers.

    python theory.py                                     # every check, one table, runs/theory.png and .json; exit 1 if one fails
    python theory.py --run runs/rcgrpo                   # and next to them what a real run measured

Read it as a lecture: each check is one function whose docstring states what holds, on what assumptions, and why. The policies
are tables of logits over the histories of a small multi-turn game, so that every expectation is a finite sum; what is
checked is the code that trains: advantages come from grpo.group_advantages, gradients from grpo.clipped_loss by autograd,
tokens from rcgrpo.draw_tokens, log-probs of a language model from model.token_logprobs.

Beyond the paper: near-collapse (its propositions speak of exact collapse only), stratified tokens, what the variance that
mixed tokens add can teach at all, and a problem in which it teaches nothing.
"""
import json
import math
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from itertools import combinations_with_replacement, product
from pathlib import Path

import torch

import grpo
import model as policy
import rcgrpo
from evaluate import TaskOptions, load_tasks
from reward import trajectory_reward
from run import (UserError, check_file, checkpoint_of, config_of, make_options, option, program, read_flags, read_json,
                 read_jsonl, require, require_package, run_of)
from sampler import Sampler
from sft import demonstrate
from tokens import HIGH, LOW

CLIP, EPS_STAB = grpo.Options.clip, grpo.Options.eps_stab
HIGH_MODE, LOW_MODE = 0, 1                               # index of a token's table of logits


@dataclass
class Options:
    groups: str = option("4,8", "group sizes G to check, comma-separated")
    p_high: str = option("0.25,0.5", "probabilities of the high token to check, comma-separated")
    samples: int = option(10_000, "groups of a Monte Carlo estimate", least=100)
    seeds: int = option(20, "training runs of remark 4.4", least=2)
    seed: int = option(0, "seed of everything drawn", least=0)
    run: str = option("", "a run folder of rcgrpo.py or grpo.py, to be set next to the theory")
    tasks: int = option(96, "tasks on which --run measures gradients", least=8)
    out: str = option("runs/theory.png", "the figure; all lines go into a JSON file beside it")

    def check(self):
        require(all(part.strip().isdecimal() and int(part) >= 2 for part in self.groups.split(",")),
                f"--groups takes whole numbers of at least 2 (a group of one has no variance), comma-separated; got {self.groups}")
        try:
            good = all(0 <= float(part) <= 1 for part in self.p_high.split(","))
        except ValueError:
            good = False
        require(good, f"--p_high takes probabilities between 0 and 1, comma-separated; got {self.p_high}")
        kinds = (".png", ".pdf", ".svg")
        require(Path(self.out).suffix in kinds, f"--out takes a .png, .pdf or .svg file; got {self.out}")
        check_file(self.out)

    @property
    def sizes(self):
        return [int(part) for part in self.groups.split(",")]

    @property
    def shares(self):
        return [float(part) for part in self.p_high.split(",")]


@dataclass
class Row:
    """One line of the table: what was checked, in which setting, and how it came out."""
    statement: str
    setting: str
    bound: float | None
    exact: float | None
    measured: float | None
    error: float | None                                  # standard error of measured; None: no sampling in it
    verdict: str                                         # FAILS, or how it holds

    @property
    def holds(self) -> bool:
        return self.verdict != "FAILS"

    def plain(self) -> dict:
        """For JSON, which has no NaN."""
        return {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in asdict(self).items()}


def verdict(holds: bool, how: str = "holds") -> str:
    return how if holds else "FAILS"


def near(measured: float, exact: float, error: float = 0.0) -> bool:
    """Equal within four standard errors and fp32 rounding; a NaN is never near."""
    return abs(measured - exact) <= 4 * error + 2e-5 * max(1.0, abs(exact))


def estimate(values: torch.Tensor) -> tuple[float, float]:
    """Mean of a sample and its standard error."""
    values = values.double()
    return float(values.mean()), float(values.std() / math.sqrt(len(values)))


# ---------------------------------------------------------------------------------------------------------------------
# a tabular multi-turn policy, and the training step on it

class Game:
    """T steps with K actions each; action 0 is the expert's. All K^T trajectories are listed; the reward is 1 for the expert's.

    A policy is a table of logits (..., H, K), one row for each of the H = 1 + K + ... + K^(T-1) histories.
    """

    def __init__(self, steps: int, actions: int):
        self.T, self.K = steps, actions
        self.actions = torch.tensor(list(product(range(actions), repeat=steps)))         # (N, T)
        history, seen = torch.zeros(len(self.actions), dtype=torch.long), []
        for t in range(steps):                                                           # numbered as the nodes of a K-ary heap
            seen.append(history)
            history = actions * history + 1 + self.actions[:, t]
        self.histories = torch.stack(seen, 1)                                            # (N, T)
        self.H = (actions ** steps - 1) // (actions - 1) if actions > 1 else steps
        self.rewards = torch.zeros(len(self.actions))                                    # (N,)
        self.rewards[0] = 1.0

    def table(self, *steps: list[float]) -> torch.Tensor:
        """(H, K) logits from one list of action probabilities per step, the same for every history of that step."""
        return torch.cat([torch.tensor(probs).log().expand(self.K ** t, self.K) for t, probs in enumerate(steps)])

    def logprobs(self, tables: torch.Tensor) -> torch.Tensor:
        """(..., H, K) logits -> (..., N, T) log-probs of every action of every trajectory."""
        return tables.log_softmax(-1)[..., self.histories, self.actions]

    def probabilities(self, tables: torch.Tensor) -> torch.Tensor:
        """(..., H, K) -> (..., N) probabilities of the trajectories."""
        return self.logprobs(tables.double()).sum(-1).exp()

    def success(self, tables: torch.Tensor) -> torch.Tensor:
        """(..., H, K) -> (...) expected reward J."""
        return (self.probabilities(tables) * self.rewards).sum(-1)

    def gradient_of_success(self, table: torch.Tensor) -> torch.Tensor:
        """(H, K) -> (H, K): the gradient of J."""
        leaf = table.double().requires_grad_()
        return torch.autograd.grad(self.success(leaf), leaf)[0].float()


def step(game: Game, tables: torch.Tensor, modes: torch.Tensor, picks: torch.Tensor, eps: float = EPS_STAB, beta: float = 0.0,
         reference: torch.Tensor | None = None, advantages: torch.Tensor | None = None) -> torch.Tensor:
    """The direction of one training step for each of B groups, every group with its own tables of logits: (B, M, H, K).

    tables: (B, M, H, K) or (M, H, K), one table per token; modes, picks: (B, G), token and trajectory of each rollout. Minus
    the gradient of the loss that training minimises; advantages (B, G) replace the normalised ones if given.
    """
    B, G = picks.shape
    leaf = tables.expand(B, *tables.shape[-3:]).clone().requires_grad_()
    rows = torch.arange(B)[:, None]
    logp = game.logprobs(leaf)[rows, modes, picks].reshape(B * G, game.T)
    ref = None if reference is None else game.logprobs(reference.expand_as(leaf))[rows, modes, picks].reshape(B * G, game.T)
    if advantages is None:
        advantages = grpo.group_advantages(game.rewards[picks], eps)
    weights = grpo.loss_weights(torch.full((B * G,), game.T), "sequence") * B            # each group is a step of its own
    mask = torch.ones(B * G, game.T, dtype=torch.bool)
    loss, _ = grpo.clipped_loss(logp, logp.detach(), ref, advantages.reshape(-1), mask, CLIP, beta, weights)
    loss.backward()
    return -leaf.grad


def draw(probabilities: torch.Tensor, count: int, gen: torch.Generator) -> torch.Tensor:
    """(N,) or (B, N) -> count draws per row, (count,) or (B, count)."""
    return torch.multinomial(probabilities.float(), count, replacement=True, generator=gen)


def token_modes(groups: int, group: int, p: float, how: str, seed) -> torch.Tensor:
    """(groups, group) modes, drawn as training draws its tokens."""
    return torch.tensor([[{HIGH: HIGH_MODE, LOW: LOW_MODE}[token] for token in row]
                         for row in rcgrpo.draw_tokens(groups, group, p, how, seed)])


def sigma(rewards: torch.Tensor, eps: float = EPS_STAB) -> torch.Tensor:
    """(P, G) -> (P,): the sigma_g that the training code divided by, read off its advantages: gap of R = (sigma + eps) * gap of A."""
    advantages = grpo.group_advantages(rewards, eps)
    gap = advantages.amax(1) - advantages.amin(1)
    return torch.where(gap > 0, (rewards.amax(1) - rewards.amin(1)) / gap - eps, gap)


# ---------------------------------------------------------------------------------------------------------------------
# the checks

def collapse(o: Options):
    """Definition 4.1. All G rewards of a group equal: sigma_g = 0, every advantage is exactly 0, and so is the policy gradient.

    R - mean is 0 on paper; in floating point the mean of G times 0.1 is not 0.1, and rounding noise over a small eps_stab is
    an advantage: hence exact zeros, for any value, G and eps_stab. With beta > 0 the KL term is what is left. Training
    differentiates k3 = pi_ref/pi - 1 - log(pi_ref/pi) through log pi on samples of pi; in expectation that is
    E_pi[(1 - pi_ref/pi) grad log pi] = -E_ref[grad log pi] = grad KL(pi_ref || pi). So a collapsed group pulls towards the
    reference, along the KL that covers the reference's modes, although the VALUE of k3 estimates KL(pi || pi_ref).
    """
    game, gen = Game(2, 3), torch.Generator().manual_seed(o.seed)
    table = torch.randn(1, game.H, 3, generator=gen)
    for G in o.sizes:
        values = torch.tensor([0.0, 1.0, 0.1, 1 / 3, -7.3, 1e6])[:, None].expand(-1, G)                        # (6, G)
        largest = max(float(grpo.group_advantages(values, eps).abs().max()) for eps in (0.0, 1e-8, EPS_STAB, 1.0))
        yield Row("Def. 4.1 largest |A|", f"equal rewards, G={G}", 0.0, 0.0, largest, None, verdict(largest == 0, "exact"))
        picks = torch.stack([torch.zeros(G), torch.ones(G), 1 + torch.arange(G) % (len(game.actions) - 1)]).long()       # success; failures
        pull = float(step(game, table, torch.zeros_like(picks), picks).abs().max())
        yield Row("Def. 4.1 |gradient|, beta=0", f"equal rewards, G={G}", 0.0, 0.0, pull, None, verdict(pull == 0, "exact"))
    bandit, beta = Game(1, 4), 0.1
    table, reference = torch.randn(2, 1, 1, 4, generator=gen)
    one = torch.arange(4)[:, None].expand(4, 2)                                          # a group per action: both rollouts are it
    pulls = step(bandit, table, torch.zeros_like(one), one, beta=beta, reference=reference)                    # (4, 1, 1, 4)
    expected = (table.softmax(-1).view(4, 1, 1, 1) * pulls).sum(0)
    toward = beta * (reference.softmax(-1) - table.softmax(-1))                          # -beta grad KL(pi_ref || pi)
    yield Row("Def. 4.1 |KL's pull|, beta=0.1", "equal rewards", None, float(toward.norm()), float(expected.norm()), None,
              verdict(near(float((expected - toward).norm()), 0), "forward KL"))


def lemma(o: Options):
    """Lemma 1.2. KL(delta_{a*} || pi) = sum over a of delta(a) log(delta(a) / pi(a)) = -log pi(a*). If it is at most eps, then
    pi(a*) >= exp(-eps) >= 1 - eps, the last because exp is convex and 1 - eps its tangent at 0. Tight where the KL is eps.

    For a deterministic expert that KL is stage 1's own loss on the action, so the check runs a small random language model:
    eps from model.token_logprobs, pi(a*) from the softmax of all its logits. For an expert that is not deterministic the
    lemma fails: KL = 0 says pi = expert, whose best action may have any probability; what remains is Pinsker's inequality,
    pi(a*) >= expert(a*) - sqrt(KL / 2).
    """
    lm, tokenizer = policy.builtin_policy(["the quick brown fox jumps over the lazy dog"], o.seed, width=16, layers=1)
    policy.add_reward_tokens(lm, tokenizer)
    banned = lm.config.reward_token_ids
    prompt = torch.randint(0, min(banned), (64, 6), generator=torch.Generator().manual_seed(o.seed))
    for temperature in (2.0, 0.3, 0.03):
        with torch.no_grad():
            logits = lm(prompt).logits[:, -1].double() / temperature                     # (64, V)
            logits[:, banned] = float("-inf")
            probs = logits.softmax(-1)
            expert = probs.argmax(-1, keepdim=True)
            mask = torch.zeros(64, 7, dtype=torch.bool)
            mask[:, -1] = True
            eps = -policy.token_logprobs(lm, torch.cat([prompt, expert], 1), mask, temperature)[:, -1].double()
        chosen = probs.gather(1, expert).squeeze(1)
        good = bool((chosen >= 1 - eps - 1e-6).all()) and near(float((chosen - (-eps).exp()).abs().max()), 0)
        yield Row("Lemma 1.2 pi(a*), mean", f"LM at T={temperature}, eps={float(eps.mean()):.3f}", float((1 - eps).mean()),
                  float((-eps).exp().mean()), float(chosen.mean()), None, verdict(good, "tight" if eps.mean() < 1 else "vacuous"))
    gen = torch.Generator().manual_seed(o.seed)
    expert = (2 * torch.randn(o.samples, 4, generator=gen, dtype=torch.float64)).softmax(-1)
    pi = (expert.log() + torch.randn(o.samples, 4, generator=gen, dtype=torch.float64)).softmax(-1)
    kl, best = (expert * (expert / pi).log()).sum(-1), expert.argmax(-1, keepdim=True)
    chosen, wanted = pi.gather(1, best).squeeze(1), expert.gather(1, best).squeeze(1)
    broken = float((chosen < (-kl).exp()).double().mean())
    yield Row("Lemma 1.2 share of pi(a*) < exp(-KL)", "experts that are not deterministic", None, None, broken, None,
              verdict(broken > 0.5 and bool((chosen >= wanted - (kl / 2).sqrt()).all()), "lemma fails, Pinsker holds"))


def vanishing(o: Options):
    """Proposition 4.2. If at every history pi gives the expert's action at least exp(-eps), one rollout is the expert's with
    probability >= exp(-T eps), all G of them with >= exp(-G T eps) >= (1-eps)^(GT) >= 1 - G T eps, and then the group
    collapses. Here a collapse is all rewards equal, a larger event (all may fail): q^G + (1-q)^G for success probability q.

    Gradient: a group that has not collapsed gives at most sqrt(2), since the mean of |A| is at most 1 and the gradient of a
    log-softmax at most sqrt(2); so E||g|| <= sqrt(2) G T eps. The rate is exact: for small eps just one rollout deviates in
    one step, it has A = -sqrt(G-1), and E||g|| = sqrt(2 (G-1)) eps. The bound 1 - G T eps is vacuous from eps = 1/(G T) on
    (G = 4, ten messages: pi(a*) < 0.975); (1-eps)^(GT) never is. No bound says anything on groups that are all wrong.
    """
    game, gen = Game(3, 2), torch.Generator().manual_seed(o.seed)

    def peaked(eps):
        return game.table(*[[math.exp(-eps), -math.expm1(-eps)]] * game.T)
    for G in o.sizes:
        for eps in (0.2, 0.02, 0.002):
            probs, q = game.probabilities(peaked(eps)), float(game.success(peaked(eps)))
            bound, sharp = 1 - G * game.T * eps, (1 - eps) ** (G * game.T)
            coincide, exact = float((probs ** G).sum()), q ** G + (1 - q) ** G
            advantages = grpo.group_advantages(game.rewards[draw(probs, o.samples * G, gen).view(o.samples, G)], EPS_STAB)
            measured, error = estimate((advantages == 0).all(1))
            good = bound <= sharp <= math.exp(-G * game.T * eps) <= coincide + 1e-9 and coincide <= exact + 1e-9
            yield Row("Prop. 4.2 P(collapse)", f"G={G} T={game.T} eps={eps} (sharp {sharp:.3f})", bound, exact, measured, error,
                      verdict(good and near(measured, exact, error), "vacuous" if bound <= 0 else "holds"))
    for G in [size for size in o.sizes if size <= 8]:
        sizes, rates = [], (1e-1, 1e-3, 1e-4)
        groups = torch.tensor(list(combinations_with_replacement(range(len(game.actions)), G)))                # (C, G) multisets
        ways = torch.tensor([math.factorial(G) // math.prod(map(math.factorial, Counter(g).values())) for g in groups.tolist()])
        for eps in rates:
            chance = ways * game.probabilities(peaked(eps))[groups].prod(1)                                    # (C,), sums to 1
            norms = step(game, peaked(eps)[None], torch.zeros_like(groups), groups).flatten(1).norm(dim=1)
            sizes.append(float((chance * norms).sum()))
        picks = draw(game.probabilities(peaked(0.1)), o.samples * G, gen).view(-1, G)
        measured, error = estimate(step(game, peaked(0.1)[None], torch.zeros_like(picks), picks).flatten(1).norm(dim=1))
        yield Row("Prop. 4.2 E||g||", f"G={G} T={game.T} eps=0.1", math.sqrt(2) * G * game.T * 0.1, sizes[0], measured, error,
                  verdict(sizes[0] <= math.sqrt(2) * G * game.T * 0.1 and near(measured, sizes[0], error)))
        limit = math.sqrt(2 * (G - 1)) * rates[-1]
        yield Row("Prop. 4.2 E||g|| -> sqrt(2(G-1)) eps", f"G={G} T={game.T} eps={rates[-1]}", math.sqrt(2) * G * game.T * rates[-1],
                  limit, sizes[-1], None, verdict(abs(sizes[-1] / limit - 1) < 0.02, "rate"))
        slope = math.log(sizes[-2] / sizes[-1]) / math.log(rates[-2] / rates[-1])
        yield Row("Prop. 4.2 exponent of eps", f"G={G} T={game.T}, eps {rates[-2]} to {rates[-1]}", None, 1.0, slope, None,
                  verdict(abs(slope - 1) < 0.05, "rate"))


def binomial_group(q: float, G: int, eps: float = EPS_STAB) -> dict[str, float]:
    """Exact values for a group of G independent rollouts that succeed with probability q: k successes have
    sigma = sqrt(k (G-k)) / G, gap 1 / (sigma + eps), and push up success (see near_collapse) by u = sigma^2 / (sigma + eps)."""
    pmf = [math.comb(G, k) * q ** k * (1 - q) ** (G - k) for k in range(G + 1)]
    sigmas = [math.sqrt(k * (G - k)) / G for k in range(G + 1)]
    push = [s * s / (s + eps) for s in sigmas]

    def mean(values):
        return sum(p * value for p, value in zip(pmf, values))
    return {"flat": pmf[0] + pmf[G], "variance": mean(s * s for s in sigmas), "gap": mean((s > 0) / (s + eps) for s in sigmas),
            "push": mean(push), "noise": math.sqrt(max(0.0, mean(u * u for u in push) - mean(push) ** 2))}


def near_collapse(o: Options):
    """Between the exact cases, which the paper leaves open: G independent rollouts that succeed with probability q.

    P(sigma = 0) = q^G + (1-q)^G and E[sigma^2] = (G-1)/G q(1-q). Along the direction that raises success (success or failure
    as a two-way choice with logit theta, grad log pi = 1-q or -q) a group pushes by u = 1/G sum_j A_j grad_j, and as
    advantages sum to 0, u = (sum of the successes' A)/G = sigma^2 / (sigma + eps), about sigma itself. Undivided it would be
    sigma^2: division by sigma makes the push of one success among G sqrt(G-1)/G instead of (G-1)/G^2, larger by
    G/sqrt(G-1), and gives that one rollout the advantage sqrt(G-1). A rare success is a large update by design.

    What follows for G. With N rollouts in a step, the mean of N/G groups has signal to noise sqrt(N/G) E[u]/sd[u]. For rare
    success (q << 1/G) that is sqrt(N q) whatever G is, because each success makes one informative group: G only scales the
    step, by sqrt(G-1), which Adam undoes. At q = 1/2 it grows with G. So choose G for the middle of the tasks, not in the
    hope of rare successes; half of the groups are informative from about G = 0.7/q on.

    The clip, with several updates on the same rollouts: a rare success stops at pi = (1+clip) q, but the failures go on being
    pushed down until (1-pi) = (1-clip)(1-q); so pi rises to clip + (1-clip) q, not to (1+clip) q, and then stops exactly.
    """
    bandit, gen = Game(1, 2), torch.Generator().manual_seed(o.seed)
    for G, q in product(o.sizes, (0.05, 0.5)):
        exact = binomial_group(q, G)
        picks = draw(torch.tensor([q, 1 - q]), o.samples * G, gen).view(-1, G)
        rewards = bandit.rewards[picks]
        sigmas, advantages = sigma(rewards), grpo.group_advantages(rewards, EPS_STAB)
        push = step(bandit, bandit.table([q, 1 - q])[None], torch.zeros_like(picks), picks)[:, 0, 0, 0]       # d/d logit of success
        measured = {"flat": estimate(sigmas == 0), "variance": estimate(sigmas ** 2),
                    "gap": estimate(advantages.amax(1) - advantages.amin(1)), "push": estimate(push)}
        for name, title in (("flat", "P(sigma=0)"), ("variance", "E[sigma^2]"), ("gap", "E[advantage gap]"), ("push", "E[push]")):
            yield Row(f"Near-collapse {title}", f"G={G} q={q}", None, exact[name], *measured[name],
                      verdict(near(measured[name][0], exact[name], measured[name][1])))
        pushed = sigmas.double().square().mean().item()
        yield Row("Near-collapse push over undivided", f"G={G} q={q}", None, exact["push"] / exact["variance"],
                  measured["push"][0] / pushed, measured["push"][1] / pushed,
                  verdict(near(measured["push"][0], exact["push"], measured["push"][1])))
    for q in (0.02, 0.5):
        for G in (2, 4, 8, 16):
            group = binomial_group(q, G)
            exact = group["push"] / group["noise"] / math.sqrt(G)
            picks = draw(torch.tensor([q, 1 - q]), o.samples * G, gen).view(-1, G)
            push = step(bandit, bandit.table([q, 1 - q])[None], torch.zeros_like(picks), picks)[:, 0, 0, 0].double()
            measured = float(push.mean() / push.std() / math.sqrt(G))
            centred, variance = push - push.mean(), push.var()
            influence = centred / variance.sqrt() - push.mean() * (centred ** 2 - variance) / (2 * variance ** 1.5)      # delta method
            error = estimate(influence)[1] / math.sqrt(G)
            yield Row("Choice of G: signal/noise per sqrt(N)", f"q={q} G={G}" + (f", sqrt(q)={math.sqrt(q):.3f}" if q < 0.1 else ""), None, exact,
                      measured, error, verdict(near(measured, exact, error)))
    q, G, rate = 0.05, 16, 0.2
    old = bandit.logprobs(bandit.table([q, 1 - q]))                                       # (2, 1)
    picks, table = torch.tensor([0] + [1] * (G - 1)), bandit.table([q, 1 - q])
    advantages = grpo.group_advantages(bandit.rewards[picks][None], EPS_STAB)[0]
    for _ in range(500):                                                                  # updates on the same group
        leaf = table.clone().requires_grad_()
        loss, _ = grpo.clipped_loss(bandit.logprobs(leaf)[picks], old[picks], None, advantages, torch.ones(G, 1, dtype=torch.bool), CLIP, 0.0)
        table = table - rate * torch.autograd.grad(loss, leaf)[0]
    reached, stop = float(bandit.success(table)), CLIP + (1 - CLIP) * q
    yield Row("Near-collapse pi under the clip", f"q={q} G={G}, 500 updates on one group", stop, stop, reached, None,
              verdict(stop <= reached <= stop + 0.02, "stops there"))


REWARDS = (("certain modes", 1.0, 0.0, None), ("bernoulli .6/.1", 0.6, 0.1, None), ("no separation", 0.5, 0.5, 0.5), ("gaussian 1/.2", 1.0, 0.2, 0.5))


def moments(high: float, low: float, deviation: float | None) -> tuple[float, float]:
    """Variances of the reward under the two tokens: Bernoulli where no deviation is given."""
    return (high * (1 - high), low * (1 - low)) if deviation is None else (deviation ** 2, deviation ** 2)


def rewards_of(modes: torch.Tensor, high: float, low: float, deviation: float | None, gen: torch.Generator) -> torch.Tensor:
    """(P, G) modes -> (P, G) rewards: Bernoulli, or Gaussian where a deviation is given."""
    mean = torch.where(modes == HIGH_MODE, high, low)
    return torch.bernoulli(mean, generator=gen) if deviation is None else mean + deviation * torch.randn(modes.shape, generator=gen)


def between(G: int, p: float, how: str) -> float:
    """What the separation is worth: E[sigma_g^2] of a group of G whose rewards are 1 under the high token and 0 under the low one."""
    odd = round(p * G, 9) % 1                            # stratified: n or n + 1 high tokens where p G is n + odd
    return (G - 1) / G * p * (1 - p) if how == "iid" else p * (1 - p) - odd * (1 - odd) / G ** 2


def variance_value(G: int, p: float, squared: float, high: float, low: float, how: str = "iid") -> float:
    """E[sigma_g^2] from the squared separation and the conditional variances under the two tokens (variance, stratified)."""
    return (G - 1) / G * (p * high + (1 - p) * low) + between(G, p, how) * squared


def variance(o: Options):
    """Proposition 4.3. Tokens drawn i.i.d. with P(high) = p, separation Delta = |E[R|high] - E[R|low]|: E[sigma_g^2] >= (G-1)/G p(1-p) Delta^2.

    The rewards of a group are then i.i.d. from the mixture, so E[sigma_g^2] = (G-1)/G Var(R), and by the law of total variance
    Var(R) = p Var_high + (1-p) Var_low + p(1-p) Delta^2. The bound drops the first two: equality iff each token determines
    the reward. It is vacuous for p = 0 or 1 and without separation. (Like the paper's, for one task: over tasks the
    averages of both sides compare, with the average of Delta^2, not the square of its average.)
    """
    gen = torch.Generator().manual_seed(o.seed)
    for G, p, (name, high, low, deviation) in [*product(o.sizes, o.shares, REWARDS), (o.sizes[0], 0.0, REWARDS[1]), (o.sizes[0], 1.0, REWARDS[1])]:
        bound = between(G, p, "iid") * (high - low) ** 2
        exact = variance_value(G, p, (high - low) ** 2, *moments(high, low, deviation))
        modes = token_modes(o.samples, G, p, "iid", o.seed)
        measured, error = estimate(sigma(rewards_of(modes, high, low, deviation, gen)) ** 2)
        yield Row("Prop. 4.3 E[sigma^2], iid", f"G={G} p={p} {name}", bound, exact, measured, error,
                  verdict(bound <= exact + 1e-12 and near(measured, exact, error),
                          "vacuous" if bound == 0 else "tight" if exact - bound < 1e-12 else "holds"))


def stratified(o: Options):
    """Our addition. Draw exactly p G high tokens a group: E[sigma_g^2] = (G-1)/G (p Var_high + (1-p) Var_low) + p(1-p) Delta^2.

    The share of high rows is now a constant, so the variance between the modes keeps its factor 1: the bound is p(1-p) Delta^2,
    never below the i.i.d. value, and no group has one token only. Where p G = n + f is no integer, n or n+1 are drawn and
    f(1-f)/G^2 Delta^2 is lost: the least variance that a whole number with mean p G can have, so still not below i.i.d.
    """
    gen = torch.Generator().manual_seed(o.seed + 1)
    for G, p, (name, high, low, deviation) in [*product(o.sizes, o.shares, REWARDS), (5, 0.5, REWARDS[1])]:
        bound = between(G, p, "stratified") * (high - low) ** 2
        exact, iid = (variance_value(G, p, (high - low) ** 2, *moments(high, low, deviation), how) for how in ("stratified", "iid"))
        modes = token_modes(o.samples, G, p, "stratified", o.seed)
        measured, error = estimate(sigma(rewards_of(modes, high, low, deviation, gen)) ** 2)
        mixed = bool((modes.amin(1) < modes.amax(1)).all()) or not 1 <= p * G <= G - 1
        good = mixed and bound <= exact + 1e-12 and exact >= iid - 1e-12
        yield Row("Stratified E[sigma^2]", f"G={G} p={p} {name}", bound, exact, measured, error,
                  verdict(good and near(measured, exact, error),
                          "vacuous" if bound == 0 else "tight" if exact - bound < 1e-12 else "holds"))


def step_factor(q: float, G: int, eps: float = EPS_STAB) -> float:
    """alpha(q) = E[A | this rollout succeeds] - E[A | it fails], the other G-1 succeeding with probability q each."""
    pmf = [math.comb(G - 1, k) * q ** k * (1 - q) ** (G - 1 - k) for k in range(G)]
    sigmas = [math.sqrt(k * (G - k)) / G for k in range(G + 1)]
    return sum(p * ((1 - (k + 1) / G) / (sigmas[k + 1] + eps) + (k / G) / (sigmas[k] + eps)) for k, p in enumerate(pmf))


def what_variance_teaches(o: Options):
    """Our own: the expected update of RC-GRPO, at ratio 1 and beta = 0. J_h, J_l: success under the two tokens.

    Undivided: E[1/G sum_j (R_j - mean) grad log pi(tau_j|r_j)]. For i != j, E[R_i grad log pi(tau_j|r_j)] = 0 (independent rollouts,
    E[grad log pi] = 0), so of the mean only R_j/G is left: E = (G-1)/G (p grad J_h + (1-p) grad J_l). Exactly the two
    modes' own policy gradients, weighted by their share of the rows. The variance between the modes is in no term.

    Divided by sigma, rewards 0 or 1: E[A_j | R_j] depends on the row's own reward alone, as the other rows are i.i.d. from the
    mixture whatever token this row has. So E = alpha(m) (p grad J_h + (1-p) grad J_l), m = p J_h + (1-p) J_l: a common step
    size. GRPO under the high token alone has alpha(J_h) grad J_h. alpha hardly varies: at G = 4 from 1.62 to 1.73.

    So with separate parameters per token the low rows teach the high mode NOTHING but a step size, however large the variance
    that they make; it gets its own gradient from p of the rows. With shared parameters a step eta adds eta (1-p) <grad J_h, grad J_l>
    to J_h: what the low rows teach is the cosine of the two gradients (a tabular policy whose logits are
    a * shared + sqrt(1-a^2) * own has a^2 times the cosine of the tables). The paper reads Proposition 4.3 as "variance, hence
    learning"; the guarantee holds, but variance between modes is no teacher by itself: it keeps sigma > 0 while the direction
    is what the rows' own gradients are. What is bought is exploration under another mode, worth what transfers.
    """
    game, gen, p = Game(2, 2), torch.Generator().manual_seed(o.seed), 0.5
    high, low = game.table([0.9, 0.1], [0.8, 0.2]), game.table([0.3, 0.7], [0.6, 0.4])
    tables = torch.stack([high, low]) + 0.3 * torch.randn(2, game.H, 2, generator=gen)   # (2, H, K)
    success = game.success(tables)
    own = torch.stack([game.gradient_of_success(table) for table in tables]) / game.T    # the loss takes the mean over T tokens
    share = torch.tensor([p, 1 - p])[:, None, None]
    for G in (2, 4):
        picks = torch.tensor(list(product(range(len(game.actions)), repeat=G)))          # (N^G, G)
        update = {"undivided": 0.0, "divided": 0.0}
        for tokens in product((HIGH_MODE, LOW_MODE), repeat=G):
            modes = torch.tensor(tokens).expand_as(picks)
            chance = (game.probabilities(tables)[modes, picks].prod(1) * math.prod(float(share[m]) for m in tokens))[:, None, None, None]
            rewards = game.rewards[picks]
            huge = 1e4                                                                   # eps_stab so large that only it divides
            centred = grpo.group_advantages(rewards, huge) * huge
            update["undivided"] = update["undivided"] + (chance * step(game, tables, modes, picks, advantages=centred)).sum(0)
            update["divided"] = update["divided"] + (chance * step(game, tables, modes, picks)).sum(0)
        mixture = p * float(success[HIGH_MODE]) + (1 - p) * float(success[LOW_MODE])
        predicted = {"undivided": (G - 1) / G * share * own, "divided": step_factor(mixture, G) * share * own}
        for name, exact in predicted.items():
            yield Row(f"RC update, {name}, |high table|", f"G={G} p={p}", None, float(exact[HIGH_MODE].norm()), float(update[name][HIGH_MODE].norm()),
                      None, verdict(float((update[name] - exact).norm()) < 2e-4 * float(exact.norm())))
        plain = step_factor(float(success[HIGH_MODE]), G) * own[HIGH_MODE]
        chance = game.probabilities(tables)[HIGH_MODE][picks].prod(1)[:, None, None, None]
        alone = (chance * step(game, tables, torch.full_like(picks, HIGH_MODE), picks)).sum(0)[HIGH_MODE]
        yield Row("GRPO update, |high table|", f"G={G}, all high", None, float(plain.norm()), float(alone.norm()), None,
                  verdict(float((alone - plain).norm()) < 2e-4 * float(plain.norm())))
    direction, eta = update["undivided"].double(), 1e-3                                  # G = 4
    for shared in (0.0, 0.5, 1.0):                                                       # a^2
        moved = tables.double() + eta * (direction + shared * direction.flip(0))
        gain = float(game.success(moved)[HIGH_MODE] - game.success(tables)[HIGH_MODE]) / eta
        inner = [float((own[HIGH_MODE] * own[mode]).sum()) * game.T for mode in (HIGH_MODE, LOW_MODE)]
        exact = (G - 1) / G * (p * inner[HIGH_MODE] + (1 - p) * shared * inner[LOW_MODE])
        cosine = shared * inner[LOW_MODE] / game.T / float(own[HIGH_MODE].norm() * own[LOW_MODE].norm())
        yield Row("dJ_high / step", f"G={G}, cosine of the modes {cosine:.2f}", None, exact, gain, None, verdict(abs(gain / exact - 1) < 0.01))


WRONG = [3e-4, 0.999 - 3e-4, 5e-4, 5e-4]                  # sure of a wrong action
SURE, FAIR, WIDE = [0.98, 0.01, 0.005, 0.005], [0.7, 0.2, 0.05, 0.05], [0.3, 0.3, 0.2, 0.2]
SETTINGS = {                                              # high mode, low mode (one list a step), share of the parameters a^2
    "shortcut": ((WRONG, [0.9, 0.04, 0.03, 0.03]), (WIDE, WIDE), 0.5),
    "shortcut, nothing shared": ((WRONG, [0.9, 0.04, 0.03, 0.03]), (WIDE, WIDE), 0.0),
    "high has it already": ((SURE, SURE), (WIDE, WIDE), 0.5),
    "low learns it too": ((FAIR, FAIR), (WIDE, WIDE), 0.5)}


def train_tables(o: Options, setting: str, conditioned: bool, steps: int = 200, G: int = 8, rate: float = 3.0):
    """Train o.seeds tables side by side, one group of G rollouts a step -> (success by mode before every step and after all,
    (steps + 1, seeds, 2); mean of sigma_g^2 over all steps and seeds)."""
    game, gen = Game(2, 4), torch.Generator().manual_seed(o.seed)
    high, low, shared = SETTINGS[setting]
    tables = torch.stack([game.table(*high), game.table(*low)]).expand(o.seeds, -1, -1, -1).clone()            # (S, 2, H, K)
    history, spread = [], 0.0
    for number in range(steps):
        history.append(game.success(tables))
        modes = token_modes(o.seeds, G, 0.5 if conditioned else 1.0, "iid", (o.seed, number))                  # (S, G)
        probs = game.probabilities(tables)[torch.arange(o.seeds)[:, None], modes]                              # (S, G, N)
        picks = draw(probs.flatten(0, 1), 1, gen).view(o.seeds, G)
        spread += float((sigma(game.rewards[picks]) ** 2).mean()) / steps
        direction = step(game, tables, modes, picks)
        tables = tables + rate * (direction + shared * direction.flip(1))                # a step in shared and own parameters
    return torch.stack(history + [game.success(tables)]), spread


def remark(o: Options, curves: dict):
    """Remark 4.4. The paper: variance that does not degenerate keeps the updates informative, so training does not stall.

    True where the other mode finds what this one does not, and where what it learns carries over. "shortcut": the high mode is
    sure of a wrong action and the low mode is not. GRPO under the high token sees no success, RC-GRPO with as many
    rollouts moves on. The same with nothing shared: just as much variance, and the high mode learns nothing from it. It does
    not help where the high mode already succeeds on all that it can reach, though high-succeeds-low-fails is variance too; nor
    where the low mode learns to succeed: the reward ignores the token, so the separation closes and its variance goes with it.
    """
    for setting in SETTINGS:
        (plain, alone), (mixed, together) = (train_tables(o, setting, conditioned) for conditioned in (False, True))
        curves[setting] = (plain, mixed)
        gain, error = estimate(mixed[-1, :, HIGH_MODE] - plain[-1, :, HIGH_MODE])
        helps = setting == "shortcut"
        separation = (mixed[:, :, HIGH_MODE] - mixed[:, :, LOW_MODE]).mean(1)            # (steps + 1,)
        yield Row(f"Remark 4.4 {setting}", f"J_high {float(plain[0, :, HIGH_MODE].mean()):.2f} -> GRPO {float(plain[-1, :, HIGH_MODE].mean()):.2f}, "
                  f"RC {float(mixed[-1, :, HIGH_MODE].mean()):.2f}; sigma^2 {alone:.2f}, {together:.2f}", None, None, gain, error,
                  verdict(gain > 0.3 and gain > 4 * error if helps else gain < 0.05, "moves on" if helps else "no help"))
        middle = float(separation[len(separation) // 2])
        closed = abs(float(separation[-1])) < 0.1 * abs(float(separation[0]))
        yield Row("Remark 4.4 separation under RC", f"{setting}: {float(separation[0]):+.2f}, {middle:+.2f} half-way", None, None,
                  *estimate(mixed[-1, :, HIGH_MODE] - mixed[-1, :, LOW_MODE]),
                  verdict(closed or "shortcut" in setting, "closes" if closed else "other way round"))


# ---------------------------------------------------------------------------------------------------------------------
# next to a real run

def read_groups(folder: str) -> dict[int, list[list[dict]]]:
    """episodes.jsonl of an RL run -> its groups by step. Raises UserError where there are none."""
    file, groups = Path(folder) / "episodes.jsonl", {}
    require(file.exists(), f"--run: there is no {file}; give the run folder of rcgrpo.py or grpo.py")
    for number, row in enumerate(read_jsonl(file), 1):
        try:
            if row["advantage"] is not None:                                             # else a step that was left out, see state.py
                groups.setdefault(row["step"], {}).setdefault(row["group"], []).append({key: row[key] for key in ("goal", "reward", "advantage")})
        except (TypeError, KeyError):
            raise UserError(f"--run: line {number} of {file} is no rollout of an RL run; give the run folder of rcgrpo.py or grpo.py")
    require(bool(groups), f"--run: {file} has no episodes")
    return {number: list(of_step.values()) for number, of_step in sorted(groups.items())}


def from_run(o: Options, curve: dict):
    """Proposition 4.3 on a run's own rollouts: E[sigma_g^2] per step, the exact formula, the bound.

    Exact: per task, with unbiased estimates from its own rollouts: sample variances under either token, and (difference of
    means)^2 less its own sampling variance for Delta^2; groups with two rows of each token at least. In these estimates the
    formula is an identity once the tokens are given, so what it tests is that tokens were drawn as P_sample says, row by
    row. Bound: from the separation of the whole step, squared, less its squared standard error; by Jensen's inequality the
    mean over tasks of Delta^2 is at least that. Tokens drawn once per group, say, break the bound.
    """
    options = read_json(Path(o.run) / "config.json")["options"]
    G, p, how = options["group"], options.get("p_high"), options.get("how", "iid")
    worst, steps = 0.0, []
    for number, groups in read_groups(o.run).items():
        rewards = torch.tensor([[row["reward"] for row in group] for group in groups])   # (P, G)
        recorded = torch.tensor([[row["advantage"] for row in group] for group in groups])
        worst = max(worst, float((grpo.group_advantages(rewards, options["eps_stab"]) - recorded).abs().max()))
        high = torch.tensor([[row["goal"] == "high" for row in group] for group in groups])
        n, m, spread = {}, {}, {}                                                        # by token, of each group: (P,)
        for token, where in (("high", high), ("low", ~high)):
            n[token] = where.sum(1)
            m[token] = (rewards * where).sum(1) / n[token].clamp_min(1)
            spread[token] = ((rewards - m[token][:, None]) ** 2 * where).sum(1) / (n[token] - 1).clamp_min(1)
        bound, exact = 0.0, torch.zeros(0)
        if p is not None:                                                                # plain GRPO has no token to separate
            squared = (m["high"] - m["low"]) ** 2 - spread["high"] / n["high"].clamp_min(1) - spread["low"] / n["low"].clamp_min(1)
            exact = variance_value(G, p, squared, spread["high"], spread["low"], how)[(n["high"] >= 2) & (n["low"] >= 2)]
        if p is not None and high.any() and not high.all():
            mean = {"high": float(rewards[high].mean()), "low": float(rewards[~high].mean())}
            influence = n["high"] * (m["high"] - mean["high"]) / n["high"].sum() - n["low"] * (m["low"] - mean["low"]) / n["low"].sum()
            bound = between(G, p, how) * max(0.0, (mean["high"] - mean["low"]) ** 2 - float((influence ** 2).sum()))
        steps.append((number, bound, exact, sigma(rewards, options["eps_stab"]) ** 2))
    deviations = []                                                                      # over all groups: one step has few of them
    for values in (torch.cat([measured for *_, measured in steps]), torch.cat([exact for *_, exact, _ in steps])):
        deviations.append(float(values.std()) if len(values) > 1 else 0.0)
    shown = [(number, bound, float(exact.mean()), float(measured.mean()), deviations[0] / math.sqrt(len(measured)),
              deviations[1] / math.sqrt(max(1, len(exact)))) for number, bound, exact, measured in steps]
    curve["rows"] = shown
    yield Row("Run: recorded advantages, |difference|", o.run, 0.0, 0.0, worst, None, verdict(worst < 1e-4, "as recomputed"))
    every = max(1, len(shown) // 8)
    for number, bound, exact, measured, error, exact_error in shown:
        good = measured >= bound - 5 * error - 1e-6 and (math.isnan(exact) or abs(measured - exact) <= 5 * math.hypot(error, exact_error) + 1e-6)
        if number % every == 0 or number == 1 or not good:
            yield Row("Run: E[sigma^2]", f"step {number}, G={G}" + ("" if p is None else f" p={p} {how}"), bound,
                      None if math.isnan(exact) else exact, measured, error, verdict(good, "vacuous" if bound == 0 else "holds"))
    means = [sum(values) / len(values) for values in zip(*[row[1:4] for row in shown if not math.isnan(row[2])])]
    if means:
        error, exact_error = (math.sqrt(sum(row[i] ** 2 for row in shown)) / len(shown) for i in (4, 5))
        yield Row("Run: E[sigma^2], mean", f"{len(shown)} steps", *means, error,
                  verdict(means[2] >= means[0] - 4 * error and abs(means[2] - means[1]) <= 4 * math.hypot(error, exact_error)))


def policy_of_run(o: Options, source: str, options: dict, when: str):
    """Proposition 4.2 and the cosine of the two modes' gradients, measured on a checkpoint (start or end of the run).

    4.2: T eps is -log pi(demonstration), summed over its tokens, under the high token; the mean over tasks of both bounds next
    to the share of groups of G rollouts under the high token whose rewards are all equal.
    Cosine: the gradient of each mode's success on the same tasks, by the training loss with undivided centred rewards. Noise
    would shorten it, so norms come from two independent halves of the rollouts (nan: they point apart, noise is all there
    is); standard error by the jackknife over tasks. Of a large model every k-th weight stands for all.
    """
    fields = {key: options[key] for key in TaskOptions.__dataclass_fields__}
    topics = TaskOptions(**fields)
    lm, tokenizer = policy.load_policy(source, topics.torch_device())
    sampler = Sampler(lm, tokenizer, options["rows"], options["max_message"], options["max_messages"])
    tasks, G, parts = load_tasks(topics, "validation", o.tasks, seed=30_000 + o.seed), 8, 8
    episodes = [(goal, task.episode()) for goal in (HIGH, LOW) for task in tasks for _ in range(G)]
    prompts = [sampler.renderer.prompt(episode.messages, episode.tools, goal) for goal, episode in episodes]
    rolled = sampler.rollout([episode for _, episode in episodes], prompts, options["temperature"], seed=(o.seed, 0))
    rewards = torch.tensor([0.0 if t.truncated else float(trajectory_reward(t.episode).total) for t in rolled]).view(2, len(tasks), G)

    nll = []
    for task in tasks:
        ids, mask = sampler.renderer.conversation(demonstrate(task).messages, task.episode().tools, HIGH)
        with torch.no_grad():
            nll.append(-float(policy.token_logprobs(lm, torch.tensor([ids], device=lm.device), torch.tensor([mask], device=lm.device)).sum()))
    nll = torch.tensor(nll, dtype=torch.float64)
    flat, error = estimate(sigma(rewards[0]) == 0)
    sharp = float((-G * nll).exp().mean())
    bound = float((1 - G * nll).mean())
    yield Row(f"Run: P(collapse) under high, {when}", f"G={G}, T eps: median {float(nll.median()):.2f} nats, sharp {sharp:.3f}",
              bound, None, flat, error, verdict(flat >= max(bound, sharp) - 4 * error, "vacuous" if bound <= 0 else "holds"))

    def gradient(mode: int, half: int, part: int) -> torch.Tensor:
        """Of the success under one mode, from half of the rollouts on one part of the tasks; weights in one vector."""
        rows = [(t, j) for t in range(part, len(tasks), parts) for j in range(half * G // 2, (half + 1) * G // 2)]
        centred = rewards[mode, :, half * G // 2:(half + 1) * G // 2]
        centred = (centred - centred.mean(1, keepdim=True)) * (G // 2) / (G // 2 - 1)    # unbiased: its own reward is in the mean
        picked = [rolled[(mode * len(tasks) + t) * G + j] for t, j in rows]
        weights = grpo.loss_weights(torch.tensor([t.sampled for t in picked]), "sequence")
        lm.zero_grad(set_to_none=True)
        for batch in policy.batches_by_length([len(t.ids) for t in picked], options["token_budget"]):
            ids, mask = (policy.pad([getattr(picked[i], name) for i in batch], fill, lm.device) for name, fill in (("ids", 0), ("mask", False)))
            logp = policy.token_logprobs(lm, ids, mask, options["temperature"])
            advantages = torch.stack([centred[rows[i][0], rows[i][1] - half * G // 2] for i in batch]).to(lm.device)
            grpo.clipped_loss(logp, logp.detach(), None, advantages, mask, CLIP, 0.0, weights[batch].to(lm.device))[0].backward()
        return torch.cat([-p.grad.flatten()[::stride].float().cpu() for p in lm.parameters() if p.grad is not None])

    stride = -(-sum(p.numel() for p in lm.parameters()) // 4_000_000)
    sums = torch.stack([gradient(*which) for which in product((0, 1), (0, 1), range(parts))]).unflatten(0, (2, 2, parts))

    def cosine(keep) -> tuple[float, float]:
        g = sums[:, :, keep].sum(2)                                                      # (mode, half, weights)
        inner = float(g[0].mean(0) @ g[1].mean(0))
        squares = [float(g[mode, 0] @ g[mode, 1]) for mode in (0, 1)]
        return inner / math.sqrt(squares[0] * squares[1]) if min(squares) > 0 else math.nan, inner / squares[0] if squares[0] > 0 else math.nan
    for i, title in enumerate(("cosine of the modes' gradients", "<high, low> / <high, high>")):
        left_out = torch.tensor([cosine([k for k in range(parts) if k != part])[i] for part in range(parts)])
        error = math.sqrt((parts - 1) / parts * float(((left_out - left_out.mean()) ** 2).sum()))
        yield Row(f"Run: {title}, {when}", f"{len(tasks)} tasks x {G}, success {float(rewards[0].mean()):.2f} / {float(rewards[1].mean()):.2f}",
                  None, None, cosine(list(range(parts)))[i], error, "measured" if math.isfinite(error) else "lost in noise")


# ---------------------------------------------------------------------------------------------------------------------
# the table and the figure

CHECKS = (collapse, lemma, vanishing, near_collapse, variance, stratified, what_variance_teaches)


def show(row: Row) -> str:
    """A line of the table."""
    def number(value):
        return "" if value is None else "0" if value == 0 else f"{value:.4g}" if 1e-3 <= abs(value) < 1e5 else f"{value:.1e}"
    measured = number(row.measured) + (f" +- {number(row.error)}" if row.error else "")
    return f"{row.statement:42} {row.setting:52} {number(row.bound):>9} {number(row.exact):>9} {measured:>21}  {row.verdict}"


def figure(o: Options, curves: dict, run: dict):
    """Collapse and its bounds, near-collapse, variance against p, the remark's training curves, and the run's variance."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    fig, axes = plt.subplots(2, 3, figsize=(13, 7), layout="constrained")
    G, T, eps = o.sizes[0], 3, torch.logspace(-3, 0, 60, dtype=torch.float64)
    q = (-T * eps).exp()
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set(title=f"Prop. 4.2: collapse, G={G}, T={T}", xlabel="eps", xscale="log", ylim=(-0.05, 1.05))
    axes[0, 0].plot(eps, q ** G + (1 - q) ** G, label="exact, all rewards equal")
    axes[0, 0].plot(eps, (1 - eps).clamp_min(0) ** (G * T), "--", label="(1-eps)^(GT)")
    axes[0, 0].plot(eps, 1 - G * T * eps, ":", label="1 - G T eps")
    grid = torch.linspace(0.005, 0.995, 100).tolist()
    axes[0, 1].set(title="near-collapse: P(sigma = 0), and push by sigma (dashed)", xlabel="q")
    for i, size in enumerate((2, 4, 8, 16)):
        exact = [binomial_group(q, size) for q in grid]
        axes[0, 1].plot(grid, [e["flat"] for e in exact], color=f"C{i}", label=f"G={size}")
        axes[0, 1].plot(grid, [e["push"] for e in exact], "--", color=f"C{i}")
    axes[0, 2].set(title=f"Prop. 4.3: E[sigma^2] at .6/.1, G={G}", xlabel="p")
    for how, style in (("iid", "C0"), ("stratified", "C1")):
        axes[0, 2].plot(grid, [variance_value(G, p, 0.25, *moments(0.6, 0.1, None), how) for p in grid], style, label=f"exact, {how}")
        axes[0, 2].plot(grid, [between(G, p, how) * 0.25 for p in grid], style + ":", label=f"bound, {how}")
    for axis, setting in zip((axes[1, 0], axes[1, 1]), ("shortcut", "low learns it too")):
        plain, mixed = (curve.mean(1) for curve in curves[setting])                      # (steps + 1, 2)
        axis.set(title=f"Remark 4.4: {setting}", xlabel="step")
        axis.plot(plain[:, HIGH_MODE], "C1", label="GRPO, high")
        axis.plot(mixed[:, HIGH_MODE], "C0", label="RC-GRPO, high")
        axis.plot(mixed[:, LOW_MODE], "C2", linewidth=1, label="RC-GRPO, low")
        axis.plot(mixed[:, HIGH_MODE] - mixed[:, LOW_MODE], "k:", linewidth=1, label="separation")
    if run:
        number, bound, exact, measured, *_ = zip(*run["rows"])
        axes[1, 2].set(title=f"E[sigma^2] of {o.run}", xlabel="step")
        for values, label, style in ((measured, "measured", "C0"), (exact, "exact formula", "C1--"), (bound, "bound", "k:")):
            axes[1, 2].plot(number, values, style, label=label)
    else:
        success = torch.linspace(0.005, 0.995, 100).tolist()
        axes[1, 2].set(title="alpha(q): all that the mix's sigma changes", xlabel="q", ylim=(0, 4.2))
        for i, size in enumerate((2, 4, 8, 16)):
            axes[1, 2].plot(success, [step_factor(q, size) for q in success], f"C{i}", label=f"G={size}")
    for axis in axes.flat:
        axis.legend(fontsize=7, frameon=False)
    Path(o.out).parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(o.out, dpi=110)
    plt.close(fig)


def main(argv=None):
    o = make_options(Options, read_flags(Options, argv), False)
    require_package("matplotlib", "the figure")
    if o.run:
        o.run = str(run_of(o.run))
        read_groups(o.run)                                                               # bad input fails before the work
    torch.manual_seed(o.seed)
    curves, run, rows = {}, {}, []
    checks = [check(o) for check in CHECKS] + [remark(o, curves)]
    if o.run:
        options = config_of(o.run)["options"]
        checks.append(from_run(o, run))
        checks += [policy_of_run(o, checkpoint_of(folder), options, when)
                   for folder, when in ((options["init"], "start"), (o.run, "end"))]
    print(f"{'statement':42} {'setting':52} {'bound':>9} {'exact':>9} {'measured':>21}  verdict")
    for check in checks:
        for row in check:
            print(show(row), flush=True)
            rows.append(row)
    failed, file = sum(not row.holds for row in rows), Path(o.out).with_suffix(".json")
    try:
        figure(o, curves, run)
        everything = {"options": asdict(o), "lines": len(rows), "failed": failed, "rows": [row.plain() for row in rows]}
        file.write_text(json.dumps(everything, indent=1), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {error.filename}: {error.strerror}; choose another --out")
    print(f"{len(rows)} lines, {failed} failed; wrote {o.out} and {file}")
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    program(main)
