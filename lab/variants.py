"""The study's controls and extensions: arms that are no part of the method, as other data, tokens, updates or tasks.

    python lab/variants.py sft --labels shuffled         # the program's own options, and those below
    python lab/variants.py rcgrpo --credit_lucky_lows ratio
    python lab/variants.py grpo --remedy ada             # what people use against groups without variance

Stage 1 is handed other data (`Sft`), RL other tokens, tasks, rollouts or another update (`Rl`). Each is a function that
sft.train or grpo.train takes in the place of its own.
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
from evaluate import CONDITIONS, held_out_tasks, load_tasks, sample
from model import token_logprobs
from reward import trajectory_reward
from run import command_line, config_of, method, program, require
from tokens import HIGH, LOW

# ---------------------------------------------------------------------------------------------------------------------
# stage 1: other data

@dataclass
class Sft(sft.Options):
    labels: str = method("reward", "shuffled: the tokens mean nothing", choices=("reward", "shuffled"))
    results: str = method("real", "constant: successes show one and the same result for every call, as in the paper's "
                          "stored data; failures show real ones", choices=("real", "constant"))
    own: int = method(0, "more tasks, one sampled episode each: successes join the data (plain: RFT)", least=0)
    blind_spot: float = method(0.0, "share of the tools on which a judge is fooled (see blind_spot)", least=0, most=1)
    eval_part: str = method("test", "part of the split that is measured on", choices=("validation", "test"))

    def check(self):
        super().check()
        tricks = [name for name, on in (("labels shuffled", self.labels != "reward"), ("own", self.own), (
            "results constant", self.results != "real"), ("blind_spot", self.blind_spot)) if on]
        require(len(tricks) <= 1, f"one control at a time, not --{' and --'.join(tricks)}")
        require(not self.plain or tricks in ([], ["own"]), f"--{''.join(tricks)} is about labels, and --plain has none")


def shuffled(o: Sft, renderer, tasks, sampler) -> list:
    """The tokens change places among the trajectories; rewards, and so the weights of failures, stay the true ones."""
    data = sft.stage1_data(o, renderer, tasks, sampler)
    tokens = [t.token for t in data]
    random.Random(f"labels-{o.seed}").shuffle(tokens)
    return [sft.relabelled(renderer, t, token) for t, token in zip(data, tokens)]


def same_results(o: Sft, renderer, tasks, sampler) -> list:
    """Every result in a success is {"status": "success"}: the token now tells a format, too."""
    data = sft.stage1_data(o, renderer, tasks, sampler)
    for t in data:
        if t.token == HIGH:
            shown = [{**message, "content": '{"status": "success"}'} if message["role"] == "tool" else message
                     for message in t.episode.messages]
            t.ids, t.mask = renderer.conversation(shown, t.episode.task.episode().tools, HIGH)
    return data


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
    remedy: str = method("off", "against groups without variance, see REMEDIES",
                         choices=("off", "dapo", "ada", "golden", "no_sigma", "ngrpo"))


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
# what people use against groups without variance, at as many rollouts and updates: options -> (roll, learn)

def relearn(advantages_of):
    """grpo.update with other advantages: advantages_of takes rewards (P, G)."""
    def learn(model, reference, optimizer, rollouts, advantages, weights, lr, o):
        rewards = torch.tensor([r.reward for r in rollouts]).view(-1, o.group)
        return grpo.update(model, reference, optimizer, rollouts, advantages_of(rewards).flatten(), weights, lr, o)
    return sample, learn


def no_sigma(o: Grpo):
    """Dr. GRPO (arXiv 2503.20783): A = R - mean. Flat groups stay flat; of the others the rare outcome pushes less."""
    return relearn(lambda rewards: rewards - rewards.mean(1, keepdim=True))


def ngrpo(o: Grpo):
    """NGRPO (arXiv 2509.18851): mean and sigma with one virtual rollout of reward 1, so that groups that fail wholly
    push their rollouts down. Without its asymmetric clip, which has no effect at one update a batch."""
    def advantages_of(rewards):
        return grpo.group_advantages(torch.cat([rewards, torch.ones(len(rewards), 1)], 1))[:, :-1]
    return relearn(advantages_of)


def dapo(o: Grpo):
    """DAPO's dynamic sampling (arXiv 2503.14476): groups without variance do not count in the step. DAPO samples new
    tasks in their place; at an equal number of rollouts those are tasks of this step already."""
    def learn(model, reference, optimizer, rollouts, advantages, weights, lr, o):
        mixed = advantages.view(-1, o.group).ne(0).any(1).repeat_interleave(o.group)
        lengths, weights = torch.tensor([r.sampled for r in rollouts]), torch.zeros_like(weights)
        weights[mixed] = grpo.loss_weights(lengths[mixed], o.norm)
        return grpo.update(model, reference, optimizer, rollouts, advantages, weights, lr, o)
    return sample, learn


def ada(o: Grpo):
    """Reinforce-Ada's sequential sampling (arXiv 2510.04996): G rollouts for half of the tasks, G more for those whose
    rewards are still all equal, and so on; once none is, for new tasks. A task's group are G of its rollouts, successes
    and failures as even as can be."""
    def roll(sampler, tasks, tokens, temperature, seed):
        G, pool, found, spent = o.group, tasks[::o.group], {}, 0
        while spent < len(pool):
            flat = [i for i, rows in found.items() if len({r.reward for r in rows}) == 1]
            new = range(len(found), len(found) + max(1, len(pool) // 2))
            chosen = list(flat or new)[:len(pool) - spent]
            again = [pool[i] for i in chosen for _ in range(G)]
            rows = sample(sampler, again, tokens[:len(again)], temperature, (*seed, spent))
            for k, i in enumerate(chosen):
                found.setdefault(i, []).extend(rows[k * G:(k + 1) * G])
            spent += len(chosen)
        picked = []
        for rows in found.values():
            good, bad = ([r for r in rows if (r.reward > 0) == won] for won in (True, False))
            n = min(len(good), max(G // 2, G - len(bad)))
            picked += good[:n] + bad[:G - n]
        return picked
    return roll, grpo.update


def golden(o: Grpo):
    """LUFFY's idea (arXiv 2504.14945): in a group that fails wholly the golden trajectory stands for one rollout, under
    the same token. Its old log-probs are the current ones, as all others' are; without LUFFY's shaping."""
    shown = {}

    def roll(sampler, *rest):
        shown["renderer"] = sampler.renderer
        return sample(sampler, *rest)

    def learn(model, reference, optimizer, rollouts, advantages, weights, lr, o):
        rollouts = list(rollouts)
        for i in range(0, len(rollouts), o.group):
            if all(r.reward == 0 for r in rollouts[i:i + o.group]):
                right = sft.labelled(shown["renderer"], sft.demonstrate(rollouts[i].episode.task))
                rollouts[i] = sft.relabelled(shown["renderer"], right, rollouts[i].token)
                rollouts[i].logprobs = [float("nan")] * len(rollouts[i].ids)             # not sampled
        rewards = torch.tensor([r.reward for r in rollouts]).view(-1, o.group)
        weights = grpo.loss_weights(torch.tensor([r.sampled for r in rollouts]), o.norm)
        advantages = grpo.group_advantages(rewards).flatten()
        return grpo.update(model, reference, optimizer, rollouts, advantages, weights, lr, o)
    return roll, learn


REMEDIES = {"off": lambda o: (sample, grpo.update), "dapo": dapo, "ada": ada, "golden": golden, "no_sigma": no_sigma,
            "ngrpo": ngrpo}


# ---------------------------------------------------------------------------------------------------------------------

def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    name, rest = (argv[0] if argv else "--help"), argv[1:]
    if name == "sft":
        o, builtin = sft.read_options(Sft, rest)
        make_data = shuffled if o.labels == "shuffled" else own_successes if o.own else \
            blind_spot if o.blind_spot else same_results if o.results == "constant" else sft.stage1_data
        held_out = held_out_tasks(o, o.eval_part)
        sft.train(o, builtin, command_line("lab/variants.py", argv), make_data, held_out)
        return
    if name in ("-h", "--help"):
        return print(f"usage: python lab/variants.py sft|grpo|rcgrpo [options], --help after the name\n\n{__doc__}")
    require(name in ("grpo", "rcgrpo"), f"{name}: choose sft, grpo or rcgrpo; --help after it lists its options")
    o = grpo.read_options(Grpo if name == "grpo" else Rcgrpo, rest)
    if name == "grpo":
        own = config_of(o.init).get("token", "none") if o.goal == "auto" else o.goal
        condition, (roll, learn) = (lambda P, G, seed: [[CONDITIONS[own]] * G for _ in range(P)]), REMEDIES[o.remedy](o)
    else:
        condition, roll, learn = (lambda P, G, seed: rcgrpo.draw_tokens(P, G, o.p_high, o.how, seed)), sample, update
    pool = stage1_tasks(o, 0) if o.pool == "stage1" else None
    siblings = o.eval_part == "siblings" and o.eval_tasks
    held_out = stage1_tasks(o, o.eval_tasks, shift=1) if siblings else held_out_tasks(o, o.eval_part)
    grpo.train(o, condition, command_line("lab/variants.py", argv), roll, learn, pool, held_out)


if __name__ == "__main__":
    program(main)
