"""Small models with tokenizer, chat template and generation settings, as published models have them.

`check` converts such a model, fine-tunes it with two processes, exports it, and compares the answers
of transformers with those of this package. transformers gets nothing but the exported folder.
"""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from megatron_packed.inputs.prompts import encode_prompts, texts
from megatron_packed.models.generate import generate
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.training.trained_model import TrainedModel
from support import hybrid_cases as cases
from support.converted_model import convert
from support.huggingface_models import NO_STEP_LIMIT, filled
from support.runs import TINY_RUN, flags_of, trained
from support.template_conversations import STRUCTURES, write_tokenizer

COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
}
DELTA_NET = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
VISION |= {"num_position_embeddings": 16, "out_hidden_size": 32}
MAMBA = {"mamba_n_heads": 4, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_d_head": 16}
QUESTIONS = ("What is the weather in Oslo?", "How many trains leave?", "Why?", "Where is Lima?")
ANSWERS = ("There is snow.", "Three of them.", "Nobody knows it, not in the least.", "In Peru.")
CHATML = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + ' says\\n' }}
{%- if message.role == 'assistant' -%}
  {%- generation -%}{{ message.content + '<|im_end|>' }}{%- endgeneration -%}
{%- else -%}
  {{- message.content + '<|im_end|>' -}}
{%- endif -%}
{{ '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant says\\n' }}{%- endif -%}
"""
"""Template of a user, with blocks that mark what is learned. Most bases have no such tokens."""
NEW_TOKENS = 40


def _qwen3_5(vocab_size: int, draw: random.Random) -> Any:
    text = {"vocab_size": vocab_size, **COMMON, **DELTA_NET}
    config = transformers.Qwen3_5Config(text_config=text, vision_config=VISION)
    return filled(transformers.Qwen3_5ForConditionalGeneration(config), draw)


def _llama(vocab_size: int, draw: random.Random) -> Any:
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    config = transformers.LlamaConfig(
        vocab_size=vocab_size, rope_parameters=rope, tie_word_embeddings=True, **COMMON
    )
    return filled(transformers.LlamaForCausalLM(config), draw)


def _nemotron_h(vocab_size: int, draw: random.Random) -> Any:
    sizes = {name: value for name, value in COMMON.items() if name != "num_hidden_layers"}
    config = transformers.NemotronHConfig(
        vocab_size=vocab_size,
        layers_block_type=None,
        hybrid_override_pattern="M*-",
        head_dim=8,
        mamba_num_heads=4,
        mamba_head_dim=8,
        n_groups=2,
        ssm_state_size=16,
        chunk_size=16,
        time_step_min=NO_STEP_LIMIT,
        **sizes,
    )
    return filled(transformers.NemotronHForCausalLM(config), draw)


def _granite(vocab_size: int, draw: random.Random) -> Any:
    config = transformers.GraniteMoeHybridConfig(
        vocab_size=vocab_size,
        layer_types=["mamba", "attention"],
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=20,
        position_embedding_type=None,
        mamba_chunk_size=16,
        embedding_multiplier=3.0,
        residual_multiplier=0.5,
        attention_multiplier=0.25,
        logits_scaling=4.0,
        **MAMBA,
        **COMMON,
    )
    return filled(transformers.GraniteMoeHybridForCausalLM(config), draw)


@dataclass(frozen=True)
class Served:
    """A family of published models."""

    structure: str
    """Name of the structure of its chat template; see `template_conversations`."""
    build: Callable[[int, random.Random], Any]
    kwargs: str | None = None
    """Value of ``--chat-template-kwargs`` with the model's own template."""
    ends: tuple[str, ...] = ()
    """Ends of answers in generation_config.json beside ``eos_token``."""


MODELS = {
    "qwen3_5": Served("qwen3_5", _qwen3_5, ends=("<|endoftext|>",)),
    "llama": Served("llama", _llama, '{"date_string": "28 Nov 2026"}', ("<|eom_id|>",)),
    "nemotron_h": Served("nemotron", _nemotron_h),
    "granite": Served("granite", _granite),
}
TEMPLATES = ("own", "chatml", "file")
"""Chat template of the training: the model's own, the built-in one, or a file of the user."""


class Compared(NamedTuple):
    """Answers to the same prompts."""

    ours: list[list[int]]
    theirs: list[list[int]]
    ends: frozenset[int]
    said: str
    """Console of the export."""
    gap: float
    """Largest difference between the logits of our token and their token where an answer first
    differs, relative to the largest logit there; 0 if all answers are equal."""

    @property
    def stopped(self) -> bool:
        """True if every answer of transformers stops before the limit."""
        return all(answer[-1] in self.ends for answer in self.theirs)


