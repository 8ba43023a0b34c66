"""Rollouts: a batched sampler whose key/value cache lives through all turns of an episode.

Rows of different lengths share one cache with one write position per row: no padding stands between a row's tokens, every
token has its own position id, and an explicit mask lets a query see exactly the keys of its own row up to its own position
(SDPA's is_causal would align to the top left, which is wrong once the cache holds something). Rows whose episode has ended
are refilled from the queue. Works with every transformers model that uses the standard cache interface and full attention.

Sampling noise belongs to the episode, not to the batch: token n of episode i under seed s uses the n-th number of a
generator seeded with (s, i). So the number of rows, and which rows happen to run side by side, change nothing (but for a
tie in the last bit, about one token in 10,000).
"""
import inspect
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from transformers import Cache

from model import batches_by_length, pad, policy_logits
from run import UserError
from tokens import Renderer, parse_calls

PREFILL_CHUNK = 2048       # tokens that one row feeds at one time
PREFILL_TOKENS = 16384     # tokens, padding included, that one prefill feeds at one time
CACHE_STEP = 256           # the cache grows by this many positions


@dataclass
class Trajectory:
    """One episode as ids. ids, mask and logprobs have equal length; mask is True on the tokens that the policy sampled."""
    episode: object
    ids: list[int]
    mask: list[bool]
    logprobs: list[float]                                # of the sampled tokens, at the sampling temperature; 0 elsewhere
    messages: list[str] = field(default_factory=list)    # what the policy said, message by message
    truncated: bool = False                              # cut by a limit on tokens or messages: scored 0

    @property
    def sampled(self) -> int:
        """Number of sampled tokens: what results and user turns added does not count."""
        return sum(self.mask)


class RaggedCache(Cache):
    """Keys and values of `rows` sequences, each with its own length. Layers: (rows, K, positions, D).

    The last position is a bin: padding of a ragged batch is written there and never read by a real token.
    """

    def __init__(self, model, rows: int):
        super().__init__(layers=[])
        config = model.config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.shape = (rows, heads, CACHE_STEP, size)
        self.keys = [torch.zeros(self.shape, dtype=model.dtype, device=model.device) for _ in range(config.num_hidden_layers)]
        self.values = [torch.zeros_like(key) for key in self.keys]

    def reserve(self, positions: int):
        """Make room for sequences of this many tokens (and the bin)."""
        have = self.keys[0].shape[2]
        if positions + 1 > have:
            more = -(-(positions + 1 - have) // CACHE_STEP) * CACHE_STEP
            self.keys = [F.pad(key, (0, 0, 0, more)) for key in self.keys]
            self.values = [F.pad(value, (0, 0, 0, more)) for value in self.values]

    def keep(self, rows: list[int]):
        """Drop all rows but these."""
        self.keys = [key[rows] for key in self.keys]
        self.values = [value[rows] for value in self.values]

    def aim(self, rows: torch.Tensor, positions: torch.Tensor, span: int):
        """Where the next forward pass writes: rows (R,), positions (R, Q); it reads positions 0 .. span-1."""
        self.rows, self.positions, self.span = rows, positions, span
        self.everything = len(rows) == self.keys[0].shape[0]             # rows are then 0, 1, 2, ...: no gather needed

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        """Write (R, K, Q, D) and return all keys and values of the rows aimed at, (R, K, span, D)."""
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        keys[self.rows[:, None], :, self.positions] = key_states.transpose(1, 2)
        values[self.rows[:, None], :, self.positions] = value_states.transpose(1, 2)
        if self.everything:
            return keys[:, :, :self.span], values[:, :, :self.span]
        return keys[self.rows, :, :self.span], values[self.rows, :, :self.span]

    def get_seq_length(self, layer_idx=0):
        return 0                                         # never asked for anything: positions and mask are explicit


def truncate_distribution(logits: torch.Tensor, top_p: float, top_k: int) -> torch.Tensor:
    """(N, V) logits -> the same with everything outside the top k and the nucleus of mass p at -inf."""
    if top_k:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], float("-inf"))
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

    def feed(self) -> int:
        return len(self.ids) - self.cached               # 1: decoding; more: results or a prompt wait for their prefill


