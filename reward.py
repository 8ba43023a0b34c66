"""The reward of a trajectory: R = R_state * R_action, each 0 or 1, for any Episode.

    R_state   the final state equals the state that the golden calls lead to
    R_action  every golden call is among the calls of the episode, as often as it is wanted (eq. 5 of the paper);
              further calls cost nothing

A trajectory that was cut by a limit on tokens or messages earns 0, whatever it had reached: its end was not its own.

    python simulator.py prints golden replays, whose reward is 1 by the tests.
"""
from typing import NamedTuple


class Reward(NamedTuple):
    """Each 0 or 1; `total` is the product of the other two, and 0 where the trajectory was truncated."""
    state: int
    action: int
    total: int


def same(a, b):
    """Whether two pieces of plain data are equal: 3 and 3.0 are, True and 1 are not, nan equals nan."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or (a != a and b != b)


def replay(task, turns=None, closing=lambda calls: ""):
    """Run calls, one list per user turn (the golden ones if None), on a fresh episode of `task`; returns the episode.

    Every call is a message of its own, because a call may need the result of the one before.
    closing: the calls of a turn -> the words that end it.
    """
    episode = task.episode()
    for calls in task.golden if turns is None else turns:
        for call in calls:
            episode.step([call])
        episode.next_turn(closing(calls))
    return episode


def covers(calls, golden):
    """Whether every call of `golden` occurs in `calls`, as many times as it occurs in `golden`."""
    left = list(calls)
    for wanted in golden:
        match = next((i for i, call in enumerate(left) if call.name == wanted.name
                      and same(call.arguments, wanted.arguments)), None)
        if match is None:
            return False
        del left[match]
    return True


def trajectory_reward(episode, truncated=False) -> Reward:
    """The Reward of `episode` as it stands, against the golden calls of its task. truncated: cut by a limit."""
    golden = [episode.bind(call) for calls in episode.task.golden for call in calls]
    action = int(None not in golden and covers(episode.calls, golden))
    state = int(same(episode.state(), replay(episode.task).state()))
    return Reward(state, action, 0 if truncated else state * action)
