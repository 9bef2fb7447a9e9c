"""Oracle of `HybridModel`: the same model for one document, in plain loops and sums.

It uses no op of the package and computes in any dtype. The scan is a recurrence over tokens.
Attention is a softmax over all earlier tokens. An expert layer is a sum over all experts, with zero
weights for experts that are not chosen.
"""

import torch
import torch.nn.functional as F


def plain_logits(parameters, config, tokens, vocab_size, expert_biases=()):
    """Return ``(L, vocab_size)`` logits of one document of L tokens.

    Args:
        parameters: name -> tensor, with the names of `HybridModel`. Their dtype is the dtype of
            the computation.
        expert_biases: one for each E layer whose router has a bias.
    """
    expert_biases = list(expert_biases)
    hidden = embedded(parameters, config, tokens)
    hidden = stack(hidden, parameters, config, range(config.num_layers), expert_biases)
    return head(norm(hidden, parameters, "final_norm", config), parameters, config, vocab_size)


def embedded(parameters, config, tokens):
    return parameters["embedding.weight"][tokens] * (config.embedding_multiplier or 1)


def head(hidden, parameters, config, vocab_size):
    weight = parameters.get("output.weight", parameters["embedding.weight"])
    return hidden @ weight[:vocab_size].T / (config.logits_scaling or 1)


def stack(hidden, parameters, config, numbers, expert_biases):
    """Return the hidden state after some layers. Biases of their E layers are removed."""
    for number in numbers:
        symbol = config.layer_types[number]
        prefix = f"layers.{number}."
        layer = {
            name.removeprefix(prefix): p
            for name, p in parameters.items()
            if name.startswith(prefix)
        }
        mixer = {
            name.removeprefix("mixer."): p for name, p in layer.items() if name.startswith("mixer.")
        }
        after = config.attention_norm_placement == "output" and (
            symbol == "*" or (symbol in "-E" and config.layer_types[number - 1 : number] == ["*"])
        )
        x = hidden if after else norm(hidden, layer, "norm", config)
        if symbol == "M":
            update = mamba(x, mixer, config)
        elif symbol == "G":
            update = gated_delta_net(x, mixer, config)
        elif symbol == "*":
            update = attention(x, mixer, config, config.window_of(number))
        elif symbol == "-":
            update = mlp(x, mixer, "", config)
        else:
            update = experts(x, mixer, config, expert_biases.pop(0) if expert_biases else None)
        if after:
            update = norm(update, layer, "norm", config)
        hidden = hidden + update * (config.residual_multiplier or 1)
    return hidden


def depth_losses(parameters, config, tokens, mask, vocab_size, expert_biases=()):
    """Return the summed losses of one document at each depth of multi-token prediction.

    Depth k runs only on the positions whose token k tokens ahead is in the document.
    """
    biases = list(expert_biases)
    hidden = embedded(parameters, config, tokens)
    hidden = stack(hidden, parameters, config, range(config.num_layers), biases)
    hidden = norm(hidden, parameters, "final_norm", config)
    found, main = [], config.num_layers
    for depth in range(1, config.mtp_depths + 1):
        if len(tokens) <= depth:
            found.append(hidden.new_zeros(()))
            continue
        stored = 0 if config.mtp_use_repeated_layer else depth - 1
        p = {
            name.removeprefix(f"mtp.{stored}."): value
            for name, value in parameters.items()
            if name.startswith(f"mtp.{stored}.")
        }
        e = norm(embedded(parameters, config, tokens[depth:]), p, "enorm", config)
        h = norm(hidden[: len(tokens) - depth], p, "hnorm", config)
        hidden = torch.cat([e, h], dim=-1) @ p["eh_proj.weight"].T
        first = main + stored * len(config.mtp_layers)
        numbers = range(first, first + len(config.mtp_layers))
        used = list(biases[: config.mtp_layers.count("E")])
        hidden = stack(hidden, parameters, config, numbers, used)
        if not config.mtp_use_repeated_layer:
            biases = biases[config.mtp_layers.count("E") :]
        hidden = norm(hidden, p, "final_norm", config)
        logits = head(hidden[:-1], parameters, config, vocab_size)
        loss = F.cross_entropy(logits, tokens[depth + 1 :], reduction="none")
        found.append((loss * mask[depth + 1 :]).sum())
    return found


