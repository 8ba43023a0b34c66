"""The policy: any causal language model of transformers, plus two reward-token rows.

Load (hub name, folder, GGUF file), add the rows of <|high_reward|> and <|low_reward|>, score
sampled tokens, optimise with fp32 masters, save as a plain Hugging Face folder.

Bytes of GPU memory per weight in bf16, besides activations and the sampler's cache. All weights trained: weights 2 +
frozen reference 2 (RL with beta > 0) + gradients 2 + fp32 masters 4 + moments 8 = 18. With LoRA (lora.py): 2 per frozen
weight, its own reference included, and 16 per weight of the adapters.

- The reward tokens are prompt only: their logits are -inf wherever this program samples or scores (`policy_logits`, the
  one function that both the sampler and the trainer call).
- Log-softmax is fp32 whatever the weights are; the head runs on sampled positions only, in chunks that the backward
  pass recomputes: full logits of a 6k-token episode over 152k tokens would be 3.6 GB.
- Padding is on the right and rows are causal, so no attention mask is needed (but for packed rows): real tokens never
  see the padding. No pad id exists anywhere; masks come from lengths.
- Dropout is never on: a policy is always in eval mode, so the ratio before the first update is exactly 1.
"""
import copy
import functools
import inspect
import json
import math
import os
import shutil
import socket
import threading
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from urllib.parse import urlsplit

import torch
import torch.nn.functional as F
from huggingface_hub import constants as hub
from torch.utils.checkpoint import checkpoint
from transformers import AddedToken, AutoModelForCausalLM, AutoTokenizer, Cache, GenerationConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from lora import add_adapters, merged_state
from run import UserError, memory, require, require_package
from tokens import REWARD_TOKENS

HEAD_CHUNK = 2048          # sampled positions whose logits exist at one time
STEP_CHUNK = 2 ** 27       # weights whose fp32 gradients exist at one time
CHATML = ("{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")

# ---------------------------------------------------------------------------------------------------------------------
# making and loading

def add_reward_tokens(model, tokenizer):
    """Give every token of REWARD_TOKENS an id and an embedding row. Does nothing where they are there already.

    Rows only grow: a matrix padded beyond the tokenizer keeps its size, and where the new ids already have a (padding)
    row, that row is used. The start of a row is deterministic: the mean of all rows plus or minus one standard
    deviation in fixed pseudo-random directions, the same in every process. In an untied head the rows are never used
    (banned). Raises UserError if a reward token is already an ordinary token of this model.
    """
    known, tokens = tokenizer.get_added_vocab(), list(REWARD_TOKENS.values())
    for token in tokens:
        special = token in known and tokenizer.added_tokens_decoder[known[token]].special
        if token in tokenizer.get_vocab() and not special:
            raise UserError(f"this model's tokenizer already uses {token} as an ordinary token; choose another model")
    if getattr(model.config, "reward_token_ids", None):
        if [tokenizer.convert_tokens_to_ids(token) for token in tokens] != list(model.config.reward_token_ids):
            raise UserError("the checkpoint's reward tokens, its tokenizer and tokens.REWARD_TOKENS do not belong "
                            "together; make it again with sft.py")
        return
    if any(token in known for token in tokens):
        raise UserError(f"this model already has a special token {' or '.join(tokens)} that RC-GRPO did not make; "
                        "choose another model")
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in tokens], special_tokens=True)
    ids = [tokenizer.convert_tokens_to_ids(token) for token in tokens]
    old_rows = model.get_input_embeddings().weight.shape[0]
    if max(ids) >= old_rows:
        model.resize_token_embeddings(max(ids) + 1, mean_resizing=False)
    draw = torch.Generator().manual_seed(20260203)
    with torch.no_grad():
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        real = embedding[:min(ids)].float()                             # rows in use before, without padding
        mean, deviation = real.mean(0), real.std(0)                     # (d,), (d,)
        for row in ids:
            noise = torch.randn(mean.shape, generator=draw).to(mean.device)
            embedding[row] = (mean + deviation * noise).to(embedding.dtype)
            if head is not embedding:
                head[row] = head[:min(ids)].float().mean(0).to(head.dtype)
    model.config.reward_token_ids = ids


