"""The reward of a trajectory: R = R_state * R_action, each 0 or 1, for any Episode.

    R_state   the final state equals the state that the golden calls lead to
    R_action  for every golden call there is a call with the same name and all its arguments equal (eq. 5, appendix D):
              order and number are free, further calls and further arguments cost nothing

Where a call leaves an argument out it has the signature's default: the call is the same. The paper is silent on that.

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
        episode.close(closing(calls))
    return episode


def covers(calls, golden):
    """Whether for every call of `golden` there is one in `calls` with its name and all its arguments."""
    return all(any(call.name == wanted.name
                   and all(name in call.arguments and same(call.arguments[name], value)
                           for name, value in wanted.arguments.items()) for call in calls) for wanted in golden)


def trajectory_reward(episode, truncated=False) -> Reward:
    """The Reward of `episode` as it stands, against the golden calls of its task. truncated: cut by a limit."""
    golden = [call for calls in episode.task.golden for call in calls]
    bound = [episode.bind(call) for call in golden]                      # in canonical form, defaults filled in
    wanted = [full and full._replace(arguments={name: full.arguments[name] for name in call.arguments})
              for full, call in zip(bound, golden)]                      # the defaults are not wanted
    action = int(None not in wanted and covers(episode.calls, wanted))
    state = int(same(episode.state(), replay(episode.task).state()))
    return Reward(state, action, 0 if truncated else state * action)
