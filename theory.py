"""The paper's definition, lemma, propositions and remark, and what they leave open, checked by numbers.

    python theory.py                                     # every check, one table, also in runs/theory.json
    python lab/run_theory.py runs/rcgrpo                 # what a real run measured, next to the propositions

Read it as a lecture: each check is one function whose docstring states what holds, on what assumptions, and why; it
exits 1 if one fails. Policies are tables of logits over the histories of a small multi-turn game, so that every
expectation is a finite sum. What is checked is the code that trains: advantages come from grpo.group_advantages,
gradients from grpo.clipped_loss by autograd, tokens from rcgrpo.draw_tokens, log-probs of a language model from
model.token_logprobs.

Beyond the paper: near-collapse (its propositions speak of exact collapse only), stratified tokens, what the variance
that mixed tokens add can teach at all, and a problem in which it teaches nothing.
"""
import json
import math
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from itertools import combinations_with_replacement, product
from pathlib import Path
from typing import NamedTuple

import torch

import grpo
import model as policy
import rcgrpo
from builtin import builtin_policy
from run import UserError, check_file, make_options, option, program, read_flags
from tokens import HIGH

CLIP, EPS_STAB = grpo.Options.clip, grpo.EPS_STAB
HIGH_MODE, LOW_MODE = 0, 1                               # index of a token's table of logits
SIZES, SHARES = (4, 8), (0.25, 0.5)                      # G and P(high) of the checks


@dataclass
class Options:
    samples: int = option(10_000, "groups of a Monte Carlo estimate", least=100)
    seeds: int = option(20, "training runs of remark 4.4", least=2)
    seed: int = option(0, "seed of everything drawn", least=0)
    out: str = option("runs/theory.json", "where all lines go, too")

    def check(self):
        check_file(self.out)


@dataclass
class Row:
    """One line of the table: what was checked, in which setting, and how it came out."""
    statement: str
    setting: str
    bound: float | None
    exact: float | None
    measured: float
    holds: bool
    how: str = "holds"
    error: float | None = None                           # standard error of measured; None: no sampling in it

    @property
    def verdict(self) -> str:
        return self.how if self.holds else "FAILS"

    def __str__(self) -> str:
        def text(x):
            return "" if x is None else "0" if x == 0 else f"{x:.4g}" if 1e-3 <= abs(x) < 1e5 else f"{x:.1e}"
        measured = text(self.measured) + (f" +- {text(self.error)}" if self.error else "")
        columns = f"{text(self.bound):>9} {text(self.exact):>9} {measured:>21}  {self.verdict}"
        return f"{self.statement:42} {self.setting:52} {columns}"

    def plain(self) -> dict:
        """For JSON, which has no NaN."""
        keys = ("statement", "setting", "bound", "exact", "measured", "error", "verdict")
        values = [getattr(self, key) for key in keys]
        return dict(zip(keys, [None if isinstance(x, float) and not math.isfinite(x) else x for x in values]))


def near(measured: float, exact: float, error: float = 0.0) -> bool:
    """Equal within `error` and fp32 rounding, which is relative; a NaN is never near."""
    return abs(measured - exact) <= error + 1e-4 * abs(exact) + 1e-9


def estimate(values: torch.Tensor) -> tuple[float, float]:
    """Mean of a sample and its standard error."""
    values = values.double()
    return float(values.mean()), float(values.std() / math.sqrt(len(values)))


# ---------------------------------------------------------------------------------------------------------------------
# a tabular multi-turn policy, and the training step on it

