"""lab/variants.py: controls and extensions of the study."""
import collections
import dataclasses
import random
import types

import pytest
import torch

import evaluate
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


def learnt(t):
    return [token for token, mine in zip(t.ids, t.mask) if mine]


@pytest.mark.parametrize("dialogue", ["turns", "merged"])
def test_variants_same_results(dialogue):
    """Successes show one result for every call; failures, the mask's calls and the tokens are what they were."""
    renderer = Renderer(tiny()[1])
    o = variants.Sft(demos=20, results="constant", dialogue=dialogue)
    tasks = evaluate.load_tasks(o, "train", 20, 3)
    true, same = sft.stage1_data(o, renderer, tasks), variants.same_results(o, renderer, tasks, None)
    changed = 0
    for a, b in zip(true, same, strict=True):
        assert (a.token, a.reward) == (b.token, b.reward) and learnt(a) == learnt(b)
        results = sum(m["role"] == "tool" for m in b.episode.messages) - (dialogue == "merged")     # none after done
        count = renderer.tokenizer.decode(b.ids).count('{"status": "success"}')
        assert count == (results if b.token == HIGH else 0)
        changed += a.ids != b.ids
    assert changed == sum(t.token == HIGH and bool(t.episode.calls) for t in true) > 15


def remedied(name, rollouts, rewards, model):
    """What a remedy learns from rollouts with these rewards in groups of 4 -> (gradient, weights of plain GRPO)."""
    rollouts = [dataclasses.replace(t, reward=float(reward)) for t, reward in zip(rollouts, rewards)]
    o, keeper = variants.Grpo(beta=0.0, group=4, remedy=name), Gradients(model)
    weights = grpo.loss_weights(torch.tensor([t.sampled for t in rollouts]), o.norm)
    advantages = grpo.group_advantages(torch.tensor(rewards, dtype=torch.float32).view(-1, 4)).flatten()
    variants.REMEDIES[name](o)[1](model, None, keeper, rollouts, advantages, weights, 1e-3, o)
    return getattr(keeper, "gradient", None), weights


REWARDS = [1, 0, 0, 0,  0, 0, 0, 0,  1, 1, 1, 1,  1, 1, 0, 0]


@pytest.mark.parametrize("name, advantages", [
    ("no_sigma", [.75, -.25, -.25, -.25, *[0] * 8, .5, .5, -.5, -.5]),
    ("ngrpo", [6 ** .5 / 2, *[-6 ** .5 / 3] * 3, *[-.5] * 4, *[0] * 4, *[6 ** .5 / 3] * 2, *[-6 ** .5 / 2] * 2]),
    ("off", [3 ** .5, *[-3 ** -.5] * 3, *[0] * 8, 1, 1, -1, -1])])
def test_variants_other_advantages(name, advantages):
    """By hand, for one success, none, all, half; the virtual success makes a group that fails wholly push down."""
    tasks, model, tokenizer = school()
    rollouts = rollout(model, tokenizer, tasks * 2)
    gradient, weights = remedied(name, rollouts, REWARDS, model)
    assert close(gradient, by_hand(model, rollouts, advantages, weights), 1e-3)


def test_variants_dynamic_sampling():
    """Groups without variance do not count: the others' weights are those of a step without them."""
    tasks, model, tokenizer = school()
    rollouts = rollout(model, tokenizer, tasks * 2)
    gradient, weights = remedied("dapo", rollouts, REWARDS, model)
    kept = [*range(4), *range(12, 16)]
    advantages = grpo.group_advantages(torch.tensor(REWARDS, dtype=torch.float32).view(-1, 4)).flatten()[kept]
    assert close(gradient, by_hand(model, [rollouts[i] for i in kept], advantages, 2 * weights[kept]), 1e-4)
    assert remedied("dapo", rollouts[:4], [1] * 4, model)[0] is None, "no group is left, so no step"


def test_variants_golden_trajectory():
    """It stands for the first rollout of each group that fails wholly, with R = 1 under that rollout's token."""
    tasks, model, tokenizer = school()
    tasks = [tasks[0], *sim_tasks(1, 77)]                                # the other one was never learnt
    sampler, played = Sampler(model, tokenizer, 16, 40, 6), [task for task in tasks for _ in range(4)]
    o, keeper = variants.Grpo(beta=0.0, group=4, remedy="golden"), Gradients(model)
    roll, learned = variants.golden(o)
    rollouts = [dataclasses.replace(t, reward=float(i == 1))             # the second group fails wholly
                for i, t in enumerate(roll(sampler, played, [LOW] * 8, 1.0, (0, 1)))]
    learned(model, None, keeper, rollouts, None, None, 1e-3, o)
    right = sft.relabelled(sampler.renderer, sft.labelled(sampler.renderer, sft.demonstrate(tasks[1])), LOW)
    rows = [*rollouts[:4], right, *rollouts[5:]]
    weights = grpo.loss_weights(torch.tensor([t.sampled for t in rows]), o.norm)
    up, down = 3 ** .5, -3 ** -.5
    wanted = by_hand(model, rows, [down, up, down, down, up, down, down, down], weights)
    assert reward.trajectory_reward(relive(right, sampler.renderer)).total == 1 and right.ids != rollouts[4].ids
    assert rollouts[4].reward == 0 and close(keeper.gradient, wanted, 1e-3)


@pytest.mark.parametrize("luck", [0.0, 0.1, 0.5, 1.0])
def test_variants_sequential_sampling(luck, monkeypatch):
    """As many rollouts as GRPO's, groups of G of one task, a mixed group wherever a task has shown both; tasks whose
    rollouts were all alike are sampled again before new ones come."""
    tasks, rng, rounds = sim_tasks(12, 3), random.Random(0), []

    def made(sampler, played, tokens, temperature, seed):
        assert len(played) == len(tokens)
        rounds.append(([task.id for task in played], [float(rng.random() < luck) for _ in played], seed))
        return [types.SimpleNamespace(task=task.id, reward=won) for task, won in zip(played, rounds[-1][1])]
    monkeypatch.setattr(variants, "sample", made)
    o = variants.Grpo(group=4, remedy="ada")
    picked = variants.ada(o)[0](None, [task for task in tasks for _ in range(4)], [None] * 48, 1.0, (5, 7))
    groups = [picked[i:i + 4] for i in range(0, len(picked), 4)]
    assert sum(len(ids) for ids, _, _ in rounds) == 48 and len({seed for _, _, seed in rounds}) == len(rounds)
    found = collections.defaultdict(list)
    for ids, won, _ in rounds:
        flat = {name for name, rewards in found.items() if len(set(rewards)) == 1}
        assert set(ids) <= flat or not flat, "first those without variance"
        for name, each in zip(ids, won):
            found[name].append(each)
    assert [group[0].task for group in groups] == list(found)
    for group in groups:
        name, rewards = group[0].task, [row.reward for row in group]
        wins, fails = found[name].count(1.0), found[name].count(0.0)
        assert all(row.task == name for row in group) and (len(set(rewards)) == 2) == (wins > 0 and fails > 0)
        assert sum(rewards) == (2 if min(wins, fails) >= 2 else wins if wins < 2 else 4 - fails)
    assert (len(found) == 12) == (luck == 0.5) or luck not in (0.0, 1.0)
