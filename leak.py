"""How much of a BFCL level is memory? A lookup table, without any model, on the paper's random split and on ours by scenario.

    python leak.py                                       # five seeds of both splits, ten seconds; writes runs/leak.json

The four multi-turn categories of BFCL are four variants of the same 200 scenarios, with the same golden calls. The paper draws its 80
test tasks at random from all 800 and trains on the others, so that most of them have siblings among the training tasks. What that is worth shows a "policy"
that can do nothing but remember: it takes the training task whose first user message shares most words with that of the test task, and
repeats its golden calls when the user says the same again. A call whose function is still withheld waits until it is handed over. No
argument is ever read from the conversation, no result is used.

R is the reward of the paper (reward.py); the official verdict also wants every call in its turn. Both say what a policy can score on a split
without learning to call tools, not what the paper's policies did.
"""
import json
from dataclasses import dataclass
from pathlib import Path

import bfcl
from bfcl import answer
from envs import CATEGORIES, Task
from evaluate import wilson
from reward import trajectory_reward
from run import UserError, check_file, make_options, option, program, read_flags


@dataclass
class Options:
    seeds: int = option(5, "seeds of each split", least=1)
    out: str = option("runs/leak.json", "where the numbers go")


def words(task: Task) -> set[str]:
    """The words of a task's first user message."""
    return set(task.turns[0].lower().split())


def nearest(task: Task, memory: list[Task]) -> Task:
    """The task in memory whose first user message is most alike: words in common by all words of the two (Jaccard). The first of several."""
    mine = words(task)
    return max(memory, key=lambda other: len(mine & words(other)) / len(mine | words(other)))


def repeat(task: Task, remembered: Task) -> bfcl.Episode:
    """An episode of `task` in which the golden calls of another task are made, each when the user says what was said before it there.

    A text that was not said there may lack something: it is waited for one more, which then stands for the next remembered turn.
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


def main(argv=None):
    o, rows = make_options(Options, read_flags(Options, argv), False), []
    check_file(o.out)
    for split in ("random", "scenario"):
        for seed in range(o.seeds):
            try:
                memory, more, tasks = (bfcl.load_tasks(split=split, part=part, seed=seed) for part in ("train", "validation", "test"))
            except ModuleNotFoundError as error:
                raise UserError(str(error))
            memory += more                               # the paper trains on all 720
            answers = {answer(task) for task in memory}
            for task in tasks:
                episode = repeat(task, nearest(task, memory))
                rows.append({"split": split, "seed": seed, "task": task.id, "category": task.category,
                             "known": int(answer(task) in answers),
                             "success": trajectory_reward(episode).total, "official": int(bfcl.official_verdict(episode))})
    numbers = {}
    print(f"lookup without a model, {o.seeds} seeds of each split: %, Wilson 95 %")
    print(f"{'split':10}{'category':14}{'tasks':>6}{'golden calls known':>24}{'R':>24}{'official verdict':>24}")
    for split in ("random", "scenario"):
        for category in ("all", *CATEGORIES):
            chosen = [row for row in rows if row["split"] == split and category in ("all", row["category"])]
            cells = {}
            for key in ("known", "success", "official"):
                total = sum(row[key] for row in chosen)
                cells[key] = [100 * total / len(chosen), *(100 * end for end in wilson(total, len(chosen)))]
            numbers.setdefault(split, {})[category] = {"tasks": len(chosen), **cells}
            print(f"{split:10}{category:14}{len(chosen):6}" + "".join(f"{mean:10.1f} [{low:4.1f}, {high:5.1f}]" for mean, low, high in cells.values()))
    Path(o.out).parent.mkdir(parents=True, exist_ok=True)
    everything = {"command": "python leak.py", "data": bfcl.data_hash(), "seeds": o.seeds, "numbers": numbers}
    Path(o.out).write_text(json.dumps(everything, indent=1), encoding="utf-8")
    print(f"wrote {o.out}")


if __name__ == "__main__":
    program(main)