class Game:
    """T steps with K actions each; action 0 is the expert's. All N trajectories are listed; the reward is 1 for the
    expert's.

    early: action K-1 ends the episode, so lengths go from 1 to T; else N = K^T and all have length T.
    A policy is a table of logits (..., H, K), one row for each of the H = 1 + K + ... + K^(T-1) histories.
    """

    def __init__(self, steps: int, actions: int, early: bool = False):
        def length(taken):
            return taken.index(actions - 1) + 1 if early and actions - 1 in taken else steps
        listed = [taken for taken in product(range(actions), repeat=steps) if not any(taken[length(taken):])]
        self.T, self.K, self.name = steps, actions, "unequal lengths" if early else "equal lengths"
        self.actions = torch.tensor(listed)                                              # (N, T), 0 after the end
        self.lengths = torch.tensor([length(taken) for taken in listed])                 # (N,)
        self.mask = torch.arange(steps) < self.lengths[:, None]                          # (N, T)
        history, seen = torch.zeros(len(listed), dtype=torch.long), []
        for t in range(steps):                                               # numbered as the nodes of a K-ary heap
            seen.append(history)
            history = actions * history + 1 + self.actions[:, t]
        self.histories = torch.stack(seen, 1)                                            # (N, T)
        self.H = (actions ** steps - 1) // (actions - 1)
        self.rewards = torch.zeros(len(listed))                                          # (N,)
        self.rewards[0] = 1.0

    def table(self, *steps: list[float]) -> torch.Tensor:
        """(H, K) logits from one list of action probabilities per step, the same for every history of that step."""
        return torch.cat([torch.tensor(probs).log().expand(self.K ** t, self.K) for t, probs in enumerate(steps)])

    def logprobs(self, tables: torch.Tensor) -> torch.Tensor:
        """(..., H, K) logits -> (..., N, T) log-probs of every action of every trajectory, 0 after its end."""
        return tables.log_softmax(-1)[..., self.histories, self.actions].masked_fill(~self.mask, 0.0)

    def probabilities(self, tables: torch.Tensor) -> torch.Tensor:
        """(..., H, K) -> (..., N) probabilities of the trajectories."""
        return self.logprobs(tables.double()).sum(-1).exp()

    def success(self, tables: torch.Tensor) -> torch.Tensor:
        """(..., H, K) -> (...) expected reward J."""
        return (self.probabilities(tables) * self.rewards).sum(-1)

    def gradient(self, table: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """(H, K) -> (H, K): the gradient of the expectation of values (N,)."""
        leaf = table.double().requires_grad_()
        return torch.autograd.grad((self.probabilities(leaf) * values).sum(), leaf)[0].float()

    def scores(self, table: torch.Tensor) -> torch.Tensor:
        """(H, K) -> (N, H, K): the gradient of each trajectory's mean log-prob of an action, one-hot minus softmax."""
        N, scores = len(self.actions), torch.zeros(len(self.actions), self.H, self.K)
        taken = torch.eye(self.K)[self.actions] - table.softmax(-1)[self.histories]      # (N, T, K)
        scores[torch.arange(N)[:, None], self.histories] = taken * self.mask[..., None] / self.lengths[:, None, None]
        return scores


def step(game: Game, tables: torch.Tensor, modes: torch.Tensor, picks: torch.Tensor, beta: float = 0.0,
         reference=None, advantages=None) -> torch.Tensor:
    """The direction of one training step for each of B groups, every group with its own tables of logits: (B, M, H, K).

    tables: (B, M, H, K) or (M, H, K), one table per token; modes, picks: (B, G), token and trajectory of each rollout.
    Minus the gradient of the loss that training minimises; advantages (B, G) replace the normalised ones if given.
    """
    B, G = picks.shape
    leaf = tables.expand(B, *tables.shape[-3:]).clone().requires_grad_()

    def played(of):
        return game.logprobs(of)[torch.arange(B)[:, None], modes, picks].view(B * G, game.T)
    logp, ref = played(leaf), None if reference is None else played(reference.expand_as(leaf))
    if advantages is None:
        advantages = grpo.group_advantages(game.rewards[picks], EPS_STAB)
    kinds, which = game.lengths[picks].unique(dim=0, return_inverse=True)    # each group is a step of its own
    weights = torch.stack([grpo.loss_weights(row, "sequence") for row in kinds])[which].flatten()
    mask = game.mask[picks].view(B * G, game.T)
    loss, _ = grpo.clipped_loss(logp, logp.detach(), ref, advantages.reshape(-1), mask, CLIP, beta, weights)
    loss.backward()
    return -leaf.grad


def token_modes(groups: int, group: int, p: float, how: str, seed) -> torch.Tensor:
    """(groups, group) modes, drawn as training draws its tokens."""
    drawn = rcgrpo.draw_tokens(groups, group, p, how, seed)
    return torch.tensor([[HIGH_MODE if token == HIGH else LOW_MODE for token in row] for row in drawn])


def sigma(rewards: torch.Tensor, eps: float = EPS_STAB) -> torch.Tensor:
    """(P, G) -> (P,): the sigma_g that the training code divided by, read off its advantages:
    gap of R = (sigma + eps) * gap of A."""
    advantages = grpo.group_advantages(rewards, eps)
    gap = advantages.amax(1) - advantages.amin(1)
    return torch.where(gap > 0, (rewards.amax(1) - rewards.amin(1)) / gap - eps, gap)


def binomial(q: float, n: int) -> list[float]:
    """Probabilities of 0 to n successes."""
    return [math.comb(n, k) * q ** k * (1 - q) ** (n - k) for k in range(n + 1)]


def by_successes(G: int) -> torch.Tensor:
    """(G+1, G): rewards of a group with k successes, for every k. Whose they are changes no sum over the group."""
    return torch.ones(G + 1, G).tril(-1)


# ---------------------------------------------------------------------------------------------------------------------
# collapse

def collapse(o: Options):
    """Definition 4.1. All G rewards of a group equal: sigma_g = 0, every advantage is exactly 0, and so is the policy
    gradient.

    On paper R - mean is 0; in floating point the mean of G times 0.1 is not 0.1, and rounding noise over a small
    eps_stab is an advantage: hence exact zeros, for any value, G and eps_stab. With beta > 0 the KL term is left.
    Training differentiates k3 = pi_ref/pi - 1 - log(pi_ref/pi) on samples of pi; in expectation that gives
    E_pi[(1 - pi_ref/pi) grad log pi] = -E_ref[grad log pi] = grad KL(pi_ref || pi). So a collapsed group is pulled
    along the KL that covers the reference's modes, although the VALUE of k3 estimates KL(pi || pi_ref).
    """
    games, gen = (Game(2, 3), Game(2, 3, early=True)), torch.Generator().manual_seed(o.seed)
    table = torch.randn(1, games[0].H, 3, generator=gen)
    for G in SIZES:
        values = torch.tensor([0.0, 1.0, 0.1, 1 / 3, -7.3, 1e6])[:, None].expand(-1, G)  # (6, G)
        largest = max(float(grpo.group_advantages(values, eps).abs().max()) for eps in (0.0, 1e-8, EPS_STAB, 1.0))
        yield Row("Def. 4.1 largest |A|", f"equal rewards, G={G}", 0.0, 0.0, largest, largest == 0, "exact")
        for game in games:
            failures = 1 + torch.arange(G) % (len(game.actions) - 1)
            picks = torch.stack([torch.zeros(G), torch.ones(G), failures]).long()        # 0 is the success
            pull = float(step(game, table, torch.zeros_like(picks), picks).abs().max())
            yield Row("Def. 4.1 |gradient|, beta=0", f"equal rewards, {game.name}, G={G}", 0.0, 0.0, pull,
                      pull == 0, "exact")
    bandit, beta = Game(1, 4), 0.1
    table, reference = torch.randn(2, 1, 1, 4, generator=gen)
    one = torch.arange(4)[:, None].expand(4, 2)                              # a group per action: both rollouts are it
    pulls = step(bandit, table, torch.zeros_like(one), one, beta=beta, reference=reference)              # (4, 1, 1, 4)
    expected = (table.softmax(-1).view(4, 1, 1, 1) * pulls).sum(0)
    toward = beta * (reference.softmax(-1) - table.softmax(-1))                          # -beta grad KL(pi_ref || pi)
    size, pull = float(toward.norm()), float(expected.norm())
    yield Row("Def. 4.1 |KL's pull|, beta=0.1", "equal rewards", None, size, pull,
              float((expected - toward).norm()) < 1e-4 * size, "forward KL")


def lemma(o: Options):
    """Lemma 1.2. KL(delta_{a*} || pi) = sum over a of delta(a) log(delta(a) / pi(a)) = -log pi(a*). If it is at most
    eps, then pi(a*) >= exp(-eps) >= 1 - eps, the last because exp is convex and 1 - eps its tangent at 0. Tight where
    the KL is eps.

    For a deterministic expert that KL is stage 1's own loss on the action, so the check runs a small random language
    model: eps from model.token_logprobs, pi(a*) from the softmax of all its logits. For an expert that is not
    deterministic the lemma fails: KL = 0 says pi = expert, whose best action may have any probability; what remains is
    Pinsker's inequality, pi(a*) >= expert(a*) - sqrt(KL / 2).
    """
    lm, tokenizer = builtin_policy(["the quick brown fox jumps over the lazy dog"], o.seed, width=16, layers=1)
    policy.add_reward_tokens(lm, tokenizer)
    banned = lm.config.reward_token_ids
    prompt = torch.randint(0, min(banned), (64, 6), generator=torch.Generator().manual_seed(o.seed))
    mask = torch.arange(7).expand(64, 7) == 6
    for temperature in (2.0, 0.3, 0.03):
        with torch.no_grad():
            logits = lm(prompt).logits[:, -1].double() / temperature                     # (64, V)
            logits[:, banned] = float("-inf")
            probs = logits.softmax(-1)
            expert = probs.argmax(-1, keepdim=True)
            eps = -policy.token_logprobs(lm, torch.cat([prompt, expert], 1), mask, temperature)[:, -1].double()
        chosen = probs.gather(1, expert).squeeze(1)
        good = bool((chosen >= 1 - eps - 1e-6).all()) and float((chosen - (-eps).exp()).abs().max()) < 2e-5
        bound, exact, measured = (float(value.mean()) for value in (1 - eps, (-eps).exp(), chosen))
        yield Row("Lemma 1.2 pi(a*), mean", f"LM at T={temperature}, eps={float(eps.mean()):.3f}", bound, exact,
                  measured, good, "tight" if eps.mean() < 1 else "vacuous")
    gen = torch.Generator().manual_seed(o.seed)
    expert = (2 * torch.randn(o.samples, 4, generator=gen, dtype=torch.float64)).softmax(-1)
    pi = (expert.log() + torch.randn(o.samples, 4, generator=gen, dtype=torch.float64)).softmax(-1)
    kl, best = (expert * (expert / pi).log()).sum(-1), expert.argmax(-1, keepdim=True)
    chosen, wanted = pi.gather(1, best).squeeze(1), expert.gather(1, best).squeeze(1)
    broken = float((chosen < (-kl).exp()).double().mean())
    yield Row("Lemma 1.2 share of pi(a*) < exp(-KL)", "experts that are not deterministic", None, None, broken,
              broken > 0.5 and bool((chosen >= wanted - (kl / 2).sqrt()).all()), "lemma fails, Pinsker holds")


def vanishing(o: Options):
    """Proposition 4.2. If at every history pi gives the expert's action at least exp(-eps), one rollout is the expert's
    with probability >= exp(-T eps), all G of them with >= exp(-G T eps) >= (1-eps)^(GT) >= 1 - G T eps, and then the
    group collapses. Here a collapse is all rewards equal, a larger event (all may fail): q^G + (1-q)^G for success
    probability q.

    Gradient: a group that has not collapsed gives at most sqrt(2), since the mean of |A| is at most 1 and the gradient
    of a log-softmax at most sqrt(2); so E||g|| <= sqrt(2) G T eps. The rate is exact: for small eps just one rollout
    deviates in one step, it has A = -sqrt(G-1), and E||g|| = sqrt(2 (G-1)) eps; if the mistake ends the episode, the
    mean over its tokens is one over fewer, and the rate is (1 + 1/2 + ... + 1/T) times that. The bound 1 - G T eps is
    vacuous from eps = 1/(G T) on (G = 4, ten messages: pi(a*) < 0.975); (1-eps)^(GT) never is. No bound says anything
    on groups that are all wrong.
    """
    game = Game(3, 2)

    def peaked(eps):
        return game.table(*[[math.exp(-eps), -math.expm1(-eps)]] * game.T)
    for G in SIZES:
        collapsed = (grpo.group_advantages(by_successes(G), EPS_STAB) == 0).all(1).tolist()
        for eps in (0.2, 0.02, 0.002):
            probs, q = game.probabilities(peaked(eps)), float(game.success(peaked(eps)))
            bound, sharp = 1 - G * game.T * eps, (1 - eps) ** (G * game.T)
            coincide, exact = float((probs ** G).sum()), q ** G + (1 - q) ** G
            measured = math.fsum(chance for chance, flat in zip(binomial(q, G), collapsed) if flat)
            good = bound <= sharp <= math.exp(-G * game.T * eps) <= coincide + 1e-9 and coincide <= exact + 1e-9
            yield Row("Prop. 4.2 P(collapse)", f"G={G} T={game.T} eps={eps} (sharp {sharp:.3f})", bound, exact,
                      measured, good and near(measured, exact), "vacuous" if bound <= 0 else "holds")
    games = (Game(3, 2), 1), (Game(3, 2, early=True), 1 + 1 / 2 + 1 / 3)
    for G, (game, factor) in product(SIZES, games):
        large, small = 1e-1, 1e-4
        setting, bound = f"G={G} T={game.T} {game.name}", math.sqrt(2) * G * game.T
        groups = torch.tensor(list(combinations_with_replacement(range(len(game.actions)), G)))      # (C, G) multisets
        ways = torch.tensor([math.factorial(G) // math.prod(map(math.factorial, Counter(group).values()))
                             for group in groups.tolist()])

        def mean_norm(eps, updates):                                                     # of (C, H, K)
            chance = ways * game.probabilities(peaked(eps))[groups].prod(1)              # (C,), sums to 1
            return float((chance * updates.flatten(1).norm(dim=1)).sum())
        first, last = (mean_norm(eps, step(game, peaked(eps)[None], torch.zeros_like(groups), groups))
                       for eps in (large, small))
        rewards = game.rewards[groups].double()
        by_hand = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, unbiased=False, keepdim=True) + EPS_STAB)
        updates = torch.einsum("cg,cghk->chk", by_hand.float(), game.scores(peaked(large))[groups]) / G
        exact, limit = mean_norm(large, updates), factor * math.sqrt(2 * (G - 1)) * small
        yield Row("Prop. 4.2 E||g||", f"{setting}, eps={large}", bound * large, exact, first,
                  first <= bound * large and near(first, exact))
        yield Row("Prop. 4.2 E||g||, limit", f"{setting}, eps={small}", bound * small, limit, last,
                  abs(last / limit - 1) < 0.02, "rate")


