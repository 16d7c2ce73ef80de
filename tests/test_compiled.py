"""Kernels are compiled once, before the first step."""

from __future__ import annotations

import fcntl
import os

from hybridep_rt.codecs import warm_up
from hybridep_rt.runtime import compiled


def test_each_spec_once_and_none_where_nothing_is_compiled(monkeypatch):
    called = []
    monkeypatch.setattr(compiled, "_done", set())
    monkeypatch.setattr(warm_up, "warm_up", lambda specs: called.append(sorted(specs)))
    monkeypatch.setattr(warm_up, "warm_up_adamw", lambda: called.append("adamw"))
    compiled.compile_kernels(["exact", "bf16"], with_adamw=False)
    assert called == []
    compiled.compile_kernels(["int8", "1bit:vs=16", "exact"], with_adamw=True)
    compiled.compile_kernels(["int8"], with_adamw=True)
    assert called == [["1bit:vs=16", "int8"], "adamw"]


def test_processes_take_turns(tmp_path, monkeypatch):
    monkeypatch.setattr(compiled.tempfile, "gettempdir", lambda: str(tmp_path))
    path = tmp_path / f"hybridep-{os.getuid()}-kernels.lock"
    with compiled._turn(), open(path) as other:
        assert not compiled._locked(other.fileno())
    with open(path) as other:
        assert compiled._locked(other.fileno())
        monkeypatch.setattr(compiled, "_PATIENCE_S", 0.0)
        with compiled._turn():
            fcntl.flock(other, fcntl.LOCK_UN)


def test_a_folder_that_is_none_does_not_stop_it(monkeypatch):
    monkeypatch.setattr(compiled.tempfile, "gettempdir", lambda: "/no/such/folder")
    with compiled._turn():
        pass


def test_the_kernels_themselves():
    warm_up.warm_up_adamw()
