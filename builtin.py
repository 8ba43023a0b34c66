"""The built-in model: a million weights, its own small tokenizer, and a stand-in for the pretraining that it never had.

The stand-in is trained once and kept in runs/base (`python sft.py --pretrain` makes it and nothing else): word lists to
say again, single calls, then dialogues of which a quarter has a mistake. It is no part of the method: with a pretrained
model, sft.py --model NAME, none of this runs.
"""
import hashlib
import json
import random
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import envs
import simulator
import tokens
from evaluate import one_variant_each
from model import CHATML, add_reward_tokens, save_policy
from run import Run, read_json
from sampler import Trajectory
from sft import Fit, corrupt, demonstrate, fit
from tokens import Renderer, signature


def builtin_policy(texts: list[str], seed: int = 0, width: int = 128, layers: int = 4, vocabulary: int = 2048):
    """An untrained Llama-shaped model with a tokenizer trained on `texts` -> (model, tokenizer).

    The tokenizer is byte-level BPE: words of the corpus are one token each, with the blank before; other text falls
    back to bytes. Weights start three times as large as transformers would have them: at width 128 and 0.02 the model
    learns to copy a value from a sentence into a call several times later. (Not Qwen2-shaped: for that model type
    AutoTokenizer puts Qwen's own pre-tokenizer in place of the saved one, and a reloaded checkpoint reads other ids.)
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r" ?\w+| ?[^\w\s]+|\s+"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    core.decoder = decoders.ByteLevel()
    core.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=vocabulary, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>",
                                        chat_template=CHATML, tool_schemas="compact",
                                        clean_up_tokenization_spaces=False)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.mul_(3)
    return model.eval(), tokenizer


@dataclass
class Pretraining:
    """The stand-in for pretraining: what a chat model would bring along."""
    echoes: int = 3_000        # phase 1, word lists to be said again: copying, which real models bring from text
    singles: int = 8_000       # phase 2, tasks with a single call, two in three of them base
    dialogues: int = 4_000     # phase 3, whole tasks
    corrupted: float = 0.25    # share of these with a mistake: the base model is to be unsure, as chat models are
    lr: float = 3e-3           # of phases 1 and 2; half of it in phase 3
    batch: int = 16
    width: int = 128
    layers: int = 4
    seed: int = 0


def pretrained(folder: str, seed: int = 0, p: Pretraining = Pretraining()) -> str:
    """The base model's checkpoint; trained on first use, and again when its recipe or the simulator has changed."""
    p, checkpoint = replace(p, seed=seed), str(Path(folder) / "checkpoint")
    sources = b"".join(Path(module.__file__).read_bytes() for module in (envs, simulator, tokens))
    recipe = hashlib.sha256(json.dumps(asdict(p)).encode() + sources).hexdigest()
    stamp = Path(folder) / "config.json"
    if stamp.exists() and read_json(stamp).get("recipe") == recipe:
        return checkpoint
    config = {"recipe": recipe, "pretraining": asdict(p), "builtin": True, "token": "none"}
    with Run(folder, config, overwrite=True) as run:
        model, tokenizer = pretrain(p, lambda row: run.append("metrics.jsonl", row))
        save_policy(model, tokenizer, run.folder / "checkpoint")
        run.finish()
    return checkpoint


def pretrain(p: Pretraining, log):
    """The stand-in itself -> (model, tokenizer)."""
    rng = random.Random(p.seed)
    few = {"turns": (1, 1), "calls": (1, 1), "tools": 4}
    singles = one_variant_each(p.singles * 2 // 3, 1_000_000 + p.seed, ("base",), **few)
    singles += one_variant_each(p.singles - len(singles), 2_000_000 + p.seed, ("miss_func", "miss_param"), **few)
    dialogues = one_variant_each(p.dialogues, 3_000_000 + p.seed, turns=(1, 2), calls=(1, 1), tools=6, clutter=3)
    chats = {"single calls": [demonstrate(task) for task in singles],
             "dialogues": [demonstrate(task, corrupt(task, rng)[1] if rng.random() < p.corrupted else None)
                           for task in dialogues]}
    words = sorted({word for task in singles for text in task.turns for word in text.split()})
    lists = [" ".join(rng.choices(words, k=rng.randint(6, 14))) for _ in range(p.echoes)]

    corpus = [message["content"] for episodes in chats.values() for e in episodes for message in e.messages]
    corpus += [signature(tool) for task in singles for tool in task.episode().tools]
    corpus += [tokens.python_calls(calls) for task in singles for calls in task.golden]
    corpus += [tokens.FRAME + tokens.goal_text("")] * 2
    model, tokenizer = builtin_policy(corpus, p.seed, p.width, p.layers)
    add_reward_tokens(model, tokenizer)
    renderer = Renderer(tokenizer)

    def lesson(messages, tools=(), episode=None):
        return Trajectory(episode, *renderer.conversation(messages, list(tools)), [], reward=1.0)
    echoes = [lesson([{"role": role, "content": text} for role in ("user", "assistant")]) for text in lists]
    phases = {"copying": echoes} | {
        title: [lesson(e.messages, e.task.episode().tools, e) for e in episodes] for title, episodes in chats.items()}
    for title, lessons in phases.items():
        lr = p.lr / 2 if title == "dialogues" else p.lr
        fit(model, lessons, Fit(lr, batch=p.batch, seed=p.seed), f"built-in model, once: {title}",
            log=lambda row: log({"phase": title, **row}))
    return model, tokenizer
