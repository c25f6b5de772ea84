"""vLLM worker behind a pipe, run by VLLMProcess in vLLM's own environment, so it imports nothing of dschat.

Each line of standard input is a JSON object: {"prompts": [[id, …], …], "limits": [n, …]} sets the rollout,
{"go": true} runs it. Each response is a JSON object on the original standard output; the output of vLLM is redirected
to standard error.
"""

import ctypes
import json
import os
import signal
import sys
import time

PR_SET_PDEATHSIG = 1


def main() -> None:
    # It is stopped most of the time, so it would not notice that its parent has exited.
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
            answer(prompts=len(prompts))
        else:
            # In training, weights change between rollouts, so cached keys and values are invalid.
            llm.reset_prefix_cache()
            start = time.perf_counter()
            outputs = llm.generate(prompts, sampling, use_tqdm=False)
            seconds = time.perf_counter() - start
            answer(seconds=seconds, tokens=sum(len(output.outputs[0].token_ids) for output in outputs))


if __name__ == "__main__":
    main()
