"""Settings go into environment variables and come back unchanged; anything malformed is a ConfigError."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridep_rt.config import Timeouts
from hybridep_rt.errors import ConfigError
from hybridep_rt.runtime.environment import TOKEN_VARIABLE, Environment, Settings, parse_timeouts

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0", exclude_categories=["Cs"]), min_size=1)
SETTINGS = st.builds(
    Settings,
    topology=TEXT,
    run_token=st.binary(min_size=16, max_size=64),
    plan=TEXT,
    codecs=st.sampled_from(["", "weights=bf16", "weights=bf16,tokens=fp8"]),
    chunks=st.one_of(st.none(), st.integers(1, 10**8)),
    staleness=st.sampled_from([None, 0, 1]),
    replan=st.one_of(st.none(), st.integers(0, 10**8)),
    memory_gb=st.one_of(st.none(), st.integers(0, 10**9).map(lambda number: number / 1000)),
    trace=st.one_of(st.just(""), TEXT),
    timeouts=st.builds(Timeouts, rendezvous_s=st.integers(1, 1000).map(lambda ms: ms / 1000)),
    epoch=st.integers(0, 10**8),
)
ENVIRONMENTS = st.builds(
    Environment,
    dc=TEXT,
    worker=st.integers(0, 10**8),
    endpoint=st.one_of(TEXT.map("unix:/{}".format), st.just("tcp:10.0.0.1:7000")),
    settings=SETTINGS,
)
GOOD = Settings(topology="t.yaml", run_token=b"x" * 16).for_worker("a", 1, "unix:/s").write()


@given(ENVIRONMENTS)
def test_what_is_written_reads_back(environment: Environment) -> None:
    assert Environment.read(environment.write()) == environment
    assert Settings.read(environment.write()) == environment.settings


def test_without_the_launcher_there_is_no_environment() -> None:
    assert Environment.read({"HYBRIDEP_TOPOLOGY": "t.yaml", "HYBRIDEP_WORKER": "0"}) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HYBRIDEP_TOPOLOGY", ""),
        ("HYBRIDEP_WORKER", "-1"),
        ("HYBRIDEP_WORKER", "1.5"),
        ("HYBRIDEP_WORKER", "9" * 5000),
        ("HYBRIDEP_COORDINATOR", "udp:1:2"),
        ("HYBRIDEP_CHUNKS", "0"),
        ("HYBRIDEP_EPOCH", "x"),
        ("HYBRIDEP_MEMORY_GB", "-1"),
        ("HYBRIDEP_MEMORY_GB", "nan"),
        ("HYBRIDEP_TIMEOUTS", "operation"),
        ("HYBRIDEP_TIMEOUTS", "operation=1s,silence=2s"),
        (TOKEN_VARIABLE, "ab"),
        (TOKEN_VARIABLE, "not hexadecimal, but long enough"),
    ],
)
def test_a_malformed_variable_is_named(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match="timeouts" if "silence" in value else name):
        Environment.read(GOOD | {name: value})


def test_the_token_is_in_no_message() -> None:
    with pytest.raises(ConfigError) as caught:
        Environment.read(GOOD | {TOKEN_VARIABLE: "secret words"})
    assert "secret" not in str(caught.value)
    assert "7878" not in repr(Environment.read(GOOD))
    assert "xxx" not in repr(Environment.read(GOOD))


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("2m", 120), ("1500ms", 1.5), ("0.5h", 1800), ("7", 7)])
def test_durations(text: str, seconds: float) -> None:
    assert parse_timeouts([f"rendezvous={text}"], "--timeout").rendezvous_s == seconds