def sigmas_of(G: int) -> torch.Tensor:
    """(G+1,): sigma_g = sqrt(k (G-k)) / G of a group with k successes, for every k."""
    k = torch.arange(G + 1, dtype=torch.float64)
    return (k * (G - k)).sqrt() / G


def group_means(q: float, G: int, sigmas=None, gap=None, push=None) -> dict[str, float]:
    """Expectations over a group of G independent rollouts that succeed with probability q, from values by number of
    successes, (G+1,); exact where none are given: gap 1 / (sigma + eps), push up success sigma^2 / (sigma + eps)."""
    if sigmas is None:
        sigmas = sigmas_of(G)
        gap, push = (sigmas > 0) / (sigmas + EPS_STAB), sigmas ** 2 / (sigmas + EPS_STAB)

    def mean(values):
        return float((torch.tensor(binomial(q, G), dtype=torch.float64) * values).sum())
    found = {"P(sigma=0)": mean(sigmas == 0), "E[sigma^2]": mean(sigmas ** 2), "E[advantage gap]": mean(gap),
             "E[push]": mean(push)}
    found["push over undivided"] = found["E[push]"] / (found["E[sigma^2]"] or math.nan)
    found["signal/noise"] = found["E[push]"] / (math.sqrt(G * mean((push - found["E[push]"]) ** 2)) or math.nan)
    return found


