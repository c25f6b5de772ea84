"""Byte-level BPE tokenizers trained on the fly: every text round-trips through encoding and decoding."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "\n\nHuman: What is 2 plus 3?\n\nAssistant: It is 5.",
    "user assistant system Please add 17 and 4. Of course, the sum of 17 and 4 is 21.",
]

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BOS_HEADERS = (  # begins with BOS; a turn ends with an end token and no newline
    "{{ bos_token }}{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n\n' + message['content'] "
    "+ '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n\n' }}{% endif %}"
)
NO_END = (  # plain text without an end-of-turn token
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
NO_PREFIX = (  # the generation prompt is no prefix of the finished turn
    "{% for message in messages %}{{ '[' + message['role'] + '] ' + message['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[now] ' }}{% endif %}"
)


def make_tokenizer(*, bos=None, eos="</s>", pad="</s>", template=None, adds_bos=False, adds_eos=False):
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["</s>", "<s>", "<|im_start|>", "<|im_end|>", "<pad>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS * 4, trainer)
    if adds_bos or adds_eos:
        parts = [bos] * adds_bos + ["$A"] + [eos] * adds_eos
        special_tokens = [(token, backend.token_to_id(token)) for token in {bos, eos} - {None}]
        backend.post_processor = processors.TemplateProcessing(single=" ".join(parts), special_tokens=special_tokens)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token=eos, pad_token=pad)
    tokenizer.chat_template = template
    return tokenizer
