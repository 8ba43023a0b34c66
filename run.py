"""A run: its options, its folder, its errors. Shared by all programs that train or evaluate.

Options are the fields of one dataclass per program; each has a comment, the default for pretrained models and, where it
differs, the one for the built-in model. Flags are made from the fields.

The life of a run's folder:

    claim             before anything that takes long: would an older run be lost, or another process be disturbed?
    <out>.partial/    while it runs: locked, with config.json; metrics.jsonl (an object a step) and episodes.jsonl grow
      states/         what an exact resume needs (state.py): every --save_every steps, and when it is stopped
      checkpoint/     the policy so far, when it is stopped: a plain Hugging Face folder, as at the end
    --resume          the same options, tasks and weights only; rows of steps after the newest good state are cut
    <out>/            the whole folder takes its name when it is complete; an older run of that name goes only then,
                      and only with --overwrite. What only resuming needs goes, too.

A mistake of the user's is a UserError: one line on stderr that says what to do, exit status 2. So is a lack of memory,
a full disk, or one that must not be written.
"""
import argparse
import dataclasses
import difflib
import errno
import fcntl
import functools
import hashlib
import importlib.util
import json
import math
import operator
import os
import re
import shlex
import shutil
import sys
import typing
from pathlib import Path

import torch
import transformers

for name, found, least in (("Python", sys.version, "3.10"), ("torch", torch.__version__, "2.8"),
                           ("transformers", transformers.__version__, "5.2")):
    if [int(part) for part in re.findall(r"\d+", found)[:2]] < [int(part) for part in least.split(".")]:
        print(f"error: {name} {found.split()[0]} is too old, {least} is the oldest that works", file=sys.stderr)
        sys.exit(2)

# what --resume lets the user change: speed, memory, reporting, how long to go on. (RL's rate is constant after its
# warm-up: more steps are the same run going on. A longer SFT run is another one: its rate falls to 0 at the last step.)
FREE = {"rows", "token_budget", "grad_checkpoint", "device", "threads", "save_every", "steps", "out", "base", "resume",
        "overwrite"}
DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM}
NO_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}          # of a file system that cannot
NO_FOLDER_SYNC = NO_SYNC | {errno.EACCES, errno.EPERM, errno.EBADF, errno.EISDIR}
LIMITS = {"least": ("at least", operator.ge), "above": ("more than", operator.gt),
          "most": ("at most", operator.le), "below": ("less than", operator.lt)}
MADE_BY = {"runs/rctp": "python sft.py", "runs/sft": "python sft.py --plain", "runs/grpo": "python grpo.py",
           "runs/rcgrpo": "python rcgrpo.py"}
COLOURS = {"high": "C0", "none": "C7", "low": "C3", "GRPO": "C1", "RC-GRPO": "C2"}       # in every figure


class UserError(Exception):
    """Something that the user can mend; its text is one line that says how."""


def option(default, comment, builtin=None, choices=None, some=False, group="run", **limits):
    """A dataclass field that becomes a flag. builtin: the default for the built-in model where it differs.

    some: a comma-separated choice of the default's names. limits: the range of a number, by the names in LIMITS.
    """
    return dataclasses.field(default=default, metadata={"comment": comment, "builtin": builtin, "choices": choices,
                                                        "some": some, "group": group, "limits": limits})


GROUPS = ("method", "data", "optimisation", "memory and speed", "run")                   # of --help, in this order
method, data, optimisation, memory, running = (functools.partial(option, group=name) for name in GROUPS)


def bounds(field) -> str:
    """The range of a numeric option in words."""
    return " and ".join(f"{LIMITS[name][0]} {limit}" for name, limit in field.metadata["limits"].items())


def meant(word: str, known) -> str:
    """'; did you mean ...?', or nothing where no known word is like this one."""
    return "".join(f"; did you mean {close}?" for close in difflib.get_close_matches(word, list(known), 1))


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(f"{message} (see --help)")