def near_collapse(o: Options):
    """Between the exact cases, which the paper leaves open: G independent rollouts that succeed with probability q.

    P(sigma = 0) = q^G + (1-q)^G and E[sigma^2] = (G-1)/G q(1-q). Along the logit of success (grad log pi is 1-q or -q)
    a group pushes by u = 1/G sum_j A_j grad_j; as advantages sum to 0, u = (sum of the successes' A)/G
    = sigma^2 / (sigma + eps), about sigma. Division by sigma thus makes the push of one success among G larger by
    G/sqrt(G-1) and gives that rollout the advantage sqrt(G-1): a rare success is a large update by design.

    Choice of G: N rollouts make N/G groups, whose mean push has signal to noise sqrt(N/G) E[u]/sd[u]. For rare success
    (q << 1/G) that is sqrt(N q) whatever G is: G only scales the step, by sqrt(G-1), which Adam undoes. At q = 1/2 it
    grows with G. So choose G for the middle of the tasks; half of the groups are informative from about G = 0.7/q on.

    The clip, with several updates on the same rollouts: the success stops pushing at pi = (1+clip) q, the failures are
    pushed down until 1-pi = (1-clip)(1-q); so pi rises to clip + (1-clip) q, and there it stops.
    """
    bandit = Game(1, 2)

    def measured(q, G):
        rewards = by_successes(G)
        picks = 1 - rewards.long()                                                       # action 0 succeeds
        updates = step(bandit, bandit.table([q, 1 - q])[None], torch.zeros_like(picks), picks)
        push, advantages = updates[:, 0, 0, 0].double(), grpo.group_advantages(rewards, EPS_STAB)
        return group_means(q, G, sigma(rewards), advantages.amax(1) - advantages.amin(1), push)
    for G, q in product(SIZES, (0.05, 0.5)):
        exact, found = group_means(q, G), measured(q, G)
        for name in list(exact)[:-1]:
            yield Row(f"Near-collapse {name}", f"G={G} q={q}", None, exact[name], found[name],
                      near(found[name], exact[name]))
    for q, G in product((0.02, 0.5), (2, 4, 8, 16)):
        exact, found = (means["signal/noise"] for means in (group_means(q, G), measured(q, G)))
        root = f", sqrt(q)={math.sqrt(q):.3f}" if q < 0.1 else ""
        yield Row("Choice of G: signal/noise per sqrt(N)", f"q={q} G={G}{root}", None, exact, found, near(found, exact))
    q, G, rate = 0.05, 16, 0.2
    table, picks = bandit.table([q, 1 - q]), torch.tensor([0] + [1] * (G - 1))
    old, mask, weights = bandit.logprobs(table)[picks], torch.ones(G, 1, dtype=torch.bool), torch.full((G,), 1 / G)
    advantages = grpo.group_advantages(bandit.rewards[picks][None], EPS_STAB)[0]
    for _ in range(500):                                                                 # updates on the same group
        leaf = table.clone().requires_grad_()
        loss, _ = grpo.clipped_loss(bandit.logprobs(leaf)[picks], old, None, advantages, mask, CLIP, 0.0, weights)
        table = table - rate * torch.autograd.grad(loss, leaf)[0]
    reached, stop = float(bandit.success(table)), CLIP + (1 - CLIP) * q
    yield Row("Near-collapse pi under the clip", f"q={q} G={G}, 500 updates on one group", stop, stop, reached,
              stop <= reached <= stop + 0.02, "stops there")