class Sampler:
    """Rolls out episodes with a policy.

    rows: episodes side by side; max_message: tokens of one assistant message; max_messages: assistant messages of one
    episode; max_length: tokens of one episode (default: the model's context). An episode cut by a limit is flagged.
    """

    def __init__(self, model, tokenizer, rows: int = 256, max_message: int = 256, max_messages: int = 32,
                 max_length: int | None = None):
        kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"}:
            raise UserError(f"this model's attention ({', '.join(sorted(kinds))}) is not supported: full attention only")
        self.model, self.tokenizer, self.renderer = model, tokenizer, Renderer(tokenizer)
        self.rows, self.max_message, self.max_messages = rows, max_message, max_messages
        context = model.config.max_position_embeddings
        self.max_length = min(max_length or context, context)
        eos = model.generation_config.eos_token_id if model.generation_config is not None else None
        eos = eos if isinstance(eos, list) else [eos]
        self.stop_ids = self.renderer.stop_ids | {token for token in eos if token is not None}
        names = inspect.signature(type(model.base_model).forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"          # renamed in transformers 5.2x

    def check_prompt(self, episode, prompt: list[int]):
        """Raises UserError for a prompt that leaves no room in the context."""
        if len(prompt) >= self.max_length:
            raise UserError(f"the prompt of task {episode.task.id} has {len(prompt)} tokens and the limit is {self.max_length}; "
                            "choose a model with a longer context or shorter prompts (sft.py --schemas compact)")

    @torch.no_grad()
    def rollout(self, episodes: list, prompts: list[list[int]], temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0,
                seed=0, progress=None) -> list[Trajectory]:
        """Play every episode to its end, prompts[i] being the opening of episodes[i]; trajectories in the same order.

        temperature 0 is greedy. top_p and top_k are for evaluation: the recorded log-probs are those of the full softmax.
        seed: int or tuple of ints; progress: called when an episode has ended.
        Raises UserError for a prompt that leaves no room in the context.
        """
        for episode, prompt in zip(episodes, prompts, strict=True):
            self.check_prompt(episode, prompt)
        training = self.model.training
        self.model.eval()
        self._temperature, self._top_p, self._top_k, self._progress = temperature, top_p, top_k, progress
        seed = seed if isinstance(seed, (tuple, list)) else (seed,)
        queue = deque(_Row(episode, list(prompt), [False] * len(prompt), [0.0] * len(prompt), index=i,
                           noise=np.random.default_rng([*seed, i]))
                      for i, (episode, prompt) in enumerate(zip(episodes, prompts)))
        done: list[Trajectory | None] = [None] * len(queue)
        slots: list[_Row | None] = [None] * min(self.rows, len(queue))
        self.cache = RaggedCache(self.model, len(slots)) if slots else None
        while True:
            for s, row in enumerate(slots):
                if row is None and queue:
                    slots[s] = queue.popleft()
            live = [s for s, row in enumerate(slots) if row is not None]
            if not live:
                break
            if len(live) <= len(slots) // 2:             # the queue is empty and half the rows are idle: drop them
                self.cache.keep(live)
                slots, live = [slots[s] for s in live], list(range(len(live)))
            self._prefill(slots, [s for s in live if slots[s].feed() > 1], done)
            while True:
                active = [s for s in live if slots[s] is not None and slots[s].feed() == 1]
                if not active:
                    break
                self._decode(slots, active, done)
                waiting = sum(slots[s].feed() > 1 if slots[s] is not None else bool(queue) for s in live)
                if waiting >= max(1, len(live) // 4):    # enough rows wait for their results: feed them together
                    break
        self.model.train(training)
        self.cache = None
        return done

    def _forward(self, rows, ids, positions, span):
        """Feed ids (R, Q) at positions (R, Q) of the cache's rows; hidden states (R, Q, d)."""
        self.cache.reserve(span)
        bin_ = self.cache.keys[0].shape[2] - 1
        positions = torch.where(positions < 0, bin_, positions)          # padding goes to the bin
        self.cache.aim(rows, positions, span)
        keys = torch.arange(span, device=ids.device)
        mask = keys[None, None, None, :] <= positions[:, None, :, None]  # (R, 1, Q, span); padding sees everything: no NaN
        return self.model.base_model(
            input_ids=ids, position_ids=positions.clamp(max=span - 1), attention_mask=mask, use_cache=True,
            **{self._cache_name: self.cache}).last_hidden_state

    def _prefill(self, slots, waiting, done):
        """Feed prompts and results to the rows that wait for it, up to a chunk each; sample where all is fed."""
        device = self.model.device
        feeds = [min(slots[s].feed(), PREFILL_CHUNK) for s in waiting]
        for batch in batches_by_length(feeds, PREFILL_TOKENS):
            chosen = sorted(waiting[i] for i in batch)
            sizes = [min(slots[s].feed(), PREFILL_CHUNK) for s in chosen]
            starts = [slots[s].cached for s in chosen]
            ids = pad([slots[s].ids[a:a + n] for s, a, n in zip(chosen, starts, sizes)], 0, device)            # (R, Q)
            positions = pad([range(a, a + n) for a, n in zip(starts, sizes)], -1, device)                      # (R, Q)
            hidden = self._forward(torch.tensor(chosen, device=device), ids, positions, max(map(sum, zip(starts, sizes))))
            for s, n in zip(chosen, sizes):
                slots[s].cached += n
            ready = [i for i, s in enumerate(chosen) if slots[s].feed() == 0]
            last = torch.tensor([sizes[i] - 1 for i in ready], device=device, dtype=torch.long)
            self._sample(slots, [chosen[i] for i in ready], hidden[torch.tensor(ready, device=device, dtype=torch.long), last], done)

    def _decode(self, slots, active, done):
        """Feed the last sampled token of every active row and sample the next one."""
        device = self.model.device
        ids, positions = [[0]] * len(slots), [[-1]] * len(slots)         # idle rows write into the bin
        for s in active:
            ids[s], positions[s] = [slots[s].ids[-1]], [slots[s].cached]
            slots[s].cached += 1
        hidden = self._forward(torch.arange(len(slots), device=device), torch.tensor(ids, device=device),
                               torch.tensor(positions, device=device), max(slots[s].cached for s in active))
        self._sample(slots, active, hidden[torch.tensor(active, device=device), 0], done)

    def _sample(self, slots, rows, hidden, done):
        """Draw one token for each of these rows, hidden (R, d), and let finished messages act."""
        if not rows:
            return
        logits = policy_logits(self.model, hidden, self._temperature or 1.0)                    # (R, V) fp32
        logp = F.log_softmax(logits, dim=-1)
        if self._temperature == 0:
            tokens = logits.argmax(-1)
        else:
            noise = torch.tensor([slots[s].noise.random() for s in rows], dtype=torch.float32, device=hidden.device)
            cdf = truncate_distribution(logits, self._top_p, self._top_k).softmax(-1).cumsum(-1)
            tokens = (cdf <= noise[:, None] * cdf[:, -1:]).sum(-1).clamp(max=logits.shape[-1] - 1)   # first id past the noise
        chosen = logp.gather(-1, tokens[:, None]).squeeze(-1)
        for s, token, value in zip(rows, tokens.tolist(), chosen.tolist()):
            row = slots[s]
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
        elif row.episode.next_turn(text) is None:
            return True
        answer = self.renderer.answer([m for m in row.episode.messages[before:] if m["role"] != "assistant"])
        if len(row.messages) >= self.max_messages or len(row.ids) + len(answer) >= self.max_length:
            row.truncated = True
            return True
        row.ids += answer
        row.mask += [False] * len(answer)
        row.logprobs += [0.0] * len(answer)
        return False
