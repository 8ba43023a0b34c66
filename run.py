"""A run: its options, its folder, its errors. Shared by sft.py, grpo.py, rcgrpo.py and evaluate.py. (How it goes on after a stop: state.py.)

- Options are the fields of one dataclass per program; each field has a comment, the default for pretrained models and,
  where it differs, the one for the built-in model. Flags are made from the fields.
- A finished run is a folder: config.json, metrics.jsonl (one object a step), episodes.jsonl, figure.png and checkpoint/ (a
  plain Hugging Face folder). While it runs it is `<name>.partial`, locked against other processes; it takes its name when it is
  complete.
- A mistake of the user's is a UserError: one line on stderr that says what to do, exit status 2. So is a lack of memory, a full
  disk, or one that must not be written.
"""
import argparse
import dataclasses
import errno
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import sys
import typing
from pathlib import Path

import torch
import transformers


# what --resume lets the user change: speed, memory, reporting, how long to go on. (RL's rate is constant after its warm-up, so more
# steps are the same run going on; a longer SFT run is another one, for its rate falls towards the last step.)
FREE = {"rows", "token_budget", "grad_checkpoint", "device", "threads", "save_every", "max_skips", "steps", "out", "base", "resume"}
DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM}


class UserError(Exception):
    """Something that the user can mend; its text is one line that says how."""


def option(default, comment, builtin=None, choices=None):
    """A dataclass field that becomes a flag. builtin: the default for the built-in model where it differs."""
    return dataclasses.field(default=default, metadata={"comment": comment, "builtin": builtin, "choices": choices})


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(f"{message} (see --help)")


def read_flags(options_class, argv=None, positional: str | None = None) -> dict:
    """Command line -> the options that the user gave, by field name. Unknown flags and wrong types are UserErrors."""
    doc = sys.modules[options_class.__module__].__doc__ if options_class.__module__ in sys.modules else ""
    parser = _Parser(description=(doc or "").split("\n\n")[0], allow_abbrev=False, argument_default=argparse.SUPPRESS,
                     formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=30, width=110))
    types = typing.get_type_hints(options_class)
    for field in dataclasses.fields(options_class):
        kind = next((t for t in typing.get_args(types[field.name]) if t is not type(None)), types[field.name])
        text = f"{field.metadata['comment']} (default {field.default}"
        if field.metadata["builtin"] is not None:
            text += f"; built-in model {field.metadata['builtin']}"
        text = (text + ")").replace("%", "%%")
        if field.name == positional:
            parser.add_argument(field.name, help=text)
        elif kind is bool:
            parser.add_argument(f"--{field.name}", action=argparse.BooleanOptionalAction, help=text)
        else:
            parser.add_argument(f"--{field.name}", type=kind, choices=field.metadata["choices"], help=text)
    return vars(parser.parse_args(argv))


def make_options(options_class, given: dict, builtin: bool):
    """The user's choices over the defaults of the built-in model or of pretrained ones; then the class's own check()."""
    preset = {field.name: field.metadata["builtin"] for field in dataclasses.fields(options_class)
              if builtin and field.metadata["builtin"] is not None}
    options = options_class(**{**preset, **given})
    for field in dataclasses.fields(options_class):
        choices = field.metadata["choices"]
        if choices and getattr(options, field.name) not in choices:
            raise UserError(f"--{field.name} must be one of {', '.join(map(str, choices))}")
    options.check()
    return options


def require(condition: bool, message: str):
    """A check of the user's input: UserError(message) if it does not hold."""
    if not condition:
        raise UserError(message)


class OutOfMemory(UserError):
    """Memory ran out; the text names options that need less."""


def within_memory(advice: str, function, *args, **kwargs):
    """function(*args, **kwargs); if memory runs out in it, OutOfMemory with this advice. Its tensors are free again by then."""
    try:
        return function(*args, **kwargs)
    except RuntimeError as error:                                        # of a GPU; of a CPU
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
    raise OutOfMemory(f"out of memory {advice}")                         # not in the block above: the first error's frames hold the tensors


def disk_error(error: BaseException | None) -> str | None:
    """What to say of an error that means a disk is full or must not be written; None for any other.

    The Rust code in safetensors and tokenizers raises its own kinds, with the number at the end: "(os error 28)".
    """
    if isinstance(error, OSError):
        number = error.errno
    else:
        found = None if isinstance(error, UserError) else re.search(r"\(os error (\d+)\)", str(error))
        number = int(found[1]) if found else None
    file = getattr(error, "filename", None)
    return (f"{file}: " if file else "") + os.strerror(number) if number in DISK else None


def program(main):
    """Run a program's main(): mistakes of the user's end with one line and status 2, Ctrl-C with status 130."""
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        within_memory("(lower --rows or --max_message, train with --lora_rank 16, or choose a smaller model)", main)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if not disk_error(error):
            raise
        print(f"error: {disk_error(error)}", file=sys.stderr)
        sys.exit(2)


def checkpoint_of(path: str, made_by: str) -> str:
    """The checkpoint folder of a run folder (or `path` itself, if it is a Hugging Face folder, file or hub name).

    A runs/ folder that is not there is a UserError that names the command which makes it.
    """
    folder = Path(path)
    if (folder / "checkpoint").is_dir():
        return str(folder / "checkpoint")
    if folder.exists() and (folder.is_file() or (folder / "config.json").exists()):
        return path
    if folder.exists() or folder.is_absolute() or not folder.parts or folder.parts[0] in ("runs", ".", ".."):
        raise UserError(f"there is no checkpoint in {path}; make it with `{made_by}`")
    return path                                                          # looks like a hub name: owner/model