def run_plain_depths(model, documents, vocab_size):
    """Return ([main loss, loss of each depth], gradients of the total loss) in float64.

    Each loss is a mean over its own targets of all documents.
    """
    parameters = {n: p.detach().double().requires_grad_() for n, p in model.named_parameters()}
    biases = [layer.mixer.router.expert_bias for layer in model.moe_layers]
    biases = [] if None in biases else [bias.double() for bias in biases]
    config, depths = model.config, model.config.mtp_depths
    sums, counts = [0.0] * (depths + 1), [0] * (depths + 1)
    for tokens, mask in documents:
        tokens, mask = torch.as_tensor(tokens), torch.as_tensor(mask)
        logits = plain_logits(parameters, config, tokens, vocab_size, biases)
        main = F.cross_entropy(logits[:-1], tokens[1:], reduction="none") * mask[1:]
        later = depth_losses(parameters, config, tokens, mask, vocab_size, biases)
        sums = [total + loss for total, loss in zip(sums, [main.sum(), *later])]
        counts = [n + int(mask[1 + depth :].sum()) for depth, n in enumerate(counts)]
    losses = [total / max(count, 1) for total, count in zip(sums, counts)]
    (losses[0] + config.mtp_loss_scaling_factor / depths * sum(losses[1:])).backward()
    return [float(loss.detach()) for loss in losses], {
        n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in parameters.items()
    }


def norm(x, p, name, config):
    weight = p[f"{name}.weight"] + config.apply_layernorm_1p
    if f"{name}.bias" in p:
        return F.layer_norm(x, weight.shape, weight, p[f"{name}.bias"], config.norm_epsilon)
    return F.rms_norm(x, weight.shape, weight, config.norm_epsilon)


def activate(x, config):
    if config.swiglu:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up
    return F.relu(x).square() if config.squared_relu else F.gelu(x)


def mlp(x, p, prefix, config):
    inner = activate(F.linear(x, p[prefix + "fc1.weight"], p.get(prefix + "fc1.bias")), config)
    return F.linear(inner, p[prefix + "fc2.weight"], p.get(prefix + "fc2.bias"))


def attention(x, p, config, window=None):
    length, width = x.shape[0], config.head_dim
    groups, per_group = (
        config.num_query_groups,
        config.num_attention_heads // config.num_query_groups,
    )
    rows = F.linear(x, p["qkv.weight"], p.get("qkv.bias")).view(length, groups, -1, width)
    gated = config.attention_output_gate
    queries, gates, keys, values = rows.split([per_group, gated * per_group, 1, 1], dim=2)
    if config.qk_layernorm:
        together = (length, -1) if config.qk_layernorm_scope == "all_heads" else (-1, width)
        queries = norm(queries.reshape(together), p, "q_norm", config).view(queries.shape)
        keys = norm(keys.reshape(together), p, "k_norm", config).view(keys.shape)
    places = torch.arange(length)
    hidden = places[:, None] < places
    if window is not None:
        hidden |= places[:, None] - places >= window
    scale = config.softmax_scale or width**-0.5
    heads = []
    for group in range(groups):
        key, value = keys[:, group, 0], values[:, group, 0]
        for head in range(per_group):
            query = queries[:, group, head]
            scores = rotate(query, config) @ rotate(key, config).T * scale
            out = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1) @ value
            heads.append(out * torch.sigmoid(gates[:, group, head]) if gated else out)
    return F.linear(torch.cat(heads, dim=-1), p["proj.weight"], p.get("proj.bias"))


