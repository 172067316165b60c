"""The Typer application and what all commands share: which cluster is meant."""

from __future__ import annotations

from typing import Annotated

import typer

from deploy import record
from deploy.cli.output import fail
from deploy.record import ClusterRecord
from tandem.config import ClusterConfig, load_config

DEFAULT_NAME = ClusterConfig().name

app = typer.Typer(
    name="tandem",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Serve a language model with prefill and decode in separate, separately scaled pools of workers.

    [bold]Start here:[/]

      tandem up --detach                   serve a small chat model here

      tandem generate "Once upon a time"   ask it something

      tandem scale decode=2                grow one pool while it serves

      tandem down                          stop what was started
    """,
)


@app.callback()
def select(
    context: typer.Context,
    cluster: Annotated[str, typer.Option("--cluster", "-c", help="which cluster of this machine is meant")] = "",
) -> None:
    context.obj = cluster


def cluster_name(context: typer.Context) -> str:
    """The cluster that was chosen, or the default one. Raises ConfigError for what cannot be a name."""
    return load_config(None, {"name": context.obj}).name if context.obj else DEFAULT_NAME


def running_cluster(context: typer.Context) -> ClusterRecord:
    """The record of the chosen cluster; ends the command with a hint when there is none."""
    name = cluster_name(context)
    found = record.load(name)
    if found is None:
        others = record.names()
        hint = f"running here: {', '.join(others)} (choose with --cluster NAME)" if others else "start one: tandem up"
        fail(f"no cluster {name!r} runs on this machine", hint)
    return found