def hub_answers(patience: float = 5.0) -> bool:
    """Whether a connection to the hub can be made: one try, so that no network is noticed in seconds (transformers
    tries for a minute).

    The address is HF_ENDPOINT's if that is set. Behind a proxy nothing is tried: the answer is yes.
    """
    url, answers = urlsplit(hub.ENDPOINT), []
    if {url.scheme, "all"} & set(urllib.request.getproxies()):
        return True

    def connect():
        try:
            port = url.port or (80 if url.scheme == "http" else 443)
            socket.create_connection((url.hostname, port), patience).close()
            answers.append(True)
        except OSError:
            pass
    thread = threading.Thread(target=connect, daemon=True)               # looking up a name has no timeout of its own
    thread.start()
    thread.join(patience)
    return bool(answers)


def _loading_rules(name: str) -> dict:
    """What from_pretrained may do with a checkpoint that somebody else made: no pickle, no code from it, no endless
    search for a network."""
    rules = {"trust_remote_code": False}                                 # else transformers asks on the terminal
    folder = Path(name)
    if name.endswith(".gguf"):
        for package in ("gguf", "accelerate"):
            require_package(package, "reading a GGUF file", "gguf accelerate")
        return rules | {"gguf_file": folder.name}
    if folder.is_dir():
        pickles = [file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in sorted(folder.glob(pattern))]
        require(not pickles or any(folder.glob("*.safetensors")), f"{name} has its weights as pickle only "
                f"({', '.join(pickles[:3])}), and reading a pickle can run any code: convert them to safetensors")
    elif not hub.HF_HUB_OFFLINE and not hub_answers():
        rules["local_files_only"] = True
    return rules | {"use_safetensors": True}


def load_policy(name_or_path: str, device: str | torch.device = "cpu", dtype: torch.dtype | None = None):
    """Load a causal language model and its tokenizer, reward tokens added -> (model, tokenizer).

    name_or_path: a folder, a .gguf file (test extras gguf and accelerate), or a hub name. dtype: default fp32 on a CPU,
    bf16 elsewhere. Reads safetensors and GGUF only, never runs code from the checkpoint. Raises UserError if it cannot
    be loaded.
    """
    device = torch.device(device)
    if dtype is None:
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    rules = _loading_rules(name_or_path)
    where = os.path.dirname(name_or_path) or "." if "gguf_file" in rules else name_or_path
    try:
        tokenizer = AutoTokenizer.from_pretrained(where, **rules)
        model = AutoModelForCausalLM.from_pretrained(where, dtype=dtype, attn_implementation="sdpa", **rules)
    except Exception as error:                                           # many kinds: no file, no network, bad JSON
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        if "trust_remote_code" in str(error):
            reason = ("it needs code of its own to be run (auto_map in its config.json), which is never done; choose a "
                      "model that transformers knows")
        elif "local_files_only" in rules:
            reason = (f"{hub.ENDPOINT} does not answer, and this name is not in the local cache; give a folder, or try "
                      "again with a network")
        raise UserError(f"cannot load a model from {name_or_path}: {reason}")
    if getattr(model, "hf_quantizer", None) is not None and "gguf_file" in rules:
        model.hf_quantizer.remove_quantization_config(model)             # its weights are plain by now
    require(model.get_output_embeddings() is not None, f"{type(model).__name__} is not supported: it has no head")
    make_savable(model)
    model.requires_grad_(True)
    add_reward_tokens(model, tokenizer)
    return model.to(device).eval(), tokenizer


def make_savable(model):
    """Some versions of transformers load defaults of decoding that they refuse to save, such as a temperature alone."""
    found = model.generation_config
    for changes in ({}, {"do_sample": True}):
        model.generation_config = copy.copy(found)
        model.generation_config.update(**changes)
        with suppress(ValueError):
            return model.generation_config.validate(strict=True)
    model.generation_config = GenerationConfig(eos_token_id=found.eos_token_id, pad_token_id=found.pad_token_id)


