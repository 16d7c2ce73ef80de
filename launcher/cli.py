"""The `hybridep` command. Subcommands are loaded when they are used: `hybridep topology` needs no MPI."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import click

from hybridep_rt.errors import ConfigError, ConnectFailed, HandshakeRefused, HybridEPError

_COMMANDS: Mapping[str, str] = {
    "calibrate": "launcher.calibrate:calibrate",
    "certs": "launcher.certs:certs",
    "doctor": "launcher.doctor:doctor",
    "plan": "launcher.plan_view:plan",
    "run": "launcher.run:run",
    "simulate": "launcher.simulate:simulate",
    "status": "launcher.status_view:status",
    "testbed": "launcher.testbed.cli:testbed",
    "topology": "launcher.topology_view:topology",
}


class _LazyGroup(click.Group):
    """Knows its subcommands by name, and turns every typed error into one line and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, _, attribute = _COMMANDS[cmd_name].partition(":")
        try:
            command: click.Command = getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
            return None
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except HybridEPError as error:
            _say(str(error))
            ctx.exit(exit_code(error))
        except click.UsageError as error:
            command = ctx.command_path if error.ctx is None else error.ctx.command_path
            _say(f"{error.format_message().rstrip('.')} (see {command} --help)")
            ctx.exit(2)


def exit_code(error: HybridEPError) -> int:
    """2: the job never began and something has to be changed before the next try; 1: anything else."""
    return 2 if isinstance(error, ConfigError | HandshakeRefused | ConnectFailed) else 1


def _say(text: str) -> None:
    click.echo(f"hybridep: {' '.join(text.split())}", err=True)


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="hybridep", prog_name="hybridep")
def main() -> None:
    """Train Mixture-of-Experts models across datacenters joined by slow links."""


if __name__ == "__main__":
    main()
