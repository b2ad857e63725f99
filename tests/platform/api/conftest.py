"""One real server for these tests: the command line's `serve` in a process of its own."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

ADMIN_KEY = "an-admin-key-for-tests"
ALL_SCOPES = ["inference", "adapters:read", "adapters:write", "routes:write", "usage:read"]
START_SECONDS = 180


@dataclass(frozen=True)
class RunningServer:
    """Where it is, its process, and its log."""

    url: str
    pid: int
    log: Path
    admin_key: str = ADMIN_KEY

    def admin(self) -> httpx.Client:
        return self.client(ADMIN_KEY)

    def client(self, key: str) -> httpx.Client:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=120)

    def new_key(self, tenant: str, scopes: list[str]) -> str:
        with self.admin() as admin:
            answer = admin.post(f"/admin/tenants/{tenant}/keys", json={"scopes": scopes})
            answer.raise_for_status()
            return str(answer.json()["key"])

    def new_tenant(self, **limits: int) -> "Tenant":
        slug = f"t-{uuid.uuid4().hex[:12]}"
        with self.admin() as admin:
            body = {"slug": slug, "limits": limits}
            admin.post("/admin/tenants", json=body).raise_for_status()
        return Tenant(self, slug, self.new_key(slug, ALL_SCOPES))


@dataclass(frozen=True)
class Tenant:
    """A tenant with one key."""

    server: RunningServer
    slug: str
    key: str

    def http(self) -> httpx.Client:
        return self.server.client(self.key)

    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.server.url}/v1", api_key=self.key, max_retries=0)

    def push(
        self, name: str, folder: Path, query: str = "wait=true&promote=prod"
    ) -> httpx.Response:
        with self.http() as client:
            return client.post(
                f"/v1/adapters/{name}/revisions?{query}",
                content=packed(folder),
                headers={"content-type": "application/x-tar"},
            )


def packed(folder: Path) -> bytes:
    """The folder as a tar."""
    path = folder.parent / f"{folder.name}-{uuid.uuid4().hex}.tar"
    with tarfile.open(path, "w") as archive:
        archive.add(folder, arcname=folder.name)
    return path.read_bytes()


@pytest.fixture(scope="session")
def server(
    tiny_llama_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    with served(tiny_llama_folder, tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture
def serve_another() -> Callable[..., contextlib.AbstractContextManager[RunningServer]]:
    """For tests that need servers of their own: `with serve_another(base, folder, …)`."""
    return served


@contextlib.contextmanager
def served(base: Path, folder: Path, **more: object) -> Iterator[RunningServer]:
    """`polyloom serve` with its log in `folder`, and its data too unless `more` says otherwise."""
    command = [sys.executable, "-m", "polyloom.platform.cli.main", "serve"]
    options = {
        "base": base,
        "port": 0,
        "data-dir": folder / "data",
        "dtype": "float32",
        "kv-memory": "64MiB",
        "adapter-memory": "64MiB",
        "upload-limit": "4MiB",
        "max-running": 16,
    } | {name.replace("_", "-"): value for name, value in more.items()}
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("POLYLOOM_")}
    log = folder / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=out,
            env=environment | {"POLYLOOM_ADMIN_KEY": ADMIN_KEY, "PYTHONUNBUFFERED": "1"},
        )
    try:
        yield RunningServer(_wait_for_url(process, log), process.pid, log)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()[-3000:]


def _wait_for_url(process: "subprocess.Popen[bytes]", log: Path) -> str:
    give_up = time.monotonic() + START_SECONDS
    while time.monotonic() < give_up and process.poll() is None:
        found = re.search(r"at (http://\S+)", log.read_text())
        if found:
            return found[1]
        time.sleep(0.1)
    process.kill()
    raise AssertionError(log.read_text()[-3000:])


@pytest.fixture(scope="session")
def tenant(server: RunningServer) -> Tenant:
    return server.new_tenant()


MakeAdapter = Callable[..., Path]


@pytest.fixture(scope="session")
def make_adapter(tiny_llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> MakeAdapter:
    """`make_adapter(seed)`: a folder of a random adapter with a strong effect, cached by seed."""
    made: dict[int, Path] = {}

    def make(seed: int) -> Path:
        if seed not in made:
            torch.manual_seed(seed)
            base = AutoModelForCausalLM.from_pretrained(tiny_llama_folder)
            config = LoraConfig(
                r=8,
                lora_alpha=64,
                target_modules=["q_proj", "v_proj", "o_proj", "down_proj"],
                task_type="CAUSAL_LM",
                init_lora_weights=False,
            )
            made[seed] = tmp_path_factory.mktemp(f"adapter-{seed}")
            get_peft_model(base, config).save_pretrained(made[seed])
        return made[seed]

    return make


@pytest.fixture(scope="session")
def base_name(tiny_llama_folder: Path) -> str:
    return tiny_llama_folder.name
