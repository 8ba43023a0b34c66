"""Tests of fuzz.py: what it watches holds, and code that is broken on purpose is seen."""
import collections
import copy
import dataclasses
import decimal
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fuzz                             # first: it puts the project's root on the path

import bfcl
import envs
import reward
import tokens
from envs import Call, CallError
from test_all import ALL_ROLES, STYLES, needs_bfcl, some_styles, style

both_envs = pytest.mark.parametrize("env", ["sim", pytest.param("bfcl", marks=needs_bfcl)])


@both_envs
def test_fuzz_model_output_cannot_hurt(env):
    """The short version of `python lab/fuzz.py`, whose docstring says what is tried and what must hold."""
    found = fuzz.attack(env, 3000, seed=1)
    assert not found["failures"] and found["outputs"] == 3000 and found["ran"] > 500, found["failures"][:3]


def dispatch_anything(self, call):
    """A dispatcher that trusts the model: any attribute of any object, whatever its name."""
    for instance in self.objects.values():
        if isinstance(call, Call) and call.name and hasattr(instance, call.name):
            try:
                return json.dumps(getattr(instance, call.name)(**call.arguments), default=str)
            except Exception as error:
                return envs.error_text(error)
    return envs.error_text("no such tool")


def evaluating(text):
    """A reader that evaluates what looks like a list of calls."""
    try:
        found = eval(text, {"__builtins__": {}}, collections.defaultdict(lambda: lambda **arguments: CallError("x")))
        return list(found) if isinstance(found, list) else []
    except BaseException:
        return []


def precise(self, call):
    decimal.getcontext().prec += 1


def trip(self, call):
    if isinstance(call, Call) and call.name not in self.table:
        raise KeyError(call.name)


def then(change):
    """A method that also does something else: change(self, argument) before it runs."""
    return lambda method: lambda self, argument="": (change(self, argument), method(self, argument))[1]


BROKEN = {  # what is broken -> (the property that it violates, the method, how it is broken)
    "any attribute": ("c", "run", lambda run: dispatch_anything),
    "nothing withheld": ("c", "step", then(lambda self, _: self.available.update(*self.task.withheld.values()))),
    "eval": ("d", "parse_calls", lambda parse: evaluating),
    "environment": ("d", "run", then(lambda self, _: os.environ.update(FUZZ=str(time.time())))),
    "precision": ("d", "run", then(precise)),
    "raises": ("a", "run", then(trip)),
    "results lost": ("b", "step", lambda step: lambda self, calls: step(self, calls)[:2]),
    "half characters": ("b", "run", lambda run: lambda self, call: run(self, call) + "\ud800"),
    "endless": ("f", "next_turn", lambda method: lambda self, said="": {"role": "user", "content": "more"})}


@both_envs
@pytest.mark.parametrize("what", BROKEN)
def test_fuzz_sees_what_is_broken(monkeypatch, env, what):
    """Each property is violated once, by code that is broken on purpose."""
    letter, name, broken = BROKEN[what]
    target = fuzz if name == "parse_calls" else {"sim": envs, "bfcl": bfcl}[env].Episode
    hard = ["miss_func"]
    tasks = envs.make_tasks(200, 11, categories=hard) if env == "sim" else bfcl.load_tasks(hard, part="all")
    monkeypatch.setattr(reward, "replay", lambda task: task.episode())              # golden replays would stumble first
    monkeypatch.setattr(target, name, broken(getattr(target, name)))
    monkeypatch.setenv("FUZZ", "")
    with decimal.localcontext():
        failures = fuzz.attack(env, 120, 2, tasks[::13])["failures"]
    assert any(f"{letter}: " in complaint for _, complaint in failures), failures[:5]


@pytest.mark.parametrize("change", [lambda *_: sum(range(2 * 10**7)), lambda *_: len([0] * 10**8)])
def test_fuzz_sees_what_takes_too_much_time_or_memory(monkeypatch, change):
    monkeypatch.setattr(envs.Episode, "run", then(change)(envs.Episode.run))
    figures = fuzz.play("sim", envs.make_tasks(1, 11)[0], ["[f()]"], fuzz.signatures_of("sim"))[2]
    assert "e: run" in dict(fuzz.too_much(figures))[0]


@needs_bfcl
def test_fuzz_sees_calls_without_bounds(monkeypatch):
    monkeypatch.setattr(bfcl, "LIMITS", {})
    calls = [Call("logarithm", {"value": 7, "base": 3, "precision": 20000}),
             Call("round_number", {"number": 1, "decimal_places": 1})]
    task = next(task for task in bfcl.load_tasks(part="all") if "MathAPI" in task.classes)
    task = dataclasses.replace(task, withheld={}, offered=[call.name for call in calls])
    figures = fuzz.play("bfcl", task, [tokens.python_calls(calls)], fuzz.signatures_of("bfcl"))[2]
    assert "e: run" in dict(fuzz.too_much(figures))[0]


def digests():
    """Hashes over all results and states of spoilt replays (bfcl: all 800 tasks) and of runs of the fuzzer."""
    tasks, found = {"sim": envs.make_tasks(200, 11)}, hashlib.sha256()
    if importlib.util.find_spec("bfcl_eval"):
        tasks["bfcl"] = bfcl.load_tasks(part="all")
    for task in sum(tasks.values(), []):
        spoilt = [[call, call._replace(name="x"), call._replace(arguments={**call.arguments, "x": 1}),
                   Call(call.name, dict.fromkeys(call.arguments, "x"))] for calls in task.golden for call in calls]
        episode = reward.replay(task, spoilt)
        found.update(repr((episode.messages, getattr(episode, "broken", False) or episode.state())).encode())
    return found.hexdigest(), [fuzz.attack(env, 600, seed=3)["digest"] for env in tasks]


def test_fuzz_results_are_the_same_in_every_process():
    here = Path(__file__)
    found = {subprocess.run([sys.executable, "-c", f"import {here.stem} as tests; print(tests.digests())"], check=True,
                            capture_output=True, text=True, cwd=here.parent,
                            env={**os.environ, "PYTHONHASHSEED": seed}).stdout for seed in ("1", "2")}
    assert len(found) == 1 and len(found.pop()) > 100


@pytest.mark.parametrize("name", STYLES)
def test_fuzz_text_from_outside_stays_text(name):
    """Hostile conversations have the control tokens and the masks of harmless ones."""
    assert fuzz.injection(style(name), 200 if name in ALL_ROLES else 40, seed=5) == []


HOLES = {  # what is let in -> (the method, how it is broken)
    "text": ("guard", lambda guard: lambda data: data),
    "names": ("guard", lambda guard: lambda data: guard(data) if isinstance(data, str) else data),
    "halves": ("encode", lambda encode: lambda text: encode(text.replace(tokens.MARK, "")))}


@some_styles
@pytest.mark.parametrize("hole", HOLES)
def test_fuzz_sees_a_renderer_that_lets_control_text_in(monkeypatch, name, hole):
    renderer, (method, broken) = copy.copy(style(name)), HOLES[hole]
    if hole == "names" and renderer.own_block:
        pytest.skip("all of the block is guarded at once")
    monkeypatch.setattr(renderer, method, broken(getattr(renderer, method)), raising=False)
    assert fuzz.injection(renderer, 100, seed=5)
