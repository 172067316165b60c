"""`tandem pull`, and the progress bar that `up` and the demo share with it."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from deploy.cli.app import app
from deploy.cli.interrupt import raise_on_signals
from deploy.cli.output import Output, OutputFormat, reports_errors, show_json, stderr, stdout
from tandem.model_files import ModelFiles, resolve_model


def resolve_with_progress(model: str) -> ModelFiles:
    """Find or fetch a model; a bar appears only if something is downloaded. Raises ModelError."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=stderr, transient=True) as bar:
        tasks: dict[str, TaskID] = {}

        def on_progress(what: str, done_nbytes: int, total_nbytes: int | None) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(f"fetching {what}", total=total_nbytes)
            bar.update(tasks[what], completed=done_nbytes, total=total_nbytes)

        return resolve_model(model, progress=on_progress)


@app.command()
@reports_errors
def pull(
    model: Annotated[str, typer.Argument(metavar="HUB-ID|smollm2-135m")] = "smollm2-135m",
    output: Output = OutputFormat.TEXT,
) -> None:
    """Fetch a model into the cache, so that `tandem up` needs no network.

    For example:

      tandem pull

      tandem pull Qwen/Qwen3-0.6B
    """
    raise_on_signals()
    files = resolve_with_progress(model)
    if output is OutputFormat.JSON:
        show_json({"model": files.name, "kind": files.kind, "path": str(files.path)})
    else:
        stdout.print(f"{files.name} is at {files.path}")