# ---------------------------------------------------------------------------------------------------------------------
# variance

class Rewards(NamedTuple):
    """Success under the two tokens."""
    name: str
    high: float
    low: float

    @property
    def squared(self) -> float:
        """Delta^2, of the separation Delta = |E[R|high] - E[R|low]|."""
        return (self.high - self.low) ** 2

    @property
    def variances(self) -> tuple[float, float]:
        """Of the reward under the high and under the low token."""
        return self.high * (1 - self.high), self.low * (1 - self.low)

    def draw(self, modes: torch.Tensor, gen: torch.Generator) -> torch.Tensor:
        """(P, G) modes -> (P, G) rewards."""
        return torch.bernoulli(torch.where(modes == HIGH_MODE, self.high, self.low), generator=gen)


REWARDS = (Rewards("certain modes", 1.0, 0.0), Rewards("success .6/.1", 0.6, 0.1), Rewards("no separation", 0.5, 0.5))


def between(G: int, p: float, how: str) -> float:
    """What the separation is worth: E[sigma_g^2] of a group of G whose rewards are 1 under the high token and 0 under
    the low one."""
    odd = round(p * G, 9) % 1                            # stratified: n or n + 1 high tokens where p G is n + odd
    return (G - 1) / G * p * (1 - p) if how == "iid" else p * (1 - p) - odd * (1 - odd) / G ** 2


def variance_value(G: int, p: float, squared: float, high: float, low: float, how: str = "iid") -> float:
    """E[sigma_g^2] from Delta^2 and the variances under the two tokens (variance, stratified); also of tensors."""
    return (G - 1) / G * (p * high + (1 - p) * low) + between(G, p, how) * squared


def spread(G: int, p: float, kind: Rewards, how: str) -> tuple[float, float, float]:
    """Mean, variance and third central moment of sigma_g^2, by enumeration: how many rows are high, and how many of
    either kind succeed."""
    whole, odd = divmod(round(p * G, 9), 1)
    highs, raw = ((int(whole), 1 - odd), (int(whole) + 1, odd)), [0.0, 0.0, 0.0]
    for n, share in enumerate(binomial(p, G)) if how == "iid" else [pair for pair in highs if pair[1]]:
        for (h, a), (l, b) in product(enumerate(binomial(kind.high, n)), enumerate(binomial(kind.low, G - n))):
            raw = [sum_ + share * a * b * ((h + l) * (G - h - l) / G ** 2) ** i for i, sum_ in enumerate(raw, 1)]
    mean = raw[0]
    return mean, max(0.0, raw[1] - mean ** 2), raw[2] - 3 * mean * raw[1] + 2 * mean ** 3


