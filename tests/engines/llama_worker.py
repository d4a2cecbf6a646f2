"""Runs in the engines' environment: llama.cpp's own server on GGUF files, asked what a job says.

Usage: llama_worker.py JOB.json REPLIES.json, a job being {"model": PATH, "draft": null or {"path", "type", "k"},
"requests": [[address, body]]}.
"""

import json
import sys
import urllib.request

import xllamacpp

LENGTH = 256


def settings(job: dict) -> xllamacpp.CommonParams:
    """One request at a time, one thread, everything in float32, nothing kept from one request to the next."""
    out = xllamacpp.CommonParams()
    out.model.path = job["model"]
    out.n_ctx, out.n_parallel, out.port, out.n_gpu_layers = LENGTH, 1, 0, 0
    out.warmup = out.fit_params = False
    out.cache_type_k = out.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    out.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    out.cpuparams.n_threads = out.cpuparams_batch.n_threads = 1
    if job["draft"]:
        draft = out.speculative.draft
        out.speculative.types = [getattr(xllamacpp.common_speculative_type, job["draft"]["type"])]
        draft.mparams.path, draft.n_max, draft.n_min, draft.p_min = job["draft"]["path"], job["draft"]["k"], 0, 0.0
        draft.n_gpu_layers = 0
        draft.cache_type_k = draft.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = 1
    return out


def ask(url: str, body: dict) -> dict:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        job = json.load(file)
    server = xllamacpp.Server(settings(job))
    replies = [ask(server.listening_address + address, body) for address, body in job["requests"]]
    with open(sys.argv[2], "w") as file:
        json.dump(replies, file)
