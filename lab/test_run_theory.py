"""run_theory.py: it agrees with honest runs, and not with runs in which something went wrong."""
import json
import math
import random
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

import builtin
import evaluate
import grpo
import model as policy
import rcgrpo
import run
import run_theory
from tokens import HIGH, LOW


def made_up_run(folder, per_row=True, high=0.8, low=0.2, twist=0.0, steps=3, groups=40, how="iid", G=8, options=None):
    """A run folder with rollouts only: tokens drawn per row or (a fault) per group."""
    rng, rows = random.Random(0), []
    for step, group in ((step, group) for step in range(1, steps + 1) for group in range(groups)):
        tokens = rcgrpo.draw_tokens(1, G, 0.5, how, (step, group))[0] if per_row else [[HIGH, LOW][group % 2]] * G
        rewards = [float(rng.random() < (high if token == HIGH else low)) for token in tokens]
        advantages = grpo.group_advantages(torch.tensor([rewards]))[0] + twist
        rows += [{"step": step, "group": group, "token": "high" if token == HIGH else "low", "reward": reward,
                  "advantage": float(advantage)} for token, reward, advantage in zip(tokens, rewards, advantages)]
    folder.mkdir()
    (folder / "episodes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.json").write_text(json.dumps({"options": options or {"group": G, "p_high": 0.5, "how": "iid"}}))
    return folder


@pytest.mark.parametrize("made, fails", [
    ({}, set()), ({"high": 1.0, "low": 0.0}, set()),                         # the bound is tight
    ({"per_row": False, "high": 1.0, "low": 0.0}, {"Run: E[sigma^2]"}),      # and data can violate it
    ({"how": "stratified", "high": 1.0, "low": 0.0}, {"Run: E[sigma^2]", "Run: E[sigma^2], mean"}),
    ({"steps": 1, "groups": 1}, set()), ({"steps": 1, "groups": 2}, set()),  # no deviation seen
    ({"twist": 0.01}, {"Run: recorded advantages, |difference|"})])
def test_made_up_runs(tmp_path, made, fails):
    lines = run_theory.from_run(made_up_run(tmp_path / "run", **made), {})
    assert {line.statement for line in lines if not line.holds} == fails


@pytest.fixture
def whole_run(tmp_path, monkeypatch):
    """A run folder with a tiny random policy -> its options."""
    monkeypatch.chdir(tmp_path)
    lm, tokenizer = builtin.builtin_policy(["call the tool"] * 9, 0, width=16, layers=1)
    policy.add_reward_tokens(lm, tokenizer)
    for p in lm.parameters():
        p.data *= 4 if p.dim() > 1 else 1                                    # so that the token in the prompt matters
    small = rcgrpo.Options(init="run", group=8, rows=64, max_message=2, max_messages=1, tools=3, turns=1,
                           temperature=0.7, device="cpu")
    made_up_run(Path("run"), steps=2, groups=4, options=asdict(small))
    policy.save_policy(lm, tokenizer, Path("run/checkpoint"))
    real = evaluate.sample

    def lucky(sampler, tasks, tokens, *more, **options):                     # a random policy does not succeed
        rollouts = real(sampler, tasks, tokens, *more, **options)
        for i, r in enumerate(rollouts):
            r.reward = float(r.ids[r.mask.index(True)] % 2)                  # by the first sampled token
            if i % 3 == 0:                                                   # lengths differ
                r.ids, r.mask, r.logprobs = r.ids[:-1], r.mask[:-1], r.logprobs[:-1]
        lucky.rollouts, lucky.temperature = rollouts, more[0]
        return rollouts
    monkeypatch.setattr(evaluate, "sample", lucky)
    return small, lucky


def test_a_whole_run(whole_run, capsys):
    run_theory.main(["run", "--tasks", "8", "--out", "new/a.png"])
    told, printed = json.loads(Path("new/a.json").read_text()), capsys.readouterr().out
    assert told["lines"] == len(told["rows"]) == 10 and told["failed"] == 0 and told["options"]["run"] == "run"
    assert all(row["statement"] in printed for row in told["rows"]) and Path("new/a.png").stat().st_size > 10_000


def test_a_policy_by_hand(whole_run, monkeypatch):
    """T eps and both modes' gradients, at the temperature of the rollouts; a collapse below its bound fails."""
    small, lucky = whole_run
    o, options = run_theory.Options(run="run", tasks=8), asdict(small)
    collapse, cosine, ratio = run_theory.policy_of_run(o, "run/checkpoint", options, "end")
    lm, tokenizer = policy.load_policy("run/checkpoint")
    tasks, nll = evaluate.load_tasks(small, "validation", 8, 30_000), []
    renderer = run_theory.Sampler(lm, tokenizer).renderer

    def total(ids, mask):
        return policy.token_logprobs(lm, torch.tensor([ids]), torch.tensor([mask]), 0.7).sum()
    for task in tasks:
        shown = run_theory.demonstrate(task).messages
        nll.append(-total(*renderer.conversation(shown, task.episode().tools, HIGH)).item())
    assert f"median {sorted(nll)[3]:.2f} nats" in collapse.setting
    assert lucky.temperature == 0.7 and [r.token for r in lucky.rollouts] == [HIGH] * 64 + [LOW] * 64
    g = []
    for rows in torch.arange(128).view(-1, 4).tolist():                      # half a group
        rewards, worth = [lucky.rollouts[i].reward for i in rows], 0.0
        for i, reward in zip(rows, rewards):
            r, advantage = lucky.rollouts[i], (reward - sum(rewards) / 4) * 4 / 3
            worth = worth + advantage * total(r.ids, r.mask) / (4 * r.sampled)
        g.append(torch.cat([p.flatten() for p in torch.autograd.grad(worth, list(lm.parameters()))]))
    g = torch.stack(g).view(2, 8, 2, -1)                                     # mode, task, half

    def by_hand(tasks):
        (a, b), (c, d) = g[:, tasks].sum(1)
        inner, high, low = float((a + b) @ (c + d)) / 4, float(a @ b), float(c @ d)
        return [inner / (high * low) ** 0.5 if min(high, low) > 0 else math.nan, inner / high if high > 0 else math.nan]
    left_out = torch.tensor([by_hand([i for i in range(8) if i != k]) for k in range(8)])
    errors = (left_out.std(0) * 7 / 8 ** 0.5).tolist()                       # jackknife: 7/8 of the sum of squares
    for row, value, error in zip((cosine, ratio), by_hand(list(range(8))), errors):
        assert math.isfinite(error) and row.how == "measured"
        assert (row.measured, row.error) == (pytest.approx(value, rel=1e-3), pytest.approx(error, rel=1e-2))

    monkeypatch.setattr(run_theory.theory, "sigma", lambda rewards: torch.ones(len(rewards)))        # nothing collapses
    for eps, holds in ((math.log(50) / 8, True), (0.0, False)):
        monkeypatch.setattr(policy, "token_logprobs", lambda lm, ids, mask, *_, eps=eps: mask * -eps / mask.sum())
        row = next(run_theory.policy_of_run(o, "run/checkpoint", options, "end"))
        assert row.measured == row.error == 0 and row.holds == holds


def test_mistakes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("sft").mkdir()
    Path("sft/episodes.jsonl").write_text('{"task": "a", "success": 1}\n')
    for argv, says in ((["nowhere"], "episodes.jsonl"), (["sft"], "line 1 of sft/episodes.jsonl"),
                       (["--tasks", "7"], "at least 8"), (["--out", "a.json"], "takes a .png")):
        with pytest.raises(run.UserError, match=says):
            run_theory.main(argv)
