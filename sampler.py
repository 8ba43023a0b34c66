"""Rollouts: a batched sampler whose key/value cache lives through all turns of an episode.

Rows of different lengths share one cache with one write position per row: no padding stands between a row's tokens,
every token has its own position id, and an explicit mask lets a query see exactly the keys of its own row up to its own
position (SDPA's is_causal would align to the top left, which is wrong once the cache holds something). Rows whose
episode has ended are refilled from the queue. Works with every transformers model that uses the standard cache
interface and full attention; whether a model does is measured: `verify` compares sampler and trainer with the model's
own forward pass.

What makes it fast:
- A prefix that a new prompt shares with a prompt in the cache is copied, not computed: a group's prompt up to the
  reward token is fed once, and so are system prompts and tool schemas that several tasks have in common
  (`Sampler._refill`).
- Grouped queries without repeated keys: the query heads of a group stand side by side as if they were tokens.
- One decoding step is one function of tensors whose shapes do not change (`Sampler._step`). On a GPU it is captured as
  a CUDA graph, once for each pair of rows and key span, and replayed: one launch, one copy in and one copy out for each
  step.

Sampling noise belongs to the episode, not to the batch: token n of episode i under seed s uses the n-th number of a
generator seeded with (s, i). So the number of rows, and which rows happen to run side by side, change nothing (but for
a tie in the last bit, about one token in 10,000).
"""
import copy
import inspect
import re
import sys
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from transformers import AttentionInterface, Cache

from model import batches_by_length, cache_argument, pad, policy_logits, token_logprobs
from run import UserError, no_memory, require
from tokens import Renderer, parse_calls

PREFILL_CHUNK = 2048       # tokens that one row feeds at one time
PREFILL_TOKENS = 8192 if torch.cuda.is_available() else 1024        # at one time, with padding, which a CPU minds
CACHE_STEP = 256           # the cache grows by this many positions, or a multiple; so does a CUDA graph's span
SHARE = 32                 # shorter common prefixes are computed again: a copy is one more forward pass to wait for


@dataclass
class Trajectory:
    """One episode as ids. ids, mask and logprobs have equal length; mask is True on the tokens that the policy
    sampled."""
    episode: object
    ids: list[int]
    mask: list[bool]
    logprobs: list[float]                                # of sampled tokens, at the temperature; 0 elsewhere
    messages: list[str] = field(default_factory=list)    # what the policy said, message by message
    truncated: bool = False                              # cut by a limit on tokens or messages: scored 0
    token: str | None = None                             # the reward token in its prompt; set with the two below by
    outcome: object = None                               # evaluate.sample: reward.Reward of the episode
    reward: float = 0.0                                  # what the episode earned

    @property
    def sampled(self) -> int:
        """Number of sampled tokens: what results and user turns added does not count."""
        return sum(self.mask)


