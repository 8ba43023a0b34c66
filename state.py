"""What lets a long run survive: saved states, stops, numbers that are no numbers. Shared by sft.py, grpo.py, rcgrpo.py.

    <out>.partial/states/00000020/state.safetensors      # fp32 masters and both moments after step 20
    <out>.partial/states/00000020/SHA256SUMS             # (as of sha256sum -c)

Everything random in training is a function of (seed, step), and the rate is one of the step; so a resumed run needs
nothing else, no state of a random generator: the policy and its reference are made from the starting checkpoint again,
the masters put the trained weights into the policy. On a CPU the run then goes on bit for bit.

A state is written under a temporary name, synced and renamed. The last two are kept and the newest with the right
checksum counts. All weights trained, each is 12 bytes a weight; a finished run keeps none.
"""
import hashlib
import itertools
import json
import os
import shutil
import signal
import traceback
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file
from tqdm import tqdm

from model import Optimizer, save_policy
from run import Run, UserError, no_memory, require, sync

KEPT = 2                   # states
MAX_SKIPS = 5              # steps in a row with NaN or infinity after which a run stops
SHOWN = ("loss", "reward", "zero_variance", "kl", "tok_s")               # metrics beside the progress bar


def write_tensors(file, tensors: dict[str, torch.Tensor]) -> str:
    """Write fp32 tensors in safetensors format -> SHA-256. One by one: safetensors' save_file copies all of them."""
    header, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + 4 * tensor.numel()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    values = (tensor.detach().to("cpu", torch.float32).contiguous().numpy().data for tensor in tensors.values())
    for part in itertools.chain([len(text).to_bytes(8, "little") + text], values):
        file.write(part)
        digest.update(part)
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
        shutil.rmtree(temporary, ignore_errors=True)                     # on a full disk it is in the way
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
        return getattr(error, "strerror", None) or "no checksum"
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
    """A hash of the beginnings of all weights, the same in fp32 and bf16: enough to tell one policy from another."""
    digest = hashlib.sha256()
    for weight in model.parameters():
        digest.update(weight.detach().flatten()[:4096].to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


class Keeper:
    """Keeps a training run, in a `with` block: steps() goes on where it was, saves and stops; log() ends each step.

    Inside, Ctrl-C and SIGTERM let the step end, save, say how to go on, exit with 130 or 143 (Ctrl-C twice: at once).
    After MAX_SKIPS steps in a row without an update (NaN or infinity in loss, gradient or reward) and where memory runs
    out, the run ends with a UserError; what was learned is saved.
    """

    def __init__(self, run: Run, model, tokenizer, every: int):
        self.run, self.model, self.tokenizer, self.every = run, model, tokenizer, every
        self.done = self.saved = self.begun = self.skipped = 0
        self.optimizer, self.caught, self.at_once = None, None, False

    def steps(self, total: int, optimizer: Optimizer, title: str):
        """The numbers of the steps that are still to be done, under a progress bar; log() is to be called in each."""
        self.optimizer = optimizer
        if self.run.resumed:
            self.done, tensors = newest_state(self.run.folder / "states")
            print(f"going on after step {self.done}" if self.done else "there is no saved state: starting from step 0")
            if self.done:
                optimizer.load_tensors(tensors)
        require(self.done <= total, f"--steps {total}: {self.done} are done already")
        self.saved = self.done
        self.run.cut(self.done)                                          # what was recorded of later ones is done again
        for row in self.run.rows("metrics.jsonl"):
            self.count(row)
        with tqdm(total=total, initial=self.done, desc=title, unit="step") as self.bar:
            while self.done < total:
                yield self.done
                if self.caught or self.skipped >= MAX_SKIPS:
                    self.save(checkpoint=True)
                    if self.caught:
                        raise KeyboardInterrupt
                    raise UserError(f"{self.skipped} steps in a row gave NaN or infinity and were left out; the "
                                    f"weights of before are in {self.run.folder}/. Start again with a lower --lr and "
                                    f"--overwrite, or {self.run.how}")
                if self.done == total or self.done % self.every == 0:
                    self.save()

    def count(self, row: dict):
        self.skipped = self.skipped + 1 if row["skipped"] else 0         # steps in a row

    def log(self, row: dict, *episodes: dict):
        """The end of a step: its metrics ("skipped": updates that were left out) and episodes, into the run folder."""
        self.run.append("metrics.jsonl", row)
        self.run.append("episodes.jsonl", *episodes)
        self.done, self.begun = self.done + 1, self.optimizer.begun
        self.count(row)
        shown = {key: f"{row[key]:.{0 if abs(row[key]) >= 100 else 3}f}" for key in SHOWN if key in row}
        self.bar.set_postfix(**shown, **({"skipped": self.skipped} if self.skipped else {}), refresh=False)
        self.bar.update()

    def save(self, checkpoint: bool = False):
        """The state; and the policy so far as a plain Hugging Face folder, to be used: going on does not need it."""
        if self.done > self.saved:
            for path in self.run.folder.glob("*.jsonl"):
                sync(path)
            save_state(self.run.folder / "states", self.optimizer.tensors(), self.done)
            self.saved = self.done
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
            if no_memory(error):
                traceback.clear_frames(trace)                            # they hold the tensors
                updating = any(frame.name == "update" for frame in traceback.extract_tb(trace))
                if self.done > self.saved and self.optimizer.begun == self.begun:
                    self.save(checkpoint=True)                           # else a part of the weights may have moved
                less = "update: lower --token_budget or add --grad_checkpoint" if updating else "rollout: lower --rows"
                raise UserError(f"out of memory in a{'n' * updating} {less}, then {self.run.how}; "
                                f"what is done is in {self.run.folder}/") from None
        finally:
            for number, handler in self.handlers.items():
                signal.signal(number, handler or signal.SIG_DFL)
        if isinstance(error, KeyboardInterrupt):
            saved = f"after step {self.saved}; saved in {self.run.folder}/"
            saved = saved if self.saved else "before the first saved state"
            print(f"\nstopped {saved}. {self.run.how[0].upper()}{self.run.how[1:]}")
            raise SystemExit(128 + (self.caught or signal.SIGINT)) from None
