"""How settings reach the processes of a job: environment variables, here in one table.

| variable | meaning |
|---|---|
| HYBRIDEP_TOPOLOGY    | path of the topology's YAML file, or preset:NAME |
| HYBRIDEP_RUN_TOKEN   | the job's secret, hexadecimal, at least 16 bytes: who knows it belongs to the job |
| HYBRIDEP_PLAN        | auto (default), ep, replicate, domains:2,1 or the path of a plan file |
| HYBRIDEP_CODECS      | a rung, KIND=CODEC or both, such as default,gradients=2bit; default: as the topology says |
| HYBRIDEP_CHUNKS      | into how many chunks a worker's remote tokens are cut; default: the runtime's choice |
| HYBRIDEP_STALENESS   | 1: copies are one step behind; default: as the topology says, else 0 |
| HYBRIDEP_TRACE       | path of a trace in Chrome's format, written by the first worker at the end; default: none |
| HYBRIDEP_EMULATE_COMPUTE | such as 50 TFLOP/s: kernels become waits; default: as the topology says |
| HYBRIDEP_CALIBRATION | path of what `hybridep calibrate` wrote, for plan auto; default: none |
| HYBRIDEP_TIMEOUTS    | comma-separated NAME=DURATION, such as operation=60s,rendezvous=2m; names as in `Timeouts` |
| HYBRIDEP_TLS_FOLDER  | folder with DC.pem, DC.key and ca.pem for links between DCs; default: as the topology says |
| HYBRIDEP_CONGESTION  | TCP congestion control between DCs, such as cubic; default: as the topology says, else bbr |
| HYBRIDEP_REPLAN      | look for a better plan every so many optimizer steps; default: the topology's, else never |
| HYBRIDEP_MEMORY_GB   | for the copies of one worker, in plans that are searched for, such as 12.5; default: no limit |
| HYBRIDEP_EPOCH       | number of the job's incarnation, 0 or more; default 0 |
| HYBRIDEP_DC          | this process's DC (set by the per-rank entry) |
| HYBRIDEP_WORKER      | local index of this worker (set by the per-rank entry) |
| HYBRIDEP_COORDINATOR | the worker's coordinator: unix:PATH or tcp:HOST:PORT (set by the per-rank entry) |
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from hybridep_rt.config import Timeouts
from hybridep_rt.errors import ConfigError
from topology.units import FLOPS

TOKEN_VARIABLE = "HYBRIDEP_RUN_TOKEN"
TOKEN_MIN_BYTES = 16
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|)")
_AMOUNT = re.compile(r"\d{1,12}(\.\d{1,12})?")
_UNIT_S = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What all processes of a job are told alike."""

    topology: str
    run_token: bytes = field(repr=False)
    plan: str = "auto"
    codecs: str = ""
    chunks: int | None = None
    staleness: int | None = None
    replan: int | None = None
    memory_gb: float | None = None
    trace: str = ""
    emulate_compute_flops_per_s: float | None = None
    calibration: str = ""
    timeouts: Timeouts = field(default_factory=Timeouts)
    tls_folder: str = ""
    congestion: str = ""
    epoch: int = 0

    @classmethod
    def read(cls, variables: Mapping[str, str]) -> Settings:
        """Parse the job-wide variables. Raises ConfigError where one is missing or malformed."""
        return cls(**_job_wide(variables))

    def write(self) -> dict[str, str]:
        """The variables that `read` understands."""
        return {
            "HYBRIDEP_TOPOLOGY": self.topology,
            TOKEN_VARIABLE: self.run_token.hex(),
            "HYBRIDEP_PLAN": self.plan,
            "HYBRIDEP_CODECS": self.codecs,
            "HYBRIDEP_CHUNKS": "" if self.chunks is None else str(self.chunks),
            "HYBRIDEP_STALENESS": "" if self.staleness is None else str(self.staleness),
            "HYBRIDEP_REPLAN": "" if self.replan is None else str(self.replan),
            "HYBRIDEP_MEMORY_GB": "" if self.memory_gb is None else f"{self.memory_gb:f}",
            "HYBRIDEP_TRACE": self.trace,
            "HYBRIDEP_EMULATE_COMPUTE": _flops(self.emulate_compute_flops_per_s),
            "HYBRIDEP_CALIBRATION": self.calibration,
            "HYBRIDEP_TIMEOUTS": format_timeouts(self.timeouts),
            "HYBRIDEP_TLS_FOLDER": self.tls_folder,
            "HYBRIDEP_CONGESTION": self.congestion,
            "HYBRIDEP_EPOCH": str(self.epoch),
        }

    def for_worker(self, dc: str, worker: int, endpoint: str) -> Environment:
        """What one worker is told: these settings, and who it is."""
        return Environment(dc=dc, worker=worker, endpoint=endpoint, settings=self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What one worker is told by the launcher."""

    dc: str
    worker: int
    endpoint: str
    settings: Settings

    @classmethod
    def read(cls, variables: Mapping[str, str]) -> Environment | None:
        """Parse a worker's variables; None where HYBRIDEP_DC is not set: the process was not started by the launcher.

        Raises ConfigError where one is missing or malformed.
        """
        if "HYBRIDEP_DC" not in variables:
            return None
        return cls(
            dc=_required(variables, "HYBRIDEP_DC"),
            worker=_whole_number("HYBRIDEP_WORKER", _required(variables, "HYBRIDEP_WORKER"), 0),
            endpoint=_endpoint(_required(variables, "HYBRIDEP_COORDINATOR")),
            settings=Settings.read(variables),
        )

    def write(self) -> dict[str, str]:
        """The variables that `read` understands."""
        return self.settings.write() | {
            "HYBRIDEP_DC": self.dc,
            "HYBRIDEP_WORKER": str(self.worker),
            "HYBRIDEP_COORDINATOR": self.endpoint,
        }


def parse_token(text: str, where: str = TOKEN_VARIABLE) -> bytes:
    """The run token from its hexadecimal text. Raises ConfigError, which doesn't repeat the text."""
    try:
        token = bytes.fromhex(text.strip())
    except ValueError:
        raise ConfigError(f"{where}: the run token must be hexadecimal digits") from None
    if len(token) < TOKEN_MIN_BYTES:
        raise ConfigError(f"{where}: the run token must have at least {2 * TOKEN_MIN_BYTES} hexadecimal digits")
    return token


def parse_timeouts(items: Iterable[str], where: str) -> Timeouts:
    """`["operation=60s", "rendezvous=2m"]` -> Timeouts; a number without a unit is seconds. Raises ConfigError."""
    names = [each.name.removesuffix("_s") for each in fields(Timeouts)]
    values: dict[str, float] = {}
    for item in items:
        name, _, duration = item.partition("=")
        match = _DURATION.fullmatch(duration)
        if name not in names or match is None:
            allowed = ", ".join(names)
            raise ConfigError(f"{where}: expected NAME=DURATION such as operation=60s, NAME one of {allowed}: {item!r}")
        values[f"{name}_s"] = float(match[1]) * _UNIT_S[match[2]]
    return Timeouts(**values)


def format_timeouts(timeouts: Timeouts) -> str:
    """The text of HYBRIDEP_TIMEOUTS: every timeout, in seconds."""
    return ",".join(f"{each.name.removesuffix('_s')}={getattr(timeouts, each.name):g}s" for each in fields(timeouts))


def parse_flops(text: str, where: str) -> float:
    """ "50 TFLOP/s" -> operations per second. Raises ConfigError."""
    try:
        flops_per_s = FLOPS.parse(text)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    if flops_per_s <= 0:
        raise ConfigError(f"{where}: the rate must be above 0, not {text!r}")
    return flops_per_s


def _flops(flops_per_s: float | None) -> str:
    return "" if flops_per_s is None else f"{flops_per_s:f} FLOP/s"


def _job_wide(variables: Mapping[str, str]) -> dict[str, Any]:
    chunks = variables.get("HYBRIDEP_CHUNKS", "")
    staleness = variables.get("HYBRIDEP_STALENESS", "")
    replan = variables.get("HYBRIDEP_REPLAN", "")
    memory = variables.get("HYBRIDEP_MEMORY_GB", "")
    emulated = variables.get("HYBRIDEP_EMULATE_COMPUTE", "")
    timeouts = [item for item in variables.get("HYBRIDEP_TIMEOUTS", "").split(",") if item]
    return {
        "topology": _required(variables, "HYBRIDEP_TOPOLOGY"),
        "run_token": parse_token(_required(variables, TOKEN_VARIABLE)),
        "plan": variables.get("HYBRIDEP_PLAN") or "auto",
        "codecs": variables.get("HYBRIDEP_CODECS", ""),
        "chunks": _whole_number("HYBRIDEP_CHUNKS", chunks, 1) if chunks else None,
        "staleness": _whole_number("HYBRIDEP_STALENESS", staleness, 0) if staleness else None,
        "replan": _whole_number("HYBRIDEP_REPLAN", replan, 0) if replan else None,
        "memory_gb": _amount("HYBRIDEP_MEMORY_GB", memory) if memory else None,
        "trace": variables.get("HYBRIDEP_TRACE", ""),
        "emulate_compute_flops_per_s": parse_flops(emulated, "HYBRIDEP_EMULATE_COMPUTE") if emulated else None,
        "calibration": variables.get("HYBRIDEP_CALIBRATION", ""),
        "timeouts": parse_timeouts(timeouts, "HYBRIDEP_TIMEOUTS"),
        "tls_folder": variables.get("HYBRIDEP_TLS_FOLDER", ""),
        "congestion": variables.get("HYBRIDEP_CONGESTION", ""),
        "epoch": _whole_number("HYBRIDEP_EPOCH", variables.get("HYBRIDEP_EPOCH") or "0", 0),
    }


def _required(variables: Mapping[str, str], name: str) -> str:
    value = variables.get(name, "")
    if not value:
        raise ConfigError(f"the environment variable {name} is not set")
    return value


def _whole_number(name: str, text: str, least: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= least):
        raise ConfigError(f"{name} must be a whole number, at least {least}, not {text[:40]!r}")
    return int(text)


def _amount(name: str, text: str) -> float:
    if not (_AMOUNT.fullmatch(text) and text.isascii()):
        raise ConfigError(f"{name} must be a number from 0, such as 12.5, not {text[:40]!r}")
    return float(text)


def _endpoint(text: str) -> str:
    if not text.startswith(("unix:/", "tcp:")):
        raise ConfigError(f"HYBRIDEP_COORDINATOR must be unix:PATH or tcp:HOST:PORT, not {text[:200]!r}")
    return text
