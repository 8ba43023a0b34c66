"""A stand-in until the simulator has a file of its own."""
from envs import *  # noqa
from envs import TABLE, make_tasks  # noqa