def rotate(x, config):
    if config.position_embedding_type != "rope":
        return x
    half = config.rotary_dim // 2
    frequency = config.rotary_base ** (-torch.arange(half, dtype=torch.float64) / half)
    if config.use_rope_scaling:
        turns = frequency * config.rope_scaling_original_max_positions / (2 * torch.pi)
        low, high = config.rope_scaling_low_freq_factor, config.rope_scaling_high_freq_factor
        smooth = (turns - low) / (high - low)
        slow = frequency / config.rope_scaling_factor
        mixed = (1 - smooth) * slow + smooth * frequency
        mixed = torch.where(turns >= high, frequency, mixed)
        frequency = torch.where(turns <= low, slow, mixed)
    angle = torch.arange(x.shape[0], dtype=torch.float64)[:, None] * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second, rest = x[:, :half], x[:, half : 2 * half], x[:, 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def mamba(u, p, config):
    length, inner, heads = u.shape[0], config.d_inner, config.mamba_num_heads
    groups, states = config.mamba_num_groups, config.mamba_state_dim
    z, xbc, dt = (u @ p["in_proj.weight"].T).split(
        [inner, inner + 2 * groups * states, heads], dim=-1
    )
    width = p["conv1d.weight"].shape[1]
    padded = torch.cat([xbc.new_zeros(width - 1, xbc.shape[1]), xbc])
    taps = [padded[w : w + length] * p["conv1d.weight"][:, w] for w in range(width)]
    xbc = F.silu(torch.stack(taps).sum(0) + p.get("conv1d.bias", 0))
    x, b, c = xbc.split([inner, groups * states, groups * states], dim=-1)
    # At least float32: a recurrence in bfloat16 would be too inexact for an oracle.
    wide = torch.promote_types(u.dtype, torch.float32)
    x = x.to(wide).view(length, heads, -1)
    b, c = (
        v.to(wide).view(length, groups, states).repeat_interleave(heads // groups, dim=1)
        for v in (b, c)
    )
    dt = F.softplus(dt.to(wide) + p["dt_bias"].to(wide))
    decay = torch.exp(-torch.exp(p["A_log"].to(wide)) * dt)
    state, outputs = torch.zeros(heads, x.shape[2], states, dtype=wide), []
    for t in range(length):
        state = (
            decay[t, :, None, None] * state + (dt[t, :, None] * x[t])[:, :, None] * b[t, :, None, :]
        )
        outputs.append((state * c[t, :, None, :]).sum(-1) + p["D"].to(wide)[:, None] * x[t])
    y = torch.stack(outputs).reshape(length, inner).to(u.dtype)
    gated = (y * F.silu(z)).view(length, config.mamba_norm_groups or groups, -1)
    square = gated.square().mean(-1, keepdim=True)
    normed = gated * torch.rsqrt(square + config.mamba_norm_epsilon)
    return (normed.view(length, inner) * p["norm.weight"]) @ p["out_proj.weight"].T


def gated_delta_net(u, p, config):
    length, heads = u.shape[0], config.linear_num_value_heads
    keys, values = config.linear_key_dim, config.linear_value_dim
    qkv, z, b, a = (u @ p["in_proj.weight"].T).split(
        [2 * keys + values, values, heads, heads], dim=-1
    )
    width = p["conv1d.weight"].shape[1]
    padded = torch.cat([qkv.new_zeros(width - 1, qkv.shape[1]), qkv])
    taps = [padded[w : w + length] * p["conv1d.weight"][:, w] for w in range(width)]
    wide = torch.promote_types(u.dtype, torch.float32)
    q, k, v = F.silu(torch.stack(taps).sum(0)).to(wide).split([keys, keys, values], dim=-1)
    q, k = (x.view(length, config.linear_num_key_heads, -1) for x in (q, k))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (q, k))
    v = v.view(length, heads, -1)
    beta = torch.sigmoid(b.to(wide)) * (2 if config.linear_allow_neg_eigval else 1)
    step = F.softplus(a.to(wide) + p["dt_bias"].to(wide))
    decay = torch.exp(-torch.exp(p["A_log"].to(wide)) * step)
    state, outputs = torch.zeros(heads, k.shape[2], v.shape[2], dtype=wide), []
    for t in range(length):
        state = decay[t, :, None, None] * state
        read = torch.einsum("nkv,nk->nv", state, k[t])
        state = state + torch.einsum("nk,nv->nkv", k[t], beta[t, :, None] * (v[t] - read))
        outputs.append(torch.einsum("nkv,nk->nv", state, q[t]) * q.shape[2] ** -0.5)
    o, eps = torch.stack(outputs), config.linear_norm_epsilon or config.norm_epsilon
    normed = F.rms_norm(o, (v.shape[2],), p["norm.weight"].to(wide), eps)
    y = (normed.flatten(1) * F.silu(z.to(wide))).to(u.dtype)
    return y @ p["out_proj.weight"].T


def open_values(values, config):
    """Return the values with -inf outside the best groups of experts of each token."""
    groups, chosen = config.moe_router_num_groups or 1, config.moe_router_group_topk or 1
    width, best = config.num_experts // groups, config.moe_router_topk // chosen
    result = torch.full_like(values, -torch.inf)
    for row, kept in zip(values.detach(), result):
        sums = [sum(sorted(part.tolist())[-best:]) for part in row.split(width)]
        for group in sorted(range(groups), key=lambda group: sums[group])[-chosen:]:
            kept[group * width : (group + 1) * width] = 0
    return values + result


def experts(x, p, config, bias):
    router = p["router.weight"]
    logits = x.to(router.dtype) @ router.T
    if config.moe_router_score_function == "softmax":
        scores = torch.softmax(logits, dim=-1)
        ordered = open_values(scores if config.moe_router_pre_softmax else logits, config)
        chosen = ordered.topk(config.moe_router_topk, dim=-1).indices
        weights = scores.gather(1, chosen)
        if not config.moe_router_pre_softmax:
            weights = weights / weights.sum(-1, keepdim=True)
    else:
        scores = torch.sigmoid(logits)
        ordered = open_values(scores if bias is None else scores + bias, config)
        chosen = ordered.topk(config.moe_router_topk, dim=-1).indices
        weights = scores.gather(1, chosen)
        if config.moe_router_topk > 1:
            weights = weights / weights.sum(-1, keepdim=True)
    weights = weights * (config.moe_router_topk_scaling_factor or 1.0)
    z = x if config.moe_latent_size is None else x @ p["fc1_latent_proj.weight"].T
    result = torch.zeros_like(z)
    for expert in range(config.num_experts):
        share = (weights * (chosen == expert)).sum(-1, keepdim=True)
        y = activate(z @ p["experts.fc1"][expert].T, config) @ p["experts.fc2"][expert].T
        result = result + (share * y).to(x.dtype)
    if config.moe_latent_size is not None:
        result = result @ p["fc2_latent_proj.weight"].T
    if config.moe_shared_expert_intermediate_size:
        y = mlp(x, p, "shared_expert.", config)
        if config.moe_shared_expert_gate:
            y = y * torch.sigmoid(x @ p["shared_expert_gate.weight"].T)
        result = result + y
    return result


def run_plain(model, documents, vocab_size, targets, dtype):
    """Return (logits, per-token loss, loss, gradients) of documents run one by one.

    Args:
        model: model whose weights are used.
        dtype: dtype of the computation. Parameters that the model keeps in float32 stay float32
            unless it is float64.
    """
    parameters = {}
    for name, p in model.named_parameters():
        kept = torch.float32 if getattr(p, "keep_fp32", False) and dtype != torch.float64 else dtype
        parameters[name] = p.detach().to(kept).requires_grad_()
    biases = [layer.mixer.router.expert_bias for layer in model.moe_layers]
    biases = [] if None in biases else biases
    wide = torch.promote_types(dtype, torch.float32)
    all_logits, losses = [], []
    for tokens, mask in documents:
        tokens, mask = torch.as_tensor(tokens), torch.as_tensor(mask)
        logits = plain_logits(parameters, model.config, tokens, vocab_size, biases).to(wide)
        loss = F.cross_entropy(logits[:-1], tokens[1:], reduction="none") * mask[1:]
        all_logits.append(logits.detach())
        losses.append(torch.cat([loss, loss.new_zeros(1)]))
    total = torch.cat(losses).sum() / targets
    total.backward()
    gradients = {
        n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in parameters.items()
    }
    return torch.cat(all_logits), torch.cat(losses).detach(), total.detach(), gradients