def variance_rows(title: str, how: str, settings: list[tuple[int, float, Rewards]], o: Options, seed: int):
    """Bound, exact value and Monte Carlo estimate of E[sigma_g^2], for tokens drawn like this.

    The error is that of the exact distribution, not of the sample, where a rare event may not have happened at all.
    The estimate is to be within four errors, and what skewness adds to that quantile (Cornish and Fisher),
    (4^2 - 1)/6 mu_3 / mu_2 over the groups.
    """
    gen = torch.Generator().manual_seed(seed)
    for G, p, kind in settings:
        bound = between(G, p, how) * kind.squared
        exact, iid = (variance_value(G, p, kind.squared, *kind.variances, way) for way in (how, "iid"))
        modes, (mean, second, third) = token_modes(o.samples, G, p, how, o.seed), spread(G, p, kind, how)
        measured, error = float((sigma(kind.draw(modes, gen)) ** 2).double().mean()), math.sqrt(second / o.samples)
        skew = 2.5 * abs(third) / second / o.samples if second > 1e-12 else 0.0
        mixed = how == "iid" or not 1 <= p * G <= G - 1 or bool((modes.amin(1) < modes.amax(1)).all())
        ordered = bound <= exact + 1e-12 and iid <= exact + 1e-12
        yield Row(title, f"G={G} p={p} {kind.name}", bound, exact, measured,
                  mixed and ordered and near(mean, exact) and near(measured, exact, 4 * error + skew),
                  "vacuous" if bound == 0 else "tight" if exact - bound < 1e-12 else "holds", error)


def variance(o: Options):
    """Proposition 4.3. Tokens drawn i.i.d. with P(high) = p, separation Delta = |E[R|high] - E[R|low]|:
    E[sigma_g^2] >= (G-1)/G p(1-p) Delta^2.

    The rewards of a group are then i.i.d. from the mixture, so E[sigma_g^2] = (G-1)/G Var(R), and by the law of total
    variance Var(R) = p Var_high + (1-p) Var_low + p(1-p) Delta^2. The bound drops the first two: equality iff each
    token determines the reward. It is vacuous for p = 0 or 1 and without separation. (Like the paper's, for one task:
    over tasks the averages of both sides compare, with the average of Delta^2, not the square of its average.)
    """
    edges = [(SIZES[0], 0.0, REWARDS[1]), (SIZES[0], 1.0, REWARDS[1])]
    settings = [*product(SIZES, SHARES, REWARDS), *edges]
    yield from variance_rows("Prop. 4.3 E[sigma^2], iid", "iid", settings, o, o.seed)


def stratified(o: Options):
    """Our addition. Draw exactly p G high tokens a group:
    E[sigma_g^2] = (G-1)/G (p Var_high + (1-p) Var_low) + p(1-p) Delta^2.

    The share of high rows is now a constant, so the variance between the modes keeps its factor 1: the bound is
    p(1-p) Delta^2, never below the i.i.d. value, and no group has one token only. Where p G = n + f is no integer, n or
    n+1 are drawn and f(1-f)/G^2 Delta^2 is lost: the least variance that a whole number with mean p G can have, so
    still not below i.i.d.
    """
    settings = [*product(SIZES, SHARES, REWARDS), (5, 0.5, REWARDS[1])]
    yield from variance_rows("Stratified E[sigma^2]", "stratified", settings, o, o.seed + 1)


# ---------------------------------------------------------------------------------------------------------------------
# what the variance teaches

def step_factor(q: float, G: int) -> float:
    """alpha(q) = E[A | this rollout succeeds] - E[A | it fails], the other G-1 succeeding with probability q each."""
    share, divisor = torch.arange(G + 1) / G, sigmas_of(G) + EPS_STAB              # by successes, with this one
    gain = (1 - share[1:]) / divisor[1:] + share[:-1] / divisor[:-1]
    return float((torch.tensor(binomial(q, G - 1), dtype=torch.float64) * gain).sum())


