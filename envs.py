"""The protocol of an environment: a Task, an Episode of it, and the safe dispatch of whatever a model asks for.

A task is a dialogue of user turns; its golden calls say what should be done in each. The environments are simulator.py
(made tasks) and bfcl.py (the real benchmark). A new one goes into a module of its own, three things in plain Python:

    class Counter:                      # an API: plain attributes are its state, methods are its tools
        def __init__(self, start):
            self.count = start

        def add(self, amount: int):     # the annotation is checked, the docstring becomes the schema
            '''Add to the counter.

            Args:
                amount: How much.
            '''
            self.count += amount        # raise Refused, before anything has changed, for what cannot be done

    class CounterEpisode(Episode):
        table = {"add": make_tool(Counter.add, "Counter", writes=True)}

        def start(self):                # fresh state, {class name: instance}
            return {"Counter": Counter(**fresh(self.task.initial))}

    class CounterTask(Task):
        def episode(self):
            return CounterEpisode(self)

    task = CounterTask("count-1", "base", "count-1", turns=["add 2"], golden=[[Call("add", {"amount": 2})]],
                       offered=["add"], initial={"start": 3})

Reward, sampling and training take it from there: they know tasks and episodes only. evaluate.TaskOptions.env and
evaluate.load_tasks say which environment --env names: add it to both.

Whatever a model asks for is data: names are looked up in the table, arguments are checked against the signature before
anything runs, and an episode starts from its own copy of the initial data.
"""
import copy
import inspect
import json
from dataclasses import dataclass, field, replace
from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Any, Callable, Literal, NamedTuple, Union, get_args, get_origin

from reward import same

CATEGORIES = ("base", "miss_func", "miss_param", "long_context")
MAX_CALLS = 16      # calls that one message may run; the rest get an error result
MAX_TEXT = 500      # characters in one string argument
MAX_ITEMS = 20      # entries in one list or object argument
MAX_DEPTH = 8       # of lists and objects in one argument
MAX_NUMBER = 10**9  # absolute value of one number argument
MAX_RESULT = 10**5  # characters in one result


# ---- data types ----

class Call(NamedTuple):
    """A tool call: what the policy asks for, or what a task wants."""
    name: str
    arguments: dict


class CallError(NamedTuple):
    """What could not be read as a call; it is fed back to the policy as an error result."""
    message: str


class Refused(Exception):
    """Raised by a tool, or by the check of its arguments, BEFORE anything has changed; the text is the error result."""


class Tool(NamedTuple):
    """One callable tool. `owner` is the name of the API class whose instance `function` gets as its first argument."""
    owner: str
    function: Callable
    parameters: dict    # name -> inspect.Parameter, its annotation no string
    writes: bool
    schema: dict        # JSON schema as get_json_schema gives it; shared by all episodes, so read it only


def make_tool(function, owner: str, writes: bool) -> Tool:
    """The Tool of a method of the class named `owner`: its annotations are checked, its docstring gives the schema."""
    from transformers.utils import get_json_schema
    parameters = dict(list(inspect.signature(function, eval_str=True).parameters.items())[1:])
    return Tool(owner, function, parameters, writes, get_json_schema(function))


@dataclass(frozen=True)
class Task:
    """A dialogue and what should be done in it. An environment overrides `episode`."""
    id: str                     # unique
    category: str               # one of CATEGORIES
    scenario: str               # the variants of one scenario share it
    turns: list[str]            # what the user says, turn by turn
    golden: list[list[Call]]    # the wanted calls of each user turn; [] where nothing can be done yet
    offered: list[str] = field(default_factory=list)                # names of the tools offered at the start, in order
    withheld: dict[int, list[str]] = field(default_factory=dict)    # turn index -> names handed over at that turn
    initial: dict = field(default_factory=dict)                     # what `start` makes the state from
    merged: bool = False        # one user turn, ended by the tool `done`: see `merge`

    def episode(self) -> "Episode":
        """A run of this task on fresh state."""
        raise NotImplementedError


DONE = {"type": "function", "function": {"name": "done", "description": "End the dialogue, when every step is done.",
                                         "parameters": {"type": "object", "properties": {}}}}


def merge(task: Task) -> Task:
    """The task as the paper plays it: all that the user says in one message, and the tool `done` to end the episode.

    What was missing stands in the same message: tools that were withheld are handed over with it.
    """
    steps = [f"Step {i}: {text}" for i, text in enumerate(task.turns, 1)]
    text = "Take these steps one after the other, then call done.\n" + "\n".join(steps)
    handed = [name for names in task.withheld.values() for name in names]
    return replace(task, id=f"{task.id}_merged", turns=[text], golden=[sum(task.golden, [])],
                   withheld={0: handed} if handed else {}, merged=True)


