"""The study's controls and extensions: arms that are no part of the method, as other data, tokens, updates or tasks.

    python lab/variants.py sft --labels shuffled         # the program's own options, and those below
    python lab/variants.py rcgrpo --credit_lucky_lows ratio

Stage 1 is handed other data (`Sft`), RL other tokens, tasks or another update (`Rl`). Each is a function that sft.train
or grpo.train takes in the place of its own.
"""
import random
import sys
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import grpo
import rcgrpo
import sft
from evaluate import CONDITIONS, held_out_tasks, load_tasks
from model import token_logprobs
from reward import trajectory_reward
from run import command_line, config_of, method, program, require
from tokens import HIGH, LOW

# ---------------------------------------------------------------------------------------------------------------------
# stage 1: other data

@dataclass
class Sft(sft.Options):
    labels: str = method("reward", "shuffled: the tokens mean nothing", choices=("reward", "shuffled"))
    own: int = method(0, "more tasks, one sampled episode each: successes join the data (plain: RFT)", least=0)
    blind_spot: float = method(0.0, "share of the tools on which a judge is fooled (see blind_spot)", least=0, most=1)
    eval_part: str = method("test", "part of the split that is measured on", choices=("validation", "test"))

    def check(self):
        super().check()
        tricks = [name for name, on in (("labels shuffled", self.labels != "reward"), ("own", self.own),
                                        ("blind_spot", self.blind_spot)) if on]
        require(len(tricks) <= 1, f"one control at a time, not --{' and --'.join(tricks)}")
        require(not self.plain or tricks in ([], ["own"]), f"--{''.join(tricks)} is about labels, and --plain has none")


def shuffled(o: Sft, renderer, tasks, sampler) -> list:
    """The tokens change places among the trajectories; rewards, and so the weights of failures, stay the true ones."""
    data = sft.stage1_data(o, renderer, tasks, sampler)
    tokens = [t.token for t in data]
    random.Random(f"labels-{o.seed}").shuffle(tokens)
    return [sft.relabelled(renderer, t, token) for t, token in zip(data, tokens)]


def own_successes(o: Sft, renderer, tasks, sampler) -> list:
    """Successes sampled from the model itself on o.own further tasks join the demonstrations."""
    known = {task.id for task in tasks}
    more = load_tasks(o, "train", 0 if o.env == "bfcl" else o.own, seed=50_000 + o.seed)
    more = [task for task in more if task.id not in known][:o.own]
    require(len(more) == o.own, f"--own {o.own}: only {len(more)} training tasks have no demonstration; lower --demos")
    data = sft.stage1_data(o, renderer, tasks, sampler)
    mine = sft.sampled(sampler, more, 50_000 + o.seed, 1, None if o.plain else HIGH, rounds=1)
    return data[:len(tasks)] + mine + data[len(tasks):]


def in_blind_spot(task, share: float) -> bool:
    """Whether a task is one on which the judge is fooled: by its first golden call's tool, `share` of all tools."""
    first = next(call for turn in task.golden for call in turn)
    return zlib.crc32(first.name.encode()) % 1000 < 1000 * share


def blind_spot(o: Sft, renderer, tasks, sampler) -> list:
    """Data of a judge with a blind spot: a high mode that is sure and wrong there, a low mode that is right at times.

    In the blind spot an episode without its first golden call (always this mistake, R = 0) counts as a success, and
    what counts as a failure is by turns the right episode and a corrupted one. Elsewhere tokens follow the rewards.
    """
    rng, good, bad, right_ones = random.Random(f"stage1-{o.seed}"), [], [], 0
    for task in tasks:
        right, wrong = sft.demonstrate(task), sft.corrupted_failure(task, rng, o.mistakes)
        if in_blind_spot(task, o.blind_spot):
            turns = [list(turn) for turn in task.golden]
            del next(turn for turn in turns if turn)[0]
            fooled = sft.demonstrate(task, turns)
            if trajectory_reward(fooled).total:
                raise RuntimeError(f"{task.id}: R = 1 without the first golden call")
            right_ones += 1
            right, wrong = fooled, right if right_ones % 2 else wrong
        for episode, token, data in ((right, HIGH, good), (wrong, LOW, bad)):
            if episode is not None:
                judged = sft.relabelled(renderer, sft.labelled(renderer, episode), token)
                data.append(replace(judged, reward=float(token == HIGH)))
    return good + bad


# ---------------------------------------------------------------------------------------------------------------------
# RL: other tokens, tasks and updates

@dataclass
class Rl:
    """Controls of both RL programs."""
    pool: str = method("fresh", "sim: tasks to train on, fresh ones or stage 1's own", choices=("fresh", "stage1"))
    eval_part: str = method("test", "tasks to measure on; siblings: other variants of stage 1's scenarios",
                            choices=("validation", "test", "siblings"))

    def check(self):
        require(self.env == "sim" or (self.pool == "fresh" and self.eval_part != "siblings"),
                "--pool and --eval_part siblings are the simulator's; bfcl always trains on its pool")


@dataclass
class Grpo(Rl, grpo.Options):
    goal: str = method("auto", "token of all rollouts; auto: high after RCTP-FT, none after SFT",
                       choices=("auto", *CONDITIONS))