def expected_update(game: Game, tables: torch.Tensor, p: float, G: int, divided=True) -> torch.Tensor:
    """(2, H, K): the mean update of steps of one group, over all that G rollouts can be, enumerated."""
    N = len(game.actions)
    rows = torch.tensor(list(product(range(2 * N), repeat=G)))               # (B, G): token, trajectory
    chance = (torch.tensor([p, 1 - p])[:, None] * game.probabilities(tables)).flatten()[rows].prod(1)
    rows, chance = rows[chance > 0], chance[chance > 0][:, None, None, None]
    eps, scale = (EPS_STAB, 1) if divided else (1e4, 1e4)                                # so large that only it divides
    advantages = scale * grpo.group_advantages(game.rewards[rows % N], eps)
    return (chance * step(game, tables, rows // N, rows % N, advantages=advantages)).sum(0).float()


def predicted_update(game: Game, tables: torch.Tensor, p: float, G: int, divided=True) -> torch.Tensor:
    """(2, H, K): alpha * the sum over both modes of share * (grad E[w R] - m grad E[w]), see what_variance_teaches."""
    share = torch.tensor([p, 1 - p])
    m = float(share.double() @ game.success(tables))
    alpha = step_factor(m, G) if divided else (G - 1) / G
    worth = alpha * (game.rewards - m) / game.lengths
    return share[:, None, None] * torch.stack([game.gradient(table, worth) for table in tables])


def cosine_of(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a * b).sum() / (a.norm() * b.norm()))


def what_variance_teaches(o: Options):
    """Our own: the expected update of RC-GRPO, at ratio 1 and beta = 0. J_h, J_l: success under the two tokens. First
    for rollouts of equal length.

    Undivided: E[1/G sum_j (R_j - mean) grad log pi(tau_j|r_j)]. For i != j, E[R_i grad log pi(tau_j|r_j)] = 0
    (independent rollouts), so of the mean only R_j/G is left: E = (G-1)/G (p grad J_h + (1-p) grad J_l). Exactly the
    two modes' own policy gradients, weighted by their share of the rows. The variance between them is in no term.

    Divided by sigma: E[A_j | R_j] depends on the row's own reward alone, as the other rows are i.i.d. from the mixture
    whatever token this row has. So E = alpha(m) (p grad J_h + (1-p) grad J_l), m = p J_h + (1-p) J_l: a common step
    size, which hardly varies (at G = 4 from 1.62 to 1.73). GRPO under the high token has alpha(J_h) grad J_h.

    So with separate parameters per token the low rows teach the high mode NOTHING but a step size, however large the
    variance that they make. With shared parameters a step eta adds eta (1-p) <grad J_h, grad J_l> to J_h: what the low
    rows teach is the cosine of the two gradients (tables of logits a * shared + sqrt(1-a^2) * own have a^2 times the
    cosine of the tables). The paper reads Proposition 4.3 as "variance, hence learning"; the guarantee holds, but
    variance between modes is no teacher by itself. What is bought is exploration under another mode, worth what
    transfers.

    Unequal lengths. The normaliser "sequence" gives row j the weight w_j = 1/len_j, so E[w_j grad log pi(tau_j)] is not
    0 but grad E[w], and E = alpha(m) (p (grad E_h[w R] - m grad E_h[w]) + (1-p) (the same under low)): exact, but m is
    now in the direction, where GRPO has J_h: through the group's mean the low rows teach the high mode length, not
    success.
    """
    gen, p = torch.Generator().manual_seed(o.seed), 0.5
    even, ragged = Game(2, 2), Game(3, 2, early=True)

    def tables_of(game, *chances):                                           # of the expert's action, by mode and step
        modes = torch.stack([game.table(*([q, 1 - q] for q in mode)) for mode in chances])
        return modes + 0.3 * torch.randn(2, game.H, 2, generator=gen)                    # (2, H, K)
    modes = {even: tables_of(even, (0.9, 0.8), (0.3, 0.6)),
             ragged: tables_of(ragged, (0.7, 0.3, 0.3), (0.9, 0.95, 0.95))}
    for game, G in product((even, ragged), (2, 4)):
        found, tables = {}, modes[game]
        for name, share, divided in (("RC update, undivided", p, False), ("RC update, divided", p, True),
                                     ("GRPO update", 1.0, True)):
            found[name] = update = expected_update(game, tables, share, G, divided)
            exact = predicted_update(game, tables, share, G, divided)
            yield Row(f"{name}, |high table|", f"G={G} P(high)={share} {game.name}", None,
                      float(exact[HIGH_MODE].norm()), float(update[HIGH_MODE].norm()),
                      float((update - exact).norm()) < 2e-4 * float(exact.norm()))
        turn = cosine_of(found["RC update, divided"][HIGH_MODE], found["GRPO update"][HIGH_MODE])
        exact = cosine_of(*(predicted_update(game, tables, share, G)[HIGH_MODE] for share in (p, 1.0)))
        yield Row("RC and GRPO update, cosine", f"G={G} high table, {game.name}", None, exact, turn, near(turn, exact),
                  "the low rows turn it" if exact < 1 - 1e-3 else "same direction")
    tables, G, eta = modes[even], 4, 1e-3
    direction = expected_update(even, tables, p, G, divided=False).double()
    gradients = [even.gradient(table, even.rewards) for table in tables]
    inner = [float((gradients[HIGH_MODE] * gradient).sum()) / even.T for gradient in gradients]  # a mean over T tokens
    for shared in (0.0, 0.5, 1.0):                                                       # a^2
        moved = tables.double() + eta * (direction + shared * direction.flip(0))
        gain = float(even.success(moved)[HIGH_MODE] - even.success(tables)[HIGH_MODE]) / eta
        exact = (G - 1) / G * (p * inner[HIGH_MODE] + (1 - p) * shared * inner[LOW_MODE])
        yield Row("dJ_high / step", f"G={G}, cosine of the modes {shared * cosine_of(*gradients):.2f}", None, exact,
                  gain, abs(gain / exact - 1) < 0.01)


WRONG = [3e-4, 0.999 - 3e-4, 5e-4, 5e-4]                 # sure of a wrong action
SURE, FAIR, WIDE = [0.98, 0.01, 0.005, 0.005], [0.7, 0.2, 0.05, 0.05], [0.3, 0.3, 0.2, 0.2]
SETTINGS = {                                  # high mode, low mode (one list a step), share of the parameters a^2
    "shortcut": ((WRONG, [0.9, 0.04, 0.03, 0.03]), (WIDE, WIDE), 0.5),
    "shortcut, nothing shared": ((WRONG, [0.9, 0.04, 0.03, 0.03]), (WIDE, WIDE), 0.0),
    "high has it already": ((SURE, SURE), (WIDE, WIDE), 0.5),
    "low learns it too": ((FAIR, FAIR), (WIDE, WIDE), 0.5)}


def train_tables(o: Options, setting: str, conditioned: bool, steps: int = 200, G: int = 8, rate: float = 3.0):
    """Train o.seeds tables side by side, one group of G rollouts a step -> (success by mode before every step and after
    all, (steps + 1, seeds, 2); mean of sigma_g^2 over all steps and seeds)."""
    game, gen = Game(2, 4), torch.Generator().manual_seed(o.seed)
    high, low, shared = SETTINGS[setting]
    tables = torch.stack([game.table(*high), game.table(*low)]).expand(o.seeds, -1, -1, -1).clone()      # (S, 2, H, K)
    history, variance = [game.success(tables)], 0.0
    for number in range(steps):
        modes = token_modes(o.seeds, G, 0.5 if conditioned else 1.0, "iid", (o.seed, number))            # (S, G)
        probs = game.probabilities(tables)[torch.arange(o.seeds)[:, None], modes]                        # (S, G, N)
        picks = torch.multinomial(probs.flatten(0, 1).float(), 1, replacement=True, generator=gen).view(o.seeds, G)
        variance += float((sigma(game.rewards[picks]) ** 2).mean()) / steps
        direction = step(game, tables, modes, picks)
        tables = tables + rate * (direction + shared * direction.flip(1))    # a step in shared and own parameters
        history.append(game.success(tables))
    return torch.stack(history), variance


def remark(o: Options):
    """Remark 4.4. The paper: variance that does not degenerate keeps the updates informative, so training does not
    stall.

    True where the other mode finds what this one does not, and where what it learns carries over. "shortcut": the high
    mode is sure of a wrong action and the low mode is not. GRPO under the high token sees no success, RC-GRPO with as
    many rollouts moves on. The same with nothing shared: just as much variance, and the high mode learns nothing from
    it. It does not help where the high mode already succeeds on all that it can reach, though high-succeeds-low-fails
    is variance too; nor where the low mode learns to succeed: the reward ignores the token, so the separation closes
    and its variance goes with it. In "shortcut" the low mode learns first: the separation opens the wrong way round;
    only what is shared closes it.
    """
    for setting in SETTINGS:
        (plain, alone), (mixed, together) = (train_tables(o, setting, conditioned) for conditioned in (False, True))
        gain, error = estimate(mixed[-1, :, HIGH_MODE] - plain[-1, :, HIGH_MODE])
        before, grpo_, rc, low = (float(at.mean()) for at in (plain[0, :, HIGH_MODE], plain[-1, :, HIGH_MODE],
                                                             mixed[-1, :, HIGH_MODE], mixed[-1, :, LOW_MODE]))
        luck = 0.1 + 4 * math.sqrt(0.1 * 0.9 / o.seeds)                      # at most one seed in ten finds it alone
        good = {"shortcut": rc > 0.9 and grpo_ < luck,
                "shortcut, nothing shared": rc < 0.1 and low > 0.9}.get(setting, min(rc, grpo_) > 0.98)
        yield Row(f"Remark 4.4 {setting}",
                  f"J_high {before:.2f} -> GRPO {grpo_:.2f}, RC {rc:.2f}; sigma^2 {alone:.2f}, {together:.2f}",
                  None, None, gain, good, "moves on" if setting == "shortcut" else "no help", error)
        separation = (mixed[:, :, HIGH_MODE] - mixed[:, :, LOW_MODE]).mean(1)            # (steps + 1,)
        first, middle, last = separation[[0, len(separation) // 2, -1]].tolist()
        closed, opened = abs(last) < 0.05, float(separation.min()) < -0.5    # opened: the low mode found it first
        good, how = {"shortcut": (opened and closed, "opens, then closes"),
                     "shortcut, nothing shared": (last < -0.9, "stays open")}.get(
                         setting, (first > 0.3 and closed and not opened, "closes"))
        measured, error = estimate(mixed[-1, :, HIGH_MODE] - mixed[-1, :, LOW_MODE])
        yield Row("Remark 4.4 separation under RC", f"{setting}: {first:+.2f}, {middle:+.2f} half-way", None, None,
                  measured, good, how, error)


# ---------------------------------------------------------------------------------------------------------------------
# the table

CHECKS = (collapse, lemma, vanishing, near_collapse, variance, stratified, what_variance_teaches)


def report(checks: list, out: str, options: dict) -> int:
    """Print the lines of the checks as they come and write them to the JSON file out; returns how many failed."""
    print(f"{'statement':42} {'setting':52} {'bound':>9} {'exact':>9} {'measured':>21}  verdict")
    found = []
    for check in checks:
        for row in check:
            print(row, flush=True)
            found.append(row)
    failed = sum(not row.holds for row in found)
    told = {"options": options, "lines": len(found), "failed": failed, "rows": [row.plain() for row in found]}
    try:
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        Path(out).write_text(json.dumps(told, indent=1), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {error.filename}: {error.strerror}; choose another --out")
    print(f"{len(found)} lines, {failed} failed; wrote {out}")
    return failed


def main(argv=None):
    o = make_options(Options, read_flags(Options, argv), False)
    torch.manual_seed(o.seed)
    if report([*(check(o) for check in CHECKS), remark(o)], o.out, asdict(o)):
        sys.exit(1)


if __name__ == "__main__":
    program(main)
