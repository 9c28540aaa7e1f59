"""Decodes a few prompts in vLLM otherwise than in one process, with the plugin switched on.

python -m python_tests.vllm_engine.ways processes|tensor_parallel|server OUT
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from python_tests.vllm_engine.models import COUNTERS, PAIR, TARGET, speculative_config

PROMPTS = 8


def offline(**options: Any) -> dict[str, Any]:
    from python_tests.vllm_engine.run import counters, decode, load

    with tempfile.TemporaryDirectory() as made:
        llm = load("dflash", Path(made), additional_config={"dcut": True}, **options)
        found = decode(llm, PROMPTS, PROMPTS)
        return {"texts": found["texts"]} | counters(llm)


def served() -> dict[str, Any]:
    """Texts of a streaming client, and the server's own counts."""
    from openai import OpenAI

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = json.dumps(speculative_config("dflash", Path()))
    arguments = ["--speculative-config", config, "--additional-config", '{"dcut": true}', "--dtype", "float32"]
    arguments += ["--max-model-len", "512", "--enforce-eager", "--no-async-scheduling", "--port", str(port)]
    command = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", str(TARGET), *arguments]
    server = subprocess.Popen(command, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}"
        wait(f"{url}/health", server)
        client, texts = OpenAI(base_url=f"{url}/v1", api_key="none"), []
        for prompt in json.loads((PAIR / "prompts.json").read_text())[:PROMPTS]:
            stream = client.completions.create(
                model=str(TARGET), prompt=prompt, max_tokens=64, temperature=0, stream=True,
                extra_body={"return_token_ids": True},
            )  # fmt: skip
            texts.append([token for chunk in stream for token in chunk.choices[0].token_ids or []])  # type: ignore[attr-defined]
        metrics = urllib.request.urlopen(f"{url}/metrics").read().decode()
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)  # with the engine's own process
            raise
    found: dict[str, Any] = {"texts": texts}
    for key, name in COUNTERS.items():
        found[key] = sum(map(float, re.findall(rf"^vllm:{name}_total{{.*}} ([\d.e+]+)$", metrics, re.MULTILINE)))
    return found


def wait(url: str, server: subprocess.Popen) -> None:
    for _ in range(600):
        if server.poll() is not None:
            raise RuntimeError(f"server: expected it to stay, got exit status {server.returncode}")
        try:
            urllib.request.urlopen(url, timeout=1)
            return
        except OSError:
            time.sleep(0.5)
    raise RuntimeError("server: expected it to answer within five minutes")


if __name__ == "__main__":
    ways = {"processes": offline, "tensor_parallel": lambda: offline(tensor_parallel_size=2), "server": served}
    Path(sys.argv[2]).write_text(json.dumps({sys.argv[1]: ways[sys.argv[1]]()}))
