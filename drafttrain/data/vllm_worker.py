"""Runs rows of token ids through vLLM, whose connector leaves their hidden states in files, as a subprocess of another
Python: standard library and vLLM.

    PYTHON -I vllm_worker.py JOB.json        (-I: nothing of this package, and no module beside this file, is imported)

JOB.json: {"llm": arguments of vllm.LLM, "output": path}. Standard input: a line [[number, [token id]]] for each group
of rows that is run together. Appends JSON lines to output: {"kind": "engine", ..} once the engine is up, {"kind":
"files", "files": [[number, path]]} for each group; {"kind": "error", "message"} for what the caller has to mend. A file
may still be in the writing when it is named: its lock says so. Where the input ends whoever asked is gone, and all of
it ends.
"""

import json
import os
import queue
import signal
import sys
import threading
import time


def main(job_path):
    """Load the engine, run the groups as they come."""
    groups = queue.Queue()
    threading.Thread(target=listen, args=(sys.stdin, groups), daemon=True).start()
    with open(job_path, encoding="utf-8") as file:
        job = json.load(file)
    with open(job["output"], "a", encoding="utf-8") as output:

        def write(**line):
            output.write(json.dumps(line) + "\n")
            output.flush()

        try:
            import torch
            import vllm
        except ImportError as error:
            write(kind="error", message=f"cannot import vllm with {sys.executable}: {error}")
            return 1
        started = time.perf_counter()
        llm = vllm.LLM(**job["llm"])
        write(
            kind="engine",
            version=vllm.__version__,
            python=sys.version.split()[0],
            torch=torch.__version__,
            device=torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
            startup=time.perf_counter() - started,
        )
        while True:
            write(kind="files", files=run_group(llm, vllm, groups.get()))


def listen(lines, groups):
    """Put each group of the input into the queue; at its end this process and its engine end."""
    for line in lines:
        groups.put(json.loads(line))
    os.killpg(os.getpgrp(), signal.SIGKILL)


def run_group(llm, vllm, rows):
    """[number, path of its file] of each row: the prefill of it all and one token, which is thrown away."""
    prompts = [{"prompt_token_ids": ids} for _, ids in rows]
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    files = [(output.kv_transfer_params or {}).get("hidden_states_path") for output in outputs]
    return [[number, path] for (number, _), path in zip(rows, files, strict=True)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
