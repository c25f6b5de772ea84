"""Creates a tiny Llama with random weights and a newly trained BPE tokenizer, as a Hugging Face folder.

python scripts/quickstart/make_model.py --data DIR/sft_train.jsonl --output MODEL --seed 1
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable

import torch
from jinja2 import TemplateError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from dschat.arguments.script_inputs import (
    SEEDS,
    existing_file,
    exit_on_mistake,
    new_folder,
    number_type,
    read_json_lines,
)
from dschat.data.chat_template import ensure_chat_template

EOS, PAD = "<|end|>", "<|pad|>"
VOCABULARY_SIZE = 512
MAX_POSITIONS = 256


def wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """`tokenizer` as a transformers tokenizer with a chat template, an end token and a separate pad token."""
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=MAX_POSITIONS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    ensure_chat_template(wrapped)
    return wrapped


def train_tokenizer(conversations: Iterable[list[dict]]) -> PreTrainedTokenizerFast:
    """Byte-level BPE over `conversations` as rendered by the chat template; every digit is one token.

    Byte-level, so any text can be encoded and decoded. With single-digit tokens, the 7 of 7, 17 and 70 is the same
    token.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    template = wrap(tokenizer)
    texts = (template.apply_chat_template(messages, tokenize=False).replace(EOS, "") for messages in conversations)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return wrap(tokenizer)


def tiny_llama(tokenizer: PreTrainedTokenizerFast, *, seed: int) -> LlamaForCausalLM:
    """About 0.9 million parameters: 4 layers of width 128, random weights from `seed`."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        initializer_range=0.05,  # the usual 0.02 is meant for wider models
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=existing_file, required=True, help="jsonl file with a `messages` column")
    parser.add_argument("--output", type=new_folder, required=True, help="folder of the model")
    parser.add_argument("--seed", type=number_type(int, **SEEDS), default=1)
    options = parser.parse_args(arguments)
    with exit_on_mistake("make_model"):
        conversations = [row["messages"] for row in read_json_lines(options.data, fields=["messages"])]
        if not conversations:
            raise ValueError(f"{options.data} has no rows: a tokenizer needs text to learn from")
        try:
            tokenizer = train_tokenizer(conversations)
        except (TypeError, KeyError, AttributeError, TemplateError) as error:
            raise ValueError(f'{options.data}: its "messages" are no chats ({error})') from error
        model = tiny_llama(tokenizer, seed=options.seed)
        options.output.mkdir(parents=True, exist_ok=True)
        tokenizer.save_pretrained(options.output)
        model.save_pretrained(options.output)
    print(f"{options.output}: Llama, {model.num_parameters() / 1e6:.2f}M parameters, {len(tokenizer)} tokens")


if __name__ == "__main__":
    main()
