"""Stage 2: RC-GRPO. Every rollout of a group draws its own reward token (paper, method 2, eq. 3).

    python rcgrpo.py                                     # RCTP-FT + RC-GRPO, from runs/rctp -> runs/rcgrpo
    python rcgrpo.py --init runs/sft                     # SFT + RC-GRPO, the fourth arm
    python rcgrpo.py --how stratified                    # exactly p * G high tokens in every group

All that differs from grpo.py is on this screen: r_j ~ P_sample with P(high) = p, independently for each rollout of each
group. Advantages stay those of the whole group (same task, mixed tokens), ratio and KL are each under the rollout's own
token; the reward is the task's, whatever the token (no bonus for obeying the low one).

Departure, an option: stratified tokens. Then E[sigma_g^2] = (G-1)/G (p Var_high + (1-p) Var_low) + p(1-p) Delta^2: the
bound of Proposition 4.3 loses its factor (G-1)/G, and no group is all high or all low (at G = 4, p = 1/2 one i.i.d.
group in eight is). A third reward token would be drawn here, too: see tokens.REWARD_TOKENS.
"""
import random
from dataclasses import dataclass

import grpo
from run import command_line, method, program, running
from tokens import HIGH, LOW


@dataclass
class Options(grpo.Options):
    p_high: float = method(0.5, "probability of the high token (paper: share of successes in stage 1)", least=0, most=1)
    how: str = method("iid", "how tokens are drawn: iid (paper), stratified (p * G high ones a group)",
                      choices=("iid", "stratified"))
    init: str = running("runs/rctp", "where to start, also the frozen reference: run or checkpoint folder, hub name")
    out: str = running("runs/rcgrpo", "run folder")


def draw_tokens(groups: int, group_size: int, p_high: float, how: str = "iid", seed=0) -> list[list[str]]:
    """`groups` lists of `group_size` reward tokens, HIGH or LOW; the same seed gives the same draw.

    stratified: p * G high tokens in random order; where p * G is no integer, the odd one is high with the remaining
    probability, so that P(high) = p for every rollout. Raises ValueError for p outside [0, 1] and unknown ways to draw.
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


def main(argv=None):
    o = grpo.read_options(Options, argv)
    grpo.train(o, lambda groups, size, seed: draw_tokens(groups, size, o.p_high, o.how, seed),
               command_line("rcgrpo.py", argv))


if __name__ == "__main__":
    program(main)
