"""bench.py, leak.py and survive.py."""
import importlib.metadata
import collections
import copy
import dataclasses
import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import bench
import bfcl
import leak
import survive
from reward import trajectory_reward
from sampler import Sampler
from test_all import bare_policy, biased, here, needs_bfcl, reward_ids, school, school_run, stumble, tiny
from tokens import HIGH

# ---------------------------------------------------------------------------------------------------------------------
# bench.py

@pytest.mark.parametrize("limits", [{}, {"max_message": 5}, {"max_messages": 2}, {"max_length": 90}], ids=str)
def test_bench_generate_loop_plays_the_same_game(limits):
    """Greedy, the hand-written loop around transformers' generate and the sampler make the same episodes, id for id."""
    tasks, model, tokenizer = school()
    sampler = Sampler(model, tokenizer, **{"rows": 3, "max_message": 40, "max_messages": 6, **limits})
    episodes = [task.episode() for task in tasks]
    prompts = [sampler.renderer.prompt(episode.messages, episode.tools, HIGH) for episode in episodes]
    theirs = bench.generate_loop(sampler, episodes, prompts, temperature=0)
    ours = sampler.rollout([task.episode() for task in tasks], prompts, temperature=0)
    for a, b in zip(ours, theirs, strict=True):
        assert (a.ids, a.mask, a.messages, a.truncated) == (b.ids, b.mask, b.messages, b.truncated)
        assert a.episode.messages == b.episode.messages and a.episode.calls == b.episode.calls and a.sampled > 0
    assert any(t.truncated for t in ours) == bool(limits)
    assert max(len(t.messages) for t in ours) >= (1 if "max_message" in limits else 2)


def test_bench_generate_loop_samples_the_full_softmax():
    """At temperature 1 the peer draws from the same distribution as the sampler: no top-k, no reward token, seeded."""
    tasks, model, tokenizer = school()
    banned = set(reward_ids(tokenizer))
    head = biased(model, {token: token / 1000 for token in range(len(tokenizer))} | dict.fromkeys(banned, 100.0))
    with torch.no_grad():
        head.lm_head.weight = torch.nn.Parameter(torch.zeros_like(head.lm_head.weight))   # all ids nearly alike
    sampler = Sampler(head, tokenizer, rows=64, max_message=8)

    def first_tokens(seed):
        episodes = [task.episode() for task in tasks * 8]
        prompt = sampler.renderer.prompt(episodes[0].messages, episodes[0].tools, HIGH)
        return [t.ids[len(prompt):][:8] for t in bench.generate_loop(sampler, episodes, [prompt] * 64, seed=seed)]
    drawn = set(sum(first_tokens(0), []))
    assert len(drawn) > 200 and not drawn & banned and first_tokens(0) == first_tokens(0) != first_tokens(1)


def test_bench_bytes_and_flops_by_hand():
    model, _ = tiny()
    words = model.config.vocab_size                       # width 32, 2 layers, 4 heads of 8, 2 of them with keys
    body = 2 * (32 * 32 + 32 * 16 + 32 * 16 + 32 * 32 + 3 * 32 * 96 + 2 * 32) + 32
    assert bench.weights(model) == (body, 32 * words)
    assert sum(p.numel() for p in model.parameters()) == body + 32 * words
    assert bench.cache_bytes(model) == 2 * bench.cache_bytes(copy.deepcopy(model).bfloat16()) == 2 * 2 * 2 * 8 * 4
    assert bench.decode_bytes(model, 3, 10) == 4 * (body + 32 * words) + 3 * 10 * 256
    attention = sum(2 * 2 * 4 * 8 * t for n in (50, 70) for t in range(1, n + 1)) * 2    # layers, FLOPs, heads, size
    flops = 2 * body * 120 + 2 * 32 * words * 9 + attention
    assert bench.forward_flops(model, [50, 70], 9) == pytest.approx(flops, rel=0.01)
    untied, _ = bare_policy(untied=True)
    table = untied.get_input_embeddings().weight.numel()
    assert sum(bench.weights(untied)) == sum(p.numel() for p in untied.parameters()) - table
    layer = 2 * 3584 * 3584 + 2 * 3584 * 512 + 3584 + 2 * 512 + 3 * 3584 * 18944 + 2 * 3584     # Qwen2.5-7B
    assert bench.weights(bench.shape("7B", "meta")) == (28 * layer + 3584, 152064 * 3584)
    step = 2 * (28 * layer + 3584 + 152064 * 3584) + 32 * 1100 * 2 * 28 * 4 * 128 * 2
    assert f"{step / 1e9:.2f} GB a step" in bench.plan() and f"limit {32 * 4.8e12 / step:,.0f} tok/s" in bench.plan()


