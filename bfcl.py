"""The real benchmark: the 800 multi-turn tasks of the Berkeley Function Calling Leaderboard v4, in the form of envs.py.

Questions, golden answers, function documents and the simulated tool classes come from the official package, installed
with `pip install --no-deps bfcl-eval==2026.3.23`. Show what is in it, with the official verdict on the golden answers:

    python bfcl.py

What differs from the leaderboard and from the paper, and why:
- Calls never reach eval: looked up in an allow-list (the documented functions of the task's classes), bound to the
  signature, bounded in size, run on a fresh copy. Only official_verdict() feeds the official checker, which evaluates
  strings; these are built here from calls that have passed all that, with "(" in strings escaped, because the
  checker's regular expression would rewrite `sort (x)` inside a text.
- A withheld function is refused before the turn that hands it over (the leaderboard only hides it), unless the
  golden answer itself uses it earlier: `tail` in multi_turn_miss_func_49. The sentence that hands it over is the
  leaderboard's for models with a native call format; there the schemas join the tools at the top of the prompt, here
  they stand below that sentence. Functions listed as excluded are left out; the leaderboard's code ignores that list.
- Tools raise errors and JSON objects alike; here every failure reads {"error": "..."}.
- A call that cannot be read gives an error result; on the leaderboard it ends the turn. There a turn of more than 20
  messages with calls fails the task; here --max_messages bounds the dialogue, and a message has at most 64 calls.
- The function documents are shown without "Note that the provided function is in Python 3 syntax.", which the
  leaderboard adds to each description, and without what the function returns.
- Episodes share no state: in the official classes long_context credit cards, mutable default arguments and the
  precision of decimal and mpmath are process-global. Two error texts there list a set in hash order; here they are
  sorted.
- The split is by scenario unless asked otherwise, see load_tasks. Reward: the paper's, see reward.py.
"""
import ast
import contextlib
import copy
import decimal
import functools
import hashlib
import importlib
import importlib.util
import inspect
import itertools
import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import envs
from envs import CATEGORIES, Call, CallError, Refused, Task
from run import UserError, program, read_flags

CLASSES = {  # tool class -> its module and function document in the package
    "GorillaFileSystem": "gorilla_file_system", "MathAPI": "math_api", "MessageAPI": "message_api",
    "TwitterAPI": "posting_api", "TicketAPI": "ticket_api", "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking", "VehicleControlAPI": "vehicle_control"}
TYPES = {"dict": "object", "float": "number"}           # the documents' type names that JSON Schema doesn't know

MAX_SIZE = 10_000       # characters and items in the arguments of a call; the longest golden call has 6.7 thousand
MAX_DEPTH = 8           # of nested lists and objects in an argument
MAX_NUMBER = 10 ** 18   # card numbers have 16 digits
MAX_FILES = 2_000       # entries of a simulated file system, each counted as often as it can be reached
MAX_PATHS = 10 ** 6     # characters in all their paths, which `find` lists
MAX_FOLDERS = 64        # its depth
MAX_RESULT = 100_000    # characters of one result; golden ones have up to 32 thousand
LIMITS = {("power", "exponent"): 300, ("logarithm", "precision"): 100,      # numbers; beyond these they hang
          ("square_root", "precision"): 100, ("round_number", "decimal_places"): 100,
          ("logarithm", "value"): MAX_NUMBER, ("logarithm", "base"): MAX_NUMBER}    # mpmath reads texts: "1e9999999"
SETS = {"book_flight": ("Invalid travel class. Must be one of {", "}"),     # errors that list a set: what is around it
        "edit_ticket": ("Invalid fields for update: ", "")}


# ---- the package ----

def _official(name: str):
    """A module of the official multi-turn evaluation. These import without the package's heavy dependencies."""
    return importlib.import_module("bfcl_eval.eval_checker.multi_turn_eval." + name)