def write_old_keys(folder: Path):
    """What transformers 4, and servers that use it, look for: else they take a default rope in silence.

    Ropes by layer type stay as they are. The tokenizer's class had another name, its list of special tokens another
    key.
    """
    files = folder / "config.json", folder / "tokenizer_config.json"
    config, reader = (json.loads(file.read_text(encoding="utf-8")) for file in files)
    rope = dict(config.get("rope_parameters") or {})
    for name in {"rope_theta", "partial_rotary_factor"} & rope.keys():
        config[name] = rope.pop(name)
    if rope.get("rope_type", "default") != "default":
        config["rope_scaling"] = rope
    if reader.get("tokenizer_class") == "TokenizersBackend":
        reader["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(reader.get("extra_special_tokens"), list):
        reader["additional_special_tokens"] = reader.pop("extra_special_tokens")
    for file, values in zip(files, (config, reader)):
        file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def save_policy(model, tokenizer, folder: str | Path):
    """Write a plain Hugging Face folder (safetensors, tokenizer, template), complete or not at all: temporary name,
    renamed.

    Adapters are merged into the weights that are written; the model itself stays as it is.
    """
    folder = Path(folder)
    temporary, old = folder.with_name(folder.name + ".tmp"), folder.with_name(folder.name + ".old")
    shutil.rmtree(temporary, ignore_errors=True)
    model.save_pretrained(temporary, state_dict=merged_state(model))
    tokenizer.save_pretrained(temporary)
    write_old_keys(temporary)
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.replace(folder, old)
    os.replace(temporary, folder)
    shutil.rmtree(old, ignore_errors=True)


@dataclass
class MemoryOptions:
    """What is trained and what is kept in memory: shared by the programs that train."""
    lora_rank: int = memory(0, "rank of LoRA adapters beside frozen weights; 0: train all weights", least=0)
    lora_alpha: float = memory(32.0, "weight of the adapters: W x + alpha / rank * B A x", above=0)
    lora_targets: str = memory("q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj", "linear layers with adapters")
    grad_checkpoint: bool = memory(False, "activations again in the backward pass: less memory, a third more time")

    def prepare(self, model, seed: int):
        """Make a freshly loaded policy what these options say, in place."""
        if self.lora_rank:
            add_adapters(model, self.lora_rank, self.lora_alpha, self.lora_targets, seed)
        if self.grad_checkpoint:
            recompute_layers(model)


def _recomputed(layer, *args, **kwargs):
    """Forward of a decoder layer of which only the input is kept; the backward pass runs it again."""
    forward = type(layer).forward
    if not torch.is_grad_enabled():
        return forward(layer, *args, **kwargs)
    return checkpoint(forward, layer, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def recompute_layers(model):
    """Gradient checkpointing. (transformers' own is for train mode, drops the cache there, and would need dropout to be
    off.)"""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    require(len(layers) > 0, "--grad_checkpoint: this model's layers cannot be found; choose another model")
    for layer in layers:
        layer.forward = MethodType(_recomputed, layer)                   # a method: a deep copy calls its own layers


def frozen_copy(model):
    """The same weights, no gradients."""
    return copy.deepcopy(model).requires_grad_(False).eval()


def reference_policy(model):
    """The policy that the KL term pulls to, to be used inside lora.base_weights: the model itself if it has adapters,
    else a copy."""
    return model if hasattr(model.get_input_embeddings(), "reward_rows") else frozen_copy(model)


# ---------------------------------------------------------------------------------------------------------------------
# scoring

def policy_logits(model, hidden: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Hidden states (N, d) -> fp32 logits (N, V) of the policy: over the temperature, reward tokens banned."""
    logits = model.get_output_embeddings()(hidden).float()
    if temperature != 1:
        logits = logits / temperature
    banned = getattr(model.config, "reward_token_ids", None)
    for token in banned or ():
        logits[:, token] = float("-inf")            # one by one: a list as an index would be copied to the device
    return logits


def _score(model, hidden, targets, temperature):
    """(N, d), (N,) -> log-probs (N,), fp32."""
    return F.log_softmax(policy_logits(model, hidden, temperature), dim=-1).gather(-1, targets[:, None]).squeeze(-1)


def cache_argument(model) -> str:
    """What this version of transformers calls the cache that a model's forward takes (renamed in 5.2x)."""
    return _cache_argument(type(model.base_model))


@functools.cache
def _cache_argument(kind: type) -> str:                  # asked before every decoding step: a signature takes time
    return "cache" if "cache" in inspect.signature(kind.forward).parameters else "past_key_values"


class _Prompt(Cache):
    """Keys and values (1, K, shared, D) of a prompt that several rows have in common, as part of the graph."""

    def __init__(self):
        super().__init__(layers=[])
        self.kept = {}

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        self.kept[layer_idx] = key_states, value_states
        return key_states, value_states

    def get_seq_length(self, layer_idx=0):
        return 0                                         # never asked for anything: positions and mask are explicit


class _Rest(_Prompt):
    """What B rows attend to after that prompt: its keys and values, then their own, (B, K, shared + Q, D)."""

    def __init__(self, prompt: _Prompt):
        super().__init__()
        self.prompt = prompt

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        return tuple(torch.cat([before.expand(len(own), -1, -1, -1), own], dim=2)
                     for before, own in zip(self.prompt.kept[layer_idx], (key_states, value_states)))


def _after_prompt(model, ids, shared):
    """Hidden states (B, T - shared, d) of what each row of ids (B, T) has of its own; the shared tokens are computed
    once."""
    place = torch.arange(ids.shape[1], device=ids.device)                          # (T,)
    sees, prompt = place <= place[:, None], _Prompt()                              # (T, T), queries first
    for tokens, begin, cache in ((ids[:1, :shared], 0, prompt), (ids[:, shared:], shared, _Rest(prompt))):
        end = begin + tokens.shape[1]
        hidden = model.base_model(
            input_ids=tokens, position_ids=place[None, begin:end], attention_mask=sees[None, None, begin:end, :end],
            use_cache=True, **{cache_argument(model): cache}).last_hidden_state
    return hidden


def token_logprobs(model, ids: torch.Tensor, mask: torch.Tensor, temperature=1.0, shared: int = 0) -> torch.Tensor:
    """Log-probs of the masked tokens given everything before them.

    ids: (B, T) int, padded on the right with anything; mask: (B, T) bool, True on sampled tokens (never at position 0).
    shared: so many leading tokens are the same in all rows and computed once; each row has one more of its own before
    it samples. Returns (B, T) fp32, 0 where mask is False.
    """
    row, position = mask.nonzero(as_tuple=True)                                    # (N,), (N,)
    hidden = (_after_prompt(model, ids, shared) if shared                          # (B, T - shared, d)
              else model.base_model(input_ids=ids, use_cache=False).last_hidden_state)
    before = hidden[row, position - 1 - shared]                                    # (N, d)
    targets = ids[row, position]                                                   # the state at t-1 scores token t
    chunks = [slice(i, i + HEAD_CHUNK) for i in range(0, len(row), HEAD_CHUNK)]
    scores = [checkpoint(_score, model, before[chunk], targets[chunk], temperature, use_reentrant=False)
              for chunk in chunks]
    values = torch.cat(scores) if scores else before.sum() * 0.0 + before.new_zeros(0, dtype=torch.float32)
    return before.new_zeros(mask.shape, dtype=torch.float32).index_put((row, position), values)


def batches_by_length(lengths: list[int], budget: int) -> list[list[int]]:
    """Indices grouped into micro-batches of similar length, each at most `budget` tokens with its padding (at least one
    row)."""
    groups, group = [], []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if group and (len(group) + 1) * lengths[i] > budget:
            groups.append(group)
            group = []
        group.append(i)
    return groups + [group] if group else groups


def pad(rows: list, fill, device) -> torch.Tensor:
    """Lists of unequal length -> one (B, T) tensor, filled up on the right."""
    width = max(map(len, rows))
    return torch.tensor([list(row) + [fill] * (width - len(row)) for row in rows], device=device)


# ---------------------------------------------------------------------------------------------------------------------
# optimising

class Optimizer:
    """AdamW whose weights are fp32 even where the model's are bf16.

    In pure bf16 an update of 1e-5 leaves a weight of 0.02 where it was; so the masters take the step and the model gets
    a rounded copy. In fp32 the model's own weights are the masters. row_speed: learning rate of the reward tokens'
    rows, as a multiple of that of everything else. Parameters without requires_grad have no part in it.
    """

    def __init__(self, model, lr: float, betas=(0.9, 0.999), weight_decay: float = 0.0, row_speed: float = 1.0):
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.masters = [p if p.dtype == torch.float32 else p.detach().float().requires_grad_() for p in self.params]
        self.adamw = torch.optim.AdamW(self.masters, lr=lr, betas=betas, weight_decay=weight_decay, foreach=True)
        self.parts = batches_by_length([p.numel() for p in self.params], STEP_CHUNK)
        self.begun = 0                                                   # steps, this one included
        embedding = model.get_input_embeddings()
        table = getattr(embedding, "reward_rows", embedding.weight)      # (2, d) with adapters, else (V, d)
        self.table = next(master for param, master in zip(self.params, self.masters) if param is table)
        ids = getattr(model.config, "reward_token_ids", [])
        self.rows, self.row_speed = ids if table is embedding.weight else list(range(len(ids))), row_speed

    def step(self, lr: float, max_norm: float) -> float:
        """One update at learning rate lr, gradient clipped to max_norm; returns the norm before clipping.

        If that is NaN or infinite nothing is changed, and the gradient is dropped.
        """
        grads = [param.grad for param in self.params]
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad, dtype=torch.float32)
                                                     for grad in grads if grad is not None]))
        if not torch.isfinite(norm):
            self.discard()
            return float(norm)
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for group in self.adamw.param_groups:
            group["lr"] = lr
        before = self.table.detach()[self.rows]                          # a copy
        self.begun += 1
        for param in self.params:
            param.grad = None
        for part in self.parts:                                          # AdamW leaves out what has no gradient
            for i in part:
                if grads[i] is not None:
                    self.masters[i].grad, grads[i] = grads[i].float().mul_(scale), None
            self.adamw.step()
            self.adamw.zero_grad(set_to_none=True)
        with torch.no_grad():
            if self.row_speed != 1:                                      # AdamW's step is linear in its rate
                self.table[self.rows] = before + self.row_speed * (self.table[self.rows] - before)
            for param, master in zip(self.params, self.masters):
                if master is not param:
                    param.copy_(master)
        return float(norm)

    def discard(self) -> float:
        """Drop a gradient that is not to be used; returns NaN, the norm of what cannot be trusted."""
        for param in self.params:
            param.grad = None
        return math.nan

    def tensors(self) -> dict[str, torch.Tensor]:
        """Masters and moments by name, for a checkpoint."""
        state = {f"master.{i}": master.detach() for i, master in enumerate(self.masters)}
        for i, master in enumerate(self.masters):
            for name, value in self.adamw.state.get(master, {}).items():
                state[f"{name}.{i}"] = value
        return state

    def load_tensors(self, state: dict[str, torch.Tensor]):
        """The inverse of tensors(); the model gets its weights from the masters. Raises UserError if they are those of
        other weights."""
        shapes = [state[f"master.{i}"].shape for i in range(len(state)) if f"master.{i}" in state]
        require(shapes == [master.shape for master in self.masters],
                "the interrupted run trained other weights: --resume needs its --init, --lora_rank and --lora_targets")
        with torch.no_grad():
            for i, master in enumerate(self.masters):
                master.copy_(state[f"master.{i}"])
                names = ("step", "exp_avg", "exp_avg_sq")
                moments = {name: state[f"{name}.{i}"] for name in names if f"{name}.{i}" in state}
                if moments:
                    self.adamw.state[master] = {name: value.to(master.device if name != "step" else "cpu").clone()
                                                for name, value in moments.items()}
                if self.params[i] is not master:
                    self.params[i].copy_(master)                         # whatever weights the model was loaded with
