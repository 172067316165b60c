"""`tandem version`."""

from __future__ import annotations

import platform
from importlib import metadata

from deploy.cli.app import app
from deploy.cli.output import Output, OutputFormat, show_json, stdout
from tandem import __version__
from tandem.layout import WIRE_VERSION


@app.command()
def version(output: Output = OutputFormat.TEXT) -> None:
    """Show the versions of Tandem, its wire protocol and what it stands on."""
    parts: dict[str, str | int] = {"tandem": __version__, "wire": WIRE_VERSION, "python": platform.python_version()}
    parts.update({name: metadata.version(name) for name in ("ray", "torch", "grpcio")})
    if output is OutputFormat.JSON:
        show_json(parts)
    else:
        for name, value in parts.items():
            stdout.print(f"{name:8} {value}")
