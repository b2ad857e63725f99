"""`polyloom serve`."""

from typing import Any

import rich_click as click

OPTIONS = {
    "base": "A known name, a folder, a .gguf file or a hub id.",
    "host": "Address to listen on.  [default: 127.0.0.1]",
    "port": "Port to listen on.  [default: 8000]",
    "data_dir": "Where adapters, the database and bases are kept.",
    "device": "auto, cpu or cuda.  [default: auto]",
    "dtype": "auto, bfloat16 or float32.  [default: auto]",
    "kv_dtype": "auto (as dtype) or int8, which needs CUDA kernels.  [default: auto]",
    "database_url": "The record; SQLite in the data directory if not given.",
    "redis_url": "Shared live state; in this process if not given.",
    "kv_memory": "Memory of each engine's KV cache, such as 1GiB.",
    "adapter_memory": "Memory of each engine's resident adapters, such as 512MiB.",
    "block_size": "Tokens of a KV block.",
    "token_budget": "Tokens of one step.",
    "max_running": "Sequences that run at the same time.",
    "max_model_len": "Tokens of one sequence, prompt and answer.",
    "queue_limit": "Sequences that may wait.",
    "request_deadline": "Seconds that a request may take.",
    "upload_limit": "Largest upload, such as 2GiB.",
    "max_rank": "Largest rank of an adapter.",
    "itl_target": "Seconds between two tokens of an answer that long prompts are cut up for.",
    "draft_model": "Folder of a smaller model of the same tokenizer that drafts for the base.",
    "drafts": "off, latency, adaptive or a length: guess next tokens where that pays."
    "  [default: adaptive]",
    "prefix_cache": "true or false: reuse the KV of prompts that begin alike.  [default: true]",
    "engines": "Engine processes; each has the base, KV and adapter memory, and limits of its own."
    "  [default: 1]",
}


def _with_options(command: Any) -> Any:
    """Every setting but the admin key, which does not belong on a command line."""
    for name, text in reversed(OPTIONS.items()):
        command = click.option("--" + name.replace("_", "-"), name, help=text)(command)
    return command


@click.command()
@_with_options
def serve(**options: str | None) -> None:
    """Serve a base and all its fine-tunes. Every option is also a POLYLOOM_ variable."""
    from polyloom.platform.settings import SettingsError, load_settings

    try:
        settings = load_settings(options)
    except SettingsError as error:
        raise click.ClickException(str(error)) from error

    from polyloom.platform.cli.serving import run_server

    run_server(settings)
