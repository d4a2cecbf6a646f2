"""Runs rows of token ids through an in-process vLLM, or through one whose connector leaves their hidden states in
files, as a subprocess of another Python: standard library, vLLM and its torch.

    PYTHON -I vllm_worker.py JOB.json        (-I: nothing of this package, and no module beside this file, is imported)

JOB.json: {"llm": arguments of vllm.LLM, "output": path, ..}. Appends JSON lines to output: {"kind": "engine", ..} once
the engine is up, then what follows; {"kind": "error", "message"} for what the caller has to mend.

With "prompts": [[token id]], "seeds": [int or null], "group": prompts at a time, "sampling": arguments of
vllm.SamplingParams and "warm_up": [token id] they are answered: {"kind": "group", ..} for each group, {"kind": "end"}.
The counters are differences over the group.

Without them rows are read: standard input has a line [[number, [token id]]] for each group of rows that is run
together, {"kind": "files", "files": [[number, path]]} answers it. A file may still be in the writing when it is named:
its lock says so. Where the input ends whoever asked is gone, and all of it ends.
"""

import json
import os
import queue
import signal
import sys
import threading
import time

COUNTERS = {
    "vllm:spec_decode_num_drafts": "draft_rounds",
    "vllm:spec_decode_num_draft_tokens": "drafted",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
}
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"
ITERATIONS = "vllm:iteration_tokens_total"


def main(job_path):
    """Load the engine, run the groups of the job or of the input."""
    with open(job_path, encoding="utf-8") as file:
        job = json.load(file)
    rows = None if "prompts" in job else listen(sys.stdin)
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
            threads=torch.get_num_threads(),
            startup=time.perf_counter() - started,
        )
        while rows is not None:
            write(kind="files", files=run_rows(llm, vllm, rows.get()))
        generate(llm, vllm, job, [job["warm_up"]], [None], max_tokens=8)
        for first in range(0, len(job["prompts"]), job["group"]):
            chosen = slice(first, first + job["group"])
            write(**run_group(llm, vllm, job, first, job["prompts"][chosen], job["seeds"][chosen]))
        write(kind="end")
    return 0


def listen(lines):
    """A queue of the groups of rows in the input; at its end this process and its engine end."""
    groups = queue.Queue()

    def read():
        for line in lines:
            groups.put(json.loads(line))
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=read, daemon=True).start()
    return groups


def run_rows(llm, vllm, rows):
    """[number, path of its file] of each row: the prefill of it all and one token, which is thrown away."""
    prompts = [{"prompt_token_ids": ids} for _, ids in rows]
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    files = [(output.kv_transfer_params or {}).get("hidden_states_path") for output in outputs]
    return [[number, path] for (number, _), path in zip(rows, files, strict=True)]


def generate(llm, vllm, job, prompts, seeds, **changes):
    """The engine's outputs for prompts of token ids, run together."""
    sampling = [vllm.SamplingParams(**{**job["sampling"], "seed": seed, **changes}) for seed in seeds]
    return llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)


def run_group(llm, vllm, job, first, prompts, seeds):
    """One line of the output: tokens and seconds of each prompt, and the counter differences of the group."""
    before = read_counters(llm)
    outputs = generate(llm, vllm, job, prompts, seeds)
    after = read_counters(llm)
    rows = []
    for index, output in enumerate(outputs, first):
        stats = output.metrics  # The engine core's own monotonic clock: the prefill's token ends the prefill.
        rows.append(
            {
                "index": index,
                "tokens": list(output.outputs[0].token_ids),
                "ttft": stats.first_token_ts - stats.queued_ts,
                "seconds": stats.last_token_ts - stats.first_token_ts,
            }
        )
    return {"kind": "group", "prompts": rows, "counters": difference(before, after)}


def read_counters(llm):
    """The counters of speculative decoding and the number of engine steps, summed over engines."""
    counters = {"draft_rounds": 0, "drafted": 0, "accepted": 0, "per_position": [], "iterations": 0}
    for metric in llm.get_metrics():
        if metric.name in COUNTERS:
            counters[COUNTERS[metric.name]] += metric.value
        elif metric.name == PER_POSITION:
            counters["per_position"] = add(counters["per_position"], metric.values)
        elif metric.name == ITERATIONS:
            counters["iterations"] += metric.count
    return counters


def add(left, right):
    """Elementwise sum of two lists, the shorter one filled up with zeros."""
    longest = max(len(left), len(right))
    left, right = (list(values) + [0] * (longest - len(values)) for values in (left, right))
    return [a + b for a, b in zip(left, right, strict=True)]


def difference(before, after):
    """What the counters rose by."""
    rose = {name: after[name] - before[name] for name in after if name != "per_position"}
    rose["per_position"] = add(after["per_position"], [-count for count in before["per_position"]])
    return rose


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