def _files() -> dict[str, Path]:
    """Every data file in use, by a short name."""
    package = importlib.util.find_spec("bfcl_eval")
    if package is None:
        raise ModuleNotFoundError("the official benchmark is missing: pip install --no-deps bfcl-eval==2026.3.23")
    data = Path(package.submodule_search_locations[0]) / "data"
    files = {f"{folder}/{category}": data / folder / f"BFCL_v4_multi_turn_{category}.json"
             for folder in ("", "possible_answer") for category in CATEGORIES}
    return files | {name: data / "multi_turn_func_doc" / f"{name}.json" for name in CLASSES.values()}


def _lines(name: str) -> list[dict]:
    return [json.loads(line) for line in _files()[name].read_text(encoding="utf-8").splitlines() if line.strip()]


def handover() -> str:
    """What the user says when withheld functions are handed over; the data have no words for it."""
    prompts = importlib.import_module("bfcl_eval.constants.default_prompts")
    return prompts.DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_FC


def data_hash() -> str:
    """First 16 hex digits of the SHA-256 of the data files: scores move between versions of the data."""
    digest = hashlib.sha256()
    for name, path in sorted(_files().items()):
        digest.update(name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _standard(schema: dict) -> dict:
    """A parameter document in standard JSON Schema."""
    schema = {**schema, "type": TYPES.get(schema["type"], schema["type"])}
    if "properties" in schema:
        schema["properties"] = {name: _standard(inner) for name, inner in schema["properties"].items()}
    if "items" in schema:
        schema["items"] = _standard(schema["items"])
    return schema


class Function(NamedTuple):
    """A documented function of the official tool classes."""
    owner: type             # its class
    signature: inspect.Signature
    schema: dict            # shared by all episodes, so read it only


@functools.cache
def _table() -> dict[str, Function]:
    """Every documented function by its name, which no two classes share."""
    table = {}
    for name, module in CLASSES.items():
        lines = _lines(module)                          # says how to install the package if it is not there
        owner = getattr(_official("func_source_code." + module), name)
        for doc in lines:
            doc = {key: doc[key] for key in ("name", "description")} | {"parameters": _standard(doc["parameters"])}
            table[doc["name"]] = Function(owner, inspect.signature(getattr(owner, doc["name"])),
                                          {"type": "function", "function": doc})
    return table


# ---- calls ----

def _check_literal(value) -> None:
    """Refused unless value is made of JSON's types and is no larger than any real argument."""
    stack, size = [(value, 0)], 0
    while stack:
        item, depth = stack.pop()
        size += len(item) if type(item) in (str, list, dict) else 1
        if size > MAX_SIZE:
            raise Refused(f"the arguments are longer than {MAX_SIZE} characters and items")
        if type(item) in (list, dict) and depth < MAX_DEPTH:
            stack += [(inner, depth + 1) for inner in (item if type(item) is list else [*item, *item.values()])]
        elif type(item) in (int, float):
            if not abs(item) <= MAX_NUMBER:             # NaN is refused as well
                raise Refused(f"a number is beyond {MAX_NUMBER}")
        elif item is not None and type(item) not in (bool, str):
            raise Refused("an argument is not a plain value, or nested too deeply")


def _bind(call: Call, allowed: set[str]) -> Call:
    """The call with its arguments bound to the official signature, defaults filled in; Refused says what is wrong."""
    if not isinstance(call, Call) or type(call.name) is not str:
        raise Refused("a call is a name and an object of arguments")
    if call.name not in allowed:
        raise Refused(f"no function {call.name[:80]!r}")
    _check_literal(call.arguments)
    try:
        bound = _table()[call.name].signature.bind(None, **call.arguments)
    except TypeError as error:                          # missing, unknown, or not a name
        raise Refused(f"{call.name}: {error}") from None
    bound.apply_defaults()
    arguments = {name: envs.fresh(value) for name, value in bound.arguments.items() if name != "self"}
    for name, value in arguments.items():
        limit = LIMITS.get((call.name, name))
        if limit and not (isinstance(value, (int, float)) and abs(value) <= limit):
            raise Refused(f"{call.name}: {name} is beyond {limit}, or no number")
    return Call(call.name, arguments)


def _parse_golden(text: str) -> Call:
    """An official golden answer, e.g. `sort('a.txt')`: literals only, positional arguments named by the signature."""
    node = ast.parse(text, mode="eval").body
    names = list(_table()[node.func.id].signature.parameters)[1:]
    arguments = dict(zip(names, map(ast.literal_eval, node.args)))
    return Call(node.func.id, arguments | {word.arg: ast.literal_eval(word.value) for word in node.keywords})


def _error(text: str) -> str:
    return json.dumps({"error": text[:1000]})


def _render(result, name: str) -> str:
    """A result of the function `name` as the official executor writes it, but in the same order in every process."""
    if type(result) is dict:
        before, after = SETS.get(name, ("", ""))
        if before and str(result.get("error")).startswith(before):
            listed = result["error"].removeprefix(before).removesuffix(after)
            result = {**result, "error": before + ", ".join(sorted(listed.split(", "))) + after}
        try:
            result = json.dumps(result)
        except (TypeError, ValueError):                 # Decimal and mpmath numbers
            pass
    text = str(result)
    return text if len(text) <= MAX_RESULT else _error(f"the result has more than {MAX_RESULT} characters")


@contextlib.contextmanager
def _own_precision():
    """Inside, tools may set the process-global precision of decimal and mpmath; afterwards it is as it was."""
    import mpmath                                       # the official MathAPI needs it; torch brings it
    with decimal.localcontext(), mpmath.workdps(15):
        yield


def _plain(value, depth: int = 0, left=None, path: int = 0):
    """Official state as plain data that shares nothing with it; Broken if a file system is a cycle or too large.

    left: [entries, characters of paths] that may still come; path: characters of the path to `value`.
    """
    kind = type(value).__name__
    if kind not in ("Directory", "File"):
        return sorted(value) if kind == "set" else copy.deepcopy(value)
    left, path = left or [MAX_FILES, MAX_PATHS], path + len(value.name) + 1
    left[:] = left[0] - 1, left[1] - path
    if min(left) < 0 or depth > MAX_FOLDERS:
        raise Broken("the file system has become a cycle or too large")
    if kind == "File":
        return {"file": value.name, "content": copy.deepcopy(value.content)}
    return {"folder": value.name,
            "contents": {name: _plain(inner, depth + 1, left, path) for name, inner in value.contents.items()}}


class Broken(Exception):
    """A simulated file system that can no longer be walked. mv and cp of folders can do that in the official class."""


# ---- tasks ----

@dataclass(frozen=True)
class BfclTask(Task):
    """An official task."""
    classes: list[str] = field(default_factory=list)  # the tool classes involved, in the official order
    early: list[str] = field(default_factory=list)    # withheld functions that run all the same: golden uses them early

    def episode(self) -> "Episode":
        """A run of this task on fresh official instances."""
        return Episode(self)


def _task(category: str, question: dict, answer: list[list[str]]) -> BfclTask:
    classes = question["involved_classes"]
    golden = [[_parse_golden(text) for text in turn] for turn in answer]
    withheld = {int(turn): names for turn, names in question.get("missed_function", {}).items()}
    hidden = {*question.get("excluded_function", ()), *itertools.chain(*withheld.values())}
    used_early = {call.name for turn, names in withheld.items() for calls in golden[:turn] for call in calls} & hidden
    return BfclTask(
        id=question["id"], category=category, scenario=question["id"].rsplit("_", 1)[1],
        turns=[messages[0]["content"] if messages else handover() for messages in question["question"]], golden=golden,
        offered=[name for owner in classes for name, function in _table().items()
                 if function.owner.__name__ == owner and name not in hidden],
        withheld=withheld, initial=question["initial_config"], classes=classes, early=sorted(used_early))


SPLITS = ("scenario", "paper", "random")


@functools.cache
def _all_tasks() -> tuple[BfclTask, ...]:
    tasks = []
    for category in CATEGORIES:
        answers = {answer["id"]: answer["ground_truth"] for answer in _lines("possible_answer/" + category)}
        tasks += [_task(category, question, answers[question["id"]]) for question in _lines("/" + category)]
    return tuple(tasks)


def answer(task: Task) -> str:
    """A task's golden calls, wherever the turns break and in any order."""
    return str(sorted(str(call) for calls in task.golden for call in calls))


@functools.cache
def _kin() -> dict[str, set[str]]:
    """Scenario -> those that it is connected with by equal answers of any of their variants, itself included."""
    kin, first = {task.scenario: {task.scenario} for task in _all_tasks()}, {}
    for task in _all_tasks():
        joined = kin[task.scenario] | kin[first.setdefault(answer(task), task.scenario)]
        kin.update(dict.fromkeys(joined, joined))
    return kin


def load_tasks(categories=None, split: str = "scenario", part: str = "train", seed: int = 0) -> list[Task]:
    """The official multi-turn tasks of one part, in the official order.

    categories: some of base, miss_func, miss_param, long_context (default: all; the parts do not depend on the choice).
    split "scenario": the 200 scenarios are shuffled by seed into 20 test, 20 validation, 160 train, all four variants
        of a scenario on the same side. Two pairs of scenarios (107 and 136, 120 and 124) have the same golden calls in
        other words: both go where the first of them falls, so a part may have a scenario or two more or fewer. Left as
        they fall, for no answer is another's: 40 and 43 open with the same message (3 of 9 calls in common), 4 pairs
        have 3 in 4 calls in common, and 9 scenarios want another's functions in the same order with other values.
    split "paper": exactly the paper's 80 test tasks (seed has no say), and all other 720 train; validation is 80 of
        those. It LEAKS: every test task has variants of its scenario among the training tasks.
    split "random": like it, drawn by seed: 80 test tasks, 80 for validation, 640 to train on.
    part: train, validation, test or all.
    """
    categories = CATEGORIES if categories is None else tuple(categories)
    for name, values, allowed in (("category", categories, CATEGORIES), ("split", [split], SPLITS),
                                  ("part", [part], ("train", "validation", "test", "all"))):
        for value in values:
            if value not in allowed:
                raise ValueError(f"unknown {name} {value!r}: choose from {', '.join(allowed)}")
    tasks = _all_tasks()
    if split == "paper":                                # the authors' own lines, with their order of the categories
        keys = [f"multi_turn_{name}_{i}" for name in sorted(CATEGORIES) for i in range(200)]
        random.Random(42).shuffle(keys)
    else:
        keys = sorted({task.scenario if split == "scenario" else task.id for task in tasks})
        random.Random(seed).shuffle(keys)
    tenth, places = len(keys) // 10, {name: place for place, name in enumerate(keys)}
    kin = _kin() if split == "scenario" else {}
    first = tenth if split == "paper" else 2 * tenth    # of those that train
    chosen = {"test": range(tenth), "validation": range(tenth, 2 * tenth), "train": range(first, len(keys)),
              "all": range(len(keys))}[part]

    def place(task) -> int:
        own = task.scenario if split == "scenario" else task.id
        return min(places[name] for name in kin.get(own, [own]))
    return [task for task in tasks if task.category in categories and place(task) in chosen]


# ---- episodes ----

class Episode(envs.Episode):
    """One run of a task on fresh official instances; the interface is that of the simulator."""
    table = property(lambda self: _table())
    max_calls = 64          # golden turns have up to 34

    def __init__(self, task: BfclTask):
        super().__init__(task)
        self.available.update(task.early)
        self.known = self.available.union(*task.withheld.values())
        self.steps = [[]]       # user turn -> step -> calls that ran: what the official checker is given
        self.broken = False     # see Broken

    def start(self) -> dict:
        """Official instances, loaded as the official executor does it, {class name: instance}."""
        instances = {}
        for name in self.task.classes:
            instance = getattr(_official("func_source_code." + CLASSES[name]), name)()
            if name != "MathAPI":                       # it has no state to load
                instance._load_scenario(copy.deepcopy(self.task.initial.get(name, {})),
                                        long_context=self.task.category == "long_context")
            instances[name] = copy.deepcopy(instance)   # what it took from its module is now its own
        return instances

    def bind(self, call: Call) -> Call | None:
        """`call` bound to its signature, defaults filled in; None if unknown, not bindable or out of bounds."""
        try:
            return _bind(call, self.known)
        except Refused:
            return None

    def run(self, call) -> str:
        """Run one call, whatever it is; its result as the official executor writes it, or {"error": reason}."""
        if isinstance(call, CallError):
            return _error(call.message if isinstance(call.message, str) else "unreadable call")
        if self.done or self.broken:
            return _error("the dialogue is over" if self.done else "the file system is broken")
        try:
            bound = _bind(call, self.available)
        except Refused as error:
            return _error(str(error))
        self.calls.append(bound)
        instance = self.objects[_table()[bound.name].owner.__name__]
        try:
            with _own_precision():
                result = _render(getattr(instance, bound.name)(**envs.fresh(bound.arguments)), bound.name)
        except Exception as error:                      # tools raise on wrong types, unknown keys and the like
            result = _error(f"{type(error).__name__}: {error}")
        try:
            for folder in ("root", "_current_dir"):     # one can stand in a folder that the root no longer reaches
                _plain(getattr(instance, folder, None))
        except Broken as error:
            self.broken, result = True, _error(str(error))
        return result

    def step(self, calls: list[Call | CallError]) -> list[str]:
        """Run the calls of one assistant message; their results, in order. Never raises."""
        before = len(self.calls)
        results = super().step(calls)
        if len(self.calls) > before:
            self.steps[-1].append(self.calls[before:])
        return results

    def next_turn(self, said: str = "") -> dict | None:
        """The next user message, with "tools" where functions are handed over; None at the end."""
        message = super().next_turn(said)
        if message is not None:
            self.steps.append([])
        return message

    def state(self) -> dict:
        """{class name: {public attribute: plain value}}, as the official checker compares it; broken: equal to none."""
        if self.broken:
            return {"broken": object()}
        return {owner: {name: _plain(value) for name, value in vars(instance).items() if not name.startswith("_")}
                for owner, instance in self.objects.items()}


# ---- the leaderboard's verdict ----

_verdicts = itertools.count()


def _text(call: Call) -> str:
    """A bound call as the official executor reads it. It rewrites `name(` anywhere, so "(" in a string is escaped."""
    arguments = (f"{name}=" + repr(value).replace("(", "\\x28") for name, value in call.arguments.items())
    return f"{call.name}({', '.join(arguments)})"


def official_verdict(episode: Episode) -> bool:
    """The leaderboard's own multi_turn_checker on the calls that the episode executed, turn by turn and step by step.

    Unlike reward.py it compares the state after every turn, and results instead of calls; calls made where the golden
    answer has none only count through the state. An episode that did not reach the last turn has failed. On golden
    answers with one mistake (sft.corrupt) it agrees with reward.py in 97 %; the tests name each kind of disagreement.
    The checker keeps its instances in its module: they get their own name and are deleted, card balances are restored.
    """
    task = episode.task
    if len(episode.steps) < len(task.turns):
        return False
    done = [[[_text(call) for call in step] for step in turn] for turn in episode.steps]
    golden = [[_text(episode.bind(call)) for call in turn] for turn in task.golden]
    entry = {"id": task.id, "initial_config": task.initial, "involved_classes": task.classes}
    names, cards = vars(_official("multi_turn_utils")), _official("func_source_code.long_context").CREDIT_CARD_EXTENSION
    before, own = copy.deepcopy(cards), f"verdict{next(_verdicts)}_"
    try:
        with _own_precision():
            return _official("multi_turn_checker").multi_turn_checker(done, golden, entry, task.category, own)["valid"]
    finally:
        cards.update(before)
        for name in [name for name in names if name.startswith(own)]:
            del names[name]


@dataclass
class Options:
    """There are none."""


def main(argv=None):
    read_flags(Options, argv)
    try:
        load_tasks()
    except ModuleNotFoundError as error:
        raise UserError(str(error))
    for category in CATEGORIES:
        tasks, passed = load_tasks([category], part="all"), 0
        for task in tasks:
            episode = task.episode()
            for calls in task.golden:
                episode.step(calls)
                episode.next_turn()
            passed += official_verdict(episode)
        print(f"{category}: {len(tasks)} tasks, official verdict on the golden answers: {passed} pass")
    print("data", data_hash())


if __name__ == "__main__":
    program(main)