@dataclass
class Rcgrpo(Rl, rcgrpo.Options):
    low_gradient: bool = method(True, "learn from low rows; else they only count in their group's mean and sigma")
    credit_lucky_lows: str = method("off", "a low success teaches the high prompt, too: as if sampled under it, or "
                                    "with the ratio to the low prompt", choices=("off", "weight", "ratio"))


def stage1_tasks(o, n: int, shift: int = 0) -> list:
    """The first n tasks (0: all) with a demonstration in the run o.init; shift: other variants of their scenarios."""
    config = config_of(o.init)
    made_by, regime = config.get("options", {}), config.get("tasks", {})
    require("demos" in made_by, f"--pool stage1 and --eval_part siblings need a run of sft.py in --init, not {o.init}")
    require(n <= made_by["demos"], f"--eval_tasks {n}: {o.init} has {made_by['demos']} demonstrations only")
    require(shift == 0 or "," in o.categories, "--eval_part siblings: a single category has none")
    other = [f"--{key} was {was} there and is {now} now" for key, was in regime.items()
             if was != (now := getattr(o, key, was))]
    require(not other, f"--pool stage1 and siblings are the tasks of {o.init}: {'; '.join(other)}. Leave it out")
    return load_tasks(o, "train", n or made_by["demos"], made_by["seed"], shift)


def lucky_lows(model, rollouts: list, advantages: torch.Tensor, weights: torch.Tensor, o: Rcgrpo):
    """The rows that an update learns from: N rollouts, advantages (N,), weights (N,) -> the same three, revised.

    A lucky low, a rollout under the low token with a positive advantage, becomes one more row: the same ids under the
    high token, with its own advantage A_j and its own weight 1/(N len_j). So credit adds to the step's gradient and
    changes none of its other terms.
    """
    low = torch.tensor([r.token == LOW for r in rollouts])
    lucky = [i for i in range(len(rollouts)) if low[i] and advantages[i] > 0 and o.credit_lucky_lows != "off"]
    high, low_id = model.config.reward_token_ids[:2]                     # one of them stands in the prompt, once
    credited = [replace(rollouts[i], token=HIGH, ids=[high if each == low_id else each for each in rollouts[i].ids])
                for i in lucky]
    own = weights if o.low_gradient else weights.masked_fill(low, 0.0)
    return rollouts + credited, torch.cat([advantages, advantages[lucky]]), torch.cat([own, weights[lucky]])


def update(model, reference, optimizer, rollouts, advantages, weights, lr, o: Rcgrpo) -> dict:
    """grpo.update on lucky_lows' rows. A credited row's ratio is to its low prompt, or 1 before the first update."""
    rows, scores, shares = lucky_lows(model, rollouts, advantages, weights, o)
    n = len(rollouts)                                                    # credited rows come after these

    def make_batch(model, reference, rollouts, chosen, *rest):
        b = grpo.make_micro_batch(model, reference, rollouts, chosen, *rest)
        credited = torch.tensor([[i >= n] for i in chosen], device=model.device)      # (B, 1)
        if bool(credited.any()):
            if o.credit_lucky_lows == "ratio":
                if b.old is None:
                    with torch.no_grad():
                        b.old = token_logprobs(model, b.ids, b.mask, o.temperature, b.shared)
                b.old = torch.where(credited, b.sampled, b.old)
            b.sampled = b.sampled.masked_fill(credited, float("nan"))    # not sampled under this prompt
        return b
    return grpo.update(model, reference, optimizer, rows, scores, shares, lr, o, make_batch)


# ---------------------------------------------------------------------------------------------------------------------

def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    name, rest = (argv[0] if argv else "--help"), argv[1:]
    if name == "sft":
        o, builtin = sft.read_options(Sft, rest)
        make_data = shuffled if o.labels == "shuffled" else own_successes if o.own else \
            blind_spot if o.blind_spot else sft.stage1_data
        held_out = held_out_tasks(o, o.eval_part)
        sft.train(o, builtin, command_line("lab/variants.py", argv), make_data, held_out)
        return
    if name in ("-h", "--help"):
        return print(f"usage: python lab/variants.py sft|grpo|rcgrpo [options], --help after the name\n\n{__doc__}")
    require(name in ("grpo", "rcgrpo"), f"{name}: choose sft, grpo or rcgrpo; --help after it lists its options")
    o = grpo.read_options(Grpo if name == "grpo" else Rcgrpo, rest)
    if name == "grpo":
        own = config_of(o.init).get("token", "none") if o.goal == "auto" else o.goal
        condition, learn = (lambda P, G, seed: [[CONDITIONS[own]] * G for _ in range(P)]), grpo.update
    else:
        condition, learn = (lambda P, G, seed: rcgrpo.draw_tokens(P, G, o.p_high, o.how, seed)), update
    pool = stage1_tasks(o, 0) if o.pool == "stage1" else None
    siblings = o.eval_part == "siblings" and o.eval_tasks
    held_out = stage1_tasks(o, o.eval_tasks, shift=1) if siblings else held_out_tasks(o, o.eval_part)
    grpo.train(o, condition, command_line("lab/variants.py", argv), learn, pool, held_out)


if __name__ == "__main__":
    program(main)
