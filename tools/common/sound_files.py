"""Small sound files of each kind that the project reads, made by one tiny model."""

from __future__ import annotations

import base64
import io
import json
import shutil
import subprocess
from pathlib import Path

from support import megatron_checkpoint
from support.data_helpers import byte_level, conversation
from support.family_models import COMMON, MODELS

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOKENIZER = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model tok"
MODEL = f"--hybrid-layer-pattern {MODELS['llama']} {COMMON}"
"""Flags of a llama of four layers."""


def make_sound_files(folder: Path, commands: Path) -> None:
    """Write all sound files to ``folder``, which is also the working directory of their commands.

    Args:
        commands: folder of the programs ``python`` and ``megatron-packed``.
    """
    _write_data(folder)
    _write_tokenizers(folder)
    _write_options(folder)
    megatron_checkpoint.write(
        folder / "megatron", megatron_checkpoint.tensors(), common_file=True, parts=2
    )

    def run(words: str) -> None:
        program = str(commands / "megatron-packed")
        done = subprocess.run(
            [program, *words.split()], cwd=folder, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"

    run(
        f"train --nproc-per-node 1 {MODEL} {TOKENIZER} --train-data-path chat.jsonl --train-iters 2 "
        "--save ck --log-jsonl log.jsonl"
    )
    run("convert --to-hf hf --load ck")
    run("convert --from-hf hf --save converted")
    run(
        "preprocess --input numbers.jsonl --output-prefix indexed --tokenizer-type NullTokenizer "
        "--vocab-size 256"
    )


def _write_data(folder: Path) -> None:
    lines = [conversation(f"Hello {number}", f"fine {number}") for number in range(40)]
    (folder / "chat.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "chat").mkdir()
    (folder / "chat" / "a.jsonl").write_text("\n".join(lines[:20]) + "\n")
    (folder / "chat" / "b.json").write_text(json.dumps([json.loads(line) for line in lines[20:]]))
    texts = [f"Hello there, how are you {number}?" for number in range(40)]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    numbers = [" ".join(str((n * 7 + i) % 250) for i in range(20)) for n in range(40)]
    (folder / "numbers.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in numbers))
    (folder / "prompts.jsonl").write_text('{"prompt": "Hello 1"}\n{"prompt": "Hello 2"}\n')
    _write_tables(folder, texts)


def _write_tables(folder: Path, texts: list[str]) -> None:
    """Write a Parquet file and a saved Hugging Face data set; nothing without pyarrow."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        return
    table = pa.table({"text": texts})
    pq.write_table(table, folder / "text.parquet")
    (folder / "dataset").mkdir()
    with pa.ipc.new_stream(str(folder / "dataset" / "data.arrow"), table.schema) as out:
        out.write_table(table)
    state = {"_data_files": [{"filename": "data.arrow"}], "_split": "train"}
    (folder / "dataset" / "state.json").write_text(json.dumps(state))
    (folder / "dataset" / "dataset_info.json").write_text(json.dumps({"features": {}}))


def _write_tokenizers(folder: Path) -> None:
    engine = byte_level()
    (folder / "tok").mkdir()
    engine.save(str(folder / "tok" / "tokenizer.json"))
    config = {"eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tok" / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "tok" / "special_tokens_map.json").write_text(json.dumps({"eos_token": "</s>"}))
    (folder / "template.jinja").write_text(TEMPLATE)
    model = json.loads(engine.to_str())["model"]
    vocabulary = {**model["vocab"], "<|endoftext|>": len(model["vocab"])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    ranks = "".join(f"{base64.b64encode(bytes([n])).decode()} {n}\n" for n in range(256))
    (folder / "vocab.tiktoken").write_text(ranks)
    try:
        import sentencepiece
    except ImportError:
        return
    model_file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["Hello there, how are you today? I am fine."] * 20),
        model_writer=model_file,
        vocab_size=300,
        hard_vocab_limit=False,
        byte_fallback=True,
        minloglevel=2,
    )
    (folder / "piece.model").write_bytes(model_file.getvalue())


def _write_options(folder: Path) -> None:
    (folder / "blend.txt").write_text("1 chat.jsonl\n")
    (folder / "splits.json").write_text('{"train": ["1", "chat.jsonl"], "valid": null}')
    (folder / "run.yaml").write_text("packing:\n  seq_length: 128\n")
    (folder / "run.args").write_text("--sft --seq-length 128 --train-data-path chat.jsonl\n")
    (folder / "lengths.txt").write_text("120 30\n60 10\n")
    flags = {"--num-layers": 2, "--hidden-size": 32, "--num-attention-heads": 4}
    flags |= {"--seq-length": 128, "--data-path": "data", "--lr": 1e-3, "--train-iters": 2}
    (folder / "model_config.yaml").write_text(json.dumps({"MODEL_ARGS": flags}))
    words = " ".join(f"{name} {value}" for name, value in flags.items())
    script = f'ARGS=({words})\ntorchrun pretrain_gpt.py "${{ARGS[@]}}"\n'
    (folder / "train.sh").write_text(script)
    packs = [
        {"capacity": capacity, "documents": 2, "squares": squares, "ms": ms}
        for capacity in (2, 4)
        for squares, ms in ((1000.0, 1.0), (2000.0, 2.0))
    ]
    costs = {"format": "megatron_packed step costs 1", "tokens": 128, "update_ms": 1.0}
    (folder / "costs.json").write_text(json.dumps({**costs, "packs": packs, "device": "cpu"}))


def copy_files(sound: Path, names: tuple[str, ...], folder: Path) -> None:
    """Copy files and folders of the sound files into a new folder."""
    folder.mkdir()
    for name in names:
        if (sound / name).is_dir():
            shutil.copytree(sound / name, folder / name)
        else:
            shutil.copyfile(sound / name, folder / name)
