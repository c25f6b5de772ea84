"""Shared fixtures and settings: thread limits, offline mode, skip reasons of GPU tests, tiny tokenizer and Llama."""

import importlib.util
import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Set before torch is imported, which reads these once; subprocesses of the tests inherit them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")  # on a machine with GPUs too; tests marked gpu set their own
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
SUPPORT = ROOT / "tests" / "support"
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), str(SUPPORT), os.environ.get("PYTHONPATH")]))

import pytest  # noqa: E402

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("vllm") is None:
        for item in items:
            if item.get_closest_marker("vllm") is not None:  # a keyword may be a folder of the path
                item.add_marker(pytest.mark.skip(reason="needs vLLM: bash scripts/test.sh --vllm"))
    gpu_items = [item for item in items if "gpu" in item.keywords]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch sees none"))


@pytest.fixture(scope="session")
def tiny_tokenizer():
    """Byte-level BPE of about 300 tokens with a ChatML template; pad, bos and eos are three different tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())
    )
    bpe.train_from_iterator(["the cat sat on the mat and the dog sat there"] * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<|pad|>", bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
    tokenizer.chat_template = CHATML
    return tokenizer


@pytest.fixture
def tiny_llama_folder(tmp_path: Path, tiny_tokenizer) -> Path:
    """A Hugging Face folder with a seeded random Llama (2 layers x 32) and the tiny tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tiny_tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        pad_token_id=tiny_tokenizer.pad_token_id,
        bos_token_id=tiny_tokenizer.bos_token_id,
        eos_token_id=tiny_tokenizer.eos_token_id,
    )
    folder = tmp_path / "tiny-llama"
    LlamaForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def single_rank_group():
    """The tests of a module run as one rank of a process group (see rlhf_models)."""
    from rlhf_models import group_of_one

    with group_of_one():
        yield


@pytest.fixture(scope="session")
def programs():
    """Runs scripts on several processes (see programs.py)."""
    from programs import Programs

    with Programs() as server:
        yield server