def write_base(name: str, folder: Path, seed: int = 0) -> None:
    """Write a random model of a family, with its tokenizer and chat template."""
    served, draw = MODELS[name], random.Random(seed)
    structure = next(one for one in STRUCTURES if one.name == served.structure)
    folder.mkdir(parents=True)
    write_tokenizer(structure, folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = served.build(len(tokenizer), draw)
    numbers = tokenizer.convert_tokens_to_ids([structure.eos, *served.ends])
    for config in (model.config, model.config.get_text_config()):
        config.eos_token_id, config.pad_token_id = numbers[-1], None
    model.generation_config = transformers.GenerationConfig(
        do_sample=True, temperature=0.6, top_p=0.9, eos_token_id=numbers
    )
    model.save_pretrained(folder)


def check(
    name: str, template: str, folder: Path, *, bf16: bool = False, flags: Sequence[str] = ()
) -> Compared:
    """Convert, fine-tune for 40 steps with two processes, export, and answer on both sides.

    Args:
        name: key of `MODELS`.
        template: one of `TEMPLATES`.
        folder: directory for all files.
        bf16: train in bf16.
        flags: further flags of the export.
    """
    served = MODELS[name]
    base, weights, run, out = (folder / part for part in ("base", "weights", "run", "out"))
    write_base(name, base)
    _succeed("--from-hf", base, "--save", weights, *["--bf16"] * bf16)
    (folder / "chat.jinja").write_text(CHATML)
    data = folder / "chats.jsonl"
    data.write_text("".join(json.dumps({"messages": m}) + "\n" for m in _conversations()))
    options = {**TINY_RUN, **flags_of(weights / "model.args"), "train_iters": 40, "lr": 1e-2}
    options |= {"train_data_path": data, "data_cache_path": folder / "cache"}
    options |= {"seq_length": 512, "pretrained_checkpoint": weights}
    if template != "own":
        options["chat_template"] = {"file": folder / "chat.jinja"}.get(template, template)
    elif served.kwargs is not None:
        options["chat_template_kwargs"] = served.kwargs
    trained(run, 2, options)
    said = _succeed("--to-hf", out, "--load", run / "checkpoints", "--hf-base", base, *flags)
    model = TrainedModel.load(run / "checkpoints", device="cpu")
    prompts = encode_prompts(model.config, model.tokenizer, texts(QUESTIONS))
    ours = generate(model.model, prompts.tokens, NEW_TOKENS, ends=prompts.ends)
    theirs = _theirs(out)
    both = zip(prompts.tokens, ours, theirs, strict=True)
    gap = max(_gap(model.model, *answers) for answers in both)
    return Compared(ours, theirs, prompts.ends, said, gap)


def _conversations() -> list[list[dict[str, str]]]:
    pairs = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        for question, answer in zip(QUESTIONS, ANSWERS, strict=True)
    ]
    return [*pairs, pairs[0] + pairs[1], pairs[2] + pairs[3]] * 2


def _theirs(folder: Path) -> list[list[int]]:
    """Return the answers of transformers, which reads everything from the folder."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, architecture).from_pretrained(folder).eval()
    answers = []
    for question in QUESTIONS:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        # The settings of generation_config.json, except that the most likely token is taken.
        [tokens] = model.generate(**prompt, max_new_tokens=NEW_TOKENS, do_sample=False)
        answers.append(tokens[prompt["input_ids"].shape[1] :].tolist())
    return answers


def _gap(
    model: HybridModel, prompt: Sequence[int], ours: Sequence[int], theirs: Sequence[int]
) -> float:
    """Return `Compared.gap` of one answer; infinite if one answer is the beginning of the other."""
    pairs = list(zip(ours, theirs))
    at = next((number for number, (mine, other) in enumerate(pairs) if mine != other), None)
    if at is None:
        return 0.0 if len(ours) == len(theirs) else float("inf")
    tokens = [*prompt, *ours[:at]]
    batch = cases.make_pack([(tokens, [0] * len(tokens))])
    with torch.no_grad():
        logits = model.logits(batch.tokens, batch.packed)[len(tokens) - 1].float()
    return float((logits[ours[at]] - logits[theirs[at]]).abs() / logits.abs().max())


def _succeed(*words: object) -> str:
    """Run ``megatron-packed convert`` and return what it prints."""
    said = io.StringIO()
    with redirect_stdout(said):
        assert convert(*words) == 0
    return said.getvalue()
