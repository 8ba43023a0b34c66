"""LoRA by hand: small trainable matrices beside frozen weights, so that a large model fits on one GPU.

    y = W x + (alpha / rank) * B A x                     # W (out, in) frozen; A (rank, in); B (out, rank)

A starts at random (uniform, +-1/sqrt(in)), B at zero: at the start the policy equals the base model exactly. The two
reward rows of the input embedding are trained beside it, as a parameter (2, d) of their own: no gradient of the (V, d)
table exists.

Everything hangs on the model's own modules as extra parameters and forward hooks, so no module changes its name. The
reference policy is the same network inside `base_weights(model)`; a checkpoint is written merged (`merged_state`).
"""
import math
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn

from run import UserError


def _add_low_rank(linear, inputs, output):
    """Forward hook of an adapted nn.Linear."""
    if not linear.adapter_on:
        return output
    return output + linear.lora_scale * F.linear(F.linear(inputs[0], linear.lora_A), linear.lora_B)


def _put_reward_rows(embedding, inputs, output):
    """Forward hook of the input embedding: the reward tokens get their rows from the parameter."""
    if not embedding.adapter_on:
        return output
    for token, row in zip(embedding.reward_ids, embedding.reward_rows):
        output = torch.where((inputs[0] == token)[..., None], row, output)
    return output


def add_adapters(model, rank: int, alpha: float, targets: str, seed: int = 0):
    """Freeze the model; give the linear layers named in `targets` (comma-separated) adapters and the two reward rows a
    parameter.

    Raises UserError for a name that no linear layer of the model has.
    """
    linears = [(name.split(".")[-1], module) for name, module in model.base_model.named_modules()
               if isinstance(module, nn.Linear)]
    known, names = sorted({name for name, _ in linears}), targets.split(",")
    for name in names:
        if name not in known:
            raise UserError(f"--lora_targets: this model has no linear layer {name!r}; it has {', '.join(known)}")
    embedding = model.get_input_embeddings()
    if type(embedding) is not nn.Embedding:
        raise UserError("--lora_rank: this model does more than a look-up in its embedding; train all weights")
    model.requires_grad_(False)
    draw = torch.Generator().manual_seed(seed)
    for name, linear in linears:
        if name in names:
            bound = 1 / math.sqrt(linear.in_features)
            start = torch.empty(rank, linear.in_features).uniform_(-bound, bound, generator=draw)
            linear.lora_A = nn.Parameter(start.to(linear.weight))
            linear.lora_B = nn.Parameter(linear.weight.new_zeros(linear.out_features, rank))
            linear.lora_scale, linear.adapter_on = alpha / rank, True
            linear.register_forward_hook(_add_low_rank)
    embedding.reward_ids, embedding.adapter_on = list(model.config.reward_token_ids), True
    embedding.reward_rows = nn.Parameter(embedding.weight.detach()[embedding.reward_ids])              # (2, d), a copy
    embedding.register_forward_hook(_put_reward_rows)


@contextmanager
def base_weights(model):
    """Inside, the network is what it was before its adapters, reward rows included. A model without adapters stays
    as it is."""
    adapted = [module for module in model.modules() if hasattr(module, "adapter_on")]
    for module in adapted:
        module.adapter_on = False
    try:
        yield
    finally:
        for module in adapted:
            module.adapter_on = True


@torch.no_grad()
def merged_state(model) -> dict[str, torch.Tensor]:
    """The state dict of the plain model that computes the same: W + scale * B A, in fp32 and rounded once, reward rows
    in their table.

    The merged matrices are made in main memory, so that a GPU that is full can still be saved from; the live weights
    are not touched. Without adapters: the state dict as it is.
    """
    ours = ("lora_A", "lora_B", "reward_rows")
    state = {name: tensor for name, tensor in model.state_dict().items() if name.split(".")[-1] not in ours}
    for name, module in model.named_modules():
        if hasattr(module, "lora_A"):
            weight, a, b = (p.detach().cpu().float() for p in (module.weight, module.lora_A, module.lora_B))
            state[f"{name}.weight"] = (weight + module.lora_scale * b @ a).to(module.weight.dtype)
        elif hasattr(module, "reward_rows"):
            table = module.weight.to("cpu", copy=True)
            table[module.reward_ids] = module.reward_rows.to("cpu")
            tied = module.weight.data_ptr()
            state |= {key: table for key, tensor in state.items() if tensor.data_ptr() == tied}          # a head, too
    return state
