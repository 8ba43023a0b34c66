"""What lets a long run survive: saved states, stops, numbers that are no numbers. Shared by sft.py, grpo.py and rcgrpo.py.

    <out>.partial/states/00000020/state.safetensors      # fp32 masters and both moments after step 20
    <out>.partial/states/00000020/SHA256SUMS             # (as of sha256sum -c)

Everything random in training is a function of (seed, step), and the rate is one of the step; so a resumed run needs nothing
else, no state of a random generator: the policy and its reference are made from the starting checkpoint again, the masters put
the trained weights into the policy. On a CPU the run then goes on bit for bit as if nothing had happened.

A state is written under a temporary name, synced and renamed. The last two are kept and the newest with the right checksum
counts. All weights trained, each is 12 bytes a weight; a finished run keeps none.
"""
import hashlib
import json
import os
import shutil
import signal
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file

from model import Optimizer, save_policy
from run import OutOfMemory, Run, UserError, sync

KEPT = 2                   # states


def write_tensors(file, tensors: dict[str, torch.Tensor]) -> str:
    """Write fp32 tensors in safetensors format -> SHA-256. One after the other: safetensors' own save_file copies all of them at once."""
    header, end = {}, 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [end, end := end + 4 * tensor.numel()]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()

    def put(data):
        file.write(data)
        digest.update(data)
    put(len(text).to_bytes(8, "little") + text)
    for tensor in tensors.values():
        put(tensor.detach().to("cpu", torch.float32).contiguous().numpy().data)
    return digest.hexdigest()


def save_state(folder: Path, tensors: dict[str, torch.Tensor], step: int):
    """Write folder/<step>, complete or not at all, and drop all but the newest KEPT."""
    target, temporary = folder / f"{step:08}", folder / f"{step:08}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        with open(temporary / "state.safetensors", "wb") as file:
            digest = write_tensors(file, tensors)
        (temporary / "SHA256SUMS").write_text(f"{digest}  state.safetensors\n", encoding="utf-8")
        for path in (*temporary.iterdir(), temporary):
            sync(path)
        os.replace(temporary, target)
        sync(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)                     # on a full disk it is in the way of everything else
        raise
    for old in states(folder)[:-KEPT]:
        shutil.rmtree(old)


def states(folder: Path) -> list[Path]:
    """The saved states in a folder, the oldest first, whatever else lies there."""
    return sorted(path for path in folder.glob("*") if path.name.removesuffix(".tmp").isdecimal())


def damage(state: Path) -> str | None:
    """What is wrong with a saved state; None if nothing is."""
    try:
        wanted = (state / "SHA256SUMS").read_text(encoding="utf-8").split()[0]
        digest = hashlib.sha256()
        with open(state / "state.safetensors", "rb") as file:
            while part := file.read(2 ** 24):
                digest.update(part)
    except (OSError, ValueError, IndexError) as error:
        return f"{getattr(error, 'strerror', None) or 'no checksum'}"
    return None if digest.hexdigest() == wanted else "wrong checksum"


def newest_state(folder: Path) -> tuple[int, dict[str, torch.Tensor]]:
    """(steps done, tensors) of the newest good state; (0, {}) if there is none. Damaged ones are named and removed."""
    for state in reversed(states(folder)):
        if state.suffix != ".tmp":                                       # else a kill came while it was written
            wrong = damage(state)
            if not wrong:
                return int(state.name), load_file(state / "state.safetensors")
            print(f"{state} is damaged ({wrong}): left out")
        shutil.rmtree(state)
    return 0, {}


def weights_hash(model) -> str:
    """A short hash of the beginnings of all weights, the same in fp32 and bf16: enough to see that a starting policy is another one."""
    digest = hashlib.sha256()
    for weight in model.parameters():
        digest.update(weight.detach().flatten()[:4096].to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


class Keeper:
    """Keeps a training run: begin() at its start, done() after each of its steps, all in a `with` block.

    Inside, Ctrl-C and SIGTERM let the step end, save, say how to go on, exit with 130 or 143 (Ctrl-C twice: at once).
    After max_skips steps in a row without an update (NaN or infinity in loss, gradient or reward) the run ends with a UserError.
    """

    def __init__(self, run: Run, model, tokenizer, every: int, max_skips: int):
        self.run, self.model, self.tokenizer, self.every, self.max_skips = run, model, tokenizer, every, max_skips
        self.steps = self.saved = self.begun = self.skipped = 0
        self.optimizer, self.caught, self.at_once = None, None, False

    def begin(self, optimizer: Optimizer) -> int:
        """Load the newest state where the run is resumed -> the steps it has done; what was recorded of later ones goes."""
        self.optimizer = optimizer
        if self.run.resumed:
            self.steps, tensors = newest_state(self.run.folder / "states")
            print(f"going on after step {self.steps}" if self.steps else "there is no saved state: starting from step 0")
            if self.steps:
                optimizer.load_tensors(tensors)
        self.saved = self.steps
        self.run.cut(self.steps)
        for row in self.run.rows("metrics.jsonl"):
            self.skipped = self.skipped + 1 if row.get("skipped") else 0
        return self.steps

    def done(self, skipped: int, last: bool = False):
        """After a step, its rows written: save if it is time, stop if someone asked for it. skipped: updates that were left out."""
        self.steps, self.begun = self.steps + 1, self.optimizer.begun
        self.skipped = self.skipped + 1 if skipped else 0
        if self.caught or self.skipped >= self.max_skips:
            self.save(checkpoint=True)
            if self.caught:
                raise KeyboardInterrupt
            raise UserError(f"{self.skipped} steps in a row gave NaN or infinity and were left out; the weights of before are in {self.run.folder}/. "
                            f"Start again with a lower --lr or --clip_norm and --overwrite, or {self.run.how}")
        if last or self.steps % self.every == 0:
            self.save()

    def shown(self, skipped: int) -> dict:
        """For the bar: how many steps in a row were left out, if any."""
        return {"skipped": self.skipped + 1} if skipped else {}

    def save(self, checkpoint: bool = False):
        """The state; and the policy so far as a plain Hugging Face folder, to be used: going on does not need it."""
        if self.steps > self.saved:
            for path in self.run.folder.glob("*.jsonl"):
                sync(path)
            save_state(self.run.folder / "states", self.optimizer.tensors(), self.steps)
            self.saved = self.steps
        if checkpoint:
            save_policy(self.model, self.tokenizer, self.run.folder / "checkpoint")

    @contextmanager
    def interruptible(self):
        """Inside, a signal does not wait for the end of a step: for evaluations, which a resumed run does again."""
        if self.caught:
            raise KeyboardInterrupt
        self.at_once = True
        try:
            yield
        finally:
            self.at_once = False

    def _signal(self, number, frame):
        at_once = self.at_once or self.caught == number == signal.SIGINT
        self.caught = number
        if at_once:
            raise KeyboardInterrupt

    def __enter__(self):
        self.handlers = {number: signal.signal(number, self._signal) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, kind, error, trace):
        try:
            if isinstance(error, OutOfMemory) and self.steps > self.saved and self.optimizer.begun == self.begun:
                self.save(checkpoint=True)                               # else a part of the weights may have moved
        finally:
            for number, handler in self.handlers.items():
                signal.signal(number, handler or signal.SIG_DFL)
        if isinstance(error, KeyboardInterrupt):
            saved = f"after step {self.saved}; saved in {self.run.folder}/"
            saved = saved if self.saved else "before the first saved state"
            print(f"\nstopped {saved}. {self.run.how[0].upper()}{self.run.how[1:]}")
            raise SystemExit(128 + (self.caught or signal.SIGINT)) from None
