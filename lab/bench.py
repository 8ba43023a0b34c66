"""How fast is it: rollouts, updates and whole steps, next to what people would use instead.

    python lab/bench.py                                  # CPU: the built-in model; GPU: Qwen2.5 shapes, random weights
    python lab/bench.py --quick                          # fewer points: a GPU in less than 5 minutes
    python lab/bench.py --plan                           # on paper: the limits of an H200 with the 7B shape

Both sides of a comparison have the same weights, dtype, attention (sdpa), prompts and limits, run in one process and
take turns after a warm-up. "Times better" is the median over such pairs, with the smallest and the largest behind it.

  decode    one decode step, (time of N + 1 new tokens - time of 1) / N, all rows with one prompt of random ids. Peer:
            transformers' `generate`. Memory limit: the bytes that a step must read (weights and the cache in use) over
            the bandwidth of a large copy, measured here. The built-in model fits into a CPU's cache: no limit there.
  rollouts  multi-turn episodes at temperature 1: simulator tasks, or on a GPU three user turns under a policy that
            stops at random. Peer: `generate` turn by turn (generate_loop), the usual loop: a left-padded batch of all
            unfinished episodes says one message each, answers are appended, again; no cache is kept across turns. Other
            random numbers than ours.
  prefix    first token of 8 rollouts that share a long prompt. Peer: the same sampler, prompts differ in the first id.
  trl       a whole single-turn step next to TRL's GRPOTrainer (left out without `pip install trl datasets accelerate`):
            same checkpoint, first-turn prompts of the tasks (one a group), exactly N new tokens each (no stop id on
            either side), beta, one optimizer step, reward by parity of the ids. TRL without vLLM, logging, saving,
            gradient checkpointing; all in one batch.
  growth    a decode step against rows and against context, and model size: the figure.
  update    a whole RL step on prompts of random ids, no two alike (and all alike), with a reference (beta > 0), all
            weights trained; on a GPU with LoRA too.
            Model FLOPs: passes * (2 * body * tokens + 2 * head * sampled + attention), attention = 2 * layers * heads *
            head_dim * sum of squared lengths (causal). Passes: 3 of the policy, hence 6 * parameters * tokens (2 where
            LoRA freezes the weights), and 1 of the reference. What is computed again does not count. 100 % is a large
            matrix product, measured here.

Peak memory: torch's on a GPU; on a CPU the resident memory of the whole process (Linux).
Writes bench.md, bench.json and bench.png into --out after every section, so that a run that is cut off loses nothing.
"""
import copy
import functools
import gc
import importlib.metadata
import json
import math
import platform
import statistics
import sys
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PrinterCallback, Qwen2Config, TrainerCallback

import grpo
from builtin import builtin_policy
from evaluate import TASK_KEYS, TaskOptions, load_tasks
from model import Optimizer, add_reward_tokens, load_policy, reference_policy, save_policy
from rcgrpo import draw_tokens
from run import (UserError, checkpoint_of, config_of, make_options, option, program, read_flags, require,
                 require_package)
from sampler import Sampler, Trajectory
from tokens import FRAME, parse_calls

FIELDS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
          "vocab_size", "tie_word_embeddings")
SHAPES = {name: dict(zip(FIELDS, sizes)) for name, sizes in {
    "0.5B": (896, 24, 14, 2, 4864, 151936, True), "1.5B": (1536, 28, 12, 2, 8960, 151936, True),
    "7B": (3584, 28, 28, 4, 18944, 152064, False)}.items()}
PATIENCE = {"7B": 4}                                     # its share of the time, next to 1 for every other model
STEP, LIMIT, MFU, PEAK = "ms per decode step", "% of the memory limit", "% model-FLOP utilisation", "peak memory, GiB"
SHORT, LONG = "32 rows, context 1100", "32 rows, context 5600"
TARGETS = (  # model, section, start of the setting, measure, column, what is wanted (memory: at most)
    ("built-in", "rollouts", "", "episodes/s", "ratio", 3), ("built-in", "trl", "", "s per step", "ratio", 2),
    ("7B", "decode", SHORT, LIMIT, "ours", 60), ("7B", "decode", LONG, LIMIT, "ours", 60),
    ("7B", "decode", SHORT, "tok/s", "ratio", 8), ("7B", "decode", LONG, "tok/s", "ratio", 18),
    ("7B", "prefix", "", "s to the first token", "ratio", 6), ("1.5B", "update", "all weights", MFU, "ours", 50),
    ("7B", "update", "LoRA", MFU, "ours", 50), ("7B", "update", "LoRA", PEAK, "ours", 40e9 / 2 ** 30))


