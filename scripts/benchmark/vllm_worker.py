"""vLLM behind a pipe: run by VLLMProcess with the interpreter of vLLM's own environment, so it imports nothing of ours.

Each line of standard input is a JSON object: {"prompts": [[id, …], …], "limits": [n, …]} names the rollout,
{"go": true} runs it. Each answer is a JSON object on the file descriptor that was standard output; what vLLM prints
goes to standard error.
"""

import ctypes
import json
import os
import signal
import sys
import time

PR_SET_PDEATHSIG = 1


def main() -> None:
    # It sleeps most of the time, and so would not notice that whoever started it is gone.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    settings = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(**values: object) -> None:
        print(json.dumps(values), file=answers)

    import vllm

    llm = vllm.LLM(skip_tokenizer_init=True, generation_config="vllm", **settings)
    answer(version=vllm.__version__)
    prompts, sampling = [], []
    for line in sys.stdin:
        request = json.loads(line)
        if "prompts" in request:
            prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
            sampling = [
                vllm.SamplingParams(temperature=1.0, max_tokens=limit, ignore_eos=True, detokenize=False)
                for limit in request["limits"]
            ]
            answer(taken=len(prompts))
        else:
            # In training the weights have changed since the last rollout, so its keys and values are of no use.
            llm.reset_prefix_cache()
            start = time.perf_counter()
            outputs = llm.generate(prompts, sampling, use_tqdm=False)
            seconds = time.perf_counter() - start
            answer(seconds=seconds, tokens=sum(len(output.outputs[0].token_ids) for output in outputs))


if __name__ == "__main__":
    main()
