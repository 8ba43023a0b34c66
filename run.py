"""A run: its options, its folder, its errors. Shared by sft.py, grpo.py, rcgrpo.py and evaluate.py.

- Options are the fields of one dataclass per program; each field has a comment, the default for pretrained models and,
  where it differs, the one for the built-in model. Flags are made from the fields.
- A finished run is a folder: config.json, metrics.jsonl (one object a step), episodes.jsonl, figure.png and checkpoint/ (a
  plain Hugging Face folder). While it runs it is `<name>.partial`; it takes its name when it is complete.
- A mistake of the user's is a UserError: one line on stderr that says what to do, exit status 2. So is a lack of memory.
"""
import argparse
import dataclasses
import hashlib
import json
import os
import shutil
import sys
import typing
from pathlib import Path

import torch
import transformers


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
    return json.loads(file.read_text()) if file.exists() and (Path(path) / "checkpoint").is_dir() else {}


class Run:
    """The folder of a run in progress. finish() gives it its name; until then an older run of that name stays as it is."""

    def __init__(self, name: str, config: dict, resume: bool = False):
        self.final, self.folder = Path(name), Path(name + ".partial")
        if resume:
            require((self.folder / "config.json").exists(), f"there is no interrupted run {self.folder}; start it without --resume")
        elif self.folder.exists():
            shutil.rmtree(self.folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.write("config.json", json.dumps(config, indent=1))
        except OSError as error:
            raise UserError(f"cannot write the run folder {self.folder}: {error.strerror}")

    def write(self, name: str, text: str):
        """A whole file at once: written under a temporary name, then renamed."""
        temporary = self.folder / (name + ".tmp")
        temporary.write_text(text)
        os.replace(temporary, self.folder / name)

    def append(self, name: str, *rows: dict):
        """Objects, one a line, at the end of a JSONL file."""
        with open(self.folder / name, "a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)

    def rows(self, name: str) -> list[dict]:
        """All objects of a JSONL file; [] where there is none."""
        file = self.folder / name
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def finish(self):
        """Take the final name, in place of an older run of that name."""
        old = self.final.with_name(self.final.name + ".old")
        if self.final.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.replace(self.final, old)
        os.replace(self.folder, self.final)
        shutil.rmtree(old, ignore_errors=True)