def test_bench_report(here):
    """Ratios say how many times ours is better, whichever way a measure counts; nothing is begun after the deadline."""
    report = bench.Report(bench.Options(out="."), torch.device("cpu"), torch.float32)
    subject = bench.Subject("built-in", None, None)
    side = lambda rate, seconds, size: {"episodes/s": rate, "s per step": seconds, bench.PEAK: size}
    pairs = [[side(6, 2, 1), side(2, 6, 3)], [side(8, 1, 1), side(2, 5, 3)], [side(9, math.nan, 1), side(1, 1, 3)]]
    report.add("rollouts", subject, "some", pairs, "peer")
    numbers = [[row.get(key) for key in ("ours", "peer", "ratio", "ratio low", "ratio high")] for row in report.rows]
    assert numbers == [[8, 2, 4, 3, 9], [1.5, 5.5, 4, 3, 5], [1, 3, None, None, None]]
    for size in (30, 40):
        report.add("update", bench.Subject("7B", None, None), "LoRA, 8 episodes", [[{bench.PEAK: size}]])
    assert [line[1:] for line in report.targets()] == [
        ["4", "at least 3", "yes"], ["30", "at most 37.3", "yes"], ["40", "at most 37.3", "no"]]
    calls = []
    side = lambda warm: calls.append(warm) or {"s per step": 1.0}
    report.deadline = time.time() - 1
    report.compare("prefix", subject, "late", [side, side])
    assert not calls and "late: left out, no time" in report.notes[-1] and len(report.rows) == 5
    report.deadline = math.inf
    report.compare("prefix", subject, "in time", [side, side])
    assert calls == [True] * 2 + [False] * 2 * report.o.repeats and report.rows[-1]["ratio"] == 1


def test_bench_writes_its_files(here, school_run, monkeypatch, capsys):
    """Every section on a tiny policy; what was measured before a crash is kept."""
    monkeypatch.setitem(sys.modules, "trl", None)         # as if it were not installed
    argv = f"--checkpoint {school_run} --device cpu --quick --repeats 1 --tasks 1 --group 2 --rows 4 --new 8".split()
    bench.main(argv)
    found = json.loads(Path("runs/bench/bench.json").read_text())
    assert {row["section"] for row in found["rows"]} == {"decode", "rollouts", "prefix", "growth", "update"}
    assert ["trl: left out" in note for note in found["notes"]] == [True]
    assert found["machine"]["torch"] == importlib.metadata.version("torch")
    for row in found["rows"]:
        assert row["model"] == "built-in" and row["low"] <= row["ours"] <= row["high"] or math.isnan(row["ours"])
        assert not row["ours"] <= 0 and ("peer" in row) == (row["section"] != "update")
    table = Path("runs/bench/bench.md").read_text()
    assert table.count("\n| ") > len(found["rows"])
    assert "| rollouts | built-in | 2 simulator episodes, 4 rows | episodes/s |" in table
    assert Path("runs/bench/bench.png").stat().st_size > 5000
    assert "times generate turn by turn" in capsys.readouterr().out

    def crash(*_):
        raise KeyboardInterrupt
    monkeypatch.setitem(bench.SECTIONS, "update", crash)
    with pytest.raises(KeyboardInterrupt):
        bench.main(argv + ["--sections", "update,prefix", "--out", "other"])
    assert {row["section"] for row in json.loads(Path("other/bench.json").read_text())["rows"]} == {"prefix"}


# ---------------------------------------------------------------------------------------------------------------------
# leak.py

