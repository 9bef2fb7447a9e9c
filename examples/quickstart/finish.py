"""End of the quickstart: compare the loss with that of single tokens, answer questions, report.

python examples/quickstart/finish.py @examples/quickstart/sft.args
"""

import json
import sys
from pathlib import Path

from megatron_packed.config.parser.parse import parse_or_exit
from megatron_packed.data.sources.tokenized_dataset import open_dataset
from megatron_packed.data.tokenizers.chat_format import chat_format
from megatron_packed.data.tokenizers.encode import answer_ends, prompt_tokens
from megatron_packed.models.generate import generate
from megatron_packed.reporting.curves import read_jsonl
from megatron_packed.reporting.run_report import write_report
from megatron_packed.training.load_for_inference import load_model
from megatron_packed.training.open_documents import build_tokenizer

QUESTIONS = 3
MARGIN = 0.5
"""Nats by which the validation loss must be lower than the entropy of single answer tokens."""


def main() -> int:
    config = parse_or_exit(sys.argv[1:], launched=False)
    tokenizer = build_tokenizer(config.data, config.model.vocab_size)
    chat = chat_format(tokenizer)
    valid = open_dataset(
        config.data.valid_data_path,
        tokenizer,
        chat,
        sft=True,
        shorten_to=config.shorten_to,
        cache_root=config.data.data_cache_path,
        show=False,
    )
    entropy = valid.target_entropy()
    log = config.logging.log_jsonl
    losses = [r["valid_loss"] for r in read_jsonl(log) if "valid_loss" in r]
    print(
        f"validation loss {losses[0]:.3f} -> {losses[-1]:.3f}; unigram entropy of the answers {entropy:.3f} nats"
    )

    model = load_model(config, tokenizer.vocab_size)
    notes = []
    lines = Path(config.data.valid_data_path[0]).read_text().splitlines()
    for line in lines[:: max(1, len(lines) // QUESTIONS)][:QUESTIONS]:
        question = json.loads(line)["messages"][0]["content"]
        prompt = prompt_tokens(tokenizer, chat, [{"role": "user", "content": question}])
        [answer] = generate(model, [prompt], max_new_tokens=48, ends=answer_ends(tokenizer, chat))
        text = tokenizer.decode(answer, skip_special=True).strip()
        print(f"\nQ: {question}\nA: {text}")
        notes.append((f"Question: {question}", text))
    chat.close()

    page = write_report(
        log,
        Path(log).with_name("report.html"),
        title="Quickstart: Python's standard library, answered by a small hybrid model",
        levels={"unigram entropy": entropy},
        notes=notes,
    )
    print(f"\nreport: {page}")
    if losses[-1] > entropy - MARGIN:
        print(
            f"The validation loss is not {MARGIN} nats below the unigram entropy: the model did not learn."
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