def code_hash() -> str:
    """First 16 hex digits of the SHA-256 of this program's source files."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def config_of(path: str) -> dict:
    """A run's config.json; {} where `path` is no run folder."""
    file = Path(path) / "config.json"
    return read_json(file) if file.exists() and (Path(path) / "checkpoint").is_dir() else {}


# ---------------------------------------------------------------------------------------------------------------------
# files

def read_json(file: Path):
    """The value in a JSON file. Raises UserError if it is damaged."""
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise UserError(f"{file} is no JSON: {error}")


def read_jsonl(file: Path) -> list[dict]:
    """The objects of a JSONL file. A last line that a killed program did not finish is left out; any other broken line is a UserError."""
    rows, text = [], file.read_text(errors="replace")
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        try:
            rows.append(json.loads(line))
            if not isinstance(rows[-1], dict):
                raise ValueError
        except ValueError:
            if line.endswith("\n"):
                raise UserError(f"{file}: line {number} is no JSON object")
            rows = rows[:number - 1]
    return rows


def to_line(row: dict) -> str:
    """A row of a JSONL file. JSON has no NaN and no infinity: null."""
    return json.dumps({key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}) + "\n"


def sync(path: Path):
    """Have a file, or a folder's list of files, on the disk before anything that relies on it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def interrupted(name: str) -> dict:
    """config.json of the interrupted run `name`. Raises UserError if there is none."""
    partial = Path(name + ".partial")
    if not (partial / "config.json").exists():
        if (Path(name) / "config.json").exists():
            shutil.rmtree(Path(name) / "states", ignore_errors=True)     # left over if a kill came within its last moments
            (Path(name) / "lock").unlink(missing_ok=True)
            raise UserError(f"{name} is finished, there is nothing to resume; give another --out, or start without --resume")
        raise UserError(f"there is no interrupted run {partial}; start it without --resume")
    return read_json(partial / "config.json")


def same_run(old: dict, new: dict):
    """UserError if a run with config `new` would not go on with the run of config `old`, but be another one. Earlier code is noted in `new`."""
    before, now = ({"stage": config.get("stage"), **config.get("options", {})} for config in (old, new))
    changed = [f"--{key} was {before[key]} and is {now[key]} now" for key in before if key in now and key not in FREE and before[key] != now[key]]
    require(not changed, f"--resume goes on with the same options only: {'; '.join(changed)}. Give the old values, or start without --resume")
    was, are = old.get("hashes", {}), new.get("hashes", {})
    for key, what in (("policy", "the weights of the starting policy"), ("data", "the tasks"), ("prompt", "the prompt of the first task")):
        require(was.get(key) == are.get(key), f"--resume: {what} changed since the run began; bring back what was there, or start without --resume")
    earlier = old.get("earlier_code", [])
    if was.get("code") != are.get("code"):
        print(f"the program's files changed since the run began (code {was.get('code')}, now {are.get('code')}); going on with the new ones")
        earlier = earlier + [was.get("code")]
    if earlier:
        new["earlier_code"] = earlier


class Run:
    """The folder of a run in progress, to be used in a `with` block: locked, and a full disk inside is a UserError.

    finish() gives it its name; until then an older run of that name stays as it is. command: the program, for messages.
    """

    def __init__(self, name: str, config: dict, resume: bool = False, command: str = "the same command"):
        self.final, self.folder, self.resumed = Path(name), Path(name + ".partial"), resume
        self.how = f"go on with: {command} --resume and the same options"
        if resume:
            same_run(interrupted(name), config)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock()
            for path in [] if resume else self.folder.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                elif path.name != "lock":
                    path.unlink()
            self.write("config.json", json.dumps(config, indent=1))
        except OSError as error:
            raise UserError(f"cannot write the run folder {self.folder}: {error.strerror}")

    def _lock(self):
        """Held as long as the file is open, so a killed process leaves none behind."""
        self.lock = open(self.folder / "lock", "a")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = os.path.samestat(os.fstat(self.lock.fileno()), os.stat(self.folder / "lock"))         # not just renamed away
        except (BlockingIOError, FileNotFoundError):
            free = False
        except OSError:                                                  # a file system without locks
            free = True
        if not free:
            self.lock.close()
            raise UserError(f"another process is at work in {self.folder}; wait for it, or give another --out")

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.lock.close()
        if said := disk_error(error):
            raise UserError(f"cannot write in {self.folder}: {said}. What was saved before is good: make room, then {self.how}") from None

    def write(self, name: str, text: str):
        """A whole file at once: written under a temporary name, then renamed."""
        temporary = self.folder / (name + ".tmp")
        temporary.write_text(text)
        sync(temporary)
        os.replace(temporary, self.folder / name)

    def append(self, name: str, *rows: dict):
        """Objects, one a line, at the end of a JSONL file."""
        with open(self.folder / name, "a") as file:
            file.writelines(map(to_line, rows))

    def rows(self, name: str) -> list[dict]:
        """All objects of a JSONL file; [] where there is none."""
        file = self.folder / name
        return read_jsonl(file) if file.exists() else []

    def cut(self, step: int):
        """Drop what was recorded of later steps: they are done again."""
        for name in ("metrics.jsonl", "episodes.jsonl"):
            self.write(name, "".join(to_line(row) for row in self.rows(name) if row.get("step", 0) <= step))

    def finish(self):
        """Take the final name, in place of an older run of that name; what only a resumed run needs goes."""
        old = self.final.with_name(self.final.name + ".old")
        for path in self.folder.rglob("*"):
            sync(path)
        if self.final.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.replace(self.final, old)
        os.replace(self.folder, self.final)
        sync(self.final.absolute().parent)
        shutil.rmtree(old, ignore_errors=True)
        shutil.rmtree(self.final / "states", ignore_errors=True)
        (self.final / "lock").unlink()
