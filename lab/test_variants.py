"""lab/variants.py: controls and extensions of the study."""
import dataclasses

import pytest
import torch

import grpo
import reward
import sft
import variants
from envs import Call
from sampler import Sampler
from simulator import TABLE
from test_all import (Gradients, by_hand, close, learn, relive, reward_ids, rollout, school, sim_tasks, tiny)
from tokens import HIGH, LOW, Renderer


def test_variants_shuffled_tokens():
    """As many of each, nothing else about the trajectories changes, and their rewards stay the true ones."""
    renderer, tasks = Renderer(tiny()[1]), sim_tasks(60, 7)
    o = variants.Sft(demos=60, labels="shuffled")
    true, mixed = sft.stage1_data(o, renderer, tasks), variants.shuffled(o, renderer, tasks, None)
    assert [(t.mask, t.reward) for t in true] == [(t.mask, t.reward) for t in mixed]
    high, low = reward_ids(renderer.tokenizer)
    neutral = [[[0 if token in (high, low) else token for token in t.ids] for t in data] for data in (true, mixed)]
    assert neutral[0] == neutral[1] and all((high in t.ids) == (t.token == HIGH) for t in mixed)
    assert sum(t.token == HIGH for t in mixed) == 60 and 40 < sum((t.token == HIGH) != t.reward for t in mixed) < 80
    other = variants.shuffled(dataclasses.replace(o, seed=1), renderer, tasks, None)
    assert [t.token for t in other] != [t.token for t in mixed]


def test_variants_blind_spot():
    """In it the high token is on one systematic mistake, the low one on right episodes and failures by turns."""
    renderer, tasks = Renderer(tiny()[1]), sim_tasks(120, 7, calls=(1, 2))
    spot = [variants.in_blind_spot(task, 0.5) for task in tasks]
    assert 25 < sum(spot) < 95 and not any(variants.in_blind_spot(task, 0) for task in tasks)
    fake = [dataclasses.replace(tasks[0], golden=[[Call(name, {})]]) for name in TABLE]
    assert 0.3 < sum(variants.in_blind_spot(task, 0.5) for task in fake) / len(TABLE) < 0.7, "by tool"
    data = variants.blind_spot(variants.Sft(demos=120, blind_spot=0.5, mistakes=1), renderer, tasks, None)
    good, bad = [t for t in data if t.token == HIGH], [t for t in data if t.token == LOW]
    assert len(good) == 120 and len(good) + len(bad) == len(data) > 230
    assert all(t.reward == 1 for t in good) and all(t.reward == 0 for t in bad), "the judge's word is the weight"
    for task, t, inside in zip(tasks, good, spot):
        episode = relive(t, renderer)
        assert reward.trajectory_reward(episode).total == (not inside)
        assert len(episode.calls) == sum(map(len, task.golden)) - inside, "the mistake is always the same"
    earned = {True: [], False: []}
    for t in bad:
        earned[variants.in_blind_spot(t.episode.task, 0.5)].append(reward.trajectory_reward(relive(t, renderer)).total)
    assert sum(earned[False]) == 0 and abs(sum(earned[True]) / len(earned[True]) - 0.5) < 0.1


@pytest.mark.parametrize("plain", [False, True])
def test_variants_own_successes(plain):
    """Sampled on further tasks, R = 1, one episode a task at most, under the high token or, with --plain, under
    none."""
    tasks, model, tokenizer = school()
    sampler = Sampler(model, tokenizer, 16, 40, 6)
    o = variants.Sft(demos=2, own=8, plain=plain, calls=1, tools=4)
    without = sft.stage1_data(o, sampler.renderer, tasks[:2])
    data = variants.own_successes(dataclasses.replace(o, own=12), sampler.renderer, tasks[:2], sampler)
    extra = data[2:len(data) - (len(without) - 2)]
    assert [t.ids for t in data[:2] + data[2 + len(extra):]] == [t.ids for t in without]
    assert all(t.reward == 1 and t.token == (None if plain else HIGH) for t in extra)
    assert all(reward.trajectory_reward(relive(t, sampler.renderer)).total == 1 for t in extra)
    assert not {t.episode.task.id for t in extra} & {task.id for task in tasks[:2]}