EXPECTED = {int: "a whole number", float: "a number", bool: "true or false", NoneType: "null",
            str: f"a text of at most {MAX_TEXT} characters", list[str]: f"a list of at most {MAX_ITEMS} texts",
            list: f"a list of at most {MAX_ITEMS} entries", dict: f"an object of at most {MAX_ITEMS} entries"}


def check(value, kind, depth=0):
    """`value` in canonical form if it fits the annotation `kind`, any that get_json_schema takes; else Refused.

    Numbers without a fraction become int, so 3 and 3.0 are one call; True is not a number, nor is nan. A list becomes
    the tuple that is asked for, and a value the member of an Enum.
    """
    origin, inner = get_origin(kind) or kind, get_args(kind)
    entry = inner[-1] if inner else Any
    items = isinstance(value, (list, tuple, dict)) and len(value) <= MAX_ITEMS and depth < MAX_DEPTH
    if origin is Annotated:
        return check(value, inner[0], depth)
    if origin in (Union, UnionType):
        reasons = []
        for option in inner:
            try:
                return check(value, option, depth)
            except Refused as error:
                reasons.append(str(error).removeprefix("must be "))
        raise Refused("must be " + " or ".join(reasons))
    if kind is Any and type(value) in EXPECTED:
        return check(value, type(value), depth)
    if origin is Literal and any(same(value, choice) for choice in inner):
        return next(choice for choice in inner if same(value, choice))
    if isinstance(origin, type) and issubclass(origin, Enum):
        return value if isinstance(value, kind) else kind(check(value, Literal[tuple(member.value for member in kind)]))
    if kind in (int, float):
        if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= MAX_NUMBER:
            if value == int(value) or kind is float:
                return int(value) if value == int(value) else value
    elif kind in (bool, NoneType, str) and isinstance(value, kind) and (kind is not str or len(value) <= MAX_TEXT):
        return value
    elif origin is list and items and isinstance(value, list):
        return [check(item, entry, depth + 1) for item in value]
    elif origin is dict and items and isinstance(value, dict):
        return {check(key, str): check(item, entry, depth + 1) for key, item in value.items()}
    elif origin is tuple and items and not isinstance(value, dict) and len(inner or value) == len(value):
        return tuple(check(item, each, depth + 1) for item, each in zip(value, inner or [Any] * len(value)))
    raise Refused(f"must be {EXPECTED.get(kind) or EXPECTED.get(origin) or inspect.formatannotation(kind)}")


def bind_arguments(parameters, arguments):
    """`arguments` (anything) checked against `parameters` {name: inspect.Parameter}, with defaults; or Refused."""
    if not isinstance(arguments, dict):
        raise Refused("arguments must be an object")
    if not arguments.keys() <= parameters.keys():
        raise Refused("unknown argument")
    bound = {}
    for name, parameter in parameters.items():
        if name in arguments:
            try:
                bound[name] = check(arguments[name], parameter.annotation)
            except Refused as error:
                raise Refused(f"{name} {error}") from None
        elif parameter.default is inspect.Parameter.empty:
            raise Refused(f"missing argument {name}")
        else:
            bound[name] = fresh(parameter.default)
    return bound


def fresh(data):
    """A deep copy of plain data (dicts, lists, scalars)."""
    if isinstance(data, dict):
        return {key: fresh(value) for key, value in data.items()}
    return [fresh(value) for value in data] if isinstance(data, list) else data


def error_text(reason) -> str:
    """A result that tells the policy why its call did not work; `reason` is a text or an exception."""
    kind = "" if isinstance(reason, (str, Refused)) else type(reason).__name__
    try:
        text = f"{kind}: {reason}" if kind else str(reason)
    except Exception:                       # of its own __str__
        text = kind
    return json.dumps({"error": text[:MAX_TEXT]})


def result_text(result) -> str:
    """What a tool returned, as strict JSON: sets sorted, all else that JSON lacks as text. Refused if too long."""
    def plain(value):
        return sorted(value, key=str) if isinstance(value, (set, frozenset)) else str(value)
    try:
        text = json.dumps(result, default=plain, allow_nan=False)
    except (TypeError, ValueError):         # a key that is no text, a number that is none, a circle
        text = json.dumps(str(result))
    if len(text) > MAX_RESULT:
        raise Refused(f"the result has more than {MAX_RESULT} characters")
    return text