@dataclass
class Options(TaskOptions):
    checkpoint: str = option("runs/rctp", "CPU: the policy, a run or checkpoint folder")
    shapes: str = option("0.5B,7B,1.5B", "GPU: shapes of Qwen2.5, comma-separated, in this order", some=True)
    sections: str = option("decode,rollouts,prefix,trl,growth,update", "what to measure, comma-separated", some=True)
    out: str = option("runs/bench", "folder of the results")
    quick: bool = option(False, "fewer points, 2 repeats, 4 minutes at most")
    minutes: float = option(25.0, "start no measurement after this time", above=0)
    plan: bool = option(False, "print the limits of an H200 on paper and end")
    tasks: int = option(4, "tasks in a step", builtin=32, least=1)
    group: int = option(8, "rollouts of a task", least=2)
    rows: int = option(32, "episodes side by side, on both sides", builtin=256, least=1)
    new: int = option(48, "new tokens of an episode in trl, and in update on a CPU", least=1)
    repeats: int = option(3, "pairs of measurements", builtin=5, least=1)

    def check(self):
        if self.quick:
            self.minutes, self.repeats = min(self.minutes, 4.0), min(self.repeats, 2)


@dataclass
class Subject:
    """A policy under measurement."""
    name: str
    model: torch.nn.Module
    tokenizer: object


def on_gpu(subject: Subject) -> bool:
    return subject.model.device.type == "cuda"


# ---------------------------------------------------------------------------------------------------------------------
# bytes and FLOPs

def weights(model) -> tuple[int, int]:
    """(body, head): weights that every token meets, and the output layer's, which only sampled positions meet."""
    table = model.get_input_embeddings().weight
    body = sum(p.numel() for p in model.base_model.parameters() if p is not table)
    return body, model.get_output_embeddings().weight.numel()


def cache_bytes(model) -> int:
    """Bytes of keys and values of one token."""
    config = model.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * config.num_key_value_heads * size * model.dtype.itemsize


def decode_bytes(model, rows: int, context: int) -> int:
    """Bytes that one decode step must read: all weights (few rows of the input table) and the cache in use once."""
    return sum(weights(model)) * model.dtype.itemsize + rows * context * cache_bytes(model)


def forward_flops(model, lengths: list[int], sampled: int) -> int:
    """Model FLOPs of a forward pass over episodes of these lengths, head on `sampled` positions, causal attention."""
    (body, head), config = weights(model), model.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = 2 * config.num_hidden_layers * config.num_attention_heads * size * sum(n * n for n in lengths)
    return 2 * body * sum(lengths) + 2 * head * sampled + attention


def shape(name: str, device) -> torch.nn.Module:
    """A Qwen2.5 shape with random bf16 weights (none on the device meta)."""
    rope = {"rope_type": "default", "rope_theta": 1e6}
    config = Qwen2Config(**SHAPES[name], max_position_embeddings=32768, rope_parameters=rope, bos_token_id=None,
                         eos_token_id=None)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()


def plan() -> str:
    """The limits of an H200 (4.8 TB/s, 141 GB, 989 TFLOP/s dense bf16) with the 7B shape."""
    model, tokens = shape("7B", "meta"), 16384
    (body, head), config, total = weights(model), model.config, sum(p.numel() for p in model.parameters())
    lines = [f"7B: {total / 1e9:.3f}e9 weights, {body / 1e9:.3f}e9 body, {head / 1e9:.3f}e9 head; "
             f"cache {cache_bytes(model):,} bytes a token"]
    for context in (1100, 5600):
        size = decode_bytes(model, 32, context)
        lines.append(f"decode, 32 rows, context {context}: {size / 1e9:.2f} GB a step, {1e3 * size / 4.8e12:.2f} ms; "
                     f"limit {32 * 4.8e12 / size:,.0f} tok/s, 60 % of it {0.6 * 32 * 4.8e12 / size:,.0f}")
    for name, passes in (("all weights", 4), ("LoRA", 3)):
        flops = passes * forward_flops(model, [6000] * 8, 8 * 600)
        lines.append(f"update, 8 episodes of 6000 tokens (600 sampled), {name}: {passes} passes, "
                     f"{flops / 1e12:,.0f} TFLOP, {flops / 989e12:.1f} s at the peak")
    inputs = 2 * tokens * config.hidden_size * config.num_hidden_layers
    inner = 2 * tokens * (6 * config.hidden_size + 4 * config.intermediate_size)
    logits = 3 * 4 * 2048 * config.vocab_size
    work = inputs + inner + logits
    lines.append(f"activations of {tokens} tokens with checkpointing: layers' inputs {inputs / 1e9:.1f} + inside one "
                 f"layer about {inner / 1e9:.1f} + fp32 logits of 2048 positions {logits / 1e9:.1f} = "
                 f"{work / 1e9:.0f} GB")
    lines.append("all weights: bf16 2 + reference 2 + gradients 2 + fp32 masters 4 + moments 8 = 18 bytes a weight, "
                 f"{18 * total / 1e9:.0f} GB, with activations {(18 * total + work) / 1e9:.0f} of 141 GB")
    linear = [module for module in model.base_model.modules() if isinstance(module, torch.nn.Linear)]
    adapters = sum(32 * (module.in_features + module.out_features) for module in linear)
    cache = 8 * 6000 * cache_bytes(model)
    lines.append(f"LoRA: frozen weights, their own reference {2 * total / 1e9:.1f} + {adapters / 1e6:.0f}e6 adapter "
                 f"weights (rank 32) * 16 bytes {16 * adapters / 1e9:.1f} + max(cache of 8 rollouts {cache / 1e9:.1f}, "
                 f"activations {work / 1e9:.0f}) = {(2 * total + 16 * adapters + max(cache, work)) / 1e9:.0f} of 40 GB")
    # the paper's run: 5 passes over 1,440 trajectories; 400 steps of 255 rollouts; two evaluations of 80 tasks under 3
    # tokens each. 40 % of the peak where all tokens are read, 60 % of the memory limit where they are written
    read = forward_flops(model, [6000], 600) / (0.4 * 989e12)
    write = 600 / (0.6 * 32 * 4.8e12 / decode_bytes(model, 32, 5600)) + read
    hours = [seconds / 3600 for seconds in (5 * 1440 * 4 * read, 400 * 255 * (write + 4 * read), 2 * 3 * 80 * write)]
    lines.append(f"the paper's run on one GPU, 6000 tokens an episode (600 sampled): stage 1 {hours[0]:.1f} h, RL "
                 f"{hours[1]:.0f} h, evaluation {hours[2]:.1f} h; on 8, if nothing is lost, {sum(hours) / 8:.1f} h")
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------------------
# measuring