@needs_bfcl
def test_leak_repeats_what_it_remembers():
    """A task that is remembered is solved, mostly one with a sibling, too; nothing of the task's own answer is read."""
    tasks = {task.id: task for task in bfcl.load_tasks(part="all")}
    judged = collections.Counter()
    for number in range(0, 200, 5):
        base = tasks[f"multi_turn_base_{number}"]
        for category in bfcl.CATEGORIES:
            task = tasks[f"multi_turn_{category}_{number}"]
            episode, sibling = leak.repeat(task, task), leak.repeat(task, base)
            assert episode.done and trajectory_reward(episode).total == 1 and bfcl.official_verdict(episode), task.id
            if task is not base:
                judged[category, "R"] += trajectory_reward(sibling).total
                judged[category, "official"] += bfcl.official_verdict(sibling)
            blind = dataclasses.replace(task, golden=[[] for _ in task.golden])
            assert list(map(str, leak.repeat(blind, base).calls)) == list(map(str, sibling.calls))
    assert min(judged.values()) >= 30, judged
    other = tasks["multi_turn_base_1"]
    assert trajectory_reward(leak.repeat(tasks["multi_turn_base_0"], other)).total == 0
    memory = [other, tasks["multi_turn_base_3"], tasks["multi_turn_base_4"]]
    assert leak.nearest(tasks["multi_turn_miss_param_3"], memory) is memory[1]


@needs_bfcl
def test_leak_numbers(here, capsys):
    """One seed: the table and the file; the committed file is of the data that are installed here."""
    leak.main(["--seeds", "1"])
    made, printed = json.loads(Path("runs/leak.json").read_text()), capsys.readouterr().out
    assert made["numbers"]["random"]["all"]["tasks"] == 80 and leak.table(made["numbers"]) in printed
    for split, (low, high) in {"random": (75, 100), "scenario": (0, 5)}.items():
        found = made["numbers"][split]["all"]
        assert low <= found["success"][0] <= high, "an answer is either remembered or not known at all"
        assert found["official"][0] <= found["success"][0] + 5
    committed = json.loads((Path(bfcl.__file__).parent / "results/leak.json").read_text())
    assert {row["known"][0] for file in (made, committed) for row in file["numbers"]["scenario"].values()} == {0}
    assert committed["data"] == made["data"] == bfcl.data_hash() and committed["seeds"] == 5


# ---------------------------------------------------------------------------------------------------------------------
# survive.py

def test_survive(here, school_run):
    """Three kills of each program, one while saving if the moment is met; in six it notices what differs."""
    script = f"""if True:
        import model, survive
        argv = ["--steps", "6", "--init", {school_run!r}, "--kills"]
        try:
            survive.main([*argv, "3"])
        except SystemExit as end:
            print("status", int(end.code))
        model.Optimizer.load_tensors = lambda *_: None
        survive.main([*argv, "6", "--programs", "sft"])
    """
    paths = f"{Path(survive.__file__).parent}:{Path(bfcl.__file__).parent}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths})
    rows, said = [line.split() for line in done.stdout.splitlines()], done.stdout + done.stderr
    assert [(row[0], row[3], row[6]) for row in rows[1:3]] == [("sft.py", "3", "yes"), ("rcgrpo.py", "3", "yes")], said
    assert rows[3] == ["status", "0"] and done.returncode == 1, said
    assert re.search(r"DIFFERS: sft.py, run \d: weights", done.stdout) and not list(here.iterdir()), said


@pytest.mark.parametrize("module, argv, says", [
    (bench, "", "there is no checkpoint in runs/rctp; make it with `python sft.py`"),
    (bench, "--checkpoint SCHOOL --sections speed", "--sections knows decode, "),
    (bench, "--checkpoint SCHOOL --shapes 3B", "--shapes knows 0.5B, "),
    (bench, "--checkpoint SCHOOL --group 1", "--group must be at least 2"),
    (bench, "--checkpoint SCHOOL --out /proc/no/where", "cannot write"),
    (bench, "--checkpoint SCHOOL --threads -1", "--threads must be at least 0"),
    (leak, "--seeds 0", "--seeds must be at least 1"), (leak, "--out .", "is a folder"),
    (survive, "--kills 0", "--kills"), (survive, "--programs grpo", "--programs knows"),
    (survive, "--programs sft,sft", "each name once"), (survive, "--init nowhere", "no run folder")])
def test_lab_mistakes_are_one_line(here, monkeypatch, capsys, school_run, module, argv, says):
    assert says in stumble(monkeypatch, capsys, module, *argv.replace("SCHOOL", school_run).split())
    assert not list(here.iterdir())
