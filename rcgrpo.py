"""Stage 2: RC-GRPO. Every rollout of a group draws its own reward token (paper, method 2, eq. 3).

    python rcgrpo.py                                     # RCTP-FT + RC-GRPO, from runs/rctp -> runs/rcgrpo
    python rcgrpo.py --init runs/sft                     # SFT + RC-GRPO, the fourth arm
    python rcgrpo.py --how stratified                    # exactly p * G high tokens in every group

All that differs from grpo.py is on this screen: r_j ~ P_sample with P(high) = p, independently for each rollout of each
group. Advantages stay those of the whole group (same task, mixed tokens), ratio and KL are each under the rollout's own
token; the reward is the task's, whatever the token (no bonus for obeying the low one).

Departure, an option: stratified tokens. Then E[sigma_g^2] = (G-1)/G (p Var_high + (1-p) Var_low) + p(1-p) Delta^2: the bound
of Proposition 4.3 loses its factor (G-1)/G, and no group is all high or all low (at G = 4, p = 1/2 one i.i.d. group in eight is).

Ours, off by default, to find out what the low rows are for (`learn_from`): --no-low_gradient, and --credit_lucky_lows.
"""
import random
from dataclasses import dataclass

import torch

import grpo
from evaluate import GOALS
from run import command_line, option, program, require
from tokens import HIGH, LOW


@dataclass
class Options(grpo.Options):
    init: str = option("runs/rctp", "where to start: run folder, checkpoint folder or hub name; it is the frozen reference too")
    out: str = option("runs/rcgrpo", "run folder")
    p_high: float = option(0.5, "probability of the high token (paper: the share of successes in the RCTP data)",
                           least=0, most=1)
    how: str = option("iid", "how tokens are drawn: iid (paper) or stratified (exactly p * G high ones a group)",
                      choices=("iid", "stratified"))

    low_gradient: bool = option(True, "learn from rows under the low token; without, they only count in their group's mean and sigma")
    credit_lucky_lows: str = option("off", "a success under the low token also teaches the high prompt: off, weight (as if sampled under it) "
                                    "or ratio (importance ratio to the low prompt it was sampled under, clipped)", choices=("off", "weight", "ratio"))

    def check(self):
        super().check()
        require(self.goal == "auto", "--goal is for grpo.py: here every rollout draws its own token")


def draw_tokens(groups: int, group_size: int, p_high: float, how: str = "iid", seed=0) -> list[list[str]]:
    """`groups` lists of `group_size` reward tokens, HIGH or LOW; the same seed gives the same draw.

    stratified: p * G high tokens in random order; where p * G is no integer, the odd one is high with the remaining
    probability, so that P(high) = p for every rollout. Raises ValueError for p outside [0, 1] or an unknown way to draw.
    """
    if not 0 <= p_high <= 1:
        raise ValueError(f"p_high must be between 0 and 1, not {p_high}")
    if how not in ("iid", "stratified"):
        raise ValueError(f"how must be iid or stratified, not {how!r}")
    rng = random.Random(f"tokens-{seed}")
    drawn = []
    for _ in range(groups):
        if how == "iid":
            drawn.append([HIGH if rng.random() < p_high else LOW for _ in range(group_size)])
        else:
            exact = round(p_high * group_size, 9)                        # 0.7 * 10 is 7, not 7.000000000000001
            high = int(exact) + (rng.random() < exact - int(exact))
            drawn.append(rng.sample([HIGH] * high + [LOW] * (group_size - high), group_size))
    return drawn


def learn_from(o: Options, model, rollouts: list, labels: list[str], advantages: torch.Tensor, weights: torch.Tensor):
    """The rows that an update learns from: N rollouts, their tokens, advantages (N,), weights (N,) -> the same three, revised.

    A lucky low, a row under the low token with a positive advantage, becomes one more row: the same ids under the high token, with
    its own advantage A_j and its own weight in the loss, 1/(N len_j) (N: the step's rollouts). So credit adds to the step's gradient
    and changes none of its other terms.
    """
    low = torch.tensor([label == LOW for label in labels])
    lucky = [i for i in range(len(rollouts)) if low[i] and advantages[i] > 0 and o.credit_lucky_lows != "off"]
    high_id, low_id = model.config.reward_token_ids                      # a reward token stands in the prompt only, once
    credited = [grpo.Credited(row.episode, [high_id if token == low_id else token for token in row.ids], row.mask, row.logprobs,
                              ratio=o.credit_lucky_lows == "ratio") for row in (rollouts[i] for i in lucky)]
    own = weights if o.low_gradient else weights.masked_fill(low, 0.0)
    return rollouts + credited, torch.cat([advantages, advantages[lucky]]), torch.cat([own, weights[lucky]])


def main(argv=None):
    o, _ = grpo.inherit(Options, argv, "runs/rctp")
    grpo.train(o, lambda groups, group_size, seed: draw_tokens(groups, group_size, o.p_high, o.how, seed), tuple(GOALS),
               command_line("rcgrpo.py", argv),
               lambda *batch: learn_from(o, *batch))


if __name__ == "__main__":
    program(main)
