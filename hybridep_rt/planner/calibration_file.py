"""What `hybridep calibrate` writes, and `plan` and `run` read: medians with their spread, and the date.

    cluster: demo
    date: "2026-11-29T23:00:00+00:00"
    workload: OLMoE-7B
    sites:                              # each DC's slowest worker
      lyon:
        gemm: {median: 31.2 GFLOP/s, low: 30 GFLOP/s, high: 33.1 GFLOP/s}
        backward_factor: {median: 2.1, low: 2, high: 2.3}
        expert: {median: 70 us, low: 60 us, high: 90 us}               # of each expert, however few its tokens are
        expert_backward: {median: 0.3 ms, low: 0.2 ms, high: 0.4 ms}   # likewise
        pre_expert: {median: 3.1 us, low: 3 us, high: 3.3 us}          # per token
        exchange: {median: 0.8 ms, low: 0.7 ms, high: 1.1 ms}          # fixed cost of a batch
        update: {median: 1.2 ns, low: 1.1 ns, high: 1.3 ns}            # of an optimizer step, per parameter
        inside: {median: 1.2 GB/s, low: 1.1 GB/s, high: 1.3 GB/s}      # where there are several workers
    links:
      lyon -> bonn: {goodput: {median: ..., low: ..., high: ...}, rtt: {...}}
    codecs:
      weights=bf16: {encode: {median: 0.3 ns, ...}, decode: {...}}     # per element

Any of sites, links and codecs may be left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from hybridep_rt.errors import PlanError, TopologyError
from hybridep_rt.planner.calibration import Calibration, CodecFigures, Figure, LinkFigures, SiteFigures
from topology.document import FILE_BYTES_MAX, Item, read
from topology.units import FLOPS, RATE, TIME, format_bit_rate, format_byte_rate, format_flops, format_time

_LINK = re.compile(r"(\S{1,63}) -> (\S{1,63})", re.ASCII)
_CODEC = re.compile(r"(tokens|weights|gradients)=[a-z0-9.:=-]{1,64}", re.ASCII)
_FACTOR = re.compile(r"\d{1,3}(\.\d{1,9})?", re.ASCII)
_LEAST_S = 1e-12
"""Shorter times are written as this."""
_MOST_S = 1e4
_MOST_RATE = 1e15
_MOST_FACTOR = 100.0

Reader = Callable[[Item], float]


def load_calibration(path: str | Path) -> Calibration:
    """Read a file. Raises PlanError: one line with file, line, key, what was found and what is allowed."""
    try:
        with Path(path).open("rb") as file:
            text = file.read(FILE_BYTES_MAX + 1).decode()
    except OSError as error:
        raise PlanError(f"{path}: can't be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise PlanError(f"{path}: not UTF-8 text at byte {error.start}") from None
    return parse_calibration(text, str(path))


def parse_calibration(text: str, source: str) -> Calibration:
    """Read text; `source` names it in errors. Raises PlanError."""
    try:
        return _calibration(read(text, source))
    except TopologyError as error:
        raise PlanError(str(error)) from None


def dump_calibration(found: Calibration) -> str:
    """The file's text, with four significant digits."""
    content: dict[str, Any] = {"cluster": found.cluster, "date": found.date, "workload": found.workload}
    content["sites"] = {name: _site_text(site) for name, site in found.sites.items()}
    content["links"] = {
        f"{source} -> {target}": {
            "goodput": _text(link.goodput_bytes_per_s, format_bit_rate),
            "rtt": _text(link.rtt_s, _time),
        }
        for (source, target), link in found.links.items()
    }
    content["codecs"] = {
        name: {"encode": _text(codec.encode_s, _time), "decode": _text(codec.decode_s, _time)}
        for name, codec in found.codecs.items()
    }
    content = {key: value for key, value in content.items() if value}
    return str(yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True))


