"""How much of a BFCL level is memory? A lookup table without a model, on the paper's split, random ones and ours.

    python lab/leak.py                                   # the paper's, five seeds of the others; writes runs/leak.json

The four multi-turn categories of BFCL are four variants of the same 200 scenarios, with the same golden calls. The
paper draws its 80 test tasks at random from all 800 and trains on the others, so that all of them have siblings among
the training tasks. What that is worth shows a "policy" that can do nothing but remember: it takes the training task
whose first user message shares most words with that of the test task, and repeats its golden calls when the user says
the same again. A call whose function is still withheld waits until it is handed over. No argument is ever read from the
conversation, no result is used.

R is the reward of the paper (reward.py); the official verdict also wants every call in its turn. Both say what a policy
can score on a split without learning to call tools, not what the paper's policies did.
"""
import json
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import bfcl
from bfcl import answer
from envs import CATEGORIES, Task
from evaluate import wilson
from reward import trajectory_reward
from run import UserError, check_file, make_options, option, program, read_flags


@dataclass
class Options:
    seeds: int = option(5, "seeds of the splits random and scenario", least=1)
    out: str = option("runs/leak.json", "where the numbers go")


def words(task: Task) -> set[str]:
    """The words of a task's first user message."""
    return set(task.turns[0].lower().split())


def nearest(task: Task, memory: list[Task]) -> Task:
    """The first task in memory whose first user message is most alike: words in common by all words (Jaccard)."""
    mine = words(task)
    return max(memory, key=lambda other: len(mine & words(other)) / len(mine | words(other)))


def repeat(task: Task, remembered: Task) -> bfcl.Episode:
    """An episode of `task` with the golden calls of another one, each when the user says what was said before it there.

    A text that was not said there may lack something: it is waited for one more, which then stands for the next turn.
    """
    handover, told = bfcl.handover(), []                 # what was said and done; a hand-over is no wish of its own
    for text, golden in zip(remembered.turns, remembered.golden):
        told[-1:] = [(told[-1][0], told[-1][1] + golden)] if text == handover else [*told[-1:], (text, golden)]
    episode, waiting, reached, unsure = task.episode(), [], 0, False
    for text in task.turns:
        place = next((place for place in range(reached, len(told)) if told[place][0] == text), None)
        if place is None and text != handover:
            place, unsure = (reached if unsure else None), not unsure
        if place is not None:
            waiting += [call for _, calls in told[reached:place + 1] for call in calls]
            reached = place + 1
        while waiting and waiting[0].name in episode.available:
            episode.step([waiting.pop(0)])
        episode.next_turn()
    return episode


MEASURES = {"known": "golden calls known", "success": "R = 1", "official": "official verdict"}


def lookup(split: str, seed: int) -> list[dict]:
    """What the lookup earns on a split's test tasks, one row each."""
    try:
        parts = [bfcl.load_tasks(split=split, part=part, seed=seed) for part in ("train", "validation", "test")]
    except ModuleNotFoundError as error:
        raise UserError(str(error))
    memory, tasks, rows = parts[0] + parts[1], parts[2], []              # all 720 that do not test
    answers = {answer(task) for task in memory}
    for task in tasks:
        episode = repeat(task, nearest(task, memory))
        rows.append({"category": task.category, "known": int(answer(task) in answers),
                     "success": trajectory_reward(episode).total, "official": int(bfcl.official_verdict(episode))})
    return rows


def summary(rows: list[dict], category: str) -> dict:
    """[mean, low, high] in percent of every measure, for a category or all."""
    rows = [row for row in rows if category in ("all", row["category"])]
    totals = {key: sum(row[key] for row in rows) for key in MEASURES}
    return {"tasks": len(rows), **{key: [100 * total / len(rows), *(100 * end for end in wilson(total, len(rows)))]
                                   for key, total in totals.items()}}


def table(numbers: dict) -> str:
    """In markdown: %, Wilson 95 %."""
    head = ["split", "category", "tasks", *MEASURES.values()]
    rows = [[split, category, str(row["tasks"]), *("{:.1f} [{:.1f}, {:.1f}]".format(*row[key]) for key in MEASURES)]
            for split, by in numbers.items() for category, row in by.items()]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))


def main(argv=None):
    o = make_options(Options, read_flags(Options, argv), False)
    check_file(o.out)
    numbers = {}
    for split in ("paper", "random", "scenario"):
        seeds = range(1 if split == "paper" else o.seeds)                # there is only one
        rows = [row for seed in seeds for row in lookup(split, seed)]
        numbers[split] = {name: summary(rows, name) for name in ("all", *CATEGORIES)}
    print(f"lookup without a model, {o.seeds} seeds of the splits that have some: %, Wilson 95 %\n{table(numbers)}")
    Path(o.out).parent.mkdir(parents=True, exist_ok=True)
    everything = {"command": "python lab/leak.py", "data": bfcl.data_hash(), "seeds": o.seeds, "numbers": numbers}
    Path(o.out).write_text(json.dumps(everything, indent=1), encoding="utf-8")
    print(f"wrote {o.out}")


if __name__ == "__main__":
    program(main)
