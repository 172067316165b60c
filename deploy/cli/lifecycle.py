"""`tandem up` and `tandem down`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
import yaml
from rich.status import Status

from deploy import record
from deploy.cli.app import DEFAULT_NAME, app, cluster_name
from deploy.cli.download import resolve_with_progress
from deploy.cli.interrupt import raise_on_signals, run
from deploy.cli.output import EXIT_INTERRUPTED, Output, OutputFormat, fail, reports_errors, show_json, stderr, stdout
from deploy.launch import Launched, launch, settle, take_down
from deploy.record import ClusterRecord
from tandem.config import ClusterConfig, load_config
from tandem.model_files import ModelFiles

_HEAD_CHECK_S = 1.0


@app.command()
@reports_errors
def up(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option(help="a YAML file of settings; see deploy/configs/")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="one setting, such as engine.block_size=32")
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="PATH|HUB-ID|smollm2-135m", help="a folder, a .gguf file or a hub id")
    ] = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"] | None, typer.Option(help="of weights and KV; auto: float32 on CPU")
    ] = None,
    prefill: Annotated[int | None, typer.Option(min=0, help="prefill workers; 0: decode workers prefill too")] = None,
    decode: Annotated[int | None, typer.Option(min=1, help="decode workers")] = None,
    grpc_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="where clients call; 0: any free port")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="return once everything serves")] = False,
    output: Output = OutputFormat.TEXT,
) -> None:
    """Start a cluster on this machine: Ray, the controller, the pools and the router.

    Stays in the foreground, and Ctrl-C stops everything; with --detach it returns, and `tandem down` stops it.

    For example:

      tandem up --detach

      tandem up --model ~/models/Qwen3-0.6B --prefill 2 --decode 2

      tandem up --set engine.kv_cache_mib=1024

      tandem up --set name=second --grpc-port 0 --set control.port=0

    With --prefill 0 it runs aggregated: the decode workers prefill too.
    """
    flags = {
        "model.model": model,
        "model.dtype": dtype,
        "pools.prefill": prefill,
        "pools.decode": decode,
        "router.grpc_port": grpc_port,
    }
    overrides = {**parse_settings(set_ or []), **{key: value for key, value in flags.items() if value is not None}}
    if context.obj:
        overrides["name"] = context.obj
    settings = load_config(config, overrides)
    raise_on_signals()
    files = resolve_with_progress(settings.model.model)
    settle(settings, files)  # says what is wrong before the first stage is shown
    served = False

    def ready(launched: Launched) -> None:
        nonlocal served
        served = True
        _show_ready(launched, detach, output)

    try:
        run(_up(settings, files, detach, ready), lambda: stderr.print("[dim]still stopping; please wait[/]"))
    except KeyboardInterrupt:
        stderr.print("stopped; nothing is left running")
        raise typer.Exit(0 if served else EXIT_INTERRUPTED) from None


async def _up(settings: ClusterConfig, files: ModelFiles, detach: bool, ready: Any) -> None:
    launched = await launch_with_progress(settings, files)
    if detach:
        ready(launched)
        return
    try:
        ready(launched)
        assert launched.head is not None
        while launched.head.poll() is None:  # noqa: ASYNC110 - another process sets no event of ours
            await asyncio.sleep(_HEAD_CHECK_S)
        stderr.print("the cluster was stopped from elsewhere")
    finally:
        stderr.print("stopping ...")
        await take_down(launched.record, launched.head)


async def launch_with_progress(
    settings: ClusterConfig, files: ModelFiles, on_record: Callable[[ClusterRecord], None] = lambda rec: None
) -> Launched:
    """`launch`, with a line for each stage and its duration."""
    started = stage_started = time.monotonic()
    current = ""
    with Status("", console=stderr) as status:

        def on_stage(text: str) -> None:
            nonlocal current, stage_started
            now = time.monotonic()
            stage = text.partition(":")[0]
            if current and stage != current:
                stderr.print(f"[green]✓[/] {current} [dim]{now - stage_started:.1f} s[/]")
            if stage != current:
                current, stage_started = stage, now
            status.update(text)

        launched = await launch(settings, files, on_stage, on_record=on_record)
        on_stage("")
    stderr.print(f"[green]✓[/] everything serves [dim]{time.monotonic() - started:.1f} s in all[/]")
    return launched


def _show_ready(launched: Launched, detach: bool, output: OutputFormat) -> None:
    rec, pools = launched.record, launched.config.pools
    if output is OutputFormat.JSON:
        show_json(
            {
                "cluster": rec.name,
                "model": rec.model,
                "grpc_address": rec.grpc_address,
                "control_address": rec.control_address,
                "prefill": pools.prefill,
                "decode": pools.decode,
            }
        )
        return
    name = f" --cluster {rec.name}" if rec.name != DEFAULT_NAME else ""
    mode = f"{pools.prefill} prefill + {pools.decode} decode" if pools.prefill else f"{pools.decode} aggregated"
    stdout.print(f"\n[bold]{rec.model}[/] on {mode} worker{'' if pools.prefill + pools.decode == 1 else 's'}")
    stdout.print(f"  clients (gRPC)   {rec.grpc_address}")
    stdout.print(f"  control          {rec.control_address}")
    stdout.print(f"  logs             {rec.temp_dir}/session_latest/logs")
    stdout.print(f'\ntry:   tandem{name} generate "The capital of France is"')
    stdout.print(f"stop:  {f'tandem{name} down' if detach else 'Ctrl-C'}")


@app.command()
@reports_errors
def down(context: typer.Context) -> None:
    """Stop a cluster: exactly what `tandem up` started, and nothing else. Safe to repeat."""
    name = cluster_name(context)
    found = record.load(name)
    if found is None:
        others = [other for other in record.names() if other != name]
        stderr.print(f"no cluster {name!r} runs here" + (f"; running: {', '.join(others)}" if others else ""))
        return
    with stderr.status("stopping ..."):
        run(take_down(found))
    stderr.print(f"[green]✓[/] cluster {name!r} is stopped; nothing is left running")


def parse_settings(settings: list[str]) -> dict[str, Any]:
    """`engine.block_size=32` -> {"engine.block_size": 32}: values are YAML."""
    parsed: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            fail(f"--set {setting}: expected KEY=VALUE", "for example: --set engine.block_size=32")
        try:
            parsed[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            fail(f"--set {setting}: {value!r} is not a YAML value")
    return parsed
