#!/usr/bin/env python3
"""Runs a container in vLLM, which finds the plugin by itself.

usage: serve_vllm.py CONTAINER [PROMPT...]        as a server: vllm serve CONTAINER --dtype float16
"""
import sys

from vllm import LLM, SamplingParams

if __name__ == "__main__":
    model = LLM(sys.argv[1], dtype="float16")
    outputs = model.generate(sys.argv[2:] or ["The"], SamplingParams(temperature=0, max_tokens=64))
    for output in outputs:
        print(repr(output.prompt + output.outputs[0].text))