def read_flags(options_class, argv=None, positional: str | None = None) -> dict:
    """Command line -> the options that the user gave, by field name. Unknown flags and wrong types are UserErrors."""
    doc = sys.modules[options_class.__module__].__doc__ or ""
    parser = _Parser(usage="python %(prog)s [options]", description=doc.split("\n\n")[0], allow_abbrev=False,
                     argument_default=argparse.SUPPRESS,
                     formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32, width=120))
    groups = {name: parser.add_argument_group(name) for name in GROUPS}
    types = typing.get_type_hints(options_class)
    for field in dataclasses.fields(options_class):
        kind = next((t for t in typing.get_args(types[field.name]) if t is not type(None)), types[field.name])
        meta, group = field.metadata, groups[field.metadata["group"]]
        facts = [str(field.default), meta["builtin"] is not None and f"built-in model {meta['builtin']}", bounds(field)]
        text = f"{meta['comment']} ({'; '.join(filter(None, facts))})".replace("%", "%%").replace(" ()", "")
        if field.name == positional:
            group.add_argument(field.name, nargs="?", help=text)
        elif kind is bool:
            group.add_argument(f"--{field.name}", action=argparse.BooleanOptionalAction, help=text)
        else:
            shown = f"{{{','.join(meta['choices'])}}}" if meta["choices"] else kind.__name__.upper()
            group.add_argument(f"--{field.name}", type=kind, metavar=shown, help=text)
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        near = meant(unknown[0].split("=")[0], parser._option_string_actions)
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{near}")
    return {key: os.path.expanduser(value) if isinstance(value, str) else value for key, value in vars(given).items()}


def make_options(options_class, given: dict, builtin: bool):
    """The user's choices over the defaults of the built-in model or of pretrained ones: ranges, then check()."""
    preset = {field.name: field.metadata["builtin"] for field in dataclasses.fields(options_class)
              if builtin and field.metadata["builtin"] is not None}
    options = options_class(**{**preset, **given})
    for field in dataclasses.fields(options_class):
        name, value, choices = field.name, getattr(options, field.name), field.metadata["choices"]
        if choices and value not in choices:
            raise UserError(f"--{name}: choose from {', '.join(choices)}, not {value}{meant(value, choices)}")
        if field.metadata["some"]:
            known, words = field.default.split(","), value.split(",")
            odd = next((word for word in words if word not in known), None)
            require(odd is None, f"--{name} knows {', '.join(known)}; got {value}{meant(odd or '', known)}")
            require(len(set(words)) == len(words), f"--{name} takes each name once; got {value}")
        if isinstance(value, (int, float)):
            require(all(LIMITS[key][1](value, limit) for key, limit in field.metadata["limits"].items()),
                    f"--{name} must be {bounds(field)}, not {value}")
            require(abs(value) < 2 ** 31, f"--{name} must be a number below 2^31, not {value}")          # nor NaN
    if hasattr(options, "check"):
        options.check()
    return options


def command_line(program: str, argv=None) -> list[str]:
    """The words of the command that runs now: main(argv) of a program, or what the shell was given."""
    return ["python", *sys.argv] if argv is None else ["python", program, *argv]


def require(condition: bool, message: str):
    """A check of the user's input: UserError(message) if it does not hold."""
    if not condition:
        raise UserError(message)


def require_package(name: str, what: str, install: str = ""):
    """UserError if a package is not installed that `what` needs; to be asked before the work, not after it."""
    found = importlib.util.find_spec(name) is not None
    require(found, f"{what} needs the package {name}: pip install {install or name}")


def check_file(path: str):
    """UserError if a file cannot be written there: before the work, not after it. Folders on the way may be missing."""
    file = Path(path).absolute()
    there = next(place for place in (file, *file.parents) if place.exists())
    require(not file.is_dir(), f"--out {path} is a folder: give a file")
    require((there == file or there.is_dir()) and os.access(there, os.W_OK), f"cannot write {path}: give another --out")


def no_memory(error: BaseException | None) -> bool:
    """Whether an error means that memory ran out, of a GPU or of a CPU."""
    return isinstance(error, torch.OutOfMemoryError) or \
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def disk_error(error: BaseException | None) -> str | None:
    """What to say of an error that means a disk is full or must not be written; None for any other.

    The Rust code in safetensors and tokenizers raises its own kinds, with the number at the end: "(os error 28)".
    """
    rust = not isinstance(error, UserError) and re.search(r"\(os error (\d+)\)", str(error))
    number = error.errno if isinstance(error, OSError) else int(rust[1]) if rust else None
    file = getattr(error, "filename", None)
    return (f"{file}: " if file else "") + os.strerror(number) if number in DISK else None