class RaggedCache(Cache):
    """Keys and values of `rows` sequences, each with its own length. Layers: (rows, K, positions, D).

    The last position is a bin: padding of a ragged batch is written there and never read by a real token. What is
    captured from these tensors (CUDA graphs) lives in `graphs` and is gone when they are replaced.
    """

    def __init__(self, model, rows: int, limit: int):
        super().__init__(layers=[])
        config = model.config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.rows, self.limit, self.groups = rows, limit, config.num_attention_heads // heads
        self.keys = [torch.zeros((rows, heads, CACHE_STEP + 1, size), dtype=model.dtype, device=model.device)
                     for _ in range(config.num_hidden_layers)]
        self.values = [torch.zeros_like(key) for key in self.keys]
        self.graphs = {}

    @property
    def bin(self) -> int:
        return self.keys[0].shape[2] - 1

    def reserve(self, positions: int):
        """Make room for sequences of this many tokens; where graphs would be lost, for half as many again, up to the
        limit."""
        if positions > self.bin:
            wanted = max(positions, min(self.bin * 3 // 2, self.limit)) if self.graphs else positions
            more = -(-(wanted - self.bin) // CACHE_STEP) * CACHE_STEP
            self.graphs = {}
            for tensors in (self.keys, self.values):
                for i in range(len(tensors)):                            # one at a time: the old ones are free at once
                    tensors[i] = F.pad(tensors[i], (0, 0, 0, more))

    def copy(self, sources: list[int], targets: list[int], length: int):
        """Give each target row the first `length` positions of its source row, all at once: a source may be a target
        too."""
        sources, targets = torch.tensor([sources, targets], device=self.keys[0].device)
        for layer in (*self.keys, *self.values):
            layer[targets, :, :length] = layer[sources, :, :length]

    def aim(self, rows: torch.Tensor | None, positions: torch.Tensor, span: int):
        """Where the next forward pass writes: rows (R,), None for the first R; positions (R, Q). It reads positions
        0 .. span-1."""
        self.read = slice(len(positions)) if rows is None else rows      # a slice is a view, rows are gathered
        self.write = (torch.arange(len(positions), device=positions.device) if rows is None else rows)[:, None]
        self.positions, self.span = positions, span

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        """Write (R, K, Q, D) and return all keys and values of the rows aimed at, (R, K, span, D)."""
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        keys[self.write, :, self.positions] = key_states.transpose(1, 2)
        values[self.write, :, self.positions] = value_states.transpose(1, 2)
        return keys[self.read, :, :self.span], values[self.read, :, :self.span]

    def get_seq_length(self, layer_idx=0):
        return 0                                         # never asked for anything: positions and mask are explicit


def grouped_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """Attention for transformers: query (B, H, Q, D), key and value (B, K, S, D) -> (B, Q, H, D), None.

    No key is repeated for the H/K query heads that share it: they are reshaped into the query-length axis, and so is
    the mask that is added to the scores, (B, 1, H/K * Q, S).
    """
    if any(kwargs.get(name) is not None for name in ("softcap", "s_aux", "position_bias")):
        raise UserError("this model's attention is not supported: plain softmax attention only")
    heads, length, size = query.shape[1:]
    query = query.reshape(len(query), key.shape[1], -1, size)                                  # (B, K, H/K * Q, D)
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    return output.reshape(len(query), heads, length, -1).transpose(1, 2).contiguous(), None


AttentionInterface.register("grouped", grouped_attention)


@contextmanager
def rolling(model):
    """The model as a rollout needs it, eval mode and grouped attention, and afterwards as it was."""
    training, attention = model.training, model.config._attn_implementation
    model.eval()
    model.config._attn_implementation = "grouped"
    try:
        yield
    finally:
        model.config._attn_implementation = attention
        model.train(training)


def truncate_distribution(logits: torch.Tensor, top_p: float, top_k: int) -> torch.Tensor:
    """(N, V) logits -> the same with everything outside the top k and the nucleus of mass p at -inf."""
    if top_k:
        logits = logits.masked_fill(logits < logits.topk(min(top_k, logits.shape[-1])).values[:, -1:], float("-inf"))
    if top_p < 1:
        ordered, order = logits.sort(descending=True)
        probs = ordered.softmax(-1)
        outside = (probs.cumsum(-1) - probs) >= top_p                    # mass before the token already reaches p
        logits = logits.masked_fill(torch.zeros_like(outside).scatter(-1, order, outside), float("-inf"))
    return logits


@dataclass
class _Row(Trajectory):
    index: int = 0
    noise: np.random.Generator = None
    cached: int = 0                                      # tokens of ids that are in the cache
    said: int = 0                                        # sampled tokens of the message in progress
    source: tuple[int, int] | None = None                # (slot, n): waits until this slot has n tokens to copy

    def feed(self) -> int:
        return len(self.ids) - self.cached               # 1: decoding; more: results or a prompt wait for their prefill


class Sampler:
    """Rolls out episodes with a policy.

    rows: episodes side by side; max_message: tokens of one assistant message; max_messages: assistant messages of one
    episode; max_length: tokens of one episode (default: the model's context). An episode cut by a limit is flagged.
    Raises UserError for a model that cannot be served: its attention, its tokenizer or its chat template.
    """

    def __init__(self, model, tokenizer, rows: int = 256, max_message: int = 256, max_messages: int = 32,
                 max_length: int | None = None):
        try:
            self.model, self.tokenizer, self.renderer = model, tokenizer, Renderer(tokenizer)
        except ValueError as error:
            raise UserError(f"{tokenizer.name_or_path}: {error}")
        self.rows, self.max_message, self.max_messages = rows, max_message, max_messages
        context = getattr(model.config, "max_position_embeddings", None)
        name = type(model).__name__
        require(context and context > 0, f"{name} is not supported: its config names no max_position_embeddings")
        self.max_length = min(max_length or context, context)
        eos = model.generation_config.eos_token_id if model.generation_config is not None else None
        eos = eos if isinstance(eos, list) else [eos]
        self.graphs = model.device.type == "cuda"        # decode with CUDA graphs; False after a capture has failed
        self._side = torch.cuda.Stream(model.device) if self.graphs else None          # where they are captured
        self.fed = self.copied = 0                       # of the last rollout: tokens read, keys copied instead
        self.cache = self._weights = None                # both outlive a rollout
        self.stop_ids = self.renderer.stop_ids | {token for token in eos if token is not None}
        if getattr(model.config, "rollouts_verified", None) != transformers.__version__:
            verify(self)
            model.config.rollouts_verified = transformers.__version__    # saved with the checkpoint

    def check_prompt(self, episode, prompt: list[int]):
        """Raises UserError for a prompt that leaves no room in the context."""
        if len(prompt) >= self.max_length:
            raise UserError(f"the prompt of task {episode.task.id} has {len(prompt)} tokens and the limit is "
                            f"{self.max_length}; choose a model with a longer context or shorter prompts "
                            "(sft.py --schemas compact)")

    def rollout(self, episodes: list, prompts: list[list[int]], temperature: float = 1.0, top_p: float = 1.0,
                top_k: int = 0, seed=0, progress=None, guidance: float = 0.0) -> list[Trajectory]:
        """Play every episode to its end, prompts[i] being the opening of episodes[i]; trajectories in the same order.

        temperature 0 is greedy. top_p and top_k are for evaluation: the recorded log-probs are those of the full
        softmax. seed: int or tuple of ints; progress: called when an episode has ended. Raises UserError for a prompt
        that leaves no room in the context.
        guidance w > 0: every episode comes twice, under two prompts of one length; both say what is drawn from
        (1 + w) log pi(. | first) - w log pi(. | second), normalised.
        """
        for episode, prompt in zip(episodes, prompts, strict=True):
            self.check_prompt(episode, prompt)
        self._temperature, self._top_p, self._top_k, self._progress = temperature, top_p, top_k, progress
        self._guidance = guidance
        self.fed, self.copied, self._answers = 0, 0, {}
        seed = seed if isinstance(seed, (tuple, list)) else (seed,)
        queue = deque(_Row(episode, list(prompt), [False] * len(prompt), [0.0] * len(prompt), index=i,
                           noise=np.random.default_rng([*seed, i]))
                      for i, (episode, prompt) in enumerate(zip(episodes, prompts)))
        done: list[Trajectory | None] = [None] * len(queue)
        pairs = 2 if guidance else 1                     # slots 2k and 2k + 1 hold a pair, and always the same message
        slots: list[_Row | None] = [None] * min(max(1, self.rows // pairs) * pairs, len(queue))
        longest = max(map(len, prompts), default=0)
        self._openings = np.full((len(slots), longest), -1, dtype=np.int32)       # prompts in the cache, less a token
        if slots:
            self._make_room(len(slots), longest + self.max_message)
        with torch.no_grad(), rolling(self.model):
            while queue or any(slots):
                if queue:
                    self._refill(slots, queue)
                else:
                    self._shrink(slots)
                self._prefill(slots, done)
                while active := [s for s, row in enumerate(slots) if row is not None and row.feed() == 1]:
                    self._decode(slots, active, done)
                    waiting = sum(row.feed() > 1 if row is not None else bool(queue) for row in slots)
                    if waiting >= max(1, sum(row is not None for row in slots) // 4):
                        break                            # enough rows wait for their results: feed them together
        return done

    def _make_room(self, rows, positions):
        """A cache for this rollout: that of the last one, with its graphs, while the model has its weights in the same
        places (updates in place need no new graph; a switch inside the model that changes what it computes does: make a
        new Sampler)."""
        weights = [self.model, *(weight.data_ptr() for weight in self.model.parameters())]
        if self.cache is None or self.cache.rows < rows or self._weights != weights:
            self.cache = None                            # the old one is free before the new one is made
            self.cache, self._weights = RaggedCache(self.model, rows, self.max_length), weights
        self.cache.reserve(min(positions, self.max_length))

    def _refill(self, slots, queue):
        """New episodes for idle slots. Each may copy the longest prefix (but for its last token) that its prompt shares
        with a prompt in the cache, at once, or with a new one before it, when that one has been fed."""
        fresh = [s for s, row in enumerate(slots) if row is None][:len(queue)]
        owners = [*range(len(slots)), *fresh]            # of the prompts in `known`: in the cache, then new ones
        known = np.concatenate([self._openings, np.full((len(fresh), self._openings.shape[1]), -1, np.int32)])
        at_once = []
        for k, s in enumerate(fresh, len(slots)):
            slots[s] = row = queue.popleft()
            known[k, :len(row.ids) - 1] = row.ids[:-1]
            if len(row.ids) > SHARE:
                equal = known[:k, :len(row.ids) - 1] == known[k, :len(row.ids) - 1]            # (k, T-1)
                common = np.where(equal.all(1), len(row.ids) - 1, equal.argmin(1))             # (k,)
                best = int(common.argmax())
                if common[best] >= SHARE:
                    row.source = owners[best], int(common[best])
                    at_once += [s] if best < len(slots) else []
        self._openings[fresh] = known[len(slots):]
        self._copy(slots, at_once)

    def _copy(self, slots, chosen):
        """Give these rows the keys of their sources, all in one go: a row may take what another one is about to
        overwrite."""
        if chosen:
            sources, lengths = zip(*(slots[s].source for s in chosen))
            self.cache.copy(sources, chosen, max(lengths))
            self.copied += sum(lengths)
            for s, n in zip(chosen, lengths):
                slots[s].cached, slots[s].source = n, None

    def _shrink(self, slots):
        """The queue is empty: drop idle slots, moving rows from the end into gaps. By halves only where every number of
        rows is a graph of its own; an idle row costs little there."""
        live = [s for s, row in enumerate(slots) if row is not None]
        size = len(slots)
        if self.graphs:
            while len(live) <= size // 2 and not (self._guidance and size % 4):
                size //= 2
        elif len(live) <= 7 * size // 8:
            size = len(live)
        moved = [s for s in live if s >= size]
        if moved:
            gaps = [s for s in range(size) if slots[s] is None][:len(moved)]
            self.cache.copy(moved, gaps, max(slots[s].cached for s in moved))
            for gap, s in zip(gaps, moved):
                slots[gap] = slots[s]
        del slots[size:]

    def _span(self, positions):
        """The number of keys to look at, room made: a few sizes only where each is a graph, and no key too many
        elsewhere."""
        span = -(-positions // CACHE_STEP) * CACHE_STEP if self.graphs else positions
        self.cache.reserve(span)
        return span

    def _forward(self, rows, ids, positions, span):
        """Feed ids (R, Q) at positions (R, Q) of the cache's rows, None for the first R; hidden states (R, Q, d)."""
        self.cache.aim(rows, positions, span)
        unseen = torch.arange(span, device=ids.device) > positions[:, None, :, None]           # (R, 1, Q, span)
        mask = torch.zeros(unseen.shape, dtype=self.model.dtype, device=ids.device).masked_fill(unseen, float("-inf"))
        mask = mask.repeat(1, 1, self.cache.groups, 1)                                         # (R, 1, H/K * Q, span)
        return self.model.base_model(
            input_ids=ids, position_ids=positions.clamp(max=span - 1), attention_mask=mask, use_cache=True,
            **{cache_argument(self.model): self.cache}).last_hidden_state

    def _prefill(self, slots, done):
        """Feed prompts and results in chunks until no row waits, for itself or for its source; sample where all is
        fed."""
        while True:
            pending = [s for s, row in enumerate(slots) if row is not None and row.source]
            ready = [s for s in pending for source, n in [slots[s].source]
                     if slots[source] is None or slots[source].cached >= n]
            self._copy(slots, ready)
            waiting = [s for s, row in enumerate(slots) if row is not None and not row.source and row.feed() > 1]
            if not waiting and not ready:
                return
            for batch in batches_by_length([min(slots[s].feed(), PREFILL_CHUNK) for s in waiting], PREFILL_TOKENS):
                self._feed(slots, sorted(waiting[i] for i in batch), done)

    def _feed(self, slots, chosen, done):
        """Feed one chunk to each of these rows."""
        device = self.model.device
        sizes = [min(slots[s].feed() - bool(self._guidance), PREFILL_CHUNK) for s in chosen]    # a pair draws together
        starts = [slots[s].cached for s in chosen]
        span = self._span(max(map(sum, zip(starts, sizes))))
        ids = pad([slots[s].ids[a:a + n] for s, a, n in zip(chosen, starts, sizes)], 0, device)                # (R, Q)
        positions = pad([range(a, a + n) for a, n in zip(starts, sizes)], self.cache.bin, device)              # (R, Q)
        hidden = self._forward(torch.tensor(chosen, device=device), ids, positions, span)
        self.fed += sum(sizes)
        for s, n in zip(chosen, sizes):
            slots[s].cached += n
        ready = [i for i, s in enumerate(chosen) if slots[s].feed() == 0]
        if ready:
            ends = torch.tensor([sizes[i] - 1 for i in ready], device=device)
            last = hidden[torch.tensor(ready, device=device), ends]                            # (N, d)
            noise = torch.tensor([slots[chosen[i]].noise.random() for i in ready], dtype=torch.float32, device=device)
            self._append(slots, {chosen[i]: line for i, line in zip(ready, self._draw(last, noise).tolist())}, done)

    def _decode(self, slots, active, done):
        """Feed the last token of every active row and sample the next one."""
        span = self._span(max(slots[s].cached for s in active) + 1)
        inputs = np.zeros((len(slots), 3), dtype=np.float32)                                   # ids exact up to 2^24
        inputs[:, 1] = self.cache.bin                                                          # idle rows write there
        inputs[active] = [(slots[s].ids[-1], slots[s].cached, slots[s].noise.random()) for s in active]
        for s in active:
            slots[s].cached += 1
        self.fed += len(active)
        step = self._replay if self.graphs else self._step
        output = step(torch.from_numpy(inputs), span).tolist()                                 # waits for the device
        self._append(slots, {s: output[s] for s in active}, done)

    def _step(self, inputs, span):
        """One decoding step of the first R rows: inputs (R, 3) fp32, last token, its position and noise -> (R, 2) fp32,
        next token and its log-prob. Nothing here waits for the device or depends on a value, so that it can be
        captured."""
        inputs = inputs.to(self.model.device)
        ids, positions, noise = inputs[:, :1].long(), inputs[:, 1:2].long(), inputs[:, 2]
        return self._draw(self._forward(None, ids, positions, span)[:, 0], noise)

    def _replay(self, inputs, span):
        """_step as a CUDA graph, captured when this size is met for the first time. The graphs of a cache share one
        memory pool: the output of a replay is to be read before the next one."""
        key = len(inputs), span, self._temperature, self._top_p, self._top_k, self._guidance
        graphs = self.cache.graphs
        try:
            if key not in graphs:
                pool = next(iter(graphs.values()))[0].pool() if graphs else None
                graphs[key] = self._capture(inputs.to(self.model.device), span, pool)
        except RuntimeError as error:                    # say so and go on without
            print(f"no CUDA graphs, decoding is slower: {str(error).splitlines()[0]}", file=sys.stderr)
            self.graphs, self.cache.graphs = False, {}
            return self._step(inputs, span)
        graph, static, output = graphs[key]
        static.copy_(inputs)
        graph.replay()
        return output

    def _capture(self, static, span, pool):
        """Returns (graph, static, output): a replay reads its inputs from `static` and writes to `output`."""
        with torch.cuda.device(static.device):
            graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
            self._side.wait_stream(current)
            with torch.cuda.stream(self._side):          # also sets the stream back when the capture fails
                self._step(static, span)                 # first a normal run, which loads kernels
                with torch.cuda.graph(graph, pool=pool, stream=self._side):
                    output = self._step(static, span)
            current.wait_stream(self._side)
        return graph, static, output

    def _draw(self, hidden, noise):
        """Hidden states (R, d), noise (R,) in [0, 1) -> (R, 2): the next token, and its log-prob in the full
        softmax."""
        logits = policy_logits(self.model, hidden, self._temperature or 1.0)                   # (R, V) fp32
        logp = F.log_softmax(logits, dim=-1)
        if self._guidance:
            first, second = logp[::2], logp[1::2]
            guided = torch.where(first > float("-inf"), first + self._guidance * (first - second), first)
            logits = guided.repeat_interleave(2, 0)
            logp, noise = F.log_softmax(logits, dim=-1), noise[::2].repeat_interleave(2)
        likeliest = logp.argmax(-1, keepdim=True)                                              # (R, 1)
        if self._temperature == 0:
            tokens = likeliest
        else:
            whole = self._top_p >= 1 and not self._top_k
            probs = logp.exp() if whole else truncate_distribution(logits, self._top_p, self._top_k).softmax(-1)
            cdf = probs.cumsum(-1)
            tokens = torch.searchsorted(cdf, noise[:, None] * cdf[:, -1:], right=True)         # first past the noise
            tokens = tokens.clamp(max=cdf.shape[-1] - 1)
            tokens = torch.where(logp.gather(-1, tokens) > float("-inf"), tokens, likeliest)   # never what is banned
        return torch.cat([tokens.float(), logp.gather(-1, tokens)], dim=-1)

    def _append(self, slots, drawn, done):
        """Give the tokens, {slot: (token, log-prob)}, to their rows and let finished messages act."""
        for s, (token, value) in drawn.items():
            row, token = slots[s], int(token)
            row.ids.append(token)
            row.mask.append(True)
            row.logprobs.append(value)
            row.said += 1
            if token in self.stop_ids:
                over = self._act(row)
            else:
                row.truncated = over = row.said >= self.max_message or len(row.ids) >= self.max_length
                if over:
                    row.messages.append(self.renderer.text(row.ids[-row.said:]))
            if over:
                done[row.index], slots[s] = row, None
                if self._progress:
                    self._progress()

    def _act(self, row: _Row) -> bool:
        """A message is complete: run its calls, or end the turn if it has none. True when the episode is over."""
        text = self.renderer.text(row.ids[-row.said:-1])
        row.messages.append(text)
        row.said = 0
        before = len(row.episode.messages)
        calls = parse_calls(text)
        if calls:
            row.episode.step(calls)
        else:
            row.episode.next_turn(text)
        if row.episode.done:
            return True
        said = [m for m in row.episode.messages[before:] if m["role"] != "assistant"]
        key = repr(said)                                 # a group's rollouts get the same answers again and again
        answer = self._answers[key] = self._answers.get(key) or self.renderer.answer(said)
        if len(row.messages) >= self.max_messages or len(row.ids) + len(answer) >= self.max_length:
            row.truncated = True
            return True
        row.ids += answer
        row.mask += [False] * len(answer)
        row.logprobs += [0.0] * len(answer)
        return False


# ---------------------------------------------------------------------------------------------------------------------
# is what is sampled and trained the model itself?

ROUNDING = {torch.float32: 1e-4, torch.float64: 1e-4}  # mean nats a token between two orders of the same sums, at most
ROUNDING_16_BIT = 0.1


def switches(config) -> list[int]:
    """Lengths from which on a model computes something else, as its config names them: windows, chunks, ropes."""
    found, left = [], [config.to_dict()]
    while left:
        for key, value in left.pop().items():
            if isinstance(value, dict):
                left.append(value)
            elif type(value) is int and re.search("window|chunk|original_max_position", key):
                found.append(value)
    return found


class _Talk:
    """An episode that answers whatever is said, for the probe."""

    def __init__(self):
        self.messages, self.task, self.done = [], SimpleNamespace(id="probe"), False

    def step(self, calls):
        self.messages += [{"role": "tool", "name": "f", "content": "ok"} for _ in calls]

    def next_turn(self, said):
        self.messages.append({"role": "user", "content": "ok"})
        return self.messages[-1]


def own_logprobs(model, row: Trajectory) -> torch.Tensor:
    """Log-probs (N,) of a row's sampled tokens by the model's own forward pass on that row alone."""
    ids = torch.tensor(row.ids, device=model.device)                                                         # (T,)
    place = torch.tensor(row.mask, device=model.device).nonzero()[:, 0]                                      # (N,)
    keep = {"logits_to_keep": place - 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    logits = model(input_ids=ids[None], use_cache=False, **keep).logits[0]
    logits = (logits if keep else logits[place - 1]).float()                                                 # (N, V)
    logits[:, model.config.reward_token_ids] = float("-inf")
    return logits.log_softmax(-1).gather(-1, ids[place, None])[:, 0]


@torch.no_grad()
def verify(sampler: Sampler):
    """UserError unless sampler and trainer give the log-probs of the model's own forward pass, but for rounding.

    Both compute the model in parts: body, cache, mask and head are put together here and in model.py. The probe plays a
    few prompts of mixed lengths side by side, one longer than every window or change of rope that the config names,
    over several short messages and answers. Its rows are then scored by the trainer, with and without a shared prompt,
    and by the model, each row alone.
    """
    model, name, probe = sampler.model, type(sampler.model).__name__, copy.copy(sampler)
    probe.rows, probe.max_message, probe.max_messages = 3, 5, 3
    probe.stop_ids = range(0, len(sampler.tokenizer), 2)                 # about every second token ends a message
    room, text = sampler.max_length - 16, sampler.renderer.encode(__doc__)
    shared = min(room, max([50, *(5 * n // 4 for n in switches(model.config) if n < room)]))
    text *= 1 + (shared + 16) // len(text)
    prompts = [text[:shared] + text[k:k + 5] for k in (1, 2)] + [text[:20], text[7:10]]
    try:
        rows = probe.rollout([_Talk() for _ in prompts], prompts)
        ids = pad([row.ids for row in rows], 0, model.device)                                                # (B, T)
        mask = pad([row.mask for row in rows], False, model.device)                                          # (B, T)
        sampled = pad([row.logprobs for row in rows], 0.0, model.device)                                     # (B, T)
        own = torch.zeros_like(sampled).masked_scatter(mask, torch.cat([own_logprobs(model, row) for row in rows]))
        parts = {"the trainer": token_logprobs(model, ids, mask), "the sampler": sampled,
                 "the trainer with a shared prompt": token_logprobs(model, ids[:2], mask[:2], shared=shared)}
    except Exception as error:                                           # a cache, a mask or positions of another kind
        if isinstance(error, UserError) or no_memory(error):
            raise
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:120]
        raise UserError(f"{name} is not supported: it does not take our cache, mask and positions ({reason})")
    for part, values in parts.items():
        gap = float((values - own[:len(values)]).abs().sum() / mask[:len(values)].sum())
        if not gap <= ROUNDING.get(model.dtype, ROUNDING_16_BIT):
            likely = "a scale or cap on its logits" if part == "the trainer" else "windows, a rope that switches"
            raise UserError(f"{name} is not supported: {part} differs from its own forward pass by {gap:.2g} nats a "
                            f"token (often {likely}); choose another model")
