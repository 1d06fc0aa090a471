"""A vLLM in an environment of its own, as a process; its lines go to a file."""

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

# A start takes a minute on an idle machine with two cores.
_PATIENCE_S = 900.0


class Server:
    """A server of one model and a folder of states."""

    def __init__(self, python: Path, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / f"server-{port}.log"
        transfer = {
            "kv_connector": "ProtoKVConnector",
            "kv_connector_module_path": "protokv.vllm",
            "kv_role": "kv_consumer",
            "kv_connector_extra_config": {"states": str(folder / "states")},
        }
        chosen = {
            "model": folder / "model",
            "host": "127.0.0.1",
            "port": port,
            "max-model-len": 1024,
            "block-size": 32,
            "max-logprobs": 20,
            "kv-transfer-config": json.dumps(transfer),
            "dtype": "float32",
            "limit-mm-per-prompt": '{"image":0,"video":0}',
            # So few blocks have no room for all states and all that is in flight.
            "num-gpu-blocks-override": 40,
            "max-num-seqs": 16,
        }
        flags = [part for name, value in chosen.items() for part in (f"--{name}", str(value))]
        flags += ["--enforce-eager", "--enable-prefix-caching", "--enable-chunked-prefill"]
        self._command = [str(python), "-m", "vllm.entrypoints.openai.api_server", *flags]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it answers."""
        environment = os.environ | {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        environment.pop("PYTHONPATH", None)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdout=log,
                stderr=log,
                env=environment,
                cwd=self.log.parent,
                start_new_session=True,
            )
        until = time.monotonic() + _PATIENCE_S
        while time.monotonic() < until and self._process.poll() is None:
            try:
                urlopen(f"{self.url}/health", timeout=5).close()
            except (URLError, OSError):
                time.sleep(1)
            else:
                return
        self.kill()
        tail = self.log.read_text(errors="replace").splitlines()[-15:]
        raise RuntimeError("\n".join(["the server did not start:", *tail]))

    def kill(self) -> None:
        """End it and its workers at once."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    @contextmanager
    def running(self) -> Iterator["Server"]:
        """Hold it running."""
        self.start()
        try:
            yield self
        finally:
            self.kill()