def program(main):
    """Run a program's main(): mistakes of the user's end with one line and status 2, Ctrl-C with status 130."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")                         # what a terminal cannot show ends nothing
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        said = str(error) if isinstance(error, UserError) else disk_error(error) or no_memory(error) and \
            "out of memory (lower --rows or --max_message, train with --lora_rank 16, or choose a smaller model)"
        if not said:
            raise
        print(f"error: {said}", file=sys.stderr)
        sys.exit(2)


def checkpoint_of(path: str) -> str:
    """The checkpoint folder of a run folder (or `path` itself, if it is a Hugging Face folder, file or hub name).

    A runs/ folder that is not there is a UserError that names the command which makes it, or one with nearly that name.
    """
    folder = Path(path)
    if (folder / "checkpoint").is_dir():
        return str(folder / "checkpoint")
    if folder.exists() and (folder.is_file() or (folder / "config.json").exists()):
        return path
    if folder.exists() or folder.is_absolute() or not folder.parts or folder.parts[0] in ("runs", ".", ".."):
        command = MADE_BY.get(os.path.normpath(path))
        near = [str(file.parent) for parent in {folder.parent, Path("runs")} for file in parent.glob("*/checkpoint")]
        advice = f"make it with `{command}`" if command else "give the folder of a run, of a checkpoint, or a hub name"
        raise UserError(f"there is no checkpoint in {path}{meant(os.path.normpath(path), near)}; {advice}")
    return path                                                          # looks like a hub name: owner/model


def code_hash() -> str:
    """First 16 hex digits of the SHA-256 of this program's source files."""
    files = sorted(file for file in Path(__file__).parent.glob("[!.]*.py") if file.is_file())    # no editor's lock
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def run_of(path: str) -> Path:
    """The run folder to which a checkpoint folder belongs; any other path as it is."""
    folder = resolved(path)
    return folder.parent if folder.name == "checkpoint" and (folder.parent / "config.json").exists() else Path(path)


def config_of(path: str) -> dict:
    """The config.json of a run, given its folder or its checkpoint's; {} where there is no run."""
    file = run_of(path) / "config.json"
    return read_json(file) if file.exists() and (file.parent / "checkpoint").is_dir() else {}


# ---------------------------------------------------------------------------------------------------------------------
# files

def read_json(file: Path):
    """The value in a JSON file. Raises UserError if it cannot be read or is damaged."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}")
    except ValueError as error:
        raise UserError(f"{file} is no JSON: {error}")


def read_jsonl(file: Path) -> list[dict]:
    """The objects of a JSONL file, without a last line that a kill cut. Any other broken line is a UserError."""
    rows, text = [], file.read_text(encoding="utf-8", errors="replace")
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict):
            rows.append(row)
        else:
            require(not line.endswith("\n"), f"{file}: line {number} is no JSON object")
    return rows


def to_line(row: dict) -> str:
    """A row of a JSONL file. JSON has no NaN and no infinity: null."""
    return json.dumps({key: None if isinstance(value, float) and not math.isfinite(value) else value
                       for key, value in row.items()}) + "\n"


def sync(path: Path):
    """Have a file, or a folder's list of files, on the disk before anything that relies on it, if that is possible."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in (NO_FOLDER_SYNC if Path(path).is_dir() else NO_SYNC):
            raise