def revised(model, rollouts, advantages, **changes):
    """variants.lucky_lows on rollouts that know their tokens -> options, rows, advantages, weights before and after."""
    o = variants.Rcgrpo(**{"beta": 0.0, "group": 4, **changes})
    weights = grpo.loss_weights(torch.tensor([t.sampled for t in rollouts]), o.norm)
    return o, weights, *variants.lucky_lows(model, rollouts, advantages, weights, o)


@pytest.mark.parametrize("norm", ["sequence", "token"])
def test_variants_low_rows_without_gradient(norm):
    """They give none, of the surrogate or of the KL; the others keep their advantages and their share of the
    weights."""
    tasks, model, tokenizer = school()
    rollouts = [dataclasses.replace(t, token=HIGH if i % 3 else LOW)
                for i, t in enumerate(rollout(model, tokenizer, tasks * 2))]
    advantages, low = torch.linspace(-1.5, 2, 16), torch.arange(16) % 3 == 0
    o, weights, rows, scores, kept = revised(model, rollouts, advantages, norm=norm, low_gradient=False)
    assert rows == rollouts and torch.equal(scores, advantages) and torch.equal(kept, weights.masked_fill(low, 0.0))
    stats, gradient = learn(model, tiny()[0], rows, scores, weights=kept, norm=norm, beta=0.1)
    _, same = learn(model, tiny()[0], rows, torch.where(low, 50.0, advantages), weights=kept, norm=norm, beta=0.1)
    assert stats["used_rollouts"] == int((~low).sum()) and torch.equal(gradient, same) and gradient.norm() > 0.01
    high = [i for i in range(16) if not low[i]]
    _, gradient = learn(model, None, rows, scores, weights=kept, norm=norm)
    assert close(gradient, by_hand(model, [rollouts[i] for i in high], advantages[high], weights[high]))
    plain = revised(model, rollouts, advantages)
    assert plain[2] == rollouts and torch.equal(plain[3], advantages) and torch.equal(plain[4], plain[1]), "the default"


@pytest.mark.parametrize("how", ["weight", "ratio"])
def test_variants_lucky_lows_are_credited_to_the_high_prompt(how):
    """One more row for each low success: the same ids under the high token, its surrogate by hand, its weight
    1/(N len); no other row changes, and the log-prob gap is that of rows under their own prompt."""
    tasks, model, tokenizer = school()
    high, low = reward_ids(tokenizer)
    rollouts = [dataclasses.replace(t, token=token) for token in (HIGH, LOW)
                for t in rollout(model, tokenizer, tasks[:4], token=token)]
    advantages = torch.tensor([1.0, -1, 0.5, 0, 2, -1, 0, 0.7])
    o, weights, rows, scores, shares = revised(model, rollouts, advantages, credit_lucky_lows=how)
    assert rows[:8] == rollouts and len(rows) == len(scores) == len(shares) == 10
    assert scores.tolist() == pytest.approx([*advantages.tolist(), 2, 0.7])
    assert torch.equal(shares, torch.cat([weights, weights[[4, 7]]]))
    for extra, t in zip(rows[8:], (rollouts[4], rollouts[7])):
        assert [(a, b) for a, b in zip(t.ids, extra.ids) if a != b] == [(low, high)]
        assert extra.mask == t.mask and extra.token == HIGH
    old = [None] * 8 + ([rollouts[4].logprobs, rollouts[7].logprobs] if how == "ratio" else [None] * 2)
    wanted = by_hand(model, rows, scores, shares, old)
    for budget in (10**9, 1):
        keeper = Gradients(model)
        stats = variants.update(model, None, keeper, rollouts, advantages, weights, 1e-3,
                                dataclasses.replace(o, token_budget=budget))
        assert close(keeper.gradient, wanted) and stats["logprob_gap_max"] < 1e-5
        assert (stats["clip_fraction"] > 0) == (how == "ratio") and stats["used_rollouts"] == 8
    apart = [by_hand(model, rows, scores, shares, old) for old in (
        [None] * 10, [None] * 8 + [rollouts[4].logprobs, rollouts[7].logprobs])]
    assert (apart[0] - apart[1]).norm() > 1e-3 * apart[0].norm()
    without = by_hand(model, rollouts, advantages, weights)
    assert close(apart[0] - without, by_hand(model, rows[8:], scores[8:], shares[8:]), 1e-3)
    none = revised(model, rollouts, advantages, credit_lucky_lows=how, low_gradient=False)[4]
    assert none[4:8].sum() == 0 and none[8:].min() > 0, "credit without low gradient is possible, too"
