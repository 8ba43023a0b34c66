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
    """Equal within `error` and fp32 rounding, which is relative; a NaN is never near."""
    return abs(measured - exact) <= error + 1e-4 * abs(exact) + 1e-9


def estimate(values: torch.Tensor) -> tuple[float, float]:
    """Mean of a sample and its standard error."""
    values = values.double()
    return float(values.mean()), float(values.std() / math.sqrt(len(values)))


# ---------------------------------------------------------------------------------------------------------------------
# a tabular multi-turn policy, and the training step on it

class Game:
    """T steps with K actions each; action 0 is the expert's. All N trajectories are listed; the reward is 1
    for the expert's.

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


def step(game: Game, tables: torch.Tensor, modes: torch.Tensor, picks: torch.Tensor, norm: str = "sequence",
         beta: float = 0.0, reference=None, advantages=None) -> torch.Tensor:
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
        advantages = grpo.group_advantages(game.rewards[picks], EPS_STAB)
    kinds, which = game.lengths[picks].unique(dim=0, return_inverse=True)  # each group is a step of its own
    weights = torch.stack([grpo.loss_weights(row, norm) for row in kinds])[which].flatten()
    mask = game.mask[picks].reshape(B * G, game.T)
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


def binomial(q: float, n: int) -> list[float]:
    """Probabilities of 0 to n successes."""
    return [math.comb(n, k) * q ** k * (1 - q) ** (n - k) for k in range(n + 1)]


def by_successes(G: int) -> torch.Tensor:
    """(G+1, G): rewards of a group with k successes, for every k. Whose they are changes no sum over the group."""
    return torch.ones(G + 1, G).tril(-1)


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
    games, gen = (Game(2, 3), Game(2, 3, early=True)), torch.Generator().manual_seed(o.seed)
    table = torch.randn(1, games[0].H, 3, generator=gen)
    for G in o.sizes:
        values = torch.tensor([0.0, 1.0, 0.1, 1 / 3, -7.3, 1e6])[:, None].expand(-1, G)                        # (6, G)
        largest = max(float(grpo.group_advantages(values, eps).abs().max()) for eps in (0.0, 1e-8, EPS_STAB, 1.0))
        yield Row("Def. 4.1 largest |A|", f"equal rewards, G={G}", 0.0, 0.0, largest, None, verdict(largest == 0, "exact"))
        for game in games:
            failures = 1 + torch.arange(G) % (len(game.actions) - 1)
            picks = torch.stack([torch.zeros(G), torch.ones(G), failures]).long()        # 0 is the success
            pull = float(step(game, table, torch.zeros_like(picks), picks).abs().max())
            yield Row("Def. 4.1 |gradient|, beta=0", f"equal rewards, {game.name}, G={G}", 0.0, 0.0, pull, None,
                      verdict(pull == 0, "exact"))
    bandit, beta = Game(1, 4), 0.1
    table, reference = torch.randn(2, 1, 1, 4, generator=gen)
    one = torch.arange(4)[:, None].expand(4, 2)                                          # a group per action: both rollouts are it
    pulls = step(bandit, table, torch.zeros_like(one), one, beta=beta, reference=reference)                    # (4, 1, 1, 4)
    expected = (table.softmax(-1).view(4, 1, 1, 1) * pulls).sum(0)
    toward = beta * (reference.softmax(-1) - table.softmax(-1))                          # -beta grad KL(pi_ref || pi)
    yield Row("Def. 4.1 |KL's pull|, beta=0.1", "equal rewards", None, float(toward.norm()), float(expected.norm()), None,
              verdict(float((expected - toward).norm()) < 1e-4 * float(toward.norm()), "forward KL"))


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
        good = bool((chosen >= 1 - eps - 1e-6).all()) and float((chosen - (-eps).exp()).abs().max()) < 2e-5
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
    for G in o.sizes:
        collapsed = (grpo.group_advantages(by_successes(G), EPS_STAB) == 0).all(1).tolist()
        for eps in (0.2, 0.02, 0.002):
            probs, q = game.probabilities(peaked(eps)), float(game.success(peaked(eps)))
            bound, sharp = 1 - G * game.T * eps, (1 - eps) ** (G * game.T)
            coincide, exact = float((probs ** G).sum()), q ** G + (1 - q) ** G
            measured = math.fsum(chance for chance, flat in zip(binomial(q, G), collapsed) if flat)
            good = bound <= sharp <= math.exp(-G * game.T * eps) <= coincide + 1e-9 and coincide <= exact + 1e-9
            setting = f"G={G} T={game.T} eps={eps} (sharp {sharp:.3f})"
            yield Row("Prop. 4.2 P(collapse)", setting, bound, exact, measured, None,
                      verdict(good and near(measured, exact), "vacuous" if bound <= 0 else "holds"))
    for G, (game, factor) in product([size for size in o.sizes if size <= 8],
                                     ((Game(3, 2), 1), (Game(3, 2, early=True), 1 + 1 / 2 + 1 / 3))):
        rates, bound = (1e-1, 1e-4), math.sqrt(2) * G * game.T
        groups = torch.tensor(list(combinations_with_replacement(range(len(game.actions)), G)))                # (C, G) multisets
        ways = torch.tensor([math.factorial(G) // math.prod(map(math.factorial, Counter(g).values())) for g in groups.tolist()])

        def mean_norm(eps, updates):                                                     # of (C, H, K)
            chance = ways * game.probabilities(peaked(eps))[groups].prod(1)              # (C,), sums to 1
            return float((chance * updates.flatten(1).norm(dim=1)).sum())
        sizes = [mean_norm(eps, step(game, peaked(eps)[None], torch.zeros_like(groups), groups)) for eps in rates]
        rewards = game.rewards[groups].double()
        by_hand = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, unbiased=False, keepdim=True) + EPS_STAB)
        scores = game.scores(peaked(rates[0]))[groups]                                   # (C, G, H, K)
        exact = mean_norm(rates[0], torch.einsum("cg,cghk->chk", by_hand.float(), scores) / G)
        setting = f"G={G} T={game.T} {game.name}"
        yield Row("Prop. 4.2 E||g||", f"{setting}, eps={rates[0]}", bound * rates[0], exact, sizes[0], None,
                  verdict(sizes[0] <= bound * rates[0] and near(sizes[0], exact)))
        limit = factor * math.sqrt(2 * (G - 1)) * rates[-1]
        yield Row("Prop. 4.2 E||g||, limit", f"{setting}, eps={rates[-1]}", bound * rates[-1], limit, sizes[-1], None,
                  verdict(abs(sizes[-1] / limit - 1) < 0.02, "rate"))


def binomial_group(q: float, G: int, eps: float = EPS_STAB) -> dict[str, float]:
    """Exact values for a group of G independent rollouts that succeed with probability q: k successes have
    sigma = sqrt(k (G-k)) / G, gap 1 / (sigma + eps), and push up success (see near_collapse) by u = sigma^2 / (sigma + eps)."""
    pmf = binomial(q, G)
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
    bandit = Game(1, 2)

    def groups_at(q, G):  # by successes: chance, advantages, push
        rewards = by_successes(G)
        picks = 1 - rewards.long()                                                        # action 0 succeeds
        updates = step(bandit, bandit.table([q, 1 - q])[None], torch.zeros_like(picks), picks)
        return torch.tensor(binomial(q, G), dtype=torch.float64), rewards, updates[:, 0, 0, 0].double()
    for G, q in product(o.sizes, (0.05, 0.5)):
        exact = binomial_group(q, G)
        chance, rewards, push = groups_at(q, G)                                           # push: d/d logit of success
        advantages, sigmas = grpo.group_advantages(rewards, EPS_STAB), sigma(rewards)
        gap = advantages.amax(1) - advantages.amin(1)
        values = {"flat": sigmas == 0, "variance": sigmas ** 2, "gap": gap, "push": push}
        measured = {name: float((chance * value).sum()) for name, value in values.items()}
        for table in (exact, measured):
            table["times"] = table["push"] / (table["variance"] or math.nan)
        for name, title in (("flat", "P(sigma=0)"), ("variance", "E[sigma^2]"), ("gap", "E[advantage gap]"),
                            ("push", "E[push]"), ("times", "push over undivided")):
            yield Row(f"Near-collapse {title}", f"G={G} q={q}", None, exact[name], measured[name], None,
                      verdict(near(measured[name], exact[name])))
    for q, G in product((0.02, 0.5), (2, 4, 8, 16)):
        group, (chance, _, push) = binomial_group(q, G), groups_at(q, G)
        mean = float((chance * push).sum())
        exact = group["push"] / group["noise"] / math.sqrt(G)
        measured = mean / (math.sqrt(float((chance * (push - mean) ** 2).sum()) * G) or math.nan)
        root = f", sqrt(q)={math.sqrt(q):.3f}" if q < 0.1 else ""
        yield Row("Choice of G: signal/noise per sqrt(N)", f"q={q} G={G}{root}", None, exact, measured, None,
                  verdict(near(measured, exact)))
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


def spread(G: int, p: float, high: float, low: float, deviation: float | None, how: str) -> tuple[float, float, float]:
    """Mean, variance and third central moment of sigma_g^2 where rewards are as in rewards_of, by enumeration.

    Over how many rows are high, and how many of either kind succeed; for Gaussian rewards G sigma_g^2 / deviation^2 is
    noncentral chi-squared instead.
    """
    odd = round(p * G, 9) % 1
    count, raw = int(round(p * G, 9)), [0.0, 0.0, 0.0]
    for n, share in enumerate(binomial(p, G)) if how == "iid" else ((count, 1 - odd), (count + 1, odd)):
        if share and deviation is None:
            for (h, a), (l, b) in product(enumerate(binomial(high, n)), enumerate(binomial(low, G - n))):
                raw = [sum_ + share * a * b * ((h + l) * (G - h - l) / G ** 2) ** i for i, sum_ in enumerate(raw, 1)]
        elif share:
            off = n * (G - n) / G * ((high - low) / deviation) ** 2
            unit = deviation ** 2 / G  # cumulants of the noncentral chi-squared:
            first, second, third = (unit ** i * c * (G - 1 + i * off) for i, c in ((1, 1), (2, 2), (3, 8)))
            for i, value in enumerate((first, second + first ** 2, third + 3 * first * second + first ** 3)):
                raw[i] += share * value
    mean = raw[0]
    return mean, max(0.0, raw[1] - mean ** 2), raw[2] - 3 * mean * raw[1] + 2 * mean ** 3


def sampled_spread(modes: torch.Tensor, p: float, kind: tuple, how: str, gen) -> tuple[float, float, bool]:
    """E[sigma_g^2] over drawn groups, its standard error, and whether it is near the exact one.

    The error is that of the exact distribution, not of the sample, where a rare event may not have happened at all.
    Near: within four errors, and what skewness adds to that quantile (Cornish and Fisher), (4^2 - 1)/6 mu_3 / mu_2 over
    the groups.
    """
    mean, second, third = spread(modes.shape[1], p, *kind, how)
    measured, error = float((sigma(rewards_of(modes, *kind, gen)) ** 2).double().mean()), math.sqrt(second / len(modes))
    skew = 2.5 * abs(third) / second / len(modes) if second > 1e-12 else 0.0
    exact = variance_value(modes.shape[1], p, (kind[0] - kind[1]) ** 2, *moments(*kind), how)
    return measured, error, near(mean, exact) and near(measured, exact, 4 * error + skew)


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
        measured, error, close = sampled_spread(modes, p, (high, low, deviation), "iid", gen)
        yield Row("Prop. 4.3 E[sigma^2], iid", f"G={G} p={p} {name}", bound, exact, measured, error,
                  verdict(bound <= exact + 1e-12 and close,
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
        measured, error, close = sampled_spread(modes, p, (high, low, deviation), "stratified", gen)
        mixed = bool((modes.amin(1) < modes.amax(1)).all()) or not 1 <= p * G <= G - 1
        good = mixed and bound <= exact + 1e-12 and exact >= iid - 1e-12
        yield Row("Stratified E[sigma^2]", f"G={G} p={p} {name}", bound, exact, measured, error,
                  verdict(good and close,
                          "vacuous" if bound == 0 else "tight" if exact - bound < 1e-12 else "holds"))


def step_factor(q: float, G: int, eps: float = EPS_STAB) -> float:
    """alpha(q) = E[A | this rollout succeeds] - E[A | it fails], the other G-1 succeeding with probability q each."""
    sigmas = [math.sqrt(k * (G - k)) / G for k in range(G + 1)]
    return sum(p * ((1 - (k + 1) / G) / (sigmas[k + 1] + eps) + (k / G) / (sigmas[k] + eps))
               for k, p in enumerate(binomial(q, G - 1)))


def expected_update(game: Game, tables: torch.Tensor, p: float, G: int, norm: str, divided=True, groups: int = 1):
    """The mean update, (2, H, K), of steps of `groups` groups, enumerated; and that of the update times the step's
    mean length, which undoes the token normaliser."""
    N = len(game.actions)
    rows = torch.tensor(list(product(range(2 * N), repeat=groups * G)))  # (B, rollouts): token, trajectory
    chance = (torch.tensor([p, 1 - p])[:, None] * game.probabilities(tables)).flatten()[rows].prod(1)
    rows, chance = rows[chance > 0], chance[chance > 0][:, None, None, None]
    huge = 1 if divided else 1e4  # eps_stab so large that only it divides
    advantages = grpo.group_advantages(game.rewards[rows % N].view(-1, G), EPS_STAB if divided else huge) * huge
    updates = chance * step(game, tables, rows // N, rows % N, norm, advantages=advantages.view(rows.shape))
    lengths = game.lengths[rows % N].float().mean(1)[:, None, None, None]
    return updates.sum(0).float(), (updates * lengths).sum(0).float()


def predicted_update(game: Game, tables: torch.Tensor, p: float, G: int, norm: str, divided=True) -> torch.Tensor:
    """(2, H, K): alpha * the sum over both modes of share * (grad E[w R] - m grad E[w]), see what_variance_teaches."""
    share = torch.tensor([p, 1 - p])
    m = float(share.double() @ game.success(tables))
    alpha = step_factor(m, G) if divided else (G - 1) / G
    worth = alpha * (game.rewards - m) / (game.lengths if norm == "sequence" else 1)
    return share[:, None, None] * torch.stack([game.gradient(table, worth) for table in tables])


def cosine_of(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a * b).sum() / (a.norm() * b.norm()))


def what_variance_teaches(o: Options):
    """Our own: the expected update of RC-GRPO, at ratio 1 and beta = 0. J_h, J_l: success under the two tokens. First
    for rollouts of equal length, or weights free of it.

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

    Unequal lengths. The normaliser "sequence" gives row j the weight w_j = 1/len_j, so E[w_j grad log pi(tau_j)] is not
    0 but grad E[w], and E = alpha(m) (p (grad E_h[w R] - m grad E_h[w]) + (1-p) (the same under low)): exact, but m is
    now in the direction. GRPO has J_h for m, so through the mean of the group the low rows do turn the high mode's
    update: they teach it length, not success. "token" divides the step's sum over tokens, for which the statement above
    is exact, by the step's tokens. That number is random and depends on the same rollouts: the mean of the quotient is
    off by a term in one over the number of groups.
    """
    gen, p = torch.Generator().manual_seed(o.seed), 0.5
    even, ragged = Game(2, 2), Game(3, 2, early=True)
    chances = {even: ((0.9, 0.8), (0.3, 0.6)), ragged: ((0.7, 0.3, 0.3), (0.9, 0.95, 0.95))}  # of the expert's action
    modes = {game: torch.stack([game.table(*([q, 1 - q] for q in mode)) for mode in pair])
             + 0.3 * torch.randn(2, game.H, 2, generator=gen) for game, pair in chances.items()}        # (2, H, K)
    for game, norm, title in ((even, "sequence", even.name), (ragged, "sequence", "unequal, 1/len"),
                              (ragged, "token", "unequal, times tokens")):
        tables = modes[game]
        for G in (2, 4):
            found = {}
            for name, share, divided in (("RC update, undivided", p, False), ("RC update, divided", p, True),
                                         ("GRPO update", 1.0, True)):
                found[name] = update = expected_update(game, tables, share, G, norm, divided)[norm == "token"]
                exact = predicted_update(game, tables, share, G, norm, divided)
                close = float((update - exact).norm()) < 2e-4 * float(exact.norm())
                norms = [float(of[HIGH_MODE].norm()) for of in (exact, update)]
                yield Row(f"{name}, |high table|", f"G={G} P(high)={share} {title}", None, *norms, None, verdict(close))
            turn = cosine_of(found["RC update, divided"][HIGH_MODE], found["GRPO update"][HIGH_MODE])
            exact = cosine_of(*(predicted_update(game, tables, share, G, norm)[HIGH_MODE] for share in (p, 1.0)))
            yield Row("RC and GRPO update, cosine", f"G={G} high table, {title}", None, exact, turn, None,
                      verdict(near(turn, exact), "the low rows turn it" if exact < 1 - 1e-3 else "same direction"))
    exact = predicted_update(ragged, tables, p, 2, "token")
    length = float((ragged.probabilities(tables).mean(0) * ragged.lengths).sum())
    found = [length * expected_update(ragged, tables, p, 2, "token", groups=groups)[0] for groups in (1, 2)]
    off = [float((update - exact).norm() / exact.norm()) for update in found]
    for groups, value in enumerate(off, 1):
        yield Row("RC update, token normaliser, off by", f"G=2, unequal, groups: {groups}", None, None, value, None,
                  verdict(off[0] > 0.01 and 0.4 < off[1] / off[0] < 0.6, "as 1/groups"))
    game, tables, G, eta = even, modes[even], 4, 1e-3
    direction = expected_update(game, tables, p, G, "sequence", divided=False)[0].double()
    gradients = [game.gradient(table, game.rewards) for table in tables]
    inner = [float((gradients[HIGH_MODE] * gradient).sum()) / game.T for gradient in gradients]  # a mean over T tokens
    for shared in (0.0, 0.5, 1.0):                                                       # a^2
        moved = tables.double() + eta * (direction + shared * direction.flip(0))
        gain = float(game.success(moved)[HIGH_MODE] - game.success(tables)[HIGH_MODE]) / eta
        exact = (G - 1) / G * (p * inner[HIGH_MODE] + (1 - p) * shared * inner[LOW_MODE])
        cosine = shared * cosine_of(*gradients)
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
    In "shortcut" the low mode learns first: the separation opens the wrong way round; only what is shared closes it.
    """
    for setting in SETTINGS:
        (plain, alone), (mixed, together) = (train_tables(o, setting, conditioned) for conditioned in (False, True))
        curves[setting] = (plain, mixed)
        gain, error = estimate(mixed[-1, :, HIGH_MODE] - plain[-1, :, HIGH_MODE])
        low_end = mixed[-1, :, LOW_MODE].mean()
        before, grpo_, rc = (float(at[:, HIGH_MODE].mean()) for at in (plain[0], plain[-1], mixed[-1]))
        luck = 0.1 + 4 * math.sqrt(0.1 * 0.9 / o.seeds)  # at most one seed in ten finds it alone
        good = {"shortcut": rc > 0.9 and grpo_ < luck,
                "shortcut, nothing shared": rc < 0.1 and low_end > 0.9}.get(setting, min(rc, grpo_) > 0.98)
        yield Row(f"Remark 4.4 {setting}",
                  f"J_high {before:.2f} -> GRPO {grpo_:.2f}, RC {rc:.2f}; sigma^2 {alone:.2f}, {together:.2f}",
                  None, None, gain, error, verdict(good, "moves on" if setting == "shortcut" else "no help"))
        separation = (mixed[:, :, HIGH_MODE] - mixed[:, :, LOW_MODE]).mean(1)            # (steps + 1,)
        first, middle, last = separation[[0, len(separation) // 2, -1]].tolist()
        closed, opened = abs(last) < 0.05, float(separation.min()) < -0.5  # opened: the low mode found it first
        good, how = {"shortcut": (opened and closed, "opens, then closes"),
                     "shortcut, nothing shared": (last < -0.9, "stays open")}.get(
                         setting, (first > 0.3 and closed and not opened, "closes"))
        yield Row("Remark 4.4 separation under RC", f"{setting}: {first:+.2f}, {middle:+.2f} half-way", None, None,
                  *estimate(mixed[-1, :, HIGH_MODE] - mixed[-1, :, LOW_MODE]), verdict(good, how))


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

    Exact: per task, with unbiased estimates from its own rollouts: sample variances under either token, and (difference
    of means)^2 less its own sampling variance for Delta^2; groups with two rows of each token at least. In these
    estimates the formula is an identity once the tokens are given, so what it tests is that tokens were drawn as
    P_sample says, row by row. Bound: from the separation of the whole step, squared, less its squared standard error;
    by Jensen's inequality the mean over tasks of Delta^2 is at least that. Tokens drawn once per group, say, break the
    bound. Errors are those of a group over the whole run, and of one more at the largest deviation there can be,
    range^2 / 8, as few groups show none.
    """
    options = read_json(Path(o.run) / "config.json")["options"]
    G, p, how = options["group"], options.get("p_high"), options.get("how", "iid")
    worst, steps, of_step = 0.0, [], read_groups(o.run)
    scores = [row["reward"] for groups in of_step.values() for group in groups for row in group]
    extent = max(scores) - min(scores)
    for number, groups in of_step.items():
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
        squares = float(((values - values.mean()) ** 2).sum()) + (extent ** 2 / 8) ** 2
        deviations.append(math.sqrt(squares / max(1, len(values))))
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
            ids, mask = (torch.tensor([row], device=lm.device) for row in (ids, mask))
            nll.append(-float(policy.token_logprobs(lm, ids, mask, options["temperature"]).sum()))
    nll = torch.tensor(nll, dtype=torch.float64)
    flat, error = estimate(sigma(rewards[0]) == 0)
    least = (-G * nll).exp()  # a task's P(collapse) is at least that
    sharp, spared = float(least.mean()), 4 * math.sqrt(float((least * (1 - least)).sum())) / len(tasks)
    bound = float((1 - G * nll).mean())
    yield Row(f"Run: P(collapse) under high, {when}", f"G={G}, T eps: median {float(nll.median()):.2f} nats, sharp {sharp:.3f}",
              bound, None, flat, error, verdict(flat >= sharp - spared, "vacuous" if bound <= 0 else "holds"))

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