def _site_text(site: SiteFigures) -> dict[str, Any]:
    inside = site.inside_bytes_per_s
    return {
        "gemm": _text(site.gemm_flops_per_s, format_flops),
        "backward_factor": {name: float(f"{value:.4g}") for name, value in site.backward_factor._asdict().items()},
        "expert": _text(site.expert_s, _time),
        "expert_backward": _text(site.expert_backward_s, _time),
        "pre_expert": _text(site.pre_expert_s, _time),
        "exchange": _text(site.exchange_s, _time),
        "update": _text(site.update_s, _time),
    } | ({} if inside is None else {"inside": _text(inside, format_byte_rate)})


def _text(figure: Figure, form: Callable[[float], str]) -> dict[str, str]:
    return {name: form(value) for name, value in figure._asdict().items()}


def _time(seconds: float) -> str:
    return format_time(max(seconds, _LEAST_S))


def _calibration(root: Item) -> Calibration:
    fields = root.fields(("cluster", "date", "workload", "sites", "links", "codecs"), required=("cluster", "date"))
    sites = fields["sites"].entries("figures by DC") if "sites" in fields else []
    links = fields["links"].entries("figures by link") if "links" in fields else []
    codecs = fields["codecs"].entries("figures by codec") if "codecs" in fields else []
    return Calibration(
        cluster=fields["cluster"].name(),
        date=_date(fields["date"]),
        workload=fields["workload"].text("a title") if "workload" in fields else "",
        sites={key.name(): _site(value) for key, value in sites},
        links={_pair(key): _link(value) for key, value in links},
        codecs={_codec_name(key): _codec(value) for key, value in codecs},
    )


def _date(item: Item) -> str:
    text = item.text("a date and time")
    try:
        return datetime.fromisoformat(text).isoformat()
    except ValueError:
        raise item.wrong("a date and time such as 2026-11-29T23:00:00+00:00") from None


def _pair(key: Item) -> tuple[str, str]:
    match = _LINK.fullmatch(key.text("DC -> DC"))
    if match is None or match[1] == match[2]:
        raise key.wrong("two DCs, as in 'lyon -> bonn'")
    return match[1], match[2]


def _codec_name(key: Item) -> str:
    text = key.text("KIND=CODEC")
    if not _CODEC.fullmatch(text):
        raise key.wrong("KIND=CODEC such as weights=bf16, KIND one of tokens, weights, gradients")
    return text


def _site(item: Item) -> SiteFigures:
    needed = ("gemm", "backward_factor", "expert", "expert_backward", "pre_expert", "exchange", "update")
    fields = item.fields((*needed, "inside"), required=needed)
    return SiteFigures(
        _figure(fields["gemm"], lambda each: each.quantity(FLOPS, 1.0, _MOST_RATE)),
        _figure(fields["backward_factor"], _factor),
        _figure(fields["expert"], _seconds),
        _figure(fields["expert_backward"], _seconds),
        _figure(fields["pre_expert"], _seconds),
        _figure(fields["exchange"], _seconds),
        _figure(fields["update"], _seconds),
        _figure(fields["inside"], _rate) if "inside" in fields else None,
    )


def _link(item: Item) -> LinkFigures:
    fields = item.fields(("goodput", "rtt"), required=("goodput", "rtt"))
    return LinkFigures(_figure(fields["goodput"], _rate), _figure(fields["rtt"], _seconds))


def _codec(item: Item) -> CodecFigures:
    fields = item.fields(("encode", "decode"), required=("encode", "decode"))
    return CodecFigures(_figure(fields["encode"], _seconds), _figure(fields["decode"], _seconds))


def _figure(item: Item, value: Reader) -> Figure:
    fields = item.fields(Figure._fields, required=Figure._fields)
    found = Figure(*(value(fields[name]) for name in Figure._fields))
    if not found.low <= found.median <= found.high:
        raise item.error("found a median outside its spread, allowed: low <= median <= high")
    return found


def _rate(item: Item) -> float:
    return item.quantity(RATE, 1.0, _MOST_RATE)


def _seconds(item: Item) -> float:
    return item.quantity(TIME, 0.0, _MOST_S)


def _factor(item: Item) -> float:
    allowed = f"a number above 0, at most {_MOST_FACTOR:g}"
    text = item.text(allowed)
    if not _FACTOR.fullmatch(text) or not 0 < float(text) <= _MOST_FACTOR:
        raise item.wrong(allowed)
    return float(text)