def json_copy(arguments):
    """A copy of a call's arguments as strict JSON, for the log of messages; {} where they are no such thing."""
    try:
        copy = json.loads(json.dumps(arguments, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        return {}
    return copy if isinstance(copy, dict) else {}


class Episode:
    """One run of a task, on its own copy of the initial data.

    messages  the dialogue so far, in the usual chat format
    tools     JSON schemas of the tools offered at the start
    calls     every call that ran, bound with defaults, in order, also those that gave an error result
    done      whether the last user turn is over
    An environment has its own `table` and `start`, and its own `execute`, `run`, `bind` and `state` where needed.
    """
    table: dict[str, Tool] = {}     # every tool by its name
    max_calls = MAX_CALLS           # that one message may run; the rest get an error result

    def __init__(self, task: Task):
        self.task = task
        self.turn = 0
        self.done = False
        self.calls: list[Call] = []
        self.messages = []
        self.tools = [self.table[name].schema for name in task.offered] + [DONE] * task.merged
        self.available = set(task.offered)      # grows when withheld tools are handed over
        self.ask()
        self.objects = self.start()

    def start(self) -> dict:
        """Fresh API instances, {class name: instance}, which share nothing with the task."""
        raise NotImplementedError

    def execute(self, tool: Tool, call: Call):
        """Run one bound call and return its result; Refused if the API does not accept it."""
        instance = self.objects[tool.owner]
        result = tool.function(instance, **copy.deepcopy(call.arguments))
        if tool.writes:
            instance.revision = getattr(instance, "revision", 0) + 1
        return {"ok": True} if result is None else result

    def state(self) -> dict:
        """The state of all APIs as a copy in plain data, {class name: {attribute: value}}."""
        return {name: fresh(vars(instance)) for name, instance in self.objects.items()}

    def bind(self, call: Call) -> Call | None:
        """`call` in canonical form with defaults filled in; None if the tool is unknown or the arguments do not fit."""
        try:
            return Call(call.name, bind_arguments(self.table[call.name].parameters, call.arguments))
        except (Refused, KeyError, TypeError, AttributeError):  # a name may be missing, unhashable, or no name at all
            return None

    def step(self, calls: list[Call | CallError]) -> list[str]:
        """Run the calls of one assistant message; their results as JSON strings, in order.

        Never raises, but for Ctrl-C. A call that cannot run gives {"error": reason}, changes nothing, and the next one
        still runs. So it is with any exception of a tool, sys.exit included; what it has changed until then stays.
        """
        calls = calls if isinstance(calls, list) else [calls]
        results = [self.finish() if self.task.merged and isinstance(call, Call) and call.name == "done" else
                   self.run(call) if i < self.max_calls else error_text(f"more than {self.max_calls} calls")
                   for i, call in enumerate(calls)]
        names = [call.name if isinstance(call, Call) and isinstance(call.name, str) else "invalid" for call in calls]
        if calls:
            asked = [{"name": name[:MAX_TEXT], "arguments": json_copy(getattr(call, "arguments", None))}
                     for name, call in zip(names, calls)]
            self.messages.append({"role": "assistant", "content": "",
                                  "tool_calls": [{"type": "function", "function": function} for function in asked]})
            self.messages += [{"role": "tool", "name": function["name"], "content": result}
                              for function, result in zip(asked, results)]
        return results

    def run(self, call) -> str:
        """Run one call, whatever it is; its result, or {"error": reason}, as JSON."""
        if isinstance(call, CallError):
            return error_text(call.message if isinstance(call.message, str) else "unreadable call")
        if self.done:
            return error_text("the dialogue is over")
        if not isinstance(call, Call) or not isinstance(call.name, str) or call.name not in self.available:
            return error_text("no such tool")
        tool = self.table[call.name]
        try:
            bound = Call(call.name, bind_arguments(tool.parameters, call.arguments))
            self.calls.append(bound)
            return self.present(result_text(self.execute(tool, bound)), bound)
        except (Exception, SystemExit) as error:
            return error_text(error)

    def finish(self) -> str:
        """What the tool `done` does: the dialogue is over."""
        self.done = True
        return json.dumps({"ok": True})

    def close(self, said=""):
        """End the turn as a demonstration does: by the tool `done` where there is one, else in words."""
        return self.step([Call("done", {})]) if self.task.merged else self.next_turn(said)

    def present(self, result: str, call: Call) -> str:
        """The result of a call, JSON, as the policy gets to read it."""
        return result

    def next_turn(self, said="") -> dict | None:
        """End the assistant's turn with the text `said`; the next user message, or None at the end of the dialogue.

        The message has the key "tools" (schemas) if tools that were withheld are handed over with it.
        """
        if self.done:
            return None
        self.messages.append({"role": "assistant", "content": said})
        self.turn += 1
        self.done = self.turn == len(self.task.turns)
        return None if self.done else self.ask()

    def ask(self) -> dict:
        """The user's message of this turn, and the tools that come with it."""
        message = {"role": "user", "content": self.task.turns[self.turn]}
        handed = self.task.withheld.get(self.turn, [])
        if handed:
            self.available.update(handed)
            message["tools"] = [self.table[name].schema for name in handed]
        self.messages.append(message)
        return message


def __getattr__(name):
    """`envs.make_tasks` is simulator.make_tasks, which cannot be imported above: simulator.py imports this module."""
    if name != "make_tasks":
        raise AttributeError(f"module 'envs' has no attribute {name!r}")
    from simulator import make_tasks
    return make_tasks