def lock(folder: Path):
    """A run folder's lock: held until this file is closed, so a killed process leaves none behind.

    Raises UserError if another process has it.
    """
    file = open(folder / "lock", "a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        free = os.path.samestat(os.fstat(file.fileno()), os.stat(folder / "lock"))       # not just renamed away
    except (BlockingIOError, FileNotFoundError):
        free = False
    except OSError:                                                      # a file system without locks
        free = True
    if not free:
        file.close()
        raise UserError(f"another process is at work in {folder}; wait for it, or give another --out")
    return file


def tidy(folder: Path):
    """Remove from a finished run what only an unfinished one needs, and the older run that it replaced."""
    for name in ("states", "replaced"):
        shutil.rmtree(folder / name, ignore_errors=True)
    (folder / "lock").unlink(missing_ok=True)


def interrupted(final: Path) -> dict:
    """config.json of the interrupted run of this name. Raises UserError if there is none."""
    partial = Path(f"{final}.partial")
    if not (partial / "config.json").exists():
        if (final / "config.json").exists():
            tidy(final)                                                  # if a kill came within its last moments
            raise UserError(f"{final} is finished, there is nothing to resume; give another --out, or --overwrite")
        raise UserError(f"there is no interrupted run {partial}; start it without --resume")
    return read_json(partial / "config.json")


def resolved(name: str) -> Path:
    """A run's folder without links, `..` or a slash at the end; below the working directory it is relative."""
    path, here = Path(os.path.realpath(name)), Path.cwd()
    return path.relative_to(here) if here in path.parents else path


def claim(name: str, resume: bool, overwrite: bool, start: str = "", kind: str = "options") -> Path:
    """The folder of a run to be started or resumed. UserError if an older run would be lost, or something that is none.

    start: the checkpoint that the run begins with. kind: what stands in the config.json of a run that may be replaced.
    """
    final, flag = resolved(name), "--out" if kind == "options" else "--base"
    partial = Path(f"{final}.partial")
    if (partial / "lock").exists():
        lock(partial).close()
    if resume:
        overwrite = overwrite or interrupted(final).get("options", {}).get("overwrite", False)
    elif (partial / "config.json").exists():
        work = [path for name in ("states/*", "checkpoint", "*.jsonl") for path in partial.glob(name)]
        if any(path.is_dir() or path.stat().st_size for path in work):
            require(overwrite, f"{partial} is a run that was stopped: go on with --resume, give another {flag}, or "
                    "begin anew with --overwrite")
            other = kind not in read_json(partial / "config.json")
            require(not other, f"{partial} is another kind of run: give another {flag}")
    require(partial.absolute() not in Path(os.path.realpath(start), "x").parents,
            f"the run cannot start from {start} and be written there: give another {flag}")
    if final.is_file() or final.is_dir() and any(final.iterdir()):
        config = final / "config.json"
        require(config.is_file() and kind in read_json(config),
                f"{final} exists and is not a run that could be replaced: give another {flag}")
        require(overwrite, f"{final} is a finished run: give another {flag}, or replace it with --overwrite")
    check_file(partial / "config.json")
    return final


def same_run(old: dict, new: dict):
    """UserError if a run of config `new` would not go on with that of config `old`, but be another one. The code may be
    another; `new` gets a list of the earlier ones."""
    before, now = ({"stage": config.get("stage"), **config.get("options", {})} for config in (old, new))
    changed = [f"--{key} was {was} and is {now[key]} now" for key, was in before.items()
               if key not in FREE and now.get(key, was) != was]
    require(not changed, f"--resume goes on with the same options only: {'; '.join(changed)}. "
            "Give the old values, or begin anew with --overwrite")
    was, now = old.get("hashes", {}), new.get("hashes", {})
    for key, what in (("policy", "the weights of the starting policy"), ("data", "the tasks"),
                      ("prompt", "the prompt of the first task")):
        require(was.get(key) == now.get(key), f"--resume: {what} changed since the run began; "
                "bring back what was there, or begin anew with --overwrite")
    earlier = old.get("earlier_code", [])
    if was.get("code") != now.get("code"):
        print(f"the program's files changed since the run began (code {was.get('code')}, now {now.get('code')}); "
              "going on with the new ones")
        earlier = earlier + [was.get("code")]
    if earlier:
        new["earlier_code"] = earlier


class Run:
    """The folder of a run in progress, to be used in a `with` block: locked, and a full disk inside is a UserError.

    finish() gives it its name; until then an older run of that name, to be replaced with `overwrite`, stays as it is.
    command: the words of the command that runs, for messages.
    """

    def __init__(self, name: str, config: dict, resume: bool = False, overwrite: bool = False, command=()):
        kind = "recipe" if "recipe" in config else "options"
        self.final, self.resumed = claim(name, resume, overwrite, kind=kind), resume
        self.folder, self.replaces = Path(f"{self.final}.partial"), self.final.exists()
        self.how = "go on with: " + shlex.join([*(word for word in command if word != "--resume"), "--resume"])
        if resume:
            same_run(interrupted(self.final), config)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lock = lock(self.folder)
            for path in [] if resume else self.folder.iterdir():
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                elif path.name != "lock":
                    path.unlink()
            self.write("config.json", json.dumps(config, indent=1))
        except OSError as error:
            raise UserError(f"cannot write the run folder {self.folder}: {error.strerror}")

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.lock.close()
        if said := disk_error(error):
            raise UserError(f"cannot write in {self.folder}: {said}. What was saved before is good: make room, then "
                            f"{self.how}") from None

    def write(self, name: str, text: str):
        """A whole file at once: written under a temporary name, then renamed."""
        temporary = self.folder / (name + ".tmp")
        temporary.write_text(text, encoding="utf-8")
        sync(temporary)
        os.replace(temporary, self.folder / name)

    def append(self, name: str, *rows: dict):
        """Objects, one a line, at the end of a JSONL file."""
        with open(self.folder / name, "a", encoding="utf-8") as file:
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
        for path in self.folder.rglob("*"):
            if path.exists():                                            # a dangling link is an editor's lock
                sync(path)
        if self.final.exists():
            require(self.replaces, f"{self.final} has appeared meanwhile; the complete run is in {self.folder}")
            os.replace(self.final, self.folder / "replaced")             # beside it any name could be a run's
        os.replace(self.folder, self.final)
        sync(self.final.absolute().parent)
        tidy(self.final)