def timed(function, device) -> tuple:
    """(seconds, peak GiB, result) of one call."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    high_water = Path("/proc/self/clear_refs")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif high_water.exists():
        high_water.write_text("5")
    wait()
    clock = time.perf_counter()
    result = function()
    wait()
    seconds, peak = time.perf_counter() - clock, math.nan
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device) / 2 ** 30
    elif high_water.exists():
        peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 2 ** 20
    return seconds, peak, result


def limits(device, dtype) -> tuple[float, float]:
    """(bytes a second of a large copy, read and written; FLOPs a second of a large matrix product in dtype)."""
    source = torch.ones(2 ** 30 if device.type == "cuda" else 2 ** 27, dtype=torch.uint8, device=device)
    target, n = torch.empty_like(source), 8192 if device.type == "cuda" else 1024
    a = torch.randn(n, n, device=device).to(dtype)
    best = lambda function: min(timed(function, device)[0] for _ in range(6))
    return 2 * source.numel() / best(lambda: target.copy_(source)), 2 * n ** 3 / best(lambda: a @ a)


class Report:
    """The result rows, the deadline of the section, and the three files."""

    def __init__(self, o: Options, device, dtype):
        self.o, self.rows, self.notes, self.deadline = o, [], [], math.inf
        self.bandwidth, self.flops = limits(device, dtype)
        names = ("torch", "transformers", "numpy", "trl")
        installed = {d.name: d.version for d in importlib.metadata.distributions() if d.name in names}
        cpu = f"CPU ({torch.get_num_threads()} threads)"
        where = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu
        self.machine = {"device": where, "dtype": str(dtype).removeprefix("torch."),
                        "copy": f"{self.bandwidth / 1e9:.0f} GB/s",
                        "matrix product": f"{self.flops / 1e12:.3g} TFLOP/s", "python": platform.python_version(),
                        **installed, "seed": o.seed,
                        "command": " ".join(["python", "lab/bench.py", *sys.argv[1:]])}

    def note(self, text: str):
        self.notes.append(text)
        print("  " + text, flush=True)

    def add(self, section: str, subject: Subject, setting: str, pairs: list, peer: str = "", **where):
        """One row per measure of `pairs`, a list of [ours, the peer's] dicts of measures, or of [ours] alone."""
        for measure in pairs[0][0]:
            numbers = [[side[measure] for side in pair if measure in side] for pair in pairs]
            numbers = [pair for pair in numbers if all(map(math.isfinite, pair))] or [[math.nan] * len(numbers[0])]
            ours, *theirs = zip(*numbers)
            row = {"section": section, "model": subject.name, "setting": setting, "measure": measure,
                   "ours": statistics.median(ours), "low": min(ours), "high": max(ours), **where}
            if theirs:
                row |= {"peer": statistics.median(theirs[0]), "peer is": peer}
                if measure.endswith("/s") or measure.startswith(("s ", "ms ")):          # more is better, or less is
                    ratios = [a / b if measure.endswith("/s") else b / a for a, b in numbers]
                    row |= {"ratio": statistics.median(ratios), "ratio low": min(ratios), "ratio high": max(ratios)}
            self.rows.append(row)
            print("  " + " | ".join(cells(row)), flush=True)

    def compare(self, section: str, subject: Subject, setting: str, sides: list, peer: str = "", **where):
        """Warm all sides up (functions of `warm`: a short run will do), then they take turns until time is up."""
        if time.time() > self.deadline:
            return self.note(f"{section}, {subject.name}, {setting}: left out, no time")
        try:
            for side in sides:
                side(warm=True)
            pairs = []
            while not pairs or len(pairs) < self.o.repeats and time.time() < self.deadline:
                pairs.append([side(warm=False) for side in sides])
            self.add(section, subject, setting, pairs, peer, **where)
        except torch.OutOfMemoryError:
            self.note(f"{section}, {subject.name}, {setting}: out of memory")

    def targets(self) -> list[list[str]]:
        """What was wanted of the rows that are there: target, measured, wanted, met."""
        found = []
        for model, section, setting, measure, column, wanted in TARGETS:
            for row in self.rows:
                same = (row["model"], row["section"], row["measure"]) == (model, section, measure)
                if same and row["setting"].startswith(setting) and column in row:
                    what = f"{model}, {section}, {row['setting']}: {measure}"
                    what += f", times {row['peer is']}" if column == "ratio" else ""
                    met = row[column] <= wanted if measure == PEAK else row[column] >= wanted
                    limit = f"{'at most' if measure == PEAK else 'at least'} {wanted:.3g}"
                    found.append([what, f"{row[column]:.3g}", limit, "yes" if met else "no"])
        return found

    def write(self):
        """bench.md, bench.json and bench.png, as far as it has come."""
        folder = Path(self.o.out)
        everything = {"machine": self.machine, "options": asdict(self.o), "notes": self.notes, "rows": self.rows}
        (folder / "bench.json").write_text(json.dumps(everything, indent=1), encoding="utf-8")
        head = ["section", "model", "setting", "measure", "ours", "peer", "times better"]
        (folder / "bench.md").write_text("\n".join([
            "# Speed", "", ", ".join(f"{key} {value}" for key, value in self.machine.items()) + ".", "",
            "What is compared, and how, stands at the top of bench.py. Medians; in brackets smallest and largest.", "",
            *markdown(head, map(cells, self.rows)), "",
            *markdown(["target", "measured", "wanted", "met"], self.targets()), "",
            *[f"- {note}" for note in self.notes], "", "![time of a decode step](bench.png)", ""]), encoding="utf-8")
        figure(self.rows, folder / "bench.png")


def cells(row: dict) -> list[str]:
    """A result row as the cells of its table."""
    spread = lambda low, high: f" [{low:.3g}, {high:.3g}]" if low != high else ""
    return [row["section"], row["model"], row["setting"], row["measure"],
            f"{row['ours']:.4g}{spread(row['low'], row['high'])}",
            f"{row['peer']:.4g} ({row['peer is']})" if "peer" in row else "",
            f"{row['ratio']:.3g}{spread(row['ratio low'], row['ratio high'])}" if "ratio" in row else ""]


def markdown(head: list[str], rows) -> list[str]:
    return ["| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *rows)]


def figure(rows: list[dict], path: Path):
    """How a decode step's time grows with rows, context and (of several models) weights; generate dashed."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    rows = [row for row in rows if row["measure"] == STEP]
    models = list(dict.fromkeys(row["model"] for row in rows))
    panels = [(x, [row for row in rows if row.get("axis") == x]) for x in ("rows", "context")]
    if len(models) > 1:
        panels.append(("weights", [row for row in rows if row["setting"] == SHORT]))
    fig, axes = plt.subplots(1, len(panels), figsize=(4.2 * len(panels), 4), layout="constrained")
    for axis, (x, points) in zip(axes, panels):
        for i, model in enumerate(models):
            for column, style, who in (("ours", "o-", "ours"), ("peer", "s--", "generate")):
                line = sorted((row[x], row[column]) for row in points
                              if (x == "weights" or row["model"] == model) and math.isfinite(row[column]))
                if line and (x != "weights" or i == 0):
                    axis.plot(*zip(*line), style, color="k" if x == "weights" else f"C{i}", markersize=3,
                              label=f"{model} {who}")
        fixed = {"rows": "context", "context": "rows"}.get(x)
        axis.set(xlabel=f"{x} ({fixed} {points[0][fixed]})" if fixed and points else x, ylabel=STEP, xscale="log",
                 yscale="log")
        axis.spines[["top", "right"]].set_visible(False)
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    fig.savefig(path, dpi=120)
    plt.close(fig)


# ---------------------------------------------------------------------------------------------------------------------
# rollouts

class Chat:
    """An episode without a task: `turns` user turns of the same words, whatever the policy says."""

    def __init__(self, turns: int = 1, words: str = ""):
        self.task, self.tools, self.calls, self.left = SimpleNamespace(id="chat"), [], [], turns
        self.messages = [{"role": "user", "content": words}]

    def step(self, calls):
        """What looks like a call is answered by the user."""
        self.messages.append(self.messages[0])

    def next_turn(self, said: str) -> str | None:
        self.left -= 1
        if self.left > 0:
            self.messages.append(self.messages[0])
        return self.messages[0]["content"] if self.left > 0 else None


def random_prompts(subject: Subject, n: int, length: int, seed: int) -> list[list[int]]:
    """n prompts of ordinary random ids."""
    ordinary = sorted(set(range(len(subject.tokenizer))) - set(subject.tokenizer.added_tokens_decoder))
    return np.random.default_rng(seed).choice(ordinary, (n, length)).tolist()


def task_prompts(subject: Subject, o: Options, conditioned: bool = True) -> tuple[list, list[list[int]]]:
    """The P tasks of a step and the prompts of their P * G rollouts: each with its own reward token, or all without."""
    tasks = load_tasks(o, "train", o.tasks, seed=o.seed)
    tokens = draw_tokens(len(tasks), o.group, 0.5, seed=o.seed) if conditioned else [[None] * o.group for _ in tasks]
    renderer, starts = Sampler(subject.model, subject.tokenizer).renderer, [task.episode() for task in tasks]
    return tasks, [renderer.prompt(start.messages, start.tools, token)
                   for start, row in zip(starts, tokens) for token in row]


def generation(sampler: Sampler, new: int, temperature: float) -> GenerationConfig:
    """The sampler's rules for `generate`: at most `new` tokens (without stop ids exactly), reward tokens banned, the
    full softmax."""
    drawn = dict(do_sample=True, temperature=temperature, top_k=0, top_p=1.0) if temperature else dict(do_sample=False)
    stop = dict(eos_token_id=sorted(sampler.stop_ids)) if sampler.stop_ids else dict(min_new_tokens=new)
    return GenerationConfig(max_new_tokens=new, pad_token_id=0, **stop, **drawn,
                            suppress_tokens=sampler.model.config.reward_token_ids)


@torch.no_grad()
def generate_loop(sampler: Sampler, episodes: list, prompts: list[list[int]], temperature: float = 1.0,
                  seed: int = 0) -> list[Trajectory]:
    """Sampler.rollout as people write it around `generate`: the whole history of every unfinished episode is fed again
    for each message. Model, rows, limits and stop ids are those of `sampler`. Log-probs are not kept."""
    model, device = sampler.model, sampler.model.device
    torch.manual_seed(seed)
    done = [Trajectory(episode, list(prompt), [False] * len(prompt), [])
            for episode, prompt in zip(episodes, prompts, strict=True)]
    for first in range(0, len(done), sampler.rows):
        live = done[first:first + sampler.rows]
        while live:
            width = max(len(t.ids) for t in live)
            room = [min(sampler.max_message, sampler.max_length - len(t.ids)) for t in live]
            ids = torch.tensor([[0] * (width - len(t.ids)) + t.ids for t in live], device=device)          # (B, width)
            seen = torch.tensor([[0] * (width - len(t.ids)) + [1] * len(t.ids) for t in live], device=device)
            rules = generation(sampler, max(room), temperature)
            new = model.generate(ids, attention_mask=seen, generation_config=rules)[:, width:].tolist()
            live = [t for t, tokens, n in zip(live, new, room) if _say(sampler, t, tokens[:n])]
    return done


def _say(sampler: Sampler, t: Trajectory, tokens: list[int]) -> bool:
    """Put one generated message and what answers it on the trajectory; False when the episode is over."""
    stop = next((i for i, token in enumerate(tokens) if token in sampler.stop_ids), None)
    said = tokens if stop is None else tokens[:stop + 1]
    t.ids += said
    t.mask += [True] * len(said)
    t.messages.append(sampler.renderer.text(tokens[:stop]))
    t.truncated = stop is None
    if t.truncated:
        return False
    before, calls = len(t.episode.messages), parse_calls(t.messages[-1])
    if calls:
        t.episode.step(calls)
    elif t.episode.next_turn(t.messages[-1]) is None:
        return False
    answer = sampler.renderer.answer([m for m in t.episode.messages[before:] if m["role"] != "assistant"])
    t.truncated = len(t.messages) >= sampler.max_messages or len(t.ids) + len(answer) >= sampler.max_length
    if t.truncated:
        return False
    t.ids += answer
    t.mask += [False] * len(answer)
    return True


def fixed_length(subject: Subject, rows: int):
    """A sampler without stop ids -> play(prompts, new): exactly `new` tokens for each prompt; play.sampler is it."""
    sampler = Sampler(subject.model, subject.tokenizer, rows)
    sampler.stop_ids = set()

    def play(prompts, new):
        sampler.max_message = new
        return sampler.rollout([Chat() for _ in prompts], prompts)
    play.sampler = sampler
    return play


def decode_step(subject: Subject, report: Report, section: str, rows: int, context: int, measures, **where):
    """Compare one decode step of `rows` rows at this mean context with generate's."""
    model, device, ours = subject.model, subject.model.device, fixed_length(subject, rows)
    many, few = (128, 16) if on_gpu(subject) else (64, 64)                               # generate is slow there
    limit = decode_bytes(model, rows, context) / report.bandwidth                        # seconds

    @torch.no_grad()
    def theirs(prompts, new):
        ids = torch.tensor(prompts, device=device)
        rules = generation(ours.sampler, new, 1.0)
        found = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=rules)
        assert found.shape[1] == ids.shape[1] + new, "generate stopped early"

    def side(play, steps):
        prompts = random_prompts(subject, 1, max(1, context - steps // 2), report.o.seed) * rows

        def measure(warm):
            if warm:
                return play(prompts, 2)
            long, peak, _ = timed(lambda: play(prompts, steps + 1), device)
            short, _, _ = timed(lambda: play(prompts, 1), device)
            step = (long - short) / steps if long > short else math.nan                  # lost in the noise
            found = {STEP: 1e3 * step, "tok/s": rows / step, LIMIT: 100 * limit / step, PEAK: peak}
            return {name: found[name] for name in measures}
        return measure
    report.compare(section, subject, f"{rows} rows, context {context}", [side(ours, many), side(theirs, few)],
                   "generate", rows=rows, context=context, weights=sum(weights(model)), **where)


def decode(subject: Subject, o: Options, report: Report):
    """A decode step next to generate's, and how near it is to the memory limit."""
    for rows, context in ((32, 1100), (32, 5600)) if on_gpu(subject) else ((o.rows, 200),):
        decode_step(subject, report, "decode", rows, context, (STEP, "tok/s", LIMIT, PEAK))


def growth(subject: Subject, o: Options, report: Report):
    """A decode step against rows and against context."""
    if on_gpu(subject):
        rows, contexts, at_rows, at_context = [1, 8, 32, 128, 256], [512, 1024, 2048, 4096, 8192], 32, 1024
    else:
        rows, contexts = [n for n in (1, 4, 16, 64, 256) if n <= o.rows], [64, 128, 256, 512, 960]
        at_rows, at_context = min(16, o.rows), 128
    thin = 2 if o.quick else 1
    for n in rows[::thin]:
        decode_step(subject, report, "growth", n, at_context, (STEP,), axis="rows")
    for context in contexts[::thin]:
        decode_step(subject, report, "growth", at_rows, context, (STEP,), axis="context")


def rollouts(subject: Subject, o: Options, report: Report):
    """Whole episodes over several turns, next to generate_loop."""
    n, sampler = o.tasks * o.group, Sampler(subject.model, subject.tokenizer, o.rows, 64, 16)
    if on_gpu(subject):
        sampler.max_message = 256
        sampler.stop_ids = set(range(0, subject.model.config.vocab_size, 64))   # random weights: one token in 64
        prompts, what = random_prompts(subject, n, 1024, o.seed), "episodes of 3 user turns, prompts of 1024 tokens"
        episodes = lambda: [Chat(3, "please go on " * 40) for _ in range(n)]
    else:
        tasks, prompts = task_prompts(subject, o)
        episodes, what = lambda: [task.episode() for task in tasks for _ in range(o.group)], "simulator episodes"

    def side(play):
        def measure(warm):
            seconds, peak, found = timed(lambda: play(episodes(), prompts, seed=o.seed), subject.model.device)
            tokens = sum(t.sampled for t in found)
            return {"episodes/s": n / seconds, "tok/s": tokens / seconds, "sampled tokens": tokens,
                    "messages": sum(len(t.messages) for t in found), PEAK: peak}
        return measure
    peer = functools.partial(generate_loop, sampler)
    report.compare("rollouts", subject, f"{n} {what}, {o.rows} rows", [side(sampler.rollout), side(peer)],
                   "generate turn by turn")


def prefix(subject: Subject, o: Options, report: Report):
    """The first token of 8 rollouts with one long prompt, every other one with another id in a reward token's place."""
    length = 5500 if on_gpu(subject) else min(960, subject.model.config.max_position_embeddings - 2)
    play = fixed_length(subject, 8)
    prompt, others = random_prompts(subject, 2, length, o.seed)
    shared = [prompt[:-6] + [others[i % 2]] + prompt[-5:] for i in range(8)]
    apart = [[others[2 + i]] + row[1:] for i, row in enumerate(shared)]

    def side(prompts):
        def measure(warm):
            seconds, peak, _ = timed(lambda: play(prompts, 1), subject.model.device)
            return {"s to the first token": seconds, PEAK: peak}
        return measure
    report.compare("prefix", subject, f"group of 8, {length} tokens", [side(shared), side(apart)], "nothing shared")


# ---------------------------------------------------------------------------------------------------------------------
# whole steps

def parity(ids: list[int]) -> float:
    """A reward that costs nothing and differs within a group: the share of odd ids."""
    return sum(token % 2 for token in ids) / len(ids)


def learner(subject: Subject, group: int, rows: int, **changes):
    """(step, options): step(prompts, new) is an RL step as grpo.train makes it, on prompts that come group by group,
    with exactly `new` tokens each -> (seconds of rollouts, of the update, peak GiB, trajectories). With LoRA the model
    keeps its adapters."""
    model, device, play = subject.model, subject.model.device, fixed_length(subject, rows)
    options = grpo.Options(beta=0.05, group=group, token_budget=16384 if on_gpu(subject) else 4096, **changes)
    options.prepare(model, options.seed)
    reference = reference_policy(model)
    optimizer = Optimizer(model, options.lr, betas=grpo.BETAS)

    def step(prompts, new):
        sampling, peak, found = timed(lambda: play(prompts, new), device)
        rewards = torch.tensor([parity(t.ids[-new:]) for t in found]).view(-1, group)
        advantages = grpo.group_advantages(rewards).view(-1)
        weights = grpo.loss_weights(torch.tensor([t.sampled for t in found]), options.norm)
        batch = (found, advantages, weights, options.lr, options)
        updating, other, _ = timed(lambda: grpo.update(model, reference, optimizer, *batch), device)
        return sampling, updating, max(peak, other), found
    return step, options


def trl(subject: Subject, o: Options, report: Report):
    """A whole step next to TRL's GRPOTrainer: its callback runs our step between two of its own. On a GPU 0.5B only."""
    if subject.name in SHAPES and subject.name != "0.5B":
        return
    try:
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer
    except ImportError as error:
        return report.note(f"trl: left out, {error} (pip install trl datasets accelerate)")
    n, device, dtype = o.tasks * o.group, subject.model.device, str(subject.model.dtype).removeprefix("torch.")
    prompts = task_prompts(subject, o, conditioned=False)[1]
    texts = [subject.tokenizer.decode(prompt, skip_special_tokens=False, clean_up_tokenization_spaces=False)
             for prompt in prompts[::o.group]]
    require([subject.tokenizer(text)["input_ids"] for text in texts] == prompts[::o.group],
            "trl: it would read other ids than ours in the prompts' text")
    tokens, pairs = [], []

    def reward(completion_ids, **_):
        tokens.append(sum(map(len, completion_ids)))
        return [parity(ids) for ids in completion_ids]

    class Turns(TrainerCallback):
        def on_step_begin(self, *_, **__):
            self.clock = time.perf_counter() + timed(lambda: None, device)[0]            # waits for the GPU

        def on_step_end(self, args, state, control, **_):
            timed(lambda: None, device)
            theirs = time.perf_counter() - self.clock
            ours, _, found = timed(lambda: step(prompts, o.new)[3], device)
            pairs.append([{"s per step": seconds, "tok/s": count / seconds, "sampled tokens": count}
                          for seconds, count in ((ours, sum(t.sampled for t in found)), (theirs, tokens[-1]))])
            control.should_training_stop = len(pairs) > 1 and time.time() > report.deadline

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save_policy(subject.model, subject.tokenizer, Path(folder) / "model")
        step, options = learner(subject, o.group, n)
        trainer = GRPOTrainer(
            model=str(Path(folder) / "model"), reward_funcs=reward, processing_class=copy.deepcopy(subject.tokenizer),
            train_dataset=Dataset.from_dict({"prompt": texts}), callbacks=[Turns()],
            args=GRPOConfig(
                output_dir=folder, max_steps=1 + o.repeats, per_device_train_batch_size=n, num_generations=o.group,
                max_completion_length=o.new, temperature=1.0, top_k=0, beta=options.beta, loss_type="grpo",
                generation_kwargs={"min_new_tokens": o.new, "suppress_tokens": subject.model.config.reward_token_ids},
                scale_rewards="group", learning_rate=options.lr, lr_scheduler_type="constant", seed=o.seed,
                gradient_checkpointing=False, use_cpu=device.type == "cpu", bf16=device.type == "cuda",
                model_init_kwargs={"dtype": dtype, "attn_implementation": "sdpa"}, report_to="none",
                logging_strategy="no", save_strategy="no", disable_tqdm=True))
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    report.add("trl", subject, f"{o.tasks} prompts x {o.group}, {o.new} new tokens each", pairs[1:], "TRL GRPOTrainer")


def step_side(subject: Subject, report: Report, group: int, prompts: list, new: int, **changes):
    """A side of compare(): a whole step on these prompts, and one where all rollouts have the first of them."""
    step, options = learner(subject, group, len(prompts), **changes)
    passes = (2 if changes else 3) + (options.beta > 0)
    flops = passes * forward_flops(subject.model, [len(prompt) + new for prompt in prompts], len(prompts) * new)

    def measure(warm):
        sampling, updating, peak, _ = step(prompts, new)
        sampling_one, updating_one, *_ = step(prompts[:1] * len(prompts), new)
        return {"s of rollouts": sampling, "s of the update": updating,
                MFU: 100 * flops / updating / report.flops, PEAK: peak,
                "s of rollouts, one prompt": sampling_one, "s of the update, one prompt": updating_one}
    return measure


def update(subject: Subject, o: Options, report: Report):
    """A whole RL step on random prompts: seconds of both halves, model-FLOP utilisation of the update, peak memory."""
    gpu, total = on_gpu(subject), sum(p.numel() for p in subject.model.parameters())
    n, length, new = (8, 6000, 60 if o.quick else 600) if gpu else (o.tasks * o.group, 192 + o.new, o.new)
    for name, changes in (("all weights", {}), ("LoRA", {"lora_rank": 32, "grad_checkpoint": True}))[:2 if gpu else 1]:
        if gpu and not changes and 20 * total > torch.cuda.get_device_properties(subject.model.device).total_memory:
            report.note(f"update, {subject.name}, {name}: left out, its 18 bytes a weight are "
                        f"{18 * total / 1e9:.0f} GB, activations come on top")
        else:
            prompts = random_prompts(subject, n, length - new, o.seed)
            report.compare("update", subject, f"{name}, {n} episodes of {length} tokens, {new} sampled",
                           [step_side(subject, report, n if gpu else o.group, prompts, new, **changes)])


SECTIONS = {section.__name__: section for section in (decode, rollouts, prefix, trl, growth,
                                                      update)}           # the last one, since it changes the model


# ---------------------------------------------------------------------------------------------------------------------

def subjects(o: Options, names: list[str], device):
    """The policies to measure, one at a time."""
    for name in names:
        if name in SHAPES:
            words = [text for task in load_tasks(o, "train", 50, 0) for text in task.turns] + [FRAME] * 2
            torch.manual_seed(o.seed)
            model, tokenizer = shape(name, device), builtin_policy(words, width=32, layers=1)[1]
            add_reward_tokens(model, tokenizer)
        else:
            model, tokenizer = load_policy(checkpoint_of(o.checkpoint), device)
        yield Subject(name, model, tokenizer)


def main(argv=None):
    given = read_flags(Options, argv)
    if given.get("plan"):
        return print(plan())
    require_package("matplotlib", "the figure")
    where = {key: given[key] for key in ("device", "threads") if key in given}
    device = make_options(TaskOptions, where, False).torch_device()
    gpu, source = device.type == "cuda", given.get("checkpoint", "runs/rctp")
    config = {} if gpu else config_of(checkpoint_of(source) and source)
    tasks = {key: value for key, value in config.get("tasks", {}).items() if key in TASK_KEYS}
    o = make_options(Options, {**tasks, **given}, not gpu)
    names = o.shapes.split(",") if gpu else ["built-in" if config.get("builtin") else o.checkpoint]
    chosen = [section for section in SECTIONS if section in o.sections.split(",")]
    try:
        Path(o.out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write the folder {o.out}: {error.strerror}")
    end = time.time() + 60 * o.minutes
    left = {(name, section): PATIENCE.get(name, 1) for name in names for section in chosen}
    report = Report(o, device, torch.bfloat16 if gpu else torch.float32)
    print(", ".join(f"{key} {value}" for key, value in report.machine.items()))
    for subject in subjects(o, names, device):
        for section in chosen:
            report.deadline = time.time() + (end - time.time()) * left[subject.name, section] / sum(left.values())
            del left[subject.name, section]
            print(f"{section}, {subject.name}", flush=True)
            SECTIONS[section](subject, o, report)
            report.write()
            gc.collect()                                 # trainers are cycles
            torch.cuda.empty_cache()
    print("\n".join(markdown(["target", "measured", "wanted", "met"], report.targets())))
    print(f"wrote {o.out}/ (bench.md, bench.json, bench.png)")


if __name__ == "__main__":
    program(main)
